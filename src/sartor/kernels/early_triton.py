"""Kernels that are made ready while the one before them still runs.

A kernel of a chain begins when the one before it has ended. From compute capability 9.0 on the device can
make it ready meanwhile (programmatic dependent launches): on an H200 rounds of softmax regression take 5 %
less, of the CNN half a percent. Its programs come when those of the one before have ended. They could come
sooner and wait on the device, but would crowd where there is room already: that made rounds of the CNN 10 %
longer.

Every kernel calls :func:`wait_turn` first of all, before it reads or writes anything. There it waits until
the kernel before it has ended and what that wrote can be seen; as that one had waited in turn, all others
before have ended as well. So memory is touched in the same order as without. A kernel that is not ours waits
to be launched, and is waited for, as ever. This module needs Triton.
"""

# mypy: ignore-errors
# Triton's language is not Python's, and it brings no types.

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_wait
except ImportError:  # Triton before 3.4
    gdc_wait = None


def _serves() -> bool:
    """Whether every device can do so: a kernel is the same for all of them."""
    if gdc_wait is None or torch.version.cuda is None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    devices = range(torch.cuda.device_count())
    return min(map(torch.cuda.get_device_capability, devices), default=(0, 0)) >= (9, 0)


EARLY = {"launch_pdl": True} if _serves() else {}
"""The options of every launch; a kernel that has them must call :func:`wait_turn`."""
_EARLY = tl.constexpr(bool(EARLY))


@triton.jit
def wait_turn():
    """Wait until the kernel before has ended."""
    if _EARLY:
        gdc_wait()
