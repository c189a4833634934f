"""In each kind of failure, a trace names what failed, and what has run as torch's own hooks tell it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.following.tracing.trace import Trace
from retrograd.following.views.trace_text import format_trace
from tests.by_hand import make_function


def fail(*_: object) -> Any:
    raise KeyError("planned")


def cut(gradient: Tensor) -> Tensor:
    return gradient[:1]


def give_text(*_: object) -> Any:
    return "text"


def make_odd(result: Callable[[Tensor], Any], *, saves: bool) -> Callable[[Tensor], Tensor]:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if saves:
            ctx.save_for_backward(x)
        return x * 2

    return make_function(forward, lambda ctx, gradient: result(gradient)).apply  # type: ignore[no-any-return]


Make = Callable[[Tensor], Tensor]


def on_tensor(hook: Any) -> Make:
    def make(w: Tensor) -> Tensor:
        y = w * 1
        y.register_hook(hook)
        return y.exp().sum()

    return make


def on_retained(w: Tensor) -> Tensor:
    y = w * 1
    y.retain_grad()
    y.register_hook(fail)
    return y.exp().sum()


def on_leaf(w: Tensor) -> Tensor:
    w.register_hook(fail)
    return (w * 1).exp().sum()


def on_several(mode: Any) -> Make:
    def make(w: Tensor) -> Tensor:
        a, b = w * 1, w.abs()
        torch.autograd.graph.register_multi_grad_hook((a, b), fail, mode=mode)
        return (a.exp() + b.sin()).sum()

    return make


def after_accumulation(w: Tensor) -> Tensor:
    w.register_post_accumulate_grad_hook(fail)
    return (w * 1).exp().sum()


def before_node(w: Tensor) -> Tensor:
    y = w * 1
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(fail)
    return y.exp().sum()


def after_node(hook: Any) -> Make:
    def make(w: Tensor) -> Tensor:
        y = (w * 1).exp()
        assert y.grad_fn is not None
        y.grad_fn.register_hook(hook)
        return y.sum()

    return make


def in_function(result: Callable[[Tensor], Any], *, saves: bool = True) -> Make:
    return lambda w: make_odd(result, saves=saves)(w * 1).exp().sum()


def unpacking(unpack: Any) -> Make:
    def make(w: Tensor) -> Tensor:
        y = w * 1
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            z = y.exp()
        return z.sum()

    return make


def overwritten(w: Tensor) -> Tensor:
    y = w.exp()
    z = y.sin()
    y.add_(1)
    return z.sum()


def around_module(register: str) -> Make:
    def make(w: Tensor) -> Tensor:
        module = nn.Tanh()
        getattr(module, register)(fail)
        out: Tensor = module(w * 1).exp().sum()
        return out

    return make


HOOK = "in a hook on the gradient that comes to MulBackward0, made at"
KINDS: dict[str, tuple[Make, str]] = {
    "a tensor hook raises": (on_tensor(fail), HOOK),
    "a tensor hook gives another shape": (on_tensor(cut), HOOK),
    "a tensor hook gives text": (on_tensor(give_text), HOOK),
    "a hook of a tensor that retains its gradient": (on_retained, HOOK),
    "a hook of a leaf": (on_leaf, "in a hook on the gradient of w, after MulBackward0"),
    "a hook of several, all": (on_several("all"), "in a hook on the gradient that comes to MulBackward0"),
    "a hook of several, any": (on_several("any"), "in a hook on the gradient that comes to AbsBackward0"),
    "a hook after accumulation": (after_accumulation, "in w, node 4 of 4"),
    "a hook before a node": (before_node, "MulBackward0"),
    "a hook after a node raises": (after_node(fail), "in ExpBackward0"),
    "a hook after a node gives another shape": (after_node(lambda given, came: (given[0][:1],)), "in ExpBackward0"),
    "a backward raises": (in_function(fail), "in OddBackward"),
    "a backward that saves nothing raises": (in_function(fail, saves=False), "in OddBackward"),
    "a backward gives too many": (in_function(lambda gradient: (gradient, gradient)), "in OddBackward"),
    "a backward gives another shape": (in_function(lambda gradient: gradient[:1, :1].expand(3, 3)), "in OddBackward"),
    "a backward gives text": (in_function(give_text), "in OddBackward"),
    "unpacking raises": (unpacking(fail), "in ExpBackward0"),
    "unpacking gives text": (unpacking(give_text), "in ExpBackward0"),
    "a saved tensor was overwritten": (overwritten, "in SinBackward0"),
    "a full backward hook of a module": (around_module("register_full_backward_hook"), "BackwardHookFunctionBackward"),
    "a pre-hook of a module": (around_module("register_full_backward_pre_hook"), "BackwardHookFunctionBackward"),
}


TENSOR_HOOKS = [kind for kind in KINDS if "tensor" in kind or "leaf" in kind or "several" in kind]


def run(make: Make, w: Tensor, *, keeps_graph: bool = False) -> list[str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever torch makes of it
        make(w).backward(retain_graph=keeps_graph)
    return list(getattr(caught.value, "__notes__", ()))


def run_bare(make: Make, w: Tensor, *, keeps_graph: bool) -> list[str]:
    """The nodes that have run to their end, as hooks on them say it."""
    loss = make(w)
    ran: list[str] = []
    waiting, known = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in known:
            known.add(node)
            name = node.name().rpartition("::")[2]
            node.register_hook(lambda given, came, name=name: ran.append(name))
            waiting += [following for following, _ in node.next_functions]
    with pytest.raises(Exception):  # noqa: B017, PT011
        loss.backward(retain_graph=keeps_graph)
    return ran


@pytest.mark.parametrize("options", [{}, {"norms": True}], ids=["noted", "thorough"])
@pytest.mark.parametrize("keeps_graph", [False, True], ids=["freed", "kept"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_failed_and_what_ran(kind: str, keeps_graph: bool, options: Any, tmp_path: Path) -> None:
    make, expected = KINDS[kind]
    ran = run_bare(make, torch.ones(4, 4, requires_grad=True), keeps_graph=keeps_graph)
    w = torch.ones(4, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        with rg.trace(folder=tmp_path, names={"w": w}, **options) as trace:
            (note,) = run(make, w, keeps_graph=keeps_graph)
    head = note.partition("\n")[0]
    failure = trace.failure
    assert failure is not None
    if failure.had_run is None:  # as where the graph is kept: not more is said than can be known
        assert "hook" in kind
        assert keeps_graph or failure.event.name in ("AccumulateGrad", "BackwardHookFunctionBackward") or "node" in kind
        assert not options or kind not in TENSOR_HOOKS
        assert head.endswith("or in a hook that ran before or after it")
        assert failure.bundle is None
        assert not list(tmp_path.iterdir())
    else:
        assert [event.name for event in trace.events if not event.raised] == ran
        assert expected in head
    assert (failure.bundle is not None) == ("hook" not in kind and kind != "a backward gives text")
    assert "an earlier pass" not in note
    summary = format_trace(trace)
    assert head.removeprefix("retrograd: backward ") in " ".join(summary.split())
    assert ("retrograd replay" in summary) == ("retrograd replay" in note) == (failure.bundle is not None)
    read = Trace.load(trace.save(tmp_path / "trace.json.gz")).failure
    assert read is not None
    assert (read.had_run, read.hook_on) == (failure.had_run, failure.hook_on)


def test_a_hook_of_the_loss_fails_before_any_node() -> None:
    loss = torch.ones(3, requires_grad=True).exp().sum()
    loss.register_hook(fail)
    with rg.trace() as trace:
        (note,) = run(lambda w: loss, loss)
    assert note.startswith("retrograd: backward failed in a hook on a tensor that it began with\n  raised by")
    assert trace.events == []


def test_anomaly_mode_names_the_node_that_gave_nan() -> None:
    for options in ({}, {"norms": True}):
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True), rg.trace(**options) as trace:  # type: ignore[arg-type]
            warnings.simplefilter("ignore")
            (note,) = run(lambda w: ((w * 1).sqrt() * 0).sum(), torch.zeros(4, requires_grad=True))
        assert note.startswith("retrograd: backward failed in SqrtBackward0, node 3 of 5\n")
        assert [event.name for event in trace.events if event.raised] == ["SqrtBackward0"]


def test_a_second_pass_through_one_graph_notes_each_node_once() -> None:
    loss = (torch.ones(4, requires_grad=True) * 1).exp().sum()
    with rg.trace(memory=True) as trace:
        loss.backward()
        (note,) = run(lambda w: loss, loss)
    assert note.startswith("retrograd: backward failed in ExpBackward0, node 2 of 4\n")
    assert "no replay bundle: a pass has freed what the node had saved" in note
    second = [event for event in trace.events if event.run == 1]
    assert [event.name for event in second] == ["SumBackward0", "ExpBackward0"]
    assert all(event.memory is not None for event in second)


def test_a_hook_names_module_and_line() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with rg.trace(net):
        hidden = net[0](torch.ones(3, 4))
        hidden.register_hook(fail)
        loss = net[1](hidden).sum()
        (note,) = run(lambda w: loss, hidden)
    assert "that comes to 0:AddmmBackward0, made at " in note
    assert "after 1:ReluBackward0, node 2 of" in note
