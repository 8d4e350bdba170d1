"""Kernels compiled ahead on CUDA: just those that a step launches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from helpers import classification, federation_of, method, play
from sartor.engines.stacked import trace
from sartor.kernels import ahead
from sartor.kernels.gpu import HAS_TRITON
from sartor.model.task import Task

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")]


def network(channels: int = 11) -> nn.Module:
    """With sizes that no other test has, so that nothing is compiled yet."""
    torch.manual_seed(0)
    first = (nn.Conv2d(3, channels, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(channels, 23, 3), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(207, 29), nn.ReLU(), nn.Linear(29, 7))


@pytest.mark.parametrize(("channels", "sizes"), [(11, (96,) * 6), (13, (96, 80, 64, 48, 32, 16))])
def test_a_traced_step_compiles_nothing_when_it_runs(
    channels: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all clients, or of those who are left, down to one."""
    from triton.runtime.jit import JITFunction

    compile, plain = JITFunction._do_compile, trace._plain
    compiled: list[str] = []
    late: list[str] = []
    running = threading.Event()

    def noted(kernel: Any, *arguments: Any, **options: Any) -> Any:
        (late if running.is_set() else compiled).append(kernel.__name__)
        return compile(kernel, *arguments, **options)

    def seen(graph: fx.GraphModule) -> Callable[[list[Tensor]], list[Tensor]]:
        run = plain(graph)

        def watched(inputs: list[Tensor]) -> list[Tensor]:
            running.set()
            try:
                return run(inputs)
            finally:
                running.clear()

        return watched

    monkeypatch.setattr(JITFunction, "_do_compile", noted)
    monkeypatch.setattr(trace, "_plain", seen)
    monkeypatch.setattr(ahead, "_COMPILED", set())
    data = classification(sizes, shape=(3, 18, 18), classes=7)
    task = Task(network(channels), classes=7)
    made = federation_of("stacked", task, data, local={"batch": 16}, device="cuda")
    play(method("fedavg", made), made, [range(6)] * 2)
    assert not late
    assert len(compiled) > 10


def test_a_run_is_the_same_without() -> None:
    data, left = classification((40, 17, 23), shape=(3, 18, 18), classes=7), []
    for wanted in (True, False):
        made = federation_of("stacked", Task(network(), classes=7), data, local={"batch": 8}, device="cuda")
        made.engine._tracer.ahead.wanted = wanted  # type: ignore[attr-defined]
        left.append(play(method("fedavg", made), made, [range(3)] * 3).w)
    assert torch.equal(*left)
