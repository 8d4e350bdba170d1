"""Settings for all tests."""

from __future__ import annotations

import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

import sartor  # noqa: F401  (sets how threads wait, before torch starts any)
from sartor.engines.stacked import trace

# How long an example takes says how busy the machine is.
settings.register_profile("sartor", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sartor")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``nightly``, whatever else is asked for, unless that is."""
    if "nightly" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    # Tests that one worker runs one after the other, mostly waiting, begin first: others fill the time.
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests run side by side, one on each core."""
    torch.set_num_threads(1)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stacked engine traces every step, and not only those that are worth it."""
    monkeypatch.setattr(trace, "UNTRACED", 0)


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """A shell starts its background jobs so that they, and all they start, ignore Ctrl-C: not these, which
    press it themselves.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
