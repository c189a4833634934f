"""Modules that are called several times in one micro-batch: shared, recurrent, in place."""

from __future__ import annotations

import torch
from torch import nn

from tests.core.recording.collector import collect
from tests.core.recording.oracle import assert_row, listen


class Recurrent(nn.Module):
    """A cell that is called once a time step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        h = x
        for _ in range(steps):
            h = self.cell(h).tanh()
        return h


def test_calls_beyond_the_hundredth_merge_and_that_is_said_once() -> None:
    net = Recurrent()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with listen(net) as oracle, collect(net, sites="cell:output*") as seen:
        for _ in range(2):
            net(torch.randn(2, 4), 103).sum().backward()
            optimizer.step()
    assert_row(seen.one("cell#99:output", step=0), oracle.values["cell"][98])
    assert_row(seen.one("cell#100:output", step=0), *oracle.values["cell"][99:103])
    assert_row(seen.one("cell#100:output.grad", step=1), *(grads[0] for grads in oracle.gradients["cell"][103 + 99 :]))
    assert "cell#101:output" not in seen.names
    assert [(event.name, event.moment.step) for event in seen.events_of("note")] == [("cell#100:output", 0)]


def test_a_view_that_is_written_to_later_keeps_what_it_was() -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :2]

    net = nn.Sequential(nn.Linear(3, 4), Half())
    x = torch.randn(5, 3)
    with collect(net) as seen:
        out = net(x)
        value = out.detach().clone()
        out.mul_(3)  # renews the history of the view and of its base
        out.sum().backward()
    assert_row(seen.one("1:output"), value)
    assert_row(seen.one("0:output.grad"), torch.tensor([3.0, 3.0, 0.0, 0.0]).expand(5, 4))
    reasons = {item["site"]: item["reason"] for item in seen.facts["not_recorded"]}
    assert "no gradient came" in reasons["1:output.grad"]  # no node of the graph has it any more
