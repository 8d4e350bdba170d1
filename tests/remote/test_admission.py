"""Whatever a node says of itself, it is an introduction or it is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flower_grid import HereGrid, experiment_of
from hypothesis import given, settings
from hypothesis import strategies as st

from sartor.remote.admission import (
    INTRODUCTION,
    Admission,
    Introduction,
    assemble,
    introduction_of,
    misfit,
)
from sartor.remote.messages import DTYPES, Parts, encode
from sartor.remote.requests import Failed, Requests

HONEST: dict[str, Any] = {
    "names": ["a", "b"],
    "counts": {"train": [3, 4], "test": [1, 0]},
    "x": {"x": ["float32", [2, 5]]},
    "y": {"y": ["int64", []]},
    "classes": 3,
    "labels": None,
    "features": None,
    "hash": "0" * 64,
    "process": "1",
}
MOMENTS = {"mean x": torch.zeros(2, dtype=torch.float64), "squares x": torch.ones(2, dtype=torch.float64)}

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 2**24, 2**26, 2**40, 2**63, 10**4000]),
    st.floats(),
    st.text(st.characters(), max_size=8),
    st.sampled_from([*DTYPES, *HONEST]),
)
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.text(max_size=4) | st.sampled_from(["train", "test", "validation"]), inner),
    ),
    max_leaves=8,
)
tensors = st.builds(
    lambda dtype, shape, value: torch.full(shape, 1).to(dtype) * torch.tensor(value, dtype=torch.float64),
    st.sampled_from([torch.float64, torch.float32, torch.int64, torch.bool]),
    st.lists(st.integers(0, 3), max_size=3),
    st.floats(),
)
groups = st.dictionaries(
    st.sampled_from(["moments", "more"]),
    st.dictionaries(st.sampled_from(["mean x", "squares x", "more"]), tensors, max_size=3),
    max_size=2,
)


def read(header: dict[str, Any], held: Any, normalised: bool) -> Introduction | Failed:
    """The introduction or the refusal; nothing else may happen."""
    try:
        return introduction_of(header, held, normalised)
    except Failed as error:
        return error


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_whatever_a_node_says_it_is_understood_or_refused(data: st.DataObject) -> None:
    normalised = data.draw(st.booleans())
    header = {**HONEST, "nonce": "", "tensors": {}, **({"number": {"x": 35}} if normalised else {})}
    header |= data.draw(st.dictionaries(st.sampled_from(sorted(header)) | st.text(), values, max_size=3))
    for key in data.draw(st.lists(st.sampled_from(sorted(header)), max_size=1)):
        del header[key]
    held = data.draw(groups | st.just({"moments": MOMENTS} if normalised else {}))
    met = read(header, held, normalised)
    if isinstance(met, Failed):
        assert met.kind == "malformed"
        assert str(met).startswith("its introduction: ")
        assert str(met).isprintable()
        assert len(str(met)) < 500
    else:
        assert header.keys() <= {*INTRODUCTION, "number", "nonce", "tensors"}
        assert assemble({1: met}).names == tuple(sorted(met.names))
        assert misfit(met, [met]) is not None  # its own clients are there already


@settings(deadline=None, max_examples=200)
@given(values, st.booleans())
def test_whatever_is_sent_as_an_answer_it_is_understood_or_refused(value: Any, genuine: bool) -> None:
    """All the way from the bytes, with the secret and without it."""

    def change(node: int, parts: Parts) -> Parts:
        nonce = grid.nonce if genuine else "guessed"
        header = {**HONEST, **value} if isinstance(value, dict) else {**HONEST, "error": value}
        try:
            return encode({**header, "nonce": nonce})
        except ValueError:  # it is no JSON
            return {"header": repr(value).encode()}

    grid = Answering(change)
    admission = Admission(Requests(grid, 5.0), experiment_of("fedavg"))
    for _ in range(10):
        found = admission.met({1})
        if found:
            break
    assert isinstance(found[1], (Introduction, Failed))
    if isinstance(found[1], Failed):
        assert str(found[1]).isprintable()


class Answering(HereGrid):
    """One node, which answers what ``change`` says."""

    def __init__(self, change: Any) -> None:
        super().__init__({1: self}, change)  # type: ignore[dict-item]
        self.nonce = ""

    def handle(self, parts: Parts) -> Parts:
        from sartor.remote.messages import read_header

        self.nonce = read_header(parts)["nonce"]
        return encode({})


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("names", "ab", "names: expected one or more different"),
        ("names", ["a", "a"], "names: "),
        ("names", ["a", "b\n"], "names: "),
        ("names", ["a", "\ud800"], "names: "),
        ("names", ["a", "b" * 201], "names: "),
        ("counts", 5, "counts: expected whole numbers.*got 5"),
        ("counts", {"train": [3, 4]}, "counts: "),
        ("counts", {"train": [3, 4], "test": [1, True]}, "counts: "),
        ("counts", {"train": [3, 4], "test": [1, 2**40]}, "counts: "),
        ("counts", {"train": [3, 4], "test": [1]}, "counts: 1 for test, but there are 2 clients"),
        ("x", {"x": ["float32", [2**22, 2**22]]}, "x: "),
        ("x", {"x": ["float32", [1] * 17]}, "x: "),
        ("x", {"x": ["float32", [2, 0]]}, "x: "),
        ("x", {"x": ["complex64", [2]]}, "x: "),
        ("x", {"x": [["float32"], [2]]}, "x: "),
        ("x", {}, "x: "),
        ("x", {"x.a": ["float32", [2]], "x": ["float32", [2]]}, "x: "),
        ("x", {"x.a": ["float32", [2]], "x[0]": ["float32", [2]]}, "x: "),
        ("x", {"x[1]": ["float32", [2]]}, "x: "),
        ("x", {f"x[{place}]": ["float32", [2]] for place in range(65)}, "x: "),
        ("x", {"x" + ".a" * 300: ["float32", [2]]}, "x: "),
        ("y", {"x": ["int64", []]}, "y: "),
        ("y", 7, "y: "),
        ("classes", 2**24 - 1, "classes: "),
        ("classes", 0, "classes: "),
        ("hash", "", "hash: "),
        ("process", 1, "process: "),
        ("number", 1, "'number': nobody asked for that"),
    ],
)
def test_a_wrong_entry_is_named(key: str, value: Any, reason: str) -> None:
    assert introduction_of({**HONEST, "nonce": "", "tensors": {}}, {}, False).names == ("a", "b")
    with pytest.raises(Failed, match=rf"^its introduction: {reason}"):
        introduction_of({**HONEST, key: value}, {}, False)


@pytest.mark.parametrize("key", sorted(HONEST))
def test_a_missing_entry_is_named(key: str) -> None:
    with pytest.raises(Failed, match=rf"^its introduction: {key}: there is none"):
        introduction_of({name: value for name, value in HONEST.items() if name != key}, {}, False)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"mean x": MOMENTS["mean x"]},
        {**MOMENTS, "mean x": torch.zeros(3, dtype=torch.float64)},
        {**MOMENTS, "mean x": torch.zeros(2)},
        {**MOMENTS, "mean x": MOMENTS["mean x"] * torch.nan},
        {**MOMENTS, "mean x": MOMENTS["mean x"] - 1e200},
        {**MOMENTS, "squares x": MOMENTS["squares x"] * torch.inf},
        {**MOMENTS, "squares x": -MOMENTS["squares x"]},
        {**MOMENTS, "more": MOMENTS["mean x"]},
    ],
)
def test_wrong_moments_are_refused(wrong: Any) -> None:
    header = {**HONEST, "number": {"x": 35}}
    met = introduction_of(header, {"moments": MOMENTS}, True)
    assert met.moments is not None
    assert met.moments["x"].number == 35
    for held in ({"moments": wrong}, {"moments": MOMENTS, "more": wrong}):
        with pytest.raises(Failed, match=r"^its introduction: moments: "):
            introduction_of(header, held, True)
    with pytest.raises(Failed, match=r"^its introduction: tensors: "):
        introduction_of(HONEST, {"moments": MOMENTS}, False)
