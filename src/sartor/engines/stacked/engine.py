"""The fast engine: a step of many clients at once.

A client function is written for one client. Here it runs for a whole chunk of them under ``torch.vmap``,
and its scans, the loops over batches, are carried out outside of it. That is done by replaying: the
function is pure, so it is run until it reaches its first scan, where it is suspended; the scan is carried
out; then the function is run again with the result in hand, and so on until it returns. Between scans a
client function has only vector algebra, which costs nothing to repeat.

A step of a scan is the body of the suspended function for one lane each (see ``schedule.py``). It is traced
once into a plain graph of tensor operations, which removes Python, vmap and autograd from every later step;
it may be compiled, and so may what lies between scans. On CUDA the whole call, from the shuffling of the
samples to the replies, is captured as one CUDA graph per shape and replayed.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from sartor import random
from sartor.client.local import Batches, Client
from sartor.data.clients import ClientData
from sartor.engines.base import LocalEngine, Origins
from sartor.engines.schedule import Plan, bucket, plan, scan_table
from sartor.errors import NotStackable, SartorError
from sartor.federation.exchange import (
    NOBODY,
    ClientError,
    ClientFunction,
    Outcome,
    Work,
    checked_reply,
    norms_of,
)
from sartor.federation.functions import name_of
from sartor.federation.settings import FederationSettings
from sartor.kernels import products
from sartor.kernels.device import digits, free_bytes, to_device
from sartor.kernels.gpu import has_tensor_cores
from sartor.model.task import Batch, Task

log = logging.getLogger(__name__)

_Result = tuple[dict[str, Tensor], dict[str, Tensor], tuple[Tensor, ...]]
"""What a function gives, one row per client: replies, new states and, if it trained, buffers."""

_Checked = tuple[dict[str, Tensor], dict[str, Tensor], tuple[Tensor, ...], dict[str, Tensor]]
"""That of a chunk, and where a graph computes them along with it, the norms of all of it."""

_Traced = Callable[[list[Tensor]], Any]
"""A traced function: from its flattened arguments to its result."""

MOST_GRAPHS = 64
"""CUDA graphs kept per federation; the one unused for longest goes first."""

MOST_PLANS = 1024
"""Plans remembered per federation: with equal clients every round has the same."""

MOST_COHORTS = 64
"""Cohorts whose client numbers stay on the device."""


class _Suspended(Exception):
    """A client function reached a scan whose result is not known yet."""

    def __init__(
        self, client: Client, body: Callable[[Any, Batch], Any], carry: Any, batches: Batches
    ) -> None:
        self.client, self.body, self.carry, self.batches = client, body, carry, batches


class _Rows(NamedTuple):
    """What differs between clients, one row each: numbers, rounds, sample counts and arguments."""

    number: Tensor
    round: Tensor
    counts: dict[str, Tensor]
    arguments: dict[str, Tensor]
    buffers: tuple[Tensor, ...]
    origins: tuple[Tensor, ...] = ()
    """Where clients are not those of one run in order: a client's number in its run, and that run's seed."""


class _Fixed(NamedTuple):
    """What is the same for all clients of a call."""

    arguments: dict[str, Tensor]
    buffers: tuple[Tensor, ...]
    data: dict[str, tuple[Tensor, Tensor]]


@dataclass
class _Program:
    """A client function for inputs of certain shapes: its scans, in order, and their traced steps."""

    function: ClientFunction
    hyper: Any
    round: int = 0
    """The server's round of the call under way, for messages."""
    scans: list[Batches] | None = None
    steps: dict[Hashable, _Traced] = field(default_factory=dict)
    parts: dict[int, tuple[Batches | None, _Traced]] = field(default_factory=dict)
    """Where it is compiled, what lies before and after its scans, with the scan that follows."""


@dataclass
class _Graph:
    """A captured call: replaying it reads the inputs' memory and writes the outputs'."""

    graph: Any
    inputs: list[Tensor]
    outputs: _Checked
    keep: Any
    numbers: Tensor | None = None
    """The client numbers it holds: such a tensor never changes, and is not copied twice."""

    def replay(self, numbers: Tensor, rounds: np.ndarray, others: list[Tensor]) -> _Checked:
        """Put the inputs where the graph reads them, and make the call again."""
        to_numbers, to_rounds, *rest = self.inputs
        if numbers is not self.numbers:
            to_numbers.copy_(numbers)
            self.numbers = numbers
        if len(set(rounds.tolist())) == 1:  # one number, as a rule, which travels faster than an array
            to_rounds.fill_(int(rounds[0]))
        else:
            to_rounds.copy_(to_device(rounds, to_rounds.device))
        for static, value in zip(rest, others, strict=True):
            static.copy_(value, non_blocking=True)
        self.graph.replay()
        sent, kept, after, norms = self.outputs
        return _cloned(sent), _cloned(kept), tuple(value.clone() for value in after), _cloned(norms)


class StackedEngine(LocalEngine):
    """Runs client functions for many clients at once, in chunks that fit into memory.

    Of its settings, ``chunk`` and ``lanes`` limit how many clients are held and stepped at once (0: as many
    as fit), ``compile`` puts the traced step through ``torch.compile``, ``graphs`` captures calls on CUDA.
    """

    name = "stacked"

    def __init__(
        self, task: Task, data: ClientData, settings: FederationSettings, origins: Origins | None = None
    ) -> None:
        super().__init__(task, data, settings, origins)
        self.chunk, self.lanes, self.compile = settings.chunk, settings.lanes, settings.compile
        self.graphs = settings.graphs and self.device.type == "cuda"
        self._programs: dict[Hashable, _Program] = {}
        self._captured: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self._pool: Any = None
        self._origins: Tensor | None = None
        """Each client's number in its run, and that run's seed, where they are not as they come."""
        if origins is not None:
            self._origins = to_device(np.stack([origins.numbers, origins.seeds]), self.device)
        self._plans: dict[Hashable, Plan] = {}
        self._cohorts: dict[bytes, Tensor] = {}
        self._counted: dict[int, Tensor] = {}
        self._known: tuple[Any, str] | None = None
        self._samples = torch.compile(scan_table, dynamic=False) if self.compile else scan_table
        if self.compile:  # PyTorch's default precision is meant; its hint at a coarser one is no news
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)
        train = self.samples["train"]
        self.task.require_stackable(train.x, train.y)
        self._activations = self.task.activations(train.x)

    @cached_property
    def _counts(self) -> Tensor:
        """How many samples of each split every client has, a row per split."""
        return torch.stack([samples.count for samples in self.samples.values()])

    # A call, chunk by chunk -----------------------------------------------------------------------

    def run(self, work: Work) -> Outcome:
        """Run the function at all these clients, as many at once as memory allows."""
        with torch.no_grad(), digits(self.settings.precision):
            return self._run(work)

    def _run(self, work: Work) -> Outcome:
        clients = len(work.numbers)
        if not clients:
            return NOBODY
        if not self.chunk:
            self.chunk = self._fitting_chunk()
        while True:
            try:
                sent, kept, after, norms = self._chunks(work, self.chunk)
                return Outcome(work.numbers, sent, kept, after[0] if after else None, norms or None)
            except (torch.OutOfMemoryError, MemoryError):
                if min(self.chunk, clients) == 1:
                    raise
                self.chunk = max(1, min(self.chunk, clients) // 2)
                log.warning("out of memory: training %d clients at once from now on", self.chunk)
                self._forget_graphs()

    def _chunks(self, work: Work, limit: int) -> _Checked:
        clients = len(work.numbers)
        pieces = -(-clients // limit)
        size = min(bucket(-(-clients // pieces)), limit)
        if pieces == 1 and size == clients:
            return self._chunk(work)
        # Clients of like size share a chunk, so that little is left to wait for.
        order = np.argsort(-self.samples["train"].counts[work.numbers], kind="stable")
        results: list[Any] = []
        for first in range(0, clients, size):
            # A last chunk is filled up with copies of its first client, so that all chunks have one shape.
            taken = order[first : first + size]
            places = np.concatenate([taken, np.repeat(taken[:1], size - len(taken))])
            index = to_device(places, self.device)
            result = self._chunk(work.rows(places, index))
            results.append(tree_map(partial(_first, len(taken)), result))
        back = to_device(np.argsort(order, kind="stable"), self.device)
        joined: _Checked = tree_map(lambda *pieces: torch.cat(pieces)[back], *results)
        return joined

    def _fitting_chunk(self) -> int:
        """How many clients fit: some copies of the model and a batch's activations, with room to spare."""
        width = self.settings.local.batch or int(self.samples["train"].counts.max(initial=1))
        numbers = 8 * self.task.size + 4 * max(width, self.settings.evaluation_batch) * self._activations
        # Twice the samples that are fetched for a client: where they are laid out, and on the way there.
        numbers += 2 * sum(samples.fetched for samples in self.samples.values())
        return max(1, int(0.7 * free_bytes(self.device)) // (numbers * self.task.initial().element_size()))

    # A chunk: plain, or captured and replayed -----------------------------------------------------

    def _chunk(self, work: Work) -> _Checked:
        names = (tuple(work.shared), tuple(work.own))
        arguments = [*work.shared.values(), *work.own.values()]
        if work.buffers is not None:
            arguments.append(work.buffers)
        shapes = tuple((value.shape, value.dtype) for value in arguments)
        key = (work.function, self._described(work.hyper), len(work.numbers), names, shapes)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(work.function, work.hyper)
        program.round = work.round
        plans = None
        if program.scans is not None:
            for split in {batches.split for batches in program.scans}:
                self._bring(split, work.numbers)
            plans = [self._plan(batches, work.numbers) for batches in program.scans]
        tables = [table for plan in plans or () if (table := plan.table) is not None]
        numbers = self._numbers_there(work.numbers)
        others = [*arguments, *(to_device(table, self.device) for table in tables)]

        def call(inputs: list[Tensor]) -> _Checked:
            given = iter(inputs)
            header = (next(given), next(given))
            shared, own = (dict(zip(group, given, strict=False)) for group in names)
            buffers = () if work.buffers is None else (next(given),)
            return self._execute(program, work.numbers, plans, header, shared, own, buffers, list(given))

        def inputs() -> list[Tensor]:
            return [numbers, to_device(work.rounds, self.device), *others]

        if not self.graphs or plans is None:
            return call(inputs())
        shape = (key, tuple(plan.shape for plan in plans))
        if shape not in self._captured:
            # Once in the ordinary way: a shape that never comes again is not worth a capture.
            self._captured[shape] = None
            return call(inputs())
        captured = self._captured[shape] or self._capture(shape, call, inputs())
        self._captured.move_to_end(shape)
        return captured.replay(numbers, work.rounds, others)

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

    def _numbers_there(self, numbers: np.ndarray) -> Tensor:
        """Client numbers on the device; the same tensor for the same cohort."""
        key = numbers.tobytes()
        if key not in self._cohorts:
            if len(self._cohorts) >= MOST_COHORTS:
                self._cohorts.clear()
            self._cohorts[key] = to_device(numbers.copy(), self.device)
        return self._cohorts[key]

    def _capture(
        self, shape: Hashable, call: Callable[[list[Tensor]], _Checked], inputs: list[Tensor]
    ) -> _Graph:
        """Capture a call. Whatever it touched is kept: a graph finds its tensors by address."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        static = [value.clone() for value in inputs]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool):
            outputs = call(static)
        captured = self._captured[shape] = _Graph(graph, static, outputs, call)
        living = [known for known, entry in self._captured.items() if entry is not None]
        for old in living[: max(0, len(living) - MOST_GRAPHS)]:
            del self._captured[old]
        return captured

    def _forget_graphs(self) -> None:
        self._captured.clear()
        self._pool = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # Running a program ----------------------------------------------------------------------------

    def _execute(
        self,
        program: _Program,
        numbers: np.ndarray,
        plans: list[Plan] | None,
        header: tuple[Tensor, Tensor],
        shared: dict[str, Tensor],
        own: dict[str, Tensor],
        buffers: tuple[Tensor, ...],
        tables: list[Tensor],
    ) -> _Checked:
        """Advance the function from scan to scan until it returns."""
        index, rounds = header
        counts = dict(zip(self.samples, self._counts[:, index].unbind(), strict=True))
        own_buffers = any(value.dim() == 2 for value in buffers)
        origins = () if self._origins is None else self._origins[:, index].unbind()
        rows = _Rows(index, rounds, counts, own, buffers if own_buffers else (), origins)
        fixed = _Fixed(shared, () if own_buffers else buffers, self._data())
        memo: list[Any] = []
        scans: list[Batches] = []
        waiting = iter(tables)
        while True:
            batches, result = self._advance(program, fixed, rows, memo)
            if batches is None:
                program.scans = scans
                finished: _Checked = result
                return finished
            if plans is None and self._bring(batches.split, numbers):
                fixed = fixed._replace(data=self._data())
            scan_plan = self._plan(batches, numbers) if plans is None else plans[len(scans)]
            table = None
            if (packed := scan_plan.table) is not None:
                table = next(waiting) if plans is not None else to_device(packed, self.device)
            memo.append(self._scan(program, len(scans), batches, scan_plan, table, fixed, rows, memo, result))
            scans.append(batches)

    def _advance(
        self, program: _Program, fixed: _Fixed, rows: _Rows, memo: list[Any]
    ) -> tuple[Batches | None, Any]:
        """Run the function up to its next scan and give that with its carry, or to its end."""
        suspended: list[Batches] = []

        def client(rows: _Rows, memo: list[Any], fixed: _Fixed) -> Any:
            try:
                return self._replay(program, fixed, rows, memo)
            except _Suspended as reached:
                suspended.append(reached.batches)
                return reached.carry

        def clients(fixed: _Fixed, rows: _Rows, memo: list[Any]) -> Any:
            result = torch.vmap(partial(client, fixed=fixed))(rows, memo)
            if not suspended:
                return *result, norms_of(result[0], result[1]) if self.graphs else {}
            if self.device.type == "cuda":  # one layout for all steps: a compiled step is for one layout only
                result = tree_map(lambda value: value.contiguous(), result)
            return result

        if not self.compile or program.scans is None:
            try:
                result = clients(fixed, rows, memo)
            except Exception as error:
                raise self._explained(program, error) from error
            return next(iter(suspended), None), result
        inputs, spec = tree_flatten((fixed._replace(data={}), rows, memo))
        if len(memo) not in program.parts:
            traced = self._traced(program, clients, inputs, spec)
            program.parts[len(memo)] = next(iter(suspended), None), traced
        batches, run = program.parts[len(memo)]
        return batches, run(inputs)

    def _bring(self, split: str, numbers: np.ndarray) -> bool:
        """Have these clients' samples on the device; whether they lie in other tensors than before."""
        moved = self.samples[split].bring(numbers)
        if moved and self.graphs:
            self._forget_graphs()
        return moved

    def _data(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {split: (samples.x, samples.y) for split, samples in self.samples.items()}

    def _replay(self, program: _Program, fixed: _Fixed, rows: _Rows, memo: list[Any]) -> _Result:
        """Run the function for one client with the results of its first scans given."""
        buffers = next(iter(fixed.buffers + rows.buffers), None)
        known = iter(memo)

        def scan(client: Client, body: Callable[[Any, Batch], Any], carry: Any, batches: Batches) -> Any:
            for result in known:
                return result
            raise _Suspended(client, body, carry, batches)

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
            seed=rows.origins[1] if rows.origins else self.settings.seed,
        )
        result = program.function(client, program.hyper, **fixed.arguments, **rows.arguments)
        reply = checked_reply(program.function, result, self.task.dtype, self.device)
        trained = () if client.buffers is None or client.buffers is buffers else (client.buffers,)
        return reply.sent, reply.kept, trained

    def _scan(
        self,
        program: _Program,
        position: int,
        batches: Batches,
        plan: Plan,
        table: Tensor | None,
        fixed: _Fixed,
        rows: _Rows,
        memo: list[Any],
        carry: Any,
    ) -> Any:
        """Carry out a scan for all clients of the chunk: ``carry`` holds one row per client."""
        shape, clients = plan.shape, len(rows.number)
        if shape.steps == 0:
            return carry
        samples = self.samples[batches.split]
        if table is None:
            lanes = self._counting(clients).expand(shape.steps, clients)
            turns = self._counting(shape.steps)[:, None].expand(shape.steps, clients)
        else:
            lanes, turns = table[0], table[1]
            # One more row, for idle lanes to work on.
            carry = tree_map(lambda value: torch.cat([value, value[:1]]), carry)
        places = self._counting(shape.places)
        size = rows.counts[batches.split]
        number, seed = rows.origins or (None, self.settings.seed)
        index, real = self._samples(
            batches,
            random.stream(seed, batches.stream),
            shape.width,
            places,
            rows.round,
            rows.number,
            samples.start,
            size,
            lanes,
            turns,
            number,
        )
        for turn in range(shape.steps):
            lane = () if table is None else (lanes[turn],)
            arguments = (fixed, rows, memo, carry, lane, index[turn], real[turn], turns[turn])
            after = self._step(program, position, batches, plan, arguments)
            if table is None:
                carry = after
            else:
                for whole, part in zip(tree_leaves(carry), tree_leaves(after), strict=True):
                    whole.index_copy_(0, lanes[turn], part)
        return carry if table is None else tree_map(lambda value: value[:clients], carry)

    def _step(self, program: _Program, position: int, batches: Batches, plan: Plan, arguments: Any) -> Any:
        """One step of every lane, traced on first use."""
        key = (
            position,
            plan.shape.lanes,
            plan.shape.width,
            plan.shape.packed,
            plan.shape.full,
            len(arguments[2]),
        )
        inputs, spec = tree_flatten(arguments)
        traced = program.steps.get(key)
        if traced is None:
            traced = program.steps[key] = self._trace_step(program, batches, plan, inputs, spec)
        return traced(inputs)

    def _trace_step(
        self, program: _Program, batches: Batches, plan: Plan, inputs: list[Tensor], spec: Any
    ) -> _Traced:
        def lane(
            rows: _Rows,
            memo: list[Any],
            carry: Any,
            x: Tensor,
            y: Tensor,
            real: Tensor,
            turn: Tensor,
            fixed: _Fixed,
        ) -> Any:
            weight = None
            if not plan.shape.full:
                weight = (torch.arange(plan.shape.width, device=x.device) < real).to(self.task.dtype)
            number, seed = rows.origins or (rows.number, self.settings.seed)
            key = random.stream(seed, "layers", rows.round, number, turn) if self.task.draws else 0
            try:
                self._replay(program, fixed, rows, memo)
            except _Suspended as reached:
                return reached.body(carry, Batch(x, y, weight, key))
            raise SartorError(
                f"{name_of(program.function)}: a client function must make the same scans each time"
            )

        def step(
            fixed: _Fixed,
            rows: _Rows,
            memo: list[Any],
            carry: Any,
            lanes: tuple[Tensor, ...],
            index: Tensor,
            real: Tensor,
            turn: Tensor,
        ) -> Any:
            x, y = (_picked(part, index) for part in fixed.data[batches.split])
            if lanes:
                client = lanes[0].clamp(max=len(rows.number) - 1)
                rows, memo = tree_map(lambda value: value[client], (rows, memo))
                carry = tree_map(lambda value: value[lanes[0]], carry)
            return torch.vmap(partial(lane, fixed=fixed))(rows, memo, carry, x, y, real, turn)

        return self._traced(program, step, inputs, spec)

    def _traced(
        self, program: _Program, function: Callable[..., Any], inputs: list[Tensor], spec: Any
    ) -> _Traced:
        """The function as a plain graph of tensor operations for such arguments; compiled if wanted."""
        result_spec: list[Any] = []

        def flat(inputs: list[Tensor]) -> list[Tensor]:
            leaves, after_spec = tree_flatten(function(*tree_unflatten(inputs, spec)))
            result_spec.append(after_spec)
            return leaves

        try:
            # Tracing knows inputs by their identity, and a carry may begin as one of the arguments itself.
            graph = make_fx(flat)([value.detach() for value in inputs])
        except Exception as error:
            raise self._explained(program, error) from error
        graph.graph.eliminate_dead_code()
        graph.recompile()
        for node in graph.graph.nodes:
            # A constant that a client function made lies on the CPU, from where a capture cannot fetch it.
            if node.op == "get_attr":
                setattr(graph, node.target, getattr(graph, node.target).to(self.device))
        if has_tensor_cores(self.device):
            products.specialise(graph)
        run: Callable[[list[Tensor]], list[Tensor]] = graph
        if self.compile:
            # Keyed draws are products of numbers that wrap, of which the compiler's algebra knows nothing.
            wrapping: dict[str, Any] = {"constant_and_index_propagation": False}
            run = torch.compile(graph, dynamic=False, options=wrapping if self.task.draws else None)
        return lambda inputs: tree_unflatten(run(inputs), result_spec[0])

    def _explained(self, program: _Program, error: Exception) -> Exception:
        """An error of vmap or tracing in a user's words.

        Out of memory and our own errors stay what they are.
        """
        if isinstance(error, (SartorError, torch.OutOfMemoryError, MemoryError)):
            return error
        if "can't allocate memory" in str(error):
            return MemoryError(str(error))
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if isinstance(error, RuntimeError) and ("vmap" in first or "functorch" in first):
            cure = "engine.name=loop runs one client at a time"
            return NotStackable(f"{name_of(program.function)} cannot be stacked ({first}); {cure}")
        cure = "engine.name=loop names the client"
        return ClientError(f"{name_of(program.function)}, round {program.round}: {first}; {cure}")

    # Plans ----------------------------------------------------------------------------------------

    def _plan(self, batches: Batches, numbers: np.ndarray) -> Plan:
        sizes = self.samples[batches.split].counts[numbers]
        key = (batches, sizes.tobytes())
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan(batches, sizes, self.lanes, rounded=self.graphs)
        return self._plans[key]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away: a graph of an earlier federation that it frees ends a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _picked(samples: Tensor, index: Tensor) -> Tensor:
    """Samples by number; whole ones are copied, which is faster than indexing them, single numbers not."""
    if samples.dim() == 1:
        return samples[index]
    return samples.index_select(0, index.view(-1)).view(*index.shape, *samples.shape[1:])


def _first(count: int, value: Tensor) -> Tensor:
    return value[:count]


def _cloned(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}
