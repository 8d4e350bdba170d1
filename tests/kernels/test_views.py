"""Traced graphs without views that change nothing give the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from sartor.kernels.views import quicken, straighten


def step(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """A step of SGD with a small network, as a lane takes it."""

    def loss(w: Tensor) -> Tensor:
        first, second = w[:12].view(4, 3), w[12:].view(2, 4)
        return F.cross_entropy(F.linear(torch.relu(F.linear(x, first)), second), y)

    return w - 0.1 * torch.func.grad(loss)(w)


def in_place(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """What is written through a view is seen by what it is a view of."""
    hidden = w.mT.mT.expand(w.shape) * 2
    hidden.view(hidden.shape).relu_()
    return hidden + w


LANES = torch.randn(3, 20), torch.randn(3, 5, 3), torch.randint(0, 2, (3, 5))
TRIED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a step of lanes": (torch.vmap(step), LANES),
    "in place": (in_place, (torch.randn(3, 4), LANES[1], LANES[2])),
    "other axes": (
        lambda a, *_: a.transpose(0, 1).transpose(1, 2).transpose(-1, -2),
        (torch.randn(2, 3, 4), LANES[1], LANES[2]),
    ),
    "another shape": (lambda a, *_: a.view(2, 6).expand(2, 6)[:, :4], (torch.randn(3, 4), *LANES[1:])),
}


@pytest.mark.parametrize("name", TRIED)
def test_what_is_left_gives_the_same_bits(name: str) -> None:
    function, given = TRIED[name]
    graph = make_fx(function)(*given)
    before = len(graph.graph.nodes)
    expected = function(*(value.clone() for value in given))
    straighten(graph)
    graph.recompile()
    assert torch.equal(graph(*(value.clone() for value in given)), expected)
    assert len(graph.graph.nodes) <= before


def test_a_step_has_no_view_left_that_changes_nothing() -> None:
    graph = make_fx(torch.vmap(step))(*LANES)
    before = len(graph.graph.nodes)
    straighten(graph)
    assert len(graph.graph.nodes) < 0.8 * before
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.expand.default):
        assert node.meta["val"].shape != node.args[0].meta["val"].shape


def test_a_copy_that_is_written_to_stays_one() -> None:
    def step(w: Tensor) -> tuple[Tensor, Tensor]:
        doubled = w * 1
        doubled[0].add_(3)
        return doubled, w + 0

    graph = make_fx(step)(LANES[0])
    straighten(graph)
    for ours, theirs in zip(graph(LANES[0].clone()), step(LANES[0].clone()), strict=True):
        assert torch.equal(ours, theirs)


def test_a_gradient_needs_no_loss() -> None:
    """Of a mean over real samples, as engines have it; and what counts places is computed once."""

    def loss(w: Tensor, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        losses = -F.log_softmax(x @ w, 1).gather(1, y[:, None])[:, 0]
        weight = (torch.arange(len(y)) < real).to(w.dtype)
        return (losses * weight).sum() / weight.sum()

    given = torch.randn(3, 3, 2), LANES[1], LANES[2], torch.tensor([5, 1, 4])
    graph = make_fx(torch.vmap(torch.func.grad(loss)))(*given)
    expected = graph(*given)
    straighten(graph)
    targets = [node.target for node in graph.graph.nodes]
    aten = torch.ops.aten
    assert not {aten.gather.default, aten.ones_like.default, aten.select_backward.default} & set(targets)
    assert torch.equal(graph(*given), expected)
    quicken(graph)
    graph.recompile()
    assert aten.arange.default not in [node.target for node in graph.graph.nodes]
    assert torch.equal(graph(*given), expected)
