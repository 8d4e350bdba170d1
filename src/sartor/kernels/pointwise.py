"""What a traced step does number by number with whole models, as one operation.

Momentum, weight decay, Adam, a pull towards another model or a control variate: each is a few sums and
products of vectors as long as a model, and each of those reads and writes all of it, which takes a GPU longer
than to compute it. :func:`specialise` has one operation carry out those that follow one another and write
down no more than what is read elsewhere. The kernel is in ``pointwise_triton.py``.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from sartor.kernels.views import reads_late, shape_of, value_of

aten = torch.ops.aten

LEAST = 256
"""Numbers of a row, below which vectors are no models and not worth a kernel of their own."""

NAMES: dict[Any, str] = {
    aten.add.Tensor: "add",
    aten.sub.Tensor: "sub",
    aten.rsub.Scalar: "rsub",
    aten.mul.Tensor: "mul",
    aten.div.Tensor: "div",
    aten.neg.default: "neg",
    aten.sqrt.default: "sqrt",
    aten.abs.default: "abs",
    aten.reciprocal.default: "reciprocal",
    aten.maximum.default: "maximum",
    aten.minimum.default: "minimum",
    aten.where.self: "where",
}
"""Operations that are taken together, as programs call them; a last number is ``alpha``, if there is one."""

_PLAIN: dict[str, Callable[..., Tensor]] = {name: getattr(torch, name) for name in NAMES.values()}

Program = tuple[list[list[Any]], list[int]]
"""Steps, each a name and operands, and which values are results.

An operand is a number, or as a whole number the place of a value: inputs come first, then what steps give.
"""


def specialise(module: fx.GraphModule) -> None:
    """Let a traced graph do in one operation what follows one another number by number."""
    graph = module.graph
    place = {node: number for number, node in enumerate(graph.nodes)}
    group: list[fx.Node] = []
    for node in list(graph.nodes):
        if not _fits(node):
            continue
        alike = not group or shape_of(node) == shape_of(group[0])
        users = {user for member in group for user in member.users} - {*group, node}
        if not alike or any(place[user] < place[node] for user in users):
            _replace(graph, group)
            group = []
        group.append(node)
    _replace(graph, group)
    graph.eliminate_dead_code()
    module.recompile()


def _fits(node: fx.Node) -> bool:
    """Whether a node is such an operation on vectors as long as a model, a row for each lane."""
    value, shape = value_of(node), shape_of(node)
    if node.op != "call_function" or node.target not in NAMES or value is None or shape is None:
        return False
    if len(shape) != 2 or shape[1] < LEAST or value.dtype != torch.float32:
        return False
    condition = node.target is aten.where.self
    return all(
        _operand(part, shape, torch.bool if condition and number == 0 else torch.float32)
        for number, part in enumerate(_parts(node))
    )


def _parts(node: fx.Node) -> list[Any]:
    """What a node is given, a factor of the last operand included."""
    return [*node.args, *node.kwargs.values()]


def _operand(part: Any, shape: tuple[int, ...], kind: torch.dtype) -> bool:
    if isinstance(part, (int, float)) and not isinstance(part, bool):
        return math.isfinite(part) and kind != torch.bool
    value = value_of(part)
    if value is None or value.dtype != kind or value.dim() > 2:
        return False
    sizes = (1, 1, *value.shape)[-2:]
    return all(size in (1, wanted) for size, wanted in zip(sizes, shape, strict=True))


def _replace(graph: fx.Graph, group: Sequence[fx.Node]) -> None:
    """Have one operation give what a group of nodes gives."""
    inputs = list(dict.fromkeys(part for node in group for part in node.all_input_nodes if part not in group))
    given = [node for node in group if any(user not in group for user in node.users)]
    if len(group) < 2 or not given or reads_late(graph, inputs):
        return
    places = {node: number for number, node in enumerate([*inputs, *group])}
    steps = [
        [NAMES[node.target], *(places[part] if isinstance(part, fx.Node) else float(part) for part in parts)]
        for node in group
        for parts in [_parts(node)]
    ]
    program = json.dumps([steps, [places[node] for node in given]])
    with graph.inserting_before(group[-1].next):
        all_given = graph.call_function(torch.ops.sartor.pointwise.default, (inputs, program))
        for number, node in enumerate(given):
            result = graph.call_function(operator.getitem, (all_given, number))
            result.meta = node.meta
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in group)


@torch.library.custom_op("sartor::pointwise", mutates_args=())
def pointwise(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    """What a program makes of inputs that go with one another; see ``Program``, of which this is the JSON."""
    return computed(inputs, program, ())


def computed(inputs: Sequence[Tensor], program: str, into: Sequence[Tensor | None]) -> list[Tensor]:
    """What :func:`pointwise` gives, each written ``into`` a tensor if there is one, which may be an input."""
    if any(value.is_cuda for value in inputs):
        from sartor.kernels import pointwise_triton

        made: list[Tensor] = pointwise_triton.pointwise(inputs, program, into)
        return made
    steps, given = json.loads(program)
    values = list(inputs)
    for name, *parts in steps:
        operands = [values[part] if isinstance(part, int) else part for part in parts]
        alpha = {"alpha": operands.pop()} if name in ("add", "sub") and len(operands) > 2 else {}
        values.append(_PLAIN[name](*operands, **alpha))
    results = [values[number] for number in given]
    return [
        result if place is None else place.copy_(result)
        for result, place in itertools.zip_longest(results, into)
    ]


@pointwise.register_fake
def _(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    shape = torch.broadcast_shapes(*(value.shape for value in inputs))  # type: ignore[no-untyped-call]
    kind = next(value for value in inputs if value.dtype == torch.float32)
    return [kind.new_empty(shape) for _ in json.loads(program)[1]]
