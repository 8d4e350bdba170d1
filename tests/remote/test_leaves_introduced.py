"""What a node says of samples that have several leaves is bounded as what it says of one array."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flower_grid import experiment_of

from sartor.data.moments import Moments, moments_of
from sartor.remote.admission import (
    Introduction,
    far_off,
    introduction_of,
    moments_like,
    not_expected,
    sent_moments,
)
from sartor.remote.form import check_form
from sartor.remote.messages import BadMessage, spec_of
from sartor.remote.requests import Failed

X = {"image": torch.arange(24.0).view(4, 2, 3), "age": torch.arange(4)}
HEADER: dict[str, Any] = {
    "names": ["a", "b"],
    "counts": {"train": [3, 1], "test": [1, 0]},
    "x": {"x.image": ["float32", [2, 3]], "x.age": ["int64", []]},
    "y": {"y": ["int64", []]},
    "classes": 3,
    "labels": None,
    "features": None,
    "hash": "0",
    "process": "1",
}


def introduced(x: dict[str, tuple[int, ...]], y: tuple[int, ...] = (), **moments: Moments) -> Introduction:
    return Introduction(
        ("a",),
        {"train": [4], "test": [1]},
        {path: ("float32", shape) for path, shape in x.items()},
        {"y": ("int64", y)},
        3,
        "0",
        "1",
        {f"x.{leaf}": held for leaf, held in moments.items()} or None,
    )


def test_moments_are_those_of_each_leaf() -> None:
    numbers, tensors = sent_moments(moments_of(X))
    shapes = {path: tuple(shape) for path, (_, shape) in HEADER["x"].items()}
    assert {name: spec_of(value) for name, value in tensors.items()} == moments_like(shapes)
    met = introduction_of({**HEADER, "number": numbers}, {"moments": tensors}, True)
    assert met.moments is not None
    assert {path: held.number for path, held in met.moments.items()} == {"x.image": 12, "x.age": 4}
    for wrong in ({"x.image": 13}, {"x.age": 3}):
        with pytest.raises(Failed, match="not that of its training samples"):
            introduction_of({**HEADER, "number": {**numbers, **wrong}}, {"moments": tensors}, True)
    with pytest.raises(Failed, match="number: expected one for each leaf"):
        introduction_of({**HEADER, "number": {"x.image": 12}}, {"moments": tensors}, True)
    beyond = {**tensors, "mean x.age": torch.full((1,), 1e18, dtype=torch.float64)}
    with pytest.raises(Failed, match="not those of any samples"):
        introduction_of({**HEADER, "number": numbers}, {"moments": beyond}, True)


@pytest.mark.parametrize(
    ("expect", "met", "reason"),
    [
        ({"shape": [2, 3]}, introduced({"x.image": (2, 3)}), None),
        (
            {"shape": [2, 3]},
            introduced({"x.image": (2, 3), "x.age": ()}),
            "samples of shape x.image [2, 3], x.age [], expected [2, 3] (expect.shape)",
        ),
        ({}, introduced({"x.a": (2**19,), "x.b": (2**19,)}), None),
        ({}, introduced({"x.a": (2**19,), "x.b": (2**19 + 1,)}), "1048577 numbers; the server must be told"),
        ({}, introduced({"x": (2,)}, y=(2**20 + 1,)), "its targets have 1048577 numbers"),
    ],
)
def test_what_is_expected_holds_for_leaves(
    expect: dict[str, Any], met: Introduction, reason: str | None
) -> None:
    found = not_expected(met, experiment_of("fedavg", expect=expect))
    assert found is None if reason is None else reason in str(found)


def test_a_leaf_outside_the_range_is_found() -> None:
    experiment = experiment_of("fedavg", expect={"low": 0.0, "high": 30.0})
    shapes = {"x.image": (2, 3), "x.age": ()}
    held = {path.removeprefix("x."): moments for path, moments in moments_of(X).items()}
    assert not_expected(introduced(shapes, **held), experiment) is None
    older = Moments.of(X["age"] + 40)
    assert "do not lie between 0 and 30" in str(
        not_expected(introduced(shapes, **{**held, "age": older}), experiment)
    )


def test_a_node_is_far_off_by_any_leaf() -> None:
    shapes = {"x.image": (2, 3), "x.age": ()}
    held = {path.removeprefix("x."): moments for path, moments in moments_of(X).items()}
    told = dict.fromkeys((1, 2, 3), introduced(shapes, **held))
    assert far_off(told) == {}
    for leaf in held:
        wrong = {**held, leaf: Moments.of(1e6 * X[leaf])}
        assert set(far_off({**told, 4: introduced(shapes, **wrong)})) == {4}


def test_numbers_in_a_request_are_a_table() -> None:
    header = {"kind": "fail", "reason": "none"}
    assert check_form({**header, "number": {"x": 3}}) == "fail"
    for wrong in (3, {"x": "3"}, [3]):
        with pytest.raises(BadMessage, match="fail: number is"):
            check_form({**header, "number": wrong})
