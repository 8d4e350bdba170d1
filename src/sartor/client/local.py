"""What a client can do: go through its samples in batches, take gradients, descend, evaluate.

A client function gets a :class:`Client` and calls its methods; it is pure and written for one client,
whatever engine runs it. The one way to the client's samples is :meth:`Client.scan`, a fold over batches;
everything else is made of scans. An engine decides how a scan is carried out: one client after the other,
or a step of many clients at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from sartor import random
from sartor.client.law import Law
from sartor.errors import SettingError
from sartor.model.optimizers import Optimizer, adam, chain, decay, momentum
from sartor.model.task import Batch, Change, Frozen, LossAndPass, Pass, Penalty, Task
from sartor.nests import Nest

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

    def width(self, most: int) -> int:
        """Samples per batch, where the largest client has ``most``."""
        return max(1, min(self.size, most) if self.size else most)

    def per_epoch(self, n: Any, width: int) -> Any:
        """Batches of one pass over n samples; for integers, arrays and tensors."""
        return (n + width - 1) // width

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

    @property
    def n(self) -> Tensor:
        """The number of training samples."""
        return self.counts["train"]

    def stream(self, name: str) -> int | Tensor:
        """The key of this client's stream of that name in this round: what is random follows from it."""
        return random.stream(self._seed, name, self.round, self.number)

    # Quantities of one batch ----------------------------------------------------------------------

    def grad(
        self,
        w: Tensor,
        batch: Batch,
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
        gradient, after = self.task.grad_and_buffers(
            w, batch, self.buffers, self._frozen or frozen, penalty, change
        )
        if track:
            self.buffers = after
        return gradient

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

        ``carry`` is a tensor or a tuple or dict of tensors.
        """
        result: Carry = self._scan(self, body, carry, batches)
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
        rows = model.unbind() if isinstance(model, Tensor) and model.dim() == 2 else model
        several = isinstance(rows, Sequence)
        models: Sequence[Any] = rows if isinstance(rows, Sequence) else [rows]
        functions = [one if callable(one) else partial(self.outputs, one) for one in models]
        known = self.task.objective.tallies(self.task.width)
        counted = {name: known[name] for name in tallies if name in known}
        like = self.counts[split]
        zeros = {"loss": like.new_zeros((), dtype=self.task.dtype)}
        zeros |= {name: like.new_zeros(tally.shape, dtype=tally.dtype) for name, tally in counted.items()}

        def add(carry: list[dict[str, Tensor]], batch: Batch) -> list[dict[str, Tensor]]:
            return [
                self._add(total, outputs(batch.x), batch, counted)
                for total, outputs in zip(carry, functions, strict=True)
            ]

        totals = self.scan(add, [dict(zeros) for _ in models], Batches(split, self._evaluation_batch))
        if not several:
            return {**totals[0], "n": like}
        return {**{name: torch.stack([total[name] for total in totals]) for name in zeros}, "n": like}

    def _add(
        self, total: dict[str, Tensor], result: Any, batch: Batch, counted: dict[str, Tally]
    ) -> dict[str, Tensor]:
        """The sums with what one batch adds to them."""
        loss = batch.mean(self.task.loss_function(result, batch.y)) * batch.size
        added = {name: tally.count(result, batch.y, batch.weight) for name, tally in counted.items()}
        return {name: total[name] + value for name, value in {"loss": loss, **added}.items()}

    # The local loop -------------------------------------------------------------------------------

    def batches(
        self,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        stream: str = "batch",
        split: str = "train",
        times: int = 1,
    ) -> Batches:
        """The shuffled training batches of the ``local`` settings, or so many epochs or steps of them."""
        law = None
        if epochs is None and steps is None:
            epochs, steps, law = self.local.most_epochs, self.local.steps, self.local.law
        size = self.local.batch
        return Batches(split, size, epochs or 0, steps or 0, True, stream, times, law)

    def epochs(self, batches: Batches) -> Tensor | None:
        """The epochs that are drawn for this client in this round; None where all do as many."""
        return None if batches.law is None else batches.law.epochs(self._seed, self.round, self.number)

    def steps(self, *, epochs: int | None = None, steps: int | None = None) -> Tensor:
        """K_i: how many steps :meth:`descend` takes with these arguments."""
        batches = self.batches(epochs=epochs, steps=steps)
        count: Tensor = batches.count(self.n, self.epochs(batches))
        return count

    def rate(self, lr: float | Tensor) -> float | Tensor:
        """η of this round: rounds count from 1, and ``local.lr_decay`` acts after each."""
        decay = self.local.lr_decay
        if decay == 1.0:
            return lr
        factor = torch.full_like(self.round, decay, dtype=self.task.dtype)
        # Work that a client does again in one round has another number above these bits.
        return lr * torch.pow(factor, ((self.round & 0xFFFFFFFF) - 1).clamp(min=0))

    def work(self, lr: float | Tensor) -> Tensor:
        """Σ_k η_k = K_i η: the rates of all steps that :meth:`descend` takes, added up."""
        return self.steps().to(self.task.dtype) * self.rate(lr)

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
    ) -> Tensor:
        """Local training from ``w``: K_i steps against ``direction(w_k, batch)``, by default the gradient.

        The ``local`` settings say how many steps, which optimiser, momentum and weight decay; ``epochs`` or
        ``steps`` override the amount. ``updates`` steps are taken on every batch. ``only`` is a boolean
        vector: what is false in it does not move, not by momentum or weight decay either. The optimiser
        starts afresh each time. ``split`` says on which samples; ``union`` is for
        :meth:`~sartor.federation.federation.Federation.together` alone.
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
    ) -> tuple[Tensor, Carry]:
        """:meth:`descend` with a direction that hands a ``memory`` on to the next step; both are returned.

        ``times`` multiplies the number of steps, for methods that need several batches for one.
        """
        rate = self.rate(lr)
        optimizer = _optimizer(self.local)
        carry: dict[str, Any] = {"w": w, "slots": optimizer.init(w), "memory": memory}
        if self.buffers is not None:
            carry["buffers"] = self.buffers

        def body(carry: dict[str, Any], batch: Batch) -> dict[str, Any]:
            w_k, slots, memory = carry["w"], carry["slots"], carry["memory"]
            self.buffers = carry.get("buffers")
            for _ in range(updates):
                g, memory = direction(w_k, batch, memory)
                step, slots = optimizer.update(g, slots, w_k)
                moved = torch.sub(w_k, step, alpha=rate) if isinstance(rate, float) else w_k - rate * step
                w_k = moved if only is None else torch.where(only, moved, w_k)
            after = {"w": w_k, "slots": slots, "memory": memory}
            return after if self.buffers is None else {**after, "buffers": self.buffers}

        batches = self.batches(epochs=epochs, steps=steps, stream=stream, split=split, times=times)
        carry = self.scan(body, carry, batches)
        self.buffers = carry.get("buffers")
        return carry["w"], carry["memory"]


def require_plain_sgd(local: Local, method: str, *, weight_decay: bool = True) -> None:
    """Refuse local optimisers under which a step is not η times the direction, and so a method's identity
    fails.

    Weight decay is an L2 term of the loss under plain SGD; ``weight_decay=False`` refuses it as well.
    """
    wrong = [
        ("optimizer", local.optimizer, "sgd", local.optimizer != "sgd"),
        ("momentum", local.momentum, 0, local.momentum != 0),
        ("weight_decay", local.weight_decay, 0, local.weight_decay != 0 and not weight_decay),
    ]
    for key, value, plain, refused in wrong:
        if refused:
            cure = f"set local.{key} to {plain!r}"
            raise SettingError(f"local.{key} = {value!r}: {method} is defined for plain SGD steps; {cure}")


def _optimizer(local: Local) -> Optimizer:
    """The local optimiser: weight decay, then heavy-ball momentum or Adam."""
    parts = [decay(local.weight_decay)] if local.weight_decay else []
    if local.optimizer == "adam":
        parts.append(adam(local.momentum or 0.9, 0.999, 1e-8, corrected=True))
    elif local.momentum:
        parts.append(momentum(local.momentum))
    return chain(*parts)
