"""What is done to samples before a client trains on them, drawn anew for every batch.

An augmentation gets a batch of one client and a key, and gives the batch that is trained on. It works where
the samples lie, is written without branching on data, and draws from its key alone, so that every engine
gives the same. What is evaluated, or goes into a gradient over all samples, is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sartor import nests, random
from sartor.errors import SartorError, SettingError
from sartor.extensions import Registry
from sartor.model.batch import Batch, Mixed
from sartor.model.draws import Drawing, Keyed
from sartor.nests import Nest
from sartor.settings import build, setting, shown, unknown

if TYPE_CHECKING:
    from sartor.client.settings import Local

Key = int | Tensor


@dataclass(frozen=True)
class Augmentation:
    """What is done to a batch; others extend it.

    >>> @dataclass(frozen=True)
    ... class Noise(Augmentation):
    ...     '''Normal noise.'''
    ...     scale: float = setting(0.1, "its deviation", low=0)
    ...     def apply(self, key, batch):
    ...         return batch._replace(x=batch.x + self.scale * torch.randn_like(batch.x))
    >>> Noise(0.0).apply(0, Batch(torch.ones(2, 3), torch.zeros(2))).x.sum()
    tensor(6.)
    """

    pictures: ClassVar[bool] = False
    """Whether it takes one array of pictures, [channels, height, width] each."""
    moves: ClassVar[bool] = False
    """Whether a target that lies on the picture would have to move too, and cannot."""

    def apply(self, key: Key, batch: Batch) -> Batch:
        """The batch to train on; what is random follows from the key, also by PyTorch's functions."""
        return batch


def _uniform(key: Key, place: int, x: Tensor) -> Tensor:
    """A number in [0, 1) for every sample."""
    return random.uniform(random.fold(key, place), len(x), x.device)


def _column(values: Tensor, x: Tensor) -> Tensor:
    """A number of every sample, against which its numbers broadcast."""
    return values.to(x.dtype).view(-1, *[1] * (x.dim() - 1))


@dataclass(frozen=True)
class Crop(Augmentation):
    """Pictures are shifted by a few places in both directions; what comes in is zero, or mirrored."""

    padding: int = setting(4, "places by which they are shifted at most", low=1)
    edges: str = setting("zero", "what comes in at the edges", choices=("zero", "mirrored"))
    pictures, moves = True, True

    def apply(self, key: Key, batch: Batch) -> Batch:
        """A window of the padded picture, each at a place of its own."""
        x, most = batch.x, 2 * self.padding + 1
        mirrored = self.edges == "mirrored"
        padded = x if mirrored else F.pad(x, [self.padding] * 4)
        for axis in (2, 3):
            first, last = (_uniform(key, axis, x) * most).long(), x.shape[axis] - 1
            places = first[:, None] + torch.arange(x.shape[axis], device=x.device)
            if mirrored:  # at both edges, which are not repeated
                places = last - (last - (places - self.padding).abs()).abs()
            shape = [-1, 1, 1, 1]
            shape[axis] = x.shape[axis]
            wanted = [*padded.shape]
            wanted[axis] = x.shape[axis]
            padded = padded.gather(axis, places.view(shape).expand(wanted))
        return batch._replace(x=padded)


@dataclass(frozen=True)
class Flip(Augmentation):
    """Pictures are mirrored, left to right, and so is a target that lies on them."""

    chance: float = setting(0.5, "how probable it is", low=0, high=1)
    pictures = True

    def apply(self, key: Key, batch: Batch) -> Batch:
        """The picture or its mirror image."""
        mirrored = _uniform(key, 0, batch.x) < self.chance

        def turned(values: Tensor) -> Tensor:
            return torch.where(mirrored.view(-1, *[1] * (values.dim() - 1)), values.flip(-1), values)

        on_picture = isinstance(batch.y, Tensor) and batch.y.shape[-2:] == batch.x.shape[-2:]
        return batch._replace(x=turned(batch.x), y=turned(batch.y) if on_picture else batch.y)


@dataclass(frozen=True)
class Colour(Augmentation):
    """Brightness, contrast and saturation of pictures change, each by an amount up to its setting."""

    brightness: float = setting(0.2, "added to all numbers of a picture, at most", low=0)
    contrast: float = setting(0.2, "share by which differences from its mean grow or shrink, at most", low=0)
    saturation: float = setting(0.2, "the same for differences of a pixel's channels", low=0)
    pictures = True

    def apply(self, key: Key, batch: Batch) -> Batch:
        """The same picture in other colours."""
        x = batch.x
        light, spread, colour = (
            _column(most * (2 * _uniform(key, place, x) - 1), x)
            for place, most in enumerate((self.brightness, self.contrast, self.saturation))
        )
        grey = x.mean(dim=1, keepdim=True)
        x = grey + (1 + colour) * (x - grey)
        mean = x.mean(dim=(1, 2, 3), keepdim=True)
        return batch._replace(x=mean + light + (1 + spread) * (x - mean))


@dataclass(frozen=True)
class CutOut(Augmentation):
    """A square of every picture becomes zero; it may reach over the edge."""

    size: int = setting(8, "its side", low=1)
    pictures, moves = True, True

    def apply(self, key: Key, batch: Batch) -> Batch:
        """The picture without a square at a place of its own."""
        x, inside = batch.x, []
        for axis in (2, 3):
            first = (_uniform(key, axis, x) * x.shape[axis]).long() - self.size // 2
            apart = torch.arange(x.shape[axis], device=x.device) - first[:, None]
            inside.append((apart >= 0) & (apart < self.size))
        cut = inside[0][:, None, :, None] & inside[1][:, None, None, :]
        return batch._replace(x=torch.where(cut, 0, x))


@dataclass(frozen=True)
class MixUp(Augmentation):
    """Every sample is mixed with another of its batch, and its loss is that of both targets in these shares.

    The share of a batch is drawn from Beta(α, α). It is the last of a list.
    """

    alpha: float = setting(0.2, "how even the shares are", symbol="α", above=0)

    def apply(self, key: Key, batch: Batch) -> Batch:
        """λ x + (1 − λ) x', where x' lies so many places further among the real samples."""
        length = nests.length(batch.y)
        like = nests.leaves(batch.y)[0]
        size = (
            batch.size if isinstance(batch.size, Tensor) else torch.full((), batch.size, device=like.device)
        )
        real = size.long().clamp(min=1)
        draws = random.uniform(random.fold(key, 0), 2, like.device)
        shift = 1 + (draws[0] * (real - 1)).long()
        other = (torch.arange(length, device=like.device) + shift) % real
        share = beta_quantile(self.alpha, draws[1])

        def mixed(leaf: Tensor) -> Tensor:
            return share.to(leaf.dtype) * leaf + (1 - share).to(leaf.dtype) * leaf[other]

        shares, importance = share.expand(length), batch.importance
        if importance is not None:  # each of the two losses counts as much as its sample does
            one, importance = shares * importance, mixed(importance)
            shares = torch.where(importance > 0, one / importance, shares)
        if batch.weight is not None:
            shares = shares.to(batch.weight.dtype)
        x, y = nests.mapped(mixed, batch.x), Mixed(batch.y, nests.rows(batch.y, other), shares)
        return batch._replace(x=x, y=y, importance=importance)


POINTS = 512
"""Places at which the distribution of shares is known; between them it is interpolated."""


@cache
def _quantiles(alpha: float) -> Tensor:
    """v = x^α at even steps of the probability from 0 to 1/2 of Beta(α, α), where v is smooth also at 0.

    With v the density u^(α−1) (1 − u)^(α−1) du is (1 − v^(1/α))^(α−1) dv / α.
    """
    v = np.linspace(0, 0.5**alpha, 16 * POINTS)
    density = (1 - v ** (1 / alpha)) ** (alpha - 1)
    steps = np.diff(v) * (density[1:] + density[:-1]) / 2
    reached = np.concatenate([[0], np.cumsum(steps)])
    return torch.from_numpy(np.interp(np.linspace(0, reached[-1], POINTS + 1), reached, v))


def beta_quantile(alpha: float, probability: Tensor) -> Tensor:
    """The number below which Beta(α, α) lies with this probability.

    >>> beta_quantile(1.0, torch.tensor([0.25, 0.5, 0.9], dtype=torch.float64)).round(decimals=6).tolist()
    [0.25, 0.5, 0.9]
    """
    table = _quantiles(alpha).to(probability.device)
    upper = probability > 0.5
    place = 2 * POINTS * torch.where(upper, 1 - probability, probability)
    first = place.long().clamp(max=POINTS - 1)
    v = table[first] + (place - first) * (table[first + 1] - table[first])
    x = v ** (1 / alpha)
    return torch.where(upper, 1 - x, x)


AUGMENTATIONS: Registry[type] = Registry(
    "sartor.augmentations",
    "augmentation",
    {"crop": Crop, "flip": Flip, "colour": Colour, "cut-out": CutOut, "mix-up": MixUp},
)
"""The augmentations by name, those of users and of installed packages included."""
T = TypeVar("T")


def register_augmentation(name: str) -> Callable[[T], T]:
    """Make an augmentation known by name for ``local.augment``: an Augmentation, or a function of inputs.

    A function gets the inputs of a batch of one client and gives others of the same shape; what it draws by
    PyTorch's functions is drawn from the keyed streams.

    >>> @register_augmentation("jitter")
    ... def jitter(x):
    ...     return x + 0.1 * torch.randn_like(x)
    >>> made("jitter", "local.augment").apply(0, Batch(torch.zeros(2, 3), torch.zeros(2))).x.shape
    torch.Size([2, 3])
    >>> AUGMENTATIONS.remove("jitter")
    """

    def added(thing: T) -> T:
        known: Any = thing
        if isinstance(known, type) and is_dataclass(known) and issubclass(known, Augmentation):
            AUGMENTATIONS.add(name, known)
        elif callable(known) and not isinstance(known, type):
            described = {
                "apply": lambda self, key, batch: batch._replace(x=known(batch.x)),
                "__doc__": known.__doc__ or f"The function {known.__name__}.",
                "__module__": known.__module__,
            }
            AUGMENTATIONS.add(
                name,
                make_dataclass(known.__name__, [], bases=(Augmentation,), namespace=described, frozen=True),
            )
        else:
            raise SartorError(
                f"augmentation {name!r}: expected a function, or an Augmentation that is a dataclass"
            )
        return thing

    return added


def made(given: Any, where: str) -> Augmentation:
    """An augmentation from its name, or from a table with its name and settings."""
    if isinstance(given, Augmentation):
        return given
    table = {"name": given} if isinstance(given, str) else given
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        known = ", ".join(AUGMENTATIONS)
        raise SettingError(
            f"{where}: expected a name, or a table with a name, got {shown(given)}; known: {known}"
        )
    if table["name"] not in AUGMENTATIONS:
        raise unknown(where, table["name"], AUGMENTATIONS, what="name")
    own = {key: value for key, value in table.items() if key != "name"}
    found: Augmentation = build(AUGMENTATIONS[table["name"]], own, where)
    return found


def all_made(given: Sequence[Any]) -> tuple[Augmentation, ...]:
    """The augmentations of a list, in order."""
    found = tuple(made(entry, f"local.augment[{place}]") for place, entry in enumerate(given))
    if any(isinstance(entry, MixUp) for entry in found[:-1]):
        raise SettingError("local.augment: mix-up mixes what the others give; name it last, and once")
    return found


def written(augmentation: Augmentation) -> dict[str, Any]:
    """An augmentation as the table that it is made from."""
    name = next(name for name, kind in AUGMENTATIONS.items() if kind is type(augmentation))
    return {"name": name, **{entry.name: getattr(augmentation, entry.name) for entry in fields(augmentation)}}


def augmented(augmentations: Sequence[Augmentation], batch: Batch, stream: str) -> Batch:
    """The batch that is trained on, in a scan whose batches come from a stream."""
    for place, augmentation in enumerate(augmentations):
        key = random.stream(0, f"augment {stream}", batch.key, place)
        with Keyed(Drawing(key)):
            batch = augmentation.apply(key, batch)
    return batch


def check_augment(local: Local, x: Nest, y: Nest) -> None:
    """Refuse augmentations that such samples do not allow."""
    first, targets = nests.mapped(lambda leaf: leaf[:3].cpu(), (x, y))
    few = Batch(first, targets, None, 1)
    for augmentation in local.augment:
        name = written(augmentation)["name"]
        place = f"local.augment: {name}"
        one = isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point()
        if augmentation.pictures and not one:
            raise SettingError(
                f"{place} is for pictures, one array [channels, height, width] of floats; samples are "
                f"{nests.words(x)}; give a function of your own by register_augmentation"
            )
        if augmentation.moves and isinstance(y, Tensor) and y.dim() > 2 and y.shape[-2:] == x.shape[-2:]:
            raise SettingError(
                f"{place} leaves no target where nothing of the picture is left; targets are {nests.words(y)}"
            )
        if isinstance(augmentation, MixUp) and not all(leaf.is_floating_point() for leaf in nests.leaves(x)):
            raise SettingError(f"{place} mixes floats; samples are {nests.words(x)}")
        try:
            with torch.no_grad():
                after = augmented([augmentation], few, "batch")
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise SettingError(f"{place} cannot take samples of {nests.words(x)}: {reason}") from error
        if nests.form(after.x) != nests.form(few.x) or nests.length(after.x) != nests.length(few.x):
            raise SettingError(
                f"{place} turns samples of {nests.words(x)} into {nests.words(after.x)}, of another form"
            )
