"""Gradients of weights that are computed beside the way back are what they are in its course."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_laid import draw
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from sartor.kernels import beside

sartor = torch.ops.sartor
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=cuda)]
SIZES = (6 * 2 * 9, 5, 4 * 7)


def step(w: Tensor, x: Tensor, gradient: Tensor, bias: Tensor, left: Tensor, right: Tensor) -> Any:
    """A convolution's and a bias's gradient, and a product between them; then what lies behind goes on."""
    images = sartor.first_images(x, None, x.shape[:2], 0, [1, 1])
    parts = sartor.first_weight_gradient(images, gradient, [1, 1], [3, 3])
    layers = [parts.view(len(parts), len(w), -1).transpose(0, 1), bias]
    before = gradient * 2  # as the way back goes on
    after = sartor.descended(w, layers, [left, right], [None], [False], [1], 0.5, None)
    return [after, before.sum(1)]


def operands(device: str) -> list[Tensor]:
    lanes = 3
    w, bias = draw(lanes, sum(SIZES)), draw(lanes, 4, 5, seed=1)
    x, gradient = draw(lanes, 4, 2, 8, 8), draw(lanes, 4, 6, 8, 8, seed=2)
    return [value.to(device) for value in (w, x, gradient, bias, draw(lanes, 4, 3), draw(lanes, 3, 7))]


def specialised(given: list[Tensor]) -> fx.GraphModule:
    graph = make_fx(step)(*given)
    beside.specialise(graph)
    graph.recompile()
    return graph


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_the_same(device: str) -> None:
    given = operands(device)
    w, *_ = given
    order = [node.target for node in specialised(given).graph.nodes]
    assert sartor.descended.default not in order
    assert order.index(beside.begun_beside) < order.index(torch.ops.aten.mul.Tensor)
    assert order.index(beside.gradient_beside) < order.index(torch.ops.aten.mul.Tensor)
    for found, expected in zip(specialised(given)(*given), step(*given), strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(w, step(*given)[0])


def test_a_gradient_that_is_read_twice_stays_where_it_is() -> None:
    def twice(w: Tensor, x: Tensor, gradient: Tensor, *others: Tensor) -> Any:
        parts = sartor.first_weight_gradient(x, gradient, [1, 1], [3, 3])
        layer = parts.view(len(parts), len(w), -1).transpose(0, 1)
        return [sartor.descended(w, [layer], [], [], [], [], 0.5, None), parts.sum()]

    given = operands("cpu")
    given[0] = draw(3, SIZES[0])
    given[2] = draw(3, 4, 6, 6, 6)
    graph = make_fx(twice)(*given)
    beside.specialise(graph)
    assert sartor.descended.default in [node.target for node in graph.graph.nodes]


def test_small_products_alone_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def dense(w: Tensor, left: Tensor, right: Tensor) -> Any:
        return [sartor.descended(w, [], [left, right], [None], [False], [0], 0.5, None)]

    *_, left, right = operands("cpu")
    given = [draw(3, 28), left, right]
    for large, stays in ((28, False), (29, True)):
        monkeypatch.setattr(beside, "LARGE", large)
        graph = make_fx(dense)(*given)
        beside.specialise(graph)
        graph.recompile()
        assert (sartor.descended.default in [node.target for node in graph.graph.nodes]) is stays
        assert torch.equal(graph(*given)[0], dense(*given)[0])


@cuda
def test_many_captured_steps_are_the_same() -> None:
    given = operands("cuda")
    graph, side = specialised(given), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    expected = given[0]
    for _ in range(8):
        expected, _ = step(expected, *given[1:])
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        w = given[0]
        graph(w, *given[1:])
        captured.capture_begin()
        for _ in range(8):
            w, _ = graph(w, *given[1:])
        captured.capture_end()
    for _ in range(3):
        captured.replay()
        torch.cuda.synchronize()
        assert torch.equal(w, expected)
