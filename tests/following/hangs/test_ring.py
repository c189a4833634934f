"""The ring of last events: what is in it, and that it can be read whatever became of its writer."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.core.errors import RunWriteError, TraceError
from retrograd.following.hangs.rank_state import RankState
from retrograd.following.hangs.ring import LANES, Ring
from retrograd.following.hangs.ring_file import (
    HEADER_SIZE,
    MODULES,
    NAMES,
    RING,
    parse_ring,
    read_ring,
    read_rings,
    size_of,
)
from retrograd.following.views.hang_report import describe_ranks
from tests import warm
from tests.by_hand import make_function
from tests.processes import wait_for_child

KILLED = """
import sys, time, torch
from retrograd.following.hangs.watch import watch_hangs

class Hanging(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        print("here", flush=True)
        time.sleep(600)

watch_hangs(sys.argv[1])
x = torch.ones(3, requires_grad=True)
(x * 2).sum().backward()
Hanging.apply(x.sin()).exp().sum().backward()
"""


def hook_all(root: torch.Tensor, see: Callable[..., None]) -> None:
    """Hooks as torch gives them, on every node."""
    seen = [root.grad_fn]
    for node in seen:
        node.register_prehook(see)
        seen += [following for following, _ in node.next_functions if following not in (None, *seen)]


def make_loss() -> torch.Tensor:
    x = torch.ones(3, requires_grad=True)
    return (x.sin() * x.exp()).relu().sum()


def run_pass(ring: Ring, loss: torch.Tensor | None = None) -> None:
    loss = make_loss() if loss is None else loss
    hook_all(loss, ring.see)
    ring.pass_begins()
    loss.backward()
    ring.pass_ends()


def only(state: RankState) -> Any:
    assert len(state.threads) == 1
    return state.threads[0]


@pytest.fixture
def ring() -> Any:
    ring = Ring.create(None)
    yield ring
    ring.close()


@pytest.mark.parametrize("in_memory", [False, True])
def test_each_node_is_there_in_the_order_of_the_engine(tmp_path: Path, in_memory: bool) -> None:
    ring = Ring.create(None if in_memory else tmp_path)
    loss, ran = make_loss(), []
    hook_all(loss, lambda _: ran.append(torch._C._current_autograd_node()))
    before = time.time_ns()
    run_pass(ring, loss)
    state = ring.read() if in_memory else read_ring(tmp_path / "rank00000" / RING)
    thread = only(state)
    numbers = [None if "Accumulate" in node.name() else node._sequence_nr() for node in ran]
    names = [node.name().rpartition("::")[2] for node in ran]
    assert [event.state for event in thread.events] == ["pass begins", *["node"] * len(ran), "pass ends"]
    assert [(event.name, event.number) for event in thread.events[1:-1]] == list(zip(names, numbers, strict=True))
    times = [before, *(event.time for event in thread.events), time.time_ns()]
    assert times == sorted(times)
    assert (state.rank, state.pid, state.alive, state.inside) == (0, os.getpid(), True, [])
    assert (thread.depth, thread.passes, thread.failed) == (0, 1, False)
    assert (thread.native, thread.name) == (threading.get_native_id(), "MainThread")
    ring.close()


def test_only_the_last_events_are_kept(tmp_path: Path) -> None:
    ring = Ring.create(tmp_path, capacity=50)
    for number in range(30):
        ring.pass_begins()
        ring.pass_ends(failed=number == 29)
        events = only(ring.read(last=1000)).events
        assert [event.count for event in events] == list(range(max(1, 2 * number + 2 - 62), 2 * number + 3))
    thread = only(ring.read(last=3))
    assert [event.state for event in thread.events] == ["pass ends", "pass begins", "pass failed"]
    assert (thread.failed, thread.passes) == (True, 30)
    ring.close()


def test_where_a_pass_is_inside_another(ring: Ring) -> None:
    seen: list[RankState] = []

    class Nesting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                inner = make_loss()
            hook_all(inner, ring.see)
            hook_all(inner, lambda _: seen.append(ring.read()))
            ring.pass_begins(is_nested=True)
            inner.backward()
            ring.pass_ends()
            seen.append(ring.read())
            return gradient

    x = torch.ones(3, requires_grad=True)
    loss = Nesting.apply(x * 2).sum()
    hook_all(loss, lambda _: seen.append(ring.read()))
    run_pass(ring, loss)
    places = [place for state in seen for place in state.inside]
    counts = [(event.name, thread.node, thread.depth) for thread, event in places]
    inner = [
        *(("SumBackward0", 3, 2), ("ReluBackward0", 4, 2), ("MulBackward0", 5, 2)),
        *(("ExpBackward0", 6, 2), ("SinBackward0", 7, 2), ("AccumulateGrad", 8, 2)),
    ]
    # our hooks come before the ring's in the outer pass, and after them in the inner one
    assert counts[2:-2] == [*inner, ("NestingBackward", 8, 1)]
    again, first = places[-3][1], next(each for each in places[-3][0].events if each.name == "NestingBackward")
    assert again.time == first.time, "it is still the same run of the node"
    assert [event.depth for event in only(ring.read()).events if event.state == "pass begins"] == [0, 1]
    assert only(ring.read()).passes == 1


def test_threads_have_lanes_of_their_own(tmp_path: Path) -> None:
    ring = Ring.create(tmp_path)
    together = threading.Barrier(LANES)

    def work(number: int) -> None:
        together.wait()
        for _ in range(20):
            run_pass(ring)
        if number % 2:
            ring.pass_begins()
        together.wait()

    workers = [threading.Thread(target=work, args=(number,), name=f"worker {number}") for number in range(LANES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    state = read_ring(tmp_path / "rank00000" / RING, last=1000)
    assert {thread.name for thread in state.threads} == {worker.name for worker in workers}
    for thread in state.threads:
        assert [event.count for event in thread.events] == list(range(1, len(thread.events) + 1))
        assert len(thread.events) == 20 * 8 + thread.depth
        assert thread.depth == int(thread.name[-1]) % 2
    assert {thread.name[-1] for thread, _ in state.inside} == {"1", "3", "5", "7"}
    assert max(thread.passes for thread in state.threads) == LANES * 20 + LANES // 2
    ring.close()


def test_more_threads_than_lanes(ring: Ring) -> None:
    for _ in range(3 * LANES):  # each takes the place of one that has ended
        thread = threading.Thread(target=run_pass, args=(ring,))
        thread.start()
        thread.join()
    gathered, done = threading.Barrier(2 * LANES + 1), threading.Event()

    def work() -> None:
        run_pass(ring)
        gathered.wait()
        done.wait()

    workers = [threading.Thread(target=work) for _ in range(2 * LANES)]
    for worker in workers:
        worker.start()
    gathered.wait()
    state = ring.read()
    done.set()
    for worker in workers:
        worker.join()
    assert len(state.threads) == LANES
    assert state.inside == []


def test_a_thread_of_the_engine_counts_while_a_pass_runs(ring: Ring) -> None:
    """On CUDA one thread asks for a pass, and another one runs its nodes."""

    def run_nodes() -> None:
        loss = make_loss()
        hook_all(loss, ring.see)
        loss.backward()

    def in_thread() -> None:
        thread = threading.Thread(target=run_nodes, name="engine")
        thread.start()
        thread.join()

    in_thread()
    assert ring.read().inside == []
    ring.pass_begins()
    assert [thread.name for thread, _ in ring.read().inside] == ["MainThread"]
    in_thread()
    assert [(thread.name, event.name) for thread, event in ring.read().inside] == [
        ("engine", "AccumulateGrad"),
        ("MainThread", ""),
    ]
    ring.pass_ends()
    assert ring.read().inside == []


def test_kinds_that_share_a_type_and_names_that_are_odd(ring: Ring) -> None:
    odd = make_function(lambda ctx, x: x.clone(), lambda ctx, gradient: gradient, "two\nlines\x1b")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out
        scripted = torch.jit.script(double_and_add)
        x = torch.ones(3, requires_grad=True)
        for _ in range(4):
            y = scripted(odd.apply(torch._C._functions.DelayedError("no", 1)(x) * 0 + x))
    assert type(y.grad_fn).__name__ == "CppFunction"
    loss = y.sum()
    hook_all(loss, ring.see)
    ring.pass_begins()
    with pytest.raises(RuntimeError, match="no"):
        loss.backward()
    ring.pass_ends(failed=True)
    thread = only(ring.read())
    names = [event.name for event in thread.events if event.state == "node"]
    assert thread.failed
    assert names[:3] == ["SumBackward0", "DifferentiableGraphBackward", "two lines\x1bBackward"]
    assert names[-1] == "Error"


def double_and_add(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * 2) + x


def test_nothing_outside_of_a_pass_does_harm(ring: Ring) -> None:
    ring.see(None)
    ring.pass_ends()
    assert ring.read().threads == ()
    ring.pass_begins()
    ring.close()
    run_pass(ring)  # a thread may not have noticed
    ring.close()


def test_modules_of_numbers(tmp_path: Path) -> None:
    ring = Ring.create(tmp_path)
    loss = make_loss()
    first = loss.grad_fn._sequence_nr()
    ring.name_modules(first - 3, first + 1, "self")
    ring.name_modules(first - 1, first, "blocks.3 \n")
    run_pass(ring, loss)
    for state in (ring.read(), read_ring(tmp_path / "rank00000" / RING)):
        found = {event.name: event.module for event in only(state).events if event.state == "node"}
        assert found["SumBackward0"] == "self"
        assert found["ReluBackward0"] == "blocks.3"
        assert found["MulBackward0"] == "self"
        assert found["SinBackward0"] is None
        assert found["AccumulateGrad"] is None
    for _ in range(5):
        for number in range(10_000):
            ring.name_modules(10**6 + number, 10**6 + number + 1, "x" * 40)
        run_pass(ring)
    assert (tmp_path / "rank00000" / MODULES).stat().st_size < 3 << 20
    ring.close()


def test_whose_folder_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    first = Ring.create(tmp_path)
    second = Ring.create(tmp_path)
    run_pass(first)
    assert [ring.folder.name for ring in (first, second) if ring.folder] == ["rank00003", f"rank00003.p{os.getpid()}"]
    assert [(state.rank, len(state.threads)) for state in read_rings(tmp_path)] == [(3, 1), (3, 0)]
    first.close()
    assert read_rings(tmp_path)[0].closed
    third = Ring.create(tmp_path)
    assert third.folder == tmp_path / "rank00003"
    assert [(state.closed, len(state.threads)) for state in read_rings(tmp_path)] == [(0, 0), (0, 0)]
    monkeypatch.setenv("RANK", "4")  # it is told late
    run_pass(third)
    assert third.rank == 4 == read_ring(tmp_path / "rank00003" / RING).rank
    for ring in (second, third):
        ring.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_does_not_write(tmp_path: Path) -> None:
    ring = Ring.create(tmp_path)
    run_pass(ring)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        for _ in range(3):
            run_pass(ring)
            ring.name_modules(0, 1, "child")
        ring.close()
        os._exit(0)
    assert wait_for_child(child) == 0
    run_pass(ring)
    state = read_ring(tmp_path / "rank00000" / RING)
    assert (state.pid, state.closed, only(state).passes) == (os.getpid(), 0, 2)
    ring.close()


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no such signal")
def test_it_outlives_a_killed_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        alive = read_rings(tmp_path)[0]
        process.send_signal(signal.SIGKILL)
        process.wait()
    dead = read_rings(tmp_path)[0]
    assert (alive.alive, dead.alive) == (True, False)
    for state in (alive, dead):
        [(thread, event)] = state.inside
        assert (event.name, thread.node, thread.passes, state.pid) == ("HangingBackward", 3, 2, process.pid)
        assert [each.name for each in thread.events[-3:]] == ["SumBackward0", "ExpBackward0", "HangingBackward"]
    again = Ring.create(tmp_path)
    assert again.folder == tmp_path / "rank00000", "the place of a dead process is free"
    again.close()


@cache
def whole() -> dict[str, bytes]:
    """A ring with all sorts of entries, as its three files."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        ring = Ring.create(folder, capacity=16)
        ring.name_modules(0, 1000, "a")
        for _ in range(3):
            run_pass(ring)
        ring.pass_begins()
        rank = Path(folder) / "rank00000"
        content = {name: (rank / name).read_bytes() for name in (RING, NAMES, MODULES)}
        ring.close()
        return content


MIXED_UP = st.lists(
    st.tuples(st.sampled_from([RING, RING, NAMES, MODULES]), st.integers(0, 900), st.binary(max_size=9))
)


@settings(deadline=None, max_examples=150)
@given(changes=MIXED_UP, ends=st.dictionaries(st.sampled_from([RING, NAMES, MODULES]), st.integers(0, 10_000)))
def test_damaged_files_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, int, bytes]], ends: dict[str, int]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged" / "rank00000"
    folder.mkdir(parents=True, exist_ok=True)
    content = {name: bytearray(each) for name, each in whole().items()}
    for name, place, new in changes:
        content[name][place : place + len(new)] = new
    for name, each in content.items():
        (folder / name).write_bytes(each[: ends.get(name)])
    [state] = read_rings(folder.parent)
    if state.fault:
        with pytest.raises(TraceError, match=re.escape(state.fault)):
            read_ring(folder / RING)
    else:
        assert [thread.events for thread in read_ring(folder / RING).threads] == [
            thread.events for thread in state.threads
        ]
    assert all(isinstance(line, str) for line in describe_ranks([state], limit=1.0))


@given(st.binary(min_size=256, max_size=2048))
def test_a_whole_lane_of_nonsense(content: bytes) -> None:
    ring = bytearray(whole()[RING])
    ring[HEADER_SIZE : HEADER_SIZE + len(content)] = content
    assert parse_ring(ring, [], []).pid == os.getpid()


def test_half_written_entries_are_left_out(tmp_path: Path) -> None:
    ring = Ring.create(tmp_path, capacity=16)
    for _ in range(20):
        ring.pass_begins()
        ring.pass_ends()
    path = tmp_path / "rank00000" / RING
    ring.close()
    content = bytearray(path.read_bytes())
    entries = HEADER_SIZE + 128
    struct.pack_into("<3Q", content, entries + 41 % 16 * 32, 1, 2, 3)  # the next one, without its count
    struct.pack_into("<Q", content, entries + 38 % 16 * 32 + 24, 10**15)  # no count that could stand there
    path.write_bytes(content)
    assert [event.count for event in only(read_ring(path)).events] == [*range(26, 38), 39, 40]


def test_what_is_no_ring(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"holds no ring of events[^$]*rg\.watch_hangs"):
        read_rings(tmp_path)
    path = tmp_path / "rank00000" / RING
    path.parent.mkdir()
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_ring(path)
    path.write_bytes(b"")
    with pytest.raises(TraceError, match="is not a ring of events"):
        read_ring(path)
    assert "not a ring of events" in read_rings(tmp_path)[0].fault
    path.write_bytes(whole()[RING][:-1])
    with pytest.raises(TraceError, match=f"is cut off: {size_of(LANES, 16) - 1} of {size_of(LANES, 16)} bytes"):
        read_ring(path)
    later = bytearray(whole()[RING])
    later[8] = 99
    path.write_bytes(later)
    with pytest.raises(TraceError, match="later version"):
        read_ring(path)
    with pytest.raises(RunWriteError, match="cannot be written"):
        Ring.create(path)


def test_names_of_another_ring_are_not_taken_for_its_own(tmp_path: Path) -> None:
    path = tmp_path / RING
    path.write_bytes(whole()[RING])
    (tmp_path / NAMES).write_bytes(whole()[NAMES].replace(b"names of ring", b"names of ring 1"))
    assert {event.name for event in only(read_ring(path)).events} == {"", "?"}
