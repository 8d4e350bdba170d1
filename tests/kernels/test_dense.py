"""Dense layers of several models on the same samples: one product, and the numbers of each alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from sartor.kernels import dense as module
from sartor.kernels.dense import Dense, dense

LANES, MODELS, SAMPLES, INPUTS, OUTPUTS = 3, 2, 4, 5, 6
Linear = Callable[..., Tensor]


def drawn(*shape: int) -> Tensor:
    """Numbers that are not alike."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


X, W, B = drawn(SAMPLES, INPUTS), drawn(OUTPUTS, INPUTS), drawn(OUTPUTS)
LANES_X, LANES_W = drawn(LANES, SAMPLES, INPUTS), drawn(LANES, OUTPUTS, INPUTS)
LANES_B, MODELS_W = drawn(LANES, OUTPUTS), drawn(MODELS, OUTPUTS, INPUTS)
MODELS_X, MODELS_B = drawn(MODELS, SAMPLES, INPUTS), drawn(MODELS, OUTPUTS)
EVERY_X, EVERY_W = drawn(LANES, MODELS, SAMPLES, INPUTS), drawn(LANES, MODELS, OUTPUTS, INPUTS)


def models(linear: Linear, x: int | None = None) -> Callable[..., Tensor]:
    """Several models, whose samples may be their own."""
    return torch.vmap(linear, (x, 0, 0))


WAYS: dict[str, Callable[[Linear], Tensor]] = {
    "one": lambda linear: linear(X, W, B),
    "one, without a bias": lambda linear: linear(X, W),
    "samples of three axes": lambda linear: linear(LANES_X, W, B),
    "lanes of samples": lambda linear: torch.vmap(linear, (0, None, None))(LANES_X, W, B),
    "lanes of samples at the end": lambda linear: torch.vmap(linear, (2, None, None))(
        LANES_X.movedim(0, 2), W, B
    ),
    "lanes of weights": lambda linear: torch.vmap(linear, (None, 0, 0))(X, LANES_W, LANES_B),
    "lanes of weights alone": lambda linear: torch.vmap(linear, (None, 0, None))(X, LANES_W, B),
    "lanes of biases alone": lambda linear: torch.vmap(linear, (None, None, 0))(X, W, LANES_B),
    "lanes of weights, no bias": lambda linear: torch.vmap(linear, (None, 0))(X, LANES_W),
    "lanes of both": lambda linear: torch.vmap(linear)(LANES_X, LANES_W, LANES_B),
    "lanes of both, no bias": lambda linear: torch.vmap(linear)(LANES_X, LANES_W),
    "lanes of both, three axes": lambda linear: torch.vmap(linear)(EVERY_X, LANES_W, LANES_B),
    "models on lanes of samples": lambda linear: torch.vmap(models(linear), (0, None, None))(
        LANES_X, MODELS_W, MODELS_B
    ),
    "a second layer of models": lambda linear: torch.vmap(models(linear, 0), (0, None, None))(
        EVERY_X, MODELS_W, MODELS_B
    ),
    "lanes of models on lanes of samples": lambda linear: torch.vmap(models(linear), (0, 0, None))(
        LANES_X, EVERY_W, MODELS_B
    ),
    "lanes of second layers": lambda linear: torch.vmap(models(linear, 0), (0, 0, None))(
        EVERY_X, EVERY_W, MODELS_B
    ),
    "lanes of second layers, one's samples": lambda linear: torch.vmap(models(linear, 0), (None, 0, None))(
        MODELS_X, EVERY_W, MODELS_B
    ),
}


@pytest.mark.parametrize("rows", [0, 128])
@pytest.mark.parametrize("way", WAYS)
def test_lanes_are_those_of_linear(way: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", rows)
    torch.testing.assert_close(WAYS[way](dense), WAYS[way](F.linear), rtol=1e-13, atol=1e-13)


def test_models_on_lanes_of_samples_are_one_product() -> None:
    graph = make_fx(lambda: WAYS["models on lanes of samples"](dense))().graph
    products = [node for node in graph.nodes if "mm" in str(node.target)]
    assert [node.target for node in products] == [torch.ops.aten.addmm.default]
    assert products[0].meta["val"].shape == (MODELS * OUTPUTS, LANES * SAMPLES)


def test_what_is_differentiated_is_left_to_pytorch() -> None:
    """As in a method that has a gradient of a model in evaluation mode."""

    def total(linear: Linear, w: Tensor) -> Tensor:
        return linear(X, w, B).square().sum()

    found = torch.vmap(torch.func.grad(lambda w: total(dense, w)))(LANES_W)
    torch.testing.assert_close(found, torch.vmap(torch.func.grad(lambda w: total(F.linear, w)))(LANES_W))


def test_the_context_replaces_linear_alone() -> None:
    with Dense():
        assert torch.equal(torch.relu(F.linear(X, W, bias=B)), torch.relu(dense(X, W, B)))
