"""The server of a real federation: ``sartor serve``.

It starts Flower's SuperLink, waits until enough nodes are there, and runs the experiment with the only
round loop; its run folder is that of a simulation.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sartor.algorithms import registered
from sartor.data.clients import ClientData
from sartor.data.settings import OWN_DATA
from sartor.engines import federation_of
from sartor.errors import SartorError, SettingError
from sartor.federation import Federation
from sartor.federation.clock import Conditions
from sartor.model.task import Task
from sartor.remote.addresses import is_loopback
from sartor.remote.admission import Admission, Introduction, assemble, misfit
from sartor.remote.keys import read_public_keys
from sartor.remote.requests import PARTING, Failed, Grid, Requests
from sartor.remote.server import RemoteEngine
from sartor.runs.execute import execute
from sartor.runs.experiment import Experiment
from sartor.runs.record import RunFolder
from sartor.runs.result import Result
from sartor.runs.resume import resume as resume_run
from sartor.runs.setup import federation_settings

if TYPE_CHECKING:
    from sartor.remote.flower import SuperLink

log = logging.getLogger(__name__)

LOOK = 0.25
"""Seconds between two looks of the server for new nodes, unless something arrives."""


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
    require_deployable(experiment)
    with listen(service, anew=resume is None) as grid:
        where = f"[{service.host}]" if ":" in service.host else service.host
        _say(f"listening on {where}:{grid.port}")
        return serve_on(grid, experiment, service, out=out, resume=resume, progress=progress)


def require_deployable(experiment: Experiment) -> None:
    """Refuse a method that needs the data of all clients in one place, before anybody joins."""
    name = experiment.algorithm
    if not registered()[name].deployable:
        raise SettingError(
            f"{name}: needs the data of all clients in one place, so it cannot be deployed; "
            f"`sartor run {name}` simulates it where the data are"
        )


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
    requests, sent = Requests(grid, PARTING), []
    for node in grid.nodes():
        with suppress(Failed):  # it has left
            sent.append(requests.send(node, {"kind": "fail", "reason": reason}, expected={}))
    requests.deliver(sent, PARTING)


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
    met = await_nodes(Admission(Requests(grid, service.deadline), experiment), grid, experiment, service)
    data = assemble(met, experiment.data.labels)
    _say(f"{len(met)} nodes with {data.clients} clients; {experiment.algorithm} begins")
    told = experiment

    def open_federation(experiment: Experiment, task: Task, data: ClientData) -> Federation:
        # A bad reply is its sender's harm alone; who is there and for how long is not simulated.
        conditions = Conditions(on_bad_reply="drop", largest_norm=experiment.replies.largest_norm)
        settings = replace(federation_settings(experiment), conditions=conditions)
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
        opened.append((federation_of(task, engine, settings), engine))
        return opened[-1][0]

    if resume is not None:
        return resume_run(resume, data=data, progress=progress, opened=open_federation)
    experiment = replace(experiment, data=replace(experiment.data, name=OWN_DATA, clients=data.clients))
    return execute(experiment, data=data, out=out, progress=progress, opened=open_federation)


def await_nodes(
    admission: Admission, grid: Grid, experiment: Experiment, service: Service
) -> dict[int, Introduction]:
    """Wait until enough nodes are there, and greet them."""
    met: dict[int, Introduction] = {}
    wanted = f"{service.min_nodes} nodes" if service.min_nodes else f"{experiment.data.clients} clients"
    _say(f"waiting for {wanted}")
    while True:
        there = grid.nodes()
        met = {node: introduction for node, introduction in met.items() if node in there}
        for node, answer in admission.met(there - set(met)).items():
            if isinstance(answer, Failed):
                log.warning("node %d: %s: %s", node, answer.kind, answer)
                continue
            reason = misfit(answer, met.values(), experiment.data.labels)
            if reason is not None:
                log.warning("node %d: refused: %s", node, reason)
                admission.refuse(node, reason)
                continue
            met[node] = answer
            _say(f"node {node} has joined with {', '.join(answer.names[:5])}")
        clients = sum(len(introduction.names) for introduction in met.values())
        if (len(met) >= service.min_nodes) if service.min_nodes else (clients >= experiment.data.clients):
            return met
        grid.rest(LOOK)


def _say(text: str) -> None:
    """A line for whoever started the server."""
    print(f"sartor: {text}", file=sys.stderr, flush=True)
