"""Gradients of inputs through one module, against nets in which every argument is copied at the module's door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from retrograd.core.hooks.engine import next_sequence_number
from retrograd.core.hooks.gradients import InputGradient, edge_of, hook_input_gradients
from retrograd.core.hooks.module import CallTap
from retrograd.core.hooks.reach import DeepGraphGuard

Gradients = dict[str, list[Tensor]]


class Watcher:
    """Sees the gradient of every argument of a module, by name: position or keyword."""

    def __init__(self, name: str, seen: Gradients) -> None:
        self.name = name
        self.seen = seen
        self.gradients: list[InputGradient] = []
        self.leaf_handles: list[RemovableHandle] = []
        self.open: list[tuple[int, list[InputGradient]]] = []

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        made = []
        for key, value in [*enumerate(args), *kwargs.items()]:
            edge = edge_of(value) if isinstance(value, Tensor) else None
            if edge is not None:
                made.append(InputGradient(self.seen.setdefault(f"{self.name}.{key}", []).append, *edge))
        self.open.append((next_sequence_number(), made))

    def after_call(self, module: nn.Module, output: Any) -> None:
        first, made = self.open.pop()
        if output is not None:
            outputs = [each for each in (output if isinstance(output, tuple) else (output,)) if each.requires_grad]
            hook_input_gradients(made, outputs, first, DeepGraphGuard(), self.leaf_handles)
            self.gradients += made


def copied(module: nn.Module, name: str, seen: Gradients) -> None:
    """The oracle: let the module work on copies of its arguments, and hook these."""
    forward = module.forward

    def on_copies(*args: Any, **kwargs: Any) -> Any:
        return forward(*(copy(key, arg) for key, arg in enumerate(args)), **{k: copy(k, v) for k, v in kwargs.items()})

    def copy(key: Any, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        mine = value.clone()
        mine.register_hook(lambda gradient: see(f"{name}.{key}", gradient))
        return mine

    def see(key: str, gradient: Tensor | None) -> None:
        if gradient is not None:
            seen.setdefault(key, []).append(gradient)

    module.forward = on_copies  # type: ignore[method-assign]


def watched(model: nn.Module) -> tuple[Gradients, list[Watcher]]:
    seen: Gradients = {}
    watchers = []
    for name, module in model.named_modules():
        watchers.append(Watcher(name, seen))
        CallTap(module, watchers[-1])
    return seen, watchers


def finish(watchers: list[Watcher]) -> None:
    """A pass is over."""
    for watcher in watchers:
        for gradient in watcher.gradients:
            if gradient.unfinished:
                gradient.finish()


def assert_same(ours: Gradients, expected: Gradients) -> None:
    """Gradients by module and argument; the calls of a module come in the same order."""
    assert {key for key, value in ours.items() if value} == expected.keys()
    for key, gradients in expected.items():
        assert len(ours[key]) == len(gradients), key
        for one, other in zip(ours[key], gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


# ---- random nets ----------------------------------------------------------------------------------------------


class Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + 2 * y, y * 3

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a, 2 * a + 3 * b


OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "add": lambda a, b, w: a + b,
    "multiply": lambda a, b, w: a * b,
    "weigh": lambda a, b, w: a @ w,
    "tanh": lambda a, b, w: torch.tanh(a),
    "relu in place": lambda a, b, w: (a * 1.0).relu_(),
    "add in place": lambda a, b, w: (a * 1.0).add_(b),
    "broadcast": lambda a, b, w: a + b[:1, :1],
    "sum": lambda a, b, w: a + b.sum(0),
    "chunk": lambda a, b, w: torch.cat([piece * k for k, piece in enumerate(a.chunk(3, 1), 1)], 1),
    "unbind": lambda a, b, w: torch.stack([row * k for k, row in enumerate(a.unbind(0), 1)]),
    "half of it": lambda a, b, w: torch.cat([a[:, :1], b.detach()[:, 1:]], 1),
    "max": lambda a, b, w: a + a.max(1, keepdim=True).values,
    "custom": lambda a, b, w: Shift.apply(a, b)[0],
    "custom, second": lambda a, b, w: Shift.apply(a, b)[1],
    "transposed": lambda a, b, w: (a.t() @ b) @ w,
    "view written": lambda a, b, w: write(a * 1.0, b),
    "cut": lambda a, b, w: a.detach() * b,
}


def write(a: Tensor, b: Tensor) -> Tensor:
    a[:, 0] = b[:, 1]
    return a


Program = list[tuple[str, int, int]]


class Block(nn.Module):
    """Runs a program on its arguments and returns the last results; unused arguments stay unused."""

    def __init__(self, program: Program, seed: int) -> None:
        super().__init__()
        self.program = program
        self.w = nn.Parameter(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: Tensor, *, other: Tensor) -> tuple[Tensor, Tensor]:
        values = [x, other]
        for name, first, second in self.program:
            values.append(OPERATIONS[name](values[first % len(values)], values[second % len(values)], self.w))
        last, before = values[-1], values[-2] if len(self.program) > 1 else values[-1] * 2
        return last, before


class Net(nn.Module):
    """Blocks with residual connections; the first one is called again at the end."""

    def __init__(self, programs: list[Program]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(program, seed) for seed, program in enumerate(programs))

    def forward(self, x: Tensor) -> Tensor:
        other = torch.sigmoid(x)
        for block in [*self.blocks, self.blocks[0]]:
            y, z = block(x, other=other)
            x, other = x + y, other * z.cos()
        return x + other


def run(net: Net, passes: int = 1) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(3, 3, dtype=torch.float64, generator=generator).requires_grad_()
    loss = net(x * 1.0).square().mean()

    def backward() -> None:
        loss.backward(retain_graph=True)

    return backward


PROGRAMS = st.lists(
    st.lists(
        st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=6
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=120, deadline=None)
@given(PROGRAMS)
def test_random_nets(programs: list[Program]) -> None:
    net, oracle = Net(programs), Net(programs)
    ours, watchers = watched(net)
    expected: Gradients = {}
    for name, module in oracle.named_modules():
        copied(module, name, expected)
    backward, backward_of_oracle = run(net), run(oracle)
    for _ in range(2):  # the second pass goes over the retained graph
        backward()
        backward_of_oracle()
        finish(watchers)
    assert_same(ours, expected)


# ---- by hand --------------------------------------------------------------------------------------------------


class Call(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def gradients(module: nn.Module, use: Callable[[Tensor], Tensor], x: Tensor | None = None) -> Gradients:
    """What is seen of a module's inputs when ``use`` calls it and makes a loss."""
    seen: Gradients = {}
    watcher = Watcher("", seen)
    tap = CallTap(module, watcher)
    x = torch.tensor([1.0, -2.0], requires_grad=True) * 1.0 if x is None else x
    use(x).backward()
    finish([watcher])
    tap.remove()
    return seen


def one(seen: Gradients, key: str = ".0") -> list[float]:
    (gradient,) = seen[key]
    return gradient.tolist()


def weigh(a: Tensor, b: Tensor) -> Tensor:
    return a * 2 + b * 3


BY_HAND: dict[
    str, tuple[Callable[..., Any] | nn.Module, Callable[[Any, Tensor], Tensor], dict[str, list[list[float]]]]
] = {
    "what flows past the module does not count": (
        torch.square,
        lambda module, x: (5 * module(x) + 7 * x).sum(),
        {".0": [[10, -20]]},
    ),
    "in place": (nn.ReLU(inplace=True), lambda module, x: (module(x) * 3).sum(), {".0": [[3, 0]]}),
    # what the name stands for afterwards is the output, so all of it went through the module
    "in place, used again": (nn.ReLU(inplace=True), lambda module, x: (module(x) * 3 + x * 2).sum(), {".0": [[5, 0]]}),
    "handed on": (nn.Identity(), lambda module, x: (module(x) * 3).sum(), {".0": [[3, 3]]}),
    "handed on beside a result": (
        lambda x: (x, x * 2, x),
        lambda module, x: torch.cat(module(x)).sum(),
        {".0": [[4, 4]]},
    ),
    "the same tensor twice": (weigh, lambda module, x: module(x, x).sum(), {".0": [[5, 5]], ".1": [[5, 5]]}),
    "two views": (weigh, lambda module, x: module(x[:1], x[1:]).sum(), {".0": [[2]], ".1": [[3]]}),
    "two outputs of a node": (weigh, lambda module, x: module(*x.chunk(2)).sum(), {".0": [[2]], ".1": [[3]]}),
    "an output that is not used": (lambda x: (x * 2, x * 100), lambda module, x: module(x)[0].sum(), {".0": [[2, 2]]}),
    "no gradient, and not used": (
        lambda a, b, c: b * 2,
        lambda module, x: module(torch.ones(2), x, x * 5).sum(),
        {".1": [[2, 2]], ".2": []},
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    function, use, expected = BY_HAND[name]
    module = function if isinstance(function, nn.Module) else Call(function)
    seen = gradients(module, lambda x: use(module, x))
    assert {key: [each.tolist() for each in found] for key, found in seen.items()} == expected


def test_a_leaf_that_is_handed_on() -> None:
    module = nn.Identity()
    leaf = torch.tensor([1.0, -2.0], requires_grad=True)
    seen: Gradients = {}
    watcher = Watcher("", seen)
    CallTap(module, watcher)
    (module(leaf) * 3).sum().backward()
    assert one(seen) == [3, 3]
    (handle,) = watcher.leaf_handles
    handle.remove()
    assert not leaf._backward_hooks


def test_a_leaf_has_what_comes_through_this_module_alone() -> None:
    leaf = torch.tensor([1.0, -2.0], requires_grad=True)
    module = Call(lambda x: x * 2 + x * 3)
    assert one(gradients(module, lambda x: (module(x) + x).sum(), leaf)) == [5, 5]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [6, 6]


def test_a_second_backward_over_the_same_graph() -> None:
    module = Call(lambda x: x * 2 + x.sin())
    seen: Gradients = {}
    CallTap(module, Watcher("", seen))
    x = torch.ones(2, requires_grad=True) * 1.0
    loss = module(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(*seen[".0"])


def test_double_backward_leaves_no_graph_behind() -> None:
    module = Call(lambda x: x**3 + x.sin())
    seen: Gradients = {}
    CallTap(module, Watcher("", seen))
    x = torch.ones(2, requires_grad=True) * 1.0
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    assert not seen[".0"][0].requires_grad
    torch.testing.assert_close(seen[".0"][0], slope.detach())


def test_a_failed_pass_is_forgotten() -> None:
    def fail(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    module = Call(lambda x: x * 2 + hooked(x * 3))

    def hooked(x: Tensor) -> Tensor:
        x.register_hook(fail)
        return x

    seen: Gradients = {}
    watcher = Watcher("", seen)
    CallTap(module, watcher)
    x = torch.ones(2, requires_grad=True) * 1.0
    loss = module(x).sum()
    with pytest.raises(KeyboardInterrupt):
        loss.backward(retain_graph=True)
    for gradient in watcher.gradients:
        gradient.drop()
        assert not gradient.unfinished
    assert seen[".0"] == []


def test_hooks_are_taken_back() -> None:
    module = Call(lambda x: (x * 2, x))
    seen: Gradients = {}
    watcher = Watcher("", seen)
    CallTap(module, watcher)
    x = torch.ones(2, requires_grad=True) * 1.0
    a, b = module(x)
    for gradient in watcher.gradients:
        gradient.remove()
    (a + b).sum().backward()
    assert seen[".0"] == []
