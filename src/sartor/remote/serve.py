"""The server of a real federation: ``sartor serve``.

It starts Flower's SuperLink, waits until enough nodes are there, and runs the experiment with the only
round loop; its run folder is that of a simulation.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sartor.algorithms import registered
from sartor.data.clients import ClientData
from sartor.data.settings import OWN_DATA
from sartor.engines import federation_of
from sartor.errors import DataError, SartorError, SettingError
from sartor.federation import Federation
from sartor.federation.attacks import NONE, for_simulations
from sartor.federation.clock import Conditions
from sartor.federation.exchange import NobodyAnswered
from sartor.files import OWNER_ALONE, write
from sartor.model.networks import check_told
from sartor.model.objectives import chosen_objective
from sartor.model.task import Task
from sartor.remote.addresses import is_loopback
from sartor.remote.admission import (
    AGAIN,
    Admission,
    Introduction,
    Owners,
    assemble,
    far_off,
    listed_names,
    misfit,
)
from sartor.remote.keys import fingerprint, read_public_keys
from sartor.remote.requests import PARTING, Failed, Grid, Requests
from sartor.remote.server import RemoteEngine
from sartor.runs.evaluation import evaluate, personal_models
from sartor.runs.execute import execute
from sartor.runs.experiment import Experiment
from sartor.runs.metrics import measured
from sartor.runs.observers import Observer
from sartor.runs.record import RunFolder
from sartor.runs.result import Result
from sartor.runs.resume import resume as resume_run
from sartor.runs.run import Run
from sartor.runs.setup import check_device, checked_method, federation_settings
from sartor.runs.stopping import refuse_unmeasured
from sartor.runs.tracking import check as check_trackers

if TYPE_CHECKING:
    from sartor.remote.flower import SuperLink

log = logging.getLogger(__name__)

LOOK = 0.25
"""Seconds between two looks of the server for new nodes, unless something arrives."""
NODES = "nodes.json"
"""The file of a run folder that says which key each client came with, and with how many samples."""
EMPTY_ROUNDS = 10
"""Rounds after which a run ends in which no reply could be used so far."""
MEASURED = ("shared_pooled", "shared_local", "shared_validation", "personal_local", "personal_validation")
"""The cells that a federation may have: nobody has the test data of all clients for personal models."""
SOME_WIDTH = 2
"""Stands for how many numbers a model puts out, which is not known before nodes are there."""


@dataclass(frozen=True)
class Service:
    """How a server serves: its address, whom it lets in, and how long it waits for them.

    ``linger`` are the seconds that it stays after the end for nodes that are not there to hear of it.
    """

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
    linger: float = PARTING

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
        if experiment.data.path is not None or experiment.data.name != OWN_DATA:
            raise SettingError(f"{resume}: was simulated; `sartor resume {resume}` goes on with it")
    assert experiment is not None
    if experiment.data.path is not None:
        raise SettingError("data.path: in a federation data lie at the nodes; leave it out")
    require_deployable(experiment)
    check_device(experiment)
    if resume is None:
        check_trackers(experiment.tracking.loggers)
        if out is not None:
            RunFolder.require_free(out)
    with listen(service, anew=resume is None) as grid:
        where = f"[{service.host}]" if ":" in service.host else service.host
        _say(f"listening on {where}:{grid.port}")
        return serve_on(grid, experiment, service, out=out, resume=resume, progress=progress)


def require_deployable(experiment: Experiment) -> None:
    """Refuse, before anybody joins, what would need the data of all clients in one place."""
    name = experiment.algorithm
    if not registered()[name].deployable:
        raise SettingError(
            f"{name}: needs the data of all clients in one place, so it cannot be deployed; "
            f"`sartor run {name}` simulates it where the data are"
        )
    named = () if experiment.columns else (experiment.model,)  # a schema says how many categories there are
    for choice in (*named, *(group.choice for group in experiment.models)):
        check_told(choice, "the server sees no samples")
    if experiment.attack.name != NONE:
        raise for_simulations(experiment.attack.name)
    experiment.attack.check()
    checked_method(experiment)
    _check_evaluation(experiment)
    privacy = experiment.privacy
    if privacy.mode == "samples" and privacy.noise is None:
        raise SettingError(
            "privacy.epsilon: with mode = 'samples' its noise follows from the samples of all clients, which "
            "no node knows; give privacy.noise (--dry-run of a simulation says what it costs)"
        )
    if privacy.on and not privacy.secret:
        log.warning(
            "privacy.secret = false: noise follows from the seed, and whoever knows it can take the noise "
            "off; set it to true, unless this is a trial"
        )


def _check_evaluation(experiment: Experiment) -> None:
    """Refuse to measure what cannot be without the samples, and what there is no such metric for."""
    evaluate, stop = experiment.evaluate, experiment.stop
    if evaluate.personal_pooled == "yes":
        raise SettingError(
            "evaluate.personal_pooled = 'yes': nobody has the test data of all clients, which stay at the "
            "nodes; leave it out"
        )
    if evaluate.outputs == "yes":
        raise SettingError(
            "evaluate.outputs = 'yes': what models say of a node's samples stays there; leave it out"
        )
    if evaluate.by is not None:
        raise SettingError(
            f"evaluate.by = {evaluate.by!r}: which samples have which value, and what models say of them, "
            "stays at their nodes; leave it out"
        )
    objective = chosen_objective(experiment.objective)
    what = measured(objective, SOME_WIDTH, evaluate.metrics, evaluate.headline)
    if stop.wanted and stop.metric is not None:
        refuse_unmeasured(stop.metric, MEASURED, what)


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
        reason = _reason(error)
        try:
            for federation, _ in opened:
                federation.cancel(federation.running)  # nobody begins what was asked before
            _tell_failure(grid, reason)
        except Exception as other:  # what the run has failed of is what counts
            log.warning("nodes could not be told that the server ends: %s", other)
        raise
    for _, engine in opened:
        engine.farewell(service.linger)
    return result


def _reason(error: Exception) -> str:
    """What nodes are told of an error, as the server itself tells it."""
    if isinstance(error, SartorError):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror or error}"
    return f"{type(error).__name__}: {error}"


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
    owners = Owners(
        {} if service.nodes is None else read_owners(service.nodes),
        {} if resume is None else read_record(resume / NODES),
    )
    admission = Admission(Requests(grid, service.deadline), experiment, owners)
    met = await_nodes(admission, grid, experiment, service)
    _question_classes(met.values(), experiment)
    data = assemble(met, experiment.data.labels, experiment.columns)
    _say(f"{len(met)} nodes with {data.clients} clients; {experiment.algorithm} begins")
    told = experiment

    def open_federation(experiment: Experiment, task: Task, data: ClientData) -> Federation:
        # A bad reply is its sender's harm alone; who is there and for how long is not simulated.
        settings = federation_settings(experiment)
        simulated = settings.conditions
        conditions = Conditions(
            on_bad_reply="drop",
            largest_norm=simulated.largest_norm,
            largest_ratio=simulated.largest_ratio,
            largest_weight=simulated.largest_weight,
        )
        settings = replace(settings, conditions=conditions)
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
            owners=owners,
        )
        opened.append((federation_of(task, engine, settings), engine))
        return opened[-1][0]

    observers = [Watched(owners)]
    if resume is not None:
        return resume_run(resume, data=data, progress=progress, opened=open_federation, observers=observers)
    own = replace(experiment.data, name=OWN_DATA, clients=data.clients)
    replies = experiment.replies.deployed(compares=experiment.privacy.mode != "central")
    experiment = replace(experiment, data=own, replies=replies)
    return execute(
        experiment, data=data, out=out, progress=progress, opened=open_federation, observers=observers
    )


def _question_classes(met: Collection[Introduction], experiment: Experiment) -> None:
    """Say so where nodes count classes differently: labels 0 and 1 here may be 5 and 6 there."""
    counts = sorted({one.classes for one in met if one.classes is not None and one.labels is None})
    if len(counts) > 1 and experiment.data.labels is None and experiment.expect.classes is None:
        log.warning(
            "nodes have from %d to %d classes, by their largest labels; are labels numbered alike at all of "
            "them? expect.classes says how many there are",
            counts[0],
            counts[-1],
        )


class Watched(Observer):
    """Records whose the clients of a run are, and ends one in which nobody's reply can be used."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    def start(self, run: Run) -> None:
        """The run begins, or goes on."""
        if run.folder is not None:
            text = json.dumps(self._owners.record(), indent=1)
            write(run.folder / NODES, text.encode(), OWNER_ALONE)

    def round(self, run: Run, row: Mapping[str, Any]) -> None:
        """A round is over."""
        last = run.round == run.experiment.rounds or bool(run.stopped)
        if not run.federation.updates and (last or run.round >= EMPTY_ROUNDS):
            told = f"no reply of any node could be used in {run.round} rounds"
            run.leave(SartorError(f"{told}; the log and rounds.jsonl say what was wrong with them"))

    def end(self, run: Run, summary: Mapping[str, Any] | None) -> None:
        """All is stored; who was never evaluated is once, for its node to know what its model is made of."""
        algorithm, server, settings = run.algorithm, run.server, run.experiment.evaluate
        if summary is None or not 0 < settings.clients < run.federation.clients:
            return
        if personal_models(algorithm, server, np.arange(1)) is None:
            return
        try:
            evaluate(algorithm, server, run.federation, replace(settings, clients=0))
        except (SartorError, NobodyAnswered) as error:
            log.warning("nodes do not know all of their clients' models: %s", error or "nobody answered")


def read_owners(path: Path) -> dict[str, tuple[str, ...]]:
    """The clients that each key may bring, by the name of the key."""
    return {fingerprint(key): names for key, names in read_public_keys(path).items()}


def read_record(path: Path) -> dict[str, Any]:
    """Whose the clients of a run are; nothing where that was not recorded."""
    try:
        found = json.loads(path.read_text())
        return {
            str(name): {"key": str(one["key"]), "counts": one["counts"], "hash": str(one["hash"])}
            for name, one in found.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            f"{path}: cannot be read; it says which key each client of the run came with"
        ) from None


def await_nodes(
    admission: Admission, grid: Grid, experiment: Experiment, service: Service
) -> dict[int, Introduction]:
    """Wait until enough nodes are there, and greet them."""
    met: dict[int, Introduction] = {}
    names = experiment.expect.names
    wanted = f"{service.min_nodes} nodes" if service.min_nodes else f"{experiment.data.clients} clients"
    if names is not None:
        wanted = f"{len(names)} clients"
    _say(f"waiting for {wanted}")
    while True:
        present = grid.nodes()
        met = {node: introduction for node, introduction in met.items() if node in present}
        for node, answer in admission.met(present - set(met)).items():
            if isinstance(answer, Failed):
                kind = answer.kind if answer.kind in AGAIN else "refused"
                log.warning("node %d: %s: %s", node, kind, answer)
                continue
            reason = misfit(answer, met.values(), experiment.data.labels)
            if reason is not None:
                log.warning("node %d: refused: %s", node, reason)
                admission.refuse(node, reason)
                continue
            if not met and experiment.expect.shape is None and not is_loopback(service.host):
                _say(f"expect.shape does not say what samples are; those of node {node} decide")
            met[node] = answer
            _say(f"node {node} has joined with {listed_names(answer.names, 5)}")
        there = {name for introduction in met.values() for name in introduction.names}
        enough = len(met) >= service.min_nodes if service.min_nodes else len(there) >= experiment.data.clients
        if enough if names is None else there >= set(names):
            far = {} if experiment.expect.bounded else far_off(met)
            for node, reason in far.items():
                log.warning("node %d: refused: %s", node, reason)
                admission.refuse(node, reason)
                del met[node]
            if not far:
                break
        grid.rest(LOOK)
    for node, introduction in met.items():
        admission.admitted(node, introduction)
    return met


def _say(text: str) -> None:
    """A line for whoever started the server."""
    print(f"sartor: {text}", file=sys.stderr, flush=True)
