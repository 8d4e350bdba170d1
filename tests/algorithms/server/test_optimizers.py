"""Server optimizers: their recursions by hand in double precision, their limits and invariants."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import federation_of, quadratics
from sartor.algorithms.server.optimizers import OPTIMIZERS, Adagrad, Adam, Momentum, Sgd, SlowMo, State, Yogi
from sartor.client.local import Client
from sartor.federation import Reply

CHANGES = [[0.5, -0.02, 1e-5], [-0.3, 0.04, 0.0], [0.1, 0.03, -2e-3], [-0.7, -0.01, 1e-3]]
W = [0.2, -1.0, 3.0]
VALUE = st.floats(-10, 10).filter(lambda value: value == 0 or abs(value) > 1e-6)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def steps_of(optimizer: Any, changes: list[list[float]], rates: list[float] | None = None) -> list[Tensor]:
    """The steps an optimizer takes for these changes, while its state and Δ stay what they were."""
    state = optimizer.start(State(w=vector(*W)))
    steps = []
    for place, change in enumerate(changes):
        delta, before = vector(*change), state
        copies = {name: value.clone() for name, value in {"w": before.w, **before.memory}.items()}
        step, state = optimizer.step(state, delta, 1.0 if rates is None else rates[place])
        assert torch.equal(delta, vector(*change))
        assert state.memory.keys() == before.memory.keys()
        for name, copy in copies.items():
            assert torch.equal({"w": before.w, **before.memory}[name], copy)
        steps.append(step)
    return steps


def assert_steps(found: list[Tensor], expected: list[list[float]]) -> None:
    for step, row in zip(found, expected, strict=True):
        assert torch.allclose(step, vector(*row), rtol=1e-13, atol=1e-16)


def test_sgd_scales_the_change() -> None:
    assert_steps(steps_of(Sgd(0.3), CHANGES), [[0.3 * value for value in row] for row in CHANGES])


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_by_hand(nesterov: bool) -> None:
    expected, m = [], [0.0] * 3
    for row in CHANGES:
        m = [0.8 * old + new for old, new in zip(m, row, strict=True)]
        ahead = [new + 0.8 * old for old, new in zip(m, row, strict=True)]
        expected.append([0.5 * value for value in (ahead if nesterov else m)])
    assert_steps(steps_of(Momentum(0.5, 0.8, nesterov), CHANGES), expected)


def test_a_constant_change_drives_the_momentum_to_the_sum_of_the_series() -> None:
    """m → Δ / (1 − β), and the distance to it shrinks by β a round."""
    steps = steps_of(Momentum(beta=0.9), [CHANGES[0]] * 200)
    limit = vector(*CHANGES[0]) / 0.1
    for count in (1, 7, 50, 200):
        assert torch.allclose(limit - steps[count - 1], 0.9**count * limit, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", [Momentum(1.0, 0.0), Momentum(1.0, 0.0, True), SlowMo(1.0, 0.0)])
def test_without_momentum_the_change_itself_is_the_step(optimizer: Any) -> None:
    found = steps_of(optimizer, CHANGES)
    assert all(torch.equal(step, vector(*row)) for step, row in zip(found, CHANGES, strict=True))


@given(rate=st.floats(1e-4, 10), beta=st.floats(0, 0.99), alpha=st.floats(0.1, 2))
def test_slowmo_at_a_constant_rate_is_momentum(rate: float, beta: float, alpha: float) -> None:
    slow = steps_of(SlowMo(alpha, beta), CHANGES, [rate] * len(CHANGES))
    for found, expected in zip(slow, steps_of(Momentum(alpha, beta), CHANGES), strict=True):
        assert torch.allclose(found, expected, rtol=1e-11, atol=1e-14)


def test_slowmo_remembers_in_units_of_the_local_rate() -> None:
    """When γ is halved, the momentum that was built at the old rate counts half."""
    rates = [0.4, 0.2, 0.2, 0.05]
    momentum, expected = vector(0, 0, 0), []
    for place, row in enumerate(CHANGES):
        ratio = rates[place] / rates[place - 1] if place else 1.0
        momentum = 0.7 * ratio * momentum + vector(*row)
        expected.append((1.5 * momentum).tolist())
    assert_steps(steps_of(SlowMo(1.5, 0.7), CHANGES, rates), expected)


def test_a_rate_of_zero_is_no_division_by_zero() -> None:
    (step,) = steps_of(SlowMo(), [[0.0] * 3], [0.0])
    assert torch.equal(step, vector(0, 0, 0))


SECOND = {
    "adagrad": lambda v, d, b2: v + d * d,
    "adam": lambda v, d, b2: b2 * v + (1 - b2) * d * d,
    "yogi": lambda v, d, b2: v - (1 - b2) * d * d * ((v > d * d) - (v < d * d)),
}


@pytest.mark.parametrize("start", ["tau2", "zero"])
@pytest.mark.parametrize("name", SECOND)
def test_adaptive_optimizers_by_hand(name: str, start: str) -> None:
    lr, b1, b2, tau = 0.05, 0.6, 0.9, 1e-2
    settings = {} if name == "adagrad" else {"beta2": b2}
    optimizer = OPTIMIZERS[name](server_lr=lr, beta1=b1, tau=tau, v0=start, **settings)  # type: ignore[call-arg]
    m, v = [0.0] * 3, [tau**2 if start == "tau2" else 0.0] * 3
    expected = []
    for row in CHANGES:
        m = [b1 * old + (1 - b1) * d for old, d in zip(m, row, strict=True)]
        v = [SECOND[name](old, d, b2) for old, d in zip(v, row, strict=True)]
        expected.append([lr * a / (math.sqrt(b) + tau) for a, b in zip(m, v, strict=True)])
    assert_steps(steps_of(optimizer, CHANGES), expected)


def test_adams_first_step_has_its_closed_form() -> None:
    d, tau = vector(*CHANGES[0]), 1e-3
    (step,) = steps_of(Adam(server_lr=0.1, beta1=0.9, beta2=0.99, tau=tau), CHANGES[:1])
    expected = 0.1 * (1 - 0.9) * d / ((0.99 * tau**2 + (1 - 0.99) * d**2).sqrt() + tau)
    assert torch.allclose(step, expected, rtol=1e-13)


@pytest.mark.parametrize(("start", "factor"), [("tau2", 2.0), ("zero", 1.0)])
def test_adagrad_with_a_large_tau_is_the_plain_average(start: str, factor: float) -> None:
    """The step is η_g Δ / (√v0 + τ) as τ grows, so 2 τ as rate, or τ when v starts at 0."""
    found = steps_of(Adagrad(server_lr=factor * 1e6, beta1=0.0, tau=1e6, v0=start), CHANGES)
    for step, row in zip(found, CHANGES, strict=True):
        assert torch.allclose(step, vector(*row), rtol=1e-6, atol=1e-12)


@given(changes=st.lists(st.lists(VALUE, min_size=3, max_size=3), min_size=1, max_size=6))
def test_yogi_moves_towards_the_square_and_by_a_bounded_amount(changes: list[list[float]]) -> None:
    optimizer = Yogi(beta2=0.9)
    state = optimizer.start(State(w=vector(*W)))
    for row in changes:
        before, square = state.memory["v"], vector(*row) ** 2
        _, state = optimizer.step(state, vector(*row))
        v = state.memory["v"]
        assert bool((v >= 0).all())
        assert bool((v <= before)[square <= before].all())
        assert bool((v >= before)[square >= before].all())
        rounding = 1e-15 * (before + square)
        assert bool(((v - before).abs() <= 0.1 * square + rounding).all())


def test_yogi_forgets_a_large_change_more_slowly_than_adam() -> None:
    """After one large change and many small ones, Adam's v has decayed; Yogi's has moved by the small
    squares only.
    """
    left = {}
    for optimizer in (Adam(beta2=0.9), Yogi(beta2=0.9)):
        state = optimizer.start(State(w=vector(0.0)))
        for change in (1.0, *[0.01] * 50):
            _, state = optimizer.step(state, vector(change))
        left[type(optimizer)] = float(state.memory["v"])
    assert left[Adam] == pytest.approx(0.9**50 * (0.1 + 0.9 * 1e-6) + (1 - 0.9**50) * 1e-4, rel=1e-9)
    assert left[Yogi] == pytest.approx(0.1 + 1e-6 - 50 * 0.1 * 1e-4, rel=1e-9)


@pytest.mark.parametrize("name", SECOND)
def test_the_printed_form_by_hand(name: str) -> None:
    """w ← β1 w + η_g m / √(v + τ), and Adam's v with a minus."""
    b1, b2, tau, lr = 0.9, 0.99, 0.5, 0.1
    settings = {} if name == "adagrad" else {"beta2": b2}
    optimizer = OPTIMIZERS[name](server_lr=lr, beta1=b1, tau=tau, as_printed=True, **settings)  # type: ignore[call-arg]
    second = {**SECOND, "adam": lambda v, d, b2: b2 * v - (1 - b2) * d * d}[name]
    m, v, expected = [0.0] * 3, [tau**2] * 3, []
    for row in CHANGES:
        m = [b1 * old + (1 - b1) * d for old, d in zip(m, row, strict=True)]
        v = [second(old, d, b2) for old, d in zip(v, row, strict=True)]
        moved = [lr * a / math.sqrt(b + tau) for a, b in zip(m, v, strict=True)]
        expected.append([b1 * w + move - w for w, move in zip(W, moved, strict=True)])
    assert_steps(steps_of(optimizer, CHANGES), expected)


def test_adams_printed_minus_ends_in_no_number() -> None:
    """Reason enough for the correction: a change of 1 for a hundred rounds leaves no step."""
    steps = steps_of(Adam(as_printed=True), [[1.0, 1.0, 1.0]] * 100)
    assert bool(steps[-1].isnan().all())
    assert all(bool(step.isfinite().all()) for step in steps_of(Adam(), [[1.0, 1.0, 1.0]] * 100))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_change_moves_nothing_and_entries_do_not_mix(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    assert all(bool((step == 0).all()) for step in steps_of(optimizer, [[0.0] * 3] * 3))
    together = steps_of(optimizer, CHANGES)
    alone = steps_of(optimizer, [[row[0], 0.0, 0.0] for row in CHANGES])
    assert all(float(a[0]) == float(b[0]) for a, b in zip(together, alone, strict=True))


def closed_form(optimizer: Any, w: Tensor, deltas: Tensor, rates: list[float]) -> list[Tensor]:
    """The steps by the papers' equations, written out in the vectors' own precision."""
    m, v = torch.zeros_like(w), torch.full_like(w, optimizer.tau**2 if hasattr(optimizer, "tau") else 0.0)
    steps = []
    for d, rate in zip(deltas, rates, strict=True):
        lr = optimizer.server_lr
        if type(optimizer) is Sgd:
            steps.append(lr * d)
        elif type(optimizer) is SlowMo:
            m = optimizer.beta * m + d / rate
            steps.append(lr * rate * m)
        elif type(optimizer) is Momentum:
            m = optimizer.beta * m + d
            steps.append(lr * (d + optimizer.beta * m if optimizer.nesterov else m))
        else:
            beta2, square, minus = getattr(optimizer, "beta2", 0.0), d * d, -1 if optimizer.as_printed else 1
            m = optimizer.beta1 * m + (1 - optimizer.beta1) * d
            if type(optimizer) is Adagrad:
                v = v + square
            elif type(optimizer) is Adam:
                v = beta2 * v + minus * (1 - beta2) * square
            else:
                v = v - (1 - beta2) * square * torch.sign(v - square)
            if optimizer.as_printed:
                steps.append((optimizer.beta1 - 1) * w + lr * m / (v + optimizer.tau).sqrt())
            else:
                steps.append(lr * m / (v.sqrt() + optimizer.tau))
    return steps


@pytest.mark.parametrize(
    "optimizer",
    [
        *(kind() for kind in OPTIMIZERS.values()),
        Momentum(0.7, 0.8, nesterov=True),
        *(kind(0.3, 0.6, tau=0.5, as_printed=True) for kind in (Adagrad, Adam, Yogi)),
    ],
    ids=str,
)
def test_steps_are_the_equations_to_the_bit(optimizer: Any) -> None:
    """In float32, where every rounding shows, whatever functions the optimizer is made of."""
    generator = torch.Generator().manual_seed(5)
    w, deltas = torch.randn(101, generator=generator), 0.1 * torch.randn(6, 101, generator=generator)
    rates = [0.3, 0.3, 0.1, 0.1, 0.07, 1.0]
    state = optimizer.start(State(w=w))
    for place, expected in enumerate(closed_form(optimizer, w, deltas, rates)):
        step, state = optimizer.step(state, deltas[place], rates[place])
        assert torch.equal(step, expected)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_the_servers_first_adam_step_is_a_clients(engine: str) -> None:
    """One client that has all its samples in its one step, against the server's Adam on the same gradient.

    Without memory of the zeros that it started from, β1 = β2 = 0 and v from 0, the server's first step is one
    whose bias is corrected. The gradient's entries are powers of two: then no product of them is rounded, so
    that both agree to the bit.
    """
    targets = torch.tensor([[1.0, -0.5, 0.25, -8.0]])
    task, data = quadratics(targets, torch.ones_like(targets), (3,))
    federation = federation_of(engine, task, data, local={"optimizer": "adam", "batch": 0, "steps": 1})

    def one_step(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=client.descend(w, lr=0.125), gradient=client.full_gradient(w))

    w = torch.zeros_like(task.initial())
    replies = federation.map(one_step, [0], {"w": w})
    gradient = replies["gradient"][0]
    assert gradient.abs().log2().frac().eq(0).all()
    optimizer = Adam(server_lr=0.125, beta1=0.0, beta2=0.0, tau=1e-8, v0="zero")
    step, _ = optimizer.step(optimizer.start(State(w=w)), -gradient)
    assert torch.equal(replies["w"][0], w + step)
    assert float(step.abs().min()) > 0.1
