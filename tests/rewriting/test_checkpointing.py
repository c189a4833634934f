"""Parts that are computed again in the backward pass: a rule acts once a real call, and comes to the same again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import CannotRewriteError
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests.rewriting.models import assert_same, gradients, halve, same_bits, weights


class RunningScale(Rule):
    """Divides by an average of what it saw: its result depends on all that came before."""

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        average = state.ema("size", 0.5)
        average.add(value.detach().abs().mean())
        state.put("count", state.get("count", 0) + 1)
        return value / (1 + average.value)


class AddedNoise(Rule):
    """Noise from a generator of its own, so that checkpointing does not restore it."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        number = state.get("number", 0)
        state.put("number", number + 1)
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(number), dtype=value.dtype)
        return value + noise


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.drop(self.linear(x)))


class Net(nn.Module):
    """Blocks in checkpointed parts, one of them shared by two parts and called twice in one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def part(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[1](self.blocks[0](x)))

    def save(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.way == "plain":
            return function(x)
        return checkpoint(function, x, use_reentrant=self.way.startswith("reentrant"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.way.endswith("nested"):
            x = self.save(lambda h: self.save(self.blocks[2], self.save(self.part, self.blocks[1](h))) * 2, x)
        else:
            x = self.save(lambda h: self.blocks[2](self.part(self.blocks[1](h))) * 2, x)
        x = self.save(self.part, x)
        return self.blocks[2](x)


pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")  # a reentrant part in another

WAYS = ["reentrant", "not reentrant", "reentrant nested", "not reentrant nested"]


def train(
    way: str, make_rules: Callable[[], dict[str, Any]], steps: int = 3
) -> tuple[list[Tensor], dict[str, Tensor], Any]:
    torch.manual_seed(0)
    net = Net(way).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    with rewrite(net, make_rules()) as rewriting:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = net(torch.randn(5, 3, dtype=torch.float64)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, weights(net), rewriting.state_dict()


RULES: dict[str, Callable[[], dict[str, Any]]] = {
    "values": lambda: {"*linear:output": RunningScale()},
    "inputs": lambda: {"*linear:input.input": RunningScale()},
    "parameters": lambda: {"*linear:weight": RunningScale()},
    "gradients": lambda: {"*linear:output.grad": RunningScale()},
    "input gradients": lambda: {"*linear:input.input.grad": RunningScale()},
    "noise": lambda: {"*linear:output": AddedNoise(), "*drop:output.grad": AddedNoise()},
    "all": lambda: {
        "blocks.*:output": RunningScale(),
        "blocks.*:output.grad": RunningScale(),
        "*linear:input.input": RunningScale(),
        "stem:weight.grad": RunningScale(),
        "*linear:bias": RunningScale(),
    },
    "one call of several": lambda: {"blocks.0#3:output": RunningScale(), "blocks.0#2:output.grad": halve},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rules", RULES)
def test_as_without_checkpointing(way: str, rules: str) -> None:
    plain_losses, plain_weights, plain_state = train("plain", RULES[rules])
    losses, found, state = train(way, RULES[rules])
    assert same_bits(losses[0], plain_losses[0])
    if "not" in way:
        assert all(same_bits(one, other) for one, other in zip(losses, plain_losses, strict=True))
        assert_same(found, plain_weights)
    for name in found:  # a reentrant part adds up the gradients of a shared module in another order
        torch.testing.assert_close(found[name], plain_weights[name], rtol=1e-9, atol=1e-12)
    for (_, one), (_, other) in zip(state["rules"], plain_state["rules"], strict=True):
        assert one.keys() == other.keys()
        for site in one:
            assert one[site].get("count") == other[site].get("count")


@pytest.mark.parametrize("way", WAYS)
def test_two_passes_over_one_graph(way: str) -> None:
    def run(way: str) -> tuple[dict[str, Tensor], Any]:
        torch.manual_seed(0)
        net = Net(way).eval()
        with rewrite(net, {"*linear:output": RunningScale(), "*linear:output.grad": halve}) as rewriting:
            out = net(torch.randn(5, 3))
            out[:, 0].sum().backward(retain_graph=True)
            out[:, 1].square().sum().backward()
            return gradients(net), rewriting.state_dict()

    found, expected = run(way), run("plain")
    for name, each in found[0].items():
        torch.testing.assert_close(each, expected[0][name], rtol=1e-5, atol=1e-6)
    assert found[1]["rules"][0][1]["blocks.0.linear:output"]["count"] == 4


def test_a_part_that_a_function_of_ones_own_computes_again() -> None:
    """Neither torch's checkpoint nor the call can be told from others, so a rule with a memory says so."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
            ctx.function = function
            ctx.save_for_backward(x)
            with torch.no_grad():
                return function(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.function(x)
            torch.autograd.backward(out, gradient)
            return x.grad, None

    torch.manual_seed(0)
    linear, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    net = nn.Sequential(linear)
    with rewrite(net, {"0:output": RunningScale(), "0:output.grad": halve}):
        out = Again.apply(x, net)
        out.sum().backward()
    found = gradients(net)
    net.zero_grad()
    h = linear(x)
    value = h / (1 + 0.5 * h.detach().abs().mean() / 0.5)  # the average is corrected for its beginning
    assert torch.allclose(out, value)
    (value.sum() * 0.5).backward()
    for name, each in found.items():
        torch.testing.assert_close(each, gradients(net)[name])
    twice = nn.Sequential(linear, nn.Tanh(), linear)
    with rewrite(twice, {"0:output": RunningScale()}):
        twice(x)
        out = Again.apply(x, twice)
        with pytest.raises(CannotRewriteError, match="0:output"):
            out.sum().backward()


def test_the_pass_inside_a_reentrant_part_is_part_of_the_one_around() -> None:
    seen: list[tuple[int, int]] = []

    def note(value: Tensor, state: SiteState) -> None:
        seen.append((state.step, state.call))

    net = Net("reentrant nested")
    with rewrite(net, {"re:^blocks[.][0-9](#[0-9])?:output[.]grad": note}):
        net(torch.randn(5, 3)).sum().backward()
    assert sorted(seen) == [(0, 1)] * 3 + [(0, 2)] * 3 + [(0, 3)] * 2 + [(0, 4)]


def test_a_parameter_in_several_reentrant_parts_has_its_gradient_part_by_part() -> None:
    """Each part runs a pass of its own; the rule sees what that brings, and the sum is of what it returned."""
    linear, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    seen: list[Tensor] = []

    def square(gradient: Tensor, state: SiteState) -> Tensor:
        seen.append(gradient)
        return gradient**2

    def save(h: Tensor) -> Tensor:
        return checkpoint(linear, h, use_reentrant=True)

    with rewrite(linear, {"self:weight.grad": square}):
        save(torch.tanh(save(x))).sum().backward()
    assert len(seen) == 2
    found = gradients(linear)["weight"]
    linear.zero_grad()
    handle = linear.weight.register_hook(lambda gradient: gradient**2)
    save(torch.tanh(save(x))).sum().backward()
    handle.remove()
    assert torch.equal(found, gradients(linear)["weight"])
