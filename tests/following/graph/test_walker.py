"""A walk finds every node once, and says of each what torch knows."""

from __future__ import annotations

import gc
import random
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import DetachedGraphError, GraphError, NoGraphError, NoSuchNodeError
from retrograd.core.hooks.nodes import is_freed, name_of
from retrograd.following.graph.graph import Graph
from retrograd.following.graph.node import Edge, TensorInfo
from retrograd.following.graph.origins import record_origins
from retrograd.following.graph.walker import walk
from tests.following.graph.by_hand import make_graph


def tangle(seed: int, size: int) -> Tensor:
    """A random graph: operations with one, two or three results, leaves used several times, dead ends."""
    choose = random.Random(seed)
    tensors = [torch.rand(3, requires_grad=True) for _ in range(3)]
    for _ in range(size):
        a, b = choose.choice(tensors), choose.choice(tensors)
        match choose.randrange(5):
            case 0:
                tensors.append(a * b)
            case 1:
                tensors.append((a + b).exp())
            case 2:
                tensors.extend(torch.stack([a, b, a]).unbind())
            case 3:
                tensors.append(a.sin())
            case 4:
                tensors.append(torch.cat([a, b]).reshape(2, 3).sum(0))
    return sum(tensors[-4:], torch.zeros(3)).sum()


def nodes_by_recursion(node: Any, seen: dict[Any, None]) -> dict[Any, None]:
    if node is not None and node not in seen:
        seen[node] = None
        for following, _ in node.next_functions:
            nodes_by_recursion(following, seen)
    return seen


def engine_order(loss: Tensor) -> list[Any]:
    """In which the engine says that it will run the nodes."""
    found: list[Any] = []

    def look(gradient: Tensor) -> None:
        found.extend(torch._C._current_graph_task_execution_order())

    handle = loss.register_hook(look)
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward(retain_graph=True)
    handle.remove()
    return found


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 40))
def test_every_node_and_every_edge(seed: int, size: int) -> None:
    loss = tangle(seed, size)
    graph = walk(loss)
    expected = nodes_by_recursion(loss.grad_fn, {})
    found = [graph.live(node) for node in graph]
    assert len(found) == len(expected)
    assert set(found) == set(expected)
    for node, live in zip(graph, found, strict=True):
        assert [edge and (graph.live(edge.node), edge.slot) for edge in node.edges] == [
            None if following is None else (following, slot) for following, slot in live.next_functions
        ]
        assert node.name == live.name().split("::")[-1]
        assert node.is_leaf == (node.name == "AccumulateGrad")
        assert [info and info.shape for info in node.incoming] == [tuple(each.shape) for each in live._input_metadata]
    assert [graph.live(index) for index in graph.order()] == engine_order(loss)


def tangle_of_threads(seed: int, size: int) -> list[Tensor]:
    """A random graph whose operations were called in three threads, each with numbers of its own; two roots."""
    choose = random.Random(seed)
    tensors = [torch.rand(3, requires_grad=True) for _ in range(6)]
    threads = [ThreadPoolExecutor(1) for _ in range(3)]
    for _ in range(size):
        some = choose.sample(tensors, choose.randrange(1, 5))
        tensors.append(choose.choice(threads).submit(lambda some=some: torch.stack(some).sin().sum(0)).result())
    for thread in threads:
        thread.shutdown()
    return [sum(tensors[-4:], torch.zeros(3)).sum(), tensors[choose.randrange(6, len(tensors))].sum()]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 30))
def test_the_order_is_that_of_a_real_pass_also_over_what_threads_have_made(seed: int, size: int) -> None:
    roots = tangle_of_threads(seed, size)
    graph = walk(roots)
    ran: list[int] = []
    handles = [graph.live(index).register_prehook(lambda _, i=index: ran.append(i)) for index in range(len(graph))]
    torch.autograd.backward(roots, retain_graph=True)
    for handle in handles:
        handle.remove()
    assert graph.order() == ran
    assert make_graph(list(graph), graph.roots).order() == ran


def test_leaves_that_become_ready_together_run_in_the_order_of_the_engine() -> None:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(9)]
    ran: list[int] = []
    for number, leaf in enumerate(leaves):
        leaf.register_post_accumulate_grad_hook(lambda _, number=number: ran.append(number))
    loss = torch.stack(leaves).sum()
    graph = walk(loss)
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    expected = [numbers[id(graph.live(index).variable)] for index in graph.order() if graph[index].is_leaf]
    loss.backward()
    assert ran == expected


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_what_is_saved_is_loaded_again(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    graph = walk(tangle(seed, 15), origins=None)
    loaded = Graph.load(graph.save(tmp_path_factory.mktemp("graph") / "graph.parquet"))
    assert loaded == graph
    assert list(loaded) == list(graph)
    assert loaded.roots == graph.roots
    assert make_graph(list(graph), graph.roots) == graph


def test_two_forwards_of_one_model_have_equal_graphs() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    first, second = (walk(model(torch.ones(2, 3)).sum(), model=model) for _ in range(2))
    assert first == second
    assert first != walk(model(torch.ones(3, 3)).sum(), model=model)
    assert first != "a graph"


def test_what_a_node_knows() -> None:
    model = nn.Linear(3, 4)
    graph = walk(model(torch.ones(2, 3)), model=model)
    (node,) = graph.find("AddmmBackward0")
    assert node.incoming == (TensorInfo((2, 4), "float32"),)
    assert [info and str(info) for info in node.outgoing] == ["float32[4]", None, "float32[3, 4]"]
    assert [graph[edge.node].parameter for edge in node.edges if edge is not None and graph[edge.node].is_leaf] == [
        "self:bias"
    ]
    assert {each.name: str(each.tensor) for each in node.saved if each.tensor} == {"mat1": "float32[2, 3]"}
    assert {each.name: each.value for each in node.saved}["alpha"] == "1"
    assert graph.find("self:weight")[0].incoming == (TensorInfo((4, 3), "float32"),)


def test_a_saved_tensor_is_told_with_the_version_of_its_memory() -> None:
    x = torch.ones(2, requires_grad=True)
    a = x * 2
    loss = (a * a).sum()
    versions = [walk(loss).find("MulBackward0")[0].saved[0].version]
    a.add_(1)
    versions.append(walk(loss).find("MulBackward0")[0].saved[0].version)
    assert versions == [0, 1]


ROOTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a tuple": lambda a, b: (a, b),
    "a dict": lambda a, b: {"a": a, "b": b},
    "nested": lambda a, b: [a, {"more": (b,)}],
    "gradient edges": lambda a, b: [get_gradient_edge(a), get_gradient_edge(b)],
    "nodes": lambda a, b: (a.grad_fn, b.grad_fn),
}


@pytest.mark.parametrize("make", ROOTS.values(), ids=ROOTS)
def test_many_roots(make: Callable[[Tensor, Tensor], Any]) -> None:
    x = torch.ones(2, requires_grad=True)
    a, b = x.exp(), x.sin()
    graph = walk(make(a, b))
    assert [graph[root.node].name for root in graph.roots] == ["ExpBackward0", "SinBackward0"]
    assert len(graph) == 3


def test_a_root_that_is_the_third_result() -> None:
    third = torch.ones(3, 2, requires_grad=True).unbind()[2]
    assert walk(third).roots == (Edge(0, 2),)


def test_a_leaf_alone() -> None:
    (node,) = walk(torch.ones(2, requires_grad=True))
    assert node.is_leaf


@pytest.mark.parametrize("roots", [torch.ones(2), [], {}, [torch.ones(1)], None, 3])
def test_no_graph(roots: Any) -> None:
    with pytest.raises(NoGraphError, match="Try:"):
        walk(roots)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x + 1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def test_kinds_of_nodes() -> None:
    x = torch.ones(4, requires_grad=True)
    base = x.clone()
    base[:2] *= 3
    reentrant = checkpoint(torch.exp, x, use_reentrant=True)
    plain = checkpoint(torch.exp, x, use_reentrant=False)
    graph = walk([Double.apply(x), base, reentrant, plain])
    names = {node.name for node in graph}
    assert names >= {"DoubleBackward", "CopySlices", "CheckpointFunctionBackward", "ExpBackward0", "AccumulateGrad"}
    assert [str(each.tensor) for each in graph.find("DoubleBackward")[0].saved] == ["float32[4]"] * 2


def test_saved_tensors_are_not_unpacked() -> None:
    unpacked: list[int] = []

    def unpack(packed: int) -> Tensor:
        unpacked.append(packed)
        return torch.ones(2)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: 7, unpack):
        loss = torch.ones(2, requires_grad=True).exp().sum()
    graph = walk(loss)
    assert not unpacked
    assert [(each.name, each.tensor) for each in graph.find("ExpBackward0")[0].saved] == [("result", None)]


def test_a_freed_graph_can_be_walked() -> None:
    loss = (torch.ones(2, requires_grad=True).exp() * 2).sum()
    loss.backward()
    assert [node.name for node in walk(loss)][-1] == "AccumulateGrad"


def test_walking_changes_nothing_and_holds_no_tensor() -> None:
    x = torch.ones(3, requires_grad=True)
    loss = (x.exp() * x).sum()
    (bare,) = torch.autograd.grad(loss, x, retain_graph=True)
    graph = walk(loss)
    assert torch.equal(torch.autograd.grad(loss, x)[0], bare)
    alive = weakref.ref(x)
    graph.detach()
    del x, loss
    assert alive() is None


def test_a_graph_as_data_has_no_live_nodes() -> None:
    graph = walk(torch.ones(2, requires_grad=True).exp()).detach()
    with pytest.raises(DetachedGraphError, match="walk again"):
        graph.live(0)


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    graph = walk(torch.ones(2, requires_grad=True).exp().sum())
    with pytest.raises(NoSuchNodeError, match="ExpBackward0"):
        graph.find("ExpBackward")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no graph at all"])
def test_a_file_that_is_no_graph(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "graph.parquet"
    path.write_bytes(content)
    with pytest.raises(GraphError, match="no graph that can be read"):
        Graph.load(path)
    with pytest.raises(GraphError):
        Graph.load(tmp_path / "nothing.parquet")


def test_who_was_freed() -> None:
    x = torch.ones(2, requires_grad=True)
    loss = Double.apply(x.exp() * 2).sum()
    nodes = [walk(loss).live(node) for node in walk(loss)]
    assert not any(map(is_freed, nodes))
    loss.backward()
    freed = {name_of(node) for node in nodes if is_freed(node)}
    assert {"DoubleBackward", "ExpBackward0"} <= freed
    assert not {"SumBackward0", "AccumulateGrad"} & freed  # they save nothing


def test_origins_that_are_held_are_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with record_origins() as origins:
        loss = model(torch.ones(1, 2)).sum()
        assert walk(loss).find("0:AddmmBackward0")
    assert walk(loss).find("0:weight")
    del origins
    with pytest.raises(NoSuchNodeError):
        walk(loss).find("0:AddmmBackward0")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout, requires_grad=True)
    graph = walk((nested * 2).to_padded_tensor(0.0).sum())
    assert "nested_float32[]" in {str(info) for node in graph for info in node.incoming}


def test_a_deep_graph_of_several_threads_dies() -> None:
    """Numbers of different threads do not compare: a list in the wrong place would hold its own holder."""
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(1, requires_grad=True)
        tables: list[weakref.ref[Any]] = []
        found: list[Tensor] = []

        def grow(tensor: Tensor) -> None:
            for _ in range(1500):
                tensor = tensor * 1.0
                tensor._backward_hooks = table = OrderedDict()
                tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
                tables.append(weakref.ref(table))
            found.append(tensor)

        grow(x)
        thread = threading.Thread(target=grow, args=(found[0],))
        thread.start()
        thread.join()
        walk(found[1])
        assert sum(table() is not None for table in tables) == 3000
        found.clear()
        assert sum(table() is not None for table in tables) == 0
    finally:
        gc.enable()


def double_and_add(x: Tensor) -> Tensor:
    return x * 2 + x


def test_kinds_without_a_type_of_their_own_have_their_own_names() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out
        scripted = torch.jit.script(double_and_add)
        x = torch.ones(3, requires_grad=True)
        for _ in range(4):
            y = scripted(x.exp())
    other = torch._C._functions.DelayedError("no", 1)(y)
    graph = walk(other)
    names = [name_of(graph.live(node)) for node in graph]
    assert [node.name for node in graph] == names
    assert type(y.grad_fn).__name__ == "CppFunction"
