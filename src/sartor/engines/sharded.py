"""One run on many devices: ``torchrun --nproc-per-node 8 -m sartor run ...``.

Every process, called a rank, runs the same algorithm; what the server computes is deterministic, so all of
them hold the same server and there is no parameter server. The clients are divided: each is at home at one
rank, which has its samples and its states and does its work. All ranks receive all replies, in cohort order;
what a client keeps stays at its home. The results are those of one process. Rank 0 alone prints and writes
the record of the run; every rank writes the states of its clients.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sartor.data.clients import SPLITS, ClientData
from sartor.engines.base import Origins
from sartor.errors import SartorError, SettingError
from sartor.federation.engine import Attach, Engine
from sartor.federation.exchange import NOBODY, Outcome, Work, norms_of
from sartor.federation.functions import name_of
from sartor.federation.homes import Homes
from sartor.federation.settings import FederationSettings
from sartor.kernels.device import room_for, room_for_rows, to_device
from sartor.model.groups import regrouped
from sartor.model.task import Task

Value = TypeVar("Value")
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
FAILED = -1
NOBODY_HERE = -2
MESSAGE_BYTES = 4000
FORM_BYTES = 1 << 14
PIECE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""How much of what a rank sends is received at a time, and so held besides; a GPU has room for more."""
ALIGNED = 16
"""A value of a packed row begins at a multiple of so many bytes, so that it can be read where it lies."""


class OtherRank(SartorError):
    """What went wrong at any rank, raised at all of them; rank 0 tells it."""

    @property
    def told(self) -> bool:
        """Whether another rank prints it."""
        return rank() > 0


def rank() -> int:
    """The number of this process among those of the run; 0 where it is the only one."""
    return dist.get_rank() if _joined() else 0


def world() -> int:
    """How many processes share the run."""
    return dist.get_world_size() if _joined() else 1


def join(device: str, timeout: float) -> None:
    """Meet the other processes that torchrun started, if it did; ``timeout`` bounds every wait, in seconds.

    A process group that is there already is used as it is.
    """
    if _joined() or int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        return
    if device == "cuda":
        place, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if place >= devices:
            raise SettingError(f"torchrun --nproc-per-node: at most {devices}, the CUDA devices of a machine")
        torch.cuda.set_device(place)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with _lost():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    atexit.register(_leave)


def together(work: Callable[[], Value]) -> Value:
    """Do something at every rank; if it fails at one of them, it fails at all with that one's message."""
    if world() == 1:
        return work()
    try:
        result = work()
    except Exception as error:
        _fail(error)
    _meet(0)
    return result


def first_alone(work: Callable[[], Value]) -> Value:
    """Do something at rank 0 before the others do it, such as filling a cache that all of them use."""
    if rank() == 0:
        result = together(work)
        together(lambda: None)
        return result
    together(lambda: None)
    return together(work)


def agree(what: str, value: str) -> None:
    """Refuse to go on where a rank has another value than rank 0."""
    if world() == 1:
        return
    values = _texts(value)
    for other, found in enumerate(values):
        if found != values[0]:
            raise OtherRank(f"rank {other} has another {what} than rank 0; give all processes the same")


def first_said(text: str | None) -> str | None:
    """The text of the first rank that has one, at every rank; None where nobody has."""
    if world() == 1:
        return text
    return next((said for said in all_said(text or "") if said), None)


def all_said(text: str) -> list[str]:
    """What every rank says, at every rank."""
    return [text] if world() == 1 else _texts(text)


class Ranks(Homes):
    """Clients are dealt to the ranks by their numbers of samples, so that each has large and small ones.

    Where all have the same number, that is in turn by client number, and nothing is stored for a client.
    """

    def __init__(self, counts: np.ndarray, rank: int, ranks: int) -> None:
        super().__init__(len(counts))
        self.rank, self.ranks = rank, ranks
        self.beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._order: np.ndarray | None = None
        if len(counts) and counts.min() < counts.max():
            self._order = np.argsort(-counts, kind="stable")
            self._turns = np.empty_like(self._order)
            self._turns[self._order] = np.arange(len(counts))

    @property
    def count(self) -> int:
        """How many clients are at home here."""
        return len(range(self.rank, self.clients, self.ranks))

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """The rank at which each of these clients is at home."""
        return self._turn(numbers) % self.ranks

    def here(self, numbers: np.ndarray) -> np.ndarray:
        """Which of these clients are at home here, by their places among them."""
        return np.flatnonzero(self.of(numbers) == self.rank)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The row that each of these clients has in a table of its home."""
        return self._turn(numbers) // self.ranks

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """The clients that have these rows in a table of this home."""
        turns = rows * self.ranks + self.rank
        return turns if self._order is None else self._order[turns]

    def gathered(self, numbers: np.ndarray, values: list[Tensor]) -> list[Tensor]:
        """Values of these clients, of which each rank gives its own in their order."""
        places = to_device(self.here(numbers), values[0].device)
        found = [_spread(value, places, len(numbers)) for value in values]
        self.fill(numbers, found)
        return found

    def fill(self, numbers: np.ndarray, values: list[Tensor]) -> None:
        """Put the rows of clients at home elsewhere where they belong, among those of clients at home here.

        They are exchanged together, one rank's after the other's, and piece by piece through the same room.
        """
        of, device = self.of(numbers), values[0].device
        rows = [_bits(value) for value in values]
        columns, width = _columns(rows)
        step = max(1, PIECE_BYTES[device.type] // max(1, width))
        room = room_for((min(step, int(np.bincount(of).max())), width), torch.uint8, device)
        for rank in range(self.ranks):
            theirs = np.flatnonzero(of == rank)
            for first in range(0, len(theirs), step):
                places = to_device(theirs[first : first + step], device)
                piece = room[: len(places)]
                parts = [
                    piece[:, column].view(whole.dtype) for whole, column in zip(rows, columns, strict=True)
                ]
                if rank == self.rank:
                    for part, whole in zip(parts, rows, strict=True):
                        torch.index_select(whole, 0, places, out=part)
                _broadcast(piece, rank)
                if rank != self.rank:
                    for part, whole in zip(parts, rows, strict=True):
                        whole.index_copy_(0, places, part)

    def _turn(self, numbers: np.ndarray) -> np.ndarray:
        return numbers if self._order is None else self._turns[numbers]


Maker = Callable[[Task, ClientData, FederationSettings, Origins | None], Engine]


class ShardedEngine(Engine):
    """Runs the clients at home here by another engine, and receives the others' replies."""

    def __init__(self, make: Maker, task: Task, data: ClientData, settings: FederationSettings) -> None:
        self._ranks = Ranks(np.asarray(data.train.count), rank(), world())
        own = self._ranks.numbers(np.arange(self._ranks.count))
        if not len(own):  # more ranks than clients: an engine needs samples to look at
            own = np.zeros(1, dtype=np.int64)
        self._whole = settings.union
        if self._whole:
            self.inner = make(task, data, settings, None)
        else:
            here = data.some(own) if settings.device == "cpu" else data.some(own).packed()
            origins = Origins(own, np.broadcast_to(np.int64(settings.seed), len(own)))
            self.inner = make(regrouped(task, lambda of: of[own]), here, settings, origins)
        engine = self.inner
        self.name, self.device, self.names = engine.name, engine.device, data.names
        self.blank, self.public = engine.blank, engine.public
        self.counts = {
            name: np.asarray(getattr(data, name).count)
            if name in SPLITS
            else np.broadcast_to(counts[:1], data.clients)
            for name, counts in engine.counts.items()
        }

    @property
    def homes(self) -> Ranks:
        """The rank of every client."""
        return self._ranks

    def run(self, work: Work) -> Outcome:
        """Run work whose clients keep nothing."""
        return self.run_with(work, lambda share: share)

    def run_with(self, work: Work, attach: Attach) -> Outcome:
        """Run the work of the clients at home here, and gather the replies of all."""
        if not len(work.numbers):
            return NOBODY
        here = self.homes.here(work.numbers)
        try:
            outcome, start = self._own(work, attach, here)
        except Exception as error:
            _fail(error)
        outcome = _alike(work, outcome, len(here), start, self.device)
        outcome = _among_all(outcome, work.numbers, to_device(here, self.device))
        values = [*outcome.sent.values(), *(outcome.norms or {}).values()]
        values += [] if outcome.buffers is None else [outcome.buffers]
        values += outcome.kept.values() if work.waits else []
        if values:
            self.homes.fill(work.numbers, values)
        return outcome

    def _own(self, work: Work, attach: Attach, here: np.ndarray) -> tuple[Outcome | None, Tensor | None]:
        """What the clients at home here did, if any is, and the buffers that they were given."""
        if not len(here):
            return None, work.buffers
        share = attach(work.rows(here, to_device(here, self.device)))
        rows = share.numbers if self._whole else self.homes.rows(share.numbers)
        return self.inner.run(share._replace(numbers=rows)), share.buffers


def _alike(
    work: Work, own: Outcome | None, count: int, start: Tensor | None, device: torch.device
) -> Outcome:
    """What so many clients did here, in the form that all ranks have: without rows where there is nobody.

    Norms come along where states are kept, so that all ranks come to one opinion of them.
    """
    form, status = "", NOBODY_HERE
    if own is not None:
        norms = norms_of(own.sent, own.kept) if work.keeps and own.norms is None else own.norms
        own = own._replace(kept=own.kept if work.keeps else {}, norms=norms if work.keeps else None)
        form = _form(own)
        status = zlib.crc32(form.encode()) << 1 | int(work.keeps and own.buffers is not None)
    everyone = _meet(status)
    found = [one for one in everyone if one != NOBODY_HERE]
    wrong = next(
        (place for place, one in enumerate(everyone) if one in found and one >> 1 != found[0] >> 1), None
    )
    if wrong is not None:
        raise OtherRank(
            f"{name_of(work.function)}: clients at rank {wrong} reply in other shapes than the rest"
        )
    if NOBODY_HERE in everyone:
        form = next(said for said in _texts(form, FORM_BYTES) if said)
    own = _blank(form, device) if own is None else own
    buffers = None
    if start is not None and any(one & 1 for one in found):
        # Those of a share of which nobody took a step are what they were given.
        given = start.expand(count, -1) if count else start.view(-1, start.shape[-1])[:0]
        buffers = given if own.buffers is None else own.buffers
    return own._replace(buffers=buffers)


def _form(outcome: Outcome) -> str:
    """Names, types and shapes of what clients send and keep."""
    parts = (outcome.sent, outcome.kept, outcome.norms or {})
    return json.dumps(
        [
            {
                name: [str(value.dtype).removeprefix("torch."), list(value.shape[1:])]
                for name, value in part.items()
            }
            for part in parts
        ]
    )


def _blank(form: str, device: torch.device) -> Outcome:
    """What nobody did, in this form."""
    sent, kept, norms = (
        {
            name: torch.empty((0, *shape), dtype=getattr(torch, dtype), device=device)
            for name, (dtype, shape) in part.items()
        }
        for part in json.loads(form)
    )
    return Outcome(NOBODY.clients, sent, kept, None, norms)


def _columns(values: list[Tensor]) -> tuple[list[slice], int]:
    """Which bytes of a packed row are each value's, and how many there are."""
    columns, end = [], 0
    for value in values:
        columns.append(slice(end, end + value.element_size() * math.prod(value.shape[1:])))
        end = -(-columns[-1].stop // ALIGNED) * ALIGNED
    return columns, end


def _bits(rows: Tensor) -> Tensor:
    """The same rows as whole numbers of the same bits, which can be put anywhere whatever they are."""
    return rows[:, None].flatten(1).view(WORDS[rows.element_size()])


def _among_all(outcome: Outcome, numbers: np.ndarray, places: Tensor) -> Outcome:
    """What the clients at these places did, with rows of zeros for all others."""

    def spread(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _spread(value, places, len(numbers)) for name, value in values.items()}

    buffers = None if outcome.buffers is None else _spread(outcome.buffers, places, len(numbers))
    norms = spread(outcome.norms) if outcome.norms else None
    return Outcome(numbers, spread(outcome.sent), spread(outcome.kept), buffers, norms)


def _spread(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """So many rows, of which these are at the places given and all others are zero; untouched on a CPU."""
    found = room_for_rows(count, rows, filled=False)
    _bits(found).index_copy_(0, places, _bits(rows))
    return found


def _meet(status: int, message: str = "") -> list[int]:
    """Every rank's status; if a rank has failed, an error with the message of the first that did."""
    statuses: list[int] = _everyone(torch.tensor(status)).tolist()
    if FAILED in statuses:
        first = statuses.index(FAILED)
        reason = _texts(message)[first]
        raise OtherRank(f"rank {first}: {reason}" if first else reason)
    return statuses


def _fail(error: Exception) -> NoReturn:
    """Let all ranks end with this error; a mistake in the program keeps its traceback."""
    if isinstance(error, OtherRank):
        raise error
    known = isinstance(error, SartorError)
    try:
        _meet(FAILED, str(error) if known else f"{type(error).__name__}: {error}")
    except OtherRank as told:
        if known:
            raise told from error
    raise error


def _texts(text: str, most: int = MESSAGE_BYTES) -> list[str]:
    """Every rank's text, cut to a bounded length."""
    data = text.encode()[:most]
    mine = torch.zeros(most, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in _everyone(mine).numpy()]


def _everyone(mine: Tensor) -> Tensor:
    """The same tensor of every rank, stacked."""
    found = mine.new_empty((world(), *mine.shape))
    with _lost():
        dist.all_gather(list(found.unbind()), mine)
    return found


def _broadcast(tensor: Tensor, rank: int) -> None:
    """Give every rank what this one has; Gloo ends the process where that is nothing."""
    if tensor.numel():
        with _lost():
            dist.broadcast(tensor, rank)


@contextmanager
def _lost() -> Iterator[None]:
    """A rank that ended or does not answer, in a user's words."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SartorError(
            f"another process of this run has ended or does not answer ({reason[:200]}); "
            "its own message says why, and `sartor resume` continues from the last checkpoint"
        ) from error


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def _leave() -> None:
    if _joined():
        dist.destroy_process_group()
