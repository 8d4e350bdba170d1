"""Random streams for splitting data: each a pure function of its key.

A draw is named by a seed and a key such as ``("dirichlet", 3)``; two keys give independent streams, and the
order in which streams are used changes nothing. Splitting happens once, on the host, so numpy's
counter-based generator serves.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np


def stream(seed: int, *key: str | int) -> np.random.Generator:
    """The generator for one purpose, the same on every machine.

    >>> bool(stream(1, "shards").random() == stream(1, "shards").random())
    True
    >>> bool(stream(1, "shards").random() == stream(1, "shards", 2).random())
    False
    """
    digest = hashlib.sha256(json.dumps([int(seed), *key]).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
