"""Numbers on their way to a device are not written over before it has read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sartor.engines.stacked.pinned import Pinned


class Device:
    """What stands for a GPU: it reads what it was asked to when an event makes it, and no sooner."""

    def __init__(self) -> None:
        self.asked: list[tuple[Tensor, list[int]]] = []
        self.done = 0

    def read(self, up_to: int) -> None:
        for there, expected in self.asked[self.done : up_to]:
            assert there.tolist() == expected
        self.done = max(self.done, up_to)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    class Event:
        at = 0

        def record(self, stream: Any) -> None:
            self.at = len(made.asked)

        def synchronize(self) -> None:
            made.read(self.at)

    def plain(*size: int, pin_memory: bool, **settings: Any) -> Tensor:
        assert pin_memory
        return torch.zeros(*size, **settings)

    monkeypatch.setattr(torch, "empty", plain)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return made


def test_what_was_not_read_stays(device: Device) -> None:
    pinned = Pinned(torch.device("cuda"), half=16)
    for turn in range(60):
        numbers = np.arange(turn, turn + 1 + turn % 16)
        device.asked.append((pinned.put(numbers), numbers.tolist()))
        assert len(device.asked) - device.done <= 2 * 16
    device.read(len(device.asked))


def test_more_than_a_half_has_room_of_its_own(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self.clone())
    pinned = Pinned(torch.device("cuda"), half=4)
    there = pinned.put(np.arange(5))
    pinned.put(np.arange(4) + 7)
    assert there.tolist() == [0, 1, 2, 3, 4]


def test_on_a_cpu_nothing_travels() -> None:
    numbers = np.arange(3)
    assert np.shares_memory(Pinned(torch.device("cpu")).put(numbers).numpy(), numbers)
