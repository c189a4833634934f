"""Parts of statistics that their writer merges while a reader has the run open, more of them than stay open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.core import addresses
from retrograd.core.errors import DamagedRunError
from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, Moment
from retrograd.core.runs import event_parts, parts, stored
from retrograd.core.runs.compaction import compact
from retrograd.core.runs.layout import list_parts
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from tests.core.history.made import make_steps
from tests.core.runs.written import open_writer, sort_rows

FOLDER = "rank00000/statistics"


@pytest.fixture
def store() -> Iterator[str]:
    """A folder of a store."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("upath")
    yield "memory://runs/merged"
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def writer(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunWriter]:
    """A writer that merges four parts, of a run of which a reader keeps one file open; ``"store"``: not on a disk."""
    monkeypatch.setattr(parts, "FAN_IN", 4)
    monkeypatch.setattr(stored, "_MOST_GROUPS", 1)
    is_far = getattr(request, "param", "disk") == "store"
    writer = open_writer(request.getfixturevalue("store") if is_far else tmp_path / "run")
    yield writer
    writer.close()


both = pytest.mark.parametrize("writer", ["disk", "store"], indirect=True)


def write(writer: RunWriter, steps: range) -> None:
    for batch in make_steps(steps):
        writer.add_rows(batch)
        writer.flush()


def tell(history: History) -> dict[str, Any]:
    """Bytes of what there is to read of all sites."""
    told: dict[str, Any] = {}
    for site in history.site_names:
        series = history[site]
        told[site] = [series.steps.tobytes(), series.rms.tobytes(), *(each.tobytes() for each in series.exponents)]
    return told


@both
@pytest.mark.parametrize("rows_of_a_group", [1, 30, 1 << 15])
@pytest.mark.parametrize("before", [3, 6, 13])
def test_rows_are_those_of_the_parts(
    writer: RunWriter, monkeypatch: pytest.MonkeyPatch, before: int, rows_of_a_group: int
) -> None:
    monkeypatch.setattr(parts, "ROWS_A_GROUP", rows_of_a_group)
    write(writer, range(before))
    whole, opened = open_run(writer.path).history, open_run(writer.path)
    table, told = sort_rows(whole), tell(whole)
    listed = {path.name for _, path in opened.list_statistics()}
    write(writer, range(before, 18))
    left = {path.name for _, path in list_parts(writer.path / FOLDER)}
    assert listed - left
    assert tell(opened.history) == told
    assert sort_rows(opened.history).equals(table)
    opened.refresh()
    assert opened.history["a:output"].steps.tolist() == list(range(18))


@both
def test_a_part_that_was_merged_again_is_found(writer: RunWriter) -> None:
    write(writer, range(6))
    opened = open_run(writer.path)
    opened.refresh()
    write(writer, range(6, 9))
    opened.refresh()  # of these, two parts are the same as before
    write(writer, range(9, 17))
    assert len(list_parts(writer.path / FOLDER)) < 4
    assert opened.history["a:output"].steps.tolist() == list(range(9))
    np.testing.assert_array_equal(opened.history["a:output"].rms, open_run(writer.path).history["a:output"].rms[:9])


def test_parts_that_were_compacted_are_gone(writer: RunWriter) -> None:
    write(writer, range(7))
    opened = open_run(writer.path)
    writer.close()
    compact(writer.path, keep_ranks=True)
    with pytest.raises(DamagedRunError, match=r"part-.* is gone.(.|\n)*refresh"):
        opened.history["a:output"].statistic("rms")
    opened.refresh()
    assert opened.history["a:output"].steps.tolist() == list(range(7))


def test_parts_that_were_written_anew_are_gone(writer: RunWriter) -> None:
    write(writer, range(7))
    opened = open_run(writer.path)
    writer.close()
    again = open_writer(writer.path, resume=True, step=2)
    write(again, range(2, 14))
    again.close()
    with pytest.raises(DamagedRunError, match="is gone"):
        opened.history["a:output"].statistic("rms")


def happen(writer: RunWriter, steps: range) -> None:
    for step in steps:
        writer.add_event(Event(Moment(step, 0, 0), "loss", value=float(step), time=float(step)))
        writer.flush()


@both
def test_events_are_those_of_the_parts(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_parts, "MOST_EVENTS", 0)
    happen(writer, range(7))
    opened = open_run(writer.path)
    told = repr(opened.history.events)
    happen(writer, range(7, 18))
    assert repr(opened.history.events) == told


def test_events_that_were_written_anew_are_gone(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that a resumed run wrote are not those that were listed, though as many of them lie in the same place."""
    monkeypatch.setattr(event_parts, "MOST_EVENTS", 0)
    happen(writer, range(7))
    opened = open_run(writer.path)
    writer.close()
    again = open_writer(writer.path, resume=True, step=2)
    happen(again, range(2, 14))
    again.close()
    with pytest.raises(DamagedRunError, match="is gone"):
        repr(opened.history.events)


@pytest.mark.parametrize("writer", ["store"], indirect=True)
def test_a_merged_file_in_a_store_is_fetched_once(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    write(writer, range(7))
    opened = open_run(writer.path)
    write(writer, range(7, 17))
    assert len(list_parts(writer.path / FOLDER)) == 2
    fetched, plain = list[str](), addresses.fetch

    def note(path: Path, *limits: int) -> bytes:
        fetched.append(path.name)
        return plain(path, *limits)

    monkeypatch.setattr(addresses, "fetch", note)
    assert len(opened.history["a:output"].rms) == 7
    assert fetched.count("part-00000000-00000015.parquet") == 1
