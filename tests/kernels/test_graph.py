"""Graphs whose code is made when they run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from sartor.kernels.graph import Graph


def test_code_is_made_once_for_all_that_was_rewritten_before(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    compiled = fx.GraphModule.recompile
    monkeypatch.setattr(fx.GraphModule, "recompile", lambda graph: (made.append(graph), compiled(graph))[1])
    steps = fx.Graph()
    x = steps.placeholder("x")
    result = steps.call_function(torch.sin, (x,))
    steps.output(result)
    graph, one = Graph(nn.Module(), steps), torch.ones(3)
    for target in (torch.tan, torch.cos):
        result.target = target
        graph.recompile()
    assert not made
    first = graph.forward
    for give in (first, graph, graph.forward):
        assert torch.equal(give(one), one.cos())
    assert len(made) == 1
    other = copy.deepcopy(graph)
    result.target = torch.exp
    graph.recompile()
    assert torch.equal(graph(one), one.exp())
    assert torch.equal(graph.forward(one), one.exp())
    for kept in (first, other):
        assert torch.equal(kept(one), one.cos())
