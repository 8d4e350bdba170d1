"""Settings for all tests."""

from __future__ import annotations

import pytest
import torch

import sartor  # noqa: F401  (sets how threads wait, before torch starts any)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``nightly``, whatever else is asked for, unless that is."""
    if "nightly" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests run side by side, one on each core."""
    torch.set_num_threads(1)
