"""Users' statistics merge over calls and micro-batches as they were asked to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import retrograd as rg


@rg.statistic(merge="max")
def largest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs().max()


@rg.statistic(merge="sum")
def total(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs().sum()


def middle(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.median()


@pytest.mark.parametrize("stored", [False, True])
def test_statistics_of_a_users_own_merge_over_micro_batches(tmp_path: Path, stored: bool) -> None:
    net = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    batches = [torch.randn(5, 3) * scale for scale in (1.0, 3.0, 2.0)]
    statistics = [largest, total, middle]
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
    assert series.statistic("middle") == pytest.approx([sum(float(output.median()) for output in outputs) / 3])


def test_a_statistic_cannot_take_the_name_of_a_column() -> None:
    with pytest.raises(rg.RetrogradError, match="'step'"):
        rg.record(nn.Linear(2, 2), statistics=[rg.statistic(name="step")(torch.mean)])
