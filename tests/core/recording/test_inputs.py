"""What modules are called with, by argument name, and the gradient of each argument through that module alone.

The oracle for the gradients is ``register_full_backward_hook`` on a twin without in-place operations.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.core.recording.collector import Collector, collect
from tests.core.recording.oracle import assert_row

INPUTS = ["*:input*"]


def grad_inputs(net: nn.Module, run: Any) -> dict[str, list[torch.Tensor]]:
    """What full backward hooks say, by path, for the first call of each module."""
    found: dict[str, list[torch.Tensor]] = {}
    handles = [
        module.register_full_backward_hook(
            lambda module, given, _, path=path or "self": found.setdefault(path, [g for g in given if g is not None])
        )
        for path, module in net.named_modules()
    ]
    run(net).backward()
    for handle in handles:
        handle.remove()
    return found


class Named(nn.Module):
    """Uses its arguments in the forms that a call can have."""

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor, /, *rest: torch.Tensor, mask: Any = None, **more: Any
    ) -> torch.Tensor:
        out = x * scale
        for tensor in rest:
            out = out + tensor
        if mask is not None:
            out = out * mask["m"]
        return out + sum(more.values())


def test_arguments_have_their_names_however_they_are_passed() -> None:
    net = Named()
    given = {name: torch.randn(3, requires_grad=True) for name in ("x", "scale", "a", "b", "m", "extra")}
    with collect(net, sites=INPUTS) as seen:
        net(
            given["x"], given["scale"], given["a"], given["b"], mask={"m": given["m"]}, extra=given["extra"]
        ).sum().backward()
    slots = {"x": "x", "scale": "scale", "a": "rest.0", "b": "rest.1", "m": "mask.m", "extra": "extra"}
    assert {f"self:input.{slot}" for slot in slots.values()} == set(seen.sites(backward=-1))
    for name, slot in slots.items():
        assert_row(seen.one(f"self:input.{slot}"), given[name])
        assert given[name].grad is not None
        assert_row(seen.one(f"self:input.{slot}.grad"), given[name].grad)


def test_positional_arguments_may_be_given_by_keyword() -> None:
    net = nn.Bilinear(2, 3, 1)
    left, right = torch.randn(4, 2), torch.randn(4, 3)
    with collect(net, sites=INPUTS) as seen:
        net(input2=right, input1=left)
    assert_row(seen.one("self:input.input1"), left)
    assert_row(seen.one("self:input.input2"), right)


def test_what_is_no_tensor_is_not_recorded() -> None:
    net = Named()
    with collect(net, sites=INPUTS) as seen:
        net(torch.ones(2), 3.0, mask=None)  # type: ignore[arg-type]
    assert seen.sites() == ["self:input.x"]
    assert {"site": "self:input.scale", "reason": "no tensor was passed"} in seen.facts["not_recorded"]


def check(net: nn.Module, run: Any, skip: tuple[str, ...] = (), twin: nn.Module | None = None) -> Collector:
    """Every input gradient that full backward hooks see on a copy is what we see, at each module's first argument."""
    expected = grad_inputs(twin or copy.deepcopy(net), run)
    with collect(net, sites=[*INPUTS, "*:output*"]) as seen:
        run(net).backward()
    checked = 0
    for path, gradients in expected.items():
        rows = [row for row in seen.rows if row.site.startswith(f"{path}:input") and row.backward == 0]
        if path in skip or not gradients:
            continue
        assert len(rows) == len(gradients), path
        for row, gradient in zip(rows, gradients, strict=True):
            assert_row(row, gradient)
            checked += 1
    assert checked
    assert not seen.facts["faults"]
    return seen


class Residual(nn.Module):
    """A residual block; its ReLUs may be in place."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace)
        self.second = nn.Linear(4, 4)
        self.last = nn.ReLU(inplace)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.relu(self.first(x))) + x)


@pytest.mark.parametrize("inplace", [False, True])
def test_residual_blocks_agree_with_full_backward_hooks(inplace: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), Residual(inplace), Residual(inplace), nn.Linear(4, 1))
    twin = copy.deepcopy(net)
    for module in twin.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    x = torch.randn(5, 3, requires_grad=True)
    check(net, lambda net: net(x).square().sum(), twin=twin)


class Forked(nn.Module):
    """Uses its input in four ways, through a view, and not at all in a fifth."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x[:, :2], x[:, 2:]
        detached = x.detach()
        return torch.cat([left * right, right.tanh()], 1) + self.fc(x) + x.sin() * detached


def test_an_input_that_is_used_many_times_gets_the_sum() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Forked(), nn.Linear(4, 1))
    x = torch.randn(5, 4, requires_grad=True)
    check(net, lambda net: net(x).square().sum())


class Through(nn.Module):
    """Its input also goes around it, which is not its business."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * 2 + x.exp()


def test_only_what_comes_through_the_module_counts() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Through())
    x = torch.randn(2, 4, requires_grad=True)
    seen = check(net, lambda net: net(x).sum())
    assert seen.one("1.fc:input.input.grad").rms < seen.one("1:input.x.grad").rms


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(memory), self.value(memory))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.attend = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encode(x)
        return self.attend(memory.tanh(), memory=memory)


def test_several_arguments_each_have_their_own() -> None:
    torch.manual_seed(0)
    net = Decoder()
    x = torch.randn(2, 3, 4)
    memory: list[torch.Tensor] = []
    net.attend.register_forward_pre_hook(lambda module, args, kwargs: memory.append(kwargs["memory"]), with_kwargs=True)
    with collect(net, sites=INPUTS) as seen:
        net(x).square().sum().backward()
    net.attend._forward_pre_hooks.clear()
    # by hand: gradients through the attention alone, with inputs that are leaves
    leaves = [memory[0].detach().tanh().requires_grad_(), memory[0].detach().requires_grad_()]
    by_hand = torch.autograd.grad(net.attend(*leaves).square().sum(), leaves)
    assert_row(seen.one("attend:input.x.grad"), by_hand[0])
    assert_row(seen.one("attend:input.memory.grad"), by_hand[1])


def test_an_in_place_module_records_what_it_was_given() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    x = torch.randn(8, 3)
    with collect(net, sites=["1:*", "0:output*"]) as seen:
        net(x).sum().backward()
    before = F.linear(x, net[0].weight, net[0].bias)
    assert_row(seen.one("1:input.input"), before)
    assert_row(seen.one("0:output"), before)
    assert_row(seen.one("1:output"), before.relu())
    assert_row(seen.one("1:input.input.grad"), (before > 0).float())
    assert_row(seen.one("0:output.grad"), (before > 0).float())
    assert_row(seen.one("1:output.grad"), torch.ones(8, 3))


class Writer(nn.Module):
    """Writes into a view of its input, and returns the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 0].mul_(3)
        return x


def test_a_module_that_writes_into_a_part_of_its_input() -> None:
    net = nn.Sequential(nn.Linear(3, 3), Writer(), nn.Linear(3, 1))
    x = torch.randn(4, 3)
    with collect(net, sites=["0:output*", "1:*"]) as seen:
        net(x).sum().backward()
    given = F.linear(x, net[0].weight, net[0].bias).detach().requires_grad_()
    factor = torch.tensor([3.0, 1.0, 1.0])
    F.linear(given * factor, net[2].weight).sum().backward()
    assert given.grad is not None
    assert_row(seen.one("1:input.x"), given)
    assert_row(seen.one("0:output.grad"), given.grad)
    assert_row(seen.one("1:input.x.grad"), given.grad)
    assert_row(seen.one("1:output"), given * factor)
    assert_row(seen.one("1:output.grad"), given.grad / factor)


def test_an_input_that_is_handed_on_has_the_gradient_of_the_output() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Dropout(0.0), nn.Linear(3, 1))
    with collect(net, sites=["*:input*", "*:output*"]) as seen:
        net(torch.ones(2, 3)).sum().backward()
    for path in ("1", "2"):
        assert_row(seen.one(f"{path}:input.input.grad"), net[3].weight.detach().expand(2, 3))
        assert_row(seen.one(f"{path}:output.grad"), net[3].weight.detach().expand(2, 3))


def test_a_branch_that_no_pass_runs_leaves_the_rest_right() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, x * 3

    net = nn.Sequential(nn.Linear(2, 2), Branches())
    with collect(net, sites="1:input*") as seen:
        left, right = net(torch.ones(1, 2))
        left.sum().backward(retain_graph=True)
        right.sum().backward(retain_graph=True)
        (left + right).sum().backward()
    for backward, factor in enumerate((2.0, 3.0, 5.0)):
        assert_row(seen.one("1:input.x.grad", backward=backward), torch.full((1, 2), factor))
