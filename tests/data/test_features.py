"""Histograms of oriented gradients: known images give known histograms."""

import math

import pytest
import torch

from sartor.data.features import CHUNK, FEATURES, Hog, NoFeature
from sartor.errors import DataError


def ramp(degrees: float, slope: float = 1.0, side: int = 28) -> torch.Tensor:
    """An image that rises with the given slope in one direction (x to the right, y down)."""
    down, right = torch.meshgrid(torch.arange(float(side)), torch.arange(float(side)), indexing="ij")
    angle = math.radians(degrees)
    return (slope * (math.cos(angle) * right + math.sin(angle) * down))[None, None]


@pytest.mark.parametrize("degrees", [10, 50, 110, 170, 230, 350])
def test_a_ramp_fills_the_bin_of_its_direction_with_block_area_times_slope(degrees):
    blocks = Hog(norm="none")(ramp(degrees, slope=0.5)).view(64, 9)
    expected = torch.zeros(64, 9)
    expected[:, degrees // 40] = 49 * 0.5
    assert torch.allclose(blocks, expected, atol=1e-3)


def test_block_normalisation_gives_unit_blocks_and_leaves_empty_blocks_zero():
    image = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    image[0] = 0.3
    norms = Hog()(image).view(3, 64, 9).norm(dim=2)
    assert torch.equal(norms[0], torch.zeros(64))
    assert torch.allclose(norms[1:], torch.ones(2, 64), atol=1e-6)


def test_block_normalisation_forgets_the_contrast():
    image = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(Hog()(image), Hog()(0.25 * image + 0.1), atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "features"), [((1, 28, 28), 576), ((1, 32, 32), 729), ((3, 32, 32), 729), ((1, 8, 8), 9)]
)
def test_number_of_features(shape, features):
    assert Hog()(torch.rand(2, *shape)).shape == (2, features)


@pytest.mark.parametrize("bins", [4, 8, 12])
def test_turning_the_image_by_a_quarter_turns_blocks_and_shifts_bins_by_a_quarter(bins):
    image = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(3))
    before = Hog(bins=bins, norm="none")(image).view(5, 8, 8, bins)
    after = Hog(bins=bins, norm="none")(torch.rot90(image, 1, (2, 3))).view(5, 8, 8, bins)
    # Anticlockwise, with y down, takes an angle a to a - 90 degrees.
    expected = torch.rot90(before, 1, (1, 2)).roll(-bins // 4, dims=3)
    assert torch.allclose(after, expected, atol=1e-4)


def test_a_quarter_turn_with_nine_bins_takes_the_middle_of_a_bin_where_it_belongs():
    turned = Hog(norm="none")(torch.rot90(ramp(110), 1, (2, 3))).view(64, 9)
    assert torch.equal(turned.argmax(dim=1), torch.full((64,), 20 // 40))


def test_of_a_colour_image_the_strongest_channel_counts():
    weak, strong = ramp(10, 0.2), ramp(130, 0.9)
    colour = torch.cat([weak, strong, weak], dim=1)
    assert torch.equal(Hog()(colour), Hog()(strong))


def test_the_strongest_channel_is_chosen_pixel_by_pixel():
    left, right = ramp(10), ramp(130)
    left[..., 14:], right[..., :14] = left[..., 13:14], 0.0
    blocks = Hog(norm="none")(torch.cat([left, right], dim=1)).view(8, 8, 9)
    assert blocks[0, 0].argmax() == 0
    assert blocks[0, 7].argmax() == 3


def test_chunks_do_not_show():
    image = torch.rand(CHUNK + 3, 1, 8, 8, generator=torch.Generator().manual_seed(4))
    whole = Hog()(image)
    assert torch.allclose(whole[CHUNK:], Hog()(image[CHUNK:]), atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 784), (4, 1, 6, 28), (4, 28, 28)])
def test_what_is_no_image_or_too_small_is_refused(shape):
    with pytest.raises(DataError, match="hog: needs images"):
        Hog()(torch.zeros(shape))


def test_none_leaves_samples_alone_and_all_are_found_by_name():
    x = torch.rand(3, 5)
    assert NoFeature()(x) is x
    assert set(FEATURES) == {"none", "scale", "hog"}
