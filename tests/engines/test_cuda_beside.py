"""Steps of few clients on CUDA: on two streams they give the same to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import classification, federation_of, method, model_task, play
from sartor.engines.stacked import graphs
from sartor.kernels import beside
from sartor.kernels.gpu import HAS_TRITON

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")]

SIZES = (5, 170, 33, 640, 70, 160, 900, 20, 410, 200)
COHORTS = [[0, 3, 5, 6], [1, 2, 4, 9], [3, 6, 7, 8], [0, 1, 2, 7], [4, 5, 8, 9], [2, 3, 6, 9], [1, 3, 5, 8]]


def weights(model: str) -> Tensor:
    """What rounds of sampled cohorts of unlike clients give."""
    data = classification(SIZES, shape=(1, 28, 28), classes=10)
    made = federation_of("stacked", model_task(model, data), data, local={"batch": 32}, device="cuda")
    w: Tensor = play(method("fedavg", made), made, COHORTS * 3).w.cpu()
    return w


@pytest.mark.parametrize("model", ["cnn", "lenet", "mlp"])
def test_a_second_stream_changes_no_bit(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_SHAPES", 0)  # no call is captured as a whole
    used, own = [], beside.specialise
    monkeypatch.setattr(beside, "specialise", lambda graph: used.append(own(graph)))
    aside = weights(model)
    assert used
    monkeypatch.setattr(beside, "pays", lambda samples: False)
    assert torch.equal(aside, weights(model))
