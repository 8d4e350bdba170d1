"""A function's operations on tensors as a graph, noted while it runs.

What PyTorch has for this, ``make_fx``, is made for compilers: it follows sizes that are not known and fills
in for modules, at four times the price. Here all sizes are known, and the operations are those that arrive
below ``torch.vmap`` and ``autograd``, one after the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from sartor.kernels.graph import Graph

aten = torch.ops.aten


def recorded(
    function: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor]
) -> fx.GraphModule:
    """What a function does with such inputs; it is to be compiled before it runs.

    A node has in ``meta["val"]`` what it gives but for the numbers: shape, strides, kind and device.
    """
    recorder = _Recorder()
    given = [value.detach() for value in inputs]  # one tensor may be there twice, and each has its place
    for place, value in enumerate(given):
        recorder.note(recorder.graph.placeholder(f"inputs_{place + 1}"), value)
    with recorder:
        result = function(given)
    recorder.graph.output([recorder.node_of(value) for value in result])
    return recorder.module


def _is_ragged(function: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the size of a result follows from numbers: of what is picked, only where a mask says what."""
    if function is aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in function.tags


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module = Graph(torch.nn.Module(), fx.Graph())
        self.graph = self.module.graph
        self.nodes: MutableMapping[Tensor, fx.Node] = WeakTensorKeyDictionary()
        self.known: set[fx.Node] = set()  # whose numbers are the same whenever the graph runs
        self.kinds = FakeTensorMode(allow_fallback_kernels=True)
        self.constants = 0

    def __torch_dispatch__(
        self, function: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not all(kind in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a kind of tensor that says itself what is done with it
        if function is aten.lift_fresh.default:  # torch.tensor's numbers may change, and those of a graph not
            function = aten.lift_fresh_copy.default
        given = map_aggregate((args, kwargs or {}), self.node_of)
        result = function(*args, **(kwargs or {}))
        fixed = self.known.issuperset(value for value in tree_leaves(given[0]) if isinstance(value, fx.Node))
        if torch.Tag.data_dependent_output in function.tags:
            if fixed:
                return result
            raise RuntimeError(f"{function} takes a number out of a tensor, and every step has another")
        if _is_ragged(function, args) and not fixed:
            raise RuntimeError(f"{function} gives as much as a tensor says, and every step has another")
        node = self.graph.call_function(function, *given)
        drawn = torch.Tag.nondeterministic_seeded in function.tags
        if self.known.issuperset(node.all_input_nodes) and not drawn:
            self.known.add(node)
        elif function._schema.is_mutable:  # and what else lies where it writes
            self.known.clear()
        self.note(node, result)
        return result

    def node_of(self, value: Any) -> Any:
        """The node that gave a tensor; one that none did was there before and stays as it is."""
        if not isinstance(value, Tensor):
            return value
        node = self.nodes.get(value)
        if node is None:
            name = f"_tensor_constant{self.constants}"
            self.constants += 1
            self.module.register_buffer(name, value)
            node = self.graph.get_attr(name)
            self.known.add(node)
            self.note(node, value)
        return node

    def note(self, node: fx.Node, value: Any) -> None:
        """That a node gave this: a tensor, or several."""
        if isinstance(value, Tensor):
            self.nodes[value] = node
            if not value.is_sparse:
                node.meta["val"] = self._kind(value)
        elif isinstance(value, (tuple, list)):
            for place, part in enumerate(value):
                self.note(self.graph.call_function(operator.getitem, (node, place)), part)
            node.meta["val"] = type(value)(map(self._kind, value))

    def _kind(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        kind = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(self.kinds, kind, value.device)
