"""Who takes which step when: batches of ragged clients laid out for engines.

Clients of one chunk take different numbers of steps. A :class:`Plan` packs them into lanes: in each step
every lane works for one client, and a lane whose client is finished takes the next. Where all clients take
the same number of steps there is a lane for each and nothing to look up. How many lanes there are follows
from all clients a cohort may be drawn from, so that a step is of one shape whoever is drawn.

Where steps of several widths cost little there are only as many lanes as have a client left: they are sorted
by when they end, and the last ones are left out. Else those that idle point at a spare row behind the last
client. Between two changes of clients lies a :class:`Stretch` of steps in which every lane keeps its client.

Or every client has a lane of its own, those with most steps first: the ones who still train are the first
lanes at any time, and nobody ever changes place.

A short batch is padded, unless a sample's result depends on the others of its batch: then batches are taken
together that are as wide as each other.

Where batches do no more than add something up, a lane has a piece of a client's samples: all pieces of all
clients go at once, and they are narrow, so that little is padded however unlike clients are.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sartor import random
from sartor.client.local import Batches

WIDTHS = 4
"""Numbers of lanes per power of two where there are fewer and fewer."""
NARROWEST = 16
"""Samples of a piece at least."""


def bucket(number: int, grain: int = 8) -> int:
    """The number rounded up to one of ``grain`` sizes per power of two: few different shapes arise."""
    step = 1 << max(0, (number - 1).bit_length() - grain.bit_length())
    return -(-number // step) * step


@dataclass(frozen=True)
class Shape:
    """What a traced step depends on, and how many there are: everything of a plan but its tables."""

    lanes: int
    """At most, where a plan narrows."""
    steps: int
    width: int
    places: int
    packed: bool
    full: bool
    common: bool = False
    """Whether all lanes go through the same samples, which then lie there once."""
    in_a_row: bool = False
    """Whether the samples of one step are all that there are, lane by lane."""
    pieces: bool = False
    """Whether a lane has a piece of a client's samples, one client's behind the other's."""


class Stretch(NamedTuple):
    """Some steps in which every lane keeps its client."""

    steps: int
    lanes: int
    width: int
    busy: int = 0
    """Where clients have lanes of their own: how many train."""
    left: int = 0
    """Of whom so many go on after it."""


Move = tuple[np.ndarray, np.ndarray]
"""Places, and what moves there."""


@dataclass(frozen=True)
class Plan:
    """One scan over one chunk of clients with so many samples.

    ``rows`` and ``turns`` say whose turn it is and its which step, lane by lane, one step after the other;
    None where every lane keeps its client.
    """

    batches: Batches
    sizes: np.ndarray
    shape: Shape
    rows: np.ndarray | None
    turns: np.ndarray | None
    stretches: tuple[Stretch, ...]
    """From the first to the last step."""
    order: np.ndarray | None = None
    """Whose lanes they are, where every client has its own."""

    @cached_property
    def table(self) -> np.ndarray | None:
        """What is known of every turn: rows, turns, and what :func:`turn_table` gives, a row each."""
        if self.rows is None or self.turns is None:
            return None
        sizes, rows, turns = (torch.from_numpy(part) for part in (self.sizes, self.rows, self.turns))
        places, real = turn_table(self.batches, sizes, rows, turns, self.shape.width, self.shape.places)
        return np.stack([self.rows, self.turns, places.numpy(), real.numpy()])

    @property
    def even(self) -> bool:
        """Whether all steps are as wide."""
        return all(stretch.width == self.shape.width for stretch in self.stretches)

    @cached_property
    def moves(self) -> list[tuple[Move, Move]]:
        """For every stretch, who leaves which lanes after it, and which lanes take whom before it."""
        assert self.rows is not None
        clients, begin, lanes = len(self.sizes), 0, max((part.lanes for part in self.stretches), default=0)
        whose = np.full((len(self.stretches) + 2, lanes), clients)  # nobody before and after
        for number, part in enumerate(self.stretches, 1):
            whose[number, : part.lanes] = self.rows[begin : begin + part.lanes]
            begin += part.steps * part.lanes
        first, last = ((whose < clients) & (whose != np.roll(whose, turn, axis=0)) for turn in (1, -1))
        return [
            ((who[ends], np.flatnonzero(ends)), (np.flatnonzero(begins), who[begins]))
            for who, begins, ends in zip(whose[1:-1], first[1:-1], last[1:-1], strict=True)
        ]


@dataclass(frozen=True)
class Usual:
    """What is to be expected of a cohort, by all clients that it may be drawn from."""

    lanes: int
    """As many as keep busy while the longest client trains."""
    most: int
    """Samples of the largest client of all."""
    alike: bool
    """Whether all clients have as many samples."""


def usual(batches: Batches, among: np.ndarray, clients: int, threads: int = 1) -> Usual:
    """What is usual for so many clients that are drawn among clients with these numbers of samples.

    Each of so many ``threads`` has as many lanes as another, if there is one for each.
    """
    sizes, how_many = np.unique(among, return_counts=True)  # few, also of a million clients
    counts = np.asarray(batches.count(sizes), dtype=np.int64)
    # Epochs that are drawn make the longest client longer.
    spread = 1.0 if batches.law is None else batches.law.most / batches.law.mean
    most = int(sizes.max(initial=0))
    lanes = usual_lanes(counts, how_many, clients, spread)
    if lanes >= threads:
        lanes = min(clients, -(-lanes // threads) * threads)
    return Usual(lanes, most, len(sizes) == 1)


def usual_lanes(counts: np.ndarray, how_many: np.ndarray, clients: int, spread: float = 1.0) -> int:
    """As many lanes as keep busy while the longest of so many clients trains, by what is to be expected.

    They are drawn from clients of which ``how_many`` take so many steps, the fewest first; ``spread`` is how
    much longer the longest may be by chance. A lane each if that is nearly as many.

    >>> usual_lanes(np.array([10, 20, 40]), np.array([2, 1, 1]), 4)
    2
    """
    everyone = int(how_many.sum())
    drawn = min(clients, everyone)
    chance = [_chance(int(below), drawn, everyone) for below in np.cumsum(how_many)]
    longest = spread * float((np.diff(chance, prepend=0.0) * counts).sum())
    total = clients * float((counts * how_many).sum()) / max(1, everyone)
    if longest == 0 or total >= 0.8 * clients * longest:
        return clients
    return min(clients, math.ceil(total / longest - 1e-9))


def _chance(few: int, drawn: int, everyone: int) -> float:
    """How likely all who are drawn without replacement are among a few."""
    if few < drawn:
        return 0.0
    parts = (few + 1, everyone - drawn + 1), (few - drawn + 1, everyone + 1)
    return math.exp(sum(map(math.lgamma, parts[0])) - sum(map(math.lgamma, parts[1])))


def plan(
    batches: Batches,
    sizes: np.ndarray,
    lanes: int = 0,
    rounded: bool = False,
    epochs: np.ndarray | None = None,
    expected: Usual | None = None,
    common: bool = False,
    narrows: bool = False,
    exact: bool = False,
    own: bool = False,
) -> Plan:
    """Lay out the steps of clients with these numbers of samples, and ``epochs`` where they are drawn.

    ``lanes`` 0 takes as many as are ``expected``, ``rounded`` buckets the shape, ``common``: all clients have
    the same samples. With ``narrows`` there are fewer lanes when few have a client left; ``exact``: no batch
    is padded. With ``own`` every client has a lane, unless ``lanes`` are fewer.
    """
    clients, most = len(sizes), int(sizes.max(initial=0))
    expected = expected or usual(batches, sizes, clients)
    width = batches.width(most)
    counts = np.asarray(batches.count(sizes, epochs), dtype=np.int64)
    longest = int(counts.max(initial=0))
    passes = -(-counts // np.maximum(batches.in_turn(sizes, width), 1))
    places = max(1, int((passes * sizes).max(initial=0)))
    if rounded:
        places = bucket(places)
    if exact:
        return exactly(batches, sizes, counts, width, places, rounded)
    if rounded:
        width = min(bucket(width, 2), batches.width(expected.most))
    if not lanes or lanes >= clients:
        lanes = expected.lanes
        if lanes == clients and counts.min(initial=longest) == longest:
            full = expected.alike and expected.most % width == 0
            shape = Shape(clients, longest, width, places, False, full, common and not batches.shuffled)
            stretch = Stretch(longest, clients, width)
            return Plan(batches, sizes, shape, None, None, (stretch,))
        if own:
            shape = Shape(clients, longest, width, places, packed=True, full=False)
            return Plan(batches, sizes, shape, *_in_order(shape, counts))
    rows, turns = pack(counts, lanes)
    widths = narrowed(rows < clients) if narrows else np.full(len(rows), lanes)
    kept = np.arange(lanes) < widths[:, None]
    shape = Shape(lanes, len(rows), width, places, packed=True, full=False)
    return Plan(batches, sizes, shape, rows[kept], turns[kept], stretches(rows, widths, width))


def exactly(
    batches: Batches, sizes: np.ndarray, counts: np.ndarray, width: int, places: int, rounded: bool
) -> Plan:
    """Steps without a padded batch: clients go from pass to pass together, the widest batches of each first.

    ``rounded`` has idle lanes, so that steps of but a few numbers of lanes arise.
    """
    rows, turns, parts = [], [], []
    clients, taken = len(sizes), np.zeros_like(counts)
    in_turn = np.maximum(batches.in_turn(sizes, width), 1)
    while (left := np.flatnonzero(taken < counts)).size:
        passes = taken[left] // in_turn[left]
        left = left[passes == passes.min()]
        turn = taken[left] % in_turn[left]
        real = np.minimum(sizes[left] - turn * width, width)
        widest = int(real.max())
        full = np.minimum(sizes[left] // width - turn, counts[left] - taken[left])
        chosen = real == widest
        steps = 1 if widest < width or batches.anew else int(full[chosen].min())
        who = left[chosen]
        lanes = bucket(len(who), WIDTHS) if rounded else len(who)
        idle = lanes - len(who)
        rows.append(np.tile(np.pad(who, (0, idle), constant_values=clients), steps))
        turns.append((np.pad(taken[who], (0, idle)) + np.arange(steps)[:, None]).ravel())
        parts.append(Stretch(steps, lanes, widest))
        taken[who] += steps
    shape = Shape(clients, sum(part.steps for part in parts), width, places, packed=True, full=True)
    whose, which = (np.concatenate([np.zeros(0, dtype=np.int64), *tables]) for tables in (rows, turns))
    return Plan(batches, sizes, shape, whose, which, tuple(parts))


def piece_width(batches: Batches, sizes: np.ndarray, sample: int, piece: int) -> int:
    """How wide pieces of clients with these numbers of samples are at best: little is padded, and not many.

    A sample takes so many numbers, a piece some besides, and so does what it adds, which is gathered.

    >>> piece_width(Batches(size=500, summed=101), np.array([20, 400]), 1000, 0)
    16
    >>> piece_width(Batches(size=500, summed=101), np.array([400, 400]), 1000, 0)
    400
    """
    widest = batches.width(int(sizes.max(initial=0)))
    doubled = (NARROWEST << times for times in range(widest.bit_length()))

    def cost(width: int) -> int:
        counts = batches.per_epoch(sizes, width)
        gathered = len(sizes) * int(counts.max(initial=0)) * batches.summed
        return int(counts.sum()) * (width * sample + piece + batches.summed) + gathered

    return min([widest, *itertools.takewhile(lambda width: width < widest, doubled)], key=cost)


def in_pieces(batches: Batches, sizes: np.ndarray, width: int) -> Plan:
    """Steps of pieces, each of as many samples as if every client had a lane and full batches."""
    clients, counts = len(sizes), batches.per_epoch(sizes, width)
    total = int(counts.sum())
    most = int(sizes.max(initial=0))
    steps = -(-total * width // max(1, clients * (batches.size or most)))
    lanes = bucket(-(-total // max(1, steps)))
    rows, turns = np.full(steps * lanes, clients), np.zeros(steps * lanes, dtype=np.int64)
    rows[:total] = np.repeat(np.arange(clients), counts)
    turns[:total] = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = Shape(lanes, steps, width, bucket(max(1, most)), packed=True, full=False, pieces=True)
    return Plan(batches, sizes, shape, rows, turns, (Stretch(1, lanes, width),) * steps)


def _in_order(
    shape: Shape, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[Stretch, ...], np.ndarray]:
    """Rows, turns, stretches and the order where every client has a lane, those with most steps first."""
    order, rising = np.argsort(-counts, kind="stable"), np.sort(counts)
    ends = np.unique(counts[counts > 0])
    steps = np.diff(ends, prepend=0)
    busy, left = (len(counts) - np.searchsorted(rising, ends, side) for side in ("left", "right"))
    lanes = [min(shape.lanes, bucket(number, WIDTHS)) for number in busy.tolist()]
    found = zip(steps.tolist(), lanes, itertools.repeat(shape.width), busy.tolist(), left.tolist())
    wide = np.repeat(np.array(lanes, dtype=np.int64), steps)
    turns = np.repeat(np.arange(len(wide)), wide)
    lane = np.arange(len(turns)) - np.repeat(np.cumsum(wide) - wide, wide)
    rows = np.where(lane < np.repeat(busy, steps)[turns], order[lane], len(counts))
    return rows, turns, tuple(itertools.starmap(Stretch, found)), order


def narrowed(busy: np.ndarray) -> np.ndarray:
    """How many lanes there are in each step, of a few different numbers: all that are busy come first.

    >>> narrowed(np.array([[True, True, True], [True, True, False], [True, False, False]])).tolist()
    [3, 2, 1]
    """
    lanes = busy.shape[1]
    rounded = np.array([min(lanes, bucket(number, WIDTHS)) for number in range(lanes + 1)], dtype=np.int64)
    return np.asarray(rounded[busy.sum(axis=1)])


def stretches(rows: np.ndarray, lanes: np.ndarray, width: int) -> tuple[Stretch, ...]:
    """The steps between changes of clients, [steps, lanes], with their numbers of lanes."""
    edges = [0, *(1 + np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1))).tolist(), len(rows)]
    return tuple(
        Stretch(end - first, int(lanes[first]), width)
        for first, end in itertools.pairwise(edges)
        if first < end
    )


def pack(counts: np.ndarray, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """Longest clients first, each into the lane that is free first: [steps, lanes].

    Lanes that end last come first. Ties by number, so that the result is fixed.
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
    place = np.argsort([lane for _, lane in sorted(free, key=lambda end: (-end[0], end[1]))])
    lane_of = place[lane_of]
    rows = np.full((length, lanes), clients, dtype=np.int64)
    turns = np.zeros((length, lanes), dtype=np.int64)
    for client in range(clients):
        span = slice(begin[client], begin[client] + counts[client])
        rows[span, lane_of[client]] = client
        turns[span, lane_of[client]] = np.arange(counts[client])
    return rows, turns


def pieces(batches: Batches, size: int, epochs: int | None = None) -> list[slice]:
    """Where the steps of one client with so many samples lie in the order in which it visits them.

    >>> pieces(Batches("train", size=4, epochs=2), 6)
    [slice(0, 4, None), slice(4, 6, None), slice(6, 10, None), slice(10, 12, None)]
    """
    width = batches.width(size)
    in_turn = batches.in_turn(size, width)
    turns = (divmod(turn, in_turn) for turn in range(int(batches.count(size, epochs))))
    begins = ((done * size + at * width, size - at * width) for done, at in turns)
    return [slice(begin, begin + min(width, left)) for begin, left in begins]


def sample_order(keys: Tensor | None, sizes: Tensor, places: Tensor) -> Tensor:
    """Every client's samples in the order a scan visits them, [clients, places].

    ``places`` counts 0, 1, 2, …; shuffled ones have a key for every client.
    """
    if keys is not None:
        return random.shuffled(keys, sizes, places)
    return places[None, :] % sizes[:, None].clamp(min=1)


def turn_table(
    batches: Batches, sizes: Tensor, rows: Tensor, turns: Tensor, width: int, places: int
) -> tuple[Tensor, Tensor]:
    """Where in an order of [clients, places] the samples of each turn begin, and how many are real.

    A spare row uses none.
    """
    client = rows.clamp(max=len(sizes) - 1)
    size = sizes[client]
    in_turn = batches.in_turn(size, width).clamp(min=1)
    offset = (turns % in_turn) * width
    real = torch.where(rows < len(sizes), (size - offset).clamp(min=0, max=width), 0)
    return client * places + (turns // in_turn) * size + offset, real


def samples_at(order: Tensor, begin: Tensor, real: Tensor, start: Tensor, column: Tensor) -> Tensor:
    """Which samples each turn uses, [..., width], by what :func:`turn_table` gives and each turn's start.

    Where no sample is real the client may have none, and ``start`` must be that of some sample. ``column``
    counts 0, 1, 2, … to the width.
    """
    sample = order.view(-1)[(begin[..., None] + column).clamp(max=order.numel() - 1)]
    return start[..., None] + torch.where(column < real[..., None], sample, 0)


def sample_table(
    batches: Batches, order: Tensor, start: Tensor, sizes: Tensor, rows: Tensor, turns: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Which samples each turn uses, [..., width], and how many of them are real, [...]."""
    begin, real = turn_table(batches, sizes, rows, turns, width, order.shape[1])
    first = torch.where(real > 0, start[rows.clamp(max=len(sizes) - 1)], 0)
    column = torch.arange(width, device=order.device)
    return samples_at(order, begin, real, first, column), real


def scan_table(
    batches: Batches,
    keys: Tensor | None,
    width: int,
    places: Tensor,
    numbers: Tensor,
    start: Tensor,
    sizes: Tensor,
    rows: Tensor,
    turns: Tensor,
    full: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The samples of every turn of a scan and how many are real.

    ``start`` holds all clients, ``sizes`` and ``keys`` these ones. Where every client has its lane, and so
    many samples that all batches are full, ``full`` says for every turn how many that is.
    """
    if batches.anew:
        full = None
    if full is not None and keys is not None:  # batch after batch, as the order has them
        return random.in_batches(keys, sizes, places, start, numbers, len(turns), width), full
    order = sample_order(keys, sizes, places)
    if full is not None:
        return random.batched(start[numbers, None] + order, len(turns), width), full
    return sample_table(batches, order, start[numbers], sizes, rows, turns, width)
