"""One run over several processes gives what one process gives, and ends well when a process does not."""

from __future__ import annotations

import ast
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_processes import Child, Nursery, free_port, program
from safetensors.torch import load_file, save_file
from test_engines import assert_close, assert_same, ended, network, plain, vectors
from test_transforms import Carry
from torch import Tensor, nn
from typer.testing import CliRunner

import sartor
from helpers import PATIENCE, classification, federation_of, model_task
from sartor.client.local import Client
from sartor.commands.main import app
from sartor.engines import sharded as distributed
from sartor.errors import SartorError
from sartor.federation import Federation, Reply
from sartor.federation.attacks import AttackChoice
from sartor.federation.functions import admit
from sartor.model.groups import grouped
from sartor.privacy.settings import Privacy
from sartor.robust.attacks import Mimic
from sartor.robust.selections import Similarity
from sartor.runs.checkpoint import latest
from sartor.runs.record import RunFolder
from sartor.transforms.difference import Difference
from sartor.transforms.norms import Clip, Scale

RANKS = 2
WAITED = 8.0
METHODS = ("fedavg", "scaffold", "separate")
ODD = [[5, 0, 3], [1], [4, 2, 0, 1, 3]]
TRANSFORMS = (
    Difference(of=("w",)),
    Clip(norm=0.2),
    Scale(place="down", factor=1.01),
    Carry(),
    Carry(place="down"),
)
"""What is sent is made smaller, and what is left out is kept: by clients, and by the server."""
MIMICS = AttackChoice(name="mimic", share=0.4, settings=Mimic())
"""They send what another client does, which may be at home elsewhere."""


def federations() -> dict[str, Callable[[], Federation]]:
    """Federations whose engines, buffers and clients without samples are all different."""
    empty = classification((9, 0, 12, 0, 5, 8), shape=(5,), classes=4, dtype=torch.float64)

    def make(engine: str, **settings: Any) -> Callable[[], Federation]:
        data = settings.pop("data", None) or vectors()
        task = settings.pop("task", None) or network()
        local = {"batch": 8, **settings.pop("local", {})}
        return lambda: federation_of(engine, task, data, local=local, **settings)

    return {
        "loop": make("loop"),
        "loop local": make("loop", buffers="local"),
        "loop freeze": make("loop", buffers="freeze"),
        "loop empty": make("loop", data=empty),
        "loop disk": make("loop", task=plain(), states="disk"),
        "loop drawn": make("loop", task=plain(), local={"epochs": (1, 3)}),
        "loop augmented": make("loop", task=plain(), local={"augment": ["mix-up"]}),
        "loop transforms": make("loop", task=plain(), transforms=TRANSFORMS),
        "loop attacked": make("loop", task=plain(), aggregate=Similarity(), attack=MIMICS),
        "loop private": make("loop", task=plain(), privacy=Privacy(mode="central", noise=2.0)),
        "stacked": make("stacked", task=plain(), chunk=1),
        "stacked augmented": make("stacked", task=plain(), chunk=1, local={"augment": ["mix-up"]}),
        "stacked together": make("stacked", task=plain()),
    }


def all_left() -> dict[str, Tensor]:
    """What every federation of the list is left with by every method of the list, by name."""
    left = {}
    for name, make in federations().items():
        for method in METHODS if name == "loop" else ("scaffold",):
            found = ended(method, make(), ODD)
            left |= {f"{name}/{method}/{key}": value.contiguous() for key, value in found.items()}
    left |= {f"in flight/{key}": value for key, value in in_flight().items()}
    return left | {f"own models/{key}": value for key, value in own_models().items()}


def trained_own(client: Client, hyper: Any, w_i: Tensor) -> Reply:
    """A step from the client's own model, which it sends and keeps."""
    w = client.descend(w_i, lr=0.1, steps=1)
    return Reply(w=w).keep(w_i=w)


def own_models() -> dict[str, Tensor]:
    """What is left of clients with models of two kinds, of which a rank may have one kind at home."""
    small, large = (model_task("mlp", hidden=hidden) for hidden in (3, 8))
    task = grouped(large, [large, small], np.array([0, 1, 0, 1, 0, 1]), [0, 1])
    federation = federation_of("loop", task, classification((8,) * 6), local={"batch": 8})
    federation.declare(w_i=federation.initial_models())
    sent = federation.map(trained_own, [4, 1, 0, 5]).by_group
    left = {f"sent {group}": replies["w"] for group, replies in sent.items()}
    return left | {name: federation.states[name] for name in federation.states}


def counting(client: Client, hyper: Any, w: Tensor, c: Tensor) -> Reply:
    """A client function whose reply and state are functions of the client and of what it has kept."""
    return Reply(seen=w * client.number + c).keep(c=c + w + client.number)


def in_flight() -> dict[str, Any]:
    """What is left of work that answers one by one, saved and restored while some of it is under way."""
    admit(__name__)
    first, second = (federations()["loop"]() for _ in range(2))
    replies = []
    for federation in (first, second):
        federation.declare(c=torch.zeros(2, dtype=torch.float64))
    first.map(counting, [1, 2, 5], shared={"w": torch.ones(2, dtype=torch.float64)})
    first.dispatch(counting, np.arange(6), shared={"w": torch.full((2,), 3.0, dtype=torch.float64)})
    replies.append(first.collect(2)["seen"])
    second.restore(first.snapshot())
    replies.append(second.collect(4)["seen"])
    # Two that began from other versions, at one rank or at two; they train, so buffers go along.
    for client in (1, 3):
        second.round += 1
        second.dispatch(stepping, [client], shared={"w": second.initial()})
        second.buffers = None if second.buffers is None else second.buffers + 1
    replies.append(second.collect(2)["w"][:, :2])
    return {"seen": torch.cat(replies), "c": second.states["c"], "buffers": second.mean_buffers}


def stepping(client: Client, hyper: Any, w: Tensor) -> Reply:
    """A step from what is sent."""
    return Reply(w=client.descend(w, lr=0.1, steps=1))


def fails_at_three(client: Client, hyper: Any) -> Reply:
    """A client function that fails at one client, and so at one rank."""
    if int(client.number) == 3:
        raise SartorError("client 3 has no power")
    return Reply(number=client.number)


def said(work: Callable[[], Any]) -> str:
    """The message that a piece of work ends with."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def number_of(client: Client, hyper: Any) -> Reply:
    """A reply that says who sent it, in several types."""
    one = client.number
    return Reply(number=one, even=one % 2 == 0, half=one.to(torch.bfloat16) / 2, many=one.repeat(3).double())


def join(rank: int, port: int, timeout: float) -> None:
    """Join as a process that torchrun has started."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    distributed.join("cpu", timeout)


def sleepy_worker(rank: int, port: int, folder: str) -> None:
    """One of two processes, of which the second does not answer any more."""
    here, there, waited = (Path(folder, name) for name in (f"{rank}", f"{1 - rank}", "waited.json"))
    here.touch()
    until(there.exists)  # imports may take one of them longer than it is to wait
    join(rank, port, timeout=WAITED)
    distributed.agree("data", "the same")
    if rank == 1:
        until(waited.exists)
        os._exit(4)
    begin = time.monotonic()
    message = said(lambda: distributed.agree("data", "the same"))
    waited.write_text(json.dumps([message, time.monotonic() - begin]))
    os._exit(3)


def until(happened: Callable[[], bool]) -> None:
    """Wait, but not for ever."""
    end = time.monotonic() + PATIENCE
    while not happened() and time.monotonic() < end:
        time.sleep(0.01)


def worker(rank: int, port: int, folder: str) -> None:
    """One of two processes: everything is done in the same order at both."""
    join(rank, port, timeout=PATIENCE)
    save_file(all_left(), f"{folder}/left-{rank}.safetensors")
    federation = federations()["loop"]()
    messages = {
        "client": said(lambda: federation.map(fails_at_three, [0, 3, 4])),
        "program": said(lambda: distributed.together(lambda: 1 // rank)),
        "set up": said(lambda: distributed.together(lambda: refuse_at(rank, 1))),
        "first": said(lambda: distributed.first_alone(lambda: refuse_at(rank, 0))),
        "agreed": said(lambda: distributed.agree("data", "the same")),
        "disagreed": said(lambda: distributed.agree("data", f"hash {rank}")),
    }
    # Whatever failed, all ranks are still in step.
    replies = federation.map(number_of, [4, 2, 5])
    messages["order"] = str([replies[name].tolist() for name in ("number", "even", "half", "many")])
    messages["nobody"] = said(lambda: federation.ask(number_of, []))
    federation.declare(c=torch.zeros(2, dtype=torch.float64))
    federation.map(counting, np.arange(6), shared={"w": torch.ones(2, dtype=torch.float64)})
    messages["home"] = federation.states.save()["c.numbers"].tolist()
    order = Path(folder, "order.txt")
    distributed.first_alone(lambda: order.write_text(order.read_text() + "b" if order.exists() else "a"))
    messages["turns"] = order.read_text()
    Path(folder, f"messages-{rank}.json").write_text(json.dumps(messages))
    if rank == 1:
        os._exit(7)  # without a word
    lost = said(lambda: [distributed.agree("data", "the same") for _ in range(3)])
    Path(folder, "lost.txt").write_text(lost)
    os._exit(0)


def cuda_worker(rank: int, port: int, folder: str) -> None:
    """One of two processes that share a GPU, which only Gloo can let them do."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    left = ended("scaffold", on_cuda(), ODD)
    save_file(
        {key: value.cpu().contiguous() for key, value in left.items()}, f"{folder}/left-{rank}.safetensors"
    )


def on_cuda() -> Federation:
    return federation_of("stacked", plain(), vectors(), local={"batch": 8}, device="cuda")


def refuse_at(rank: int, wrong: int) -> None:
    if rank == wrong:
        raise SartorError("no such file")


def main(words: Sequence[str]) -> None:
    """What a process does that :func:`start` starts."""
    target, rank, port, folder = words
    globals()[target](int(rank), int(port), folder)


def start(nursery: Nursery, target: Callable[[int, int, str], None], folder: Path) -> list[int]:
    """Run two processes to their ends; their exit codes."""
    port, name = free_port(), target.__name__
    workers = [nursery.start(name, rank, port, folder, script="test_sharded") for rank in range(RANKS)]
    return [one.wait() for one in workers]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def together(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote that ran together."""
    folder = tmp_path_factory.mktemp("ranks")
    assert start(nursery, worker, folder) == [0, 7]
    return folder


def test_two_processes_are_left_with_what_one_is(together: Path) -> None:
    expected = all_left()
    found = [load_file(together / f"left-{rank}.safetensors") for rank in range(RANKS)]
    assert_same(found[0], found[1])
    # Where clients are trained one by one the arithmetic is the same; in one batch its size differs.
    exact = {key: value for key, value in expected.items() if not key.startswith("stacked together")}
    assert_same(exact, {key: found[0][key] for key in exact})
    assert_close(expected, found[0], 1e-12)


def test_a_failure_at_one_process_is_the_same_failure_at_all(together: Path) -> None:
    first, second = (json.loads((together / f"messages-{rank}.json").read_text()) for rank in range(RANKS))
    assert first["client"] == "OtherRank: rank 1: client 3 has no power"  # which is at home there
    assert second["client"] == first["client"]
    assert first["program"].startswith("ZeroDivisionError: ")  # with its traceback
    assert second["program"].startswith("OtherRank: ZeroDivisionError: ")
    assert first["set up"] == second["set up"] == "OtherRank: rank 1: no such file"
    assert first["first"] == second["first"] == "OtherRank: no such file"
    assert first["agreed"] == second["agreed"] == "nothing"
    expected = "OtherRank: rank 1 has another data than rank 0; give all processes the same"
    assert first["disagreed"] == second["disagreed"] == expected


def test_replies_of_any_type_come_in_cohort_order_and_nobody_is_nobody(together: Path) -> None:
    first, second = (json.loads((together / f"messages-{rank}.json").read_text()) for rank in range(RANKS))
    rows = [[4, 2, 5], [True, True, False], [2.0, 1.0, 2.5], [[4.0] * 3, [2.0] * 3, [5.0] * 3]]
    assert first["order"] == second["order"] == str(rows)
    assert first["nobody"] == second["nobody"] == "nothing"
    assert first["turns"] == second["turns"] == "ab"


def test_a_state_is_kept_at_its_clients_home_alone(together: Path) -> None:
    homes = [json.loads((together / f"messages-{rank}.json").read_text())["home"] for rank in range(RANKS)]
    assert sorted(homes[0] + homes[1]) == list(range(6))
    assert len(homes[0]) == len(homes[1]) == 3


def test_a_process_that_has_ended_is_missed_at_once(together: Path) -> None:
    lost = (together / "lost.txt").read_text()
    assert lost.startswith("SartorError: another process of this run has ended or does not answer (")
    assert "`sartor resume` continues from the last checkpoint" in lost


@pytest.mark.cuda
def test_on_a_device_two_processes_are_left_with_what_one_is(nursery: Nursery, tmp_path: Path) -> None:
    assert start(nursery, cuda_worker, tmp_path) == [0, 0]
    found = [load_file(tmp_path / f"left-{rank}.safetensors") for rank in range(RANKS)]
    assert_same(found[0], found[1])
    expected = {key: value.cpu() for key, value in ended("scaffold", on_cuda(), ODD).items()}
    assert_close(expected, found[0], 1e-9)


@pytest.mark.slow
def test_a_process_that_hangs_is_waited_for_as_long_as_was_said(nursery: Nursery, tmp_path: Path) -> None:
    assert start(nursery, sleepy_worker, tmp_path) == [3, 4]
    message, seconds = json.loads((tmp_path / "waited.json").read_text())
    assert message.startswith("SartorError: another process of this run has ended or does not answer (")
    assert 0.75 * WAITED < seconds < 100  # Gloo's own patience is half an hour


def test_without_torchrun_there_is_one_process() -> None:
    distributed.join("cpu", 1)
    assert (distributed.rank(), distributed.world()) == (0, 1)
    assert distributed.together(lambda: 3) == distributed.first_alone(lambda: 3) == 3
    with pytest.raises(SartorError, match="no such file"):
        distributed.together(lambda: refuse_at(0, 0))


# The command line under torchrun ---------------------------------------------------------------------------

EXPERIMENT = [
    "scaffold",
    "data.clients=4",
    "model.name=softmax",
    "local.steps=2",
    "evaluate.every=0",
    "checkpoint.every=1",
    "engine.name=loop",
    "engine.states=disk",
]


def ranks(nursery: Nursery, *words: Any, count: int = RANKS) -> list[Child]:
    """Processes such as torchrun starts."""
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [nursery.start(*words, script="sartor", env={**world, **number}) for number in numbers]


def sha_of(folder: Path) -> str:
    sha: str = json.loads((folder / "summary.json").read_text())["model_sha256"]
    return sha


def rank_pids(launcher: int) -> dict[int, int]:
    """The processes that torchrun has started, by rank."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                found[int(entry[5:])] = int(child)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_killed_rank_ends_the_run_which_any_number_of_ranks_resume_to_the_same_numbers(
    nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture, anew: bool
) -> None:
    """Under torchrun itself; at night its ranks are processes that start anew."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert CliRunner().invoke(app, ["run", *EXPERIMENT, "--rounds", "64", "--out", str(alone)]).exit_code == 0
    launched = ("-m", "sartor") if anew else ("--no-python", program(tmp_path))
    run = nursery.start(
        *("--standalone", "--nproc-per-node", RANKS, *launched),
        *("run", *EXPERIMENT, "--rounds", "60", "--out", shared),
        script="torch.distributed.run",
    )
    end = time.monotonic() + PATIENCE
    while not (shared / "rounds.jsonl").exists() or len(read_lines(shared)) < 3:
        assert run.code() is None, run.output
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(rank_pids(run.pid)[1], signal.SIGKILL if anew else signal.SIGUSR1)
    assert run.wait() != 0
    assert "sartor: another process of this run has ended or does not answer" in run.output
    assert "run folder" not in run.output
    assert len(read_lines(shared)) < 60
    resumed = ranks(nursery, "resume", shared, count=3)
    assert [rank.wait() for rank in resumed] == [0, 0, 0], resumed[0].output
    assert [rank.output.count("run folder: ") for rank in resumed] == [1, 0, 0]  # rank 0 alone prints
    folder = RunFolder.open(shared)
    parts = sorted(path.name for path in (shared / "checkpoints").iterdir() if path.suffix == ".part")
    of = [f"round-0000000{round}.{rank}-of-3.part" for round in (59, 60) for rank in (1, 2)]
    assert parts == of  # nothing is left of the two ranks
    homes = {path.parent.name for path in (shared / "states").rglob("*.rows")}
    assert homes == {"0-of-3", "1-of-3", "2-of-3"}
    # A checkpoint with a damaged part is none; the one before it is resumed by one process.
    damaged = shared / "checkpoints" / of[-1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    last = latest(folder)
    assert last is not None
    assert last.round == 59
    assert "2-of-3.part is not what was written" in caplog.text
    assert CliRunner().invoke(app, ["resume", str(shared), "--rounds", "64"]).exit_code == 0
    assert sha_of(shared) == sha_of(alone)
    assert [row["round"] for row in map(json.loads, read_lines(shared))] == list(range(1, 65))


def read_lines(folder: Path) -> list[str]:
    return (folder / "rounds.jsonl").read_text().splitlines()


@pytest.mark.slow
def test_a_mistake_in_the_data_is_told_once_and_ends_all_ranks(nursery: Nursery, tmp_path: Path) -> None:
    run = ranks(nursery, "run", "fedavg", f"data.path={tmp_path}", "--out", tmp_path / "out")
    assert all(rank.wait() for rank in run)
    assert sum(rank.output.count("sartor: ") for rank in run) == 1
    assert any(str(tmp_path) in rank.output for rank in run)
    assert not (tmp_path / "out").exists()


class Net(nn.Sequential):
    """A model with float buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))


class Stops:
    """An observer that ends the run, and leaves a file where it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def round(self, run: Any, row: Any) -> None:
        means = run.state_dict()["2.running_mean"]  # the mean of what clients keep at several ranks
        (self.folder / f"told {distributed.rank()}").write_text(str(float(means.abs().sum())))
        if run.round == 2:
            run.stop("enough")


class Fails:
    def round(self, run: Any, row: Any) -> None:
        if run.round == 2:
            raise ValueError("no room")


def observed_worker(rank: int, port: int, folder: str) -> None:
    """Runs of two processes that observers or settings end."""
    join(rank, port, timeout=PATIENCE)
    place = Path(folder)
    given: dict[str, Any] = {"data": "digits", "clients": 4, "rounds": 5, "model": "softmax"}
    given |= {"engine": "loop", "local": {"steps": 2}}
    seen = {"model": Net, "evaluate": {"every": 0}, "observers": [Stops(place)]}
    result = sartor.run("fedbn", out=place / "observer", **{**given, **seen})
    ended = [result.summary["stopped"], result.summary["model_sha256"]]
    result = sartor.run("fedavg", out=place / "target", stop={"target": 0.0}, **given)
    ended += [result.summary["stopped"], result.summary["model_sha256"]]
    ended.append(said(lambda: sartor.run("fedavg", out=place / "failed", observers=[Fails()], **given)))
    stop = {"patience": 1, "metric": "shared_local.gain"}
    ended.append(said(lambda: sartor.run("fedavg", out=place / "failing", stop=stop, **given)))
    (place / f"rank {rank}").write_text(repr(ended))


@pytest.mark.slow
def test_all_ranks_stop_together_and_one_tells_the_observers(nursery: Nursery, tmp_path: Path) -> None:
    assert start(nursery, observed_worker, tmp_path) == [0, 0]
    ended = [ast.literal_eval((tmp_path / f"rank {rank}").read_text()) for rank in range(RANKS)]
    stopped, sha, reached, _, failed, refused = ended[0]
    assert ended[1] == ended[0]
    assert stopped == {"round": 2, "reason": "enough"}
    assert sha == sha_of(tmp_path / "observer")
    assert reached["round"] == 1
    assert "observer Fails: its round, after round 2, failed: ValueError: no room" in failed
    assert len(read_lines(tmp_path / "failed")) == 2
    assert (tmp_path / "failed" / "checkpoints" / "round-000000002.safetensors").exists()
    assert "stop.metric = 'shared_local.gain': not measured" in refused
    assert not (tmp_path / "failing").exists()
    assert float((tmp_path / "told 0").read_text()) > 0
    assert not (tmp_path / "told 1").exists()
