"""A model as a vector: what :class:`Task` computes is what PyTorch computes on the module itself."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sartor
from helpers import classification, federation_of, flat, module_of, plain_cnn, play, resnet18
from sartor.algorithms import make, registered
from sartor.engines import choose_engine
from sartor.engines.base import LocalEngine
from sartor.errors import NotStackable, SartorError, SettingError
from sartor.federation import Federation, Reply
from sartor.model.batch import Batch
from sartor.model.networks import MODELS
from sartor.model.task import Task
from sartor.runs.evaluation import evaluate
from sartor.runs.settings import Evaluate

pytestmark = pytest.mark.usefixtures("traced")

SHAPES = {
    "softmax": (1, 4, 4),
    "mlp": (1, 4, 4),
    "cnn": (1, 4, 4),
    "lenet": (2, 16, 16),
    "cnn-spfl": (1, 16, 16),
    "resnet8": (2, 6, 6),
}
CLASSES = 5


def samples(shape: tuple[int, ...], count: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (count,), generator=generator)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


class Shared(nn.Module):
    """A small network of a user's own, with one layer to be tried out between two linear ones."""

    def __init__(self, layer: nn.Module, inputs: int = 6, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.layer = layer
        self.output = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(torch.tanh(self.layer(self.first(x.flatten(1)))))
        return result


def own(layer: nn.Module | None = None, seed: int = 0, **settings: Any) -> Shared:
    torch.manual_seed(seed)
    return Shared(layer or nn.Identity(), **settings).double()


# Loss, gradient, predictions -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_loss_and_gradient_are_those_of_the_module(name: str) -> None:
    module = module_of(name, SHAPES[name], CLASSES)
    task = Task(module, classes=CLASSES)
    x, y = samples(SHAPES[name])
    w = flat(module)
    assert torch.equal(task.initial(), w)

    loss = F.cross_entropy(module(x), y)
    loss.backward()
    gradient = torch.cat([value.grad.reshape(-1) for value in module.parameters() if value.grad is not None])
    assert close(task.loss(w, Batch(x, y)), loss.detach())
    assert close(task.grad(w, Batch(x, y)), gradient)
    with torch.no_grad():
        module.eval()
        assert close(task.outputs(w, x), module(x))
        assert torch.equal(task.predict(w, x), module(x).argmax(1))
        assert close(task.losses(w, Batch(x, y)), F.cross_entropy(module(x), y, reduction="none"))


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_padding_changes_neither_loss_nor_gradient(name: str) -> None:
    module = module_of(name, SHAPES[name], CLASSES)
    task = Task(module, classes=CLASSES)
    x, y = samples(SHAPES[name])
    other_x, other_y = samples(SHAPES[name], 3, seed=9)
    weight = torch.tensor([1.0] * 6 + [0.0] * 3, dtype=torch.float64)
    padded = Batch(torch.cat([x, other_x]), torch.cat([y, other_y]), weight)
    w = task.initial()
    assert padded.size == 6
    assert close(task.loss(w, padded), task.loss(w, Batch(x, y)))
    assert close(task.grad(w, padded), task.grad(w, Batch(x, y)))


def test_the_gradient_is_that_of_finite_differences() -> None:
    task = Task(own(nn.GroupNorm(2, 8)), classes=CLASSES)
    x, y = samples((6,))
    w, gradient = task.initial(), task.grad(task.initial(), Batch(x, y))
    for index in range(0, task.size, 7):
        step = torch.zeros_like(w)
        step[index] = 1e-6
        slope = (task.loss(w + step, Batch(x, y)) - task.loss(w - step, Batch(x, y))) / 2e-6
        assert float(slope) == pytest.approx(float(gradient[index]), abs=1e-8)


def test_a_layer_of_ones_own_is_told_whether_it_trains() -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x if self.training else x

    module = own(Doubling())
    task = Task(module, classes=CLASSES, head="output")
    x, y = samples((6,))
    with torch.no_grad():
        assert close(task.loss(task.initial(), Batch(x, y)), F.cross_entropy(module.train()(x), y))
        assert close(task.outputs(task.initial(), x), module.eval()(x))
        features = torch.tanh(module.first(x))
        assert close(task.features(task.initial(), x), features)


def test_a_loss_of_ones_own_is_used_per_sample() -> None:
    module = nn.Linear(3, 1).double()
    task = Task(module, loss=lambda outputs, y: (outputs[:, 0] - y).abs())
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    expected = (module(x)[:, 0] - y).abs().detach()
    assert close(task.losses(task.initial(), Batch(x, y)), expected)
    assert close(task.loss(task.initial(), Batch(x, y)), expected.mean())


def test_parameters_are_views_of_the_vector_and_the_module_is_not_touched() -> None:
    module = own()
    before = copy.deepcopy(module.state_dict())
    task = Task(module, classes=CLASSES)
    x, y = samples((6,))
    task.grad(task.initial() + 1, Batch(x, y))
    task.initial().zero_()
    assert torch.equal(task.initial(), flat(module))
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    with torch.no_grad():
        module.first.weight.zero_()
    assert task.initial()[0] != 0  # the task keeps what it was given


def test_parameters_that_take_no_gradient_stay_as_they_are() -> None:
    module = own()
    module.first.weight.requires_grad_(False)
    task = Task(module, classes=CLASSES)
    trainable = [value for value in module.parameters() if value.requires_grad]
    assert task.size == sum(value.numel() for value in trainable)
    x, y = samples((6,))
    F.cross_entropy(module(x), y).backward()
    gradient = torch.cat([value.grad.reshape(-1) for value in trainable if value.grad is not None])
    assert close(task.grad(task.initial(), Batch(x, y)), gradient)
    assert torch.equal(task.state_dict(task.initial() + 1)["first.weight"], module.first.weight)


def test_tied_parameters_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight
            self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(torch.tanh(self.first(x))) * self.scale
            return result

    module = Tied().double()
    task = Task(module)
    assert task.size == 36 + 6 + 6
    x, y = samples((6,))
    F.cross_entropy(module(x), y).backward()
    gradient = torch.cat([value.grad.reshape(-1) for value in module.parameters() if value.grad is not None])
    assert close(task.grad(task.initial(), Batch(x, y)), gradient)
    fresh = Tied().double()
    fresh.load_state_dict(task.state_dict(task.initial() + 0.25))
    assert torch.equal(fresh.second.weight, module.first.weight + 0.25)


# Parts -----------------------------------------------------------------------------------------------------


def test_parts_are_the_parameters_below_their_paths() -> None:
    module = own(nn.GroupNorm(2, 8))
    stages = {"low": ["first", "layer.weight"], "rest": ["layer.bias", "output"]}
    task = Task(module, head="output", stages=stages)
    w = torch.arange(task.size, dtype=torch.float64)
    named = task.state_dict(w)

    def gathered(*keys: str) -> Tensor:
        return torch.cat([named[key].reshape(-1) for key in keys])

    assert torch.equal(task.part("head").take(w), gathered("output.weight", "output.bias"))
    assert torch.equal(
        task.part("body").take(w), gathered("first.weight", "first.bias", "layer.weight", "layer.bias")
    )
    assert torch.equal(task.part("low").take(w), gathered("first.weight", "first.bias", "layer.weight"))
    assert task.stages == ("low", "rest")
    for names in (("head", "body"), ("low", "rest")):
        masks = torch.stack([task.part(name).mask(w) for name in names])
        assert torch.equal(masks.sum(0), torch.ones(task.size, dtype=torch.int64))
        assert all(int(mask.sum()) == task.part(name).size for name, mask in zip(names, masks, strict=True))


def test_put_replaces_a_part_in_vectors_and_matrices() -> None:
    task = Task(own(), head="output", stages={"ends": ["first.bias", "output"], "middle": ["first.weight"]})
    w = torch.randn(3, task.size, dtype=torch.float64)
    values = torch.randn(3, task.part("ends").size, dtype=torch.float64)
    for mixed in (task.part("ends").put(w, values), task.part("ends").put(w[0], values)):
        assert torch.equal(task.part("ends").take(mixed), values)
    assert torch.equal(
        task.part("middle").take(task.part("ends").put(w, values)), task.part("middle").take(w)
    )
    before = w.clone()
    task.part("ends").put(w, values)
    assert torch.equal(w, before)


@pytest.mark.parametrize("name", sorted(name for name in SHAPES if MODELS[name].head))
def test_features_are_the_input_of_the_head(name: str) -> None:
    module = module_of(name, SHAPES[name], CLASSES)
    task = Task(module, classes=CLASSES, head=MODELS[name].head)
    x, _ = samples(SHAPES[name])
    caught: list[Tensor] = []
    handle = module.get_submodule("output").register_forward_hook(
        lambda m, inputs, o: caught.append(inputs[0])
    )
    module.eval()(x)
    handle.remove()
    features = task.features(task.initial(), x)
    assert close(features, caught[0].detach())
    assert close(
        F.linear(features, *(value.detach() for value in module.get_submodule("output").parameters())),
        task.outputs(task.initial(), x),
    )


def fails(message: str, **settings: Any) -> None:
    with pytest.raises(SartorError, match=message):
        Task(own(), name="mine", **settings)


def test_wrong_parts_are_refused_with_the_paths_there_are() -> None:
    fails(r"mine.*'head'.*'outptu'.*paths: first, layer, output", head="outptu")
    fails(r"'head' names the module path 'layer', which has no parameters", head="layer")
    fails(r"'head'.*'out'", head="out")  # part of a name is not a path
    fails(
        r"stages low, high overlap|parts low, high overlap",
        stages={"low": ["first"], "high": ["first.bias", "output"]},
    )
    fails(r"stages low do not cover", stages={"low": ["first"]})
    fails(r"overlap", stages={"low": ["first", "output"], "high": ["output"]})


def test_a_missing_head_is_explained() -> None:
    task = Task(own(), name="mine")
    for ask in (lambda: task.part("head"), lambda: task.features(task.initial(), samples((6,))[0])):
        with pytest.raises(
            SartorError, match=r"mine: no part 'head'.*head=.*output.*paths: first, layer, output"
        ):
            ask()


def test_models_that_cannot_be_a_vector_are_refused() -> None:
    with pytest.raises(SartorError, match="no parameters"):
        Task(nn.ReLU())
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(SartorError, match=r"one float type.*float32.*float64"):
        Task(mixed)
    with pytest.raises(SartorError, match="'weight' has no shape yet"):
        Task(nn.LazyLinear(3))
    with pytest.raises(SartorError, match=r"'1' is BatchNorm with momentum=None"):
        Task(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)))


def test_a_forward_that_returns_no_tensor_is_refused() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    task = Task(Pair(2, 2))
    with pytest.raises(SartorError, match="forward returned tuple"):
        task.outputs(task.initial(), torch.zeros(1, 2))


# State dicts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_vector_goes_into_a_fresh_module_and_back(norm: str) -> None:
    module = module_of("resnet8", SHAPES["resnet8"], CLASSES, norm=norm)
    task = Task(module, classes=CLASSES)
    w = torch.randn(task.size, dtype=torch.float64)
    buffers = torch.rand(task.buffer_size, dtype=torch.float64) + 0.5
    fresh = module_of("resnet8", SHAPES["resnet8"], CLASSES, seed=1, norm=norm)
    fresh.load_state_dict(task.state_dict(w, buffers))
    assert torch.equal(flat(fresh), w)
    again = Task(fresh)
    assert torch.equal(again.initial(), w)
    assert torch.equal(again.initial_buffers(), buffers)
    x, _ = samples(SHAPES["resnet8"])
    with torch.no_grad():
        assert close(fresh.eval()(x), task.outputs(w, x, buffers), 1e-8)


def test_a_state_dict_shares_no_memory_with_the_vector() -> None:
    task = Task(own())
    w = task.initial()
    task.state_dict(w)["first.weight"].zero_()
    assert torch.equal(w, task.initial())


# BatchNorm -------------------------------------------------------------------------------------------------

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (lambda: Shared(nn.BatchNorm1d(8)), (6,)),
    "plain": (lambda: Shared(nn.BatchNorm1d(8, affine=False, momentum=0.3, eps=1e-2)), (6,)),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
        ),
        (2, 6, 6),
    ),
}


def normed(kind: str) -> nn.Module:
    torch.manual_seed(0)
    module = NORMS[kind][0]().double()
    for value in module.buffers():  # not the zeros and ones that hide a mistake
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, dtype=value.dtype) + 0.5)
        else:
            value.fill_(7)
    return module


def statistics(module: nn.Module) -> Tensor:
    return torch.cat([value.reshape(-1) for value in module.buffers() if value.is_floating_point()])


@pytest.mark.parametrize("kind", sorted(NORMS))
def test_masked_statistics_are_those_of_the_unpadded_batch(kind: str) -> None:
    module, shape = normed(kind), NORMS[kind][1]
    task = Task(module, classes=CLASSES)
    x, y = samples(shape, 5)
    noise = 100 * samples(shape, 3, seed=4)[0]
    weight = torch.tensor([1.0] * 5 + [0.0] * 3, dtype=torch.float64)
    padded = Batch(torch.cat([x, noise]), torch.cat([y, y[:3]]), weight)
    w, buffers = task.initial(), task.initial_buffers()
    assert torch.equal(buffers, statistics(module))

    loss = F.cross_entropy(module.train()(x), y)
    loss.backward()
    gradient = torch.cat([value.grad.reshape(-1) for value in module.parameters() if value.grad is not None])
    for batch in (Batch(x, y), padded):
        found, after = task.loss_and_buffers(w, batch, buffers)
        assert close(found, loss.detach())
        assert after is not None
        assert close(after, statistics(module))  # PyTorch updated its own in place
        assert close(task.grad(w, batch, buffers), gradient)
    assert torch.equal(buffers, task.initial_buffers())


@pytest.mark.parametrize("kind", sorted(NORMS))
def test_evaluation_uses_the_running_statistics_and_integers_stay(kind: str) -> None:
    module, shape = normed(kind), NORMS[kind][1]
    task = Task(module, classes=CLASSES)
    x, _ = samples(shape)
    with torch.no_grad():
        assert close(task.outputs(task.initial(), x, task.initial_buffers()), module.eval()(x))
        assert close(task.outputs(task.initial(), x[:1]), module(x[:1]))  # one sample has no batch statistics
    counts = [key for key in task.state_dict(task.initial()) if key.endswith("num_batches_tracked")]
    assert len(counts) == 1
    assert int(task.state_dict(task.initial(), task.initial_buffers() + 1)[counts[0]]) == 7


def test_frozen_buffers_are_used_in_training_and_not_changed() -> None:
    module = normed("dense")
    task = Task(module, classes=CLASSES)
    x, y = samples((6,))
    loss, after = task.loss_and_buffers(task.initial(), Batch(x, y), task.initial_buffers(), frozen=True)
    with torch.no_grad():
        assert close(loss, F.cross_entropy(module.eval()(x), y))
    assert after is not None
    assert torch.equal(after, task.initial_buffers())
    gradient, after = task.grad_and_buffers(task.initial(), Batch(x, y), task.initial_buffers(), frozen=True)
    F.cross_entropy(module(x), y).backward()
    expected = torch.cat([value.grad.reshape(-1) for value in module.parameters() if value.grad is not None])
    assert close(gradient, expected)
    assert after is not None
    assert torch.equal(after, task.initial_buffers())


def test_a_single_value_uses_and_keeps_the_running_statistics() -> None:
    """PyTorch refuses to train a dense BatchNorm on one sample; the last batch of a client may be one."""
    module = normed("dense")
    task = Task(module, classes=CLASSES)
    x, y = samples((6,))
    weight = torch.tensor([1.0] + [0.0] * 5, dtype=torch.float64)
    for batch in (Batch(x[:1], y[:1]), Batch(x, y, weight)):
        loss, after = task.loss_and_buffers(task.initial(), batch, task.initial_buffers())
        with torch.no_grad():
            assert close(loss, F.cross_entropy(module.eval()(x[:1]), y[:1]))
        assert after is not None
        assert torch.equal(after, task.initial_buffers())


def test_a_layer_called_twice_moves_its_statistics_twice() -> None:
    class Twice(Shared):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.output(self.layer(torch.tanh(self.layer(self.first(x)))))
            return result

    module = Twice(nn.BatchNorm1d(8)).double()
    task = Task(module, classes=CLASSES)
    x, y = samples((6,))
    _, after = task.loss_and_buffers(task.initial(), Batch(x, y), task.initial_buffers())
    module.train()(x)
    assert after is not None
    assert close(after, statistics(module))


@pytest.mark.parametrize("kind", sorted(NORMS))
def test_local_training_is_pytorchs_own_loop_with_its_running_statistics(kind: str) -> None:
    shape = NORMS[kind][1]
    data = classification((9, 17), shape=shape, classes=CLASSES, dtype=torch.float64)
    module = normed(kind)
    task = Task(module, classes=CLASSES)
    federation = federation_of(
        "loop", task, data, local={"batch": 5, "epochs": 3, "momentum": 0.9}, workers=1
    )
    federation.round = 1
    seen: list[tuple[Tensor, Tensor]] = []

    def training(client: Any, hyper: Any, w: Tensor) -> Reply:
        def direction(w_k: Tensor, batch: Batch) -> Tensor:
            seen.append((batch.x, batch.y))
            gradient: Tensor = client.grad(w_k, batch)
            return gradient

        return Reply(w=client.descend(w, direction, lr=0.1))

    after = federation.map(training, [1], {"w": task.initial()})["w"][0]
    assert len(seen) == 3 * 4  # batches of 5, 5, 5 and 2
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module.train()
    for x, y in seen:
        optimiser.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimiser.step()
    assert close(after, flat(module))
    assert federation.buffers is not None
    assert close(federation.buffers, statistics(module))
    assert not close(federation.buffers, task.initial_buffers(), 1e-3)


# Layers with a way of their own -----------------------------------------------------------------------------


class NormAct(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Tripling(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


class Still(nn.BatchNorm1d):
    """BatchNorm that is always as in evaluation."""

    def train(self, mode: bool = True) -> Still:
        return super().train(False)


class Kept(Shared):
    """A network that leaves one of its layers in evaluation mode."""

    def train(self, mode: bool = True) -> Kept:
        super().train(mode)
        self.layer.eval()
        return self


class Listed(Shared):
    """A network that calls one of its layers by way of a list."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.others = [self.layer]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(self.others[0](self.first(x)) * self.layer.num_features)
        return result


def twice(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), layer, nn.Tanh(), layer, nn.Linear(8, CLASSES))


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    return Shared(layer)


def parametrised() -> nn.Module:
    layer = nn.BatchNorm1d(8)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return Shared(layer)


WAYS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "BatchNorm with a forward": (lambda: Shared(NormAct(8)), False),
    "Dropout with a forward": (lambda: Shared(Tripling()), True),
    "BatchNorm with a mode": (lambda: Shared(Still(8)), True),
    "BatchNorm left in evaluation": (lambda: Kept(nn.BatchNorm1d(8)), True),
    "Dropout left in evaluation": (lambda: Kept(nn.Dropout(0.5)), True),
    "BatchNorm in a list": (lambda: Listed(nn.BatchNorm1d(8)), True),
    "BatchNorm at two paths": (lambda: twice(nn.BatchNorm1d(8)), True),
    "BatchNorm with a hook": (lambda: hooked(nn.BatchNorm1d(8)), True),
    "Dropout with a hook": (lambda: hooked(nn.Dropout(0.0)), True),
    "BatchNorm of a parametrised weight": (parametrised, False),
}


@pytest.mark.parametrize("name", WAYS)
def test_layers_with_a_way_of_their_own_are_as_in_pytorch(name: str) -> None:
    make, shared = WAYS[name]
    torch.manual_seed(0)
    module = make().double()
    for key, value in module.named_buffers():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, dtype=value.dtype) + 0.5)
        else:
            assert key.endswith("num_batches_tracked")
    task = Task(copy.deepcopy(module), classes=CLASSES)
    x, y = samples((6,))
    w, buffers = task.initial(), task.initial_buffers()
    stored = task.constants_hash
    with torch.no_grad():
        assert close(task.outputs(w, x, buffers), module.eval()(x))
    gradient, after = task.grad_and_buffers(w, Batch(x, y), buffers)
    F.cross_entropy(module.train()(x), y).backward()
    assert close(gradient, torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
    assert torch.equal(buffers, task.initial_buffers())
    assert task.constants_hash == stored
    if task.buffer_size:
        assert after is not None
        assert close(after, statistics(module))
    assert (task.why_not_stackable(x, y) is None) == shared


def test_batch_norm_with_a_forward_of_its_own_trains_like_two_layers() -> None:
    data = classification((8, 17, 33), shape=(6,), classes=CLASSES, dtype=torch.float64)
    for policy in ("average", "local", "freeze"):
        found = []
        for layer in (NormAct(8), nn.Sequential(nn.BatchNorm1d(8), nn.ReLU())):
            federation = federation_of(
                "loop", Task(own(layer), classes=CLASSES), data, local={"batch": 6}, buffers=policy
            )
            server = play(registered()["fedavg"](), federation, [[0, 1, 2], [2, 0]])
            found.append((server.w, federation.mean_buffers))
        assert close(found[0][0], found[1][0])
        assert close(found[0][1], found[1][1])


def test_norms_are_those_with_a_forward_of_their_own_too() -> None:
    task, plain = Task(own(NormAct(8))), Task(own(nn.BatchNorm1d(8)))
    assert task.norms() == plain.norms()
    assert task.norms()[0].size == 16


def test_batch_norm_with_a_forward_of_its_own_says_that_one_sample_is_too_few() -> None:
    task = Task(own(NormAct(8)), classes=CLASSES, name="mine")
    x, y = samples((6,), 1)
    with pytest.raises(SartorError, match=r"mine: layer 'layer', BatchNorm.* one sample; give local\.batch"):
        task.loss(task.initial(), Batch(x, y))


# What happens to buffers in a federation -------------------------------------------------------------------


def trained(policy: str, engine: str, cohorts: list[list[int]]) -> tuple[Federation, Task, Any]:
    data = classification((5, 17, 33, 8), shape=(6,), classes=CLASSES, dtype=torch.float64)
    task = Task(normed("dense"), classes=CLASSES)
    federation = federation_of(engine, task, data, local={"batch": 8}, buffers=policy)
    return federation, task, play(registered()["fedavg"](), federation, cohorts)


def after_of_each(federation: Federation, task: Task, w: Tensor, cohort: list[int]) -> Tensor:
    """The clients' own statistics after local training, by way of replies."""

    def training(client: Any, hyper: Any, w: Tensor) -> Reply:
        client.descend(w, lr=0.1)
        return Reply(statistics=client.buffers)

    return federation.ask(training, cohort, {"w": w})["statistics"]


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_average_is_the_mean_of_the_clients_buffers_by_samples(engine: str) -> None:
    federation, task, _ = trained("average", engine, [])
    federation.round = 1
    server = registered()["fedavg"]().start(federation)
    rows = after_of_each(federation, task, server.w, [0, 2, 3])
    assert torch.equal(federation.buffers, task.initial_buffers())  # asking moved nothing
    registered()["fedavg"]().round(server, federation, np.array([0, 2, 3]))
    weights = torch.tensor([5.0, 33.0, 8.0], dtype=torch.float64) / 46
    assert federation.buffers is not None
    assert close(federation.buffers, weights @ rows)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_local_buffers_stay_with_their_client(engine: str) -> None:
    federation, task, _ = trained("local", engine, [[0, 2]])
    start = task.initial_buffers()
    kept = federation.states["buffers"]
    for client in (1, 3):
        assert torch.equal(kept[client], start)
    assert not close(kept[0], start, 1e-3)
    assert not close(kept[0], kept[2], 1e-3)
    assert torch.equal(federation.buffers, start)
    assert federation.mean_buffers is not None
    assert close(federation.mean_buffers, kept.mean(0))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_local_buffers_are_those_of_a_client_that_trains_alone(engine: str) -> None:
    """Two rounds for client 2, whatever the others do; the second goes on from its own statistics."""
    together, _, _ = trained("local", engine, [[0, 2], [1, 2]])
    data = classification((5, 17, 33, 8), shape=(6,), classes=CLASSES, dtype=torch.float64)
    task = Task(normed("dense"), classes=CLASSES)
    separate = federation_of(engine, task, data, local={"batch": 8}, buffers="local")
    play(registered()["separate"](), separate, [[2], [2]])
    first = federation_of(engine, task, data, local={"batch": 8}, buffers="local")
    play(registered()["separate"](), first, [[2]])
    once, _, _ = trained("local", engine, [[0, 2]])
    assert close(first.states["buffers"][2], once.states["buffers"][2])
    assert not close(separate.states["buffers"][2], first.states["buffers"][2], 1e-3)
    assert not close(together.states["buffers"][2], once.states["buffers"][2], 1e-3)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_frozen_buffers_never_change_and_training_uses_them(engine: str) -> None:
    federation, task, server = trained("freeze", engine, [[0, 1, 2, 3], [1, 3]])
    assert torch.equal(federation.buffers, task.initial_buffers())
    # The same model with its BatchNorm written out as the affine map it then is.
    module = normed("dense")
    norm = module.layer

    class Affine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = norm.weight, norm.bias
            self.mean, self.scale = norm.running_mean.clone(), torch.rsqrt(norm.running_var + norm.eps)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = (x - self.mean) * self.scale * self.weight + self.bias
            return result

    module.layer = Affine()
    data = classification((5, 17, 33, 8), shape=(6,), classes=CLASSES, dtype=torch.float64)
    plain = federation_of(engine, Task(module, classes=CLASSES), data, local={"batch": 8})
    expected = play(registered()["fedavg"](), plain, [[0, 1, 2, 3], [1, 3]])
    assert close(server.w, expected.w)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(SartorError, match=r"buffers = 'mean': must be one of average, local, freeze"):
        trained("mean", "loop", [])


def test_buffers_that_no_layer_changes_stay_to_the_bit() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x * self.scale
            return result

    data = classification((5, 17, 33), shape=(6,), classes=CLASSES)
    for engine in ("loop", "stacked"):
        torch.manual_seed(0)
        task = Task(Shared(Scale()), classes=CLASSES)
        federation = federation_of(engine, task, data)
        play(registered()["fedavg"](), federation, [[0, 1, 2]] * 5)
        assert torch.equal(federation.buffers, task.initial_buffers())


def test_a_layer_that_writes_into_its_buffer_trains_on_the_loop_like_pytorch() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.centre.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return x - self.centre

    data = classification((12, 7), shape=(6,), classes=CLASSES, dtype=torch.float64)
    module = own(Running())
    task = Task(module, classes=CLASSES)
    federation = federation_of("loop", task, data, local={"batch": 0, "epochs": 3}, workers=1)
    federation.ask(lambda client, hyper, w: Reply(w=client.descend(w, lr=0.1)), [0, 1], {"w": task.initial()})
    assert torch.equal(federation.buffers, task.initial_buffers())
    server = play(registered()["fedavg"](), federation, [[0]])
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = data.train.of(0)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(module.train()(x), y).backward()
        optimiser.step()
    assert close(server.w, flat(module))
    assert close(federation.buffers, module.layer.centre)


class Causal(nn.Module):
    """Attention to what came before, by a mask of minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 4, 2)
        result: Tensor = self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]
        return result.flatten(1)


@pytest.mark.parametrize("policy", ["average", "local", "freeze"])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_buffers_that_are_not_finite_are_constants(engine: str, policy: str) -> None:
    data = classification((5, 17, 33), shape=(6,), classes=CLASSES, dtype=torch.float64)
    module = own(Causal())
    task = Task(module, classes=CLASSES)
    assert task.buffer_size == 0
    federation = federation_of(engine, task, data, buffers=policy, local={"batch": 0})
    algorithm = registered()["fedavg"]()
    server = play(algorithm, federation, [[2], [2]])
    optimiser = torch.optim.SGD(module.parameters(), lr=algorithm.hyper.lr)
    x, y = data.train.of(2)
    for _ in range(2):
        optimiser.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimiser.step()
    assert close(server.w, flat(module))
    assert torch.equal(task.state_dict(server.w)["layer.mask"], module.layer.mask)


def test_buffers_that_the_models_type_cannot_hold_keep_their_digits() -> None:
    class Shifted(nn.Module):
        def __init__(self, start: list[float]) -> None:
            super().__init__()
            self.register_buffer("origin", torch.tensor(start, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x - self.origin.float()

    task = Task(Shared(Shifted([1e9 + 1])))
    assert task.state_dict(task.initial())["layer.origin"].tolist() == [1e9 + 1]
    assert Task(Shared(Shifted([0.5]))).buffer_size == 1


@pytest.mark.parametrize("in_place", [True, False])
def test_a_pass_that_changes_a_constant_is_an_error(in_place: bool) -> None:
    class Smallest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("least", torch.full((8,), torch.inf))

        def forward(self, x: Tensor) -> Tensor:
            least = torch.minimum(self.get_buffer("least"), x.detach().amin(0))
            if in_place:
                self.get_buffer("least").copy_(least)
            else:
                self.least = least
            return x - least

    task = Task(own(Smallest()), classes=CLASSES, name="mine")
    x, y = samples((6,))
    with pytest.raises(SartorError, match=r"mine: a pass changes the buffer 'layer.least'.*not finite"):
        task.grad(task.initial(), Batch(x, y))


def test_models_of_bfloat16_are_told_of_the_precision_that_keeps_their_digits() -> None:
    x, y = samples((6,), 12)
    data = {"a": (x.float(), y), "b": (-x.float(), y)}
    with pytest.raises(SartorError, match=r"bfloat16.*set local\.precision = 'bf16'"):
        sartor.run("fedavg", model=own().bfloat16(), data=data, rounds=1, store=False)
    result = sartor.run(
        "fedavg", model=own().bfloat16(), data=data, rounds=1, store=False, local={"precision": "bf16"}
    )
    assert result.w.dtype == torch.float32


# Dropout ---------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """A model whose gradient on one sample of ones is its dropout mask."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(shape, dtype=torch.float64))
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(self.w * x)
        return result


def mask_task(layer: nn.Module, shape: tuple[int, ...] = (400,)) -> Task:
    return Task(Masked(layer, shape), loss=lambda outputs, y: outputs.flatten(1).sum(1))


def mask(task: Task, key: int, shape: tuple[int, ...] = (400,)) -> Tensor:
    return task.grad(
        task.initial(), Batch(torch.ones(1, *shape, dtype=torch.float64), torch.zeros(1), None, key)
    )


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 1.0])
def test_dropout_keeps_the_right_share_and_scales_it_up(p: float) -> None:
    task = mask_task(nn.Dropout(p))
    masks = torch.stack([mask(task, key) for key in range(50)])
    kept = 0.0 if p == 1 else 1 / (1 - p)
    assert bool(((masks == 0) | ((masks - kept).abs() < 1e-12)).all())
    share = float((masks != 0).double().mean())
    assert abs(share - (1 - p)) <= 5 * (p * (1 - p) / masks.numel()) ** 0.5
    assert torch.equal(
        task.outputs(task.initial(), torch.ones(2, 400, dtype=torch.float64)), torch.ones(2, 400)
    )


def test_dropout_of_channels_drops_whole_channels() -> None:
    shape = (60, 3, 2)
    found = mask(mask_task(nn.Dropout2d(0.5), shape), 3, shape).view(60, 6)
    assert bool(((found == found[:, :1]).all(1)).all())
    assert set(found[:, 0].tolist()) == {0.0, 2.0}


def test_two_dropout_layers_and_the_samples_of_a_batch_have_masks_of_their_own() -> None:
    task = mask_task(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    share = float((mask(task, 5) != 0).double().mean())
    assert abs(share - 0.25) < 0.1  # 0.5 if both layers had one mask
    task = mask_task(nn.Dropout(0.5))
    x = torch.ones(2, 400, dtype=torch.float64)
    both = task.grad(task.initial(), Batch(x, torch.zeros(2), None, 5))
    assert (
        abs(float((both == 1).double().mean()) - 0.5) < 0.1
    )  # one of the two kept; never if masks were equal


def test_masks_are_the_same_on_both_engines_and_new_for_every_step_client_and_round() -> None:
    data = classification((6, 4), shape=(400,), dtype=torch.float64)
    ones = torch.ones_like(data.train.x)
    data = type(data)(
        **{**vars(data), "train": type(data.train)(ones, data.train.y, data.train.start, data.train.count)}
    )
    steps = 4

    def masks(client: Any, hyper: Any, w: Tensor) -> Reply:
        place = torch.arange(steps)[:, None]

        def body(carry: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
            found = torch.where(place == carry["turn"], client.grad(w, batch), carry["masks"])
            return {"masks": found, "turn": carry["turn"] + 1}

        start = {"masks": w.new_zeros(steps, w.shape[0]), "turn": torch.zeros((), dtype=torch.int64)}
        return Reply(masks=client.scan(body, start, client.batches(steps=steps))["masks"])

    found = {}
    for engine in ("loop", "stacked"):
        task = mask_task(nn.Dropout(0.5))
        federation = federation_of(engine, task, data, local={"batch": 1})
        pieces = []
        for round in (1, 2):
            federation.round = round
            pieces.append(federation.map(masks, [0, 1], {"w": task.initial()})["masks"])
        found[engine] = torch.stack(pieces)
    assert torch.equal(found["loop"], found["stacked"])
    rows = {tuple(row) for row in found["loop"].view(-1, 400).tolist()}
    assert len(rows) == 2 * 2 * steps
    assert abs(float((found["loop"] != 0).double().mean()) - 0.5) < 5 * 0.5 / found["loop"].numel() ** 0.5


# Models that cannot be stacked -----------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        result: Tensor = self.output(x if x.sum() > 0 else -x)
        return result


class Mixing(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        result: Tensor = self.output(x - x.mean(0))
        return result


class Maximal(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        result: Tensor = self.output(x - x.amax(0))
        return result


class BySize(Branching):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(x.flatten(1)) / len(x)
        return result


class MixingBeforeZeros(Mixing):
    """Its outputs are zero for any samples, until it has learnt."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.output.weight)


class MixingInFloat32(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = x.float().flatten(1)
        result: Tensor = self.output(x - x.mean(0))
        return result


class MixingWithinBounds(Branching):
    """Allows few values of a parameter: a little less than it has is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(100))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        result: Tensor = self.output(x - x.mean(0)) * (self.scale + 1e-4).sqrt().sum()
        return result


class Remembering(Branching):
    """Writes of one client's samples into what all clients may share."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("first").copy_(x[0].detach())
        result: Tensor = self.output(x)
        return result


class Drawing(Branching):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(torch.poisson(x.flatten(1).exp()))
        return result


def spectral() -> nn.Module:
    """Its layer can be computed for many clients' samples, but not with weights of their own."""
    return Shared(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))


MIXING = [
    Mixing,
    Maximal,
    BySize,
    MixingBeforeZeros,
    MixingInFloat32,
    lambda: Shared(nn.BatchNorm1d(8, track_running_stats=False)),
]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Branching, "branches on the data"),
        (Remembering, "vmap"),
        (Drawing, "random"),
        (spectral, "atching rule"),
    ],
)
def test_a_model_that_cannot_be_stacked_is_refused_with_the_reason_and_runs_on_the_loop(
    kind: Callable[[], nn.Module], reason: str
) -> None:
    data = classification((9, 4), shape=(6,), classes=CLASSES)
    torch.manual_seed(0)
    task = Task(kind(), classes=CLASSES, name="mine")
    with pytest.raises(NotStackable, match=rf"mine cannot be stacked.*{reason}.*loop"):
        federation_of("stacked", task, data)
    server = play(registered()["fedavg"](), federation_of("loop", task, data), [[0, 1]])
    assert not torch.equal(server.w, task.initial())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Branching, "branches on the data"), (Drawing, "random"), (spectral, "atching")],
)
def test_engine_auto_runs_a_model_that_cannot_be_stacked_on_the_loop_and_says_why(
    kind: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    data = classification((9, 4), shape=(6,), classes=CLASSES)
    model = kind()
    result = sartor.run("fedavg", data=data, model=model, rounds=1, store=False)
    assert result.summary["engine"] == "loop"
    assert re.search(rf"{type(model).__name__} runs on the loop engine.*{reason}", caplog.text)
    with pytest.raises(NotStackable, match=reason):
        sartor.run("fedavg", data=data, model=model, rounds=1, engine="stacked", out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_that_a_model_can_be_stacked_is_not_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    data = classification((9, 4), shape=(6,), classes=CLASSES)
    result = sartor.run("fedavg", data=data, model=Shared(nn.Identity()), rounds=1, store=False)
    assert result.summary["engine"] == "stacked"
    assert not caplog.text


@pytest.mark.parametrize("few", [1, 2, 3])
@pytest.mark.parametrize("kind", [Mixing, Maximal, MixingWithinBounds])
def test_layers_that_mix_samples_show_with_few_of_them(kind: Callable[[], nn.Module], few: int) -> None:
    task = Task(kind(), classes=CLASSES)
    assert task.mixes_samples(*samples((6,), few))


@pytest.mark.parametrize(
    ("kind", "local"),
    [
        *((kind, {"batch": 4, "epochs": 2}) for kind in MIXING),
        (Mixing, {"batch": 4, "steps": 7}),
        (Mixing, {"epochs": 3}),
    ],
)
def test_layers_that_mix_samples_give_the_same_in_a_stack_as_no_batch_is_padded(
    kind: Callable[[], nn.Module], local: dict[str, int]
) -> None:
    data = classification((10, 4, 2, 16, 15), shape=(6,), classes=CLASSES)
    torch.manual_seed(0)
    task = Task(kind(), classes=CLASSES, name="mine")
    found = []
    for engine in ("loop", "stacked"):
        federation = federation_of(engine, task, data, local=local)
        found.append(play(registered()["fedavg"](), federation, [[0, 1, 2, 3, 4], [4, 1]]).w)
    # BatchNorm of two samples enlarges what two ways of computing it round.
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=5e-6)
    assert not torch.equal(found[0], task.initial())


class Rounding(nn.Module):
    """What a tensor core's short mantissa does: float32 is rounded in a way that depends on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return x
        step = 2.0**-10 * x.detach().abs() * (1 + 0.1 * len(x))
        return x + (torch.round(x / step) * step - x).detach()


class Float32(Branching):
    """Wants float32 whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(x.float().flatten(1))
        return result


class Float32Inside(Branching):
    """Has a product in float32 between numbers of the model's type, whose last bit the batch decides."""

    def forward(self, x: Tensor) -> Tensor:
        product = F.linear(x.flatten(1).float(), self.output.weight.float()) * (1 + 2.0**-22 * len(x))
        return product.to(self.output.bias.dtype) + self.output.bias


class Viewing(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.output(x.view(x.shape[0], -1)), dim=1)


def half_frozen() -> nn.Module:
    model = Shared(Rounding())
    model.first.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (lambda: Shared(nn.GroupNorm(2, 8)), (6,)),
        (lambda: Shared(nn.BatchNorm1d(8)), (6,)),
        (lambda: Shared(nn.Dropout(0.3)), (6,)),
        (lambda: Shared(Rounding()), (6,)),
        (lambda: Shared(nn.Linear(8, 8)).double(), (6,)),
        (lambda: Shared(nn.Linear(8, 8)).bfloat16(), (6,)),
        (half_frozen, (6,)),
        (Float32, (6,)),
        (Float32Inside, (6,)),
        (Viewing, (2, 3)),
        (plain_cnn, (1, 28, 28)),
        (lambda: nn.Sequential(Rounding(), plain_cnn((1, 8, 8))), (1, 8, 8)),
        (lambda: resnet18(lambda channels: nn.GroupNorm(2, channels), 8), (3, 8, 8)),
        # Groups of one number each in the last blocks: their outputs are zero but for rounding.
        (lambda: resnet18(lambda channels: nn.GroupNorm(channels, channels), 8), (3, 8, 8)),
        (lambda: resnet18(nn.BatchNorm2d, 8), (3, 8, 8)),
    ],
)
def test_models_that_a_cohort_can_share_are_stackable(
    kind: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    task = Task(kind(), classes=CLASSES)
    x, y = samples(shape, 4)
    assert task.why_not_stackable(x.float(), y) is None
    assert not task.mixes_samples(x.float(), y)


def test_models_of_whole_numbers_are_stackable() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, CLASSES))
    x = torch.randint(0, 7, (4, 5), generator=torch.Generator().manual_seed(0))
    assert Task(model, classes=CLASSES).why_not_stackable(x, torch.arange(4)) is None


def test_finding_whether_a_model_can_be_stacked_draws_nothing() -> None:
    task = Task(Drawing(), classes=CLASSES)
    state = torch.get_rng_state()
    assert task.why_not_stackable(*samples((6,))) is not None
    assert torch.equal(torch.get_rng_state(), state)


def test_whether_a_model_can_be_stacked_is_found_once() -> None:
    passes = []

    class Counting(Branching):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(len(x))
            result: Tensor = self.output(x.flatten(1))
            return result

    data = classification((9, 4), shape=(6,), classes=CLASSES)
    task = Task(Counting(), classes=CLASSES)
    assert choose_engine("auto", task, "cpu", data.train.x, data.train.y) == "stacked"
    found = len(passes)
    assert max(passes) <= 3
    task.require_stackable(data.train.x, data.train.y)
    task.require_stackable(data.train.x.flip(0), data.train.y)
    assert len(passes) == found
    federation_of("stacked", task, data)
    assert passes[found:] == [3, 3, 3, 3, 1]  # whether it draws, in both modes twice; how much room it needs


def test_shared_evaluation_uses_each_clients_own_statistics() -> None:
    federation, task, server = trained("local", "stacked", [[0, 1, 2, 3]])
    cells = evaluate(make(registered()["fedavg"]), server, federation, Evaluate())
    assert isinstance(federation.engine, LocalEngine)
    test, pool = federation.engine.samples["test"], federation.engine.samples["pooled"]
    for client in range(4):
        rows = slice(int(test.start[client]), int(test.start[client]) + int(test.count[client]))
        batch = Batch(test.x[rows], test.y[rows])
        own_loss = task.losses(server.w, batch, federation.states["buffers"][client]).mean()
        assert float(cells["shared_local"].loss[client]) == pytest.approx(float(own_loss), rel=1e-6)
    pooled = Batch(pool.x, pool.y)
    mean_loss = task.losses(server.w, pooled, federation.mean_buffers).mean()
    assert float(cells["shared_pooled"].loss[0]) == pytest.approx(float(mean_loss), rel=1e-6)


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def forward(self, given: tuple[Tensor, Any]) -> Tensor:
        return given[0][:, -1]


class Beside(nn.Module):
    """A layer's weight is in a list too."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layer, self.reads = nn.Linear(4, 3), reads
        self.held = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.held[0].T if self.reads else self.layer(x)


def test_a_module_that_computes_with_parameters_of_a_list_is_refused() -> None:
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    assert Task(Beside(reads=False)).suited(x, y, 3).classes == 3
    with pytest.raises(SettingError, match="those in a list, or in another object, stay as they were"):
        Task(Beside(reads=True)).suited(x, y, 3)


class AlwaysDrawing(nn.Module):
    """Draws in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.5, training=True)


@pytest.mark.parametrize(
    "module",
    [
        AlwaysDrawing(),
        nn.Sequential(nn.Unflatten(1, (2, 2)), nn.LSTM(2, 3, batch_first=True), Last()),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)),
    ],
    ids=["draws", "recurrent", "parametrised", "statistics"],
)
def test_other_modules_give_what_their_parameters_say(module: nn.Module) -> None:
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    assert Task(module).suited(x, y, 3).classes == 3


@pytest.mark.parametrize("name", ["fedlc", "fedrod", "knn-per", "fedcp", "gpfl", "fedgen", "ccvr", "fedgh"])
def test_a_model_may_tell_more_classes_apart_than_occur(name: str) -> None:
    data = classification((20, 9, 1, 14), classes=4)
    module = nn.Sequential(nn.Flatten(), nn.Linear(data.train.x[0].numel(), 8), nn.ReLU(), nn.Linear(8, 7))
    result = sartor.run(name, data=data, model=module, head="3", rounds=2, store=False)
    assert (result.task.classes, result.task.width) == (7, 7)
    assert result.personal is None or result.personal.isfinite().all()


def test_a_loss_that_takes_every_output_for_every_target_is_refused() -> None:
    data = {name: (torch.randn(9, 5), torch.randn(9)) for name in ("a", "b")}
    with pytest.raises(SartorError, match=r"loss cannot take outputs \[3, 1\] and targets \[3\]"):
        sartor.run("fedavg", data=data, model=nn.Linear(5, 1), objective=nn.MSELoss(), store=False)
