"""Low-rank adapters (LoRA, Hu et al. 2022): a dense layer W that stays as it is, plus B·A that is trained.

:func:`with_adapters` puts them into any module; those of PEFT have the same names, and are found by them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from sartor.errors import SartorError, SettingError
from sartor.model.parts import Part, merged
from sartor.model.task import Task

_NAME = re.compile(r"(?:^|\.)lora_(?:embedding_)?([AB])(?:\.|$)")


class LoRA(nn.Module):
    """A dense layer W that is not trained, with W x + B (A x) in its place; B begins as zero."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = layer.requires_grad_(False)
        kind: dict[str, Any] = {"bias": False, "dtype": layer.weight.dtype, "device": layer.weight.device}
        self.lora_A = nn.Linear(layer.in_features, rank, **kind)
        self.lora_B = nn.Linear(rank, layer.out_features, **kind)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's answer and the adapter's."""
        changed: Tensor = self.base(x) + self.lora_B(self.lora_A(x))
        return changed


def with_adapters(module: nn.Module, rank: int, trained: Sequence[str] = ()) -> nn.Module:
    """A copy of a module with adapters of a rank at its dense layers, which alone are trained.

    ``trained`` names modules by path that are trained as they are instead, such as a new head.

    >>> import torch
    >>> module = with_adapters(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), 2, trained=["2"])
    >>> [name for name, value in module.named_parameters() if value.requires_grad]
    ['0.lora_A.weight', '0.lora_B.weight', '2.weight', '2.bias']
    """
    module = copy.deepcopy(module).requires_grad_(False)
    kept = [path for path in trained if path]
    for path in kept:
        module.get_submodule(path).requires_grad_(True)
    dense = [
        path
        for path, layer in module.named_modules()
        if type(layer) is nn.Linear and not any(path == own or path.startswith(f"{own}.") for own in kept)
    ]
    if not dense or dense == [""]:
        raise SettingError(
            "model.adapters: the model has no dense layer (nn.Linear) inside to adapt; leave it out"
        )
    for path in dense:
        layer = module.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        module.set_submodule(path, LoRA(layer, rank))
    return module


def adapter_parts(task: Task) -> tuple[Part, Part]:
    """All A and all B of a model's adapters; a model without such pairs is refused."""
    found = _pairs(task)
    if not found:
        raise SartorError(
            f"model {task.name}: has no low-rank pairs lora_A and lora_B that are trained; set "
            "model.adapters to a rank, or give a PEFT model with LoRA"
        )
    return found[0], found[1]


def exchanged_parts(task: Task) -> tuple[Part, ...]:
    """What methods for adapters send where it is not all that is trained: A, or all but A; else nothing."""
    return tuple(part for a in _pairs(task)[:1] for part in (a, task.rest(a)))


def _pairs(task: Task) -> tuple[Part, ...]:
    """All A and all B, or nothing where they are no pairs."""
    found: dict[str, list[slice]] = {"A": [], "B": []}
    for name, place in task.places.items():
        match = _NAME.search(name)
        if match is not None:
            found[match[1]].append(place)
    if not found["A"] or len(found["A"]) != len(found["B"]):
        return ()
    return Part("lora_A", merged(found["A"])), Part("lora_B", merged(found["B"]))
