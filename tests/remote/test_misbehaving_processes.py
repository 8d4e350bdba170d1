"""A real node that misbehaves, and a rule that withstands it: what a simulation of both gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from flower_processes import Nursery, free_port
from safetensors.torch import load_file

from sartor.runs.execute import execute
from sartor.runs.experiment import load

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

SETTINGS = ("rounds=2", "data.clients=4", "engine.name=loop", "model.name=mlp", "model.hidden=4")


@pytest.mark.parametrize("method", ["fedavg", pytest.param("diversifed", marks=pytest.mark.nightly)])
def test_a_node_that_misbehaves_is_what_a_simulation_has(method: str, tmp_path: Path) -> None:
    rule = "median" if method == "fedavg" else "norm-filter"
    settings = (*SETTINGS, f"aggregate.name={rule}")
    (tmp_path / "all").mkdir()
    for client in range(4):
        random = np.random.default_rng(client)
        x, y = random.normal(size=(12, 3)).astype(np.float32), np.arange(12) % 2
        np.savez(tmp_path / "all" / f"c{client}.npz", x=x + y[:, None], y=y)
    nursery, address = Nursery(tmp_path), f"127.0.0.1:{free_port()}"
    try:
        out = tmp_path / "run"
        server = nursery.start("serve", method, *settings, "--listen", address, "--out", out)
        nodes = []
        for client in range(4):
            words = ("--data", tmp_path / "all" / f"c{client}.npz", "--state", tmp_path / f"s{client}")
            bad = ("--attack", "name=sign-flip", "--attack", "scale=3") if client == 2 else ()
            nodes.append(nursery.start("join", address, *words, *bad))
        assert server.wait() == 0, server.output
        assert all(node.wait() == 0 for node in nodes)
        assert "this node misbehaves: SignFlip" in nodes[2].output
    finally:
        nursery.close()
    given = [f"data.path={tmp_path / 'all'}", "attack.name=sign-flip", "attack.scale=3"]
    attacked = load(None, [*settings, *given, 'attack.clients=["c2"]'], algorithm=method)
    execute(attacked, out=tmp_path / "simulated")
    expected, found = (load_file(tmp_path / run / "models.safetensors") for run in ("simulated", "run"))
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)
    honest = execute(load(None, [*settings, given[0]], algorithm=method), out=tmp_path / "honest")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 2
    if honest.w is not None:
        assert not torch.allclose(honest.w, found["server.w"], rtol=1e-3)
