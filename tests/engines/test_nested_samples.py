"""Any samples and any objective on every engine: models, metrics and messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sartor
from sartor.data import lazy_clients
from sartor.engines.lockstep import fit_together
from sartor.errors import DataError, SartorError
from sartor.model.networks import seeded
from sartor.runs.inputs import gather
from sartor.runs.setup import set_up
from sartor.runs.together import execute_together

SIZES = {"Oslo": 9, "Bergen": 17, "Tromsø": 30}


class Bag(nn.Module):
    """The mean of the embeddings of those tokens that are there, and a number beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 5)
        self.output = nn.Linear(6, 3)

    def forward(self, input_ids: Tensor, mask: Tensor, age: Tensor) -> Tensor:
        there = mask.to(self.output.weight.dtype)[..., None]
        mean = (self.embedding(input_ids) * there).sum(1) / there.sum(1).clamp(min=1)
        scores: Tensor = self.output(torch.cat([mean, age[:, None]], 1))
        return scores


class Whole(Bag):
    """The same, given the dict as it is."""

    def forward(self, sample: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(**sample)


class Pair(nn.Module):
    """Two inputs, of which one is whole numbers taken as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = self.first(a) + self.second(b)
        return result


class Words(nn.Module):
    """A score for every next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(12, 4), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.output(self.embedding(x))
        return scores


class TwoHeads(nn.Module):
    """A dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.body(x).tanh()
        return {"kind": self.kind(z), "size": self.size(z)[:, 0]}


def both(outputs: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
    kind = nn.functional.cross_entropy(outputs["kind"], y["kind"], reduction="none")
    return kind + (outputs["size"] - y["size"]).square()


@dataclass(frozen=True)
class Kind:
    """Samples, a model for them and what it is trained for."""

    module: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int], tuple[Any, Any]]
    objective: Any = None
    headline: str = "loss"


def tokens(generator: torch.Generator, n: int) -> tuple[Any, Any]:
    x = torch.randint(0, 12, (n, 6), generator=generator)
    mask = torch.rand(n, 6, generator=generator) > 0.3
    return {"input_ids": x, "mask": mask, "age": torch.rand(n, generator=generator)}, x[:, 0] % 3


def flat(generator: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=generator)
    return x, (x @ torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, -1]]) > 0).long()


def paired(generator: torch.Generator, n: int) -> tuple[Any, Any]:
    a, b = torch.randn(n, 3, generator=generator), torch.randint(0, 5, (n, 2), generator=generator)
    return (a, b), a[:, :2].double() + b


def images(generator: torch.Generator, n: int) -> tuple[Any, Any]:
    x = torch.randn(n, 1, 4, 5, generator=generator)
    return x, (x[:, 0] > 0).long()


def heads(generator: torch.Generator, n: int) -> tuple[Any, Any]:
    x, y = flat(generator, n)
    return x, {"kind": y.sum(1), "size": x.sum(1)}


KINDS = {
    "dict of tokens, mask and number": Kind(Bag, tokens, headline="accuracy"),
    "dict as one argument": Kind(Whole, tokens, headline="accuracy"),
    "tuple, regression": Kind(Pair, paired, {"name": "regression", "loss": "huber"}, "rmse"),
    "multi-label": Kind(lambda: nn.Linear(4, 2), flat, "multi-label", "macro_f1"),
    "segmentation": Kind(lambda: nn.Conv2d(1, 2, 3, padding=1), images, "segmentation", "iou"),
    "next token": Kind(
        Words,
        lambda g, n: (tokens(g, n)[0]["input_ids"],) * 2,
        {"name": "next-token", "shift": True},
        "perplexity",
    ),
    "nested targets, own loss": Kind(TwoHeads, heads, both),
    "own mean loss": Kind(Pair, paired, nn.MSELoss()),
    "own loss of every number": Kind(Pair, paired, nn.MSELoss(reduction="none")),
}


def samples(kind: Kind) -> dict[str, Any]:
    return {
        name: kind.draw(torch.Generator().manual_seed(place), n)
        for place, (name, n) in enumerate(SIZES.items())
    }


def go(kind: Kind, engine: str, method: str = "fedavg", data: Any = None, **settings: Any) -> sartor.Result:
    given = {"rounds": 2, "local": {"batch": 4}, "hyper": {"lr": 0.1}, "store": False, **settings}
    model = seeded(kind.module, 0).double()
    data = samples(kind) if data is None else data
    return sartor.run(method, model=model, data=data, objective=kind.objective, engine=engine, **given)


@pytest.mark.parametrize("name", KINDS)
def test_any_samples_and_targets_train_alike_on_both_engines(name: str) -> None:
    kind = KINDS[name]
    loop, stacked = (go(kind, engine) for engine in ("loop", "stacked"))
    torch.testing.assert_close(loop.w, stacked.w, rtol=1e-9, atol=1e-11)
    assert loop.summary["headline"] == stacked.summary["headline"] == kind.headline
    for cell in ("shared_local", "shared_pooled"):
        one, other = loop.summary["last"][cell], stacked.summary["last"][cell]
        assert one[kind.headline] == pytest.approx(other[kind.headline], rel=1e-9)
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-9)
    assert loop.rounds[-1]["evaluation"]["shared_pooled"]["loss"] != pytest.approx(
        loop.rounds[0]["evaluation"]["shared_pooled"]["loss"], rel=1e-6
    )


def test_a_step_is_that_of_autograd() -> None:
    kind = KINDS["dict of tokens, mask and number"]
    x, y = kind.draw(torch.Generator().manual_seed(0), 9)
    given = {"only": {"train": (x, y), "test": (x, y)}}
    result = go(kind, "loop", data=given, rounds=1, local={"batch": 0}, hyper={"lr": 0.5})
    module = seeded(kind.module, 0).double()
    loss = nn.functional.cross_entropy(module(**{**x, "age": x["age"].double()}), y)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    stepped = [value - 0.5 * gradient for value, gradient in zip(module.parameters(), gradients, strict=True)]
    assert result.w is not None
    torch.testing.assert_close(result.w, torch.cat([value.detach().reshape(-1) for value in stepped]))


def test_a_mean_loss_is_that_of_its_samples() -> None:
    mean, each = (go(KINDS[name], "stacked") for name in ("own mean loss", "own loss of every number"))
    torch.testing.assert_close(mean.w, each.w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_lazy_clients_have_nests_too(engine: str) -> None:
    kind = KINDS["dict of tokens, mask and number"]

    def fetch(client: int) -> tuple[Any, Any]:
        return kind.draw(torch.Generator().manual_seed(client), 12)

    data = lazy_clients(5, fetch, n_train=9, n_test=3, classes=3)
    given = {
        str(client): {
            "train": (
                {name: leaf[:9] for name, leaf in fetch(client)[0].items()},
                fetch(client)[1][:9],
            ),
            "test": ({name: leaf[9:] for name, leaf in fetch(client)[0].items()}, fetch(client)[1][9:]),
        }
        for client in range(5)
    }
    lazy, there = (go(kind, engine, data=each, cohort={"count": 2}) for each in (data, given))
    assert torch.equal(lazy.w, there.w)  # type: ignore[arg-type]
    assert lazy.summary["accuracy"] == there.summary["accuracy"]


def test_seeds_with_nests_run_in_one_batch(tmp_path: Path) -> None:
    kind = KINDS["tuple, regression"]
    setups = []
    for seed in (0, 1):
        keywords: Any = {
            "model": seeded(kind.module, 0).double(),
            "data": samples(kind),
            "objective": kind.objective,
            "rounds": 2,
            "seed": seed,
            "engine": "stacked",
        }
        inputs = gather(keywords, "fedavg").inputs()
        setups.append(set_up(inputs.experiment, data=inputs.data, task=inputs.task))
    assert fit_together([(setup.task, setup.data) for setup in setups])
    results = execute_together(setups, [tmp_path / str(seed) for seed in (0, 1)])
    alone = sartor.run(
        "fedavg",
        model=seeded(kind.module, 0).double(),
        data=samples(kind),
        objective=kind.objective,
        rounds=2,
        seed=1,
        engine="stacked",
        store=False,
    )
    assert isinstance(results[1], sartor.Result)
    torch.testing.assert_close(results[1].w, alone.w, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "name", ["dict of tokens, mask and number", "tuple, regression", "nested targets, own loss"]
)
def test_a_run_with_nests_goes_on_to_the_same_numbers(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    model: Any = seeded(kind.module, 0).double()
    keywords: Any = {"data": samples(kind), "rounds": 3, "local": {"batch": 4}}
    whole = sartor.run("fedavg", model=model, objective=kind.objective, store=False, **keywords)
    inputs = gather({**keywords, "model": model, "objective": kind.objective, "rounds": 1}, "fedavg").inputs()
    sartor.run(
        "fedavg", model=model, objective=kind.objective, out=tmp_path / "run", **{**keywords, "rounds": 1}
    )
    resumed = sartor.resume(tmp_path / "run", rounds=3, data=inputs.data, task=inputs.task)
    assert torch.equal(resumed.w, whole.w)  # type: ignore[arg-type]
    assert resumed.summary["last"] == whole.summary["last"]


def test_personal_methods_take_nests() -> None:
    kind = KINDS["dict of tokens, mask and number"]
    for method in ("ditto", "fedproto", "moon"):
        results = [go(kind, engine, method, head="output", hyper={}) for engine in ("loop", "stacked")]
        one, other = (
            result.summary["last"]["personal_local"] or result.summary["last"]["shared_local"]
            for result in results
        )
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-7)


def contrast(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss between samples, no mean over them."""
    return (outputs[:, None] - outputs[None]).square().mean() + (outputs - y).square().mean()


def test_a_loss_between_samples_is_that_of_whole_batches_in_a_stack_too() -> None:
    kind = replace(KINDS["own mean loss"], objective=contrast)
    one, other = (go(kind, engine) for engine in ("loop", "auto"))
    assert other.summary["engine"] == "stacked"
    assert torch.allclose(one.w, other.w, rtol=1e-6, atol=1e-9)


def test_what_cannot_be_right_is_one_message() -> None:
    kind = KINDS["tuple, regression"]
    good = samples(kind)
    (a, b), y = good["Bergen"]
    cases: list[tuple[Any, Kind, str]] = [
        (
            {**good, "Bergen": ((a, b[:-1]), y)},
            kind,
            r"client Bergen, train: x\[1\] has 16 samples, x\[0\] has 17",
        ),
        ({**good, "Bergen": ((a, b), y[:-1])}, kind, "client Bergen, train: 17 samples in x but 16 labels"),
        ({**good, "Bergen": ((a * torch.nan, b), y)}, kind, r"Bergen.*x\[0\] has a value that is not finite"),
        ({**good, "Bergen": ((a[:, :2], b), y)}, kind, r"client Bergen, train: x\[0\] is of shape \(2,\)"),
        (
            {**good, "Bergen": ({"a": a}, y)},
            kind,
            r"client Bergen, train: x holds x.a, but client Oslo has x\[0\]",
        ),
        ({**good, "Bergen": ((a, b), y[:, :1])}, kind, r"client Bergen, train: y is of shape \(1,\)"),
        (
            {name: ((x[0], x[1]), y[:, :1]) for name, (x, y) in good.items()},
            kind,
            r"model Pair: outputs of shape \[2\] for targets of shape \[1\]",
        ),
        (
            {name: (x[:1], y) for name, (x, y) in good.items()},
            kind,
            r"model Pair: cannot take samples of \{\[0\]: \[3\] float64\}: .*'b'",
        ),
        (
            {name: (x, y[:, 0]) for name, (x, y) in good.items()},
            replace(kind, objective=lambda outputs, y: (outputs[:, :1] - y).abs()),
            r"for 3 samples the loss has shape \[3, 3\]; .*Outputs: \[3, 2\], targets: \[3\]",
        ),
        (good, replace(kind, objective=lambda outputs, y: outputs @ y), "its loss cannot take outputs"),
        (good, replace(kind, objective=lambda outputs, y: outputs > y), "a tensor of floats is needed"),
    ]
    for data, each, message in cases:
        with pytest.raises(SartorError, match=message):
            go(each, "loop", data=data)


def test_a_label_that_the_task_does_not_know_is_named() -> None:
    x, y = torch.randn(10, 4), torch.arange(10) % 2
    data = {"a": (x, y), "b": (x, torch.where(torch.arange(10) < 6, y, 4))}
    with pytest.raises(
        DataError, match=r"client b, train: label 4 in sample \d, but model mine knows 3 classes"
    ):
        sartor.run(model=sartor.Task(nn.Linear(4, 3), classes=3, name="mine"), data=data, store=False)


def test_float64_data_are_the_same_in_a_dict_as_in_client_data() -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 4)), np.arange(20) % 2
    given = {"a": (x, y), "b": (x + 1, y)}
    for dtype in (torch.float64, torch.float32):
        model = seeded(lambda: nn.Linear(4, 2), 0).to(dtype)
        one, other = (
            sartor.run(model=model, data=data, rounds=2, store=False)
            for data in (given, sartor.data.from_clients(given))
        )
        assert torch.equal(one.w, other.w)  # type: ignore[arg-type]
        assert one.w is not None
        assert one.w.dtype == dtype
    with pytest.raises(
        DataError, match=r"client b, train: x has a value that is not finite in float32, .* sample"
    ):
        sartor.run(model=nn.Linear(4, 2), data={**given, "b": (x * 1e40, y)}, store=False)


def test_whole_numbers_are_numbers_where_the_model_takes_no_others() -> None:
    x, y = torch.randint(0, 9, (20, 4)), torch.arange(20) % 2
    whole, floats = (sartor.run(data={"a": (given, y)}, rounds=2, store=False) for given in (x, x.float()))
    assert torch.equal(whole.w, floats.w)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_sample_that_the_model_refuses_is_named(engine: str) -> None:
    kind = KINDS["dict of tokens, mask and number"]
    data = samples(kind)
    x, y = data["Bergen"]
    ids = x["input_ids"].clone()
    ids[:, 2] = torch.where(torch.arange(len(y)) == 5, 99, ids[:, 2])
    split = {"train": ({**x, "input_ids": ids}, y), "test": (x, y)}
    message = (
        r"local_training, round 1, client 'Bergen', train: the model refuses sample 5 "
        r"\(x.input_ids from \d to 99, x.mask from .*\): index out of range"
    )
    with pytest.raises(SartorError, match=message):
        go(kind, engine, data={**data, "Bergen": split})


def test_a_sample_whose_loss_is_not_finite_is_named() -> None:
    kind = replace(
        KINDS["own mean loss"], objective=lambda outputs, y: (outputs - y).abs().mean(1) / (y[:, 0] != 9)
    )
    data = samples(kind)
    (a, b), y = data["Bergen"]
    wrong = torch.where(torch.arange(len(y))[:, None] == 5, 9, y)
    data["Bergen"] = {"train": ((a, b), y), "test": ((a, b), wrong)}
    message = r"the loss of shared_local at 'Bergen' is not finite, first in sample 5"
    with pytest.raises(SartorError, match=f"fedavg, round 1: {message}"):
        go(kind, "loop", data=data)
