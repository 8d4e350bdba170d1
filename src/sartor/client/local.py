"""What a client can do: go through its samples in batches, take gradients, descend, evaluate.

A client function gets a :class:`Client` and calls its methods; it is pure and written for one client,
whatever engine runs it. The one way to the client's samples is :meth:`Client.scan`, a fold over batches;
everything else is made of scans. An engine decides how a scan is carried out: one client after the other,
or a step of many clients at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from sartor import random
from sartor.client.augment import MixUp, augmented
from sartor.client.hidden import Covered, SampleNoise, noised_gradient, unseen
from sartor.client.law import Law
from sartor.client.steps import kept, optimizer_of, parts
from sartor.errors import SartorError, SettingError
from sartor.model.batch import Batch, Pass
from sartor.model.layers import Change, Frozen
from sartor.model.task import LossAndPass, Penalty, Task
from sartor.nests import Nest
from sartor.settings import shown

if TYPE_CHECKING:
    from sartor.client.settings import Local
    from sartor.model.objectives import Tally

Carry = TypeVar("Carry")
Direction = Callable[[Tensor, Batch], Tensor]


@dataclass(frozen=True)
class Batches:
    """The batches of one scan: ``steps`` of them, or ``epochs`` passes over the samples, ``times`` as many.

    With a ``law`` the epochs of every client are drawn. The last, short batch of a pass is kept. ``size`` 0
    takes all samples at once. Shuffled batches come from the keyed stream named ``stream``: two scans of one
    round that name the same see the same batches.
    """

    split: str = "train"
    size: int = 0
    epochs: int = 1
    steps: int = 0
    shuffled: bool = False
    stream: str = "batch"
    times: int = 1
    law: Law | None = None
    augmented: bool = False
    """Whether ``local.augment`` is for them."""
    anew: bool = False
    """Whether each is drawn anew among all samples, rather than all of them in turn."""
    summed: int = 0
    """Where all that a batch does is to add to so many numbers: they may be of any size, and go at once."""

    def width(self, most: int) -> int:
        """Samples per batch, where the largest client has ``most``."""
        return max(1, min(self.size, most) if self.size else most)

    def per_epoch(self, n: Any, width: int) -> Any:
        """Batches of one pass over n samples; for integers, arrays and tensors."""
        return (n + width - 1) // width

    def in_turn(self, n: Any, width: int) -> Any:
        """Batches after which samples come again: those of a pass, or one where each is drawn anew."""
        return 1 + 0 * n if self.anew else self.per_epoch(n, width)

    def count(self, n: Any, epochs: Any = None) -> Any:
        """Steps that a client with n samples takes: none without samples. ``epochs`` are those drawn."""
        width = self.size
        if self.steps:
            return self.times * self.steps * (n > 0)
        epochs = self.epochs if epochs is None else epochs
        return self.times * epochs * (self.per_epoch(n, width) if width else 1 * (n > 0))


class Scan(Protocol):
    """How an engine carries out a scan."""

    def __call__(
        self, client: Client, body: Callable[[Any, Batch], Any], carry: Any, batches: Batches
    ) -> Any:
        """The carry after all batches."""


class Client:
    """One client, as a client function sees it: its number, its samples through methods, nothing else.

    >>> def train(client, hyper, w, mine):  # mine is not sent: it is what this client kept
    ...     def direction(w_k, batch):
    ...         return client.grad(w_k, batch) + 0.1 * (w_k - mine)
    ...
    ...     w_k = client.descend(w, direction, lr=hyper.lr)
    ...     return Reply(w=w_k).keep(mine=w_k)
    """

    def __init__(
        self,
        *,
        task: Task,
        local: Local,
        scan: Scan,
        number: Tensor,
        round: Tensor,
        counts: dict[str, Tensor],
        buffers: Tensor | None,
        frozen: bool,
        evaluation_batch: int,
        most: dict[str, int],
        seed: int | Tensor = 0,
        noise: SampleNoise | None = None,
    ) -> None:
        self.task = task
        self.local = local
        self.number = number
        self.round = round
        self.counts = counts
        self.buffers = buffers
        self._frozen = frozen
        self._scan = scan
        self._evaluation_batch = evaluation_batch
        self._most = most
        """Of each split, the most samples that a client has which runs in one batch with this one."""
        self._seed = seed
        self._noise = noise
        self.watched = False
        """Whether what it does is told, so that only noised gradients may see its training samples."""
        self._gradients: Tensor | None = None
        self._descents = 0

    @property
    def n(self) -> Tensor:
        """The number of training samples."""
        return self.counts["train"]

    @property
    def gradients(self) -> Tensor:
        """Of how many batches noised gradients were taken, and how many of one at most."""
        return torch.zeros_like(self.n).expand(2) if self._gradients is None else self._gradients

    def stream(self, name: str) -> int | Tensor:
        """The key of this client's stream of that name in this round: what is random follows from it."""
        return random.stream(self._seed, name, self.round, self.number)

    # Quantities of one batch ----------------------------------------------------------------------

    def grad(
        self,
        w: Tensor,
        batch: Batch | Covered,
        *,
        track: bool = True,
        penalty: Penalty | None = None,
        frozen: Frozen = False,
        change: Change | None = None,
    ) -> Tensor:
        """The gradient of the mean loss over the batch.

        ``track=False`` leaves the running statistics as they are. ``penalty``, a function of the features
        with one number per sample, is added to the loss. ``frozen`` says of a module's path whether it is
        as in evaluation. ``change`` is applied to the features before the head gets them.
        """
        if isinstance(batch, Covered):
            if penalty is not None or change is not None:
                raise unseen("adds a term of its own to the loss of a batch")
            return self._noised(w, batch, frozen)
        gradient, after = self.task.grad_and_buffers(
            w, batch, self.buffers, self._frozen or frozen, penalty, change
        )
        if track:
            self.buffers = after
        return gradient

    def _noised(self, w: Tensor, batch: Covered, frozen: Frozen) -> Tensor:
        """The gradient of the mean loss, each sample's clipped, and noise; counted by the batch."""
        assert self._noise is not None
        return noised_gradient(self.task, w, batch, self.buffers, self._frozen or frozen, self._noise)

    def forward(self, w: Tensor, batch: Batch, change: Change | None = None) -> Pass:
        """A pass in training mode, for losses of a method's own; see :meth:`differentiate`."""
        return self.task.forward(w, batch, self.buffers, self._frozen, change)

    def differentiate(self, objective: LossAndPass, w: Tensor) -> tuple[Tensor, Pass]:
        """The gradient of a method's own objective, and the pass it made, whose buffers are taken."""
        gradient, run = self.task.differentiate(objective, w)
        self.buffers = run.buffers
        return gradient, run

    def outputs(self, w: Tensor, x: Nest) -> Any:
        """What the model returns, in evaluation mode."""
        return self.task.outputs(w, x, self.buffers)

    # Quantities of the whole local data -----------------------------------------------------------

    def scan(self, body: Callable[[Carry, Batch], Carry], carry: Carry, batches: Batches) -> Carry:
        """``carry = body(carry, batch)`` over the batches.

        ``carry`` is a tensor or a tuple or dict of tensors; the body returns one of the same form.
        """
        own = batches.split in ("train", "union") or (self.watched and batches.split != "public")
        if self._noise is not None and own and not batches.anew:
            raise unseen(f"goes through the {batches.split} samples as they are")

        def step(carry: Carry, batch: Batch) -> Carry:
            if batches.augmented:
                batch = augmented(self.local.augment, batch, batches.stream)
            after: Carry = _of_form(carry, body(carry, batch))
            return after

        result: Carry = self._scan(self, step, carry, batches)
        return result

    def mean(self, quantity: Callable[[Batch], Tensor], like: Tensor, split: str = "train") -> Tensor:
        """The mean over a split of a quantity that is itself a mean over a batch, shaped as ``like``."""
        total = self.sum(lambda batch: quantity(batch) * batch.size, like, split)
        return total / self.counts[split].clamp(min=1)

    def sum(self, quantity: Callable[[Batch], Tensor], like: Tensor, split: str = "train") -> Tensor:
        """The sum over a split of a quantity that is itself a sum over a batch, shaped as ``like``."""

        def add(total: Tensor, batch: Batch) -> Tensor:
            return total + quantity(batch)

        return self.scan(add, torch.zeros_like(like), Batches(split, self._evaluation_batch))

    def gather(
        self,
        quantity: Callable[[Batch], Tensor],
        like: Tensor,
        split: str = "train",
        *,
        most: int = 0,
        stream: str = "",
    ) -> tuple[Tensor, Tensor]:
        """A row for each sample of a split, and which rows are real: others are there to fill up.

        ``quantity`` gives a row shaped as ``like`` for every sample of a batch. With ``most`` there are so
        many rows at most, the first ones; with a ``stream`` samples come in an order that is drawn from it.
        What is made of the rows must not depend on how many fill up.
        """
        length = max(1, min(most or self._most[split], self._most[split]))

        def add(carry: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
            rows, filled = carry
            new = quantity(batch)
            places = filled + torch.arange(len(new), device=new.device)
            fits = places < length if batch.weight is None else (places < length) & (batch.weight > 0)
            places = torch.where(fits, places, length).view(-1, *[1] * like.dim())
            return rows.scatter(0, places.expand_as(new), new), filled + fits.sum()

        empty = like.new_zeros((length + 1, *like.shape)), torch.zeros_like(self.n)
        batches = Batches(split, self._evaluation_batch, shuffled=bool(stream), stream=stream or "batch")
        rows, filled = self.scan(add, empty, batches)
        return rows[:length], torch.arange(length, device=rows.device) < filled

    def full_gradient(self, w: Tensor) -> Tensor:
        """∇f_i(w): the gradient of the mean loss over all training samples."""
        return self.mean(lambda batch: self.grad(w, batch, track=False), like=w)

    def loss(self, w: Tensor, split: str = "train") -> Tensor:
        """f_i(w): the mean loss over all samples of a split, in evaluation mode."""
        return self.mean(
            lambda batch: batch.mean(self.task.losses(w, batch, self.buffers)), w.new_zeros(()), split
        )

    def evaluate(
        self,
        model: Tensor | Callable[[Nest], Any] | Sequence[Callable[[Nest], Any]],
        split: str = "test",
        tallies: Sequence[str] = ("confusion",),
    ) -> dict[str, Tensor]:
        """Sum of losses, number of samples, and what else is counted of a model's predictions.

        ``model`` is a vector, or a function from inputs to outputs for methods that predict in another way.
        Several, as the rows of a matrix or as functions, share a pass, and what is counted has a row for
        each. ``tallies`` are those of the task's objective, by name; it has a confusion matrix (rows: truth)
        where a target is a class. One that it does not have is left out.
        """
        several = isinstance(model, Sequence) or (isinstance(model, Tensor) and model.dim() == 2)
        rows = (len(cast("Sequence[Any]", model)),) if several else ()
        known = self.task.objective.tallies(self.task.width)
        counted = {name: known[name] for name in tallies if name in known}
        like = self.counts[split]
        zeros = {"loss": like.new_zeros(rows, dtype=self.task.dtype)}
        for name, tally in counted.items():
            zeros[name] = like.new_zeros((*rows, *tally.shape), dtype=tally.dtype)

        def add(total: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
            of_model = partial(self._counted, batch, counted)
            added = self.task.each(of_model, cast("Sequence[Any]", model)) if several else of_model(model)
            return {name: value + added[name] for name, value in total.items()}

        summed = sum(value.numel() for value in zeros.values())
        totals = self.scan(add, zeros, Batches(split, self._evaluation_batch, summed=summed))
        return {**totals, "n": like}

    def _counted(self, batch: Batch, counted: dict[str, Tally], model: Any) -> dict[str, Tensor]:
        """What one batch adds to the sums of a model."""
        result = model(batch.x) if callable(model) else self.outputs(model, batch.x)
        loss = batch.mean(self.task.loss_function(result, batch.y)) * batch.size
        return {"loss": loss} | {
            name: tally.count(result, batch.y, batch.weight) for name, tally in counted.items()
        }

    # The local loop -------------------------------------------------------------------------------

    def batches(
        self,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        stream: str = "batch",
        split: str = "train",
        times: int = 1,
        size: int | None = None,
    ) -> Batches:
        """The shuffled training batches of the ``local`` settings, or so many epochs or steps of them."""
        law = None
        if epochs is None and steps is None:
            epochs, steps, law = self.local.most_epochs, self.local.steps, self.local.law
        size = self.local.batch if size is None else size
        changed = bool(self.local.augment)
        return Batches(split, size, epochs or 0, steps or 0, True, stream, times, law, changed)

    def epochs(self, batches: Batches) -> Tensor | None:
        """The epochs that are drawn for this client in this round; None where all do as many."""
        return None if batches.law is None else batches.law.epochs(self._seed, self.round, self.number)

    def steps(self, *, epochs: int | None = None, steps: int | None = None) -> Tensor:
        """K_i: how many steps :meth:`descend` takes with these arguments."""
        batches = self.batches(epochs=epochs, steps=steps)
        count: Tensor = batches.count(self.n, self.epochs(batches))
        return count

    def rate(self, lr: float | Tensor) -> float | Tensor:
        """η of this round, by ``local.lr_decay`` and a schedule over rounds."""
        factor = self.local.round_factor(self.round)
        return lr if factor is None else lr * factor.to(self.task.dtype)

    def work(self, lr: float | Tensor) -> Tensor:
        """Σ_k η_k: the rates of all steps that :meth:`descend` takes, added up; K_i η of equal ones."""
        steps, schedule = self.steps(), self.local.steps_schedule
        rate, dtype = self.rate(lr), self.task.dtype
        if schedule is None:
            return steps.to(dtype) * rate
        most: int = self.batches().count(self._most["train"])
        times = torch.arange(most, device=steps.device)
        factors = schedule.at(times, self.local.schedule_length or steps)
        return torch.where(times < steps, factors, 0).sum().to(dtype) * rate

    def descend(
        self,
        w: Tensor,
        direction: Direction | None = None,
        *,
        lr: float | Tensor,
        epochs: int | None = None,
        steps: int | None = None,
        updates: int = 1,
        only: Tensor | None = None,
        stream: str = "batch",
        split: str = "train",
        apart: Sequence[int] = (),
        batch: int | None = None,
        behind: Tensor | None = None,
    ) -> Tensor:
        """Local training from ``w``: K_i steps against ``direction(w_k, batch)``, by default the gradient.

        The ``local`` settings say how many steps, which optimiser and how its rate changes; ``epochs`` or
        ``steps`` override the amount. ``updates`` steps are taken on every batch. ``only`` is a boolean
        vector: what is false in it does not move, not by momentum or weight decay either. The optimiser
        starts afresh each time. ``batch`` samples make a step, by default those of the settings. ``split``
        says on which samples; ``union`` is for
        :meth:`~sartor.federation.federation.Federation.together` alone. ``apart`` are the lengths of models
        that lie one behind the other in ``w``: the direction of each is clipped by itself. ``behind`` is
        added to what the optimiser makes of every direction.

        With ``local.micro`` the direction is the mean of those of parts of the batch. A method whose
        direction is no mean over samples has to :func:`refuse` it.
        """
        follow = direction or self.grad

        def plain(w_k: Tensor, batch: Batch, memory: tuple[()]) -> tuple[Tensor, tuple[()]]:
            return follow(w_k, batch), memory

        return self.descend_with(
            w,
            plain,
            (),
            lr=lr,
            epochs=epochs,
            steps=steps,
            updates=updates,
            only=only,
            stream=stream,
            split=split,
            apart=apart,
            batch=batch,
            behind=behind,
        )[0]

    def descend_with(
        self,
        w: Tensor,
        direction: Callable[[Tensor, Batch, Carry], tuple[Tensor, Carry]],
        memory: Carry,
        *,
        lr: float | Tensor,
        epochs: int | None = None,
        steps: int | None = None,
        updates: int = 1,
        only: Tensor | None = None,
        stream: str = "batch",
        times: int = 1,
        split: str = "train",
        apart: Sequence[int] = (),
        batch: int | None = None,
        behind: Tensor | None = None,
    ) -> tuple[Tensor, Carry]:
        """:meth:`descend` with a direction that hands a ``memory`` on to the next step; both are returned.

        ``times`` multiplies the number of steps, for methods that need several batches for one.
        """
        local, rate = self.local, self.rate(lr)
        amount: Any = {"epochs": epochs, "steps": steps, "times": times, "size": batch}
        batches = self.batches(stream=stream, split=split, **amount)
        descent, self._descents = self._descents, self._descents + 1
        if self._noise is not None:
            if not self.watched:
                raise unseen("trains models for evaluation, outside its rounds")
            # A draw of its own for every descent, and every update: one that comes again hides less.
            own = f"{stream} {descent}" if descent else stream
            batches, updates = replace(batches, anew=True, times=times * updates, stream=own), 1
        optimizer, schedule = optimizer_of(local, apart), local.steps_schedule
        carry: dict[str, Any] = {"w": w, "slots": optimizer.init(w), "memory": memory}
        if self.buffers is not None:
            carry["buffers"] = self.buffers
        if self._noise is not None:
            carry["gradients"] = self.gradients
        if schedule is not None:
            carry["step"] = torch.zeros_like(self.n)
            length = (
                local.schedule_length or batches.count(self.counts[split], self.epochs(batches)) * updates
            )

        def body(carry: dict[str, Any], batch: Batch) -> dict[str, Any]:
            w_k, slots, memory = carry["w"], carry["slots"], carry["memory"]
            self.buffers, after = carry.get("buffers"), {}
            seen: Any = batch if self._noise is None else Covered(batch, descent, only)
            for update in range(updates):
                g, memory = self._averaged(direction, w_k, seen, memory)
                if only is not None and local.clip:  # what does not move has no part in the norm
                    g = torch.where(only, g, 0)
                step, slots = optimizer.update(g, slots, w_k)
                step = step if behind is None else step + behind
                eta = rate
                if schedule is not None:
                    eta = rate * schedule.at(carry["step"] + update, length).to(w_k.dtype)
                moved = torch.sub(w_k, step, alpha=eta) if isinstance(eta, float) else w_k - eta * step
                w_k = moved if only is None else torch.where(only, moved, w_k)
            if schedule is not None:
                after["step"] = carry["step"] + updates
            if self.buffers is not None:
                after["buffers"] = self.buffers
            if isinstance(seen, Covered):
                drawn, most = carry["gradients"]
                after["gradients"] = torch.stack([drawn + (seen.taken > 0), most.clamp(min=seen.taken)])
            return {"w": w_k, "slots": slots, "memory": memory, **after}

        carry = self.scan(body, carry, batches)
        self.buffers = carry.get("buffers")
        self._gradients = carry.get("gradients", self._gradients)
        return carry["w"], carry["memory"]

    def _averaged(
        self,
        direction: Callable[[Tensor, Batch, Carry], tuple[Tensor, Carry]],
        w: Tensor,
        batch: Batch,
        memory: Carry,
    ) -> tuple[Tensor, Carry]:
        """The direction of a batch, which goes through the model in parts of ``local.micro`` samples."""
        size = self.local.micro
        if not size:
            return direction(w, batch, memory)
        if not (isinstance(memory, tuple) and not memory):
            raise SettingError(
                f"local.micro = {size}: the method's steps hand on what they learn from batch to batch, "
                "which parts of a batch would change; set local.micro to 0"
            )
        total: Tensor | None = None
        for share, part in parts(batch, size):
            before = self.buffers
            g = share * direction(w, part, memory)[0]
            self.buffers = kept(share, self.buffers, before)
            total = g if total is None else total + g
        assert total is not None  # as a batch has at least one part
        return total, memory


def _of_form(given: Any, found: Any) -> Any:
    """What a scan's body returned, with dicts in the order of what it was given; another form is refused."""
    if isinstance(given, dict) and isinstance(found, dict) and given.keys() == found.keys():
        return {name: _of_form(given[name], found[name]) for name in given}
    if isinstance(given, (tuple, list)) and type(given) is type(found) and len(given) == len(found):
        inner = [_of_form(one, other) for one, other in zip(given, found, strict=True)]
        return type(given)(*inner) if hasattr(given, "_fields") else type(given)(inner)
    if isinstance(given, (dict, tuple, list)) or isinstance(found, (dict, tuple, list)):
        raise SartorError(
            f"scan: its body was given {_form(given)} and returned {_form(found)}; it returns the same form"
        )
    return found


def _form(carry: Any) -> str:
    if isinstance(carry, dict):
        return f"a dict of {', '.join(map(str, carry))}"
    if isinstance(carry, (tuple, list)):
        return f"a {type(carry).__name__} of {len(carry)}"
    return "a tensor" if isinstance(carry, Tensor) else type(carry).__name__


def require_plain_sgd(local: Local, method: str, *, weight_decay: bool = True) -> None:
    """Refuse local optimisers under which a step is not η times the direction, and so a method's identity
    fails.

    Weight decay is an L2 term of the loss under plain SGD; ``weight_decay=False`` refuses it as well.
    """
    keys = ("optimizer", "momentum", "clip", *(() if weight_decay else ("weight_decay",)))
    refuse(local, method, "is defined for plain SGD steps", *keys)


def refuse(local: Local, method: str, why: str, *keys: str) -> None:
    """Refuse local settings with which a method would not be what it is, in one sentence.

    ``schedule_over`` stands for a learning rate that changes from step to step, ``mixup`` for mix-up among
    the augmentations.

    >>> from sartor.client.settings import Local
    >>> refuse(Local(clip=1.0), "fedprox", "has no norm to speak of", "clip")
    Traceback (most recent call last):
        ...
    sartor.errors.SettingError: local.clip = 1.0: fedprox has no norm to speak of; set local.clip to 0.0
    """
    plain = type(local)()
    if "mixup" in keys and any(isinstance(entry, MixUp) for entry in local.augment):
        raise SettingError(f"local.augment: mix-up: {method} {why}; leave it out")
    for key in keys:
        if key == "mixup":
            continue
        value, usual = getattr(local, key), getattr(plain, key)
        if value == usual or (key == "schedule_over" and local.steps_schedule is None):
            continue
        cure = f"set local.{key} to {usual!r}" if usual != () else f"leave local.{key} out"
        raise SettingError(f"local.{key} = {shown(value)}: {method} {why}; {cure}")
