"""What a model does that only trying it shows, with a few samples on the CPU.

Whether a client gets in a stack what it gets alone decides on which engine it can train; a module that
computes with other numbers than its parameters cannot be trained at all. :class:`Task` keeps what is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sartor import nests
from sartor.errors import SettingError
from sartor.model.batch import Batch
from sartor.nests import Nest

if TYPE_CHECKING:
    from sartor.model.task import Task


def few(x: Nest, y: Nest) -> tuple[Nest, Nest]:
    """Three samples on the CPU; where there are fewer, one that comes again has its numbers moved on."""
    held = nests.length(y)
    places = torch.arange(3) % held

    def others(leaf: Tensor) -> Tensor:
        rows = leaf[:3].cpu()[places]
        turned = [row.flatten().roll(turn // held).view(row.shape) for turn, row in enumerate(rows)]
        return torch.stack(turned)

    return nests.mapped(others, x), nests.mapped(lambda leaf: leaf[:3].cpu()[places], y)


def _noise(task: Task, dtype: torch.dtype) -> Tensor:
    """Numbers from -1/2 to 1/2, the same ones every time."""
    return torch.rand(task.size, generator=torch.Generator().manual_seed(0), dtype=dtype) - 0.5


def check_values(task: Task, x: Nest) -> None:
    """Refuse a module that computes with parameters it has in a list too: a pass is given its layers'."""
    w, (arguments, named) = task.initial() + 0.2 * _noise(task, task.dtype), task.arguments(x)
    found: list[list[Tensor]] = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(Exception):  # as of such numbers
        module = task.module(w)
        for given in (module(*arguments, **named), module(*arguments, **named), task.outputs(w, x)):
            found.append([leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)])
    if len(found) < 3 or not _all_close(found[0], found[1]) or _all_close(found[0], found[2]):
        return
    raise SettingError(
        f"model {task.name}: it does not give what its parameters say; have each as an attribute of its "
        "layer alone: those in a list, or in another object, stay as they were"
    )


def other_outputs(task: Task, x: Nest) -> Iterator[Any]:
    """What models near the initial one and far from it give: that one may give all samples the same."""
    for scale in (0.02, 1.0):
        with suppress(Exception):  # some models allow but few values
            yield task.outputs(task.initial() + scale * _noise(task, task.dtype), x)


def why_unlike(task: Task, x: Nest, y: Nest, padded: bool) -> str | None:
    """Why a client does not get in a stack what it gets alone, if so; one step is tried."""
    reason = None
    for dtype in dict.fromkeys((torch.float64, task.dtype)):
        try:
            with torch.random.fork_rng(devices=[]):
                alike = _stacks_alike(task, x, y, dtype, padded)
        except Exception as error:  # whatever torch says about this module is the reason
            reason = in_a_line(error)
            if "data-dependent control flow" in str(error):
                reason = "its forward pass branches on the data"
        else:
            return None if alike else "it gives another result in a stack: a layer draws at random"
    return reason


def _stacks_alike(task: Task, x: Nest, y: Nest, dtype: torch.dtype, padded: bool) -> bool:
    """Whether a step gives the same for a client alone and in a stack, there padded by a sample or not.

    In a stack the model may be each client's own or the same for all; the latter only has to run.
    """
    x, y = nests.mapped(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, (x, y))
    real = Batch(*nests.rows((x, y), slice(0, -1)))
    initial, buffers = task.initial().to(dtype), task.initial_buffers().to(dtype)
    # Not at the initial values: a layer of zeros hides what mixes samples before it, and where a unit
    # stands on the edge of being active rounding would decide about its gradient.
    with torch.no_grad():
        for w in (initial + 0.02 * _noise(task, dtype), initial):
            outputs = task.outputs(w, real.x, buffers)
            if task.loss_function(outputs, real.y).isfinite().all():  # some layers allow but few values
                break

    def step(w: Tensor, buffers: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        gradient, after = task.grad_and_buffers(w, batch, buffers)
        assert after is not None  # as there were some before
        return gradient, after

    def lane(w: Tensor, buffers: Tensor, x: Nest, *others: Nest) -> tuple[Tensor, Tensor, Any]:
        return *step(w, buffers, Batch(x, *others)), task.outputs(w, x, buffers)

    weight = torch.ones(nests.length(y), dtype=dtype)
    weight[-1] = 0
    given = nests.rows((x, y, weight) if padded else (real.x, real.y), None)
    with torch.no_grad():
        torch.vmap(lambda *given: task.loss(w, Batch(*given), buffers))(*given)
    stacked = torch.vmap(lane)(w[None], buffers[None], *given)
    alone = (*step(w, buffers, real), outputs)

    def alike(types: set[torch.dtype]) -> bool:
        """To half of the digits of the coarsest of these types."""
        tolerance = max(torch.finfo(kind).eps for kind in types) ** 0.5
        return all(
            close(value[0, : len(one)], one, tolerance)
            for value, one in zip(nests.leaves(stacked), nests.leaves(alone), strict=True)
            if one.is_floating_point()
        )

    if alike({dtype}):
        return True
    with _FloatTypes() as used, torch.no_grad():  # a layer may have a type of its own
        task.loss_function(task.outputs(w, real.x, buffers), real.y)
    return alike({dtype, *used.found})


def _all_close(values: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors are equal up to rounding, whatever computed them."""
    return all(close(value, other, 1e-3) for value, other in zip(values, others, strict=True))


def close(value: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two tensors are not finite in the same places and differ by at most this share elsewhere."""
    finite = other.isfinite()
    if not torch.equal(value.isfinite(), finite):
        return False
    if not finite.all():
        value, other = value[finite], other[finite]
    return bool((value - other).norm() <= tolerance * other.norm())


class _FloatTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the float types that operations give."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        self.found |= {value.dtype for value in leaves if value.is_floating_point()}
        return result


def in_a_line(error: Exception) -> str:
    """An error by its kind and the first line of what it says."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
