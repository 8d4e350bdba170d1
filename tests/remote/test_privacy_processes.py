"""Privacy through Flower, in processes of their own: the noise of a simulation, and the same account."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from flower_processes import Nursery, free_port
from safetensors.torch import load_file

from sartor.runs.execute import execute
from sartor.runs.experiment import load

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("privacy"))
    yield nursery
    nursery.close()


@pytest.mark.parametrize("mode", ["local", pytest.param("central", marks=pytest.mark.nightly)])
def test_processes_give_the_noise_and_the_account_of_a_simulation(mode: str, nursery: Nursery) -> None:
    place = nursery.folder / mode
    (place / "all").mkdir(parents=True)
    for client in range(2):
        random = np.random.default_rng(client)
        np.savez(place / "all" / f"c{client}.npz", x=random.normal(size=(12, 3)), y=np.arange(12) % 2)
    settings = ["algorithm=ditto", "rounds=2", "engine.name=loop", "data.clients=2", "model.name=softmax"]
    settings += [f"privacy.mode={mode}", "privacy.epsilon=30", "privacy.clip=0.5"]
    address = f"127.0.0.1:{free_port()}"
    server = nursery.start("serve", *settings, "--listen", address, "--out", place / "run")
    node = nursery.start("join", address, "--data", place / "all", "--state", place / "state")
    simulated = execute(load(None, [*settings, f"data.path={place / 'all'}"]), out=place / "simulated")
    assert server.wait() == 0, server.output
    assert node.wait() == 0, node.output
    expected = load_file(place / "simulated" / "models.safetensors")
    for name, value in load_file(place / "run" / "models.safetensors").items():
        torch.testing.assert_close(value, expected[name])
    summary = json.loads((place / "run" / "summary.json").read_text())
    assert summary["privacy"] == simulated.summary["privacy"]
    assert 0 < summary["privacy"]["epsilon"] <= 30
    assert "privacy.secret = false" in server.output  # whoever knows the seed can take the noise off
