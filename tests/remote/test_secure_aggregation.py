"""What Flower ships for secure aggregation: the facts for which ``docs/security.md`` leaves it out.

Where one of these fails, Flower has changed, and the page is to be thought over.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")


def test_a_mask_has_32_bits_of_secret() -> None:
    """Two secrets of 256 bits with the same words, in another order, give the same mask."""
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    words = [bytes([place]) * 4 for place in range(8)]
    one, other = b"".join(words), b"".join(reversed(words))
    assert one != other
    masks = [pseudo_rand_gen(secret, 1 << 32, [(1000,)])[0] for secret in (one, other)]
    assert np.array_equal(*masks)
    folded = int(np.bitwise_xor.reduce(np.frombuffer(one, dtype="<u4")))
    drawn = np.random.RandomState(folded).randint(0, (1 << 32) - 1, (1000,), dtype=np.int64)
    assert np.array_equal(masks[0], drawn)  # NumPy's Mersenne Twister, by that one number


def test_a_client_gives_both_shares_of_another_to_a_server_that_asks() -> None:
    """Who is named as there and as gone loses both secrets, and with them what it sent alone."""
    from flwr.app import ConfigRecord
    from flwr.common.secure_aggregation.secaggplus_constants import Key

    mod = import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
    state: Any = mod.SecAggPlusState()
    state.threshold = 2
    state.rd_seed_share_dict = {1: b"own mask of 1", 2: b"own mask of 2"}
    state.sk1_share_dict = {1: b"key of 1", 2: b"key of 2"}
    asked = ConfigRecord({Key.ACTIVE_NODE_ID_LIST: [1, 2], Key.DEAD_NODE_ID_LIST: [2]})
    given = mod._unmask(state, asked)
    assert given[Key.NODE_ID_LIST] == [1, 2, 2]
    assert given[Key.SHARE_LIST] == [b"own mask of 1", b"own mask of 2", b"key of 2"]


def test_it_rounds_by_numpys_global_state() -> None:
    """So what a client sends follows from no seed of a run."""
    from flwr.common.secure_aggregation.quantization import quantize

    values = [np.linspace(-1, 1, 1000)]
    state = np.random.get_state()
    first, second = quantize(values, 8.0, 1 << 22)[0], quantize(values, 8.0, 1 << 22)[0]
    assert not np.array_equal(first, second)
    np.random.set_state(state)
    assert np.array_equal(quantize(values, 8.0, 1 << 22)[0], first)


def test_its_workflow_wants_a_strategy_of_flowers() -> None:
    from flwr.app import Context, RecordDict
    from flwr.server.workflow import SecAggPlusWorkflow

    context = Context(0, 0, {}, RecordDict(), {})
    with pytest.raises(TypeError, match="Expect a LegacyContext"):
        SecAggPlusWorkflow(3, 2)(None, context)
