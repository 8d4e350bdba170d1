"""What engines share that run clients here: the clients' samples on a device, and who they are in the run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from sartor import nests
from sartor.client.augment import check_augment
from sartor.data.clients import ClientData, LazySplit, Split
from sartor.engines.samples import Samples, samples_of
from sartor.errors import SettingError
from sartor.federation.engine import Engine
from sartor.federation.settings import FederationSettings
from sartor.model.task import Task, unkeyed_words
from sartor.nests import Nest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origins:
    """Who an engine's clients are, where they are not those of one run from the first to the last."""

    numbers: np.ndarray
    """Each client's number in its run: what keys its randomness."""
    seeds: np.ndarray
    """The seed of its run."""


def union_size(data: ClientData) -> int:
    """How many training samples all clients have together, which lie in one piece; 0 where they do not."""
    train = data.train
    here = not isinstance(train, LazySplit) and int(train.count.sum()) == nests.length(train.y)
    return nests.length(train.y) if here else 0


class LocalEngine(Engine):
    """An engine with the samples of all its clients at hand.

    Clients are those of one run in order; ``origins`` says otherwise where a node has some of them or several
    runs share an engine.
    """

    def __init__(
        self, task: Task, data: ClientData, settings: FederationSettings, origins: Origins | None = None
    ) -> None:
        self.task, self.settings, self.origins = task, settings, origins
        self.device = torch.device(settings.device)
        self.names = data.names
        splits = {"train": data.train, "test": data.test, "validation": data.validation}
        self.samples: dict[str, Samples] = {
            name: samples_of(split, self.device) for name, split in splits.items() if split is not None
        }
        everyone = np.zeros(data.clients, dtype=np.int64)
        pooled = Split(data.pooled_x, data.pooled_y, everyone, everyone + nests.length(data.pooled_y))
        self.samples["pooled"] = samples_of(pooled, self.device)
        rest = None if origins is not None else data.rest
        self._divided = rest is not None
        if rest is not None and len(rest):
            x, y = nests.rows((data.pooled_x, data.pooled_y), torch.from_numpy(rest))
            self.samples["rest"] = samples_of(Split(x, y, everyone, everyone + len(rest)), self.device)
        train = self.samples["train"]
        if origins is None and union_size(
            data
        ):  # clients of several runs, or at a node, are not to be joined
            whole = Split(train.x, train.y, everyone, everyone + union_size(data), train.weight)
            self.samples["union"] = samples_of(whole, self.device)
        if data.public_x is not None:
            # In place of labels the places of samples: what is known of each is found by them.
            places = torch.arange(len(data.public_x))
            public = Split(data.public_x, places, everyone, everyone + len(places))
            self.samples["public"] = samples_of(public, self.device)
            self.public = self.samples["public"].x
        self.counts = {name: samples.counts for name, samples in self.samples.items()}
        train = self.samples["train"]
        self.blank = nests.mapped(lambda leaf: torch.zeros_like(leaf[:1]), train.x)
        task.check_loss(train.x, train.y)
        if train.weight is not None:
            task.check_apart(train.x, train.y, "samples have weights", "leave the weights out")
            if settings.privacy.mode == "samples":
                raise SettingError(
                    "privacy.mode = 'samples': the samples have weights, which are relative to their mean, "
                    "which tells of all of them; leave the weights out"
                )
        if settings.privacy.mode == "samples":
            why = "privacy.mode = 'samples' takes every sample's gradient by itself"
            task.check_apart(train.x, train.y, why, "take another mode")
        check_augment(settings.local, train.x, train.y)
        task.check_draws(train.x, train.y)
        if task.unkeyed:
            log.warning("%s", unkeyed_words(task))

    @cached_property
    def adds_up(self) -> bool:
        """Whether the pooled test data are the clients', and no sample's result depends on others'."""
        task, train = self.task, self.samples["train"]
        apart = task.why_not_stackable(train.x, train.y) is None and not task.mixes_samples(train.x, train.y)
        return self._divided and apart

    def refused(self, numbers: np.ndarray) -> str | None:
        """Which sample of these clients the model cannot take, and why; None where it takes all of them."""
        for number in numbers.tolist():
            for split, samples in self.samples.items():
                if split in ("union", "rest"):
                    continue  # these are the clients' training samples, and some of the pooled ones
                x, _, start = samples.of(number)
                first = int(start[number])
                found = self._first_refused(x, first, first + int(samples.counts[number]))
                if found is None:
                    continue
                place, reason = found
                leaves = nests.paths(nests.rows(x, slice(place, place + 1)), "x").items()
                ranges = [
                    f"{path} from {leaf.min()} to {leaf.max()}" for path, leaf in leaves if leaf.numel()
                ]
                common = {"pooled": "the pooled test data", "public": "the public samples"}
                who = common.get(split, f"client {self.names[number]!r}, {split}")
                return f"{who}: the model refuses sample {place - first} ({', '.join(ranges)}): {reason}"
        return None

    def _first_refused(self, x: Nest, first: int, end: int) -> tuple[int, str] | None:
        """The first of some samples that the model cannot take, found by halves."""
        try:
            w = self.task.initial().to(self.device)
            with torch.no_grad():
                if end > first:
                    self.task.outputs(w, nests.rows(x, slice(first, end)))
            return None
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if end - first == 1:
                return first, next(iter(str(error).strip().splitlines()), type(error).__name__)
        middle = (first + end) // 2
        return self._first_refused(x, first, middle) or self._first_refused(x, middle, end)
