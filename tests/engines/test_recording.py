"""A recorded graph has the operations that PyTorch's own tracer finds, and gives what the function gives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from sartor.engines.stacked.recording import recorded

Function = Callable[[list[Tensor]], list[Tensor]]
LANES = [torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
KEPT = nn.Parameter(torch.arange(5.0))
NUMBER = torch.tensor(2.0)


def gradients(inputs: list[Tensor]) -> list[Tensor]:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        scores = F.layer_norm(F.linear(x, w[:3]), (3,))
        return F.cross_entropy(scores, scores.argmax(1)) + (x * KEPT).tanh().mean() + torch.tensor(0.5)

    return list(torch.vmap(torch.func.grad_and_value(loss))(*inputs))


def several_at_once(inputs: list[Tensor]) -> list[Tensor]:
    first, second = inputs[0].split([1, 3], dim=1)
    return [*first.max(dim=2), second.topk(2, dim=1)[1], inputs[1], KEPT]


def in_place(inputs: list[Tensor]) -> list[Tensor]:
    total = torch.zeros(5)
    total[1:3] = 4.0
    fresh = torch.tensor([1.0, 2.0])
    fresh.add_(inputs[0].mean())
    return [total.add_(inputs[1].sum((0, 1))), fresh, total * KEPT]


def by_known_numbers(inputs: list[Tensor]) -> list[Tensor]:
    factor = float(NUMBER) + torch.tensor(1.0).add_(1).item() + (torch.ones(3).sum() / 3).item()
    return [inputs[0] * factor]


FUNCTIONS = [gradients, several_at_once, in_place, by_known_numbers]


def runnable(graph: fx.GraphModule) -> fx.GraphModule:
    graph.recompile()
    return graph


def operations(graph: fx.GraphModule) -> list[tuple[object, ...]]:
    """What is called, with which arguments and what comes out; constants may be fetched once or often."""
    nodes = [node for node in graph.graph.nodes if node.op != "get_attr"]
    place = {node: number for number, node in enumerate(nodes)}

    def plain(value: object) -> object:
        return fx.map_arg(value, lambda node: place.get(node, node.op))

    return [
        (
            node.op,
            node.op == "call_function" and node.target,
            plain(node.args),
            plain(node.kwargs),
            _kind(node),
        )
        for node in nodes
    ]


def _kind(node: fx.Node) -> object:
    value = node.meta.get("val")
    several = value if isinstance(value, (tuple, list)) else [value]
    return [(one.shape, one.stride(), one.dtype, one.device) for one in several if isinstance(one, Tensor)]


@pytest.mark.parametrize("function", FUNCTIONS[:3])
def test_the_operations_are_those_of_pytorchs_tracer(function: Function) -> None:
    theirs = make_fx(function)(LANES)
    theirs.graph.set_codegen(fx.graph.CodeGen())
    assert operations(recorded(function, LANES)) == operations(theirs)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_graph_gives_for_other_inputs_what_the_function_gives_whenever_it_runs(function: Function) -> None:
    graph = runnable(recorded(function, LANES))
    others = [value.flip(0) * 3 for value in LANES]
    for inputs in (others, LANES, others):
        expected = function([value.clone() for value in inputs])
        found = graph(*(value.clone() for value in inputs))
        assert all(map(torch.equal, found, expected))
        assert len(found) == len(expected)


def test_a_tensor_that_is_given_twice_has_two_places() -> None:
    graph = runnable(recorded(lambda inputs: [inputs[0] - 2 * inputs[1]], [LANES[0], LANES[0]]))
    assert torch.equal(graph(*LANES)[0], LANES[0] - 2 * LANES[1])


def hidden_by_a_view(inputs: list[Tensor]) -> list[Tensor]:
    number = torch.tensor([1.0])
    number.view(1)[0] = inputs[0].sum()
    return [inputs[0] * number.item()]


def drawn(inputs: list[Tensor]) -> list[Tensor]:
    return [inputs[0] * torch.zeros(()).uniform_().item()]


@pytest.mark.parametrize(
    "function",
    [
        lambda inputs: [inputs[0] * inputs[1].sum().item()],
        lambda inputs: [inputs[0] if inputs[1].sum() > 0 else inputs[1]],
        lambda inputs: [inputs[0] if torch.equal(*inputs) else inputs[1]],
        hidden_by_a_view,
        drawn,
    ],
)
def test_a_number_that_another_step_would_have_otherwise_is_not_kept(function: Function) -> None:
    with pytest.raises(RuntimeError, match="takes a number out of a tensor"):
        recorded(function, LANES)


def test_what_a_function_needs_no_more_is_not_held() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def function(inputs: list[Tensor]) -> list[Tensor]:
        middle = inputs[0] * 2
        seen.append(weakref.ref(middle))
        result = middle.sum()
        del middle
        gc.collect()
        assert seen[0]() is None
        return [result]

    recorded(function, LANES)
