"""How much memory of a device a process may have."""

from __future__ import annotations

import pytest
import torch

from sartor.kernels import device
from sartor.kernels.device import free_bytes, share_device, untaken_bytes

CUDA = torch.device("cuda")


def test_of_several_processes_each_has_its_part_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may not have taken theirs yet: what is free now is not all for the first who asks."""
    asked: list[float] = []
    monkeypatch.setattr(device, "_SHARES", [])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", asked.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda where: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda where: 40)
    assert free_bytes(CUDA) == 700 + 60
    share_device(3)
    assert asked == [pytest.approx(0.3)]
    assert free_bytes(CUDA) == 200 + 60  # 300 in all, of which 40 are in use
    assert untaken_bytes(CUDA) == 200
    share_device(1)
    assert free_bytes(CUDA) == 700 + 60
    share_device(10)
    assert free_bytes(CUDA) == 60  # it has more than its part already
