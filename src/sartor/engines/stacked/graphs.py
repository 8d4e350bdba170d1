"""CUDA graphs: captured once, replayed as often as one likes.

A call of the engine is captured as a whole, once per shape, when a shape comes the second time. Cohorts of
ragged clients hardly ever have the shape of another, and long calls take long to capture. Those are made of
pieces that any cohort can use: each part of a client function before, between and after its scans is a
graph, and so are 1, 4 and 16 steps in a row, whose samples and clients lie in tensors on the device. How many
steps there are is how often these are replayed.

Graphs share memory: one that is captured later may lay what it gives where an earlier one computes. Replaying
the earlier one then writes over it. So what parts of a function give, which is read after steps were taken,
lies in a pool of their own.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from sartor.engines.stacked.pinned import Pinned
from sartor.engines.stacked.told import Told, most_told
from sartor.engines.stacked.trace import Checked, Folded
from sartor.federation.exchange import Lent, Moved
from sartor.kernels import beside
from sartor.kernels.device import free_bytes, untaken_bytes

STRIDES = (16, 4, 1)
"""How many steps are captured as one graph: 16 of the smallest take a GPU longer than a host their replay."""

EARNED = 8
"""How often a graph of several steps must have been wanted before it is captured.

To capture a step takes as long as to take it without a graph, some milliseconds; a longer graph spares a host
a few tenths of one. Steps that seldom come many in a row are not worth it.
"""

LARGE = 1 << 16
"""Numbers that a launch for several tensors has one multiprocessor copy."""

MOST_SHAPES = 1024
"""Shapes of calls that are remembered."""

MOST_GRAPHS = 64
"""Captured calls kept per federation; the one unused for longest goes first."""


class Coming:
    """What calls are told, a row of numbers for each, where a graph takes one after the other.

    Beside it is a row for the norms of what each gives.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self.most, self._length = most_told(length), length
        self._there = torch.zeros(1 + self.most * length, dtype=torch.int64, device=device)
        self._turn = self._there[:1]
        self._tables: dict[str, Tensor] = {}
        self._lap = Lap(self._tables)
        self.marks: deque[Hashable] = deque()
        """Of which calls there are numbers that were not taken yet."""
        self._put = 0

    def take(self) -> Tensor:
        """The next row: an operation of the device."""
        return self._there[1:].view(self.most, self._length).index_select(0, self._turn)[0]

    def give(self, norms: Mapping[str, Tensor]) -> None:
        """Keep norms in the same row, and go on to the one behind it: operations of the device."""
        for name, norm in norms.items():
            if name not in self._tables:
                self._tables[name] = norm.new_zeros((self.most, *norm.shape))
            self._tables[name].index_copy_(0, self._turn, norm[None])
        self._turn.add_(1)

    def put(self, numbers: np.ndarray, marks: Sequence[Hashable], pinned: Pinned) -> None:
        """Begin anew with these rows."""
        self._lap.tables = {name: table[: self._put].clone() for name, table in self._tables.items()}
        self._lap, self._put = Lap(self._tables), len(marks)
        begin = np.zeros(1, dtype=np.int64)
        there = self._there[: 1 + numbers.size]
        there.copy_(pinned.put(np.concatenate([begin, numbers.ravel()])), non_blocking=True)
        self.marks = deque(marks)

    def norms(self) -> Norms:
        """The norms of the call made last."""
        return Norms(self._lap, self._put - len(self.marks) - 1)


@dataclass
class Lap:
    """Norms of several calls, a row each: where a graph puts them, or a copy once it begins anew."""

    tables: Mapping[str, Tensor]


class Norms(Mapping[str, Tensor]):
    """The norms of one call, looked up when they are asked for: to be used at once, and looked up again."""

    def __init__(self, lap: Lap, row: int) -> None:
        self._lap, self._row = lap, row

    def __getitem__(self, name: str) -> Tensor:
        return self._lap.tables[name][self._row]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lap.tables)

    def __len__(self) -> int:
        return len(self._lap.tables)


@dataclass
class Graph:
    """A captured call: replaying it reads the inputs' memory and writes the outputs'."""

    graph: Any
    rows: Coming
    inputs: list[Tensor]
    outputs: Folded
    keep: Any
    given: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """What lies in the places of the inputs: which tensors, and how often those had been changed."""

    def replay(
        self, told: Told, rounds: np.ndarray, others: list[Tensor], pinned: Pinned
    ) -> tuple[Checked, Lent | None]:
        """Put the inputs where the graph reads them, and make the call again."""
        rows = self.rows
        if not rows.marks or rows.marks[0] != told.mark(rounds):
            rows.put(*told.coming(rounds, rows.most), pinned)
        rows.marks.popleft()
        new = [place for place, value in enumerate(others) if not self._holds(place, value)]
        if new:
            _copy([self.inputs[place] for place in new], [others[place] for place in new])
        self.graph.replay()
        result, lent = _given(self.outputs, others, rows.norms() if self.outputs[1] else None)
        for step in self.outputs[3]:
            assert lent is not None
            self._note(step.place, lent.moved[step.name].value)
        return result, lent

    def _holds(self, place: int, value: Tensor) -> bool:
        """Whether a place has this very tensor, as the weights of a cohort that comes again; noted if not."""
        known, changes = self.given.get(place, (None, 0))
        if known is not None and known() is value and changes == value._version:
            return True
        self._note(place, value)
        return False

    def _note(self, place: int, value: Tensor) -> None:
        """Note what lies in a place from now on."""
        self.given[place] = weakref.ref(value), value._version


@dataclass
class Part:
    """What lies between two scans, captured: from tensors in their place to tensors in theirs."""

    graph: Any
    inputs: list[Tensor]
    outputs: Any

    def replay(self, inputs: list[Tensor]) -> Any:
        """The outputs for other inputs, which the next replay will write over."""
        _copy(self.inputs, inputs)
        self.graph.replay()
        return self.outputs


class Held:
    """What steps read, and what they change, where graphs find it."""

    def __init__(self, given: Any, carry: Any) -> None:
        fixed, rows, memo = given
        self._data = fixed.data
        common, self._common_form = tree_flatten(fixed._replace(data={}))
        own, self._own_form = tree_flatten((rows, memo, carry))
        self._common, self._own = [leaf.clone() for leaf in common], [leaf.clone() for leaf in own]
        self.carry = self._own[len(own) - len(tree_leaves(carry)) :]
        self.reads: list[bool] | None = None
        """Which leaves of what is each client's own steps read, once that is known."""

    def take(self, given: Any, carry: Sequence[Tensor], order: Tensor | None = None) -> None:
        """Copy here what is given and what is changed; in another order, what is read of it."""
        fixed, rows, memo = given
        _copy(self._common, fixed.leaves)
        own = [*rows.leaves, *tree_leaves(memo), *carry]
        if order is None:
            _copy(self._own, own)
            return
        for place, leaf, read in zip(self._own, own, self.reads or repeat(True), strict=False):
            if read:
                torch.index_select(leaf, 0, order, out=place)

    def first(self, lanes: int) -> tuple[Any, Any]:
        """What is given to these lanes, and what they change."""
        fixed = tree_unflatten(self._common, self._common_form)
        rows, memo, carry = tree_unflatten([leaf[:lanes] for leaf in self._own], self._own_form)
        return (fixed._replace(data=self._data), rows, memo), carry


class Steps:
    """A step of so many lanes, captured several times in a row.

    What it reads stays where it is: what is :class:`Held`, and the samples of as many turns as a graph has
    steps.
    """

    def __init__(self, graphs: Graphs, step: Step, held: Held, lanes: int) -> None:
        self._graphs, self._step, self._lanes = graphs, step, lanes
        self._given, self._carry = held.first(lanes)
        self._captured: dict[int, tuple[Any, list[Tensor]]] = {}
        self._wanted: Counter[int] = Counter()

    def run(self, turns: Sequence[Tensor], begin: int, left: int) -> None:
        """Take so many steps, from where their turns begin: a row for each lane, step after step."""
        for stride in STRIDES:
            for _ in range(left // stride if self._earned(stride, left // stride) else 0):
                end = begin + stride * self._lanes
                self._replay(stride, [turn[begin:end] for turn in turns])
                begin = end
                left -= stride

    def _earned(self, stride: int, times: int) -> bool:
        """Whether there is, or should be, a graph of so many steps, which is wanted so many times now."""
        self._wanted[stride] += times
        return stride in self._captured or stride == 1 or self._wanted[stride] >= EARNED

    def _replay(self, stride: int, turns: list[Tensor]) -> None:
        if stride not in self._captured:
            self._captured[stride] = self._capture(stride, [turn.clone() for turn in turns])
        graph, places = self._captured[stride]
        _copy(places, turns)
        graph.replay()

    def _capture(self, stride: int, places: list[Tensor]) -> tuple[Any, list[Tensor]]:
        turns = [place.view(stride, self._lanes, *place.shape[1:]) for place in places]

        if not self._captured:  # whatever a first step brings with it, as a kernel that is compiled
            once = [turn[:1] for turn in turns]
            self._graphs.aside(lambda: self._step(self._given, self._carry, once))
        steps = partial(self._step, self._given, self._carry, turns, over=True)
        graph, _ = self._graphs.capture(steps, into=tree_leaves(self._carry))
        return graph, places


class Step(Protocol):
    """Some steps: from what is given, the carry and the turns to the carry after them."""

    def __call__(self, given: Any, carry: Any, turns: Sequence[Tensor], *, over: bool = False) -> Any:
        """It may be written ``over`` the carry that is given."""


class Graphs:
    """What one engine has captured: nothing where that is not ``wanted`` or there is no CUDA device."""

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self.wanted = wanted and device.type == "cuda"
        self.captured: OrderedDict[Hashable, Graph] = OrderedDict()
        """Calls by shape, the one used last at the end."""
        self._lent: weakref.ref[Lent] | None = None
        """What the last call has lent."""
        self._latest: tuple[Hashable, Graph] | None = None
        """The shape used last, and its call."""
        self._met: OrderedDict[Hashable, None] = OrderedDict()
        """Shapes that came once."""
        self.parts: dict[Hashable, Part | None] = {}
        self.taken: dict[Hashable, Steps] = {}
        """Steps by what they were traced for."""
        self.places: dict[Hashable, Held] = {}
        """What steps read and change, by what it is held for."""
        self._rounds: dict[Hashable, set[int]] = {}
        """The first rounds in which steps for a key were wanted."""
        self._device, self._pinned = device, Pinned(device)
        self._pools: dict[str, Any] = {}
        self._side: Any = None
        self._whole = False

    @property
    def pieces(self) -> bool:
        """Whether the call under way is made of pieces: not while it is captured as a whole."""
        return self.wanted and not self._whole

    def call(
        self,
        shape: Hashable | None,
        call: Callable[[list[Tensor]], Folded],
        told: Told,
        rounds: np.ndarray,
        others: list[Tensor],
    ) -> tuple[Checked, Lent | None]:
        """Make a call with these inputs: what it is told, which the host makes for its rounds, and tensors.

        One without a shape is not captured as a whole: what it will do is not known yet, or too much.
        """

        def inputs() -> list[Tensor]:
            there = self._pinned.put(told.numbers(rounds)).to(self._device, non_blocking=True)
            return [there, *others]

        if not self.wanted:
            return call(inputs())[0], None
        lent = None if self._lent is None else self._lent()
        if lent is not None:
            lent.keep()
        result, lent = self._made(shape, call, told, rounds, others, inputs)
        self._lent = None if lent is None else weakref.ref(lent)
        return result, lent

    def _made(
        self,
        shape: Hashable | None,
        call: Callable[[list[Tensor]], Folded],
        told: Told,
        rounds: np.ndarray,
        others: list[Tensor],
        inputs: Callable[[], list[Tensor]],
    ) -> tuple[Checked, Lent | None]:
        """What a call gives, and lends: in one graph, if there is one or should be."""
        if self._latest is not None and shape is self._latest[0]:  # a shape takes long to compare
            return self._latest[1].replay(told, rounds, others, self._pinned)
        captured = None if shape is None else self.captured.get(shape)
        if captured is not None:
            self.captured.move_to_end(shape)
        elif shape is None or shape not in self._met:
            if shape is not None:
                _put(self._met, shape, None, MOST_SHAPES)
            return _given(call(inputs()), others)
        else:
            captured = self._captured_call(call, told.length, others)
            del self._met[shape]
            _put(self.captured, shape, captured, MOST_GRAPHS)
        self._latest = shape, captured
        return captured.replay(told, rounds, others, self._pinned)

    def part(self, key: Hashable, part: Callable[..., Any], given: Any) -> Any:
        """What a part of a client function gives for what it is given, as plain values and tensors."""
        fixed, rows, memo = given
        if key not in self.parts:
            self.parts[key] = None
            return part(*given)
        known = self.parts[key]
        if known is None:
            inputs, spec = tree_flatten(given)
            static = [value.clone() for value in inputs]
            self.aside(lambda: part(*tree_unflatten(static, spec)))
            graph, outputs = self.capture(lambda: part(*tree_unflatten(static, spec)), pool="parts")
            known = self.parts[key] = Part(graph, static, outputs)
        return known.replay([*fixed.leaves, *rows.leaves, *tree_leaves(memo)])

    def held(self, key: Hashable, given: Any, carry: Any) -> Held:
        """Where what is given to steps, and what they change, is held for a key."""
        if key not in self.places:
            self.places[key] = Held(given, carry)
        return self.places[key]

    def lasting(self, key: Hashable, round: int) -> bool:
        """Whether steps for a key are wanted in a third round: what is always alike is one graph by then."""
        rounds = self._rounds.setdefault(key, set())
        if len(rounds) < 3:
            rounds.add(round)
        return len(rounds) == 3

    def steps(self, key: Hashable, step: Step, held: Held, lanes: int) -> Steps:
        """Steps of so many lanes, whose key always has the same place."""
        if key not in self.taken:
            self.taken[key] = Steps(self, step, held, lanes)
        return self.taken[key]

    def forget(self) -> None:
        """Drop all graphs, and give their memory back, once nothing reads it any more."""
        beside.join()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.captured.clear()
        self._latest = None
        self._met.clear()
        self.parts.clear()
        self.taken.clear()
        self.places.clear()
        self._rounds.clear()
        self._pools.clear()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _captured_call(
        self, call: Callable[[list[Tensor]], Folded], length: int, others: list[Tensor]
    ) -> Graph:
        """Capture a call that is told so many numbers.

        Whatever it touched is kept: a graph finds its tensors by address. It ends by putting what the server
        goes on with in place of the inputs, as the next call is asked of that.
        """
        rows, static = Coming(length, self._device), [value.clone() for value in others]

        def work() -> Folded:
            made = call([rows.take(), *static])
            rows.give(made[0][3] if made[1] else {})
            _copy([static[step.place] for step in made[3]], [step.value for step in made[3]])
            return made

        self._whole = True
        try:
            self.aside(work)
            graph, outputs = self.capture(work)
        finally:
            self._whole = False
        return Graph(graph, rows, static, outputs, call)

    def aside(self, work: Callable[[], Any]) -> None:
        """Do something beside what else is done, as what will be captured must have been done once."""
        with self._beside():
            work()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """A stream of one's own, always the same: what one capture no longer needs serves the next."""
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        main = torch.cuda.current_stream(self._device)
        self._side.wait_stream(main)
        try:
            with torch.cuda.stream(self._side):
                yield
        finally:  # also where memory ran out: what is given back then may still be read there
            main.wait_stream(self._side)

    def capture(
        self, work: Callable[[], Any], into: Sequence[Tensor] = (), pool: str = "calls and steps"
    ) -> tuple[Any, Any]:
        """A graph of what is done, and the tensors that it gives: each replay writes them anew.

        So may the replay of any graph of the same ``pool`` that was captured before. With ``into``, it ends
        by copying what it gives to these places.
        """
        if pool not in self._pools:
            self._pools[pool] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._make_room()
        with warnings.catch_warnings(), _no_collection(), self._beside():
            # A function may have nothing to do before its first scan.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            # Runs that train together have threads of their own, whose work is none of this graph.
            graph.capture_begin(pool=self._pools[pool], capture_error_mode="thread_local")
            try:
                given = work()
                if into:
                    _copy(into, tree_leaves(given))
            except BaseException:
                with suppress(RuntimeError):  # what made it fail is told, as that memory ran out
                    beside.join()
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, given

    def _make_room(self) -> None:
        """Give back memory that lies idle, if it is most of what is free: a capture gets none of it."""
        if 2 * untaken_bytes(self._device) < free_bytes(self._device):
            torch.cuda.empty_cache()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away: a graph of an earlier federation that it frees ends a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _put(entries: OrderedDict[Hashable, Any], key: Hashable, entry: Any, most: int) -> None:
    """Add an entry as the last of at most so many; the first one goes, which was not used for longest."""
    entries[key] = entry
    if len(entries) > most:
        entries.popitem(last=False)


def _given(made: Folded, inputs: Sequence[Tensor], known: Norms | None = None) -> tuple[Checked, Lent | None]:
    """What a call gives for its inputs, out of the way of the next; what is only to be added up is lent.

    ``known`` are the norms, where they are out of the way already.
    """
    (sent, kept, after, norms), rows, means, onward = made
    buffers = tuple([value.clone() for value in after])
    result = _cloned(sent), _cloned(kept), buffers, _cloned(norms) if known is None else known
    if not rows:
        return result, None
    moved = {
        name: Moved(inputs[place], inputs[place]._version, rate, value.clone())
        for name, place, rate, value in onward
    }
    return result, Lent(rows, means, moved)


def _cloned(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}


def _copy(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Put values in their places: large ones each by itself, small ones in as few launches as it takes."""
    small: tuple[list[Tensor], list[Tensor]] = ([], [])
    for place, value in zip(places, values, strict=True):
        if place.numel() > LARGE:
            place.copy_(value, non_blocking=True)
        elif place is not value and place.numel():
            small[0].append(place)
            small[1].append(value)
    if len(small[0]) == 1:
        small[0][0].copy_(small[1][0], non_blocking=True)
    elif small[0]:
        torch._foreach_copy_(*small)
