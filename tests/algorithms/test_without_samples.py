"""A client without samples that is drawn changes nothing: not the server, not itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import METHODS, federation_of, method, play, task_and_data
from sartor.algorithms import registered
from sartor.federation.clock import Conditions
from sartor.runs.run import tensors_of

NAMES = [
    "apfl",
    "elastic",
    "fedbabu",
    "feddisco",
    "feddyn",
    "fedlc",
    "fedntd",
    "fedphp",
    "fedsam",
    "lg-fedavg",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_client_without_samples_counts_for_nothing(name: str) -> None:
    task, data = task_and_data((0, 9, 12, 33))
    left, states = [], []
    for cohorts in ([[1, 2], [2, 3], [1, 3]], [[0, 1, 2], [0, 2, 3], [0, 1, 3]]):
        federation = federation_of("loop", task, data, local={"batch": 8})
        left.append(dict(tensors_of(play(method(name, federation), federation, cohorts))))
        states.append({state: federation.states[state] for state in federation.states})
    for one, other in (left, states):
        assert one.keys() == other.keys()
        for key in one:
            torch.testing.assert_close(one[key], other[key], rtol=1e-12, atol=1e-14)
    for state, values in states[0].items():
        assert torch.equal(values[0], states[1][state][0]), state


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("vrl-sgd", "spfl-async")])
def test_a_round_of_none_but_such_clients_leaves_models_that_can_be_trained(name: str) -> None:
    """Their weights add up to nothing.

    ``vrl-sgd`` has all clients in every round; ``spfl-async`` mixes what it has last heard of others.
    """
    task, data = task_and_data((0, 9, 12, 33))
    kind = registered()[name]
    data = replace(data, validation=data.test if kind.needs_validation else None)
    federation = federation_of("loop", task, data, local={"batch": 8}, buffers=kind.buffers)
    server = play(method(name, federation), federation, [[0], [0, 1], [0], [0, 2, 3]])
    left = dict(tensors_of(server)) | {state: federation.states[state] for state in federation.states}
    for key, value in left.items():
        assert not value.is_floating_point() or torch.isfinite(value).all(), key


def test_a_bound_on_weights_leaves_everyone_a_sample() -> None:
    """Small clients under a bound below one would all have no weight, and nothing would be learnt."""
    task, data = task_and_data((2, 2, 2, 30))
    federation = federation_of("loop", task, data, conditions=Conditions(largest_weight=0.4))
    assert federation.sizes.tolist() == [1, 1, 1, 1]
