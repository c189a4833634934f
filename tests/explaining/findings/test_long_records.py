"""A record longer than memory is explained as a short one is: no column of it is held, and windows have seams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.limits import LIMITS
from retrograd.core.runs import stored
from retrograd.core.runs.findings import Findings


class Recurrent(nn.Module):
    """One cell that is called again and again, so that gradients vanish over its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.squash, self.head = nn.RNNCell(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(len(x), 8)
        for _ in range(6):
            state = torch.sigmoid(self.squash(self.cell(x, state)))
        return self.head(state)


def make_dead() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    nn.init.constant_(model[0].bias, -50.0)
    return model


def make_rounding() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32, momentum=1.0), nn.Tanh(), nn.Linear(32, 2)).bfloat16()


def make_multiplied() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].register_forward_hook(lambda layer, given, out: Multiplied.apply(out))
    return model


class Multiplied(torch.autograd.Function):
    """Gives the gradient on fifty times."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 50


def make_blocks(blocks: int) -> nn.Module:
    layers = [(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(blocks)]
    return nn.Sequential(*(layer for block in layers for layer in block), nn.Linear(8, 2))


def record(path: Path, model: nn.Module, micro: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    kind = next(model.parameters()).dtype
    with rg.record(model, path=path) as recording:
        for step in range(12):
            optimizer.zero_grad()
            for _ in range(micro):
                data = torch.randn(16, 8)
                nn.functional.cross_entropy(model(data.to(kind)).float(), (data[:, 0] > 0).long()).backward()
                if step % 3 == 1:
                    recording.flush()  # in the middle of a step: its rows are in two files
            optimizer.step()


def tell(found: Findings) -> tuple[list[str], list[str]]:
    return [each.as_json() for each in found], [str(each) for each in found.not_checked]


@pytest.mark.parametrize(
    ("make", "micro", "slug"),
    [
        (Recurrent, 2, "vanishing"),
        (make_dead, 1, "dead-units"),
        (make_rounding, 1, "bf16-update-lost"),
        (partial(make_blocks, 3), 2, "accumulation-not-divided"),
        (make_multiplied, 1, "hooks-scale"),
    ],
)
@pytest.mark.parametrize(("most", "at_once"), [(25, 25), (1 << 19, 7)])
@pytest.mark.filterwarnings("ignore::retrograd.core.errors.RetrogradWarning")
def test_findings_are_those_of_a_short_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module],
    micro: int,
    slug: str,
    most: int,
    at_once: int,
) -> None:
    torch.manual_seed(0)
    record(tmp_path / "run", make(), micro)
    expected = tell(rg.explain(tmp_path / "run"))
    assert slug in "".join(expected[0])
    monkeypatch.setattr(LIMITS, "held_rows", 0)
    monkeypatch.setattr(LIMITS, "merged_cells", most)
    monkeypatch.setattr(LIMITS, "cells_at_once", at_once)
    monkeypatch.setattr(LIMITS, "held_events", 0)
    assert tell(rg.explain(tmp_path / "run")) == expected


def test_windows_end_where_files_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run of one process no rows are read twice, though not all fit into a window."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    with rg.record(model, path=tmp_path / "run") as recording:
        for step in range(30):
            model(torch.randn(4, 8)).square().mean().backward()
            if step % 3 == 1:
                recording.flush()
    run = rg.open_run(tmp_path / "run")
    whole = run.history.matrix("rms")
    files = len(list(tmp_path.glob("run/*/statistics/*.parquet")))
    monkeypatch.setattr(LIMITS, "held_rows", 0)
    monkeypatch.setattr(LIMITS, "merged_cells", 8 * len(whole.sites))
    read, original = list[Sequence[int]](), stored.StoredRows._read_groups

    def read_group(part: stored.StoredRows, number: Sequence[int], *names: object) -> object:
        read.append(number)
        return original(part, number, *names)

    monkeypatch.setattr(stored.StoredRows, "_read_groups", read_group)
    found = rg.open_run(tmp_path / "run").history.matrix("rms")
    assert found.steps.tolist() == whole.steps.tolist()
    np.testing.assert_allclose(found.values, whole.values, rtol=1e-12)
    assert len(read) == files > 8


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often row groups of each run were read, by the name of its folder; all runs are long."""
    original, counts = stored.StoredRows._read_groups, Counter[str]()

    def read_group(part: stored.StoredRows, number: Sequence[int], *names: object) -> object:
        counts[part.path.parents[2].name] += 1
        return original(part, number, *names)

    monkeypatch.setattr(LIMITS, "held_rows", 0)
    monkeypatch.setattr(LIMITS, "merged_cells", 1)  # one step after the other
    monkeypatch.setattr(stored.StoredRows, "_read_groups", read_group)
    return counts


def test_a_model_of_more_layers_is_not_read_more_often(tmp_path: Path, times: Counter[str]) -> None:
    """Of all sites of a kind rows are asked for at once."""
    for blocks in (3, 12):
        torch.manual_seed(0)
        record(tmp_path / f"of-{blocks}", make_blocks(blocks))
        rg.explain(tmp_path / f"of-{blocks}")
    assert times["of-3"] == times["of-12"] > 0


def test_a_table_takes_one_pass(tmp_path: Path, times: Counter[str]) -> None:
    record(tmp_path / "run", make_blocks(3))
    rg.open_run(tmp_path / "run").history.matrix("rms")
    once = times.pop("run")
    rg.format_table(tmp_path / "run")
    assert times["run"] == once


@pytest.mark.filterwarnings("ignore::retrograd.core.errors.RetrogradWarning")
def test_sites_that_are_read_together_are_as_each_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    record(tmp_path / "run", Recurrent(), 2)
    whole = rg.open_run(tmp_path / "run").history
    monkeypatch.setattr(LIMITS, "held_rows", 0)
    monkeypatch.setattr(LIMITS, "merged_cells", 1)
    some = rg.open_run(tmp_path / "run").history.only(whole.sites[:9], histograms=True)
    for site in whole.sites[:9]:
        assert some[site].steps.tolist() == whole[site].steps.tolist()
        assert some[site].calls == whole[site].calls
        for name in ("rms", "count", "zero_share"):
            np.testing.assert_array_equal(some[site].statistic(name), whole[site].statistic(name))
        for name, column in whole[site].rows.items():
            np.testing.assert_array_equal(some[site].rows[name], column)
        np.testing.assert_array_equal(some[site].exponents[1], whole[site].exponents[1])
    with pytest.raises(KeyError, match="bin_count"):
        rg.open_run(tmp_path / "run").history.only(whole.sites[:1])[whole.sites[0]].exponents  # noqa: B018
