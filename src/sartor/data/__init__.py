"""Data: where it comes from, how it is divided among clients, and what the clients hold in the end.

Imports nothing but what every room may: errors, settings, files, memory, extensions, nests, random.
"""

from sartor.data.clients import ClientData, Split, from_clients, lazy_clients, prepare, relabel
from sartor.data.features import FEATURES
from sartor.data.heart import from_heart_disease
from sartor.data.leaf import from_leaf
from sartor.data.loaders import (
    from_columns,
    from_dataset,
    from_flower_partitioner,
    from_folder,
    from_table,
    source_from_dataset,
    source_from_table,
)
from sartor.data.named import read_data, register_data
from sartor.data.partitions import (
    PARTITIONS,
    Partition,
    apply,
    describe,
    find_scheme,
    make_partition,
    plot_partition,
)
from sartor.data.sources import SOURCES, Source, load_source
from sartor.data.texts import encoded

__all__ = [
    "FEATURES",
    "PARTITIONS",
    "SOURCES",
    "ClientData",
    "Partition",
    "Source",
    "Split",
    "apply",
    "describe",
    "encoded",
    "find_scheme",
    "from_clients",
    "from_columns",
    "from_dataset",
    "from_flower_partitioner",
    "from_folder",
    "from_heart_disease",
    "from_leaf",
    "from_table",
    "lazy_clients",
    "load_source",
    "make_partition",
    "plot_partition",
    "prepare",
    "read_data",
    "register_data",
    "relabel",
    "source_from_dataset",
    "source_from_table",
]
