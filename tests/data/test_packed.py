"""Some of the clients, with their samples alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from helpers import classification
from sartor.data.clients import lazy_clients

COUNTS = (5, 0, 7, 3, 6, 4)


def test_packed_clients_have_the_samples_they_had_and_no_others_are_there() -> None:
    data = classification(COUNTS)
    weight = torch.arange(float(len(data.train.y)))
    data = replace(data, train=replace(data.train, weight=weight))
    own = np.array([4, 1, 2])
    packed = data.some(own).packed()
    assert len(packed.train.y) == packed.train.count.sum() == data.train.count[own].sum()
    assert len(packed.train.y) < len(data.train.y)
    for place, number in enumerate(own.tolist()):
        for mine, theirs in ((packed.train, data.train), (packed.test, data.test)):
            for found, expected in zip(mine.of(place), theirs.of(number), strict=True):
                assert torch.equal(found, expected)
    assert packed.train.weight is not None
    expected = [
        weight[start : start + n] for start, n in zip(data.train.start, data.train.count, strict=True)
    ]
    assert torch.equal(packed.train.weight, torch.cat([expected[number] for number in own]))
    assert packed.pooled_x is data.pooled_x


def test_where_nobody_has_samples_one_is_left_to_show() -> None:
    packed = classification(COUNTS).some(np.array([1])).packed()
    assert packed.train.count.tolist() == [0]
    assert packed.train.x.shape[0] == 1


def test_samples_that_are_fetched_are_nobodys_before() -> None:
    def fetch(client: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full((3, 2), float(client)), np.array([0, 1, 0])

    data = lazy_clients(9, fetch, n_train=2, n_test=1, classes=2)
    packed = data.some(np.array([7, 3])).packed()
    assert packed.train.of(1)[0].tolist() == [[3.0, 3.0]] * 2


def test_numbers_of_samples_that_are_one_for_all_take_no_memory_and_give_the_same_data() -> None:
    def fetch(client: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full((4, 2), float(client)), np.array([0, 1, 0, 1])

    one = lazy_clients(5, fetch, n_train=2, n_test=1, n_validation=1, classes=2)
    each = lazy_clients(5, fetch, n_train=[2] * 5, n_test=1, n_validation=[1] * 5, classes=2)
    assert one.hash == each.hash
    assert one.validation is not None
    assert one.validation.start.strides == (0,)
    assert each.validation is not None
    assert each.validation.start.tolist() == one.validation.start.tolist() == [3] * 5
