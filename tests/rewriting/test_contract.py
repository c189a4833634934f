"""What a rule may not do: one clear error that names rule and site, and training in order after it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.errors import CannotRewriteError, RetrogradError, RuleError
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests.rewriting.models import assert_same, gradients, halve, make_net

SITES = ["1:output", "1:output.grad", "2:input.input", "2:input.input.grad", "2:weight", "2:weight.grad"]


def wrong_shape(value: Tensor, state: SiteState) -> Tensor:
    return value[:1]


def broadcastable(value: Tensor, state: SiteState) -> Tensor:
    return value.unsqueeze(0)


def wrong_dtype(value: Tensor, state: SiteState) -> Tensor:
    return value.double()


def wrong_device(value: Tensor, state: SiteState) -> Tensor:
    return value.to("meta")


def no_tensor(value: Tensor, state: SiteState) -> Any:
    return 3.0


def a_tuple(value: Tensor, state: SiteState) -> Any:
    return (value,)


def writes(value: Tensor, state: SiteState) -> Tensor:
    with torch.no_grad():
        return value.mul_(2)


def writes_in_silence(value: Tensor, state: SiteState) -> None:
    with torch.no_grad():
        value[0] = 0


def writes_through_a_view(value: Tensor, state: SiteState) -> Tensor:
    with torch.no_grad():
        value.detach().flatten().zero_()
    return value * 1


def fails(value: Tensor, state: SiteState) -> Tensor:
    raise KeyError("nothing")


FAULTS = {
    wrong_shape: "shape",
    broadcastable: "shape",
    wrong_dtype: "float64",
    wrong_device: "meta",
    no_tensor: "float",
    a_tuple: "tuple",
    writes: "written into its argument",
    writes_in_silence: "written into its argument",
    writes_through_a_view: "written into its argument",
    fails: "KeyError",
}


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_error_names_rule_and_site(fault: Any, site: str) -> None:
    net, x = make_net(), torch.randn(5, 3)
    before = {name: each.clone() for name, each in net.named_parameters()}
    rewriting = rewrite(net, {site: [halve, fault]})
    with pytest.raises(RuleError) as caught:
        net(x).square().sum().backward()
    message = str(caught.value)
    assert fault.__name__ in message
    assert site in message
    assert FAULTS[fault] in message
    assert caught.value.slug == "bad-rule"
    if fault is fails:
        assert isinstance(caught.value.__cause__, KeyError)
        assert caught.value.__cause__.__traceback__ is not None
    rewriting.remove()
    with torch.no_grad():
        for name, each in net.named_parameters():
            each.copy_(before[name])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert not any(parameter._backward_hooks for parameter in net.parameters())
    assert not any("weight" in vars(module) for module in net.modules())
    net.zero_grad()
    net(x).square().sum().backward()
    found = gradients(net)
    fresh = make_net()
    fresh(x).square().sum().backward()
    assert_same(found, gradients(fresh))


@pytest.mark.parametrize("site", SITES)
def test_a_step_after_the_error_is_as_if_it_had_not_been(site: str) -> None:
    """The rule stays, and fails once."""
    net, x = make_net(), torch.randn(5, 3)
    failing = [True]

    def once(value: Tensor, state: SiteState) -> Tensor:
        assert state.call == 1
        if failing.pop() if failing else False:
            raise ValueError("once")
        return value * 0.5

    with rewrite(net, {site: once}):
        with pytest.raises(RuleError, match="once"):
            net(x).square().sum().backward()
        net.zero_grad()
        thread = threading.Thread(target=lambda: net(x).square().sum().backward())  # no lock is held any more
        thread.start()
        thread.join()
    found = gradients(net)
    fresh = make_net()
    with rewrite(fresh, {site: halve}):
        fresh(x).square().sum().backward()
    assert_same(found, gradients(fresh))


def test_nothing_is_kept_alive_by_the_error() -> None:
    net = make_net()
    refs: list[weakref.ref[Tensor]] = []

    def fail(value: Tensor, state: SiteState) -> Tensor:
        refs.append(weakref.ref(value))
        raise ValueError

    gc.disable()
    try:
        with rewrite(net, {"1:output.grad": fail}):
            out = net(torch.randn(5, 3))
            refs.append(weakref.ref(out))
            try:
                out.sum().backward()
            except RuleError:
                caught = True
            del out
            assert caught
            assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_keyboard_interrupt_passes() -> None:
    def stop(value: Tensor, state: SiteState) -> Tensor:
        raise KeyboardInterrupt

    net, x = make_net(), torch.randn(5, 3)
    with rewrite(net, {"1:output": stop}), pytest.raises(KeyboardInterrupt):
        net(x)
    with rewrite(net, {"1:output.grad": stop}), pytest.raises(KeyboardInterrupt):
        net(x).sum().backward()


def test_an_error_of_ours_in_a_rule_keeps_its_words() -> None:
    def refuse(value: Tensor, state: SiteState) -> Tensor:
        raise CannotRewriteError("A rule within a rule.")

    net = make_net()
    with rewrite(net, {"1:output": refuse}), pytest.raises(RetrogradError, match="A rule within a rule") as caught:
        net(torch.randn(5, 3))
    assert "1:output" in str(caught.value)


class Returns(Rule):
    """A rule that hands back views and expansions, which are all right."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        if self.way == "expanded":
            return value.mean().expand_as(value)
        if self.way == "transposed":
            return (value * 2).t().contiguous().t()
        if self.way == "detached":
            return value.detach()
        return value[...]


@pytest.mark.parametrize("way", ["expanded", "transposed", "detached", "view"])
@pytest.mark.parametrize("site", ["1:output.grad", "2:weight.grad"])
def test_views_and_strides_are_free(way: str, site: str) -> None:
    net, x = make_net(), torch.randn(5, 3)
    with rewrite(net, {site: Returns(way)}):
        for _ in range(2):
            net(x).square().sum().backward()
    found = gradients(net)
    net.zero_grad()
    rule, state = Returns(way), SiteState("")

    def by_hand(gradient: Tensor) -> Tensor:
        return rule(gradient, state).clone()

    for _ in range(2):
        h = net[1](net[0](x))
        if site == "1:output.grad":
            h.register_hook(by_hand)
            net[2:](h).square().sum().backward()
        else:
            handle = net[2].weight.register_hook(by_hand)
            net[2:](h).square().sum().backward()
            handle.remove()
    for name, each in gradients(net).items():
        torch.testing.assert_close(found[name], each)


def test_gradients_of_inference_mode_and_of_subclasses() -> None:
    class Marked(Tensor):
        pass

    layer = nn.Linear(2, 2)
    with torch.inference_mode():
        given = torch.ones(1, 2)
    with rg.rewrite(layer, {"self:output.grad": lambda gradient, state: gradient * 2}):
        for gradient in (given, torch.ones(1, 2).as_subclass(Marked)):
            out = layer(torch.ones(1, 2))
            layer.zero_grad()
            torch.autograd.backward(out, gradient)
            torch.testing.assert_close(layer.weight.grad, 2 * torch.ones(2, 2), check_dtype=False)


def test_nothing_acts_after_the_block_and_nothing_is_held() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    rule = rg.rules.Scale(0.0)
    gc.collect()
    gc.disable()
    try:
        with rg.rewrite(layer, {"self:output.grad": rule}):
            loss = layer(x).sum()
        loss.backward()
        torch.testing.assert_close(layer.weight.grad, torch.ones(2, 2))
        found = weakref.ref(rule), weakref.ref(layer)
        del rule, layer, loss
        assert [each() for each in found] == [None, None]
    finally:
        gc.enable()
