"""Of several shared models one is given, and a client's own whatever is known of those."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sartor
from sartor.errors import SartorError


def test_models_that_were_not_compared_are_asked_for_by_number() -> None:
    """As at a node, which has what it trained and no pooled data."""
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    data = {"Oslo": (x, y), "Bergen": (-x, y)}
    result = sartor.run("ifca", data=data, rounds=1, store=False)
    assert result.w is not None
    assert result.w.dim() == 2
    known = result.state_dict()
    there = replace(result, summary={**result.summary, "last": None})
    personal = there.state_dict("Oslo")
    assert all(torch.equal(personal[key], value) for key, value in result.state_dict("Oslo").items())
    with pytest.raises(SartorError, match="several shared models, not compared here; say which: model=0"):
        there.state_dict()
    best = result.summary["last"]["shared_pooled"]["best_model"]
    assert all(torch.equal(there.state_dict(model=best)[key], value) for key, value in known.items())
