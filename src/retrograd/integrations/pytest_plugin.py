"""The plugin for pytest: ``--retrograd`` records each test that trains, ``rg_record`` what a test asks for.

Every run of pytest loads this file. Torch, and what else takes long, is loaded where one of the two is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import retrograd as rg
from retrograd.core.amounts import count_of

if TYPE_CHECKING:
    from retrograd.core.launch.session import Session
    from retrograd.core.recording.record import Recording
    from retrograd.core.runs.findings import Severity

_PLAIN = re.compile(r"[\w./]+\.py(::\w+)+")
_LONGEST = 60  # letters of a test's name in that of its folder: most file systems allow 255 bytes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    group = parser.getgroup("retrograd", "what happens inside loss.backward()")
    group.addoption("--retrograd", action="store_true", help="record each test that trains, and find what is wrong")
    group.addoption(
        "--retrograd-dir", metavar="DIR", help="the same; folder of the runs (default: in the cache folder of pytest)"
    )
    group.addoption(
        "--retrograd-fail-on",
        choices=("critical", "warning", "note"),
        help="the same; fail a test with a finding that is this severe, or worse",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record tests, if that is asked for."""
    if any(config.getoption(f"retrograd{name}") for name in ("", "_dir", "_fail_on")):
        config.pluginmanager.register(RecordedTests(config), "retrograd-tests")


@pytest.fixture
def rg_record(tmp_path: Path) -> Iterator[Callable[..., Recording]]:
    """``rg_record(model)`` is ``rg.record(model, folder)``; the folder is ``tmp_path / "run"``, then ``"run-2"``, …

    It takes all that :func:`retrograd.record` takes; a ``path`` of your own is one in ``tmp_path``, too. What is still
    open when the test ends is closed.
    """
    recordings: list[Recording] = []

    def record(model: Any = None, path: str | os.PathLike[str] | None = None, **options: Any) -> Recording:
        folder = tmp_path / (path or (f"run-{len(recordings) + 1}" if recordings else "run"))
        recordings.append(rg.record(model, folder, **options))
        return recordings[-1]

    yield record
    for recording in recordings:
        recording.close()


class RecordedTests:
    """Records each test that trains, in a run folder of its own, and finds what is wrong with it.

    A recording begins before the fixtures of a test are made, and ends before they are taken down.
    """

    def __init__(self, config: pytest.Config) -> None:
        from retrograd.core.hooks.discovery import construction_watch

        self._folder = _choose_folder(config)
        self._least: Severity | None = config.getoption("retrograd_fail_on")
        self._session: Session | None = None
        self._lines: list[str] | None = None
        self._watch = construction_watch
        self._watch.hold()
        os.register_at_fork(after_in_child=partial(_start_over, weakref.ref(self)))

    def pytest_unconfigure(self) -> None:
        self._watch.release()
        with contextlib.suppress(OSError):  # it holds runs, which the summary has named
            self._folder.rmdir()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._begin(item)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        try:
            result = yield
        except BaseException as error:
            self._end(item, error)
            raise
        if self._end(item):
            pytest.fail("\n".join(("--retrograd-fail-on:", *(self._lines or ()))), pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._end(item)  # one that was never called
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        if self._lines is not None:  # text, which xdist hands on
            report.retrograd, self._lines = {"folder": os.path.relpath(self._folder), "lines": self._lines}, None
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was found in each test, and where the runs are."""
        listed = (each for reports in terminalreporter.stats.values() for each in reports)
        told = [(each.nodeid, each.retrograd) for each in listed if hasattr(each, "retrograd")]
        terminalreporter.section("retrograd")
        for name, each in told:
            if each["lines"]:
                terminalreporter.line("\n  ".join((name, *each["lines"])))
        ill = sum(bool(each["lines"]) for _, each in told)
        where = "".join(f"; runs in {folder}" for folder in sorted({each["folder"] for _, each in told}))
        terminalreporter.line(f"{count_of(len(told), 'test')} trained, {ill or 'none'} with findings{where}")

    def _begin(self, item: pytest.Item) -> None:
        from retrograd.core.hooks.discovery import list_constructed
        from retrograd.core.launch.requests import RunRequest
        from retrograd.core.launch.session import Session
        from retrograd.core.runs.layout import is_run

        folder = self._folder / _name_folder(item.nodeid)
        if is_run(folder):
            shutil.rmtree(folder)
        request = RunRequest(command=("pytest", item.nodeid), path=str(folder), shown=str(folder), every=1, quiet=True)
        self._session = Session(request, list_constructed())  # what there is by now is no model of this test

    def _end(self, item: pytest.Item, raised: BaseException | None = None) -> bool:
        """End the recording, and find what is wrong; returns whether that is as severe as a test must not have it."""
        from retrograd.core.runs.layout import is_run

        session, self._session = self._session, None
        if session is None:
            return False
        is_verdict = isinstance(raised, AssertionError | pytest.fail.Exception | pytest.skip.Exception)
        session.end(None if is_verdict else raised)  # what a test says of a run is no fault of that
        folder = self._folder / _name_folder(item.nodeid)
        if not is_run(folder):
            return False
        is_severe, self._lines = _explain(folder, self._least)
        return is_severe

    def start_over(self) -> None:
        """Record a forked child for itself."""
        if self._session is not None:
            self._session.start_over()


def _start_over(find: weakref.ref[RecordedTests]) -> None:
    if (tests := find()) is not None:
        tests.start_over()


def _choose_folder(config: pytest.Config) -> Path:
    given, cache = config.getoption("retrograd_dir"), getattr(config, "cache", None)
    if given:
        return Path(given).absolute()
    if cache is not None:
        return Path(cache.mkdir("retrograd"))
    folder = Path(tempfile.mkdtemp(prefix="retrograd-tests-"))
    if not (config.pluginmanager.has_plugin("terminal") or hasattr(config, "workerinput")):
        config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))  # nobody would be told where it is
    return folder


def _name_folder(test: str) -> str:
    """A name for the folder of a test, in which nothing needs a quote, and that no other test has."""
    name = re.sub(r"[^\w.=+-]+", "-", test.replace(".py::", ".").replace("::", ".").replace("/", ".")).strip("-.")
    if _PLAIN.fullmatch(test) and len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{hashlib.sha256(test.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _explain(folder: Path, least: Severity | None) -> tuple[bool, list[str]]:
    """Whether a finding is as severe as this, and lines that say those that are; by default all but notes."""
    from retrograd.core.limits import LIMITS
    from retrograd.core.runs.findings import SEVERITIES, Findings
    from retrograd.core.runs.reader import open_run
    from retrograd.core.views.findings_text import list_findings
    from retrograd.explaining.launch.explaining import find_and_store

    more = f"more: retrograd explain {shlex.quote(os.path.relpath(folder))}"
    try:
        run = open_run(folder)
        if run.history.rows.count > LIMITS.rows_at_end:
            return False, [more]
        found = find_and_store(run)
    except Exception as error:  # a fault of ours must not fail a test
        return False, [f"what is wrong, if anything, is not known: {error!r}", more]
    worst = SEVERITIES[: SEVERITIES.index("note" if least == "note" else "warning") + 1]
    lines = list_findings(Findings(each for each in found if each.severity in worst))
    return least is not None and found.reach(least), [*lines, more] if lines else []
