"""A run whose steps have gradients beside the way back, as on CUDA, is the same to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_engines import ended
from torch import fx

from helpers import RAGGED, classification, federation_of, model_task
from sartor.engines.stacked import trace
from sartor.kernels import beside, convolution, fused, layouts, pooling, products, rectified
from sartor.model import objectives


@pytest.mark.parametrize("local", [{}, {"lr_decay": 0.9}, {"momentum": 0.5}])
def test_a_run_is_the_same(traced: None, local: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    data, specialise = classification(RAGGED, shape=(3, 16, 16)), products.specialise
    left, found = {}, []

    def as_on_cuda(graph: fx.GraphModule, most: int, aside: bool) -> None:
        rectified.specialise(graph)
        fused.specialise(graph)
        layouts.gather(graph)
        layouts.settle(graph)
        specialise(graph, most)
        pooling.specialise(graph)
        trace.merge(graph)
        if aside:
            beside.specialise(graph)
        found.extend(node.target for node in graph.graph.nodes)

    monkeypatch.setattr(objectives, "cross_entropy", objectives.cross_entropies)
    monkeypatch.setattr(trace, "has_tensor_cores", lambda device: True)
    monkeypatch.setattr(convolution, "_kernels_serve", lambda x, weight: x.dtype == torch.float32)
    for aside in (False, True):
        found.clear()
        monkeypatch.setattr(
            products, "specialise", lambda graph, most, aside=aside: as_on_cuda(graph, most, aside)
        )
        federation = federation_of("stacked", model_task("lenet", data), data, local={"batch": 8, **local})
        left[aside] = ended("fedavg", federation, [[0, 2, 4, 5]])
        ways = {beside.gradient_beside, beside.begun_beside, beside.finished_after}
        assert ways <= set(found) if aside else not ways & set(found)
    for key, value in left[False].items():
        assert torch.equal(value, left[True][key]), key
