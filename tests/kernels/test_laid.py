"""The kernels of laid images give what PyTorch gives.

They run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1). Operands are small whole numbers,
of which every product and sum is exact: results are the same to the bit, and windows have several maxima.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from sartor.kernels import laid

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
kernels = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available()),
    reason="Triton needs CUDA, or TRITON_INTERPRET=1",
)

# lanes, batch, channels in, height, width, channels out, kernel, stride, padding
SHAPES = {
    "one channel": (2, 3, 1, 9, 8, 6, (5, 5), (1, 1), (0, 0)),
    "three channels": (2, 2, 3, 9, 9, 20, (5, 5), (1, 1), (2, 2)),
    "six channels": (3, 2, 6, 7, 7, 17, (3, 2), (1, 1), (1, 0)),
    "many channels": (2, 2, 32, 6, 6, 36, (3, 3), (1, 1), (1, 1)),
    "down": (2, 3, 8, 8, 8, 12, (3, 3), (2, 2), (1, 1)),
    "shortcut": (2, 3, 5, 9, 9, 33, (1, 1), (2, 2), (0, 0)),
    "rows left over": (2, 3, 4, 10, 9, 20, (3, 3), (3, 2), (0, 0)),
    "many positions": (1, 9, 2, 17, 17, 3, (3, 3), (1, 1), (1, 1)),
}
ENDS = [(False, False), (True, False), (False, True), (True, True)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).float()


def operands(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, weights and biases of lanes and a gradient of the result; the weights lie in longer rows."""
    lanes, batch, channels, height, width, out, kernel, stride, padding = SHAPES[name]
    size = [
        (n + 2 * p - k) // s + 1 for n, k, s, p in zip((height, width), kernel, stride, padding, strict=True)
    ]
    rows = draw(lanes, out * channels * kernel[0] * kernel[1] + 7)
    weight = rows[:, 3:-4].unflatten(1, (out, channels, *kernel))
    x = draw(lanes, batch, channels, height, width)
    return x, weight, draw(lanes, out), draw(lanes, batch, out, *size, seed=1)


def same(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.cpu(), other)


def on(*values: Any) -> list[Any]:
    return [value.to(DEVICE) if isinstance(value, Tensor) else value for value in values]


@kernels
@pytest.mark.parametrize("name", SHAPES)
def test_images_are_laid(name: str) -> None:
    from sartor.kernels import moves_triton

    x, weight, *_ = operands(name)
    for images in (x, weight, weight.transpose(1, 2)):
        ours = moves_triton.lay(*on(images), None, images.shape[:2])
        same([ours], [laid.laid_images(images, None, images.shape[:2])])
    data, numbers = x.flatten(0, 1), torch.tensor([3, 0, 0, 1, 2, 3])
    ours = moves_triton.lay(*on(data, numbers, (2, 3)))
    same([ours], [laid.laid_images(data, numbers, (2, 3))])


@kernels
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("relu", "pool"), ENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_convolution_and_what_follows(name: str, relu: bool, pool: bool, first: bool) -> None:
    from sartor.kernels import laid_triton

    x, weight, bias, _ = operands(name)
    for given in (bias, None) if name == "six channels" else (bias,):
        arguments = (weight, given, *SHAPES[name][7:], relu, pool, first)
        images = laid.laid_images(x, None, x.shape[:2])
        ours = laid_triton.convolve(*on(images, *arguments))
        expected = laid.laid_conv(images, *arguments)
        same(ours[:1], expected[:1])
        real = slice(None) if first else slice(weight.shape[1])  # behind the channels a place is any
        same([ours[1][..., real]], [expected[1][..., real]])


@kernels
def test_what_is_no_number_is_a_maximum() -> None:
    from sartor.kernels import laid_triton

    x, weight, bias, _ = operands("three channels")
    x[0, 1, 2, 3:5, 4] = torch.nan
    images = laid.laid_images(x, None, x.shape[:2])
    arguments = (weight, bias, (1, 1), (2, 2), True, True, True)
    result, places = laid_triton.convolve(*on(images, *arguments))
    expected, expected_places = laid.laid_conv(images, *arguments)
    assert expected.isnan().any()
    same([result.nan_to_num(9.5), places], [expected.nan_to_num(9.5), expected_places])


@kernels
@pytest.mark.parametrize("name", SHAPES)
def test_the_gradients(name: str) -> None:
    from sartor.kernels import laid_triton

    x, weight, _, gradient = operands(name)
    kernel, *window = SHAPES[name][6:]
    images, given = (laid.laid_images(value, None, value.shape[:2]) for value in (x, gradient))
    for first in (False, True):
        arguments: tuple[Any, ...] = (weight, given, *window, x.shape[-2:], first)
        same([laid_triton.input_gradient(*on(*arguments))], [laid.laid_input_gradient(*arguments)])
    arguments = (images, given, x.shape[2], gradient.shape[2], *window, kernel)
    same([laid_triton.weight_gradient(*on(*arguments))], [laid.laid_weight_gradient(*arguments)])


@kernels
@pytest.mark.parametrize("places_first", [False, True])
@pytest.mark.parametrize("given_first", [False, True])
@pytest.mark.parametrize(("relu", "pool"), ENDS[1:])
@pytest.mark.parametrize("name", ["six channels", "many positions"])
def test_the_way_back(name: str, relu: bool, pool: bool, given_first: bool, places_first: bool) -> None:
    from sartor.kernels import moves_triton

    x, weight, bias, gradient = operands(name)
    images = laid.laid_images(x, None, x.shape[:2])
    window = SHAPES[name][7:]
    _, places = laid.laid_conv(images, weight, bias, *window, relu, pool, places_first)
    channels, size = weight.shape[1], gradient.shape[-2:]
    given = gradient[..., : size[0] // 2, : size[1] // 2] if pool else gradient
    given = given.contiguous() if given_first else laid.laid_images(given, None, given.shape[:2])
    arguments = (given, places, channels, size, given_first, places_first)
    ours, expected = moves_triton.spread(*on(*arguments)), laid.laid_spread(*arguments)
    same([ours[0], ours[1].sum(0)], [expected[0], expected[1].sum(0)])


@kernels
def test_a_lane_does_not_depend_on_the_others() -> None:
    from sartor.kernels import laid_triton

    x, weight, bias, gradient = operands("six channels")
    x, weight, bias, gradient = on(x.sin(), weight.sin(), bias.sin(), gradient.sin())
    x, gradient = (value.permute(0, 1, 3, 4, 2).contiguous() for value in (x[:, :, :4], gradient[:, :, :16]))
    weight, bias = weight[:, :16, :4], bias[:, :16]
    window = ((1, 1), (1, 0))

    def all_of(*lanes: Tensor) -> list[Tensor]:
        x, weight, bias, gradient = lanes
        return [
            laid_triton.convolve(x, weight, bias, *window, True, True, False)[0],
            laid_triton.input_gradient(weight, gradient, *window, (7, 7), False),
            laid_triton.weight_gradient(x, gradient, 4, 16, *window, (3, 2)),
        ]

    together = all_of(x, weight, bias, gradient)
    for lane in range(len(x)):
        alone = all_of(*(value[lane : lane + 1] for value in (x, weight, bias, gradient)))
        same((one[0] for one in alone), (one[lane].cpu() for one in together))
    same(all_of(x, weight, bias, gradient), (one.cpu() for one in together))


@pytest.mark.parametrize("name", ["six channels", "down"])
def test_the_operations_are_well_declared(name: str) -> None:
    """Torch's own check: schema, shapes without data, tracing."""
    x, weight, bias, gradient = operands(name)
    kernel, stride, padding = SHAPES[name][6:]
    images, given = (laid.laid_images(value, None, value.shape[:2]) for value in (x, gradient))
    operations = torch.ops.sartor
    result, places = laid.laid_conv(images, weight, bias, stride, padding, True, True, True)
    data, numbers = x.flatten(0, 1), torch.tensor([3, 0, 0, 1, 2, 3])
    for operation, arguments in [
        (operations.laid_images, (x, None, list(x.shape[:2]))),
        (operations.laid_images, (data, numbers, [2, 3])),
        (operations.laid_conv, (images, weight, bias, stride, padding, True, True, True)),
        (operations.laid_conv, (images, weight, None, stride, padding, False, False, False)),
        (operations.laid_spread, (result, places, weight.shape[1], gradient.shape[-2:], True, True)),
        (operations.laid_input_gradient, (weight, given, stride, padding, x.shape[-2:], True)),
        (operations.laid_input_gradient, (weight, given, stride, padding, x.shape[-2:], False)),
        (
            operations.laid_weight_gradient,
            (images, given, x.shape[2], gradient.shape[2], stride, padding, kernel),
        ),
    ]:
        torch.library.opcheck(operation.default, arguments)
