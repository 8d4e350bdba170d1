"""Steps of few clients, whose gradients of weights are computed beside the way back, give the same numbers.

A CPU has no streams: here is what is begun where, and what waits for what.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from test_engines import ended
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from helpers import RAGGED, classification, federation_of, model_task
from sartor.engines.stacked import trace
from sartor.engines.stacked.graphs import Graphs
from sartor.kernels import beside, convolution, descent, fused, layouts, pooling, products, rectified
from sartor.kernels.gpu import side_by_side
from sartor.kernels.in_place import in_place
from sartor.kernels.views import storage_of
from sartor.model import objectives

BEGUN = (beside.images_beside, beside.gradient_beside, beside.placed_beside)


@pytest.fixture
def as_on_cuda(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on a CPU are made of the operations of a GPU."""
    specialise = products.specialise

    def specialised(graph: fx.GraphModule, most: int) -> None:
        rectified.specialise(graph)
        fused.specialise(graph)
        layouts.gather(graph)
        layouts.settle(graph)
        specialise(graph, most)
        pooling.specialise(graph)
        trace.merge(graph)

    monkeypatch.setattr(objectives, "cross_entropy", objectives.cross_entropies)
    monkeypatch.setattr(trace, "has_tensor_cores", lambda device: True)
    monkeypatch.setattr(trace, "quicken", lambda graph: None)
    monkeypatch.setattr(convolution, "_kernels_serve", lambda x, weight: x.dtype == torch.float32)
    monkeypatch.setattr(products, "specialise", specialised)


def steps_of(monkeypatch: pytest.MonkeyPatch, seen: Callable[..., None]) -> Callable[..., None]:
    """A run of a model whose every step is shown."""
    repeated = trace.Traced.repeated

    def shown(self: trace.Traced, given: Any, carry: Any, turns: Any, over: bool = False) -> Any:
        turns = [*turns]
        expected = repeated(self, given, carry, turns)
        seen(self, partial_over(repeated, self, given, turns), carry, expected, len(given))
        return expected

    def run(model: str = "lenet", **local: Any) -> None:
        data = classification(RAGGED, shape=(3, 16, 16))
        made = federation_of("stacked", model_task(model, data), data, local={"batch": 8, **local})
        ended("fedavg", made, [[0, 2, 4, 5]])

    monkeypatch.setattr(trace.Traced, "repeated", shown)
    return run


def partial_over(repeated: Any, step: trace.Traced, given: Any, turns: Any) -> Callable[[Any], Any]:
    return lambda carry: repeated(step, given, carry, turns, over=True)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("local", [{}, {"lr_decay": 0.9}, {"momentum": 0.5}])
def test_steps_of_few_clients_are_the_same_to_the_bit(
    local: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "MOST_LANES", 2)
    monkeypatch.setattr(beside, "MOST_SAMPLES", 16)
    lanes: set[tuple[int, bool]] = set()
    begun: list[Any] = []
    own = beside._beside
    monkeypatch.setattr(beside, "_beside", lambda *given: (begun.append(given), own(*given))[1])

    def compare(step: trace.Traced, over: Any, carry: Any, expected: Any, first: int) -> None:
        begun.clear()
        found = over(tree_map(torch.clone, carry))
        for one, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
            assert torch.equal(one, other)
        lanes.add((len(tree_leaves(carry)[0]), bool(begun)))

    steps_of(monkeypatch, compare)(**local)
    aside = "momentum" not in local  # which joins the gradient before it steps
    assert lanes == {(1, aside), (3, False)}


def graph_of(monkeypatch: pytest.MonkeyPatch, model: str = "lenet") -> tuple[fx.GraphModule, int]:
    """The graph of a step that writes over its model, and where that is among its inputs."""
    found: list[tuple[fx.GraphModule, int]] = []

    def kept(step: trace.Traced, over: Any, carry: Any, expected: Any, first: int) -> None:
        found.append((in_place(step.graph, first, 1), first))

    steps_of(monkeypatch, kept)(model)
    return found[0]


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("model", ["lenet", "cnn"])
def test_nothing_reads_what_goes_on_beside_before_it_is_waited_for(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, first = graph_of(monkeypatch, model)
    beside.specialise(module)
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    w = module.graph.find_nodes(op="placeholder")[first]
    aside = [node for node in order if node.target in BEGUN]
    assert {node.target for node in aside} == set(BEGUN)
    (last,) = module.graph.find_nodes(op="call_function", target=beside.finished_after)
    for node in order:
        for given in node.all_input_nodes:
            if storage_of(given) in aside and storage_of(node) is node:
                assert node is last or node in aside, node
    # A product is written over weights that nobody reads any more.
    split = next(node for node in w.users if node.target is torch.ops.aten.split_with_sizes.default)
    sizes = split.args[1]
    for node in aside:
        if node.target is beside.placed_beside:
            place = [sum(sizes[:number]) for number in range(len(sizes))].index(node.args[5])
            assert all(order[reader] < order[node] for reader in readers(w, place))
    # The way back goes on while they do, and ends with a gradient of its own.
    gradients = module.graph.find_nodes(
        op="call_function", target=torch.ops.sartor.first_weight_gradient.default
    )
    back = module.graph.find_nodes(op="call_function", target=torch.ops.sartor.laid_input_gradient.default)
    assert len(gradients) == 1
    assert all(any(order[node] < order[later] for later in (*back, *gradients)) for node in aside)


def readers(w: fx.Node, place: int) -> list[fx.Node]:
    """What reads a layer."""
    found = []
    for node in w.graph.nodes:
        for given in node.all_input_nodes:
            source = given
            while storage_of(source) is w and source.target is not torch.ops.aten.split_with_sizes.default:
                before = source.args[0] if source.op == "call_function" else None
                if not isinstance(before, fx.Node):
                    break
                if before.target is torch.ops.aten.split_with_sizes.default and source.args[1] == place:
                    found.append(node)
                source = before
    return [node for node in found if storage_of(node) is node]


class Stream:
    """In place of one of CUDA's: what is begun on it, and what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.log.append(f"on {self.name}")

    def __exit__(self, *error: object) -> None:
        self.log.append("on main")


def test_the_second_stream_waits_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads and gives is kept until then: what is free for one stream may be in use on the other."""
    log: list[str] = []
    main, side = Stream("main", log), Stream("side", log)

    class There(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    w = torch.zeros(2, 6).as_subclass(There)  # type: ignore[arg-type]
    monkeypatch.setattr(beside, "_SIDE", beside._Side())
    beside._SIDE.streams[w.device] = side
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(descent, "placed", lambda *given: log.append("placed"))
    monkeypatch.setattr(descent, "finished", lambda *given: log.append("finished") or given[0])
    operand = torch.ones(2, 3)
    beside.placed_beside(w, operand)
    assert any(operand is kept for some in beside._SIDE.used if some for kept in some)
    beside.finished_after(w)
    assert not beside._SIDE.used
    expected = ["side waits for main", "on side", "placed", "on main", "main waits for side", "finished"]
    assert log == expected


class Captured:
    """In place of a CUDA graph: one with a stream that nobody waited for cannot be ended."""

    def capture_begin(self, **how: object) -> None: ...

    def capture_end(self) -> None:
        raise RuntimeError("capturing stream has unjoined work")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Graphs, list[str]]:
    """Graphs whose stream is not the main one, and what is noted of both."""
    log: list[str] = []
    main, side = Stream("main", log), Stream("side", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(Graphs, "_make_room", lambda self: None)
    monkeypatch.setattr(beside, "_SIDE", beside._Side())
    graphs = Graphs(torch.device("cpu"), wanted=False)
    graphs._side = side
    return graphs, log


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("no memory for that")


def test_the_main_stream_waits_also_for_what_failed_beside_it(streams: tuple[Graphs, list[str]]) -> None:
    """What was given there is free then, and may be written over while it is still read."""
    graphs, log = streams
    with pytest.raises(torch.OutOfMemoryError):
        graphs.aside(out_of_memory)
    assert log == ["side waits for main", "on side", "on main", "main waits for side"]


def test_memory_that_runs_out_in_a_capture_is_told_as_that(streams: tuple[Graphs, list[str]]) -> None:
    """Fewer clients at once are tried then; and the stream of gradients is waited for."""
    graphs, log = streams
    beside._SIDE.streams[torch.device("cpu")] = Stream("gradients", log)
    beside._SIDE.used.append(())
    with pytest.raises(torch.OutOfMemoryError, match="no memory for that"):
        graphs.capture(out_of_memory)
    assert "main waits for gradients" in log
    assert not beside._SIDE.used


def test_clients_apart_are_waited_for_also_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main", log))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)

    def fail() -> None:
        with closing(side_by_side(3, torch.device("cuda"))) as contexts, next(contexts):
            out_of_memory()

    with pytest.raises(torch.OutOfMemoryError):
        fail()
    assert log[-3:] == ["main waits for side"] * 3


def test_a_model_that_is_read_otherwise_is_left_alone() -> None:
    """As one of a single layer, or whose norm is wanted."""
    graph = fx.Graph()
    w, layer = graph.placeholder("w"), graph.placeholder("layer")
    graph.call_function(torch.ops.aten.norm.Scalar, (w,))
    step = graph.call_function(descent.computed, (w, [layer], [], [], [], [], 0.5, None, w))
    graph.output([step])
    module = fx.GraphModule(torch.nn.Module(), graph)
    beside.specialise(module)
    assert step.target is descent.computed


@pytest.mark.usefixtures("as_on_cuda")
def test_small_products_alone_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = graph_of(monkeypatch, "mlp")
    for large, begun in ((2**18, 0), (16, 2)):
        monkeypatch.setattr(beside, "LARGE", large)
        other = fx.GraphModule(module, fx.Graph())
        other.graph.output(other.graph.graph_copy(module.graph, {}))
        beside.specialise(other)
        found = other.graph.find_nodes(op="call_function", target=beside.placed_beside)
        assert len(found) == begun
