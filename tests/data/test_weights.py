"""Weights of samples: a sample of weight 2 is two of them, and equal weights are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sartor
from helpers import federation_of
from sartor.client.local import Client
from sartor.data import from_clients, from_folder, from_schema, prepared
from sartor.engines.lockstep import fit_together
from sartor.engines.stacked import trace
from sartor.errors import DataError, SettingError
from sartor.federation import Reply
from sartor.model.networks import seeded
from sartor.model.task import Task
from sartor.runs.inputs import gather
from sartor.runs.setup import set_up
from sartor.runs.together import execute_together

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(12, 3, generator=GENERATOR, dtype=torch.float64), torch.arange(12) % 2
W = torch.tensor([1.0, 2, 1, 1, 3, 1, 1, 1, 1, 2, 1, 1])
TEST = (X[:4], Y[:4])


def linear() -> nn.Module:
    return seeded(lambda: nn.Linear(3, 2), 0).double()


def ran(engine: str, data: Any, method: str = "fedavg", **settings: Any) -> sartor.Result:
    given = {"local": {"batch": 0, "steps": 3}, "hyper": {"lr": 0.5}, "rounds": 2, "store": False, **settings}
    return sartor.run(method, model=linear(), data=data, engine=engine, **given)


def one(*samples: Any) -> dict[str, Any]:
    return {"train": samples, "test": TEST}


def repeated(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    times = weight.long()
    return x.repeat_interleave(times, 0), y.repeat_interleave(times, 0)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ditto", "separate"])
def test_a_weight_of_two_is_the_row_twice(engine: str, method: str) -> None:
    weighted = ran(engine, {"a": one(X, Y, 5 * W)}, method)
    twice = ran(engine, {"a": one(*repeated(X, Y, W))}, method)
    plain = ran(engine, {"a": one(X, Y)}, method)
    for key in ("w", "personal"):
        left, right, other = (getattr(result, key) for result in (weighted, twice, plain))
        if left is not None:
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)
            assert not torch.allclose(left, other, rtol=1e-4)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_equal_weights_are_none_to_the_bit(engine: str) -> None:
    settings: Any = {"local": {"batch": 5}}
    plain = ran(engine, {"a": one(X, Y), "b": one(-X, Y)}, **settings)
    equal = ran(
        engine, {"a": one(X, Y, 0.1 * torch.ones(12)), "b": one(-X, Y, 7 * torch.ones(12))}, **settings
    )
    assert torch.equal(plain.w, equal.w)  # type: ignore[arg-type]
    assert plain.summary["last"] == equal.summary["last"]
    alone = ran(engine, {"a": one(X, Y, 0.1 * torch.ones(12)), "b": one(-X, Y, W)}, "separate", **settings)
    apart = ran(engine, {"a": one(X, Y), "b": one(-X, Y)}, "separate", **settings)
    assert torch.equal(alone.personal[0], apart.personal[0])  # type: ignore[index]
    assert not torch.equal(alone.personal[1], apart.personal[1])  # type: ignore[index]


@pytest.mark.parametrize(
    "local",
    [
        {"batch": 5},
        {"batch": 5, "micro": 2},
        {"batch": 4, "optimizer": "adamw", "clip": 0.1},
        {"batch": 5, "augment": ["mix-up"]},
    ],
)
def test_engines_agree_on_weights(local: dict[str, Any]) -> None:
    data = {"a": one(X, Y, W), "b": one(-X[:7], Y[:7]), "c": one(X[3:], Y[3:], W[3:])}
    loop, stacked = (ran(engine, data, local=local).w for engine in ("loop", "stacked"))
    torch.testing.assert_close(loop, stacked, rtol=1e-10, atol=1e-12)


def test_the_gradient_is_that_of_the_weighted_mean() -> None:
    data = from_clients({"a": one(X, Y, W)})
    task = Task(linear(), classes=2)

    def asked(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(gradient=client.full_gradient(w), loss=client.loss(w), tested=client.loss(w, "test"))

    w = task.initial().requires_grad_()
    found = federation_of("loop", task, data).map(asked, [0], {"w": w.detach()})
    module = linear()
    each = nn.functional.cross_entropy(module(X), Y, reduction="none")
    loss = (each * W).sum() / W.sum()
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    expected = torch.cat([gradient.reshape(-1) for gradient in gradients])
    torch.testing.assert_close(found["gradient"][0], expected)
    torch.testing.assert_close(found["loss"][0], loss.detach())
    torch.testing.assert_close(found["tested"][0], each[:4].mean().detach())  # test rows count the same


def test_mixed_samples_count_as_theirs_do() -> None:
    """Of two samples of which one counts nothing, mix-up leaves the loss of the other in its share."""
    x, y, w = X[:2], Y[:2], torch.tensor([2.0, 0.0])
    result = ran("loop", {"a": one(x, y, w)}, local={"batch": 0, "steps": 1, "augment": ["mix-up"]}, rounds=1)
    alone = ran("loop", {"a": one(x, y)}, local={"batch": 0, "steps": 1, "augment": ["mix-up"]}, rounds=1)
    assert not torch.allclose(result.w, alone.w)  # type: ignore[arg-type]
    assert torch.isfinite(result.w).all()  # type: ignore[arg-type]


def test_weights_go_with_their_rows_and_into_the_hash() -> None:
    rows = torch.arange(20.0)[:, None] + 1
    data = from_clients({"a": (rows, Y.repeat(2)[:20], rows[:, 0]), "b": (rows, Y.repeat(2)[:20])})
    assert data.train.weight is not None
    x, n = data.train.of(0)[0][:, 0].double(), int(data.train.count[0])
    torch.testing.assert_close(data.train.weight[:n], x / x.mean())
    assert torch.equal(data.train.weight[n:], torch.ones(int(data.train.count[1]), dtype=torch.float64))
    other = from_clients({"a": (rows, Y.repeat(2)[:20]), "b": (rows, Y.repeat(2)[:20])})
    assert other.train.weight is None
    assert data.hash != other.hash
    few = data.some(np.array([1]))
    assert few.train.weight is data.train.weight


def test_weights_in_a_folder(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y, weight=W)
    np.savez(tmp_path / "b.npz", train_x=X, train_y=Y, train_weight=W, test_x=X[:4], test_y=Y[:4])
    data = from_folder(tmp_path)
    direct = from_clients({"a": (X, Y, W), "b": one(X, Y, W)})
    assert data.hash == direct.hash
    assert data.train.weight is not None


def table(path: Path, weights: Any = W) -> Path:
    rows = [f"{a},{b},{y},{w}" for (a, b, _), y, w in zip(X.tolist(), Y.tolist(), weights, strict=True)]
    path.write_text("a,b,ill,counts\n" + "\n".join(rows) + "\n")
    return path


COLUMNS = {"a": "number", "b": "number", "ill": "label", "counts": "weight"}


def test_a_column_of_weights(tmp_path: Path) -> None:
    data = prepared(from_schema(table(tmp_path / "t.csv", W.tolist()), COLUMNS))
    assert data.train.weight is not None
    assert data.train.x.shape[1] == 2  # it is no feature
    assert float(data.train.weight.mean()) == pytest.approx(1)
    with pytest.raises(DataError, match=r"column counts has no value in row 3 .* every row needs one"):
        from_schema(table(tmp_path / "t.csv", [*W.tolist()[:3], "", *W.tolist()[4:]]), COLUMNS)
    with pytest.raises(DataError, match=r"client t, train: the weight of sample 0 is -1.0; it is 0 or more"):
        from_schema(table(tmp_path / "t.csv", [-1, *W.tolist()[1:]]), COLUMNS)
    with pytest.raises(SettingError, match="two are of kind weight"):
        from_schema(tmp_path / "t.csv", {**COLUMNS, "b": "weight"})


def test_weights_that_cannot_be_are_one_message() -> None:
    for weight, message in (
        (W[:-1], r"client a, train: weight has shape \(11,\), expected one for 12 samples"),
        (W * torch.nan, "client a, train: the weight of sample 0 is nan"),
        (0 * W, "client a, train: all weights are 0; leave the client out"),
        (["much"] * 12, "client a, train: weight must hold numbers"),
    ):
        with pytest.raises(DataError, match=message):
            from_clients({"a": one(X, Y, weight)})
    with pytest.raises(DataError, match=r"expected \(x, y\), or \(x, y, weight\)"):
        from_clients({"a": (X, Y, W, W)})

    def between(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs[:, None] - outputs[None]).square().mean()

    with pytest.raises(SettingError, match="samples have weights, but its loss gives one number for a batch"):
        ran("loop", {"a": one(X, Y, W)}, objective=between)


def test_seeds_with_weights_run_in_one_batch(tmp_path: Path) -> None:
    data = {"a": one(X, Y, W), "b": one(-X, Y)}
    setups = []
    for seed in (0, 1):
        keywords: Any = {"model": linear(), "data": data, "rounds": 2, "seed": seed, "engine": "stacked"}
        inputs = gather(keywords, "fedavg").inputs()
        setups.append(set_up(inputs.experiment, data=inputs.data, task=inputs.task))
    assert fit_together([(setup.task, setup.data) for setup in setups])
    results = execute_together(setups, [tmp_path / str(seed) for seed in (0, 1)])
    alone = sartor.run("fedavg", model=linear(), data=data, rounds=2, seed=1, engine="stacked", store=False)
    assert isinstance(results[1], sartor.Result)
    torch.testing.assert_close(results[1].w, alone.w, rtol=1e-9, atol=1e-11)


def test_weights_are_refused_where_gradients_are_to_hide_samples() -> None:
    """They are relative to their mean, by which every sample would show in all gradients."""
    pytest.importorskip("dp_accounting")
    with pytest.raises(SettingError, match="the samples have weights"):
        ran("loop", {"a": one(X, Y, W)}, privacy={"mode": "samples", "noise": 1.0})


def test_a_sample_without_a_finite_gradient_counts_as_nothing() -> None:
    pytest.importorskip("dp_accounting")
    x, privacy = X.clone(), {"mode": "samples", "noise": 0.0, "clip": 1e9}
    x[3] = 1e300  # whose norm is infinite
    kept = torch.arange(12) != 3
    hidden = ran("loop", {"a": one(x, Y)}, privacy=privacy, hyper={"lr": 0.5})
    without = ran("loop", {"a": one(X[kept], Y[kept])}, hyper={"lr": 0.5 * 11 / 12})
    torch.testing.assert_close(hidden.w, without.w, rtol=1e-12, atol=1e-14)


def test_weights_count_in_steps_that_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As all steps on a GPU are, and those of long runs elsewhere; clients are ragged, and some are drawn."""
    data = {"a": one(X, Y, W), "b": one(X[:7], Y[:7], W[:7]), "c": one(X[3:8], Y[3:8])}
    local = {"batch": 4, "epochs": 2}
    expected = ran("loop", data, local=local, cohort={"count": 2})
    monkeypatch.setattr(trace, "UNTRACED", 0)
    traced = ran("stacked", data, local=local, cohort={"count": 2})
    torch.testing.assert_close(traced.w, expected.w, rtol=1e-12, atol=1e-14)
