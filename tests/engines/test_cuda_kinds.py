"""Every kind of sample, objective and local setting on CUDA: both engines there give what a CPU gives.

In double precision, so that only a mistake can make a difference; in bfloat16 to within its digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_nested_samples import KINDS, Kind, samples
from torch import Tensor, nn
from torch.nn import functional as F

import sartor
from sartor.model.adapters import with_adapters
from sartor.model.networks import seeded

pytestmark = pytest.mark.cuda
DEVICE = "cuda"

FULL: dict[str, Any] = {
    "batch": 5,
    "steps": 4,
    "optimizer": "adamw",
    "weight_decay": 0.01,
    "schedule": "cosine",
    "schedule_over": "steps",
    "warmup": 1,
    "clip": 0.5,
    "micro": 2,
}
"""All that local training has, at once."""
PICTURES: list[Any] = [
    {"name": "crop", "padding": 1},
    "flip",
    "colour",
    {"name": "cut-out", "size": 3},
    "mix-up",
]


class Cnn(nn.Module):
    """A user's own network: BatchNorm, dropout by a function, and numbers that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = F.max_pool2d(self.norm(self.convolution(x)).relu(), 2).flatten(1)
        z = F.dropout(z, 0.2, self.training) + 0.01 * torch.randn_like(z)
        scores: Tensor = self.head(z)
        return scores


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(x).tanh())
        return scores


def pictures(generator: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, 8, 8, generator=generator)
    return x, (x.mean((1, 2, 3)) > 0).long() + (x[:, 0].mean((1, 2)) > 0).long()


def rows(generator: torch.Generator, n: int) -> tuple[Any, Any]:
    kinds = torch.randint(0, 4, (n, 2), generator=generator)
    return {"numbers": torch.randn(n, 3, generator=generator), "categories": kinds}, kinds[:, 0] % 3


def texts(generator: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens, whose ends are padding."""
    x = torch.randint(1, 9, (n, 6), generator=generator)
    ends = torch.randint(1, 7, (n, 1), generator=generator)
    return torch.where(torch.arange(6) < ends, x, 0), x[:, 0] % 3


def trained(kind: Kind, device: str, engine: str, method: str = "fedavg", **settings: Any) -> sartor.Result:
    """Three rounds: what a first one captures, the others replay."""
    given = {"rounds": 3, "local": {"batch": 4}, "hyper": {"lr": 0.1}, "store": False, **settings}
    model = seeded(kind.module, 0).double()
    return sartor.run(
        method,
        model=model,
        data=samples(kind),
        objective=kind.objective,
        engine=engine,
        device=device,
        **given,
    )


def assert_alike(kind: Kind, tolerance: float = 1e-8, **settings: Any) -> None:
    """The loop here, the loop on the device and the stacked engine on it give the same."""
    expected = trained(kind, "cpu", "loop", **settings)
    for engine in ("loop", "stacked"):
        result = trained(kind, DEVICE, engine, **settings)
        assert (result.summary["engine"], result.summary["device"]) == (engine, DEVICE)
        assert (expected.w, expected.personal) != (None, None)
        for one, other in ((result.w, expected.w), (result.personal, expected.personal)):
            assert (one is None) == (other is None)
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                torch.testing.assert_close(one.cpu(), other.cpu(), rtol=tolerance, atol=tolerance)
        for cell, values in expected.summary["last"].items():
            for name, value in (values or {}).items():
                if isinstance(value, float):
                    assert result.summary["last"][cell][name] == pytest.approx(value, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_any_samples_and_targets_train_alike(name: str) -> None:
    assert_alike(KINDS[name])


@pytest.mark.parametrize("name", KINDS)
def test_with_all_that_local_training_has(name: str) -> None:
    assert_alike(KINDS[name], 1e-6, local=FULL, hyper={"lr": 0.01})


@pytest.mark.parametrize("local", [{"batch": 4}, FULL])
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedper"])
def test_an_own_network_with_batchnorm_and_augmentation(method: str, local: dict[str, Any]) -> None:
    local = {**local, "augment": PICTURES}
    assert_alike(Kind(Cnn, pictures), 1e-6, method=method, local=local, hyper={"lr": 0.02}, head="head")


@pytest.mark.parametrize("method", ["fedit", "fedsa-lora", "ffa-lora"])
def test_adapters(method: str) -> None:
    kind = replace(KINDS["multi-label"], module=lambda: with_adapters(Mlp(), 2, trained=["head"]))
    assert_alike(kind, method=method, head="head")


class Encoder(nn.Module):
    """PyTorch's own attention, with dropout inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.2, batch_first=True)
        self.output = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.output(self.layer(self.embedding(x)).mean(1))
        return scores


def test_dropout_inside_of_attention() -> None:
    assert_alike(Kind(Encoder, texts), 1e-7)


def test_a_classifier_of_hugging_face() -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    from test_hugging_face import classifier

    def masked(generator: torch.Generator, n: int) -> tuple[Any, Any]:
        x, _ = texts(generator, n)
        return {"input_ids": x, "attention_mask": (x > 0).long()}, x[:, 0] % 2

    assert_alike(Kind(lambda: classifier(lora_dropout=0.1), masked), 1e-6, method="fedit")


@pytest.mark.parametrize(
    ("name", "draw", "settings"),
    [
        ("table", rows, {"hidden": [6], "width": 3, "categories": [4, 4]}),
        ("lstm", texts, {"width": 4, "hidden": 5, "layers": 2, "dropout": 0.2, "vocabulary": 9}),
        ("transformer", texts, {"width": 8, "depth": 1, "heads": 2, "dropout": 0.1, "vocabulary": 9}),
        ("vit", pictures, {"width": 8, "depth": 1, "heads": 2, "dropout": 0.1}),
        ("resnet8", pictures, {"norm": "batch"}),
    ],
)
def test_networks_by_name(name: str, draw: Callable[..., Any], settings: dict[str, Any]) -> None:
    found = []
    for device, engine in (("cpu", "loop"), (DEVICE, "loop"), (DEVICE, "stacked")):
        result = sartor.run(
            "fedavg",
            experiment={"model": {"name": name, **settings}},
            data=samples(Kind(nn.Identity, draw)),
            local={"batch": 4, "precision": "float64"},
            hyper={"lr": 0.1},
            rounds=3,
            engine=engine,
            device=device,
            store=False,
        )
        assert (result.summary["engine"], result.summary["device"]) == (engine, device)
        assert result.w is not None
        found.append(result.w.cpu())
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", [*KINDS, "own CNN"])
def test_bfloat16_to_its_digits(name: str) -> None:
    """Engines round in another order: what a model moved by differs by a share of it."""
    kind = Kind(Cnn, pictures) if name == "own CNN" else KINDS[name]
    start = torch.cat([value.detach().reshape(-1) for value in seeded(kind.module, 0).parameters()])
    moved = {}
    for device, engine in (("cpu", "loop"), (DEVICE, "loop"), (DEVICE, "stacked")):
        result = trained(kind, device, engine, local={"batch": 4, "precision": "bf16"}, hyper={"lr": 0.02})
        assert result.w is not None
        assert result.w.dtype == torch.float32
        moved[device, engine] = result.w.cpu() - start
    plain = moved.pop(("cpu", "loop"))
    assert plain.norm() > 0
    for each in moved.values():
        assert (each - plain).norm() < 0.1 * plain.norm()
