"""The example of five hospitals runs as it stands, and deployed it is to the bit what was simulated."""

from __future__ import annotations

import csv
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flower_processes import Nursery, free_port
from safetensors.torch import load_file
from typer.testing import CliRunner

from sartor.commands.main import app
from sartor.data.schema import settles
from sartor.runs.experiment import load
from sartor.runs.record import RunFolder

HOSPITALS = Path(__file__).parents[2] / "examples" / "hospitals"
MADE_BY_SHELL = {"set", "cd"}


@pytest.fixture
def nursery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nursery]:
    pytest.importorskip("flwr")
    place = tmp_path / "hospitals"
    shutil.copytree(HOSPITALS, place)
    monkeypatch.chdir(place)
    nursery = Nursery(place)
    yield nursery
    nursery.close()


def commands() -> Iterator[tuple[list[str], bool]]:
    """The words of each command of the script, and whether it goes on beside the next."""
    port = str(free_port())
    for line in (HOSPITALS / "run.sh").read_text(encoding="utf-8").splitlines():
        words = shlex.split(line.replace("18080", port), comments=True)
        if words and words[0] not in MADE_BY_SHELL:
            yield (words[:-1], True) if words[-1] == "&" else (words, False)


@pytest.mark.slow
def test_the_example_runs_and_nodes_do_what_was_simulated(nursery: Nursery) -> None:
    said = {}
    for words, beside in commands():
        if words[0] == "python":
            runpy.run_path(words[1], run_name="__main__")
        elif words == ["wait"]:
            for child in nursery.children:
                assert child.wait() == 0, child.output
        elif beside:
            nursery.start(*words[1:])
        else:
            done = CliRunner().invoke(app, words[1:], prog_name="sartor")
            assert done.exit_code == 0, f"{words}\n{done.stderr}\n{done.exception}"
            said[words[1]] = done.stdout
    simulated, deployed = (
        load_file(f"{run}/models.safetensors")["server.w"] for run in ("simulated", "deployed")
    )
    assert torch.equal(simulated, deployed)
    headlines = {RunFolder.open(run).summary["headline"] for run in ("simulated", "deployed")}
    assert headlines == {"balanced_accuracy"}
    columns = [RunFolder.open(run).experiment.columns for run in ("simulated", "deployed")]
    assert columns[0] == columns[1]
    assert settles(load("experiment.toml").columns, columns[0])
    for found in ("has 3 rows", "every row is 'well'", "missing", "left out"):
        assert found in said["data"]
    assert "which no other client has" not in said["data"]  # words for a sex are made the same
    assert (
        "age (how many values, their sum, that of their squares, how many lie in each cell" in said["audit"]
    )
    with open("scored.csv", newline="") as file:
        scored = list(csv.DictReader(file))
    assert len(scored) == 8
    assert {row["prediction"] for row in scored} <= {"well", "ill"}
    for row in scored:
        assert float(row["probability_well"]) + float(row["probability_ill"]) == pytest.approx(1, abs=1e-5)
