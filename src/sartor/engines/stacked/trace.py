"""Client functions as programs: suspended at their scans, and traced.

A client function is written for one client. Here it runs for a whole chunk of them under ``torch.vmap``,
and its scans, the loops over batches, are carried out outside of it. That is done by replaying: the
function is pure, so it is run until it reaches its first scan, where it is suspended; the scan is carried
out; then the function is run again with the result in hand, and so on until it returns. Between scans a
client function has only vector algebra, which costs nothing to repeat.

A step of a scan is the body of the suspended function for one lane each (see ``schedule.py``). It is traced
once into a plain graph of tensor operations, which removes Python, vmap and autograd from every later step;
on a CPU so is what lies between scans, if that comes often. Tracing takes as long as some sixteen steps, so
two widths are traced for all others (:mod:`~sartor.engines.stacked.widths`), and on the CPU the first steps
are taken as they stand, by the same operations.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from sartor import nests
from sartor.client.local import Batches, Client
from sartor.engines.samples import batch_of
from sartor.engines.schedule import Plan
from sartor.engines.stacked.recording import recorded
from sartor.engines.stacked.row import Beforehand, Parts, Row, beforehand_of, parts_of
from sartor.engines.stacked.widths import of_width
from sartor.errors import NotStackable, SartorError
from sartor.federation.exchange import (
    ClientError,
    ClientFunction,
    changed_words,
    checked_reply,
    norms_of,
    untouched,
)
from sartor.federation.functions import name_of
from sartor.federation.settings import FederationSettings
from sartor.kernels import (
    attention,
    beside,
    descent,
    fused,
    layouts,
    likelihood,
    pointwise,
    pooling,
    products,
    rectified,
)
from sartor.kernels.ahead import Ahead
from sartor.kernels.gpu import HAS_TRITON, has_tensor_cores, side_by_side
from sartor.kernels.in_place import in_place
from sartor.kernels.views import quicken, straighten
from sartor.model.batch import Batch
from sartor.model.task import Task
from sartor.nests import Nest
from sartor.random import FEW

Result = tuple[dict[str, Tensor], dict[str, Tensor], tuple[Tensor, ...]]
"""What a function gives, one row per client: replies, new states and, if it trained, buffers."""

Checked = tuple[dict[str, Tensor], dict[str, Tensor], tuple[Tensor, ...], Mapping[str, Tensor]]
"""That of a chunk, and where a graph computes them along with it, the norms of all of it."""


class Onward(NamedTuple):
    """What the server goes on with from an input of a call: a step by the mean of a reply."""

    name: str
    place: int
    """Of the input."""
    rate: float
    value: Tensor


Folded = tuple[Checked, dict[str, Tensor], dict[str, Tensor], list[Onward]]
"""That of a call: without the replies of which only sums are asked for; those, their means, and steps."""


@dataclass
class Traced:
    """A traced function: from its flattened arguments to its result; and which arguments it reads."""

    run: Callable[[list[Tensor]], list[Tensor]]
    result: TreeSpec
    reads: list[bool]
    graph: fx.GraphModule
    run_over: Callable[[list[Tensor]], list[Tensor]] | None = None
    """The same for a step, which writes over what it goes on from; made when it is wanted."""
    parts: Parts | None = None
    """On a CPU, how a step is parted where many are taken in a row."""
    rows: dict[bool, Row] = field(default_factory=dict)
    """Those, without and with what is computed beforehand."""

    def __call__(self, inputs: list[Tensor]) -> Any:
        """The result for such arguments."""
        return tree_unflatten(self.run(inputs), self.result)

    def repeated(
        self, given: list[Tensor], carry: Any, turns: Sequence[tuple[Tensor, ...]], over: bool = False
    ) -> Any:
        """A step's result after some turns: each goes on from the carry that the one before gave.

        It may be written ``over`` that.
        """
        leaves, run = tree_leaves(carry), self.run
        if over and all(leaf.is_contiguous() for leaf in leaves):
            run = self.run_over = self.run_over or self._written_over(len(given), leaves, turns[0][0])
        for turn in turns:
            leaves = run([*given, *leaves, *turn])
        return tree_unflatten(leaves, self.result)

    def in_a_row(
        self,
        given: list[Tensor],
        leaves: list[Tensor],
        turns: Sequence[Tensor],
        beforehand: Beforehand | None = None,
    ) -> list[Tensor]:
        """The same for turns of [steps, lanes, …], and behind them what was computed beforehand.

        It may be written over the leaves.
        """
        # What was computed for all turns at once is compared in two of them.
        known = beforehand is not None and (True in self.rows or len(turns[0]) > 1)
        if known not in self.rows:
            few = [turn[:2] for turn in turns]
            self.rows[known] = self._row(given, leaves, few, beforehand if known else None)
        return self.rows[known](given, leaves, turns)

    def _row(
        self, given: list[Tensor], leaves: list[Tensor], turns: list[Tensor], beforehand: Beforehand | None
    ) -> Row:
        """The step parted, if it gives to the bit what the graph gives for some turns; else as a whole."""
        made = partial(Row, self.graph, len(given), len(leaves))
        places: tuple[int, ...] = ()
        if beforehand is not None and beforehand.fits(self.graph):
            places = beforehand.places
        row, expected = made(self.parts or Parts(), places), leaves
        for turn in zip(*turns[:TURN], strict=True):
            expected = self.run([*given, *expected, *turn])
        try:
            right = _gives(expected, row(given, [leaf.clone() for leaf in leaves], turns))
        except (RuntimeError, IndexError, ValueError):  # as of what lies in another way than in the trace
            right = False
        return row if right else made(Parts())

    def _written_over(
        self, first: int, leaves: list[Tensor], samples: Tensor
    ) -> Callable[[list[Tensor]], list[Tensor]]:
        """The step that writes over these leaves of all inputs; on two streams if it has few samples."""
        graph = in_place(self.graph, first, len(leaves))
        if beside.pays(samples.shape):
            beside.specialise(graph)
        return _plain(graph)


log = logging.getLogger(__name__)

Kind = tuple[int, int, int, bool, bool, bool, int]
"""What a step is traced for: the place of its scan, lanes, width, whether batches are full, whether lanes
have the same samples or theirs in a row, scans before."""

IN_PLACE = ("is not possible because there exists a Tensor", "doesn't match the broadcast shape")
"""What PyTorch says where a client's own numbers are written into what is the same for all."""

TURN = 3
"""Inputs of a step that say whose turn it is: samples, how many are real, and a key."""

UNTRACED = 40
"""Steps of one kind on the CPU before they are traced."""


class Suspended(Exception):
    """A client function reached a scan whose result is not known yet."""

    def __init__(
        self, client: Client, body: Callable[[Any, Batch], Any], carry: Any, batches: Batches
    ) -> None:
        self.client, self.body, self.carry, self.batches = client, body, carry, batches


class Rows(NamedTuple):
    """What differs between clients, one row each: numbers, rounds, sample counts and arguments."""

    number: Tensor
    round: Tensor
    counts: dict[str, Tensor]
    arguments: dict[str, Tensor]
    buffers: tuple[Tensor, ...]
    origins: tuple[Tensor, ...] = ()
    """Where clients are not those of one run in order: a client's number in its run, and that run's seed."""

    @property
    def leaves(self) -> list[Tensor]:
        """All tensors, in the order of the fields."""
        return [
            self.number,
            self.round,
            *self.counts.values(),
            *self.arguments.values(),
            *self.buffers,
            *self.origins,
        ]


class Fixed(NamedTuple):
    """What is the same for all clients of a call."""

    arguments: dict[str, Tensor]
    buffers: tuple[Tensor, ...]
    data: dict[str, tuple[Nest, Nest]]

    @property
    def leaves(self) -> list[Tensor]:
        """All tensors but the data's, in the order of the fields."""
        return [*self.arguments.values(), *self.buffers]


@dataclass
class Program:
    """A client function for inputs of certain shapes: its scans, in order, and their traced steps."""

    function: ClientFunction
    hyper: Any
    round: int = 0
    """The server's round of the call under way, for messages."""
    lanes: int = 0
    """The most lanes of the scan under way."""
    widths: frozenset[int] = frozenset()
    """All numbers of lanes of its steps."""
    scans: list[Batches] | None = None
    steps: dict[Kind, Traced] = field(default_factory=dict)
    taken: Counter[Kind] = field(default_factory=Counter)
    """Steps of every kind that were taken before one was traced."""
    beforehand: dict[tuple[Any, ...], Beforehand | None] = field(default_factory=dict)
    """What follows from turns alone in steps of a kind, however many lanes they have."""
    unlike: set[Kind] = field(default_factory=set)
    """Those that do not follow from steps of other widths."""
    parts: dict[int, tuple[Batches | None, Traced] | None] = field(default_factory=dict)
    """What lies before and after its scans, traced, with the scan that follows; None where it cannot be."""
    advanced: Counter[int] = field(default_factory=Counter)
    """How often it was run from each of its scans."""


class Tracer:
    """Runs programs up to their scans, and single steps of those; ``norms``: with the norms of results.

    ``most`` is the largest number of samples that a client has of each split.
    """

    def __init__(self, task: Task, settings: FederationSettings, most: dict[str, int], norms: bool) -> None:
        self.task, self.settings, self.most, self.norms = task, settings, most, norms
        self.device = torch.device(settings.device)
        self.apart = settings.way == "apart"
        self.ahead = Ahead(self.device, samples=min(most.get("train", 0), FEW))

    def advance(
        self, program: Program, fixed: Fixed, rows: Rows, memo: list[Any]
    ) -> tuple[Batches | None, Any]:
        """Run the function up to its next scan and give that with its carry, or to its end."""
        suspended: list[Batches] = []

        def client(rows: Rows, memo: list[Any], fixed: Fixed) -> Any:
            try:
                return self._replay(program, fixed, rows, memo)
            except Suspended as reached:
                suspended.append(reached.batches)
                return reached.carry

        def clients(fixed: Fixed, rows: Rows, memo: list[Any]) -> Any:
            result = torch.vmap(partial(client, fixed=fixed))(rows, memo)
            if not suspended:
                return *result, norms_of(result[0], result[1]) if self.norms else {}
            if self.device.type == "cuda":  # one layout for all steps
                result = tree_map(lambda value: value.contiguous(), result)
            return result

        def as_it_stands() -> tuple[Batches | None, Any]:
            try:
                result = clients(fixed, rows, memo)
            except Exception as error:
                raise self._explained(program, error) from error
            return next(iter(suspended), None), result

        place = len(memo)
        program.advanced[place] += 1
        if program.scans is None or not self._repeats(program, place):
            return as_it_stands()
        inputs, spec = tree_flatten((fixed._replace(data={}), rows, memo))
        if place not in program.parts:
            found = as_it_stands()
            program.parts[place] = self._part(program, clients, inputs, spec, found)
            return found
        part = program.parts[place]
        return as_it_stands() if part is None else (part[0], part[1](inputs))

    def _part(
        self,
        program: Program,
        clients: Callable[..., Any],
        inputs: list[Tensor],
        spec: TreeSpec,
        found: tuple[Batches | None, Any],
    ) -> tuple[Batches | None, Traced] | None:
        """What lies before or after a scan, traced; None if that does not give to the bit what was found."""
        try:
            traced = self._traced(program, clients, inputs, spec, step=False)
            right = _gives(tree_leaves(found[1]), traced.run(inputs))
        except Exception as error:  # which does not show where it stands
            log.debug("a part of %s is not traced: %s", name_of(program.function), error)
            return None
        return (found[0], traced) if right else None

    def _repeats(self, program: Program, place: int) -> bool:
        """Whether what lies before or after a scan has come so often on a CPU that it is worth tracing."""
        return self.device.type == "cpu" and not self.apart and program.advanced[place] > UNTRACED

    def steps(
        self,
        program: Program,
        key: Kind,
        batches: Batches,
        plan: Plan,
        given: tuple[Fixed, Rows, list[Any]],
        carry: Any,
        turns: Sequence[Tensor],
        over: bool = False,
    ) -> Any:
        """The carry of every lane after some turns in which it keeps its client.

        Turns are samples, how many are real and, where anything is drawn, keys. The lanes take their steps
        together, or apart: one after the other, and side by side in a graph. ``over`` allows them to write
        over the carry that is given.
        """
        step, over = self._step_of(program, batches, plan), over and not self.apart
        program.lanes, program.widths = plan.shape.lanes, frozenset(part.lanes for part in plan.stretches)
        turns = [*turns, turns[-1]][:TURN]  # a key that is not read

        def taken(given: tuple[Any, ...], carry: Any, turns: Sequence[Tensor]) -> Any:
            done, count = 0, len(turns[0])
            while done < count and key not in program.steps:
                carry = self._one(program, key, step, (*given, carry, *(turn[done] for turn in turns)))
                done += 1
            if done == count:
                return carry
            traced, inputs, left = program.steps[key], tree_leaves(given), [turn[done:] for turn in turns]
            if traced.parts is None:
                return traced.repeated(inputs, carry, [*zip(*left, strict=True)], over)
            leaves = tree_leaves(carry)
            if not over:
                leaves = [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]
            return tree_unflatten(traced.in_a_row(inputs, leaves, left), traced.result)

        if not self.apart:
            return taken(given, carry, turns)
        after = []
        fixed, *rows = given
        with closing(side_by_side(turns[0].shape[1], self.device)) as streams:
            for lane, stream in enumerate(streams):
                with stream:
                    own, start = tree_map(lambda value: value[lane], (rows, carry))  # noqa: B023
                    after.append(taken((fixed, *own), start, [turn[:, lane] for turn in turns]))
        return tree_map(lambda *lanes: torch.stack(lanes), *after)

    def _one(self, program: Program, key: Kind, step: Callable[..., Any], arguments: Any) -> Any:
        """A step of a kind that is not traced yet; it is, once such a step is worth it."""
        program.taken[key] += 1
        like = [kind for kind in program.taken if _but_lanes(kind) == _but_lanes(key)]
        traced = [kind for kind in like if kind in program.steps and kind[1] > 1]
        if len(traced) > 1 and key not in program.unlike and not self.apart:
            if self.device.type == "cpu":
                result = self._as_it_stands(program, step, arguments)
                self._widened(program, key, traced, arguments, partial(_gives, tree_leaves(result)))
                return result
            widest = max(traced[:2], key=lambda kind: kind[1])
            agrees = partial(_agrees, arguments, program.steps[widest].run, widest[1])
            if self._widened(program, key, traced, arguments, agrees):
                return program.steps[key](tree_leaves(arguments))
        if self.device.type == "cpu":
            # Steps of all widths count until two are traced, by which the others are known.
            counted = like if key[1] > 1 and len(traced) < 2 else [key]
            if sum(program.taken[kind] for kind in counted) <= UNTRACED:
                return self._as_it_stands(program, step, arguments)
        inputs, spec = tree_flatten(arguments)
        program.steps[key] = self._traced(program, step, inputs, spec)
        try:
            return program.steps[key](inputs)
        except (RuntimeError, ValueError, IndexError) as error:
            if not self.for_gpu or isinstance(error, torch.OutOfMemoryError):
                raise
            log.warning("model %s: a step runs as PyTorch has it (%s)", self.task.name, _first_line(error))
        program.steps[key] = self._traced(program, step, inputs, spec, rewritten=False)
        return program.steps[key](inputs)

    def _as_it_stands(self, program: Program, step: Callable[..., Any], arguments: Any) -> Any:
        try:
            return step(*arguments)
        except Exception as error:
            raise self._explained(program, error) from error

    def _widened(
        self,
        program: Program,
        key: Kind,
        known: Sequence[Kind],
        arguments: Any,
        right: Callable[[list[Tensor]], bool],
    ) -> bool:
        """Whether a step's graph follows from two of other widths; it is kept if what it gives is right.

        A CPU compares it to the bit with the step as it stands. On CUDA that has kernels of its own, which
        round otherwise and would have to be compiled: there a lane is compared with what the widest traced
        step gives it. Its kernels are those of the other widths, but for some of a single lane.
        """
        one, other = (program.steps[kind] for kind in known[:2])
        graph = of_width((known[0][1], one.graph), (known[1][1], other.graph), key[1])
        if graph is None:
            program.unlike.add(key)
            return False
        forward, inputs = graph.forward, tree_leaves(arguments)
        if key[1] == 1:
            self.ahead.compile(lambda: forward(*inputs))
        try:
            follows = right(forward(*inputs))
        except (RuntimeError, IndexError, ValueError, ArithmeticError):  # a size that was another's
            follows = False
        if follows:
            program.steps[key] = replace(one, run=_plain(graph), graph=graph, run_over=None, rows={})
        else:
            program.unlike.add(key)
        return follows

    def beforehand(self, program: Program, key: Kind, fixed: Fixed) -> Beforehand | None:
        """How to compute at once what follows from a scan's turns alone; steps of two widths tell."""
        kind = _but_lanes(key)
        if kind not in program.beforehand:
            known = [other for other in program.steps if _but_lanes(other) == kind and other[1] > 1][:2]
            if len(known) < 2 or program.steps[known[0]].parts is None:
                return None
            one, other = ((width[1], program.steps[width].graph) for width in known)
            program.beforehand[kind] = beforehand_of(one, other, len(tree_leaves(fixed)), TURN)
        return program.beforehand[kind]

    def some(self, program: Program, key: Kind, fixed: Fixed, every: Any, rows: Tensor) -> Any:
        """These rows of what there is for every client; of what a step does not read, any so many."""
        leaves, spec = tree_flatten(every)
        reads = self.reads(program, key, fixed)
        return tree_unflatten(
            [
                leaf.index_select(0, rows) if read else leaf[:1].expand(len(rows), *leaf.shape[1:])
                for leaf, read in zip(leaves, reads, strict=False)
            ],
            spec,
        )

    def reads(self, program: Program, key: Kind, fixed: Fixed) -> Iterable[bool]:
        """Which leaves of what there is for every client a step reads: all, as long as that is not known."""
        traced = program.steps.get(key)
        return repeat(True) if traced is None else traced.reads[len(tree_leaves(fixed)) :]

    def draws(self, batches: Batches) -> bool:
        """Whether anything is drawn for a step of such a scan, by a key of its own."""
        return self.task.draws or batches.augmented or batches.anew

    def _step_of(self, program: Program, batches: Batches, plan: Plan) -> Callable[..., Any]:
        """A step as it stands: of every lane, or of one where they are apart."""
        draws = self.draws(batches)

        def lane(
            rows: Rows,
            memo: list[Any],
            carry: Any,
            x: Nest,
            y: Nest,
            real: Tensor,
            key: Tensor,
            fixed: Fixed,
        ) -> Any:
            weight = None
            if not plan.shape.full:
                weight = (torch.arange(plan.shape.width, device=real.device) < real).to(self.task.dtype)
            try:
                self._replay(program, fixed, rows, memo)
            except Suspended as reached:
                with untouched(program.function, {**fixed.arguments, **rows.arguments}):
                    return reached.body(carry, batch_of(x, y, weight, key if draws else 0))
            raise SartorError(
                f"{name_of(program.function)}: a client function must make the same scans each time"
            )

        def step(
            fixed: Fixed,
            rows: Rows,
            memo: list[Any],
            carry: Any,
            index: Tensor,
            real: Tensor,
            key: Tensor,
        ) -> Any:
            dims: tuple[int | None, ...] = (0, 0, 0, 0, 0, 0, 0)
            every = partial(lane, fixed=fixed)
            if plan.shape.common and not self.apart:  # one product for all lanes, no copies of the samples
                index, real, dims = index[0], real[0], (0, 0, 0, None, None, None, 0)
            pick = _laid_out if plan.shape.in_a_row else _picked
            x, y = nests.mapped(lambda leaf: pick(leaf, index), fixed.data[batches.split])
            return (every if self.apart else torch.vmap(every, dims))(rows, memo, carry, x, y, real, key)

        return step

    def _traced(
        self,
        program: Program,
        function: Callable[..., Any],
        inputs: list[Tensor],
        spec: Any,
        rewritten: bool = True,
        step: bool = True,
    ) -> Traced:
        """The function as a plain graph of tensor operations for such arguments.

        For a GPU it is ``rewritten``: into operations with kernels of ours.
        """
        result_spec: list[Any] = []

        def flat(inputs: list[Tensor]) -> list[Tensor]:
            leaves, after_spec = tree_flatten(function(*tree_unflatten(inputs, spec)))
            result_spec.append(after_spec)
            return leaves

        try:
            graph = self.ahead.traced(lambda: recorded(flat, inputs))
        except Exception as error:
            raise self._explained(program, error) from error
        straighten(graph)
        for node in graph.graph.nodes:
            # A constant that a client function made lies on the CPU, from where a capture cannot fetch it.
            if node.op == "get_attr":
                setattr(graph, node.target, getattr(graph, node.target).to(self.device))
        if rewritten:
            self._rewrite(program, graph)
        reads = [bool(node.users) for node in graph.graph.find_nodes(op="placeholder")]
        parts = None
        if self.device.type == "cpu":
            # As a test has it, to see steps of a GPU; or what is no step.
            if self.apart or has_tensor_cores(self.device) or not step:
                quicken(graph)
            else:
                carried = result_spec[-1].num_leaves
                parts = parts_of(graph, len(inputs) - TURN - carried, carried)
        graph.recompile()
        self.ahead.compile(lambda: graph.forward(*inputs), program.widths)
        return Traced(_plain(graph), result_spec[-1], reads, graph, parts=parts)

    def _rewrite(self, program: Program, graph: fx.GraphModule) -> None:
        """Have a step computed by operations for which a GPU has kernels of ours."""
        if self.for_gpu:
            if not self.apart:
                rectified.specialise(graph)
            if HAS_TRITON:
                fused.specialise(graph)
            layouts.gather(graph)
            if not self.apart:
                layouts.settle(graph)
        if has_tensor_cores(self.device) and not self.apart:
            attention.specialise(graph)
            products.specialise(graph, program.lanes)
        if self.for_gpu and HAS_TRITON:
            pooling.specialise(graph)
            merge(graph)
        if self.for_gpu:
            layouts.loosen(graph)

    @property
    def for_gpu(self) -> bool:
        """Whether steps are rewritten into operations for which a GPU has kernels of ours."""
        return self.device.type == "cuda"

    def _explained(self, program: Program, error: Exception) -> Exception:
        """An error of vmap or tracing in a user's words.

        Out of memory and our own errors stay what they are.
        """
        if isinstance(error, (SartorError, torch.OutOfMemoryError, MemoryError)):
            return error
        if "can't allocate memory" in str(error):
            return MemoryError(str(error))
        first = _first_line(error)
        if any(words in first for words in IN_PLACE):
            return ClientError(changed_words(program.function, "a tensor that all clients share"))
        if isinstance(error, RuntimeError) and ("vmap" in first or "functorch" in first):
            cure = "engine.name=loop runs one client at a time"
            return NotStackable(f"{name_of(program.function)} cannot be stacked ({first}); {cure}")
        cure = "engine.name=loop names the client"
        return ClientError(f"{name_of(program.function)}, round {program.round}: {first}; {cure}")

    def _replay(self, program: Program, fixed: Fixed, rows: Rows, memo: list[Any]) -> Result:
        """Run the function for one client with the results of its first scans given."""
        buffers = next(iter(fixed.buffers + rows.buffers), None)
        known = iter(memo)

        def scan(client: Client, body: Callable[[Any, Batch], Any], carry: Any, batches: Batches) -> Any:
            for result in known:
                return result
            raise Suspended(client, body, carry, batches)

        client = Client(
            task=self.task,
            local=self.settings.local,
            scan=scan,
            number=rows.origins[0] if rows.origins else rows.number,
            round=rows.round,
            counts=rows.counts,
            buffers=buffers,
            frozen=self.settings.buffers == "freeze",
            evaluation_batch=self.settings.evaluation_batch,
            most=self.most,
            seed=rows.origins[1] if rows.origins else self.settings.seed,
            noise=self.settings.sample_noise,
        )
        arguments = {**fixed.arguments, **rows.arguments}
        with untouched(program.function, arguments):
            result = program.function(client, program.hyper, **arguments)
        reply = checked_reply(program.function, result, self.task.dtype, self.device)
        trained = () if client.buffers is None or client.buffers is buffers else (client.buffers,)
        return reply.sent, reply.kept, trained


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def merge(graph: fx.GraphModule) -> None:
    """Have a traced step made of few operations, each a kernel on a GPU: small ones take as long as large."""
    straighten(graph)
    likelihood.specialise(graph)
    descent.specialise(graph)
    products.complete(graph)
    pointwise.specialise(graph)


def _but_lanes(kind: Kind) -> tuple[Any, ...]:
    return kind[:1] + kind[2:]


def _gives(expected: list[Tensor], given: list[Tensor]) -> bool:
    """Whether a step gave just this."""
    return all(map(_same, given, expected))


def _agrees(
    arguments: Any, run: Callable[[list[Tensor]], list[Tensor]], lanes: int, given: list[Tensor]
) -> bool:
    """Whether a step gave every lane nearly what one of so many lanes gives it."""
    fixed, *own = arguments
    count = len(arguments[-1])
    for begin in range(0, count, lanes):
        places = torch.arange(begin, begin + lanes, device=arguments[-1].device) % count
        rows, memo, carry, *turn = tree_map(partial(torch.index_select, dim=0, index=places), own)
        expected = run(tree_leaves((fixed, rows, memo, carry, *turn)))
        picked = [value.index_select(0, places) for value in given]
        if not all(map(_near, picked, expected, tree_leaves(carry))):
            return False
    return True


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers; lanes that idle may have none."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _near(one: Tensor, other: Tensor, before: Tensor) -> bool:
    """Whether two tensors hold nearly the same, measured by how far one of them has come."""
    if not one.is_floating_point():
        return _same(one, other)
    apart, moved = ((value - other).abs().nan_to_num(0.0) for value in (one, before))
    most = 0.02 * moved.amax() if moved.numel() else 0.0
    return bool(((one != one) == (other != other)).all()) and bool((apart <= most).all())


def _plain(graph: fx.GraphModule) -> Callable[[list[Tensor]], list[Tensor]]:
    """What a graph does that takes its inputs one by one."""
    forward = graph.forward
    return lambda inputs: forward(*inputs)


def _picked(samples: Tensor, index: Tensor) -> Tensor:
    """Samples by number; whole ones are copied, which is faster than indexing them, single numbers not."""
    if samples.dim() == 1:
        return samples[index]
    return samples.index_select(0, index.view(-1)).view(*index.shape, *samples.shape[1:])


def _laid_out(samples: Tensor, index: Tensor) -> Tensor:
    """Samples that lie in the order of their lanes."""
    return samples.view(*index.shape, *samples.shape[1:])
