"""A node that requires clipping and noise takes part where ``[privacy]`` has it do both to its own reply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_policy import CALL, CLIP, Server

from sartor.federation import protection
from sartor.federation.transforms import plain_shapes, shapes_of
from sartor.remote.policy import Policy, Requirement

NOISE = Requirement("noise", least={"deviation": 0.5})
CAREFUL = Policy(require=(CLIP, NOISE))
LOCAL: dict[str, Any] = {"mode": "local", "clip": 0.5, "noise": 1.0, "secret": True}


@pytest.mark.parametrize(
    ("privacy", "transforms"),
    [
        (LOCAL, []),  # deviation 1 · 0.5
        ({**LOCAL, "clip": 1.0, "noise": 0.5}, []),
        ({**LOCAL, "noise": None, "epsilon": 0.5}, []),  # for which much noise is needed
        (LOCAL, [{"name": "top-k"}, {"name": "int8"}]),
    ],
)
def test_local_noise_of_that_strength_is_what_is_required(
    privacy: dict[str, Any], transforms: list[Any]
) -> None:
    given = {name: value for name, value in privacy.items() if value is not None}
    assert Server(CAREFUL).greet(privacy=given, transforms=transforms) == ""
    assert Server(Policy(require=(CLIP,))).greet(privacy=given, transforms=transforms) == ""


@pytest.mark.parametrize(
    ("privacy", "transforms", "word"),
    [
        ({**LOCAL, "noise": 0.9}, [], "noise.deviation must be at least 0.5, it is 0.45"),
        ({**LOCAL, "clip": 2.0}, [], "clip.norm must be at most 1, it is 2"),
        ({**LOCAL, "noise": 0.0}, [], "noise.deviation must be at least 0.5, it is 0"),
        ({**LOCAL, "secret": False}, [], "counts with privacy.secret = true"),
        (LOCAL, [{"name": "scale", "factor": 9.0}], "clip is required there"),
        ({**LOCAL, "mode": "samples"}, [], "clip, noise wanted, none there"),
        ({**LOCAL, "mode": "central"}, [], "clip, noise wanted, none there"),
    ],
)
def test_what_is_weaker_elsewhere_or_known_to_the_server_is_refused(
    privacy: dict[str, Any], transforms: list[Any], word: str
) -> None:
    told = Server(CAREFUL).greet(privacy=privacy, transforms=transforms)
    assert told.startswith("outside this node's policy: ")
    assert word in told


def test_a_reply_leaves_noised_and_cannot_be_had_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    left, w = [], torch.zeros(15)
    for secret in (1, 2):  # of two processes
        monkeypatch.setattr(protection, "SECRET", secret)
        server = Server(CAREFUL)
        assert server.greet(privacy=LOCAL) == ""
        error, sent = server.call(w)
        assert "without the transforms it requires" in error
        assert not sent
        told = {"shapes": plain_shapes(shapes_of({"w": w}, {})), "states": []}
        groups = {"shared": {"w": w, "transform__turn": torch.tensor(0)}}
        left.append(server.ask("call", groups, **{**CALL, "transformed": told})[1]["sent"]["delta"])
    # The same samples at the same round: what differs is two draws of deviation 0.5 for each of 15 numbers.
    assert 0.1 < float((left[0] - left[1]).norm()) < 10
