"""The plain engine: one client after the other. It is the specification, the oracle and the debugger.

On a CPU several clients run at once, each in a thread of its own with one intra-op thread: convolutions of
a small batch use two cores better that way than by splitting each operation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor import nests, random
from sartor.client.local import Batches, Client
from sartor.data.clients import ClientData
from sartor.engines.base import LocalEngine, Origins
from sartor.engines.samples import batch_of
from sartor.engines.schedule import pieces
from sartor.errors import SartorError
from sartor.federation.exchange import NOBODY, ClientError, Outcome, Reply, Work, checked_reply, untouched
from sartor.federation.functions import name_of
from sartor.federation.settings import FederationSettings
from sartor.kernels.device import Computing, room_for_rows
from sartor.model.batch import Batch
from sartor.model.task import Task

log = logging.getLogger(__name__)

Form = dict[str, tuple[torch.Size, torch.dtype]]


class Rows:
    """What so many clients send or keep, below each other: put there client by client, and held once."""

    def __init__(self, clients: int) -> None:
        self._clients, self._lock = clients, Lock()
        self._form: Form | None = None
        self.below: dict[str, Tensor] = {}
        self.others: dict[int, dict[str, Tensor]] = {}
        """Rows that have other names, shapes or types than the first that came, by place."""

    def put(self, place: int, row: dict[str, Tensor]) -> None:
        """Put the row of the client at this place; several threads may do so at once."""
        form = {name: (value.shape, value.dtype) for name, value in row.items()}
        with self._lock:
            if self._form is None:
                self._form = form
                self.below = {name: room_for_rows(self._clients, value[None]) for name, value in row.items()}
        if form != self._form:
            self.others[place] = row
            return
        for name, value in row.items():
            self.below[name][place] = value

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Each client's row."""
        for place in range(self._clients):
            other = self.others.get(place)
            yield {name: rows[place] for name, rows in self.below.items()} if other is None else other


class LoopEngine(LocalEngine):
    """Runs client functions one client after the other, or ``workers`` at once on a CPU."""

    name = "loop"

    def __init__(
        self, task: Task, data: ClientData, settings: FederationSettings, origins: Origins | None = None
    ) -> None:
        super().__init__(task, data, settings, origins)
        self._drawing: set[str] = set()
        """The functions of which it was said that they draw from PyTorch's own generator."""
        threads = torch.get_num_threads()
        self.workers = (settings.workers or threads) if self.device.type == "cpu" else 1
        train = self.samples["train"].x
        images = isinstance(train, Tensor) and train.dim() == 4 and train.is_floating_point()
        if self.device.type == "cpu" and images and self._takes(_channels_last(train[:2])):
            # A CPU pools and convolves images faster that way: 1.1 to 1.4 times on the papers' networks.
            for name in self.samples.keys() - {"union"}:
                self.samples[name].x = _channels_last(self.samples[name].x)
            if "union" in self.samples:
                self.samples["union"].x = self.samples["train"].x  # held once

    def _takes(self, x: Tensor) -> bool:
        """Whether the model can be fed with these samples; one that uses ``view`` may want another layout."""
        try:
            with torch.no_grad():
                self.task.outputs(self.task.initial().to(self.device), x)
        except RuntimeError:
            return False
        return True

    def run(self, work: Work) -> Outcome:
        """Run the function at one client after the other."""
        with Computing(self.settings.precision):
            return self._run(work)

    def _run(self, work: Work) -> Outcome:
        clients = len(work.numbers)
        # One row of buffers each, also where all clients start from the server's.
        given = None if work.buffers is None else work.buffers.expand(clients, -1)
        sent, kept = Rows(clients), Rows(clients)

        def one(place: int) -> Tensor | None:
            own = {name: rows[place] for name, rows in work.own.items()}
            start = None if given is None else given[place]
            reply, trained = self._client(work, place, {**work.shared, **own}, start)
            sent.put(place, reply.sent)
            kept.put(place, reply.kept)
            return trained

        before = self._generators()
        after = self._each(one, work.numbers)
        if not after:
            return NOBODY
        if not self.task.unkeyed and not all(map(torch.equal, before, self._generators())):
            self._tell_of_draws(work)
        replies, states = (self._alike(work, rows) for rows in (sent, kept))
        if given is None or all(row is None for row in after):
            return Outcome(work.numbers, replies, states, None)
        # A client without samples took no step: its buffers are those it was given.
        trained = [before if row is None else row for row, before in zip(after, given, strict=True)]
        return Outcome(work.numbers, replies, states, torch.stack(trained))

    def _generators(self) -> list[Tensor]:
        """Where PyTorch's own generators are, which nobody draws from where all is drawn by keys."""
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def _tell_of_draws(self, work: Work) -> None:
        """Say once of a function that equal seeds may give it other numbers."""
        name = name_of(work.function)
        if name not in self._drawing:
            self._drawing.add(name)
            log.warning(
                "%s draws from PyTorch's own generator, so equal seeds may give different runs; draw by "
                "sartor.random from client.stream(name), or from the key that a transform is given",
                name,
            )

    def _alike(self, work: Work, found: Rows) -> dict[str, Tensor]:
        """The rows below each other, where one of another shape than most have is a bad reply."""
        if not found.others:
            return found.below
        rows = list(found)
        for number, row in zip(work.numbers.tolist(), rows, strict=True):
            if row.keys() != rows[0].keys():
                first, other = (", ".join(each) or "nothing" for each in (rows[0], row))
                one = self.names[int(work.numbers[0])]
                raise SartorError(
                    f"{name_of(work.function)}, round {work.round}: client {self.names[number]!r} sends or "
                    f"keeps {other}, where client {one!r} has {first}; a client function sends and keeps the "
                    "same names at every client"
                )
        usual = {name: Counter(row[name].shape for row in rows).most_common(1)[0][0] for name in rows[0]}
        alike = []
        for number, row in zip(work.numbers.tolist(), rows, strict=True):
            wrong = next((name for name, shape in usual.items() if row[name].shape != shape), None)
            if wrong is not None:
                method, client = self.settings.method or name_of(work.function), self.names[number]
                who = f"{method}, round {work.round}, client {client!r}"
                shapes = f"has shape {list(row[wrong].shape)}, others have {list(usual[wrong])}"
                told = f"{who}: {wrong!r} of its reply {shapes}"
                if self.settings.conditions.on_bad_reply == "stop":
                    raise SartorError(f"{told} (replies.on_bad_reply = 'drop' leaves such replies out)")
                log.warning("%s", told)
                row = {name: _unfit(row[name], usual[name]) for name in usual}
            alike.append(row)
        return {name: torch.stack([row[name] for row in alike]) for name in usual}

    def _each(self, one: Callable[[int], Any], numbers: np.ndarray) -> list[Any]:
        if self.workers == 1 or len(numbers) == 1:
            return [one(place) for place in range(len(numbers))]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            # The largest clients first, so that none of them is left for one worker at the end.
            order = np.argsort(-self.samples["train"].counts[numbers], kind="stable")
            with ThreadPoolExecutor(self.workers, initializer=partial(torch.set_num_threads, 1)) as pool:
                results = dict(zip(order.tolist(), pool.map(one, order.tolist()), strict=True))
            return [results[place] for place in range(len(numbers))]
        finally:
            torch.set_num_threads(threads)

    def _client(
        self, work: Work, place: int, arguments: dict[str, Tensor], buffers: Tensor | None
    ) -> tuple[Reply, Tensor | None]:
        number, round = int(work.numbers[place]), int(work.rounds[place])
        known, seed = number, self.settings.seed
        if self.origins is not None:
            known, seed = int(self.origins.numbers[number]), int(self.origins.seeds[number])
        client = Client(
            task=self.task,
            local=self.settings.local,
            scan=partial(self._scan, number, seed, (round, known)),
            number=torch.tensor(known, device=self.device),
            round=torch.tensor(round, device=self.device),
            counts={split: samples.count[number] for split, samples in self.samples.items()},
            buffers=buffers,
            frozen=self.settings.buffers == "freeze",
            evaluation_batch=self.settings.evaluation_batch,
            most={split: int(samples.counts[number]) for split, samples in self.samples.items()},
            seed=seed,
            noise=self.settings.sample_noise,
        )
        try:
            with torch.no_grad(), untouched(work.function, arguments):
                result = work.function(client, work.hyper, **arguments)
            reply = checked_reply(work.function, result, self.task.dtype, self.device)
        except SartorError:
            raise
        except Exception as error:
            who = f"client {self.names[number]!r} (number {known})"
            reason = self.refused(np.array([number])) or f"{who}: {error}"
            raise ClientError(f"{name_of(work.function)}, round {work.round}, {reason}") from error
        trained = client.buffers if buffers is not None and client.buffers is not buffers else None
        return reply, trained

    def _scan(
        self,
        place: int,
        seed: int,
        who: tuple[int, int],
        client: Client,
        body: Callable[[Any, Batch], Any],
        carry: Any,
        batches: Batches,
    ) -> Any:
        """Carry out a scan of the client that is at this place here, of a run with this seed.

        ``who`` is its round and its number in that run, by which all is drawn: integers fold in no time.
        """
        samples = self.samples[batches.split]
        drawn = client.epochs(batches)
        held = int(samples.counts[place])
        steps = pieces(batches, held, None if drawn is None else int(drawn))
        if not steps:
            return carry
        x, y, start = samples.of(place)
        places = torch.arange(held * -(-steps[-1].stop // held), device=self.device)  # of whole passes
        order = places % held
        if batches.shuffled:
            key = torch.tensor([random.stream(seed, batches.stream, *who)], device=self.device)
            order = random.shuffled(key, samples.count[place : place + 1], places)[0]
        order = order + start[place]
        keys: Any = repeat(0, len(steps))
        if self.task.draws or batches.augmented or batches.anew:
            keys = random.stream(seed, "layers", *who, torch.arange(len(steps), device=self.device))
        for piece, key in zip(steps, keys, strict=True):
            index = order[piece]
            carry = body(carry, batch_of(nests.rows(x, index), nests.rows(y, index), None, key))
        return carry


def _channels_last(images: Tensor) -> Tensor:
    """The images with the numbers of a pixel side by side in memory."""
    images = images.contiguous(memory_format=torch.channels_last)
    if (
        images.shape[1] == 1
    ):  # lies as before, but says so: PyTorch takes a single channel for the usual layout
        height, width = images.shape[2:]
        images = images.as_strided(images.shape, (height * width, 1, width, 1))
    return images


def _unfit(value: Tensor, shape: torch.Size) -> Tensor:
    """A value of that shape which will be refused."""
    return torch.full(
        shape, torch.nan if value.is_floating_point() else 0, dtype=value.dtype, device=value.device
    )
