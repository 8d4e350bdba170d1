"""Shifted pictures whose edges are mirrored."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import sartor
from sartor.client.augment import Crop
from sartor.model.batch import Batch


def test_mirrored_edges_are_windows_of_the_mirrored_picture() -> None:
    x = torch.rand(64, 2, 5, 7)
    made = Crop(padding=2, edges="mirrored").apply(11, Batch(x, torch.zeros(64))).x
    around = F.pad(x, [2] * 4, mode="reflect")
    seen = set()
    for sample in range(64):
        found = [
            (down, right)
            for down in range(5)
            for right in range(5)
            if torch.equal(around[sample, :, down : down + 5, right : right + 7], made[sample])
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 15  # of the 25 places


def test_edges_do_not_change_where_pictures_go() -> None:
    x = torch.rand(8, 1, 6, 6)
    zero, mirrored = (Crop(2, edges).apply(3, Batch(x, torch.zeros(8))).x for edges in ("zero", "mirrored"))
    inside = zero != 0
    assert torch.equal(zero[inside], mirrored[inside])
    assert bool((mirrored > 0).all())


def test_edges_have_two_words() -> None:
    from sartor.client.augment import made
    from sartor.errors import SettingError

    with pytest.raises(SettingError, match="edges"):
        made({"name": "crop", "edges": "white"}, "local.augment[0]")


def test_engines_agree_on_mirrored_pictures(traced: None) -> None:
    def losses(engine: str) -> list[float]:
        result = sartor.run(
            "fedavg",
            clients=3,
            rounds=2,
            model="softmax",
            local={"batch": 32, "augment": [{"name": "crop", "padding": 2, "edges": "mirrored"}, "flip"]},
            engine=engine,
            store=False,
        )
        return [row["evaluation"]["shared_local"]["loss"] for row in result.rounds if "evaluation" in row]

    assert losses("stacked") == pytest.approx(losses("loop"), rel=1e-4)
