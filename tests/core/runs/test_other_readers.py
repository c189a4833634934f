"""A run folder is read by tools that know nothing of us."""

import os
from pathlib import Path

import duckdb
import numpy as np
import pandas
import polars
import pytest
import safetensors.numpy

from retrograd.core.errors import RunWriteError
from retrograd.core.history.table import STATISTICS_COLUMNS
from retrograd.core.runs.compaction import compact
from retrograd.core.runs.reader import open_run
from tests.core.history.made import SITES
from tests.core.runs.written import write_run

NAMES = [column.name for column in STATISTICS_COLUMNS]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", range(7))


@pytest.mark.parametrize("site", SITES)
def test_duckdb(run: Path, site: str) -> None:
    parts = run / "rank00000" / "statistics" / "*.parquet"
    query = f"SELECT step, rms, std, list_sum(bins), phase FROM '{parts}' WHERE site = ? ORDER BY step"
    found = duckdb.execute(query, [site]).fetchall()
    series = open_run(run).history[site]
    assert [line[0] for line in found] == series.steps.tolist()
    np.testing.assert_allclose([line[1] for line in found], series.rms, rtol=1e-15)
    np.testing.assert_allclose([line[2] for line in found], series.std, rtol=1e-15)
    assert [line[3] for line in found] == series.exponents[1].sum(axis=1).tolist()
    assert {line[4] for line in found} == {"train"}


def test_duckdb_sees_plain_types(run: Path) -> None:
    described = duckdb.execute(f"DESCRIBE SELECT * FROM '{run}/rank00000/statistics/*.parquet'").fetchall()
    types = {line[0]: line[1] for line in described}
    assert list(types) == NAMES
    assert types["site"] == types["phase"] == "VARCHAR"
    assert types["bins"] == "BIGINT[]"
    assert (types["step"], types["micro"], types["backward"]) == ("BIGINT", "INTEGER", "SMALLINT")


def test_pandas(run: Path) -> None:
    frame = pandas.read_parquet(run / "rank00000" / "statistics")
    assert list(frame) == NAMES
    assert pandas.api.types.is_string_dtype(frame["site"])
    history = open_run(run).history
    for site, rows in frame.groupby("site"):
        np.testing.assert_array_equal(rows.sort_values("step")["mean"], history[site].mean)


def test_polars(run: Path) -> None:
    frame = polars.read_parquet(run / "rank00000" / "statistics" / "*.parquet")
    assert frame.columns == NAMES
    assert frame.schema["site"] == polars.String
    history = open_run(run).history
    for site in SITES:
        rows = frame.filter(polars.col("site") == site).sort("step")
        np.testing.assert_array_equal(rows["max"].to_numpy(), history[site].max)


def test_events(run: Path) -> None:
    frame = polars.read_parquet(run / "rank00000" / "events" / "*.parquet").sort("step")
    assert frame.filter(polars.col("kind") == "loss")["value"].to_list() == list(range(7))


def test_tensors(run: Path) -> None:
    found = {}
    for shard in sorted((run / "rank00000" / "tensors").iterdir()):
        found |= safetensors.numpy.load_file(shard)
    assert sorted(found) == [f"{step}/0/-1/train/a:output" for step in range(7)]
    assert found["3/0/-1/train/a:output"].tolist() == [3.0, 3.0]


ASKING = {
    "duckdb": lambda folder: duckdb.sql(f"SELECT count(*) FROM '{folder}/*.parquet'").fetchall()[0][0],
    "polars": lambda folder: polars.read_parquet(f"{folder}/*.parquet").height,
    "polars, the folder": lambda folder: polars.read_parquet(folder).height,
    "polars, all below": lambda folder: polars.read_parquet(f"{folder.parents[1]}/**/statistics/*.parquet").height,
    "pandas": lambda folder: len(pandas.read_parquet(folder)),
}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("who", ASKING)
def test_beside_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str, half: bool) -> None:
    """What a killed writer leaves is what there is when it would give its file a name."""
    run = write_run(tmp_path / "run", range(4))
    folder = run / "rank00000" / "statistics"
    rows = ASKING[who](folder)
    asked: list[int] = []

    def ask(path: Path, _: Path) -> Path:
        if half:
            os.truncate(path, 300)
        asked.append(ASKING[who](folder))
        raise OSError("killed")

    monkeypatch.setattr(Path, "replace", ask)
    with pytest.raises(RunWriteError, match="killed"):
        compact(run)
    assert asked == [rows]
