"""Every kernel compiled for a device that need not be there: ``python offline.py 90`` prints {kernel: PTX}.

The launches are those of small operands, whose numbers nobody reads.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


def pretend(capability: int) -> None:
    """Have PyTorch and Triton find one device of this compute capability."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
        )
    )
    torch.version.cuda = torch.version.cuda or "12.8"
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    torch.cuda.device = torch.cuda.device_of = lambda _: nullcontext()  # type: ignore[assignment, misc]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def launch_all() -> None:
    """Launch every kernel once."""
    from sartor.kernels import (
        attention_triton,
        batch_norm_triton,
        convolution_triton,
        descent_triton,
        laid_triton,
        lengths_triton,
        likelihood_triton,
        moves_triton,
        norms_triton,
        orders_triton,
        pointwise_triton,
        pooling_triton,
        products_triton,
        quantised_triton,
        shuffle_triton,
    )
    from sartor.kernels.descent import Product

    descent_triton._there = lambda layout, device: draw(len(layout), dtype=torch.int64)
    one, two, weight, bias = (1, 1), (2, 2), draw(3, 32, 16, 3, 3), draw(3, 32)
    images, given = draw(3, 4, 16, 8, 8), draw(3, 4, 32, 8, 8)
    laid = moves_triton.lay(images, None, (3, 4))
    moves_triton.border(laid, None, (3, 4), 16, one)
    laid_triton.convolve(laid, weight, bias, one, one, True, True, True)
    laid_triton.input_gradient(weight, moves_triton.lay(given, None, (3, 4)), one, one, (8, 8), False)
    convolution_triton.direct(draw(3, 4, 1, 10, 10), draw(3, 32, 1, 3, 3), bias, one, True, False)
    convolution_triton.weight_gradient(images, given, one, one, (3, 3))
    pooled = draw(3, 4, 32, 4, 4), draw(3, 4, 32, 4, 4, dtype=torch.uint8)
    moves_triton.add_up(moves_triton.spread(*pooled, 32, (8, 8), True, True, True, True)[2])
    pooling_triton.spread(draw(2, 3, 4, 4), draw(2, 3, 4, 4, dtype=torch.int64), [8, 8], [*two])
    left, right = draw(3, 32, 64), draw(3, 64, 48)
    products_triton.completed(left, right, None, False, 32, draw(3, 48), None, True)
    descent_triton.descended(
        draw(3, 1536 + 40), [draw(3, 5, 40)], [Product(left, right, None, False, 0)], 0.1, None
    )
    targets, real = draw(3, 32, dtype=torch.int64), draw(3, dtype=torch.int64)
    likelihood_triton.pulled(draw(2, 3, 32, 10), draw(3, 10), targets, None, None, 1.0, real)
    shuffle_triton.shuffled(real, real, 20)
    pointwise_triton.pointwise([draw(3, 50), draw(3, 50)], json.dumps([[["add", 0, 1]], [2]]))
    lengths_triton.lengths(draw(3, 50))
    x, weight, bias = draw(3, 4, 16, 8, 8), draw(3, 16), draw(3, 16)
    norms_triton.normalise(x, weight, bias, None, 4, 64, 1e-5, True)
    norms_triton.gradients(x, x, weight, bias, None, 4, 64, 1e-5, True)
    counted = draw(3, 4)
    moments = batch_norm_triton.moments(x, counted)
    batch_norm_triton.normalise(x, weight, bias, *moments, None, 1e-5, True)
    batch_norm_triton.gradients(x, x, weight, bias, counted, *moments, draw(3), 1e-5, None, True)
    query, turned = draw(3, 2, 16, 16), draw(3, 2, 16, 16)
    attention_triton.gradients(
        attention_triton.attend(query, turned, query, 0.25), query, turned, query, 0.25
    )
    codes = quantised_triton.quantised(draw(3, 50), draw(3, 1), real, 7, 50, 4)
    quantised_triton.restored(codes, draw(3, 1), 50, 7, 50, 4)
    orders_triton.median(draw(5, 50), draw(5))


def compiled(capability: int) -> dict[str, str]:
    """What each kernel is in PTX."""
    pretend(capability)
    from sartor.kernels import ahead

    launches: list[Any] = []
    with FakeTensorMode(), ahead.noted(launches):
        launch_all()
    every = {
        f"{launch.kernel.__module__.rpartition('.')[2]}.{launch.kernel.__name__}": launch
        for launch in launches
    }
    return {name: launch.compile(torch.device("cuda", 0)).asm["ptx"] for name, launch in every.items()}


if __name__ == "__main__":
    print(json.dumps(compiled(int(sys.argv[1]))))
