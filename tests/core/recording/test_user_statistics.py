"""Statistics of users: computed for every recorded tensor, merged as asked, where the tensors are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import retrograd as rg
from tests.core.recording.collector import collect
from tests.core.recording.oracle import listen


def median(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().median()


@rg.statistic(merge="max")
def largest_row(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(len(tensor), -1).norm(dim=1).max()


def make_net() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def test_values_are_those_of_the_function() -> None:
    net, optimizer = make_net()
    with listen(net) as oracle, collect(net, statistics=[median, largest_row]) as seen:
        for _ in range(2):
            net(torch.randn(5, 3)).square().sum().backward()
            optimizer.step()
    for path in ("0", "1", "self"):
        for step in range(2):
            value, gradient = oracle.values[path][step], oracle.gradients[path][step][0]
            for row, tensor in (
                (seen.one(f"{path}:output", step=step), value),
                (seen.one(f"{path}:output.grad", step=step), gradient),
            ):
                assert row.median == pytest.approx(median(tensor).item())
                assert row.largest_row == pytest.approx(largest_row(tensor).item())
    assert seen.facts["statistics"] == {"median": "mean", "largest_row": "max"}
    assert not seen.facts["faults"]


def test_several_tensors_of_a_record_merge() -> None:
    net, _ = make_net()
    with collect(net, statistics=[median, largest_row]) as seen, torch.no_grad(), listen(net) as oracle:
        for _ in range(3):
            net(torch.randn(5, 3))
    values = oracle.values["0"]
    row = seen.one("0:output", phase="no_grad")
    assert row.median == pytest.approx(sum(median(value).item() for value in values) / 3)
    assert row.largest_row == pytest.approx(max(largest_row(value).item() for value in values))


def test_one_that_raises_takes_nothing_from_the_others() -> None:
    def picky(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (5, 4):
            raise ValueError("not this shape")
        return tensor.sum()

    net, _ = make_net()
    with (
        collect(net, statistics=[median, picky], sites="*:output") as seen,
        pytest.warns(UserWarning, match="not this shape"),
        listen(net) as oracle,
        torch.no_grad(),
    ):
        for size in (5, 2, 5, 3):
            net(torch.randn(size, 3))
    values = oracle.values["0"]
    row = seen.one("0:output")
    assert row.calls == 4
    assert row.median == pytest.approx(sum(median(value).item() for value in values) / 4)
    assert row.picky == pytest.approx((values[1].sum() + values[3].sum()).item() / 2, rel=1e-5)


def test_updates_and_unreadable_tensors_have_none() -> None:
    net, optimizer = make_net()
    with collect(net, statistics=[median]) as seen:
        net(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    assert math.isnan(seen.one("0:weight.update").median)
    assert seen.one("0:weight.grad").median == pytest.approx(net[0].weight.grad.median().item())  # type: ignore[union-attr]


@rg.statistic(merge="max")
def largest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs().max()


@rg.statistic(merge="sum")
def total(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs().sum()


@pytest.mark.parametrize("stored", [False, True])
def test_statistics_of_a_users_own_merge_over_micro_batches(tmp_path: Path, stored: bool) -> None:
    net = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    batches = [torch.randn(5, 3) * scale for scale in (1.0, 3.0, 2.0)]
    statistics = [largest, total, median]
    with rg.record(net, tmp_path / "run" if stored else None, sites="self:output", statistics=statistics) as recording:
        for batch in batches:
            net(batch).sum().backward()
        optimizer.step()
    with torch.no_grad():
        outputs = [net(batch) for batch in batches]

    series = recording.history["self:output"]

    assert len(series.steps) == 1
    assert series.statistic("largest") == pytest.approx([max(float(output.abs().max()) for output in outputs)])
    assert series.statistic("total") == pytest.approx([sum(float(output.abs().sum()) for output in outputs)])
    assert series.statistic("median") == pytest.approx([sum(float(output.median()) for output in outputs) / 3])


def test_a_statistic_cannot_take_the_name_of_a_column() -> None:
    with pytest.raises(rg.RetrogradError, match="'step'"):
        rg.record(nn.Linear(2, 2), statistics=[rg.statistic(name="step")(torch.mean)])
