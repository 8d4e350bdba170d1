"""A federation of nodes gives what a simulation gives: real nodes and messages, in one process.

That every method does is tested with the engines, in ``test_engines.py``.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import HereGrid, experiment_of, federation_on, nodes_of, work
from test_engines import COHORTS, network, plain, vectors, without_draws
from test_transforms import Carry, Noise, named
from torch import Tensor

from helpers import PATIENCE, federation_of, model_task
from owned import forgetful
from sartor.algorithms import make, registered
from sartor.errors import SartorError
from sartor.extensions import import_code
from sartor.federation import Federation
from sartor.federation.functions import find_function, qualified_name
from sartor.remote.admission import Admission, misfit
from sartor.remote.messages import Parts, decode, encode, read_header
from sartor.remote.node import Node
from sartor.remote.requests import MOST_FORGED, Requests
from sartor.remote.serve import Service, serve_on
from sartor.runs.checkpoint import pack, unpack
from sartor.runs.evaluation import evaluate, evaluation_of, model_of, shared_model
from sartor.runs.execute import execute
from sartor.runs.result import Result
from sartor.runs.run import tensors_of
from sartor.runs.settings import Evaluate
from sartor.transforms.norms import Clip, Scale

__all__ = ["forgetful", "named"]  # fixtures of these tests too

BLOCKS = [[0, 3], [1, 4], [2, 5]]
EVERYBODY = [0, 1, 2, 3, 4, 5]


# Faults: a reply that is not used has not been given -------------------------------------------------------


def rounds_on(federation: Federation, name: str, cohorts: Any = COHORTS, server: Any = None) -> Any:
    """Some rounds, from the federation's on; ``server`` continues an earlier state."""
    algorithm = make(registered()[name], lr=0.05)
    federation.hyper = algorithm.hyper
    server = algorithm.start(federation) if server is None else server
    for cohort in cohorts:
        federation.round += 1
        server = algorithm.round(server, federation, np.array(cohort))
    return server


def deployed(name: str, grid: HereGrid, task: Any, **settings: Any) -> Federation:
    return federation_on(grid, experiment_of(name, local={"batch": 8}), task, **settings)


def simulation(answers: Any = None) -> Federation:
    return federation_of("loop", plain(), vectors(), local={"batch": 8}, workers=1, answers=answers)


def lose(parts: Parts) -> None:
    return None


def fail(parts: Parts) -> Parts:
    return encode({"nonce": read_header(parts)["nonce"], "error": "the disk is full"})


def forge(parts: Parts) -> Parts:
    header, groups = decode(parts)
    return encode({**header, "nonce": "0" * 32}, groups)


def cut(parts: Parts) -> Parts:
    header, groups = decode(parts)
    return encode(header, {"sent": {name: value[:, :-1] for name, value in groups["sent"].items()}})


def grow(parts: Parts) -> Parts:
    header, groups = decode(parts)
    return encode(header, {**groups, "more": {"w": torch.zeros(100)}})


def spoil(parts: Parts) -> Parts:
    header, groups = decode(parts)
    return encode(header, {"sent": {name: value / 0 for name, value in groups["sent"].items()}})


def scramble(parts: Parts) -> Parts:
    return {**parts, "header": parts["header"][:-1]}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lose, "late"),
        (fail, "failed"),
        (forge, "forged"),
        (cut, "misshapen"),
        (grow, "oversized"),
        (spoil, "bad"),
        (scramble, "malformed"),
    ],
)
def test_a_node_whose_reply_cannot_be_used_has_not_moved(
    change: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the second round the node with clients 1 and 4 errs: it might as well have been gone."""
    expected = rounds_on(gone := simulation(lambda round, n: (round != 2) | ~np.isin(n, [1, 4])), "scaffold")

    def changed(node: int, parts: Parts) -> Parts | None:
        errs = node == 2 and federation is not None and federation.round == 2
        reply: Parts | None = change(parts) if errs else parts
        return reply

    federation: Federation | None = None
    grid = HereGrid(nodes_of(vectors(), plain(), BLOCKS), changed)
    federation = deployed("scaffold", grid, plain(), deadline=0.2)
    noted = []
    server = None
    for cohort in COHORTS:
        server = rounds_on(federation, "scaffold", [cohort], server)
        noted.append(federation.notes.get(kind, 0))
    federation.engine.farewell()  # type: ignore[attr-defined]
    assert torch.equal(server.w, expected.w)
    assert torch.equal(grid.kept("c_i"), gone.states["c_i"])
    # Bad replies are counted by clients; one without the secret may be another's, so the node is asked again.
    assert noted == [0, {"bad": 2, "forged": 1 + MOST_FORGED}.get(kind, 1), 0]
    assert caplog.text.count("round 2") == (2 if kind == "forged" else 1)
    assert ("not finite" if kind == "bad" else f"{kind}: ") in caplog.text


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_reply_that_another_has_forged_costs_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """On a grid that cannot tell who answers: every first answer of a node is another's, also to a greeting.

    The node has done its work and staged its states by then, and is asked the same once more.
    """
    expected = rounds_on(undisturbed := simulation(), name)
    asked: set[str] = set()

    def changed(node: int, parts: Parts) -> Parts:
        nonce = read_header(parts)["nonce"]
        if node != 2 or nonce in asked:
            return parts
        asked.add(nonce)
        return forge(parts)

    grid = HereGrid(nodes_of(vectors(), plain(), BLOCKS), changed)
    federation = deployed(name, grid, plain(), quorum=3)
    server = rounds_on(federation, name)
    federation.engine.farewell()  # type: ignore[attr-defined]
    assert torch.equal(server.w, expected.w)
    if name == "scaffold":
        assert torch.equal(grid.kept("c_i"), undisturbed.states["c_i"])
    assert len(asked) > 4
    assert "node 2 ('client 1', 'client 4'): forged: " in caplog.text


def test_a_quorum_that_cannot_be_reached_ends_the_run() -> None:
    grid = HereGrid(nodes_of(vectors(), plain(), BLOCKS))
    federation = deployed("fedavg", grid, plain(), quorum=3)
    grid.change = lambda node, parts: fail(parts) if node == 2 and "exchange" in read_header(parts) else parts
    with pytest.raises(SartorError, match="2 of 3 nodes answered, 3 must: the disk is full"):
        rounds_on(federation, "fedavg", [[0, 1, 2]])


def test_a_node_started_anew_goes_on_with_what_it_has_stored(tmp_path: Path) -> None:
    """Before the second round, and in the middle of the third when it has answered but was not told that it
    counts.
    """
    expected = rounds_on(undisturbed := simulation(), "scaffold")
    grid = HereGrid(nodes_of(vectors(), plain(), BLOCKS, tmp_path))
    federation = deployed("scaffold", grid, plain(), quorum=3)
    server = rounds_on(federation, "scaffold", COHORTS[:1])
    grid.at |= {2: nodes_of(vectors(), plain(), BLOCKS, tmp_path)[2]}
    server = rounds_on(federation, "scaffold", COHORTS[1:], server)
    grid.at |= {3: nodes_of(vectors(), plain(), BLOCKS, tmp_path)[3]}
    evaluate(make(registered()["scaffold"]), server, federation, Evaluate())
    federation.engine.farewell()  # type: ignore[attr-defined]
    assert torch.equal(server.w, expected.w)
    assert torch.equal(grid.kept("c_i"), undisturbed.states["c_i"])


@pytest.mark.parametrize("found", ["nothing", "an older copy"])
def test_a_node_without_what_its_clients_have_kept_is_left_out(tmp_path: Path, found: str) -> None:
    """It might as well have been gone in the third round; with its own folder it is there in the fourth."""
    gone = simulation(lambda round, n: (round != 3) | ~np.isin(n, [1, 4]))
    expected = rounds_on(gone, "scaffold", [EVERYBODY] * 4)
    own, other = tmp_path / "own", tmp_path / "other"
    grid = HereGrid(nodes_of(vectors(), plain(), BLOCKS, own))
    federation = deployed("scaffold", grid, plain())
    server = rounds_on(federation, "scaffold", [EVERYBODY])
    if found == "an older copy":
        shutil.copytree(own, other)
    server = rounds_on(federation, "scaffold", [EVERYBODY], server)
    stranger = nodes_of(vectors(), plain(), BLOCKS, other)[2]
    grid.at |= {2: stranger}
    server = rounds_on(federation, "scaffold", [EVERYBODY], server)
    assert "is not in its state folder; start it with the folder that it had" in stranger.refusal
    assert federation.notes["forgotten"] == 1
    grid.at |= {2: nodes_of(vectors(), plain(), BLOCKS, own)[2]}
    server = rounds_on(federation, "scaffold", [EVERYBODY], server)
    federation.engine.farewell()  # type: ignore[attr-defined]
    assert torch.equal(server.w, expected.w)
    assert torch.equal(grid.kept("c_i"), gone.states["c_i"])


def test_a_node_of_a_method_that_keeps_nothing_may_come_from_anywhere(tmp_path: Path) -> None:
    expected = rounds_on(simulation(), "fedavg")
    grid = HereGrid(nodes_of(vectors(), plain(), BLOCKS, tmp_path / "own"))
    federation = deployed("fedavg", grid, plain(), quorum=3)
    server = rounds_on(federation, "fedavg", COHORTS[:1])
    grid.at |= {2: nodes_of(vectors(), plain(), BLOCKS, tmp_path / "other")[2]}
    assert torch.equal(rounds_on(federation, "fedavg", COHORTS[1:], server).w, expected.w)


def test_nodes_that_train_one_client_on_the_fast_engine() -> None:
    """What is the same for all clients, such as a rate, is spread out over one there."""
    cohorts = [[0, 3, 1], [2, 4]]
    expected = rounds_on(simulation(), "fedadc", cohorts)
    grid = HereGrid(nodes_of(vectors(), plain(), [[number] for number in range(6)]))
    experiment = experiment_of("fedadc", local={"batch": 8}, engine={"name": "stacked"})
    found = rounds_on(federation_on(grid, experiment, plain()), "fedadc", cohorts)
    for (key, value), (_, wanted) in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert torch.allclose(value, wanted, rtol=1e-9, atol=1e-11), key


class Forgetful:
    """A node of which nothing but its folder lasts from one request to the next."""

    def __init__(self, place: int, folder: Path) -> None:
        self.place, self.folder = place, folder

    def node(self) -> Node:
        node = nodes_of(vectors(), plain(), BLOCKS, self.folder)[self.place]
        node.recall()
        return node

    def handle(self, parts: Parts) -> Parts:
        return self.node().handle(parts)

    def states(self, name: str) -> dict[int, Tensor]:
        return self.node().states(name)


@pytest.mark.parametrize("normalise", [False, True])
def test_nodes_that_live_for_one_request_give_the_same(tmp_path: Path, normalise: bool) -> None:
    """As where Flower starts a process for every message."""
    experiment = experiment_of("scaffold", local={"batch": 8}, data={"normalise": normalise})
    left = []
    for nodes in (
        nodes_of(vectors(), plain(), BLOCKS, tmp_path / "lasting"),
        {place: Forgetful(place, tmp_path / "forgetful") for place in (1, 2, 3)},
    ):
        grid = HereGrid(nodes)  # type: ignore[arg-type]
        federation = federation_on(grid, experiment, plain())
        server = rounds_on(federation, "scaffold")
        federation.engine.farewell()  # type: ignore[attr-defined]
        left.append((server.w, grid.kept("c_i")))
    assert torch.equal(left[0][0], left[1][0])
    assert torch.equal(left[0][1], left[1][1])


@pytest.mark.parametrize("name", ["scaffold", "fedasync", "fedper", "fedproto"])
@pytest.mark.parametrize("anew", [False, True])
def test_a_server_that_continues_takes_the_nodes_back(tmp_path: Path, name: str, anew: bool) -> None:
    """After the checkpoint of round 1 a round was played that is forgotten; nodes had used its replies."""
    algorithm = make(registered()[name], lr=0.05)
    expected = rounds_on(simulation(), name)
    nodes = nodes_of(vectors(), plain(), BLOCKS, tmp_path)
    soon = 1e-6  # everybody takes longer than the unit of time that a simulation lets them take
    first = deployed(name, HereGrid(nodes), plain(), unit=soon)
    server = rounds_on(first, name, COHORTS[:1])
    structure, tensors = pack({"server": dict(tensors_of(server)), "federation": first.snapshot()}, "saved")
    rounds_on(first, name, [COHORTS[2], COHORTS[0]], server)
    if anew:
        nodes = nodes_of(vectors(), plain(), BLOCKS, tmp_path)
    second = deployed(name, HereGrid(nodes), plain(), unit=soon)
    algorithm.start(second)
    second.restore(unpack(structure, tensors, {}, torch.device("cpu"))["federation"])
    second.round = 1
    found = rounds_on(second, name, COHORTS[1:], server)
    for (key, value), (_, wanted) in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert torch.equal(value, wanted), key


def test_a_node_goes_back_however_often_the_server_did_before_it_was_asked_again(tmp_path: Path) -> None:
    """Of the second server, which goes back, the third node hears nothing; the third server takes it back."""
    name, algorithm = "scaffold", make(registered()["scaffold"], lr=0.05)
    everybody, some = [0, 1, 2, 3, 4, 5], [0, 1, 3, 4]
    expected = rounds_on(undisturbed := simulation(), name, [everybody, some, some, some, everybody])
    nodes = nodes_of(vectors(), plain(), BLOCKS, tmp_path)
    grid = HereGrid(nodes)
    federation = deployed(name, grid, plain())
    server = rounds_on(federation, name, [everybody])
    for cohorts, lost in (([some] * 3, [everybody] * 2), ([everybody], [some])):
        done = federation.round
        saved = pack({"server": dict(tensors_of(server)), "federation": federation.snapshot()}, "saved")
        rounds_on(federation, name, lost, server)  # forgotten, though nodes have used it
        grid = HereGrid(nodes)
        federation = deployed(name, grid, plain())
        algorithm.start(federation)
        federation.restore(unpack(*saved, {}, torch.device("cpu"))["federation"])
        federation.round = done
        server = rounds_on(federation, name, cohorts, server)
    federation.engine.farewell()  # type: ignore[attr-defined]
    assert torch.equal(server.w, expected.w)
    assert torch.equal(grid.kept("c_i"), undisturbed.states["c_i"])


OWN_START = """
from dataclasses import dataclass, replace

import numpy as np

from sartor import Algorithm, Reply, register
from sartor.algorithms import Server


def rarity(client, hyper, zero):
    total = client.scan(lambda sum, batch: sum + batch.x.abs().sum(), zero, client.batches(epochs=1))
    return Reply(rarity=1 / total)  # not finite for samples of zeros


def train(client, hyper, w, base):
    return Reply(delta=client.descend(w, lr=hyper.lr) - w + base)


@dataclass(frozen=True)
class Begun(Server):
    share: float = 1.0


@register
class OwnStart(Algorithm):
    '''FedAvg of which everything follows from what clients answer at the start, waited for or not.'''

    name, family, paper = "own-start", "own", "nobody's"
    server_keeps, client_keeps, traffic = "w", "what it began with", "1 / 1"

    def start(self, federation):
        w, everyone = federation.initial(), np.arange(federation.clients)
        asked = {"zero": w.new_zeros(())}
        federation.declare(base=federation.map(rarity, everyone, asked).mean("rarity"))
        federation.dispatch(rarity, everyone, asked)
        return Begun(w, federation.collect(len(everyone))["rarity"].sum().item())

    def round(self, server, federation, cohort):
        replies = federation.map(train, cohort, shared={"w": server.w})
        return replace(server, w=server.w + server.share * replies.mean("delta"))
"""


class Interrupted(HereGrid):
    """Ctrl-C is pressed when something of this round is sent."""

    round = 0

    def send(self, node: int, parts: Parts, lifetime: float, most: int, note: str = "") -> str:
        if self.round and read_header(parts).get("round") == self.round:
            raise KeyboardInterrupt
        return super().send(node, parts, lifetime, most, note)

    def asked(self, name: str) -> int:
        """How often nodes were asked to run a client function."""
        return sum(read_header(parts).get("function", "").endswith(f":{name}") for _, parts in self.sent)


SMALLER = {"transforms": [{"name": "difference"}, {"name": "top-k", "share": 0.5}]}


@pytest.mark.parametrize(
    ("name", "model", "asked", "times", "tables"),
    [
        ("fedgen", "mlp", "counts", 3, {}),
        ("fsvrg", "softmax", "feature_counts", 3, SMALLER),
        ("ma-fsvrg-async", "softmax", "scaling", 3, {"hyper": {"deadline": 600}}),
        ("own-start", "softmax", "rarity", 3 + 6, SMALLER),
    ],
    ids=["fedgen", "fsvrg", "ma-fsvrg-async", "own-start"],
)
def test_a_server_that_continues_asks_nobody_how_the_run_began(
    forgetful: None,
    tmp_path: Path,
    name: str,
    model: str,
    asked: str,
    times: int,
    tables: dict[str, Any],
) -> None:
    """Nodes were asked once, hear of no other run, and all ends as if it had never been interrupted."""
    (tmp_path / "mine.py").write_text(OWN_START)
    import_code(str(tmp_path / "mine.py"))
    data, service = vectors(torch.float32), Service(min_nodes=3, quorum=3)
    tables = {"model": {"name": model}, "checkpoint": {"every": 1}, "local": {"batch": 8}, **tables}
    experiment = experiment_of(name, rounds=2, **tables)

    def grid(place: str) -> Interrupted:
        return Interrupted(nodes_of(data, model_task(model, data), BLOCKS, tmp_path / place))

    undisturbed = serve_on(grid("undisturbed"), experiment, service, out=tmp_path / "whole")
    first, second = grid("states"), grid("states")
    first.round = 2
    with pytest.raises(KeyboardInterrupt):
        serve_on(first, experiment, service, out=tmp_path / "run")
    result = serve_on(second, experiment, service, resume=tmp_path / "run")
    assert (first.asked(asked), second.asked(asked)) == (times, 0)
    assert undisturbed.w is not None
    assert result.w is not None
    assert torch.equal(result.w, undisturbed.w)
    assert [row["answered"] for row in result.rounds] == [row["answered"] for row in undisturbed.rounds]
    assert (result.summary["bytes_down"], result.summary["bytes_up"]) == (
        undisturbed.summary["bytes_down"],
        undisturbed.summary["bytes_up"],
    )
    for node in ("1", "2", "3"):
        assert len([path for path in (tmp_path / "states" / node).iterdir() if path.is_dir()]) == 1


def test_a_server_continues_from_before_the_first_round(tmp_path: Path) -> None:
    """A run of no rounds, whose server was killed when all but the summary was stored."""
    data, service = vectors(torch.float32), Service(min_nodes=3)
    experiment = experiment_of("fsvrg", rounds=0, model={"name": "softmax"})
    nodes = nodes_of(data, model_task("softmax", data), BLOCKS, tmp_path)
    expected = serve_on(HereGrid(nodes), experiment, service, out=tmp_path / "run").summary
    (tmp_path / "run" / "summary.json").unlink()
    grid = Interrupted(nodes)
    found = serve_on(grid, experiment, service, resume=tmp_path / "run").summary
    assert grid.asked("feature_counts") == 0
    assert found["model_sha256"] == expected["model_sha256"]
    assert found["bytes_up"] == expected["bytes_up"] > 0


def test_a_refused_node_knows_why() -> None:
    grid = HereGrid(nodes_of(vectors(), plain(), BLOCKS))
    admission = Admission(Requests(grid, 5.0), experiment_of("fedavg"))
    while len(met := admission.met(grid.nodes())) < 3:
        pass
    assert misfit(met[1], [met[2], met[3]]) is None
    double = replace(met[1], names=met[2].names)
    told = "client 'client 1' is at another node already; give each client a name of its own"
    assert misfit(double, [met[3], met[2]]) == told
    other = replace(met[1], x={"x": ("float32", (7,))})
    assert "float32 [7] with targets int64 [] in test, train, validation" in str(misfit(other, [met[2]]))
    admission.refuse(1, "go\x1b[2J home")
    assert admission.met({1}) == {}  # it is not greeted again, and has been told
    assert [node.refusal for node in grid.at.values()] == ["go[2J home", "", ""]  # nothing for a terminal
    assert not grid.requests
    admission.met(set())
    assert admission.met({1}).keys() == {1}  # it has been away


@pytest.mark.parametrize("name", ["fedavg", "fedbuff"])
def test_nodes_are_told_of_whatever_ends_the_server(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that nobody has foreseen, while clients are at work; not an interruption."""
    reasons = {
        RuntimeError("a\n\x1b[2J disk" + 1000 * "!"): "RuntimeError: a [2J disk!",
        SartorError("\n"): "no reason given",
        KeyboardInterrupt(): "",
    }
    data = vectors(torch.float32)
    for place, (error, reason) in enumerate(reasons.items()):

        def changed(node: int, parts: Parts, error: BaseException = error) -> Parts:
            if "exchange" in read_header(parts):
                raise error
            return parts

        grid = HereGrid(nodes_of(data, model_task("mlp", data), BLOCKS), changed)
        with pytest.raises(type(error)) as raised:
            serve_on(grid, experiment_of(name), Service(min_nodes=3), out=tmp_path / str(place))
        assert raised.value is error or not reason
        for node in grid.at.values():
            assert node.failure[: len(reason) or None] == reason
            assert len(node.failure) < 600
            assert not node.done
        if name == "fedbuff" and reason:  # what was asked before is called off
            assert not grid.requests
    assert "could not be told" not in caplog.text


def test_a_grid_that_fails_does_not_hide_what_the_server_failed_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking(HereGrid):
        def send(self, node: int, parts: Parts, lifetime: float, most: int, note: str = "") -> str:
            if read_header(parts)["kind"] in ("open", "fail"):
                raise OSError("no space left")
            return super().send(node, parts, lifetime, most, note)

    data = vectors(torch.float32)
    grid = Breaking(nodes_of(data, model_task("mlp", data), BLOCKS))
    with pytest.raises(OSError, match="no space left") as raised:
        serve_on(grid, experiment_of("fedavg"), Service(min_nodes=3), out=tmp_path / "run")
    assert "_open" in [entry.name for entry in raised.traceback]
    assert "nodes could not be told that the server ends: no space left" in caplog.text


# What is said of a run -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        *(("fedavg", "auto"), ("fedbn", "auto"), ("fedbn", "yes")),
        *(("fedper", "auto"), ("fedper", "yes"), ("ma-fsvrg", "yes")),
    ],
)
def test_evaluation_is_that_of_a_simulation(name: str, asked: str) -> None:
    """Pooled results are sums over the clients' own test data, which together are the pooled data.

    Float buffers that clients keep stay with them like personal models: unless they are asked for, each has
    evaluated the shared model with its own.
    """
    data, task, policy = vectors(), network(), registered()[name].buffers
    cohorts = [[0, 1, 2, 3, 4, 5]] * 2
    simulated = federation_of("loop", task, data, local={"batch": 8}, buffers=policy, workers=1)
    grid = HereGrid(nodes_of(data, task, BLOCKS, sends_personal=asked == "yes"))
    experiment = experiment_of(name, local={"batch": 8}, evaluate={"personal_models": asked})
    real = federation_on(grid, experiment, task, buffers=policy)
    algorithm = make(registered()[name], lr=0.05)
    cells = [
        evaluate(algorithm, rounds_on(federation, name, cohorts), federation, Evaluate())
        for federation in (simulated, real)
    ]
    assert set(cells[1]) == set(cells[0]) - {"personal_pooled"}  # nobody holds all test data
    own = policy == "local" and asked != "yes"
    for cell in cells[1]:
        a, b = cells[0][cell].summary(), cells[1][cell].summary()
        if own and cell == "shared_pooled":
            a = cells[0]["shared_local"].summary()
            assert b["accuracy"] == pytest.approx(a["accuracy_weighted"])
            continue
        assert b["accuracy"] == a["accuracy"], cell
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-12), cell
    sent = task.initial_buffers().nbytes * 6 if policy == "local" and asked == "yes" else 0
    assert real.traffic == replace(simulated.traffic, up=simulated.traffic.up + sent)
    assert real.updates == simulated.updates


@pytest.mark.parametrize(
    ("name", "buffers"),
    [("separate", "auto"), ("separate", "local"), ("fedper", "auto"), ("fedrod", "local")],
)
def test_a_result_says_where_the_personal_models_are(name: str, buffers: str) -> None:
    """A model that is a vector, one with parts of the server's, one that is a function; with BatchNorm."""
    data, task = vectors(), network()
    simulation, results = execute_on(None, name, buffers), []
    for asked in ("auto", "yes"):
        grid = HereGrid(nodes_of(data, task, BLOCKS, sends_personal=True))
        results.append(execute_on(grid, name, buffers, asked))
    stay, sent = results
    for cell in ("shared_local", "personal_local"):
        found = [result.summary["accuracy"][cell] for result in (simulation, *results)]
        assert found == [found[0]] * 3
    assert simulation.personal_stored
    assert sent.personal_stored
    assert sent.summary["bytes_up"] > stay.summary["bytes_up"] == simulation.summary["bytes_up"]
    assert not stay.personal_stored
    assert stay.personal is stay.personal_buffers is None
    with pytest.raises(SartorError, match=rf"{name}: the personal models stay at the nodes; evaluate\.perso"):
        stay.state_dict(client=0)
    if name == "fedrod" and buffers == "local":  # which has a shared model
        with pytest.raises(SartorError, match="the float buffers of the model stay at the nodes"):
            stay.state_dict()
    if simulation.personal is None:  # what makes up the prediction is in the run folder
        assert name == "fedrod"
        return
    assert sent.personal is not None
    assert torch.equal(sent.personal, simulation.personal)
    for key, value in simulation.state_dict(client=4).items():
        assert torch.equal(sent.state_dict(client=4)[key], value), key


def execute_on(grid: HereGrid | None, name: str, buffers: str, asked: str = "auto") -> Result:
    """Two rounds at the nodes of a grid, or simulated."""
    task = network()
    tables = {"model": {"buffers": buffers}, "evaluate": {"personal_models": asked}}
    told = experiment_of(name, local={"batch": 8}, rounds=2, **tables)

    def opened(experiment: Any, task: Any, data: Any) -> Federation:
        assert grid is not None
        settings = {"buffers": experiment.model.buffers, "hyper": experiment.hyper}
        return federation_on(grid, told, task, **settings)

    data = vectors()
    return execute(told, data=data, task=task, store=False, opened=None if grid is None else opened)


def test_messages_are_as_large_as_what_is_declared() -> None:
    data = vectors(torch.float32)
    task = model_task("mlp", data, hidden=2000)
    grid = HereGrid(nodes_of(data, task, [[number] for number in range(6)]))
    federation = deployed("fedavg", grid, task)
    rounds_on(federation, "fedavg")
    down = sum(sum(map(len, parts.values())) for _, parts in grid.sent)
    assert federation.traffic.down <= down <= 1.05 * federation.traffic.down


def test_evaluations_have_names() -> None:
    for function in (
        evaluation_of(shared_model, "test", "confusion+scores"),
        model_of(shared_model),
        shared_model,
    ):
        assert find_function(qualified_name(function)) is function
    with pytest.raises(SartorError, match="no such client function"):
        find_function("wraps/sartor.runs.evaluation:shared_model")


# Transforms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto", "fedasync"])
def test_transforms_at_nodes_give_what_a_simulation_gives(named: None, name: str, tmp_path: Path) -> None:
    """Error feedback is kept at the nodes; what travels is what is counted."""
    transforms = (Scale(place="down", factor=1.01), Clip(norm=0.5), Noise(), Carry(), Carry(place="down"))
    data, task = vectors(), plain()
    simulated = federation_of("loop", task, data, local={"batch": 8}, workers=1, transforms=transforms)
    expected = rounds_on(simulated, name)
    tables = [
        {"name": "scale", "place": "down", "factor": 1.01},
        {"name": "clip", "norm": 0.5},
        {"name": "jitter"},
        {"name": "carry"},
        {"name": "carry", "place": "down"},
    ]
    grid = HereGrid(nodes_of(data, task, BLOCKS, tmp_path))
    experiment = experiment_of(name, local={"batch": 8}, transforms=tables)
    federation = federation_on(grid, experiment, task, transforms=transforms)
    found = rounds_on(federation, name)
    if name == "fedasync":  # answers arrive in another order than a simulation's
        assert all(bool(torch.isfinite(value.double()).all()) for _, value in tensors_of(found))
        return
    for key, value in tensors_of(expected):
        assert torch.equal(dict(tensors_of(found))[key], value), key
    assert federation.traffic == simulated.traffic


def test_a_node_does_not_let_the_server_ask_past_the_transforms() -> None:
    """A server that leaves the clipping out is refused by the nodes."""
    grid = HereGrid(nodes_of(vectors(), plain(), BLOCKS))
    experiment = experiment_of("fedavg", transforms=[{"name": "clip", "norm": 0.5}])
    federation = federation_on(grid, experiment, plain())
    with pytest.raises(SartorError, match="it asks past the transforms of the experiment"):
        rounds_on(federation, "fedavg", COHORTS[:1])


class OneByOne(HereGrid):
    """Answers to work arrive at different instants: one at most after every rest."""

    arrives = True

    def rest(self, seconds: float) -> None:
        self.arrives = True
        super().rest(seconds)

    def poll(self, message: str) -> Parts | None:
        reply = super().poll(message) if self.arrives or not work(self.requests[message][1]) else None
        self.arrives &= reply is None
        return reply


def test_float_buffers_of_answers_that_come_one_by_one_are_those_of_a_simulation() -> None:
    task, data, name = without_draws(), vectors(), "fedavg-sync"
    grid = OneByOne(nodes_of(data, task, BLOCKS))
    found = deployed(name, grid, task, unit=PATIENCE, buffers="average")
    expected = federation_of("loop", task, data, local={"batch": 8}, workers=1, buffers="average")
    servers = [rounds_on(federation, name, [EVERYBODY] * 2) for federation in (found, expected)]
    assert torch.allclose(servers[0].w, servers[1].w)
    assert found.buffers is not None
    assert expected.buffers is not None
    assert torch.allclose(found.buffers, expected.buffers)
    assert not torch.equal(found.buffers, found.initial_buffers())
    assert found.traffic == expected.traffic
