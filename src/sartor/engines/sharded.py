"""One run on many devices: ``torchrun --nproc-per-node 8 -m sartor run ...``.

Every process, called a rank, runs the same algorithm on the same data; what the server computes is
deterministic, so all of them hold the same server and there is no parameter server. Only the clients' work
is divided: each rank trains a share of the cohort and all receive all replies and states, in cohort order.
The results are those of one process. Rank 0 alone writes the run folder and prints.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sartor.errors import SartorError, SettingError
from sartor.federation.engine import Engine
from sartor.federation.exchange import NOBODY, Outcome, Work
from sartor.kernels.device import to_device

Value = TypeVar("Value")
FAILED = -1
MESSAGE_BYTES = 4000


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
    return next((said for said in _texts(text or "") if said), None)


class ShardedEngine(Engine):
    """Trains this rank's share of the clients by another engine, and receives the rest from the others."""

    def __init__(self, engine: Engine) -> None:
        self.inner = engine
        self.name, self.device, self.names = engine.name, engine.device, engine.names
        self.counts, self.blank, self.public = engine.counts, engine.blank, engine.public

    def run(self, work: Work) -> Outcome:
        """Run a share of the work here, and gather what the ranks have done."""
        clients, ranks = len(work.numbers), world()
        if not clients:
            return NOBODY
        # Clients of all sizes to every rank. Shares are filled up with a copy of the first client to one
        # length, so that all ranks have the same to exchange.
        order = np.argsort(-self.counts["train"][work.numbers], kind="stable")
        length = -(-clients // ranks)
        filled = np.concatenate([order, np.repeat(order[:1], length * ranks - clients)])
        places = filled[rank() :: ranks]
        share = work.rows(places, to_device(places, self.device))
        try:
            own = self.inner.run(share)
        except Exception as error:
            _fail(error)
        after = own.buffers
        trained = _meet(int(after is not None))
        if after is None and any(trained) and share.buffers is not None:
            after = share.buffers.expand(length, -1)  # nobody of this share took a step
        rows = [*own.sent.values(), *own.kept.values(), *([] if after is None else [after])]
        place = np.empty(clients, dtype=np.int64)
        turn = np.arange(clients)
        place[order] = (turn % ranks) * length + turn // ranks
        gathered = iter(_gather(rows, to_device(place, self.device)))
        sent = {name: next(gathered) for name in own.sent}
        kept = {name: next(gathered) for name in own.kept}
        return Outcome(work.numbers, sent, kept, None if after is None else next(gathered))


def _gather(rows: list[Tensor], index: Tensor) -> list[Tensor]:
    """The ranks' rows one after the other, of which ``index`` is taken: one exchange for all tensors."""
    widths = [value[:1].nbytes for value in rows]
    packed = torch.cat([value[:, None].flatten(1).contiguous().view(torch.uint8) for value in rows], dim=1)
    everyone = _everyone(packed).flatten(0, 1)
    parts = torch.split(everyone[index], widths, dim=1)
    return [
        part.clone(memory_format=torch.contiguous_format).view(value.dtype).view(len(index), *value.shape[1:])
        for part, value in zip(parts, rows, strict=True)
    ]


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


def _texts(text: str) -> list[str]:
    """Every rank's text, cut to a bounded length."""
    data = text.encode()[:MESSAGE_BYTES]
    mine = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in _everyone(mine).numpy()]


def _everyone(mine: Tensor) -> Tensor:
    """The same tensor of every rank, stacked."""
    found = mine.new_empty((world(), *mine.shape))
    with _lost():
        dist.all_gather(list(found.unbind()), mine)
    return found


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
