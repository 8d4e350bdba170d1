"""A run whose steps are merged into few operations, as on CUDA, is the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_engines import ended
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from helpers import RAGGED, classification, federation_of, model_task
from sartor.engines.stacked import trace
from sartor.engines.stacked.recording import recorded
from sartor.engines.stacked.widths import of_width
from sartor.kernels import products
from sartor.kernels.in_place import in_place
from sartor.model import objectives

MERGED = ("likelihood_gradient", "descended", "completed_product")


@pytest.mark.parametrize(
    ("name", "local", "steps"),
    [
        ("fedavg", {}, True),
        ("fedavg", {"lr_decay": 0.9}, True),
        ("fedavg", {"momentum": 0.5, "weight_decay": 0.1}, False),
        ("fedavg", {"optimizer": "adam"}, False),
        ("fedprox", {}, False),
        ("scaffold", {}, False),
        ("per-fedavg", {}, False),
        ("fedrep", {}, True),
    ],
)
def test_a_run_is_the_same(
    traced: None, name: str, local: dict[str, Any], steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``steps``: whether the model moves where its gradient is joined, and is not moved by more than that."""
    data, specialise = classification(RAGGED), products.specialise
    left, found = {}, []

    def counted(graph: fx.GraphModule, most: int, merged: bool) -> None:
        specialise(graph, most)
        if merged:
            trace.merge(graph)
        found.append(graph)

    monkeypatch.setattr(objectives, "cross_entropy", objectives.cross_entropies)
    monkeypatch.setattr(trace, "has_tensor_cores", lambda device: True)
    for merged in (False, True):
        found.clear()
        monkeypatch.setattr(
            products, "specialise", lambda graph, most, merged=merged: counted(graph, most, merged)
        )
        federation = federation_of("stacked", model_task("mlp", data), data, local={"batch": 8, **local})
        left[merged] = ended(name, federation)
        targets = [str(node.target) for graph in found for node in graph.graph.nodes]
        assert all(any(f"sartor.{name}." in target for target in targets) is merged for name in MERGED)
        moved = [
            node.args[0] is not None
            for graph in found
            for node in graph.graph.nodes
            if node.target is torch.ops.sartor.descended.default
        ]
        assert any(moved) is (steps and merged)
        assert any("sartor.pointwise." in target for target in targets) is (merged and not steps)
    for key, value in left[False].items():
        assert torch.equal(value, left[True][key]), key


@pytest.mark.parametrize(
    ("name", "local", "written"),
    [
        ("fedavg", {}, 1),
        ("fedavg", {"lr_decay": 0.9}, 1),
        ("fedavg", {"momentum": 0.5, "weight_decay": 0.1}, 2),
        ("fedavg", {"optimizer": "adam"}, 3),
        ("fedprox", {}, 1),
        ("scaffold", {}, 1),
    ],
)
def test_a_step_writes_over_what_it_goes_on_from(
    traced: None, name: str, local: dict[str, Any], written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of its vectors as ``written`` are not copied, and the numbers are those of a step that does."""
    data, specialise, compared = classification(RAGGED), products.specialise, []
    monkeypatch.setattr(objectives, "cross_entropy", objectives.cross_entropies)
    monkeypatch.setattr(trace, "has_tensor_cores", lambda device: True)
    monkeypatch.setattr(
        products, "specialise", lambda graph, most: (specialise(graph, most), trace.merge(graph))
    )
    repeated = trace.Traced.repeated

    def both(self: trace.Traced, given: Any, carry: Any, turns: Any, over: bool = False) -> Any:
        turns, places = [*turns], tree_map(torch.clone, carry)
        expected = repeated(self, given, carry, turns)
        found = repeated(self, given, places, turns, over=True)
        pairs = zip(tree_leaves(expected), tree_leaves(found), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        same = zip(tree_leaves(found), tree_leaves(places), strict=True)
        compared.append(sum(one is other and one.shape[1:].numel() > 1 for one, other in same))
        return expected

    monkeypatch.setattr(trace.Traced, "repeated", both)
    federation = federation_of("stacked", model_task("mlp", data), data, local={"batch": 8, **local})
    ended(name, federation)
    assert set(compared) == {written}


def step_of(outputs: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> fx.GraphModule:
    """A traced step of a gradient and a vector w, that moves w against it and does something besides."""

    def step(given: list[Tensor]) -> list[Tensor]:
        gradient, w = given
        return [*outputs(w, torch.ops.sartor.descended(w, [gradient], [], [], [], [], 0.5, None))]

    return recorded(step, [torch.randn(2, 1, 6), torch.randn(2, 6)])


@pytest.mark.parametrize(
    ("outputs", "over"),
    [
        (lambda w, after: (after,), True),
        (lambda w, after: (after - w.view(2, 6),), False),  # which is not what a step ends with
        (lambda w, after: (after, w.view(6, 2)), False),  # which is read afterwards
        (lambda w, after: (after, after), False),
    ],
)
def test_nothing_is_written_over_that_is_still_read(
    outputs: Callable[[Tensor, Tensor], tuple[Tensor, ...]], over: bool
) -> None:
    graph = step_of(outputs)
    graph.recompile()
    gradient, w = torch.randn(2, 1, 6), torch.randn(2, 6)
    expected, before = graph(gradient, w), w.clone()
    count = 1 if len(expected) == 1 else 2
    made = in_place(graph, 2 - count, count)
    found = made(gradient.expand(2, 1, 6).clone(), w)
    assert all(map(torch.equal, found, expected))
    assert (found[0] is w) is over
    assert torch.equal(w, before) is not over


def test_steps_of_other_widths_follow_from_merged_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what is traced for them, node for node."""
    data = classification(RAGGED)
    monkeypatch.setattr(objectives, "cross_entropy", objectives.cross_entropies)
    monkeypatch.setattr(trace, "has_tensor_cores", lambda device: True)
    monkeypatch.setattr(trace, "UNTRACED", 0)
    plain, specialise, graphs = trace.Tracer._traced, products.specialise, {}
    monkeypatch.setattr(
        products, "specialise", lambda graph, most: (specialise(graph, 6), trace.merge(graph))
    )

    def noted(self: trace.Tracer, *given: Any) -> trace.Traced:
        made = plain(self, *given)
        graphs[len(given[2][-1])] = made.graph
        return made

    monkeypatch.setattr(trace.Tracer, "_traced", noted)
    for lanes in (2, 3, 5):
        federation = federation_of("stacked", model_task("mlp", data), data, local={"batch": 8}, lanes=lanes)
        ended("fedavg", federation, [[0, 1, 2, 3, 4, 5]])
    made = of_width((2, graphs[2]), (3, graphs[3]), 5)
    assert made is not None
    described = [
        [(node.name, node.target, str(node.args)) for node in graph.graph.nodes]
        for graph in (made, graphs[5])
    ]
    assert described[0] == described[1]
    assert any("descended" in str(target) for _, target, _ in described[0])


@pytest.mark.parametrize(
    ("one", "near"),
    [
        ([1.1, 2.0, float("nan")], True),
        ([1.101, 2.0, float("nan")], True),
        ([1.11, 2.0, float("nan")], False),
        ([1.1, 2.0, 3.0], False),
        ([float("nan"), 2.0, float("nan")], False),
        ([float("inf"), 2.0, float("nan")], False),
    ],
)
def test_what_is_near_is_measured_by_the_step(one: list[float], near: bool) -> None:
    after, before = torch.tensor([1.1, 2.0, float("nan")]), torch.tensor([1.0, 2.0, 3.0])
    assert trace._near(torch.tensor(one), after, before) is near
