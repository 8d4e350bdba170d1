"""Layers that need to know more than their input.

BatchNorm takes statistics over the real samples of a padded batch, and hands out its running ones instead of
changing them in place; Dropout has masks from the keyed streams; a convolution may be one of many clients at
once. A module's own layers become these, by :func:`shareable`, and learn of a pass by :func:`told`. Those
with a ``forward`` of their own stay what they are.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from sartor.errors import SartorError
from sartor.kernels import batch_norm
from sartor.kernels.convolution import conv2d
from sartor.model.draws import dropped, inside_transform

Change = Callable[[Tensor], Tensor]
"""From the features (the head's input) of a batch to what the head is given in their place."""
Frozen = bool | Callable[[str], bool]
"""Which layers, by module path, use their running statistics without changing them: all, none, or some.

Where some are frozen they are as in evaluation, without dropout; ``True`` is about statistics alone.
"""


class Mode:
    """What a forward pass tells the replaced layers, and the running statistics they hand back."""

    def __init__(
        self,
        *,
        training: bool,
        weight: Tensor | None = None,
        frozen: Frozen = False,
        key: Tensor | int = 0,
        change: Change | None = None,
    ) -> None:
        self.training, self.weight, self.frozen, self.key = training, weight, frozen, key
        self.change = change
        self.changed: dict[str, Tensor] = {}
        self.features: Tensor | None = None
        self.draws = 0

    def still(self, path: str) -> bool:
        """Whether the running statistics of the layer at this path are used and stay as they are."""
        return not self.training or (self.frozen(path) if callable(self.frozen) else self.frozen)

    def drops(self, path: str) -> bool:
        """Whether dropout at this path drops anything: not in a layer that is as in evaluation."""
        return self.training and not (callable(self.frozen) and self.frozen(path))


_context = threading.local()


@contextmanager
def told(mode: Mode) -> Iterator[None]:
    """Meanwhile layers know of this pass."""
    previous = getattr(_context, "mode", None)
    _context.mode = mode
    try:
        yield
    finally:
        _context.mode = previous


def note_features(head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A hook of the head: what it is given are the features; a change is made here."""
    mode: Mode = _context.mode
    mode.features = inputs[0]
    return None if mode.change is None else (mode.change(inputs[0]), *inputs[1:])


class BatchNorm(nn.Module):
    """BatchNorm over the real samples of a padded batch.

    It returns running statistics rather than changing them.
    """

    path: str
    eps: float
    momentum: float
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """The samples normalised, and scaled and shifted where the layer does so."""
        mode: Mode = _context.mode
        still = mode.still(self.path) or not self.training
        if self.running_mean is not None and self.running_var is not None and still:
            mean, variance = self.running_mean, self.running_var
        elif self._is_usual(x):
            return self._usual(x)
        elif self.weight is not None and self.bias is not None and batch_norm.serves(x, self.weight):
            return self._normalised(x, mode.weight, self.weight, self.bias)
        else:
            mean, variance = self._statistics(x, mode.weight)
        shape = [1, -1] + [1] * (x.dim() - 2)
        normal = (x - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is None or self.bias is None:
            return normal
        return normal * self.weight.view(shape) + self.bias.view(shape)

    def _is_usual(self, x: Tensor) -> bool:
        """Whether PyTorch's own layer would do the same, in fewer operations: all samples of a client."""
        held = (self.weight, self.running_mean)
        alike = all(tensor is None or tensor.dtype == x.dtype for tensor in held)
        several = x.dim() > 1 and x.numel() > x.shape[1]
        return alike and several and _context.mode.weight is None and not inside_transform()

    def _usual(self, x: Tensor) -> Tensor:
        """The same by PyTorch's own layer."""
        if self.running_mean is not None and self.running_var is not None:
            others = [axis for axis in range(x.dim()) if axis != 1]
            unbiased, mean = torch.var_mean(x.detach(), others)
            before_mean, before_var = self._before(self.running_mean, self.running_var)
            self._change(before_mean.lerp(mean, self.momentum), before_var.lerp(unbiased, self.momentum))
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)

    def _before(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """The running statistics; a layer that is called twice in a pass goes on from its first change."""
        changed = _context.mode.changed
        named = tensor_names(self.path, "running_mean", "running_var")
        return changed.get(named[0], mean), changed.get(named[1], variance)

    def _change(self, mean: Tensor, variance: Tensor) -> None:
        """Hand back what the running statistics have become."""
        named = tensor_names(self.path, "running_mean", "running_var")
        _context.mode.changed |= dict(zip(named, (mean, variance), strict=True))

    def _normalised(self, x: Tensor, weight: Tensor | None, gamma: Tensor, beta: Tensor) -> Tensor:
        """The same by kernels that know the gradients."""
        counted = _ones_like_rows(x) if weight is None else weight
        count = counted.sum() * x[0, 0].numel()
        mean, variance = self._moved(*batch_norm.moments(x, counted), count)
        given = count <= 1 if self.running_mean is not None else torch.zeros_like(count, dtype=torch.bool)
        share = torch.where(given, 0.0, 1 / count)
        return batch_norm.normalised(x, gamma, beta, counted, mean, variance, share, self.eps)

    def _statistics(self, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        others = [axis for axis in range(x.dim()) if axis != 1]
        weight = _ones_like_rows(x) if weight is None else weight
        weight = weight.view([-1] + [1] * (x.dim() - 1))
        count = weight.sum() * (x[0, 0].numel())
        mean = (x * weight).sum(others) / count
        centred = (x - mean.view([1, -1] + [1] * (x.dim() - 2))) * weight
        variance = (centred * centred).sum(others) / count
        return self._moved(mean, variance, count)

    def _moved(self, mean: Tensor, variance: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """The statistics to normalise by, after the running ones have moved towards them."""
        if self.running_mean is not None and self.running_var is not None:
            share = self.momentum
            unbiased = variance * count / (count - 1).clamp(min=1)
            before_mean, before_var = self._before(self.running_mean, self.running_var)
            # One value has no variance, and PyTorch refuses it; here the running statistics stand in and
            # stay.
            single = count <= 1
            mean, variance = torch.where(single, before_mean, mean), torch.where(single, before_var, variance)
            moved = before_var + share * (unbiased - before_var)
            self._change(before_mean + share * (mean - before_mean), torch.where(single, before_var, moved))
        return mean, variance


def _ones_like_rows(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], dtype=x.dtype, device=x.device)


class Dropout(nn.Module):
    """Dropout whose mask is a function of the batch's key, so that every engine draws the same."""

    path: str
    p: float
    whole_channels: bool

    def forward(self, x: Tensor) -> Tensor:
        """What is not dropped, larger by as much as is."""
        mode: Mode = _context.mode
        if self.p == 0 or not self.training or not mode.drops(self.path):
            return x
        return dropped(mode, x, self.p, self.whole_channels)


def tensor_names(path: str, *tensors: str) -> list[str]:
    """What tensors of a layer are called in the module."""
    return [f"{path}.{name}" if path else name for name in tensors]


class Conv2d(nn.Conv2d):
    """A convolution that many clients, each with its own weights, compute together on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        """By a kernel for all clients where there is one."""
        return conv2d(
            x, self.weight, self.bias, cast("tuple[int, int]", self.stride), cast(Any, self.padding)
        )


_NORM_FORWARDS = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
_DROPOUT_FORWARDS = tuple(kind.forward for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d))


def shareable(module: nn.Module, name: str) -> nn.Module:
    """A copy of the module whose BatchNorm and Dropout layers are versions that clients can share.

    They stay the objects they are, with their hooks, wherever the module holds them.
    """
    module = copy.deepcopy(module)
    for path, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.momentum is None:
            what = "BatchNorm with momentum=None, an average over all batches ever seen"
            raise SartorError(f"model {name}: layer {path!r} is {what}; give it a momentum, such as 0.1")
        kind = _shareable_kind(layer)
        if kind is not None:
            vars(layer).update(path=path, whole_channels=not isinstance(layer, nn.Dropout))
            layer.__class__ = kind
    return module


def _shareable_kind(layer: nn.Module) -> type[nn.Module] | None:
    """What a layer becomes, if anything: not where it computes or is put into a mode in a way of its own."""
    forward = getattr(layer.forward, "__func__", None)
    if type(layer).train is not nn.Module.train or is_parametrized(layer):
        return None
    if forward in _NORM_FORWARDS:
        return BatchNorm
    if forward in _DROPOUT_FORWARDS:
        return Dropout
    if type(layer) is nn.Conv2d and (layer.groups, layer.dilation, layer.padding_mode) == (
        1,
        (1, 1),
        "zeros",
    ):
        return Conv2d
    return None
