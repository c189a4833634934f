"""What can be handed to whatever reads a record, and what is said of all else."""

from __future__ import annotations

import csv
import inspect
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core import errors
from retrograd.core.errors import NoSuchSiteError, NotARunError, NothingRecordedError, RetrogradError, RunExistsError
from retrograd.core.history.history import History
from retrograd.core.runs.reader import Run


def train(recorded: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(recorded.parameters(), 0.1)
    for _ in range(steps):
        recorded(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()


@pytest.fixture
def recording(tmp_path: Path) -> rg.Recording:
    model = nn.Sequential(nn.Linear(3, 2))
    with rg.record(model, tmp_path / "run") as recording:
        train(model)
    return recording


def test_a_view_takes_a_folder_a_run_a_recording_and_a_history(recording: rg.Recording, tmp_path: Path) -> None:
    given = [str(tmp_path / "run"), tmp_path / "run", rg.open_run(tmp_path / "run"), recording, recording.history]
    assert len({rg.format_table(each) for each in given}) == 1
    assert len({rg.format_heatmap(each) for each in given}) == 1
    for each in given[:4]:
        assert rg.write_report(each) == tmp_path / "run" / "report.html"
        rows = csv.DictReader(rg.export(each, "csv", tmp_path / "rows.csv").read_text().splitlines())
        assert {row["step"] for row in rows} == {"0", "1"}
    assert rg.write_report(recording.history, tmp_path / "history.html").exists()


@pytest.mark.parametrize("given", [nn.Linear(1, 1), None, {}, 3])
def test_all_else_is_refused_with_words(given: object, tmp_path: Path) -> None:
    for read in (rg.format_table, rg.format_heatmap, rg.write_report, lambda run: rg.export(run, "csv")):
        with pytest.raises(NothingRecordedError, match=type(given).__name__):
            read(given)  # type: ignore[operator]
    with pytest.raises(TypeError):
        rg.print_table(given)  # type: ignore[arg-type]


def test_a_history_in_memory_is_not_exported(recording: rg.Recording) -> None:
    with pytest.raises(NothingRecordedError, match="in memory"):
        rg.export(recording.history, "csv")
    with pytest.raises(ValueError, match="xml"):
        rg.export(recording, "xml")


def test_a_recording_to_a_folder_refreshes_one_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    with rg.record(model, tmp_path / "run") as recording:
        train(model, 1)
        run, history = recording.run, recording.history
        assert len(history["0:output.grad"].steps) == 1
        train(model, 2)
        assert recording.history is history
        assert recording.run is run
        assert len(history["0:output.grad"].steps) == 3
        assert (
            history["0:output.grad"].rms.tolist() == rg.open_run(tmp_path / "run").history["0:output.grad"].rms.tolist()
        )
    assert isinstance(recording.run, Run)
    assert recording.run.status == "finished"


def test_a_recording_in_memory_has_no_run() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    with rg.record(model) as recording:
        train(model)
    assert recording.run is None
    assert isinstance(recording.history, History)


def test_a_history_is_listed_and_asked_like_a_dict(recording: rg.Recording) -> None:
    history = recording.history
    assert list(history) == history.sites
    assert "0:output.grad" in history
    assert "1:output" not in history
    assert [history[site].rms.shape for site in history] == [(2,)] * len(history.sites)
    with pytest.raises(KeyError, match="no-such-site"):
        history["1:output"]


def test_errors_are_those_that_python_has_for_the_same_mistake(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        rg.open_run(tmp_path / "nothing")
    assert isinstance(missing.value, NotARunError)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileExistsError) as taken:
        rg.record(nn.Linear(1, 1), tmp_path)
    assert isinstance(taken.value, RunExistsError)
    with pytest.raises(ValueError, match="bad-schedule"):
        rg.every(0)
    assert issubclass(NoSuchSiteError, LookupError)


@pytest.mark.parametrize(
    "kind", [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, RetrogradError)]
)
def test_an_error_says_and_keeps_what_it_was_made_with(kind: type[RetrogradError]) -> None:
    error = kind("It is wrong.", repair="do so.", reason="it must.")
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert str(each) == f"It is wrong. [{kind.slug}]\n  Try: do so.\n  Reason: it must."
        assert each.args == ("It is wrong.", "do so.", "it must.")
        assert getattr(each, "errno", None) is getattr(each, "filename", None) is None
