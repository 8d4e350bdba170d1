"""Settings for all tests."""

from __future__ import annotations

import functools
import gc
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.testing
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings

import sartor  # noqa: F401  (sets how threads wait, before torch starts any)
from sartor import random
from sartor.engines.stacked import trace

gc.disable()  # until all tests are known: what is imported and collected stays

# How long an example takes says how busy the machine is.
settings.register_profile("sartor", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sartor")

# Commands are put together once, not for each of their many calls.
typer.testing._get_command = functools.cache(typer.testing._get_command)

TOGETHER = (
    "tests/docs/test_site_built.py",
    "tests/engines/test_sharded.py",
    "tests/model/test_hugging_face.py",
    "tests/report/test_report_browser.py",
    "tests/runs/test_survival.py",
    "tests/runs/test_tracking.py",
)
"""Files whose tests share what takes long to make, so that one worker runs all of them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``nightly``, whatever else is asked for, unless that is."""
    if "nightly" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=_turn)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is marked ``cuda`` needs such a device."""
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def _turn(item: pytest.Item) -> int:
    """What one worker runs one after the other begins first, and then what takes long."""
    if _file(item.nodeid) in TOGETHER:
        return 0
    return 1 if item.get_closest_marker("slow") else 2


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0]


def pytest_collection_finish() -> None:
    """What all tests have imported is no garbage, but for a little: nobody need look through it, nor often.

    PyTorch has dozens of loggers that pytest would listen to one by one in every test.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """What pytest makes of the assertions is made once, and found by all workers where pytest keeps it."""
    files = [] if sys.dont_write_bytecode else sorted(Path(__file__).parent.rglob("test_*.py"))
    for file in files:
        kept = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite.try_makedirs(kept.parent) and rewrite._read_pyc(file, kept) is None:
            seal, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, seal, kept)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whoever is free runs the next test, or the next file of those whose tests share something."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _file(nodeid) if _file(nodeid) in TOGETHER else nodeid

        def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
            for done in [scope for scope, tests in workload.items() if all(tests.values())]:
                del workload[done]  # or all that were ever run are counted after each
            return super()._pending_of(workload)

    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests run side by side, one on each core."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A network that a test makes does not depend on which tests the same process has run before."""
    random.seed_torch(0)


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
