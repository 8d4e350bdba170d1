"""A real federation from the command line: ``sartor serve`` at the server, ``sartor join`` at every node.

The server starts Flower's SuperLink, waits until enough nodes are there, and runs the experiment with the
runner's round loop; its run folder is that of a simulation. A node answers the server's requests until the
run has ended; it outlives the server, and its own end, by what it has stored.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sartor.data.clients import ClientData, from_clients
from sartor.data.loaders import from_folder, from_table, read_client
from sartor.data.settings import OWN_DATA
from sartor.errors import DataError, SartorError, SettingError
from sartor.federation import Federation
from sartor.federation.clock import Conditions
from sartor.files import write
from sartor.model.task import Task
from sartor.remote.admission import Introduction, Reception, assemble, misfit
from sartor.remote.node import Load, Node
from sartor.remote.requests import PARTING, Failed, Grid, Post
from sartor.remote.server import RemoteEngine
from sartor.runs import runner
from sartor.runs.experiment import Experiment, to_toml
from sartor.runs.record import RunFolder
from sartor.runs.runner import Result

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    from sartor.remote.flower import SuperLink

log = logging.getLogger(__name__)

LOOK = 0.05
"""Seconds between two looks of the server for new nodes."""
SHORTEST, LONGEST = 0.02, 0.25
"""Seconds between two looks of a node for requests: after one, and when nothing has come for a while."""
RETRY = 1.0
"""Seconds until a node tries again to reach a server."""
TABLES = (".csv", ".parquet")


@dataclass(frozen=True)
class Service:
    """How a server serves: its address, whom it lets in, and how long it waits for them."""

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    key: Path | None = None
    nodes: Path | None = None
    insecure: bool = False
    min_nodes: int = 0
    deadline: float = 600.0
    quorum: int = 1
    unit: float = 1.0
    store: Path | None = None

    def __post_init__(self) -> None:
        """Refuse to serve in the open what should not be."""
        if (self.certificate is None) != (self.key is None):
            raise SettingError("--tls: a certificate and its key belong together; `sartor keys` makes both")
        if self.insecure or is_loopback(self.host):
            return
        for given, option, why in (
            (self.certificate, "--tls CERT KEY CA", "models and results would travel readable"),
            (self.nodes, "--nodes", "anybody who reaches the port could join"),
        ):
            if given is None:
                raise SettingError(
                    f"--listen {self.host}: without {option} {why}; `sartor keys` makes what is needed, "
                    "--insecure does without it"
                )


def is_loopback(host: str) -> bool:
    """Whether only this machine is meant."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    experiment: Experiment | None,
    service: Service,
    *,
    out: Path | None = None,
    resume: Path | None = None,
    progress: bool = False,
) -> Result:
    """Run an experiment with the clients of nodes that join, or continue a run that was interrupted."""
    if (experiment is None) == (resume is None):
        raise SettingError("give an experiment, or --resume RUN to continue a run")
    if resume is not None:
        folder = RunFolder.open(resume)
        if folder.finished:
            raise SettingError(f"{resume}: finished already; it has a summary.json")
        experiment = folder.experiment
    assert experiment is not None
    if experiment.data.path is not None:
        raise SettingError("data.path: in a federation data lie at the nodes; leave it out")
    with listen(service, anew=resume is None) as grid:
        where = f"[{service.host}]" if ":" in service.host else service.host
        _say(f"listening on {where}:{grid.port}")
        return serve_on(grid, experiment, service, out=out, resume=resume, progress=progress)


def listen(service: Service, *, anew: bool = True) -> SuperLink:
    """The port that nodes join, as a context; ``anew`` forgets messages that an earlier server has left."""
    from sartor.remote.flower import SuperLink

    tls = None if service.certificate is None or service.key is None else (service.certificate, service.key)
    keys = None if service.nodes is None else read_public_keys(service.nodes)
    return SuperLink(service.host, service.port, tls=tls, keys=keys, database=service.store, anew=anew)


def serve_on(
    grid: Grid,
    experiment: Experiment,
    service: Service,
    *,
    out: Path | None = None,
    resume: Path | None = None,
    progress: bool = False,
) -> Result:
    """Run an experiment with the nodes of a grid, or continue the run of a folder with them.

    Nodes are told when it fails, and end; when it is interrupted they are not, and wait for it to go on.
    """
    opened: list[tuple[Federation, RemoteEngine]] = []
    try:
        result = _serve_on(grid, experiment, service, opened, out=out, resume=resume, progress=progress)
    except Exception as error:
        reason = str(error) if isinstance(error, SartorError) else f"{type(error).__name__}: {error}"
        try:
            for federation, _ in opened:
                federation.cancel(federation.running)  # nobody begins what was asked before
            _tell_failure(grid, reason)
        except Exception as other:  # what the run has failed of is what counts
            log.warning("nodes could not be told that the server ends: %s", other)
        raise
    for _, engine in opened:
        engine.farewell()
    return result


def _tell_failure(grid: Grid, reason: str) -> None:
    """Tell all nodes why the server ends; one that does not hear it in time waits for another server."""
    post, letters = Post(grid, PARTING), []
    for node in grid.nodes():
        with suppress(Failed):  # it has left
            letters.append(post.send(node, {"kind": "fail", "reason": reason}, expected={}))
    post.deliver(letters, PARTING)


def _serve_on(
    grid: Grid,
    experiment: Experiment,
    service: Service,
    opened: list[tuple[Federation, RemoteEngine]],
    *,
    out: Path | None,
    resume: Path | None,
    progress: bool,
) -> Result:
    """The run itself; its federation is added to those that are ``opened``."""
    met = _await(Reception(Post(grid, service.deadline), experiment), grid, experiment, service)
    data = assemble(met, experiment.data.labels)
    _say(f"{len(met)} nodes with {data.clients} clients; {experiment.algorithm} begins")
    told = experiment

    def open_federation(experiment: Experiment, task: Task, data: ClientData) -> Federation:
        # A bad reply is its sender's harm alone; who is there and for how long is not simulated.
        conditions = Conditions(on_bad_reply="drop", largest_norm=experiment.replies.largest_norm)
        settings = replace(runner.federation_settings(experiment), conditions=conditions)
        engine = RemoteEngine(
            grid,
            met,
            told,
            task,
            data,
            settings,
            deadline=service.deadline,
            quorum=service.quorum,
            unit=service.unit,
        )
        opened.append((Federation(task, engine, settings), engine))
        return opened[-1][0]

    if resume is not None:
        return runner.resume(resume, data=data, progress=progress, opened=open_federation)
    experiment = replace(experiment, data=replace(experiment.data, name=OWN_DATA, clients=data.clients))
    return runner.execute(experiment, data=data, out=out, progress=progress, opened=open_federation)


def _await(
    reception: Reception, grid: Grid, experiment: Experiment, service: Service
) -> dict[int, Introduction]:
    """Wait until enough nodes are there, and greet them."""
    met: dict[int, Introduction] = {}
    wanted = f"{service.min_nodes} nodes" if service.min_nodes else f"{experiment.data.clients} clients"
    _say(f"waiting for {wanted}")
    while True:
        there = grid.nodes()
        met = {node: introduction for node, introduction in met.items() if node in there}
        for node, answer in reception.met(there - set(met)).items():
            if isinstance(answer, Failed):
                log.warning("node %d: %s: %s", node, answer.kind, answer)
                continue
            reason = misfit(answer, met.values(), experiment.data.labels)
            if reason is not None:
                log.warning("node %d: refused: %s", node, reason)
                reception.refuse(node, reason)
                continue
            met[node] = answer
            _say(f"node {node} has joined with {', '.join(answer.names[:5])}")
        clients = sum(len(introduction.names) for introduction in met.values())
        if (len(met) >= service.min_nodes) if service.min_nodes else (clients >= experiment.data.clients):
            return met
        time.sleep(LOOK)


# A node ----------------------------------------------------------------------------------------------------


def loader(path: Path, name: str | None, client_column: str | None, label_column: str | None) -> Load:
    """What reads a node's own data: an npz file of one client, a folder of them, or a table."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if path.suffix in TABLES and (client_column is None or label_column is None):
        raise SettingError(f"{path}: a table needs --client-column and --label-column too")

    def load(experiment: Experiment) -> ClientData:
        options: dict[str, Any] = {
            "validation_fraction": experiment.data.validation,
            "seed": experiment.seed,
            "labels": experiment.data.labels,
        }
        if path.is_dir():
            return from_folder(path, **options)
        if path.suffix in TABLES:
            return from_table(path, str(client_column), str(label_column), **options)
        return from_clients({name or path.stem: read_client(path)}, name=path.name, **options)

    return load


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
    sends_personal: bool = False,
    show: Callable[[str], None] = lambda text: None,
) -> None:
    """Take part in the run of a server until it ends; a server that is gone is waited for.

    A server that asks for personal models gets them only if ``sends_personal``.
    """
    from sartor.remote.flower import FleetLink, Lost

    host, _ = split_address(address)
    if certificates is None and not insecure and not is_loopback(host):
        raise SettingError(
            f"{host}: without --ca the server could be anybody and everything would travel readable; "
            "give the certificate that `sartor keys` made for it, or --insecure"
        )
    state.mkdir(parents=True, exist_ok=True)
    own = read_key(key) if key is not None else _own_key(state / "key.pem")
    known = state / "known.json"
    numbers: dict[str, int] = json.loads(known.read_text()) if known.exists() else {}
    node = Node(load, state / "runs", device=device, sends_personal=sends_personal)
    link = FleetLink(
        address, own, certificates=certificates, insecure=certificates is None, known=numbers.get(address, 0)
    )
    try:
        connected, since, round, quiet = False, time.monotonic(), 0, SHORTEST
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
                    write(known, json.dumps(numbers).encode())
                    show(f"joined {address} as node {link.known}")
                    connected = True
                request = link.receive()
                if request is not None:
                    link.reply(request, node.handle(request.parts))
                since = time.monotonic()
            except Lost as error:
                connected = False
                if time.monotonic() - since > patience:
                    raise SartorError(f"{address}: no server for {patience:g} s: {error}") from None
                log.info("%s: %s; trying again", address, error)
                time.sleep(RETRY)
                continue
            if node.round != round:
                round = node.round
                show(f"round {round}")
            quiet = SHORTEST if request is not None else min(1.3 * quiet, LONGEST)
            time.sleep(quiet)
        show("the run has ended")
    finally:
        link.close()


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of an address."""
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise SettingError(f"{address!r}: expected an address such as 192.168.0.5:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)


# Keys and certificates -------------------------------------------------------------------------------------


def check_issued(certificate: Path, authority: Path) -> None:
    """Refuse a server's certificate that nodes with this authority's would not accept."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    found = []
    for path in (certificate, authority):
        try:
            found.append(x509.load_pem_x509_certificate(path.read_bytes()))
        except OSError as error:
            raise SettingError(f"--tls: {path}: cannot be read: {error.strerror or error}") from None
        except ValueError:
            raise SettingError(f"--tls: {path}: no certificate in PEM form") from None
    try:
        found[0].verify_directly_issued_by(found[1])
    except (ValueError, TypeError, InvalidSignature):
        raise SettingError(
            f"--tls: {certificate} was not issued by {authority}; nodes would refuse the server"
        ) from None


def make_keys(folder: Path, hosts: list[str], nodes: list[str], days: int = 825) -> list[Path]:
    """Keys for a federation: an authority, the server's certificate by it, and a key for every node.

    Nothing that exists is written over.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder.mkdir(parents=True, exist_ok=True)
    names = ["ca.crt", "server.crt", "server.key", "nodes.pub", *(f"{node}.key" for node in nodes)]
    taken = [name for name in names if (folder / name).exists()]
    if taken:
        raise SettingError(f"{folder / taken[0]}: exists already; give another folder")
    now = datetime.datetime.now(datetime.timezone.utc)

    def certificate(subject: str, key: Any, issuer: str, by: Any, authority: bool) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder(
            issuer_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]),
            subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(hours=1),
            not_valid_after=now + datetime.timedelta(days=days),
        )
        builder = builder.add_extension(x509.BasicConstraints(authority, 0 if authority else None), True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        signs = x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key())
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
        )
        usage |= {"encipher_only": False, "decipher_only": False}
        usage |= {"digital_signature": not authority, "key_cert_sign": authority, "crl_sign": authority}
        return builder.add_extension(signs, False).add_extension(x509.KeyUsage(**usage), True)

    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = certificate("sartor federation", authority, "sartor federation", authority, True)
    alternatives = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    leaf = certificate(hosts[0], server, "sartor federation", authority, False)
    leaf = leaf.add_extension(alternatives, False)
    made = {
        "ca.crt": (root.sign(authority, hashes.SHA256()), 0o644),
        "server.crt": (leaf.sign(authority, hashes.SHA256()), 0o644),
    }
    for name, (signed, mode) in made.items():
        write(folder / name, signed.public_bytes(_pem()), mode)
    write(folder / "server.key", _private(server), 0o600)
    public = b""
    for node in nodes:
        key = ec.generate_private_key(ec.SECP384R1())  # the curve of Flower's nodes
        write(folder / f"{node}.key", _private(key), 0o600)
        public += _public(key)
    write(folder / "nodes.pub", public)
    return [folder / name for name in names]


def _alternative(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def read_key(path: Path) -> EllipticCurvePrivateKey:
    """A node's private key, PEM or OpenSSH."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    try:
        data = path.read_bytes()
        read = load_ssh_private_key if b"OPENSSH" in data[:60] else load_pem_private_key
        key = read(data, None)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DataError(f"{path}: no private key of a node; `sartor keys` makes them")
    return key


def read_public_keys(path: Path) -> list[bytes]:
    """The public keys of the nodes that may join: PEM, one after the other in a file."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    end = b"-----END PUBLIC KEY-----"
    try:
        blocks = [block.strip() for block in path.read_bytes().split(end) if block.strip()]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    keys = []
    for place, block in enumerate(blocks, 1):
        try:
            key = load_pem_public_key(block + b"\n" + end)
        except ValueError:
            raise DataError(f"{path}: entry {place} is no public key") from None
        keys.append(key.public_bytes(_pem(), _subject()))
    if not keys:
        raise DataError(f"{path}: holds no public key; `sartor keys` writes such a file")
    return keys


def _own_key(path: Path) -> EllipticCurvePrivateKey:
    """The key of a node that was not given one: its own, made once."""
    from cryptography.hazmat.primitives.asymmetric import ec

    if not path.exists():
        write(path, _private(ec.generate_private_key(ec.SECP384R1())), 0o600)
    return read_key(path)


def _pem() -> Any:
    from cryptography.hazmat.primitives.serialization import Encoding

    return Encoding.PEM


def _subject() -> Any:
    from cryptography.hazmat.primitives.serialization import PublicFormat

    return PublicFormat.SubjectPublicKeyInfo


def _private(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import NoEncryption, PrivateFormat

    return bytes(key.private_bytes(_pem(), PrivateFormat.PKCS8, NoEncryption()))


def _public(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes(_pem(), _subject()))


# An application for any Flower installation ----------------------------------------------------------------

_APP = """[project]
name = "sartor-federation"
version = "1.0.0"
description = "An experiment of sartor on Flower"
license = "Apache-2.0"
dependencies = ["sartor[flower]"]

[tool.flwr.app]
publisher = "sartor"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
out = ""
min-nodes = 0
deadline = 600.0
quorum = 1
"""

_SERVER = '''"""The server: runs the experiment beside this file."""

from pathlib import Path

from flwr.serverapp import ServerApp

from sartor.remote.deploy import Service, serve_on
from sartor.runs.experiment import load
from sartor.remote.flower_app import StockGrid

app = ServerApp()


@app.main()
def main(grid, context):
    """Run the rounds; the run folder is run_config "out", or a new one in runs/."""
    settings = context.run_config
    service = Service(
        min_nodes=int(settings["min-nodes"]),
        deadline=float(settings["deadline"]),
        quorum=int(settings["quorum"]),
    )
    out = Path(str(settings["out"])) if settings["out"] else None
    serve_on(StockGrid(grid), load(Path(__file__).with_name("experiment.toml")), service, out=out)
'''

_CLIENT = '''"""A node: its data and its states lie where --node-config says."""

from flwr.clientapp import ClientApp

from sartor.remote.flower_app import answer

app = ClientApp()


@app.query("call")
def call(message, context):
    """Answer a request of the server."""
    return answer(message, context)
'''


def write_app(folder: Path, experiment: Experiment) -> list[Path]:
    """An application of Flower's that runs the experiment; nothing that exists is written over."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "pyproject.toml": _APP,
        "server_app.py": _SERVER,
        "client_app.py": _CLIENT,
        "experiment.toml": to_toml(experiment),
    }
    for name in files:
        if (folder / name).exists():
            raise SettingError(f"{folder / name}: exists already; give another folder")
    for name, text in files.items():
        write(folder / name, text.encode())
    return [folder / name for name in files]


def _say(text: str) -> None:
    """A line for whoever started the server."""
    print(f"sartor: {text}", file=sys.stderr, flush=True)
