"""Two models at a client that learn from each other: its own, and a small one that all clients share.

Both are trained on the same batches as one vector, the own model first. Each follows the gradient of its own
loss: what it learns from the other model is a constant to it.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from sartor.client.local import Client
from sartor.model.batch import Batch, Pass


def divergence(teacher: Tensor, pupil: Tensor) -> Tensor:
    """KL(p ‖ q) of every sample, by the scores of the two; the teacher's are constant."""
    p = F.log_softmax(teacher.detach(), dim=1)
    return (p.exp() * (p - F.log_softmax(pupil, dim=1))).sum(dim=1)


def passes(client: Client, own: Tensor, shared: Tensor, batch: Batch) -> tuple[Pass, Pass]:
    """What both models make of a batch; float buffers of the shared one are as they were at the start."""
    return client.forward(own, batch), client.task.common.forward(shared, batch, None, frozen=True)
