"""What modules are called with inside compiled code: all arguments and their gradients, in the bits of eager code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from shutil import which
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import retrograd as rg
from retrograd.compiled import inputs as compiled_inputs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

Compile = Callable[[nn.Module], Any]


class Attention(nn.Module):
    """A keyword, a constant, a nest among the arguments; several uses of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Any = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = q @ k.transpose(-2, -1) * scale + mask["m"]
        return weights.softmax(-1) @ v + x, weights


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.act = nn.LayerNorm(6), Attention(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.attention(self.norm(x), scale=0.5, mask={"m": x.new_zeros(4, 4)})
        return x + self.act(found)


@dataclasses.dataclass
class Pair:
    left: Tensor
    right: Any


class Split(nn.Module):
    def forward(self, x: Tensor, *more: Tensor) -> Pair:
        return Pair(x * more[0], {"sin": (x.sin(), [more[1].cos()])})


class Nested(nn.Module):
    """Further positional arguments; a dataclass that holds a mapping, a tuple and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.last = Split(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        pair = self.split(self.last(x), x, self.last(x))
        return self.last(pair.left + pair.right["sin"][0] + pair.right["sin"][1][0])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x) * x


class Unused(nn.Module):
    """One of two branches has no gradient, so a part of that of an argument never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branches, self.same = nn.Linear(6, 6), Branches(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        used, _ = self.branches(self.first(x))
        return self.same(used)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.tanh = nn.Linear(6, 6), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros_like(x)
        for _ in range(3):
            hidden = self.tanh(self.cell(x + hidden))
        return hidden


class Overwriting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1


class Views(nn.Module):
    """An argument that its module overwrites, and modules that return views of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.over, self.flat = nn.Linear(6, 6), Overwriting(), nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.flat(self.over(self.first(x)))
        return found


def as_parts(net: nn.Module) -> Any:
    for part in net.children():
        part.compile(backend="aot_eager")
    return net


def in_a_function(net: nn.Module) -> Any:
    return torch.compile(lambda x: net(x), backend="aot_eager", fullgraph=True)


def as_a_whole(net: nn.Module) -> Any:
    return torch.compile(net, backend="aot_eager", fullgraph=True)


def train(make: Callable[[], nn.Module], compile_: Compile) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """Losses, all that was recorded, and what was compiled."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(3)
    net = make()
    call = compile_(net)
    update = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    with rg.record(net, sites="*") as recording:
        for _ in range(2):
            loss = call(torch.randn(2, 4, 6)).square().mean()
            loss.backward()
            update.step()
            update.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            call(torch.randn(2, 4, 6))
    history = recording.history
    statistics = ("count", "mean", "rms", "min", "max", "zeros")
    rows = {
        site: [history[site].steps.tolist(), *(getattr(history[site], each).tolist() for each in statistics)]
        for site in history.sites
    }
    return losses, rows, dict(counters["graph_break"])


@pytest.mark.parametrize("compile_", [as_a_whole, as_parts, in_a_function])
@pytest.mark.parametrize("make", [Attending, Nested, Unused, Recurrent, Views])
def test_every_site_has_the_bits_of_eager_code(make: Any, compile_: Compile) -> None:
    seen, expected, _ = train(make, lambda net: net)
    found_losses, found, breaks = train(make, compile_)
    assert found_losses == seen
    assert any(":input" in site and site.endswith(".grad") for site in expected)
    if compile_ is as_parts:  # with gradients of zeros where none comes, and those of a tensor before it is overwritten
        found = {site: rows for site, rows in found.items() if site in expected}
    assert found == expected
    assert not breaks


def test_nothing_is_compiled_anew_when_the_recording_of_inputs_changes() -> None:
    net = Attending()
    call = as_a_whole(net)
    x = torch.randn(2, 4, 6)
    with rg.record(net, sites="*"):
        call(x).sum().backward()
    first = dict(counters["stats"])
    call(x).sum().backward()
    with rg.record(net, sites="attention:inputs", schedule=2) as recording:
        for _ in range(3):
            call(x).sum().backward()
    assert {site.partition(":")[0] for site in recording.history.sites} == {"attention"}
    assert dict(counters["stats"]) == first


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.same(x).sin() * self.same(x)
        return self.same(self.last(found))


def test_two_calls_with_the_same_tensor_are_two_calls() -> None:
    """The compiler computes the second no more; the third is not taken for it."""
    _, expected, _ = train(Twice, lambda net: net)
    _, found, _ = train(Twice, as_a_whole)
    assert "same#3:output" in expected
    assert {site: found[site] for site in expected if not site.endswith(".grad")} == {
        site: rows for site, rows in expected.items() if not site.endswith(".grad")
    }
    assert set(found) == set(expected)


class Cut(nn.Module):
    """A module whose output is used without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.cut = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.cut(x).detach().argmax(-1, keepdim=True)


def test_a_parameter_without_a_gradient_is_no_fault(recwarn: pytest.WarningsRecorder) -> None:
    """Compiled code calls its hooks with None."""
    net = Cut()
    compiled = torch.compile(net, backend="aot_eager")
    with rg.record(compiled) as recording:
        compiled(torch.randn(3, 6)).sum().backward()
    assert [each for each in recwarn if issubclass(each.category, rg.RetrogradWarning)] == []
    assert "used:weight.grad" in recording.history.sites
    assert "cut:weight.grad" not in recording.history.sites


def test_a_trace_that_raises_leaves_no_call_behind() -> None:
    """What is known of a call that has begun holds its graph."""

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = torch.mm(x * 2, x)
            return found

    net = nn.Sequential(nn.Linear(6, 6), Failing())
    call = torch.compile(lambda x: net(x), backend="eager")
    with rg.record(net, sites="*:input*"):
        call(torch.ones(6, 6)).sum().backward()
        net[1].forward = raise_it  # type: ignore[method-assign]
        with pytest.raises(Exception, match="it fails here"):
            call(torch.ones(6, 6))
        assert not compiled_inputs._here.entered


@torch.library.custom_op("retrograd_tests::fail", mutates_args=())
def fail(x: Tensor) -> Tensor:
    raise ArithmeticError("it fails here")


@fail.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def raise_it(x: Tensor) -> Tensor:
    found: Tensor = fail(x)
    return found


@pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")
def test_with_inductor() -> None:
    """All rows of eager code, but for the compiler's rounding."""
    _, expected, _ = train(Attending, lambda net: net)
    _, found, breaks = train(Attending, lambda net: torch.compile(net, fullgraph=True))
    assert not breaks
    assert found.keys() == expected.keys()
    for site in expected:
        torch.testing.assert_close(found[site][:5], expected[site][:5], rtol=1e-4, atol=1e-6, msg=site)
