"""Own data: from memory, folders, tables, torch data sets and Flower's partitioners."""

import dataclasses

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sartor.data import (
    describe,
    from_clients,
    from_dataset,
    from_flower_partitioner,
    from_folder,
    from_table,
    make_partition,
    prepare,
    source_from_dataset,
)
from sartor.data.schemes import Dirichlet
from sartor.errors import DataError, SettingError


def numbered(first: int, number: int, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Samples that carry their own number, so that they can be followed."""
    own = np.arange(first, first + number)
    return np.column_stack([own, own % 7]).astype(np.float32), own % classes


def outcome(call):
    """What a call gives, or the error that is a user's to mend; any other error goes through."""
    try:
        return call()
    except DataError as error:
        return error


def numbers(x: torch.Tensor) -> list[int]:
    return x[:, 0].int().tolist()


# --- in memory --------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.floats(0.01, 0.6),
    st.sampled_from([0.0, 0.25]),
    st.integers(0, 2**63),
)
@settings(max_examples=50)
def test_every_sample_is_in_one_split_of_its_client(sizes, test, validation, seed):
    if max(sizes) < 2:
        sizes = [*sizes, 2]
    starts = np.cumsum([0, *sizes])
    clients = {f"c{i}": numbered(int(starts[i]), size) for i, size in enumerate(sizes)}
    data = from_clients(clients, test_fraction=test, validation_fraction=validation, seed=seed)
    splits = [data.train, data.test] + ([data.validation] if data.validation else [])
    for client, (x, y) in enumerate(clients.values()):
        held = [split.of(client) for split in splits]
        assert sorted(number for part, _ in held for number in numbers(part)) == x[:, 0].astype(int).tolist()
        for part, own in held:
            assert own.tolist() == [number % 3 for number in numbers(part)]
        assert len(held[0][1]) >= 1
        assert len(held[1][1]) >= (1 if len(y) > 1 else 0)
    assert torch.equal(data.pooled_x, data.test.x)
    assert data.classes == int(max(y.max() for _, y in clients.values())) + 1


def test_a_client_s_split_depends_on_its_name_and_the_seed_alone():
    both = from_clients({"a": numbered(0, 20), "b": numbered(100, 30)}, seed=4)
    alone = from_clients({"b": numbered(100, 30)}, seed=4)
    assert torch.equal(both.test.of(1)[0], alone.test.x)
    other = from_clients({"b": numbered(100, 30)}, seed=5)
    assert not torch.equal(other.test.x, alone.test.x)
    twins = from_clients({"a": numbered(0, 30), "b": numbered(0, 30)})
    assert not torch.equal(twins.test.of(0)[0], twins.test.of(1)[0])


def test_given_splits_stay_as_they_are_and_missing_ones_are_drawn():
    given_splits = {"train": numbered(0, 10), "test": numbered(10, 4), "validation": numbered(14, 2)}
    data = from_clients({"a": given_splits, "b": {"train": numbered(20, 10)}}, validation_fraction=0.1)
    assert [numbers(split.of(0)[0]) for split in (data.train, data.test, data.validation)] == [
        list(range(10)),
        list(range(10, 14)),
        [14, 15],
    ]
    assert data.test.count.tolist() == [4, 2]
    assert data.train.start.tolist() == [0, 10]
    assert data.validation.count.tolist() == [2, 1]
    with pytest.raises(DataError, match="1 of 2 clients have a validation split"):
        from_clients({"a": given_splits, "b": {"train": numbered(20, 10)}})


def test_tensors_and_arrays_give_the_same_and_the_given_memory_is_left_alone():
    x, y = numbered(0, 20)
    first = from_clients({"a": (x, y)})
    second = from_clients({"a": (torch.from_numpy(x), torch.from_numpy(y))})
    assert first.hash == second.hash
    assert first.train.x.dtype == torch.float32
    assert first.train.y.dtype == torch.int64
    whole = from_clients({"a": {"train": (x, y), "test": (x, y)}})
    whole.train.x.zero_()
    assert x.sum() > 0


def test_the_hash_is_of_the_contents():
    x, y = numbered(0, 20)
    data = from_clients({"a": (x, y)})
    assert from_clients({"a": (x.copy(), y.tolist())}).hash == data.hash
    assert from_clients({"b": (x, y)}).hash != data.hash
    assert from_clients({"a": (x + 1, y)}).hash != data.hash
    assert from_clients({"a": (x, 1 + y)}).hash != data.hash


def test_regression_has_targets_and_no_classes():
    x, _ = numbered(0, 20)
    data = from_clients({"a": (x, np.linspace(-1, 1, 20))}, targets="number")
    assert data.classes is None
    assert data.train.y.dtype == torch.float64
    assert describe(data)[0]["classes"] is None
    with pytest.raises(DataError, match="not finite, first in sample 3"):
        from_clients({"a": (x, np.where(np.arange(20) == 3, np.nan, 1.0))}, targets="number")


def test_own_data_can_be_normalised_from_training_samples_and_turned_into_features():
    data = from_clients({"a": numbered(0, 40), "b": numbered(40, 30)}, validation_fraction=0.2)
    scaled = prepare(data, normalise=True)
    mean, deviation = data.train.x.mean(0), data.train.x.std(0, correction=0)
    for split in ("train", "test", "validation"):
        expected = (getattr(data, split).x - mean) / deviation
        assert torch.allclose(getattr(scaled, split).x, expected, atol=1e-5)
    assert scaled.pooled_x is scaled.test.x
    doubled = prepare(data, features=lambda x: torch.cat([x, 2 * x], 1))
    assert torch.equal(doubled.test.x[:, 2:], 2 * data.test.x)
    assert (doubled.hash, doubled.names) == (data.hash, data.names)
    assert prepare(data) is data


def test_to_moves_every_tensor():
    data = from_clients({"a": numbered(0, 9)}, validation_fraction=0.2).to("meta")
    tensors = [data.pooled_x, data.pooled_y]
    for split in (data.train, data.test, data.validation):
        tensors += [split.x, split.y]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert data.clients == 1


X, Y = numbered(0, 4)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({}, "no clients"),
        ({"a": (X, Y[:3])}, "client a, train: 4 samples in x but 3 labels in y"),
        ({"a": (X[:0], Y[:0])}, "client a, train: no samples"),
        (
            {"a": (np.where(X == 2, np.nan, X), Y)},
            "client a, train: x has a value that is not finite, first in sample 2",
        ),
        (
            {"a": (X, Y), "b": (X[:, :1], Y)},
            r"client b, train: samples of shape \(1,\), but client a has \(2,\)",
        ),
        ({"a": {"train": (X, Y), "test": (X[:, :1], Y)}}, "client a, test: samples of shape"),
        ({"a": (X, Y - 1)}, "labels are whole numbers from 0, got -1 in sample 0"),
        ({"a": (X, Y + 0.5)}, "labels are whole numbers from 0, got 0.5 in sample 0; objective='regression'"),
        ({"a": (X, np.array([0, 1, np.nan, 1]))}, "got nan in sample 2"),
        ({"a": (X, np.array([1j] * 4))}, "client a, train: y must hold numbers"),
        ({"a": (X, list("abcd")), "b": (X, Y)}, "client b, train: labels are numbers, those of other .* 'a'"),
        ({"a": (X, list("abcd")), "b": (X, ["a", "b", "", "d"])}, "client b: a label is empty"),
        ({"a": (X, ["a", "b", "c\x1b", "d"])}, r"client a: the label 'c\\x1b' is not printable; rename it"),
        ({"a": (X, ["a", "b", "c" * 201, "d"])}, r"client a: the label 'c+\.\.\. has 201 characters"),
        ({"a": (X, [["a", "b"]] * 4)}, "y must have one number per sample"),
        ({"a": (X[:, 0], Y)}, "x must be .* got shape"),
        ({"a": (X, X)}, "y must have one number per sample"),
        ({"a": ([[1, 2], [3]], [0, 1])}, "x is ragged"),
        ({"a": {"test": (X, Y)}}, "expected the splits train, test, validation, got test"),
        ({"a": {"train": (X, Y), "tset": (X, Y)}}, "expected the splits"),
        ({"a": (X, Y, Y, Y)}, r"client a, train: expected \(x, y\)"),
        ({1: (X, Y), "1": (X, Y)}, "same name"),
        (
            {"train": (X, Y), "test": (X, Y)},
            "clients are called train and test, as splits are; give",
        ),
        ({"Train": (X, Y), "val": (X, Y)}, "clients are called Train and val, as splits are"),
        ({"a": (np.full((4, 2), 2**64 - 1, np.uint64), Y)}, "x has 18446744073709551615 in sample 0; whole"),
        ({"a": ({"id": np.uint64([1, 2, 2**63, 3])}, Y)}, r"x\.id has 9223372036854775808 in sample 2"),
    ],
)
def test_what_is_wrong_is_named(clients, message):
    with pytest.raises(DataError, match=message):
        from_clients(clients)


def test_names_of_splits_are_names_beside_others():
    assert from_clients({"train": (X, Y)}).names == ("train",)
    assert from_clients({"train": (X, Y), "ferry": (X, Y)}).names == ("train", "ferry")


def test_large_whole_numbers_are_kept():
    ids = np.array([[2**63 - 1]] * 4, np.uint64)
    assert from_clients({"a": (ids, Y)}).train.x.unique().tolist() == [2**63 - 1]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fractions_are_checked(fraction):
    with pytest.raises(DataError, match="test_fraction: must be at least 0 and below 1"):
        from_clients({"a": (X, Y)}, test_fraction=fraction)


# --- a folder ---------------------------------------------------------------------------------------------


def test_a_folder_with_a_file_per_client(tmp_path):
    x, y = numbered(0, 10)
    np.savez(tmp_path / "b.npz", x=x, y=y)
    np.savez(tmp_path / "a.npz", train_x=x, train_y=y, test_x=x[:3], test_y=y[:3])
    data = from_folder(tmp_path, seed=3)
    direct = from_clients({"a": {"train": (x, y), "test": (x[:3], y[:3])}, "b": (x, y)}, seed=3)
    assert data.names == ("a", "b")
    assert data.hash == direct.hash


def test_a_folder_says_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match="no npz files"):
        from_folder(tmp_path)
    with pytest.raises(DataError, match="no npz files"):
        from_folder(tmp_path / "none")
    x, y = numbered(0, 10)
    for arrays in (
        {"x": x},
        {"train_x": x, "train_y": y, "test_x": x},
        {"x": x, "y": y, "z": y},
        {"test_x": x, "test_y": y},
    ):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(DataError, match=r"a\.npz: expected the arrays x and y"):
            from_folder(tmp_path)
    content = (tmp_path / "a.npz").read_bytes()
    for length in range(0, len(content), 11):
        (tmp_path / "a.npz").write_bytes(content[:length])
        with pytest.raises(DataError, match=r"a\.npz"):
            from_folder(tmp_path)


# --- a table ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_table_with_a_client_column(tmp_path, ending):
    x, y = numbered(0, 30)
    site = np.array(["north", "south", "east"])[np.arange(30) % 3]
    table = pyarrow.table({"site": site, "f": x[:, 0], "g": x[:, 1], "label": y})
    path = tmp_path / f"t.{ending}"
    (pyarrow.csv.write_csv if ending == "csv" else pyarrow.parquet.write_table)(table, path)
    data = from_table(path, "site", "label", seed=2)
    direct = from_clients(
        {name: (x[site == name].astype(np.float64), y[site == name]) for name in ("east", "north", "south")},
        seed=2,
    )
    assert data.hash == direct.hash
    assert data.name == "t"
    narrow = from_table(path, "site", "label", ["g"], seed=2)
    assert torch.equal(narrow.train.x[:, 0], data.train.x[:, 1])


def test_text_labels_are_numbered_in_order_and_a_split_column_is_kept(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "who,x,kind,part\n2,0,dog,train\n10,1,cat,train\n2,2,cat,test\n10,3,emu,test\n2,4,emu,validation\n10,5,dog,validation\n"
    )
    data = from_table(path, "who", "kind", split_column="part")
    assert data.names == ("2", "10")
    assert data.train.y.tolist() == [1, 0]
    assert data.test.x.flatten().tolist() == [2, 3]
    assert data.validation.y.tolist() == [2, 1]
    assert data.classes == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("who,x\na,1\n", "no column label"),
        ("who,x,lable\na,1,0\n", "no column label; did you mean lable"),
        ("who,label\na,1\n", "at least one feature column"),
        ("who,x,label\na,b,0\na,c,1\n", "column x does not hold numbers"),
        ("who,x,label\na,1,0\na,,1\n", "column x has no value in row 1"),
        ("who,x,label\n", "no rows"),
        ("who,x,label\na,1,0,7\n", "cannot be read as a table"),
        ("", "cannot be read as a table"),
        ("who,x,x,label\na,1,2,0\n", "two columns are called x"),
        ("who,x,label\na,1,-1\na,2,0\n", "labels are whole numbers from 0, got -1"),
        ("who,x,label\na,1,0.5\na,2,0\n", "labels are whole numbers from 0, got 0.5"),
    ],
)
def test_a_table_says_what_is_wrong(tmp_path, content, message):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        from_table(tmp_path / "t.csv", "who", "label")


def test_a_table_of_another_kind_or_nowhere_is_refused(tmp_path):
    (tmp_path / "t.xls").write_text("")
    with pytest.raises(DataError, match=r"ends in .csv, .parquet, .pq"):
        from_table(tmp_path / "t.xls", "a", "b")
    with pytest.raises(DataError, match="no such file"):
        from_table(tmp_path / "t.csv", "a", "b")
    (tmp_path / "t.csv").write_text("who,x,label,part\na,1,0,train\na,1,0,tset\n")
    with pytest.raises(DataError, match="column part says 'tset'"):
        from_table(tmp_path / "t.csv", "who", "label", split_column="part")


line = st.lists(
    st.sampled_from(["who", "x", "label", "a", "1", "-2", "0.5", "nan", "", '"', "\x00", "é", "1e999"]),
    max_size=4,
)


@given(
    st.one_of(
        st.binary(max_size=60), st.lists(line.map(",".join), max_size=6).map(lambda t: "\n".join(t).encode())
    )
)
@example(b"\x80\n")
@example(b'"a\nb",x,label\n1,2,3\n')
@settings(max_examples=150)
def test_any_bytes_as_a_table_end_in_data_or_one_message(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("table")
    for name, start in (("t.csv", b"who,x,label\n"), ("u.csv", b""), ("t.parquet", b"PAR1")):
        (folder / name).write_bytes(start + content)
        found = outcome(lambda path=folder / name: from_table(path, "who", "label"))
        assert "\n" not in str(found) if isinstance(found, DataError) else len(found.train.y) >= 1


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "t.parquet"
    x, y = numbered(0, 30)
    pyarrow.parquet.write_table(pyarrow.table({"who": np.arange(30) % 3, "x": x[:, 0], "label": y}), path)
    content = path.read_bytes()
    for length in range(0, len(content), 23):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match=r"t\.parquet"):
            from_table(path, "who", "label")


# --- torch data sets --------------------------------------------------------------------------------------


def dataset(first: int = 0, number: int = 60) -> torch.utils.data.TensorDataset:
    x, y = numbered(first, number)
    return torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


def test_a_dataset_with_a_partition_a_scheme_or_numbers():
    source = source_from_dataset(dataset(), dataset(60, 30))
    partition = make_partition(source, Dirichlet(least=5), 4, seed=1)
    by_partition = from_dataset(dataset(), partition, test=dataset(60, 30))
    by_scheme = from_dataset(
        dataset(), {"name": "dirichlet", "least": 5}, test=dataset(60, 30), clients=4, seed=1
    )
    assert by_partition.hash == by_scheme.hash == partition.hash
    assert torch.equal(by_partition.train.x, by_scheme.train.x)
    assert numbers(by_partition.pooled_x) == list(range(60, 90))
    given_numbers = {"a": [5, 3, 1], "b": {"train": [10, 11], "test": [61], "validation": [12]}}
    data = from_dataset(dataset(), given_numbers, test=dataset(60, 30), validation_fraction=0.3)
    splits = (data.train, data.test, data.validation)
    assert sorted(number for split in splits for number in numbers(split.of(0)[0])) == [1, 3, 5]
    assert [numbers(split.of(1)[0]) for split in splits] == [
        [10, 11],
        [61],
        [12],
    ]


class Pairs:
    """A data set that is not a tensor: arrays and plain numbers."""

    def __init__(self, pairs: list) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int):
        return self.pairs[index]


def test_a_dataset_of_arrays_and_numbers():
    pairs = Pairs([(np.full((1, 2, 2), i, np.uint8), i % 2) for i in range(10)])
    data = from_dataset(pairs, "iid", clients=2)
    assert data.train.x.shape[1:] == (1, 2, 2)
    assert data.classes == 2


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ({"a": [1, 2], "b": {"train": [3], "test": [2]}}, "every sample belongs to one split"),
        ({"a": {"train": [1, 2], "test": [2, 3]}}, "sample 2 is in .*every sample belongs to one split"),
        ({"a": [1, 60]}, r"client a, train: sample numbers must lie in 0..59"),
        ({"a": [-1, 3]}, "must lie in"),
        ({"a": [0.5]}, "expected a list of sample numbers"),
        ({"a": []}, "expected a list of sample numbers"),
        ({"a": {"test": [1]}}, "expected the splits"),
        ({}, "a name of its own"),
    ],
)
def test_numbers_that_cannot_be_are_refused(partition, message):
    with pytest.raises(DataError, match=message):
        from_dataset(dataset(), partition)


def test_what_is_no_dataset_is_refused():
    with pytest.raises(DataError, match="gives \\(x, y\\) pairs"):
        from_dataset(42, "iid", clients=2)
    with pytest.raises(DataError, match="gives \\(x, y\\) pairs"):
        from_dataset(Pairs([]), "iid", clients=2)
    with pytest.raises(DataError, match="different shapes"):
        from_dataset(Pairs([(np.zeros(2), 0), (np.zeros(3), 1)]), "iid", clients=2)
    with pytest.raises(DataError, match="test samples of shape"):
        from_dataset(dataset(), "iid", clients=2, test=Pairs([(np.zeros(9), 0)]))
    with pytest.raises(SettingError, match="clients"):
        from_dataset(dataset(), "iid")


# --- Flower Datasets --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Rows:
    """What a partition of Flower Datasets offers of the interface that is used."""

    columns: dict

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def with_format(self, kind: str) -> "Rows":
        assert kind == "numpy"
        return self

    def __getitem__(self, rows: slice) -> dict:
        return {name: values[rows] for name, values in self.columns.items()}


class Partitioner:
    """Three partitions of byte images with the channels last."""

    num_partitions = 3

    def __init__(self) -> None:
        self.images = np.arange(3 * 8 * 2 * 2 * 3, dtype=np.uint8).reshape(3, 8, 2, 2, 3)

    def load_partition(self, number: int) -> Rows:
        return Rows({"img": self.images[number], "label": np.arange(8) % 2})


def test_flower_partitions_become_clients():
    partitioner = Partitioner()
    data = from_flower_partitioner(partitioner, "img", "label", seed=1)
    assert data.names == ("0", "1", "2")
    x, _ = data.train.of(1)
    expected = {tuple(image.transpose(2, 0, 1).ravel()) for image in partitioner.images[1]}
    assert {tuple(image) for image in x.mul(255).round().to(torch.uint8).flatten(1).tolist()} <= expected
    assert x.shape[1:] == (3, 2, 2)
    with pytest.raises(DataError, match="no column image"):
        from_flower_partitioner(partitioner, "image", "label")
    with pytest.raises(DataError, match="not a Flower Datasets partitioner"):
        from_flower_partitioner(object(), "img", "label")


def test_a_real_flower_partitioner():
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    import datasets

    rows = {"x": [[float(i), 0.0] for i in range(40)], "y": [i % 2 for i in range(40)]}
    partitioner = partitioners.IidPartitioner(num_partitions=4)
    partitioner.dataset = datasets.Dataset.from_dict(rows)
    data = from_flower_partitioner(partitioner, "x", "y")
    assert data.clients == 4
    assert sorted(numbers(data.train.x) + numbers(data.test.x)) == list(range(40))
