"""Other engines merge the ranks of a run to the same numbers, with what docs/scale.md has."""

from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import polars
import pytest

from retrograd.core.history.sink import Moment
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


MERGE = """
    SELECT step, sum(n) AS n, sum(total) AS total,
           sum(m2 + total * total / n) - sum(total) * sum(total) / sum(n) AS m2
    FROM (SELECT step, "count" - nan - pos_inf - neg_inf AS n, "sum" AS total, m2
          FROM read_parquet('{run}/rank*/statistics/*.parquet', filename = true)
          WHERE site = '{site}' AND phase = 'train' AND backward <= 0 AND ({whole} OR filename LIKE '%rank00000%'))
    GROUP BY step ORDER BY step
"""
"""As docs/scale.md has it."""


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("most_rows", [1 << 18, 0])
def test_engines_merge_ranks_to_the_same_numbers(
    run: Path, monkeypatch: pytest.MonkeyPatch, site: str, most_rows: int
) -> None:
    monkeypatch.setattr("retrograd.core.history.windows.MOST_ROWS", most_rows)
    series = open_run(run).history[site]
    by_duckdb = duckdb.execute(MERGE.format(run=run, site=site, whole=site != COPY)).fetchnumpy()
    assert by_duckdb["step"].tolist() == series.steps.tolist()
    np.testing.assert_allclose(np.sqrt(by_duckdb["m2"] / by_duckdb["n"]), series.std, rtol=1e-9)
    np.testing.assert_allclose(by_duckdb["total"] / by_duckdb["n"], series.mean, rtol=1e-9, atol=1e-12)
    ranks = "rank00000" if site == COPY else "rank*"
    n = polars.col("count") - polars.col("nan") - polars.col("pos_inf") - polars.col("neg_inf")
    squares = polars.col("m2") + polars.col("sum") ** 2 / n
    rows = polars.scan_parquet(run / ranks / "statistics" / "*.parquet")
    by_polars = (
        rows.filter(polars.col("site") == site, polars.col("phase") == "train", polars.col("backward") <= 0)
        .group_by("step")
        .agg((squares.sum() / n.sum()).sqrt().alias("rms"), polars.col("max").max())
        .sort("step")
        .collect()
    )
    assert by_polars["step"].to_list() == series.steps.tolist()
    np.testing.assert_allclose(by_polars["rms"].to_numpy(), series.rms, rtol=1e-12)
    np.testing.assert_array_equal(by_polars["max"].to_numpy(), series.max)
