"""The networks that people use: they are what their names say, and run on both engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sartor
from helpers import federation_of, play
from sartor import nests
from sartor.algorithms import make, registered
from sartor.data.clients import ClientData, from_clients
from sartor.errors import SettingError
from sartor.model.batch import Batch
from sartor.model.networks import MODELS, ModelChoice, build_task, make_task
from sartor.model.objectives import OBJECTIVES
from sartor.model.sequences import _Layer
from sartor.model.task import Task

SIZES = (5, 9, 4)


def tokens(place: int, n: int, length: int = 6, vocabulary: int = 9) -> Tensor:
    """Rows of tokens, whose ends are padding."""
    generator = torch.Generator().manual_seed(place)
    x = torch.randint(1, vocabulary, (n, length), generator=generator)
    ends = torch.randint(1, length + 1, (n, 1), generator=generator)
    return torch.where(torch.arange(length) < ends, x, 0)


def images(shape: tuple[int, ...] = (3, 8, 8)) -> ClientData:
    generator = torch.Generator().manual_seed(0)
    clients = {
        f"c{k}": (torch.randn(n, *shape, generator=generator), torch.arange(n) % 3)
        for k, n in enumerate(SIZES)
    }
    return from_clients(clients)


def texts(next_token: bool = False) -> ClientData:
    clients = {}
    for place, n in enumerate(SIZES):
        x = tokens(place, n)
        y = torch.where(x.roll(-1, 1) == 0, -100, x.roll(-1, 1)) if next_token else x[:, 0] % 3
        clients[f"c{place}"] = (x, y)
    return from_clients(clients, targets="classes" if next_token else "class")


def rows() -> ClientData:
    generator = torch.Generator().manual_seed(0)
    clients = {}
    for place, n in enumerate(SIZES):
        kinds = torch.randint(0, 4, (n, 2), generator=generator)
        x = {"numbers": torch.randn(n, 3, generator=generator), "categories": kinds}
        clients[f"c{place}"] = (x, kinds[:, 0] % 3)
    return from_clients(clients)


def task_of(name: str, data: ClientData, objective: str = "classification", **settings: Any) -> Task:
    choice = ModelChoice(name=name, settings=MODELS[name](**settings))
    return build_task(choice, data.train.x, data.train.y, data.classes, 0, OBJECTIVES[objective]())


CASES = [
    ("resnet8", lambda: images((1, 4, 4)), {"norm": "batch"}, "classification"),
    ("vit", images, {"width": 8, "depth": 1, "heads": 2}, "classification"),
    ("lstm", texts, {"width": 4, "hidden": 5, "layers": 2}, "classification"),
    ("lstm", lambda: texts(True), {"width": 4, "hidden": 5}, "next-token"),
    ("transformer", texts, {"width": 8, "depth": 1, "heads": 2, "dropout": 0.1}, "classification"),
    ("transformer", lambda: texts(True), {"width": 8, "depth": 1, "heads": 2}, "next-token"),
    ("table", rows, {"hidden": (6,), "width": 3}, "classification"),
]


@pytest.mark.parametrize(("name", "data", "settings", "objective"), CASES)
def test_engines_agree_on_every_network(
    name: str, data: Any, settings: dict[str, Any], objective: str
) -> None:
    data = data()
    data = data.map(
        lambda x: nests.mapped(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, x)
    )
    given = task_of(name, data, objective, **settings)
    task = Task(given.module(given.initial()).double(), objective=objective, classes=data.classes)
    assert task.why_not_stackable(data.train.x, data.train.y) is None
    left = []
    for engine in ("loop", "stacked"):
        federation = federation_of(engine, task, data, local={"batch": 4})
        algorithm = make(registered()["fedavg"], lr=0.1)
        federation.hyper = algorithm.hyper
        left.append(play(algorithm, federation, [[0, 1, 2]]).w)
    assert not torch.equal(left[0], task.initial())
    torch.testing.assert_close(left[0], left[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["resnet8", "resnet18", "resnet20"])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_residual_network_has_the_layers_of_its_name(name: str, norm: str) -> None:
    with torch.device("meta"):
        module = MODELS[name](norm=norm).build((3, 32, 32), 10)
    layers = [path for path, layer in module.named_modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    assert sum("shortcut" not in path for path in layers) == int(name.removeprefix("resnet"))
    kinds = {type(layer) for layer in module.modules()}
    assert (nn.GroupNorm in kinds, nn.BatchNorm2d in kinds) == (norm == "group", norm == "batch")


def test_resnet18_has_the_parameters_of_the_one_for_cifar() -> None:
    with torch.device("meta"):
        module = MODELS["resnet18"](norm="batch").build((3, 32, 32), 10)
    # He et al.'s four stages, counted by hand: convolutions without biases, two numbers per channel and norm.
    widths, before, total = (64, 128, 256, 512), 64, 3 * 64 * 9 + 2 * 64
    for width in widths:
        total += before * width * 9 + 3 * width * width * 9 + 4 * 2 * width
        total += 0 if before == width else before * width + 2 * width
        before = width
    assert sum(value.numel() for value in module.parameters()) == total + 512 * 10 + 10 == 11_173_962


def test_the_lstm_is_pytorchs_where_nothing_is_padding() -> None:
    torch.manual_seed(0)
    own, theirs = _Layer(3, 4), nn.LSTM(3, 4, batch_first=True)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(own.input.weight)
        theirs.bias_ih_l0.copy_(own.input.bias)
        theirs.weight_hh_l0.copy_(own.recurrent.weight)
        theirs.bias_hh_l0.zero_()
    x = torch.randn(2, 7, 3)
    torch.testing.assert_close(own(x, torch.ones(2, 7, dtype=torch.bool)), theirs(x)[0])


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_padding_changes_nothing(name: str) -> None:
    """A text alone and the same text before padding of which the network knows nothing but its token."""
    data = texts()
    task = task_of(name, data, vocabulary=9)
    w, x = task.initial(), data.train.x[:3]
    shorter = torch.tensor([[4, 2, 7, 0, 0, 0], [4, 2, 7, 0, 0, 0]])
    places = task.places["embedding.weight"]
    moved = w.clone()
    moved[places.start : places.start + task.shapes["embedding.weight"][1]] += (
        1  # the padding's own embedding
    )
    torch.testing.assert_close(task.outputs(w, shorter), task.outputs(moved, shorter))
    assert not torch.allclose(task.outputs(w, x[:1]), task.outputs(w, (x[:1] + 1) % 9))


def test_the_transformer_does_not_see_what_comes() -> None:
    task = task_of("transformer", texts(True), "next-token", vocabulary=9)
    x = torch.tensor([[1, 2, 3, 4, 5, 6]])
    other = torch.tensor([[1, 2, 3, 8, 8, 8]])
    one, two = task.outputs(task.initial(), x), task.outputs(task.initial(), other)
    torch.testing.assert_close(one[:, :3], two[:, :3])
    assert not torch.allclose(one[:, 3:], two[:, 3:])
    assert one.shape == (1, 6, 9)  # a number for each token at every place


def test_patches_are_cut_from_the_image() -> None:
    """Each patch has its own pixels: with the dense layer as the identity the tokens are the patches."""
    module = MODELS["vit"](patch=2, width=4, depth=1, heads=1).build((1, 4, 4), 2)
    seen: list[Tensor] = []
    module.patches.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    module(torch.arange(16.0).view(1, 1, 4, 4))
    assert seen[0].tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]]


def test_a_table_is_numbers_and_an_embedding_of_each_category() -> None:
    data = rows()
    task = task_of("table", data, hidden=(6,), width=3)
    sizes = {name: tuple(shape) for name, shape in task.shapes.items()}
    assert sizes["embeddings.0.weight"] == sizes["embeddings.1.weight"] == (4, 3)
    assert sizes["dense.0.weight"] == (6, 3 + 2 * 3)
    w = task.initial()
    one = {"numbers": torch.zeros(1, 3), "categories": torch.tensor([[1, 2]])}
    gradient = task.grad(w, Batch(one, torch.tensor([0])))
    table = gradient[task.places["embeddings.0.weight"]].view(4, 3)
    assert [bool(row.any()) for row in table] == [False, True, False, False]


def test_what_is_left_open_is_taken_from_the_samples_and_recorded(tmp_path: Any) -> None:
    clients = {f"c{place}": (tokens(place, n), tokens(place, n)[:, 0] % 3) for place, n in enumerate(SIZES)}
    sartor.run(
        "fedavg",
        data=clients,
        experiment={"model": {"name": "lstm", "width": 4, "hidden": 5}},
        rounds=1,
        out=tmp_path / "run",
    )
    largest = max(int(x.max()) for x, _ in clients.values())
    assert f"vocabulary = {largest + 1}" in (tmp_path / "run" / "config.toml").read_text()


WRONG = [
    ("resnet18", {}, torch.zeros(4, 5), "needs images"),
    ("vit", {"patch": 3}, torch.zeros(4, 1, 8, 8), "model.patch = 3: images of 8×8"),
    ("vit", {"width": 10, "heads": 4}, torch.zeros(4, 1, 8, 8), "model.heads = 4: model.width = 10"),
    ("lstm", {}, torch.zeros(4, 5), "model.vocabulary"),
    ("lstm", {}, torch.zeros(4, 5, 2).long(), "needs rows of tokens"),
    ("transformer", {"vocabulary": 3}, torch.full((4, 5), 3), "there is a token 3"),
    ("lstm", {}, torch.full((4, 5), -1), "whole numbers from 0"),
    ("table", {}, torch.zeros(4, 5), "needs samples"),
    ("table", {"categories": (2,)}, {"categories": torch.full((4, 1), 2)}, "2 values in column 0"),
    ("table", {"categories": (2,)}, {"numbers": torch.zeros(4, 1)}, "the data has 0 of categories"),
    ("mlp", {}, {"numbers": torch.zeros(4, 1)}, "takes one array"),
]


@pytest.mark.parametrize(("name", "settings", "x", "said"), WRONG)
def test_samples_that_do_not_fit_are_refused(name: str, settings: dict[str, Any], x: Any, said: str) -> None:
    choice = ModelChoice(name=name, settings=MODELS[name](**settings))
    with pytest.raises(SettingError, match=said):
        build_task(choice, x, torch.arange(4) % 2, 2, 0)


def test_a_vocabulary_is_told_where_no_samples_are_seen() -> None:
    from sartor.remote.serve import require_deployable
    from sartor.runs.experiment import load

    with pytest.raises(SettingError, match=r"model\.vocabulary: say it, as the server sees no samples"):
        require_deployable(load(None, ["model.name=lstm"]))
    require_deployable(load(None, ["model.name=lstm", "model.vocabulary=50"]))


def test_samples_are_drawn_into_the_network_by_the_seed() -> None:
    made = [make_task("vit", MODELS["vit"](), (1, 8, 8), 3, seed).initial() for seed in (0, 0, 1)]
    assert torch.equal(made[0], made[1])
    assert not np.array_equal(made[0].numpy(), made[2].numpy())
