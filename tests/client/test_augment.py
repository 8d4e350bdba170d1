"""Augmentations: what each does to a batch, drawn from the keyed streams, on every engine the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sartor
from helpers import batches_of, classification, federation_of, module_of
from sartor.client.augment import AUGMENTATIONS, Augmentation, augmented, beta_quantile, made
from sartor.client.local import Client
from sartor.errors import SartorError, SettingError
from sartor.federation import Reply
from sartor.model.batch import Batch, Mixed
from sartor.model.task import Task
from sartor.runs.experiment import fingerprint, from_mapping, to_mapping, to_toml

ALL = [
    {"name": "crop", "padding": 1},
    "flip",
    "colour",
    {"name": "cut-out", "size": 2},
    {"name": "mix-up", "alpha": 0.7},
]
PICTURES = torch.arange(1.0, 2 * 3 * 4 * 5 + 1).view(2, 3, 4, 5)


def once(entry: Any, x: Tensor, y: Tensor | None = None, key: int = 1, weight: Tensor | None = None) -> Batch:
    y = torch.arange(len(x)) if y is None else y
    return augmented([made(entry, "augment")], Batch(x, y, weight, key), "batch")


def test_a_crop_is_a_window_of_the_padded_picture() -> None:
    padded = F.pad(PICTURES, [1, 1, 1, 1])
    seen = set()
    for key in range(30):
        after = once({"name": "crop", "padding": 1}, PICTURES, key=key).x
        for number in range(2):
            places = [
                (up, left)
                for up in range(3)
                for left in range(3)
                if torch.equal(after[number], padded[number, :, up : up + 4, left : left + 5])
            ]
            assert len(places) == 1
            seen.add(places[0])
    assert len(seen) == 9  # every shift comes up


def test_a_flip_is_the_mirror_image_and_takes_the_target_along() -> None:
    y = torch.arange(2 * 4 * 5).view(2, 4, 5)
    both = once({"name": "flip", "chance": 1.0}, PICTURES, y)
    assert torch.equal(both.x, PICTURES.flip(3))
    assert torch.equal(both.y, y.flip(2))
    neither = once({"name": "flip", "chance": 0.0}, PICTURES, y)
    assert torch.equal(neither.x, PICTURES)
    many = once("flip", PICTURES[:1].expand(2000, -1, -1, -1))
    assert float((many.x[:, 0, 0, 0] != 1).double().mean()) == pytest.approx(0.5, abs=0.05)
    assert torch.equal(many.y, torch.arange(2000))  # classes do not lie on a picture


def test_colours_change_by_one_light_contrast_and_saturation_of_each_picture() -> None:
    none = {"name": "colour", "brightness": 0.0, "contrast": 0.0, "saturation": 0.0}
    assert torch.allclose(once(none, PICTURES).x, PICTURES)
    light = once({**none, "brightness": 0.5}, PICTURES).x - PICTURES
    assert torch.allclose(light, light[:, :1, :1, :1].expand_as(light), atol=1e-4)
    assert light.abs().max() <= 0.5
    assert light[0, 0, 0, 0] != light[1, 0, 0, 0]
    contrast = once({**none, "contrast": 0.5}, PICTURES).x
    mean = PICTURES.mean(dim=(1, 2, 3), keepdim=True)
    ratio = (contrast - mean) / (PICTURES - mean)
    assert torch.allclose(ratio, ratio[:, :1, :1, :1].expand_as(ratio), rtol=1e-3)
    colour = once({**none, "saturation": 0.5}, PICTURES).x
    assert torch.allclose(colour.mean(1), PICTURES.mean(1), rtol=1e-5)  # the same in grey
    assert not torch.allclose(colour, PICTURES)


def test_cut_out_is_one_square() -> None:
    for key in range(10):
        cut = once({"name": "cut-out", "size": 2}, PICTURES, key=key).x == 0
        for picture in cut:
            assert torch.equal(picture[0], picture[1])
            rows, columns = picture[0].any(1), picture[0].any(0)
            assert torch.equal(picture[0], rows[:, None] & columns[None, :])
            assert 1 <= int(rows.sum()) <= 2
            assert 1 <= int(columns.sum()) <= 2


def test_mix_up_mixes_samples_and_their_losses() -> None:
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    after = once({"name": "mix-up", "alpha": 1.0}, x, y)
    assert isinstance(after.y, Mixed)
    share = after.y.share[:, None]
    other = [row for row in range(1, 5) if torch.allclose(after.x, share * x + (1 - share) * x.roll(-row, 0))]
    assert len(other) == 1
    assert torch.equal(after.y.other, y.roll(-other[0], 0))
    task = Task(nn.Linear(3, 3).double(), classes=3)
    w = task.initial()
    scores = task.outputs(w, after.x)
    one = F.cross_entropy(scores, y, reduction="none")
    two = F.cross_entropy(scores, after.y.other, reduction="none")
    assert torch.allclose(task.losses(w, after), after.y.share * one + (1 - after.y.share) * two)


def test_samples_are_mixed_with_real_ones() -> None:
    x = torch.tensor([[1.0], [2.0], [1e9], [1e9]])
    for key in range(20):
        after = once({"name": "mix-up", "alpha": 1.0}, x, key=key, weight=torch.tensor([1.0, 1.0, 0.0, 0.0]))
        assert float(after.x[:2].max()) <= 2
    alone = once("mix-up", x[:1])
    assert torch.allclose(alone.x, x[:1])


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 4.0])
def test_shares_have_the_beta_distribution(alpha: float) -> None:
    probability = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    share = beta_quantile(alpha, probability)
    assert float(share.mean()) == pytest.approx(0.5, abs=1e-6)
    assert float(share.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=2e-3)
    assert bool((share.diff() >= 0).all())


# In training ------------------------------------------------------------------------------------------------


def train(client: Client, hyper: Any, w: Tensor) -> Reply:
    after = client.descend(w, lr=0.1)
    return Reply(w=after, loss=client.loss(w), gradient=client.full_gradient(w))


def left(engine: str, augment: list[Any], **local: Any) -> dict[str, Tensor]:
    data = classification((3, 11, 16), shape=(3, 4, 4), classes=4, dtype=torch.float64)
    task = Task(module_of("mlp", (3, 4, 4), 4, hidden=6), classes=4)
    federation = federation_of(engine, task, data, local={"batch": 4, "augment": augment, **local})
    return dict(federation.map(train, range(3), {"w": task.initial()}).values)


def test_engines_agree_and_what_is_measured_is_not_augmented() -> None:
    plain = left("loop", [])
    for local in ({}, {"micro": 3}):
        loop, stacked = left("loop", ALL, **local), left("stacked", ALL, **local)
        for name in loop:
            assert torch.allclose(loop[name], stacked[name], rtol=1e-9, atol=1e-11), name
        assert torch.allclose(loop["gradient"], plain["gradient"])
        assert torch.allclose(loop["loss"], plain["loss"])
        assert not torch.allclose(loop["w"], plain["w"])


def test_every_batch_round_and_client_is_changed_in_its_own_way() -> None:
    data = classification((8, 8), shape=(1, 4, 4), classes=2)
    task = Task(module_of("mlp", (1, 4, 4), 2).float(), classes=2)
    augment = [{"name": "colour", "contrast": 0.0, "saturation": 0.0, "brightness": 1.0}]
    changed, plain = (
        federation_of("loop", task, data, local={"batch": 8, "epochs": 2, "augment": entries}, workers=1)
        for entries in (augment, [])
    )
    added = set()
    for number in (0, 1):
        for round in (1, 2):
            pairs = zip(batches_of(changed, number, round), batches_of(plain, number, round), strict=True)
            for one, other in pairs:
                added |= {round_off(value) for value in (one.x - other.x)[:, 0, 0, 0].tolist()}
    assert len(added) == 2 * 2 * 2 * 8


def round_off(value: float) -> float:
    return round(value, 4)


# A user's own -----------------------------------------------------------------------------------------------


@pytest.fixture
def jitter() -> Any:
    @sartor.register_augmentation("shaken")
    def jitter(x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)

    @sartor.register_augmentation("shift")
    @dataclass(frozen=True)
    class Shift(Augmentation):
        by: float = sartor.setting(1.0, "how far")

        def apply(self, key: Any, batch: Batch) -> Batch:
            return batch._replace(x=batch.x + self.by)

    yield jitter
    AUGMENTATIONS.remove("shaken")
    AUGMENTATIONS.remove("shift")


@pytest.mark.usefixtures("jitter")
def test_a_function_of_ones_own_draws_from_the_keyed_streams() -> None:
    torch.manual_seed(1)
    loop = left("loop", ["shaken", {"name": "shift", "by": 0.5}])
    torch.manual_seed(2)
    stacked = left("stacked", ["shaken", {"name": "shift", "by": 0.5}])
    assert torch.allclose(loop["w"], stacked["w"], rtol=1e-9, atol=1e-11)
    assert torch.equal(once({"name": "shift", "by": 0.5}, PICTURES).x, PICTURES + 0.5)


def test_what_is_no_augmentation_is_not_registered() -> None:
    with pytest.raises(SartorError, match="augmentation 'wrong': expected a function"):
        sartor.register_augmentation("wrong")(nn.Linear)


# As settings ------------------------------------------------------------------------------------------------


def test_augmentations_are_settings_that_are_written_and_read() -> None:
    experiment = from_mapping({"local": {"augment": ALL}})
    again = from_mapping(to_mapping(experiment))
    assert again == experiment
    assert fingerprint(again) == fingerprint(experiment) != fingerprint(from_mapping({}))
    assert '{name = "crop", padding = 1, edges =' in to_toml(experiment).replace('"name"', "name")


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (["crp"], r"local\.augment\[0\] = 'crp': unknown name; did you mean crop\?"),
        ([{"name": "crop", "padding": 0}], r"local\.augment\[0\]\.padding: must be at least 1, got 0"),
        ([{"name": "crop", "pading": 1}], r"local\.augment\[0\]\.pading: unknown key; did you mean"),
        ([3], r"local\.augment\[0\]: expected a name, or a table with a name, got 3"),
        (["mix-up", "flip"], r"local\.augment: mix-up mixes what the others give; name it last"),
        ("flip", r"local\.augment: expected a list, got 'flip'"),
    ],
)
def test_wrong_ones_are_refused(augment: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        from_mapping({"local": {"augment": augment}})


def test_samples_that_an_augmentation_cannot_take_are_refused() -> None:
    data = classification((5, 3), shape=(5,), classes=2)
    task = Task(nn.Linear(5, 2), classes=2)
    with pytest.raises(
        SettingError, match=r"local\.augment: crop is for pictures, .* samples are shape \[5\]"
    ):
        federation_of("loop", task, data, local={"augment": ["crop"]})
    scans = {"a": (torch.randn(6, 1, 4, 4), torch.randint(0, 2, (6, 4, 4)))}
    with pytest.raises(SettingError, match=r"local\.augment: crop leaves no target"):
        sartor.run(
            "fedavg",
            data=scans,
            model=nn.Conv2d(1, 2, 1),
            objective="segmentation",
            local={"augment": ["crop"]},
            store=False,
        )
