"""Parts are sorted by site when they are written: of one site few rows are read, and all answers stay as they were."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

import retrograd as rg
from retrograd.core.history import rows
from retrograd.core.history.history import History
from retrograd.core.history.sink import Moment, Phase, RowBatch
from retrograd.core.limits import LIMITS
from retrograd.core.runs import parts
from retrograd.core.runs.stored import StoredRows
from retrograd.core.runs.writer import RunWriter
from tests.core.history.made import SITES, make_batch
from tests.core.history.strategies import batches
from tests.core.runs.written import NEVER, files, open_writer

COUNTS = ("count", "nan", "zeros", "nonfinite", "min", "max", "abs_max", "zero_share")
SUMS = ("rms", "mean", "std", "l1", "update_ratio")


def write(path: Path, ranks: Sequence[Sequence[Sequence[RowBatch]]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of some flushes a rank; the steps of a later one may be those of an earlier one, as of a resumed run."""
    for rank, flushes in enumerate(ranks):
        monkeypatch.setenv("RANK", str(rank))
        writer = RunWriter(path, join=True, flush_seconds=NEVER)
        writer.add_sites(SITES)
        for flush in flushes:
            for batch in flush:
                writer.add_rows(batch)
            writer.flush()
        writer.close()
    return path


def ask(history: History) -> dict[str, Any]:
    """What readers ask: series, matrices and histograms, of each phase, and rows one by one."""
    found: dict[str, Any] = {"sites": history.sites, "nonfinite": history.find_first_nonfinite("train")}
    for phase, statistic in itertools.product(("train", "eval", None), (*COUNTS, *SUMS)):
        matrix = history.matrix(statistic, phase=phase)
        found[f"{statistic} in {phase}"] = matrix.steps, matrix.values
    for site in history.sites:
        series = history[site]
        found[f"{site} alone"] = series.steps, series.rms
        found[f"{site} passes"] = [series.select(backward=each).steps for each in (0, 1, None)]
        found[f"{site} bins"] = series.exponents
    return found


def list_rows(history: History) -> list[str]:
    """All rows as texts, in which NaN is NaN."""
    return sorted(map(repr, history.table().to_pylist()))


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, tuple | list) and name != "sites":
            for one, other in zip(found[name], value, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-300, err_msg=name)
        else:
            assert found[name] == value, name


def rise(flushes: list[list[RowBatch]]) -> list[list[RowBatch]]:
    """The same, with steps, micro-batches and passes that never fall, and passes over forwards of one phase alone."""
    moments = [batch.moment for flush in flushes for batch in flush]
    phases: dict[tuple[int, int], Phase] = {}
    risen = iter(
        [
            replace(moment, phase=phases.setdefault((moment.step, moment.micro), moment.phase))
            for moment in sorted(moments, key=lambda moment: (moment.step, moment.micro, moment.backward))
        ]
    )
    return [[replace(batch, moment=next(risen)) for batch in flush] for flush in flushes]


flushes = st.lists(st.lists(batches(), min_size=1, max_size=4), min_size=1, max_size=5).map(rise)


@settings(max_examples=10, deadline=None)
@given(st.lists(flushes, min_size=1, max_size=2), st.sampled_from([2, 4, 100]))
def test_answers_are_those_of_rows_as_they_came(
    tmp_path_factory: pytest.TempPathFactory, ranks: list[list[list[RowBatch]]], fan_in: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in {"fan_in": fan_in, "site_rows": 3, "group_rows": 6, "rows_at_once": 5}.items():
            patch.setattr(LIMITS, name, limit)
        write(folder / "sorted", ranks, patch)
        patch.setattr(rows, "order_by_site", lambda sites, steps: np.arange(len(sites)))
        patch.setattr(parts, "sort_by_site", lambda table: table)
        patch.setattr(parts, "cut_by_site", lambda table: [table])
        write(folder / "plain", ranks, patch)
        expected = rg.open_run(folder / "plain").history
        assert list_rows(rg.open_run(folder / "sorted").history) == list_rows(expected)
        answers = ask(expected)
        compare(ask(rg.open_run(folder / "sorted").history), answers)
        patch.setattr(LIMITS, "held_rows", 0)
        for cells in (1, 1 << 20):
            patch.setattr(LIMITS, "merged_cells", cells)
            compare(ask(rg.open_run(folder / "sorted").history), answers)


N_SITES, STEPS_A_FLUSH = 32, 8


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 32 sites and five flushes, in groups of four sites."""
    monkeypatch.setattr(LIMITS, "site_rows", 4 * STEPS_A_FLUSH)
    monkeypatch.setattr(LIMITS, "held_rows", 0)
    monkeypatch.setattr(LIMITS, "merged_cells", 8 * STEPS_A_FLUSH)
    writer = RunWriter(tmp_path / "run", flush_seconds=NEVER)
    writer.add_sites([f"layer{number}:output" for number in range(N_SITES)])
    for step in range(5 * STEPS_A_FLUSH):
        elements = {number: np.full(2, 1.0 + step + number) for number in range(N_SITES)}
        writer.add_rows(make_batch(Moment(step), elements))
        if step % STEPS_A_FLUSH == STEPS_A_FLUSH - 1:
            writer.flush()
    writer.close()
    return tmp_path / "run"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each reading of columns took in."""
    counts, original = list[int](), StoredRows._read_groups

    def count(part: StoredRows, numbers: Sequence[int], names: Sequence[str]) -> Any:
        found = original(part, numbers, names)
        counts.append(len(found[names[0]]))
        return found

    monkeypatch.setattr(StoredRows, "_read_groups", count)
    return counts


def test_of_one_site_a_group_of_each_part_is_read(wide: Path, read: list[int]) -> None:
    history = rg.open_run(wide).history
    assert not read
    np.testing.assert_array_equal(history["layer17:output"].rms, np.arange(18, 58))
    assert read == [4 * STEPS_A_FLUSH] * 5


def test_all_sites_are_read_as_few_pieces(wide: Path, read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "merged_cells", 1 << 20)
    values = rg.open_run(wide).history.matrix("rms").values
    np.testing.assert_array_equal(values, 1.0 + np.add.outer(np.arange(N_SITES), np.arange(5 * STEPS_A_FLUSH)))
    assert read == [N_SITES * STEPS_A_FLUSH] * 5


def test_of_a_screenful_no_other_sites_are_read(wide: Path, read: list[int]) -> None:
    history = rg.open_run(wide).history
    some = rg.format_table(history, most=4)
    assert some.splitlines()[0].startswith("32 sites, ")
    assert [line.split()[0] for line in some.splitlines()[2:]] == [*(f"layer{n}:output" for n in range(4)), "28"]
    assert set(read) == {4 * STEPS_A_FLUSH}
    assert rg.format_table(history, most=32) == rg.format_table(history)


def test_the_largest_are_looked_for_among_all(wide: Path) -> None:
    shown = rg.format_table(wide, most=2, sort="value").splitlines()[2:]
    assert [line.split()[0] for line in shown] == ["layer31:output", "layer30:output", "30"]


def test_parts_of_other_lengths_have_groups_of_the_same_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So their footers tell of sites in the same words, which are read once."""
    monkeypatch.setattr(LIMITS, "site_rows", 12)
    writer = open_writer(tmp_path / "run")
    for length, step in ((4, 0), (5, 10), (6, 20)):
        for place in range(length):
            writer.add_rows(make_batch(Moment(step + place), {number: np.ones(1) for number in range(5)}))
        writer.flush()
    writer.close()
    folder = tmp_path / "run" / "rank00000" / "statistics"
    footers = [pq.read_metadata(folder / name) for name in files(tmp_path / "run", "statistics")]
    assert [each.num_row_groups for each in footers] == [3, 3, 3]
    assert len({each.metadata[b"retrograd.sites"] for each in footers}) == 1


def test_merged_parts_are_sorted_by_site_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in {"fan_in": 4, "group_rows": 40, "site_rows": 10}.items():
        monkeypatch.setattr(LIMITS, name, limit)
    writer = open_writer(tmp_path / "run")
    for step in range(16):
        writer.add_rows(make_batch(Moment(step), {number: np.ones(1) for number in range(5)}))
        writer.flush()
    writer.close()
    [path] = (tmp_path / "run" / "rank00000" / "statistics").glob("*.parquet")
    file = pq.ParquetFile(path)
    groups = [file.read_row_group(number).to_pandas() for number in range(file.num_row_groups)]
    sites = [sorted(set(group["site"])) for group in groups]
    assert sites == [["a:output"], ["a:output.grad"], ["b:output"], ["b:output.grad"], ["b:weight.update"]] * 2
    assert [group["step"].tolist() for group in groups] == [[*range(8)]] * 5 + [[*range(8, 16)]] * 5
