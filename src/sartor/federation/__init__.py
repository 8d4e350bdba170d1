"""The contract between algorithms and engines: map a client function over a cohort, and what comes back.

Imports client and model. What an algorithm may see of the clients is here and nowhere else.
"""

from __future__ import annotations

from sartor.federation.exchange import Call, Replies, Reply, Step, changes, personal
from sartor.federation.federation import Federation

__all__ = ["Call", "Federation", "Replies", "Reply", "Step", "changes", "personal"]
