"""What a list of runs tells, against the events that were written."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from retrograd.core.cli import main
from retrograd.core.errors import LaunchError, NotARunError
from retrograd.core.history.sink import Event, Moment
from retrograd.core.runs.listed import choose_listed, find_differing, natural, read_listed
from retrograd.core.runs.listing import RunLine
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.settings import read_settings
from retrograd.core.views.runs_table import print_runs
from tests.core.runs.written import open_writer, write_run


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """Three runs that are over, one that goes on, a folder that is none, and a run with a torn file."""
    folder = tmp_path / "runs"
    write_run(folder / "short", range(2))
    write_run(folder / "long", range(9))
    ill = open_writer(folder / "ill")
    ill.add_event(Event(Moment(0, 0, 0), "loss", value=math.nan, time=1.0))
    ill.close("failed")
    (folder / "ill" / "findings.jsonl").write_text('{"severity": "critical"}\n{"severity": "note"}\n')
    (folder / "notes").mkdir()
    write_run(folder / "torn", range(1))
    (folder / "torn" / "rank00000" / "rank.json").write_text("{")
    return folder


def list_runs(parent: Path) -> list[RunLine]:
    return [run.line for run in read_listed(parent)]


def name_in_order(parent: Path, *choice: Any, **options: Any) -> list[str]:
    return [each.line.name for each in choose_listed(read_listed(parent), *choice, **options)]


def test_runs_are_told_sorted_and_found(
    parent: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {line.name: line for line in list_runs(parent)}
    assert set(told) == {"short", "long", "ill", "torn"}
    assert (told["long"].last_step, told["long"].status, told["long"].loss) == (8, "finished", 8.0)
    assert told["long"].findings is None
    assert told["ill"].status == "failed"
    assert told["ill"].loss is not None
    assert math.isnan(told["ill"].loss)
    assert told["ill"].findings == {"critical": 1, "warning": 0, "note": 1}
    assert told["torn"].status == "damaged"
    assert name_in_order(parent, "steps")[:2] == ["long", "short"]
    assert name_in_order(parent, "loss") == ["short", "long", "ill", "torn"]
    assert name_in_order(parent, "findings")[0] == "ill"

    writer = open_writer(parent / "going")
    writer.flush()
    assert {line.name: line.status for line in list_runs(parent)}["going"] == "running"
    writer.close()

    assert main(["ls", str(parent), "--json", "--sort", "name"]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == ["going", "ill", "long", "short", "torn"]
    assert lines[1]["loss"] == "nan"
    assert main(["ls", str(parent)]) == 0
    assert "1 critical, 1 note" in capfd.readouterr().out
    with pytest.raises(NotARunError):
        list_runs(parent / "nowhere")

    os.utime(parent / "long" / "manifest.json", (4e9, 4e9))
    monkeypatch.chdir(parent.parent)
    assert main(["ls", "--json"]) == 0
    assert len(capfd.readouterr().out.splitlines()) == len(list_runs(parent))
    assert main(["view", "--statistic", "foo"]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert "the newest run: runs/long" in said.err
    assert "[bad-statistic]" in said.err
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: not opened.append(address))
    assert main(["report", "--open"]) == 0
    assert opened == [(parent / "long" / "report.html").as_uri()]


def test_the_last_loss_is_that_of_the_last_step_over_micro_batches_and_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 ends a step earlier, as when it is killed; each micro-batch lies in a part file of its own."""
    losses = {0: {0: (1.0, 2.0), 1: (5.0, 6.0)}, 1: {0: (3.0, 4.0), 1: (7.0, 9.0), 2: (10.0, 40.0)}}
    for rank, steps in losses.items():
        monkeypatch.setenv("RANK", str(rank))
        writer = open_writer(tmp_path / "run", join=True)
        for step, values in steps.items():
            for micro, value in enumerate(values):
                writer.add_event(Event(Moment(step, micro, 0), "loss", value=value, time=1.0))
                writer.flush()
        writer.close()
    monkeypatch.delenv("RANK")
    [line] = list_runs(tmp_path)
    assert line.loss == 25.0
    assert line.loss == open_run(tmp_path / "run").history.loss.values[-1]
    shutil.rmtree(tmp_path / "run" / "rank00001")
    assert list_runs(tmp_path)[0].loss == 5.5


def test_a_run_is_listed_as_itself_and_an_empty_folder_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs" / "one", range(3))
    (tmp_path / "none").mkdir()
    for folder in ("runs", "runs/one", "runs/one/"):
        assert [(line.name, line.last_step) for line in list_runs(tmp_path / folder)] == [("one", 2)]
    monkeypatch.chdir(tmp_path / "runs" / "one")
    assert main(["ls", "--json", "."]) == 0
    assert json.loads(capfd.readouterr().out)["name"] == "one"
    assert main(["ls", "--json", str(tmp_path / "none")]) == 0
    said = capfd.readouterr()
    assert said.out == ""
    assert f"there is no run in {tmp_path / 'none'}" in said.err


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("updates", [0, 1, 3])
def test_the_last_loss_is_not_that_of_passes_behind_the_last_update(
    tmp_path: Path, updates: int, in_parts: bool
) -> None:
    """Losses of two micro-batches a step, and then of an evaluation; without an update nothing tells them apart."""
    writer = open_writer(tmp_path / "run")
    for step in range(max(updates, 1)):
        for micro in range(2):
            writer.add_event(Event(Moment(step, micro, 0), "loss", value=10.0 * step + micro, time=1.0))
            if in_parts:
                writer.flush()
        if updates:
            writer.add_event(Event(Moment(step, 1), "update", "SGD", step + 1.0, time=1.0))
    for micro in range(5):
        writer.add_event(Event(Moment(max(updates, 1), micro, 0), "loss", value=-100.0, time=1.0))
        if in_parts:
            writer.flush()
    writer.close()
    [line] = list_runs(tmp_path)
    expected = 10.0 * (updates - 1) + 0.5 if updates else -100.0
    assert line.loss == expected
    assert open_run(tmp_path / "run").history.made_loss.values[-1] == expected
    assert line.last_step == (updates - 1 if updates else 1)


HOSTILE = "<b>\n\u202e"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Runs of four rates; one ends in NaN, and one has a hostile name, no loss, and options called as columns are."""
    folder = tmp_path / "sweep"
    for number, rate in enumerate((0.1, 0.01, 0.001, 1.0)):
        writer = open_writer(folder / f"run{(2, 10, 1, 20)[number]}")
        command = ["python", "train.py", "--lr", str(rate), "--seed", "3"]
        writer.describe(command=command, started=f"2026-01-0{number + 1}T00:00:00+00:00", seed=3)
        for step in range(40):
            value = math.nan if rate == 1.0 and step > 20 else rate * (step + 1)
            writer.add_event(Event(Moment(step, 0, 0), "loss", value=value, time=1.0))
        if rate < 1.0:
            writer.add_event(Event(Moment(39), "scalar", name="accuracy", value=1 - rate, time=1.0))
        writer.close("failed" if rate == 0.01 else "finished")
    writer = open_writer(folder / HOSTILE)
    writer.describe(command=["python", "train.py", "loss=nan", "--lr", "nan"])
    writer.close()
    return folder


def test_runs_are_chosen_and_ordered_by_what_is_known_of_them(
    sweep: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert name_in_order(sweep, "name")[1:] == ["run1", "run2", "run10", "run20"]
    assert name_in_order(sweep, "--lr") == ["run1", "run10", "run2", "run20", HOSTILE]
    assert name_in_order(sweep, "lr", is_reversed=True) == ["run20", "run2", "run10", "run1", HOSTILE]
    for is_reversed, known in ((False, ["run1", "run10", "run2"]), (True, ["run2", "run10", "run1"])):
        assert name_in_order(sweep, "final", is_reversed=is_reversed) == [*known, "run20", HOSTILE]
    assert name_in_order(sweep, "accuracy", is_reversed=True)[0] == "run1"
    assert name_in_order(sweep, "name", ["lr>=0.01", "status=finished"]) == ["run2", "run20"]
    assert name_in_order(sweep, "name", ["status!=finished"]) == ["run10"]
    assert name_in_order(sweep, "name", ["final=nan"]) == ["run20"]
    assert name_in_order(sweep, "name", ["argv.loss=nan"]) == [HOSTILE]
    assert name_in_order(sweep, "name", search="RUN1 train.py") == ["run1", "run10"]
    found = {each.line.name: each for each in read_listed(sweep)}
    assert found["run2"].curve is not None
    assert found["run2"].curve.final == pytest.approx(0.1 * (39 + 40) / 2)
    assert found["run2"].curve.logged == {"accuracy": 0.9}
    for wrong, near in (("acuracy", "accuracy"), ("sead", "seed")):
        with pytest.raises(LaunchError, match=f"did you mean '{near}'"):
            name_in_order(sweep, wrong)
    with pytest.raises(LaunchError, match="not a condition"):
        name_in_order(sweep, "name", ["failed"])

    assert main(["ls", str(sweep), "--sort", "final", "--filter", "lr<=0.1", "--json"]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == ["run1", "run10", "run2"]
    assert lines[0]["settings"]["--lr"] == 0.001
    assert main(["ls", str(sweep), "--sort", "lr"]) == 0
    printed = capfd.readouterr().out
    assert len(printed.splitlines()) == 6
    assert "\u202e" not in printed
    columns, *rows = [line.split("\t") for line in printed.splitlines()]  # as `cut` and `awk` read it
    assert {"accuracy", "--lr"} <= set(columns)
    assert {len(row) for row in rows} == {len(columns)}
    read = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    for line in lines:
        assert float(read[line["name"]]["final"]) == line["final"]
        assert read[line["name"]]["status"] == line["status"]


def test_a_pipe_of_a_width_gets_the_table_of_a_window(
    sweep: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["ls", str(sweep)]) == 0
    printed = capfd.readouterr().out.splitlines()
    assert max(map(len, printed[:-1])) <= 70
    assert "\t" not in "".join(printed)
    assert printed[-1].startswith("A wider window")


def test_where_there_is_no_run_a_sentence_says_so(
    sweep: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none").mkdir()
    for words, told in (
        ([str(tmp_path / "none")], "there is no run in"),
        ([str(sweep), "--filter", "status=lost"], "none of 5 runs is so"),
    ):
        for form in ([], ["--json"]):
            assert main(["ls", *words, *form]) == 0
            out, err = capfd.readouterr()
            assert not out
            assert told in err


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_a_narrow_window_leaves_out_columns_before_names(
    sweep: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    window = io.StringIO()
    monkeypatch.setattr(window, "isatty", lambda: True)
    runs = choose_listed(read_listed(sweep), "name")
    print_runs(runs, file=window)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", window.getvalue()).splitlines()
    titles, said = re.split(r"\s{2,}", lines[0].strip()), " ".join(map(str.strip, lines)).partition(" also shows ")[2]
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    assert {line.split()[0] for line in lines} > {"run1", "run2", "run10", "run20"}
    for title in ("loss", "started", "last step", "curve", "status"):
        assert (title in titles) != (title in re.split(", | and ", said)), title


def test_settings_that_go_together_have_one_column() -> None:
    runs = [{"argv": f"--lr {lr}", "--lr": lr, "lr": lr, "seed": 1, "host": "a"} for lr in (0.1, 0.2)]
    assert find_differing(runs) == ["--lr"]
    assert find_differing([{"argv": "a"}, {"argv": "b"}]) == ["argv"]
    assert find_differing([{"seed": 1}, {}]) == ["seed"]
    wd = [{"--wd": 0, "weight_decay": 0.0, "x": True}, {"--wd": 1, "weight_decay": 1.0, "x": 1}]
    assert find_differing(wd) == ["--wd", "x"]  # an option and what the optimizer makes of it are one
    assert find_differing([]) == []
    assert sorted(["b10", "B2", "a"], key=natural) == ["a", "B2", "b10"]


def test_a_folder_of_runs_means_its_newest_and_a_mistyped_run_is_named(
    sweep: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(sweep / "run2" / "manifest.json", (4e9, 4e9))
    for command in ("explain", "report", "view"):
        assert main([command, str(sweep)]) == 0
        told = capfd.readouterr()
        assert f"the newest of 5 runs in {sweep}: {sweep / 'run2'}, beside " in told.err
        assert f"retrograd ls {sweep}" in told.err
    assert (sweep / "run2" / "report.html").is_file()
    assert main(["compare", str(sweep), str(sweep / "run1")]) == 2
    assert "is a folder of 5 runs" in capfd.readouterr().err
    assert main(["explain", str(sweep / "rnu20")]) == 2
    assert "run20'?" in capfd.readouterr().err
    monkeypatch.chdir(sweep.parent)
    sweep.rename("runs")
    assert main(["view", "run11"]) == 2
    assert "did you mean 'runs/run1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["train.py", "--lr", "0.1"], "train.py"),
        (["/usr/bin/python3.12", "-u", "train.py", "--lr", "0.1"], "train.py"),
        (["torchrun", "--nproc-per-node", "2", "src/train.py", "--lr", "0.1"], "train.py"),
        (["python", "-m", "train", "--lr", "0.1"], "-m train"),
        (["-m", "train", "--lr", "0.1"], "-m train"),
        (["./train", "--lr", "0.1"], "train"),
    ],
)
def test_script_and_options_are_told_apart_however_it_was_started(command: list[str], script: str) -> None:
    assert read_settings({"command": command}) == {"script": script, "argv": "--lr 0.1", "--lr": 0.1}


def test_a_number_is_the_same_setting_however_it_is_written_and_however_large() -> None:
    large = 10**400  # no float holds it
    assert find_differing([{"lr": 0, "seed": large}, {"lr": 0.0, "seed": large}]) == []
    assert find_differing([{"seed": large}, {"seed": large + 1}]) == ["seed"]
    assert find_differing([{"flag": True}, {"flag": 1}]) == ["flag"]
    assert find_differing([{"lr": math.nan}, {"lr": float("nan")}]) == []
