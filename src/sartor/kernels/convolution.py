"""Convolutions whose weights differ from client to client.

Under ``torch.vmap`` a convolution with weights per lane becomes one grouped convolution, which on a GPU takes
many times longer than its arithmetic. :func:`conv2d` is ``F.conv2d`` for one client; for lanes of clients on
CUDA it runs kernels made for them (``convolution_triton.py``).

An image [b, c], weights [o, c] and a result [b, o] (each with two more axes, of space) belong to three
products: the result is one of image and weights, an image's gradient one of weights and result, a weight's
gradient one of image and result. Each is linear in both operands, and its derivatives are the other two. So
one differentiable function, ``_Product``, holds all three, and may be differentiated as often as one likes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from sartor.kernels.gpu import HAS_TRITON, lanes_under_way

Pair = tuple[int, int]

_AXES = {"image": "bc", "weight": "oc", "result": "bo"}
_LARGEST = 2**31 - 1
"""The kernels count the numbers of one lane in 32 bits."""


def room(channels: int) -> int:
    """Places for so many channels: fours, so that a load takes four of them."""
    return -(-channels // 4) * 4


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair | str = 0,
) -> Tensor:
    """``F.conv2d`` for one client's images and weights; fast under ``torch.vmap`` over clients on CUDA.

    >>> images, weights = torch.ones(5, 2, 1, 4, 4), torch.ones(5, 3, 1, 3, 3)  # 5 clients
    >>> torch.vmap(conv2d)(images, weights).shape
    torch.Size([5, 2, 3, 2, 2])
    """
    if isinstance(padding, str) or not (_kernels_serve(x, weight) and lanes_under_way()):
        return F.conv2d(x, weight, bias, stride, padding)
    differentiated = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    shape = replace(_shape(x, weight, _pair(stride), _pair(padding)), passed=not differentiated)
    if not shape.fits(x.shape, weight.shape):
        return F.conv2d(x, weight, bias, stride, padding)
    return _apply("result", x, weight, bias, shape)


def _kernels_serve(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can run for tensors of this kind."""
    single = x.dtype == weight.dtype == torch.float32 and x.dim() == weight.dim() == 4
    return single and x.is_cuda and weight.is_cuda and not torch.is_autocast_enabled("cuda") and HAS_TRITON


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


@dataclass(frozen=True)
class _Shape:
    """What the operands' own shapes do not tell about a convolution."""

    stride: Pair
    padding: Pair
    image: Pair
    kernel: Pair
    passed: bool = False
    """Whether nothing is differentiated, so that images of lanes with the same weights may be one lane's."""

    @property
    def result(self) -> Pair:
        """Height and width of the result."""
        height, width = (
            (n + 2 * p - k) // s + 1
            for n, p, k, s in zip(self.image, self.padding, self.kernel, self.stride, strict=True)
        )
        return height, width

    def fits(self, x: torch.Size, weight: torch.Size) -> bool:
        """Whether this is a convolution that the kernels serve; torch says what is wrong with any other."""
        if x[1] != weight[1] or 0 in x or 0 in weight or min(self.stride) < 1 or min(self.padding) < 0:
            return False
        height, width = self.result
        sides = [n + 2 * p for n, p in zip(self.image, self.padding, strict=True)]
        largest = max(room(x[1]) * sides[0] * sides[1], room(weight[0]) * height * width)
        return min(height, width) > 0 and x[0] * largest <= _LARGEST


def _shape(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> _Shape:
    return _Shape(stride, padding, (x.shape[-2], x.shape[-1]), (weight.shape[-2], weight.shape[-1]))


class _Product(torch.autograd.Function):
    """The product with a ``role`` in ``_AXES``; its operands are the other two, in that order.

    They belong to one convolution, or have lanes in front. ``bias`` is for a result alone, else None.
    """

    @staticmethod
    def forward(role: str, left: Tensor, right: Tensor, bias: Tensor | None, shape: _Shape) -> Tensor:
        """Operands of four axes belong to one convolution, operands of five to one per lane."""
        if left.dim() == 4:
            return _plain(role, left, right, bias, shape)
        result: Tensor
        if role == "result":
            result = stacked_conv_forward(left, right, bias, shape.stride, shape.padding)
        elif role == "image":
            result = stacked_conv_input_gradient(left, right, shape.stride, shape.padding, shape.image)
        else:
            result = stacked_conv_weight_gradient(left, right, shape.stride, shape.padding, shape.kernel)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the operands for either direction of differentiation."""
        ctx.role, left, right, _, ctx.shape = inputs
        ctx.save_for_backward(left, right)
        ctx.save_for_forward(left, right)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """An operand's gradient is the product of the other one and ``gradient``; computed if wanted."""
        names = _operands(ctx.role)
        tensors = dict(zip(names, ctx.saved_tensors, strict=True)) | {ctx.role: gradient}
        gradients: list[Tensor | None] = [None, None]
        for place, name in enumerate(names):
            if ctx.needs_input_grad[1 + place]:
                left, right = (tensors[other] for other in _operands(name))
                gradients[place] = _apply(name, left, right, None, ctx.shape)
        bias = gradient.sum((-4, -2, -1)) if ctx.needs_input_grad[3] else None
        return None, *gradients, bias, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """The product rule."""
        left, right = ctx.saved_tensors
        tangent = _apply(ctx.role, tangents[1], right, None, ctx.shape)
        tangent = tangent + _apply(ctx.role, left, tangents[2], None, ctx.shape)
        return tangent if tangents[3] is None else tangent + tangents[3][..., None, :, None, None]

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        role: str,
        left: Tensor,
        right: Tensor,
        bias: Tensor | None,
        shape: _Shape,
    ) -> tuple[Tensor, int]:
        """Lanes of both operands go to the kernels; lanes of one are more samples or channels of it.

        Where nothing is differentiated, so do images that all lanes have in common.
        """
        left_lanes, right_lanes, bias_lanes = in_dims[1:4]
        if shape.passed and left.dim() == 5 and right_lanes is None and bias_lanes is None:
            images = left.movedim(left_lanes, 0)
            one = images.reshape(1, -1, *images.shape[2:])
            if shape.fits(one.shape[1:], right.shape):
                bias = None if bias is None else bias[None]
                result = _apply(role, one, right[None], bias, shape)
                return result.view(*images.shape[:2], *result.shape[2:]), 0
        of_all = left.dim() == 4 and left_lanes is None and right_lanes is not None
        if shape.passed and of_all and not lanes_under_way():
            # One convolution with the channels of all lanes leaves them where ReLU and pooling do not go on.
            left, left_lanes = left.expand(info.batch_size, *left.shape), 0
        if bias is not None:
            own = bias_lanes is not None
            bias = bias.movedim(bias_lanes, 0) if own else bias.expand(info.batch_size, *bias.shape)
        if left_lanes is not None and right_lanes is not None:
            left, right = left.movedim(left_lanes, 0), right.movedim(right_lanes, 0)
            if left.dim() == 5:
                return _apply(role, left, right, bias, shape), 0
            # Lanes of lanes.
            bias = None if bias is None else bias.flatten(0, 1)
            result = _apply(role, left.flatten(0, 1), right.flatten(0, 1), bias, shape)
            return result.reshape(*left.shape[:2], *result.shape[1:]), 0
        if left_lanes is None and right_lanes is None:
            result = _apply(role, left, right, None, shape)[None]
            result = result.expand(info.batch_size, *result.shape[1:])
        else:
            # The operand's axis to widen is the one that the other does not have: the product has it too.
            left_name, right_name = _operands(role)
            if left_lanes is not None:
                (axis,) = set(_AXES[left_name]) - set(_AXES[right_name])
                left = _widened(left, left_lanes, _AXES[left_name].index(axis))
            else:
                (axis,) = set(_AXES[right_name]) - set(_AXES[left_name])
                right = _widened(right, right_lanes, _AXES[right_name].index(axis))
            result = _narrowed(
                _apply(role, left, right, None, shape), info.batch_size, _AXES[role].index(axis)
            )
        return result if bias is None else result + bias[..., None, :, None, None], 0


def _apply(role: str, left: Tensor, right: Tensor, bias: Tensor | None, shape: _Shape) -> Tensor:
    result: Tensor = _Product.apply(role, left, right, bias, shape)  # type: ignore[no-untyped-call]
    return result


def _operands(role: str) -> tuple[str, str]:
    left, right = (name for name in _AXES if name != role)
    return left, right


def _widened(operand: Tensor, lanes: int, axis: int) -> Tensor:
    """The operand with its lanes merged into the first or second of its last four axes."""
    return operand.movedim(lanes, axis - 5).flatten(axis - 5, axis - 4)


def _narrowed(product: Tensor, lanes: int, axis: int) -> Tensor:
    """The product with the lanes taken out of that axis again, to the front."""
    before, after = product.shape[: axis - 4], product.shape[product.dim() + axis - 3 :]
    return product.reshape(*before, lanes, -1, *after).movedim(axis - 5, 0)


def _plain(role: str, left: Tensor, right: Tensor, bias: Tensor | None, shape: _Shape) -> Tensor:
    """One convolution, or one of its gradients, by torch."""
    window = (shape.stride, shape.padding)
    if role == "result":
        return F.conv2d(left, right, bias, *window)
    if role == "image":
        size = (right.shape[0], left.shape[1], *shape.image)
        image: Tensor = conv2d_input(size, left, right, *window)  # type: ignore[no-untyped-call]
        return image
    size = (right.shape[1], left.shape[1], *shape.kernel)
    weight: Tensor = conv2d_weight(left, size, right, *window)  # type: ignore[no-untyped-call]
    return weight


# The operations on lanes, which a traced graph holds as single nodes ----------------------------------------


def _kernels(tensor: Tensor) -> Any:
    """The kernels where they can run; elsewhere None, and the lanes are gone through one by one."""
    if not tensor.is_cuda:
        return None
    from sartor.kernels import convolution_triton

    return convolution_triton


def _one_by_one(role: str, left: Tensor, right: Tensor, bias: Tensor | None, shape: _Shape) -> Tensor:
    biases = [None] * len(left) if bias is None else bias
    return torch.stack([_plain(role, *lane, shape) for lane in zip(left, right, biases, strict=True)])


@torch.library.custom_op(
    "sartor::stacked_conv_forward",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding) -> Tensor",
)
def stacked_conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
) -> Tensor:
    """The convolution of every lane: ``x`` [L, B, C, H, W], ``weight`` [L, O, C, h, w], ``bias`` [L, O]."""
    kernels = _kernels(x)
    if kernels is None:
        return _one_by_one("result", x, weight, bias, _shape(x, weight, stride, padding))
    result: Tensor = kernels.forward(x, weight, bias, stride, padding)
    return result


@torch.library.custom_op(
    "sartor::stacked_conv_input_gradient",
    mutates_args=(),
    schema="(Tensor weight, Tensor gradient, int[] stride, int[] padding, int[] image) -> Tensor",
)
def stacked_conv_input_gradient(
    weight: Tensor, gradient: Tensor, stride: Pair, padding: Pair, image: Pair
) -> Tensor:
    """The gradient for images [L, B, C, *image] from the one for the result, [L, B, O, h, w]."""
    kernels = _kernels(weight)
    if kernels is None:
        shape = _Shape(stride, padding, image, (weight.shape[-2], weight.shape[-1]))
        return _one_by_one("image", weight, gradient, None, shape)
    result: Tensor = kernels.input_gradient(weight, gradient, stride, padding, image)
    return result


@torch.library.custom_op(
    "sartor::stacked_conv_weight_gradient",
    mutates_args=(),
    schema="(Tensor x, Tensor gradient, int[] stride, int[] padding, int[] kernel) -> Tensor",
)
def stacked_conv_weight_gradient(
    x: Tensor, gradient: Tensor, stride: Pair, padding: Pair, kernel: Pair
) -> Tensor:
    """The gradient for weights [L, O, C, *kernel] from the one for the result, [L, B, O, h, w]."""
    kernels = _kernels(x)
    if kernels is None:
        shape = _Shape(stride, padding, (x.shape[-2], x.shape[-1]), kernel)
        return _one_by_one("weight", x, gradient, None, shape)
    result: Tensor = kernels.weight_gradient(x, gradient, stride, padding, kernel)
    return result


@stacked_conv_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    return x.new_empty(*x.shape[:2], weight.shape[1], *_shape(x, weight, stride, padding).result)


@stacked_conv_input_gradient.register_fake
def _(weight: Tensor, gradient: Tensor, stride: Pair, padding: Pair, image: Pair) -> Tensor:
    return gradient.new_empty(*gradient.shape[:2], weight.shape[2], *image)


@stacked_conv_weight_gradient.register_fake
def _(x: Tensor, gradient: Tensor, stride: Pair, padding: Pair, kernel: Pair) -> Tensor:
    return x.new_empty(x.shape[0], gradient.shape[2], x.shape[2], *kernel)
