"""Partitions: what each scheme promises, the matched test data, the saved artefact."""

import dataclasses
import time

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sartor.data.apportion import apportion, cut, round_to
from sartor.data.features import Hog
from sartor.data.partitions import (
    PARTITIONS,
    Partition,
    apply,
    describe,
    find_scheme,
    make_partition,
    plot_partition,
)
from sartor.data.schemes import Column, Dirichlet, Labels, Parts, Practical, class_counts, match_test
from sartor.data.sources import Source
from sartor.data.streams import stream
from sartor.errors import DataError, SettingError

quick = settings(max_examples=40)
seeds = st.integers(0, 2**63 - 1)
COVERING = [
    {"name": "iid"},
    {"name": "shards"},
    {"name": "shards", "shards_per_client": 1},
    {"name": "dirichlet", "alpha": 0.1, "least": 1},
    {"name": "dirichlet", "alpha": 0.1, "least": 2, "balance": True},
    {"name": "dirichlet", "alpha": 0.3, "by": "client"},
    {"name": "practical", "dominant": 1},
]


def shuffled(counts: list[int], seed: int = 0) -> np.ndarray:
    """Labels with the given number of each class, in random order."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


@st.composite
def pools(draw, least: int = 1, most: int = 60, test: bool = True):
    """Labels of a training and a test set with every class in both."""
    classes = draw(st.integers(2, 7))
    sizes = st.lists(st.integers(least, most), min_size=classes, max_size=classes)
    train = shuffled(draw(sizes), draw(st.integers(0, 99)))
    return (train, shuffled(draw(sizes), 1)) if test else train


def source(train=(40, 40, 40), test=(10, 10, 10), shape=(1, 4, 4)) -> Source:
    random = torch.Generator().manual_seed(5)
    x, y = torch.rand(sum(train), *shape, generator=random), torch.from_numpy(shuffled(list(train)))
    test_x, test_y = (
        torch.rand(sum(test), *shape, generator=random) + 1,
        torch.from_numpy(shuffled(list(test))),
    )
    return Source("made up", x, y, test_x, test_y, len(train))


# --- rounding ---------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
@quick
def test_apportion_sums_to_the_total_and_is_within_one(total, shares):
    assume(sum(shares) > 0)
    counts = apportion(total, shares)
    exact = total * (np.array(shares) / max(shares)) / (np.array(shares) / max(shares)).sum()
    assert counts.sum() == total
    assert (np.abs(counts - exact) < 1 + 1e-6).all()


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 20)), min_size=1, max_size=12), st.data())
@quick
def test_apportion_respects_caps(pairs, data):
    shares, caps = map(np.array, zip(*pairs, strict=True))
    total = data.draw(st.integers(0, int(caps.sum())))
    counts = apportion(total, shares, caps)
    assert counts.sum() == total
    assert (counts <= caps).all()
    # Those not full stand in proportion to their shares: one factor fits all of them within one.
    free = (counts < caps) & (shares > 1e-9)
    if free.any() and total > 0:
        low, high = (counts[free] - 1) / shares[free], (counts[free] + 1) / shares[free]
        assert low.max() <= high.min() * (1 + 1e-9)


def test_apportion_survives_shares_too_small_to_divide():
    assert apportion(7, [5e-324, 5e-324, 0]).tolist() == [4, 3, 0]
    with pytest.raises(ValueError, match="do not fit"):
        apportion(5, [1, 1], caps=[2, 2])


def test_round_to_keeps_whole_numbers_whole():
    assert round_to(4, np.array([1.0, 1.0, 1.9])).tolist() == [1, 1, 2]
    assert round_to(3, np.array([1.0, 1.0, 1.9])).tolist() == [1, 1, 1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.floats(0.01, 0.9), seeds)
@quick
def test_cut_keeps_every_class_where_it_can(counts, fraction, seed):
    labels = shuffled(counts)
    assume(len(labels) >= 2)
    kept, taken = cut(np.arange(len(labels)), labels, fraction, stream(seed, "test"))
    assert sorted([*kept, *taken]) == list(range(len(labels)))
    assert len(taken) == min(max(1, round(fraction * len(labels))), len(labels) - 1)
    present = np.unique(labels)
    if len(taken) <= len(labels) - len(present):
        assert set(labels[kept]) == set(present)
        sizes = np.bincount(labels, minlength=10)[present]
        exact = len(taken) * sizes / len(labels)
        if (np.ceil(exact) < sizes).all():  # nothing held back: a plain largest remainder
            assert (np.abs(np.bincount(labels[taken], minlength=10)[present] - exact) < 1).all()


# --- what every scheme promises ---------------------------------------------------------------------------


@pytest.mark.parametrize("spec", COVERING, ids=str)
@given(pools(), st.integers(1, 9), seeds, st.sampled_from([0.0, 0.2]))
@settings(max_examples=25)
def test_every_training_sample_goes_to_exactly_one_client(spec, labels, clients, seed, validation):
    assume(len(labels[0]) >= 2 * clients)
    partition = make_partition(labels, spec, clients, seed, validation=validation)
    parts = partition.train + (partition.validation or ())
    assert sorted(np.concatenate(parts)) == list(range(len(labels[0])))
    assert min(map(len, partition.train)) >= 1
    assert min(map(len, partition.test)) >= 1
    assert np.concatenate(partition.test).min() >= len(labels[0])
    assert partition.clients == clients


@pytest.mark.parametrize("spec", COVERING, ids=str)
@given(pools(least=8, test=False), st.integers(1, 8), seeds)
@settings(max_examples=15)
def test_without_a_test_set_each_client_s_own_samples_are_cut(spec, labels, clients, seed):
    spec = {**spec, "least": 2} if spec["name"] == "dirichlet" and spec.get("by") != "client" else spec
    assume(len(labels) >= 2 * clients)
    partition = make_partition(labels, spec, clients, seed)
    assert sorted(np.concatenate(partition.train + partition.test)) == list(range(len(labels)))
    for train, test in zip(partition.train, partition.test, strict=True):
        size = len(train) + len(test)
        assert len(test) == (0 if size < 2 else min(max(1, round(0.2 * size)), size - 1))


@pytest.mark.parametrize("spec", [*COVERING, {"name": "classes"}, {"name": "parts", "k": 2}], ids=str)
def test_the_seed_alone_decides(spec):
    labels = shuffled([40] * 5), shuffled([20] * 5)
    first, again, other = (make_partition(labels, spec, 6, seed, validation=0.1) for seed in (3, 3, 4))
    assert first.hash == again.hash
    assert first.hash != other.hash


@given(pools(), st.integers(1, 9), st.integers(1, 4), seeds)
@quick
def test_sizes_of_iid_and_shards_are_equal(labels, clients, shards, seed):
    assume(len(labels[0]) >= clients * shards)
    iid = make_partition(labels, "iid", clients, seed)
    sizes = [len(part) for part in iid.train]
    assert max(sizes) - min(sizes) <= 1
    partition = make_partition(labels, {"name": "shards", "shards_per_client": shards}, clients, seed)
    sizes = [len(part) for part in partition.train]
    assert max(sizes) - min(sizes) <= shards


def test_shards_have_at_most_two_classes_each_and_usually_one():
    labels = shuffled([600] * 10)
    partition = make_partition(labels, "shards", 30, 1)
    held = [row["classes"] for row in describe(partition)]
    assert max(held) <= 4
    assert np.median(held) == 2


# --- exactly k classes ------------------------------------------------------------------------------------


@given(pools(least=12), st.integers(1, 12), st.data(), seeds)
@quick
def test_exactly_k_classes_used_equally_often(labels, clients, data, seed):
    classes = labels[0].max() + 1
    k = data.draw(st.integers(1, int(classes)))
    partition = make_partition(labels, {"name": "classes", "k": k}, clients, seed)
    counts = partition.counts("train")
    assert ((counts > 0).sum(axis=1) == k).all()
    uses = (counts > 0).sum(axis=0)
    assert uses.max() - uses.min() <= 1
    joined = np.concatenate(partition.train)
    assert len(set(joined)) == len(joined)
    for label in np.flatnonzero(uses):
        held = counts[counts[:, label] > 0, label]
        assert held.sum() == (labels[0] == label).sum()
        assert held.max() - held.min() <= 1
    if clients * k < classes:
        assert "unused" in partition.notes[0]


def test_exactly_k_classes_with_fixed_sizes():
    labels = shuffled([500] * 10), shuffled([100] * 10)
    partition = make_partition(labels, {"name": "classes", "k": 2, "train": 50, "test": 10}, 40, 1)
    for split, each in (("train", 25), ("test", 5)):
        assert [sorted(row)[-3:] for row in partition.counts(split).tolist()] == [[0, each, each]] * 40
    with pytest.raises(DataError, match="too few samples to give each client 30 of exactly 2 classes"):
        make_partition(shuffled([500, 20]), {"name": "classes", "k": 2, "train": 30}, 3, 1)
    with pytest.raises(SettingError, match="test needs train"):
        find_scheme({"name": "classes", "test": 5})


def test_classes_are_paired_at_random_so_there_are_no_hidden_groups():
    labels = shuffled([200] * 10)
    pairs = set()
    for seed in range(5):
        counts = make_partition(labels, {"name": "classes", "k": 2}, 20, seed).counts("train")
        own = {tuple(np.flatnonzero(row)) for row in counts}
        assert len(own) > 10  # five pairs, each for four clients, would be groups
        pairs |= own
    assert len(pairs) > 30  # of 45 there are


def test_too_many_classes_or_too_few_samples_are_refused():
    with pytest.raises(SettingError, match=r"partition.k: the data have 3 classes, got 4"):
        make_partition(shuffled([9, 9, 9]), {"name": "classes", "k": 4}, 2)
    with pytest.raises(DataError, match="class 1 has 2 samples for 5 clients"):
        make_partition(shuffled([9, 2]), {"name": "classes", "k": 2}, 5)


# --- Dirichlet --------------------------------------------------------------------------------------------


def test_by_class_with_large_alpha_every_client_has_the_same_labels():
    labels = shuffled([300, 200, 100])
    partition = make_partition((labels, labels), {"name": "dirichlet", "alpha": 1e8, "least": 1}, 10, 1)
    assert (np.abs(partition.counts("train") - np.array([30, 20, 10])) <= 1).all()


def test_by_class_with_small_alpha_a_class_is_at_one_client():
    labels = shuffled([200] * 10)
    counts = make_partition(
        (labels, labels), {"name": "dirichlet", "alpha": 1e-3, "least": 1}, 10, 1
    ).counts()
    assert np.median(counts.max(axis=0) / counts.sum(axis=0)) >= 0.95


@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 1e8])
def test_no_alpha_breaks_the_draw(alpha):
    for by in ("class", "client"):
        partition = make_partition(shuffled([50] * 4), {"name": "dirichlet", "alpha": alpha, "by": by}, 5, 1)
        assert min(map(len, partition.train)) >= 1


def test_by_client_with_large_alpha_every_client_has_the_labels_of_all():
    labels = shuffled([600, 300, 100])
    scheme = Dirichlet(alpha=1e8, by="client", train=50)
    counts = make_partition((labels, labels), scheme, 10, 1).counts("train")
    assert (np.abs(counts - np.array([30, 15, 5])) <= 1).all()


def test_by_client_with_small_alpha_a_client_has_one_class():
    labels = shuffled([500] * 10)
    counts = make_partition((labels, labels), Dirichlet(alpha=1e-3, by="client", train=50), 20, 1).counts()
    assert np.median(counts.max(axis=1) / counts.sum(axis=1)) >= 0.95


def test_shares_by_class_have_the_mean_and_variance_of_a_dirichlet_law():
    alpha, clients = 0.5, 8
    labels = Labels(shuffled([20_000] * 200), np.empty(0, np.int64))
    counts = Dirichlet(alpha=alpha, least=1)._counts(labels.sizes(), clients, 1, 0)
    shares = counts / 20_000
    mean = 1 / clients
    variance = mean * (1 - mean) / (clients * alpha + 1)
    assert np.abs(shares.mean(axis=1) - mean).max() < 5 * np.sqrt(variance / 200)
    assert shares.var() == pytest.approx(variance, rel=0.15)


def test_the_balancing_mask_gives_nothing_to_who_has_a_fair_share():
    sizes = np.full(10, 100)
    masked = Dirichlet(alpha=0.1, balance=True, least=1)._counts(sizes, 5, 1, 0)
    held = np.cumsum(masked, axis=1)
    for label in range(1, 10):
        assert (masked[held[:, label - 1] >= 1000 / 5, label] == 0).all()
    assert masked.sum() == 1000


@given(st.integers(2, 12), st.integers(1, 9), seeds)
@settings(max_examples=20)
def test_small_clients_are_lifted_and_it_is_said(clients, least, seed):
    labels = shuffled([clients * least, clients * least // 2 + 1])
    spec = {"name": "dirichlet", "alpha": 0.01, "least": least}
    partition = make_partition((labels, labels), spec, clients, seed)
    assert min(map(len, partition.train)) >= least
    counts = Dirichlet(alpha=0.01, least=least)._counts(np.bincount(labels), clients, seed, 0)
    if counts.sum(axis=1).min() < least:
        assert "drawn" in partition.notes[0] or "moved" in partition.notes[0]
    else:
        assert np.array_equal(partition.counts("train"), counts)
        assert partition.notes == ()


def test_dirichlet_says_what_cannot_be():
    with pytest.raises(DataError, match="30 samples cannot give 4 clients 10 each"):
        make_partition(shuffled([15, 15]), "dirichlet", 4)
    with pytest.raises(SettingError, match="train and test need by"):
        find_scheme({"name": "dirichlet", "train": 5})
    with pytest.raises(SettingError, match="balance needs by"):
        find_scheme({"name": "dirichlet", "by": "client", "balance": True})
    with pytest.raises(SettingError, match=r"partition.alpha: must be above 0, got 0"):
        find_scheme({"name": "dirichlet", "alpha": 0})
    with pytest.raises(DataError, match="4 clients need 80 training samples, there are 30"):
        make_partition(shuffled([15, 15]), Dirichlet(by="client", train=20), 4)
    with pytest.raises(DataError, match="4 clients need 40 test samples, there are 30"):
        make_partition(
            (shuffled([150] * 2), shuffled([15] * 2)), Dirichlet(by="client", train=20, test=10), 4
        )


# --- fixed sizes and one law in train and test ------------------------------------------------------------


@given(
    pools(least=20, most=80), st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.booleans(), seeds
)
@quick
def test_fixed_sizes_are_exact_and_train_and_test_labels_have_one_law(
    labels, clients, train, test, official, seed
):
    data = labels if official else labels[0]
    assume(clients * (train + (0 if official else test)) <= len(labels[0]))
    assume(clients * test <= len(labels[1]))
    scheme = Dirichlet(alpha=0.2, by="client", train=train, test=test)
    partition = make_partition(data, scheme, clients, seed)
    assert {len(part) for part in partition.train} == {train}
    assert {len(part) for part in partition.test} == {test}
    joined = np.concatenate(partition.train + partition.test)
    assert len(set(joined)) == len(joined)
    unlike = np.abs(partition.counts("test") - test * partition.counts("train") / train).max(axis=1) >= 1
    said = [note for note in partition.notes if "unlike" in note]
    assert unlike.sum() <= (int(said[0].split()[0]) if said else 0)


def test_a_class_whose_test_samples_are_used_up_counts_as_exhausted():
    labels = shuffled([100, 100]), shuffled([10, 40])
    scheme = Practical(groups=(2,), dominant=1, share=1.0, train=20, test=10)
    partition = make_partition(labels, scheme, 2, 1)
    assert sorted(partition.counts("train").tolist()) == [[0, 20], [20, 0]]
    assert np.array_equal(2 * partition.counts("test"), partition.counts("train"))
    assert not any("unlike" in note for note in partition.notes)


def test_an_exhausted_class_is_replaced_by_the_client_s_others():
    labels = shuffled([100, 100])
    partition = make_partition((labels, labels), Practical(dominant=1, groups=(4,), train=40), 4, 1)
    counts = partition.counts("train")
    assert counts.sum(axis=0).tolist() == [100, 60]
    assert sorted(counts[:, 0].tolist()) == [4, 32, 32, 32]
    assert "ran out for 1 of 4" in partition.notes[0]


def test_practical_groups_have_their_dominant_classes():
    labels = shuffled([2000] * 9)
    scheme = Practical(groups=(6, 6, 8), train=500, test=100)
    partition = make_partition((labels, labels), scheme, 20, 1)
    for split, size in (("train", 500), ("test", 100)):
        counts = partition.counts(split)
        for group, clients in enumerate((range(6), range(6, 12), range(12, 20))):
            own = slice(3 * group, 3 * group + 3)
            for client in clients:
                exact = np.full(9, 0.2 / 6 * size)
                exact[own] = 0.8 / 3 * size
                # Twice rounded: the training counts to whole numbers, the test counts after them.
                assert (np.abs(counts[client] - exact) < 2).all()
                assert counts[client, own].sum() == pytest.approx(0.8 * size, abs=3)
    with pytest.raises(SettingError, match=r"partition.groups: sizes from 1 that sum to the 21 clients"):
        make_partition((labels, labels), scheme, 21, 1)


@given(pools(least=20), st.integers(1, 10), st.data(), st.booleans(), seeds)
@quick
def test_parts_are_parts_of_classes_cut_into_train_and_test(labels, clients, data, iid, seed):
    classes = int(labels[0].max() + 1)
    k = data.draw(st.integers(1, classes))
    partition = make_partition(labels, Parts(k=k, iid=iid), clients, seed)
    both = partition.counts("train") + partition.counts("test")
    assert ((both > 0).sum(axis=1) == k).all()
    sizes = np.bincount(labels[0], minlength=classes)
    held = both > 0
    assert (np.abs(both - sizes / clients)[held] < 1).all()
    assert np.concatenate(partition.test).max() < len(labels[0])
    for train, test in zip(partition.train, partition.test, strict=True):
        total = len(train) + len(test)
        assert len(test) == min(max(1, round(0.2 * total)), total - 1)
    assert not iid or (held == held[0]).all()
    joined = np.concatenate(partition.train + partition.test)
    assert len(set(joined)) == len(joined)


def test_parts_of_classes_too_small_are_refused():
    with pytest.raises(DataError, match="class 1 has 5 samples, too few for 3 parts"):
        make_partition(shuffled([9, 5]), Parts(k=1), 3)


def test_a_column_names_the_clients(tmp_path):
    column = np.array(["b", "a", "b", "c", "a", "b"])
    partition = make_partition((shuffled([3, 3]), shuffled([3, 3])), Column(values=column))
    assert partition.names == ("a", "b", "c")
    assert [part.tolist() for part in partition.train] == [[1, 4], [0, 2, 5], [3]]
    (tmp_path / "clients.txt").write_text("\n".join(column) + "\n")
    spec = {"name": "column", "column_file": str(tmp_path / "clients.txt")}
    assert make_partition((shuffled([3, 3]), shuffled([3, 3])), spec).hash == partition.hash
    with pytest.raises(SettingError, match="names 3 clients, got 4"):
        make_partition((shuffled([3, 3]), shuffled([3, 3])), spec, clients=4)
    with pytest.raises(DataError, match="9 training samples but 6 entries"):
        make_partition(shuffled([9]), spec)
    with pytest.raises(DataError, match="cannot read the clients"):
        make_partition(shuffled([9]), {"name": "column", "column_file": str(tmp_path / "none.txt")})
    with pytest.raises(SettingError, match="needs a file"):
        make_partition(shuffled([9]), "column")
    assert make_partition(shuffled([6]), Column(values=[10, 9, 10, 9, 8, 8])).names == ("8", "9", "10")


# --- matched test data ------------------------------------------------------------------------------------


@given(pools(least=1, most=40), st.integers(1, 12), seeds)
@settings(max_examples=80)
def test_test_labels_follow_the_training_labels_in_one_ratio(labels, clients, seed):
    held = Labels(*labels)
    counts = np.random.default_rng(seed).integers(0, 12, (clients, held.classes))
    counts[:, 0] += 1
    test, notes = match_test(held, counts, seed)
    number = class_counts(np.concatenate(labels), test, held.classes)
    available, holders = held.test_sizes(), (counts > 0).sum(axis=0)
    assert min(map(len, test)) >= 1
    if not notes:
        joined = np.concatenate(test)
        assert len(set(joined)) == len(joined)
        assert (number[counts == 0] == 0).all()
    ample = (holders <= available) & (holders > 0)
    cells = (counts > 0) & ample
    if not cells.any():
        return
    if not notes:
        assert (number[cells] >= 1).all()
        # Some one ratio r has |number - max(1, r * count)| < 1 in every cell.
        low = max((n - 1) / c for n, c in zip(number[cells], counts[cells], strict=True))
        high = min((n + 1) / c for n, c in zip(number[cells], counts[cells], strict=True))
        assert low < high + 1e-9
        # It cannot be larger: some class is used up, but for rounding.
        assert (available - number.sum(axis=0))[ample].min() <= 1


def test_with_equal_ratios_the_test_set_is_used_up_and_counts_are_proportional():
    train, test = shuffled([500] * 4), shuffled([100] * 4)
    partition = make_partition((train, test), {"name": "dirichlet", "alpha": 50, "least": 1}, 5, 1)
    assert len(np.concatenate(partition.test)) == 400
    assert (np.abs(partition.counts("test") - partition.counts("train") / 5) < 1).all()


def test_a_small_test_set_is_shared_and_it_is_said():
    partition = make_partition((shuffled([50, 50]), shuffled([3, 3])), "iid", 20, 1)
    assert min(map(len, partition.test)) == 1
    assert "share" in partition.notes[0]


def test_a_client_whose_classes_are_not_tested_is_refused():
    with pytest.raises(DataError, match=r"holds only classes \[1\], of which the test set has no sample"):
        make_partition((shuffled([20, 20]), np.zeros(9, int)), {"name": "classes", "k": 1}, 2)


# --- the artefact -----------------------------------------------------------------------------------------


@given(pools(least=4), st.integers(1, 6), seeds, st.sampled_from([0.0, 0.3]))
@settings(max_examples=15)
def test_a_saved_partition_comes_back(tmp_path_factory, labels, clients, seed, validation):
    path = tmp_path_factory.mktemp("partition") / "p.npz"
    spec = {"name": "dirichlet", "least": 1}
    assume(len(labels[0]) >= clients)
    before = make_partition(labels, spec, clients, seed, validation=validation)
    before.save(path)
    after = Partition.load(path)
    assert after.hash == before.hash
    for field in dataclasses.fields(Partition):
        first, second = getattr(before, field.name), getattr(after, field.name)
        if field.name in ("train", "test", "validation") and first is not None:
            assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
        else:
            assert np.array_equal(first, second) if field.name == "labels" else first == second
    assert list(path.parent.iterdir()) == [path]


def test_the_hash_is_of_what_clients_hold_not_of_how_it_was_made():
    labels = shuffled([20, 20])
    partition = make_partition(labels, "iid", 4, 1)
    assert dataclasses.replace(partition, name="other", seed=9, notes=("x",)).hash == partition.hash
    swapped = (partition.train[1], partition.train[0], *partition.train[2:])
    assert dataclasses.replace(partition, train=swapped).hash != partition.hash
    assert dataclasses.replace(partition, labels=1 - partition.labels).hash != partition.hash
    assert dataclasses.replace(partition, names=("a", "b", "c", "d")).hash != partition.hash


def test_a_damaged_partition_is_named_and_never_half_read(tmp_path):
    path = tmp_path / "p.npz"
    partition = make_partition(shuffled([20, 20]), "iid", 4, 1)
    partition.save(path)
    content = path.read_bytes()
    random = np.random.default_rng(1)
    for _ in range(60):
        path.write_bytes(content[: random.integers(0, len(content))])
        with pytest.raises(DataError, match=r"p\.npz"):
            Partition.load(path)
    for _ in range(200):
        damaged = bytearray(content)
        damaged[random.integers(0, len(content))] ^= int(random.integers(1, 256))
        path.write_bytes(bytes(damaged))
        try:
            found = Partition.load(path).hash
        except DataError as error:
            found = str(error)
        assert found == partition.hash or "p.npz" in found  # a byte that carries nothing, or noticed


def test_a_partition_with_a_false_hash_or_another_format_is_refused(tmp_path):
    path = tmp_path / "p.npz"
    make_partition(shuffled([20, 20]), "iid", 4, 1).save(path)
    with np.load(path) as file:
        arrays = dict(file)
    arrays["labels"] = 1 - arrays["labels"]
    np.savez(path, **arrays)
    with pytest.raises(DataError, match="does not have the hash"):
        Partition.load(path)
    np.savez(path, x=np.zeros(3))
    with pytest.raises(DataError, match="lacks header"):
        Partition.load(path)
    with pytest.raises(DataError, match="no such file"):
        Partition.load(tmp_path / "none.npz")
    with pytest.raises(DataError, match="cannot write"):
        make_partition(shuffled([20, 20]), "iid", 4, 1).save(tmp_path / "none" / "p.npz")


def test_a_sample_in_two_splits_is_an_error():
    partition = make_partition(shuffled([20, 20]), "iid", 4, 1, validation=0.2)
    for first, second in (("train", "test"), ("validation", "test"), ("train", "validation")):
        parts = list(getattr(partition, first))
        parts[0] = np.append(parts[0], getattr(partition, second)[3][0])
        with pytest.raises(DataError, match="every sample belongs to one split"):
            dataclasses.replace(partition, **{first: tuple(parts)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": "empty"}, "client 0 has no training samples"),
        ({"names": ("a", "a", "b", "c")}, "a name of its own"),
        ({"names": ("a", "b")}, "2 clients but 4 parts"),
        ({"train_total": 41}, "train_total"),
        ({"labels": np.full(40, -1)}, "whole numbers from 0"),
        ({"labels": np.zeros(3, int)}, "train_total"),
    ],
)
def test_a_partition_that_cannot_be_is_refused(change, message):
    partition = make_partition(shuffled([20, 20]), "iid", 4, 1)
    if change == {"train": "empty"}:
        change = {"train": (partition.train[0][:0], *partition.train[1:])}
    with pytest.raises(DataError, match=message):
        dataclasses.replace(partition, **change)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], "no samples"),
        ([0.5, 1], "whole numbers"),
        ([-1, 0], "whole numbers"),
        ([[0], [1]], "whole numbers"),
    ],
)
def test_labels_that_cannot_be_partitioned_are_refused(labels, message):
    with pytest.raises(DataError, match=message):
        make_partition(np.array(labels), "iid", 1)


def test_wrong_requests_are_refused():
    with pytest.raises(SettingError, match="did you mean dirichlet"):
        find_scheme("dirchlet")
    with pytest.raises(SettingError, match=r"did you mean partition.alpha"):
        find_scheme({"name": "dirichlet", "alhpa": 1})
    with pytest.raises(SettingError, match="give the name of a partition"):
        find_scheme({"alpha": 1})
    with pytest.raises(SettingError, match="clients: how many"):
        make_partition(shuffled([9]), "iid")
    with pytest.raises(SettingError, match="clients: must be at least 1"):
        make_partition(shuffled([9]), "iid", 0)
    with pytest.raises(DataError, match="9 samples for 10 clients"):
        make_partition(shuffled([9]), "iid", 10)
    with pytest.raises(DataError, match="validation: must be at least 0 and below 1"):
        make_partition(shuffled([9]), "iid", 1, validation=1.0)


# --- from partition to clients ----------------------------------------------------------------------------


def test_apply_gives_each_client_its_samples():
    data = source()
    partition = make_partition(data, {"name": "classes", "k": 2}, 5, 1, validation=0.2)
    clients = apply(data, partition)
    every_x, every_y = torch.cat([data.train_x, data.test_x]), torch.cat([data.train_y, data.test_y])
    for split, parts in partition.splits().items():
        for client, part in enumerate(parts):
            x, y = getattr(clients, split).of(client)
            assert torch.equal(x, every_x[part])
            assert torch.equal(y, every_y[part])
    assert torch.equal(clients.pooled_x, data.test_x)
    assert (clients.hash, clients.names, clients.classes) == (partition.hash, partition.names, 3)


def test_clients_may_be_tested_on_samples_of_both_sets_but_never_trained_on_the_test_set():
    data = source(train=(6, 6), test=(3, 3))
    partition = make_partition(data, "iid", 2, 1)
    train = (np.array([0, 3]), np.array([1]))
    mixed = dataclasses.replace(partition, train=train, test=(np.array([2, 13]), np.array([14])))
    x, _ = apply(data, mixed).test.of(0)
    assert torch.equal(x, torch.stack([data.train_x[2], data.test_x[1]]))
    for split in ("train", "validation"):
        with pytest.raises(DataError, match=f"{split} holds sample 13, which is of the test set"):
            dataclasses.replace(mixed, **{split: (np.array([0, 13]), np.array([1]))})
    with pytest.raises(DataError, match="no client has a test sample"):
        dataclasses.replace(mixed, test=(np.arange(0), np.arange(0)))


def test_without_an_official_test_set_the_clients_tests_are_pooled():
    data = source(test=(0, 0, 0))
    clients = apply(data, make_partition(data, "iid", 4, 1), normalise=True)
    assert torch.equal(clients.pooled_x, clients.test.x)
    assert len(clients.pooled_y) == 24


def test_normalisation_looks_at_training_samples_only():
    data = source(shape=(2, 4, 4))
    data.train_x[:, 1] = 0.25
    partition = make_partition(data, "iid", 4, 1, validation=0.2)
    clients = apply(data, partition, normalise=True)
    assert clients.train.x[:, 0].mean() == pytest.approx(0, abs=1e-5)
    assert clients.train.x[:, 0].std(correction=0) == pytest.approx(1, abs=1e-5)
    assert torch.equal(clients.train.x[:, 1], torch.zeros_like(clients.train.x[:, 1]))
    raw = data.train_x[np.concatenate(partition.train)][:, 0].double()
    expected = (data.test_x[:, 0] - raw.mean()) / raw.std(correction=0)
    assert torch.allclose(clients.pooled_x[:, 0], expected.float(), atol=1e-5)
    other = dataclasses.replace(data, test_x=data.test_x * 100)
    held = np.concatenate(partition.validation)
    other.train_x[held] *= 50
    assert torch.equal(apply(other, partition, normalise=True).train.x, clients.train.x)


def test_flat_samples_are_normalised_column_by_column():
    data = source(shape=(5,))
    data.train_x.mul_(torch.arange(1.0, 6.0))
    x = apply(data, make_partition(data, "iid", 4, 1), normalise=True).train.x
    assert torch.allclose(x.mean(0), torch.zeros(5), atol=1e-5)
    assert torch.allclose(x.std(0, correction=0), torch.ones(5), atol=1e-5)


def test_features_are_computed_before_normalisation():
    data = source(shape=(1, 8, 8))
    partition = make_partition(data, "iid", 3, 1)
    plain, clients = apply(data, partition), apply(data, partition, features=Hog())
    assert torch.allclose(clients.train.x, Hog()(plain.train.x))
    assert torch.allclose(clients.pooled_x, Hog()(data.test_x))
    both = apply(data, partition, features=Hog(), normalise=True).train.x
    assert torch.allclose(both.mean(0), torch.zeros(9), atol=1e-5)


def test_a_partition_of_other_data_is_refused():
    data = source()
    partition = make_partition(data, "iid", 3, 1)
    other = dataclasses.replace(data, train_y=data.train_y.flip(0))
    with pytest.raises(DataError, match="was not made for made up"):
        apply(other, partition)
    with pytest.raises(DataError, match="was not made for made up"):
        apply(source(train=(40, 40, 41)), partition)


def test_describe_agrees_between_partition_and_clients():
    data = source()
    partition = make_partition(data, {"name": "dirichlet", "least": 2}, 4, 1, validation=0.2)
    rows = describe(partition)
    assert rows == describe(apply(data, partition))
    assert [row["client"] for row in rows] == ["0", "1", "2", "3"]
    assert sum(row["train"] + row["validation"] for row in rows) == 120
    counts = partition.counts()
    assert [row["classes"] for row in rows] == (counts > 0).sum(1).tolist()
    assert [row["largest_share"] for row in rows] == pytest.approx(counts.max(1) / counts.sum(1))


def test_the_plot_has_a_dot_per_client_and_class(tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    drawn = []
    original = figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), original(self, *a, **k))
    )
    partition = make_partition(shuffled([40, 30, 20]), {"name": "dirichlet", "least": 2}, 5, 1)
    plot_partition(partition, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    dots = drawn[0].axes[0].collections[0]
    counts = partition.counts()
    assert {tuple(place) for place in dots.get_offsets().astype(int).tolist()} == set(
        zip(*np.nonzero(counts), strict=True)
    )
    areas = dots.get_sizes() / counts[np.nonzero(counts)]
    assert np.allclose(areas, areas[0])
    with pytest.raises(DataError, match="cannot write"):
        plot_partition(partition, tmp_path / "none" / "p.png")


def test_without_matplotlib_the_plot_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(DataError, match=r"pip install 'sartor\[plot\]'"):
        plot_partition(make_partition(shuffled([20]), "iid", 2), tmp_path / "p.png")


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"column"}))
def test_sixty_thousand_labels_and_a_thousand_clients_take_under_two_seconds(name):
    labels = shuffled([6000] * 10), shuffled([1000] * 10)
    begin = time.process_time()
    partition = make_partition(labels, name, 1000, 1, validation=0.1)
    assert time.process_time() - begin < 2
    assert partition.clients == 1000
