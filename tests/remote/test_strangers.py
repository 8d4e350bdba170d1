"""Nodes that do not deserve trust harm themselves alone: what they say, claim, send and keep from sending."""

from __future__ import annotations

import json
import logging
import re
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import HereGrid, experiment_of, federation_on, nodes_of
from test_engines import plain, vectors
from torch import Tensor
from typer.testing import CliRunner

from helpers import federation_of, model_task
from sartor.algorithms import make, registered
from sartor.commands.main import app
from sartor.data.clients import ClientData
from sartor.data.moments import Moments
from sartor.data.settings import Expect
from sartor.errors import DataError, SartorError, SettingError
from sartor.federation import Federation
from sartor.federation.clock import Conditions
from sartor.federation.exchange import Check
from sartor.files import private_folder
from sartor.remote import server
from sartor.remote.admission import Admission, Introduction, Owners, far_off, misfit, not_expected
from sartor.remote.journal import Journal
from sartor.remote.keys import fingerprint, make_keys, read_public_keys
from sartor.remote.limits import Limits
from sartor.remote.messages import Parts, decode, encode, read_header
from sartor.remote.requests import Failed, Requests
from sartor.remote.serve import NODES, Service, await_nodes, serve_on
from sartor.runs.execute import execute
from sartor.runs.experiment import from_mapping, load, to_mapping
from sartor.runs.record import RunFolder

BLOCKS = [[0, 3], [1, 4], [2, 5]]


def introduced(
    names: tuple[str, ...] = ("north",),
    count: int = 10,
    shape: tuple[int, ...] = (5,),
    classes: int | None = 4,
    moments: Moments | None = None,
    **more: Any,
) -> Introduction:
    counts = {"train": [count] * len(names), "test": [2] * len(names)}
    x, y = {"x": ("float32", shape)}, {"y": ("int64", ())}
    told = None if moments is None else {"x": moments}
    return Introduction(names, counts, x, y, classes, "0", "1", told, **more)


def moments(mean: list[float], spread: float, number: int = 10) -> Moments:
    return Moments(
        number,
        torch.tensor(mean, dtype=torch.float64),
        torch.full((len(mean),), number * spread**2, dtype=torch.float64),
    )


# Names belong to keys --------------------------------------------------------------------------------------


def test_a_client_comes_with_its_key_alone() -> None:
    owners = Owners({"n": ("north",), "s": ("south",), "s2": ("south",)})
    assert owners.fault("n", ["north"], {}) is None
    assert "may not come with this node's key, which may bring 'north'" in str(
        owners.fault("n", ["north", "west"], {})
    )
    assert "is another node's" in str(owners.fault("other", ["north"], {}))
    assert owners.fault("other", ["west"], {}) is None  # nobody's so far
    owners.bind("other", introduced(("west",)))
    assert owners.fault("other", ["west"], {}) is None
    assert "is another node's" in str(owners.fault("third", ["west"], {}))
    assert owners.fault("third", ["east"], {}) is None
    owners.bind("s", introduced(("south",)))
    assert owners.fault("s2", ["south"], {}) is None  # its owner has named both keys


def test_whose_clients_are_outlives_the_server() -> None:
    owners = Owners()
    owners.bind("n", introduced(("a", "b"), count=7))
    again = Owners({}, json.loads(json.dumps(owners.record())))
    counts = {"train": [7, 7], "test": [2, 2]}
    assert again.fault("n", ["a", "b"], counts) is None
    assert "other data than at the start" in str(again.fault("n", ["a", "b"], {**counts, "train": [7, 8]}))
    assert "is another node's" in str(again.fault("m", ["b"], {"train": [7], "test": [2]}))
    assert again.changed(["a", "b"], introduced(("a", "b")).hash) is None
    assert "'a', 'b': other data" in str(again.changed(["a", "b"], "another"))
    assert again.changed(["a"], "of one of them") is None  # they may come apart
    # Who runs the server may say otherwise: a machine was replaced.
    assert Owners({"m": ("b",)}, owners.record()).fault("m", ["b"], {"train": [7], "test": [2]}) is None


def test_public_keys_name_the_clients_that_they_may_bring(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a", "b"], {"a": ["north", "a b, c"]})
    found = read_public_keys(tmp_path / "keys" / "nodes.pub")
    assert list(found.values()) == [("north", "a b, c"), ()]
    assert len({fingerprint(key) for key in found}) == 2
    path = tmp_path / "nodes.pub"
    path.write_bytes(b"# of June\nclients are north\n" + next(iter(found)))
    with pytest.raises(
        DataError, match=r"entry 1: expected 'client: NAME' above a key, got 'clients are north'"
    ):
        read_public_keys(path)
    path.write_bytes(b"client: north\n" + 2 * next(iter(found)))
    with pytest.raises(DataError, match="entry 2 has the key of another; name all of its clients above one"):
        read_public_keys(path)


def test_the_keys_of_named_nodes_bring_the_client_of_that_name(tmp_path: Path) -> None:
    def made(*words: str) -> list[tuple[str, ...]]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        result = CliRunner().invoke(app, ["keys", str(folder), "--host", "localhost", *words])
        assert result.exit_code == 0, result.output
        return list(read_public_keys(folder / "nodes.pub").values())

    assert made("--nodes", "north,south") == [("north",), ("south",)]
    assert made("--nodes", "north,south", "--clients", "south=c0,c3") == [("north",), ("c0", "c3")]
    assert made("--nodes", "2") == [(), ()]
    wrong = ["keys", str(tmp_path / "x"), "--host", "localhost", "--nodes", "north", "--clients", "west=c0"]
    result = CliRunner().invoke(app, wrong)
    assert result.exit_code == 2
    assert "--clients: expected NODE=NAME,NAME" in result.output


def test_a_run_goes_on_with_the_keys_that_it_began_with(tmp_path: Path) -> None:
    """Also after the server was started anew: another node with the same data is turned away."""
    data = vectors(torch.float32)
    experiment = experiment_of("fedavg", rounds=2, checkpoint={"every": 1})
    run = tmp_path / "run"

    def broken(node: int, parts: Parts) -> Parts:
        if read_header(parts).get("exchange", 0) > 3:
            raise OSError("power cut")
        return parts

    grid = HereGrid(nodes_of(data, model_task("mlp", data), BLOCKS, tmp_path / "states"), broken)
    with pytest.raises(OSError, match="power cut"):
        serve_on(grid, experiment, Service(min_nodes=3), out=run)
    assert set(json.loads((run / NODES).read_text())) == set(data.names)
    assert stat.S_IMODE((run / NODES).stat().st_mode) == 0o600
    nodes = nodes_of(data, model_task("mlp", data), [*BLOCKS, BLOCKS[0]], tmp_path / "states")
    again = HereGrid({4: nodes[4]})
    again.at |= {node: nodes[node] for node in (1, 2, 3)}
    serve_on(again, RunFolder.open(run).experiment, Service(min_nodes=3), resume=run)
    assert "its name goes with another key than this node's" in nodes[4].refusal
    assert all(nodes[node].done for node in (1, 2, 3))


# What is expected ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expect", "met", "reason"),
    [
        ({"shape": [5]}, introduced(), None),
        ({"shape": [1, 8, 8]}, introduced(shape=(5, 5)), r"shape \[5, 5\], expected \[1, 8, 8\]"),
        ({}, introduced(shape=(2**11, 2**10)), "2097152 numbers; the server must be told"),
        ({"shape": [2**11, 2**10]}, introduced(shape=(2**11, 2**10)), None),
        ({"classes": 4}, introduced(), None),
        ({"classes": 3}, introduced(), "4 classes, expected at most 3"),
        ({"classes": 3}, introduced(classes=None), "no classes, expected at most 3"),
        ({}, introduced(classes=2**20), "1048576 classes; the server must be told"),
        ({"names": ["south"]}, introduced(), "a client 'north', who is not expected"),
        ({"samples": 9}, introduced(), "10 training samples, expected at most 9"),
        ({"low": 0.0, "high": 1.0}, introduced(moments=moments([0.5], 0.5)), None),
        ({"low": 0.0, "high": 1.0}, introduced(moments=moments([1.5], 0.1)), "do not lie between 0 and 1"),
        ({"low": 0.0, "high": 1.0}, introduced(moments=moments([0.5], 0.6)), "do not lie between 0 and 1"),
        ({"low": 0.0}, introduced(moments=moments([-0.5], 0.6)), "do not lie between 0 and inf"),
        ({"low": 0.0}, introduced(moments=moments([1e9], 1e9)), None),
    ],
)
def test_the_server_says_what_it_expects(
    expect: dict[str, Any], met: Introduction, reason: str | None
) -> None:
    found = not_expected(met, experiment_of("fedavg", expect=expect))
    assert (found is None) if reason is None else re.search(reason, str(found)), found


def test_what_is_expected_is_so_in_a_simulation_too() -> None:
    words = ["data.clients=3", "rounds=1", "model.name=softmax", "evaluate.every=0"]
    names = [f"{place}" for place in range(3)]
    fits = ["expect.shape=[1, 8, 8]", "expect.classes=10", "expect.samples=2000"]
    execute(load(None, [*words, *fits, "expect.low=0", "expect.high=16"]), store=False)
    for wrong, reason in {
        "expect.shape=[8, 8]": r"samples of shape \[1, 8, 8\], expected \[8, 8\]",
        "expect.classes=9": "10 classes, expected at most 9",
        "expect.samples=5": "training samples, expected at most 5",
        "expect.high=0.5": "expected at most 0.5",
        "expect.low=0.5": "expected at least 0.5",
        f"expect.names={names[:2]}": "who is not expected",
    }.items():
        with pytest.raises(DataError, match=reason):
            execute(load(None, [*words, wrong]), store=False)
    with pytest.raises(SettingError, match=r"expect\.low = 2: above expect\.high = 1"):
        load(None, ["expect.low=2", "expect.high=1"])
    assert from_mapping(to_mapping(load(None, fits))).expect == Expect((1, 8, 8), 10, None, 2000)


def test_the_run_begins_when_all_expected_clients_are_there() -> None:
    data = vectors()
    grid = HereGrid(nodes_of(data, plain(), BLOCKS[:2]))
    experiment = experiment_of("fedavg", expect={"names": list(data.names[:2] + data.names[3:5])})
    admission = Admission(Requests(grid, 5.0), experiment)
    assert set(await_nodes(admission, grid, experiment, Service())) == {1, 2}
    with pytest.raises(Failed, match="who is not expected"):
        Admission(Requests(HereGrid(nodes_of(data, plain(), BLOCKS)), 5.0), experiment).greet(3)


def test_a_node_without_classes_or_with_too_many_does_not_decide_for_the_others() -> None:
    others = [introduced(("south",))]
    assert misfit(introduced(), others) is None
    assert "numbers of classes" in str(misfit(introduced(classes=None), others))
    texts = [introduced(("south",), labels=tuple(f"s{place}" for place in range(600)))]
    more = introduced(labels=tuple(f"n{place}" for place in range(600)))
    assert "1200 classes; the server must be told of them" in str(misfit(more, texts))


# Moments ---------------------------------------------------------------------------------------------------


def test_whose_samples_lie_beyond_all_measure_is_found() -> None:
    told = {
        1: introduced(moments=moments([0.0, 0.0, 5.0], 1.0)),
        2: introduced(moments=moments([1.0, 0.0, 4.0], 2.0)),
        3: introduced(moments=moments([-1.0, 0.0, 6.0], 0.5)),
    }
    assert far_off(told) == {}
    for wrong in ([1e17, 0.0, 5.0], [0.0, 0.0, -1e4]):
        assert set(far_off({**told, 4: introduced(moments=moments(wrong, 1.0))})) == {4}
    assert set(far_off({**told, 4: introduced(moments=moments([0.0, 0.0, 5.0], 1e5))})) == {4}
    # A feature that is zero for most is no reason to turn those away who have it.
    zero = {
        node: introduced(
            moments=Moments(
                10,
                one.moments["x"].mean * torch.tensor([1.0, 0.0, 1.0]),
                one.moments["x"].squares * torch.tensor([1.0, 0.0, 1.0]),
            )
        )
        for node, one in told.items()
        if one.moments is not None
    }
    assert far_off({**zero, 4: introduced(moments=moments([0.0, 20.0, 5.0], 1.0))}) == {}
    # Of two, nobody can say which is wrong.
    assert far_off({1: told[1], 2: introduced(moments=moments([1e17, 0.0, 5.0], 1.0))}) == {}


def test_moments_beyond_all_measure_harm_nobody(tmp_path: Path) -> None:
    """Such a node is refused, and the run begins when the true one is there."""
    data = vectors(torch.float32)
    lied: list[int] = []

    def changed(node: int, parts: Parts) -> Parts:
        header, groups = decode(parts)
        if node == 4 and "moments" in groups:
            lied.append(node)
            groups["moments"]["mean x"] += 1e17
            return encode(header, groups)
        if node == 3 and "moments" in groups and not grid.at[4].refusal:
            return encode({"nonce": header["nonce"], "error": "busy", "closed": True})
        return parts

    grid = HereGrid(nodes_of(data, model_task("mlp", data), [*BLOCKS, BLOCKS[2]]), changed)
    experiment = replace(
        experiment_of("fedavg", rounds=1),
        data=replace(experiment_of("fedavg").data, normalise=True, clients=6),
    )
    admission = Admission(Requests(grid, 5.0), experiment)
    late = {3}
    grid.gone = late
    met: dict[int, Introduction] = {}
    real = admission.refuse

    def refuse(node: int, reason: str) -> None:
        real(node, reason)
        late.clear()

    admission.refuse = refuse  # type: ignore[method-assign]
    met = await_nodes(admission, grid, experiment, Service())
    assert lied == [4]
    assert set(met) == {1, 2, 3}


# Weights, norms and counts ---------------------------------------------------------------------------------


def test_a_norm_is_compared_with_the_median() -> None:
    norms = [torch.tensor([1.0, 2.0, 3.0, 500.0]), torch.tensor([0.0, 0.0, 0.0, 9.0])]
    numbers = np.arange(4)
    check = Check("x", numbers, dict(zip(("'w'", "'h'"), norms, strict=True)), 0.0, 100.0)
    [(_, bad)] = Check.bad([check])
    assert bad.tolist() == [[False, False, False, True], [False] * 4]  # a median of 0 says nothing
    assert "above replies.largest_ratio = 100 times the median" in check.told(bad, "abcd")
    both = Check("x", numbers, {"'w'": norms[0]}, 2.5, 100.0)
    [(_, bad)] = Check.bad([both])
    assert bad.tolist() == [[False, False, True, True]]
    assert "above replies.largest_norm = 2.5" in both.told(bad, "abcd")
    for few in (2, 1):
        rows = torch.tensor([1.0, 500.0])[:few]
        assert not Check.bad([Check("x", numbers[:few], {"'w'": rows}, 0.0, 100.0)])
    [(_, bad)] = Check.bad(
        [Check("x", numbers, {"'w'": norms[0] * torch.tensor([1, 1, 1, torch.nan])}, 0.0, 100.0)]
    )
    assert bad.tolist() == [[False, False, False, True]]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_of_many_checks_the_bad_one_is_found(wrong: float) -> None:
    """Also where nothing bounds the norms, and where nothing was checked."""
    fine = [Check(f"round {turn}", np.arange(2), {"'w'": torch.ones(2)}, 0.0) for turn in range(9)]
    assert not Check.bad(fine)
    assert not Check.bad([])
    sick = Check("round 9", np.arange(2), {"'w'": torch.tensor([1.0, wrong])}, 0.0)
    [(found, bad)] = Check.bad([*fine, sick, *fine])
    assert found is sick
    assert bad.tolist() == [[False, True]]
    assert "client 'b': 'w' of its reply is not finite" in found.told(bad, "ab")


def one_round(federation: Federation) -> Tensor:
    algorithm = make(registered()["fedavg"])
    federation.hyper, federation.round = algorithm.hyper, 1
    start = algorithm.start(federation)
    after: Tensor = algorithm.round(start, federation, np.arange(6)).w
    return after


def test_a_clients_weight_is_bounded_as_in_a_simulation(caplog: pytest.LogCaptureFixture) -> None:
    """Who claims a million times the samples counts as a few of the others, and honest nodes as they are."""
    data = vectors()
    conditions = Conditions(on_bad_reply="drop", largest_weight=10.0)

    def claimed(node: int, parts: Parts) -> Parts:
        header, groups = decode(parts)
        if node == 3 and "counts" in header:
            header["counts"]["train"] = [10**11, header["counts"]["train"][1]]
        return encode(header, groups)

    def deployed(change: Any) -> Federation:
        grid = HereGrid(nodes_of(data, plain(), BLOCKS), change)
        return federation_on(
            grid, experiment_of("fedavg", local={"batch": 8}), plain(), conditions=conditions
        )

    honest = federation_of("loop", plain(), data, local={"batch": 8})
    assert torch.equal(one_round(deployed(None)), one_round(honest))
    assert "count" not in caplog.text
    liar = deployed(claimed)
    after = one_round(liar)
    counts = np.array(data.train.count)
    median = float(np.median(np.where(np.arange(6) == 2, 10**11, counts)))
    assert int(liar.sizes[2]) == int(10 * median)
    assert "of which" in caplog.text
    assert not torch.equal(after, one_round(honest))
    assert float((after - honest.initial()).norm()) > 0.2 * float(
        (one_round(honest) - honest.initial()).norm()
    )


def test_the_bounds_of_a_deployed_run_are_recorded(tmp_path: Path) -> None:
    data = vectors(torch.float32)
    grid = HereGrid(nodes_of(data, model_task("mlp", data), BLOCKS))
    result = serve_on(grid, experiment_of("fedavg", rounds=1), Service(min_nodes=3), out=tmp_path / "run")
    replies = RunFolder.open(tmp_path / "run").experiment.replies
    assert (replies.largest_ratio, replies.largest_weight) == (100.0, 10.0)
    simulated = execute(
        experiment_of("fedavg", rounds=1, replies={"largest_ratio": 100.0, "largest_weight": 10.0}),
        data=data,
        store=False,
    )
    assert torch.equal(result.w, simulated.w)
    assert torch.equal(result.w, execute(experiment_of("fedavg", rounds=1), data=data, store=False).w)


def test_counts_of_an_evaluation_are_those_of_the_samples(tmp_path: Path) -> None:
    """Whatever a node says that it has counted: its clients are left out, the others are evaluated."""
    data = vectors(torch.float32)

    def changed(node: int, parts: Parts) -> Parts:
        header, groups = decode(parts)
        sent = groups.get("sent", {})
        if node == 2 and "test.confusion" in sent:
            sent["test.confusion"] = torch.eye(4).expand_as(sent["test.confusion"]) * 1e6
        if node == 3 and "test.n" in sent:
            sent["test.n"] = sent["test.n"] * 1000
            sent["test.loss"] = sent["test.loss"] * 0
        return encode(header, groups)

    grid = HereGrid(nodes_of(data, model_task("mlp", data), BLOCKS), changed)
    result = serve_on(grid, experiment_of("fedavg", rounds=1), Service(min_nodes=3), out=tmp_path / "run")
    honest = execute(experiment_of("fedavg", rounds=1), data=data, store=False)
    found, expected = (
        dict(zip(one.clients["client"], one.clients["shared_local_loss"], strict=True))
        for one in (result, honest)
    )
    for number, name in enumerate(data.names):
        if number in BLOCKS[0]:
            assert found[name] == pytest.approx(expected[name])
        else:
            assert found[name] is None or np.isnan(found[name])


def test_a_run_in_which_nobodys_reply_counts_fails(tmp_path: Path) -> None:
    data = vectors(torch.float32)

    def changed(node: int, parts: Parts) -> Parts:
        header, groups = decode(parts)
        if "exchange" in header:
            wrong = {
                name: value * torch.nan for name, value in groups["sent"].items() if not name.endswith(".n")
            }
            groups["sent"] = {**groups["sent"], **wrong}
        return encode(header, groups)

    for rounds, most in ((2, 2), (40, 10)):
        grid = HereGrid(nodes_of(data, model_task("mlp", data), BLOCKS), changed)
        experiment = experiment_of("fedavg", rounds=rounds, evaluate={"every": 0})
        with pytest.raises(SartorError, match=rf"^no reply of any node could be used in {most} rounds"):
            serve_on(grid, experiment, Service(min_nodes=3), out=tmp_path / str(rounds))
        assert all("no reply of any node" in node.failure for node in grid.at.values())


# Silence ---------------------------------------------------------------------------------------------------


def test_a_silent_node_is_left_out_until_it_reports_back(caplog: pytest.LogCaptureFixture) -> None:
    silent, deadline = {2}, 0.3

    def changed(node: int, parts: Parts) -> Parts | None:
        header = read_header(parts)
        return None if node in silent and ("exchange" in header or silent == {2, 9}) else parts

    grid = HereGrid(nodes_of(vectors(), plain(), BLOCKS), changed)
    federation = federation_on(grid, experiment_of("fedavg"), plain(), deadline=deadline)
    algorithm = make(registered()["fedavg"])
    federation.hyper = algorithm.hyper
    state = algorithm.start(federation)
    took, answered = [], []

    def play(rounds: int) -> None:
        nonlocal state
        for _ in range(rounds):
            begun = time.monotonic()
            federation.round += 1
            state = algorithm.round(state, federation, np.arange(6))
            took.append(time.monotonic() - begun)
            answered.append(federation.answered)

    with caplog.at_level(logging.WARNING):
        play(server.MISSES)
        assert min(took) > deadline
        assert caplog.text.count("left out until it reports back") == 1
        silent |= {9}  # not a word of it any more
        play(3)
        assert max(took[server.MISSES :]) < deadline  # nobody waits for it
        assert answered == [4] * (server.MISSES + 3)
        silent.clear()
        while answered[-1] < 6:
            play(1)
            time.sleep(0.05)
        assert "node 2: is back" in caplog.text
        silent |= {2}
        play(2)  # the second time one miss is enough
    assert caplog.text.count("left out until it reports back") == 2


def test_a_silent_node_that_is_needed_is_asked_as_soon_as_it_reports_back() -> None:
    missed = 0

    def changed(node: int, parts: Parts) -> Parts | None:
        nonlocal missed
        if node == 2 and "exchange" in read_header(parts) and missed < server.MISSES:
            missed += 1
            return None
        return parts

    grid = HereGrid(nodes_of(vectors(), plain(), BLOCKS), changed)
    federation = federation_on(
        grid, experiment_of("fedavg", local={"batch": 8}), plain(), deadline=0.2, quorum=3
    )
    simulated = federation_of("loop", plain(), vectors(), local={"batch": 8})
    assert torch.equal(one_round(federation), one_round(simulated))
    assert missed == server.MISSES


# The end ---------------------------------------------------------------------------------------------------


def test_a_node_that_comes_back_after_the_end_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = HereGrid(nodes_of(vectors(), plain(), BLOCKS))
    federation = federation_on(grid, experiment_of("fedavg"), plain())
    one_round(federation)
    grid.gone = {3}
    looks = 0
    there = grid.nodes

    def nodes() -> set[int]:
        nonlocal looks
        looks += 1
        if looks > 3:
            grid.gone = set()
        return there()

    monkeypatch.setattr(grid, "nodes", nodes)
    begun = time.monotonic()
    federation.engine.farewell(5.0)  # type: ignore[attr-defined]
    assert all(node.done for node in grid.at.values())
    assert time.monotonic() - begun < 5.0
    grid.gone = {3}
    monkeypatch.setattr(grid, "nodes", there)
    begun = time.monotonic()
    federation.engine.farewell(0.2)  # type: ignore[attr-defined]
    assert time.monotonic() - begun < 5.0  # who does not come is not waited for any longer


# Files and limits ------------------------------------------------------------------------------------------


def test_what_a_node_stores_is_for_its_owner_alone(tmp_path: Path) -> None:
    data: ClientData = vectors()
    folder = tmp_path / "states"
    grid = HereGrid(nodes_of(data, plain(), BLOCKS, folder))
    federation = federation_on(grid, experiment_of("scaffold"), plain())
    algorithm = make(registered()["scaffold"])
    federation.hyper, federation.round = algorithm.hyper, 1
    algorithm.round(algorithm.start(federation), federation, np.arange(6))
    federation.engine.farewell()  # type: ignore[attr-defined]
    found = [path for path in folder.rglob("*") if path != folder]
    assert {path.suffix for path in found} >= {".json", ".safetensors", ".tensors", ".txt"}
    for path in found:
        if path.parent != folder:  # the node's own folder is made by `sartor join`
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    private_folder(open_to_all / "a" / "b")
    private_folder(open_to_all)
    assert stat.S_IMODE(open_to_all.stat().st_mode) == 0o700
    assert Journal(open_to_all / "c").states() == {}


def test_a_key_may_ask_for_so_much_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("sartor.remote.limits.time.monotonic", lambda: now)
    limits = Limits(rate=2.0, burst=4.0, at_once=100)
    assert [limits.begin(b"a", 10) for _ in range(5)] == [True] * 4 + [False]
    assert limits.begin(b"b", 10)  # another one's
    now += 1.0
    assert [limits.begin(b"a", 10) for _ in range(3)] == [True, True, False]
    now += 100.0
    assert not limits.begin(b"a", 41)  # 60 are on their way
    limits.end(b"a", 10)
    assert limits.begin(b"a", 41)


def test_a_node_that_was_refused_and_is_there_is_greeted_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have been mended and started anew so soon that nobody saw it leave."""
    grid = HereGrid(nodes_of(vectors(), plain(), BLOCKS))
    admission = Admission(Requests(grid, 5.0), experiment_of("fedavg"))
    assert isinstance(admission.met({1})[1], Introduction)
    admission.refuse(1, "no")
    assert not admission.met({1})
    monkeypatch.setattr("sartor.remote.admission.RECONSIDERED", 0.0)
    assert isinstance(admission.met({1})[1], Introduction)
