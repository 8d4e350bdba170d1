"""Run folders: what is written can be read back, nothing is overwritten, and damage is named."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_processes import Nursery
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import PATIENCE, process
from sartor.algorithms.source import method_code
from sartor.data.partitions import Partition, make_partition
from sartor.errors import SartorError
from sartor.runs.experiment import fingerprint, from_mapping, to_mapping
from sartor.runs.record import FILES, RunFolder, environment, to_json

EXPERIMENT = from_mapping({"rounds": 2, "seed": 7, "data": {"clients": 3}})


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", EXPERIMENT)


def test_a_whole_run_reads_back_as_written(tmp_path: Path) -> None:
    partition = make_partition(np.arange(60) % 3, "iid", clients=3, seed=1)
    rounds = [{"round": 1, "loss": 0.5, "bytes": 10}, {"round": 2, "loss": 0.25, "bytes": 20}]
    with RunFolder.create(tmp_path / "a" / "run", EXPERIMENT, signature={"x": [2]}) as run:
        run.write_partition(partition)
        for row in rounds:
            run.add_round(row)
            clients = {"round": row["round"], "client": ["x", "y"], "accuracy": torch.tensor([0.5, 1.0])}
            run.add_clients(clients)
        run.write_models({"server": torch.arange(4.0), "personal": torch.arange(6.0).view(2, 3)})
        run.write_summary({"accuracy": 0.75})
    again = RunFolder.open(tmp_path / "a" / "run")
    assert again.experiment == EXPERIMENT
    assert again.config == to_mapping(EXPERIMENT)
    assert again.rounds == rounds
    assert again.clients == {
        "round": [1, 1, 2, 2],
        "client": ["x", "y", "x", "y"],
        "accuracy": [0.5, 1.0, 0.5, 1.0],
    }
    assert again.summary == {"accuracy": 0.75}
    assert again.signature == {"x": [2]}
    assert again.finished
    assert torch.equal(again.models["personal"], torch.arange(6.0).view(2, 3))
    assert Partition.load(again.path / "partition.npz").hash == partition.hash
    assert sorted(os.listdir(again.path)) == sorted(FILES)


def test_the_environment_names_what_numbers_depend_on(run: RunFolder) -> None:
    stored = run.environment
    assert stored["torch"] == torch.__version__
    assert stored["numpy"] == np.__version__
    assert stored["python"] == sys.version.split()[0]
    assert stored["device"] == "cpu"
    assert stored["device_name"]
    assert stored["method"] == method_code("fedavg")
    assert {*environment(), "method", "imports", "experiment"} == set(stored)


# -- which folder --------------------------------------------------------------------------------------


def test_default_folders_are_named_by_the_experiment_and_never_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [RunFolder.create(None, EXPERIMENT).path.name for _ in range(3)]
    first = f"fedavg-digits-s7-{fingerprint(EXPERIMENT)[:8]}"
    assert names == [first, f"{first}-2", f"{first}-3"]
    assert sorted(os.listdir("runs")) == sorted(names)
    own = from_mapping({"data": {"path": "my data/table.csv"}})
    assert RunFolder.create(None, own).path.name.startswith("fedavg-table-s0-")


def test_a_folder_with_a_run_is_refused_and_left_alone(run: RunFolder) -> None:
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    with pytest.raises(SartorError, match=r"already holds a run \(config\.toml\); give another folder"):
        RunFolder.create(run.path, from_mapping({"rounds": 9}))
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before


def test_a_folder_without_a_run_is_used_and_its_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder.create(tmp_path, EXPERIMENT)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_path_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SartorError, match="is a file"):
        RunFolder.create(tmp_path / "file", EXPERIMENT)
    with pytest.raises(SartorError, match="cannot be written"):
        RunFolder.create(tmp_path / "file" / "run", EXPERIMENT)


@pytest.mark.slow
def test_of_two_runs_that_want_one_folder_one_gets_it(tmp_path: Path) -> None:
    nursery = Nursery(tmp_path)
    words = ("run", "fedavg", "--rounds", 1, "--clients", 2, "--out", tmp_path / "run")
    runs = [nursery.start(*words) for _ in range(3)]
    ended = sorted(run.wait() for run in runs)
    nursery.close()
    assert ended == [0, 2, 2], [run.output for run in runs]


def test_a_folder_taken_in_the_very_last_moment_is_refused(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter((None, "config.toml"))  # as if the other run came just after the first look
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "_held", lambda run: next(looks))
        with pytest.raises(SartorError, match="already holds a run"):
            RunFolder.create(run.path, from_mapping({"rounds": 9}))
    assert run.experiment == EXPERIMENT


# -- rows ----------------------------------------------------------------------------------------------


def test_a_round_is_in_the_file_at_once(run: RunFolder) -> None:
    run.add_round({"round": 1})
    (line,) = (run.path / "rounds.jsonl").read_text().splitlines()
    assert json.loads(line) == {"round": 1, "seal": line[-16:-2]}
    assert RunFolder.open(run.path).rounds == [{"round": 1}]


def test_a_line_cut_off_by_a_crash_is_left_out(run: RunFolder) -> None:
    run.add_round({"round": 1})
    with open(run.path / "rounds.jsonl", "a") as file:
        file.write('{"round": 2, "lo')
    assert RunFolder.open(run.path).rounds == [{"round": 1}]


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(plain)
def test_json_is_strict_one_line_and_holds_all_but_non_finite_numbers(value: Any) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    def finite(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, list):
            return [finite(entry) for entry in value]
        return {key: finite(entry) for key, entry in value.items()} if isinstance(value, dict) else value

    text = to_json(value)
    assert "\n" not in text
    assert json.loads(text, parse_constant=refuse) == finite(value)


def test_json_takes_arrays_and_tensors() -> None:
    given_value = {
        "a": np.float32(0.5),
        "b": np.array([1, 2]),
        "c": torch.tensor([1.0, math.inf]),
        3: (Path("x"),),
    }
    assert json.loads(to_json(given_value)) == {"a": 0.5, "b": [1, 2], "c": [1.0, None], "3": ["x"]}


def test_client_rows_of_different_columns_lie_below_each_other(run: RunFolder) -> None:
    run.add_clients({"round": 1, "client": ["a", "b"], "accuracy": [1, 0]})
    run.write_clients()
    run.add_clients({"round": 2, "client": ["a"], "accuracy": [0.5], "personal": np.array([0.25])})
    run.close()
    expected = {
        "round": [1, 1, 2],
        "client": ["a", "b", "a"],
        "accuracy": [1.0, 0.0, 0.5],
        "personal": [None, None, 0.25],
    }
    assert run.clients == expected
    assert RunFolder.open(run.path).clients == expected


def test_a_process_that_reads_client_rows_comes_to_its_end(run: RunFolder) -> None:
    """Arrow's threads had aborted about every second one, after all was done."""
    run.add_clients({"round": 1, "client": ["a"]})
    run.write_clients()
    read = f"from sartor.runs.record import RunFolder; RunFolder.open({str(run.path)!r}).clients"
    with ExitStack() as processes:
        started = [processes.enter_context(process([sys.executable, "-c", read])) for _ in range(6)]
        ends = [(each.communicate(timeout=PATIENCE)[1], each.returncode) for each in started]
    assert ends == [("", 0)] * len(started)


def test_client_columns_of_different_length_are_a_bug(run: RunFolder) -> None:
    with pytest.raises(ValueError, match="equally long"):
        run.add_clients({"client": ["a", "b"], "accuracy": [1.0]})


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_client_rows_are_kept_when_a_run_breaks_off(tmp_path: Path, error: type[BaseException]) -> None:
    def break_off() -> None:
        with RunFolder.create(tmp_path / "run", EXPERIMENT) as run:
            run.add_clients({"round": 1, "client": ["a"]})
            raise error

    with pytest.raises(error):
        break_off()
    again = RunFolder.open(tmp_path / "run")
    assert again.clients == {"round": [1], "client": ["a"]}
    assert not again.finished


def test_the_error_that_broke_off_a_run_is_the_one_shown(tmp_path: Path) -> None:
    def break_off() -> None:
        with RunFolder.create(tmp_path / "run", EXPERIMENT) as run:
            run.add_clients({"round": 1, "client": ["a"]})
            shutil.rmtree(run.path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()


def test_a_summary_is_replaced_in_one_step(run: RunFolder) -> None:
    run.write_summary({"round": 1})
    with open(run.path / "summary.json") as reader:
        run.write_summary({"round": 2})
        assert json.load(reader)["round"] == 1  # who reads meanwhile sees the old file whole
    assert run.summary == {"round": 2}


def test_views_of_one_vector_are_stored_each_for_itself(run: RunFolder) -> None:
    vector = torch.arange(12.0)
    tensors = {"all": vector, "same": vector, "head": vector[8:], "matrix": vector.view(3, 4).T}
    run.write_models(tensors)
    stored = RunFolder.open(run.path).models
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


# -- trouble -------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_clear_error(run: RunFolder) -> None:
    (run.path / "rounds.jsonl").symlink_to("/dev/full")
    with pytest.raises(SartorError, match=r"rounds\.jsonl: cannot be written: No space left on device"):
        run.add_round({"round": 1})


WRITERS: dict[str, Any] = {
    "summary.json": lambda run: run.write_summary({"text": "x" * 10_000}),
    "clients.arrow": lambda run: run.add_clients({"x": np.random.default_rng(0).random(10_000)}),
    "models.safetensors": lambda run: run.write_models({"w": torch.zeros(10_000)}),
    "partition.npz": lambda run: run.write_partition(make_partition(np.arange(60_000) % 7, "iid", clients=3)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_does_not_fit_leaves_the_old_one_and_nothing_else(run: RunFolder, name: str) -> None:
    resource = pytest.importorskip("resource")
    (run.path / name).write_bytes(b"old")
    before = sorted(os.listdir(run.path))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limit[1]))  # a write past this fails as on a full disk
    try:
        with pytest.raises(SartorError, match=rf"{name}: can"):
            WRITERS[name](run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (run.path / name).read_bytes() == b"old"
    assert sorted(os.listdir(run.path)) == before


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SartorError, match="no such run folder"):
        RunFolder.open(tmp_path / "nothing")
    with pytest.raises(SartorError, match=r"not a run folder, it has no config\.toml"):
        RunFolder.open(tmp_path)


def test_an_unfinished_run_says_so(run: RunFolder) -> None:
    assert (run.rounds, run.clients, run.finished) == ([], {}, False)
    with pytest.raises(SartorError, match=r"summary\.json: missing; the run has not finished"):
        _ = run.summary
    with pytest.raises(SartorError, match=r"models\.safetensors: this run has stored no models"):
        _ = run.models


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=60) | st.just(b"[" * 100_000) | st.just(b"[1]\n"))
def test_damaged_files_are_named(tmp_path_factory: Any, content: bytes) -> None:
    run = RunFolder.create(tmp_path_factory.mktemp("run"), EXPERIMENT)
    views = {
        "config.toml": "config",
        "environment.json": "environment",
        "summary.json": "summary",
        "rounds.jsonl": "rounds",
        "clients.parquet": "clients",
        "models.safetensors": "models",
    }
    for name, view in views.items():
        (run.path / name).write_bytes(content)
        try:
            getattr(RunFolder.open(run.path), view)
        except SartorError as error:
            message = str(error)
            assert name in message
            assert "\n" not in message
        (run.path / name).unlink()
        if name == "config.toml":
            (run.path / name).write_text("")
