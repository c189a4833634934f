"""Our warnings point at the program's line and raise nothing; those of others are printed no more often."""

from __future__ import annotations

import io
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core import notices
from retrograd.core.limits import LIMITS
from retrograd.core.notices import end_waiting, showing, tell_far, tell_read, waiting, warnings_kept
from retrograd.following.tracing.tracer import Tracing


def fail(*_: object) -> None:
    raise ZeroDivisionError


def step(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Callable[[], Any]]:
    """Makes tools that fail inside of a step."""
    monkeypatch.setattr(Tracing, "_begin", fail)
    (tmp_path / "file").write_text("")
    return [rg.trace, lambda: rg.keep_saved(MODEL, rg.saved.Disk(tmp_path / "file"))]


MODEL = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))


@pytest.mark.parametrize("action", ["error", "show"])
def test_what_we_say_ends_no_step(
    failing: list[Callable[[], Any]], action: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where warnings are errors, nor where showing them fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("error" if action == "error" else "always")
        if action == "show":
            monkeypatch.setattr(warnings, "showwarning", fail)
        for tool in failing:
            MODEL.zero_grad()
            with tool():
                step(MODEL, torch.ones(300, 300))
            assert MODEL[0].weight.grad is not None
    said = capsys.readouterr().err
    assert said.count("RetrogradWarning: retrograd could not trace a backward pass as asked: ZeroDivisionError") == 1
    assert said.count("RetrogradWarning: Saved tensors stay in memory from now on") == 1
    assert said.count(f"{__file__}:{step.__code__.co_firstlineno + 1}: ") == 2


def test_what_we_say_points_at_the_line_of_the_program(failing: list[Callable[[], Any]]) -> None:
    for tool in failing:
        with tool(), pytest.warns(rg.RetrogradWarning) as caught:
            step(MODEL, torch.ones(300, 300))
        assert [(each.filename, each.lineno) for each in caught] == [(__file__, step.__code__.co_firstlineno + 1)]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our warnings are kept apart from the program's, as under ``retrograd run``."""
    monkeypatch.setattr(notices, "_apart", threading.Event())
    monkeypatch.setattr(notices, "_shown", set())
    notices.warn_apart()


def say_twice() -> None:
    for _ in range(2):
        notices.warn("something of ours")


@pytest.mark.usefixtures("apart")
def test_a_command_says_it_whatever_the_program_does_with_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        filters = list(warnings.filters)
        say_twice()
        assert list(warnings.filters) == filters
    assert caught == []
    assert capsys.readouterr().err.count("RetrogradWarning: something of ours") == 1


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(("action", "times"), [("ignore", 0), ("always", 2)])
def test_a_filter_for_our_warnings_is_followed(action: Any, times: int, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action, rg.RetrogradWarning)
        say_twice()
    assert len(caught) == times
    assert capsys.readouterr().err == ""


def test_without_stderr_nothing_is_said(failing: list[Callable[[], Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(sys, "stderr", None)
        for tool in failing:
            with tool():
                step(MODEL, torch.ones(300, 300))


# ---- those of others ------------------------------------------------------------------------------------------


def warn_twice(change: Callable[[], None]) -> int:
    """How often the same line warns, when in between somebody changes the filters."""
    registry: dict[Any, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for number in range(2):
            warnings.warn_explicit("old", UserWarning, "file", 1, registry=registry)
            if not number:
                change()
    return len(caught)


def change_filters() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)


@warnings_kept()
def change_filters_unheard() -> None:
    change_filters()
    with warnings_kept():
        change_filters()
    change_filters()


def test_what_changes_filters_in_between_has_nothing_printed_again() -> None:
    assert warn_twice(change_filters) == 2  # so it is with Python
    assert warn_twice(change_filters_unheard) == 1


def test_what_another_thread_changes_meanwhile_counts() -> None:
    def change() -> None:
        with warnings_kept():
            thread = threading.Thread(target=change_filters)
            thread.start()
            thread.join()

    assert warn_twice(change) == 2


def test_nothing_is_left_behind() -> None:
    before = warnings._filters_mutated  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError), warnings_kept():
        fail()
    assert warnings._filters_mutated is before  # type: ignore[attr-defined]


class Terminal(io.StringIO):
    """Stands for stderr."""

    def __init__(self, is_seen: bool) -> None:
        super().__init__()
        self._is_seen = is_seen

    def isatty(self) -> bool:
        return self._is_seen

    def wait_for(self, text: str) -> None:
        while text not in self.getvalue():
            time.sleep(0.001)


def test_a_terminal_shows_how_far_it_is_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "quiet_seconds", 0.0)
    monkeypatch.setattr(LIMITS, "blink_seconds", 0.001)
    terminal = Terminal(is_seen=True)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    with pytest.raises(KeyboardInterrupt), waiting("reading runs/wide"):
        terminal.wait_for("retrograd: reading runs/wide, 0 s")
        tell_far(part="7 of 130")
        terminal.wait_for("retrograd: reading runs/wide, part 7 of 130, 0 s")
        with waiting("something within"):
            raise KeyboardInterrupt
    last = terminal.getvalue().rsplit("\r", 2)
    assert (last[-1], last[-2].strip()) == ("", "")
    assert "within" not in terminal.getvalue()


@pytest.mark.parametrize("is_seen", [True, False])
def test_what_is_shown_at_the_end_is_gone_after_it(monkeypatch: pytest.MonkeyPatch, is_seen: bool) -> None:
    terminal = Terminal(is_seen)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    with showing("looking"):
        assert terminal.getvalue() == ("retrograd: looking\r" if is_seen else "")
    assert terminal.getvalue().split("\r")[1:] == ([" " * len("retrograd: looking"), ""] if is_seen else [])


def test_the_line_goes_before_anything_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "quiet_seconds", 0.0)
    terminal = Terminal(is_seen=True)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    with waiting("reading"):
        terminal.wait_for("reading")
        end_waiting()
        told = terminal.getvalue()
        assert told.endswith("\r")
    assert terminal.getvalue() == told


def test_a_pipe_is_told_at_once_of_what_is_long_and_then_how_fast_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "progress_seconds", 0.001)
    pipe = Terminal(is_seen=False)
    monkeypatch.setattr(sys, "__stderr__", pipe)
    with waiting("reading runs/wide", is_long=True):
        assert pipe.getvalue().startswith("retrograd: reading runs/wide\n")
        tell_far(part="7 of 130")
        tell_read(1 << 50)
        pipe.wait_for("retrograd: reading runs/wide, part 7 of 130, ")
        pipe.wait_for(" million rows/s, 0 s\n")
    assert "\r" not in pipe.getvalue()


def test_a_pipe_is_told_after_a_moment_of_what_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Terminal(is_seen=False)
    monkeypatch.setattr(sys, "__stderr__", pipe)
    with waiting("opening s3://runs/wide"):
        pass
    assert not pipe.getvalue()
    monkeypatch.setattr(LIMITS, "quiet_seconds", 0.0)
    with waiting("opening s3://runs/wide"):
        pipe.wait_for("retrograd: opening s3://runs/wide, 0 s\n")


def test_a_pipe_is_told_nothing_of_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "quiet_seconds", 0.0)
    pipe = Terminal(is_seen=False)
    monkeypatch.setattr(sys, "__stderr__", pipe)
    threads = threading.active_count()
    with waiting("reading", follows=True):
        assert threading.active_count() == threads
        tell_far(part="7 of 130")
    assert not pipe.getvalue()


def test_on_a_narrow_terminal_the_end_of_the_line_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "quiet_seconds", 0.0)
    monkeypatch.setattr(notices, "_find_width", lambda: 50)
    terminal = Terminal(is_seen=True)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    tell = f"reading 9,900,000 rows of runs/{'long-' * 9}name"
    with waiting(tell):
        tell_far(part="7 of 130")
        terminal.wait_for("…, part 7 of 130, 0 s")
    assert max(map(len, terminal.getvalue().split("\r"))) < 50
