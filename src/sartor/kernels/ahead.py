"""The kernels of a traced step, compiled ahead and side by side.

Triton compiles a kernel when it is first launched, for the shapes that it is launched with, and keeps it on
disk. A step launches dozens of such variants, and on a machine that has none of them it would wait for one
after the other. Here a step is gone through once: what it would launch is noted, and copies of this process
compile it at once, as kernels are read by Python, of which a process runs one thread at a time.

Nothing depends on it. A kernel that was not compiled here, or could not be, is when it is launched.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sartor.kernels.copies import by_copies
from sartor.kernels.gpu import HAS_TRITON, coming

T = TypeVar("T")

log = logging.getLogger(__name__)

LONGEST = ("_descend", "_direct")
"""Kernels that take longest to compile: with loops unrolled they are several times as long as others."""

_COMPILED: set[tuple[Any, ...]] = set()
"""Variants, with their device, that were compiled ahead; Triton keeps them as long as the process lives."""

_BEGUN: list[threading.Thread] = []
"""What makes Triton ready."""

_NOTING, _COMPILING = threading.RLock(), threading.Lock()


def begin(device: torch.device) -> None:
    """Make Triton ready behind what goes on, if there will be kernels: the sooner the better, and once.

    Before the first kernel Triton compiles what talks to the driver, and hashes hundreds of megabytes of its
    own, by which it names what it keeps on disk. Either takes half a second or more.
    """
    if device.type == "cuda" and HAS_TRITON and not _BEGUN:
        _quietly(_triton)  # PyTorch imports it too, and two threads at once would wait for each other
        threads = [threading.Thread(target=_quietly, args=(work,)) for work in (_key, _driver)]
        for thread in threads:
            thread.start()
        _BEGUN.extend(threads)


def _key() -> Any:
    return importlib.import_module("triton.runtime.cache").triton_key()


def _driver() -> Any:
    return _compiler().driver.active


def _quietly(work: Callable[..., Any], *arguments: Any) -> None:
    try:
        work(*arguments)
    except Exception as error:  # which the first kernel will show, or the one that it is about
        log.debug("not made ready: %s", error)


class Launch(NamedTuple):
    """A kernel, and what it would have been launched with."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def variant(self) -> tuple[Any, ...]:
        """What Triton compiles a kernel for: launches that have this in common need it once."""
        pairs = zip(self.kernel.params, self.arguments, strict=False)
        kinds = (value if parameter.is_constexpr else _kind(parameter, value) for parameter, value in pairs)
        return self.kernel, *kinds, *sorted(self.options.items())

    def compile(self, device: torch.device) -> Any:
        """The kernel compiled for this device."""
        with torch.cuda.device(device):
            return self.run()

    def run(self) -> Any:
        """The kernel compiled for the device that Triton finds."""
        return self.kernel.run(*self.arguments, grid=(1,), warmup=True, **self.options)


def _kind(parameter: Any, value: Any) -> Any:
    """What matters of an argument that is not a constant."""
    if hasattr(value, "data_ptr"):
        aligned = value.data_ptr() % 16 == 0 or getattr(parameter, "do_not_specialize_on_alignment", False)
        return value.dtype, aligned
    if type(value) is not int:
        return type(value)
    large = value.bit_length() > 31
    return large if parameter.do_not_specialize else (large, value == 1, value % 16 == 0)


class Ahead:
    """Compiles what steps on a device need; does nothing on a CPU, or without Triton."""

    def __init__(self, device: torch.device, samples: int = 0) -> None:
        self.wanted = device.type == "cuda" and HAS_TRITON
        if self.wanted and str(device) == "cuda":  # threads would take the first
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._begun: threading.Thread | None = None
        if self.wanted:
            self._begun = threading.Thread(target=_quietly, args=(self._shuffles, samples))
            self._begun.start()

    def _shuffles(self, samples: int) -> None:
        """Compile the shuffles of so many samples, which come before any step."""
        self._compile(shuffles(samples, self.device))

    def wait(self) -> None:
        """Wait for what comes before any step."""
        if self._begun is not None:
            self._begun.join()
            self._begun = None

    def traced(self, trace: Callable[[], T]) -> T:
        """What tracing gives, for which numbers do not matter: kernels that rewriting replaces need not run.

        Where they do matter after all, it is traced again with those that the kernels give.
        """
        if self.wanted:
            try:
                with Unlaunched():
                    return trace()
            except Exception as error:
                log.debug("a step is traced with its kernels: %s", error)
        return trace()

    def compile(self, step: Callable[[], Any], widths: Iterable[int] = ()) -> None:
        """Compile what a step launches; it is taken, without its kernels.

        Steps of other ``widths`` will follow, some of whose kernels have other tiles.
        """
        if not self.wanted:
            return
        self.wait()
        try:
            self._compile(launches_of(step, widths))
        except Exception as error:  # which the step itself will show
            log.debug("kernels are not compiled ahead: %s", error)

    def _compile(self, launches: Iterable[Launch]) -> None:
        every = {(self.device, *launch.variant): launch for launch in launches}
        for thread in _BEGUN:
            thread.join()
        with _COMPILING:  # runs that train together need the same
            new = [launch for variant, launch in every.items() if variant not in _COMPILED]
            _COMPILED.update(every)
            if len(new) > 1:
                compile_all(new, self.device)


def compile_all(launches: Sequence[Launch], device: torch.device) -> None:
    """Compile all of these at once; one that fails will fail again where it is launched."""
    longest_first = sorted(launches, key=lambda launch: launch.kernel.__name__ not in LONGEST)
    missing = not_on_disk(longest_first, device)
    with torch.cuda.device(device):
        target = _compiler().driver.active.get_current_target()
    work = [partial(_compile_onto_disk, launch, device, target) for launch, _ in missing]
    signatures = {tuple(source.signature.values()): source for _, source in missing}
    processors = os.cpu_count() or 1
    with ThreadPoolExecutor(2 * processors) as pool:  # some wait for a compiler of C
        with by_copies(work, min(len(work), processors)):
            list(pool.map(partial(_quietly, _make_launcher), signatures.values()))
        list(pool.map(lambda pair: _quietly(pair[0].compile, device), missing))


def not_on_disk(launches: Iterable[Launch], device: torch.device) -> list[tuple[Launch, Any]]:
    """Those that are not compiled, with what Triton would read; all others are made ready."""
    kind, missing, here = _compiler().ASTSource, [], threading.get_ident()
    own = kind.make_ir

    def make_ir(source: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != here:  # what is launched meanwhile
            return own(source, *arguments, **options)
        missing.append((launch, source))
        raise LookupError(f"{launch.kernel.__name__} is not on disk")

    kind.make_ir = make_ir
    try:
        for launch in launches:
            _quietly(launch.compile, device)
    finally:
        kind.make_ir = own
    return missing


def _compile_onto_disk(launch: Launch, device: torch.device, target: Any) -> None:
    """In a copy of the process that has the device, of which nothing is asked."""
    known = {
        "get_current_target": lambda: target,
        "get_current_device": lambda: device.index,
        "get_current_stream": lambda _: 0,
    }
    _compiler().driver.set_active(SimpleNamespace(**known))
    launch.run()


def _make_launcher(source: Any) -> None:
    """What launches a kernel is a module in C for its signature, which Triton keeps on disk too."""
    _compiler().driver.active.launcher_cls(source, _Unknown())


class _Unknown:
    """What is known of a kernel that is not compiled yet."""

    def __getattr__(self, name: str) -> None:
        return None


def launches_of(step: Callable[[], Any], widths: Iterable[int] = ()) -> list[Launch]:
    """What a step would launch, in order, with what it would if it had so many lanes."""
    unlaunched = Unlaunched()
    with unlaunched, coming(widths):
        step()
    return unlaunched.launches


def shuffles(samples: int, device: torch.device) -> list[Launch]:
    """The shuffles of so many samples of a client: their order, and batches by it."""
    from sartor.kernels import shuffle_triton

    launches: list[Launch] = []
    with FakeTensorMode():
        keys = torch.empty(1, dtype=torch.int64, device=device)
    with noted(launches):
        shuffle_triton.in_batches(keys, keys, max(1, samples), keys, keys, 1, 1)
        shuffle_triton.shuffled(keys, keys, max(1, samples))
    return launches


class Unlaunched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations of ours note what they would launch, and give anything, or nothing but shapes for such.

    A mode that is entered later, as one that traces, sees the operation and not what its result is made of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self.mode = FakeTensorMode(allow_fallback_kernels=True, allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operation's result; only of ours is it another than usual."""
        operation = OPDEFS.get(func._schema.name) if func.namespace == "sartor" else None
        if operation is None:
            return func(*args, **(kwargs or {}))
        bare_args, bare_kwargs = tree_map_only(Tensor, self._bare, (args, kwargs or {}))
        # What an operation makes of nothing, as constants that are kept, is as real as ever.
        with unset_fake_temporarily(), noted(self.launches):
            result = operation._init_fn(*bare_args, **bare_kwargs)
        bare = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        return result if bare else tree_map_only(Tensor, _anything, result)

    def _bare(self, value: Tensor) -> Tensor:
        return value if isinstance(value, FakeTensor) else self.mode.from_tensor(value)


def _anything(like: Tensor) -> Tensor:
    """Unlike numbers that are not zero, whose quotients are numbers; or the first place of anything."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    if not made.is_floating_point():
        return made.zero_()
    return made.copy_(torch.linspace(0.5, 1.5, made.numel(), device=made.device).view(made.shape))


@contextmanager
def noted(launches: list[Launch]) -> Iterator[None]:
    """Note what is launched with tensors that have no memory; what has others is launched."""
    if not HAS_TRITON:
        yield
        return
    launcher = _triton().JITFunction

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not any(isinstance(argument, FakeTensor) for argument in arguments):
            return own(kernel, *arguments, grid=grid, warmup=warmup, **options)
        launches.append(Launch(kernel, tuple(map(_stand_in, arguments)), options))
        return None

    with _NOTING:
        own = launcher.run
        launcher.run = run
        try:
            yield
        finally:
            launcher.run = own


def _stand_in(argument: Any) -> Any:
    """What tells Triton as much as a tensor: its type, and how its address is aligned."""
    if not isinstance(argument, FakeTensor):
        return argument
    address = argument.storage_offset() * argument.itemsize % 16  # memory itself begins aligned
    stand_in = _triton().MockTensor(argument.dtype)
    stand_in.data_ptr = lambda: address
    return stand_in


def _triton() -> Any:
    """What is compiled and launched, and what stands for a tensor there."""
    return importlib.import_module("triton.runtime.jit")


def _compiler() -> Any:
    """What reads kernels, and knows the driver."""
    return importlib.import_module("triton.compiler.compiler")
