import csv
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from retrograd.core.errors import LibraryError, RunWriteError
from retrograd.core.exports import export as exports
from retrograd.core.exports import tables
from retrograd.core.exports.export import export
from retrograd.core.exports.tables import export_csv
from retrograd.core.history import windows
from retrograd.core.history.sink import Event, Moment
from retrograd.core.limits import LIMITS
from retrograd.core.runs.reader import Run, open_run
from retrograd.core.runs.writer import RunWriter
from retrograd.core.statistics.row import STATISTICS
from tests.core.history.made import SITES, make_batch, make_steps
from tests.core.runs.written import open_writer, write_run

ALL = {"scalars": 0, "histograms": 0}
"""How much of a board to read."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(write_run(tmp_path / "run", range(5)))


def test_csv(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", 7)
    path = export(run, "csv")
    assert path == run.path / "statistics.csv"
    frame = pandas.read_csv(path)
    assert len(frame) == 25
    assert set(STATISTICS) < set(frame)
    for site, rows in frame.groupby("site"):
        series = run.history[site]
        assert rows["step"].tolist() == series.steps.tolist()
        for statistic in STATISTICS:
            np.testing.assert_allclose(rows[statistic], series.statistic(statistic), rtol=1e-14)


@pytest.mark.parametrize("to", ["csv", "parquet"])
def test_scalars_lie_beside_the_table(to: str, tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "run")
    for step in range(3):
        writer.add_event(Event(Moment(step), "loss", value=0.5 * step))
        writer.add_event(Event(Moment(step), "scalar", "=acc" if step else "accuracy", value=step))
    writer.close()
    run = open_run(tmp_path / "run")
    path = export(run, to, tmp_path / f"rows.{to}")
    frame = getattr(pandas, f"read_{to}")(path.with_name(f"rows_scalars.{to}"))
    assert frame["step"].tolist() == [0, 1, 2]
    assert frame["loss"].tolist() == [0.0, 0.5, 1.0]
    assert frame["accuracy"].dropna().tolist() == [0.0]
    assert frame["'=acc" if to == "csv" else "=acc"].dropna().tolist() == [1.0, 2.0]


def test_csv_with_a_users_statistic_and_of_nothing(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "run")
    assert export_csv(open_run(tmp_path / "run"), tmp_path / "empty.csv").read_text().count("\n") == 1
    writer.add_rows(make_batch(Moment(0), {0: np.ones(1)}, custom={"entropy": ([0], [0.25])}))
    writer.close()
    path = export(open_run(tmp_path / "run"), "csv", tmp_path / "other.csv")
    assert pandas.read_csv(path)["entropy"].tolist() == [0.25]


def test_csv_of_a_long_run_holds_no_column(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = export(run, "csv").read_bytes()
    monkeypatch.setattr(LIMITS, "held_rows", 1)

    def refuse(rows: windows.LongRows, name: str) -> None:
        raise AssertionError(f"all of {name!r} is held")

    monkeypatch.setattr(windows.LongRows, "__getitem__", refuse)
    assert export(open_run(run.path), "csv", tmp_path / "long.csv").read_bytes() == whole


def test_tensorboard(run: Run) -> None:
    path = export(run, "tensorboard")
    board = EventAccumulator(str(path), ALL).Reload()
    tags = board.Tags()
    assert {"loss", "rms/a:output", "mean/b:output.grad", "update_ratio/b:weight.update"} < set(tags["scalars"])
    assert "update_ratio/a:output" not in tags["scalars"]
    series = run.history["a:output"]
    found = board.Scalars("rms/a:output")
    assert [event.step for event in found] == series.steps.tolist()
    np.testing.assert_allclose([event.value for event in found], series.rms, rtol=1e-6)
    assert len(tags["histograms"]) == len(SITES)
    for event, counts in zip(board.Histograms("exponents/a:output"), series.exponents[1], strict=True):
        histogram = event.histogram_value
        used = np.flatnonzero(counts)
        assert sum(histogram.bucket) == histogram.num == 8
        assert list(histogram.bucket_limit) == list(range(used[0] - 126, used[-1] - 125))
        assert (histogram.min, histogram.max) == (used[0] - 127, used[-1] - 126)


def test_tensorboard_of_a_long_run_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "MOST_SCALARS", 4)
    monkeypatch.setattr(exports, "MOST_HISTOGRAMS", 1)
    writer = open_writer(tmp_path / "run")
    for batch in make_steps(range(100)):
        writer.add_rows(batch)
        writer.add_event(Event(batch.moment, "loss", value=1.0))
    writer.close()
    path = export(open_run(tmp_path / "run"), "tensorboard", tmp_path / "board")
    board = EventAccumulator(str(path), ALL).Reload()
    assert [event.step for event in board.Scalars("loss")] == [0, 33, 66, 99]
    assert len(board.Histograms("exponents/a:output")) == 1


def test_tensorboard_of_an_evaluation_alone_has_its_numbers(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "run")
    writer.add_rows(make_batch(Moment(3, phase="eval"), {0: np.full(4, 2.0)}))
    writer.close()
    board = EventAccumulator(str(export(open_run(tmp_path / "run"), "tensorboard")), ALL).Reload()
    assert [(event.step, event.value) for event in board.Scalars("rms/a:output")] == [(3, 2.0)]


def test_tensorboard_that_is_not_installed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.delitem(sys.modules, "retrograd.core.exports.tensorboard", raising=False)
    with pytest.raises(LibraryError, match=r"pip install 'retrograd\[tensorboard\]'"):
        export(run, "tensorboard")


def test_an_unknown_format(run: Run) -> None:
    with pytest.raises(ValueError, match=r"'xls'.*\n.*'csv', 'parquet', 'tensorboard'"):
        export(run, "xls")


@pytest.mark.parametrize("name", ["=1+1:output", "@sum(a):output", "+a:output", "-a:output", "\ta:output"])
def test_csv_runs_no_name_as_a_formula(tmp_path: Path, name: str) -> None:
    writer = RunWriter(tmp_path / "run")
    writer.add_sites([name])
    writer.add_rows(make_batch(Moment(0), {0: np.array([-1.5, -2.5])}))
    writer.close()
    path = export_csv(open_run(tmp_path / "run"), tmp_path / "out.csv")
    [line] = csv.DictReader(path.read_text().splitlines())
    assert line["site"] == f"'{name}"
    assert float(line["mean"]) == -2.0  # a number stays one
    assert line["mean"].startswith("-")


@pytest.mark.parametrize("to", ["csv", "tensorboard"])
def test_a_place_that_cannot_be_written(run: Run, to: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunWriteError, match="cannot be written"):
        export(run, to, tmp_path / "file" / "out")
