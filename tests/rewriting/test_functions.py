"""Rules on functions that modules call: held against hooks and autograd Functions that are written by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd.core.errors import CannotRewriteError, NoSuchSiteError, PatternError, RuleError
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests.rewriting.models import halve

Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Computes whatever it is given, with two linear layers."""

    def __init__(self, compute: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.act = nn.ReLU()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def x_of() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(5, 6, requires_grad=True)


def saliency(net: nn.Module, rules: Any) -> Tensor:
    x = x_of()
    with rewrite(net, rules):
        net(x).sum().backward()
    assert x.grad is not None
    return x.grad


class Guided(torch.autograd.Function):
    """ReLU whose backward lets only positive gradients of positive inputs pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g.clamp(min=0) * (x > 0)


WAYS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "functional": lambda net, x: F.relu(x),
    "method": lambda net, x: x.relu(),
    "torch": lambda net, x: torch.relu(x),
    "module": lambda net, x: net.act(x),
    "in place": lambda net, x: F.relu(x, inplace=True),
}


def two_layers(way: Callable[[Net, Tensor], Tensor]) -> Forward:
    return lambda net, x: way(net, net.b(way(net, net.a(x))))


def guided(net: Net) -> Tensor:
    x = x_of()
    Guided.apply(net.b(Guided.apply(net.a(x)))).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    "pattern", ["*/relu:output.grad", "*:ReluBackward0", "*:Relu*Backward0", "re:/relu:output.grad$"]
)
@pytest.mark.parametrize("way", WAYS)
def test_guided_backpropagation_takes_two_lines(way: str, pattern: str) -> None:
    net = Net(two_layers(WAYS[way]))
    given = saliency(net, {pattern: rg.rules.KeepSign()})
    assert torch.equal(given, guided(net))


def test_what_is_written_into_as_a_statement() -> None:
    def compute(net: Net, x: Tensor) -> Tensor:
        for layer in (net.a, net.b):
            x = layer(x)
            x.relu_()
        return x

    net = Net(compute)
    assert torch.equal(saliency(net, {"*/relu_:output.grad": rg.rules.KeepSign()}), guided(net))
    with pytest.raises(CannotRewriteError, match=r"nobody takes what `relu_` returns"):
        saliency(net, {"*/relu_:output": halve})


def test_a_call_is_chosen_by_its_number() -> None:
    net = Net(two_layers(WAYS["method"]))
    given = saliency(net, {"self/relu#1:output.grad": halve})
    x = x_of()
    h = net.a(x).relu()
    h.register_hook(lambda g: g * 0.5)
    net.b(h).relu().sum().backward()
    assert torch.equal(given, x.grad)  # type: ignore[arg-type]


def test_values_and_their_gradients() -> None:
    net = Net(lambda net, x: net.a(x).softmax(-1) @ net.b(x).T)
    given = saliency(net, {"*/softmax:output": halve})
    x = x_of()
    ((net.a(x).softmax(-1) * 0.5) @ net.b(x).T).sum().backward()
    assert torch.equal(given, x.grad)  # type: ignore[arg-type]


def test_one_of_several_outputs() -> None:
    net = Net(lambda net, x: net.a(x).max(-1).values + net.b(x).split(3, -1)[1].sum(-1))
    given = saliency(net, {"*/max:output.0.grad": halve, "*/split:output.1": halve})
    x = x_of()
    top = net.a(x).max(-1).values
    top.register_hook(lambda g: g * 0.5)
    (top + (net.b(x).split(3, -1)[1] * 0.5).sum(-1)).sum().backward()
    assert torch.equal(given, x.grad)  # type: ignore[arg-type]


def test_attention() -> None:
    def compute(net: Net, x: Tensor) -> Tensor:
        q = net.a(x)[None, None]
        return F.scaled_dot_product_attention(q, q, net.b(x)[None, None])

    seen: list[tuple[int, ...]] = []

    def look(value: Tensor, state: SiteState) -> None:
        seen.append(tuple(value.shape))

    saliency(Net(compute), {"*/scaled_dot_product_attention:output": look})
    assert seen == [(1, 1, 5, 6)]


class Epsilon(Rule):
    """The gradient times input over output of a function: needs what goes in and what comes out."""

    needs_value = needs_input = True

    def __call__(self, gradient: Tensor, state: SiteState) -> Tensor:
        assert state.value is not None
        return gradient * state.inputs["0"] / (state.value + 1e-6)


def test_what_a_rule_is_shown() -> None:
    net = Net(lambda net, x: F.gelu(net.a(x)))
    given = saliency(net, {"*/gelu:output.grad": Epsilon()})
    x = x_of()
    z = net.a(x)
    y = F.gelu(z)
    (y * (z / (y + 1e-6)).detach()).sum().backward()
    torch.testing.assert_close(given, x.grad)


def test_inside_of_modules_and_in_the_order_of_rules() -> None:
    told: list[tuple[str, str]] = []

    def tell(name: str) -> Any:
        return lambda value, state: told.append((name, state.site))

    net = Net(lambda net, x: net.act(net.a(x)))
    first = {"*/relu:output": tell("value"), "*/relu:output.grad": [tell("one"), tell("two")]}
    first |= {"act:output": tell("module"), "act:output.grad": tell("module")}
    with rewrite(net, first), rewrite(net, {"*/relu:output": tell("later"), "*/relu:output.grad": tell("later")}):
        net(x_of()).sum().backward()
    assert told == [
        ("value", "act/relu:output"),
        ("later", "act/relu:output"),
        ("module", "act:output"),
        ("module", "act:output.grad"),
        ("later", "act/relu:output.grad"),
        ("one", "act/relu:output.grad"),
        ("two", "act/relu:output.grad"),
    ]


def in_part(reentrant: bool) -> Forward:
    def inner(net: Net, x: Tensor) -> Tensor:
        return net.b(F.relu(net.a(x)).tanh()).relu()

    return lambda net, x: checkpoint(inner, net, x, use_reentrant=reentrant)


@pytest.mark.parametrize("site", ["*/relu:output", "*/relu:output.grad", "*/tanh:output.grad"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_again_what_rules_have_made(reentrant: bool, site: str) -> None:
    calls: list[int] = []

    def rule(value: Tensor, state: SiteState) -> Tensor:
        calls.append(state.call)
        count = state.get("count", 0)
        state.put("count", count + 1)
        return value * (0.5 + count)

    def run(compute: Forward) -> tuple[Tensor, list[int]]:
        calls.clear()
        return saliency(Net(compute), {site: rule}), sorted(set(calls))

    plain = run(lambda net, x: net.b(F.relu(net.a(x)).tanh()).relu())
    assert torch.equal(plain[0], run(in_part(reentrant))[0])
    assert plain[1] == run(in_part(reentrant))[1]


def test_nodes_are_not_known_in_a_reentrant_checkpoint() -> None:
    assert torch.equal(
        saliency(Net(in_part(False)), {"*:ReluBackward0": halve}),
        saliency(Net(in_part(False)), {"*/relu:output.grad": halve}),
    )
    with pytest.raises(CannotRewriteError, match=r"self/[a-z]+ makes its own only when"):
        saliency(Net(in_part(True)), {"self:ReluBackward0": halve})


def test_a_part_is_called_by_itself() -> None:
    net, x = Net(two_layers(WAYS["module"])), x_of()
    calls: list[int] = []
    with rewrite(net, {"*/relu:output": lambda value, state: calls.append(state.call)}):
        net.act(net.a(x)).sum().backward()
        net.act(net.a(x))
        net.act(net.a(x)).sum().backward()
    assert calls == [1, 1, 2]


def test_nothing_is_left_behind() -> None:
    net, x = Net(two_layers(WAYS["functional"])), x_of()
    with rewrite(net, {"*/relu:output.grad": rg.rules.Zero()}):
        out = net(x)
        assert torch._C._len_torch_function_stack() == 0
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_is_left(error: type[BaseException]) -> None:
    fails = [True]

    def compute(net: Net, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        if fails.pop():
            raise error
        return net.b(y).relu()

    net = Net(compute)
    with rewrite(net, {"*/relu:output.grad": rg.rules.KeepSign()}):
        with pytest.raises(error):
            net(x_of())
        fails += [False]
        x = x_of()
        net(x).sum().backward()
        assert torch.equal(x.grad, guided(net))  # type: ignore[arg-type]
    net.act(x)  # a thread that was left in the middle is cleared by its next call of a module
    assert torch._C._len_torch_function_stack() == 0


def test_what_a_rule_raises_comes_to_the_program() -> None:
    def rule(value: Tensor, state: SiteState) -> Tensor:
        return value[0]

    net = Net(two_layers(WAYS["functional"]))
    with rewrite(net, {"*/relu:output": rule}):
        for _ in range(2):
            with pytest.raises(RuleError, match="self/relu:output"):
                net(x_of())


def test_in_threads() -> None:
    net = Net(two_layers(WAYS["functional"]))
    want, given, found = guided(net), x_of().detach(), []  # threads share the generator

    def work() -> None:
        for _ in range(5):
            x = given.clone().requires_grad_()
            found.append(torch.equal(torch.autograd.grad(net(x).sum(), x)[0], want))

    with rewrite(net, {"*/relu:output.grad": rg.rules.KeepSign()}):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == [True] * 15


def test_without_grad_values_are_changed_and_nothing_else() -> None:
    net, x = Net(two_layers(WAYS["functional"])), x_of()
    with rewrite(net, {"*/relu:output": halve, "*/relu:output.grad": rg.rules.Zero()}), torch.no_grad():
        given = net(x)
    with torch.no_grad():
        assert torch.equal(given, net.b(net.a(x).relu() * 0.5).relu() * 0.5)


def test_patterns_that_mean_no_function() -> None:
    net = Net(two_layers(WAYS["functional"]))
    seen: list[str] = []
    rules = {"*:output": lambda value, state: seen.append(state.site), "*/tanh:output": halve}
    with pytest.warns(UserWarning, match=r"'\*/tanh:output': no such function was called. Those called are .*\*/relu"):
        saliency(net, rules)
    assert seen == ["a:output", "b:output", "self:output"]
    with pytest.raises(NoSuchSiteError, match=r"before the slash stands a module: .*a"):
        rewrite(net, {"aa/relu:output": halve})
    with pytest.raises(PatternError, match="a function"):
        rewrite(net, {"*/relu": halve})


def test_memory_goes_on_in_another_rewriting() -> None:
    def count(value: Tensor, state: SiteState) -> None:
        state.put("count", state.get("count", 0) + 1)
        counts.append(state.get("count", 0))

    net, counts = Net(two_layers(WAYS["functional"])), list[int]()
    with rewrite(net, {"*/relu:output": count, "*:ReluBackward0": count}) as rewriting:
        net(x_of()).sum().backward()
        saved = rewriting.state_dict()
    with rewrite(net, {"*/relu:output": count, "*:ReluBackward0": count}) as rewriting:
        rewriting.load_state_dict(saved)  # warns of nothing
        net(x_of()).sum().backward()
    assert counts == [1, 2, 1, 2, 3, 4, 3, 4]


def test_compiled_code_is_named() -> None:
    net = Net(lambda net, x: net.act(net.b(F.relu(net.a(x)))))
    net.act = torch.compile(net.act, backend="eager")  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="have not acted in all of the model. Inside of compiled code"):
        saliency(net, {"*/relu:output.grad": halve})


def test_what_was_changed_is_recorded_under_its_name() -> None:
    net = Net(two_layers(WAYS["functional"]))
    sites = ["*/relu:output.grad", "*/relu:output.before.grad"]
    with rg.record(net, sites=sites) as recording, rewrite(net, {"*/relu:output.grad": halve}):
        net(x_of()).sum().backward()
    history = recording.history
    events = [(event.name, event.value) for event in history.events if event.kind == "rewrite"]
    assert events == [("self/relu#2:output.grad", 0.5), ("self/relu:output.grad", 0.5)]
    after, before = history["self/relu#2:output.grad"].l2, history["self/relu#2:output.before.grad"].l2
    assert after[0] == pytest.approx(before[0] / 2)
