"""``retrograd explain``, and the last words of ``retrograd run``: what is wrong with a run, from its record.

A command is run first, and watched closely. ``python -m retrograd.explaining.launch.explaining RUN SHOWN [FD]``
prints the last words, and says on an open file how far it is.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from types import FrameType

from retrograd.core.addresses import open_folder
from retrograd.core.amounts import count_of, list_names
from retrograd.core.errors import LaunchError, RunError
from retrograd.core.files import to_utf8
from retrograd.core.foreign.text import show_plainly
from retrograd.core.launch.chosen_run import choose_run, reading
from retrograd.core.launch.interpreter import find_obstacle
from retrograd.core.launch.lean import load_lean_arrow
from retrograd.core.launch.requests import RunRequest
from retrograd.core.launch.start import make_environment, resolve_command
from retrograd.core.limits import LIMITS
from retrograd.core.notices import print_text, say, waiting
from retrograd.core.runs.findings import Findings, store_findings
from retrograd.core.runs.layout import MANIFEST, find_latest, is_run
from retrograd.core.runs.reader import Run, open_run
from retrograd.core.views.findings_text import format_findings, list_findings
from retrograd.explaining.card.card import Card
from retrograd.explaining.card.describe import describe_record
from retrograd.explaining.findings.explain import explain_record, make_record
from retrograd.explaining.findings.record import Record
from retrograd.explaining.launch.options import ExplainOptions
from retrograd.explaining.views.annotations import find_root, format_github, format_sarif


def explain_as_asked(arguments: ExplainOptions) -> int:
    """Print what is wrong with a run; where a command was given, with the run that it makes.

    Args:
        arguments: with a ``run`` or a ``command``; by default the newest run.

    Returns:
        2 if no row can be read, 1 if ``--fail-on`` says so, else that of the command, else 0.

    Raises:
        RetrogradError: for a folder that holds no run, or anything that can be found wrong before a command runs.
    """
    code = 0
    if arguments.card and arguments.fail_on:
        raise LaunchError("--card checks nothing that --fail-on could fail on.", repair="give one of the two.")
    if arguments.card and arguments.form in ("github", "sarif"):
        raise LaunchError(f"--card has no --format {arguments.form}.", repair="--format json, or leave it out.")
    if arguments.command:
        request = _make_request(arguments)
        code = _run_watched(arguments.command, request, is_quiet=arguments.form != "text")
        run, shown = open_folder(request.path), request.shown
        if not is_run(run):  # what was in the way has been said
            return code
    else:
        _check_options(arguments)
        run = find_latest() if arguments.run is None else choose_run(arguments.run)
        shown = str(run)
    with reading(run) as opened:
        record = make_record(opened)
        card, about = describe_record(record), f"{shown}, {_tell_end(opened)}"
        if arguments.card:
            _print_card(card, about, arguments)
            return code
        findings, others = find_and_store(opened, record), find_in_others(opened, LIMITS.rows_at_end)
        place = find_place(opened)
    _print(about, findings, card, arguments, place)
    if told := list_others(others, shown):
        (print_text if arguments.form == "text" else say)("\n".join(told))
    if findings.unread:
        return 2
    asked = [findings, *(each for each in others.values() if each is not None)]
    return 1 if arguments.fail_on and any(each.reach(arguments.fail_on) for each in asked) else code


def _tell_end(run: Run) -> str:
    """How a run ended, or that it goes on; one that somebody has stopped has not failed."""
    errors = [error for rank in run.ranks if (error := rank.facts.get("error"))]
    is_stopped_by_hand = bool(errors) and all(error["kind"] == "KeyboardInterrupt" for error in errors)
    if run.status == "stopped":
        return _tell_where_stopped(run)
    return "interrupted" if run.status == "failed" and is_stopped_by_hand else run.status


def _tell_where_stopped(run: Run) -> str:
    """Report which ranks ended without a word, and how far their rows go."""
    stopped = [rank for rank in run.ranks if rank.status == "stopped"]
    steps = [rank.facts["last_step"] for rank in stopped if isinstance(rank.facts.get("last_step"), int)]
    ranks = list_names([str(rank.rank) for rank in stopped])
    which = f" by rank {ranks}" if len(run.ranks) > 1 and stopped else ""
    rows = f"; the last rows are of step {max(steps):,}" if steps else ""
    return f"stopped: the record was not closed{which}, as when killed{rows}"


def _make_request(arguments: ExplainOptions) -> RunRequest:
    shown = arguments.output or ""
    request = RunRequest(command=arguments.command, shown=shown, watch=True, limit=arguments.steps, quiet=True)
    request.check()
    return request.choose_folder()


def _check_options(arguments: ExplainOptions) -> None:
    for name, given in (("--steps", arguments.steps), ("--output", arguments.output)):
        if given is not None:
            raise LaunchError(
                f"{name} is for a command, and none was given.", repair="retrograd explain [OPTIONS] train.py [ARGS]"
            )


def _run_watched(command: Sequence[str], request: RunRequest, *, is_quiet: bool) -> int:
    """Run a command to its end, and return its exit code, as a shell would."""
    words = resolve_command(command, "explain")
    environment = make_environment(request, os.environ)
    say(find_obstacle(words, environment) or f"watching {shlex.join(command)}, recorded in {request.shown}")
    sys.stdout.flush()
    try:
        process = Popen(words, env=environment, stdout=sys.stderr if is_quiet else None)
    except OSError as error:
        raise LaunchError(f"{words[0]!r} cannot be executed: {error.strerror}.") from error
    with _signals_left_to(process):
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals_left_to(process: Popen[bytes]) -> Iterator[None]:
    """Let what would end us end the command alone: its run is explained all the same.

    Ctrl-C reaches the command by itself, as one that runs in front of the same terminal.
    """

    def hand_on(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT or not _is_in_front():
            process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_in_front() -> bool:
    """Return whether Ctrl-C in the terminal interrupts us, and with us the command."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def find_and_store(run: Run, record: Record | None = None) -> Findings:
    """Explain a run, whose record may be there already, and keep the findings in its folder."""
    findings = explain_record(record or make_record(run))
    with contextlib.suppress(OSError):  # the folder is somebody else's, and what is asked for is the answer
        if not findings.unread:  # a list of runs would show it as one without findings
            store_findings(run.path, findings)
    return findings


def find_in_others(run: Run, most_rows: int) -> dict[str, Findings | None]:
    """Explain the processes beside a run's history, which had found their rank taken: those of so many rows in all.

    Returns:
        What is found in each, by the name of its folder; None for those that were not explained.
    """
    found: dict[str, Findings | None] = {}
    for rank in run.ranks:
        if not rank.is_extra:
            continue
        found[rank.folder.name] = None
        with contextlib.suppress(RunError):  # whoever asks about it is told which
            opened = open_run(rank.folder)
            most_rows -= opened.history.rows.count
            if most_rows >= 0 and len(found) <= LIMITS.other_processes:
                found[rank.folder.name] = find_and_store(opened)
    return found


def list_others(others: Mapping[str, Findings | None], shown: str) -> list[str]:
    """What to say of processes beside a run's history, line by line; nothing of those of which all is well."""
    lines = []
    for name, findings in others.items():
        if findings is not None and len(findings):
            lines.append(f"{count_of(len(findings), 'finding')} in {name}, a process by itself:")
            lines += [*list_findings(findings), f"more: retrograd explain {shown}/{name}"]
    left = [name for name, findings in others.items() if findings is None]
    if left:
        verb = "is" if len(left) == 1 else "are"
        processes = count_of(len(left), "more process", "more processes")
        lines.append(f"{processes} {verb} not explained here: retrograd explain {shown}/{left[0]}")
    return lines


def find_place(run: Run) -> str:
    """``file:line`` of what has no line of its own: the beginning of the script that was recorded, or of the record."""
    words = map(str, run.history.manifest.get("command", ()))
    scripts = (word for word in words if word.endswith(".py") and Path(word).is_file())
    return f"{next(scripts, run.path / MANIFEST)}:1"


def _print_card(card: Card, about: str, arguments: ExplainOptions) -> None:
    if arguments.form == "json":
        print_text(card.as_json(), is_json=True)
        return
    lines = [
        f"{about}, did this:" if card.lines else f"{about}: nothing was recorded",
        "",
        *_list_card(card, arguments),
    ]
    print_text("\n".join(show_plainly(line, keep="") for line in lines))


def _list_card(card: Card, arguments: ExplainOptions) -> list[str]:
    """The lines of a card; with ``-v`` what each leaves out below it."""
    details = [tuple(f"{'':11}{text}" for text in line.details) if arguments.verbose else () for line in card.lines]
    return [text for line, more in zip(card.lines, details, strict=True) for text in (str(line), *more)]


def _print(about: str, findings: Findings, card: Card, arguments: ExplainOptions, place: str) -> None:
    if arguments.form != "text":
        formats: dict[str, Callable[[], str]] = {
            "json": findings.as_json_lines,
            "github": lambda: format_github(findings, find_root()),
            "sarif": lambda: format_sarif(findings, find_root(), place),
        }
        print_text(formats[arguments.form](), end="", is_json=arguments.form != "github")
        return
    is_seen = sys.stdout.isatty()
    said = format_findings(
        findings,
        every=arguments.all,
        verbose=arguments.verbose,
        not_checked=arguments.not_checked,
        card=_list_card(card, arguments),
        width=shutil.get_terminal_size().columns if is_seen else None,
        colour=is_seen and "NO_COLOR" not in os.environ,
    )
    print_text(f"{show_plainly(about, keep='')}: {said}")


# ---- the last words of `retrograd run` ----


def find_verdict(run: Path, shown: str) -> str:
    """Find the words that follow in the sentence about how much was recorded.

    Args:
        run: the folder.
        shown: the same as the user wrote it.
    """
    opened = open_run(run)
    rows = opened.history.rows.count
    words = f"looking for what is wrong in {count_of(rows, 'row')} of {shown}"
    with waiting(words, is_long=rows > LIMITS.explained_rows, follows=True):
        findings = find_and_store(opened) if rows <= LIMITS.rows_at_end else None
        others = find_in_others(opened, LIMITS.rows_at_end - rows)
    told = list_others(others, shown)
    whose = list_names([rank.folder.name for rank in opened.ranks if not rank.is_extra], 2) if told else ""
    return "\n  ".join(
        [_tell_lost_attempt(opened) + _tell_stopped(opened) + tell_verdict(findings, shown, whose), *told]
    )


def _tell_lost_attempt(run: Run) -> str:
    """Report that a launcher has started the work anew, and that nothing recorded before is gone on with."""
    told = [rank.facts.get("attempt") for rank in run.ranks if not rank.is_extra]
    attempts = [each for each in told if isinstance(each, dict) and each.get("number")]
    is_lost = bool(attempts) and all(each.get("step") is None for each in attempts)
    return "; an earlier attempt left no rows that this one goes on from: steps are counted from 0" if is_lost else ""


def _tell_stopped(run: Run) -> str:
    """Report how many processes died without a word; nothing where none did."""
    stopped = {rank.rank for rank in run.ranks if rank.status == "stopped"}
    whose = "its" if len(stopped) == 1 else "their"
    processes = count_of(len(stopped), "process", "processes")
    return f"; {processes} ended without closing {whose} record, as when killed" if stopped else ""


def tell_verdict(findings: Findings | None, shown: str, whose: str = "") -> str:
    """Report what was found in the same words; None if nothing was checked. ``whose``: where other processes differ."""
    report = f"see it with: retrograd report {shown}"
    if findings is None:
        return f"; what is wrong, if anything, tells: retrograd explain {shown}; {report}"
    if not len(findings):
        applied = findings.headline.rpartition("; ")[2]
        where = f" in {whose}" if whose else ""
        return f"; no findings{where}; {applied}; what it did: retrograd explain {shown}; {report}"
    lines = [*list_findings(findings), f"more: retrograd explain {shown}"]
    return "\n  ".join([f". {count_of(len(findings), 'finding')}:", *lines])


if __name__ == "__main__":
    load_lean_arrow()
    if len(sys.argv) > 3:  # stderr of who asks: on that of this process nobody listens
        sys.__stderr__ = os.fdopen(int(sys.argv[3]), "w")  # type: ignore[misc]
    sys.stdout.buffer.write(to_utf8(find_verdict(open_folder(sys.argv[1]), sys.argv[2])))
