"""Client states: one row per client, addressed by client number. The server has no way to them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

ON_DEVICE_BYTES = 4 << 30
"""States up to this size stay on the device.

Larger ones lie in host memory and only a cohort's rows travel.
"""


class StateStore:
    """Named states of all clients, each a table with one row per client."""

    def __init__(self, clients: int, device: torch.device) -> None:
        self.clients, self.device = clients, device
        self._tables: dict[str, Tensor] = {}

    def declare(self, name: str, initial: Tensor) -> None:
        """A state that starts with the same value at every client."""
        bytes_needed = initial.nbytes * self.clients
        where = self.device if bytes_needed <= ON_DEVICE_BYTES else torch.device("cpu")
        self._tables[name] = initial.to(where).expand(self.clients, *initial.shape).clone()

    def rows(self, name: str, numbers: np.ndarray) -> Tensor:
        """The states of some clients, on the device."""
        table = self._tables[name]
        return table[torch.from_numpy(numbers).to(table.device)].to(self.device)

    def write(self, name: str, numbers: np.ndarray, rows: Tensor) -> None:
        """Replace the states of some clients."""
        table = self._tables[name]
        table.index_copy_(0, torch.from_numpy(numbers).to(table.device), rows.to(table.device, table.dtype))

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __getitem__(self, name: str) -> Tensor:
        return self._tables[name]
