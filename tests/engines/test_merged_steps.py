"""A run whose steps are merged into few operations, as on CUDA, is the same to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_engines import ended
from torch import fx

from helpers import RAGGED, classification, federation_of, model_task
from sartor.engines.stacked import trace
from sartor.engines.stacked.widths import of_width
from sartor.kernels import products
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
