"""Where ranks are, in words; and that whoever looks is not stopped by what there is to see."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from retrograd.core.errors import TraceError
from retrograd.following.hangs.rank_state import RankState, RingEvent, State, ThreadPosition, describe_age
from retrograd.following.hangs.ring import Ring
from retrograd.following.hangs.ring_file import RING
from retrograd.following.views.hang_report import (
    STUCK,
    compare_ranks,
    describe_rank,
    describe_ranks,
    print_ranks,
    watch_run,
)

NOW = 1_000_000_000_000
SECOND = 1_000_000_000
DEAD = "dead (process 4711 is gone), last seen"


def make_thread(
    name: str | None, node: int = 0, *, passes: int = 12, ago: float = 42.0, failed: bool = False, depth: int = 1
) -> ThreadPosition:
    """Inside a node of this name; outside of a pass where it is None."""
    when = NOW - round(ago * SECOND)
    state: State = "node" if name else "pass failed" if failed else "pass ends"
    event = RingEvent(state, name or "", 100 + node if name else passes, when, 0, 50)
    inside = depth if name else 0
    ended = 0 if name else when
    return ThreadPosition(1, 1, "MainThread", inside, passes, node, when - SECOND, ended, failed, (event,))


def make_state(rank: int, *threads: ThreadPosition) -> RankState:
    return RankState(rank, 4711 + rank, "node03", None, NOW, True, 0, threads)


def ended(rank: int, passes: int = 12) -> RankState:
    return make_state(rank, make_thread(None, passes=passes))


def inside(rank: int, name: str, node: int, ago: float = 42.0) -> RankState:
    return make_state(rank, make_thread(name, node, ago=ago))


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (inside(3, "MmBackward0", 17), "inside MmBackward0 (number 117), node 17 of pass 12, for 42 s"),
        (ended(0), "outside of a pass; pass 12 ended 42 s ago"),
        (make_state(0, make_thread(None, failed=True)), "outside of a pass; pass 12 failed 42 s ago"),
        (make_state(0), "no backward pass yet"),
        (replace(inside(0, "X", 1), alive=False), f"{DEAD} inside X (number 101), node 1 of pass 12, 42 s ago"),
        (replace(ended(0), alive=False), f"{DEAD} outside of a pass; pass 12 ended 42 s ago"),
        (replace(ended(0), alive=None), "outside of a pass; pass 12 ended 42 s ago (on node03)"),
        (replace(ended(0), closed=1), "no longer watched: outside of a pass; pass 12 ended 42 s ago"),
        (replace(make_state(0), fault="it is cut off."), "cannot be read: it is cut off."),
        (
            make_state(0, make_thread("X", 1), replace(make_thread("Y", 1, ago=41.0, depth=0), ident=2)),
            "inside Y (number 101), for 41 s; inside X (number 101), node 1 of pass 12, for 42 s",
        ),
    ],
)  # fmt: skip
def test_a_rank_in_words(state: RankState, text: str) -> None:
    assert describe_rank(state) == text


def test_an_event_says_its_module_and_a_leaf_has_no_number() -> None:
    thread = make_thread("MmBackward0", 17)
    event = replace(thread.events[0], module="blocks.3")
    assert "MmBackward0 (number 117, module blocks.3), node" in describe_rank(
        make_state(0, replace(thread, events=(event,)))
    )
    event = replace(thread.events[0], number=None, name="AccumulateGrad")
    assert "inside AccumulateGrad, node 17" in describe_rank(make_state(0, replace(thread, events=(event,))))
    event = replace(thread.events[0], state="pass begins", name="")
    assert "at the beginning of pass 12, before its" in describe_rank(make_state(0, replace(thread, events=(event,))))


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([], ""),
        ([ended(0)], ""),
        ([make_state(0), make_state(1)], "all 2 ranks have begun no pass"),
        ([ended(rank) for rank in range(8)], "all 8 ranks have ended pass 12"),
        ([inside(rank, "X", 17) for rank in range(8)], "all 8 ranks are inside X, node 17 of pass 12"),
        (
            [inside(1, "X", 17) if rank == 1 else ended(rank) for rank in range(8)],
            "rank 1 is inside X, node 17 of pass 12; the other 7 have ended pass 12",
        ),
        (
            [inside(0, "Reduce", 20), inside(1, "Sleep", 17)],
            "rank 1 is inside Sleep, node 17 of pass 12; rank 0 is inside Reduce, node 20 of pass 12",
        ),
        (
            [ended(rank, 11) if rank in (2, 3, 5) else inside(rank, "X", 1) for rank in range(8)],
            "ranks 2-3, 5 have ended pass 11; the other 5 are inside X, node 1 of pass 12",
        ),
        (
            [ended(0, 9), inside(1, "X", 3), inside(2, "Y", 2), inside(3, "Y", 2)],
            "rank 0 has ended pass 9; ranks 2-3 are inside Y, node 2 of pass 12; rank 1 is inside X, node 3 of pass 12",
        ),
        (
            [replace(ended(1), alive=False), ended(0), ended(1, 3), replace(ended(1), closed=1)],
            "rank 1 has ended pass 3; rank 0 has ended pass 12",
        ),
        ([replace(ended(0), fault="gone"), ended(1), ended(2)], "all 2 ranks have ended pass 12"),
    ],
)
def test_which_ranks_differ(states: list[RankState], text: str) -> None:
    """The one that has come least far comes first."""
    assert compare_ranks(states) == text


def test_one_line_a_rank_and_what_is_stuck_is_marked() -> None:
    states = [
        ended(0), inside(1, "X", 17), replace(inside(2, "X", 17), alive=False), replace(inside(3, "X", 17), closed=1),
        inside(10, "X", 17, ago=4.0), replace(ended(10), pid=5),
    ]  # fmt: skip
    lines = describe_ranks(states, limit=30)
    assert [line.partition("  ")[0] for line in lines[:-1] if line[0] == "!"] == ["! rank 1", "! rank 2"]
    assert [line[2:20] for line in lines[-3:-1]] == ["rank 10 (pid 4721)", "rank 10 (pid 5)   "]
    assert lines[-1] == "ranks 0, 10 have ended pass 12; the other 3 are inside X, node 17 of pass 12"
    assert [line[0] for line in describe_ranks(states)[:-1]] == [" ", " ", "!", " ", " ", " "]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((-5, "0.0 s"), (0.04, "0.0 s"), (9.94, "9.9 s"), (42.4, "42 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s")),
        *((7500, "2 h 5 min"), (1e9, "277,777 h 46 min")),
    ],
)  # fmt: skip
def test_ages(seconds: float, text: str) -> None:
    assert describe_age(round(seconds * SECOND)) == text


# A run folder


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring.create(tmp_path)


@pytest.mark.parametrize("what", ["pipe", "empty", "folder", "dangling"])
def test_it_ends_where_no_ring_can_be_read(tmp_path: Path, what: str) -> None:
    path = tmp_path / "rank00000" / RING
    path.parent.mkdir()
    {
        "pipe": lambda: os.mkfifo(path),
        "empty": path.touch,
        "folder": path.mkdir,
        "dangling": lambda: path.symlink_to(path.parent),
    }[what]()
    file = io.StringIO()
    assert watch_run(tmp_path, interval=0.01, file=file) == 0
    assert file.getvalue().startswith("  rank 0  cannot be read: ")


def test_looking_once(tmp_path: Path, ring: Ring) -> None:
    file = io.StringIO()
    print_ranks(tmp_path, file=file)
    assert file.getvalue() == "  rank 0  no backward pass yet\n"
    ring.pass_begins()
    file = io.StringIO()
    assert watch_run(tmp_path, once=True, file=file) == 0
    assert file.getvalue().startswith("  rank 0  at the beginning of pass 1, before its first node, for 0.")
    assert watch_run(tmp_path, once=True, limit=1e-9, file=io.StringIO()) == STUCK
    (tmp_path / "rank00001").mkdir()
    (tmp_path / "rank00001" / RING).touch()
    print_ranks(tmp_path, file=(file := io.StringIO()))
    assert "rank 1  cannot be read: " in file.getvalue()
    ring.close()
    with pytest.raises(TraceError, match="holds no ring"):
        print_ranks(tmp_path / "rank00000", file=file)


class Moving(io.StringIO):
    """Does something each time that something is written to it."""

    def __init__(self, moves: list[Callable[[], object]], *, is_terminal: bool = False) -> None:
        super().__init__()
        self._moves = moves
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def flush(self) -> None:
        if self._moves and self.getvalue():
            self._moves.pop(0)()


def test_a_pipe_is_told_when_something_moved(tmp_path: Path, ring: Ring) -> None:
    file = Moving([ring.pass_begins, ring.pass_ends, ring.close])
    assert watch_run(tmp_path, interval=0.001, file=file) == 0
    lines = file.getvalue().splitlines()
    assert [line.split(",")[0].split(";")[0] for line in lines] == [
        "  rank 0  no backward pass yet",
        "  rank 0  at the beginning of pass 1",
        "  rank 0  outside of a pass",
        "  rank 0  no longer watched: outside of a pass",
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_ctrl_c_ends_it(tmp_path: Path, ring: Ring, is_terminal: bool) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrograd.following.views.hang_report.time.sleep", interrupt)
        file = Moving([], is_terminal=is_terminal)
        assert watch_run(tmp_path, file=file) == 0
    assert "no backward pass yet" in file.getvalue()
    ring.close()


def test_a_terminal_is_redrawn(tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    moves = iter([ring.pass_begins, ring.pass_ends, ring.close])
    monkeypatch.setattr("retrograd.following.views.hang_report.time.sleep", lambda seconds: next(moves)())
    file = Moving([], is_terminal=True)
    assert watch_run(tmp_path, file=file, limit=1e-9) == 0
    shown = file.getvalue()
    assert "\x1b[1A" in shown or "\x1b[2K" in shown
    assert "\x1b[1;31m! rank 0  at the beginning of pass 1" in shown
    assert "no longer watched" in shown


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no such signal")
def test_it_ends_when_the_run_is_dead_and_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from retrograd.following.views.hang_report import watch_run; "
        "code = watch_run(sys.argv[1], interval=0.01); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    child = os.fork() if sys.platform != "win32" else 0
    if child == 0:
        try:
            ring = Ring.create(tmp_path)
            ring.pass_begins()
            (tmp_path / "there").touch()
            time.sleep(60)
        finally:
            os._exit(0)
    try:
        while not (tmp_path / "there").exists():
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child has died"
            time.sleep(0.01)
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as watch:
            assert watch.stdout is not None
            assert watch.stdout.readline().startswith("  rank 0  at the beginning of pass 1")
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert watch.stdout.readline().startswith(
                f"! rank 0  dead (process {child} is gone), last seen at the beginning"
            )
            assert watch.wait() == STUCK
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
