"""Tables that a server keeps: one row per client."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def rows(table: Tensor, clients: np.ndarray) -> Tensor:
    """The rows of these clients.

    >>> rows(torch.tensor([[0.0], [1.0], [2.0]]), np.array([2, 0])).tolist()
    [[2.0], [0.0]]
    """
    return table[torch.as_tensor(clients, device=table.device)]
