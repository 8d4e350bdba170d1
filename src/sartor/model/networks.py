"""Networks by name: those of the papers, and what makes any of them, or a user's own, into a task.

Each is a frozen dataclass of its settings with ``build(shape, classes)``; those for images, sequences and
tables that people use beside the papers' have modules of their own. The initial weights are PyTorch's own
initialisation, drawn from the keyed stream (seed, "initial").
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from sartor import nests, random
from sartor.errors import SartorError, SettingError
from sartor.extensions import Registry, call, find_function
from sartor.memory import free_memory
from sartor.model.adapters import with_adapters
from sartor.model.objectives import Classification, Objective
from sartor.model.sequences import LSTM, Transformer
from sartor.model.tables import Table
from sartor.model.task import Task
from sartor.model.vision import ResNet8, ResNet18, ResNet20, ViT
from sartor.nests import Nest
from sartor.settings import setting

Shape = tuple[int, ...]
Built = TypeVar("Built")


@dataclass(frozen=True)
class Softmax:
    """Softmax regression: one linear layer on the flattened input."""

    head: ClassVar[str | None] = None

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """The module for inputs of this shape."""
        return nn.Sequential(nn.Flatten(), nn.Linear(_size(shape), classes))


@dataclass(frozen=True)
class MLP:
    """One hidden layer with ReLU (64 units: the network of DiversiFed on Fashion-MNIST)."""

    hidden: int = setting(64, "units of the hidden layer", low=1)
    head: ClassVar[str | None] = "output"

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """The module for inputs of this shape."""
        return _named(
            flatten=nn.Flatten(),
            hidden=nn.Linear(_size(shape), self.hidden),
            relu=nn.ReLU(),
            output=nn.Linear(self.hidden, classes),
        )


@dataclass(frozen=True)
class CNN:
    """McMahan's CNN: 5×5 convolutions of 32 and 64 channels with 2×2 max pooling, a dense layer of 512."""

    padding: int = setting(
        2, "zeros around images: 2 keeps their size, as in the original; PFLlib has 0", low=0, high=2
    )
    head: ClassVar[str | None] = "output"

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """The module for images of this shape."""
        return _convolutional("cnn", shape, classes, channels=(32, 64), padding=self.padding, dense=(512,))


@dataclass(frozen=True)
class LeNet:
    """DiversiFed's LeNet: 5×5 convolutions with 6 and 16 channels, pooling, dense layers of 120 and 84."""

    head: ClassVar[str | None] = "output"

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """The module for images of this shape; convolutions are unpadded."""
        return _convolutional("lenet", shape, classes, channels=(6, 16), padding=0, dense=(120, 84))


@dataclass(frozen=True)
class CNNSPFL:
    """SPFL's CNN: 5×5 convolutions with 20 and 50 channels, pooling, a dense layer of 512."""

    head: ClassVar[str | None] = "output"

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """The module for images of this shape; convolutions are unpadded."""
        return _convolutional("cnn-spfl", shape, classes, channels=(20, 50), padding=0, dense=(512,))


@dataclass(frozen=True)
class Custom:
    """A model given in Python: a stored experiment can name it, but not make it."""

    head: ClassVar[str | None] = None

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """Refuse: the module itself is not in the experiment."""
        raise SettingError("model.name = 'custom': the model was given in Python; pass it again as model=...")


CUSTOM = "custom"
"""The name of a model that has none: one given in Python, or by ``model.path``."""

MODELS: Registry[type] = Registry(
    "sartor.models",
    "model",
    {
        "softmax": Softmax,
        "mlp": MLP,
        "cnn": CNN,
        "lenet": LeNet,
        "cnn-spfl": CNNSPFL,
        "resnet8": ResNet8,
        "resnet18": ResNet18,
        "resnet20": ResNet20,
        "vit": ViT,
        "lstm": LSTM,
        "transformer": Transformer,
        "table": Table,
        CUSTOM: Custom,
    },
)
"""The networks by name, those of users and of installed packages included."""

Model = TypeVar("Model", bound=type)


def register_model(name: str) -> Callable[[Model], Model]:
    """Make a network known as ``model.name``: a frozen dataclass of its settings with ``build``.

    ``build(shape, classes)`` gives the module for inputs of a shape; its initial weights are drawn from the
    run's seed. ``head``, if it has one, names the module that is a personal head.

    >>> @register_model("broad")
    ... @dataclass(frozen=True)
    ... class Broad:
    ...     width: int = setting(1000, "units of the layer", low=1)
    ...     head: ClassVar[str | None] = "2"
    ...
    ...     def build(self, shape: Shape, classes: int) -> nn.Module:
    ...         first, last = nn.Linear(shape[0], self.width), nn.Linear(self.width, classes)
    ...         return nn.Sequential(first, nn.ReLU(), last)
    >>> make_task("broad", MODELS["broad"](width=4), (3,), 2, seed=0).size
    26
    >>> MODELS.remove("broad")
    """

    def added(cls: Model) -> Model:
        if not is_dataclass(cls) or not callable(getattr(cls, "build", None)):
            raise SartorError(f"model {name!r}: expected a dataclass of settings with build(shape, classes)")
        MODELS.add(name, cls)
        return cls

    return added


def about(kind: type) -> str:
    """What a network is, in a line."""
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def build_task(
    choice: ModelChoice, x: Nest, y: Nest, classes: int | None, seed: int, objective: Objective | None = None
) -> Task:
    """The task of what an experiment says of its model, for such samples: by name, or a function in a file.

    A function is given the shape of a sample (of every leaf, in the form of the sample) and how many outputs
    the objective needs, as ``classes``.
    """
    objective = Classification() if objective is None else objective
    if choice.path is None:
        shape = nests.mapped(lambda leaf: tuple(leaf.shape[1:]), x)
        choice = settled(choice, [x], y)
        one = isinstance(shape, tuple) and all(isinstance(size, int) for size in shape)
        if not one and not getattr(choice.settings, "nested", False):
            raise SettingError(
                f"model.name = {choice.name!r}: takes one array, samples are {nests.words(x)}; give a model "
                "of your own"
            )
        outputs = objective.outputs(y, classes)
        named = choice.name, choice.settings, shape, outputs, seed, objective, classes
        return make_task(*named, adapters=choice.adapters)
    head = None if choice.head is None else str(choice.head)
    build, what = find_function(choice.path, "model.path"), f"model.path = {choice.path!r}"
    factory = Factory(build, head, objective, Path(choice.path).name, what, choice.adapters)
    return factory.task(x, y, classes, seed)


@dataclass(frozen=True)
class Factory:
    """A model that is built anew for every run, with what it draws drawn from the run's seed.

    ``build`` is a class or a function that gives an ``nn.Module`` or a :class:`Task`; it is told the
    ``shape`` of a sample and how many outputs (``classes``) are needed, where it declares them.
    """

    build: Callable[..., Any]
    head: str | None = None
    objective: Objective | None = None
    name: str = ""
    what: str = "model"
    """What it is called in messages."""
    adapters: int = 0
    """The rank of adapters that it gets; 0: none."""

    def task(self, x: Nest, y: Nest, classes: int | None, seed: int) -> Task:
        """The task for such samples under a seed.

        >>> net = Factory(lambda: nn.Linear(2, 2))
        >>> starts = [net.task(torch.zeros(1, 2), torch.zeros(1).long(), 2, s).initial() for s in (0, 0, 1)]
        >>> bool((starts[0] == starts[1]).all()), bool((starts[0] == starts[2]).any())
        (True, False)
        """
        objective = Classification() if self.objective is None else self.objective
        shape = nests.mapped(lambda leaf: tuple(leaf.shape[1:]), x)
        outputs = objective.outputs(y, classes)

        def build() -> Any:
            made = call(self.build, self.what, shape=shape, classes=outputs)
            return adapted(made, self.adapters, self.head)

        made = seeded(build, seed)
        if not isinstance(made, (nn.Module, Task)):
            raise SettingError(f"{self.what}: expected an nn.Module, it gives a {type(made).__name__}")
        name = self.name or type(made).__name__
        if isinstance(made, nn.Module):
            made = Task(made, objective=objective, classes=classes, head=self.head, name=name)
        made.seeded = True
        return made


def settled(choice: ModelChoice, samples: Sequence[Nest], y: Nest) -> ModelChoice:
    """The choice with what samples say of settings that were left open, such as how many tokens there are."""
    if not hasattr(choice.settings, "seen"):
        return choice
    return replace(choice, settings=choice.settings.seen(samples, y))


def check_told(choice: ModelChoice, why: str) -> None:
    """Refuse settings that are left to samples where these cannot say it."""
    for key in getattr(choice.settings, "told", ()):
        if not getattr(choice.settings, key):
            raise SettingError(f"model.{key}: say it, as {why}")


def make_task(
    name: str,
    settings: Any,
    shape: Any,
    outputs: int | None,
    seed: int,
    objective: Objective | None = None,
    classes: int | None = None,
    adapters: int = 0,
) -> Task:
    """The task of a named model on inputs of a shape, with initial weights that depend on the seed alone.

    ``outputs`` are its classes where no objective says otherwise.
    """
    shape = shape if isinstance(shape, dict) else tuple(shape)
    if outputs is None:
        raise SettingError(
            f"model.name = {name!r}: classifies, but the data has no classes; give a model of your own, or "
            "name the objective"
        )
    check_size(name, settings, shape, outputs)
    head = getattr(settings, "head", None)
    module = seeded(lambda: adapted(settings.build(shape, outputs), adapters, head), seed)
    if not isinstance(module, nn.Module):
        raise SettingError(f"model {name}: build() gives a {type(module).__name__}, expected an nn.Module")
    known = outputs if objective is None else classes
    task = Task(module, objective=objective, classes=known, head=head, name=name)
    task.drawn = task.seeded = True
    if _ours(settings):
        task.alike(repr((settings, shape, outputs, adapters)))
    return task


def _ours(settings: Any) -> bool:
    return type(settings).__module__.startswith("sartor.")


def adapted(made: Any, rank: int, head: str | None) -> Any:
    """A module with adapters where a rank is set; its head, where it has one, is trained as it is."""
    if not rank:
        return made
    if isinstance(made, Task):
        raise SettingError("model.adapters: a Task has what it trains; put adapters into its module")
    return with_adapters(made, rank, () if head is None else (head,)) if isinstance(made, nn.Module) else made


def check_size(name: str, settings: Any, shape: Any, outputs: int) -> None:
    """Refuse a network of ours that does not fit into memory, before it is made."""
    if not _ours(settings):  # whoever adds a network may count on one call
        return
    with torch.device("meta"):
        module = settings.build(shape, outputs)
    needed = sum(value.nbytes for value in module.state_dict().values())
    free = free_memory()
    if needed > free:
        raise SettingError(
            f"model {name}: has {needed / 1e9:.1f} GB of parameters for {outputs} classes, and "
            f"{free / 1e9:.1f} GB of memory are free; take a smaller one"
        )


def seeded(build: Callable[[], Built], seed: int, index: int = 0) -> Built:
    """What ``build`` makes with PyTorch's generator set from the stream (seed, "initial", index), then
    restored.
    """
    with torch.random.fork_rng(devices=[]):
        random.seed_torch(random.integer(random.stream(seed, "initial", index)))
        return build()


def _size(shape: Shape) -> int:
    return int(torch.Size(shape).numel())


def _named(**layers: nn.Module) -> nn.Sequential:
    sequence = nn.Sequential()
    for name, layer in layers.items():
        sequence.add_module(name, layer)
    return sequence


def _convolutional(
    name: str, shape: Shape, classes: int, channels: tuple[int, int], padding: int, dense: tuple[int, ...]
) -> nn.Module:
    """Two 5×5 convolutions with pooling, then dense layers."""
    if len(shape) != 3:
        raise SettingError(
            f"model.name = {name!r}: needs images [channels, height, width], the data has {list(shape)}"
        )
    height, width = shape[1:]
    for _ in channels:
        height, width = (height - 4 + 2 * padding) // 2, (width - 4 + 2 * padding) // 2
    if min(height, width) < 1:
        raise SettingError(
            f"model.name = {name!r}: images of {shape[1]}×{shape[2]} are too small for it; "
            "take mlp, softmax or resnet8"
        )
    layers: dict[str, nn.Module] = {}
    previous = shape[0]
    for number, width_ in enumerate(channels, 1):
        layers[f"convolution{number}"] = nn.Conv2d(previous, width_, 5, padding=padding)
        layers[f"relu{number}"] = nn.ReLU()
        layers[f"pool{number}"] = nn.MaxPool2d(2)
        previous = width_
    layers["flatten"] = nn.Flatten()
    previous = previous * height * width
    for number, width_ in enumerate(dense, 1):
        layers[f"dense{number}"] = nn.Linear(previous, width_)
        layers[f"activation{number}"] = nn.ReLU()
        previous = width_
    layers["output"] = nn.Linear(previous, classes)
    return _named(**layers)


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The network, by name with its settings, and what happens to its buffers."""

    name: str = setting("mlp", "the network")
    settings: Any
    path: str | None = setting(
        None, "own network instead of `name`: a function in a file, as in net.py:build"
    )
    head: str | int | None = setting(
        None, "path of the module that is the head of an own network (model.path)"
    )
    adapters: int = setting(
        0, "rank of low-rank adapters (LoRA) at its dense layers, which are then frozen; 0: none", low=0
    )
    buffers: str = setting(
        "auto",
        "float buffers such as BatchNorm statistics: averaged, kept by each client or frozen",
        choices=("auto", "average", "local", "freeze"),
    )
