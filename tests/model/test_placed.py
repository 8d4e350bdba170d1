"""A module called with tensors in the place of its own gives what PyTorch's own way gives."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from sartor.model.placed import Placed


class Tied(nn.Module):
    """Two names of one weight, a layer that has two places, and a buffer that is put anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.again = self.last
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.again(self.last(self.first(x)).tanh()) + self.calls


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "statistics": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
    "recurrent": lambda: nn.GRU(3, 2),
    "one layer": lambda: nn.Linear(3, 2),
}


@pytest.mark.parametrize("name", MODULES)
def test_it_is_what_functional_call_gives(name: str) -> None:
    module = MODULES[name]()
    before = {key: (value, value.clone()) for key, value in module.state_dict(keep_vars=True).items()}
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    given = {key: value.detach() + 1 for key, value in named.items()}
    x = torch.randn(5, 3)
    expected_left = {key: value.clone() for key, value in given.items()}
    left = {key: value.clone() for key, value in given.items()}
    expected = functional_call(copy.deepcopy(module), expected_left, (x,))
    found = Placed(module)(left, (x,), {})
    assert all(map(torch.equal, tree_leaves(found), tree_leaves(expected)))
    assert left.keys() == expected_left.keys()
    for key in left:  # and what it has counted
        assert torch.equal(left[key], expected_left[key]), key
    after = module.state_dict(keep_vars=True)
    for key, (own, values) in before.items():
        assert after[key] is own, key
        assert torch.equal(own, values), key


def test_a_module_has_its_own_tensors_back_after_an_error() -> None:
    layer = nn.Linear(3, 2)
    weight = layer.weight
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Placed(layer)({"weight": torch.zeros(2, 3)}, (torch.zeros(1, 4),), {})
    assert layer.weight is weight


def test_gradients_reach_what_was_given() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    Placed(nn.Linear(3, 2))({"weight": weight, "bias": torch.zeros(2)}, (torch.ones(3),), {}).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1.0] * 3] * 2


def test_a_module_that_is_a_script_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Jitted modules"):
        Placed(torch.jit.script(nn.Linear(3, 2)))({}, (torch.zeros(3),), {})
