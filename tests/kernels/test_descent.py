"""A step from the gradients of layers is that from the whole gradient.

The kernel's own tests run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_convolution import DEVICE, distance, draw, kernels
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from sartor.kernels import descent, products
from sartor.kernels.views import straighten

aten = torch.ops.aten
DESCENDED = torch.ops.sartor.descended.default


def layers(**kind: Any) -> list[Tensor]:
    """Gradients of three lanes: parts of a product, of one sample each, and as they are; for two launches."""
    parts, samples = draw(4, 3, 5, 7, **kind), draw(3, 6, 300, **kind)
    others = [draw(3, size, seed=size, **kind) for size in (2, 2049, 1, 40, 3, 8, 130)]
    return [parts, samples, *others]


def gradient(parts: Tensor, samples: Tensor, *others: Tensor) -> Tensor:
    return torch.cat([parts.sum(0).view(3, -1), samples.sum(1, keepdim=True).view(3, -1), *others], 1)


STEPS = {
    "a number": lambda w, rates, *given: torch.sub(w, gradient(*given), alpha=0.05),
    "a number per lane": lambda w, rates, *given: w - rates[:, None] * gradient(*given),
}
OTHERS = {
    "decay": lambda w, rates, *given: torch.sub(w, gradient(*given) + 0.1 * w, alpha=0.05),
    "the other way": lambda w, rates, *given: gradient(*given) - w,
    "read twice": lambda w, rates, *given: (w - (g := gradient(*given)), g),
    "a rate each": lambda w, rates, *given: w - w * gradient(*given),
    "a rate for all": lambda w, rates, *given: w - rates[0] * gradient(*given),
}


def traced(step: Any, **kind: Any) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    given = layers(**kind)
    inputs = (draw(3, gradient(*given).shape[1], **kind), draw(3, **kind), *given)
    return make_fx(step)(*inputs), inputs


def outputs(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


@pytest.mark.parametrize("name", [*STEPS, *OTHERS])
def test_a_step_is_the_same_to_the_bit(name: str) -> None:
    graph, inputs = traced({**STEPS, **OTHERS}[name], dtype=torch.float32)
    expected = outputs(graph(*inputs))
    descent.specialise(graph)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(DESCENDED) == 1
    assert aten.cat.default not in targets
    assert (aten.sub.Tensor in targets) is (name in OTHERS)
    for ours, theirs in zip(outputs(graph(*inputs)), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("joined", [lambda a, b: torch.cat([a, b], 0), lambda a, b: torch.cat([a, b], 2)])
def test_what_is_no_gradient_of_layers_is_left_alone(joined: Any) -> None:
    given = draw(3, 4, 5, dtype=torch.float32), draw(3, 4, 5, dtype=torch.float32)
    graph = make_fx(joined)(*given)
    descent.specialise(graph)
    assert not graph.graph.find_nodes(op="call_function", target=DESCENDED)


def test_double_precision_is_left_alone() -> None:
    graph, _ = traced(STEPS["a number"], dtype=torch.float64)
    descent.specialise(graph)
    assert not graph.graph.find_nodes(op="call_function", target=DESCENDED)


def test_products_are_computed_where_they_go() -> None:
    """Of one part, read nowhere else, and not turned round."""
    w, x, index = (
        draw(3, 88, dtype=torch.float32),
        draw(20, 6, dtype=torch.float32),
        torch.arange(12).view(3, 4),
    )
    given = draw(3, 4, 2, dtype=torch.float32)

    def step(w: Tensor, x: Tensor, index: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        samples = x.index_select(0, index.view(-1)).view(3, 4, 6)
        here, turned, twice = (torch.bmm(given.mT, samples * factor) for factor in (1, 2, 3))
        picked = torch.bmm(given.mT, samples)
        other = torch.bmm(samples.mT, samples).sum(1)
        pieces = [
            here,
            other[:, None],
            turned.mT,
            picked,
            twice,
            given.sum(1)[:, None],
            torch.bmm(given.mT, samples),
        ]
        flat = torch.cat([piece.reshape(3, -1) for piece in pieces], 1)
        return torch.sub(w[:, : flat.shape[1]], flat, alpha=0.05), twice

    inputs = (w, x, index, given)
    graph = make_fx(step)(*inputs)
    products.specialise(graph)
    straighten(graph)
    expected = graph(*inputs)
    descent.specialise(graph)
    (node,) = graph.graph.find_nodes(op="call_function", target=DESCENDED)
    assert node.args[5] == [0, 3, 6]
    assert [numbers is None for numbers in node.args[3]] == [True, False, False]
    for ours, theirs in zip(graph(*inputs), expected, strict=True):
        assert torch.equal(ours, theirs)


@kernels
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("rated", [False, True])
def test_the_kernel_takes_the_step(steps: bool, rated: bool) -> None:
    from sartor.kernels import descent_triton

    kind: dict[str, Any] = {"device": DEVICE, "dtype": torch.float32}
    parts, samples, *others = layers(**kind)
    x, numbers = draw(20, 70, **kind), (torch.arange(12) * 7 % 20).view(3, 4).to(DEVICE)
    left, right, picked = draw(3, 33, 40, **kind), draw(3, 40, 35, **kind), draw(3, 5, 4, **kind)
    given = [parts.flatten(2).transpose(0, 1), samples, *(layer[:, None] for layer in others)]
    made = [
        descent.Product(left, right, None, False, 1),
        descent.Product(picked, x, numbers, True, len(given) + 1),
    ]
    exact = [layer.double().cpu() for layer in (parts.sum(0).flatten(1), samples.sum(1), *others)]
    exact.insert(1, (left.double() @ right.double()).cpu().flatten(1))
    exact.append((picked.double() @ x[numbers].double()).cpu().flatten(1))
    whole = torch.cat(exact, 1)
    w, rates = draw(3, whole.shape[1], **kind), draw(3, **kind) if rated and steps else None
    found = descent_triton.descended(w if steps else None, given, made, 0.05, rates)
    rate = 0.05 * (1 if rates is None else rates.double().cpu()[:, None])
    assert distance(found, w.double().cpu() - rate * whole if steps else whole) < 1e-6
    alone = descent_triton.descended(
        w[1:2] if steps else None,
        [layer[1:2] for layer in given],
        [
            descent.Product(left[1:2], right[1:2], None, False, 1),
            descent.Product(picked[1:2], x, numbers[1:2], True, len(given) + 1),
        ],
        0.05,
        None if rates is None else rates[1:2],
    )
    assert torch.equal(alone[0], found[1])


def test_what_is_changed_later_is_read_before() -> None:
    """A gradient's terms that are written to before the gradients are joined."""
    terms, others = draw(3, 6, 30, dtype=torch.float32), draw(3, 40, dtype=torch.float32)

    def step(terms: Tensor, others: Tensor) -> Tensor:
        own = terms * 2
        added = own.sum(1)
        own.view(3, -1).zero_()
        return torch.cat([added, others, own[:, 0]], 1)

    graph = make_fx(step)(terms, others)
    descent.specialise(graph)
    assert graph.graph.find_nodes(op="call_function", target=DESCENDED)
    assert torch.equal(graph(terms, others), step(terms, others))


def test_parts_of_a_convolutions_bias_are_added_up_where_they_go() -> None:
    parts, others = draw(5, 3, 30, dtype=torch.float32), draw(3, 40, dtype=torch.float32)
    graph = make_fx(lambda parts, others: torch.cat([torch.ops.sartor.add_up(parts), others], 1))(
        parts, others
    )
    descent.specialise(graph)
    targets = [node.target for node in graph.graph.nodes]
    assert DESCENDED in targets
    assert torch.ops.sartor.add_up.default not in targets
    assert torch.equal(graph(parts, others), torch.cat([parts.sum(0), others], 1))
