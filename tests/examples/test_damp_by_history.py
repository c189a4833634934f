"""Damping by the past is what a bare hook with a number of its own does; it goes on after a restart."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from torch import Tensor

import retrograd as rg
from tests.examples.scripts import load_script

script = load_script("damp_by_history")


class DampingByHand:
    """The same on a bare hook, in Python's own floats: m ← 0.9 m + 0.1 ‖g‖, corrected as Adam corrects."""

    def __init__(self) -> None:
        self.total = self.weight = 0.0
        self.shares: dict[int, float] = {}
        self.step = 0

    def __call__(self, gradient: Tensor) -> Tensor | None:
        norm = gradient.double().norm().item()
        limit = 2 * self.total / self.weight if self.weight else math.inf
        scale = min(1.0, limit / norm)
        self.total, self.weight = 0.9 * self.total + 0.1 * norm * scale, 0.9 * self.weight + 0.1
        if scale < 1:
            self.shares[self.step] = 1 - scale
        self.step += 1
        return gradient * scale


def train_by_hand() -> tuple[torch.nn.Module, DampingByHand]:
    torch.manual_seed(0)
    model, damping = script.Classifier(), DampingByHand()
    model.fc1.register_forward_hook(lambda module, args, output: output.register_hook(damping) and None)
    script.train(model)
    return model, damping


def test_it_trains_as_a_bare_hook_does() -> None:
    torch.manual_seed(0)
    model = script.Classifier()
    with (
        rg.record(model, sites=[script.SITE]) as recording,
        rg.rewrite(model, {script.SITE: script.DampByHistory()}),
    ):
        script.train(model)
    by_hand, damping = train_by_hand()
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    acts = {event.moment.step: event.value for event in recording.history.events if event.kind == "rewrite"}
    assert acts.keys() == damping.shares.keys()
    assert list(acts.values()) == pytest.approx(list(damping.shares.values()), rel=1e-3)
    assert list(acts) == [9, 19, 29, 39, 49, 59]


def test_it_goes_on_with_the_same_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = list(script.make_batches(60))
    models = []
    for cuts in ([0, 60], [0, 25, 60]):
        torch.manual_seed(0)
        model, saved = script.Classifier(), None
        for begin, end in itertools.pairwise(cuts):
            monkeypatch.setattr(script, "make_batches", lambda count, part=batches[begin:end]: part)
            with rg.rewrite(model, {script.SITE: script.DampByHistory()}) as rewriting:
                if saved is not None:
                    rewriting.load_state_dict(saved)
                script.train(model)
                saved = rewriting.state_dict()
        models.append(model)
    whole, in_two = models
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), in_two.parameters(), strict=True))


def test_it_prints_when_and_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    script.main()
    printed = capsys.readouterr().out
    _, damping = train_by_hand()
    assert "damped in 6 of 60 steps" in printed
    shares = {int(step): float(share) for step, share in re.findall(r"step +(\d+): ([\d.]+)%", printed)}
    assert shares == {step: pytest.approx(100 * share, abs=0.1) for step, share in damping.shares.items()}
