"""A node of a real federation: ``sartor join``.

It answers the server's requests until the run has ended; it outlives the server, and its own end, by what it
has stored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sartor.data.clients import ClientData, from_clients
from sartor.data.leaf import from_leaf, is_leaf
from sartor.data.loaders import from_folder, from_table, read_client
from sartor.data.named import read_data
from sartor.data.settings import Data
from sartor.data.tables import from_schema, is_table
from sartor.errors import DataError, SartorError, SettingError
from sartor.extensions import function_file
from sartor.federation.attacks import Attack, single_handed
from sartor.files import OWNER_ALONE, alone, private_folder, write
from sartor.model.objectives import chosen_objective
from sartor.remote.addresses import is_loopback, split_address
from sartor.remote.audit import Audit
from sartor.remote.keys import own_key, read_key
from sartor.remote.node import Load, Node
from sartor.remote.policy import Policy
from sartor.runs.experiment import Experiment, anchored, import_named
from sartor.runs.setup import poisoned

SHORTEST, LONGEST = 0.02, 0.25
"""Seconds between two looks of a node for requests: after one, and when nothing has come for a while."""
RETRY = 1.0
"""Seconds until a node tries again to reach a server."""
NOTICED = 5.0
"""Seconds after which a node says that it still waits for a server, and why."""


def loader(path: Path, name: str | None, client_column: str | None, label_column: str | None) -> Load:
    """What reads a node's own data: an npz file of one client, a folder of them, a table, or a function.

    The file of a function is imported here: the node's owner has named it.
    """
    if function_file(str(path)) is not None:
        import_named(anchored({"data": {"path": str(path)}}, Path.cwd()))
        return partial(_from_function, str(path))
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    table = is_table(path)

    def load(experiment: Experiment) -> ClientData:
        options: dict[str, Any] = {
            "validation_fraction": experiment.data.validation,
            "seed": experiment.seed,
            "targets": chosen_objective(experiment.objective).targets,
            "labels": experiment.data.labels,
        }
        if experiment.columns:
            if not table:
                raise DataError(f"{path}: the experiment describes the columns of a table; give one")
            if client_column is not None or label_column is not None:
                raise SettingError(
                    "--client-column, --label-column: the experiment says what columns are; leave them out"
                )
            return from_schema(path, experiment.columns, name=name, **options)
        if is_leaf(path):
            return from_leaf(path, validation_fraction=experiment.data.validation, seed=experiment.seed)
        if path.is_dir():
            return from_folder(path, **options)
        if table:
            if client_column is None or label_column is None:
                raise SettingError(
                    f"{path}: a table needs --client-column and --label-column too, as the experiment has no "
                    "[columns]"
                )
            return from_table(path, str(client_column), str(label_column), **options)
        return from_clients({name or path.stem: read_client(path)}, name=path.name, **options)

    return load


def _poisoned(load: Load, attack: Attack, experiment: Experiment) -> ClientData:
    """A node's data, with what an attack makes of its training samples."""
    data = load(experiment)
    everyone = np.arange(data.clients)
    return poisoned(data, attack.settled(data.train.x), everyone, experiment.seed) if attack.on_data else data


def _from_function(path: str, experiment: Experiment) -> ClientData:
    """The clients that a function of the node's owner gives."""
    named = Data(path=path, validation=experiment.data.validation)
    if experiment.columns:
        raise DataError(f"{path}: the experiment describes the columns of a table; give one")
    data = read_data(named, experiment.seed, chosen_objective(experiment.objective).targets)
    if not isinstance(data, ClientData):
        raise DataError(f"{path}: gives samples of no client; give {{client: (x, y)}}")
    return data


def _known(path: Path) -> dict[str, int]:
    """By address the number that this node has at a server, as it was stored."""
    try:
        numbers = json.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError, RecursionError):
        numbers = None
    if not isinstance(numbers, dict) or not all(type(number) is int for number in numbers.values()):
        raise SartorError(f"{path}: damaged; remove it, and servers take this node for a new one")
    return numbers


def join(
    address: str,
    load: Load,
    state: Path,
    *,
    key: Path | None = None,
    certificates: Path | None = None,
    insecure: bool = False,
    patience: float = 600.0,
    device: str = "cpu",
    policy: Policy | None = None,
    attack: Attack | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> None:
    """Take part in the run of a server until it ends; a server that is gone is waited for.

    ``policy`` is what this node agrees to; what it is asked for and what leaves it is logged in ``state``.
    With ``attack`` it misbehaves, for tests of a federation.
    """
    host, _ = split_address(address)
    if certificates is None and not insecure and not is_loopback(host):
        raise SettingError(
            f"{host}: without --ca the server could be anybody and everything would travel readable; "
            "give the certificate that `sartor keys` made for it, or --insecure"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingError("--device cuda: PyTorch sees no CUDA device here; take cpu")
    private_folder(state)
    with alone(state, "another node is using it; give every node a folder of its own (--state)"):
        given = (address, load, state, key, certificates, patience, device, policy or Policy(), attack, show)
        _take_part(*given)


def _take_part(
    address: str,
    load: Load,
    state: Path,
    key: Path | None,
    certificates: Path | None,
    patience: float,
    device: str,
    policy: Policy,
    attack: Attack | None,
    show: Callable[[str], None],
) -> None:
    """Answer a server until its run ends."""
    from sartor.remote.flower_link import FleetLink, Lost, clocks_apart

    own = read_key(key) if key is not None else own_key(state / "key.pem")
    known = state / "known.json"
    numbers = _known(known)
    audit = Audit(state)
    audit.add("started", f"Started to join {address}, with its policy.", policy=policy.to_mapping())
    attack = single_handed(attack)
    if attack is not None:
        load = partial(_poisoned, load, attack)
        audit.add("attack", "Misbehaves, as it was told to.", attack=repr(attack))
        show(f"this node misbehaves: {attack}")
    node = Node(load, state / "runs", device=device, policy=policy, audit=audit, attack=attack)
    link = FleetLink(
        address, own, certificates=certificates, insecure=certificates is None, known=numbers.get(address, 0)
    )
    try:
        connected, apart, since, round, quiet = False, False, time.monotonic(), 0, SHORTEST
        told = ""
        while not node.done:
            if node.refusal:
                raise SartorError(f"{address}: this node cannot take part: {node.refusal}")
            if node.failure:
                raise SartorError(f"{address}: the server ended: {node.failure}")
            try:
                if not connected:
                    if link.connect():
                        node.renew()
                    numbers[address] = link.known
                    write(known, json.dumps(numbers).encode(), OWNER_ALONE)
                    audit.add("joined", f"Joined the server {address} as node {link.known}.")
                    show(f"joined {address} as node {link.known}")
                    if link.ahead and not apart:
                        apart = True
                        show(f"{clocks_apart(link.ahead)}, by which this node goes; set it when you can")
                    connected, told = True, ""
                request = link.receive()
                if request is not None:
                    link.reply(request, node.handle(request.parts))
                since = time.monotonic()
            except Lost as error:
                connected = False
                if time.monotonic() - since > patience:
                    raise SartorError(f"{address}: no server for {patience:g} s: {error}") from None
                if str(error) != told and time.monotonic() - since > NOTICED:
                    told = str(error)
                    show(f"{address}: {told}; trying again for {patience:g} s")
                time.sleep(RETRY)
                continue
            if node.round != round:
                round = node.round
                show(f"round {round}")
            quiet = SHORTEST if request is not None else min(1.3 * quiet, LONGEST)
            time.sleep(quiet)
        if node.fault and not node.answered:
            raise SartorError(f"{address}: the run has ended, without an answer of this node: {node.fault}")
        show("the run has ended")
    finally:
        link.close()
