"""What a node agrees to: its owner's own settings, which no server can change.

A server decides what it asks for, and a request can be made to give samples away: the gradient of one step on
one sample is, for some networks, the sample. So a node has a policy, a TOML file of its owner's
(``sartor join --policy policy.toml``). A request outside it is refused: nothing is computed, or what was
computed stays. The server is told why, and the node's audit log has it.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sartor.algorithms import registered
from sartor.client.local import Batches
from sartor.data.clients import ClientData
from sartor.errors import SartorError, SettingError
from sartor.federation.transforms import JOINT, Transform
from sartor.runs.experiment import Experiment, read_toml
from sartor.runs.protection import settled_privacy
from sartor.settings import build, setting, shown, unknown
from sartor.transforms import TRANSFORMS
from sartor.transforms.noise import Noise
from sartor.transforms.norms import Clip

EVALUATED = ("test.", "validation.")
"""What the name of a quantity begins with that was counted in an evaluation."""
MARK = "outside this node's policy: "
STAY = (
    ", which stay at this node; `sartor join --allow-personal-models`, or personal_models in its policy, "
    "lets them go"
)
SEEDED = (
    "; noise of privacy.mode = 'local' counts with privacy.secret = true: without, it follows from the seed, "
    "which the server knows"
)


class Refused(SartorError):
    """A request that this node does not agree to."""

    def __init__(self, text: str) -> None:
        super().__init__(MARK + text)


@dataclass(frozen=True)
class Requirement:
    """A transform that replies must pass at this node, and how strong it must be."""

    name: str = setting("clip", "the transform, as in an experiment's [[transforms]]")
    least: dict[str, float] = field(
        default_factory=dict, metadata=setting(None, "settings of it that must be at least so large").metadata
    )
    most: dict[str, float] = field(
        default_factory=dict, metadata=setting(None, "settings of it that must be at most so large").metadata
    )

    def __post_init__(self) -> None:
        """Refuse a transform, or a setting of it, that does not exist."""
        if self.name not in TRANSFORMS:
            raise unknown("policy.require.name", self.name, TRANSFORMS, what="name")
        hints = typing.get_type_hints(TRANSFORMS[self.name])
        known = [key for key, hint in hints.items() if hint in (int, float)]
        for key in (*self.least, *self.most):
            if key not in known:
                raise unknown(f"policy.require.{self.name}", key, known)

    def fault(self, transform: Transform) -> str | None:
        """What keeps a transform from being the one that is required."""
        if type(transform) is not TRANSFORMS[self.name]:
            return f"{self.name} is required there"
        if transform.of:
            return f"{self.name} must be for all quantities, it is for {', '.join(transform.of)}"
        for word, bounds in (("least", self.least), ("most", self.most)):
            for key, bound in bounds.items():
                found = getattr(transform, key)
                if found < bound if word == "least" else found > bound:
                    return f"{self.name}.{key} must be at {word} {bound:g}, it is {found:g}"
        return None


@dataclass(frozen=True)
class Policy:
    """What a node agrees to. As it comes it agrees to every method, and sends no personal models.

    >>> Policy(least_batch=8).check_training(batch=1, epochs=1, steps=1, samples=100)
    'a step is taken on 1 samples, at least 8 are required (least_batch)'
    """

    methods: tuple[str, ...] = setting((), "methods whose runs the node takes part in; left out: any")
    functions: tuple[str, ...] = setting(
        (), "client functions that it runs, by their names; left out: all of the method and of evaluation"
    )
    quantities: tuple[str, ...] = setting(
        (),
        "quantities that may leave it, by their names, as delta or loss; left out: all that a method sends",
    )
    personal_models: bool = setting(False, "whether personal models, and what belongs to them, may leave it")
    moments: bool = setting(True, "whether the mean and spread of its features may leave it, for normalising")
    counts: bool = setting(
        True, "whether it may leave how often categories, and numbers in cells of a grid, occur in its table"
    )
    least_batch: int = setting(0, "least number of samples of a training step", low=0)
    least_steps: int = setting(0, "least number of steps behind a reply", low=0)
    least_samples: int = setting(0, "least number of a client's own samples behind a reply", low=0)
    most_exchanges: int = setting(
        0,
        "requests for work that it answers at most, in all runs that its state folder has seen; 0: any",
        low=0,
    )
    require: tuple[Requirement, ...] = ()
    """Transforms that replies must pass: the last ones on the way up, in this order.

    What ``[privacy]`` does to them with mode local counts as a clip and noise before all others."""

    def __post_init__(self) -> None:
        """Refuse the name of a method that is not there: it would refuse every run."""
        for name in self.methods:
            if name not in registered():
                raise unknown("policy.methods", name, registered(), what="name")

    # What is asked for --------------------------------------------------------------------------------

    def check_experiment(self, experiment: Experiment) -> None:
        """Refuse an experiment that the node does not take part in, whatever its data are."""
        if self.methods and experiment.algorithm not in self.methods:
            raise Refused(
                f"the method {experiment.algorithm}; it agrees to {', '.join(self.methods)} (methods)"
            )
        if experiment.evaluate.personal_models == "yes" and not self.personal_models:
            raise Refused(f"the server asks for personal models (evaluate.personal_models = 'yes'){STAY}")
        if experiment.data.normalise and not self.moments:
            raise Refused(
                "the mean and spread of features are asked for (data.normalise = true); they stay (moments)"
            )
        for column in experiment.columns:
            for what, words, allowed in (
                ("sums", "the sum and the squares of its values (moments)", self.moments),
                ("grid", "how many of its values lie in each cell of a grid (counts)", self.counts),
                ("values", "which categories it has and how often (counts)", self.counts),
            ):
                if what in column.wanted and not allowed:
                    raise Refused(f"of the column {column.name} it is asked {words}; that stays")
        up = [each for each in experiment.transforms if each.place == "up"]
        fault = self._missing([*noised_first(experiment), *up]) if self.require else None
        if fault:
            seeded = experiment.privacy.mode == "local" and not experiment.privacy.secret
            more = SEEDED if seeded and "noise" in [each.name for each in self.require] else ""
            raise Refused(
                f"the last transforms on the way up are not those it requires: {fault}{more} (require)"
            )

    def _missing(self, up: list[Transform]) -> str | None:
        """What keeps transforms from ending with those that are required.

        What only compresses, by sending parts, may come after them and not before: they act on whole values.
        Noise may come after them too.
        """
        final = TRANSFORMS[self.require[-1].name]
        while up and (up[-1].parts or up[-1].noises) and type(up[-1]) is not final:
            up = up[:-1]
        if len(up) < len(self.require):
            return f"{', '.join(each.name for each in self.require)} wanted, {len(up) or 'none'} there"
        before, last = up[: -len(self.require)], up[-len(self.require) :]
        early = next((type(made).__name__.lower() for made in before if made.parts), None)
        if early:
            return f"{early} comes before them, which sends parts"
        faults = (wanted.fault(found) for wanted, found in zip(self.require, last, strict=True))
        return next((fault for fault in faults if fault), None)

    def check_data(self, experiment: Experiment, data: ClientData) -> None:
        """Refuse training that would say too much of too few samples of a client here."""
        local = experiment.local
        for name, samples in zip(data.names, np.asarray(data.train.count).tolist(), strict=True):
            fault = self.check_training(local.batch, local.least_epochs, local.steps, samples)
            if fault:
                raise Refused(f"client {name}: {fault}")

    def check_training(self, batch: int, epochs: int, steps: int, samples: int) -> str | None:
        """What is too little about the training of a client with so many samples, in words."""
        size = min(batch, samples) if batch else samples
        taken = int(Batches("train", batch, epochs, steps).count(samples))
        for found, least, words, key in (
            (size, self.least_batch, f"a step is taken on {size} samples", "least_batch"),
            (taken, self.least_steps, f"a reply is made of {taken} steps", "least_steps"),
            (
                min(samples, taken * size),
                self.least_samples,
                "a reply is made of {0} samples",
                "least_samples",
            ),
        ):
            if found < least:
                return f"{words.format(found)}, at least {least} are required ({key})"
        return None

    def check_call(self, name: str, own: bool, evaluates: bool, transformed: bool, answered: int) -> None:
        """Refuse a client function before it runs.

        ``own`` says that it replies what is a client's own, ``evaluates`` that it only evaluates,
        ``transformed`` that its reply passes the transforms; ``answered`` requests were answered before.
        """
        plain = name.split("/")[-1].split(":")[-1]
        if self.functions and not {name, plain} & set(self.functions):
            raise Refused(f"the client function {name} (functions)")
        if own and not self.personal_models:
            raise Refused(f"{name}: it sends personal models or what belongs to them{STAY}")
        if self.require and not (transformed or evaluates or own):
            raise Refused(f"{name} is asked for without the transforms it requires (require)")
        if self.most_exchanges and answered >= self.most_exchanges:
            raise Refused(f"{answered} requests were answered already, which is the most (most_exchanges)")

    def _may_leave(self, quantity: str) -> bool:
        """Whether a quantity may: what is counted in an evaluation goes by its name on whichever samples."""
        own = quantity.partition(".")[2] if quantity.startswith(EVALUATED) else quantity
        return not self.quantities or bool({quantity, own} & set(self.quantities))

    def check_reply(self, name: str, sent: Iterable[str]) -> None:
        """Refuse to send quantities that have to stay."""
        names = {quantity.split(JOINT)[0] for quantity in sent}
        wrong = sorted(quantity for quantity in names if not self._may_leave(quantity))
        if wrong:
            raise Refused(
                f"{name} sends {', '.join(wrong)}; {', '.join(self.quantities)} may leave (quantities)"
            )

    # In words -----------------------------------------------------------------------------------------

    def to_mapping(self) -> dict[str, Any]:
        """All settings as plain values."""
        return dataclasses.asdict(self)


def noised_first(experiment: Experiment) -> list[Transform]:
    """What ``[privacy]`` has a client do to its reply before the transforms, as a clip and noise.

    The clip is over all quantities together, so that none is longer. Noise that follows from the seed is none
    to a server, which knows it.
    """
    if experiment.privacy.mode != "local":
        return []
    algorithm = registered()[experiment.algorithm](experiment.hyper)
    privacy = settled_privacy(experiment, algorithm, np.ones(1, dtype=np.int64))
    noise = [Noise(deviation=privacy.multiplier * privacy.clip)] if privacy.secret else []
    return [Clip(norm=privacy.clip), *noise]


def read_policy(path: Path | str) -> Policy:
    """The policy of a TOML file; an unknown key, or a value out of its range, is an error that names it."""
    if not Path(path).exists():
        raise SettingError(f"{path}: no such policy file")
    try:
        return policy_of(read_toml(path))
    except SettingError as error:
        told = str(error)
        raise SettingError(told if told.startswith(str(path)) else f"{path}: {told}") from None


def policy_of(mapping: Mapping[str, Any]) -> Policy:
    """The policy of plain values, as TOML has them.

    >>> policy_of({"least_batch": 8, "require": [{"name": "clip", "most": {"norm": 1}}]}).require[0].most
    {'norm': 1.0}
    """
    given = dict(mapping)
    tables = given.pop("require", [])
    if not isinstance(tables, (list, tuple)) or not all(isinstance(table, Mapping) for table in tables):
        raise SettingError(
            f"policy.require: expected a list of tables, got {shown(tables)}; write [[require]] and a name"
        )
    required = [build(Requirement, table, f"policy.require[{place}]") for place, table in enumerate(tables)]
    return replace(build(Policy, given, "policy"), require=tuple(required))


def node_policy(path: Path | str | None, allow_personal_models: Any) -> Policy:
    """What a node was told that it agrees to: in a file, or by the one word there is for it."""
    if not isinstance(allow_personal_models, bool):
        raise SettingError(f"allow-personal-models: is true or false, got {shown(allow_personal_models)}")
    if path is None:
        return Policy(personal_models=allow_personal_models)
    if allow_personal_models:
        raise SettingError(f"{path}: the policy says whether personal models may leave; write it there alone")
    return read_policy(path)
