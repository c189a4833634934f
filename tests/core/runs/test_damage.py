"""Part files that a disk or a copy has damaged: the others are read, and nothing is removed."""

from __future__ import annotations

import csv
import errno
import shutil
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import retrograd as rg
from retrograd.core.cli import main
from retrograd.core.errors import CompareError, DamagedRunError, RetrogradWarning
from retrograd.core.files import write_json
from retrograd.core.foreign.text import read_json
from retrograd.core.launch import chosen_run
from retrograd.core.limits import LIMITS
from retrograd.core.runs import parts
from retrograd.core.runs.compaction import compact
from retrograd.core.runs.listing import read_line
from retrograd.core.runs.reader import Run, open_run
from retrograd.core.runs.writer import RunWriter
from tests import warm
from tests.core.history.made import make_steps
from tests.core.runs.written import add_step, files, open_writer, write_run

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "cut": lambda whole: whole[: len(whole) // 2],
    "short": lambda whole: whole[:-1],
    "rubbish": lambda whole: b"\xff\xfe rubbish",
}
STEPS = range(7)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Seven steps, each in a part of its own."""
    return write_run(tmp_path / "run", STEPS)


def tear(run: Path, kind: str, number: int, how: str = "cut") -> Path:
    path = run / "rank00000" / kind / files(run, kind)[number]
    path.write_bytes(DAMAGES[how](path.read_bytes()))
    return path


def open_torn(run: Path) -> Run:
    with pytest.warns(RetrogradWarning, match="damaged-run"):
        return open_run(run)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize(
    ("number", "place"), [(0, "begins with step 1"), (3, "step 2,.*step 4"), (6, "ends with step 5")]
)
def test_what_other_parts_hold_is_read(run: Path, tmp_path: Path, how: str, number: int, place: str) -> None:
    before = open_run(shutil.copytree(run, tmp_path / "whole")).history
    torn = tear(run, "statistics", number, how)
    with pytest.warns(RetrogradWarning, match=f"{torn.name}.*{place}"):
        after = open_run(run)
    left = [step for step in STEPS if step != number]
    for site in before.sites:
        series = after.history[site]
        is_left = np.isin(before[site].steps, left)
        assert series.steps.tolist() == before[site].steps[is_left].tolist()
        np.testing.assert_array_equal(series.std, before[site].std[is_left])
    assert [part.path for part in after.damaged] == [torn]
    assert "1 damaged file left out" in repr(after)
    assert after.history.loss.steps.tolist() == list(STEPS)


@pytest.mark.parametrize("how", DAMAGES)
def test_events_of_other_parts_are_read(run: Path, how: str) -> None:
    torn = tear(run, "events", 3, how)
    opened = open_torn(run)
    assert opened.history.loss.steps.tolist() == [0, 1, 2, 4, 5, 6]
    assert opened.history["a:output"].steps.tolist() == list(STEPS)
    assert [(part.path, part.after, part.before) for part in opened.damaged] == [(torn, 2, 4)]


def test_a_part_is_told_of_once_and_read_once_it_is_whole(run: Path) -> None:
    whole = {kind: (run / "rank00000" / kind / files(run, kind)[2]).read_bytes() for kind in ("statistics", "events")}
    torn = {kind: tear(run, kind, 2) for kind in whole}
    opened = open_torn(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened.refresh()
        assert len(opened.damaged) == 2
        for kind, path in torn.items():
            path.write_bytes(whole[kind])
        opened.refresh()
    assert opened.damaged == []
    assert opened.history["a:output"].steps.tolist() == list(STEPS)
    assert opened.history.loss.steps.tolist() == list(STEPS)


@pytest.mark.parametrize("most_events", [0, 1 << 16])
def test_a_run_that_goes_on_is_followed(run: Path, monkeypatch: pytest.MonkeyPatch, most_events: int) -> None:
    monkeypatch.setattr(LIMITS, "held_events", most_events)
    writer = open_writer(run, resume=True, step=7)
    tear(run, "events", 3)
    opened = open_torn(run)
    assert opened.status == "running"
    for step in (7, 8):
        add_step(writer, next(iter(make_steps([step]))))
        writer.flush()
        opened.refresh()
        assert opened.history.loss.steps.tolist() == [0, 1, 2, 4, 5, 6, *range(7, step + 1)]
    torn = tear(run, "events", 7)
    with pytest.warns(RetrogradWarning, match=torn.name):
        opened.refresh()
    assert opened.history.loss.steps.tolist() == [0, 1, 2, 4, 5, 6, 8]
    assert len(opened.damaged) == 2
    writer.close()


@pytest.mark.parametrize("kind", ["statistics", "events"])
def test_what_a_torn_file_was_merged_from_is_read_and_kept(run: Path, kind: str) -> None:
    """As a power cut leaves them: the merged file is empty, and of those before it the removal was not written."""
    folder = run / "rank00000" / kind
    torn = folder / "part-00000002-00000004.parquet"
    torn.write_bytes(b"")
    before = {path: path.read_bytes() for path in run.rglob("*.parquet")}
    opened = open_torn(run)
    assert [part.path for part in opened.damaged] == [torn]
    assert opened.history["a:output"].steps.tolist() == opened.history.loss.steps.tolist() == list(STEPS)
    assert read_line(run).status == "damaged"
    with pytest.raises(DamagedRunError, match=torn.name):
        RunWriter(run, resume=True, step=7)
    assert {path: path.read_bytes() for path in run.rglob("*.parquet")} == before
    (folder / "part-00000003-00000003.parquet").unlink()
    shutil.copy(folder / "part-00000004-00000004.parquet", torn)
    assert open_run(run).history.loss.steps.tolist() == ([0, 1, 4, 5, 6] if kind == "events" else list(STEPS))


def test_of_a_run_without_a_readable_part_the_file_is_named(run: Path) -> None:
    for number in STEPS:
        torn = tear(run, "statistics", number)
    with pytest.raises(DamagedRunError, match="part-00000000"):
        open_run(run)
    assert torn.exists()


@pytest.mark.parametrize("kind", ["statistics", "events"])
def test_what_the_system_cannot_read_now_is_not_left_out(run: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    opened = open_run(run)
    refused = run / "rank00000" / kind / files(run, kind)[3]
    os_file = pa.OSFile
    with monkeypatch.context() as patch:

        def open_file(path: str) -> pa.OSFile:
            if path == str(refused):
                raise OSError(errno.EMFILE, "Too many open files")
            return os_file(path)

        patch.setattr(parts.pa, "OSFile", open_file)
        with pytest.raises(DamagedRunError, match="Too many open files"):
            open_run(run)
    opened.refresh()
    assert opened.damaged == open_run(run).damaged == []


@pytest.mark.filterwarnings("ignore::retrograd.core.errors.RetrogradWarning")
def test_views_of_a_damaged_run(run: Path, tmp_path: Path) -> None:
    whole = shutil.copytree(run, tmp_path / "whole")
    torn = tear(run, "statistics", 3)
    page = rg.write_report(run, tmp_path / "report.html").read_text()
    assert "Damaged files" in page
    assert torn.name in page
    assert list(rg.explain(run)) == list(rg.explain(whole))
    assert str(rg.compare(run, whole))
    rg.export(run, "csv", tmp_path / "run.csv")
    with (tmp_path / "run.csv").open(newline="") as file:
        steps = {int(row["step"]) for row in csv.DictReader(file)}
    assert steps == set(STEPS) - {3}


@pytest.mark.parametrize("kind", ["statistics", "events"])
@pytest.mark.parametrize("keep_ranks", [False, True])
@pytest.mark.filterwarnings("ignore::retrograd.core.errors.RetrogradWarning")
def test_a_damaged_run_is_not_compacted(run: Path, kind: str, keep_ranks: bool) -> None:
    torn = tear(run, kind, 3)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(DamagedRunError, match=f"is not compacted(.|\n)*{torn.name}"):
        compact(run, keep_ranks=keep_ranks)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", ["statistics", "events"])
def test_a_list_says_that_a_run_is_damaged(run: Path, how: str, kind: str) -> None:
    assert read_line(run).status == "finished"
    tear(run, kind, 3, how)
    line = read_line(run)
    assert (line.status, line.last_step, line.loss) == ("damaged", 6, 6.0)


def test_a_list_says_that_a_later_version_has_written_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = read_json(run / "manifest.json")
    write_json(run / "manifest.json", {**content, "format": 99})
    assert read_line(run).status == "newer format"
    assert main(["ls", str(run.parent)]) == 0
    assert "newer format" in capsys.readouterr().out
    for told in ("1", None, -1, 99.0):
        write_json(run / "manifest.json", {**content, "format": told})
        assert read_line(run).status == "damaged"


@pytest.mark.parametrize("how", DAMAGES)
def test_tensors_of_other_shards_are_read(run: Path, how: str) -> None:
    torn = tear(run, "tensors", 3, how)
    opened = open_run(run)
    with pytest.warns(RetrogradWarning, match=rf"{torn.name}.*ends with step 2.*begins with step 4"):
        kept = opened.history["a:output"].tensors
    assert [each.step for each in kept] == [0, 1, 2, 4, 5, 6]
    assert [each.load().tolist() for each in kept] == [[step] * 2 for step in (0, 1, 2, 4, 5, 6)]  # type: ignore[union-attr]
    assert [part.path for part in opened.damaged] == [torn]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is told once
        opened.refresh()
        assert len(opened.history["a:output"].tensors) == 6
    assert [part.path for part in opened.damaged] == [torn]


def test_a_run_whose_tensors_are_all_damaged_is_read(run: Path) -> None:
    for number in range(len(STEPS)):
        tear(run, "tensors", number)
    opened = open_run(run)
    with pytest.warns(RetrogradWarning, match="shard-"):
        assert opened.history["a:output"].tensors == []
    assert len(opened.damaged) == len(STEPS)
    assert opened.history["a:output"].steps.tolist() == list(STEPS)


# ---- pages that are damaged beneath a footer that is whole ----

GROUPED = range(70)


@pytest.fixture
def grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seventy steps: two merged parts of several row groups, and six of a step each."""
    monkeypatch.setattr(LIMITS, "group_rows", 30)
    return write_run(tmp_path / "run", GROUPED)


def spoil(path: Path, group: int, column: str, where: float) -> range:
    """Flip bits in the bytes of a column of a row group; returns the steps of the file."""
    file = pq.ParquetFile(path)
    of_group = file.metadata.row_group(group)
    chunk = next(
        each for each in map(of_group.column, range(of_group.num_columns)) if each.path_in_schema.startswith(column)
    )
    start = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
    steps = file.read(["step"])["step"].to_pylist()
    whole = bytearray(path.read_bytes())
    place = start + int(where * (chunk.total_compressed_size - 8))
    whole[place : place + 8] = bytes(each ^ 0xFF for each in whole[place : place + 8])
    path.write_bytes(whole)
    return range(min(steps), max(steps) + 1)


def ask_of(run: Run) -> list[np.ndarray]:
    series = run.history["a:output"]
    return [series.steps, series.rms, series.max, series.exponents[0], run.history.matrix("zero_share").values[0]]


HARMLESS = {("count", 0.5)}
"""Bytes of the header of a page that say nothing of what is in it."""


@pytest.mark.parametrize("where", [0.0, 0.5])
@pytest.mark.parametrize("column", ["step", "phase", "max", "count", "bins"])
@pytest.mark.parametrize("most", [0, 1 << 18])
@pytest.mark.filterwarnings("ignore::retrograd.core.errors.RetrogradWarning")
def test_a_file_with_a_bad_page_is_left_out(
    grouped: Path, monkeypatch: pytest.MonkeyPatch, column: str, where: float, most: int
) -> None:
    monkeypatch.setattr(LIMITS, "held_rows", most)
    whole = ask_of(open_run(grouped))
    path = grouped / "rank00000/statistics" / files(grouped, "statistics")[0]
    assert pq.read_metadata(path).num_row_groups > 2
    lost = spoil(path, 1, column, where)
    run = open_run(grouped)
    told = ask_of(run)
    is_left = ~np.isin(whole[0], lost)
    if column == "phase":  # the same for all rows, and told in the footer
        is_left[:] = True
    elif (column, where) not in HARMLESS:
        assert told[3].tolist() == whole[3][is_left].tolist()
        assert [(part.path, part.steps) for part in run.damaged] == [(path, (lost[0], lost[-1]))]
    if not run.damaged or (most == 0 and column == "bins"):  # what needs no histograms is read all the same
        is_left[:] = True
    for found, expected in zip(told[:3], whole[:3], strict=True):
        assert found.tolist() == expected[is_left].tolist()
    before = len(run.damaged)
    run.refresh()
    assert len(run.damaged) == before


@pytest.mark.parametrize("most", [0, 1 << 18])
def test_a_bad_page_is_told_of_once_and_shown(
    grouped: Path, monkeypatch: pytest.MonkeyPatch, most: int, tmp_path: Path
) -> None:
    monkeypatch.setattr(LIMITS, "held_rows", most)
    path = grouped / "rank00000/statistics" / files(grouped, "statistics")[0]
    lost = spoil(path, 1, "sum", 0.5)
    run = open_run(grouped)
    with pytest.warns(RetrogradWarning, match=f"{path.name}.*steps {lost[0]} to {lost[-1]}") as told:
        page = rg.write_report(run, tmp_path / "report.html").read_text()
    assert len([each for each in told if path.name in str(each.message)]) == 1
    assert f"steps {lost[0]} to {lost[-1]}" in page
    assert "1 damaged file left out" in repr(run)


@pytest.mark.parametrize("keep_ranks", [False, True])
def test_a_run_with_a_bad_page_is_not_compacted(grouped: Path, keep_ranks: bool) -> None:
    spoil(grouped / "rank00000/statistics" / files(grouped, "statistics")[0], 1, "sum", 0.5)
    before = {path: path.read_bytes() for path in grouped.rglob("*.parquet")}
    with pytest.raises(DamagedRunError, match="cannot be read"):
        compact(grouped, keep_ranks=keep_ranks)
    assert {path: path.read_bytes() for path in grouped.rglob("*.parquet")} == before


# ---- a run of which no row can be read ----


def flip_all(run: Path) -> None:
    """Damage a page of each part; footers stay whole."""
    for name in files(run, "statistics"):
        spoil(run / "rank00000/statistics" / name, 0, "sum", 0.5)


@pytest.mark.filterwarnings("ignore::retrograd.core.errors.RetrogradWarning")
def test_that_no_row_can_be_read_is_what_is_said_first(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = shutil.copytree(run, tmp_path / "whole")
    count = open_run(run).history.rows.count
    flip_all(run)
    for command in ("explain", "view"):
        assert main([command, str(run)]) == 2
        told = capsys.readouterr().out.splitlines()[0]
        assert f"0 of {len(STEPS)} steps could be read" in told
        assert f"{count} of {count} rows" in told
    for pair, which in (((run, whole), "A"), ((whole, run), "B")):
        with pytest.raises(CompareError, match=f"No row of {which} could be read: {count} of {count} rows"):
            rg.compare(*pair)


@pytest.mark.filterwarnings("ignore::retrograd.core.errors.RetrogradWarning")
def test_what_a_comparison_lacks_is_said(run: Path, tmp_path: Path) -> None:
    whole = shutil.copytree(run, tmp_path / "whole")
    count = open_run(run).history.rows.count
    spoil(run / "rank00000/statistics" / files(run, "statistics")[2], 0, "sum", 0.5)
    lost = count // len(STEPS)
    told = rg.compare(whole, run)
    assert told.verdict == "identical"
    assert told.about.endswith(f"; without {lost} of {count} rows and 1 damaged file of B")
    assert f"without {lost} of {count} rows" in rg.explain(run).headline


def test_commands_print_warnings_as_lines_of_theirs(run: Path) -> None:
    flip_all(run)
    told = warm.run([sys.executable, "-m", "retrograd", "explain", str(run)], capture_output=True, text=True)
    assert told.returncode == 2
    assert told.stderr.startswith("retrograd: ")
    assert "RetrogradWarning" not in told.stderr
    assert "main()" not in told.stderr


def test_a_command_without_memory_ends_with_a_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path) -> None:
        raise MemoryError

    monkeypatch.setattr(chosen_run, "choose_run", fail)
    assert main(["explain", str(run)]) == 2
    assert capsys.readouterr().err == "retrograd: there is too little memory for it.\n"


@pytest.mark.parametrize(
    "error",
    [
        pa.lib.ArrowMemoryError("malloc of size 64 failed"),
        pa.lib.ArrowException("Unknown error: Failed to launch worker thread: Resource temporarily unavailable"),
    ],
)
def test_too_little_memory_is_not_damage(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(MemoryError), parts.explain_damage(tmp_path / "part"):
        raise error


def test_json_takes_as_much_memory_as_it_is_long(tmp_path: Path) -> None:
    write_json(tmp_path / "small.json", {"a": 1})
    tracemalloc.start()
    try:
        assert read_json(tmp_path / "small.json") == {"a": 1}
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
