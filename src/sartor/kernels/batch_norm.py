"""BatchNorm of many clients: statistics of a batch's real samples, and what they are good for.

Written out, a batch's statistics go over its numbers seven times and their gradients some twenty times. Here
each is a kernel that goes over them once (``batch_norm_triton.py``), for lanes of clients under
``torch.vmap`` on CUDA; for one client and elsewhere they are written out.

With weights m of samples, each 0 or 1, and n numbers of a channel that count,

    mean = Σ m x / n,   variance = Σ m (x - mean)² / n,   z = (x - mean) / √(variance + ε),   y = γ z + β,

    ∂x = γ / √(variance + ε) · (g - m / n · (Σ g + z Σ g z)),   ∂γ = Σ g z,   ∂β = Σ g.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sartor.kernels.norms import finished, serves_lanes


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels run for numbers and weights of this kind."""
    single = x.dtype == weight.dtype == torch.float32 and x.numel() > 0 and x.dim() > 1
    return single and not torch.is_autocast_enabled("cuda") and serves_lanes(x)


def moments(x: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel of ``x`` [n, c, ...] over the samples with ``counted`` [n] = 1.

    They are constants: what depends on them knows its gradient.
    """
    mean, variance = _Moments.apply(x.detach(), counted)  # type: ignore[no-untyped-call]
    return mean, variance


def normalised(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    counted: Tensor,
    mean: Tensor,
    variance: Tensor,
    share: Tensor,
    eps: float,
) -> Tensor:
    """``x`` normalised by these statistics, times ``weight``, plus ``bias``.

    ``share`` is 1 / n where the statistics are those of the batch itself, and 0 where they are given.
    """
    result: Tensor = _Batch.apply(x, weight, bias, counted, mean, variance, share, eps)  # type: ignore[no-untyped-call]
    return result


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """The operation on lanes, or on one client's numbers."""
        if counted.dim() == 1:
            return _plain_moments(x, counted)
        mean, variance = stacked_moments(x, counted)
        return mean, variance

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """They are constants."""
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        """They are constants."""
        return None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[None, None]:
        """They are constants."""
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor) -> Any:
        """Lanes go to the kernel, lanes of lanes as more of them."""
        stacked, again = _in_lanes(info.batch_size, tensors, in_dims, 1)
        results = _Moments.apply(*stacked)  # type: ignore[no-untyped-call]
        return tuple(map(again, results)), (0, 0)


class _Batch(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, *others: Any) -> Tensor:
        """The operation on lanes, or on one client's numbers."""
        if others[0].dim() == 1:
            return _plain(x, *others)
        *tensors, eps = others
        result: Tensor = stacked_batch_norm(x, *tensors, None, eps, False)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what either direction of differentiation needs."""
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """All three gradients."""
        gradients = _BatchGradient.apply(gradient, *ctx.saved_tensors, ctx.eps)  # type: ignore[no-untyped-call]
        return *gradients, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """As of plain operations, by which the statistics depend on the batch."""
        function = _with(_plain, 3, ctx)
        tangent: Tensor = torch.func.jvp(function, ctx.saved_tensors[:3], tangents[:3])[1]
        return tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        """Lanes go to the kernel, lanes of lanes as more of them."""
        stacked, again = _in_lanes(info.batch_size, arguments[:-1], in_dims, 1)
        return again(_Batch.apply(*stacked, arguments[-1])), 0  # type: ignore[no-untyped-call]


class _BatchGradient(torch.autograd.Function):
    @staticmethod
    def forward(gradient: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The operation on lanes, or on one client's numbers."""
        if others[0].dim() == 1:
            return _plain_gradient(gradient, x, *others)
        *tensors, eps = others
        before, sums = stacked_batch_norm_gradient(gradient, x, *tensors, None, eps, False)
        return before, sums[0], sums[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what either direction of differentiation needs."""
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """As of plain operations, by which the statistics depend on the batch."""
        pull = torch.func.vjp(_with(_plain_gradient, 4, ctx), *ctx.saved_tensors[:4])[1]
        return *pull(gradients), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        """As of plain operations, by which the statistics depend on the batch."""
        function = _with(_plain_gradient, 4, ctx)
        result: tuple[Tensor, ...] = torch.func.jvp(function, ctx.saved_tensors[:4], tangents[:4])[1]
        return result

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        """Lanes go to the kernel, lanes of lanes as more of them."""
        stacked, again = _in_lanes(info.batch_size, arguments[:-1], in_dims, 2)
        results = _BatchGradient.apply(*stacked, arguments[-1])  # type: ignore[no-untyped-call]
        return tuple(map(again, results)), (0, 0, 0)


def _with(function: Callable[..., Any], given: int, ctx: Any) -> Callable[..., Any]:
    """A function of its first tensors alone; the others are as they were."""
    return lambda *tensors: function(*tensors, *ctx.saved_tensors[given:], ctx.eps)


def _in_lanes(
    lanes: int, tensors: Sequence[Tensor], in_dims: Sequence[int | None], per_channel: int
) -> tuple[list[Tensor], Any]:
    """Tensors with all lanes in one axis, the first, and how results get the axes of theirs back.

    The tensor with that number has one axis of its own.
    """
    stacked = [
        value.expand(lanes, *value.shape) if axis is None else value.movedim(axis, 0)
        for value, axis in zip(tensors, in_dims, strict=False)
    ]
    if stacked[per_channel].dim() == 2:
        return stacked, lambda result: result
    return [value.flatten(0, 1) for value in stacked], lambda result: result.unflatten(0, (lanes, -1))


# Plain operations on [.., n, c, place], with lanes in front or without --------------------------------------


def _per_channel(value: Tensor) -> Tensor:
    return value[..., None, :, None]


def _plain_moments(x: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    x = x.reshape(*counted.shape, *x.shape[counted.dim() : counted.dim() + 1], -1)
    real = counted[..., None, None]
    count = counted.sum(-1, keepdim=True) * x.shape[-1]
    mean = (x * real).sum((-3, -1)) / count
    centred = (x - _per_channel(mean)) * real
    return mean, (centred * centred).sum((-3, -1)) / count


def _statistics(
    x: Tensor, counted: Tensor, mean: Tensor, variance: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    """Those of the batch, as functions of it, or those that are given."""
    given = share[..., None] == 0
    own = _plain_moments(x, counted)
    return torch.where(given, mean, own[0]), torch.where(given, variance, own[1])


def _plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    counted: Tensor,
    mean: Tensor,
    variance: Tensor,
    share: Tensor,
    eps: float,
) -> Tensor:
    mean, variance = _statistics(x, counted, mean, variance, share)
    numbers = x.reshape(*counted.shape, weight.shape[-1], -1)
    scale = torch.rsqrt(variance + eps) * weight
    result = (numbers - _per_channel(mean)) * _per_channel(scale) + _per_channel(bias)
    return result.reshape(x.shape)


def _plain_gradient(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    counted: Tensor,
    mean: Tensor,
    variance: Tensor,
    share: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance = _statistics(x, counted, mean, variance, share)
    numbers = x.reshape(*counted.shape, weight.shape[-1], -1)
    given = gradient.reshape(numbers.shape)
    scale = _per_channel(torch.rsqrt(variance + eps))
    normal = (numbers - _per_channel(mean)) * scale
    by_weight, by_bias = (given * normal).sum((-3, -1)), given.sum((-3, -1))
    real = counted[..., None, None] * share[..., None, None, None]
    before = given - real * (_per_channel(by_bias) + normal * _per_channel(by_weight))
    return (before * scale * _per_channel(weight)).reshape(x.shape), by_weight, by_bias


# The operations on lanes, which a traced graph holds as single nodes ----------------------------------------

_TENSORS = "Tensor x, Tensor weight, Tensor bias, Tensor counted, Tensor mean, Tensor variance, Tensor share"


@torch.library.custom_op(
    "sartor::stacked_moments", mutates_args=(), schema="(Tensor x, Tensor counted) -> (Tensor, Tensor)"
)
def stacked_moments(x: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [L, c] of ``x`` [L, n, c, ...] over the samples with ``counted`` [L, n] = 1."""
    if x.is_cuda:
        from sartor.kernels import batch_norm_triton

        result: tuple[Tensor, Tensor] = batch_norm_triton.moments(x, counted)
        return result
    return _plain_moments(x, counted)


@torch.library.custom_op(
    "sartor::stacked_batch_norm",
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor? beside, float eps, bool rectified) -> Tensor",
)
def stacked_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    counted: Tensor,
    mean: Tensor,
    variance: Tensor,
    share: Tensor,
    beside: Tensor | None,
    eps: float,
    rectified: bool,
) -> Tensor:
    """``x`` [L, n, c, ...] by statistics and weights [L, c], plus ``beside``; ``rectified``: its ReLU."""
    if x.is_cuda:
        from sartor.kernels import batch_norm_triton

        result: Tensor = batch_norm_triton.normalise(x, weight, bias, mean, variance, beside, eps, rectified)
        return result
    return finished(_plain(x, weight, bias, counted, mean, variance, share, eps), beside, rectified)


@torch.library.custom_op(
    "sartor::stacked_batch_norm_gradient",
    mutates_args=(),
    schema=f"(Tensor gradient, {_TENSORS}, Tensor? beside, float eps, bool rectified) -> (Tensor, Tensor)",
)
def stacked_batch_norm_gradient(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    counted: Tensor,
    mean: Tensor,
    variance: Tensor,
    share: Tensor,
    beside: Tensor | None,
    eps: float,
    rectified: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient for ``x``, plus ``beside``, and those for weights and biases together: [2, L, c]."""
    others = (weight, bias, counted, mean, variance, share, eps)
    if x.is_cuda:
        from sartor.kernels import batch_norm_triton

        result: tuple[Tensor, Tensor] = batch_norm_triton.gradients(gradient, x, *others, beside, rectified)
        return result
    if rectified:
        gradient = torch.where(_plain(x, *others) <= 0, 0.0, gradient)
    before, *sums = _plain_gradient(gradient, x, *others)
    return finished(before, beside, False), torch.stack(sums)


@stacked_moments.register_fake
def _(x: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], x.shape[2]), x.new_empty(x.shape[0], x.shape[2])


@stacked_batch_norm.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


@stacked_batch_norm_gradient.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(2, *weight.shape)
