"""torch.compile: a model that is compiled after its rules were set has them; one that has run before is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from retrograd.core.errors import CannotRewriteError, RetrogradError, RetrogradWarning
from retrograd.core.hooks.in_graphs import tapped_calls
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests.rewriting.models import gradients, halve, make_net

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]


class Counting(Rule):
    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        count = state.get("count", 0) + 1
        state.put("count", count)
        return value * (1 + 0.1 * count)


SITES = [
    "1:output",
    "1:output.grad",
    "2:input.input",
    "2:input.input.grad",
    "2:weight",
    "2:weight.grad",
    "self:output.grad",
]


def run(net: nn.Module, call: Any, rules: dict[str, Any], make_call: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    losses = []
    with rewrite(net, rules):
        call = make_call(net)
        for step in range(3):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            loss = call(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
    return losses, gradients(net)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["whole", "in place"])
def test_compiled_after(way: str, backend: str) -> None:
    def compile_it(net: nn.Module) -> Any:
        if way == "whole":
            return torch.compile(net, backend=backend)
        net.compile(backend=backend)
        return net

    eager = run(make_net(), None, {site: Counting() for site in SITES}, lambda net: net)
    found = run(make_net(), None, {site: Counting() for site in SITES}, compile_it)
    for one, other in zip(found[0], eager[0], strict=True):
        torch.testing.assert_close(one, other)
    assert found[1].keys() == eager[1].keys()
    for name, each in found[1].items():
        torch.testing.assert_close(each, eager[1][name])


def test_compiled_again_when_the_rules_are_gone() -> None:
    net, x = make_net(), torch.randn(5, 3)
    plain = net(x)
    with rewrite(net, {"1:output": halve, "2:weight": halve}):
        compiled = torch.compile(net, backend="eager")
        assert not torch.equal(compiled(x), plain)
    torch.testing.assert_close(compiled(x), plain)


@pytest.mark.parametrize("rules", [{"1:output.grad": halve}, {"2:input.input": halve}, {"2:weight": halve}])
def test_compiled_before_is_refused(rules: Any) -> None:
    net, x = make_net(), torch.randn(5, 3)
    compiled = torch.compile(net, backend="eager")
    compiled(x)
    with pytest.raises(CannotRewriteError, match="compiled"):
        rewrite(compiled, rules)


def test_the_boundary_of_a_compiled_model() -> None:
    net, x = make_net(), torch.randn(5, 3)
    compiled = torch.compile(net, backend="aot_eager")
    compiled(x)
    with rewrite(compiled, {"self:output.grad": halve, "self:output": halve, "0:weight.grad": halve}):
        out = compiled(x)
        out.sum().backward()
    found = gradients(net)
    net.zero_grad()
    plain = net(x)
    torch.testing.assert_close(out, plain * 0.5)
    (plain.sum() * 0.25).backward()
    for name, each in gradients(net).items():
        torch.testing.assert_close(found[name], each * (0.5 if name == "0.weight" else 1.0))
    with pytest.raises(CannotRewriteError):
        rewrite(compiled, {"self:output": halve, "0:weight": halve})


@pytest.fixture
def no_taps_of_others() -> Iterator[None]:
    """What earlier tests have left in compiled code guards no missing hooks."""
    users = tapped_calls._users
    for _ in range(users):
        tapped_calls.release()
    yield
    for _ in range(users):
        tapped_calls.hold()


@pytest.mark.usefixtures("no_taps_of_others")
@pytest.mark.parametrize("resets", [False, True])
def test_a_function_that_calls_the_model_and_was_compiled_before(resets: bool) -> None:
    """It does not ask for rules, and nobody can tell from the model; so they are said to have been idle.

    While there are taps, missing hooks are guarded, and it does ask.
    """
    net, x = make_net(), torch.randn(5, 3)

    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        return net(x).sum()

    plain = step(x)
    plain.backward()
    expected = gradients(net)
    net.zero_grad()
    if resets:
        torch.compiler.reset()
    said = nullcontext() if resets else pytest.warns(RetrogradWarning, match=r"torch.compiler.reset")
    with said, rewrite(net, {"4:output.grad": halve, "4:output": halve}):
        out = step(x)
        out.backward()
    factor = 0.5 if resets else 1.0
    torch.testing.assert_close(out, plain * factor)
    for name, each in gradients(net).items():
        torch.testing.assert_close(each, expected[name] * factor**2)


@pytest.mark.parametrize(
    "rules", [{"1:output.grad": Counting()}, {"2:weight.grad": Counting()}, {"2:input.input.grad": Counting()}]
)
def test_compiled_autograd_works_or_says_that_it_does_not(rules: Any) -> None:
    net, x = make_net(), torch.randn(5, 3)
    (site,) = rules
    eager = make_net()
    with rewrite(eager, {site: Counting()}):
        eager(x).sum().backward()
    with rewrite(net, rules):
        try:
            with compiled_autograd._enable(torch.compile(backend="eager")):
                net(x).sum().backward()
        except (RetrogradError, torch._dynamo.exc.TorchDynamoException):
            return
    for name, each in gradients(net).items():
        torch.testing.assert_close(each, gradients(eager)[name])
