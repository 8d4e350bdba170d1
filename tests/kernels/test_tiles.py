"""How kernels cut their work: by how many programs there are."""

from __future__ import annotations

import itertools

import pytest
import torch

from sartor.kernels import laid, products
from sartor.kernels.gpu import choices, coming
from sartor.kernels.laid import Tiles

SHARED = 99 * 1024
"""Bytes that a program may share on the smallest devices with tensor cores."""
LANES = (1, 2, 3, 4, 6, 8, 10, 16, 40, 100)
LAYERS = [
    *itertools.product((6, 10, 16, 32, 48, 64, 128, 300), (4, 16, 32, 64, 128), (64, 1440, 6272, 32768))
]
PRODUCTS = [
    *itertools.product((1, 10, 32, 100, 1000), (10, 64, 512, 3136), (10, 200, 512, 3136), (False, True))
]


def fits(tiles: Tiles) -> bool:
    return (tiles.rows + tiles.columns) * tiles.depth * 4 * tiles.stages <= SHARED


@pytest.mark.parametrize("lanes", LANES)
def test_tiles_are_such_as_a_device_has_room_for_and_triton_compiles_rightly(lanes: int) -> None:
    for out, channels, positions in LAYERS:
        tiles = laid.convolve_tiles(out, channels, positions, lanes)
        assert fits(tiles), (out, channels, positions)
        assert (tiles.rows, tiles.columns, tiles.warps) != (64, 16, 4)
        assert tiles.depth <= 32 or channels % tiles.depth == 0
    for (rows, columns, depth, along), parts in itertools.product(PRODUCTS, (1, 8)):
        tiles = products.tiles_of(rows, columns, depth, along, parts, lanes)
        assert fits(tiles), (rows, columns, depth)
        assert tiles.depth == products.tiles_of(rows, columns, depth, along, parts, 1000).depth


def test_fewer_lanes_have_no_larger_tiles() -> None:
    for fewer, more in itertools.pairwise(LANES):
        for layer in LAYERS:
            small, large = (laid.convolve_tiles(*layer, lanes) for lanes in (fewer, more))
            assert small.rows * small.columns <= large.rows * large.columns
        for product in PRODUCTS:
            small, large = (products.tiles_of(*product, 1, lanes) for lanes in (fewer, more))
            assert small.rows * small.columns <= large.rows * large.columns


def test_the_papers_network_has_other_tiles_where_few_clients_are_left() -> None:
    """The gradient of its second convolution, and of its first dense layer, for 32 images."""
    found = [laid.convolve_tiles(32, 64, 32 * 14 * 14, lanes) for lanes in (1, 4, 10)]
    assert len(set(found)) == 3
    dense = [products.tiles_of(32, 3136, 512, False, 1, lanes) for lanes in (3, 4)]
    assert dense[0].stages > dense[1].stages


def test_a_windows_rows_go_to_the_gradient_where_there_are_few_channels() -> None:
    """LeNet's first layer, but none of those for which that was slower; nor where rows are left out."""
    layers = {"lenet": (6, 3, 5, 5), "second": (16, 6, 5, 5), "cnn": (32, 3, 5, 5), "grey": (32, 1, 5, 5)}
    sizes = {"lenet": 28, "second": 10, "cnn": 32, "grey": 28}
    found = {
        name: laid.split(torch.Size((40, 100, weight[0], sizes[name], sizes[name])), weight, (1, 1)).risen
        for name, weight in layers.items()
    }
    assert found == {"lenet": True, "second": False, "cnn": False, "grey": False}
    assert not laid.split(torch.Size((40, 100, 6, 14, 28)), (6, 3, 5, 5), (2, 1)).risen


def test_what_is_coming_is_chosen_too_and_only_while_it_is_noted() -> None:
    def width(lanes: int) -> int:
        return laid.convolve_tiles(32, 64, 6272, lanes).rows

    with coming(range(1, 11)):
        assert choices(width, 10) == [128, 64]
    assert choices(width, 10) == [128]
    assert choices(width, 2) == [64]
