"""Matrix products per client: a traced step computes the same with them, the kernel is the product.

The kernel's own tests run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_convolution import DEVICE, INTERPRETED, cuda, distance, draw, kernels
from test_engines import assert_close, ended
from torch import Tensor, fx
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from helpers import RAGGED, classification, federation_of, model_task
from sartor.engines.stacked import trace
from sartor.kernels import products
from sartor.kernels.device import Computing

aten = torch.ops.aten
PRODUCT = torch.ops.sartor.stacked_product.default

# lanes, rows, columns, terms of each sum, terms per part
SHAPES = {
    "mlp, first": (5, 100, 64, 784, 224),
    "mlp, second": (5, 100, 10, 64, 64),
    "softmax": (6, 10, 10, 576, 160),
    "cnn": (2, 32, 70, 300, 96),
    "odd": (3, 17, 33, 5, 5),
    "one": (1, 1, 1, 1, 1),
    "one column": (2, 5, 1, 40, 32),
}


def matrices(name: str, **kind: Any) -> tuple[Tensor, Tensor]:
    """Operands of a product; the right one is turned round and lies in rows that are not aligned."""
    lanes, rows, columns, depth, _ = SHAPES[name]
    flat = draw(lanes, columns * depth + 7, **kind)
    return draw(lanes, rows, depth, seed=1, **kind), flat[:, 3:-4].unflatten(1, (columns, depth)).mT


def multiplied(left: Tensor, right: Tensor, terms: int, *numbers: Any) -> Tensor:
    from sartor.kernels import products_triton as product_kernels

    return product_kernels.multiply(left, right, *(numbers or (None, False)), terms).sum(0)


# A step -----------------------------------------------------------------------------------------------------


def step(data: Tensor, index: Tensor, hidden: Tensor, output: Tensor) -> tuple[Tensor, ...]:
    """The gradients of two dense layers for samples that are picked from the data."""
    x = data.index_select(0, index.view(-1)).view(*index.shape, *data.shape[1:])

    def loss(hidden: Tensor, output: Tensor, x: Tensor) -> Tensor:
        return F.linear(F.linear(x.flatten(1), hidden).relu(), output).sin().sum()

    return vmap(grad(loss, (0, 1)))(hidden, output, x)


def inputs(features: int = 12, **kind: Any) -> tuple[Tensor, ...]:
    index = (torch.arange(15) * 7 % 20).view(3, 5)
    hidden = draw(3, 8, features, **kind) / features**0.5
    return draw(20, 2, features // 2, **kind), index, hidden, draw(3, 4, 8, **kind)


def targets(graph: fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes]


def test_a_step_is_the_same_to_the_bit_and_copies_no_samples() -> None:
    given = inputs(dtype=torch.float32)
    graph = make_fx(step)(*given)
    expected = graph(*given)
    assert targets(graph).count(aten.bmm.default) == 5
    products.specialise(graph)
    assert targets(graph).count(PRODUCT) == 5
    assert not {aten.bmm.default, aten.index_select.default} & set(targets(graph))
    for ours, theirs in zip(graph(*given), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_long_sums_are_made_of_parts() -> None:
    given = inputs(600, dtype=torch.float32)
    graph = make_fx(step)(*given)
    expected = graph(*given)
    products.specialise(graph)
    (node, *_) = graph.graph.find_nodes(op="call_function", target=PRODUCT)
    assert 600 / 8 <= node.args[-1] < 600
    for ours, theirs in zip(graph(*given), expected, strict=True):
        assert distance(ours, theirs.double()) < 1e-6


def test_double_precision_is_left_alone() -> None:
    graph = make_fx(step)(*inputs(dtype=torch.float64))
    before = targets(graph)
    products.specialise(graph)
    assert targets(graph) == before


@pytest.mark.parametrize(
    "picked",
    [
        lambda data, index: data.index_select(0, index.view(-1)).view(3, 5, 12).mT,
        lambda data, index: data.index_select(0, index.view(-1)).view(3, 12, 5).mT,
        lambda data, index: data.index_select(0, index[:1].view(-1)).view(1, 5, 12).expand(3, 5, 12),
        lambda data, index: data.mT.index_select(1, index.view(-1)).view(3, 5, 12),
        lambda data, index: data.mT.index_select(0, index.view(-1) % 12).view(3, 5, 20),
        lambda data, index: data.index_select(0, index.view(-1)).view(3, 10, 6),
        lambda data, index: (data.index_select(0, index.view(-1)) * 2).view(3, 5, 12),
    ],
)
def test_only_rows_of_the_data_are_read_in_place(picked: Any) -> None:
    """Turned round, shared by lanes, of another axis, cut in two or changed they are not rows any more."""
    data, index = draw(20, 12).float(), inputs()[1]

    def multiply(data: Tensor, index: Tensor, right: Tensor) -> Tensor:
        return torch.bmm(picked(data, index), right)

    right = draw(3, picked(data, index).shape[2], 4).float()
    graph = make_fx(multiply)(data, index, right)
    expected = graph(data, index, right)
    products.specialise(graph)
    (node,) = graph.graph.find_nodes(op="call_function", target=PRODUCT)
    assert node.args[2] is None
    assert torch.equal(graph(data, index, right), expected)


def test_a_product_of_products() -> None:
    left, middle, right = draw(3, 4, 5).float(), draw(3, 5, 6).float(), draw(3, 6, 7).float()
    graph = make_fx(lambda *given: torch.bmm(torch.bmm(*given[:2]), given[2]))(left, middle, right)
    products.specialise(graph)
    assert targets(graph).count(PRODUCT) == 2
    assert torch.equal(graph(left, middle, right), left @ middle @ right)


@pytest.mark.parametrize("depth", [1, 31, 100, 256, 784, 4096])
@pytest.mark.parametrize("lanes", [1, 10, 40, 1000])
def test_shares_are_whole_tiles_or_all(lanes: int, depth: int) -> None:
    terms = products.share(lanes, 100, 64, depth)
    assert terms == depth or (terms % 32 == 0 and 64 <= terms < depth)
    assert -(-depth // terms) <= 8
    if lanes == 1000:
        assert terms == depth


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_the_engine_computes_the_same_with_them(
    traced: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = classification(RAGGED)
    left, found = {}, []

    def counted(graph: fx.GraphModule, most: int) -> None:
        specialise(graph, most)
        found.append(targets(graph).count(PRODUCT))

    specialise = products.specialise
    monkeypatch.setattr(products, "specialise", counted)
    for there in (False, True):
        monkeypatch.setattr(trace, "has_tensor_cores", lambda device, there=there: there)
        federation = federation_of("stacked", model_task("mlp", data), data, local={"batch": 8})
        left[there] = ended(name, federation)
        assert bool(found) == there
    assert max(found) >= 5
    for key, value in left[False].items():
        assert torch.equal(value, left[True][key])


# The kernel -------------------------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("precision", ["full", "tf32"])
def test_the_kernel_is_the_product(name: str, precision: str) -> None:
    left, right = matrices(name, device=DEVICE, dtype=torch.float32)
    expected = left.double().cpu() @ right.double().cpu()
    *_, depth, terms = SHAPES[name]
    close = 2e-3 if precision == "tf32" else 1e-6
    with Computing(precision):
        assert distance(multiplied(left, right, terms), expected) < close
        assert distance(multiplied(left, right.contiguous(), depth), expected) < close
        assert distance(multiplied(right.mT, left.mT, terms), expected.mT) < close


@kernels
def test_the_kernel_reads_numbered_rows() -> None:
    data, index = draw(30, 40, device=DEVICE, dtype=torch.float32), inputs()[1].to(DEVICE)
    weights, gradients = draw(3, 20, 40).to(data), draw(3, 5, 20).to(data)
    x = data[index].double().cpu()
    forward = multiplied(data, weights.mT, 32, index, False)
    assert distance(forward, x @ weights.mT.double().cpu()) < 1e-6
    backward = multiplied(gradients.mT, data, 5, index, True)
    assert distance(backward, gradients.mT.double().cpu() @ x) < 1e-6


@kernels
def test_what_is_not_finite_stays_so() -> None:
    left, right = matrices("odd", device=DEVICE, dtype=torch.float32)
    left[0, 3, 2], right[1, 4, 7], left[2, 1, 1] = float("inf"), float("nan"), 3e38
    ours, theirs = multiplied(left, right, 5).cpu(), (left.cpu() @ right.cpu())
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert not ours[0, 3].isfinite().any()
    assert not ours[1, :, 7].isfinite().any()


@kernels
def test_the_kernel_gives_the_same_every_time_and_in_any_company() -> None:
    left, right = matrices("mlp, first", device=DEVICE, dtype=torch.float32)
    together = multiplied(left, right, 224)
    assert torch.equal(multiplied(left, right, 224), together)
    assert torch.equal(multiplied(left[2:3], right[2:3], 224)[0], together[2])


# On CUDA ----------------------------------------------------------------------------------------------------


@cuda
@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no tensor cores")
def test_it_is_as_exact_as_float32_on_cuda() -> None:
    left, right = matrices("mlp, first", device="cuda", dtype=torch.float32)
    expected = left.double().cpu() @ right.double().cpu()
    assert distance(multiplied(left, right, 224), expected) < 1.5 * distance(left @ right, expected)


@cuda
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "diversifed", "fedrep"])
@pytest.mark.parametrize("sizes", [RAGGED, (32,) * 6])
def test_a_run_equals_the_loop_on_cuda(name: str, sizes: tuple[int, ...]) -> None:
    """In single precision: that is when the products are the kernel's."""
    data = classification(sizes, shape=(1, 20, 20))
    left = {}
    for device, engine in (("cpu", "loop"), ("cuda", "stacked")):
        federation = federation_of(engine, model_task("mlp", data), data, local={"batch": 8}, device=device)
        ended_with = ended(name, federation, [[0, 1, 2, 3, 4, 5]] * 5)
        left[device] = {key: value.cpu() for key, value in ended_with.items()}
    assert_close(left["cpu"], left["cuda"], 1e-3)
