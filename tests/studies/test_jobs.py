"""Runs of an entry that several processes make at once: the numbers of one, whatever happens to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sartor.studies.reproduction import Reproduction, reproduce

FEW: dict[str, Any] = {
    "methods": ["fedavg", "fedprox"],
    "columns": ["5"],
    "seeds": 2,
    "settings": {"rounds": 3, "data": {"clients": 6}, "partition": {"name": "iid"}},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def comfed(out: str, **more: Any) -> Reproduction:
    return reproduce("comfed/table4", **{**FEW, "out": out, **more})


def without_times(value: Any) -> Any:
    """What is stored, but for what it took."""
    if isinstance(value, dict):
        return {key: without_times(each) for key, each in value.items() if key != "seconds"}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def stored(file: Path) -> Any:
    return without_times(json.loads(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("together", ["no", "yes"])
def test_two_processes_give_the_numbers_of_one(together: str) -> None:
    one, two = (comfed(f"{jobs}", jobs=jobs, together=together) for jobs in (1, 2))
    assert without_times(two.to_mapping()) == without_times(one.to_mapping())
    files = [path.relative_to("1") for path in Path("1").rglob("*.json")]
    assert len([path for path in files if path.name == "comparison.json"]) == 1
    for path in files:
        if path.name in ("comparison.json", "reproduction.json"):
            assert stored(Path("2", path)) == stored(Path("1", path))
