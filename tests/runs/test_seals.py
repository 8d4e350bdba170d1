"""Records that cannot lie: a run whose files were damaged is made again, or refused by the file's name."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import sartor
from sartor.errors import SartorError
from sartor.runs.checkpoint import paths
from sartor.runs.experiment import from_mapping
from sartor.runs.record import BEGINNING, RunFolder
from sartor.runs.resume import resume
from sartor.runs.seals import is_whole, sealed

SETTINGS: dict[str, Any] = {
    "data": "digits",
    "model": "softmax",
    "clients": 3,
    "rounds": 6,
    "evaluate": {"every": 2},
    "checkpoint": {"every": 3},
    "engine": {"name": "loop"},
}


def numbers(folder: Path) -> tuple[Any, ...]:
    run = RunFolder.open(folder)
    rows = [{key: value for key, value in row.items() if "seconds" not in key} for row in run.rounds]
    return rows, run.clients, run.summary["model_sha256"]


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was killed after round 5, whose last checkpoint is that of round 3."""
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "close", lambda run: None)  # a killed process closes nothing
        patch.setattr(RunFolder, "write_summary", lambda run, summary: None)
        patch.setattr(RunFolder, "write_models", lambda run, models: None)
        sartor.run("fedavg", out=folder, **SETTINGS)
    lines = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_bytes(b"".join(lines[:5]))
    paths(RunFolder.open(folder))[0].unlink()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    sartor.run("fedavg", out=folder, **SETTINGS)
    return folder


def flips(content: bytes, count: int) -> list[bytes]:
    """The content with one bit turned over, at places spread over all of it."""
    chance = random.Random(len(content))
    changed = []
    for _ in range(count):
        damaged = bytearray(content)
        damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        changed.append(bytes(damaged))
    return changed


@pytest.mark.parametrize("first", [False, True])
def test_a_seal_fits_what_was_sealed_and_nothing_else(first: bool) -> None:
    content = sealed(b"crc32:00000000 some words crc32:00000000", first=first)
    assert content.count(b"crc32:00000000") == 1
    assert is_whole(content, first=first)
    for place in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        assert not is_whole(bytes(damaged), first=first)
    with pytest.raises(ValueError, match="no blank seal"):
        sealed(b"nothing")


@pytest.mark.parametrize("name", ["rounds.jsonl", "clients.arrow"])
def test_damage_to_an_interrupted_run_is_cut_off_or_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = interrupted(tmp_path / "cut", monkeypatch)
    content, run = (cut / name).read_bytes(), RunFolder.open(cut)
    expected = [row for row in run.rounds if row["round"] <= 3], {k: v[:3] for k, v in run.clients.items()}
    ends = [content[: len(content) * part // 9] for part in range(9)]
    refused = []
    for number, damaged in enumerate([*flips(content, 60), *ends, content + b"\0" * 40]):
        run = RunFolder.open(shutil.copytree(cut, tmp_path / str(number)))
        (run.path / name).write_bytes(damaged)
        try:
            run.cut(3)
        except SartorError as error:
            refused.append(str(error).replace(str(run.path), ""))
        else:
            assert (run.rounds, run.clients) == expected
    assert 10 < len(refused) < 60
    assert all(message.startswith(f"/{name}: the row") for message in refused)


def test_what_is_damaged_after_the_checkpoint_is_made_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = interrupted(tmp_path / "cut", monkeypatch)
    lines = (cut / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"cohort": 3', b'"cohort": 2')
    (cut / "rounds.jsonl").write_bytes(b"".join(lines))
    content = bytearray((cut / "clients.arrow").read_bytes())
    content[len(content) // 2] ^= 1  # in the rows of round 4, the second of three
    (cut / "clients.arrow").write_bytes(bytes(content))
    resume(cut)
    assert numbers(cut) == numbers(whole)


@pytest.mark.parametrize(
    ("name", "view"),
    [("rounds.jsonl", "rounds"), ("clients.parquet", "clients"), ("summary.json", "summary")],
)
def test_every_damaged_bit_of_a_finished_run_is_noticed(
    whole: Path, tmp_path: Path, name: str, view: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    for damaged in flips((whole / name).read_bytes(), 100):
        (folder / name).write_bytes(damaged)
        with pytest.raises(SartorError, match=name):
            getattr(RunFolder.open(folder), view)


def test_every_damaged_bit_of_growing_rows_is_noticed(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", from_mapping({}))
    for round in (1, 2):
        run.add_round({"round": round, "evaluation": {}})
        run.add_clients({"round": round, "client": ["a", "b"], "accuracy": [0.5, None]})
    path = tmp_path / "run" / "clients.arrow"
    for damaged in flips(path.read_bytes(), 400):
        path.write_bytes(damaged)
        with pytest.raises(
            SartorError, match=r"clients\.arrow: the rows of round [12] are missing or damaged"
        ):
            _ = run.clients


def test_models_are_those_of_the_summary(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    content = bytearray((folder / "models.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "models.safetensors").write_bytes(bytes(content))
    with pytest.raises(
        SartorError, match=r"models\.safetensors: damaged, its checksum is not that of summary"
    ):
        _ = RunFolder.open(folder).models


def test_rows_cut_off_a_finished_run_are_missed(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    lines = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(SartorError, match=r"rounds\.jsonl: its last rows are missing"):
        _ = RunFolder.open(folder).rounds


def test_a_changed_setting_is_noticed_before_the_first_checkpoint(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    (folder / "summary.json").unlink()
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("batch = 32", "batch = 36"))
    with pytest.raises(
        SartorError, match=r"config\.toml: is not the experiment that the run was started with"
    ):
        resume(folder)


def test_records_are_read_with_other_tools_as_ever(whole: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (whole / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["seal"].startswith("crc32:") for row in rows)
    table = pyarrow.parquet.read_table(whole / "clients.parquet")
    assert table.to_pydict() == RunFolder.open(whole).clients
    run = RunFolder.create(tmp_path / "run", from_mapping({}))
    run.add_clients({"round": 1, "client": ["a", "b"]})
    with pyarrow.ipc.open_stream(tmp_path / "run" / "clients.arrow") as stream:
        assert stream.read_all().to_pydict() == {"round": [1, 1], "client": ["a", "b"]}


# -- a run that was killed before it began -------------------------------------------------------------


def test_a_run_killed_at_any_moment_of_its_beginning_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    usual = RunFolder._store
    for files in range(4):
        folder, left = tmp_path / str(files), iter(range(files))

        def store(run: RunFolder, name: str, content: bytes, left: Any = left) -> None:
            if next(left, None) is None:
                raise Killed
            usual(run, name, content)

        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "_store", store)
            with pytest.raises(Killed):
                sartor.run("fedavg", out=folder, **SETTINGS)
        if files < 3:
            assert (folder / BEGINNING).exists()
            with pytest.raises(SartorError, match="its run was stopped before it began; start it again"):
                resume(folder)
            sartor.run("fedavg", out=folder, **SETTINGS)
        else:  # the experiment is written: it has begun
            resume(folder)
        assert RunFolder.open(folder).finished
        assert not (folder / BEGINNING).exists()


def test_a_default_folder_whose_run_never_began_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = from_mapping({})
    first = RunFolder.create(None, experiment).path
    (first / "config.toml").rename(first / BEGINNING)
    assert RunFolder.create(None, experiment).path == first
    assert RunFolder.create(None, experiment).path != first


def test_files_of_somebody_else_are_no_beginning(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text("{}")
    with pytest.raises(SartorError, match=r"already holds a run \(environment\.json\)"):
        RunFolder.create(tmp_path, from_mapping({}))
