"""A model as a vector: any ``nn.Module`` becomes functions of one flat vector ``w``.

Papers write ``w ∈ R^d``; so do the algorithms here. :class:`Task` lays a module's parameters into one
vector and its float buffers (BatchNorm's running statistics) into a second one, and gives loss, gradient
and predictions as functions of them. Parameters are views of ``w``: nothing is copied. Named slices of the
vector, ``task.parts``, are declared by module path. Integer buffers stay as they were in the module; so do
float buffers that the vector cannot hold, as a mask of minus infinity, which a pass must not change.

What a client's pass must not share with others, as BatchNorm's statistics and what is drawn, is seen to in
``layers.py`` and ``draws.py``; what only trying a model shows, in ``trials.py``.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.func import grad
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves, tree_map

from sartor import nests, random
from sartor.errors import NotStackable, SartorError, SettingError
from sartor.kernels.dense import Dense
from sartor.kernels.norms import Norms, serves_lanes
from sartor.model import trials
from sartor.model.batch import Batch, Mixed, Pass
from sartor.model.draws import Keyed, inside_transform
from sartor.model.layers import (
    BatchNorm,
    Change,
    Conv2d,
    Dropout,
    Frozen,
    Mode,
    note_features,
    shareable,
    tensor_names,
    told,
)
from sartor.model.means import is_mean
from sartor.model.objectives import Classification, Loss, Objective, Own, OwnLoss, objective_of
from sartor.model.parts import Layout, Part, below, gaps, merged
from sartor.model.placed import Placed
from sartor.model.precision import half_precision
from sartor.nests import Nest

if TYPE_CHECKING:
    from sartor.model.groups import Groups

Penalty = Callable[[Tensor], Tensor]
"""From the features (the head's input) of a batch to one number per sample, added to the losses."""


LossAndPass = Callable[[Tensor], tuple[Tensor, Pass]]
"""From a vector to a loss and the pass it was computed from."""


Reasons: TypeAlias = dict[Hashable, tuple[str | None, bool]]
_REASONS: defaultdict[Hashable, Reasons] = defaultdict(dict)
"""Those of networks that are built again and again."""


class Task:
    """A module, what it is trained for and named parts, as functions of flat vectors.

    ``module`` is taken as it is: its values are the initial model. It is called with a sample's tensor; with
    the entries of a tuple, one after the other; with those of a dict by name, where its ``forward`` takes
    these names, else with the dict. ``objective`` is a name, an :class:`Objective` or a loss function;
    ``loss`` is such a function too, which gives one number per sample or their mean. ``classes`` are those of
    the data where they are not given, or more, if the model tells more apart. ``head`` names the module whose
    input are the features (``body`` is then everything else); ``stages`` names groups of module paths that
    together cover the model.

    >>> task = Task(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), head="2")
    >>> task.size, task.parts["head"].size
    (67, 27)
    >>> task = Task(nn.Linear(4, 1), objective="regression")
    >>> task.losses(task.initial() * 0, Batch(torch.zeros(2, 4), torch.tensor([1.0, 3.0]))).tolist()
    [1.0, 9.0]
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        objective: str | Objective | Loss | None = None,
        loss: Loss | None = None,
        classes: int | None = None,
        head: str | None = None,
        stages: Mapping[str, Iterable[str]] | None = None,
        name: str = "custom",
    ) -> None:
        self.name = name
        self.drawn = False
        """Whether the initial numbers were drawn for this run, and so cannot have been trained."""
        self.seeded = False
        """Whether it was built for a run's seed; else all seeds start from the numbers that it came with."""
        self.unkeyed = False
        """Whether a pass draws what the keyed streams do not reach, as :meth:`check_draws` finds."""
        self._keyed: bool | None = None
        """Whether a pass draws by functions rather than by layers; None: not looked at."""
        self._called = False
        """Whether one has, so far."""
        self.precision = "model"
        """What numbers are computed in; see :meth:`in_precision`."""
        self.groups: Groups | None = None
        """What clients have instead, where they have models of their own."""
        self._common: Task | None = None
        if loss is not None and objective is not None:
            raise SartorError(f"model {name}: a loss and an objective, which has one; give one of them")
        self.objective = OwnLoss(loss) if loss is not None else objective_of(objective or Classification())
        self.classes = self.width = classes
        """How many classes there are, and how many of them, or of labels or numbers, are counted apart."""
        self._undone: bool | None = None
        """Whether a loss that is one number per batch is the mean of its samples'; None: not looked at."""
        self.head_path = head
        lazy = [key for key, value in module.named_parameters() if isinstance(value, UninitializedParameter)]
        if lazy:
            raise SartorError(f"model {name}: {lazy[0]!r} has no shape yet; run the module once on a sample")
        parameters = {key: value for key, value in module.named_parameters() if value.requires_grad}
        if not parameters:
            raise SartorError(f"model {name}: it has no parameters that take a gradient: nothing to train")
        kinds = {value.dtype for value in parameters.values()}
        if len(kinds) > 1 or not next(iter(kinds)).is_floating_point:
            raise SartorError(
                f"model {name}: parameters must share one float type, found {sorted(map(str, kinds))}"
            )
        self.dtype = next(iter(kinds))
        self._module = shareable(module, name)
        self._norms = {
            path: layer
            for path, layer in self._module.named_modules()
            if isinstance(layer, (BatchNorm, nn.modules.batchnorm._BatchNorm))
        }
        buffers = dict(module.named_buffers())
        running = {key for path in self._norms for key in tensor_names(path, "running_mean", "running_var")}
        floats = {
            key: value
            for key, value in buffers.items()
            if value.is_floating_point() and (key in running or _holds(self.dtype, value))
        }
        fixed = {key: value for key, value in buffers.items() if key not in floats}
        self._tables = [key for key, value in fixed.items() if value.is_floating_point()]
        """Float buffers that the vector cannot hold."""
        fixed |= {key: value for key, value in module.named_parameters() if not value.requires_grad}
        self._constants = {key: value.detach().clone() for key, value in fixed.items()}
        self._constants_by_device: dict[torch.device, dict[str, Tensor]] = {}
        self._reasons: Reasons = {}
        """Why the model cannot be stacked, if so, by the kind of samples."""
        self._parameters, self._buffers = Layout(parameters), Layout(floats)
        self.size, self.buffer_size = self._parameters.size, self._buffers.size
        self._initial_w = self._parameters.flatten(parameters).to(self.dtype)
        self._initial_b = self._buffers.flatten(floats).to(self.dtype)
        self._original = module
        self._names = _parameter_names(module)
        self._stored = _stored_names(module)
        plain = [path for path, layer in self._norms.items() if isinstance(layer, BatchNorm)]
        handed = {key for path in plain for key in tensor_names(path, "running_mean", "running_var")}
        self._changed_in_place = [key for key in floats if key not in handed]
        """Float buffers of layers that may change them in place while they train."""
        self._own_norms = [path for path in self._norms if path not in plain]
        counts = [key for path in self._own_norms for key in tensor_names(path, "num_batches_tracked")]
        self._counted = [key for key in counts if key in fixed]
        self._layers_draw = any(isinstance(layer, Dropout) for layer in self._module.modules())
        self._module_paths = [path for path, _ in module.named_modules() if path]
        self._local = threading.local()
        self.parts: dict[str, Part] = {}
        self._stage_paths = (
            None if stages is None else {stage: list(paths) for stage, paths in stages.items()}
        )
        if head is not None:
            self.parts["head"] = self._part("head", [head])
            self.parts["body"] = self._rest("body", [self.parts["head"]])
        if stages is not None:
            for stage, paths in (self._stage_paths or {}).items():
                self.parts[stage] = self._part(stage, paths)
        self.stages = tuple(stages or (("body", "head") if head is not None else ()))
        if stages is not None and self._rest("rest", [self.parts[stage] for stage in stages]).slices:
            raise SartorError(
                f"model {name}: the stages {', '.join(stages)} do not cover all of its parameters"
            )

    # Models of clients' own -----------------------------------------------------------------------

    @property
    def common(self) -> Task:
        """The task that all clients know, where they have models of their own; else this one."""
        return self._common or self

    @common.setter
    def common(self, task: Task) -> None:
        self._common = task

    def of_client(self, number: int) -> Task:
        """The task of a client."""
        return self if self.groups is None else self.groups.tasks[int(self.groups.of[number])]

    # What numbers are computed in -----------------------------------------------------------------

    def in_precision(self, name: str) -> Task:
        """The same task with parameters of a type; ``model`` leaves them as they are.

        With ``bf16`` they are float32, and products and convolutions of training are computed in bfloat16.

        >>> Task(nn.Linear(2, 2)).in_precision("float64").initial().dtype
        torch.float64
        """
        if name == "model" and self.dtype == torch.bfloat16:
            raise SettingError(
                f"model {self.name}: its parameters are bfloat16, whose eight bits lose small steps and what "
                "clients differ by; set local.precision = 'bf16', which keeps them in float32 and computes "
                "in bfloat16"
            )
        if name == "model":
            return self
        dtype = torch.float64 if name == "float64" else torch.float32
        task = copy.copy(self) if dtype == self.dtype else self._typed_as(dtype)
        task.precision = name
        return task

    def same_constants(self, other: Task) -> bool:
        """Whether two tasks have the same in what is not trained."""
        return self._constants.keys() == other._constants.keys() and all(
            torch.equal(value, other._constants[key]) for key, value in self._constants.items()
        )

    @property
    def constants_hash(self) -> str | None:
        """What is not trained, by its SHA-256: nobody sends it, so all must have the same; None: nothing."""
        digest = hashlib.sha256()
        for key, value in sorted(self._constants.items()):
            digest.update(f"{key} {list(value.shape)} {value.dtype} ".encode())
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy(force=True).tobytes())
        return digest.hexdigest() if self._constants else None

    def _typed_as(self, dtype: torch.dtype) -> Task:
        task = Task(
            copy.deepcopy(self._original).to(dtype),
            objective=self.objective,
            classes=self.classes,
            head=self.head_path,
            stages=self._stage_paths,
            name=self.name,
        )
        task.drawn, task.seeded = self.drawn, self.seeded
        return task

    # The vectors ----------------------------------------------------------------------------------

    def initial(self, device: torch.device | str = "cpu") -> Tensor:
        """The initial model: the values the module came with."""
        return self._initial_w.to(device, copy=True)

    def initial_buffers(self, device: torch.device | str = "cpu") -> Tensor:
        """The initial float buffers; empty for a model that has none."""
        return self._initial_b.to(device, copy=True)

    def state_dict(self, w: Tensor, buffers: Tensor | None = None) -> dict[str, Tensor]:
        """A model's vector as a module's ``state_dict``, to load into the user's own module."""
        floats = self._buffers.views(self._initial_b if buffers is None else buffers)
        named = {**self._parameters.views(w), **floats, **self._constants}
        return {key: named[first].detach().clone() for key, first in self._stored.items()}

    def module(self, w: Tensor, buffers: Tensor | None = None) -> nn.Module:
        """A module like the one that was given, with a model's values, in evaluation mode."""
        made = copy.deepcopy(self._original)
        made.load_state_dict(self.state_dict(w, buffers))
        made.eval()
        return made

    def part(self, name: str) -> Part:
        """A declared part; the error for one that is missing names the module paths there are."""
        if name in self.parts:
            return self.parts[name]
        paths = ", ".join(self._module_paths)
        raise SartorError(
            f"model {self.name}: no part {name!r} is declared (parts: {', '.join(self.parts) or 'none'}); "
            f"declare it by module path, for example head={(self._module_paths or ['...'])[-1]!r}; "
            f"paths: {paths}"
        )

    @property
    def places(self) -> dict[str, slice]:
        """Where each parameter lies in the vector, by its name in the module."""
        return dict(self._parameters.places)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter, by its name in the module."""
        return dict(self._parameters.shapes)

    def select(self, paths: Iterable[str]) -> tuple[Part, Part]:
        """The parameters and the float buffers of some modules, named by path or as ``head``.

        Both are parts of their own vector; either may be empty.
        """
        named = [self._declared_head() if path == "head" else path for path in paths]
        parameters = self._part("selected", named) if named else Part("selected", ())
        return parameters, self._buffers_below("selected", named)

    def outside(self, paths: Iterable[str]) -> tuple[Part, Part]:
        """The parameters and the float buffers that :meth:`select` leaves of the model."""
        parameters, buffers = self.select(paths)
        return self.rest(parameters), Part("rest", gaps(buffers.slices, self.buffer_size))

    def norms(self) -> tuple[Part, Part]:
        """The parameters and the running statistics of all BatchNorm layers, found by their type."""
        learnt = [
            place
            for key, place in self._parameters.places.items()
            if any(below(key, path) for path in self._norms)
        ]
        return Part("norms", merged(learnt)), self._buffers_below("norms", list(self._norms))

    def inside(self, paths: Iterable[str]) -> Callable[[str], bool]:
        """Whether a module's path is one of these or lies below one; named as for :meth:`select`."""
        named = [self._declared_head() if path == "head" else path for path in paths]
        return lambda path: any(below(path, name) for name in named)

    def rest(self, part: Part) -> Part:
        """All parameters outside of a part."""
        return self._rest("rest", [part])

    def _declared_head(self) -> str:
        self.part("head")
        assert self.head_path is not None
        return self.head_path

    def _buffers_below(self, name: str, paths: list[str]) -> Part:
        places = self._buffers.places.items()
        return Part(name, merged([place for key, place in places if any(below(key, path) for path in paths)]))

    def _part(self, name: str, paths: list[str]) -> Part:
        slices = []
        for path in paths:
            found = [place for key, place in self._parameters.places.items() if below(key, path)]
            if not found:
                raise SartorError(
                    f"model {self.name}: part {name!r} names the module path {path!r}, which has no "
                    f"parameters; paths: {', '.join(self._module_paths) or 'none'}"
                )
            slices += found
        return Part(name, merged(slices))

    def _rest(self, name: str, parts: list[Part]) -> Part:
        taken = sorted((piece for part in parts for piece in part.slices), key=lambda piece: piece.start)
        if any(piece.start < before.stop for before, piece in pairwise(taken)):
            raise SartorError(f"model {self.name}: parts {', '.join(part.name for part in parts)} overlap")
        return Part(name, gaps(taken, self.size))

    # The functions --------------------------------------------------------------------------------

    def outputs(self, w: Tensor, x: Nest, buffers: Tensor | None = None, change: Change | None = None) -> Any:
        """What the module returns for ``x``, in evaluation mode.

        ``change`` is applied to the features before the head gets them.
        """
        return self._call(w, x, buffers, Mode(training=False, change=change))

    def predict(self, w: Tensor, x: Nest, buffers: Tensor | None = None) -> Any:
        """What the model says of every sample: its most likely class, or what the objective has instead."""
        return self.objective.predictions(self.outputs(w, x, buffers))

    def features(self, w: Tensor, x: Nest, buffers: Tensor | None = None) -> Tensor:
        """The input of the head, in evaluation mode."""
        mode = Mode(training=False)
        self._call(w, x, buffers, mode)
        return self.noted_features(mode)

    def forward(
        self,
        w: Tensor,
        batch: Batch,
        buffers: Tensor | None = None,
        frozen: Frozen = False,
        change: Change | None = None,
    ) -> Pass:
        """A pass over a batch in training mode: outputs, features and the buffers after it."""
        mode = Mode(training=True, weight=batch.weight, frozen=frozen, key=batch.key, change=change)
        outputs = self._call(w, batch.x, buffers, mode)
        if not mode.changed:
            return Pass(outputs, mode.features, buffers)
        views = self._buffers.views(self._given(buffers, w))
        after = torch.cat([mode.changed.get(key, view).reshape(-1) for key, view in views.items()])
        return Pass(outputs, mode.features, after.detach())

    def loss_function(self, outputs: Any, targets: Nest) -> Tensor:
        """The loss of every sample, of what the module returned.

        One number for the whole batch where the loss is no mean over samples; see :meth:`check_loss`.
        """
        if isinstance(targets, Mixed):
            one, other = self.loss_function(outputs, targets.one), self.loss_function(outputs, targets.other)
            share = targets.share.to(one.dtype) if one.dim() else targets.share[0].to(one.dtype)
            return share * one + (1 - share) * other
        losses = self.objective.losses(outputs, targets)
        if losses.dim() > 1:
            return losses.flatten(1).mean(1)
        if losses.dim() == 0 and self._undone:
            return torch.vmap(lambda *one: self.objective.losses(*nests.rows(one, None)))(outputs, targets)
        return losses

    def losses(self, w: Tensor, batch: Batch, buffers: Tensor | None = None) -> Tensor:
        """The loss of every sample, in evaluation mode."""
        return self.loss_function(self.outputs(w, batch.x, buffers), batch.y)

    def each(self, quantity: Callable[[Any], Any], models: Tensor | Sequence[Any]) -> Any:
        """What a quantity of one model is for each of several, stacked; it is not differentiated.

        On the CPU models of dense layers go through the samples together, where clients do.
        """
        if isinstance(models, Tensor) and models.device.type == "cpu" and inside_transform() and self._dense:
            return torch.vmap(quantity)(models)
        return tree_map(lambda *rows: torch.stack(rows), *[quantity(model) for model in models])

    @property
    def _dense(self) -> bool:
        """Whether all that is trained are dense layers, and nothing is drawn."""
        layers = (layer for layer in self._module.modules() if layer._parameters)
        return not self.draws and all(type(layer) is nn.Linear for layer in layers)

    def loss(self, w: Tensor, batch: Batch, buffers: Tensor | None = None) -> Tensor:
        """The mean loss over a batch, in training mode."""
        return self.loss_and_buffers(w, batch, buffers)[0]

    def loss_and_buffers(
        self,
        w: Tensor,
        batch: Batch,
        buffers: Tensor | None = None,
        frozen: Frozen = False,
        penalty: Penalty | None = None,
        change: Change | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The mean training loss and the buffers after this batch.

        ``frozen`` buffers are used and not changed. ``penalty`` adds a term of the features to the loss,
        ``change`` is applied to the features before the head gets them.
        """
        loss, run = self._loss_and_pass(w, batch, buffers, frozen, penalty, change)
        return loss, run.buffers

    def _loss_and_pass(
        self,
        w: Tensor,
        batch: Batch,
        buffers: Tensor | None,
        frozen: Frozen,
        penalty: Penalty | None,
        change: Change | None,
    ) -> tuple[Tensor, Pass]:
        run = self.forward(w, batch, buffers, frozen, change)
        losses = self.loss_function(run.outputs, batch.y)
        return batch.mean(losses if penalty is None else losses + penalty(self.noted_features(run))), run

    def grad(self, w: Tensor, batch: Batch, buffers: Tensor | None = None) -> Tensor:
        """The gradient of the batch's mean training loss."""
        return self.grad_and_buffers(w, batch, buffers)[0]

    def grad_and_buffers(
        self,
        w: Tensor,
        batch: Batch,
        buffers: Tensor | None = None,
        frozen: Frozen = False,
        penalty: Penalty | None = None,
        change: Change | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of the batch's mean training loss, and the buffers after this batch."""
        given = self._given(buffers, w) if self.buffer_size else buffers

        def objective(w: Tensor) -> tuple[Tensor, Pass]:
            return self._loss_and_pass(w, batch, given, frozen, penalty, change)

        gradient, run = self.differentiate(objective, w)
        return gradient, run.buffers

    def differentiate(self, objective: LossAndPass, w: Tensor) -> tuple[Tensor, Pass]:
        """The gradient of an objective at ``w``, and the pass it made."""

        def with_tensors(w: Tensor) -> tuple[Tensor, dict[str, Any]]:
            loss, run = objective(w)
            found: dict[str, Any] = {} if run.buffers is None else {"buffers": run.buffers}
            if run.features is not None:
                found["features"] = run.features.detach()
            return loss, {**found, "outputs": nests.mapped(torch.Tensor.detach, run.outputs)}

        if inside_transform():
            gradient, found = grad(with_tensors, has_aux=True)(w)
        else:  # plain autograd gives the same bits with less overhead
            with torch.enable_grad():
                live = w.detach().requires_grad_()
                loss, found = with_tensors(live)
                (gradient,) = torch.autograd.grad(loss, live)
        return gradient, Pass(found["outputs"], found.get("features"), found.get("buffers"))

    def noted_features(self, run: Pass | Mode) -> Tensor:
        """What the head was given in a pass; an error that says why where there is nothing."""
        self.part("head")
        if run.features is None:
            raise SartorError(f"model {self.name}: its forward pass never calls the head {self.head_path!r}")
        return run.features

    def _constants_like(self, w: Tensor) -> dict[str, Tensor]:
        """What is not trained, on the device of a vector, and in its type what has the model's."""
        if w.device not in self._constants_by_device:
            self._constants_by_device[w.device] = {
                key: value.to(w.device) for key, value in self._constants.items()
            }
        constants = self._constants_by_device[w.device]
        if w.dtype == self.dtype:
            return constants
        return {
            key: value.to(w.dtype) if value.dtype == self.dtype else value for key, value in constants.items()
        }

    def _given(self, buffers: Tensor | None, w: Tensor) -> Tensor:
        return self.initial_buffers(w.device) if buffers is None else buffers

    def arguments(self, x: Nest) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """How the module is called with a sample of this form."""
        if isinstance(x, tuple):
            return x, {}
        if isinstance(x, dict) and (self._names is None or x.keys() <= self._names):
            return (), x
        return (x,), {}

    def _call(self, w: Tensor, x: Nest, buffers: Tensor | None, mode: Mode) -> Any:
        module = self._placed(mode.training)
        named = self._parameters.views(w)
        if self.buffer_size:
            named |= self._buffers.views(self._given(buffers, w))
            for key in self._changed_in_place:  # such a layer shall not write into the vector it was given
                named[key] = named[key].clone()
        named |= self._constants_like(w)
        for key in self._counted:  # such a layer shall not count in what all share
            named[key] = named[key].clone()
        tables = {key: (named[key], named[key]._version) for key in self._tables}
        half = self.precision == "bf16" and mode.training
        many = not mode.training and w.device.type == "cpu" and inside_transform()
        keyed = None if self._keyed is False else Keyed(mode)
        stills = self._stilled(module.module, mode)
        try:
            with (
                told(mode),
                half_precision(w.device.type) if half else nullcontext(),
                keyed or nullcontext(),
                Dense() if many else nullcontext(),
                Norms() if serves_lanes(w) else nullcontext(),
                _unbranched(),
            ):
                result = module(named, *self.arguments(x))
        except ValueError as error:
            if not (self._own_norms and "more than 1 value per channel" in str(error)):
                raise
            raise SartorError(
                f"model {self.name}: layer {self._own_norms[0]!r}, BatchNorm with a forward of its own, "
                "cannot train on one sample; give local.batch another size, or take PyTorch's own layer with "
                "what its forward adds behind it"
            ) from error
        finally:
            for layer in stills:
                layer.training = True
        self._called |= keyed is not None and keyed.called
        for key, (table, version) in tables.items():
            if named[key] is not table or table._version != version:
                raise SartorError(
                    f"model {self.name}: a pass changes the buffer {key!r}, which is a constant as it has "
                    f"numbers that are not finite or that {self.dtype} cannot hold; start it from others"
                )
        if half and mode.features is not None:
            mode.features = mode.features.to(w.dtype)
        if mode.training:
            moving = [key for key in self._changed_in_place if not mode.still(key.rpartition(".")[0])]
            mode.changed |= {key: named[key] for key in moving}
        result = getattr(result, "logits", result)  # what Hugging Face's models return
        if not isinstance(result, Tensor) and (
            isinstance(self.objective, Classification) or not _is_nest(result)
        ):
            raise SartorError(
                f"model {self.name}: forward returned {type(result).__name__}, a tensor is needed"
            )
        if not half:
            return result
        return nests.mapped(lambda leaf: leaf.to(w.dtype) if leaf.is_floating_point() else leaf, result)

    def _placed(self, training: bool) -> Placed:
        """The module; tensors are put into it while it runs, so every thread has one of its own."""
        if not hasattr(self._local, "modules"):
            self._local.modules = {}
        if training not in self._local.modules:
            module = copy.deepcopy(self._module)
            module.train(training)
            head = dict(module.named_modules()).get(self.head_path or "")
            if self.head_path and head is not None:
                head.register_forward_pre_hook(note_features)
            self._local.modules[training] = Placed(module)
        found: Placed = self._local.modules[training]
        return found

    def _stilled(self, module: nn.Module, mode: Mode) -> list[nn.Module]:
        """Layers that are as in evaluation during a pass in training mode, where one may ask what it is.

        BatchNorm with a ``forward`` of its own asks always.
        """
        if not mode.training or not mode.frozen:
            return []
        if callable(mode.frozen) and self._keyed is not False:
            named = [layer for path, layer in module.named_modules() if mode.frozen(path)]
        else:
            named = [module.get_submodule(path) for path in self._own_norms if mode.still(path)]
        stills = [layer for layer in named if layer.training]
        for layer in stills:
            layer.training = False
        return stills

    # Linear models --------------------------------------------------------------------------------

    @property
    def raw_features(self) -> int | None:
        """How many raw features a model that is one linear layer on the flattened input takes, else None."""
        layers = [self._module]
        if type(self._module) is nn.Sequential:
            layers = [layer for layer in self._module if type(layer) not in (nn.Flatten, nn.Identity)]
        if len(layers) == 1 and type(layers[0]) is nn.Linear and layers[0].weight.requires_grad:
            return layers[0].in_features
        return None

    def by_feature(self, values: Tensor) -> Tensor:
        """One value per raw feature as a vector like ``w``: every weight has its feature's, a bias has 1."""
        pieces = [
            values.expand(shape).reshape(-1) if len(shape) == 2 else values.new_ones(shape)
            for shape in self._parameters.shapes.values()
        ]
        return torch.cat(pieces)

    # What the engines ask -------------------------------------------------------------------------

    def suited(self, x: Nest, y: Nest, classes: int | None) -> Task:
        """The same task for such samples, with their classes where none were given.

        What a model puts out that cannot be right for them is refused.
        """
        few = nests.mapped(lambda leaf: leaf[:2].cpu(), (x, y))
        try:
            with torch.no_grad():
                outputs = self.outputs(self.initial(), few[0])
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise SettingError(
                f"model {self.name}: cannot take samples of {nests.words(x)}: {reason}"
            ) from error
        if not self.drawn:
            trials.check_values(self, few[0])
        own = isinstance(self.objective, Own) or self.objective.targets == "any"
        scores = (
            isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] >= max(classes or 0, 2)
        )
        if own and not scores:
            classes = None  # these are no scores of classes
        known = classes if self.classes is None else self.classes
        if isinstance(outputs, Tensor):
            wrong = self.objective.wrong(outputs, few[1], known)
            if wrong is not None:
                raise SettingError(f"model {self.name}: {wrong}")
        width = self.objective.width(outputs, few[1], known)
        if nests.leaves(y)[0].dim() > 1:
            known = None
        elif known is not None:  # the model may know more than occur
            known = max(known, width or 0)
        if (known, width) == (self.classes, self.width):
            return self
        suited = copy.copy(self)
        suited.classes, suited.width = known, width
        return suited

    def numbers(self, x: Nest) -> frozenset[str]:
        """The leaves of whole numbers that the model takes as floats alone, by path; found on zeros."""
        whole = [path for path, leaf in nests.paths(x, "x").items() if not leaf.is_floating_point()]
        if not whole:
            return frozenset()
        for chosen in (frozenset[str](), frozenset(whole), *(frozenset({path}) for path in whole)):

            def blank(path: str, leaf: Tensor, chosen: frozenset[str] = chosen) -> Tensor:
                zeros = torch.zeros((1, *leaf.shape[1:]), dtype=leaf.dtype)
                return zeros.to(self.dtype) if path in chosen or leaf.is_floating_point() else zeros

            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    self.outputs(self.initial(), nests.named(blank, x, "x"))
            except (RuntimeError, ValueError, TypeError, IndexError):
                continue
            return chosen
        return frozenset()  # why, is said where real samples are tried

    def check_loss(self, x: Nest, y: Nest) -> None:
        """See what an own loss gives for such samples; what cannot be used is an error.

        One number for a batch is undone into its samples' where it shows to be their mean by all targets.
        """
        if self._undone is not None or _counted_by_us(self.objective):
            return
        few, targets = trials.few(x, y)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = self.outputs(self.initial(), self.typed(few))
            targets = self.typed(targets)
            found = self._raw_losses(outputs, targets)
            self._undone = False
            if found.dim() == 0:
                several = [outputs, *trials.other_outputs(self, self.typed(few))]
                self._undone = is_mean(
                    lambda outputs, y: self.objective.losses(outputs, self.typed(y)), several, y
                )
                return
            fewer = self._raw_losses(*nests.rows((outputs, targets), slice(0, 2)))
            if len(found) != 3 or len(fewer) != 2 or (3 in found.shape[1:] and 2 in fewer.shape[1:]):
                raise SartorError(
                    f"model {self.name}: for 3 samples the loss has shape {list(found.shape)}; it gives one "
                    f"number per sample, or their mean. Outputs: {_shapes(outputs)}, targets: "
                    f"{_shapes(targets)}; bring them to one shape"
                )

    @property
    def draws(self) -> bool:
        """Whether a pass draws at random, and needs a key for it."""
        return self._layers_draw or bool(self._keyed)

    def check_draws(self, x: Nest, y: Nest) -> None:
        """See whether a step on such samples draws at random, and whether it does the same a second time."""
        if self._keyed is not None:
            return
        x, y = nests.mapped(lambda leaf: leaf[:3].cpu(), (self.typed(x), self.typed(y)))
        w, results = self.initial(), []
        try:
            for seed in range(2):
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    random.seed_torch(seed)
                    outputs = self.outputs(w, x), self.forward(w, Batch(x, y, None, 1)).outputs
                    results.append(nests.leaves((*outputs, self.loss_function(outputs[1], y))))
        except Exception:  # why the model cannot take a step is said where it trains
            return
        self._keyed = self._called
        tolerance = torch.finfo(self.dtype).eps ** 0.5
        pairs = [pair for pair in zip(*results, strict=True) if pair[0].is_floating_point()]
        self.unkeyed = not all(trials.close(one, other, tolerance) for one, other in pairs)

    def check_apart(self, x: Nest, y: Nest, why: str, cure: str) -> None:
        """Refuse what needs the loss of each sample, where it cannot be told."""
        self.check_loss(x, y)
        if self._mixes(*trials.few(x, y)):
            raise SettingError(
                f"model {self.name}: {why}, but its loss gives one number for a batch that is no mean over "
                f"samples, as far as their targets tell; give one number per sample, or {cure}"
            )

    def _raw_losses(self, outputs: Any, y: Nest) -> Tensor:
        """What the loss gives, or an error with the shapes that it was given."""
        try:
            with warnings.catch_warnings():  # of n outputs [1] and n targets PyTorch makes n × n losses
                warnings.filterwarnings("error", "Using a target size")
                found = self.objective.losses(outputs, y)
        except (
            UserWarning,
            RuntimeError,
            ValueError,
            TypeError,
            IndexError,
            KeyError,
            AttributeError,
        ) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            shapes = f"outputs {_shapes(outputs)} and targets {_shapes(y)}"
            raise SartorError(f"model {self.name}: its loss cannot take {shapes}: {reason}") from error
        if not isinstance(found, Tensor) or not found.is_floating_point():
            raise SartorError(
                f"model {self.name}: its loss gives {type(found).__name__}, a tensor of floats is needed"
            )
        return found

    def typed(self, nest: Nest) -> Nest:
        """A nest whose floats have the model's type."""
        return nests.mapped(lambda leaf: leaf.to(self.dtype) if leaf.is_floating_point() else leaf, nest)

    def alike(self, network: Hashable) -> None:
        """Say that tasks of such a network differ in their numbers alone, so that one is tried for all."""
        if _counted_by_us(self.objective):
            self._reasons = _REASONS[network, repr(self.objective), self.dtype]

    def why_not_stackable(self, x: Nest, y: Nest, apart: bool = False) -> str | None:
        """The reason why this model cannot train many clients in one batch, or None.

        That is a property of the model for samples of this kind. It is found once, with the first of them, on
        the CPU and in float64, so that no device's rounding decides; in the model's own type where it cannot
        run in float64. Clients ``apart``, whose steps are traced each by itself, only need steps that are the
        same series of operations for all samples, as of a model with a gradient written by hand.
        """
        reason = self._stacking(x, y)[0]
        return self._why_not_traceable(x, y) if reason is not None and apart else reason

    def mixes_samples(self, x: Nest, y: Nest) -> bool:
        """Whether a sample's result or the loss depends on what else is in a batch, which is then not padded.

        Of a model that can be stacked; found with the reason why it cannot.
        """
        return self._stacking(x, y)[1]

    def _stacking(self, x: Nest, y: Nest) -> tuple[str | None, bool]:
        """What stands against stacking, and whether batches must not be padded."""
        kind = (nests.form(x), nests.form(y))
        if kind not in self._reasons:
            self.check_loss(x, y)
            few = trials.few(x, y)
            if not self._mixes(*few) and trials.why_unlike(self, *few, padded=True) is None:
                self._reasons[kind] = None, False
            else:
                self._reasons[kind] = trials.why_unlike(self, *few, padded=False), True
        return self._reasons[kind]

    def _why_not_traceable(self, x: Nest, y: Nest) -> str | None:
        """Why a step is not the same operations for all samples, if so: one is tried without any."""
        self.check_draws(x, y)
        if self.unkeyed:
            return "a layer draws at random"
        few = self.typed(nests.mapped(lambda leaf: leaf[:3].cpu(), (x, y)))
        # What is held from now on has numbers; a module, which may keep what it makes, is one for this trial.
        self._constants_like(self.initial())
        held, self._local.modules = getattr(self._local, "modules", {}), {}
        for training in (False, True):
            self._placed(training)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as blank, torch.no_grad():
                w, buffers = blank.from_tensor(self.initial()), blank.from_tensor(self.initial_buffers())
                batch = Batch(*nests.mapped(blank.from_tensor, few))
                self.grad_and_buffers(w, batch, buffers)
                self.losses(w, batch, buffers)
        except Exception as error:  # whatever torch says about this module is the reason
            if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
                return "its forward pass branches on the data"
            return trials.in_a_line(error)
        finally:
            self._local.modules = held
        return None

    def _mixes(self, x: Nest, y: Nest) -> bool:
        """Whether the loss is one number for a batch that is no mean over samples."""
        if self._undone is not False:
            return False
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = self.outputs(self.initial(), self.typed(x))
            return self.objective.losses(outputs, self.typed(y)).dim() == 0

    def require_stackable(self, x: Nest, y: Nest, apart: bool = False) -> None:
        """Raise :class:`NotStackable`, with the reason, for a model that only the loop engine can run."""
        reason = self.why_not_stackable(x, y, apart)
        if reason is not None:
            raise NotStackable(f"model {self.name} cannot be stacked ({reason}); use the loop engine")

    @property
    def has_convolutions(self) -> bool:
        """Whether the module has a convolution; on a CPU those are faster one client at a time."""
        return any(isinstance(module, nn.modules.conv._ConvNd) for module in self._module.modules())

    @property
    def has_kernels(self) -> bool:
        """Whether all layers have kernels for many clients on a GPU, each with weights of its own."""
        large = (nn.modules.conv._ConvNd, nn.RNNBase)
        known = all(isinstance(layer, Conv2d) for layer in self._module.modules() if isinstance(layer, large))
        return known and self.dtype == torch.float32 and self.precision != "bf16"

    def activations(self, x: Nest) -> int:
        """Numbers held by the outputs of all layers for one sample.

        What a step needs beside copies of ``w``.
        """
        total = 0

        def count(module: nn.Module, inputs: Any, output: Any) -> None:
            nonlocal total
            if isinstance(output, Tensor) and not list(module.children()):
                total += output.numel()

        handle = nn.modules.module.register_module_forward_hook(count)
        try:
            with torch.no_grad():
                self.outputs(self._initial_w, nests.mapped(lambda leaf: leaf[:1].cpu(), x))
        finally:
            handle.remove()
        return total + sum(leaf[:1].numel() for leaf in nests.leaves(x))


def unkeyed_words(task: Task) -> str:
    """What is to be said of a model whose passes are not the same a second time."""
    return (
        f"model {task.name}: a pass gives another result a second time: it draws, or counts, in a way "
        "that the keyed streams do not reach, so equal seeds may give different runs"
    )


def _holds(dtype: torch.dtype, value: Tensor) -> bool:
    """Whether a type has all these numbers, and they are finite."""
    return bool(value.isfinite().all()) and torch.equal(value.to(dtype).to(value.dtype), value)


@contextmanager
def _unbranched() -> Iterator[None]:
    """Many clients at once cannot branch on data, and modules ask about that as they do of a compiler.

    Hugging Face's leave a mask out where it masks nothing, unless they are being compiled.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = before or inside_transform()
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _counted_by_us(objective: Objective) -> bool:
    """Whether an objective is one of this package, whose losses are known to be one number per sample."""
    return type(objective).__module__ == Objective.__module__ and not isinstance(objective, Own)


def _parameter_names(module: nn.Module) -> set[str] | None:
    """The names that a module's forward takes; None where it takes any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}


def _is_nest(value: Any) -> bool:
    found = tree_leaves(value) if isinstance(value, (tuple, dict)) else []
    return bool(found) and all(isinstance(leaf, Tensor) for leaf in found)


def _shapes(nest: Nest) -> str:
    """The shapes of a nest's leaves for a message."""
    found = {path: list(leaf.shape) for path, leaf in nests.paths(nest, "").items()}
    return str(found[""]) if list(found) == [""] else str(found)


def _stored_names(module: nn.Module) -> dict[str, str]:
    """The keys of the module's ``state_dict`` with the name each tensor goes by.

    Tied tensors have several keys.
    """
    first = {id(value): key for key, value in [*module.named_parameters(), *module.named_buffers()]}
    stored = module.state_dict(keep_vars=True)
    return {key: first[id(value)] for key, value in stored.items() if id(value) in first}
