"""Rules on plain gradients: where they are, what they may not do, and what they leave behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.errors import RuleError
from retrograd.core.hooks import rewriters
from retrograd.rewriting.rules.rule import SiteState


def test_rules_act_one_after_the_other_and_are_told_where_they_are() -> None:
    layer, told = nn.Linear(2, 2), []

    def double(gradient: Tensor, state: SiteState) -> Tensor:
        told.append((state.site, state.step, state.call, state.training, gradient.tolist()))
        return gradient * 2

    with rg.rewrite(layer, {"self:output.grad": [rg.rules.Scale(3.0), double]}):
        for training in (True, False):
            layer.train(training)
            x = torch.ones(1, 2, requires_grad=True)
            (layer(x).sum() + layer(x).sum()).backward()
            torch.testing.assert_close(x.grad, 12 * layer.weight.detach().sum(0, keepdim=True))
    assert [each[1:4] for each in told] == [(0, 2, True), (0, 1, True), (0, 1, False), (0, 1, False)]
    assert all(each[0] == "self:output.grad" and each[4] == [[3.0, 3.0]] for each in told)


def returns(make: Callable[[Tensor], Any]) -> Callable[[Tensor, SiteState], Any]:
    return lambda gradient, state: make(gradient)


FAULTS = {
    "has returned a float64 tensor": returns(Tensor.double),
    "of shape (2,)": returns(lambda gradient: gradient[0]),
    "has returned int": returns(lambda gradient: 1),
    "has written into its argument": returns(Tensor.zero_),
    "has raised ZeroDivisionError": returns(lambda gradient: 1 // 0),
}


@pytest.mark.parametrize("said", FAULTS)
def test_faults_are_told_and_training_goes_on(said: str) -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    calls = [FAULTS[said], FAULTS[said], lambda gradient, state: None]
    with rg.rewrite(layer, {"self:output.grad": lambda gradient, state: calls.pop(0)(gradient, state)}):
        for _ in range(2):
            with pytest.raises(RuleError) as caught:
                layer(x).sum().backward()
            assert said in str(caught.value)
            assert "self:output.grad" in str(caught.value)
            assert isinstance(caught.value.__cause__, ZeroDivisionError) == ("ZeroDivision" in said)
        thread = threading.Thread(target=lambda: layer(x).sum().backward())  # the lock is free again
        thread.start()
        thread.join()
    assert not calls
    torch.testing.assert_close(layer.weight.grad, torch.ones(2, 2))


def test_what_is_no_fault_of_a_rule_passes() -> None:
    def stop(gradient: Tensor, state: SiteState) -> None:
        raise KeyboardInterrupt

    layer = nn.Linear(2, 2)
    with rg.rewrite(layer, {"self:output.grad": stop}), pytest.raises(KeyboardInterrupt):
        layer(torch.ones(1, 2)).sum().backward()


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


def test_listeners_are_told_and_loss_scales_taken_off() -> None:
    layer, seen = nn.Linear(2, 2), []

    class Listener:
        def intervened(self, module: Any, site: Any, rule: str, before: Tensor, after: Tensor) -> None:
            seen.append((module is layer, str(site), before.tolist(), after.tolist()))

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    listener = Listener()
    with rg.rewrite(layer, {"self:output.grad": lambda gradient, state: gradient.clamp(max=0.5)}):
        layer(torch.ones(1, 2)).sum().backward()
        rewriters.intervention_listeners.add(listener)
        try:
            layer(torch.ones(1, 2)).sum().backward()
        finally:
            rewriters.intervention_listeners.remove(listener)
        layer.zero_grad()
        scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
    assert seen == [(True, "self:output.grad", [[1.0, 1.0]], [[0.5, 0.5]])]
    torch.testing.assert_close(layer.weight.grad, 4 * torch.full((2, 2), 0.5))


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
