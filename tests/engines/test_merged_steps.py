"""A run whose steps are merged into few operations, as on CUDA, is the same to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_engines import ended
from torch import fx

from helpers import RAGGED, classification, federation_of, model_task
from sartor.engines.stacked import trace
from sartor.kernels import products
from sartor.model import objectives

MERGED = ("likelihood_gradient", "descended", "completed_product")


@pytest.mark.parametrize(
    ("name", "local", "steps"),
    [
        ("fedavg", {}, True),
        ("fedavg", {"lr_decay": 0.9}, True),
        ("fedavg", {"momentum": 0.5, "weight_decay": 0.1}, False),
        ("fedprox", {}, False),
        ("scaffold", {}, False),
        ("per-fedavg", {}, False),
        ("fedrep", {}, True),
    ],
)
def test_a_run_is_the_same(
    traced: None, name: str, local: dict[str, Any], steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``steps``: whether the model moves where its gradient is joined."""
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
    for key, value in left[False].items():
        assert torch.equal(value, left[True][key]), key
