"""A transformer's block in plain operations, which many clients can compute together."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sartor.errors import SettingError


class Block(nn.Module):
    """Attention and two dense layers, each after a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise SettingError(f"model.heads = {heads}: model.width = {width} is no multiple of it")
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.dense1, self.dense2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """``seen`` says which tokens each one sees: ``[..., length, length]``; left out, all."""
        x = x + self.dropout(self._attention(self.norm1(x), seen))
        after: Tensor = x + self.dropout(self.dense2(F.gelu(self.dense1(self.norm2(x)))))
        return after

    def _attention(self, x: Tensor, seen: Tensor | None) -> Tensor:
        n, length, width = x.shape

        def parted(values: Tensor) -> Tensor:
            return values.reshape(n, length, self.heads, width // self.heads).transpose(1, 2)

        query, key, value = parted(self.query(x)), parted(self.key(x)), parted(self.value(x))
        scores = query @ key.transpose(2, 3) / math.sqrt(width // self.heads)
        if seen is not None:
            scores = torch.where(seen[:, None], scores, torch.finfo(scores.dtype).min)
        mixed: Tensor = self.mix((scores.softmax(-1) @ value).transpose(1, 2).reshape(n, length, width))
        return mixed
