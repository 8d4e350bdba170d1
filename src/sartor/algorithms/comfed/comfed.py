"""ComFed (Nguyen et al. 2022): a client mechanism and a server optimizer, freely combined.

Two tables, ``MECHANISMS`` here (``mechanisms.py``, ``prox.py``, ``scaf.py`` and ``nova.py``) and
``OPTIMIZERS`` in ``sartor.algorithms.server.optimizers``; each pair of entries is a method of its own name,
``prox-yogi`` or ``scaf-adam``. Known pairs have their usual names too. Line numbers are those of the paper's
algorithm 2. Where a line cannot be meant as it is printed the default is corrected; ``as_printed`` gives the
letter, and the docstrings say which line.
"""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass
from typing import Any

from sartor.algorithms.base import register
from sartor.algorithms.comfed.mechanisms import ComFed, Mechanism
from sartor.algorithms.comfed.nova import ComFedNova
from sartor.algorithms.comfed.prox import ComFedProx
from sartor.algorithms.comfed.scaf import ComFedScaf
from sartor.algorithms.server.optimizers import OPTIMIZERS

MECHANISMS: dict[str, type[ComFed[Any]]] = {
    "sgd": ComFed,
    "prox": ComFedProx,
    "scaf": ComFedScaf,
    "nova": ComFedNova,
}
NAMES = {
    "fedadam": ("sgd-adam", "Reddi et al. 2021"),
    "fedadagrad": ("sgd-adagrad", "Reddi et al. 2021"),
    "fedyogi": ("sgd-yogi", "Reddi et al. 2021"),
    "fedavgm": ("sgd-momentum", "Hsu et al. 2019"),
    "slowmo": ("sgd-slowmo", "Wang et al. 2020"),
    "fedprox": ("prox-sgd", "Li et al. 2020"),
    "scaffold": ("scaf-sgd", "Karimireddy et al. 2020"),
    "fednova": ("nova-sgd", "Wang et al. 2020"),
    "comfed-m": ("sgd-momentum", "Nguyen et al. 2022, future work"),
}
"""Other names of pairs, and whose they are; ``comfed-m`` has ``local_beta`` switched on."""


def cell(pair: str, name: str, paper: str, **defaults: float) -> type[ComFed[Any]]:
    """Register a pair such as ``prox-yogi`` under a name, with defaults of its own."""
    client, server = pair.split("-")
    mechanism, optimizer = MECHANISMS[client], OPTIMIZERS[server]
    keeps = {"m": hasattr(optimizer, "beta") or hasattr(optimizer, "beta1"), "v": hasattr(optimizer, "beta1")}
    local_beta = defaults.setdefault("local_beta", 0.0)
    keeps |= {"c": client == "scaf", "momentum": local_beta > 0}
    inherited = {entry.name: entry.metadata for entry in (*fields(Mechanism), *fields(optimizer))}
    own = [(key, float, field(default=value, metadata=inherited[key])) for key, value in defaults.items()]
    title = f"{client.title()} at the clients, {server.title()} at the server ({pair})."
    described = {
        "__doc__": f"{title}\n\n{mechanism.__doc__}\n{optimizer.__doc__}",
        "__module__": __name__,
        "name": name,
        "family": "global",
        "paper": paper,
        "server_keeps": ", ".join(["w", *(key for key, kept in keeps.items() if kept)]),
        "traffic": "2 / 1" if local_beta else mechanism.traffic,
        "Hyper": make_dataclass("Hyper", own, bases=(mechanism.Hyper, optimizer), frozen=True),
    }
    return register(type(f"ComFed[{name}]", (mechanism,), described))


for _client in MECHANISMS:
    for _server in OPTIMIZERS:
        # The paper states β1 = 0.9 for all of its optimizers; FedAdagrad by its own name has none.
        _own = {"beta1": 0.9} if _server == "adagrad" else {}
        cell(f"{_client}-{_server}", f"{_client}-{_server}", "Nguyen et al. 2022", **_own)
for _name, (_pair, _paper) in NAMES.items():
    cell(_pair, _name, _paper, **({"local_beta": 0.5} if _name == "comfed-m" else {}))
