"""A trace sees every node of every pass, changes nothing, and explains a pass that fails."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import CannotBundleError, NoSuchNodeError, RetrogradWarning, StepperError, TraceError
from retrograd.following.bundles.replay import replay
from retrograd.following.graph.node import TensorInfo
from retrograd.following.graph.walker import walk
from retrograd.following.hangs.watch import HangWatch, watch_hangs
from retrograd.following.tracing.trace import NodeEvent, Trace
from retrograd.following.tracing.tracer import trace
from tests.by_hand import make_function
from tests.following.graph.test_walker import engine_order, tangle
from tests.scenarios import ZOO, build, train

MODES: dict[str, dict[str, Any]] = {
    "events alone": {"origins": False},
    "with origins": {},
    "everything": {"norms": True, "memory": True, "resumable": True, "live": lambda event: None},
}

_bare: dict[str, Any] = {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_every_bit_is_the_same(name: str, mode: str) -> None:
    if name == "gpt2":
        pytest.importorskip("transformers")
    if name not in _bare:
        _bare[name] = train(build(name), 2)
    run = build(name)
    with trace(**MODES[mode]) as seen:
        result = train(run, 2)
    assert [key for key, _ in result] == [key for key, _ in _bare[name]]
    assert [key for (key, value), (_, bare) in zip(result, _bare[name], strict=True) if value != bare] == []
    assert seen.events


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 30))
def test_every_node_in_the_engines_order(seed: int, size: int) -> None:
    loss = tangle(seed, size)
    expected = [node.name().split("::")[-1] for node in engine_order(loss)]
    with trace(origins=False) as seen:
        loss.backward()
    assert [event.name for event in seen.events] == expected
    (run,) = seen.passes
    times = [run.begin, *(time for event in seen.events for time in (event.begin, event.end)), run.end]
    assert times == sorted(times)
    for event, following in zip(seen.events, seen.events[1:], strict=False):
        assert event.end == following.begin


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return self.norm(self.fc(x).relu()) + x


def test_where_nodes_come_from() -> None:
    net = Net()
    with trace() as seen:
        net(torch.ones(2, 3)).sum().backward()
    places = [event.place for event in seen.events]
    assert places[:3] == ["SumBackward0", "self:AddBackward0", "norm:NativeLayerNormBackward0"]
    assert {"fc#2:AddmmBackward0", "fc:AddmmBackward0", "fc:weight", "norm:bias"} <= set(places)
    (relu,) = seen.find("*ReluBackward0")
    assert relu.line is not None
    assert Path(relu.line.file).samefile(__file__)
    assert "relu()" in Path(__file__).read_text().splitlines()[relu.line.line - 1]
    assert [span.module for span in seen.forwards] == ["self", "fc", "fc", "norm"]
    assert [str(info) for info in relu.incoming + relu.outgoing] == ["float32[2, 3]"] * 2


def test_a_model_names_places() -> None:
    net = Net()
    with trace({"student": net}) as seen:
        net(torch.ones(2, 3)).sum().backward()
    assert seen.find("student.fc:weight")
    assert seen.find("student.norm:*")


def test_norms() -> None:
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    with trace(norms=True) as seen:
        (x * 2).backward(torch.tensor([3.0, 4.0]))
    (node,) = seen.find("MulBackward0")
    assert node.norms_in == (5.0,)
    assert node.norms_out == (10.0, None)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float16, 6e4),
        (torch.float16, 1e-4),
        (torch.bfloat16, 1e15),
        (torch.float32, 1e15),
        (torch.complex64, 1e15),
    ],
)
def test_norms_that_the_dtype_itself_cannot_hold(dtype: torch.dtype, value: float) -> None:
    x = torch.ones(1000, dtype=dtype, requires_grad=True)
    gradient = torch.full((1000,), value, dtype=dtype)
    with trace(norms=True) as seen:
        x.clone().backward(gradient)
    (node,) = seen.find("CloneBackward0")
    expected = float(np.linalg.norm(gradient.to(torch.complex128).numpy()))
    assert node.norms_in == pytest.approx((expected,), rel=1e-5)
    assert node.norms_out == pytest.approx((expected,), rel=1e-5)


def test_memory() -> None:
    """A gradient that is made is memory gained: with this library of C it is counted to the byte."""
    x = torch.ones(1_000_000, requires_grad=True)
    loss = x.expand(2, -1).sum()
    with trace(memory=True) as seen:
        loss.backward()
    gained = {event.name: event.memory for event in seen.events}
    assert gained["ExpandBackward0"] is not None
    assert 4_000_000 <= gained["ExpandBackward0"] < 4_200_000


def test_live() -> None:
    live: list[NodeEvent] = []
    with trace(live=live.append) as seen:
        (torch.ones(2, requires_grad=True) * 2).sum().backward()
    assert [event.place for event in live] == [event.place for event in seen.events]
    assert live[0].end >= live[0].begin


def fail_late(ctx: Any, *gradients: Tensor) -> NoReturn:
    """Of the two results of the forward one is used."""
    raise ArithmeticError("as planned")


def test_the_live_line_of_a_node_that_raised_tells_what_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def explain_slowly(*args: Any) -> tuple[None, str]:
        time.sleep(0.2)
        return None, "as planned"

    monkeypatch.setattr("retrograd.following.tracing.traced_pass.bundle_node", explain_slowly)
    live: list[NodeEvent] = []
    a, b = torch.ones(2, 3, requires_grad=True), torch.ones(4, requires_grad=True)
    with pytest.raises(ArithmeticError), trace(live=live.append, folder=tmp_path) as seen:
        (make_function(lambda ctx, a, b: (a.clone(), b.clone()), fail_late).apply(a, b)[0] * 2).sum().backward()
    (told,) = (event for event in live if event.raised)
    assert told.incoming == (TensorInfo((2, 3), "float32"), None)
    assert told.outgoing == (None, None)
    assert told.end == seen.passes[0].end  # and not when it had been explained
    assert [(event.incoming, event.outgoing) for event in seen.events if event.raised] == [
        (told.incoming, told.outgoing)
    ]


@pytest.mark.parametrize("options", [{}, {"live": lambda event: None}])
def test_a_gradient_that_does_not_come_has_no_shape(options: dict[str, Any]) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with trace(**options) as seen:
        x.unbind()[1].sum().backward()
    (node,) = seen.find("UnbindBackward0")
    assert node.incoming == (None, TensorInfo((3,), "float32"))


def test_a_pass_that_outlives_the_block_is_whole() -> None:
    inside, left = threading.Event(), threading.Event()

    def hold(gradient: Tensor) -> None:
        inside.set()
        assert left.wait(30)

    def work() -> None:
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(hold)
        y.sum().backward()

    with trace() as seen:
        thread = threading.Thread(target=work)
        thread.start()
        assert inside.wait(30)
    left.set()
    thread.join()
    assert [event.name for event in seen.events] == ["SumBackward0", "MulBackward0", "AccumulateGrad"]
    assert seen.passes[0].end >= seen.events[-1].end > 0


def test_as_many_passes_of_threads_as_were_asked_for() -> None:
    barrier = threading.Barrier(10)

    def wait(gradient: Tensor) -> None:
        barrier.wait(30)  # all ten are in their passes at once

    def work() -> None:
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(wait)
        y.sum().backward()

    tracing = trace(passes=3)
    with tracing as seen:
        threads = [threading.Thread(target=work) for _ in range(10)]
        assert not tracing.is_over
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tracing.is_over
    assert len(seen.passes) == 3
    assert [sum(event.run == number for event in seen.events) for number in range(3)] == [3, 3, 3]


def test_some_passes_only() -> None:
    x = torch.ones(2, requires_grad=True)
    for passes, expected in ((2, 2), ([0, 3], 2), (None, 5)):
        with trace(passes=passes) as seen:
            for _ in range(5):
                x.exp().sum().backward()
        assert len(seen.passes) == expected
        assert len(seen.events) == 3 * expected


def test_a_full_trace_counts_on() -> None:
    with trace(limit=4) as seen:
        for _ in range(5):
            torch.ones(2, requires_grad=True).exp().sum().backward()
    assert len(seen.events) == 6
    assert seen.dropped == 9


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"passes": 0}])
def test_a_trace_of_nothing(wrong: dict[str, int]) -> None:
    with pytest.raises(TraceError):
        trace(**wrong)  # type: ignore[arg-type]


def test_a_pass_inside_a_pass() -> None:
    net = Net()
    with trace() as seen:
        checkpoint(net, torch.ones(2, 3, requires_grad=True), use_reentrant=True).sum().backward()
    assert [run.depth for run in seen.passes] == [0, 1]
    inner = [event for event in seen.events if event.run == 1]
    assert "fc:AddmmBackward0" in {event.place for event in inner}
    assert any(span.recompute for span in seen.forwards)


def test_double_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    with trace() as seen:
        (gradient,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        gradient.sum().backward()
    assert len(seen.passes) == 2
    assert [event.name for event in seen.events if event.run == 1].count("ExpBackward0") == 1


def test_threads_trace_apart() -> None:
    barrier = threading.Barrier(3)

    def work() -> None:
        x = torch.ones(2, requires_grad=True)
        for _ in range(20):
            barrier.wait()
            (x * 2).exp().sum().backward()

    with trace() as seen:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen.passes) == 60
    assert len(seen.events) == 60 * 4
    for event in seen.events:
        assert event.thread == seen.passes[event.run].thread
    assert {run.depth for run in seen.passes} == {0}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_region_is_a_node(backend: str) -> None:
    torch._dynamo.reset()
    net = Net()
    compiled = torch.compile(net, backend=backend)
    x = torch.ones(2, 3)
    compiled(x).sum().backward()
    bare = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    with trace() as seen:
        compiled(x).sum().backward()
    assert all(torch.equal(a.grad, b) for a, b in zip(net.parameters(), bare, strict=True) if a.grad is not None)
    names = {event.name for event in seen.events}
    assert "CompiledFunctionBackward" in names if backend == "aot_eager" else "AddmmBackward0" in names


def test_it_saves_and_loads(tmp_path: Path) -> None:
    net = Net()
    with trace(norms=True, memory=True) as seen:
        net(torch.ones(2, 3)).sum().backward()
    loaded = Trace.load(seen.save(tmp_path / "trace.json.gz"))
    for name in ("events", "forwards", "passes", "failure", "rank", "epoch", "dropped"):
        assert getattr(loaded, name) == getattr(seen, name), name
    assert repr(loaded) == f"<Trace of {len(seen.events)} nodes in 1 backward pass>"


@pytest.mark.parametrize("content", [b"", b"no trace", b"\x1f\x8b\x08\x00\x00\x00"])
def test_a_file_that_is_no_trace(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="no trace that can be read"):
        Trace.load(path)


# ---- failures ------------------------------------------------------------------------------------------------


class Fuse(torch.autograd.Function):
    """Its backward raises while ``blown`` is set."""

    blown = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if Fuse.blown:
            raise ValueError("the fuse has blown")
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3)
        self.after = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        return self.after(Fuse.apply(h) + h) * h


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fuse, "blown", True)


def run_fused(net: nn.Module) -> Tensor:
    return net(torch.linspace(-1, 1, 6).reshape(2, 3)).sum()


@pytest.mark.usefixtures("fuse")
def test_the_exception_goes_on_with_a_note(tmp_path: Path) -> None:
    net = Fused()
    with trace(folder=tmp_path) as seen, pytest.raises(ValueError, match="blown") as caught:
        run_fused(net).backward()
    assert type(caught.value) is ValueError
    (note,) = caught.value.__notes__
    failure = seen.failure
    assert failure is not None
    assert failure.note() == note
    assert failure.event.place == "self:FuseBackward"
    assert failure.event.raised
    assert failure.place == (len(seen.events), len(walk(run_fused(net))))
    assert f"{Path(__file__).name}:" in failure.source
    assert [str(info) + str(bad) for info, bad in filter(None, failure.incoming)] == ["float32[2, 3]0"]
    assert failure.before[0].name == seen.events[-2].name
    assert "Fuse.apply(h)" in note
    assert f"retrograd replay {failure.bundle}" in note
    assert "the fuse has blown" in str(replay(str(failure.bundle)))
    assert Trace.load(seen.save(tmp_path / "trace.json.gz")).failure == failure
    assert seen.bundle("self:FuseBackward") == failure.bundle


@pytest.mark.usefixtures("fuse")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_failure_inside_a_checkpoint(use_reentrant: bool, tmp_path: Path) -> None:
    net = Fused()
    x = torch.ones(2, 3, requires_grad=True)
    with trace(folder=tmp_path) as seen, pytest.raises(ValueError, match="blown") as caught:
        checkpoint(net, x, use_reentrant=use_reentrant).sum().backward()
    assert "FuseBackward" in caught.value.__notes__[0]
    assert seen.failure is not None


def test_non_finite_elements_are_counted(tmp_path: Path) -> None:
    x = torch.ones(3, requires_grad=True)

    def fail(gradient: Any) -> None:
        raise RuntimeError("planned")

    y = x * 2
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(fail)
    with trace(folder=tmp_path) as seen, pytest.raises(RuntimeError, match="planned"):
        y.backward(torch.tensor([1.0, float("nan"), float("inf")]))
    assert seen.failure is not None
    assert [bad for _, bad in filter(None, seen.failure.incoming)] == [2]
    assert "fail" in seen.failure.source


def test_what_torch_refuses_is_not_ours_to_explain() -> None:
    with trace() as seen, pytest.raises(RuntimeError, match="does not require grad") as caught:
        torch.ones(1).backward()
    assert not hasattr(caught.value, "__notes__")
    assert seen.failure is None


@pytest.mark.usefixtures("fuse")
def test_a_failed_pass_is_finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    net = Fused()
    monkeypatch.setattr(Fuse, "blown", False)
    run_fused(net).backward()
    expected = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    monkeypatch.setattr(Fuse, "blown", True)
    with trace(resumable=True, folder=tmp_path) as seen, pytest.raises(ValueError, match="blown"):
        run_fused(net).backward()
    monkeypatch.setattr(Fuse, "blown", False)
    seen.pending.resume()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.usefixtures("fuse")
def test_it_is_finished_with_a_mended_gradient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    net = Fused()
    with trace(resumable=True, folder=tmp_path) as seen, pytest.raises(ValueError, match="blown"):
        run_fused(net).backward()
    monkeypatch.setattr(Fuse, "blown", False)
    zero = torch.zeros_like(seen.pending.incoming[0])
    seen.pending.resume(zero)
    net.before.zero_grad()
    h = net.before(torch.linspace(-1, 1, 6).reshape(2, 3))
    got = [parameter.grad for parameter in net.after.parameters()]
    net.zero_grad()
    (net.after(h.sin().detach() + h) * h).sum().backward()
    expected = [parameter.grad for parameter in net.after.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True) if a is not None and b is not None)


@pytest.mark.usefixtures("fuse")
def test_what_did_not_fail_in_a_node_cannot_go_on() -> None:
    with trace(resumable=True) as seen:
        torch.ones(2, requires_grad=True).exp().sum().backward()
    assert seen.pending is None
    from retrograd.following.tracing.traced_pass import Pending

    x = torch.ones(1, requires_grad=True).exp()
    with pytest.raises(StepperError):
        Pending([x], [torch.ones(1)]).resume()


# ---- nothing is left behind ------------------------------------------------------------------------------------


def test_a_retained_graph_has_no_hooks_of_ours() -> None:
    x = torch.ones(2, requires_grad=True)
    loss = x.exp().sum()
    with trace(norms=True) as seen:
        loss.backward(retain_graph=True)
    count = len(seen.events)
    loss.backward(retain_graph=True)
    assert len(seen.events) == count
    assert "retrograd" not in repr(loss.grad_fn.metadata)  # type: ignore[union-attr]


def test_a_fault_of_ours_is_a_warning() -> None:
    def fail(event: NodeEvent) -> None:
        raise KeyError("a fault")

    x = torch.ones(2, requires_grad=True)
    with trace(live=fail), pytest.warns(RetrogradWarning, match="could not trace a backward pass as asked"):
        x.exp().sum().backward()
    assert x.grad is not None


def test_a_pattern_that_matches_nothing() -> None:
    with trace() as seen:
        torch.ones(2, requires_grad=True).exp().sum().backward()
    with pytest.raises(NoSuchNodeError, match="ExpBackward0"):
        seen.find("Tanh*")


def test_bundles_are_written_on_the_way(tmp_path: Path) -> None:
    net = Net()
    with trace(bundle="fc*:AddmmBackward0", folder=tmp_path) as seen:
        net(torch.ones(2, 3)).sum().backward()
    found = [event for event in seen.events if event.bundle is not None]
    assert [event.place for event in found] == ["fc#2:AddmmBackward0", "fc:AddmmBackward0"]
    for event in found:
        assert replay(seen.bundle(event))
    assert seen.bundle("fc#2:AddmmBackward0") == Path(str(found[0].bundle))
    with pytest.raises(CannotBundleError, match=r"rg\.trace\(bundle="):
        seen.bundle("SumBackward0")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it makes fake tensors
@pytest.mark.parametrize("mode", [*MODES, "ring"])
def test_a_pass_that_is_compiled_as_one_graph_is_left_alone(mode: str) -> None:
    """A hook on a node would be compiled with it, and ``fullgraph`` would refuse it."""
    torch._dynamo.reset()
    net = Net()

    def gradients() -> list[Tensor | None]:
        net.zero_grad()
        loss = net(torch.ones(2, 3)).sum()
        with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
            loss.backward()
        return [parameter.grad for parameter in net.parameters()]

    bare = gradients()
    with watch_hangs() if mode == "ring" else trace(**MODES[mode]) as seen:
        traced = gradients()
    assert all(torch.equal(a, b) for a, b in zip(traced, bare, strict=True) if a is not None and b is not None)
    assert isinstance(seen, HangWatch) or not seen.events


# ---- passes that a checkpoint leaves --------------------------------------------------------------------------


def derivative(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def derived(x: Tensor) -> Tensor:
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
        return gradient

    return derived


def checkpointed(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(function, x, use_reentrant=False)


def find_nodes_in(root: Tensor) -> list[Any]:
    found: list[Any] = []
    waiting: list[Any] = [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [following for following, _ in node.next_functions]
    return found


class Life:
    """Lies in what a node knows of itself, and dies with it."""


@pytest.mark.parametrize("origins", [True, False])
def test_a_pass_that_a_checkpoint_leaves_has_not_failed_and_is_freed(origins: bool) -> None:
    """Computed again, the innermost part has enough in the middle of a pass within it, and torch leaves that pass."""
    function = derivative(lambda x: x.sin().exp().sin())
    for _ in range(3):
        function = checkpointed(function)
        function = derivative(function)
    lives = []
    gc.collect()
    gc.disable()
    try:
        with trace(origins=origins) as traced:
            x = torch.tensor(1.0, requires_grad=True)
            nodes = find_nodes_in(function(x))
            for node in nodes:
                node.metadata["life"] = life = Life()
                lives.append(weakref.ref(life))
                del life
            del nodes, node
            assert [each() for each in lives if each() is not None] == []
    finally:
        gc.enable()
    assert len(lives) > 60
    assert traced.failure is None
    assert not any(each.failed for each in traced.passes)
