"""What modules return, and its gradients: whole, nested, several calls."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

from tests.core.recording.collector import collect
from tests.core.recording.oracle import assert_row, listen


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    return nn.Sequential(nn.Linear(3, 4), block, nn.LayerNorm(4), nn.Linear(4, 1))


def test_only_what_is_selected_is_recorded() -> None:
    net = make_net()
    with collect(net, sites=["1.*:output", "3:weight.grad"]) as seen:
        net(torch.randn(5, 3)).sum().backward()
    assert sorted(seen.sites()) == ["1.0:output", "1.1:output", "1.2:output", "3:weight.grad"]
    assert sorted(seen.names) == sorted(seen.sites())


def test_gradients_can_be_recorded_without_values() -> None:
    net = make_net()
    with listen(net) as oracle, collect(net, sites="*:output.grad") as seen:
        net(torch.randn(5, 3)).square().sum().backward()
    for path in oracle.values:
        assert_row(seen.one(f"{path}:output.grad"), oracle.gradients[path][0][0])


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Boxed:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    note: str = "not a tensor"


@dataclass
class Answer(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class Two(nn.Module):
    """Returns twice and thrice its input in some nest."""

    def __init__(self, nest: Any) -> None:
        super().__init__()
        self.nest = nest

    def forward(self, x: torch.Tensor) -> Any:
        return self.nest(x * 2, x * 3)


NESTS = {
    "tuple": (lambda a, b: (a, b), ["output.0", "output.1"]),
    "list in tuple": (lambda a, b: (None, [a, "text", b]), ["output.1.0", "output.1.2"]),
    "named tuple": (Pair, ["output.left", "output.right"]),
    "dict": (lambda a, b: {"a": a, "b": {"c.d": b}}, ["output.a", 'output.b."c.d"']),
    "dict with odd keys": (lambda a, b: {0: a, "grad": b}, ["output.0", 'output."grad"']),
    "ordered dict": (lambda a, b: OrderedDict(a=a, b=b), ["output.a", "output.b"]),
    "dataclass": (lambda a, b: Boxed(a, [b]), ["output.logits", "output.hidden.0"]),
    "ModelOutput": (lambda a, b: Answer(logits=a, attentions=(b,)), ["output.logits", "output.attentions.0"]),
}


@pytest.mark.parametrize("nest", NESTS)
def test_leaves_of_nested_outputs_are_recorded_by_their_keys(nest: str) -> None:
    wrap, slots = NESTS[nest]
    taken: list[torch.Tensor] = []

    def remember(a: torch.Tensor, b: torch.Tensor) -> Any:
        for tensor in (a, b):
            tensor.retain_grad()
            taken.append(tensor)
        return wrap(a, b)

    net = nn.Sequential(nn.Linear(3, 3), Two(remember))
    with collect(net) as seen:
        net(torch.randn(2, 3))
        (taken[0].square().sum() + taken[1].exp().sum()).backward()
    for slot, tensor in zip(slots, taken, strict=True):
        assert tensor.grad is not None
        assert_row(seen.one(f"1:{slot}"), tensor)
        assert_row(seen.one(f"1:{slot}.grad"), tensor.grad)
    assert {name for name in seen.names if name.startswith("1:")} == {
        text for slot in slots for text in (f"1:{slot}", f"1:{slot}.grad")
    }


def test_a_nest_that_holds_itself_ends() -> None:
    def loop(a: torch.Tensor, b: torch.Tensor) -> Any:
        items: list[Any] = [a, b] * 5
        items += [items] * 10
        return items

    with collect(nn.Sequential(nn.Linear(3, 3), Two(loop))) as seen:
        pass
    net = Two(loop)
    with collect(net) as seen:
        net(torch.randn(2, 3))
    assert seen.one("self:output.0").count == 6


def test_a_leaf_of_a_nested_output_can_be_selected() -> None:
    net = nn.Sequential(nn.Linear(3, 3), Two(lambda a, b: {"a": a, "b": b}))
    with collect(net, sites=["1:output.b", "1:output.*.grad"]) as seen:
        out = net(torch.randn(2, 3))
        (out["a"].sum() + out["b"].sum()).backward()
    assert sorted(seen.sites()) == ["1:output.a.grad", "1:output.b", "1:output.b.grad"]


def test_an_output_may_change_its_nest_from_call_to_call() -> None:
    nests = iter([lambda a, b: a, lambda a, b: (a, b), lambda a, b: b, lambda a, b: {"a": a}])

    def wrap(a: torch.Tensor, b: torch.Tensor) -> Any:
        return next(nests)(a, b)

    net = Two(wrap)
    with collect(net) as seen:
        held = [net(torch.ones(2, requires_grad=True)) for _ in range(4)]
    assert len(held) == 4  # until here a pass could have come to each of them
    assert [row.site for row in seen.rows if row.phase == "forward" and row.backward == -1] == [
        "self:output",
        "self#2:output.0",
        "self#2:output.1",
        "self#3:output",
        "self#4:output.a",
    ]


def test_modules_that_return_no_tensor_are_recorded_around() -> None:
    for nothing in (None, 3, "text", [], {}, object(), (None, 1.5)):
        net = nn.Sequential(nn.Linear(3, 3), Two(lambda a, b, nothing=nothing: nothing))
        with collect(net) as seen:
            net(torch.randn(2, 3))
        assert seen.sites() == ["0:output"]
        assert not seen.facts["faults"]
        assert {"site": "1:output", "reason": "no tensor was returned"} in seen.facts["not_recorded"]


def test_the_order_of_sites_is_that_of_calls() -> None:
    net = make_net()
    with collect(net, sites="*:output") as seen:
        net(torch.randn(5, 3)).sum().backward()
    assert seen.names == [f"{path}:output" for path in ("0", "1.0", "1.1", "1.2", "1", "2", "3", "self")]


def test_several_models_have_their_names_in_front() -> None:
    left, right = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1))
    with collect({"left": left, "right": right}, sites="*:output") as seen:
        right(left(torch.ones(1, 2))).sum().backward()
    assert seen.sites() == ["left:output", "right.0:output", "right:output"]
