"""Weights of the clients that answered, where a method's paper does not weigh by samples or has groups."""

from __future__ import annotations

import torch
from torch import Tensor

from sartor.federation.exchange import Replies


def weights_of(replies: Replies, weighted: bool, members: Tensor | None = None) -> Tensor:
    """One weight per reply, together 1: n_i / Σ n_j, or all alike where not ``weighted``.

    A client without samples weighs nothing. ``members``, a boolean vector, leaves the others out; without
    any member all weights are 0. With everyone the weighted ones are ``replies.weights`` to the bit.
    """
    n = replies.n.double()
    share = n if weighted else (n > 0).double()
    if members is not None:
        share = torch.where(members, share, 0.0)
    return (share / share.sum().clamp(min=1)).to(replies.dtype)
