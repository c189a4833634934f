"""Automatic mixed precision: what is recorded is what an unscaled run has, the scale beside it, skipped steps too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.core.recording.collector import Collector, collect


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def numbers(seen: Collector) -> list[tuple[object, ...]]:
    return [
        (row.step, row.micro, row.backward, row.phase, row.site, *sorted(map(repr, row.columns.values())))
        for row in seen.rows
    ]


def run(net: nn.Module, scaled: bool, micro_batches: int = 1) -> Collector:
    """Three steps, with and without a scaler; its growth changes the scale in between."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1, enabled=scaled)
    torch.manual_seed(1)
    with collect(net, histogram=False) as seen:
        for _ in range(3):
            for _ in range(micro_batches):
                loss = net(torch.randn(5, 3)).square().sum()
                scaler.scale(loss / micro_batches).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_are_exactly_those_of_an_unscaled_run(micro_batches: int) -> None:
    net = make_net()
    plain, scaled = run(copy.deepcopy(net), False, micro_batches), run(copy.deepcopy(net), True, micro_batches)
    assert numbers(scaled) == numbers(plain)
    losses = [[event.value for event in seen.events_of("loss")] for seen in (plain, scaled)]
    assert losses[0] == losses[1]
    scales = [event.value for event in scaled.events_of("scale")]
    assert scales == [2.0 ** (10 + step) for step in range(3) for _ in range(micro_batches)]
    assert {row.scale for row in scaled.rows if row.backward == 0 and row.step == 1} == {2.0**11}
    assert {row.scale for row in scaled.rows if row.backward == -1} == {1.0}
    assert not plain.events_of("scale")


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_are_recorded_as_such(fused: bool) -> None:
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with collect(net) as seen:
        for step in range(3):
            factor = float("inf") if step == 1 else 1.0
            scaler.scale(net(torch.randn(5, 3)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [event.moment.step for event in seen.events_of("update")] == [0, 2]
    assert [(event.moment.step, event.name) for event in seen.events_of("skipped")] == [(1, "Adam")]
    assert [event.value for event in seen.events_of("scale")] == [2.0**10, 2.0**10, 2.0**9]
    row = seen.one("2:output.grad", step=1)
    assert row.nonfinite == row.count
    updates = [row.step for row in seen.all("0:weight.update") if row.abs_max > 0]
    assert updates == [0, 2]


def test_a_scaler_that_is_switched_off_is_none() -> None:
    net = make_net()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with collect(net) as seen:
        scaler.scale(net(torch.randn(5, 3)).sum()).backward()
        scaler.step(optimizer)
    assert not seen.events_of("scale")
    assert {row.scale for row in seen.rows} == {1.0}
    assert len(seen.events_of("update")) == 1
