"""``rg.watch``: tensors that are no module's output."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.errors import SiteSyntaxError
from tests.core.recording.collector import collect
from tests.core.recording.oracle import assert_row


class Scored(nn.Module):
    """Watches a tensor in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.scores: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            scores = rg.watch("scores", self.fc(x) * 2)
            if scores.requires_grad:
                scores.retain_grad()
            self.scores.append(scores)
            x = scores.tanh()
        return x


def test_a_watched_tensor_and_its_gradient_are_recorded_call_by_call() -> None:
    net = Scored()
    with collect(net) as seen:
        net(torch.randn(4, 3)).square().sum().backward()
    for name, tensor in zip(("watch/scores", "watch/scores#2"), net.scores, strict=True):
        assert tensor.grad is not None
        assert_row(seen.one(name), tensor)
        assert_row(seen.one(f"{name}.grad"), tensor.grad)


def test_it_returns_what_it_was_given_and_does_nothing_without_a_recording() -> None:
    tensor = torch.ones(2, requires_grad=True) * 1
    assert rg.watch("anything", tensor) is tensor
    assert not tensor._backward_hooks


def test_tensors_around_the_model_belong_to_its_step() -> None:
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with collect(net) as seen:
        for _ in range(3):
            x = rg.watch("x", torch.randn(4, 3))
            loss = rg.watch("loss", net(x).square().mean())
            loss.backward()
            optimizer.step()
    for name in ("watch/x", "watch/loss", "watch/loss.grad"):
        assert [(row.step, row.micro, row.phase) for row in seen.all(name)] == [(step, 0, "train") for step in range(3)]
    assert not list(seen.events_of("fault"))


def test_a_nest_of_tensors_is_watched_by_keys() -> None:
    net = nn.Linear(3, 3)
    with collect(net) as seen:
        h = net(torch.randn(4, 3))
        state = rg.watch("state", {"h": h * 2, "c": (h * 3, None)})
        (state["h"].sum() + state["c"][0].sum()).backward()
    assert_row(seen.one("watch/state:h"), state["h"])
    assert_row(seen.one("watch/state:c.0.grad"), torch.ones(4, 3))
    assert not seen.facts["faults"]


def test_watched_tensors_are_selected_like_others() -> None:
    net = nn.Linear(3, 3)
    with collect(net, sites=["watch/lo*", "self:output"]) as seen:
        rg.watch("logits", net(torch.ones(1, 3))).sum().backward()
        rg.watch("other", torch.ones(1))
    assert seen.sites() == ["self:output", "watch/logits", "watch/logits.grad"]
    with collect(net, sites="*:output") as seen:
        rg.watch("logits", net(torch.ones(1, 3)))
    assert seen.sites() == ["self:output"]


def test_phases_apply_to_watched_tensors() -> None:
    net = Scored()
    with collect(net) as seen:
        with torch.no_grad():
            net(torch.ones(1, 3))
            net(torch.ones(1, 3))
        with torch.inference_mode():
            net(torch.ones(1, 3))
    assert seen.one("watch/scores", phase="no_grad").calls == 2
    assert seen.one("watch/scores#2", phase="inference").calls == 1


@pytest.mark.parametrize("name", ["a:b", "a#2", "", "a.grad"])
def test_a_name_that_cannot_be_one_is_an_error_while_recording(name: str) -> None:
    net = nn.Linear(3, 3)
    with collect(net), pytest.raises(SiteSyntaxError):
        rg.watch(name, torch.ones(1))


def test_two_recordings_both_see_it() -> None:
    net = nn.Linear(3, 3)
    with collect(net) as first, collect(net, sites="watch/x") as second:
        rg.watch("x", torch.arange(3.0))
    assert first.one("watch/x").mean == second.one("watch/x").mean == 1.0
