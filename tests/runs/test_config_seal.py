"""The seal of an experiment: damaged rounds are refused, those changed by hand are not."""

from __future__ import annotations

from pathlib import Path

import pytest

import sartor
from sartor.errors import SartorError
from sartor.runs.record import SEAL_LINE, RunFolder


def test_rounds_that_were_damaged_are_refused_and_those_changed_by_hand_are_not(tmp_path: Path) -> None:
    result = sartor.run("fedavg", clients=3, rounds=2, out=tmp_path / "run", engine="loop")
    config = tmp_path / "run" / "config.toml"
    text = config.read_text()
    assert (
        sartor.run(experiment=config, store=False).summary["model_sha256"] == result.summary["model_sha256"]
    )
    config.write_text(text.replace("rounds = 2", "rounds = 6"))
    with pytest.raises(SartorError, match=r"config\.toml: is not what was written"):
        sartor.resume(tmp_path / "run")
    config.write_text(text.partition(SEAL_LINE)[0].replace("rounds = 2", "rounds = 3"))
    assert RunFolder.open(tmp_path / "run").experiment.rounds == 3
    config.write_text(text)
    assert len(sartor.resume(tmp_path / "run", rounds=4).rounds) == 4
    assert config.read_text().count("crc32:") == 1
    assert RunFolder.open(tmp_path / "run").experiment.rounds == 4
