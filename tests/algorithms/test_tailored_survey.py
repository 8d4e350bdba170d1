"""The choice of a model shares its pass with the gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers import federation_of, task_and_data
from sartor.algorithms.mixing.ifca import losses
from sartor.algorithms.tailored.exchanges import gradients, survey
from sartor.client.local import Client
from sartor.federation.exchange import Reply


def apart(client: Client, hyper: object, w: torch.Tensor) -> Reply:
    """The two passes by themselves."""
    return Reply(gradient=gradients(client, w), loss=losses(client, w))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_gradients_and_losses_of_one_pass_are_those_of_two(engine: str) -> None:
    federation = federation_of(engine, *task_and_data())
    federation.round = 1
    w = federation.initial()
    models = torch.stack([w, -w, w + 0.1])
    one, two = (federation.map(function, np.arange(6), {"w": models}) for function in (survey, apart))
    assert torch.equal(one["gradient"], two["gradient"])
    assert torch.allclose(one["loss"], two["loss"], rtol=1e-6, atol=0)  # losses alone are one product for all
