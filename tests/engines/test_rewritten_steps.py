"""Steps as a GPU has them, by operations with kernels of ours, give what plain ones give: here on a CPU.

There every such operation computes by PyTorch, so whatever a method or a network brings into a step is gone
through by all that rewrites it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_engines import SAME, as_allowed, assert_close, ended
from test_nested_samples import KINDS, samples
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

import sartor
from helpers import METHODS, RAGGED, classification, federation_of, model_task
from sartor.algorithms import registered
from sartor.engines.stacked import trace
from sartor.federation import Federation
from sartor.kernels import convolution
from sartor.model import objectives
from sartor.model.adapters import with_adapters
from sartor.model.networks import seeded
from sartor.model.task import Task

pytestmark = pytest.mark.usefixtures("traced")


def network() -> Task:
    """A network of one's own, with what convolutions go on to."""
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1)]
    head = [nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)]
    return Task(nn.Sequential(*body, *head), classes=4, head="9")


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[fx.GraphModule]]:
    """Has steps traced from now on be those of a GPU, which are given; they write over what they change."""

    def begin() -> list[fx.GraphModule]:
        found: list[fx.GraphModule] = []
        merge, repeated = trace.merge, trace.Traced.repeated

        def over(self: trace.Traced, given: Any, carry: Any, turns: Any, over: bool = False) -> Any:
            return repeated(self, given, tree_map(torch.clone, carry), turns, over=True)

        monkeypatch.setattr(trace.Traced, "repeated", over)
        monkeypatch.setattr(objectives, "cross_entropy", objectives.cross_entropies)
        monkeypatch.setattr(convolution, "_kernels_serve", lambda x, weight: True)
        monkeypatch.setattr(trace.Tracer, "for_gpu", True)
        monkeypatch.setattr(trace, "HAS_TRITON", True)
        monkeypatch.setattr(trace, "has_tensor_cores", lambda device: True)
        monkeypatch.setattr(trace, "merge", lambda graph: (merge(graph), found.append(graph)))
        return found

    return begin


def operations(graphs: list[fx.GraphModule]) -> set[str]:
    return {str(node.target).removesuffix(".default") for graph in graphs for node in graph.graph.nodes}


@pytest.mark.parametrize(
    ("model", "local"),
    [
        ("cnn", {}),
        ("cnn", {"momentum": 0.9, "weight_decay": 1e-3}),
        ("cnn-spfl", {}),
        ("lenet", {}),
        ("mlp", {}),
        ("resnet8", {}),
    ],
)
def test_every_network_is_the_same(
    model: str, local: dict[str, Any], rewritten: Callable[[], list[fx.GraphModule]]
) -> None:
    """But transformers, which are tried below."""
    data = classification((9, 30, 17, 5, 24, 12), shape=(3, 32, 32) if model == "lenet" else (3, 16, 16))

    def left() -> dict[str, Tensor]:
        task = model_task(model, data)
        return ended("sgd-sgd", federation_of("stacked", task, data, local={"batch": 8, **local}))

    expected, found = left(), rewritten()
    assert_close(expected, left(), 1e-4)
    assert "sartor.descended" in operations(found)


def equal_sizes(norm: nn.Module) -> Task:
    """A network in which channels, their sides, units and classes are four each."""
    torch.manual_seed(0)
    body = [nn.Conv2d(4, 4, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 4)]
    return Task(nn.Sequential(*body, *head), classes=4, head="9")


@pytest.mark.parametrize("norm", [nn.Identity(), nn.GroupNorm(4, 4), nn.BatchNorm2d(4), nn.LayerNorm([4, 4])])
def test_equal_sizes_are_told_apart(norm: nn.Module, rewritten: Callable[[], list[fx.GraphModule]]) -> None:
    """As many clients as samples in a batch, and as everything else has."""
    data = classification((8, 8, 8, 8), shape=(4, 4, 4))

    def left() -> dict[str, Tensor]:
        made = federation_of("stacked", equal_sizes(norm), data, local={"batch": 4})
        return ended("sgd-sgd", made, [[0, 1, 2, 3]] * 2)

    expected, found = left(), rewritten()
    assert_close(expected, left(), 1e-5)
    assert "sartor.descended" in operations(found)


@pytest.mark.parametrize(("patch", "width", "heads"), [(4, 16, 4), (4, 8, 4), (2, 64, 4), (2, 32, 16)])
def test_as_many_tokens_as_something_else_has(
    patch: int, width: int, heads: int, rewritten: Callable[[], list[fx.GraphModule]]
) -> None:
    data = classification((8, 8, 8, 8), shape=(4, 8, 8))

    def left() -> dict[str, Tensor]:
        task = model_task("vit", data, patch=patch, width=width, heads=heads, depth=1)
        made = federation_of("stacked", task, data, local={"batch": 4})
        return ended("sgd-sgd", made, [[0, 1, 2, 3]])

    expected, found = left(), rewritten()
    assert_close(expected, left(), 1e-5)
    assert "sartor.stacked_attention_gradient" in operations(found)


class Encoder(nn.Module):
    """PyTorch's own layer, over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.output = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.output(self.layer(x[:, 0]).mean(1))
        return scores


def grouped() -> nn.Module:
    """Its gradients lie otherwise than PyTorch describes them."""
    layers = (nn.MaxPool2d(2), nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=2))
    return nn.Sequential(*layers, nn.ELU(), nn.Flatten(), nn.Linear(64, 4))


@pytest.mark.parametrize("kind", [Encoder, grouped])
@pytest.mark.parametrize("clients", [1, 4])
def test_a_network_of_one_s_own_is_the_same_for_one_client_and_for_several(
    kind: Callable[[], nn.Module], clients: int, rewritten: Callable[[], list[fx.GraphModule]]
) -> None:
    data = classification((8, 8, 8, 8), shape=(1, 8, 8))

    def left() -> dict[str, Tensor]:
        torch.manual_seed(0)
        made = federation_of("stacked", Task(kind(), classes=4), data, local={"batch": 4})
        return ended("sgd-sgd", made, [list(range(clients))] * 2)

    expected, found = left(), rewritten()
    assert_close(expected, left(), 1e-5)
    assert found


def tokens(clients: int) -> dict[str, Any]:
    """Texts that begin with what they are about; another number of them for each client."""
    drawn = [torch.randint(0, 12, (8 + 7 * client, 8)) for client in range(clients)]
    return {str(client): (x, x[:, 0] % 3) for client, x in enumerate(drawn)}


@pytest.mark.parametrize(
    "model",
    [
        {"name": "lstm", "layers": 2},
        {"name": "transformer"},
        {"name": "transformer", "width": 8, "heads": 8},
    ],
)
def test_networks_for_texts_are_the_same(
    model: dict[str, Any], rewritten: Callable[[], list[fx.GraphModule]]
) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"rounds": 2, "local": {"batch": 4}, "hyper": {"lr": 0.1}, "store": False}
    settings |= {"data": tokens(3), "model": model, "engine": "stacked"}
    expected = sartor.run("fedavg", **settings).w
    found = rewritten()
    torch.testing.assert_close(sartor.run("fedavg", **settings).w, expected, rtol=1e-4, atol=1e-5)
    assert found


@pytest.mark.parametrize("name", KINDS)
def test_any_samples_and_targets_are_the_same(
    name: str, rewritten: Callable[[], list[fx.GraphModule]]
) -> None:
    kind = KINDS[name]
    settings: dict[str, Any] = {"rounds": 2, "local": {"batch": 4, "momentum": 0.5}, "store": False}
    settings |= {"data": samples(kind), "objective": kind.objective, "engine": "stacked"}

    def trained() -> Tensor | None:
        return sartor.run("fedavg", model=seeded(kind.module, 0), **settings).w

    expected, found = trained(), rewritten()
    torch.testing.assert_close(trained(), expected, rtol=1e-4, atol=1e-5)
    assert found


@pytest.mark.parametrize("name", ["fedit", "ffa-lora", "fedsa-lora", "feddf", "fedmd"])
def test_methods_of_adapters_and_of_public_samples_are_the_same(
    name: str, rewritten: Callable[[], list[fx.GraphModule]]
) -> None:
    data = classification((9, 17, 5, 12), shape=(1, 8, 8))
    data = replace(data, validation=data.test, public_x=data.pooled_x[:9])

    def left() -> dict[str, Tensor]:
        torch.manual_seed(0)
        body = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 16)]
        module: nn.Module = nn.Sequential(*body, nn.ReLU(), nn.Linear(16, 4))
        if registered()[name].adapters:
            module = with_adapters(module, 2, ("4",))
        task = Task(module, classes=4, head="6")
        return ended(name, federation_of("stacked", task, data, local={"batch": 4}), [[0, 1, 2, 3], [1, 3]])

    expected, found = left(), rewritten()
    assert_close(expected, left(), 1e-4)
    assert found


def test_a_step_that_fails_as_it_was_rewritten_runs_as_it_was(
    rewritten: Callable[[], list[fx.GraphModule]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = classification((9, 5, 12), shape=(1, 8, 8))

    def left() -> dict[str, Tensor]:
        made = federation_of("stacked", network(), data, local={"batch": 4})
        return ended("sgd-sgd", made, [[0, 1, 2], [0, 2]])

    expected = left()
    rewritten()

    def broken(graph: fx.GraphModule) -> None:
        (result,) = graph.graph.find_nodes(op="output")
        with graph.graph.inserting_before(result):
            wrong = graph.graph.call_function(torch.ops.aten.view.default, (result.args[0][0], [3, 5]))
        result.args = ([wrong, *result.args[0][1:]],)

    monkeypatch.setattr(trace, "merge", broken)
    assert_close(expected, left(), 1e-5)
    assert "a step runs as PyTorch has it (shape '[3, 5]' is invalid" in caplog.text


@pytest.mark.parametrize("name", [name for name in METHODS if name not in SAME])
def test_every_method_is_the_same_with_a_convolutional_network(
    name: str, rewritten: Callable[[], list[fx.GraphModule]]
) -> None:
    data = classification(RAGGED, shape=(1, 8, 8))
    data = replace(data, validation=data.test)

    def federation(local: dict[str, float]) -> Federation:
        return federation_of("stacked", network(), data, local={"batch": 8, **local})

    def left() -> dict[str, Tensor]:
        return {key: value for key, value in as_allowed(name, federation).items() if value.numel()}

    expected, found = left(), rewritten()
    # The last digits of what fedgen's generator learns from are steps of Adam's.
    assert_close(expected, left(), 0.05 if name == "fedgen" else 1e-5)
    assert {"sartor.laid_conv", "sartor.descended"} <= operations(found)
