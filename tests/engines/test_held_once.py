"""What clients reply is held once: where it is made, while it is exchanged, and not after it is gone."""

from __future__ import annotations

import os
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, get_ident
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import PATIENCE, classification, federation_of, model_task
from sartor.client.local import Client
from sartor.data import lazy_clients
from sartor.engines import sharded
from sartor.engines.loop import LoopEngine
from sartor.engines.sharded import Ranks, ShardedEngine
from sartor.federation import Reply
from sartor.federation.exchange import Outcome, Work
from sartor.federation.settings import FederationSettings
from sartor.kernels import device
from sartor.kernels.device import room_for, rows_at

CPU = torch.device("cpu")
MEGABYTE = 1 << 20
COUNTS = np.array([3, 9, 9, 0, 5, 4, 12, 1, 9, 2, 30])
COHORT = np.array([10, 0, 3, 7, 4, 9, 1, 8])


class Wires:
    """Several ranks as threads of this process, and what went from one to all."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ranks, self._all = ranks, Barrier(ranks, timeout=PATIENCE)
        self._rank_of: dict[int, int] = {}
        self._sent = torch.empty(0)
        self.pieces: list[Tensor] = []
        """What rank 0 gave or received, in order."""
        monkeypatch.setattr(sharded, "_broadcast", self._broadcast)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        rank = self._rank_of[get_ident()]
        if rank == root:
            self._sent = tensor.clone()
        self._all.wait()
        tensor.copy_(self._sent)
        if rank == 0:
            self.pieces.append(tensor)
        self._all.wait()

    def gathered(self, values: list[Tensor]) -> list[list[Tensor]]:
        """What each rank has in the end of values of the cohort, of which each is given its clients'."""

        def one(rank: int) -> list[Tensor]:
            self._rank_of[get_ident()] = rank
            homes = Ranks(COUNTS, rank, self._ranks)
            here = torch.from_numpy(homes.here(COHORT))
            self._all.wait()
            return homes.gathered(COHORT, [value[here] for value in values])

        with ThreadPoolExecutor(self._ranks) as pool:
            return list(pool.map(one, range(self._ranks)))


def values_of_every_kind() -> list[Tensor]:
    """A row for each of the cohort, of all widths and types that a reply may have."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 200, (len(COHORT), 3, 5), generator=generator)
    types = (
        "float32",
        "bool",
        "bfloat16",
        "float64",
        "uint8",
        "int64",
        "uint16",
        "float8_e4m3fn",
        "complex128",
    )
    kinds = [numbers.to(getattr(torch, name)) for name in types]
    return [kinds[0], numbers[:, 0, 0].to(torch.float16), *kinds[1:], torch.empty(len(COHORT), 0)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
@pytest.mark.parametrize("piece", [1, 1000, MEGABYTE])
def test_every_rank_has_the_values_of_all_whatever_the_pieces(
    ranks: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sharded.PIECE_BYTES, "cpu", piece)
    expected = values_of_every_kind()
    for found in Wires(ranks, monkeypatch).gathered(expected):
        for value, one in zip(expected, found, strict=True):
            assert (value.dtype, value.shape) == (one.dtype, one.shape)
            assert torch.equal(sharded._bits(value), sharded._bits(one))


def test_beside_what_is_received_a_rank_holds_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[int] = []

    def noted(shape: Any, dtype: torch.dtype, device: torch.device, filled: bool = True) -> Tensor:
        rooms.append(int(np.prod(shape)) * dtype.itemsize)
        return room_for(shape, dtype, device, filled)

    values = [torch.rand(len(COHORT), 100), torch.rand(len(COHORT), 30, dtype=torch.float64)]
    row = sum(value[:1].nbytes for value in values)
    monkeypatch.setitem(sharded.PIECE_BYTES, "cpu", 2 * row)
    monkeypatch.setattr(sharded, "room_for", noted)
    monkeypatch.setattr(device, "room_for", noted)
    wires = Wires(1, monkeypatch)
    wires.gathered(values)
    assert sum(rooms) == sum(value.nbytes for value in values) + 2 * row
    assert len(wires.pieces) == 4
    assert len({piece.data_ptr() for piece in wires.pieces}) == 1  # all through the same room
    # Nobody's rows are filled up to those of the rank that has most.
    assert sum(piece.nbytes for piece in wires.pieces) == len(COHORT) * row


def number_of(client: Client, hyper: Any, w: Tensor) -> Reply:
    """What a client is sent, and its number."""
    return Reply(number=w + client.number).keep()


def test_a_rank_lets_its_own_replies_go_before_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    held: list[int] = []

    class Noting(LoopEngine):
        def run(self, work: Work) -> Outcome:
            outcome = super().run(work)
            made.extend(weakref.ref(value) for value in outcome.sent.values())
            return outcome

    def broadcast(piece: Tensor, rank: int) -> None:
        held.append(sum(one() is not None for one in made))

    monkeypatch.setattr(sharded, "_everyone", lambda mine: mine[None])
    monkeypatch.setattr(sharded, "_broadcast", broadcast)
    engine = ShardedEngine(Noting, model_task(), classification((4,) * 6), FederationSettings())
    numbers = np.array([5, 0, 3])
    work = Work(number_of, None, numbers, numbers, {"w": torch.zeros(2)}, {}, None)
    assert engine.run(work).sent["number"].tolist() == [[5, 5], [0, 0], [3, 3]]
    assert (len(made), held) == (1, [0])


@pytest.mark.parametrize("workers", [1, 2])
def test_of_clients_that_answered_one_copy_is_left(workers: int) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def replying(client: Client, hyper: Any, w: Tensor, c: Tensor) -> Reply:
        nonlocal most
        most = max(most, sum(one() is not None for one in alive))
        sent, kept = w + client.number, c - client.number
        alive.extend([weakref.ref(sent), weakref.ref(kept)])
        return Reply(sent=sent).keep(c=kept)

    data = classification((4,) * 12)
    federation = federation_of("loop", model_task(), data, local={"batch": 4}, workers=workers)
    federation.declare(c=torch.zeros(3))
    cohort = np.arange(12)
    replies = federation.map(replying, cohort, shared={"w": torch.ones(3)})
    assert torch.equal(replies["sent"], 1 + torch.from_numpy(cohort)[:, None].expand(-1, 3))
    assert torch.equal(federation.states["c"], -torch.from_numpy(cohort)[:, None].expand(-1, 3).float())
    assert most <= 2 * workers  # of the client before, which may be at its end
    assert not any(one() is not None for one in alive)


def resident() -> int:
    """The memory of this process that holds something."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
def test_room_takes_memory_while_something_is_in_it() -> None:
    before = resident()
    room = room_for((64, MEGABYTE), torch.uint8, CPU, filled=False)
    assert resident() - before < 16 * MEGABYTE
    assert not room[::7, ::4097].any()
    room[:32] = 1
    assert resident() - before > 20 * MEGABYTE
    taken = rows_at(np.arange(40, 8, -1), room)
    assert taken[:, 0].tolist() == [0] * 9 + [1] * 23
    full = room_for((64, MEGABYTE), torch.uint8, CPU).fill_(2)
    assert full.sum().item() == 2 * full.numel()
    del room, taken, full
    assert resident() - before < 16 * MEGABYTE


def test_clients_with_one_number_of_samples_for_all_are_named_and_chosen_without_memory() -> None:
    def fetch(client: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full((3, 2), client), np.zeros(3, dtype=np.int64)

    data = lazy_clients(1_000_000, fetch, n_train=2, n_test=1, classes=2)
    odd = np.arange(1, 1_000_000, 2)
    tracemalloc.start()
    some = data.some(odd)
    again = some.some(np.array([499_999, 2]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEGABYTE
    assert (len(some.names), some.names[2], some.names[:2]) == (500_000, "5", ("1", "3"))
    assert tuple(again.names) == ("999999", "5")
    assert again.train.of(0)[0].tolist() == [[999_999, 999_999]] * 2
    assert again.test.start.tolist() == [2, 2]
