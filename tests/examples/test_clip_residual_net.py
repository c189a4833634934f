"""The layers' part of the gradient is clipped and the skip connection's is not, as in a net that is built that way."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import retrograd as rg
from tests.examples.scripts import load_script

script = load_script("clip_residual_net")


class ClipBackward(torch.autograd.Function):
    """Nothing forward; backward g · min(1, c / ‖g‖)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        norm = gradient.norm()
        return gradient * (script.MAX_NORM / norm) if norm > script.MAX_NORM else gradient


def clipped_block(self: Any, x: Tensor) -> Tensor:
    return x + self.body(ClipBackward.apply(x))


def train(steps: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = script.ResidualNet()
    hooks = script.OwnHooks(model)
    script.train(model, steps)
    return model, hooks


def test_it_trains_as_a_net_that_clips_in_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model, hooks = train(5)
    with rg.rewrite(model, {"blocks.*.body:input.input.grad": rg.rules.ClipNorm(script.MAX_NORM)}):
        script.train(model, 5)

    by_hand, their_hooks = train(5)
    monkeypatch.setattr(script.Block, "forward", clipped_block)
    script.train(by_hand, 5)
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    for number in range(4):
        torch.testing.assert_close(hooks.gradients[number], their_hooks.gradients[number])
        torch.testing.assert_close(hooks.bodies[number], their_hooks.bodies[number])
        assert hooks.bodies[number].norm() > script.MAX_NORM, "there was something to clip"


def test_the_owners_hooks_do_what_they_did_once_the_rule_is_gone() -> None:
    model, hooks = train(5)
    with rg.rewrite(model, {"blocks.*.body:input.input.grad": rg.rules.ClipNorm(script.MAX_NORM)}):
        model(torch.ones(2, 64)).sum()
    script.train(model, 5)
    by_hand, their_hooks = train(5)
    script.train(by_hand, 5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), by_hand.parameters(), strict=True))
    assert all(torch.equal(hooks.gradients[n], their_hooks.gradients[n]) for n in range(4))


def test_it_prints_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    script.main()
    lines = [[float(each) for each in re.findall(r"\d\.\d+", line)] for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3
    for whole, over_skip, clipped, before in lines:
        assert clipped == pytest.approx(script.MAX_NORM, rel=0.05)
        assert before > script.MAX_NORM
        assert abs(whole - over_skip) <= script.MAX_NORM + 2e-4
