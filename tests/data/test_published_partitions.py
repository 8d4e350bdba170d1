"""Partitions of published benchmarks: PFLlib's blocks, NIID-Bench's drawn labels, and one set cut in two."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sartor
from sartor.data import apply, load_source, make_partition
from sartor.data.features import Scale
from sartor.errors import DataError, SettingError
from sartor.model.networks import MODELS, make_task
from sartor.runs.experiment import load
from sartor.runs.setup import divided, load_data


def labels_of(*counts: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))


def test_blocks_of_clients_share_their_classes() -> None:
    partition = make_partition((labels_of(*[700] * 10), labels_of(*[100] * 10)), "blocks", clients=20, seed=3)
    held = partition.counts() > 0
    for client in range(20):
        first = 2 * (client // 4)
        assert np.flatnonzero(held[client]).tolist() == [first, first + 1]
    assert sorted(np.concatenate(partition.train)) == list(range(7000))
    assert partition.notes == ()


@given(st.lists(st.integers(40, 90), min_size=2, max_size=6), st.integers(1, 9), st.data())
@settings(max_examples=40)
def test_parts_of_a_block_are_between_the_least_and_an_even_one(sizes, clients, data) -> None:
    k, least = data.draw(st.integers(1, len(sizes))), data.draw(st.sampled_from([0.1, 0.5, 1.0]))
    labels = labels_of(*sizes), labels_of(*[20] * len(sizes))
    partition = make_partition(labels, {"name": "blocks", "k": k, "least": least}, clients, seed=1)
    counts = partition.counts()
    assert ((counts > 0).sum(axis=1) <= k).all()
    assert (counts.sum(axis=1) > 0).all()
    for label, size in enumerate(sizes):
        parts = counts[counts[:, label] > 0, label]
        if not len(parts):
            assert f"leave classes [{label}" in " ".join(partition.notes) or label > 0
            continue
        even = size // len(parts)
        assert parts.sum() == size
        assert ((parts[:-1] >= least * even) & (parts[:-1] <= even)).all()
        assert parts[-1] >= even
    assert ((counts > 0).sum(axis=1) < k).any() == any("fewer than" in note for note in partition.notes)


def test_what_blocks_leave_out_is_said() -> None:
    labels = labels_of(*[30] * 10), labels_of(*[9] * 10)
    notes = make_partition(labels, {"name": "blocks", "k": 2}, clients=7).notes
    assert notes == ("7 clients of 2 classes leave classes [8, 9] unused",)
    notes = make_partition(labels, {"name": "blocks", "k": 3}, clients=10).notes
    assert notes == ("1 clients, the last, have fewer than 3 classes",)
    with pytest.raises(DataError, match="class 0 has 3 samples for 4 clients"):
        make_partition((labels_of(3, 3), labels_of(5, 5)), "blocks", clients=4)
    with pytest.raises(SettingError, match=r"partition\.k: the data have 2 classes, got 3"):
        make_partition((labels_of(9, 9), labels_of(5, 5)), {"name": "blocks", "k": 3}, clients=4)


PFLLIB = {
    "blocks": {0: [1236, 1080], 1: [410, 890], 7: [5242, 3804], 11: [2668, 3926], 19: [4094, 3194]},
    "by law": {
        0: [67, 1, 0, 0, 0, 0, 2, 0, 5, 7],
        7: [285, 23, 7, 2024, 0, 170, 1952, 0, 0, 0],
        19: [1, 491, 1876, 267, 1, 2060, 1, 0, 0, 1],
    },
}
"""Samples by class of some of 20 clients, as PFLlib's generate_FashionMNIST.py (d832e76) deals them."""


def test_pfllib_s_own_draw_of_fashion_mnist() -> None:
    labels, wholes = labels_of(*[7000] * 10), {}
    for kind, spec in (("blocks", {"k": 2}), ("by law", {"alpha": 0.1})):
        made = [make_partition(labels, {"name": "pfllib", **spec}, clients=20, seed=seed) for seed in (0, 5)]
        assert made[0].hash == made[1].hash
        wholes[kind] = made[0].counts("train") + made[0].counts("test")
        assert made[0].counts("test").sum(axis=1).tolist() == [
            total - int(0.75 * total) for total in wholes[kind].sum(axis=1)
        ]
        assert sorted(np.concatenate([*made[0].train, *made[0].test])) == list(range(70_000))
    for client, counts in PFLLIB["blocks"].items():
        mine = wholes["blocks"][client]
        assert mine[mine > 0].tolist() == counts
        assert np.flatnonzero(mine)[0] == 2 * (client // 4)
    for client, counts in PFLLIB["by law"].items():
        assert wholes["by law"][client].tolist() == counts


def test_pfllib_s_own_draw_sample_for_sample() -> None:
    """By its functions, of 40 samples whose labels are 0, 1, 0, 1, …: who trains and tests on which."""
    made = make_partition(np.arange(40) % 2, {"name": "pfllib", "k": 1}, clients=4)
    assert [part.tolist() for part in made.train] == [
        [0, 2, 6, 8, 12],
        [14, 16, 18, 22, 26, 28, 30, 34, 38],
        [3, 5, 9],
        [11, 13, 19, 21, 23, 25, 29, 31, 33, 35, 37],
    ]
    assert [part.tolist() for part in made.test] == [[4, 10], [20, 24, 32, 36], [1, 7], [15, 17, 27, 39]]
    even = make_partition(np.arange(16) % 2, {"name": "pfllib", "k": 1, "even": True}, clients=4)
    assert (even.counts("train") + even.counts("test")).tolist() == [[4, 0], [4, 0], [0, 4], [0, 4]]


def test_pfllib_s_draw_of_too_little_is_refused() -> None:
    with pytest.raises(DataError, match="class 0 has 3 samples for 2 clients; use fewer clients"):
        make_partition(labels_of(3, 3), {"name": "pfllib", "k": 1}, clients=4)
    with pytest.raises(DataError, match="class 0 has 4 samples for 2 clients; use fewer clients"):
        make_partition(labels_of(4, *[60] * 9), {"name": "pfllib", "k": 2}, clients=10)
    with pytest.raises(DataError, match="none of 100 draws gives every client 20 samples"):
        make_partition(labels_of(200, 200), {"name": "pfllib", "alpha": 0.001}, clients=10)
    with pytest.raises(SettingError, match=r"partition\.k: the data have 2 classes, got 3"):
        make_partition(labels_of(9, 9), {"name": "pfllib", "k": 3}, clients=4)


def test_pfllib_s_draw_is_of_training_and_test_set_as_one() -> None:
    source = load_source("digits")
    words = ["data.clients=5", "partition.name=pfllib", "partition.alpha=0.5"]
    data, partition = load_data(load(None, words))
    assert partition is not None
    assert sorted(np.concatenate([*partition.train, *partition.test])) == list(range(sum(source.sizes)))
    assert int(data.test.count.sum()) == len(data.pooled_y)
    with pytest.raises(SettingError, match=r"partition\.test_share: .* test size of its own"):
        load_data(load(None, [*words, "partition.test_share=0.25"]))


@given(st.integers(2, 6), st.integers(1, 14), st.data(), st.integers(0, 2**32))
@settings(max_examples=40)
def test_drawn_classes_begin_with_the_next_in_turn(classes, clients, data, seed) -> None:
    k = data.draw(st.integers(1, classes))
    labels = labels_of(*[60] * classes), labels_of(*[20] * classes)
    partition = make_partition(labels, {"name": "classes", "k": k, "even": False}, clients, seed)
    counts = partition.counts()
    assert ((counts > 0).sum(axis=1) == k).all()
    assert all(counts[client, client % classes] for client in range(clients))
    for label in range(classes):
        parts = counts[counts[:, label] > 0, label]
        assert not len(parts) or parts.max() - parts.min() <= 1


def test_drawn_classes_are_not_used_equally_often() -> None:
    labels = labels_of(*[60] * 10), labels_of(*[20] * 10)
    drawn, even = (
        (make_partition(labels, {"name": "classes", "k": 3, "even": even}, 10, 0).counts() > 0).sum(axis=0)
        for even in (False, True)
    )
    assert even.tolist() == [3] * 10
    assert drawn.sum() == 30
    assert drawn.max() > 3


def test_one_set_is_cut_in_two() -> None:
    source = load_source("digits")
    one = source.merged()
    assert one.sizes == (sum(source.sizes), 0)
    assert torch.equal(one.train_x[: source.sizes[0]], source.train_x)
    assert torch.equal(one.train_y[source.sizes[0] :], source.test_y)
    words = ["data.clients=5", "partition.name=iid", "partition.test_share=0.25"]
    data, partition = load_data(load(None, words))
    assert partition is not None
    for train, test in zip(partition.train, partition.test, strict=True):
        assert len(test) == pytest.approx(0.25 * (len(train) + len(test)), abs=1)
    assert sorted(np.concatenate([*partition.train, *partition.test])) == list(range(one.sizes[0]))
    assert int(data.test.count.sum()) == len(data.pooled_y)
    assert data.hash == apply(one, partition).hash
    apart, _ = load_data(load(None, words[:2]))
    assert apart.hash != data.hash


@pytest.mark.parametrize(
    "words", [["partition.name=pfllib"], ["partition.name=iid", "partition.test_share=0.25"]]
)
def test_a_stored_partition_of_one_set_says_so_itself(words, tmp_path) -> None:
    data, partition = load_data(load(None, ["data.clients=5", *words]))
    assert partition is not None
    partition.save(tmp_path / "stored.npz")
    again, _ = load_data(load(None, ["data.clients=5", f"partition.file={tmp_path / 'stored.npz'}"]))
    assert again.hash == data.hash
    assert torch.equal(again.test.x, data.test.x)


@pytest.mark.parametrize("partition", [{"name": "parts"}, {"name": "classes", "train": 20, "test": 5}])
def test_two_test_sizes_are_one_too_many(partition) -> None:
    experiment = {"data": {"clients": 4}, "partition": {**partition, "test_share": 0.25}}
    with pytest.raises(SettingError, match=r"partition\.test_share: .* test size of its own"):
        sartor.run("fedavg", experiment=experiment, rounds=1, store=False)


def test_the_share_is_of_a_source_given_in_python_too() -> None:
    given = load(None, ["data.clients=4", "partition.name=iid", "partition.test_share=0.5"])
    data, _ = divided(load_source("digits"), given)
    assert abs(int(data.test.count.sum()) - int(data.train.count.sum())) <= 4


def test_scale_is_where_pixels_of_one_half_are_zero() -> None:
    assert Scale()(torch.tensor([[0.0, 0.5, 1.0]])).tolist() == [[-1.0, 0.0, 1.0]]
    assert Scale(centre=1.0, width=2.0)(torch.tensor([5.0])).tolist() == [2.0]


def test_the_unpadded_network_has_pfllib_s_layers() -> None:
    task = make_task("cnn", MODELS["cnn"](padding=0), (1, 28, 28), 10, seed=0)
    first, second = 32 * 25 + 32, 64 * 32 * 25 + 64
    assert task.size == first + second + (64 * 4 * 4) * 512 + 512 + 512 * 10 + 10
