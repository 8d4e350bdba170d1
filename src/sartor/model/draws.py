"""What is drawn at random inside of a user's code, drawn from the keyed streams instead.

``torch.rand``, ``F.dropout`` and their like take the next numbers of a generator that all of a process
shares, so that what they give depends on everything that was drawn before. Under :class:`Keyed` the n-th of
these calls draws from the n-th sub-stream of a key: equal keys give equal numbers, whatever engine runs the
code. A tensor's numbers are drawn in the order of its rows, so that rows which fill up a batch change nothing
for those before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sartor import random


class Counted(Protocol):
    """A key, and how often it was drawn from."""

    key: Tensor | int
    draws: int


class Drawing:
    """A key that nothing was drawn from yet."""

    def __init__(self, key: Tensor | int) -> None:
        self.key, self.draws = key, 0


class Keyed(TorchFunctionMode):
    """A context in which random functions of PyTorch draw from a key.

    Calls with a generator of their own are left alone, and so are a few functions that are not known here.

    >>> with Keyed(Drawing(7)):
    ...     first = torch.rand(2)
    >>> with Keyed(Drawing(7)):
    ...     bool((torch.rand(2) == first).all())
    True
    """

    def __init__(self, drawing: Counted) -> None:
        super().__init__()
        self.drawing = drawing
        self.called = False
        """Whether one of these functions was called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Draw in place of a function that would; all others are called as they are."""
        kwargs = kwargs or {}
        if func in _PYTHON:  # draws by functions that are seen here only if its own look at them is left out
            with self:
                return _opened(func)(*args, **kwargs)
        if func not in _DRAWN or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.called = True
        return _DRAWN[func](self.drawing, *args, **kwargs)


def inside_transform() -> bool:
    """Whether a torch.func transform, such as the stacked engine's vmap, is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _numbers(drawing: Counted, kind: Callable[..., Tensor], shape: Sequence[int], device: Any) -> Tensor:
    """The next numbers of a stream, in float64; they are drawn where the key is."""
    drawing.draws += 1
    shape, key = torch.Size(shape), random.fold(drawing.key, drawing.draws)
    there = key.device if isinstance(key, Tensor) else device
    return kind(key, shape.numel(), there).view(shape).to(device or torch.get_default_device())


def _uniform(drawing: Counted, like: Tensor) -> Tensor:
    return _numbers(drawing, random.uniform, like.shape, like.device)


def _normal(drawing: Counted, like: Tensor) -> Tensor:
    return _numbers(drawing, random.normal, like.shape, like.device)


def _sized(size: tuple[Any, ...], options: dict[str, Any]) -> Sequence[int]:
    """A size that is given as numbers, as one sequence or by name."""
    given: Any = options.get("size", size)
    found: Sequence[int] = given[0] if len(given) == 1 and not isinstance(given[0], int) else given
    return found


def _kind(options: dict[str, Any], usual: torch.dtype | None = None) -> dict[str, Any]:
    """The type and the device that a new tensor is to have."""
    dtype = options.get("dtype") or usual or torch.get_default_dtype()
    return {"dtype": dtype, "device": options.get("device")}


def _new(kind: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def draw(drawing: Counted, *size: Any, **options: Any) -> Tensor:
        made = _kind(options)
        return _numbers(drawing, kind, _sized(size, options), made["device"]).to(made["dtype"])

    return draw


def _like(kind: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def draw(drawing: Counted, input: Tensor, **options: Any) -> Tensor:
        made = _kind(options, input.dtype)
        return _numbers(drawing, kind, input.shape, made["device"] or input.device).to(made["dtype"])

    return draw


def _whole(uniform: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    return (low + torch.floor(uniform * (high - low))).to(dtype)


def _randint(drawing: Counted, *args: Any, **options: Any) -> Tensor:
    *bounds, size = args if "size" not in options else (*args, options["size"])
    bounds += [options[key] for key in ("low", "high") if key in options]
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    made = _kind(options, torch.int64)
    return _whole(_numbers(drawing, random.uniform, tuple(size), made["device"]), low, high, made["dtype"])


def _randint_like(drawing: Counted, input: Tensor, *bounds: int, **options: Any) -> Tensor:
    given = [*bounds, *(options[key] for key in ("low", "high") if key in options)]
    low, high = given if len(given) == 2 else (0, *given)
    return _whole(_uniform(drawing, input), low, high, options.get("dtype") or input.dtype)


def _randperm(drawing: Counted, n: int, **options: Any) -> Tensor:
    made = _kind(options, torch.int64)
    return _numbers(drawing, random.uniform, (n,), made["device"]).argsort().to(made["dtype"])


def _bernoulli(drawing: Counted, input: Tensor, p: Any = None, **options: Any) -> Tensor:
    chance = input if p is None else p
    return (_uniform(drawing, input) < chance).to(input.dtype)


def _normal_of(drawing: Counted, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    like = next((value for value in (mean, std) if isinstance(value, Tensor)), None)
    if like is None:
        made = _kind(options)
        like = torch.empty(size, **made)
    elif isinstance(mean, Tensor) and isinstance(std, Tensor):
        like = mean + std
    found: Tensor = mean + std * _normal(drawing, like).to(like.dtype)
    return found


def _multinomial(
    drawing: Counted, input: Tensor, num_samples: int, replacement: bool = False, **options: Any
) -> Tensor:
    scores = input.double().log()
    if replacement:
        shape = (*input.shape[:-1], num_samples, input.shape[-1])
        return (scores[..., None, :] + _gumbel(drawing, shape, input.device)).argmax(dim=-1)
    noise = _gumbel(drawing, input.shape, input.device)
    return (scores + noise).topk(num_samples, dim=-1).indices


def _gumbel(drawing: Counted, shape: Sequence[int], device: Any) -> Tensor:
    draws = _numbers(drawing, random.uniform, shape, device).clamp(min=2.0**-53)
    return -torch.log(-torch.log(draws))


def _filled(values: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that writes into its tensor."""

    def draw(drawing: Counted, self: Tensor, *args: Any, **options: Any) -> Tensor:
        return self.copy_(values(drawing, self, *args, **options))

    return draw


def _bernoulli_in(drawing: Counted, self: Tensor, p: Any = 0.5, **options: Any) -> Tensor:
    found: Tensor = _uniform(drawing, self) < p
    return found


def _uniform_in(drawing: Counted, self: Tensor, a: float = 0.0, b: float = 1.0, **options: Any) -> Tensor:
    low, high = options.get("from", a), options.get("to", b)
    found: Tensor = low + (high - low) * _uniform(drawing, self)
    return found


def _normal_in(drawing: Counted, self: Tensor, mean: float = 0.0, std: float = 1.0, **options: Any) -> Tensor:
    return mean + std * _normal(drawing, self)


def _random_in(drawing: Counted, self: Tensor, *bounds: int, **options: Any) -> Tensor:
    given = [*bounds, *(options[key] for key in ("from", "to") if key in options)]
    whole = not self.dtype.is_floating_point
    most = torch.iinfo(self.dtype).max if whole else int(2 / torch.finfo(self.dtype).eps)
    low, high = given if len(given) == 2 else (0, *(given or [most + 1]))
    return _whole(_uniform(drawing, self), low, high, self.dtype)


def _cauchy_in(
    drawing: Counted, self: Tensor, median: float = 0.0, sigma: float = 1.0, **options: Any
) -> Tensor:
    return median + sigma * torch.tan(math.pi * (_uniform(drawing, self) - 0.5))


def _log_normal_in(
    drawing: Counted, self: Tensor, mean: float = 1.0, std: float = 2.0, **options: Any
) -> Tensor:
    return torch.exp(_normal_in(drawing, self, mean, std))


def _geometric_in(drawing: Counted, self: Tensor, p: float, **options: Any) -> Tensor:
    return torch.floor(torch.log1p(-_uniform(drawing, self)) / math.log1p(-p)) + 1


def _exponential_in(drawing: Counted, self: Tensor, lambd: float = 1.0, **options: Any) -> Tensor:
    return -torch.log1p(-_uniform(drawing, self)) / lambd


def _dropout(
    whole_channels: bool, *, alpha: bool = False, trains: bool = True, in_place: bool = False
) -> Callable[..., Tensor]:
    drop = _alpha_dropped if alpha else dropped

    def draw(
        drawing: Counted,
        input: Tensor,
        p: float = 0.5,
        training: bool = trains,
        inplace: bool = in_place,
        **known: Any,
    ) -> Tensor:
        training = known.get("train", training)
        if not training or p == 0:
            return input
        result = drop(drawing, input, p, whole_channels)
        return input.copy_(result) if inplace else result

    return draw


def dropped(drawing: Counted, x: Tensor, p: float, whole_channels: bool = False) -> Tensor:
    """Dropout: numbers, or channels of samples, are zero with this probability, the others larger for it."""
    return x * _kept(drawing, x, p, whole_channels) * (0.0 if p == 1 else 1 / (1 - p))


SATURATED = 1.7580993408473766
"""What SELU's output goes to, with its sign turned."""


def _alpha_dropped(drawing: Counted, x: Tensor, p: float, whole_channels: bool = False) -> Tensor:
    """Dropout to SELU's lowest value, moved so that mean and variance stay (Klambauer et al., eq. 6)."""
    keep = _kept(drawing, x, p, whole_channels)
    scale = 0.0 if p == 1 else 1 / math.sqrt((1 - p) * (1 + p * SATURATED**2))
    return scale * (x * keep + SATURATED * (keep - 1 + p))


def _kept(drawing: Counted, x: Tensor, p: float, whole_channels: bool) -> Tensor:
    """1 where a number, or a channel of a sample, stays, else 0."""
    shape = x.shape[:2] if whole_channels else x.shape
    draws = _numbers(drawing, random.uniform, shape, x.device)
    return (draws >= p).to(x.dtype).view(*shape, *[1] * (x.dim() - len(shape)))


def _rrelu(
    drawing: Counted,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
    **options: Any,
) -> Tensor:
    """Below zero a slope that is drawn for every number; outside of training the mean one."""
    slope: Any = (lower + upper) / 2
    if training:
        slope = (lower + (upper - lower) * _uniform(drawing, input)).to(input.dtype)
    result = torch.where(input > 0, input, slope * input)
    return input.copy_(result) if inplace else result


def _recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's recurrent layers, one after the other, with dropout between them."""

    def draw(drawing: Counted, *args: Any) -> Any:
        first = 1 if isinstance(args[3], bool) else 2  # a packed sequence has the sizes of its batches too
        (x, *sizes), (state, weights, biases, layers, p, train, both) = args[:first], args[first : first + 7]
        if not train or p == 0 or layers == 1:
            return function(*args)
        each, ways, states = len(weights) // layers, 1 + both, []
        for layer in range(layers):
            here = slice(layer * ways, (layer + 1) * ways)
            own = tuple(part[here] for part in state) if isinstance(state, tuple) else state[here]
            mine = weights[layer * each : (layer + 1) * each]
            x = dropped(drawing, x, p) if layer else x
            x, *after = function(x, *sizes, own, mine, biases, 1, 0.0, train, both, *args[first + 7 :])
            states.append(after)
        return (x, *(torch.cat(parts) for parts in zip(*states, strict=True)))

    return draw


def _attention(
    drawing: Counted,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with dropout of its weights; without any it is PyTorch's own.

    That has no form for many clients at once, so there it is written out too.
    """
    if dropout_p == 0 and not inside_transform():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        heads = query.shape[-3]
        key = key.repeat_interleave(heads // key.shape[-3], -3)
        value = value.repeat_interleave(heads // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    shares = scores.softmax(dim=-1)
    return (shares if dropout_p == 0 else dropped(drawing, shares, dropout_p)) @ value


@cache
def _opened(func: FunctionType) -> Callable[..., Any]:
    """A function of PyTorch's that does not ask whether it is overridden, so that its body runs in a mode."""
    never = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False
    )
    opened = FunctionType(func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


_PYTHON: frozenset[Any] = frozenset({F.gumbel_softmax, F.multi_head_attention_forward})
_DRAWN: dict[Any, Callable[..., Tensor]] = {
    torch.rand: _new(random.uniform),
    torch.randn: _new(random.normal),
    torch.rand_like: _like(random.uniform),
    torch.randn_like: _like(random.normal),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.normal: _normal_of,
    torch.multinomial: _multinomial,
    torch.Tensor.multinomial: _multinomial,
    torch.Tensor.bernoulli_: _filled(_bernoulli_in),
    torch.Tensor.uniform_: _filled(_uniform_in),
    torch.Tensor.normal_: _filled(_normal_in),
    torch.Tensor.exponential_: _filled(_exponential_in),
    torch.Tensor.log_normal_: _filled(_log_normal_in),
    torch.Tensor.cauchy_: _filled(_cauchy_in),
    torch.Tensor.geometric_: _filled(_geometric_in),
    torch.Tensor.random_: _filled(_random_in),
    F.dropout: _dropout(False),
    torch.dropout: _dropout(False),
    F.dropout1d: _dropout(True),
    F.dropout2d: _dropout(True),
    F.dropout3d: _dropout(True),
    torch.feature_dropout: _dropout(True),
    torch.dropout_: _dropout(False, in_place=True),
    torch.feature_dropout_: _dropout(True, in_place=True),
    F.alpha_dropout: _dropout(False, alpha=True, trains=False),
    F.feature_alpha_dropout: _dropout(True, alpha=True, trains=False),
    torch.alpha_dropout: _dropout(False, alpha=True),
    torch.alpha_dropout_: _dropout(False, alpha=True, in_place=True),
    torch.feature_alpha_dropout: _dropout(True, alpha=True),
    torch.feature_alpha_dropout_: _dropout(True, alpha=True, in_place=True),
    F.rrelu: _rrelu,
    torch.rrelu: _rrelu,
    **{kind: _recurrent(kind) for kind in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    F.scaled_dot_product_attention: _attention,
}
