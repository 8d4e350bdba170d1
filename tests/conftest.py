"""Settings for all tests."""

from __future__ import annotations

import pytest
import torch

import sartor  # noqa: F401  (sets how threads wait, before torch starts any)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests run side by side, one on each core."""
    torch.set_num_threads(1)
