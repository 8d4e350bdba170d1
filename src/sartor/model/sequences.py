"""Networks for sequences of tokens: an LSTM and a small transformer, by name.

A sample is a row of whole numbers, of which 0 is padding and counts nowhere. A network gives one answer for a
text, or one at every place (the next token); which of them follows from the targets. Both are written
in plain operations, as PyTorch's own LSTM cannot be computed for many clients together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from sartor.errors import SettingError
from sartor.model.attention import Block
from sartor.nests import Nest
from sartor.settings import setting

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sequences:
    """What networks for sequences have in common."""

    vocabulary: int = setting(0, "number of tokens; 0: as many as the samples have, by the largest", low=0)
    answers: str = setting(
        "auto",
        "one answer for a text, or one at every place; auto: as the targets are",
        choices=("auto", "text", "place"),
    )
    width: int = setting(64, "numbers of a token", low=1)
    dropout: float = setting(0.0, "share of activations that are dropped", low=0, below=1)
    told: ClassVar[tuple[str, ...]] = ("vocabulary",)
    head: ClassVar[str | None] = "output"

    def seen(self, samples: Sequence[Nest], y: Nest) -> Sequences:
        """The same settings, with what these samples and targets say of those that were left open."""
        x = samples[0]
        if not isinstance(x, Tensor) or x.is_floating_point() or x.dim() != 2:
            return self  # refused where it is built
        if any(int(each.min()) < 0 for each in samples if each.numel()):
            raise SettingError("model: tokens are whole numbers from 0, which is padding; there is one below")
        found = max((int(each.max()) + 1 for each in samples if each.numel()), default=1)
        if self.vocabulary and found > self.vocabulary:
            raise SettingError(
                f"model.vocabulary = {self.vocabulary}: there is a token {found - 1}; tokens are below it"
            )
        place = isinstance(y, Tensor) and y.dim() == 2 and y.shape[1] == x.shape[1]
        answers = ("place" if place else "text") if self.answers == "auto" else self.answers
        return replace(self, vocabulary=self.vocabulary or found, answers=answers)

    def tokens(self, shape: Shape) -> int:
        """How many tokens there are, where samples are rows of them."""
        if len(shape) != 1:
            raise SettingError(f"model: needs rows of tokens [length], the data has {list(shape)}")
        if not self.vocabulary:
            raise SettingError("model.vocabulary: how many tokens there are; samples are no whole numbers")
        return self.vocabulary

    def outputs(self, classes: int) -> int:
        """How many numbers an answer has: at every place one for each token."""
        return max(classes, self.vocabulary) if self.answers == "place" else classes


@dataclass(frozen=True)
class LSTM(Sequences):
    """Layers of LSTM over embeddings of the tokens; the answer is of the last state, or of every state."""

    width: int = setting(32, "numbers of a token", low=1)
    hidden: int = setting(128, "units of a layer", low=1)
    layers: int = setting(1, "layers on top of each other", low=1)

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """The module for rows of tokens."""
        return _LSTM(self.tokens(shape), self.outputs(classes), self)


@dataclass(frozen=True)
class Transformer(Sequences):
    """A small transformer: learnt places, and the mean of the tokens or, at every place, what came before."""

    depth: int = setting(2, "transformer blocks", low=1)
    heads: int = setting(4, "heads of attention", low=1)

    def build(self, shape: Shape, classes: int) -> nn.Module:
        """The module for rows of tokens of this length."""
        return _Transformer(self.tokens(shape), shape[0], self.outputs(classes), self)


class _Layer(nn.Module):
    """One layer of LSTM (Hochreiter & Schmidhuber 1997, with forget gates); padding leaves the state."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.input, self.recurrent = nn.Linear(inputs, 4 * hidden), nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        gates = self.input(x)
        h = c = torch.zeros_like(gates[:, 0, : self.hidden])
        states = []
        for place in range(x.shape[1]):
            into, forget, new, out = (gates[:, place] + self.recurrent(h)).chunk(4, dim=-1)
            after = forget.sigmoid() * c + into.sigmoid() * new.tanh()
            there = real[:, place, None]
            h = torch.where(there, out.sigmoid() * after.tanh(), h)
            c = torch.where(there, after, c)
            states.append(h)
        return torch.stack(states, dim=1)


class _LSTM(nn.Module):
    def __init__(self, vocabulary: int, outputs: int, settings: LSTM) -> None:
        super().__init__()
        self.place = settings.answers == "place"
        self.embedding = nn.Embedding(vocabulary, settings.width)
        sizes = [settings.width, *[settings.hidden] * settings.layers]
        self.layers = nn.ModuleList(_Layer(*pair) for pair in pairwise(sizes))
        self.dropout = nn.Dropout(settings.dropout)
        self.output = nn.Linear(settings.hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        real, y = x != 0, self.embedding(x)
        for layer in self.layers:
            y = self.dropout(layer(y, real))
        scores: Tensor = self.output(y if self.place else y[:, -1])
        return scores


class _Transformer(nn.Module):
    def __init__(self, vocabulary: int, length: int, outputs: int, settings: Transformer) -> None:
        super().__init__()
        self.place = settings.answers == "place"
        self.embedding = nn.Embedding(vocabulary, settings.width)
        self.places = nn.Parameter(torch.randn(length, settings.width) * 0.02)
        blocks = [Block(settings.width, settings.heads, settings.dropout) for _ in range(settings.depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(settings.width)
        self.output = nn.Linear(settings.width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        real = x != 0
        length = x.shape[1]
        seen = real[:, None, :].expand(-1, length, -1)
        if self.place:
            seen = seen & torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        y = self.embedding(x) + self.places
        for block in self.blocks:
            y = block(y, seen)
        y = self.norm(y)
        if not self.place:
            there = real[..., None].to(y.dtype)
            y = (y * there).sum(1) / there.sum(1).clamp(min=1)
        scores: Tensor = self.output(y)
        return scores
