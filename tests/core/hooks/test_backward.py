"""Listeners hear of each outermost backward pass, once, whatever happens to it or to our wrapper."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from retrograd.core.hooks.backward import backward_changers, backward_listeners


class Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
        self.heard.append([root.detach() for root in roots])

    def backward_ends(self, failed: bool) -> None:
        self.heard.append("failed" if failed else "ended")


@contextmanager
def listening() -> Iterator[Listener]:
    listener = Listener()
    backward_listeners.add(listener)
    try:
        yield listener
    finally:
        backward_listeners.remove(listener)


def loss() -> Tensor:
    return (torch.ones(2, requires_grad=True) * 2).sum()


bound_by_name = torch.autograd.backward

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda t: t.backward(),
    "function": lambda t: torch.autograd.backward(t),
    "function, by name": lambda t: torch.autograd.backward(tensors=[t]),
    "function, got hold of before": lambda t: bound_by_name(t),
    "several roots": lambda t: torch.autograd.backward([t, loss()]),
    "grad": lambda t: torch.autograd.grad(t, leaf_of(t)),
    "grad, by name": lambda t: torch.autograd.grad(outputs=(t,), inputs=leaf_of(t)),
}


def leaf_of(tensor: Tensor) -> Tensor:
    node: Any = tensor.grad_fn
    while node.next_functions:
        node = node.next_functions[0][0]
    return node.variable


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_way_to_begin_one(call: Callable[[Tensor], Any]) -> None:
    root = loss()
    with listening() as listener:
        call(root)
    roots = [root.detach()] * (2 if call is CALLS["several roots"] else 1)
    assert listener.heard == [roots, "ended"]


def test_a_pass_within_a_pass_belongs_to_it() -> None:
    x = torch.ones(2, requires_grad=True)

    def inner(gradient: Tensor) -> None:
        with torch.enable_grad():
            loss().backward()

    with listening() as listener:
        y = checkpoint(torch.sin, x * 2, use_reentrant=True)
        y.register_hook(inner)
        y.sum().backward()
    assert listener.heard[1:] == ["ended"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_pass_that_fails_ends_too(error: type[BaseException]) -> None:
    def fail(gradient: Tensor) -> None:
        raise error

    root = loss()
    root.register_hook(fail)
    with listening() as listener:
        with pytest.raises(error):
            root.backward()
        loss().backward()
    assert [each for each in listener.heard if isinstance(each, str)] == ["failed", "ended"]


def test_a_wrapper_around_ours_is_left_alone_and_nothing_is_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.autograd._engine_run_backward
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", before)  # put back at the end
    calls: list[str] = []
    with listening():
        ours = torch.autograd._engine_run_backward

        @functools.wraps(ours)
        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append("theirs")
            return ours(*args, **kwargs)

        torch.autograd._engine_run_backward = theirs
    assert torch.autograd._engine_run_backward is theirs
    loss().backward()
    with listening() as listener:
        loss().backward()
    assert len(listener.heard) == 2
    assert calls == ["theirs", "theirs"]


def test_a_listener_may_leave_while_it_is_told() -> None:
    class Leaving(Listener):
        def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
            super().backward_begins(roots)
            backward_listeners.remove(self)

    leaving = Leaving()
    backward_listeners.add(leaving)
    loss().backward()
    loss().backward()
    assert leaving.heard[1:] == ["ended"]


def test_listeners_that_come_and_go_in_many_threads() -> None:
    heard = []

    def work() -> None:
        for _ in range(50):
            with listening() as listener:
                loss().backward()
            heard.append(len(listener.heard) >= 2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(heard)
    assert len(heard) == 200


def test_a_compiled_function_is_not_disturbed() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad((x * x).sum(), x)[0] * 2

    x = torch.ones(2, requires_grad=True)
    with listening():
        assert slope(x).tolist() == [4, 4]
    torch._dynamo.reset()
    assert graphs


def test_who_begins_to_listen_within_a_pass_is_told_of_it() -> None:
    first, late = Listener(), Listener()
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: backward_listeners.add(late))
    backward_listeners.add(first)
    try:
        y.sum().backward()
        assert [str(each) for each in late.heard] == [str(each) for each in first.heard]
        assert late.heard[1:] == ["ended"]
        loss().backward()
        assert late.heard[3:] == ["ended"]
    finally:
        backward_listeners.remove(first)
        backward_listeners.remove(late)


def test_changers_stand_between_the_listeners_and_the_pass() -> None:
    """Begun from the outside to the inside, and ended the other way round, also where one of them raises."""
    heard: list[tuple[str, str]] = []

    class Changer:
        def __init__(self, name: str) -> None:
            self.name = name

        def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
            heard.append((self.name, "begins"))

        def backward_ends(self, failed: bool) -> None:
            heard.append((self.name, "failed" if failed else "ended"))
            if self.name == "inner":
                raise ValueError("no")

    outer, inner, listener = Changer("outer"), Changer("inner"), Changer("listener")
    backward_changers.add(outer)
    backward_changers.add(inner)
    backward_listeners.add(listener)
    try:
        with pytest.raises(ValueError, match="no"):
            loss().backward()
    finally:
        backward_listeners.remove(listener)
        backward_changers.remove(inner)
        backward_changers.remove(outer)
    assert heard == [
        ("listener", "begins"), ("outer", "begins"), ("inner", "begins"),
        ("inner", "ended"), ("outer", "failed"), ("listener", "failed"),
    ]  # fmt: skip
