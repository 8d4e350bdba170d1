"""Checkpoints: whatever a run holds comes back to the bit, and whatever goes wrong is told."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

import sartor
from helpers import METHODS, classification, module_of
from sartor.algorithms import registered
from sartor.algorithms.references.fedavg import FedAvg
from sartor.commands.main import app
from sartor.data.clients import ClientData
from sartor.data.partitions import make_partition
from sartor.data.sources import load_source
from sartor.errors import SartorError, SettingError
from sartor.federation import Federation
from sartor.model.task import Task
from sartor.runs import checkpoint
from sartor.runs import cost as costs
from sartor.runs.checkpoint import latest, pack, paths, save, unpack
from sartor.runs.cost import estimate
from sartor.runs.execute import execute
from sartor.runs.experiment import from_mapping
from sartor.runs.newcomers import evaluate_run
from sartor.runs.observers import Kept, Saving
from sartor.runs.record import RunFolder, environment, hash_of
from sartor.runs.result import Result
from sartor.runs.resume import resume
from sartor.runs.run import Run
from sartor.runs.setup import Setup, set_up

CPU = torch.device("cpu")
cli = CliRunner()


@dataclasses.dataclass(frozen=True)
class Inner:
    v: Any
    note: str = "x"


@dataclasses.dataclass(frozen=True)
class Outer:
    w: Any
    inner: Any
    hidden: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.hidden:
            raise AssertionError("a state is rebuilt as it was, not made anew")


class Pair(NamedTuple):
    first: Any
    second: Any


CLASSES = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in (Inner, Outer, Pair)}

# A value and its parts -------------------------------------------------------------------------------------


def tensors() -> st.SearchStrategy[Tensor]:
    base = torch.arange(60.0).view(3, 4, 5)
    return st.sampled_from(
        [
            torch.tensor(2.5),
            torch.zeros(0, 3),
            torch.tensor([math.nan, math.inf, -0.0], dtype=torch.float64),
            torch.arange(4, dtype=torch.int64),
            torch.tensor([True, False]),
            torch.randn(5, dtype=torch.bfloat16),
            base,
            base.transpose(0, 2),
            base[1],
            base[:, ::2, 1:],
            base[0, 0].expand(7, 5),
            torch.arange(30, dtype=torch.int32)[7:20],
        ]
    )


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    | tensors()
    | st.sampled_from(
        [np.arange(6).reshape(2, 3), np.zeros((0,)), np.float32(0.1), np.int64(7), np.bool_(1)]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("abk.ey0", max_size=3) | st.integers(0, 3), inner, max_size=3)
        | st.builds(Inner, inner)
        | st.builds(Outer, inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


def memory_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, of the same types, tensors lying in memory in the same way."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        alike = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        aligned = a.storage_offset() % 64 == b.storage_offset() % 64
        return alike and aligned and memory_of(a) == memory_of(b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    return bool(a == b)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(values)
def test_any_state_comes_back_through_a_file_to_the_bit(tmp_path_factory: Any, value: Any) -> None:
    folder = RunFolder.create(tmp_path_factory.mktemp("run"), from_mapping({}))
    save(folder, round=3, seconds=1.5, data="hash", server=value, federation={"a.b": value})
    read = latest(folder)
    assert read is not None
    assert (read.round, read.seconds, read.data) == (3, 1.5, "hash")
    json.dumps(read.structure, allow_nan=False)
    assert same(unpack(read.structure["server"], read.tensors, CLASSES, CPU), value)
    assert same(unpack(read.structure["federation"], read.tensors, CLASSES, CPU), {"a.b": value})


def test_tensors_that_share_memory_come_back_each_for_itself() -> None:
    w = torch.arange(4.0)
    back = unpack(*pack({"a": w, "b": w, "c": w[1:]}, "server"), {}, CPU)
    back["a"][2] = 9
    assert back["b"].tolist() == [0, 1, 2, 3]
    assert back["c"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Inner({1, 2}), r"server\.v: a checkpoint cannot hold a set"),
        ({"f": [len]}, r"server\.f\.0: a checkpoint cannot hold a builtin_function"),
        ({"s": np.array(["a"])}, r"server\.s: a checkpoint cannot hold a ndarray"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(SartorError, match=message):
        pack(value, "server")


def test_a_checkpoint_makes_nothing_but_what_the_method_knows() -> None:
    algorithm = FedAvg()
    for name in ("subprocess.Popen", "test_checkpoint.Inner", "builtins.object", "antigravity.geohash"):
        structure = {"server": {"class": name, "fields": {"v": 1, "note": "x"}}}
        read = checkpoint.Checkpoint(3, 0.0, "", structure, {})
        with pytest.raises(SartorError, match=f"round 3 has '{name}' in the server's state"):
            read.server(algorithm, None, CPU)
        assert isinstance(read.server(algorithm, Inner(0), CPU) if "Inner" in name else Inner(0), Inner)
    assert "antigravity" not in sys.modules
    changed = {"server": {"class": "test_checkpoint.Inner", "fields": {"v": 1}}}
    with pytest.raises(SartorError, match=r"Inner with note' in the server's state"):
        checkpoint.Checkpoint(3, 0.0, "", changed, {}).server(algorithm, Inner(0), CPU)


# Stop and go on --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data() -> ClientData:
    made = classification((5, 17, 33, 9), shape=(6,), classes=3)
    return dataclasses.replace(made, validation=made.test)  # there are methods that need it


def go(name: str, data: ClientData, out: Path, **given: Any) -> Result:
    defaults: dict[str, Any] = {"engine": "loop", "local": {"batch": 8}, "cohort": {"count": 3}}
    defaults["checkpoint"] = {"every": 1}
    return sartor.run(name, data=data, **{"model": "softmax", **defaults, **given}, out=out)


def without_seconds(result: Result) -> dict[str, Any]:
    """All numbers of a result but the times."""
    models = {"w": result.w, "personal": result.personal, "buffers": result.buffers}
    return {
        "summary": {key: value for key, value in result.summary.items() if key != "seconds"},
        "rounds": [
            {key: value for key, value in row.items() if "seconds" not in key} for row in stored(result)
        ],
        "clients": result.clients,
        "models": {key: None if value is None else value.tolist() for key, value in models.items()},
    }


def stored(result: Result) -> list[dict[str, Any]]:
    assert result.folder is not None
    return RunFolder.open(result.folder).rounds


class Crash(BaseException):
    """The process ends here, as far as the run can tell."""


def crash(monkeypatch: pytest.MonkeyPatch, at: int, method: str = "save") -> Callable[[], None]:
    """Let the run end in round ``at``, just before it saves or comes to a method of its own."""
    cls: type = Saving if method == "save" else Run
    usual = getattr(cls, method)

    def crashing(self: Any, *arguments: Any) -> Any:
        run: Run = arguments[0] if cls is Saving else self
        if run.round == at:
            raise Crash
        return usual(self, *arguments)

    monkeypatch.setattr(cls, method, crashing)
    return lambda: monkeypatch.setattr(cls, method, usual)


def needs(name: str) -> dict[str, Any]:
    """A model with a head, and all clients where the method needs them."""
    cohort = {"cohort": {}} if name == "vrl-sgd" else {}
    return {"model": with_a_head(), **cohort}


@functools.cache
def with_a_head() -> Task:
    """The same for all methods, so that what is tried of a task is tried once."""
    return Task(module_of("mlp", (6,), 3, hidden=4).float(), classes=3, head="output")


def kill(monkeypatch: pytest.MonkeyPatch, at: int, run: Path, left: Path) -> None:
    """Put aside what a run would leave if it were killed in round ``at``, just before it saves."""
    usual = Saving.save

    def save(self: Saving, going: Run) -> None:
        if going.round == at and not left.exists():
            shutil.copytree(run, left)
        usual(self, going)

    monkeypatch.setattr(Saving, "save", save)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_goes_on_to_the_numbers_of_an_undisturbed_run_and_has_models_for_newcomers(
    data: ClientData, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the round that was lost are cut off, and the states of those who trained in it too. Newcomers
    are fewer and more than the run had clients.
    """
    given: dict[str, Any] = {"rounds": 3, "evaluate": {"every": 3}, **needs(name)}
    kill(monkeypatch, 2, tmp_path / "whole", tmp_path / "cut")
    whole = go(name, data, tmp_path / "whole", **given)
    assert len(RunFolder.open(tmp_path / "cut").rounds) == 2
    again = resume(tmp_path / "cut", data=data, task=given["model"])
    assert without_seconds(again) == without_seconds(whole)
    for file in ("clients.parquet", "models.safetensors", "config.toml"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert not (tmp_path / "cut" / "clients.arrow").exists()
    for sizes in ((7, 4), (5,) * 6):
        made = classification(sizes, (6,), 3, seed=1)
        newcomers = dataclasses.replace(made, validation=made.test, hash="others")
        new = evaluate_run(tmp_path / "whole", data=newcomers, task=given["model"])
        assert (new["newcomers"], new["clients"]) == (True, len(sizes))
        assert any(cell is not None for cell in new["last"].values())


@pytest.mark.parametrize("name", ["fedavg", "separate", "scaffold"])
@pytest.mark.parametrize(("buffers", "engine"), [("average", "loop"), ("local", "loop")])
def test_running_statistics_go_on(
    data: ClientData, name: str, buffers: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), classes=3)
    given: dict[str, Any] = {"model": task, "rounds": 3, "engine": engine}
    sections: dict[str, Any] = {"experiment": {"model": {"buffers": buffers}}}
    whole = go(name, data, tmp_path / "whole", **given, **sections)
    mend = crash(monkeypatch, at=2)
    with pytest.raises(Crash):
        go(name, data, tmp_path / "cut", **given, **sections)
    mend()
    assert without_seconds(resume(tmp_path / "cut", data=data, task=task)) == without_seconds(whole)


@pytest.mark.cuda
@pytest.mark.parametrize("name", sorted({"scaffold", "separate", "ma-fsvrg", "fedasync"} & set(registered())))
def test_on_a_gpu_too(data: ClientData, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"rounds": 4, "model": "mlp", "engine": "stacked", "device": "cuda"}
    whole = go(name, data, tmp_path / "whole", **given)
    mend = crash(monkeypatch, at=3)
    with pytest.raises(Crash):
        go(name, data, tmp_path / "cut", **given)
    mend()
    assert without_seconds(resume(tmp_path / "cut", data=data)) == without_seconds(whole)


def test_a_run_that_crashed_before_its_first_checkpoint_begins_again(
    data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = go("scaffold", data, tmp_path / "whole", rounds=2)
    mend = crash(monkeypatch, at=1)
    with pytest.raises(Crash):
        go("scaffold", data, tmp_path / "cut", rounds=2)
    mend()
    assert without_seconds(resume(tmp_path / "cut", data=data)) == without_seconds(whole)


@pytest.mark.parametrize("method", ["models", "summary"])
def test_a_run_that_crashed_at_its_end_only_ends_again(
    data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    whole = go("separate", data, tmp_path / "whole", rounds=2)
    mend = crash(monkeypatch, at=2, method=method)
    with pytest.raises(Crash):
        go("separate", data, tmp_path / "cut", rounds=2)
    mend()
    crash(monkeypatch, at=2, method="observe")  # no round is run again
    assert without_seconds(resume(tmp_path / "cut", data=data)) == without_seconds(whole)


def test_a_finished_run_is_extended_to_the_numbers_of_a_longer_one(data: ClientData, tmp_path: Path) -> None:
    whole = go("scaffold", data, tmp_path / "whole", rounds=5)
    go("scaffold", data, tmp_path / "short", rounds=2)
    longer = resume(tmp_path / "short", data=data, rounds=5)
    assert without_seconds(longer) == without_seconds(whole)
    assert RunFolder.open(tmp_path / "short").config == RunFolder.open(tmp_path / "whole").config
    with pytest.raises(SettingError, match="has 5 rounds; it can be extended, not cut to 3"):
        resume(tmp_path / "short", data=data, rounds=3)


def test_a_run_of_no_rounds_can_be_extended(data: ClientData, tmp_path: Path) -> None:
    whole = go("fedavg", data, tmp_path / "whole", rounds=2)
    go("fedavg", data, tmp_path / "none", rounds=0)
    longer = resume(tmp_path / "none", data=data, rounds=2)
    assert longer.summary["model_sha256"] == whole.summary["model_sha256"]
    assert [row["round"] for row in longer.rounds] == [0, 1, 2]


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_finished_run_is_read_back_and_left_alone(data: ClientData, tmp_path: Path) -> None:
    first = go("separate", data, tmp_path / "run", rounds=2)
    before = contents(tmp_path / "run")
    again = resume(tmp_path / "run", data=data)
    assert without_seconds(again) == without_seconds(first)
    assert again.summary == first.summary
    shown = cli.invoke(app, ["resume", str(tmp_path / "run")])
    assert shown.exit_code == 0
    assert shown.stderr == f"sartor: {tmp_path / 'run'}: finished, with 2 rounds; `--rounds` extends it\n"
    assert contents(tmp_path / "run") == before


def test_one_process_at_a_time(data: ClientData, tmp_path: Path) -> None:
    go("fedavg", data, tmp_path / "run", rounds=1)
    with RunFolder.open(tmp_path / "run").alone(), pytest.raises(SartorError, match="another process is at"):
        resume(tmp_path / "run", data=data, rounds=2)
    resume(tmp_path / "run", data=data, rounds=2)


# How often -------------------------------------------------------------------------------------------------


def rounds_saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    saved: list[int] = []
    usual = checkpoint.save

    def noting(folder: RunFolder, **parts: Any) -> None:
        saved.append(parts["round"])
        usual(folder, **parts)

    monkeypatch.setattr(checkpoint, "save", noting)
    return saved


def test_checkpoints_come_every_so_many_rounds_and_two_are_kept(
    data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = rounds_saved(monkeypatch)
    result = go("fedavg", data, tmp_path / "run", rounds=7, checkpoint={"every": 3})
    assert saved == [3, 6, 7]
    assert result.folder is not None
    names = [path.name for path in paths(RunFolder.open(result.folder))]
    assert names == ["round-000000007.safetensors", "round-000000006.safetensors"]


def test_left_to_itself_a_run_saves_for_a_twentieth_of_the_time(
    data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a round takes 1 and saving takes 2."""
    now = [0.0]
    monkeypatch.setattr("sartor.runs.observers.time.perf_counter", lambda: now[0])
    saved = rounds_saved(monkeypatch)
    saving, playing = checkpoint.save, FedAvg.round

    def slow(usual: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slower(*arguments: Any, **named: Any) -> Any:
            now[0] += seconds
            return usual(*arguments, **named)

        return slower

    monkeypatch.setattr(checkpoint, "save", slow(saving, 2.0))
    monkeypatch.setattr(FedAvg, "round", slow(playing, 1.0))
    result = go("fedavg", data, tmp_path / "run", rounds=100, evaluate={"every": 0}, checkpoint={})
    assert result.w is not None
    assert saved == [1, 41, 81, 100]
    # A state of which one would expect that saving takes 1.5 is saved when that has paid off.
    monkeypatch.setattr("sartor.runs.observers.BYTES_A_SECOND", result.w.nbytes / 1.5)
    saved.clear()
    go("fedavg", data, tmp_path / "large", rounds=100, evaluate={"every": 0}, checkpoint={})
    assert saved == [30, 70, 100]


@pytest.mark.parametrize("kept", Kept)
def test_a_finished_run_keeps_what_is_wanted_of_it(
    kept: Kept, data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = rounds_saved(monkeypatch)
    model, every = {"name": "softmax"}, {"every": 3}
    experiment = from_mapping({"algorithm": "scaffold", "model": model, "rounds": 4, "checkpoint": every})
    whole = execute(experiment, data=data, out=tmp_path / "whole")
    saved.clear()
    execute(experiment, data=data, out=tmp_path / "run", kept=kept)
    assert saved == ([3, 4] if kept is Kept.ALL else [3])
    run = RunFolder.open(tmp_path / "run")
    assert run.finished
    assert run.summary["model_sha256"] == whole.summary["model_sha256"]
    if kept is Kept.RESULTS:
        with pytest.raises(SartorError, match="has stored no models"):
            _ = run.models
    else:
        assert hash_of(run.models) == whole.summary["model_sha256"]


# Damage and mistakes ---------------------------------------------------------------------------------------


@pytest.fixture
def cut(data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of 4 rounds that ended in the last, before it was saved."""
    mend = crash(monkeypatch, at=4)
    with pytest.raises(Crash):
        go("scaffold", data, tmp_path / "cut", rounds=4)
    mend()
    return RunFolder.open(tmp_path / "cut")


@pytest.fixture(scope="module")
def undisturbed(data: ClientData, tmp_path_factory: Any) -> str:
    whole = go("scaffold", data, tmp_path_factory.mktemp("whole") / "run", rounds=4)
    return str(whole.summary["model_sha256"])


def damages() -> list[tuple[str, Callable[[bytes], bytes]]]:
    def flip(at: float) -> Callable[[bytes], bytes]:
        def flipped(content: bytes) -> bytes:
            place = int(at * (len(content) - 1))
            return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]

        return flipped

    some = [("empty", lambda content: b""), ("half", lambda content: content[: len(content) // 2])]
    some += [("longer", lambda content: content + b"x"), ("zeros", lambda content: bytes(len(content)))]
    return some + [(f"bit at {place}", flip(place)) for place in (0.0, 0.1, 0.5, 1.0)]


@pytest.mark.parametrize(
    "damage", [function for _, function in damages()], ids=[name for name, _ in damages()]
)
def test_a_damaged_checkpoint_is_passed_over_and_told(
    data: ClientData,
    cut: RunFolder,
    undisturbed: str,
    damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    last, older = paths(cut)
    assert (last.name[-13], older.name[-13]) == ("3", "2")
    last.write_bytes(damage(last.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert resume(cut.path, data=data).summary["model_sha256"] == undisturbed
    assert f"{last}: damaged (" in caplog.text
    assert "taking the checkpoint before it" in caplog.text


def test_where_every_checkpoint_is_damaged_it_says_how_to_begin_anew(
    data: ClientData, cut: RunFolder
) -> None:
    for path in paths(cut):
        path.write_bytes(b"")
    with pytest.raises(
        SartorError, match=r"every checkpoint is damaged; run it anew: sartor run .*config\.toml"
    ):
        resume(cut.path, data=data)


def rewrite(path: Path, **metadata: str) -> None:
    """Change what a checkpoint says of itself."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, framework="pt") as file:
        texts = file.metadata()
    save_file(load_file(path), path, {**texts, **metadata})


def test_a_checkpoint_of_a_newer_version_is_refused(data: ClientData, cut: RunFolder) -> None:
    newer = checkpoint.FORMAT + 1
    rewrite(paths(cut)[0], format=str(newer), content="something else")
    told = rf"of a newer Sartor \(format {newer}, this one reads {checkpoint.FORMAT}\); install"
    with pytest.raises(SartorError, match=told):
        resume(cut.path, data=data)


def test_another_experiment_is_refused(data: ClientData, cut: RunFolder) -> None:
    config = cut.path / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(
        SartorError, match=r"config\.toml: is not the experiment that the run was started with"
    ):
        resume(cut.path, data=data)


def test_other_data_are_refused(data: ClientData, cut: RunFolder) -> None:
    with pytest.raises(SartorError, match="data are not those the run was started with"):
        resume(cut.path, data=dataclasses.replace(data, hash="another"))


def test_data_given_in_python_must_be_given_again(cut: RunFolder) -> None:
    with pytest.raises(SettingError, match="pass it again as data="):
        resume(cut.path)


def test_another_version_is_told(data: ClientData, cut: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    path = cut.path / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0"}))
    resume(cut.path, data=data)
    assert f"began with torch 1.0, continues with {environment()['torch']}" in caplog.text


def test_rows_of_lost_rounds_and_torn_ends_are_cut_off(
    data: ClientData, cut: RunFolder, undisturbed: str
) -> None:
    with open(cut.path / "rounds.jsonl", "ab") as file:
        file.write(b'{"round": 5}\n\0\0\n{"round": 6, "coh')
    (cut.path / "clients.arrow").write_bytes((cut.path / "clients.arrow").read_bytes()[:-40]) if (
        cut.path / "clients.arrow"
    ).exists() else None
    (cut.path / "checkpoints" / ".unfinished-round-000000004.safetensors").write_bytes(b"half")
    result = resume(cut.path, data=data)
    assert result.summary["model_sha256"] == undisturbed
    assert [row["round"] for row in RunFolder.open(cut.path).rounds] == [1, 2, 3, 4]
    assert result.clients["round"] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert not list(cut.path.rglob(".unfinished*"))


def test_rows_that_are_missing_are_told(data: ClientData, cut: RunFolder) -> None:
    lines = (cut.path / "rounds.jsonl").read_text().splitlines(keepends=True)
    (cut.path / "rounds.jsonl").write_text(lines[0] + lines[2])
    with pytest.raises(
        SartorError, match=r"rounds\.jsonl: the row of round 2 is missing or damaged; run it anew"
    ):
        resume(cut.path, data=data)


def test_client_rows_survive_a_torn_end(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", from_mapping({}))
    for round in (1, 2):
        run.add_clients({"round": round, "client": ["a", "b"], "accuracy": [0.5, round]})
    whole = (tmp_path / "run" / "clients.arrow").read_bytes()
    for length in range(len(whole) // 2, len(whole), 37):
        (tmp_path / "run" / "clients.arrow").write_bytes(whole[:length])
        assert RunFolder.open(tmp_path / "run").clients["round"][:2] == [1, 1]
    run.close()
    assert not (tmp_path / "run" / "clients.arrow").exists()
    assert run.clients["client"][:2] == ["a", "b"]


def test_a_full_disk_stops_the_run_with_the_last_checkpoint_whole(data: ClientData, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    given: dict[str, Any] = {"rounds": 4, "model": "mlp", "cohort": {"count": 1}, "evaluate": {"every": 0}}
    whole = go("separate", data, tmp_path / "whole", **given)
    sizes = [path.stat().st_size for path in paths(RunFolder.open(tmp_path / "whole"))]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[1] - 1000, limit[1]))  # past this a write fails
    try:
        with pytest.raises(SartorError) as full:
            go("separate", data, tmp_path / "run", **given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert re.search(
        r"safetensors: cannot be written: .*; then `sartor\.resume\(.*\)`, .*, goes on", str(full.value)
    )
    assert not list((tmp_path / "run").rglob(".unfinished*"))
    assert latest(RunFolder.open(tmp_path / "run")) is not None
    assert without_seconds(resume(tmp_path / "run", data=data)) == without_seconds(whole)


# Ctrl-C ----------------------------------------------------------------------------------------------------


def pressing(monkeypatch: pytest.MonkeyPatch, at: int, times: int) -> None:
    """Ctrl-C during a round."""
    usual = FedAvg.round

    def pressed(self: FedAvg, server: Any, federation: Federation, cohort: np.ndarray) -> Any:
        if federation.round == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return usual(self, server, federation, cohort)

    monkeypatch.setattr(FedAvg, "round", pressed)


@pytest.mark.parametrize(("times", "saved"), [(1, 2), (2, 1)])
def test_ctrl_c_ends_the_round_first_and_the_second_time_at_once(
    data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, saved: int
) -> None:
    whole = go("fedavg", data, tmp_path / "whole", rounds=4)
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        pressing(patch, at=2, times=times)
        with pytest.raises(KeyboardInterrupt) as stop:
            go("fedavg", data, tmp_path / "a run", rounds=4)
    assert str(stop.value) == (
        f"stopped; `sartor.resume({str(tmp_path / 'a run')!r})`, with what was given in Python, "
        f"goes on after round {saved}"
    )
    assert signal.getsignal(signal.SIGINT) is handler
    assert len(RunFolder.open(tmp_path / "a run").rounds) == saved
    assert without_seconds(resume(tmp_path / "a run", data=data)) == without_seconds(whole)


def test_ctrl_c_in_the_last_round_lets_the_run_finish(
    data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressing(monkeypatch, at=2, times=1)
    assert go("fedavg", data, tmp_path / "run", rounds=2).summary["rounds"] == 2


def test_a_handler_of_the_users_own_stays(
    data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        pressing(monkeypatch, at=1, times=2)
        go("fedavg", data, tmp_path / "run", rounds=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT] * 2


# Rounds without an answer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({"fedavg", "scaffold", "fedadam", "fedupdate"} & set(registered())))
@pytest.mark.parametrize(
    "conditions",
    [{"replies": {"dropout": 1.0}}, {"availability": {"name": "random", "probability": 0.0}}],
    ids=["dropout", "nobody there"],
)
def test_a_round_in_which_nobody_answers_leaves_everything_as_it_was(
    data: ClientData, tmp_path: Path, name: str, conditions: dict[str, Any]
) -> None:
    start = go(name, data, tmp_path / "start", rounds=0)
    result = go(name, data, tmp_path / "run", rounds=3, experiment=conditions)
    assert start.w is not None
    assert result.w is not None
    assert torch.equal(result.w, start.w)
    assert [(row["round"], row["answered"]) for row in result.rounds] == [(1, 0), (2, 0), (3, 0)]
    kind = "lost" if "replies" in conditions else "unavailable"
    assert [row[kind] for row in result.rounds] == [3, 3, 3]
    assert all(row["bytes_up"] == 0 for row in result.rounds)


def test_rounds_with_and_without_answers_go_on_after_a_crash(
    data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"rounds": 8, "experiment": {"replies": {"dropout": 0.7}}}
    whole = go("scaffold", data, tmp_path / "whole", **given)
    answered = [row["answered"] for row in whole.rounds]
    assert 0 in answered
    assert max(answered) > 0
    mend = crash(monkeypatch, at=5)
    with pytest.raises(Crash):
        go("scaffold", data, tmp_path / "cut", **given)
    mend()
    assert without_seconds(resume(tmp_path / "cut", data=data)) == without_seconds(whole)


@pytest.mark.parametrize("name", ["fsvrg", "a-fsvrg", "ma-fsvrg", "ga-fsvrg", "ma-fsvrg-async", "fedgen"])
def test_a_run_that_nobody_answers_before_its_first_round_goes_on(
    data: ClientData, tmp_path: Path, name: str
) -> None:
    model = "mlp" if name == "fedgen" else "softmax"
    go(name, data, tmp_path / "run", model=model, rounds=1, experiment={"replies": {"dropout": 1.0}})
    result = resume(tmp_path / "run", data=data, rounds=2)
    assert [(row["round"], row["answered"]) for row in result.rounds] == [(1, 0), (2, 0)]


# Evaluation without training -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> tuple[Path, Path]:
    """Clients a to e as files, and a folder with two of them, which differ from the others in scale."""
    base = tmp_path_factory.mktemp("data")
    made = classification((20, 30, 25, 15, 40), shape=(6,), classes=3)
    for place, client in enumerate("abcde"):
        parts = {}
        for split in ("train", "test"):
            x, y = getattr(made, split).of(place)
            parts |= {f"{split}_x": (x * (1 + place) + 2).numpy(), f"{split}_y": y.numpy()}
        for name in ("all", "some") if client in "bd" else ("all",):
            (base / name).mkdir(exist_ok=True)
            np.savez(base / name / f"{client}.npz", **parts)
    return base / "all", base / "some"


def run_on(folder: Path, name: str, out: Path, **given: Any) -> Result:
    mapping = {"algorithm": name, "data": {"path": str(folder), "validation": 0.2}, "rounds": 3}
    small = {"model": {"name": "mlp", "hidden": 4}, "engine": {"name": "loop"}, "checkpoint": {"every": 9}}
    return execute(from_mapping({**mapping, **small, **given}), out=out)


@pytest.mark.parametrize("name", ["fedavg", "fedupdate", "separate", "scaffold"])
def test_on_its_own_clients_a_run_evaluates_to_its_summary(
    folders: tuple[Path, Path], name: str, tmp_path: Path
) -> None:
    result = run_on(folders[0], name, tmp_path / "run")
    before = contents(tmp_path / "run")
    for data in (None, folders[0]):  # the same clients given again are the same clients
        again = evaluate_run(tmp_path / "run", data=data)
        assert again["last"] == result.summary["last"]
        assert (again["newcomers"], again["rounds"], again["clients"]) == (False, 3, 5)
    assert contents(tmp_path / "run") == before


def test_newcomers_are_measured_with_the_shared_model_and_the_runs_own_scale(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Two of the clients, as if they were new: each has the result it had in the run."""
    result = run_on(folders[0], "fedavg", tmp_path / "run")
    new = evaluate_run(tmp_path / "run", data=folders[1])
    rows = result.clients
    two = [place for place, (round, client) in enumerate(zip(rows["round"], rows["client"], strict=True))
           if round == 3 and client in "bd"]  # fmt: skip
    for score in ("accuracy", "loss"):
        expected = np.mean([rows[f"shared_local_{score}"][place] for place in two])
        assert new["last"]["shared_local"][score] == pytest.approx(expected, rel=1e-6)
    assert (new["newcomers"], new["clients"]) == (True, 2)


def test_newcomers_get_what_the_method_gives_to_a_client_that_never_trained(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Alone, a newcomer has the initial model; under FedUpdate it fine-tunes the shared one."""
    separate = run_on(folders[0], "separate", tmp_path / "separate")
    start = run_on(folders[0], "separate", tmp_path / "start", rounds=0)
    new = evaluate_run(tmp_path / "separate", data=folders[1])["accuracy"]["personal_local"]
    initial = [start.clients["personal_local_accuracy"][place] for place in (1, 3)]
    assert new == pytest.approx(np.mean(initial))
    assert new != separate.summary["accuracy"]["personal_local"]
    run_on(folders[0], "fedupdate", tmp_path / "still", hyper={"finetune_lr": 0.0})
    still = evaluate_run(tmp_path / "still", data=folders[1])["last"]
    assert still["personal_local"] == still["shared_local"]  # fine-tuning that goes nowhere
    run_on(folders[0], "fedupdate", tmp_path / "tuned", hyper={"finetune_lr": 0.05})
    tuned = evaluate_run(tmp_path / "tuned", data=folders[1])["last"]
    assert tuned["personal_local"]["loss"] < tuned["shared_local"]["loss"]


def test_a_partition_gives_newcomers_too(tmp_path: Path) -> None:
    words: dict[str, Any] = {
        "data": {"clients": 4},
        "rounds": 1,
        "model": {"name": "softmax"},
        "engine": {"name": "loop"},
    }
    result = execute(from_mapping(words), out=tmp_path / "run")
    make_partition(load_source("digits"), "iid", clients=2, seed=9).save(tmp_path / "new.npz")
    shown = cli.invoke(
        app, ["evaluate", str(tmp_path / "run"), "--partition", str(tmp_path / "new.npz"), "--json"]
    )
    assert shown.exit_code == 0, shown.output
    new = json.loads(shown.stdout)
    assert (new["newcomers"], new["clients"], new["data"]) == (True, 2, "digits")
    assert new["partition_hash"] != result.summary["partition_hash"]
    same, before = new["last"]["shared_pooled"], result.summary["last"]["shared_pooled"]
    assert same.pop("loss") == pytest.approx(before.pop("loss"), rel=1e-6)  # added up in another order
    assert same == before  # the same test set
    table = cli.invoke(app, ["evaluate", str(tmp_path / "run")]).stdout
    assert "digits: 4 clients after round 1" in table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (5,)}, r"newcomers: samples of shape \[5\], the run's have shape \[6\]"),
        ({"classes": 4}, "newcomers: 4 classes, the run's model knows 3"),
    ],
)
def test_newcomers_that_do_not_fit_the_model_are_refused(
    data: ClientData, folders: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    run_on(folders[0], "fedavg", tmp_path / "run", rounds=1)
    shape, classes = change.get("shape", (6,)), change.get("classes", 3)
    with pytest.raises(SettingError, match=message):
        evaluate_run(tmp_path / "run", data=classification((5, 6), shape=shape, classes=classes))


def test_nothing_to_evaluate_is_told(
    data: ClientData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(monkeypatch, at=1)
    with pytest.raises(Crash):
        go("fedavg", data, tmp_path / "run", rounds=2)
    with pytest.raises(SartorError, match="has no checkpoint to evaluate"):
        evaluate_run(tmp_path / "run", data=data)
    wrong = cli.invoke(app, ["evaluate", str(tmp_path / "run"), "--data", "a", "--partition", "b"])
    assert (wrong.exit_code, wrong.stderr) == (2, "sartor: give --data or --partition, not both\n")


# Cost before the run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "patience"),
    [("fedavg", 100.0), ("fedavg", 0.0), ("scaffold", 0.0), ("separate", 0.0), ("mimesvrg", 0.0)],
)
def test_the_bytes_foretold_are_the_bytes_sent(
    name: str, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sartor.runs.cost.PATIENCE", patience)
    words: dict[str, Any] = {
        "algorithm": name,
        "data": {"clients": 12},
        "model": {"name": "softmax"},
        "rounds": 2,
    }
    words["engine"] = {"name": "loop"}
    experiment = from_mapping({**words, "cohort": {"count": 6}, "local": {"epochs": 2, "batch": 16}})
    cost = estimate(experiment)
    result = execute(experiment, store=False)
    assert (cost["bytes"]["down"], cost["bytes"]["up"]) == (
        result.summary["bytes_down"],
        result.summary["bytes_up"],
    )
    assert cost["measured_clients"] == (12 if patience else 8)
    assert (cost["clients"], cost["cohort"], cost["parameters"]) == (12, 6, result.summary["parameters"])
    steps = [2 * math.ceil(n / 16) for n in result.clients["n_train"][:12]]
    assert cost["steps_per_client"] == {"least": min(steps), "mean": np.mean(steps), "most": max(steps)}
    own = {"scaffold": 1, "separate": 1}.get(name, 0)
    assert cost["memory"]["client_states"] == 12 * own * 4 * cost["parameters"]
    assert cost["seconds"] > 0


@pytest.mark.parametrize(
    ("long", "patience", "rounds"),
    [(100.0, 100.0, [1, 2, 3, 4, 5, 6]), (100.0, 0.0, [1, 2]), (0.0, 100.0, [1])],
    ids=["until no quicker", "until patience ends", "long rounds once"],
)
def test_rounds_are_measured_until_they_become_no_quicker(
    long: float, patience: float, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that compile and capture; long ones on a CPU, and such as take all patience, fewer times."""
    monkeypatch.setattr("sartor.runs.cost.LONG", long)
    monkeypatch.setattr("sartor.runs.cost.PATIENCE", patience)
    played, play = [], FedAvg.round

    def told(self: FedAvg, server: Any, federation: Federation, cohort: Any) -> Any:
        played.append(federation.round)
        time.sleep({1: 1.6, 2: 0.8, 3: 0.8}.get(federation.round, 0.3))
        return play(self, server, federation, cohort)

    monkeypatch.setattr(FedAvg, "round", told)
    cost = estimate(from_mapping({"data": {"clients": 2}, "engine": {"name": "loop"}, "rounds": 3}))
    assert played == rounds
    least = {6: 0.3, 2: 0.8, 1: 1.6}[len(rounds)]
    assert least <= cost["seconds_per_round"] < 2 * least
    assert cost["bytes"]["down"] == 3 * 2 * 4 * cost["parameters"]
    assert cost["seconds"] > 0


@pytest.mark.parametrize("afforded", [0.0, 100.0], ids=["drawn out", "played whole"])
@pytest.mark.parametrize(
    ("local", "part"), [({"epochs": 4}, 4), ({"epochs": 20}, 13), ({"steps": 250}, 200), ({"steps": 90}, 90)]
)
def test_of_long_rounds_a_part_is_played(
    local: dict[str, int], part: int, afforded: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And drawn out, unless all of it will not take too long: 30 samples by two are 15 steps of an epoch."""
    monkeypatch.setattr(costs, "AFFORDED", afforded)
    seen: set[int] = set()

    def told(self: FedAvg, server: Any, federation: Federation, cohort: Any) -> Any:
        seen.add(getattr(federation.settings.local, *local))
        time.sleep(0.05)
        return server

    monkeypatch.setattr(FedAvg, "round", told)
    words = {"rounds": 3, "model": {"name": "softmax"}, "engine": {"name": "loop"}}
    experiment = from_mapping({**words, "local": {"batch": 2, **local}})
    cost = estimate(experiment, data=classification((30, 24)))
    (whole,) = local.values()
    assert seen == ({part, whole} if afforded else {part})
    played = max(seen)
    assert cost["steps_per_client"]["most"] == local.get("steps", 15 * whole)
    assert 0.05 <= cost["seconds_per_round"] * played / whole < 0.1


@pytest.mark.parametrize(
    ("device", "counts"), [("cpu", [(2, 1), (8, 2), (32, 6), (40, 8)]), ("cuda", [(16, 8), (40, 8)])]
)
def test_a_gpu_is_measured_with_the_whole_cohort(
    device: str, counts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each number of clients is captured anew, and a few take as long as many."""
    played: list[tuple[int, int]] = []

    def play(setup: Setup, count: int, share: int) -> tuple[int, int]:
        played.append((count, share))
        return count, share

    monkeypatch.setattr(costs, "AT_ONCE", 16)
    monkeypatch.setattr(costs, "_play", play)
    setup = set_up(from_mapping({"data": {"clients": 40}, "model": {"name": "softmax"}}))
    engine = dataclasses.replace(setup.experiment.engine, device=device)
    experiment = dataclasses.replace(setup.experiment, engine=engine)
    costs._measure(dataclasses.replace(setup, experiment=experiment), 8)
    assert played == counts


def test_a_server_that_keeps_something_for_every_client_is_drawn_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server's state of FedAvg with N more rows: on a line through what a few clients showed."""
    monkeypatch.setattr("sartor.runs.cost.PATIENCE", 0.0)

    @dataclasses.dataclass(frozen=True)
    class Rows:
        w: Tensor
        rows: Tensor

    def start(self: FedAvg, federation: Federation) -> Rows:
        return Rows(federation.task.initial(), torch.zeros(federation.clients, 10))

    monkeypatch.setattr(FedAvg, "start", start)
    monkeypatch.setattr(FedAvg, "quadratic", True)
    cost = estimate(from_mapping({"data": {"clients": 15}, "engine": {"name": "loop"}}))
    assert cost["memory"]["server"] == 4 * (cost["parameters"] + 15 * 10)
    assert cost["quadratic"]


def test_a_dry_run_prints_the_cost_and_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "run",
        "fedavg",
        "--clients",
        "3",
        "--rounds",
        "4",
        "model.name=softmax",
        "--engine=loop",
        "--dry-run",
    ]
    shown = cli.invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "3, of them 3 in a round" in shown.stdout
    assert "softmax, 650 parameters" in shown.stdout
    assert "7.8 kB per round, 31.2 kB in all" in shown.stdout  # 3 clients, 650 numbers of 4 bytes
    as_json = json.loads(cli.invoke(app, [*words, "--json"]).stdout)
    assert as_json["bytes"] == {"down": 31_200, "up": 31_200}
    assert not list(tmp_path.iterdir())
    wrong = cli.invoke(app, ["run", "fedavg", "data.clients=0", "--dry-run"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")


def test_help_of_the_new_commands_imports_nothing_heavy() -> None:
    code = (
        "import sys; from sartor.commands.main import app\n"
        "try: app(['resume', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "sys.exit(', '.join({'torch', 'numpy', 'pyarrow'} & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shutil.which("sartor") is None or "--rounds" in done.stdout
