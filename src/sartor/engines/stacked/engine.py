"""The fast engine: a step of many clients at once.

A call is made in chunks of clients that fit into memory. Between the scans of a client function it is the
whole chunk's (:mod:`~sartor.engines.stacked.trace`); a scan is carried out here, in lanes and steps laid out
by ``schedule.py``. On CUDA it is captured and replayed (:mod:`~sartor.engines.stacked.graphs`): the whole
call, from the shuffling of the samples to the replies, where a short one of its shape comes again; else the
parts between scans, and single steps in graphs of several, which serve any cohort and any number of steps.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from sartor import nests, random
from sartor.client.law import Law
from sartor.client.local import Batches
from sartor.data.clients import ClientData
from sartor.engines.base import LocalEngine, Origins
from sartor.engines.loop import LoopEngine
from sartor.engines.schedule import (
    Move,
    Plan,
    Stretch,
    Usual,
    bucket,
    in_pieces,
    piece_width,
    plan,
    sample_order,
    samples_at,
    scan_table,
    usual,
)
from sartor.engines.stacked.graphs import Graphs
from sartor.engines.stacked.told import OfRounds, Told, parted
from sartor.engines.stacked.trace import TURN, Checked, Fixed, Folded, Kind, Onward, Program, Rows, Tracer
from sartor.errors import NotStackable
from sartor.federation.exchange import NOBODY, ClientError, ClientFunction, Lent, Outcome, Step, Work, stepped
from sartor.federation.functions import name_of
from sartor.federation.reduction import PLAIN
from sartor.federation.settings import FederationSettings
from sartor.kernels.ahead import begin
from sartor.kernels.device import Computing, free_bytes, to_device
from sartor.model.task import Task
from sartor.nests import Nest

log = logging.getLogger(__name__)

MOST_PLANS = 1024
"""Plans remembered per federation: with equal clients every round has the same."""

CACHED = 1 << 25
"""Bytes of samples that a CPU is given at once where nothing is trained."""
STEPPED = 1 << 24
"""Bytes of models that a CPU steps at once: a step goes through all of them, so a cache should hold them."""
WHOLE = 128
"""Steps of a call that is captured as a whole; one with more is made of captured steps."""


HEADER_ROUNDS = 1
"""Where a header has the rounds."""

LAYERS = "layers"
"""What names the streams that layers draw from."""

Given = tuple[Fixed, Rows, list[Any]]
"""What is given to steps: what is common, what is every client's own, and what came of the scans before."""


class Table(NamedTuple):
    """What a scan knows of its clients and their turns, as arrays on the host or tensors on the device."""

    keys: dict[str, Any]
    """What samples are shuffled by, and layers draw from: by the name of the stream, one for each client."""
    order: tuple[Any, ...] = ()
    """Where every client has its lane: the order of clients."""
    turns: tuple[Any, ...] = ()
    """Where a lane takes several clients: rows, turns, first places, numbers of samples, where they start."""

    @property
    def parts(self) -> list[Any]:
        """All arrays, or tensors."""
        return [*self.keys.values(), *self.order, *self.turns]

    def of(self, parts: Iterator[Any]) -> Table:
        """A table of other parts."""
        keys = {name: next(parts) for name in self.keys}
        return Table(keys, tuple(next(parts) for _ in self.order), tuple(next(parts) for _ in self.turns))

    def there(self, device: torch.device) -> Table:
        """The table on the device."""
        return self.of(to_device(part, device) for part in self.parts)


Who = tuple[bytes, bool, tuple[str, ...], tuple[tuple[str, Step], ...]]
"""The clients of a call, whether they keep anything, what of their replies is added up, and steps by that."""


class Prepared(NamedTuple):
    """What is known of a call before its round is, for clients who may be asked the same again."""

    who: Who
    lasts: bool
    """Whether it is so in every round."""
    shape: Hashable | None
    call: Callable[[list[Tensor]], Folded]
    told: Told


class StackedEngine(LocalEngine):
    """Runs client functions for many clients at once, in chunks that fit into memory.

    Of its settings, ``chunk`` and ``lanes`` limit how many clients are held and stepped at once (0: as many
    as fit), ``graphs`` captures calls on CUDA, ``way`` has a step's clients computed together or apart, and
    ``otherwise`` says what becomes of a function that turns out not to be stackable.
    """

    name = "stacked"

    def __init__(
        self, task: Task, data: ClientData, settings: FederationSettings, origins: Origins | None = None
    ) -> None:
        begin(torch.device(settings.device))  # while samples are brought there
        super().__init__(task, data, settings, origins)
        self._given = data
        self._others: set[ClientFunction] = set()
        self.chunk = settings.chunk
        self.graphs = Graphs(self.device, settings.graphs)
        self.programs: dict[Hashable, Program] = {}
        most = {split: int(samples.counts.max(initial=0)) for split, samples in self.samples.items()}
        self._tracer = Tracer(task, settings, most, norms=self.graphs.wanted)
        self._plans: dict[Hashable, Plan] = {}
        self._expected: dict[tuple[Batches, int], Usual] = {}
        self._widths: dict[tuple[Batches, bool], int] = {}
        self._counted: dict[int, Tensor] = {}
        self._filled: dict[tuple[int, ...], Tensor] = {}
        self._known: tuple[Any, str] | None = None
        self._prepared: dict[int, Prepared] = {}
        """By program."""
        train = self.samples["train"]
        self.task.require_stackable(train.x, train.y, self._tracer.apart)
        self._alone = self.task.why_not_stackable(train.x, train.y) is not None
        """Whether the model cannot be stacked: whatever its captured steps fail on, the loop may do."""
        self._exact = self.task.mixes_samples(train.x, train.y)
        self._activations = self.task.activations(train.x)

    @property
    def narrows(self) -> bool:
        """Whether lanes without a client are dropped: each width is captured by itself."""
        return self.device.type == "cpu" and not self.graphs.wanted

    @property
    def keeps_lanes(self) -> bool:
        """Whether every client has a lane of its own: steps are captured for a few widths."""
        return self.graphs.wanted and not self._tracer.apart

    # A call, chunk by chunk -----------------------------------------------------------------------

    def run(self, work: Work) -> Outcome:
        """Run the function at all these clients, as many at once as memory allows."""
        if work.function in self._others:
            return self._loop.run(work)
        try:
            return self._stacked(work)
        except (NotStackable, ClientError, RuntimeError) as error:
            unfit = isinstance(error, NotStackable) or self._alone
            if self.settings.otherwise != "loop" or not unfit or isinstance(error, torch.OutOfMemoryError):
                raise
            self._others.add(work.function)
            log.warning("%s runs on the loop engine: %s", name_of(work.function), error)
            return self._loop.run(work)

    @cached_property
    def _loop(self) -> LoopEngine:
        """Where functions run that turn out not to be stackable, if nobody asked for this engine."""
        return LoopEngine(self.task, self._given, self.settings, self.origins)

    def _stacked(self, work: Work) -> Outcome:
        with Computing(self.settings.precision):
            try:
                return self._run(work)
            except (IndexError, ClientError) as error:  # as of a token that an embedding does not have
                reason = self.refused(work.numbers)
                if reason is None:
                    raise
                raise ClientError(f"{name_of(work.function)}, round {work.round}, {reason}") from error

    def _run(self, work: Work) -> Outcome:
        clients = len(work.numbers)
        if not clients:
            return NOBODY
        if not self.chunk:
            self.chunk = self._fitting_chunk()
        self._tracer.ahead.wait()
        while True:
            try:
                (sent, kept, after, norms), lent = self._chunks(work, self.chunk)
                return Outcome(work.numbers, sent, kept, after[0] if after else None, norms or None, lent)
            except (torch.OutOfMemoryError, MemoryError):
                if min(self.chunk, clients) == 1:
                    raise
                self.chunk = max(1, min(self.chunk, clients) // 2)
                log.warning("out of memory: training %d clients at once from now on", self.chunk)
                self.graphs.forget()

    def _chunks(self, work: Work, limit: int) -> tuple[Checked, Lent | None]:
        clients = len(work.numbers)
        pieces = -(-clients // limit)
        size = min(bucket(-(-clients // pieces)), limit)
        as_many = size == clients or clients == len(self.samples["train"].counts)  # as there always are
        if pieces == 1 and (as_many or not (work.keeps or self.graphs.wanted)):
            return self.run_chunk(work)
        # Clients of like size share a chunk, so that little is left to wait for.
        order = np.argsort(-self.samples["train"].counts[work.numbers], kind="stable")
        results: list[Any] = []
        for first in range(0, clients, size):
            # A last chunk is filled up with copies of its last client, so that all chunks have one shape.
            taken = order[first : first + size]
            places = np.concatenate([taken, np.repeat(taken[-1:], size - len(taken))])
            index = to_device(places, self.device)
            result, _ = self.run_chunk(work.rows(places, index))
            results.append(tree_map(partial(_first, len(taken)), result))
        back = to_device(np.argsort(order, kind="stable"), self.device)
        joined: Checked = tree_map(lambda *pieces: torch.cat(pieces)[back], *results)
        return joined, None

    def _fitting_chunk(self) -> int:
        """How many clients fit: some copies of the model and a batch's activations, with room to spare.

        In a pass over many samples there is one gradient of them at most, and mostly none.
        """
        width = self.settings.local.batch or int(self.samples["train"].counts.max(initial=1))
        samples_held = max(4 * width, 2 * self.settings.evaluation_batch)
        numbers = 8 * self.task.size + samples_held * self._activations
        # Twice the samples that are fetched for a client: where they are laid out, and on the way there.
        numbers += 2 * sum(samples.fetched for samples in self.samples.values())
        size = self.task.initial().element_size()
        most = int(0.7 * free_bytes(self.device)) // (numbers * size)
        if self.device.type == "cpu":
            most = min(most, max(4, STEPPED // (self.task.size * size)))
        return max(1, most)

    # A chunk: plain, or captured and replayed -----------------------------------------------------

    def run_chunk(self, work: Work) -> tuple[Checked, Lent | None]:
        """Run the function at clients that fit into memory together."""
        names = (tuple(work.shared), tuple(work.own))
        arguments = [*work.shared.values(), *work.own.values()]
        if work.buffers is not None:
            arguments.append(work.buffers)
        shapes = tuple([(value.shape, value.dtype) for value in arguments])
        key = (work.function, self._described(work.hyper), len(work.numbers), names, shapes)
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = Program(work.function, work.hyper)
        program.round = work.round
        for split in {batches.split for batches in program.scans or ()}:
            self._bring(split, work.numbers)
        folds: tuple[str, ...] = ()
        steps: tuple[tuple[str, Step], ...] = ()
        if work.fold is not None and self.graphs.wanted:
            folds, weights, steps = work.fold
            arguments.append(weights)
        prepared, who = self._prepared.get(id(program)), (work.numbers.tobytes(), work.keeps, folds, steps)
        if prepared is None or prepared.who != who:
            prepared = self._prepare(program, work, names, who)
            if prepared.lasts:
                self._prepared[id(program)] = prepared
        return self.graphs.call(prepared.shape, prepared.call, prepared.told, work.rounds, arguments)

    def _prepare(
        self, program: Program, work: Work, names: tuple[tuple[str, ...], ...], who: Who
    ) -> Prepared:
        """What is known of a call of these clients before its round is."""
        plans = None
        if program.scans is not None:
            scans = program.scans
            plans = [self._plan(batches, work, scans[:place]) for place, batches in enumerate(scans)]
        tables = [self._table(plan, work) for plan in plans or ()]
        parts = self._header(work)
        changing: dict[int, OfRounds] = {HEADER_ROUNDS: lambda rounds: rounds}
        for table in tables:
            for place, stream in enumerate(table.keys, len(parts)):
                changing[place] = partial(self._keys, stream, work.numbers)
            parts += table.parts
        sizes = [part.shape for part in parts]
        work = work._replace(shared={}, own={}, buffers=None)  # which are a round's, and not to be held

        numbers, _, folds, steps = who

        def call(inputs: list[Tensor]) -> Folded:
            joined, *given = inputs
            weights = given.pop() if folds else None
            there, values = parted(joined, sizes), iter(given)
            header = Rows(next(there), next(there), {name: next(there) for name in self.samples}, {}, ())
            if self.origins is not None:
                header = header._replace(origins=(next(there), next(there)))
            known = [table.of(there) for table in tables]
            shared, own = (dict(zip(group, values, strict=False)) for group in names)
            result = self._execute(program, work, plans, header, shared, own, tuple(values), known)
            return _folded_up(result, folds, weights, steps, shared)

        shape = None
        if plans is not None and sum(plan.shape.steps for plan in plans) <= WHOLE:
            shape = (id(program), folds, steps, *((plan.shape, plan.stretches) for plan in plans))
        lasts = plans is not None and all(plan.batches.law is None for plan in plans)
        return Prepared(who, lasts, shape, call, Told(numbers, parts, changing))

    def _header(self, work: Work) -> list[np.ndarray]:
        """Who these clients are: numbers, rounds, how many samples of each split they have, and origins."""
        numbers, origins = work.numbers, self.origins
        parts = [numbers, work.rounds, *(samples.counts[numbers] for samples in self.samples.values())]
        return parts if origins is None else [*parts, origins.numbers[numbers], origins.seeds[numbers]]

    def _described(self, hyper: Any) -> str:
        """What hyper-parameters are; as a rule they are one object that cannot change, and are remembered."""
        if self._known is not None and self._known[0] is hyper:
            return self._known[1]
        described = repr(hyper)
        parameters = getattr(hyper, "__dataclass_params__", None)
        self._known = (hyper, described) if parameters is not None and parameters.frozen else None
        return described

    def _counting(self, end: int) -> Tensor:
        """0, 1, 2, … up to ``end``; the same tensor each time."""
        if end not in self._counted:
            self._counted[end] = torch.arange(end, device=self.device)
        return self._counted[end]

    def _everywhere(self, number: int, like: Tensor) -> Tensor:
        """So much for every turn; the same tensor each time."""
        key = (number, *like.shape)
        if key not in self._filled:
            self._filled[key] = torch.full_like(like, number, memory_format=torch.contiguous_format)
        return self._filled[key]

    # Running a program ----------------------------------------------------------------------------

    def _execute(
        self,
        program: Program,
        work: Work,
        plans: list[Plan] | None,
        header: Rows,
        shared: dict[str, Tensor],
        own: dict[str, Tensor],
        buffers: tuple[Tensor, ...],
        tables: list[Table],
    ) -> Checked:
        """Advance the function from scan to scan until it returns."""
        own_buffers = any(value.dim() == 2 for value in buffers)
        rows = header._replace(arguments=own, buffers=buffers if own_buffers else ())
        fixed = Fixed(shared, () if own_buffers else buffers, self._data())
        memo: list[Any] = []
        scans: list[Batches] = []
        while True:
            batches, result = self._advance(program, fixed, rows, memo)
            if batches is None:
                program.scans = scans
                finished: Checked = result
                return finished
            if plans is None and self._bring(batches.split, work.numbers):
                fixed = fixed._replace(data=self._data())
            scan_plan = self._plan(batches, work, scans) if plans is None else plans[len(scans)]
            table = self._table(scan_plan, work).there(self.device) if plans is None else tables[len(scans)]
            run = partial(self._scan, program, len(scans))
            trains = work.keeps or scan_plan.shape.packed or batches.shuffled
            if trains or self.device.type != "cpu" or self._tracer.apart:
                memo.append(run(scan_plan, table, fixed, rows, memo, result))
            else:
                memo.append(self._in_parts(run, scan_plan, work, fixed, (table, rows, memo, result)))
            scans.append(batches)

    def _in_parts(self, run: Callable[..., Any], plan: Plan, work: Work, fixed: Fixed, given: Any) -> Any:
        """What a scan gives that trains nothing.

        A CPU is fastest with as many clients at once as have their samples in its cache, and those who have
        theirs one after the other.
        """
        split, shape, width = plan.batches.split, plan.shape, plan.shape.width
        samples = self.samples[split]
        size = width * sum(leaf[:1].nbytes for leaf in nests.leaves(samples.x))
        parts = 1 if shape.common else max(1, -(-shape.lanes * size // CACHED))
        whole = samples.laid_out(work.numbers, width) if shape.steps == 1 and not shape.common else None
        carries = []
        for places in np.array_split(np.arange(shape.lanes), min(parts, shape.lanes)):
            taken = slice(places[0], places[-1] + 1)
            table, rows, memo, carry = tree_map(lambda value: value[taken], given)  # noqa: B023
            part, seen = replace(shape, lanes=len(places), in_a_row=whole is not None), fixed
            if whole is not None:
                data = nests.rows(whole, slice(width * places[0], width * (places[-1] + 1)))
                seen = fixed._replace(data={**fixed.data, split: data})
            carries.append(run(replace(plan, shape=part), table, seen, rows, memo, carry))
        return tree_map(lambda *parts: torch.cat(parts), *carries)

    def _advance(
        self, program: Program, fixed: Fixed, rows: Rows, memo: list[Any]
    ) -> tuple[Batches | None, Any]:
        """Run the function up to its next scan, or to its end."""
        if program.scans is None or not self.graphs.pieces:
            return self._tracer.advance(program, fixed, rows, memo)
        fixed = fixed._replace(data={})  # which lies where it is, and is not read here
        part = partial(self._tracer.advance, program)
        batches, result = self.graphs.part((id(program), len(memo)), part, (fixed, rows, memo))
        return batches, result

    def _bring(self, split: str, numbers: np.ndarray) -> bool:
        """Have these clients' samples on the device; whether they lie in other tensors than before."""
        moved = self.samples[split].bring(numbers)
        if moved and self.graphs.wanted:
            self.graphs.forget()
        return moved

    def _data(self) -> dict[str, tuple[Nest, Nest]]:
        return {split: (samples.x, samples.targets) for split, samples in self.samples.items()}

    def _scan(
        self,
        program: Program,
        position: int,
        plan: Plan,
        table: Table,
        fixed: Fixed,
        rows: Rows,
        memo: list[Any],
        carry: Any,
    ) -> Any:
        """Carry out a scan for all clients of the chunk: ``carry`` holds one row per client."""
        shape, clients, batches = plan.shape, len(rows.number), plan.batches
        if shape.steps == 0:
            return carry
        places, keys, size = self._counting(shape.places), table.keys, rows.counts[batches.split]
        shuffled = keys[batches.stream] if batches.shuffled else None
        kind = (shape.full, shape.common, shape.in_a_row, len(memo))
        key: Kind = (position, clients, shape.width, *kind)
        given = (fixed, rows, memo)
        if not table.turns:
            lanes = self._counting(clients).expand(shape.steps, clients)
            turns = self._counting(shape.steps)[:, None].expand(shape.steps, clients)
            start = self.samples[batches.split].start
            full = self._everywhere(shape.width, turns) if shape.full else None
            drawn: tuple[Tensor, ...] = scan_table(
                batches, shuffled, shape.width, places, rows.number, start, size, lanes, turns, full
            )
            if LAYERS in keys:
                drawn = (*drawn, _folded(keys[LAYERS], turns))
            return self._steps(program, key, plan, given, carry, drawn)
        lanes, turns, begin, real, start = table.turns[0]
        order = sample_order(shuffled, size, places)
        drawn = (samples_at(order, begin, real, start, self._counting(shape.width)), real)
        if LAYERS in keys:
            # For all steps at once, as a key takes many small operations.
            drawn = (*drawn, _folded(keys[LAYERS][lanes.clamp(max=clients - 1)], turns))
        if shape.pieces:
            key = (position, shape.lanes, *key[2:])
            return self._in_pieces(program, key, plan, lanes, given, carry, drawn)
        if table.order:
            return self._in_order(program, key, plan, table.order[0], given, carry, drawn)
        if not self.graphs.wanted:
            return self._in_lanes(program, key, plan, lanes, given, carry, drawn)
        # One more row, for idle lanes to work on.
        carry = tree_map(lambda value: torch.cat([value, value[:1]]), carry)
        end = 0
        for stretch in plan.stretches:
            index, *others = drawn
            turn = _laid_out((index[:, : stretch.width], *others), end, stretch)
            whose, key = lanes[end:][: stretch.lanes], (position, stretch.lanes, stretch.width, *kind)
            end += stretch.steps * stretch.lanes
            client = whose.clamp(max=clients - 1)
            their_rows, their_memo = self._tracer.some(program, key, fixed, (rows, memo), client)
            theirs = tree_map(lambda value: value.index_select(0, whose), carry)  # noqa: B023
            after = self._steps(program, key, plan, (fixed, their_rows, their_memo), theirs, turn)
            for whole, part in zip(tree_leaves(carry), tree_leaves(after), strict=True):
                whole.index_copy_(0, whose, part)
        return tree_map(lambda value: value[:clients], carry)

    def _in_lanes(
        self,
        program: Program,
        key: Kind,
        plan: Plan,
        whose: Tensor,
        given: Given,
        carry: Any,
        turns: tuple[Tensor, ...],
    ) -> Any:
        """A scan in which lanes take several clients: a model moves when its client begins, and ends."""
        fixed, *others = given
        common, own = tree_leaves(fixed), tree_leaves(others)
        leaves, form = tree_flatten(carry)
        lanes = max(stretch.lanes for stretch in plan.stretches)
        ended = [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]
        held = [leaf.new_zeros((lanes, *leaf.shape[1:])) for leaf in leaves]
        columns, begin = [*turns, turns[-1]][:TURN], 0
        beforehand = self._tracer.beforehand(program, key, fixed) if plan.even else None
        if beforehand is not None:
            columns += beforehand(common, columns)
        for stretch, (going, coming) in zip(plan.stretches, plan.moves, strict=True):
            _move(held, coming, ended)
            turn = _laid_out((columns[0][:, : stretch.width], *columns[1:]), begin, stretch)
            client = whose[begin : begin + stretch.lanes].clamp(max=len(plan.sizes) - 1)
            kind = (key[0], stretch.lanes, stretch.width, *key[3:])
            start, traced = [leaf[: stretch.lanes] for leaf in held], program.steps.get(kind)
            if traced is not None and traced.parts is not None:
                read = zip(own, traced.reads[len(common) :], strict=False)
                rows = (leaf.index_select(0, client) if wanted else leaf for leaf, wanted in read)
                after = traced.in_a_row([*common, *rows], start, turn, beforehand)
            else:
                some = self._tracer.some(program, kind, fixed, others, client)
                step = partial(self._tracer.steps, program, kind, plan.batches, plan, (fixed, *some))
                after = tree_leaves(step(tree_unflatten(start, form), turn[:TURN]))
            for leaf, result in zip(start, after, strict=True):
                if result is not leaf:
                    leaf.copy_(result)
            _move(ended, going, held)
            begin += stretch.steps * stretch.lanes
        return tree_unflatten(ended, form)

    def _in_pieces(
        self,
        program: Program,
        key: Kind,
        plan: Plan,
        whose: Tensor,
        given: Given,
        carry: Any,
        turns: tuple[Tensor, ...],
    ) -> Any:
        """A scan that adds something up: what every piece of the samples adds, summed for each client."""
        fixed, rows, memo = given
        total, width, client = len(whose), plan.shape.width, whose.clamp(max=len(rows.number) - 1)
        # One more row, of nothing, for clients with fewer pieces.
        added = tree_map(lambda value: value.new_zeros((total + 1, *value.shape[1:])), carry)
        end = 0
        for stretch in plan.stretches:
            there, turn = slice(end, end + stretch.lanes), _laid_out(turns, end, stretch)
            some = self._tracer.some(program, key, fixed, (rows, memo), client[there])
            own = tree_map(lambda value: value[there], added)  # noqa: B023
            after = self._steps(program, key, plan, (fixed, *some), own, turn)
            for whole, part in zip(tree_leaves(added), tree_leaves(after), strict=True):
                whole[there] = part
            end += stretch.lanes
        count = plan.batches.per_epoch(rows.counts[plan.batches.split], width)[:, None]
        column = self._counting(-(-plan.shape.places // width))
        place = torch.where(column < count, count.cumsum(0) - count + column, total)
        return tree_map(lambda value, every: value + every[place].sum(1, dtype=value.dtype), carry, added)

    def _in_order(
        self,
        program: Program,
        key: Kind,
        plan: Plan,
        whose: Tensor,
        given: Given,
        carry: Any,
        turns: tuple[Tensor, ...],
    ) -> Any:
        """A scan in which every client has its lane, and those who still train are the first ones."""
        fixed, *others = given
        held, (leaves, form) = None, tree_flatten(carry)
        idle = plan.stretches[0].busy < len(whose)
        ended = [leaf.clone() if idle else torch.empty_like(leaf) for leaf in leaves]
        if self.graphs.pieces:
            held = self.graphs.held((id(program), key), given, carry)
            if held.reads is None and key in program.steps:
                held.reads = [*self._tracer.reads(program, key, fixed)]
            held.take(given, leaves, whose)
            leaves = held.carry
        else:
            others = self._tracer.some(program, key, fixed, others, whose)
            leaves = [leaf.index_select(0, whose) for leaf in leaves]
        begin, top = 0, plan.stretches[0].busy
        for stretch, after in itertools.pairwise((*plan.stretches, None)):
            assert stretch is not None
            kind: Kind = (key[0], stretch.lanes, *key[2:])
            step = partial(self._tracer.steps, program, kind, plan.batches, plan)
            if held is not None:
                steps = self.graphs.steps((id(program), kind), step, held, stretch.lanes)
                steps.run(turns, begin, stretch.steps)
            else:
                own, start = tree_map(
                    lambda value: value[: stretch.lanes],  # noqa: B023
                    (others, tree_unflatten(leaves, form)),
                )
                leaves = tree_leaves(step((fixed, *own), start, _laid_out(turns, begin, stretch)))
            begin += stretch.steps * stretch.lanes
            # Those who are done stay where they are until the next steps write over them.
            if held is None or after is None or after.lanes > stretch.left:
                done, top = slice(stretch.left, top), stretch.left
                for whole, leaf in zip(ended, leaves, strict=True):
                    whole.index_copy_(0, whose[done], leaf[done])
        return tree_unflatten(ended, form)

    def _steps(
        self,
        program: Program,
        key: Kind,
        plan: Plan,
        given: Given,
        carry: Any,
        turns: tuple[Tensor, ...],
    ) -> Any:
        """Some steps in which every lane keeps its client; all that is given has a row per lane."""
        step, place = partial(self._tracer.steps, program, key, plan.batches, plan), (id(program), key)
        if not (self.graphs.pieces and (plan.shape.packed or plan.shape.steps > WHOLE)):
            return step(given, carry, turns)
        if plan.shape.pieces and not self.graphs.lasting(place, program.round):
            return step(given, carry, turns)  # what is held would have a copy of the model for every piece
        held = self.graphs.held(place, given, carry)
        held.take(given, tree_leaves(carry))
        flat = [turn.flatten(0, 1) for turn in turns]
        self.graphs.steps(place, step, held, key[1]).run(flat, 0, len(turns[0]))
        return held.first(key[1])[1]

    # Plans ----------------------------------------------------------------------------------------

    def _table(self, plan: Plan, work: Work) -> Table:
        """What a scan has to know of these clients: made on the host, where it takes a few operations."""
        batches, numbers = plan.batches, work.numbers
        streams = [batches.stream] * batches.shuffled + [LAYERS] * self._tracer.draws(batches)
        keys = {name: self._keys(name, numbers, work.rounds) for name in streams}
        if plan.table is None:
            return Table(keys)
        rows, real = plan.table[0], plan.table[3]
        # Where no sample is real the client may have none, and begin behind the last sample of all.
        starts = self.samples[batches.split].starts[numbers[np.minimum(rows, len(numbers) - 1)]]
        turns = np.concatenate([plan.table, np.where(real > 0, starts, 0)[None]])
        return Table(keys, () if plan.order is None else (plan.order,), (turns,))

    def _keys(self, stream: str, numbers: np.ndarray, rounds: np.ndarray) -> np.ndarray:
        """What clients draw from in these rounds: a key each; a row of them for each round of a column."""
        if self.origins is None:
            return random.keys(self.settings.seed, stream, rounds, numbers)
        return random.keys(self.origins.seeds[numbers], stream, rounds, self.origins.numbers[numbers])

    def _plan(self, batches: Batches, work: Work, before: Sequence[Batches]) -> Plan:
        """How these clients take the steps of a scan, with the scans ``before`` it in their function."""
        sizes = self.samples[batches.split].counts[work.numbers]
        epochs = None if batches.law is None else self._epochs(batches.law, work)
        common = not batches.shuffled and self.samples[batches.split].common(work.numbers)
        pieces = self._pieces(batches, bool(work.own) or not all(scan.summed for scan in before))
        key = (batches, common, pieces, sizes.tobytes(), None if epochs is None else epochs.tobytes())
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            if pieces:
                self._plans[key] = in_pieces(batches, sizes, pieces)
                return self._plans[key]
            expected, rounded = self._usual(batches, len(sizes)), self.graphs.wanted
            lanes = self.settings.lanes
            self._plans[key] = plan(
                batches,
                sizes,
                lanes,
                rounded,
                epochs,
                expected,
                common,
                self.narrows,
                self._exact,
                own=self.keeps_lanes,
            )
        return self._plans[key]

    def _pieces(self, batches: Batches, own: bool) -> int:
        """How wide the pieces of a scan that adds something up are; 0 where batches are better.

        ``own``: every client has a model of its own, which its pieces have a copy of each.
        """
        if not batches.summed or not self.keeps_lanes or self._exact or self.settings.lanes:
            return 0
        key = (batches, own)
        if key not in self._widths:
            sizes, model = self.samples[batches.split].counts, own * self.task.size
            width = piece_width(batches, sizes, self._activations, model)
            self._widths[key] = width if width < batches.width(int(sizes.max(initial=0))) else 0
        return self._widths[key]

    def _usual(self, batches: Batches, clients: int) -> Usual:
        """What is to be expected of so many clients, whoever they are."""
        key = (batches, clients)
        if key not in self._expected:
            threads = torch.get_num_threads() if self.narrows else 1
            self._expected[key] = usual(batches, self.samples[batches.split].counts, clients, threads)
        return self._expected[key]

    def _epochs(self, law: Law, work: Work) -> np.ndarray:
        """The epochs that are drawn for these clients in their rounds."""
        numbers, seed = work.numbers, self.settings.seed
        if self.origins is None:
            return law.epochs(seed, torch.from_numpy(work.rounds), torch.from_numpy(numbers)).numpy()
        seeds, own = (torch.from_numpy(part[numbers]) for part in (self.origins.seeds, self.origins.numbers))
        return law.epochs(seeds, torch.from_numpy(work.rounds), own).numpy()


def _folded_up(
    result: Checked,
    names: tuple[str, ...],
    weights: Tensor | None,
    steps: tuple[tuple[str, Step], ...],
    shared: dict[str, Tensor],
) -> Folded:
    """What a call gives, with means of replies that are to be added up and steps; rows are as they lie."""
    sent, kept, after, norms = result
    rows = {name: value for name, value in sent.items() if name in names and value.dim() == 2}
    rows = {name: value for name, value in rows.items() if value.is_floating_point()}
    means = {name: PLAIN.sum(name, value, weights) for name, value in rows.items() if weights is not None}
    places = {name: place for place, name in enumerate(shared)}
    onward = [
        Onward(name, places[start], rate, stepped(shared[start], rate, means[name]))
        for name, (start, rate) in steps
        if name in means and start in shared
    ]
    left = {name: value for name, value in sent.items() if name not in rows}
    return (left, kept, after, norms), rows, means, onward


def _folded(keys: Tensor, turns: Tensor) -> Tensor:
    folded = random.fold(keys, turns)
    assert isinstance(folded, Tensor)
    return folded


def _laid_out(turns: tuple[Tensor, ...], begin: int, stretch: Stretch) -> tuple[Tensor, ...]:
    """What is the turns' of a stretch, [steps, lanes, …]."""
    there = slice(begin, begin + stretch.steps * stretch.lanes)
    return tuple(
        part[there].contiguous().view(stretch.steps, stretch.lanes, *part.shape[1:]) for part in turns
    )


def _move(into: list[Tensor], where: Move, source: list[Tensor]) -> None:
    """Copy rows to their places: few at a time, and faster one by one than by tables of them."""
    for place, row in zip(*(part.tolist() for part in where), strict=True):
        for leaf, other in zip(into, source, strict=True):
            leaf[place].copy_(other[row])


def _first(count: int, value: Tensor) -> Tensor:
    return value[:count]
