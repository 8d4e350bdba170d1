"""A client without samples that is drawn changes nothing: not the server, not itself."""

from __future__ import annotations

import pytest
import torch

from helpers import federation_of, method, play, task_and_data
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
