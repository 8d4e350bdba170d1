"""Low rank: a weight matrix as a product of two narrow ones, by a step of the power method (PowerSGD).

M = value + what was left out; P = orthonormal columns of M Q; Q ← Mᵀ P; P and Q are sent, and P Qᵀ arrives.
Q of the last time is where the next begins (Vogels et al. 2019, Algorithm 1, for each client by itself). A
kernel is a matrix with a row for each output. What is no matrix, or would not become smaller, is sent as it
is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sartor import random
from sartor.federation.transforms import Key, State, Transform, register_transform
from sartor.model.adapters import exchanged_parts
from sartor.settings import setting
from sartor.transforms.compression import WithFeedback, wide

Layouts = tuple[tuple[int, tuple["Matrix", ...]], ...]
"""The matrices in vectors, by the length of the vector."""


class Matrix(NamedTuple):
    """Where a matrix lies in a vector, and its shape."""

    start: int
    rows: int
    columns: int

    @property
    def place(self) -> slice:
        """Its numbers in the vector."""
        return slice(self.start, self.start + self.rows * self.columns)

    def smaller(self, rank: int) -> bool:
        """Whether the two factors are smaller."""
        return rank * (self.rows + self.columns) < self.rows * self.columns


@register_transform("low-rank")
@dataclass(frozen=True)
class LowRank(WithFeedback):
    """Weight matrices as products of two narrow ones; what is no matrix is sent as it is."""

    rank: int = setting(2, "columns of the two factors", symbol="r", low=1)

    parts = ("left", "right", "rest")
    draws = False

    @property
    def stateful(self) -> bool:
        """Where the next step of the power method begins is kept."""
        return True

    def bound(self, task: Any) -> Transform:
        """The same for vectors that are this task's models, or named parts of them."""
        return LaidOut(**vars(self), layouts=layouts_of(task))

    def init(self, like: Tensor) -> State:
        """Q begins with normal numbers, the same everywhere."""
        size = sum(matrix.columns for matrix in self.matrices(like)) * self.rank
        key = random.stream(0, "low-rank")
        drawn = random.normal(key, size, like.device)
        return {**super().init(like), "right": drawn.to(wide(like.dtype))}

    def matrices(self, like: Tensor) -> list[Matrix]:
        """The matrices of a value that become smaller."""
        found: tuple[Matrix, ...] = ()
        if like.dim() > 1:
            found = (Matrix(0, like.shape[0], like[0].numel()),)
        return [matrix for matrix in self.known(like) or found if matrix.smaller(self.rank)]

    def known(self, like: Tensor) -> tuple[Matrix, ...]:
        """The matrices in a vector of which the layout is known."""
        return ()

    def apply(self, key: Key, value: Tensor, state: State) -> tuple[dict[str, Tensor], State]:
        """One step of the power method for every matrix, from the last Q."""
        wanted, matrices = self.wanted(value, state), self.matrices(value)
        lefts, rights, starts = [], [], self._cut(state["right"], matrices, "columns")
        for matrix, start in zip(matrices, starts, strict=True):
            whole = wanted[matrix.place].view(matrix.rows, matrix.columns)
            left = orthonormal(whole @ start)
            right = whole.T @ left
            lefts.append(left)
            rights.append(right)
        told = {
            "left": _joined(lefts, wanted).to(value.dtype),
            "right": _joined(rights, wanted).to(value.dtype),
            "rest": self._rest(wanted, matrices).to(value.dtype),
        }
        kept = self.left(state, wanted, lambda: self.receive(told, value).to(wanted.dtype).flatten(), value)
        both = zip(rights, starts, strict=True)
        nexts = [torch.where(right.norm(dim=0) > 0, right, start) for right, start in both]
        return told, {**kept, "right": _joined(nexts, wanted)}

    def receive(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """P Qᵀ in the place of every matrix."""
        matrices, pieces, end, used = self.matrices(like), [], 0, 0
        lefts = self._cut(parts["left"], matrices, "rows")
        rights = self._cut(parts["right"], matrices, "columns")
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):
            between = matrix.start - end
            pieces += [parts["rest"][used : used + between], (left @ right.T).flatten()]
            end, used = matrix.place.stop, used + between
        return torch.cat([*pieces, parts["rest"][used:]]).to(like.dtype).view(like.shape)

    def _rest(self, x: Tensor, matrices: list[Matrix]) -> Tensor:
        """What is in no matrix."""
        ends = [0, *(edge for each in matrices for edge in (each.place.start, each.place.stop)), x.shape[0]]
        return torch.cat([x[ends[at] : ends[at + 1]] for at in range(0, len(ends), 2)])

    def _cut(self, joined: Tensor, matrices: list[Matrix], side: str) -> list[Tensor]:
        """The factors of the matrices, of what was joined."""
        sizes = [getattr(matrix, side) * self.rank for matrix in matrices]
        edges = pairwise([0, *accumulate(sizes)])
        return [joined[start:stop].view(-1, self.rank) for start, stop in edges]


@dataclass(frozen=True)
class LaidOut(LowRank):
    """The same where it is known which vectors hold which matrices."""

    layouts: Layouts = ()

    def known(self, like: Tensor) -> tuple[Matrix, ...]:
        """The matrices in a vector of this length."""
        return dict(self.layouts).get(like.shape[0], ()) if like.dim() == 1 else ()


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns that span the same (Gram-Schmidt); one that depends on others becomes zero."""
    found: list[Tensor] = []
    tiny = 16 * torch.finfo(columns.dtype).eps
    for column in columns.unbind(dim=1):
        rest = column
        for _ in range(2):  # the second time takes off what rounding has left
            for other in found:
                rest = rest - (other @ rest) * other
        norm = torch.linalg.vector_norm(rest)
        none = norm <= tiny * torch.linalg.vector_norm(column)
        found.append((rest / norm.masked_fill(none, 1)).masked_fill(none, 0))
    return torch.stack(found, dim=1)


def layouts_of(task: Any) -> Layouts:
    """The matrices in a task's models and in the named parts of them, by length; none where two differ."""
    places = {
        name: Matrix(place.start, task.shapes[name][0], prod(task.shapes[name][1:]))
        for name, place in task.places.items()
        if len(task.shapes[name]) > 1
    }
    found: dict[int, set[tuple[Matrix, ...]]] = {task.size: {tuple(places.values())}}
    for part in (*task.parts.values(), *exchanged_parts(task)):
        inside, offset = [], 0
        for piece in part.slices:
            within = [each for each in places.values() if piece.start <= each.start < piece.stop]
            inside += [each._replace(start=each.start - piece.start + offset) for each in within]
            offset += piece.stop - piece.start
        found.setdefault(part.size, set()).add(tuple(inside))
    return tuple((size, only) for size, several in found.items() if len(several) == 1 for only in several)


def _joined(factors: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like[:0], *(factor.flatten() for factor in factors)])
