"""Parts that somebody has forged: what is wrong in them is left out and told, and nothing else is raised than ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import retrograd as rg
from retrograd.core.cli import main
from retrograd.core.errors import DamagedRunError, RetrogradError
from retrograd.core.runs.compaction import compact
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from tests.core.history.made import make_steps
from tests.core.runs.written import add_step, open_writer, write_run

Change = Callable[[pa.Table], pa.Table]


def put(name: str, value: Any, row: int | None = 3) -> Change:
    """Another value in one row of a column, or in all."""

    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        values = [value] * len(values) if row is None else [*values[:row], value, *values[row + 1 :]]
        at = table.column_names.index(name)
        return table.set_column(at, pa.field(name, table.schema.field(name).type), pa.array(values, table[name].type))

    return change


def turn(name: str, kind: pa.DataType, make: Callable[[Any], Any]) -> Change:
    """Another type of a column."""
    return lambda table: table.set_column(
        table.column_names.index(name), name, pa.array(map(make, table[name].to_pylist()), kind)
    )


FORGED: dict[str, Change] = {
    "no site": put("site", None),
    "no sites": put("site", None, row=None),
    "no step": put("step", None),
    "no steps": put("step", None, row=None),
    "no phase": put("phase", None),
    "no backward": put("backward", None),
    "no count": put("count", None),
    "a hole in a histogram": put("bins", [None, 1]),
    "a site of no manifest": put("site", "evil:output"),
    "a phase that there is not": put("phase", "evil"),
    "another phase in all rows": put("phase", "zzz", row=None),
    "a step below zero": put("step", -7),
    "a step beyond all": put("step", 2**62),
    "a count below zero": put("count", -5),
    "counts below zero": put("count", -5, row=None),
    "an exponent beyond": put("first_bin", 30_000),
    "an exponent below": put("first_bin", -30_000),
    "too many exponents": put("bins", [1] * 5_000),
    "sites that are numbers": turn("site", pa.int64(), len),
    "steps that are texts": turn("step", pa.string(), str),
    "steps that are times": turn("step", pa.timestamp("s"), int),
    "sums that are texts": turn("sum", pa.string(), str),
    "histograms that are texts": turn("bins", pa.string(), str),
}


def forge(run: Path, change: Change, *, keeps_outline: bool) -> Path:
    """Change the last part of a run as another tool would."""
    path = max((run / "rank00000" / "statistics").iterdir())
    table = pq.read_table(path)
    told = table.schema.metadata if keeps_outline else None
    changed = change(table)
    pq.write_table(changed.replace_schema_metadata(told), path)
    return path


READERS: dict[str, Callable[[Path], object]] = {
    "table": lambda run: open_run(run).history.table(),
    "series": lambda run: [open_run(run).history[site].rms for site in open_run(run).history.sites],
    "explain": rg.explain,
    "report": rg.write_report,
    "compare": lambda run: rg.compare(run, run),
    "export": lambda run: rg.export(run, "csv"),
    "compare with a whole one": lambda run: rg.compare(write_run(run.parent / "whole", range(4)), run),
    "view": lambda run: main(["view", str(run)]),
    "resume": lambda run: RunWriter(run, resume=True, step=2).close(),
}


@pytest.mark.parametrize("keeps_outline", [True, False])
@pytest.mark.parametrize("what", FORGED)
def test_nothing_but_our_errors(tmp_path: Path, what: str, keeps_outline: bool) -> None:
    run = write_run(tmp_path / "run", range(4))
    forge(run, FORGED[what], keeps_outline=keeps_outline)
    for read in READERS.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                read(run)
            except RetrogradError:
                continue


LEFT_OUT = ["no site", "no step", "a phase that there is not", "sites that are numbers"]


@pytest.mark.parametrize("what", [*LEFT_OUT, "a site of no manifest"])
def test_the_rest_is_read_and_what_is_left_out_is_told(tmp_path: Path, what: str) -> None:
    run = write_run(tmp_path / "run", range(4))
    whole = open_run(run).history["a:output"].rms.tolist()
    path = forge(run, FORGED[what], keeps_outline=True)
    with pytest.warns(match=path.name):
        opened = open_run(run)
        found = opened.history["a:output"]
        assert found.steps.tolist() == [0, 1, 2]
    assert found.rms.tolist() == whole[:3]
    assert [part.path for part in opened.damaged] == [path]
    assert opened.history.table().num_rows == 3 * 5
    assert not any("evil" in site for site in opened.history.sites)


@pytest.mark.parametrize("what", FORGED)
def test_it_is_not_compacted(tmp_path: Path, what: str) -> None:
    run = write_run(tmp_path / "run", range(4))
    path = forge(run, FORGED[what], keeps_outline=True)
    before = {each: each.read_bytes() for each in run.rglob("*.parquet")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(DamagedRunError, match=path.name):
            compact(run)
    assert {each: each.read_bytes() for each in run.rglob("*.parquet")} == before


def test_a_step_between_those_that_the_file_names(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    for batch in make_steps([0, 2, 4]):
        add_step(writer, batch)
    writer.close()
    forge(tmp_path, put("step", 1), keeps_outline=True)
    with pytest.raises(DamagedRunError, match="a step that the file does not name"):
        compact(tmp_path)


def test_other_widths_of_numbers_are_the_same_numbers(tmp_path: Path) -> None:
    """As a table has them that went through another tool."""
    run = write_run(tmp_path / "run", range(4))
    whole = open_run(run).history["a:output"].rms.tolist()
    forge(run, turn("micro", pa.int64(), int), keeps_outline=True)
    assert open_run(run).history["a:output"].rms.tolist() == whole
    compact(run)
    assert open_run(run).history["a:output"].rms.tolist() == whole


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("another phase in all rows", "column 'phase' has 'zzz'; expected train, "),
        ("a step below zero", "column 'step' has -7; expected 0 to "),
        ("a step beyond all", f"column 'step' has {2**62}; expected 0 to "),
        ("counts below zero", "column 'count' has -5; expected 0 or more"),
    ],
)
@pytest.mark.parametrize("keeps_outline", [True, False])
def test_the_column_and_what_was_expected_are_named(tmp_path: Path, what: str, named: str, keeps_outline: bool) -> None:
    run = write_run(tmp_path / "run", range(4))
    whole = open_run(run).history["a:output"].rms.tolist()
    path = forge(run, FORGED[what], keeps_outline=keeps_outline)
    with pytest.warns(match=f"{path.name}(.|\n)*{named}"):
        assert open_run(run).history["a:output"].rms.tolist() == whole[:3]
