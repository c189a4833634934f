"""Kinks of a training run, held against what the script plants; and that looking changes nothing."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.history.facts import Kink, read_facts
from retrograd.core.history.history import History
from retrograd.core.recording.recorder import Recorder
from retrograd.explaining.facts.kink_watch import KinkWatch
from retrograd.explaining.findings.detectors.nonfinite import KinksInBackward
from retrograd.explaining.findings.explain import explain


class Root(nn.Module):
    """A root of what a ReLU gives: infinite slopes at its zeros, which the ReLU's backward masks."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.zeros.append(int((x == 0).sum()))
        return x.sqrt()


class Net(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.act(self.body(x)))
        return out


SQRT_LINE = inspect.getsourcelines(Root.forward)[1] + 3


def train(net: nn.Module, steps: int) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    kept = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        kept.append(loss.detach())
        with torch.no_grad():
            net(torch.zeros(3, 4))
    return [*kept, *(parameter.detach().clone() for parameter in net.parameters())]


def record(net: nn.Module, steps: int) -> History:
    history = History()
    recorder = Recorder(net, history, sources=[KinkWatch])
    recorder.attach()
    try:
        train(net, steps)
    finally:
        recorder.close()
    return history


def kinks_of(history: History) -> list[Kink]:
    return [fact for fact in read_facts(history.events) if isinstance(fact, Kink)]


def make(last: nn.Module) -> Net:
    torch.manual_seed(0)
    return Net(last)


def test_a_planted_kink_is_noted_with_module_and_line() -> None:
    root = Root()
    kinks = [each for each in kinks_of(record(make(root), 6)) if each.operation == "sqrt"]
    assert [(each.step, each.value) for each in kinks] == [(step, root.zeros[step]) for step in (0, 1, 2, 4)]
    first = kinks[0]
    assert (first.name, first.total) == ("last", 12)
    assert first.line == f"{__file__}:{SQRT_LINE}"
    assert first.node == "SqrtBackward0"
    assert not first.finite


def test_it_is_told_as_a_note() -> None:
    root = Root()
    history = record(make(root), 3)
    (finding,) = explain(history, detectors=[KinksInBackward()])
    assert finding.severity == "note"
    assert (finding.site, finding.step, finding.line) == ("last", 0, f"{__file__}:{SQRT_LINE}")
    assert f"sqrt is called at 0 for {root.zeros[0]} of 12 elements in last" in finding.message


class Emptied(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (0 * x).abs() + x


def test_what_is_finite_is_not_told_to_keep_away() -> None:
    (finding,) = explain(record(make(Emptied()), 6), detectors=[KinksInBackward()])
    assert "abs is called at 0" in finding.message
    assert finding.repair.startswith("see whether so many elements are meant to lie there")


class Clipped(nn.Module):
    """As in PPO: at the first pass over a batch the ratio is its clipped self, and values are those of before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        clipped = x + (x - x.detach()).clamp(-0.2, 0.2) * 0
        return torch.minimum(x, clipped) + torch.maximum(x, clipped)


@pytest.mark.parametrize(
    "last", [nn.Identity(), nn.Hardtanh(), nn.LayerNorm(4), Clipped()], ids=lambda each: type(each).__name__
)
def test_zeros_of_a_relu_are_nothing_to_tell(last: nn.Module) -> None:
    history = record(make(last), 6)
    findings = explain(history, detectors=[KinksInBackward()])
    assert not list(findings)


def test_without_looking_it_says_why_it_cannot_tell() -> None:
    (reason,) = explain(History(), detectors=[KinksInBackward()]).not_checked
    assert "retrograd explain SCRIPT" in reason.reason


def test_looking_changes_nothing() -> None:
    plain = train(make(nn.Dropout(0.3)), 8)
    net = make(nn.Dropout(0.3))
    history = History()
    recorder = Recorder(net, history, sources=[KinkWatch])
    recorder.attach()
    watched = train(net, 8)
    recorder.close()
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("on purpose")

    net = make(Fails())
    recorder = Recorder(net, History(), sources=[KinkWatch])
    recorder.attach()
    with pytest.raises(ValueError, match="on purpose"):
        net(torch.randn(3, 4))
    recorder.close()
    assert torch._C._len_torch_dispatch_stack() == 0
