"""What a GPU's kernels need, and how several run side by side."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None and any(
    map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))
)
"""Whether Triton can run: it comes with PyTorch for CUDA, and needs a compiler of C."""


def has_tensor_cores(device: torch.device) -> bool:
    """Whether kernels run on this device whose products are made of numbers in tf32."""
    if device.type != "cuda" or torch.version.cuda is None or not HAS_TRITON:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


MOST_STREAMS = 16
"""Streams that run side by side."""


def side_by_side(count: int, device: torch.device) -> Iterator[AbstractContextManager[Any]]:
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
    for place in range(count):
        yield torch.cuda.stream(streams[place % len(streams)])
    for stream in streams:
        main.wait_stream(stream)
