"""Personal models of clients that have networks of their own are asked for by name too."""

from __future__ import annotations

import pytest
import torch

import sartor
from sartor.errors import SettingError


def test_models_of_clients_own_are_taken_by_name() -> None:
    x, y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2
    result = sartor.run(
        "fml",
        data={"Oslo": (x, y), "Bergen": (-x, y)},
        models=[{"name": "mlp", "hidden": 5, "clients": ["Bergen"]}],
        rounds=1,
        store=False,
    )
    personal = result.personal
    assert personal is not None
    assert torch.equal(personal["Bergen"], personal[1])
    assert len(personal["Oslo"]) > len(personal["Bergen"]) == 3 * 5 + 5 + 5 * 2 + 2
    assert result.model(client="Bergen")(x).shape == (20, 2)
    with pytest.raises(SettingError, match="Bergen"):
        personal["Bergn"]
