"""Samples and targets of any form: read, cut, partitioned and stored as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sartor
from sartor import nests
from sartor.data import (
    from_clients,
    from_dataset,
    from_folder,
    lazy_clients,
    moments,
    prepare,
    source_from_dataset,
)
from sartor.data.moments import Moments, moments_of
from sartor.data.partitions import Partition, apply, make_partition
from sartor.errors import DataError, SettingError


def sample(n: int, first: int = 0) -> dict[str, Any]:
    """Every leaf knows the number of its sample."""
    number = np.arange(first, first + n)
    return {"ids": np.stack([number, number + 1], 1), "deep": (number.astype(np.float32), number % 2 == 0)}


def test_leaves_keep_their_types_and_stay_together() -> None:
    data = from_clients(
        {"a": (sample(10), np.arange(10) % 2), "b": (sample(20, 10), np.arange(20) % 2)},
        validation_fraction=0.2,
    )
    types = [torch.int64, torch.float32, torch.bool]
    assert [leaf.dtype for leaf in nests.leaves(data.train.x)] == types
    seen = []
    for split in (data.train, data.test, data.validation):
        assert split is not None
        for client in range(2):
            x, y = split.of(client)
            assert torch.equal(x["ids"][:, 0], x["deep"][0].long())
            assert torch.equal(x["deep"][1], x["ids"][:, 0] % 2 == 0)
            assert torch.equal(x["ids"][:, 0] % 2, y)
            seen += x["ids"][:, 0].tolist()
    assert sorted(seen) == list(range(30))


def test_the_hash_is_of_every_leaf_and_its_name() -> None:
    y = np.arange(10) % 2
    hashes = {
        from_clients({"a": (x, y)}).hash
        for x in (
            sample(10),
            sample(10, 1),
            {**sample(10), "deep": tuple(reversed(sample(10)["deep"]))},
            {"other": sample(10)["ids"], "deep": sample(10)["deep"]},
            {**sample(10), "ids": sample(10)["ids"].astype(np.int32)},
        )
    }
    assert len(hashes) == 5
    turned = {"deep": sample(10)["deep"], "ids": sample(10)["ids"]}
    both = from_clients({"a": (sample(10), y), "b": (turned, y)})  # the order of keys says nothing
    assert torch.equal(both.train.of(0)[0]["ids"], both.train.of(1)[0]["ids"])


@pytest.mark.parametrize(
    ("targets", "y", "classes"),
    [
        ("number", np.linspace(0, 1, 10), None),
        ("number", np.ones((10, 2, 3)), None),
        ("labels", np.eye(10)[:, :4], 4),
        ("classes", np.arange(20).reshape(10, 2) % 7 - 0, 7),
        ("any", {"kind": np.arange(10), "place": np.ones((10, 2))}, None),
        ("any", np.arange(10, dtype=np.int32) % 3, 3),
        ("any", np.linspace(0, 1, 10), None),
    ],
)
def test_targets_have_any_shape(targets: str, y: Any, classes: int | None) -> None:
    data = from_clients({"a": (np.eye(10), y)}, targets=targets)
    assert data.classes == classes
    wanted = nests.mapped(
        lambda leaf: leaf.shape[1:], nests.named(lambda _, leaf: torch.as_tensor(leaf), y, "y")
    )
    assert nests.mapped(lambda leaf: leaf.shape[1:], data.train.y) == wanted


@pytest.mark.parametrize(
    ("targets", "y", "message"),
    [
        ("labels", np.arange(10), r"y must be \[samples, labels\] of 0 and 1"),
        ("labels", np.full((10, 2), 0.5), "labels are 0 or 1 each, got another in sample 0"),
        ("classes", np.full((10, 2), -1), "classes are whole numbers from 0 .* in sample 0"),
        ("classes", np.full((10, 2), 0.5), "classes are whole numbers from 0"),
        ("classes", {"a": np.ones(10)}, "y is a dict; this objective takes one array"),
        ("number", np.array(["a"] * 10), "y must hold numbers"),
        ("any", {"a": np.ones(10), "b": np.ones(9)}, "y.b has 9 samples, y.a has 10"),
        ("any", {"a b": np.ones(10)}, "y has the key 'a b'; keys are names"),
        ("any", {}, "y holds no array"),
        ("anything", np.ones(10), "targets: one of class, classes, labels, number, any"),
    ],
)
def test_targets_that_are_not_what_they_should_be_are_named(targets: str, y: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_clients({"a": (np.eye(10), y)}, targets=targets)


def test_only_floats_are_normalised_each_leaf_by_itself() -> None:
    x = {"ids": np.arange(40).reshape(20, 2), "age": np.linspace(30, 60, 20), "lab": np.random.rand(20, 3)}
    data = from_clients({"a": (x, np.arange(20) % 2)})
    scaled = prepare(data, normalise=True)
    assert torch.equal(scaled.train.x["ids"], data.train.x["ids"])
    for leaf in ("age", "lab"):
        torch.testing.assert_close(
            scaled.train.x[leaf].mean(0), torch.zeros_like(scaled.train.x[leaf][0]), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            scaled.train.x[leaf].std(0, correction=0), torch.ones_like(scaled.train.x[leaf][0])
        )
    parts = [moments_of(nests.rows(data.train.x, rows)) for rows in (slice(0, 5), slice(5, None))]
    added = {path: parts[0][path] + parts[1][path] for path in parts[0]}
    assert added.keys() == {"x.ids", "x.age", "x.lab"}
    assert all(isinstance(each, Moments) for each in added.values())
    again = prepare(data, normalise=True, like=added)
    torch.testing.assert_close(again.test.x["lab"], scaled.test.x["lab"])


def test_a_folder_names_leaves_with_dots(tmp_path: Path) -> None:
    x, y = sample(10), np.arange(10) % 2
    flat = {"x.ids": x["ids"], "x.deep.0": x["deep"][0], "x.deep.1": x["deep"][1], "y": y}
    np.savez(tmp_path / "a.npz", **flat)
    assert from_folder(tmp_path).hash == from_clients({"a": (x, y)}).hash
    np.savez(tmp_path / "a.npz", **{"x.ids": x["ids"], "y.kind": y, "z": y})
    with pytest.raises(DataError, match=r"a\.npz: expected the arrays x and y"):
        from_folder(tmp_path)


class Records(torch.utils.data.Dataset[Any]):
    """Samples as dicts, with a site."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, place: int) -> Any:
        return {"v": torch.full((2,), float(place)), "site": torch.tensor(place % 3)}, torch.tensor(
            [place / 60.0]
        )


def test_samples_are_divided_by_any_label(tmp_path: Path) -> None:
    source = source_from_dataset(Records(), targets="number")
    with pytest.raises(
        DataError, match=r"name a leaf that has one number per sample \(partition.leaf: x.v, x.site, y\)"
    ):
        make_partition(source, {"name": "classes", "k": 1}, clients=3)
    partition = make_partition(source, {"name": "classes", "k": 1}, clients=3, leaf="x.site")
    data = apply(source, partition)
    assert [set(data.train.of(client)[0]["site"].tolist()) for client in range(3)] in [
        [{a}, {b}, {c}] for a, b, c in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
    ]
    partition.save(tmp_path / "p.npz")
    assert apply(source, Partition.load(tmp_path / "p.npz")).hash == data.hash
    with pytest.raises(SettingError, match=r"partition.leaf = 'x.sites': unknown leaf; did you mean x.site"):
        make_partition(source, "iid", clients=3, leaf="x.sites")
    with pytest.raises(DataError, match=r"partition.leaf = 'x.v': has \[2\] numbers per sample"):
        make_partition(source, "iid", clients=3, leaf="x.v")
    by_number = from_dataset(Records(), {"a": range(30), "b": range(30, 60)}, targets="number")
    assert by_number.clients == 2
    assert from_dataset(Records(), "iid", clients=4, targets="number").clients == 4


def test_an_experiment_divides_by_a_leaf() -> None:
    @sartor.register_data("records")
    def records() -> Any:
        return source_from_dataset(Records(), targets="number")

    class Line(torch.nn.Linear):
        def forward(self, v: torch.Tensor, site: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(v)

    try:
        partition = {"name": "classes", "k": 1, "leaf": "x.site"}
        result = sartor.run(
            data="records",
            clients=3,
            rounds=1,
            partition=partition,
            model=Line(2, 1),
            objective="regression",
            store=False,
        )
        assert result.summary["clients"] == 3
    finally:
        from sartor.data.sources import SOURCES

        SOURCES.remove("records")


def test_lazy_samples_that_differ_in_form_are_named() -> None:
    def fetch(client: int) -> Any:
        x = sample(6)
        return (x if client < 3 else {"ids": x["ids"]}), np.arange(6) % 2

    data = lazy_clients(5, fetch, n_train=4, n_test=2, classes=2, pooled=(sample(2), np.arange(2)))
    assert nests.length(data.train.of(2)[0]) == 4
    with pytest.raises(
        DataError, match=r"client 3: x holds x.ids, but those of other clients have x.ids, x.deep"
    ):
        data.train.of(3)


def test_paths_and_nests_are_each_others_inverse() -> None:
    nest = {"a": torch.ones(2), "b": (torch.ones(2), {"c": torch.ones(2)})}
    found = nests.paths(nest, "x")
    assert list(found) == ["x.a", "x.b[0]", "x.b[1].c"]
    assert nests.form(nests.built(found, "x")) == nests.form(nest)
    for wrong in ({}, {"x.a": 1, "x": 2}, {"x[1]": 1}, {"x.a": 1, "x[0]": 2}, {"y": 1}, {"x.1": 1}):
        with pytest.raises(ValueError, match=r"leaf|leaves"):
            nests.built(wrong, "x")


@pytest.mark.parametrize("shape", [(23,), (23, 4), (23, 3, 5, 5), (0, 3, 2, 2), (5, 3, 0)])
def test_moments_are_those_of_all_samples_however_many_are_taken_at_a_time(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 3
    whole = Moments.of(x)
    for most in (1, 40, 200):
        monkeypatch.setattr(moments, "CACHED", most)
        found = Moments.of(x)
        assert found.number == whole.number
        torch.testing.assert_close(found.mean, whole.mean)
        torch.testing.assert_close(found.squares, whole.squares)
    if x.numel():
        channels = x.double().movedim(1, 0).flatten(1) if x.ndim > 1 else x.double()[None]
        torch.testing.assert_close(whole.squares, channels.var(1, correction=0) * whole.number)
