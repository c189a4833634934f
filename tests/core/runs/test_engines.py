"""The SQL of docs/scale.md merges ranks and calls to the numbers that a run has when it is opened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars
import pytest

from retrograd.core.history.sink import Moment
from retrograd.core.runs.reader import open_run
from tests.core.history.made import SITES, make_batch
from tests.core.runs.engines import assert_sql_gives_the_history, compare_site, open_in_duckdb
from tests.core.runs.written import open_writer

RANKS, STEPS = 4, 13
SHARED = {
    "b:weight.update": [[0, 1, 2, 3]],
    "a:output.grad": [[0, 2], [1, 3]],
}
"""Sites of which ranks hold copies: all alike, as under DDP, and each half of them its shard, as under HSDP."""


def draw(rank: int, step: int, micro: int) -> dict[int, np.ndarray]:
    """Large means beside small deviations; a NaN and an infinity here and there; copies are the same."""
    drawn = {}
    for number, site in enumerate(SITES):
        owner = next((min(group) for group in SHARED.get(site, ()) if rank in group), rank)
        random = np.random.default_rng([number, step, micro, owner])
        drawn[number] = random.standard_normal(8) * 2.0 ** random.integers(-9, 9) + 1000.0
        if (step + owner) % 5 == number:
            drawn[number][:3] = np.nan, np.inf, 0.0
    return drawn


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not every rank has every moment; the lowest of all has died."""
    path = tmp_path_factory.mktemp("runs") / "run"
    for rank in range(RANKS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(rank))
            writer = open_writer(path, join=True)
        holds = {
            site: {"holds": "copy", "ranks": group}
            for site, groups in SHARED.items()
            for group in groups
            if rank in group
        }
        writer.describe(placements={"stages": {}, "sites": holds})
        for step in range(STEPS if rank else STEPS - 4):
            for micro in range(2):
                for phase in ("train", "eval") if step % 5 == 0 else ("train",):
                    writer.add_rows(make_batch(Moment(3 * step, micro, 0, phase), draw(rank, step, micro)))
            if step % 4 == 3:
                writer.flush()
        writer.close()
    return path


def test_ranks_are_merged_to_the_same_numbers(run: Path, tmp_path: Path) -> None:
    assert_sql_gives_the_history(run, tmp_path)


def test_no_deviation_is_lost_beside_a_large_mean(run: Path, tmp_path: Path) -> None:
    """Against all elements at once, in float64."""
    elements = [draw(rank, 2, micro)[0] for rank in range(RANKS) for micro in range(2)]
    together = np.concatenate(elements)
    with open_in_duckdb(run, tmp_path) as database:
        query = "SELECT sqrt(m2 / n) FROM merged WHERE site = ? AND step = 6"
        [(std,)] = database.execute(query, [SITES[0]]).fetchall()
    assert std == pytest.approx(together[np.isfinite(together)].std(), rel=1e-9)


def test_calls_of_a_module_are_one(tmp_path: Path) -> None:
    names = ["cell:output", "cell#2:output", "cell#3:output"]
    for rank in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(rank))
            writer = open_writer(tmp_path / "run", join=True)
        writer.add_sites(names)
        for step in range(3):
            rows = {len(SITES) + at: np.random.default_rng([rank, step, at]).standard_normal(6) for at in range(3)}
            writer.add_rows(make_batch(Moment(step, 0, 0), rows))
        writer.close()
    with open_in_duckdb(tmp_path / "run", tmp_path) as database:
        compare_site(open_run(tmp_path / "run").history, "cell:output", database)


@pytest.mark.parametrize("site", SITES)
def test_polars_merges_rows_to_the_same_numbers(run: Path, site: str) -> None:
    """With one of the ranks that hold the same, where they all live."""
    series = open_run(run).history[site]
    owners = [min(group) for group in SHARED.get(site, [[rank] for rank in range(RANKS)])]
    n = polars.col("count") - polars.col("nan") - polars.col("pos_inf") - polars.col("neg_inf")
    squares = polars.col("m2") + polars.col("sum") ** 2 / n
    by_polars = (
        polars.concat([polars.scan_parquet(run / f"rank{rank:05d}" / "statistics" / "*.parquet") for rank in owners])
        .filter(polars.col("site") == site, polars.col("phase") == "train", polars.col("backward") <= 0)
        .group_by("step")
        .agg((squares.sum() / n.sum()).sqrt().alias("rms"), polars.col("max").max())
        .sort("step")
        .head(STEPS - 4)
        .collect()
    )
    assert by_polars["step"].to_list() == series.steps.tolist()[: STEPS - 4]
    np.testing.assert_allclose(by_polars["rms"].to_numpy(), series.rms[: STEPS - 4], rtol=1e-9)
    np.testing.assert_array_equal(by_polars["max"].to_numpy(), series.max[: STEPS - 4])
