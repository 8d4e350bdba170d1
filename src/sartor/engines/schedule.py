"""Who takes which step when: batches of ragged clients laid out for engines.

Clients of one chunk take different numbers of steps. A :class:`Plan` packs them into lanes: in each step
every lane works for one client, and a lane whose client is finished takes the next. Idle lanes point at a
spare row behind the last client. Where all clients take the same number of steps there is a lane for each
and nothing to look up.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.client.local import Batches


def bucket(number: int, grain: int = 8) -> int:
    """The number rounded up to one of ``grain`` sizes per power of two: few different shapes arise."""
    step = 1 << max(0, (number - 1).bit_length() - grain.bit_length())
    return -(-number // step) * step


@dataclass(frozen=True)
class Shape:
    """What a captured program depends on: everything of a plan but its tables."""

    lanes: int
    steps: int
    width: int
    places: int
    packed: bool
    full: bool
    common: bool = False
    """Whether all lanes go through the same samples, which then lie there once."""
    in_a_row: bool = False
    """Whether the samples of one step are all that there are, lane by lane."""


@dataclass(frozen=True)
class Plan:
    """One scan over one chunk of clients.

    ``rows`` and ``turns`` are [steps, lanes]: whose turn, and its which step.
    """

    shape: Shape
    rows: np.ndarray | None
    turns: np.ndarray | None

    @property
    def table(self) -> np.ndarray | None:
        """Rows and turns in one array, [2, steps, lanes]; None where every lane keeps its client."""
        return None if self.rows is None or self.turns is None else np.stack([self.rows, self.turns])


def plan(
    batches: Batches,
    sizes: np.ndarray,
    lanes: int = 0,
    rounded: bool = False,
    epochs: np.ndarray | None = None,
    common: bool = False,
) -> Plan:
    """Lay out the steps of clients with these numbers of samples, and ``epochs`` where they are drawn.

    ``lanes`` 0 chooses, ``rounded`` buckets the shape, ``common``: all clients have the same samples.
    """
    clients, most = len(sizes), int(sizes.max(initial=0))
    width = batches.width(most)
    counts = np.asarray(batches.count(sizes, epochs), dtype=np.int64)
    longest, total = int(counts.max(initial=0)), int(counts.sum())
    passes = -(-counts // np.maximum(batches.per_epoch(sizes, width), 1))
    places = max(1, int((passes * sizes).max(initial=0)))
    if rounded:
        places = bucket(places)
        if not batches.size:
            width = bucket(width)
    full = bool((sizes % width == 0).all())
    if not lanes or lanes >= clients:
        if counts.min(initial=longest) == longest:
            together = common and not batches.shuffled
            return Plan(Shape(clients, longest, width, places, False, full, together), None, None)
        # As many lanes as keep busy while the longest client trains; a lane each if that is nearly as many.
        lanes = -(-total // longest)
        lanes = clients if total >= 0.8 * clients * longest else lanes
    rows, turns = pack(counts, lanes)
    if rounded:
        spare = bucket(len(rows), 16) - len(rows)
        rows = np.pad(rows, ((0, spare), (0, 0)), constant_values=clients)
        turns = np.pad(turns, ((0, spare), (0, 0)))
    full = full and bool((rows < clients).all())
    return Plan(Shape(lanes, len(rows), width, places, packed=True, full=full), rows, turns)


def pack(counts: np.ndarray, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """Longest clients first, each into the lane that is free first.

    Ties by number, so that the result is fixed.
    """
    clients = len(counts)
    free = [(0, lane) for lane in range(lanes)]
    begin = np.zeros(clients, dtype=np.int64)
    lane_of = np.zeros(clients, dtype=np.int64)
    for client in np.argsort(-counts, kind="stable"):
        time, lane = heapq.heappop(free)
        begin[client], lane_of[client] = time, lane
        heapq.heappush(free, (time + int(counts[client]), lane))
    length = max(time for time, _ in free)
    rows = np.full((length, lanes), clients, dtype=np.int64)
    turns = np.zeros((length, lanes), dtype=np.int64)
    for client in range(clients):
        span = slice(begin[client], begin[client] + counts[client])
        rows[span, lane_of[client]] = client
        turns[span, lane_of[client]] = np.arange(counts[client])
    return rows, turns


def sample_order(
    batches: Batches, key: int | Tensor, round: Tensor, numbers: Tensor, sizes: Tensor, places: Tensor
) -> Tensor:
    """Every client's samples in the order a scan visits them, [clients, places].

    ``places`` counts 0, 1, 2, …
    """
    if batches.shuffled:
        keys = random.fold(random.fold(key, round), numbers)
        assert isinstance(keys, Tensor)
        return random.shuffled(keys, sizes, places)
    return places[None, :] % sizes[:, None].clamp(min=1)


def sample_table(
    batches: Batches, order: Tensor, start: Tensor, sizes: Tensor, rows: Tensor, turns: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Which samples each turn uses, [..., width], and how many of them are real, [...].

    A spare row uses none.
    """
    clients, places = order.shape
    client = rows.clamp(max=clients - 1)
    size = sizes[client]
    per_epoch = batches.per_epoch(size, width).clamp(min=1)
    offset = (turns % per_epoch) * width
    first = (turns // per_epoch) * size + offset
    real = torch.where(rows < clients, (size - offset).clamp(min=0, max=width), 0)
    place = (first[..., None] + torch.arange(width, device=order.device)).clamp(max=places - 1)
    sample = order.view(-1)[client[..., None] * places + place]
    inside = torch.arange(width, device=order.device) < real[..., None]
    # Where no sample is real the client may have none, and its place may lie behind the last sample of all.
    first = torch.where(real > 0, start[client], 0)
    return first[..., None] + torch.where(inside, sample, 0), real


def scan_table(
    batches: Batches,
    key: int | Tensor,
    width: int,
    places: Tensor,
    round: Tensor,
    numbers: Tensor,
    start: Tensor,
    sizes: Tensor,
    rows: Tensor,
    turns: Tensor,
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The samples of every turn of a scan and how many are real.

    ``start`` holds all clients, ``sizes`` these ones. Where runs share the samples' tables, a client's
    randomness is keyed by its ``own`` number in its run.
    """
    order = sample_order(batches, key, round, numbers if own is None else own, sizes, places)
    return sample_table(batches, order, start[numbers], sizes, rows, turns, width)
