"""The named networks: the layers the papers print, initial weights from the seed, errors for unfit data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sartor.errors import SettingError
from sartor.model.networks import MODELS, make_task, seeded

IMAGES = {
    "softmax": (1, 8, 8),
    "mlp": (1, 8, 8),
    "cnn": (1, 8, 8),
    "lenet": (3, 32, 32),
    "cnn-spfl": (1, 28, 28),
    "resnet8": (3, 8, 8),
    "resnet18": (3, 8, 8),
    "resnet20": (3, 8, 8),
    "vit": (3, 8, 8),
}
OTHERS = {"custom", "lstm", "transformer", "table"}


def test_every_model_is_covered_here() -> None:
    ours = {name for name, kind in MODELS.items() if kind.__module__.startswith("sartor.")}
    assert set(IMAGES) == ours - OTHERS


def test_a_custom_model_cannot_be_built_from_its_name() -> None:
    with pytest.raises(SettingError, match="given in Python"):
        MODELS["custom"]().build((1, 8, 8), 3)


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_a_model_maps_images_to_one_number_per_class(name: str) -> None:
    task = make_task(name, MODELS[name](), IMAGES[name], 7, seed=0)
    outputs = task.outputs(task.initial(), torch.randn(3, *IMAGES[name]))
    assert outputs.shape == (3, 7)
    assert task.size == len(task.initial())


# Parameters counted by hand: weights + biases, layer by layer.
SIZES = {
    ("softmax", (1, 28, 28), 10): 784 * 10 + 10,
    ("mlp", (1, 28, 28), 10): 784 * 64 + 64 + 64 * 10 + 10,
    # McMahan et al. 2017, section 3: "1,663,370 total parameters".
    ("cnn", (1, 28, 28), 10): 1_663_370,
    # LeNet-5 with three input channels on 32×32 images.
    ("lenet", (3, 32, 32), 10): 3 * 6 * 25
    + 6
    + 6 * 16 * 25
    + 16
    + 400 * 120
    + 120
    + 120 * 84
    + 84
    + 84 * 10
    + 10,
    ("cnn-spfl", (1, 28, 28), 10): 20 * 25 + 20 + 20 * 50 * 25 + 50 + 800 * 512 + 512 + 512 * 10 + 10,
}


@pytest.mark.parametrize(("name", "shape", "classes"), sorted(SIZES))
def test_the_number_of_parameters_is_the_papers(name: str, shape: tuple[int, ...], classes: int) -> None:
    assert make_task(name, MODELS[name](), shape, classes, 0).size == SIZES[name, shape, classes]


def test_resnet8_has_eight_layers_with_weights_on_its_longest_path() -> None:
    task = make_task("resnet8", MODELS["resnet8"](), (3, 16, 16), 10, 0)
    names = task.state_dict(task.initial())
    deep = [key for key in names if key.endswith("weight") and ("convolution" in key or "output" in key)]
    assert len([key for key in deep if "shortcut" not in key]) == 8


@pytest.mark.parametrize(("norm", "layers", "buffers"), [("group", 9, 0), ("batch", 9, 2)])
def test_resnet8_takes_its_normalisation_from_its_settings(norm: str, layers: int, buffers: int) -> None:
    settings = MODELS["resnet8"](norm=norm)
    kind = nn.GroupNorm if norm == "group" else nn.BatchNorm2d
    found = [layer for layer in settings.build((1, 8, 8), 3).modules() if isinstance(layer, kind)]
    assert len(found) == layers
    task = make_task("resnet8", settings, (1, 8, 8), 3, 0)
    channels = 16 * 3 + 32 * 3 + 64 * 3
    assert task.buffer_size == buffers * channels


def test_initial_weights_are_a_function_of_the_seed() -> None:
    def initial(seed: int) -> torch.Tensor:
        return make_task("mlp", MODELS["mlp"](), (4,), 3, seed).initial()

    torch.manual_seed(1)
    first = initial(0)
    torch.rand(7)
    assert torch.equal(first, initial(0))
    assert not torch.equal(first, initial(1))


def test_building_a_model_leaves_pytorchs_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    seeded(lambda: nn.Linear(5, 5), 0)
    assert torch.equal(torch.rand(4), expected)


def test_a_second_model_of_a_run_has_weights_of_its_own() -> None:
    first, second = (seeded(lambda: nn.Linear(5, 5), 0, index) for index in (0, 1))
    assert not torch.equal(first.weight, second.weight)


def test_initial_weights_are_pytorchs_uniform_of_the_fan_in() -> None:
    task = make_task("softmax", MODELS["softmax"](), (400,), 50, 0)
    bound = 1 / 20
    assert float(task.initial().abs().max()) <= bound
    assert float(task.initial().std()) == pytest.approx(bound / 3**0.5, rel=0.05)


@pytest.mark.parametrize("name", ["cnn", "lenet", "cnn-spfl", "resnet8"])
def test_convolutions_refuse_what_is_no_image(name: str) -> None:
    with pytest.raises(SettingError, match=rf"{name}.*images.*\[12\]"):
        make_task(name, MODELS[name](), (12,), 3, 0)


@pytest.mark.parametrize(("name", "side"), [("lenet", 15), ("cnn-spfl", 15), ("cnn", 3)])
def test_images_too_small_for_a_model_are_refused_and_the_next_size_runs(name: str, side: int) -> None:
    with pytest.raises(SettingError, match=f"{side}×{side} are too small.*take"):
        make_task(name, MODELS[name](), (1, side, side), 3, 0)
    task = make_task(name, MODELS[name](), (1, side + 1, side + 1), 3, 0)
    assert task.outputs(task.initial(), torch.zeros(2, 1, side + 1, side + 1)).shape == (2, 3)


def test_a_named_model_needs_classes() -> None:
    with pytest.raises(SettingError, match=r"mlp.*no classes.*model of your own"):
        make_task("mlp", MODELS["mlp"](), (4,), None, 0)
