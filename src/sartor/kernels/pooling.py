"""The gradient of max pooling whose windows do not overlap: a number goes to one place, or nowhere.

PyTorch's kernel goes through every window that may hold a place. Where there is but one, :func:`specialise`
hands the gradient to a kernel that looks it up (``pooling_triton.py``), and gives the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_LARGEST = 2**31 - 1
"""The kernel counts in 32 bits."""


def specialise(module: fx.GraphModule) -> None:
    """Let the kernel compute a traced graph's gradients of pooling, where it can."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices_backward.default):
        gradient, image, kernel, stride, padding, dilation, ceiling, indices = node.args
        value = image.meta.get("val") if isinstance(image, fx.Node) else None
        apart = list(stride or kernel) == list(kernel) and not any(padding) and set(dilation) == {1}
        if value is None or ceiling or not apart or value.dim() != 4 or value.numel() > _LARGEST:
            continue
        arguments = (gradient, indices, list(value.shape[2:]), list(kernel))
        with graph.inserting_before(node):
            result = graph.call_function(torch.ops.sartor.pool_gradient.default, arguments)
        result.meta = node.meta
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()


@torch.library.custom_op(
    "sartor::pool_gradient",
    mutates_args=(),
    schema="(Tensor gradient, Tensor indices, int[] image, int[] kernel) -> Tensor",
)
def pool_gradient(gradient: Tensor, indices: Tensor, image: list[int], kernel: list[int]) -> Tensor:
    """What the gradient of the maxima says about images of this size; ``indices`` say where they were."""
    if gradient.is_cuda:
        from sartor.kernels import pooling_triton

        result: Tensor = pooling_triton.spread(gradient, indices, image, kernel)
        return result
    blank = gradient.new_zeros(*gradient.shape[:2], image[0] * image[1])
    return blank.scatter_(2, indices.flatten(2), gradient.flatten(2)).view(*gradient.shape[:2], *image)


@pool_gradient.register_fake
def _(gradient: Tensor, indices: Tensor, image: list[int], kernel: list[int]) -> Tensor:
    return gradient.new_empty(*gradient.shape[:2], *image)
