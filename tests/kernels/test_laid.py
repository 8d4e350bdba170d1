"""The kernels of laid images give what PyTorch gives.

They run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1). Operands are small whole numbers,
of which every product and sum is exact: results are the same to the bit, and windows have several maxima.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import ALL_CHECKS, SHAPE_CHECKS
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
    "three of a wide image": (2, 2, 3, 9, 12, 6, (5, 5), (1, 1), (0, 0)),
    "six of an even width": (2, 2, 6, 7, 10, 17, (3, 4), (1, 1), (2, 1)),
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
    weight = rows[:, 3:-4].view(lanes, out, channels, *kernel)
    x = draw(lanes, batch, channels, height, width)
    return x, weight, draw(lanes, out), draw(lanes, batch, out, *size, seed=1)


def same(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.cpu(), other)


def compared(ours: Any, theirs: Any, weight: Tensor, first: bool) -> None:
    """Results and places; where a channel is none, a place is any."""
    real = slice(None) if first else slice(weight.shape[1])
    same([ours[0], ours[1][..., real]], [theirs[0], theirs[1][..., real]])


def on(*values: Any) -> Any:
    return [value.to(DEVICE) if isinstance(value, Tensor) else value for value in values]


@kernels
@pytest.mark.parametrize("name", SHAPES)
def test_images_are_laid(name: str) -> None:
    from sartor.kernels import moves_triton

    x, weight, *_ = operands(name)
    for images in (x, weight, weight.transpose(1, 2)):
        ours = moves_triton.lay(*on(images, None, images.shape[:2]))
        same([ours], [laid.laid_images(images, None, images.shape[:2])])
    data, numbers = x.flatten(0, 1), torch.tensor([3, 0, 0, 1, 2, 3])
    ours = moves_triton.lay(*on(data, numbers, (2, 3)))
    same([ours], [laid.laid_images(data, numbers, (2, 3))])


@kernels
@pytest.mark.parametrize("name", SHAPES)
def test_images_get_a_border(name: str) -> None:
    from sartor.kernels import moves_triton

    x, *_ = operands(name)
    laid_ones = laid.laid_images(x, None, x.shape[:2])
    numbers = torch.tensor([3, 0, 0, 1, 2, 3])
    for arguments in [
        (x, None, x.shape[:2], 0, (1, 2)),
        (laid_ones, None, x.shape[:2], x.shape[2], (2, 0)),
        (laid_ones, None, x.shape[:2], x.shape[2], (0, 0)),
        (x.flatten(0, 1), numbers, (2, 3), 0, (0, 1)),
    ]:
        same([moves_triton.border(*on(*arguments))], [laid.first_images(*arguments)])


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
        compared(ours, laid.laid_conv(images, *arguments), weight, first)


@kernels
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", ["one channel", "three channels", "rows left over", "many positions"])
def test_a_convolution_of_few_channels(name: str, first: bool, relu: bool) -> None:
    from sartor.kernels import convolution_triton

    x, weight, bias, _ = operands(name)
    for given in (bias, None):
        arguments = (x, weight, given, SHAPES[name][7], relu, first)
        compared(convolution_triton.direct(*on(*arguments)), laid.direct_conv(*arguments), weight, first)


@kernels
def test_what_is_no_number_is_a_maximum() -> None:
    from sartor.kernels import convolution_triton, laid_triton

    x, weight, bias, _ = operands("three channels")
    x[0, 1, 2, 3:5, 4] = torch.nan
    images = laid.laid_images(x, None, x.shape[:2])
    arguments = (weight, bias, (1, 1), (0, 0), True, True, True)
    expected, expected_places = laid.laid_conv(images, *arguments)
    assert expected.isnan().any()
    for result, places in (
        laid_triton.convolve(*on(images, *arguments)),
        convolution_triton.direct(*on(x, weight, bias, (1, 1), True, True)),
    ):
        same([result.nan_to_num(9.5), places], [expected.nan_to_num(9.5), expected_places])


@kernels
@pytest.mark.parametrize("name", SHAPES)
def test_the_gradients(name: str) -> None:
    from sartor.kernels import convolution_triton, laid_triton

    x, weight, _, gradient = operands(name)
    kernel, stride, padding = SHAPES[name][6:]
    given = laid.laid_images(gradient, None, gradient.shape[:2])
    for first in (False, True):
        arguments: tuple[Any, ...] = (weight, given, stride, padding, x.shape[-2:], first)
        same([laid_triton.input_gradient(*on(*arguments))], [laid.laid_input_gradient(*arguments)])
    arguments = (laid.first_images(x, None, x.shape[:2], 0, padding), gradient, stride, kernel)
    ours, expected = convolution_triton.correlate(*on(*arguments)), laid.first_weight_gradient(*arguments)
    assert len(ours) == len(expected)
    for risen in (False, True) if stride[0] == 1 else (False,):
        ours = convolution_triton.correlate(*on(*arguments), risen=risen)
        same([ours.sum(0)], [expected.sum(0)])


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
    for wanted in ((True, False), (False, True), (True, True)):
        arguments = (given, places, channels, size, given_first, places_first, *wanted)
        *ours, sums = moves_triton.spread(*on(*arguments))
        *expected, expected_sums = laid.spread_gradient(*arguments)
        same([*ours, sums.sum(0)], [*expected, expected_sums.sum(0)])


@kernels
@pytest.mark.parametrize("count", [1, 3, 40])
def test_parts_are_added_up(count: int) -> None:
    from sartor.kernels import moves_triton

    parts = draw(count, 5, 7, 20)
    same([moves_triton.add_up(*on(parts))], [laid.add_up(parts)])
    alone = moves_triton.add_up(*on(parts[:, :1].sin()))
    assert torch.equal(alone, moves_triton.add_up(*on(parts.sin()))[:1])


@kernels
def test_a_lane_does_not_depend_on_the_others() -> None:
    from sartor.kernels import convolution_triton, laid_triton

    x, weight, bias, gradient = (value.sin() for value in operands("six channels"))

    def all_of(lanes: slice) -> list[Tensor]:
        own = on(x[lanes], weight[lanes], bias[lanes], gradient[lanes])
        images, given = (laid.laid_images(own[place].cpu(), None, own[place].shape[:2]) for place in (0, 3))
        window = ((1, 1), (1, 0))
        return [
            laid_triton.convolve(*on(images, *own[1:3], *window, True, True, False))[0].cpu(),
            laid_triton.input_gradient(*on(own[1], given, *window, (7, 7), False)).cpu(),
            convolution_triton.weight_gradient(own[0], own[3], *window, (3, 2)).cpu(),
            convolution_triton.direct(*on(*own[:3], (1, 1), True, True))[0].cpu(),
        ]

    together = all_of(slice(None))
    for lane in range(len(x)):
        same((one[0] for one in all_of(slice(lane, lane + 1))), (one[lane] for one in together))
    same(all_of(slice(None)), together)


def test_a_lane_is_cut_alike_in_any_company() -> None:
    """Positions into parts, and sums of weights' gradients."""
    for positions, channels in itertools.product(
        (1, 31, 300, 2500, 6272, 25088, 100352), (1, 6, 17, 32, 100)
    ):
        rows, columns, turns, parts = laid.parts_of(positions, channels)
        assert rows * turns * (parts - 1) < positions <= rows * turns * parts
        assert rows * columns <= 2048
    for weight in [(6, 3, 5, 5), (16, 1, 5, 5), (32, 1, 5, 5), (32, 1, 3, 3), (64, 32, 5, 5), (200, 1, 3, 3)]:
        shapes = [torch.Size((lanes, 32, weight[0], 28, 28)) for lanes in (1, 10)]
        one, many = (laid.split(shape, weight, (1, 1)) for shape in shapes)
        assert one == many
        assert min(one.tiles[:2]) >= 16
        rows = 28 + weight[2] - 1 if one.risen else 28
        assert one.share * (one.parts - 1) < 32 * rows <= one.share * one.parts


@pytest.mark.parametrize(("name", "checks"), [("six channels", ALL_CHECKS), ("down", SHAPE_CHECKS)])
def test_the_operations_are_well_declared(name: str, checks: tuple[str, ...]) -> None:
    """Torch's own check: schema, shapes without data, tracing, which is of no one shape."""
    x, weight, bias, gradient = operands(name)
    kernel, stride, padding = SHAPES[name][6:]
    operations, shape = torch.ops.sartor, list(x.shape[:2])
    images, given = (laid.laid_images(value, None, shape) for value in (x, gradient))
    bordered = laid.first_images(x, None, shape, 0, padding)
    result, places = laid.laid_conv(images, weight, bias, stride, padding, True, True, True)
    data, numbers = x.flatten(0, 1), torch.tensor([3, 0, 0, 1, 2, 3])
    lie = (weight.shape[1], gradient.shape[-2:], True, True)
    for operation, arguments in [
        (operations.laid_images, (x, None, shape)),
        (operations.laid_images, (data, numbers, [2, 3])),
        (operations.first_images, (images, None, shape, x.shape[2], [1, 0])),
        (operations.first_images, (data, numbers, [2, 3], 0, [1, 1])),
        (operations.laid_conv, (images, weight, bias, stride, padding, True, True, True)),
        (operations.laid_conv, (images, weight, None, stride, padding, False, False, False)),
        (operations.direct_conv, (x, weight, bias, stride, True, False)),
        (operations.spread_gradient, (result, places, *lie, True, False)),
        (operations.add_up, (x,)),
        (operations.laid_input_gradient, (weight, given, stride, padding, x.shape[-2:], True)),
        (operations.laid_input_gradient, (weight, given, stride, padding, x.shape[-2:], False)),
        (operations.first_weight_gradient, (bordered, gradient, stride, kernel)),
    ]:
        torch.library.opcheck(operation.default, arguments, test_utils=checks)
