"""What Python and the command line do with the same words is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import sartor
from owned import forgetful
from sartor.commands.main import app
from sartor.data import from_table, prepare

__all__ = ["forgetful"]
pytestmark = pytest.mark.usefixtures("forgetful")

COMMON: dict[str, Any] = {"engine": {"name": "loop"}, "model": {"name": "softmax"}, "local": {"batch": 4}}
CODE = """
import numpy as np

def load():
    random = np.random.default_rng(0)
    return {name: (50 + 9 * random.normal(size=(12, 3)), np.arange(12) % 2) for name in ("a", "b")}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    rows = ["site,part,age,dose,other,ill,cost"]
    for row in range(24):
        part = ("train", "train", "test")[row // 2 % 3]
        numbers = random.normal([60, 1, 0], [10, 0.2, 1]).tolist()
        rows.append(",".join(map(str, ["ab"[row % 2], part, *numbers, row // 2 % 2, numbers[0] / 3])))
    Path("t.csv").write_text("\n".join(rows) + "\n")
    Path("mine.py").write_text(CODE)


def said(*words: str) -> Tensor:
    """What the command line leaves."""
    out = f"said-{len(list(Path().iterdir()))}"
    common = ["engine.name=loop", "model.name=softmax", "local.batch=4", "--rounds", "2", "--out", out]
    outcome = CliRunner().invoke(app, ["run", "fedavg", *words, *common])
    assert outcome.exit_code == 0, outcome.output
    return load_file(f"{out}/models.safetensors")["server.w"]


def done(data: Any, objective: Any = None, **settings: Any) -> Tensor:
    """What Python leaves."""
    given: Any = {**COMMON, "data": settings}
    result = sartor.run("fedavg", data=data, objective=objective, experiment=given, rounds=2, store=False)
    assert result.w is not None
    return result.w


TABLE = {"client_column": "site", "label_column": "ill", "feature_columns": ["age", "dose"]}
SAID = ["data.path=t.csv", "data.client_column=site", "data.feature_columns=['age','dose']"]


@pytest.mark.parametrize("normalise", [None, False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_table(normalise: bool | None, split: bool) -> None:
    more: dict[str, Any] = {"split_column": "part"} if split else {}
    words = [f"data.{key}={value}" for key, value in more.items()]
    stated = {} if normalise is None else {"normalise": normalise}
    words += [f"data.{key}={str(value).lower()}" for key, value in stated.items()]
    expected = said(*SAID, "data.label_column=ill", *words)
    assert torch.equal(done("t.csv", **TABLE, **more, **stated), expected)
    assert torch.equal(done(None, path="t.csv", **TABLE, **more, **stated), expected)
    # As an object it is taken as it is, unless the same is said of it.
    table = from_table("t.csv", "site", "ill", ["age", "dose"], **more)
    assert torch.equal(done(table, normalise=normalise is not False), expected)
    assert torch.equal(done(table), done(table, normalise=False))
    ready = prepare(table, normalise=normalise is not False)
    assert torch.equal(done(ready), expected)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_function(normalise: bool) -> None:
    expected = said("data.path=mine.py:load", f"data.normalise={str(normalise).lower()}")
    assert torch.equal(done("mine.py:load", normalise=normalise), expected)
    scope: dict[str, Any] = {}
    exec(CODE, scope)
    assert torch.equal(done(scope["load"](), normalise=normalise), expected)


def test_a_regression() -> None:
    expected = said(*SAID, "data.label_column=cost", "objective.name=regression", "objective.loss=huber")
    columns = {**TABLE, "label_column": "cost"}
    found = done("t.csv", {"name": "regression", "loss": "huber"}, **columns)
    assert torch.equal(found, expected)


def test_a_schema() -> None:
    columns = {"age": "number", "site": "client", "ill": "label", "part": "split", "dose": "weight"}
    words = [f"columns.{name}={kind}" for name, kind in columns.items()]
    expected = said("data.path=t.csv", *words)
    given: Any = {"data": "t.csv", "columns": columns, "experiment": COMMON}
    result = sartor.run("fedavg", **given, rounds=2, store=False)
    assert torch.equal(result.w, expected)  # type: ignore[arg-type]
    plain = said("data.path=t.csv", *words[:-1], "columns.dose=out")
    assert not torch.equal(plain, expected)
