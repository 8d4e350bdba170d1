"""Compressors: what they promise of one value, that engines agree on them, what is kept and counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import federation_of, task_and_data
from sartor import random
from sartor.client.local import Client
from sartor.errors import SettingError
from sartor.federation import Reply
from sartor.federation.transforms import TRANSFORMS, Chain, Transform, Transforms
from sartor.model.task import Task
from sartor.runs.experiment import from_mapping, to_mapping
from sartor.transforms.compression import bits_for, packed, unpacked
from sartor.transforms.low_rank import LowRank, orthonormal
from sartor.transforms.norms import Clip
from sartor.transforms.quantised import QSGD, Int4, Int8, Majority, Sign, rounded
from sartor.transforms.sparse import RandomK, TopK

KEYS = 4000
EVERY: dict[str, Transform] = {
    "top-k": TopK(share=0.2),
    "random-k": RandomK(share=0.2),
    "random-k alone": RandomK(share=0.2, feedback=False),
    "qsgd": QSGD(levels=7),
    "qsgd of one level": QSGD(levels=1),
    "qsgd of many levels": QSGD(levels=1000),
    "int8": Int8(block=7),
    "int4": Int4(block=7),
    "sign": Sign(),
    "low-rank": LowRank(rank=1),
}

numbers = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40)
vectors = st.builds(lambda held: torch.tensor(held, dtype=torch.float64), numbers)


def through(transform: Transform, value: Tensor, key: int = 0) -> Tensor:
    """What arrives of one value, the first time."""
    parts, _ = transform.apply(key, value, transform.init(value))
    return transform.receive(parts, value)


def mean_over_keys(transform: Transform, value: Tensor) -> Tensor:
    keys = torch.as_tensor(random.stream(0, "keys", torch.arange(KEYS)))
    return torch.vmap(lambda key: through(transform, value, key))(keys).mean(dim=0)


# Bits ------------------------------------------------------------------------------------------------------


@given(st.sampled_from([1, 2, 4, 8, 16]), st.data())
@settings(max_examples=30, deadline=None)
def test_what_is_packed_is_unpacked(bits: int, data: Any) -> None:
    codes = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=1, max_size=20))
    held = packed(torch.tensor(codes), bits)
    assert held.nbytes == -(-len(codes) * bits // 8)
    assert unpacked(held, bits, len(codes)).tolist() == codes
    assert bits_for(1 << bits) == bits


# Sparse ----------------------------------------------------------------------------------------------------


@given(vectors, st.floats(0.001, 1), st.sampled_from([TopK, RandomK]))
@settings(max_examples=60, deadline=None)
def test_sparse_ones_contract(x: Tensor, share: float, kind: type) -> None:
    """‖x − C(x)‖² ≤ (1 − k/d) ‖x‖² for the largest; those that are drawn are numbers of the value."""
    made = kind(share=share)
    count, found = max(1, int(share * len(x) + 0.5)), through(made, x)
    assert int((found != 0).sum()) <= count
    if kind is TopK:
        assert float(((x - found) ** 2).sum()) <= (1 - count / len(x)) * float((x**2).sum()) * (1 + 1e-12)
    assert bool(((found == 0) | (found == x)).all())
    assert torch.equal(through(kind(share=1.0), x), x)


def test_what_is_drawn_contracts_in_expectation_and_every_place_is_as_likely() -> None:
    x = torch.tensor([5.0, -1.0, 0.5, 2.0, 1.0], dtype=torch.float64)
    keys = torch.as_tensor(random.stream(0, "keys", torch.arange(KEYS)))
    found = torch.vmap(lambda key: through(RandomK(share=0.4), x, key))(keys)
    error = ((found - x) ** 2).sum(dim=1).mean()
    assert float(error) == pytest.approx(0.6 * float((x**2).sum()), rel=0.05)
    assert (found != 0).double().mean(dim=0).tolist() == pytest.approx([0.4] * 5, abs=0.03)


@pytest.mark.parametrize("size", [1, 2, 7, 100, 70_000])
@pytest.mark.parametrize("share", [1e-9, 0.01, 0.2, 1.0])
def test_places_are_told_in_the_shortest_way(size: int, share: float) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    made = TopK(share=share)
    count = max(1, int(share * size + 0.5))
    parts, _ = made.apply(0, x, made.init(x))
    told = min(count * (2 if size <= 1 << 16 else 4), -(-size // 8))
    assert parts["places"].nbytes <= told
    assert torch.equal(made.receive(parts, x) != 0, x.abs() >= x.abs().sort().values[size - count])


# Quantised -------------------------------------------------------------------------------------------------


def test_rounding_by_chance_has_the_number_as_its_expectation() -> None:
    """By enumeration: of all words that a draw can be, the share that rounds up is what is over."""
    ratio = torch.tensor([0.0, 0.25, 1.0, -0.75, -3.0, 6.5], dtype=torch.float64)
    keys = torch.as_tensor(random.stream(0, "keys", torch.arange(KEYS)))
    found = torch.vmap(lambda key: rounded(ratio, key))(keys)
    assert bool(((found - ratio).abs() < 1).all())
    assert torch.equal(found[:, [0, 2, 4]], ratio[[0, 2, 4]].expand(KEYS, -1))  # whole numbers stay
    assert found.mean(dim=0).tolist() == pytest.approx(ratio.tolist(), abs=4 * 0.5 / KEYS**0.5)


@pytest.mark.parametrize("name", ["random-k alone", "qsgd", "qsgd of one level", "int8", "int4"])
def test_unbiased_ones_are(name: str) -> None:
    """The mean over many keys is the value, within five of its standard deviations."""
    x = torch.tensor([3.0, -2.0, 0.1, 0.0, 1e-3, -0.4, 2.2, 0.7, -0.9, 1.5], dtype=torch.float64)
    made = EVERY[name]
    step = {
        "random-k alone": 2 * 3.0 / 0.4,
        "qsgd": float(x.norm()) / 7,
        "qsgd of one level": float(x.norm()),
    }
    most = step.get(name, 3.0 / made.most if isinstance(made, Int8 | Int4) else 0.0)
    assert float((mean_over_keys(made, x) - x).abs().max()) <= 5 * most / 2 / KEYS**0.5


@given(vectors, st.sampled_from([QSGD(levels=3), QSGD(levels=32767), Int8(block=5), Int4(block=3)]))
@settings(max_examples=60, deadline=None)
def test_a_quantised_number_is_one_of_its_two_neighbours(x: Tensor, made: Any) -> None:
    found = through(made, x)
    width = made.spread(made.scale(x), len(x)) / made.most
    assert bool(((found - x).abs() <= width * (1 + 1e-9) + 1e-300).all())
    exact = torch.arange(-made.most, made.most + 1)[:100].double() if isinstance(made, Int8 | Int4) else None
    if exact is not None:
        top = torch.cat([exact, torch.tensor([float(made.most)]).double()])
        whole = replace(made, block=1000)
        torch.testing.assert_close(through(whole, top), top, rtol=1e-15, atol=0)


# Sign ------------------------------------------------------------------------------------------------------


@given(vectors)
@settings(max_examples=40, deadline=None)
def test_signs_contract(x: Tensor) -> None:
    """‖x − C(x)‖² = ‖x‖² − ‖x‖₁²/d."""
    found = through(Sign(), x)
    wanted = float((x**2).sum() - x.abs().sum() ** 2 / len(x))
    assert float(((x - found) ** 2).sum()) == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    assert bool(((found >= 0) == (x >= 0)).all()) or not float(x.abs().sum())


def test_the_majority_is_of_signs_and_not_of_sizes() -> None:
    """One client cannot outvote two however loud it is; whoever adds up gets the vote."""
    values = torch.tensor([[1.0, -1.0, 2.0], [1.0, -1.0, -2.0], [-100.0, 100.0, 0.0]], dtype=torch.float64)
    voted, _ = Majority().apply_all(0, values, {})
    scale = float(values.abs().mean())
    assert voted.tolist() == [[scale, -scale, 0.0]] * 3
    with pytest.raises(SettingError, match=r"transforms\[0\]\.place: must be one of server"):
        from_mapping({"transforms": [{"name": "majority", "place": "up"}]})


def test_signs_and_their_majority_move_the_server_by_the_vote() -> None:
    task, data = task_and_data()

    def send(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(delta=torch.where(client.number < 4, w, -9 * w))

    federation = federation_of("stacked", task, data, transforms=(Sign(), Majority()))
    w = torch.linspace(-1.0, 2.0, 40, dtype=torch.float64)
    found = federation.map(send, range(6), {"w": w}).mean("delta")
    assert torch.equal(found.sign(), torch.where(w < 0, -1.0, 1.0).double())
    torch.testing.assert_close(found.abs(), torch.full_like(w, float(w.abs().mean()) * (4 + 18) / 6))


# Low rank --------------------------------------------------------------------------------------------------


def matrix(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    return left @ torch.randn(rank, columns, generator=generator, dtype=torch.float64)


@given(st.integers(4, 9), st.integers(4, 9), st.integers(0, 2), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_matrix_of_low_rank_arrives_as_it_is(rows: int, columns: int, rank: int, seed: int) -> None:
    x = matrix(rows, columns, rank, seed)
    torch.testing.assert_close(through(LowRank(rank=2), x), x, rtol=1e-8, atol=1e-8)


def test_columns_that_depend_on_others_become_zero() -> None:
    columns = torch.tensor([[3.0, 6.0, 0.0, 1.0], [4.0, 8.0, 0.0, 0.0]], dtype=torch.float64)
    found = orthonormal(columns)
    torch.testing.assert_close(found.T @ found, torch.diag(torch.tensor([1.0, 0, 0, 1]).double()))
    assert found[:, 0].tolist() == pytest.approx([0.6, 0.8])


def test_the_power_method_goes_on_where_it_was() -> None:
    """The same matrix time after time: from the last Q its best approximation is found, by SVD as a check."""
    x = matrix(12, 9, 6, seed=3)
    made = LowRank(rank=2, feedback=False)
    state = made.init(x)
    for _ in range(60):
        parts, state = made.apply(0, x, state)
    u, s, v = torch.linalg.svd(x)
    best = (u[:, :2] * s[:2]) @ v[:2]
    torch.testing.assert_close(made.receive(parts, x), best, rtol=1e-6, atol=1e-6)
    zeros = made.apply(0, torch.zeros_like(x), state)[1]  # a round without a change forgets nothing
    assert torch.equal(zeros["right"], state["right"])


def test_matrices_are_found_in_vectors_of_a_tasks_models_and_parts() -> None:
    """Weights and kernels are matrices; biases are sent as they are, and so is what becomes no smaller."""
    network = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Flatten(), nn.Linear(24, 10), nn.Linear(10, 2))
    task = Task(network.double(), classes=2, head="3")
    (made,) = Transforms((LowRank(rank=2),), task).up.transforms
    w = task.initial()
    parts, _ = made.apply(0, w, made.init(w))
    assert parts["left"].numel() == 2 * (6 + 10)
    assert parts["right"].numel() == 2 * (18 + 24)
    assert parts["rest"].numel() == 6 + 10 + 22  # 2 · (2 + 10) numbers are no fewer than 2 · 10
    low = torch.cat([matrix(6, 18, 2).flatten(), torch.ones(6).double(), matrix(10, 24, 1).flatten()])
    whole = torch.cat([low, torch.arange(10.0).double(), torch.randn(22).double()])
    torch.testing.assert_close(through(made, whole), whole, rtol=1e-9, atol=1e-9)
    body = task.part("body")
    torch.testing.assert_close(through(made, body.take(whole)), body.take(whole), rtol=1e-9, atol=1e-9)
    assert made.concerns("delta", body.take(whole))
    assert not made.concerns("delta", whole[:-1])  # of another length: nobody knows what it is


# All of them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, made in EVERY.items() if made.stateful])
def test_what_was_sent_and_what_is_left_is_what_was_meant(name: str) -> None:
    made, generator = EVERY[name], torch.Generator().manual_seed(1)
    meant = torch.zeros(8, 6, dtype=torch.float64)
    state, sent = made.init(meant), torch.zeros_like(meant)
    for turn in range(12):
        value = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        parts, state = made.apply(turn, value, state)
        sent, meant = sent + made.receive(parts, value), meant + value
    torch.testing.assert_close(sent + state["left"], meant, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", list(EVERY))
def test_borders(name: str, dtype: torch.dtype) -> None:
    """Zeros arrive as zeros, a scalar and a single number nearly, in their shape and type."""
    made = EVERY[name]
    for shape in ((), (1,), (3,), (50,), (6, 5)):
        zeros = torch.zeros(shape, dtype=dtype)
        found = through(made, zeros)
        assert found.dtype == dtype
        assert found.shape == zeros.shape
        assert not found.any()
        held = made.apply(0, zeros, made.init(zeros))[1]
        assert all(bool(torch.isfinite(value).all()) for value in held.values())
    one = torch.tensor(-3.0, dtype=dtype)
    assert float(through(made, one)) == -3.0
    assert through(made, torch.arange(30.0).to(dtype)).dtype == dtype


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", list(EVERY))
def test_what_is_not_finite_does_not_arrive_as_if_it_were(name: str, bad: float) -> None:
    """So that a bad reply is found; of what is drawn, when it is."""
    value = torch.ones(8, 8, dtype=torch.float64)
    value[3, 4] = bad
    found = [through(EVERY[name], value, key) for key in range(60 if "random" in name else 1)]
    assert any(not bool(torch.isfinite(one).all()) for one in found)


@pytest.mark.parametrize("name", list(EVERY))
def test_small_values_are_sent_as_they_are(name: str) -> None:
    chain = Chain((EVERY[name],))
    values = {"loss": torch.tensor(2.5), "n": torch.arange(9), "w": torch.randn(400, 20)}
    sent, _ = chain.apply(0, values, chain.initial(values))
    assert torch.equal(sent["loss"], values["loss"])
    assert torch.equal(sent["n"], values["n"])
    assert "w" not in sent
    assert sum(value.nbytes for value in sent.values()) < sum(value.nbytes for value in values.values())


def test_a_scale_is_left_alone_by_what_comes_after_it() -> None:
    chain = Chain((Int8(block=4), TopK(share=0.5), Clip(norm=1e-6)))
    values = {"w": torch.linspace(-1, 1, 400)}
    sent, _ = chain.apply(0, values, chain.initial(values))
    assert set(sent) == {"w__codes", "w__scale"}
    torch.testing.assert_close(chain.receive(sent, values)["w"], values["w"], rtol=0, atol=0.01)


@pytest.mark.parametrize("name", list(EVERY))
def test_engines_agree_and_count_what_is_sent(name: str) -> None:
    """Up and down, with what clients and the server keep; chunks and the loop give the same."""
    task, data = task_and_data()
    up = EVERY[name]
    alone = {"feedback": False} if up.adds_up else {}
    down = replace(up, place="down", **alone)

    def send(client: Client, hyper: Any, w: Tensor, own: Tensor) -> Reply:
        return Reply(delta=w * (1 + client.number) + own, n=client.n)

    found, traffic = [], []
    for engine, chunk in (("loop", 0), ("stacked", 0), ("stacked", 2)):
        federation = federation_of(engine, task, data, transforms=(up, down), chunk=chunk, seed=3)
        w = torch.randn(20, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        own = torch.randn(6, 20, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        kept = []
        for round in (1, 2):
            federation.round = round
            kept.append(federation.map(send, range(6), {"w": w}, {"own": own})["delta"])
        found.append(torch.stack(kept))
        traffic.append((federation.traffic.down, federation.traffic.up))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[2], found[0], rtol=1e-12, atol=1e-12)
    parts, _ = up.apply(0, w, up.init(w))
    size = sum(part.nbytes for part in parts.values())
    assert set(traffic) == {(2 * 6 * (2 * size + 8), 2 * 6 * (size + 8))}  # which exchange it is; n_i


def test_an_experiment_names_them() -> None:
    names = ("top-k", "random-k", "qsgd", "int8", "int4", "sign", "low-rank", "majority")
    tables = [{"name": name, **({} if name == "majority" else {"place": "down"})} for name in names]
    experiment = from_mapping({"transforms": [{"name": "difference"}, *tables]})
    names = ("difference", *names)
    assert [type(made) for made in experiment.transforms] == [TRANSFORMS[name] for name in names]
    assert from_mapping(to_mapping(experiment)) == experiment
    with pytest.raises(SettingError, match=r"transforms\[0\]\.share: must be above 0"):
        from_mapping({"transforms": [{"name": "top-k", "share": 0}]})


def test_compressed_bytes_of_a_model() -> None:
    """By hand, for 10,000 numbers of four bytes."""
    x = torch.randn(10_000)
    for made, size in (
        (TopK(share=0.01), 100 * (4 + 2)),
        (TopK(share=0.1), 1000 * 4 + 1250),
        (RandomK(share=0.01), 100 * 4 + 8),
        (QSGD(levels=1), 2500 + 4),
        (QSGD(levels=7), 5000 + 4),
        (QSGD(levels=127), 10_000 + 4),
        (Int8(), 10_000 + 10 * 4),
        (Int4(), 5000 + 10 * 4),
        (Sign(), 1250 + 4),
    ):
        parts, _ = made.apply(0, x, made.init(x))
        assert sum(part.nbytes for part in parts.values()) == size, made
    assert np.prod(x.shape) == 10_000
