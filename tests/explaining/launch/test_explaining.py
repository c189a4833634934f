"""``retrograd explain``, and what is said of findings while and after a run is recorded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.cli import main
from retrograd.core.history.facts import NonFinite
from retrograd.core.history.sink import Event, Moment
from retrograd.core.launch import closing
from retrograd.core.launch.chosen_run import is_command
from retrograd.core.launch.live_findings import LiveFindings, say_critical
from retrograd.core.limits import LIMITS
from retrograd.core.recording.sink_log import EventLog
from retrograd.core.runs.findings import store_findings
from retrograd.core.runs.layout import find_latest
from retrograd.core.runs.reader import open_run
from retrograd.explaining.launch.explaining import find_verdict
from tests.commands import ENVIRONMENT, SCRIPTS, run
from tests.core.launch.recorded import HEALTHY, Command, Outcome, recorded, uncounted
from tests.core.runs.written import write_run

SICK = str(SCRIPTS / "diverges.py")


def record_run(path: Path, lr: float = 0.2, steps: int = 40) -> Path:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with rg.record(model, path):
        for _ in range(steps):
            data = torch.randn(64, 8, generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data), (data[:, 0] > 0).long()).backward()
            optimizer.step()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a healthy run, and with a sick one that was recorded later."""
    home = tmp_path_factory.mktemp("home")
    record_run(home / "runs" / "well")
    record_run(home / "runs" / "ill", lr=1e30)
    os.utime(home / "runs" / "well" / "rank00000" / "rank.json", (0, 0))
    os.utime(home / "runs" / "well" / "manifest.json", (0, 0))
    return home


@pytest.fixture
def at_home(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(runs)
    return runs


# ---- a run ----


def test_the_newest_run_is_explained(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_latest() == Path("runs/ill")
    assert main(["explain"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("runs/ill, finished: ")
    assert "\ncritical " in said
    assert "\033" not in said


def test_a_healthy_run_says_what_was_looked_at(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "runs/well", "--fail-on", "note"]) == 0
    assert capsys.readouterr().out.startswith("runs/well, finished: no findings in 40 steps at 1")


def test_what_it_rests_on_is_told_when_asked_for(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "-v", "runs/ill", "--not-checked"]) == 0
    said = capsys.readouterr().out
    assert "measured: " in said
    assert "not checked: " in said


@pytest.mark.parametrize(
    ("name", "severity", "code"),
    [("ill", "critical", 1), ("ill", "note", 1), ("well", "critical", 0), ("well", "warning", 0)],
)
def test_json_lines_and_an_exit_code(
    at_home: Path, capsys: pytest.CaptureFixture[str], name: str, severity: str, code: int
) -> None:
    assert main(["explain", f"runs/{name}", "--json", "--fail-on", severity]) == code
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["message"] for line in lines] == [each.message for each in rg.explain(f"runs/{name}")]
    assert bool(lines) == (name == "ill")
    assert Path("runs", name, "findings.jsonl").read_text().splitlines() == lines


def test_a_folder_that_may_not_be_written_is_explained_all_the_same(
    at_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: Path, findings: rg.Findings) -> None:
        raise PermissionError(run)

    monkeypatch.setattr("retrograd.explaining.launch.explaining.store_findings", refuse)
    assert main(["explain"]) == 0
    assert "critical" in capsys.readouterr().out


def test_report_and_view_take_the_newest_run_too(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view"]) == 0
    assert capsys.readouterr().out.startswith("critical ")
    assert main(["view", "runs/well"]) == 0
    assert capsys.readouterr().out.startswith("no findings in 40 steps")
    assert main(["report"]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()


@pytest.mark.parametrize(
    ("words", "slug"),
    [
        (["runs/nowhere"], "not-a-run"),
        (["nowhere.py"], "cannot-launch"),
        (["--steps", "3"], "cannot-launch"),
        (["-o", "here", "runs/ill"], "cannot-launch"),
        (["--steps", "0", SICK], "bad-schedule"),
        (["-o", "runs/ill", SICK], "run-exists"),
    ],
)
def test_a_mistake_is_told(at_home: Path, capsys: pytest.CaptureFixture[str], words: list[str], slug: str) -> None:
    assert main(["explain", *words]) == 2
    assert f"[{slug}]" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--steps", "3"]])
def test_a_script_without_its_ending_is_told_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cnn.py").touch()
    assert main(["explain", "cnn", *more]) == 2
    assert "`retrograd explain cnn.py`" in capsys.readouterr().err


def test_where_there_is_no_run_it_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain"]) == 2
    assert "retrograd run train.py" in capsys.readouterr().err


def test_a_run_is_told_from_a_command(at_home: Path) -> None:
    assert not is_command(["runs/ill"])
    assert not is_command(["runs/ill/rank00000"])
    assert not is_command(["runs/nowhere"])
    assert all(map(is_command, (["train.py"], ["-m", "timeit"], ["sh", "-c", "true"])))


def test_torch_is_not_loaded(at_home: Path) -> None:
    code = "import sys; from retrograd.core.cli import main; main(['explain']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


# ---- a command ----


def explain_command(folder: Path, *words: str) -> tuple[int, str, str]:
    return run([sys.executable, "-m", "retrograd", "explain", *words], folder)


def test_a_command_is_run_and_explained(tmp_path: Path) -> None:
    code, output, errors = explain_command(tmp_path, "-o", "run", SICK, "3")
    assert code == 3
    losses, said = output.split("left\n")
    assert len(losses.split()) == 12
    assert said.startswith("run, failed: ")
    assert "\ncritical " in said
    assert errors.splitlines()[0].startswith("retrograd: watching ")
    assert not [line for line in errors.splitlines()[1:] if line.startswith("retrograd: ")]


def test_a_command_is_ended_after_some_steps_and_may_tidy_up(tmp_path: Path) -> None:
    code, output, errors = explain_command(
        tmp_path, "-o", "run", "--steps", "8", "--json", "--fail-on", "critical", "--", SICK
    )
    assert code == 1
    assert next(json.loads(line)["severity"] for line in output.splitlines()) == "critical"  # and nothing else
    assert [line for line in errors.splitlines() if line in ("nan", "left")] == [*["nan"] * 7, "left"]
    assert "retrograd: the program is ended here, after 8 steps, as --steps asks" in errors.splitlines()
    assert open_run(tmp_path / "run").history.manifest["status"] == "finished"
    assert len(open_run(tmp_path / "run").history.loss.steps) == 8


# ---- while and after a run is recorded ----


@recorded("diverges.py 3", "diverges.py raise")
def test_what_was_found_is_said_once_and_changes_nothing(outcome: Outcome) -> None:
    assert outcome.code in (3, 1)
    live, *_, last = outcome.words[1:]
    assert live.startswith("retrograd: critical  NaN is made in head, step 1: overflow of float32")
    assert live.endswith(" (toy.py:14)")
    head, *found, more = last.split("\n")
    assert head.startswith("retrograd: recorded 12 steps at ")
    assert head.endswith(f" {len(found)} finding{'s' * (len(found) != 1)}:")
    assert found[0].startswith("  critical  ")
    assert more == "  more: retrograd explain run"
    stored = [json.loads(line) for line in (outcome.run / "findings.jsonl").read_text().splitlines()]
    assert stored[0]["message"].removesuffix(".") in found[0]
    (event,) = outcome.events("finding")
    assert json.loads(event["text"])["step"] == event["step"] == 1


@pytest.mark.parametrize(
    "outcome", [Command("diverges.py 3", "--quiet"), Command("diverges.py raise", "-q")], indirect=True, ids=str
)
def test_who_wants_quiet_is_told_nothing(outcome: Outcome) -> None:
    assert outcome.words == []
    assert len(outcome.events("finding")) == 1


@pytest.mark.parametrize(
    ("number", "step", "is_lost"), [(0, None, False), (1, None, True), (1, 0, False), (1, 7, False)]
)
def test_an_earlier_attempt_that_left_nothing_is_told(
    tmp_path: Path, number: int, step: int | None, is_lost: bool
) -> None:
    """As torchrun --max-restarts starts a worker anew, whose first attempt has died before any row was written."""
    path = write_run(tmp_path / "run") / "rank00000/rank.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "attempt": {**facts["attempt"], "number": number, "step": step}}))
    told = find_verdict(tmp_path / "run", "run")
    assert ("an earlier attempt left no rows" in told and "counted from 0" in told) == is_lost


def test_a_run_that_ends_without_a_word_is_explained_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(SCRIPTS / "ends.py")
    code, _, errors = run([sys.executable, "-m", "retrograd", "run", "-o", "run", script, "SIGKILL"], tmp_path)
    assert code == -9
    assert len(errors.splitlines()) == 2
    assert main(["explain", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "run, stopped: the record was not closed, as when killed; the last rows are of step " in said
    assert ": no findings in " in said


def test_the_verdict(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert uncounted(find_verdict(runs / "runs/well", "run")) == f"; {HEALTHY}"
    lines = find_verdict(runs / "runs/ill", "run").split("\n")
    assert lines[0].startswith(". ")
    assert lines[1].startswith("  critical  ")
    assert lines[-1] == "  more: retrograd explain run"
    monkeypatch.setattr(LIMITS, "rows_at_end", 3)
    assert "retrograd explain run" in find_verdict(runs / "runs/well", "run")


def test_processes_beside_the_history_are_explained_too(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = tmp_path / "both"
    shutil.copytree(runs / "runs/well", both)
    shutil.copytree(runs / "runs/ill/rank00000", both / "rank00000.p77")
    alone = find_verdict(both / "rank00000.p77", "run/rank00000.p77").split("\n")
    assert alone[0].startswith(". ")  # not that its record was not closed
    first, *lines = find_verdict(both, "run").split("\n")
    assert uncounted(first) == f"; {HEALTHY}".replace("findings;", "findings in rank00000;")
    assert lines[0].endswith(" in rank00000.p77, a process by itself:")
    assert lines[1:] == alone[1:]
    assert main(["explain", "--fail-on", "critical", str(both)]) == 1
    assert " in rank00000.p77, a process by itself:\ncritical  " in capsys.readouterr().out
    monkeypatch.setattr(LIMITS, "other_processes", 0)
    first, left = find_verdict(both, "run").split("\n")
    assert uncounted(first) == f"; {HEALTHY}".replace("findings;", "findings in rank00000;")
    assert left == "  1 more process is not explained here: retrograd explain run/rank00000.p77"
    shutil.rmtree(both / "rank00000.p77")
    shutil.copytree(runs / "runs/well/rank00000", both / "rank00000.p77")
    monkeypatch.undo()
    assert uncounted(find_verdict(both, "run")) == f"; {HEALTHY}"
    facts = both / "rank00000.p77" / "rank.json"
    error = {"kind": "ValueError", "message": "of the other", "in_backward": False, "lines": ["other.py:1"]}
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "status": "failed", "error": error}))
    assert find_verdict(both, "run").startswith("; no findings in rank00000; ")  # it has not failed


def test_last_words_tell_of_a_process_that_was_killed(tmp_path: Path) -> None:
    facts = write_run(tmp_path / "run") / "rank00000" / "rank.json"
    facts.write_text(facts.read_text().replace('"finished"', '"running"'))  # and nobody holds its lock
    assert find_verdict(tmp_path / "run", "run").startswith(
        "; 1 process ended without closing its record, as when killed;"
    )


def test_the_ranks_that_were_killed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        write_run(tmp_path / "run", range(3), join=True)
    monkeypatch.delenv("RANK")
    facts = tmp_path / "run" / "rank00001" / "rank.json"
    facts.write_text(facts.read_text().replace('"finished"', '"running"'))
    assert main(["explain", str(tmp_path / "run")]) == 0
    assert (
        "the record was not closed by rank 1, as when killed; the last rows are of step 2: " in capsys.readouterr().out
    )


def test_what_cannot_be_explained_keeps_the_end_of_a_run_as_it_is(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert uncounted(closing._ask_verdict(runs / "runs/well", "run")) == f"; {HEALTHY}"
    assert closing._ask_verdict(tmp_path, "run") == ""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert closing._ask_verdict(runs / "runs/well", "run") == ""


# ---- live ----


@pytest.fixture
def hear(capfd: pytest.CaptureFixture[str]) -> Callable[[list[Event]], tuple[list[Event], str]]:
    def listen(events: list[Event]) -> tuple[list[Event], str]:
        history = rg.History()
        log = EventLog(history)
        LiveFindings(log, say_critical)
        for event in events:
            log.note(event.kind, event.name, value=event.value, text=event.text, moment=event.moment)
        return [event for event in history.events if event.kind == "finding"], capfd.readouterr().err

    return listen


Hear = Callable[[list[Event]], tuple[list[Event], str]]


def losses(*values: float) -> list[Event]:
    return [Event(Moment(step), "loss", "", value) for step, value in enumerate(values)]


def test_the_first_of_a_kind_is_said(hear: Hear) -> None:
    kept, said = hear(losses(1.0, float("inf"), float("nan")))
    assert said == "retrograd: critical  The loss is infinite at step 1\n"
    assert [event.moment.step for event in kept] == [1]


def test_a_loss_that_stays_a_thousandfold_is_said(hear: Hear) -> None:
    calm = [1.0] * 20
    kept, said = hear(losses(*calm, *[2000.0] * 9))
    assert "The loss has been above 1000 for 5 losses: 2000 at step 24, 2000 times the largest of the first 20" in said
    assert [event.moment.step for event in kept] == [24]
    assert hear(losses(*calm, *[999.0] * 9)) == ([], "")
    assert hear(losses(*calm, *[2000.0] * 4, 1.0, *[2000.0] * 4)) == ([], "")  # spikes that training gets over
    assert hear(losses(*[0.0] * 20, *[5.0] * 9)) == ([], "")


def test_the_origin_of_nan_is_said_with_its_line(hear: Hear) -> None:
    fact = NonFinite(name="block.att", born="forward", operation="softmax", line="/a/train.py:48", reason="all -inf")
    kept, said = hear([Event(Moment(7), "nonfinite", fact.name, text=fact.text), *losses(float("nan"))])
    assert said == ("retrograd: critical  NaN or infinity is made in block.att, step 7: all -inf (train.py:48)\n")
    assert len(kept) == 1


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        (
            NonFinite(name="fc1:weight", born="update", operands={"parameter": "2240 of 4096 are NaN"}),
            "NaN or infinity is in a parameter behind step 7, first seen in fc1:weight",
        ),
        (
            NonFinite(name="fc1", born="input", operation="linear", line="/a/common.py:21"),
            "NaN or infinity comes in at step 7, first seen in fc1 (common.py:21)",
        ),
        (
            NonFinite(name="head", born="backward", operation="sqrt", line="/a/train.py:9"),
            "The gradient becomes NaN or infinite in head, step 7: sqrt (train.py:9)",
        ),
        (
            NonFinite(name="head", born="backward", operation="sqrt", made="inf", certain=False),
            "The gradient becomes inf in head, step 7, it seems: sqrt",
        ),
        (
            NonFinite(name="head", born="forward", operation="sub", made="NaN", certain=False, line="/a/train.py:9"),
            "NaN is made by `sub` in head, or comes in there, step 7 (train.py:9)",
        ),
        (
            NonFinite(name="fc:weight", born="update", operation="RMSprop.step", line="/a/train.py:9"),
            "NaN or infinity is made in fc:weight, step 7: RMSprop.step (train.py:9)",
        ),
    ],
    ids=["weight", "input", "gradient", "supposed gradient", "given", "update"],
)
def test_what_was_only_seen_is_not_said_to_be_made_there(hear: Hear, fact: NonFinite, said: str) -> None:
    _, told = hear([Event(Moment(7), "nonfinite", fact.name, text=fact.text)])
    assert told == f"retrograd: critical  {said}\n"


def test_what_loss_scaling_brings_about_is_no_finding(hear: Hear) -> None:
    fact = NonFinite(name="head", born="backward")
    scaled = [Event(Moment(0), "scale", value=65536.0), Event(Moment(0), "skipped")]
    assert hear([*scaled, *losses(float("inf")), Event(Moment(0), "nonfinite", "head", text=fact.text)]) == ([], "")


def test_findings_are_stored_whole_or_not_at_all(runs: Path, tmp_path: Path) -> None:
    findings = rg.explain(runs / "runs" / "ill")
    store_findings(tmp_path, findings)
    assert [path.name for path in tmp_path.iterdir()] == ["findings.jsonl"]
    stored = (tmp_path / "findings.jsonl").read_text()
    read = rg.Findings(rg.Finding.of_dict(json.loads(line)) for line in stored.splitlines())
    assert read.as_json_lines() == findings.as_json_lines()


def test_a_run_behind_a_list_of_patterns_is_the_run(tmp_path: Path) -> None:
    path = record_run(tmp_path / "mine", steps=3)
    code, output, _ = run([sys.executable, "-m", "retrograd", "view", "--sites", "*:bias*", str(path)], tmp_path)
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()[-2:]] == ["0:bias", "2:bias"]


def test_a_run_that_somebody_has_stopped_has_not_failed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), rg.record(nn.Linear(2, 1), tmp_path / "mine"):
        raise KeyboardInterrupt
    code, output, _ = run([sys.executable, "-m", "retrograd", "explain", str(tmp_path / "mine")], tmp_path)
    assert code == 0
    assert "mine, interrupted: " in output


# ---- the card ----


def test_the_answer_begins_with_what_the_run_did(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    well = str(runs / "runs/well")
    assert main(["explain", well]) == 0
    headline, empty, *lines = capsys.readouterr().out.splitlines()
    assert headline.endswith("; this is what it did:")
    assert " checks applied; --not-checked lists the rest" in headline
    assert empty == ""
    assert lines == str(rg.describe(well)).splitlines()
    assert lines[0].startswith("parameters Sequential: all 354 parameters trained")
    assert main(["explain", str(runs / "runs/ill")]) == 0
    headline, _, first, *rest = capsys.readouterr().out.splitlines()
    assert "what it did" not in headline
    assert first.startswith("parameters ")
    assert any(line.startswith("critical ") for line in rest[rest.index("") :])


def test_the_card_alone(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    well, card = str(runs / "runs/well"), rg.describe(runs / "runs/well")
    kept = (runs / "runs/well" / "findings.jsonl").exists()
    assert main(["explain", "--card", well]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{well}, finished, did this:", "", *str(card).splitlines()]
    assert main(["explain", "--card", "-v", well]) == 0
    details = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith(" " * 11)]
    assert details == [detail for line in card.lines for detail in line.details]
    assert main(["explain", "--card", "--json", well]) == 0
    assert json.loads(capsys.readouterr().out) == card.as_dict()
    assert (runs / "runs/well" / "findings.jsonl").exists() == kept


def test_the_card_alone_has_no_findings_to_fail_on(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--card", "--fail-on", "note", str(runs / "runs/ill")]) == 2
    assert "--fail-on" in capsys.readouterr().err
