"""Memory that is freed goes back to the system, also where holes are left between what is in use."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from sartor import memory
from sartor.memory import Idle

MEGABYTE = 1 << 20


def with_holes() -> list[torch.Tensor]:
    """64 MB in pieces, of which one in fifty is still in use."""
    return [torch.ones(25_000) for _ in range(640)][::50]


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="another C library than glibc",
)
def test_what_is_idle_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "GROWN", 16 * MEGABYTE)
    monkeypatch.setattr(memory, "OFTEN", 0.0)
    idle = Idle()
    monkeypatch.setattr(idle, "_least", 0)
    memory._trim()  # what other tests have left
    before = memory._resident()
    kept = with_holes()
    assert memory._resident() - before > 32 * MEGABYTE
    idle.give_back()
    assert memory._resident() - before < 16 * MEGABYTE
    assert all(float(piece.sum()) == 25_000 for piece in kept)


def test_a_look_is_rare_and_so_is_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, held, trimmed = [0.0], [1 << 30], []
    monkeypatch.setattr(memory.time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(memory, "_resident", lambda: held[0])
    monkeypatch.setattr(memory, "_trim", lambda: trimmed.append(held[0]))
    idle = Idle()
    held[0] += memory.GROWN + 1
    idle.give_back()
    assert not trimmed  # it has looked just now
    for second in range(1, 6):
        seconds[0] = float(second)
        idle.give_back()
    assert trimmed == [(1 << 30) + memory.GROWN + 1]  # once, as it has not grown since


def test_where_nothing_is_told_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> str:
        raise OSError

    monkeypatch.setattr(memory.Path, "read_text", missing)
    monkeypatch.setattr(memory, "OFTEN", 0.0)
    monkeypatch.setattr(memory, "_trim", lambda: pytest.fail("nothing is known to be idle"))
    Idle().give_back()


def test_another_c_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    memory._trim()
