"""Nests: samples and targets of any form, as tensors in tuples and dicts inside each other.

A nest is a tensor, a tuple of nests, or a dict of nests by name. Its leaves are tensors that have the samples
along their first axis. A leaf is named by its path: ``x``, ``x.input_ids``, ``x[1]``.

>>> nest = {"image": torch.zeros(3, 2), "age": torch.arange(3)}
>>> list(paths(nest, "x")), length(nest), rows(nest, slice(0, 2))["age"].tolist()
(['x.image', 'x.age'], 3, [0, 1])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Nest: TypeAlias = Any
"""A tensor, or tuples and dicts of such."""
_STEP = re.compile(r"\.[^\W\d]\w*|\[\d{1,3}\]")


def leaves(nest: Nest) -> list[Tensor]:
    """The tensors of a nest, in its order."""
    return [nest] if isinstance(nest, Tensor) else tree_leaves(nest)


def paths(nest: Nest, name: str) -> dict[str, Tensor]:
    """The leaves by their paths, of a nest of that name."""
    return dict(_paths(nest, name))


def _paths(nest: Nest, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from _paths(value, f"{name}.{key}")
    elif isinstance(nest, tuple):
        for place, value in enumerate(nest):
            yield from _paths(value, f"{name}[{place}]")
    else:
        yield name, nest


def built(leaves: Mapping[str, Any], name: str) -> Nest:
    """The nest of that name whose leaves have these paths; a ValueError where they are those of none.

    >>> built({"x.a": 1, "x.b[0]": 2, "x.b[1]": 3}, "x")
    {'a': 1, 'b': (2, 3)}
    """
    if list(leaves) == [name]:
        return leaves[name]
    inner: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        step = _STEP.match(path, len(name))
        if step is None or not path.startswith(name):
            raise ValueError(f"{path!r} is no leaf of {name}")
        inner.setdefault(step.group(), {})[path] = leaf
    made = {step: built(below, name + step) for step, below in inner.items()}
    if made and all(step.startswith(".") for step in made):
        return {step[1:]: value for step, value in made.items()}
    if not made or list(made) != [f"[{place}]" for place in range(len(made))]:
        raise ValueError(f"{', '.join(leaves)} are not the leaves of one nest")
    return tuple(made.values())


def mapped(function: Callable[..., Any], nest: Nest, *others: Nest) -> Nest:
    """The nest of what a function gives for every leaf, and for those of others of the same form."""
    return function(nest, *others) if isinstance(nest, Tensor) else tree_map(function, nest, *others)


def named(function: Callable[[str, Tensor], Any], nest: Nest, name: str) -> Nest:
    """The nest of what a function gives for every leaf and its path."""
    if isinstance(nest, Mapping):
        return {key: named(function, value, f"{name}.{key}") for key, value in nest.items()}
    if isinstance(nest, tuple):
        return tuple(named(function, value, f"{name}[{place}]") for place, value in enumerate(nest))
    return function(name, nest)


def length(nest: Nest) -> int:
    """How many samples there are."""
    return len(nest) if isinstance(nest, Tensor) else len(tree_leaves(nest)[0])


def rows(nest: Nest, index: Any) -> Nest:
    """Some of the samples: those of an index of the first axis."""
    return nest[index] if isinstance(nest, Tensor) else tree_map(lambda leaf: leaf[index], nest)


def joined(nests: Sequence[Nest]) -> Nest:
    """The samples of several nests of one form, one after the other."""
    return mapped(lambda *parts: torch.cat(parts), nests[0], *nests[1:])


def form(nest: Nest, name: str = "") -> Hashable:
    """What is the same for all samples: the leaves' paths, shapes without the first axis, and types."""
    return tuple((path, tuple(leaf.shape[1:]), leaf.dtype) for path, leaf in _paths(nest, name))


def words(nest: Nest) -> str:
    """The shape of one sample for a message: ``[3, 8, 8]``, or every leaf by its path.

    >>> words(torch.zeros(5, 3)), words({"a": torch.zeros(5, 3), "b": torch.zeros(5).long()})
    ('shape [3]', '{a: [3] float32, b: [] int64}')
    """
    if isinstance(nest, Tensor):
        return f"shape {list(nest.shape[1:])}"
    found = (
        f"{path.lstrip('.')}: {list(leaf.shape[1:])} {str(leaf.dtype).removeprefix('torch.')}"
        for path, leaf in _paths(nest, "")
    )
    return "{" + ", ".join(found) + "}"


def same(one: Nest, other: Nest) -> bool:
    """Whether two nests hold the same."""
    return form(one) == form(other) and all(map(torch.equal, leaves(one), leaves(other)))
