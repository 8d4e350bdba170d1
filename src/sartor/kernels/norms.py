"""GroupNorm and LayerNorm whose weights differ from client to client.

Under ``torch.vmap`` these become a normalisation without weights, followed by a product and a sum, and their
gradients come in up to forty pieces. :func:`group_norm` and :func:`layer_norm` are PyTorch's for one client;
for lanes of clients on CUDA each is one kernel, and so is its gradient (``norms_triton.py``).

Both are of one kind: numbers of n samples with c channels at some places, whose channels are in groups. A
sample's numbers of one group are a row, which is normalised. A LayerNorm has one group, and one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sartor.kernels.gpu import HAS_TRITON, lanes_under_way

_LONGEST = 16384
"""Numbers of a row, filled up to powers of two, that a program holds."""


class Norms(TorchFunctionMode):
    """A context in which ``F.group_norm`` and ``F.layer_norm`` are those of this module."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or the one in its place."""
        return _OURS.get(func, func)(*args, **(kwargs or {}))


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.group_norm`` for one client's samples and weights; fast under ``torch.vmap`` over clients on CUDA.

    >>> images, weights = torch.ones(5, 2, 6, 4, 4), torch.ones(5, 6)  # 5 clients
    >>> torch.vmap(group_norm, (0, None, 0, 0))(images, 3, weights, weights).shape
    torch.Size([5, 2, 6, 4, 4])
    """
    fits = input.dim() > 1 and num_groups > 0 and input.shape[1] % num_groups == 0
    if weight is None or bias is None or not fits or not _kernels_serve(input, weight, bias):
        return F.group_norm(input, num_groups, weight, bias, eps)
    channels, places = input.shape[1], input.shape[2:].numel()
    fits = weight.shape == bias.shape == (channels,)
    if not fits or _held(channels // num_groups, places) > _LONGEST:
        return F.group_norm(input, num_groups, weight, bias, eps)
    return _apply(input, weight, bias, num_groups, places, eps)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.layer_norm`` in the same way."""
    shape, fits = torch.Size(normalized_shape), 0 < len(normalized_shape) < input.dim()
    fits = fits and input.shape[-len(shape) :] == shape and _held(shape.numel(), 1) <= _LONGEST
    if weight is None or bias is None or not fits or not _kernels_serve(input, weight, bias):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    return _apply(input, weight.reshape(-1), bias.reshape(-1), 1, 1, eps)


_OURS: dict[Any, Any] = {F.group_norm: group_norm, F.layer_norm: layer_norm}


def serves_lanes(like: Tensor) -> bool:
    """Whether lanes of clients are under way on a device that has the kernels."""
    return like.is_cuda and torch.version.cuda is not None and HAS_TRITON and lanes_under_way()


def _kernels_serve(x: Tensor, *weights: Tensor) -> bool:
    """Whether the kernels can run for tensors of this kind."""
    single = all(value.dtype == torch.float32 for value in (x, *weights))
    return single and x.numel() > 0 and not torch.is_autocast_enabled("cuda") and serves_lanes(x)


def _held(channels: int, places: int) -> int:
    """Numbers of a tile that holds a row: powers of two."""
    return (1 << (channels - 1).bit_length()) * (1 << (places - 1).bit_length())


class _Norm(torch.autograd.Function):
    """The norm of ``x`` with ``weight`` and ``bias`` [c], or of lanes of these."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, places: int, eps: float) -> Tensor:
        """The operation on lanes, or on one client's numbers."""
        if weight.dim() == 1:
            return _plain(x, weight, bias, groups, places, eps)
        result: Tensor = stacked_norm(x, weight, bias, None, groups, places, eps, False)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what either direction of differentiation needs; statistics are computed again."""
        ctx.kind = inputs[3:]
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """All three gradients by one kernel."""
        gradients = _Gradient.apply(gradient, *ctx.saved_tensors, *ctx.kind)  # type: ignore[no-untyped-call]
        return *gradients, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """As of plain operations."""
        function = _with(_plain, ctx.kind)
        tangent: Tensor = torch.func.jvp(function, ctx.saved_tensors, tangents[:3])[1]
        return tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        """Lanes go to the kernel, lanes of lanes as more of them."""
        tensors, again = _in_lanes(info.batch_size, arguments[:3], in_dims)
        return again(_apply(*tensors, *arguments[3:])), 0


class _Gradient(torch.autograd.Function):
    """The gradients of a norm's three operands; its own derivatives are those of plain operations."""

    @staticmethod
    def forward(
        gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor, groups: int, places: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The operation on lanes, or on one client's numbers."""
        if weight.dim() == 1:
            return _plain_gradient(gradient, x, weight, groups, places, eps)
        before, sums = stacked_norm_gradient(gradient, x, weight, bias, None, groups, places, eps, False)
        return before, sums[0], sums[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what either direction of differentiation needs."""
        ctx.kind = inputs[4:]
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """As of plain operations."""
        pull = torch.func.vjp(_with(_plain_gradient, ctx.kind), *ctx.saved_tensors)[1]
        return *pull(gradients), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        """As of plain operations."""
        function = _with(_plain_gradient, ctx.kind)
        result: tuple[Tensor, ...] = torch.func.jvp(function, ctx.saved_tensors, tangents[:3])[1]
        return result

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], *arguments: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Lanes go to the kernel, lanes of lanes as more of them."""
        tensors, again = _in_lanes(info.batch_size, arguments[:4], in_dims)
        results = _Gradient.apply(*tensors, *arguments[4:])  # type: ignore[no-untyped-call]
        return tuple(map(again, results)), (0, 0, 0)


def _apply(x: Tensor, weight: Tensor, bias: Tensor, *kind: Any) -> Tensor:
    result: Tensor = _Norm.apply(x, weight, bias, *kind)  # type: ignore[no-untyped-call]
    return result


def _with(function: Callable[..., Any], kind: tuple[Any, ...]) -> Callable[..., Any]:
    return lambda *tensors: function(*tensors, *kind)


def _in_lanes(
    lanes: int, tensors: Sequence[Tensor], in_dims: Sequence[int | None]
) -> tuple[list[Tensor], Any]:
    """Tensors with all lanes in one axis, the first, and how results get the axes of theirs back."""
    stacked = [
        value.expand(lanes, *value.shape) if axis is None else value.movedim(axis, 0)
        for value, axis in zip(tensors, in_dims, strict=False)
    ]
    if stacked[-1].dim() == 2:
        return stacked, lambda result: result
    return [value.flatten(0, 1) for value in stacked], lambda result: result.unflatten(0, (lanes, -1))


def _normal(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Every row [.., n, group, number] normalised, and by how much it was divided."""
    rows = x.reshape(*x.shape[:-2], groups, -1)
    centred = rows - rows.mean(-1, keepdim=True)
    scale = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return centred * scale, scale


def _plain(x: Tensor, weight: Tensor, bias: Tensor, groups: int, places: int, eps: float) -> Tensor:
    numbers = x.reshape(*weight.shape[:-1], -1, weight.shape[-1], places)
    normal = _normal(numbers, groups, eps)[0].reshape(numbers.shape)
    return (normal * weight[..., None, :, None] + bias[..., None, :, None]).reshape(x.shape)


def _plain_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, groups: int, places: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    numbers = x.reshape(*weight.shape[:-1], -1, weight.shape[-1], places)
    gradient = gradient.reshape(numbers.shape)
    normal, scale = _normal(numbers, groups, eps)
    given = (gradient * weight[..., None, :, None]).reshape(normal.shape)
    along = (given * normal).mean(-1, keepdim=True)
    before = scale * (given - given.mean(-1, keepdim=True) - normal * along)
    by_weight = (gradient * normal.reshape(numbers.shape)).sum((-3, -1))
    return before.reshape(x.shape), by_weight, gradient.sum((-3, -1))


# The operations on lanes, which a traced graph holds as single nodes ----------------------------------------


@torch.library.custom_op(
    "sartor::stacked_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor bias, Tensor? beside, int groups, int places, float eps, "
    "bool rectified) -> Tensor",
)
def stacked_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    beside: Tensor | None,
    groups: int,
    places: int,
    eps: float,
    rectified: bool,
) -> Tensor:
    """The norm of every lane, plus ``beside``; ``rectified``: the ReLU of that.

    ``weight`` and ``bias`` are [L, c], and ``x`` has the numbers of [L, n, c, places] in any shape.
    """
    if x.is_cuda:
        from sartor.kernels import norms_triton

        result: Tensor = norms_triton.normalise(x, weight, bias, beside, groups, places, eps, rectified)
        return result
    return finished(_plain(x, weight, bias, groups, places, eps), beside, rectified)


def finished(result: Tensor, beside: Tensor | None, rectified: bool) -> Tensor:
    """A norm with what is added to it, and the ReLU of that."""
    result = result if beside is None else result + beside
    return result.relu() if rectified else result


@torch.library.custom_op(
    "sartor::stacked_norm_gradient",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, Tensor weight, Tensor bias, Tensor? beside, int groups, int places, "
    "float eps, bool rectified) -> (Tensor, Tensor)",
)
def stacked_norm_gradient(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    beside: Tensor | None,
    groups: int,
    places: int,
    eps: float,
    rectified: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient for ``x``, plus ``beside``, and those for weights and biases together: [2, L, c]."""
    if x.is_cuda:
        from sartor.kernels import norms_triton

        result: tuple[Tensor, Tensor] = norms_triton.gradients(
            gradient, x, weight, bias, beside, groups, places, eps, rectified
        )
        return result
    if rectified:
        gradient = torch.where(_plain(x, weight, bias, groups, places, eps) <= 0, 0.0, gradient)
    before, *sums = _plain_gradient(gradient, x, weight, groups, places, eps)
    return finished(before, beside, False), torch.stack(sums)


@stacked_norm.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


@stacked_norm_gradient.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(2, *weight.shape)
