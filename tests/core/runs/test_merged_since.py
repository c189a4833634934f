"""Parts that their writer merges while a reader has the run open: those that stay open are read, others are gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retrograd.core.errors import DamagedRunError
from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, Moment
from retrograd.core.limits import LIMITS
from retrograd.core.runs.layout import list_parts
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from tests.core.history.made import make_steps
from tests.core.runs.written import open_writer, sort_rows


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunWriter]:
    """A writer that merges four parts."""
    monkeypatch.setattr(LIMITS, "fan_in", 4)
    writer = open_writer(tmp_path / "run")
    yield writer
    writer.close()


def write(writer: RunWriter, steps: range) -> None:
    for batch in make_steps(steps):
        writer.add_rows(batch)
        writer.add_event(Event(Moment(batch.moment.step, 0, 0), "loss", value=1.0, time=1.0))
        writer.flush()


def tell(history: History) -> dict[str, Any]:
    """Bytes of what there is to read of all sites."""
    told: dict[str, Any] = {}
    for site in history.site_names:
        series = history[site]
        told[site] = [series.steps.tobytes(), series.rms.tobytes(), *(each.tobytes() for each in series.exponents)]
    return told


@pytest.mark.parametrize("most_rows", [1 << 18, 0])
def test_rows_are_those_of_the_parts(writer: RunWriter, monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
    monkeypatch.setattr(LIMITS, "held_rows", most_rows)
    write(writer, range(6))
    whole, opened = open_run(writer.path).history, open_run(writer.path)
    table, told = sort_rows(whole), tell(whole)
    listed = {path.name for _, path in opened.list_statistics()}
    write(writer, range(6, 18))
    assert listed - {path.name for _, path in list_parts(writer.path / "rank00000/statistics")}
    assert tell(opened.history) == told
    assert sort_rows(opened.history).equals(table)
    opened.refresh()
    assert opened.history["a:output"].steps.tolist() == list(range(18))


def test_a_file_that_is_gone_is_an_error_and_refreshing_helps(
    writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "open_groups", 1)
    monkeypatch.setattr(LIMITS, "held_events", 0)
    write(writer, range(7))
    opened = open_run(writer.path)
    write(writer, range(7, 14))
    with pytest.raises(DamagedRunError, match=r"part-.* is gone.(.|\n)*refresh"):
        opened.history["a:output"].statistic("rms")
    with pytest.raises(DamagedRunError, match=r"part-.* is gone.(.|\n)*refresh"):
        repr(opened.history.events)
    opened.refresh()
    assert opened.history["a:output"].steps.tolist() == list(range(14))
    assert len(opened.history.events) == 14
    assert opened.damaged == []
