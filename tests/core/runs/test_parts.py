from pathlib import Path

import numpy as np
import pytest

from retrograd.core.history.sink import Moment
from retrograd.core.limits import LIMITS
from retrograd.core.runs.layout import Span, list_parts
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from tests.core.history.made import make_batch, make_steps
from tests.core.runs.written import files, open_writer, sort_rows, write_run


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "fan_in", 3)
    monkeypatch.setattr(LIMITS, "group_rows", 12)


@pytest.mark.usefixtures("small")
def test_neighbours_of_like_size_are_merged(tmp_path: Path) -> None:
    write_run(tmp_path / "run", range(14))
    parts = ["part-00000000-00000008", "part-00000009-00000011", "part-00000012-00000012", "part-00000013-00000013"]
    assert files(tmp_path / "run", "statistics") == [f"{part}.parquet" for part in parts]
    assert files(tmp_path / "run", "events") == files(tmp_path / "run", "statistics")


def test_merging_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = open_run(write_run(tmp_path / "apart", range(20)))
    monkeypatch.setattr(LIMITS, "fan_in", 3)
    monkeypatch.setattr(LIMITS, "group_rows", 12)
    merged = open_run(write_run(tmp_path / "merged", range(20)))
    assert sort_rows(merged.history).equals(sort_rows(apart.history))
    assert repr(merged.history.events) == repr(apart.history.events)
    assert merged.history.sites == apart.history.sites


@pytest.mark.usefixtures("small")
def test_a_statistic_that_only_some_parts_have(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    for step in range(3):
        custom = {"entropy": ([0], [float(step)])} if step == 1 else {}
        writer.add_rows(make_batch(Moment(step), {0: np.ones(2)}, custom=custom))
        writer.flush()
    writer.close()
    assert len(files(tmp_path, "statistics")) == 1
    assert str(open_run(tmp_path).history["a:output"].statistic("entropy").tolist()) == "[nan, 1.0, nan]"


@pytest.mark.usefixtures("small")
def test_large_parts_are_let_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "part_rows", 20)
    write_run(tmp_path, range(12))
    spans = [span for span, _ in list_parts(tmp_path / "rank00000" / "statistics")]
    assert spans == [Span(first, first + 2) for first in (0, 3, 6, 9)]
    assert len(open_run(tmp_path).history["a:output"]) == 12


@pytest.mark.usefixtures("small")
def test_dying_between_merging_and_removing_is_harmless(tmp_path: Path) -> None:
    write_run(tmp_path, range(2))
    folder = tmp_path / "rank00000" / "statistics"
    small = {path.name: path.read_bytes() for path in folder.iterdir()}
    writer = open_writer(tmp_path, resume=True)
    writer.add_rows(make_steps([2])[0])
    writer.close()
    for name, content in small.items():
        (folder / name).write_bytes(content)
    assert open_run(tmp_path).history["a:output"].steps.tolist() == [0, 1, 2]
    assert len(open_run(tmp_path).history.rows["step"]) == 15
    RunWriter(tmp_path, resume=True).close()
    assert files(tmp_path, "statistics") == ["part-00000000-00000002.parquet"]


@pytest.mark.usefixtures("small")
def test_a_reader_keeps_what_it_opened(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    batches = make_steps(range(3))
    for batch in batches[:2]:
        writer.add_rows(batch)
        writer.flush()
    run = open_run(tmp_path)
    writer.add_rows(batches[2])
    writer.close()
    assert len(files(tmp_path, "statistics")) == 1
    assert run.history["a:output"].rms.shape == (2,)  # read only now, from files that are gone
    run.refresh()
    assert run.history["a:output"].rms.shape == (3,)


def test_spans() -> None:
    assert Span(3, 5).file_name == "part-00000003-00000005.parquet"
    assert Span(0, 9).contains(Span(0, 3))
    assert not Span(0, 3).contains(Span(3, 4))
