"""What updates changed, added up window after window, against whole tables that are held."""

from __future__ import annotations

import numpy as np
import pytest

from retrograd.core.history.rows import Rows
from retrograd.core.history.windows import Cells, MergedRows
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.update_norms import FIRST, TOLD, UpdateNorms
from tests.explaining.findings.by_hand import make_record, spread

PARAMETERS = ("0:weight", "0:bias", "2:weight")
STEPS = 24


class Tables:
    """‖Δw‖, ‖w‖ and ‖g‖ of each parameter at each step; NaN where there is none."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        shape = len(PARAMETERS), STEPS
        self.delta, self.gradient = (np.exp(random.standard_normal(shape)) for _ in range(2))
        self.weight = np.exp(random.standard_normal((len(PARAMETERS), 1))) * np.ones(shape)
        for line in range(len(PARAMETERS)):
            if random.random() < 0.5:
                self.delta[line, random.integers(0, STEPS) :] = 0  # it stops, or never begins
        self.delta[random.random(shape) < 0.1] = 0
        self.delta[random.random(shape) < 0.1] *= 1e-7
        self.delta[random.random(shape) < 0.1] = np.nan
        self.gradient[random.random(shape) < 0.2] = np.nan
        self.gradient[:, random.random(STEPS) < 0.2] = np.nan

    def record(self) -> Record:
        def sites(step: int) -> dict[str, np.ndarray]:
            tables = ((".grad", self.gradient), (".update", self.delta))
            named = {f"{name}{end}": table[k, step] for end, table in tables for k, name in enumerate(PARAMETERS)}
            return {name: spread(norm) for name, norm in named.items() if not np.isnan(norm)}

        norms = {name: self.weight[k, 0] for k, name in enumerate(PARAMETERS)}
        return make_record(range(STEPS), sites, weights=lambda step: norms)


def cut_rows(patch: pytest.MonkeyPatch) -> None:
    """Have rows come some steps at a time, as those of a record longer than memory do."""

    def by_steps(rows: Rows, most: int) -> list[Rows]:
        steps = np.unique(rows["step"])
        windows = [Cells(steps[at : at + 5], np.unique(rows["site"]), None) for at in range(0, len(steps), 5)]
        return [
            MergedRows([{n: rows[n][w.place(rows)[0]] for n in rows if n not in ("bins", "bin_count")}])
            for w in windows
        ]

    patch.setattr(Rows, "by_steps", by_steps)


@pytest.mark.parametrize("seed", range(60))
def test_they_are_those_of_whole_tables(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Tables(seed)
    is_there = ~np.isnan(tables.delta)
    steps = np.flatnonzero(is_there.any(axis=0))
    delta, weight = tables.delta[:, steps], np.where(is_there, tables.weight, np.nan)[:, steps]
    cut_rows(monkeypatch)
    found = UpdateNorms(tables.record())
    order = [PARAMETERS.index(str(site.value)) for site in found.sites]
    assert found.steps.tolist() == steps.tolist()
    ratio = np.sqrt(np.nansum(delta**2, axis=0) / np.nansum(weight**2, axis=0))
    np.testing.assert_allclose(found.ratio, ratio, rtol=1e-6)
    np.testing.assert_allclose(found.first_weights, weight[order, :FIRST], rtol=1e-6)
    assert found.told.tolist() == [int(np.sum(delta[k] > TOLD * weight[k])) for k in order]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_is_still_is_found_as_in_whole_tables(seed: int, is_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Tables(seed)
    delta, weight, gradient = tables.delta, tables.weight, tables.gradient
    shared = [s for s in range(STEPS) if not (np.isnan(delta[:, s]).all() or np.isnan(gradient[:, s]).all())]
    is_due = np.zeros(delta.shape, np.bool_)
    for step in shared:
        moving = [k for k in range(len(delta)) if delta[k, step] > 0 and not np.isnan(gradient[k, step])]
        usual = np.median([delta[k, step] / gradient[k, step] for k in moving]) if moving else 0.0
        is_due[:, step] = np.isfinite(delta[:, step]) & (usual * gradient[:, step] > TOLD * weight[:, step])
    still, stopped = {}, {}
    for k, name in enumerate(PARAMETERS):
        due = [s for s in shared if is_due[k, s]]
        if len(due) >= 3 and all(delta[k, s] == 0 for s in due):
            still[name] = len(due)
        moves = [s for s in shared if delta[k, s] > 0]
        behind = [s for s in due if not moves or s > moves[-1]]
        if len(moves) >= 3 and len(behind) >= 3 and all((delta[:, s] > 0).any() for s in behind):
            stopped[name] = shared.index(moves[-1]) + 1
    if is_cut:
        cut_rows(monkeypatch)
    found = UpdateNorms(tables.record()).stillness
    assert found.steps.tolist() == shared
    assert found.find_still(3) == still
    assert found.find_stopped(3) == stopped


def test_both_outcomes_are_among_the_cases() -> None:
    found = [UpdateNorms(Tables(seed).record()).stillness for seed in range(60)]
    assert any(each.find_still(3) for each in found)
    assert any(each.find_stopped(3) for each in found)


def test_a_record_without_updates_cannot_tell() -> None:
    with pytest.raises(CannotTell):
        UpdateNorms(make_record(range(3), lambda step: {"0:output": spread(1.0)}))


def test_steps_that_the_record_holds_are_not_held_twice() -> None:
    record = make_record(range(4), lambda step: {"0:weight.update": spread(1.0)})
    assert np.shares_memory(UpdateNorms(record).steps, record.history.outline.all_steps)
