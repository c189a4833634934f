"""Passes that hang are reported, once each; and whoever does not hang notices nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import RunWriteError, TraceError
from retrograd.following.graph.origins import record_origins
from retrograd.following.hangs.rank_state import RankState, RingEvent, ThreadPosition
from retrograd.following.hangs.ring_file import read_rings
from retrograd.following.hangs.watch import StallDetector, watch_hangs
from tests import warm
from tests.processes import wait_for_child

HANGING = Path(__file__).with_name("hanging.py")
HAS_SIGNALS = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no such signals")
DEADLINE = 30.0


class Call(torch.autograd.Function):
    """Calls something in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradient, None


def run_pass(call: Callable[[], object]) -> None:
    x = torch.ones(3, requires_grad=True)
    Call.apply(x * 2, call).sum().backward()


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.005)
    return found


def reports(run: Path) -> list[str]:
    return [path.read_text() for path in sorted(run.glob("rank*/hang-*.txt"))]


# What is reported


def test_a_pass_that_stays_in_a_node_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with watch_hangs(tmp_path, limit=0.05):
        run_pass(lambda: None)
        run_pass(lambda: (wait_for(lambda: reports(tmp_path)), time.sleep(0.3)))
        assert len(reports(tmp_path)) == 1
        run_pass(lambda: wait_for(lambda: len(reports(tmp_path)) == 2))
    [first, second] = reports(tmp_path)
    assert f"Rank 0, pid {os.getpid()} on " in first
    assert "MainThread: inside CallBackward (number " in first
    assert "node 2 of pass 2, for 0." in first
    assert "node 2 of pass 3" in second
    lines = first.split("newest last:\n")[1].split("\n\n")[0].splitlines()
    assert [line.split(" s  ")[1].split()[0] for line in lines[-2:]] == ["SumBackward0", "CallBackward"]
    assert "in wait_for\n" in first
    assert "retrograd-hang" not in first
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2
    assert told[0].startswith("retrograd: rank 0: inside CallBackward (number ")
    assert told[0].endswith(f"see {tmp_path / 'rank00000' / 'hang-1.txt'}")


def test_without_a_folder_it_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with watch_hangs(limit=0.05) as watch:
        run_pass(lambda: time.sleep(0.3))
        assert watch.report() is None
    told = capfd.readouterr().err
    assert told.count("MainThread: inside CallBackward") == 1
    assert "Why this was written: it was asked for\n\noutside of a pass; pass 1 ended" in told


def test_a_folder_that_is_gone_does_not_stop_anybody(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with watch_hangs(run) as watch:
        for path in sorted(run.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        run.rmdir()
        run.write_text("in the way")
        run_pass(lambda: None)
        assert watch.report() is None
    assert "pass 1 ended" in capfd.readouterr().err


def test_modules_are_named_where_the_forward_was_recorded(tmp_path: Path) -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
            return Call.apply(x, call)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.slow = nn.Linear(3, 3), Slow()

        def forward(self, x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
            return self.slow(self.slow(self.first(x), lambda: None), call)

    def step(call: Callable[[], object]) -> None:
        with origins:
            y = model(torch.ones(3), call)
        y.sum().backward()

    model = Model()
    origins = record_origins(model, lines=False)
    with watch_hangs(tmp_path, origins=origins):
        step(lambda: None)
        step(lambda: wait_for(lambda: read_rings(tmp_path)[0].inside[0][1].module == "slow#2"))
    with watch_hangs(tmp_path, origins=origins) as watch:
        step(watch.report)
    assert "inside CallBackward (number " in reports(tmp_path)[0]
    assert "module slow#2), node 2" in reports(tmp_path)[0]


@HAS_SIGNALS
def test_a_process_that_ends_by_itself_is_not_taken_for_a_dead_one(tmp_path: Path) -> None:
    code = (
        "import signal, sys; from retrograd.following.hangs.watch import watch_hangs; "
        "watch_hangs(sys.argv[1], limit=9, on_signal=signal.SIGUSR1)"
    )
    warm.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    [state] = read_rings(tmp_path)
    assert state.closed
    assert state.alive is False


# When: a clock of our own stands in for the real one


def make_state(*threads: tuple[int, int, int]) -> RankState:
    """Of each thread: ident, depth, count of its last event; the latter is its time too."""
    made = [
        ThreadPosition(
            ident,
            ident,
            f"thread {ident}",
            depth,
            1,
            1,
            0,
            0,
            False,
            (RingEvent("node", f"Node{count}", 1, count, 0, count),),
        )
        for ident, depth, count in threads
    ]
    return RankState(0, 1, "here", None, 0, True, 0, tuple(made))


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ([((1, 1, 5),)] * 8, [10]),
        ([((1, 1, count),) for count in range(20)], []),
        ([((1, 1, 5),)] * 4 + [((1, 1, 6),)] * 4, [10, 22]),
        ([((1, 0, 5),)] * 8, []),  # outside of a pass
        ([((1, 1, 5), (2, 1, count)) for count in range(6, 14)], [10]),  # another pass goes on
        ([((1, 1, 5), (2, 0, count)) for count in range(6, 14)], []),  # the engine's thread runs its nodes
        ([((1, 1, 5), (2, 0, 6))] * 8, [10]),
        ([((1, 1, 5), (2, 2, 6))] * 4, [10, 10]),
        ([((1, 1, 5),)] * 2 + [()] + [((1, 1, 5),)] * 2, []),
    ],
)
def test_when_a_limit_is_reached(
    looks: list[tuple[tuple[int, int, int], ...]], told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look every three seconds, with a limit of nine: a stop is told of once, after nine."""
    now = 0.0
    monkeypatch.setattr("retrograd.following.hangs.watch.time.monotonic", lambda: now)
    lookout, found = StallDetector(9), []
    for look in looks:
        found += [round(now + 1) for _ in lookout.look(make_state(*look))]
        now += 3
    assert found == told


def test_how_often_is_looked() -> None:
    assert StallDetector(600).pause == 1.0
    assert StallDetector(0.4).pause == pytest.approx(0.1)


# Signals


@HAS_SIGNALS
def test_a_signal_asks_for_a_report_and_reaches_who_handled_it_before(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    handler = signal.getsignal(signal.SIGUSR1)
    try:
        with watch_hangs(tmp_path, on_signal=signal.SIGUSR1):
            for count in (1, 2):
                run_pass(
                    lambda count=count: (
                        signal.raise_signal(signal.SIGUSR1),
                        wait_for(lambda: len(reports(tmp_path)) == count),
                    )
                )
            assert heard == [signal.SIGUSR1] * 2
            time.sleep(0.05)
        assert signal.getsignal(signal.SIGUSR1) is handler
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(reports(tmp_path)) == 2
    assert all("Why this was written: a signal came" in report for report in reports(tmp_path))


@HAS_SIGNALS
def test_somebody_else_listens_on_the_socket(tmp_path: Path) -> None:
    """As asyncio does: before us, and after us."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, False)
    signal.set_wakeup_fd(writing)
    try:
        with watch_hangs(tmp_path, on_signal=signal.SIGUSR1):
            signal.raise_signal(signal.SIGUSR1)
            wait_for(lambda: reports(tmp_path))
            assert os.read(reading, 10) == bytes([signal.SIGUSR1])
            ours = signal.set_wakeup_fd(writing)
            assert ours not in (-1, writing)
            signal.raise_signal(signal.SIGUSR1)
            wait_for(lambda: len(reports(tmp_path)) == 2)
            assert os.read(reading, 10) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(-1) == writing
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reading)
        os.close(writing)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@HAS_SIGNALS
def test_handlers_of_others_that_came_later_are_left_alone(tmp_path: Path) -> None:
    watch = watch_hangs(tmp_path, on_signal=signal.SIGUSR1)
    ours = signal.getsignal(signal.SIGUSR1)
    heard: list[int] = []

    def theirs(number: int, frame: Any) -> None:
        heard.append(number)
        ours(number, frame)

    signal.signal(signal.SIGUSR1, theirs)
    try:
        watch.close()
        assert signal.getsignal(signal.SIGUSR1) is theirs
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert reports(tmp_path) == []


@HAS_SIGNALS
def test_closed_in_another_thread_the_handler_stays_and_is_silent(tmp_path: Path) -> None:
    watch = watch_hangs(tmp_path, on_signal=signal.SIGUSR1)
    thread = threading.Thread(target=watch.close)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGUSR1)
    assert reports(tmp_path) == []
    watch._signal.close()  # type: ignore[union-attr]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"limit": 0}, "limit of 0 seconds"),
        ({"limit": -1.0}, "limit of -1.0 seconds"),
        ({"limit": float("nan")}, "limit of nan seconds"),
        ({"on_signal": signal.SIGTERM}, "SIGTERM ends the process by default"),
        ({"on_signal": 9}, "SIGKILL ends the process by default"),
        ({"on_signal": 4711}, "The signal 4711 cannot be handled"),
    ],
)
def test_what_cannot_be_asked_for(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(TraceError, match=text):
        watch_hangs(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    assert signal.set_wakeup_fd(-1) == -1


@HAS_SIGNALS
def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunWriteError):
        watch_hangs(tmp_path / "file", limit=1, on_signal=signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


@HAS_SIGNALS
def test_signals_are_heard_in_the_main_thread_only(tmp_path: Path) -> None:
    errors = []

    def work() -> None:
        with pytest.raises(TraceError, match="main thread") as caught:
            watch_hangs(tmp_path, on_signal=signal.SIGUSR1)
        errors.append(caught.value)
        watch_hangs(tmp_path, limit=1).close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(errors) == 1


# No harm


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def train(reentrant: bool) -> list[torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order: list[str] = []
    model[0].weight.register_hook(lambda gradient: order.append("leaf"))
    for _ in range(3):
        x = torch.randn(4, 8, requires_grad=True)
        hidden = checkpoint(model[:2], x, use_reentrant=reentrant)
        hidden.register_hook(lambda gradient: gradient * 2)
        hidden.grad_fn.register_prehook(lambda gradients: order.append("node"))
        loss = model[2:](hidden).square().sum()
        [gradient] = torch.autograd.grad(loss, model[4].weight, create_graph=True, retain_graph=True)
        (loss + gradient.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert order == ["node", "leaf"] * 3
    return [*(parameter.detach() for parameter in model.parameters()), x.grad]


@pytest.mark.parametrize("reentrant", [False, True])
def test_results_are_the_same_to_the_bit(reentrant: bool) -> None:
    bare = train(reentrant)
    with watch_hangs(limit=60) as watch:
        watched = train(reentrant)
        state = watch.ring.read(1000)
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    assert max(thread.passes for thread in state.threads) == 6
    assert state.inside == []
    depths = {event.depth for thread in state.threads for event in thread.events if event.state == "pass begins"}
    assert depths == ({0, 1} if reentrant else {0})


def test_nodes_of_which_some_gradients_are_missing_are_seen_too() -> None:
    x = torch.ones(4, requires_grad=True)
    for loss in ((x * 1).split(2)[1].sum(), (x.view(2, 2) * 1).unbind(0)[1].sum(), torch.std_mean(x * 2)[1]):
        first, *ran = [node for node in walk(loss) if "Accumulate" not in node.name()]
        with watch_hangs() as watch:
            loss.backward()
            [thread] = watch.ring.read().threads
        names = [event.name for event in thread.events if event.state == "node"]
        assert names == [first.name(), *(node.name() for node in ran), "AccumulateGrad"]


def walk(root: torch.Tensor) -> list[Any]:
    nodes = [root.grad_fn]
    for node in nodes:
        nodes += [following for following, _ in node.next_functions if following not in (None, *nodes)]
    return nodes


def test_errors_come_out_as_they_are(tmp_path: Path) -> None:
    with watch_hangs(tmp_path) as watch:
        for error in (ValueError("mine"), KeyboardInterrupt()):
            with pytest.raises(type(error)) as caught:
                run_pass(lambda error=error: raise_(error))
            assert caught.value is error
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(1).backward()
        with pytest.raises(RuntimeError, match="does not have a grad_fn"):
            torch.autograd.grad(torch.ones(1), torch.ones(1, requires_grad=True))
        [thread] = watch.ring.read().threads
    ends = [event.state for event in thread.events if event.state != "node"]
    assert ends == ["pass begins", "pass failed"] * 4
    assert thread.depth == 0
    assert thread.failed


def raise_(error: BaseException) -> None:
    raise error


def test_two_watches_and_one_that_is_closed_inside_a_pass(tmp_path: Path) -> None:
    first, second = watch_hangs(tmp_path), watch_hangs()
    run_pass(first.close)
    run_pass(lambda: None)
    first.close()
    assert [thread.passes for thread in second.ring.read().threads] == [2]
    [thread] = read_rings(tmp_path)[0].threads
    assert (thread.depth, thread.node) == (1, 2), "what was known when it was closed"
    second.close()


def test_nothing_is_left_on_the_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    loss = (x.sin() * x).sum()
    with watch_hangs() as watch:
        loss.backward(retain_graph=True)
        count = len(watch.ring.read().threads[0].events)
        assert count == 2 + 4
    loss.backward(retain_graph=True)
    with watch_hangs() as again:
        loss.backward()
        assert len(again.ring.read().threads[0].events) == count
    assert len(watch.ring.read().threads[0].events) == count


def test_passes_in_several_threads() -> None:
    with watch_hangs(limit=60) as watch:
        threads = [threading.Thread(target=lambda: [run_pass(lambda: None) for _ in range(30)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        state = watch.ring.read(1000)
    assert (
        len({event.number for thread in state.threads for event in thread.events if event.state == "pass begins"})
        == 120
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_is_not_watched(tmp_path: Path) -> None:
    with watch_hangs(tmp_path, limit=0.05, on_signal=signal.SIGUSR1):
        run_pass(lambda: None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            is_restored = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1
            run_pass(lambda: time.sleep(0.2))
            os._exit(0 if is_restored else 1)
        assert wait_for_child(child) == 0
        assert reports(tmp_path) == []
        run_pass(lambda: (signal.raise_signal(signal.SIGUSR1), wait_for(lambda: reports(tmp_path))))
    [thread] = read_rings(tmp_path)[0].threads
    assert thread.passes == 2


# Several ranks


def expect_hang(run: Path) -> list[RankState]:
    def look() -> list[RankState]:
        states = read_rings(run) if list(run.glob("rank0000[01]/ring.bin")) else []
        names = [event.name for state in states for _, event in state.inside]
        return (
            states
            if names == ["ReduceGradientBackward", "SleepBackward"]
            and all(state.inside[0][0].passes == 4 for state in states)  # one may wait for the other in an earlier pass
            else []
        )

    return wait_for(look)


@pytest.mark.skipif(not torch.distributed.is_available() or sys.platform == "win32", reason="needs gloo and signals")
def test_one_rank_hangs_and_the_other_waits_for_it(tmp_path: Path) -> None:
    run, meeting = tmp_path / "run", tmp_path / "meeting"
    command = [sys.executable, str(HANGING), str(run), str(meeting), "2"]
    ranks = [warm.Popen(command, env={**os.environ, "RANK": str(rank)}, stderr=subprocess.PIPE) for rank in (0, 1)]
    try:
        waiting, sleeping = expect_hang(run)
        assert [(state.rank, state.pid, state.alive) for state in (waiting, sleeping)] == [
            *((rank, process.pid, True) for rank, process in enumerate(ranks)),
        ]
        assert [thread.passes for state in (waiting, sleeping) for thread, _ in state.inside] == [4, 4]
        assert [thread.node for state in (waiting, sleeping) for thread, _ in state.inside] == [4, 2]
        wait_for(lambda: len(reports(run)) == 2)
        for report, line in zip(
            reports(run), ("distributed.all_reduce(gradient)", "time.sleep(ctx.seconds)"), strict=True
        ):
            assert line in report
        ranks[0].send_signal(signal.SIGUSR1)  # it waits in C++, where no Python handler of signals runs
        wait_for(lambda: len(reports(run)) == 3)
        ranks[1].kill()
        ranks[1].wait()
        assert read_rings(run)[1].alive is False
        assert read_rings(run)[1].inside[0][1].name == "SleepBackward"
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
