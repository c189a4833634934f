"""Hooks that write into gradients: which branch they harm, against plain autograd without us."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.history.facts import SharedWrite, read_facts
from retrograd.core.history.history import History
from retrograd.core.recording.recorder import Recorder
from retrograd.explaining.facts.sources import SOURCES
from retrograd.explaining.facts.watches import WATCHES
from retrograd.explaining.findings.record import Record
from tests.explaining.findings.by_hand import ask

Hook = Callable[[Tensor], Tensor | None]


def in_place(g: Tensor) -> None:
    g.mul_(0.1)


def in_place_and_returned(g: Tensor) -> Tensor:
    return g.mul_(0.1)


def through_data(g: Tensor) -> None:
    g.data.mul_(0.1)


def by_index(g: Tensor) -> None:
    g[0] = 0.1 * g[0]
    g[1:] *= 0.1


def by_out(g: Tensor) -> None:
    torch.mul(g, 0.1, out=g)


def new(g: Tensor) -> Tensor:
    return g * 0.1


WRITING: list[Hook] = [in_place, in_place_and_returned, through_data, by_index, by_out]


class Scaled(torch.autograd.Function):
    hook: Hook = staticmethod(new)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        changed = Scaled.hook(g)
        return g if changed is None else changed


class Net(nn.Module):
    """Its parameters are ``first``, ``second`` and ``third``."""

    def __init__(self, case: Case, hook: Hook) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second, self.third = (nn.Parameter(torch.randn(3, 4, generator=generator)) for _ in range(3))
        self.pair = nn.Identity()
        self.case, self.hook = case, hook

    def forward(self, x: Tensor) -> Tensor:
        return self.case(self, x)


Case = Callable[[Net, Tensor], Tensor]


def hook_on(tensor: Tensor, hook: Hook) -> Tensor:
    if tensor.requires_grad:
        tensor.register_hook(hook)
    return tensor


def branch_that_runs_first(net: Any, x: Tensor) -> Tensor:
    left = torch.tanh(net.first * x)  # harmed
    right = hook_on(net.second * x, net.hook)  # hooked
    return left + right  # type: ignore[no-any-return]


def residual(net: Any, x: Tensor) -> Tensor:
    left = torch.tanh(net.first * x)  # harmed
    right = hook_on(torch.sin(left), net.hook)  # hooked
    return left + right


def through_views(net: Any, x: Tensor) -> Tensor:
    left = torch.tanh(net.first * x)  # harmed
    right = hook_on((net.second * x).view(4, 3), net.hook)  # hooked
    return (left.view(12) + right.view(12)).view(3, 4) * net.third


def one_of_three_hooks(net: Any, x: Tensor) -> Tensor:
    left = torch.tanh(net.first * x)  # harmed
    right = hook_on(net.second * x, lambda g: None)  # hooked
    hook_on(right, net.hook)
    right.register_hook(lambda g: None)
    return left + right  # type: ignore[no-any-return]


def in_a_function(net: Any, x: Tensor) -> Tensor:
    Scaled.hook = net.hook
    left = torch.tanh(net.first * x)  # harmed
    right = Scaled.apply(net.second * x)
    return left + right  # type: ignore[no-any-return]


HARMING: list[Case] = [branch_that_runs_first, residual, through_views, in_a_function]


def branch_that_runs_last(net: Any, x: Tensor) -> Tensor:
    left = hook_on(torch.tanh(net.first * x), net.hook)
    return left + net.second * x


def parts_of_one_memory(net: Any, x: Tensor) -> Tensor:
    left = torch.tanh(net.first * x)
    return torch.cat([left, hook_on(net.second * x, net.hook)])


def memory_of_its_own(net: Any, x: Tensor) -> Tensor:
    return hook_on(net.second * x, net.hook) * net.first


def added_up_before(net: Any, x: Tensor) -> Tensor:
    left = torch.tanh(net.first * x)
    right = hook_on(net.second * x, net.hook)
    last = torch.sin(left)  # its gradient is added before the hook runs
    return left + right + last


HARMLESS: list[Case] = [branch_that_runs_last, parts_of_one_memory, memory_of_its_own, added_up_before]


def take_pass(net: Net) -> list[Tensor]:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    net(x).square().sum().backward()
    return [each.grad.clone() for each in net.parameters() if each.grad is not None]


def watch(net: Any, take: Callable[[Any], list[Tensor]] = take_pass) -> tuple[list[SharedWrite], list[Tensor], Record]:
    history = History()
    recorder = Recorder(net, history, sources=(*SOURCES, *WATCHES))
    recorder.attach()
    try:
        kept = take(net)
    finally:
        recorder.close()
        nn.Identity()(torch.zeros(1))  # where modes leave that torch had put aside for the pass
    assert not [event for event in history.events if event.kind == "fault"]
    return [fact for fact in read_facts(history.events) if isinstance(fact, SharedWrite)], kept, Record(history)


def line_of(case: Any, mark: str) -> str:
    lines, first = inspect.getsourcelines(case)
    return f"{__file__}:{first + next(number for number, text in enumerate(lines) if f'# {mark}' in text)}"


def is_harmed(case: Case, hook: Hook) -> bool:
    """Whether plain autograd finds other gradients than with a hook that returns a new tensor."""
    pairs = zip(take_pass(Net(case, hook)), take_pass(Net(case, new)), strict=True)
    return not all(torch.allclose(ours, right) for ours, right in pairs)


@pytest.mark.parametrize("hook", WRITING)
@pytest.mark.parametrize("case", HARMING)
def test_a_branch_is_harmed(case: Case, hook: Hook) -> None:
    assert is_harmed(case, hook)
    (fact,), kept, record = watch(Net(case, hook))
    assert (fact.harmed, fact.harmed_line, fact.value) == ("tanh", line_of(case, "harmed"), 1)
    if case is in_a_function:
        assert (fact.hook, fact.node) == ("backward", "ScaledBackward")
    else:
        assert (fact.hook, fact.hook_line) == (hook.__name__, f"{__file__}:{inspect.getsourcelines(hook)[1]}")
        assert fact.line == line_of(case, "hooked")
    assert all(map(torch.equal, kept, take_pass(Net(case, hook))))
    (finding,) = ask("overwritten", record)
    assert (finding.severity, finding.line) == ("critical", fact.hook_line)


@pytest.mark.parametrize("hook", WRITING)
@pytest.mark.parametrize("case", HARMLESS)
def test_nobody_is_harmed(case: Case, hook: Hook) -> None:
    assert not is_harmed(case, hook)
    facts, kept, record = watch(Net(case, hook))
    assert facts == []
    assert all(map(torch.equal, kept, take_pass(Net(case, hook))))
    assert not list(ask("overwritten", record))


@pytest.mark.parametrize("case", [*HARMING, *HARMLESS])
def test_hooks_that_return_what_is_new(case: Case) -> None:
    facts, kept, _ = watch(Net(case, new))
    assert facts == []
    assert all(map(torch.equal, kept, take_pass(Net(case, new))))


@pytest.mark.parametrize("case", HARMING)
def test_a_write_that_changes_nothing(case: Case) -> None:
    facts, _, _ = watch(Net(case, lambda g: g.clamp_(-1e6, 1e6)))
    assert facts == []


def test_the_one_of_several_hooks_that_writes() -> None:
    assert is_harmed(one_of_three_hooks, in_place)
    (fact,), _, _ = watch(Net(one_of_three_hooks, in_place))
    assert fact.hook == "in_place"


def sum_of_leaves(net: Any, x: Tensor) -> Tensor:
    return net.first + net.second  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_hook_on_a_parameter(name: str) -> None:
    def make(hook: Hook) -> Net:
        net = Net(sum_of_leaves, hook)
        net.get_parameter(name).register_hook(lambda g: None)
        net.get_parameter(name).register_hook(hook)
        return net

    is_wrong = not all(map(torch.allclose, take_pass(make(in_place)), take_pass(make(new))))
    assert is_wrong == (name == "first")  # the other one runs last
    net = make(in_place)
    table: Any = net.get_parameter(name)._backward_hooks
    before = list(table.items())
    facts, _, _ = watch(net)
    assert list(table.items()) == before
    assert [(fact.tensor, fact.harmed) for fact in facts] == [("self:first", "self:second")] * is_wrong


@pytest.mark.parametrize("when", ["pre", "full", "given"])
def test_a_hook_of_a_module(when: str) -> None:
    def case(net: Any, x: Tensor) -> Tensor:
        left = torch.tanh(net.first * x)
        return left + net.pair(left * net.second)  # type: ignore[no-any-return]

    def make(write: Callable[[Tensor], Any]) -> Net:
        net = Net(case, new)
        if when == "pre":
            net.pair.register_full_backward_pre_hook(lambda module, given: (write(given[0]),))
        elif when == "full":
            net.pair.register_full_backward_hook(lambda module, found, given: (write(found[0]),))
        else:
            net.pair.register_full_backward_hook(lambda module, found, given: (write(given[0]), None)[1])
        return net

    assert not all(map(torch.allclose, take_pass(make(lambda g: g.mul_(0.1))), take_pass(make(new))))
    (fact,), kept, _ = watch(make(lambda g: g.mul_(0.1)))
    assert (fact.name, fact.hook, fact.harmed) == ("pair", "<lambda>", "tanh")
    assert all(map(torch.equal, kept, take_pass(make(lambda g: g.mul_(0.1)))))
    assert watch(make(new))[0] == []


def test_one_gradient_for_two_roots() -> None:
    def take(net: Net) -> list[Tensor]:
        given = torch.ones(3, 4)
        left, right = net.first.tanh(), hook_on(net.second.sin(), net.hook)
        net(torch.ones(3, 4))
        torch.autograd.backward([left, right], [given, given])
        return [each.grad.clone() for each in net.parameters() if each.grad is not None]

    def case(net: Any, x: Tensor) -> Tensor:
        return x

    assert not all(map(torch.allclose, take(Net(case, in_place)), take(Net(case, new))))
    facts, kept, _ = watch(Net(case, in_place), take)
    assert [fact.harmed for fact in facts] == ["tanh"]
    assert all(map(torch.equal, kept, take(Net(case, in_place))))


def raising(g: Tensor) -> None:
    raise KeyError("mine")


def test_a_hook_that_raises_leaves_nothing_behind() -> None:
    net = Net(sum_of_leaves, new)
    net.first.register_hook(raising)
    table: Any = net.first._backward_hooks
    before = list(table.items())
    with pytest.raises(KeyError, match="mine"):
        watch(net)
    assert list(table.items()) == before


class Residual(nn.Sequential):
    def __init__(self, prepare: Callable[[nn.Module], Any]) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3)))
        prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = x + block(x)
        return x


def clip_leaves(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.register_hook(lambda g: g.clamp_(-0.01, 0.01))


def update_in_backward(net: nn.Module) -> None:
    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad.mul_(0.5), alpha=-0.1)
        parameter.grad = None

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def read_modules(net: nn.Module) -> None:
    norms: list[Tensor] = []
    for module in net.modules():
        module.register_full_backward_hook(lambda module, found, given: norms.append(given[0].norm()))


@pytest.mark.parametrize("prepare", [clip_leaves, update_in_backward, read_modules])
def test_healthy_hooks(prepare: Callable[[nn.Module], Any]) -> None:
    def take(net: Any) -> list[Tensor]:
        torch.manual_seed(1)
        for _ in range(3):
            net(torch.randn(8, 4, requires_grad=True)).square().mean().backward()
        return [each.detach().clone() for each in net.parameters()]

    def gradients_of(net: Any) -> list[Tensor | None]:
        return [each.grad for each in net.parameters()]

    watched, bare = Residual(prepare), Residual(prepare)
    facts, kept, record = watch(watched, take)
    assert facts == []
    assert all(map(torch.equal, kept, take(bare)))
    pairs = zip(gradients_of(watched), gradients_of(bare), strict=True)
    assert all(
        ours is right or (ours is not None and right is not None and torch.equal(ours, right)) for ours, right in pairs
    )
    assert not list(ask("overwritten", record))
