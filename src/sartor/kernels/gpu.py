"""What a GPU's kernels need, and how several run side by side."""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")

HAS_TRITON = importlib.util.find_spec("triton") is not None and any(
    map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))
)
"""Whether Triton can run: it comes with PyTorch for CUDA, and needs a compiler of C."""


def has_tensor_cores(device: torch.device) -> bool:
    """Whether kernels run on this device whose products are made of numbers in tf32."""
    if device.type != "cuda" or torch.version.cuda is None or not HAS_TRITON:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def lanes_under_way() -> bool:
    """Whether many clients are computed at once, by ``torch.vmap``: for one, PyTorch's own ways are best.

    >>> lanes_under_way(), torch.vmap(lambda x: x + lanes_under_way())(torch.zeros(2))
    (False, tensor([1., 1.]))
    """
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


FEW_PROGRAMS = 160
"""Programs that do not fill a GPU: more and smaller ones, each with more in flight, are quicker then."""


class _Coming(threading.local):
    """Numbers of lanes that a thread will launch for, while what it launches is only noted."""

    widths: tuple[int, ...] = ()


_COMING = _Coming()


@contextmanager
def coming(widths: Iterable[int]) -> Iterator[None]:
    """Have launches noted for these numbers of lanes too."""
    before, _COMING.widths = _COMING.widths, tuple(widths)
    try:
        yield
    finally:
        _COMING.widths = before


def choices(choose: Callable[[int], T], lanes: int) -> list[T]:
    """What is chosen for so many lanes; and for those that are coming, if that is something else.

    >>> choices(lambda lanes: "small" if lanes < 4 else "large", 10)
    ['large']
    >>> with coming([1, 2, 8, 10]):
    ...     choices(lambda lanes: "small" if lanes < 4 else "large", 10)
    ['large', 'small']
    """
    return list(dict.fromkeys(map(choose, (lanes, *_COMING.widths))))


MOST_STREAMS = 16
"""Streams that run side by side."""


def side_by_side(count: int, device: torch.device) -> Generator[AbstractContextManager[Any], None, None]:
    """A context for each of some pieces of work that do not depend on each other.

    In a graph that is being captured they run at once, on streams that begin and end with the current one.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield from (nullcontext() for _ in range(count))
        return
    main = torch.cuda.current_stream(device)
    streams = [
        torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for _ in range(min(count, MOST_STREAMS))
    ]
    for stream in streams:
        stream.wait_stream(main)
    try:
        for place in range(count):
            yield torch.cuda.stream(streams[place % len(streams)])
    finally:  # also where one of them fails
        for stream in streams:
            main.wait_stream(stream)
