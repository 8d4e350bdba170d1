"""Rows that are only to be added up are lent by a captured call, and stay what they were for who holds them.

Graphs are played as in ``test_pieces.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_pieces import Again, captures, federation, vectors, weights  # noqa: F401
from torch import Tensor

from helpers import federation_of, method
from sartor.client.local import Client
from sartor.federation import Federation
from sartor.federation.clock import Conditions
from sartor.federation.exchange import Lent, Replies, Reply

COHORT = [3, 5, 8]


def training(client: Client, hyper: Any, w: Tensor) -> Reply:
    change = client.descend(w, lr=0.1) - w
    return Reply(delta=change, other=2 * change, size=client.n)


def asked(made: Federation, cohort: list[int] = COHORT, fold: tuple[str, ...] = ("delta",)) -> Replies:
    replies = made.map(training, cohort, {"w": made.initial() / made.round}, fold=fold)
    made.round += 1
    return replies


def both(**settings: Any) -> tuple[Federation, Federation]:
    made, plain = federation(**settings), federation("loop", **settings)
    made.round = plain.round = 1
    return made, plain


def alike(found: Replies, expected: Replies) -> None:
    for name in ("delta", "other"):
        for value, other in ((found.mean(name), expected.mean(name)), (found.sum(name), expected.sum(name))):
            torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)
    weights = torch.arange(1.0, len(found) + 1, dtype=torch.float64)
    torch.testing.assert_close(found.sum("delta", weights), expected.sum("delta", weights))


def test_lent_rows_give_the_same_means_and_sums(captures: list[Again]) -> None:  # noqa: F811
    made, plain = both()
    for _ in range(5):
        found, expected = asked(made), asked(plain)
        assert found.lent is not None
        assert list(found.lent.rows) == ["delta"]
        assert expected.lent is None
        alike(found, expected)
    assert made.traffic == plain.traffic


def test_the_mean_is_to_the_bit_that_of_the_rows(captures: list[Again]) -> None:  # noqa: F811
    made, _ = both()
    for _ in range(4):
        found = asked(made)
        assert torch.equal(found.mean("delta"), found.weights @ found["delta"])


def test_replies_that_are_held_stay_what_they_were(captures: list[Again]) -> None:  # noqa: F811
    """While others are asked, in the same shape or another, and with other weights."""
    made, plain = both()
    cohorts = [COHORT, COHORT, COHORT, [5, 8], COHORT, [2, 3, 8], COHORT]
    pairs = [(asked(made, cohort), asked(plain, cohort)) for cohort in cohorts]
    for found, expected in pairs:
        alike(found, expected)


def test_rows_that_nobody_holds_are_not_copied(
    captures: list[Again],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Lent] = []
    monkeypatch.setattr(Lent, "keep", kept.append)
    weights(federation(), cohorts=[COHORT] * 5)
    assert not kept


@pytest.mark.parametrize(
    ("cohort", "settings"),
    [
        ([8, 5, 3], {}),
        (COHORT, {"chunk": 2}),
        (COHORT, {"conditions": Conditions(on_bad_reply="drop")}),
    ],
)
def test_rows_that_are_put_in_order_or_left_out_are_given(
    captures: list[Again],  # noqa: F811
    cohort: list[int],
    settings: dict[str, Any],
) -> None:
    made, plain = both(**settings)
    for _ in range(3):
        found, expected = asked(made, cohort), asked(plain, cohort)
        assert found.lent is None
        alike(found, expected)


def test_what_did_not_change_is_not_copied_again(
    captures: list[Again],  # noqa: F811
) -> None:
    """The weights of equal clients are one tensor; a model that is changed in place is another model."""
    made = federation_of("stacked", federation().task, vectors((8,) * 6), local={"batch": 4})
    w, found = made.initial(), []
    for _ in range(5):
        replies = made.map(training, np.arange(4), {"w": w}, fold=["delta"])
        found.append(replies.mean("delta"))
        made.round += 1
        w += 0.1
    plain = federation_of("loop", federation().task, vectors((8,) * 6), local={"batch": 4})
    w = plain.initial()
    for value in found:
        replies = plain.map(training, np.arange(4), {"w": w}, fold=["delta"])
        torch.testing.assert_close(value, replies.mean("delta"), rtol=1e-9, atol=1e-9)
        plain.round += 1
        w += 0.1


@pytest.mark.parametrize("name", ["fedavg", "mimelite", "feddyn", "ditto"])
def test_methods_that_fold_are_what_they_are_on_the_loop(
    captures: list[Again],  # noqa: F811
    name: str,
) -> None:
    made, plain = federation(), federation("loop")
    assert method(name, made) is not None
    cohorts = [COHORT] * 4
    torch.testing.assert_close(
        weights(made, name, cohorts), weights(plain, name, cohorts), rtol=1e-9, atol=1e-9
    )
