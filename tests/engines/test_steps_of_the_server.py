"""A step of the server that is part of a captured call, and norms that lie where the graph puts them.

Graphs are played as in ``test_pieces.py``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from test_lent import training
from test_pieces import Again, captures, federation, vectors, weights  # noqa: F401
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import federation_of, method, model_task
from sartor.algorithms.references.fedavg import FedAvg, FedAvgHyper
from sartor.client.local import Client
from sartor.engines.stacked import told as told_of_calls
from sartor.engines.stacked.engine import StackedEngine
from sartor.errors import SartorError
from sartor.federation import Federation
from sartor.federation.exchange import Outcome, Replies, Reply, Step, Work
from sartor.kernels.device import Computing

EVERYONE = np.arange(4)
SETTINGS: dict[str, Any] = {"local": {"batch": 4}}


def made(engine: str = "stacked") -> Federation:
    """A federation of equal clients, whose calls are captured as a whole."""
    return federation_of(engine, federation().task, vectors((8,) * 6), **SETTINGS)


def asked(one: Federation, w: Tensor, rate: float) -> Replies:
    replies = one.map(training, EVERYONE, {"w": w}, fold={"delta": Step("w", rate)})
    one.round += 1
    return replies


class Counted(TorchDispatchMode):
    """What is computed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_a_step_is_to_the_bit_the_one_by_the_mean(captures: list[Again], rate: float) -> None:  # noqa: F811
    one = made()
    w = one.initial()
    for _ in range(5):
        replies = asked(one, w, rate)
        mean = replies.mean("delta")
        assert replies.lent is not None
        assert replies.lent.moved["delta"].is_of(w, rate)
        after = replies.moved("delta", w, rate)
        assert torch.equal(after, w + rate * mean)
        w = after


def test_another_step_than_was_told_of_is_taken_all_the_same(captures: list[Again]) -> None:  # noqa: F811
    one = made()
    w = one.initial()
    for _ in range(4):
        replies = asked(one, w, 0.3)
        mean, other = replies.mean("delta"), w.clone()
        assert torch.equal(replies.moved("delta", w, 0.5), w + 0.5 * mean)
        assert torch.equal(replies.moved("delta", other + 1, 0.3), (other + 1) + 0.3 * mean)
        w += 1
        assert torch.equal(replies.moved("delta", w, 0.3), w + 0.3 * mean)


def test_a_call_goes_on_from_whatever_model_it_is_given(captures: list[Again]) -> None:  # noqa: F811
    """The one before it gave, one that was changed since, an old one again, or any."""
    one, plain = made(), made("loop")
    kept: list[Tensor] = []
    w = one.initial()
    for turn in range(12):
        found, expected = (asked(each, w.clone() if each is plain else w, 0.3) for each in (one, plain))
        after = found.moved("delta", w, 0.3)
        torch.testing.assert_close(after, w + 0.3 * expected.mean("delta"), rtol=1e-9, atol=1e-9)
        kept.append(after.clone())
        w = after
        if turn % 4 == 1:
            w += 0.1
        elif turn % 4 == 2:
            w = kept[0].clone()
        elif turn % 4 == 3:
            w = kept[turn // 2]
        assert torch.equal(after, kept[-1]) or turn % 4 == 1
    assert [graph.replays for graph in captures] == [10]


def test_models_that_are_held_stay_what_they_were(captures: list[Again]) -> None:  # noqa: F811
    one, algorithm = made(), FedAvg(FedAvgHyper(lr=0.1, server_lr=0.5))
    servers, copies = [algorithm.start(one)], []
    for _ in range(6):
        one.round += 1
        copies.append(servers[-1].w.clone())
        servers.append(algorithm.round(servers[-1], one, EVERYONE))
    assert all(torch.equal(server.w, copy) for server, copy in zip(servers, copies, strict=False))


def test_a_round_that_is_replayed_copies_the_new_model_and_nothing_else(
    captures: list[Again],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Again, "replay", lambda self: None)
    monkeypatch.setattr(Federation, "verify", lambda self: None)  # as on a GPU, where it is seldom done
    data = vectors((8,) * 6).map(lambda x: x.float())
    one = federation_of("stacked", model_task(data=data), data, **SETTINGS)  # a model without buffers
    algorithm = FedAvg(FedAvgHyper(lr=0.1, server_lr=0.5))
    server = algorithm.start(one)
    for _ in range(6):
        one.round += 1
        server = algorithm.round(server, one, EVERYONE)
    with Counted() as counted:
        for _ in range(5):
            one.round += 1
            server = algorithm.round(server, one, EVERYONE)
    assert counted.names == ["aten::clone"] * 5


def test_rates_of_the_server_do_not_share_a_capture(captures: list[Again]) -> None:  # noqa: F811
    one, plain = made(), made("loop")
    w = one.initial()
    for rate in (0.3, 0.3, 0.3, 0.7, 0.7, 0.7, 0.3):
        found = asked(one, w, rate).moved("delta", w, rate)
        expected = asked(plain, w, rate).moved("delta", w, rate)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        w = found
    assert isinstance(one.engine, StackedEngine)
    assert len(one.engine.graphs.captured) == 2


def test_a_step_from_what_is_not_sent_is_left_to_the_server(captures: list[Again]) -> None:  # noqa: F811
    one = made()
    for _ in range(4):
        w = one.initial()
        replies = one.map(training, EVERYONE, {"w": w}, fold={"delta": Step("v"), "size": Step("w")})
        assert replies.lent is not None
        assert not replies.lent.moved
        assert torch.equal(replies.moved("delta", w), w + replies.mean("delta"))
        one.round += 1


# Norms -----------------------------------------------------------------------------------------------------


def test_norms_are_looked_up_long_after_their_call(
    captures: list[Again],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through several turns of the rows that a graph writes them to, and with other clients in between."""
    monkeypatch.setattr(told_of_calls, "AHEAD", 4)
    one, plain = made(), made("loop")
    outcomes: list[Outcome] = []
    usual = type(one.engine).run
    monkeypatch.setattr(
        type(one.engine), "run", lambda self, work: outcomes.append(usual(self, work)) or outcomes[-1]
    )
    expected = []
    w = one.initial()
    for turn in range(14):
        cohort = EVERYONE + (turn == 9)
        replies = one.map(training, cohort, {"w": w}, fold=["delta", "other"])
        rows = plain.map(training, cohort, {"w": w})
        expected.append(torch.linalg.vector_norm(rows["delta"], dim=1))
        one.round += 1
        plain.round += 1
        w = w + replies.mean("delta")
    assert len(captures) == 1
    for outcome, norm in zip(outcomes, expected, strict=True):
        assert outcome.norms is not None
        torch.testing.assert_close(outcome.norms["'delta'"], norm, rtol=1e-9, atol=1e-9)


def diverging(client: Client, hyper: Any, w: Tensor, sick: Tensor) -> Reply:
    return Reply(delta=(client.descend(w, lr=0.1) - w) / (client.number != sick))


@pytest.mark.parametrize("bad", [2, 5, 11])
def test_a_bad_reply_that_is_seen_late_is_named(
    captures: list[Again],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    bad: int,
) -> None:
    monkeypatch.setattr(told_of_calls, "AHEAD", 4)
    verify = Federation.verify
    monkeypatch.setattr(Federation, "verify", lambda self: None)  # as on a GPU, where it is seldom done
    one = made()
    for turn in range(13):
        one.round = turn
        sent = {"w": one.initial(), "sick": torch.tensor(2 if turn == bad else -1)}
        one.map(diverging, EVERYONE, sent, fold=["delta"])
    with pytest.raises(SartorError, match=rf"round {bad}, client '{one.names[2]}': 'delta' of its reply is"):
        verify(one)


# What clients compute in -----------------------------------------------------------------------------------


def test_what_clients_compute_in_ends_with_them() -> None:
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    for precision, expected in (("usual", before), ("tf32", (True, True)), ("full", (False, False))):
        with suppress(ValueError), Computing(precision), Computing("usual"):
            assert not torch.is_grad_enabled()
            assert (products.allow_tf32, convolutions.allow_tf32) == expected
            raise ValueError
        assert torch.is_grad_enabled()
        assert (products.allow_tf32, convolutions.allow_tf32) == before
    with torch.no_grad():
        with Computing("full"):
            pass
        assert not torch.is_grad_enabled()


def test_methods_that_average_as_fedavg_are_what_they_are_on_the_loop(
    captures: list[Again],  # noqa: F811
) -> None:
    for name in ("fedavg", "fedprox", "fedupdate"):
        one, plain = made(), made("loop")
        assert method(name, one) is not None
        cohorts = [[0, 1, 2, 3]] * 5
        torch.testing.assert_close(
            weights(one, name, cohorts), weights(plain, name, cohorts), rtol=1e-9, atol=1e-9
        )


def test_work_is_not_changed_by_who_has_it() -> None:
    work = Work(training, None, EVERYONE, EVERYONE, {}, {}, None)
    with pytest.raises(AttributeError):
        work.keeps = False  # type: ignore[misc]
