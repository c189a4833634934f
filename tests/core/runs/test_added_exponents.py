"""Histograms added up over steps and ranks, against a loop over the rows of the files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from retrograd.core.history.sink import Moment
from retrograd.core.limits import LIMITS
from retrograd.core.runs.reader import open_run
from tests.core.history.made import SITES, make_batch
from tests.core.runs.written import open_writer

RANKS, STEPS = 3, 13
COPY = "b:weight.update"
"""The site that is the same on all ranks."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks, two micro-batches a step, evaluations, and a site of which ranks hold copies."""
    path = tmp_path_factory.mktemp("runs") / "run"
    holds = {COPY: {"holds": "copy", "ranks": list(range(RANKS))}}
    for rank in range(RANKS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(rank))
            writer = open_writer(path, join=True)
        writer.describe(placements={"stages": {}, "sites": holds})
        for step in range(STEPS):
            for micro in range(2):
                for phase in ("train", "eval") if step % 5 == 0 else ("train",):
                    writer.add_rows(make_batch(Moment(3 * step, micro, 0, phase), dict(_draw(rank, step, micro))))
            if step % 4 == 3:
                writer.flush()
        writer.close()
    return path


def _draw(rank: int, step: int, micro: int) -> Iterator[tuple[int, np.ndarray]]:
    for number, site in enumerate(SITES):
        random = np.random.default_rng([number, step, micro, 0 if site == COPY else rank])
        yield number, random.standard_normal(8) * 2.0 ** random.integers(-20, 20)


def add_by_hand(run: Path, site: str, place: dict[int, int], columns: int) -> np.ndarray:
    """A row of the files after the other."""
    added = np.zeros((columns, 255), np.int64)
    for path in sorted(run.glob("rank*/statistics/*.parquet")):
        if site == COPY and path.parts[-3] != "rank00000":
            continue
        for row in pq.read_table(path, partitioning=None).to_pylist():
            if row["site"] == site and row["phase"] == "train":
                for offset, count in enumerate(row["bins"]):
                    added[place[row["step"]], row["first_bin"] + offset] += count
    return added


@pytest.mark.parametrize(("most_rows", "most_cells"), [(1 << 18, 1 << 19), (0, 1 << 19), (0, 10)])
@pytest.mark.parametrize("columns", [1, 4, STEPS])
def test_histograms_of_columns(
    run: Path, monkeypatch: pytest.MonkeyPatch, most_rows: int, most_cells: int, columns: int
) -> None:
    monkeypatch.setattr(LIMITS, "held_rows", most_rows)
    monkeypatch.setattr(LIMITS, "merged_cells", most_cells)
    place = {3 * step: step * columns // STEPS for step in range(STEPS)}
    history = open_run(run).history
    found = history.add_exponents(
        SITES, "train", lambda steps: np.array([place[step] for step in steps.tolist()], np.int64), columns
    )
    for site, counts in zip(SITES, found, strict=True):
        np.testing.assert_array_equal(counts, add_by_hand(run, site, place, columns))
