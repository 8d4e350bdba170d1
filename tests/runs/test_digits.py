"""Numbers keep all their digits from a table to a model in double precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sartor.runs.inputs import gather
from sartor.runs.setup import set_up

BASE = 123_456_789.0
"""A number that float32 cannot tell from the next ones."""


def table(path: Path, targets: Sequence[float]) -> Path:
    rows = [f"{'ab'[row % 2]},{BASE + row / 7!r},{row},{y!r}" for row, y in enumerate(targets)]
    path.write_text("site,far,near,y\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("schema", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_a_table_is_read_in_full(tmp_path: Path, schema: bool, normalise: bool) -> None:
    path = table(tmp_path / "t.csv", [row % 2 for row in range(20)])
    said: dict[str, Any] = {"normalise": normalise}
    columns: dict[str, Any] = {}
    if schema:
        scale = "standard" if normalise else "none"
        columns = {"far": {"scale": scale}, "near": {"scale": scale}, "site": "client", "y": "label"}
        said = {"normalise": False}
    else:
        said |= {"client_column": "site", "label_column": "y"}
    double = {"local": {"precision": "float64"}, "data": said}
    given = gather({"data": str(path), "columns": columns, "experiment": double}).inputs()
    data = set_up(given.experiment, data=given.data, task=given.task).data
    assert data.train.x.dtype == torch.float64
    x = torch.cat([data.train.x, data.test.x]).numpy()[:, 0]
    expected = BASE + np.arange(20) / 7
    if not normalise:
        assert np.array_equal(np.sort(x), expected)
    else:  # the rows stay equally far apart
        steps = np.diff(np.sort(x))
        assert steps == pytest.approx(steps.mean(), rel=1e-6)


def test_targets_and_whole_numbers_too(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [row / 3 for row in range(20)])
    columns = {"far": "number", "near": "out", "site": "client", "y": "label"}
    given = gather(
        {"data": str(path), "columns": columns, "objective": "regression", "local": {"precision": "float64"}},
        "fedavg",
    ).inputs()
    data = set_up(given.experiment, data=given.data, task=given.task).data
    y = torch.cat([data.train.y, data.test.y]).sort().values
    assert torch.equal(y, torch.arange(20, dtype=torch.float64) / 3)
    whole = 2**30 + torch.arange(20)[:, None].expand(20, 3)
    given = gather({"data": {"a": (whole, torch.arange(20) % 2)}, "local": {"precision": "float64"}}).inputs()
    data = set_up(given.experiment, data=given.data, task=given.task).data
    assert torch.equal(torch.cat([data.train.x, data.test.x])[:, 0].sort().values.long(), whole[:, 0])
    again = data.preprocessing.transform(whole[:5])
    assert again.dtype == torch.float64
    assert torch.equal(again.long(), whole[:5])
