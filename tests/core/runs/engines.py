"""What docs/scale.md has engines do: its SQL, run by DuckDB."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from retrograd.core.history.history import History
from retrograd.core.runs.reader import open_run

PAGE = Path(__file__).parents[3] / "docs" / "scale.md"


def read_blocks(language: str, mark: str) -> list[str]:
    """The blocks of the page that begin with this comment."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    found = [block for block in blocks if block.startswith(mark)]
    assert found, mark
    return found


def open_in_duckdb(run: Path, folder: Path) -> duckdb.DuckDBPyConnection:
    """A connection with the views of the page, and what it makes beside them in this folder."""
    held = folder / "held.parquet"
    names: dict[str, Any] = {}
    for block in read_blocks("python", "# who holds the same"):
        exec(block.replace('"RUN"', repr(str(run))).replace('"held.parquet"', repr(str(held))), names)
    database = duckdb.connect()
    for mark in ("-- DuckDB: views", "-- DuckDB and Spark: copies", "-- DuckDB and Spark: ranks", "-- DuckDB: bins"):
        for block in read_blocks("sql", mark):
            database.execute(block.replace("RUN/", f"{run}/").replace("held.parquet", str(held)))
    return database


def assert_sql_gives_the_history(run: Path, folder: Path) -> None:
    history = open_run(run).history
    with open_in_duckdb(run, folder) as database:
        for site in history.sites:
            compare_site(history, site, database)


def compare_site(history: History, site: str, database: duckdb.DuckDBPyConnection) -> None:
    series = history[site]
    found = database.execute("SELECT * FROM merged WHERE site = ? ORDER BY step", [site]).fetchnumpy()
    assert found["step"].tolist() == series.steps.tolist(), site
    for name in ("count", "nan", "pos_inf", "neg_inf", "zeros", "min", "max"):
        np.testing.assert_array_equal(found[name].astype(float), getattr(series, name), err_msg=f"{site} {name}")
    n = found["n"].astype(float)
    mean = found["sum"] / n
    numbers = {"mean": mean, "std": np.sqrt(found["m2"] / n), "rms": np.sqrt(found["m2"] / n + mean**2)}
    for name, values in {**numbers, "l1": found["abs_sum"]}.items():
        np.testing.assert_allclose(values, getattr(series, name), rtol=1e-9, atol=1e-12, err_msg=f"{site} {name}")
    bins = database.execute("SELECT step, exponent, n FROM histograms WHERE site = ? AND n > 0", [site]).fetchall()
    steps, counts = series.exponents
    expected = {(int(steps[at]), int(place) - 127, int(counts[at, place])) for at, place in np.argwhere(counts)}
    assert set(bins) == expected, site
    assert len(bins) == len(expected)
