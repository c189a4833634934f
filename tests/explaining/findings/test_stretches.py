"""Where the models change that a run trains, and what is said of losses then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.history.history import History
from retrograd.core.launch.live_findings import DIVERGED, LiveFindings
from retrograd.core.recording.recorder import Recorder
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.record import Record
from retrograd.explaining.findings.stretches import Stretch, find_stretches, list_parts

HELD = {"A": ("a:weight",), "A2": ("a:weight", "a:bias"), "B": ("b:weight",), "C": ("c:weight",), "unknown": ()}


def turns(*names: str) -> list[tuple[int, str]]:
    """An update a letter; those of a word are of one step."""
    return [
        (step, {"a": "A", "2": "A2", "b": "B", "c": "C"}[letter]) for step, word in enumerate(names) for letter in word
    ]


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        (turns("a", "a", "a"), [(0, None, "A A2", False)]),
        (turns("a", "a", "2", "2"), [(0, None, "A A2", False)]),  # another optimizer of the same parameters
        (turns("a", "a", "b", "b", "c"), [(0, 2, "A A2", False), (2, 4, "B", False), (4, None, "C", False)]),
        (turns("ab", "ab", "ab"), [(0, None, "A A2 B", False)]),
        (turns("a", "a", "ab", "a", "a", "ab"), [(0, None, "A A2 B", False)]),  # a critic with five updates
        (turns("a", "b", "a", "b"), [(0, None, "A A2 B", True)]),  # members of an ensemble, in turn
        (turns("a", "b", "a", "c", "c"), [(0, 3, "A A2 B", True), (3, None, "C", False)]),
        ([], []),
    ],
)
def test_find_stretches(updates: list[tuple[int, str]], expected: Sequence[tuple[int, int | None, str, bool]]) -> None:
    found = find_stretches(HELD, updates)
    assert found == [Stretch(first, end, frozenset(names.split()), mixed) for first, end, names, mixed in expected]


def fit(net: nn.Module, optimizer: torch.optim.Optimizer, scale: float, steps: int) -> list[float]:
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (net(x) - scale * x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make() -> nn.Linear:
    net = nn.Linear(3, 1)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


Train = Callable[[nn.Module, nn.Module], object]


def one_after_the_other(a: nn.Module, b: nn.Module) -> None:
    fit(a, torch.optim.Adam(a.parameters(), 0.1), 1.0, 20)
    fit(b, torch.optim.Adam(b.parameters(), 0.05), 100.0, 20)


def in_turn(a: nn.Module, b: nn.Module) -> None:
    optimizers = torch.optim.Adam(a.parameters(), 0.1), torch.optim.Adam(b.parameters(), 0.05)
    for _ in range(20):
        fit(a, optimizers[0], 1.0, 1)
        fit(b, optimizers[1], 100.0, 1)


@pytest.mark.parametrize("train", [one_after_the_other, in_turn])
def test_losses_of_two_models_are_no_series(train: Train) -> None:
    """Each loss falls at every step; the second begins where the first has never been."""
    a, b = make(), make()
    with rg.record({"a": a, "b": b}) as recording:
        train(a, b)
    record = Record(recording.history)
    values = record.loss.values
    assert (values[0::2].max() < values[1::2].min()) if train is in_turn else values[:20].max() < values[20:].min()
    found = rg.explain(recording.history)
    assert not [each for each in found if each.detector in ("diverged", "learning-rate-too-high", "loss-spike")]
    reasons = {each.detector: each.reason for each in found.not_checked}
    assert ("trained in turn" in reasons.get("diverged", "")) == (train is in_turn)


def test_a_loss_that_another_model_begins_with_is_not_said_at_once_to_have_diverged() -> None:
    a, b = make(), make()
    told: list[Finding] = []
    recorder = Recorder({"a": a, "b": b}, History())
    recorder.attach()
    LiveFindings(recorder.events, told.append)
    first = fit(a, torch.optim.Adam(a.parameters(), 0.1), 1.0, 25)
    second = fit(b, torch.optim.Adam(b.parameters(), 0.05), 1000.0, 10)
    assert min(second) > DIVERGED * max(first)
    assert not told
    recorder.close()


def test_what_is_wrong_with_one_of_them_is_still_said() -> None:
    nets = [make() for _ in range(3)]
    with rg.record(dict(zip("abc", nets, strict=True))) as recording:
        losses = [
            fit(net, torch.optim.SGD(net.parameters(), lr), 1.0, 15)
            for net, lr in zip(nets, (0.1, 3.0, 0.1), strict=True)
        ]
    assert losses[1][-1] > 100 * losses[1][0]
    parts = list_parts(Record(recording.history))
    assert [part.loss.values.tolist() for part in parts] == [pytest.approx(each) for each in losses]
    [found] = [each for each in rg.explain(recording.history) if each.detector == "learning-rate-too-high"]
    assert found.step in range(15, 30)
    assert found.last_step == 29
    assert "3 is too high" in found.message


def test_a_model_that_is_trained_by_itself_is_one_stretch() -> None:
    net = make()
    with rg.record(net) as recording:
        fit(net, torch.optim.Adam(net.parameters(), 0.1), 1.0, 5)
        fit(net, torch.optim.SGD(net.parameters(), 0.01), 1.0, 5)
    record = Record(recording.history)
    assert len(record.optimizers) == 2
    assert list_parts(record) == [record]
