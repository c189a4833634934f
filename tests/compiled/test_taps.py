"""Taps inside compiled code: what the graph holds, and who is notified when it runs."""

from __future__ import annotations

import functools
import gc
import sys
from collections import ChainMap
from collections.abc import Sequence
from itertools import pairwise
from shutil import which
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from retrograd.compiled import handles, inductor, operations, taps
from retrograd.compiled.handles import NOBODY, Listeners, Numbered, make_handle, make_run_id
from retrograd.compiled.taps import see, see_first, see_gradient
from retrograd.core.hooks.module import unwatch_forward, watch_forward
from tests.compiled.lacking import Lacking

NEEDS_COMPILER = pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Switch:
    awake = True


class Watcher:
    """Copies what it is shown, and the gradients that come for it."""

    def __init__(self) -> None:
        self.switch = Switch()
        self.values: list[dict[tuple[str, ...], Tensor]] = []
        self.gradients: list[Tensor] = []

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        raise AssertionError("all of it is compiled")

    def see_in_compiled_code(self, tensors: Sequence[tuple[tuple[str, ...], Tensor]], trains: bool) -> list[Any]:
        self.values.append({keys: tensor.clone() for keys, tensor in tensors})
        return [lambda gradient: self.gradients.append(gradient.clone())] * len(tensors)


class Node:
    """What inductor puts in order: a loop, or what ends a function of loops; made of ``reads``."""

    def __init__(self, name: str, node: object = None, *reads: str) -> None:
        self.name, self.node = name, node
        self.unmet_dependencies = [SimpleNamespace(name=read) for read in reads]

    def get_buffer_names(self) -> set[str]:
        return {self.name}

    def is_extern(self) -> bool:
        return self.node is not None

    def is_template(self) -> bool:
        return False


class Call:
    """Stands for one of ours."""


def test_calls_wait_for_what_ends_a_kernel_and_for_those_who_need_them() -> None:
    lowering: Any = pytest.importorskip("torch._inductor.ir")
    call, result = Call(), object.__new__(lowering.MultiOutput)
    nodes = [
        Node("a"),
        Node("see a", call, "a"),
        Node("run_id", result, "see a"),
        Node("b", None, "a"),
        Node("see b", call, "b", "see a"),
        Node("c"),
        Node("mm", object(), "c"),
        Node("see mm", call, "mm"),
        Node("other"),
        Node("writes mm", None, "see mm"),
        Node("see other", call, "other"),
    ]
    found = [node.name for node in inductor._put_late(nodes, Call, lowering.MultiOutput)]
    assert found == [
        "a", "b", "c", "see a", "run_id", "see b", "mm", "see mm", "other", "writes mm", "see other",
    ]  # fmt: skip


def test_what_a_tensor_stands_for_is_found_by_a_copy_of_it_too() -> None:
    numbered = Numbered[str](torch.uint32)
    tensors = [numbered.add(name) for name in "abc"]
    assert [numbered.find(tensor) for tensor in tensors] == ["a", "b", "c"]
    assert [numbered.find(tensor.clone()) for tensor in tensors] == ["a", "b", "c"]
    copy = tensors.pop(1).clone()
    gc.collect()
    assert numbered.find(copy) is None
    assert numbered.find(tensors[1]) == "c"


def test_a_tap_that_is_gone_is_told_nothing() -> None:
    class Tap:
        is_compiled = False

        @property
        def watchers(self) -> Any:
            raise AssertionError("it is gone")

    tap = Tap()
    handle = make_handle(tap)
    del tap
    assert see_first([torch.ones(2)], [handle], [""], True, [handle]) is NOBODY
    for run_id in (NOBODY, make_run_id({})):
        see([torch.ones(2)], [handle], [""], True, run_id, 1)
        see_gradient(torch.ones(2), run_id, [0])


def test_all_who_are_told_of_a_gradient_are() -> None:
    seen: list[tuple[str, Tensor]] = []
    listeners: Listeners = {
        3: (lambda gradient: seen.append(("a", gradient)),),
        5: (lambda gradient: seen.append(("b", gradient)), lambda gradient: seen.append(("c", gradient))),
    }
    run_id = make_run_id(listeners)
    see_gradient(torch.ones(2), run_id, [5, 4])
    see_gradient(torch.ones(2), run_id.clone(), [3])
    assert [name for name, _ in seen] == ["b", "c", "a"]


class Net(nn.Module):
    def __init__(self, *, saved: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.saved = saved

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False) if self.saved else self.first(x)
        return self.second(x.tanh())


@pytest.mark.parametrize("saved", [False, True])
def test_the_graph_has_one_call_for_each_value_and_gradient(saved: bool) -> None:
    graphs: list[list[str]] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if "retrograd" in str(node.target)])
        return make_boxed_func(graph.forward)

    model, watcher = Net(saved=saved), Watcher()
    modules = [model.first, model.second]
    for module in modules:
        watch_forward(module, watcher)
    x = torch.randn(2, 3)
    torch.compile(model, backend=aot_autograd(fw_compiler=note), fullgraph=True)(x).sum().backward()
    kinds = [[name.removeprefix("retrograd.").rpartition("_")[0] for name in graph] for graph in graphs]
    assert kinds == [["see_first", "see"], ["see_gradient"] * 2]
    hidden = nn.functional.linear(x, model.first.weight, model.first.bias).detach().requires_grad_()
    out = nn.functional.linear(hidden.tanh(), model.second.weight, model.second.bias)
    out.sum().backward()
    assert [list(value) for value in watcher.values] == [[()], [()]]
    torch.testing.assert_close(watcher.values[0][()], hidden.detach(), rtol=0, atol=0)
    torch.testing.assert_close(watcher.values[1][()], out.detach(), rtol=0, atol=0)
    torch.testing.assert_close(watcher.gradients, [torch.ones(2, 3), hidden.grad], rtol=0, atol=0)
    for module in modules:
        unwatch_forward(module, watcher)
    assert len(model.first._forward_hooks) == 1, "without it the graph would be compiled anew"


def test_what_a_part_hands_on_is_read_in_one_call() -> None:
    graphs: list[list[str]] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if "retrograd" in str(node.target)])
        return make_boxed_func(graph.forward)

    net = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Tanh(), nn.Sequential(nn.Identity(), nn.Identity()))
    watched = {name: (net.get_submodule(name), Watcher()) for name in ("0", "0.0", "1", "2", "2.0", "2.1")}
    for module, watcher in watched.values():
        watch_forward(module, watcher)
    x = torch.randn(2, 3)
    torch.compile(net, backend=aot_autograd(fw_compiler=note), fullgraph=True)(x).sum().backward()
    for module, watcher in watched.values():
        unwatch_forward(module, watcher)
    kinds = [[name.removeprefix("retrograd.").rpartition("_")[0] for name in graph] for graph in graphs]
    assert kinds == [["see_first", "see"], ["see_gradient"] * 2]
    hidden = net[0](x).detach().requires_grad_()
    hidden.tanh().sum().backward()
    for name, (_, watcher) in watched.items():
        value, gradient = (hidden, hidden.grad) if name[0] == "0" else (hidden.tanh(), torch.ones(2, 3))
        torch.testing.assert_close([each[()] for each in watcher.values], [value.detach()])
        torch.testing.assert_close(watcher.gradients, [gradient])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, NEEDS_COMPILER])])
def test_whoever_packs_saved_tensors_may_keep_copies_alone(backend: str) -> None:
    model, watcher = Net(), Watcher()
    modules = [model.first, model.second]
    for module in modules:
        watch_forward(module, watcher)
    compiled, inputs = torch.compile(model, backend=backend), [torch.randn(2, 3) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.numpy(force=True).copy(), torch.from_numpy):
        losses = [compiled(x).sum() for x in inputs]
    gc.collect()
    for loss in losses:
        loss.backward()
    for module in modules:
        unwatch_forward(module, watcher)
    expected = [torch.ones(2, 3), torch.ones(2, 3) @ model.second.weight]
    assert len(watcher.gradients) == 6
    for second, first, x in zip(watcher.gradients[::2], watcher.gradients[1::2], inputs, strict=True):
        slope = 1 - model.first(x).tanh() ** 2
        torch.testing.assert_close([second, first], [expected[0], expected[1] * slope])
    assert not handles._packed, "held after the last watcher has gone"


@pytest.mark.slow
@NEEDS_COMPILER
def test_while_nobody_is_awake_only_the_first_tap_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def count(name: str) -> None:
        function = getattr(taps, name)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            called.append(name)
            return function(*args)

        monkeypatch.setattr(taps, name, call)

    for name in ("see_first", "see", "see_gradient"):
        count(name)
    model, watcher = Net(), Watcher()
    modules = [model.first, model.second]
    for module in modules:
        watch_forward(module, watcher)
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(model, fullgraph=True)
        for awake in (False, True, False, True):
            watcher.switch.awake = awake
            called.clear()
            compiled(torch.randn(2, 3)).sum().backward()
            others = ["see", *["see_gradient"] * 2] if awake else []
            assert called == ["see_first", *others]
    assert len(watcher.values) == len(watcher.gradients) == 4
    for module in modules:
        unwatch_forward(module, watcher)
        assert len(module._forward_hooks) == 1, "it is a part of compiled code, though it was asleep at first"


def describe(node: Any) -> tuple[Any, ...]:
    """What a node of a graph is, with the same words for a like one of another graph."""
    value = node.meta.get("val")
    shown = sorted(
        f"{key} {found if key in ('recompute', 'partitioner_tag', 'original_aten') else ''}"
        for key, found in node.meta.items()
    )
    made = (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value
    return node.op, str(node.target), str(node.args), node.name, made, shown, tuple(map(str, node.users))


def trace_graphs() -> list[list[Any]]:
    """The graphs of a forward with two taps and of its backward, as they were traced."""
    graphs: list[list[Any]] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append([describe(node) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    model, watcher = Net(), Watcher()
    modules = [model.first, model.second]
    for module in modules:
        watch_forward(module, watcher)
    torch.compile(model, backend=aot_autograd(fw_compiler=note), fullgraph=True)(torch.randn(2, 3)).sum().backward()
    for module in modules:
        unwatch_forward(module, watcher)
    return graphs


def note_written(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call from now on, whether it was written into the graph."""
    write, found = taps.write_call, list[bool]()

    def note(*args: Any) -> Any:
        made = write(*args)
        found.append(made is not None)
        return made

    monkeypatch.setattr(taps, "write_call", note)
    return found


def test_what_is_written_into_a_graph_is_what_torch_notes_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    are_written = note_written(monkeypatch)
    written = trace_graphs()
    assert are_written == [True] * 4
    assert len(written) == 2
    monkeypatch.setattr(taps, "write_call", lambda *args: None)
    assert written == trace_graphs()


def test_what_traces_is_known_without_torchs_own_question(monkeypatch: pytest.MonkeyPatch) -> None:
    written, room = trace_graphs(), "torch.fx.experimental.proxy_tensor"
    modules = ChainMap({room: Lacking(sys.modules[room], "get_proxy_mode")}, sys.modules)  # type: ignore[dict-item, arg-type]
    monkeypatch.setattr(operations, "sys", SimpleNamespace(**{**vars(sys), "modules": modules}))
    are_written = note_written(monkeypatch)
    assert trace_graphs() == written
    assert are_written == [True] * 4


@pytest.mark.slow
@NEEDS_COMPILER
def test_cuda_graphs_are_cut_at_each_call_and_nowhere_else_and_kernels_at_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own judgement of what inductor has made; on a device a captured call would run only once."""
    found: list[tuple[bool, bool]] = []
    orders: list[list[Any]] = []
    room: Any = pytest.importorskip("torch._inductor.scheduler")
    if not hasattr(room, "is_cudagraph_unsafe_op"):
        pytest.skip("this torch judges elsewhere")
    make = room.Scheduler.__init__

    def note(self: Any, nodes: Any) -> None:
        make(self, nodes)
        orders.append(list(self.nodes))
        for node in nodes:
            if type(node).__name__ != "MultiOutput":  # a result of ours, which is read from its call
                found.append(("Plain" in type(node).__name__, room.is_cudagraph_unsafe_op(node)))

    monkeypatch.setattr(room.Scheduler, "__init__", note)
    model, watcher = Net(), Watcher()
    for module in (model.first, model.second):
        watch_forward(module, watcher)
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(model, fullgraph=True)(torch.randn(2, 3)).sum().backward()
    for module in (model.first, model.second):
        unwatch_forward(module, watcher)
    assert found.count((True, True)) == 4, "two values and two gradients"
    assert {ours == unsafe for ours, unsafe in found} == {True}
    assert (False, False) in found
    for nodes in orders:
        others = [place for place, node in enumerate(nodes) if "Plain" not in type(node.node).__name__]
        for before, after in pairwise(others):
            ends = nodes[before].is_extern() or nodes[after].is_extern()
            assert ends or after == before + 1, "a call ends a kernel that would go on"


def test_a_tap_that_is_made_inside_a_transform_has_a_handle_of_its_own() -> None:
    """What is made there by torch's own functions has no memory to be found by."""
    taps: Numbered[str] = Numbered(torch.int64)
    handles: list[Tensor] = []

    def measure(x: Tensor) -> Tensor:
        handles.append(taps.add("a tap"))
        return x.sin().sum()

    x = torch.ones(3)
    expected = torch.func.vmap(torch.func.grad(lambda x: x.sin().sum()))(x[None])
    assert torch.equal(torch.func.vmap(torch.func.grad(measure))(x[None]), expected)
    assert [taps.find(handle) for handle in handles] == ["a tap"]
