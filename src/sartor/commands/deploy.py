"""``sartor serve``, ``join``, ``audit``, ``keys``, ``flower-app``: real federations, machine by machine."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sartor.commands.base import AsJson, Imports, app, reported
from sartor.commands.run import print_result
from sartor.commands.words import UNUSED_IN_A_FEDERATION, import_words, read_words
from sartor.errors import SettingError
from sartor.settings import shown

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ALGORITHM] [EXPERIMENT.toml|PRESET] [KEY=VALUE]...",
        help="The algorithm, an experiment file or a preset, and settings that win over it.",
        show_default=False,
    ),
]


@app.command()
@reported
def serve(
    arguments: Words = None,
    listen: Annotated[str, typer.Option(help="Address for the nodes, HOST:PORT.")] = "127.0.0.1:8000",
    tls: Annotated[
        tuple[Path, Path, Path] | None,
        typer.Option(
            metavar="CERT KEY CA",
            help="The server's certificate, its key, and the certificate that nodes know it by.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        Path | None, typer.Option(help="Public keys of the nodes that may join.", show_default=False)
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without certificate or keys.")
    ] = False,
    min_nodes: Annotated[
        int, typer.Option(min=0, help="Begin when so many nodes are there; 0: data.clients clients.")
    ] = 0,
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a node that has not answered is left out.")
    ] = 600.0,
    quorum: Annotated[
        int, typer.Option(min=1, help="Nodes that must answer; fewer are waited for and asked again.")
    ] = 1,
    unit: Annotated[
        float, typer.Option(min=1e-6, help="Seconds of a unit of virtual time, for asynchronous methods.")
    ] = 1.0,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep nodes and messages under way in this file, so that they outlive the server's process; "
            "left out: in memory.",
            show_default=False,
        ),
    ] = None,
    linger: Annotated[
        float,
        typer.Option(min=0, help="Seconds after the end for nodes that are away to come and hear of it."),
    ] = 10.0,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run of this folder.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; left out: a new one in runs/.", show_default=False)
    ] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment with clients on other machines, which `sartor join`.

    sartor serve experiment.toml --listen 0.0.0.0:8000 --tls server.crt server.key ca.crt --nodes nodes.pub

    sartor serve fedprox comfed/digits --import mine.py

    sartor serve --resume runs/fedavg-own-s0-12345678
    """
    from sartor.remote.addresses import split_address
    from sartor.remote.keys import check_issued, check_pair
    from sartor.remote.serve import Service
    from sartor.remote.serve import serve as serve_nodes
    from sartor.runs.experiment import from_mapping
    from sartor.runs.record import to_json

    logging.basicConfig(format="sartor: %(message)s", level=logging.WARNING, stream=sys.stderr)
    if resume is not None and arguments:
        raise SettingError(f"{arguments[0]}: --resume continues a run as it was begun; leave it out")
    import_words(imports)
    host, port = split_address(listen)
    certificate, key = None, None
    if tls is not None:
        certificate, key, authority = tls
        check_issued(certificate, authority)
        check_pair(certificate, key)
    service = Service(
        host, port, certificate, key, nodes, insecure, min_nodes, deadline, quorum, unit, store, linger
    )
    experiment = None
    if resume is None:
        experiment = from_mapping(_served(arguments, imports))
    result = serve_nodes(experiment, service, out=out, resume=resume, progress=True)
    if as_json:
        print(to_json(result.summary))
    else:
        print_result(result.summary)
        print(f"run folder: {result.folder}")


def _served(arguments: list[str] | None, imports: list[str] | None) -> dict[str, Any]:
    """The settings of a federation: where the data of a simulation lie says nothing of the nodes'."""
    from sartor.data.settings import COLUMN_KEYS, TEXT_KEYS

    settings = read_words(arguments or (), imports, unused=UNUSED_IN_A_FEDERATION)
    table = settings.get("data")
    if isinstance(table, dict) and table.get("path") is not None:
        lie = ("path", *COLUMN_KEYS, *TEXT_KEYS)
        left_out = ", ".join(f"data.{key} = {shown(table[key])}" for key in lie if key in table)
        print(
            f"sartor: {left_out}: for simulations; here data lie at the nodes, whose command says how they "
            "are read",
            file=sys.stderr,
        )
        settings["data"] = {key: value for key, value in table.items() if key not in lie}
    return settings


@app.command()
@reported
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server's address.")],
    data: Annotated[
        Path, typer.Option(help="This node's data: an npz file, a folder of them, a table, or mine.py:load.")
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the client of an npz file.", show_default=False)
    ] = None,
    client_column: Annotated[
        str | None, typer.Option(help="Column of a table that names the client.", show_default=False)
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(help="Column of a table that holds the label.", show_default=False)
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="This node's key; left out: one made and kept.", show_default=False)
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="Certificate to know the server by.", show_default=False)
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Join a server on another machine without a certificate.")
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(help="Folder of this node's states; left out: sartor-node/NAME.", show_default=False),
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds that a server which is gone is waited for.")
    ] = 600.0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    allow_personal_models: Annotated[
        bool,
        typer.Option(
            "--allow-personal-models",
            help="Send the personal models to a server that asks for them; left out: they stay here.",
        ),
    ] = False,
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar="POLICY.toml",
            help="What this node agrees to; `sartor settings policy` lists what can be said.",
            show_default=False,
        ),
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Misbehave, to test a federation: name=sign-flip, and settings of it, an option each.",
            show_default=False,
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Take part in a federation with the data and the personal models of this machine, which stay here.

    sartor join fl.example.org:8000 --data mine.npz --key north.key --ca ca.crt --policy policy.toml
    """
    from sartor.remote.join import join as join_server
    from sartor.remote.join import loader
    from sartor.remote.policy import node_policy
    from sartor.runs.experiment import read_attack

    logging.basicConfig(format="sartor: %(message)s", level=logging.WARNING, stream=sys.stderr)
    if device not in ("cpu", "cuda"):
        raise SettingError(f"--device: must be one of cpu, cuda, got {device!r}")
    import_words(imports)
    agreed = node_policy(policy, allow_personal_models)
    load = loader(data, name, client_column, label_column)
    folder = state or Path("sartor-node") / (name or data.resolve().stem)
    join_server(
        address,
        load,
        folder,
        key=key,
        certificates=ca,
        insecure=insecure,
        patience=patience,
        device=device,
        policy=agreed,
        attack=read_attack(attack),
        show=lambda text: print(f"sartor: {text}", file=sys.stderr, flush=True),
    )


@app.command()
@reported
def audit(
    state: Annotated[Path, typer.Argument(metavar="STATE", help="The node's state folder.")],
    as_json: AsJson = False,
) -> None:
    """Check and show what a node was asked for, and what has left it.

    sartor audit sartor-node/north
    """
    import json

    from sartor.errors import SartorError
    from sartor.remote.audit import LOG, Entry, read

    if not (state / LOG).is_file():
        raise SartorError(f"{state}: no node's state folder, it has no {LOG}")
    last = None
    for entry in read(state):
        if not isinstance(entry, Entry):
            words = (
                f"{len(entry)} bytes of a line that was not finished: the node was killed while it wrote it"
            )
            print(words, file=sys.stderr if as_json else sys.stdout)
            continue
        last = entry
        told = f"{entry.line:>4}  {entry.time}  {entry.event:<10}  {entry.words}"
        print(json.dumps(vars(entry)) if as_json else told)
    if last is not None and not as_json:
        print(f"{last.line} lines, whole; the last has SHA-256 {last.sha256}")


@app.command()
@reported
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files are written.")],
    host: Annotated[
        list[str], typer.Option(help="Name or address by which nodes reach the server; may be repeated.")
    ],
    nodes: Annotated[
        str, typer.Option(help="How many nodes, or their names with commas between them.")
    ] = "3",
    clients: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE=NAME,...",
            help="Clients that a node's key may bring; may be repeated. Left out: the one of the node's "
            "name, or where nodes are given by number any that no other key may bring.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make a certificate for the server and a key for every node.

    sartor keys keys --host fl.example.org --nodes north,south,west --clients west=lisbon,porto
    """
    from sartor.remote.keys import make_keys

    names = [f"node-{place}" for place in range(1, int(nodes) + 1)] if nodes.isdigit() else nodes.split(",")
    wrong = [name for name in names if not name.replace("-", "").replace("_", "").isalnum()]
    if wrong or not names or len(set(names)) < len(names):
        raise SettingError(
            f"--nodes: expected a number, or different names of letters and digits, got {nodes!r}"
        )
    brings = {} if nodes.isdigit() else {name: [name] for name in names}
    for text in clients or ():
        node, _, own = text.partition("=")
        if node not in names or not all(name.strip() for name in own.split(",")):
            raise SettingError(f"--clients: expected NODE=NAME,NAME with one of the nodes, got {text!r}")
        brings[node] = [name.strip() for name in own.split(",")]
    for path in make_keys(folder, host, names, brings):
        print(path)


@app.command("flower-app")
@reported
def flower_app(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the application is written.")],
    arguments: Words = None,
    imports: Imports = None,
) -> None:
    """Write an application that `flwr run` executes on any Flower installation.

    sartor flower-app app experiment.toml
    """
    from sartor.remote.flower_app import write_app
    from sartor.runs.experiment import from_mapping

    experiment = from_mapping(_served(arguments, imports))
    for path in write_app(folder, experiment):
        print(path)
