"""Kernels compiled ahead: what would be launched is found, each variant once, and nothing else changes.

Triton needs a GPU; a module of the same form stands in for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from helpers import PATIENCE, RAGGED, classification, federation_of, method, model_task, play
from sartor.engines.stacked import engine, trace
from sartor.engines.stacked.recording import recorded
from sartor.kernels import ahead
from sartor.kernels.ahead import Ahead, Unlaunched, launches_of
from sartor.kernels.convolution import conv2d
from sartor.runs import setup
from sartor.runs.experiment import from_mapping

CUDA = torch.device("cuda", 0)


class Kernel:
    """In place of Triton's ``JITFunction``: a pointer, a number, another that does not matter, a constant."""

    folder: Path
    """Where compiled kernels are kept, a file each with the process that compiled it."""

    def __init__(self, name: str = "_tried") -> None:
        self.__name__ = name
        self.launched: list[tuple[Any, ...]] = []
        self.ready: list[tuple[Any, ...]] = []
        self.params = [
            SimpleNamespace(is_constexpr=constant, do_not_specialize=any_number)
            for constant, any_number in ((False, False), (False, False), (False, True), (True, False))
        ]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *arguments, **options: self.run(*arguments, grid=grid, warmup=False, **options)

    def run(self, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not warmup:
            self.launched.append(arguments)
            return
        assert DRIVER.active.get_current_device() == 0
        x, *numbers = arguments
        file = self.folder / f"{self.__name__} {x.data_ptr()} {numbers}"
        if not file.exists():
            Source(self.__name__, {"x": "*fp32", "size": numbers[-1]}).make_ir("options")
            if numbers[-1] == 13:
                raise ValueError("a kernel that cannot be compiled")
            with file.open("x") as made:
                made.write(f"{os.getpid()} {DRIVER.active.get_current_target()}")
        self.ready.append(arguments)

    @classmethod
    def compiled(cls) -> dict[str, str]:
        """What lies on disk, and who compiled it for what."""
        return {file.name: file.read_text() for file in cls.folder.iterdir()}


class Source:
    """In place of Triton's ``ASTSource``."""

    def __init__(self, name: str, signature: dict[str, Any]) -> None:
        self.name, self.signature = name, signature

    def make_ir(self, options: str) -> None:
        assert options == "options"


LAUNCHERS: list[Any] = []


def launcher(source: Source, metadata: Any) -> None:
    """In place of Triton's ``CudaLauncher``."""
    assert metadata.num_ctas is None
    LAUNCHERS.append(source.signature["size"])


class Driver:
    """In place of Triton's, which asks a device that only one process may."""

    def __init__(self) -> None:
        self.here = os.getpid()
        self.set_active(SimpleNamespace(launcher_cls=launcher, get_current_device=self.device))
        self.active.get_current_target = lambda: f"target of {self.device()}"

    def set_active(self, active: Any) -> None:
        self.active = active

    def device(self) -> int:
        assert os.getpid() == self.here
        return 0


DRIVER = Driver()


class Mock:
    """In place of Triton's ``MockTensor``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.data_ptr = lambda: 0


KERNEL = Kernel()


@torch.library.custom_op(
    "sartor::tried_ahead",
    mutates_args=(),
    schema="(Tensor x, int number, int any_number, int size) -> Tensor",
)
def tried(x: Tensor, number: int, any_number: int, size: int) -> Tensor:
    """Twice ``x``, by an operation that launches a kernel."""
    KERNEL[(1,)](x, number, any_number, size)
    return x.new_empty(x.shape) if isinstance(x, torch._subclasses.FakeTensor) else 2 * x


@tried.register_fake
def _(x: Tensor, number: int, any_number: int, size: int) -> Tensor:
    return x.new_empty(x.shape)


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    jit = SimpleNamespace(JITFunction=Kernel, MockTensor=Mock)
    compiler = SimpleNamespace(ASTSource=Source, driver=DRIVER)
    monkeypatch.setattr(Kernel, "folder", tmp_path, raising=False)
    monkeypatch.setattr(ahead, "_triton", lambda: jit)
    monkeypatch.setattr(ahead, "_compiler", lambda: compiler)
    monkeypatch.setattr(ahead, "_key", lambda: None)
    monkeypatch.setattr(ahead, "_BEGUN", [])
    monkeypatch.setattr(ahead, "shuffles", lambda samples, device: [])
    monkeypatch.setattr(ahead, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(ahead, "_COMPILED", set())
    yield
    KERNEL.launched.clear()
    KERNEL.ready.clear()
    LAUNCHERS.clear()


def compile_graph(graph: fx.GraphModule, *inputs: Tensor) -> None:
    Ahead(CUDA).compile(lambda: graph.forward(*inputs))


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    graph = make_fx(function)(*inputs)
    KERNEL.launched.clear()
    return graph


def several(x: Tensor) -> Tensor:
    """Six launches: the same, another constant, an address of four bytes, and numbers that are 1 and 32."""
    first = tried(tried(x, 7, 5, 2), 9, 6, 2)
    one = tried(first, 7, 1, 3)
    tail = tried(first[1:], 7, 5, 2)
    return one.sum() + tail.sum() + (tried(first, 1, 5, 2) + tried(first, 32, 5, 2)).sum()


def test_launches_are_found_in_order_and_none_is_launched() -> None:
    graph = graph_of(several, torch.ones(8))
    launches = launches_of(lambda: graph.forward(torch.ones(8)))
    assert [launch.arguments[1:] for launch in launches] == [
        (7, 5, 2),
        (9, 6, 2),
        (7, 1, 3),
        (7, 5, 2),
        (1, 5, 2),
        (32, 5, 2),
    ]
    assert [launch.arguments[0].data_ptr() % 16 for launch in launches] == [0, 0, 0, 4, 0, 0]
    assert not KERNEL.launched


def test_every_variant_is_compiled_once() -> None:
    graph = graph_of(several, torch.ones(8))
    compile_graph(graph, torch.ones(8))
    # 7 and 9 are alike, and so are all numbers that it is not compiled for.
    alike = {7: "any", 9: "any"}
    known = [(x.data_ptr(), alike.get(number, number), size) for x, number, _, size in KERNEL.ready]
    assert set(known) == {(0, "any", 2), (0, "any", 3), (4, "any", 2), (0, 1, 2), (0, 32, 2)}
    compile_graph(graph, torch.ones(8))
    assert len(KERNEL.ready) == len(Kernel.compiled()) == 5
    assert not KERNEL.launched


def test_copies_of_the_process_compile_and_ask_no_device() -> None:
    graph = graph_of(several, torch.ones(8))
    compile_graph(graph, torch.ones(8))
    compiled = [who.split(maxsplit=1) for who in Kernel.compiled().values()]
    assert all(int(process) != os.getpid() for process, _ in compiled)
    assert {target for _, target in compiled} == {"target of 0"}


def test_nothing_is_copied_where_all_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(several, torch.ones(8))
    compile_graph(graph, torch.ones(8))
    before = Kernel.compiled()
    monkeypatch.setattr(ahead, "_COMPILED", set())  # as in another process
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a copy is made"))
    compile_graph(graph, torch.ones(8))
    assert len(KERNEL.ready) == 10
    assert Kernel.compiled() == before


@pytest.mark.parametrize("how", ["a system without copies", "no room for one"])
def test_without_copies_threads_compile(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise OSError("no memory")

    if how == "no room for one":
        monkeypatch.setattr(os, "fork", full)
    else:
        monkeypatch.delattr(os, "fork")
    compile_graph(graph_of(several, torch.ones(8)), torch.ones(8))
    assert len(KERNEL.ready) == 5
    assert {int(who.split()[0]) for who in Kernel.compiled().values()} == {os.getpid()}


def test_one_alone_is_compiled_when_launched() -> None:
    graph = graph_of(lambda x: tried(x, 7, 5, 2), torch.ones(8))
    compile_graph(graph, torch.ones(8))
    assert not Kernel.compiled()


def test_what_fails_leaves_the_others_and_the_graph_alone() -> None:
    graph = graph_of(lambda x: tried(tried(tried(x, 7, 5, 13), 7, 5, 2), 7, 5, 3), torch.ones(8))
    compile_graph(graph, torch.ones(8))
    assert sorted(arguments[-1] for arguments in KERNEL.ready) == [2, 3]
    compile_graph(graph)  # which cannot run
    assert torch.equal(graph(torch.ones(8)), torch.full((8,), 8.0))
    assert len(KERNEL.launched) == 3


def test_nothing_is_done_on_a_cpu() -> None:
    Ahead(torch.device("cpu")).compile(lambda: pytest.fail("a step is taken"))
    assert not Kernel.compiled()
    assert not ahead._BEGUN


def test_the_longest_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [Kernel(name) for name in ("_move", "_direct", "_multiply", "_descend")]
    launches = [ahead.Launch(kernel, (Mock(torch.float32), 7, 5, 2), {}) for kernel in kernels]
    begun: list[str] = []

    def noted(work: list[Any], copies: int) -> Any:
        begun.extend(piece.args[0].kernel.__name__ for piece in work)
        return nullcontext()

    monkeypatch.setattr(ahead, "by_copies", noted)
    ahead.compile_all(launches, CUDA)
    assert begun == ["_direct", "_descend", "_move", "_multiply"]


def test_what_launches_kernels_is_made_beside_them_once_for_a_signature() -> None:
    own = Source.make_ir
    graph = graph_of(several, torch.ones(8))
    compile_graph(graph, torch.ones(8))
    assert sorted(LAUNCHERS) == [2, 3]
    assert Source.make_ir is own


def test_a_launcher_that_fails_is_left_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead._compiler().driver.active, "launcher_cls", lambda source, metadata: 1 / 0)
    compile_graph(graph_of(several, torch.ones(8)), torch.ones(8))
    assert len(KERNEL.ready) == 5


def test_shuffles_are_compiled_before_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind what else goes on, as of an engine that is being made; who needs them waits."""
    gate, shuffles = threading.Event(), [Kernel("_shuffle"), Kernel("_batches")]

    def found(samples: int, device: torch.device) -> list[ahead.Launch]:
        gate.wait(PATIENCE)
        return [ahead.Launch(kernel, (Mock(torch.int64), 7, 5, samples), {}) for kernel in shuffles]

    monkeypatch.setattr(ahead, "shuffles", found)
    compiler = Ahead(CUDA, samples=600)
    assert not Kernel.compiled()
    gate.set()
    for _ in range(2):
        compiler.wait()
        assert [len(kernel.ready) for kernel in shuffles] == [1, 1]
    Ahead(CUDA, samples=600).compile(lambda: tried(torch.ones(8), 7, 5, 2))
    assert [len(kernel.ready) for kernel in shuffles] == [1, 1]


def test_what_another_thread_compiles_meanwhile_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look what is on disk is this thread's alone."""
    here, elsewhere = Kernel("_here"), Kernel("_elsewhere")
    own = Kernel.run

    def run(kernel: Kernel, *arguments: Any, **options: Any) -> Any:
        if kernel is here and not elsewhere.ready:
            other = threading.Thread(target=ahead.Launch(elsewhere, arguments, {}).run)
            other.start()
            other.join(PATIENCE)
            assert elsewhere.ready
        return own(kernel, *arguments, **options)

    monkeypatch.setattr(Kernel, "run", run)
    launch = ahead.Launch(here, (Mock(torch.float32), 7, 5, 2), {})
    assert [found for found, _ in ahead.not_on_disk([launch], CUDA)] == [launch]
    assert [*Kernel.compiled()] == ["_elsewhere 0 [7, 5, 2]"]


def test_triton_is_made_ready_once_and_only_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    gate = threading.Event()

    def key() -> None:
        gate.wait(PATIENCE)
        made.append("key")

    monkeypatch.setattr(ahead, "_key", key)
    monkeypatch.setattr(ahead, "_driver", lambda: made.append("driver") or 1 / 0)  # said where it is needed
    ahead.begin(torch.device("cpu"))
    monkeypatch.setattr(ahead, "HAS_TRITON", False)
    ahead.begin(CUDA)
    assert not ahead._BEGUN
    monkeypatch.setattr(ahead, "HAS_TRITON", True)
    for _ in range(2):
        ahead.begin(CUDA)
    compiler = Ahead(CUDA)
    assert len(ahead._BEGUN) == 2
    assert "key" not in made  # nobody waits for it
    gate.set()
    compiler.compile(lambda: (tried(torch.ones(8), 7, 5, 2), tried(torch.ones(8), 7, 5, 3)))
    assert sorted(made) == ["driver", "key"]
    assert len(KERNEL.ready) == 2


def test_a_step_as_it_stands_launches_nothing_and_draws_nothing() -> None:
    x, before = torch.ones(3, 8), torch.get_rng_state()
    compiler = Ahead(CUDA)
    compiler.compile(lambda: (tried(x, 7, 5, 2), tried(x, 7, 5, 3)))
    assert len(KERNEL.ready) == 2
    assert not KERNEL.launched
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, torch.ones(3, 8))
    compiler.compile(lambda: 1 / 0)  # shows when it is taken


def test_results_that_are_made_up_have_the_right_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of operations within derivatives of many lanes."""
    monkeypatch.setattr("sartor.kernels.convolution._kernels_serve", lambda x, weight: True)
    x, w = torch.randn(3, 2, 1, 6, 6), torch.randn(3, 4, 1, 3, 3)
    step = vmap(grad(lambda w, x: conv2d(x, w).square().mean()))
    with Unlaunched():
        made_up = step(w, x)
    assert made_up.shape == step(w, x).shape
    assert made_up.isfinite().all()
    assert not torch.equal(made_up, step(w, x))


def test_tracing_sees_the_operations_and_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sartor.kernels.convolution._kernels_serve", lambda x, weight: True)
    step = vmap(grad(lambda w, x: conv2d(tried(x, 7, 5, 2), w).square().mean()))
    inputs = [torch.randn(3, 4, 1, 3, 3), torch.randn(3, 2, 1, 6, 6)]
    graphs = []
    for wanted in (False, True):
        KERNEL.launched.clear()
        compiler = Ahead(CUDA)
        compiler.wanted = wanted
        graphs.append(compiler.traced(lambda: recorded(lambda values: [step(*values)], inputs)))
        assert bool(KERNEL.launched) is not wanted
    for graph in graphs:
        graph.recompile()
    assert graphs[0].code == graphs[1].code
    assert "sartor.stacked_conv_weight_gradient" in graphs[1].code
    values = [node.meta["val"] for node in graphs[1].graph.nodes if "val" in node.meta]
    expected = [node.meta["val"] for node in graphs[0].graph.nodes if "val" in node.meta]
    assert [(x.shape, x.stride()) for x in values] == [(x.shape, x.stride()) for x in expected]


def test_tracing_that_fails_without_numbers_has_them() -> None:
    def picky() -> int:
        if tried(torch.zeros(2), 7, 5, 2).any():
            raise ValueError("not these numbers")
        return len(KERNEL.launched)

    assert Ahead(CUDA).traced(picky) == 1
    with pytest.raises(ZeroDivisionError):
        Ahead(CUDA).traced(lambda: 1 / 0)


def test_what_has_memory_is_launched_meanwhile() -> None:
    launches: list[ahead.Launch] = []
    with ahead.noted(launches):
        KERNEL[(1,)](torch.ones(2), 7, 5, 2)
    assert len(KERNEL.launched) == 1
    assert not launches


def test_a_run_begins_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before data are read, and an engine for itself before samples are brought to its device."""
    devices: list[torch.device] = []
    monkeypatch.setattr(setup, "begin", devices.append)
    monkeypatch.setattr(setup, "load_data", lambda *_: pytest.fail("data are read") if not devices else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        setup.set_up(from_mapping({"algorithm": "fedavg"}))
    data = classification(RAGGED)
    monkeypatch.setattr(engine, "begin", devices.append)
    federation_of("stacked", model_task("mlp", data), data)
    assert devices == [torch.device("cpu")] * 2


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_run_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, left = classification(RAGGED), []
    monkeypatch.setattr(trace, "UNTRACED", 0)
    for wanted in (False, True):
        federation = federation_of("stacked", model_task("mlp", data), data, local={"batch": 8})
        compiler = federation.engine._tracer.ahead  # type: ignore[attr-defined]
        compiler.wanted = wanted
        torch.manual_seed(0)
        left.append(play(method(name, federation), federation, [range(len(RAGGED))] * 2).w)
    assert torch.equal(*left)
