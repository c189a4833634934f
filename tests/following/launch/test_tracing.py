"""``retrograd trace`` on real scripts: what it writes, and that the script is left alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from retrograd.core.cli import main
from retrograd.core.errors import TraceError
from retrograd.core.launch import closing
from retrograd.following.launch.requests import TraceRequest, parse_passes
from retrograd.following.tracing.trace import Trace
from tests import warm
from tests.commands import SCRIPTS, run
from tests.core.views.chrome_rules import Content, read_checked

LOSSES = 4
SCRIPT = str(SCRIPTS / "plain_loop.py")

COMMANDS = {
    "plain": "plain_loop.py",
    "chosen": "--passes 1:3 --norms --memory --by module --live --nodes head* plain_loop.py",
    "raises": "fails_in_backward.py raise",
    "raises late": "--passes 1 fails_in_backward.py raise",
    "interrupted": "fails_in_backward.py interrupt",
    "killed": "--passes 2 ends.py SIGKILL",
    "killed inside": "--passes 9 ends.py SIGKILL",
    "no torch": "no_torch.py",
    "untrained": "untrained.py",
    "left": "--passes 1:2 counts_modes.py",
    "too late": "--passes 7:9 plain_loop.py",
    "forked": "forked.py",
    "threads": "trains_in_threads.py",
    "ranks": "--live torchrun --standalone --nproc-per-node 2 ddp.py",
}


@dataclass
class Outcome:
    """What a traced script did."""

    code: int
    output: str
    errors: str
    folder: Path

    def trace(self, rank: str = "rank00000") -> Trace:
        return Trace.load(self.folder / rank / "trace.json.gz")

    def chrome(self, rank: str = "rank00000") -> Content:
        return read_checked(self.folder / rank / "chrome.json")

    def words(self) -> list[str]:
        """Our own lines."""
        return [line for line in self.errors.splitlines() if line.startswith("retrograd: ")]


class Stage:
    """Runs the commands, two at a time, from the first that is wanted on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(2)
        self._futures: dict[str, Future[Outcome]] = {}

    def begin(self, name: str) -> None:
        self._futures[name] = self._pool.submit(self._trace, name)

    def get(self, name: str) -> Outcome:
        if name not in self._futures:
            self.begin(name)
        return self._futures[name].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _trace(self, name: str) -> Outcome:
        folder = self._folder / name
        folder.mkdir()
        words = [str(SCRIPTS / word) if word.endswith(".py") else word for word in COMMANDS[name].split()]
        ours = [sys.executable, "-m", "retrograd", "trace", "-o", "out", *words]
        return Outcome(*run(ours, folder), folder / "out")


@pytest.fixture(scope="module")
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("traced"))
    wanted = [item.callspec.params["traced_as"] for item in request.session.items if hasattr(item, "callspec")
              and "traced_as" in item.callspec.params]  # fmt: skip
    for name in dict.fromkeys(wanted):
        stage.begin(name)
    yield stage
    stage.close()


@pytest.fixture
def outcome(traced: Stage, traced_as: str) -> Outcome:
    return traced.get(traced_as)


def of(name: str) -> pytest.MarkDecorator:
    """Decorator: the test gets the ``outcome`` of this command."""
    return pytest.mark.parametrize("traced_as", [name])


@of("plain")
def test_the_first_three_passes(outcome: Outcome) -> None:
    assert outcome.code == 0
    assert outcome.output.count("\n") == LOSSES + 1
    trace = outcome.trace()
    assert [(run.number, run.depth, run.failed) for run in trace.passes] == [
        (0, 0, False),
        (1, 0, False),
        (2, 0, False),
    ]
    places = {event.place for event in trace.events}
    assert {"head:AddmmBackward0", "body.1:ReluBackward0", "head:weight"} <= places
    lines = {event.name: event.line for event in trace.events if event.line is not None}
    assert Path(lines["NllLossBackward0"].file).name == "plain_loop.py"


@of("plain")
def test_its_files_open_in_perfetto(outcome: Outcome) -> None:
    content = outcome.chrome()
    assert {each.name for each in content.slices} >= {"backward pass 0", "backward pass 2", "body.1", "head:weight"}
    assert ("head", "head:AddmmBackward0") in [(start.name, end.name) for start, end in content.arrows]


@of("plain")
def test_a_table_at_the_end(outcome: Outcome) -> None:
    first, *rest = outcome.errors.splitlines()
    assert first.startswith("retrograd: tracing ")
    assert rest[0].startswith("3 passes, ")
    assert rest[1].split()[:3] == ["node", "runs", "ms"]
    assert rest[-1].startswith("retrograd: traced 3 backward passes; see it in ui.perfetto.dev: out/rank*/chrome.json")
    assert any(line.split()[:2] == ["head:AddmmBackward0", "3"] for line in rest)


@of("chosen")
def test_what_was_chosen(outcome: Outcome) -> None:
    assert outcome.code == 0
    assert outcome.output.count("\n") == LOSSES + 1
    trace = outcome.trace()
    assert len(trace.passes) == 2
    assert any(event.name == "NllLossBackward0" for event in trace.events)
    assert all(event.memory is not None for event in trace.events)
    assert all(event.norms_in is not None for event in trace.events)
    lines = outcome.errors.splitlines()
    live = [line for line in lines if line.lstrip()[:1].isdigit() and " ms  " in line]
    assert len(live) >= 6
    assert all("head" in line for line in live)
    assert lines[-2].split()[0] == "head"
    assert "norm out" in outcome.errors
    assert "memory gained in the pass" in outcome.chrome().counters


@of("raises")
def test_a_pass_that_raises(outcome: Outcome) -> None:
    assert outcome.code == 1
    assert outcome.output.count("\n") == 1
    assert "ArithmeticError: as planned\nretrograd: backward failed in self:DampBackward" in outcome.errors
    trace = outcome.trace()
    assert [run.failed for run in trace.passes] == [False, True]
    assert [event.name for event in trace.events if event.raised] == ["DampBackward"]
    assert "\n! self:DampBackward " in outcome.errors
    outcome.chrome()
    assert trace.failure is not None
    assert trace.failure.bundle == outcome.folder / "rank00000" / "bundles" / trace.failure.bundle.name
    assert main(["replay", str(trace.failure.bundle)]) == 1  # its Python code raised, which no bundle holds


@of("raises late")
def test_a_pass_that_raises_after_the_traced_ones(outcome: Outcome) -> None:
    assert outcome.code == 1
    assert "retrograd: backward pass 1 raised, and was not traced; see it with --passes 1:2" in outcome.words()
    assert len(outcome.trace().passes) == 1


@of("interrupted")
def test_ctrl_c_leaves_whole_files(outcome: Outcome) -> None:
    assert outcome.code == -signal.SIGINT
    assert "KeyboardInterrupt" in outcome.errors
    assert [run.failed for run in outcome.trace().passes] == [False, True]
    outcome.chrome()
    assert outcome.words()[-1].startswith("retrograd: traced 2 backward passes")


@of("killed")
def test_what_was_asked_for_is_written_at_once(outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome.code == -signal.SIGKILL
    assert len(outcome.trace().passes) == 2
    outcome.chrome()
    assert main(["hangs", "--once", str(outcome.folder)]) == 0
    assert "rank 0" in capsys.readouterr().out


@of("killed inside")
def test_each_pass_is_written_when_it_ends(outcome: Outcome) -> None:
    assert outcome.code == -signal.SIGKILL
    assert [each.failed for each in outcome.trace().passes] == [False] * 3
    assert {event.run for event in outcome.trace().events} == {0, 1, 2}
    outcome.chrome()


def test_a_process_that_dies_in_its_first_pass_is_spoken_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    request = TraceRequest(path=str(tmp_path), shown="traces/it")
    monkeypatch.setenv(TraceRequest.variable, request.write())
    monkeypatch.setenv(closing.SPEAKER, str(os.getpid()))
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    closing.say_end("no backward pass was seen", saw_nothing=True)
    (tmp_path / "rank00000").mkdir()
    closing.say_end("no backward pass was seen", saw_nothing=True)
    before, after = capfd.readouterr().err.splitlines()
    assert before == "retrograd: nothing was traced: no backward pass was seen"
    assert after.endswith("a backward pass began and did not end; see where with: retrograd hangs traces/it")


@of("no torch")
def test_a_script_without_torch(outcome: Outcome) -> None:
    assert (outcome.code, outcome.output) == (0, "nothing to see []\n")
    assert outcome.words()[1:] == ["retrograd: nothing was traced: torch was not imported"]
    assert not outcome.folder.exists()


@of("untrained")
def test_a_script_that_trains_nothing(outcome: Outcome) -> None:
    assert outcome.words()[1:] == ["retrograd: nothing was traced: no backward pass was seen"]
    assert not outcome.folder.exists()


@of("left")
def test_nothing_is_left_on_after_the_last_traced_pass(outcome: Outcome) -> None:
    assert outcome.output.splitlines()[:4] == ["modes 0", "modes 1", "modes 0", "modes 0"]


@of("too late")
def test_passes_that_never_come(outcome: Outcome) -> None:
    said = "retrograd: nothing was traced: 4 backward passes ran, and --passes begins at number 7"
    assert outcome.words()[1:] == [said]


@of("threads")
def test_ten_threads_are_traced_for_as_many_passes_as_one(outcome: Outcome) -> None:
    assert outcome.code == 0
    trace = outcome.trace()
    assert [run.begin < run.end for run in trace.passes] == [True] * 3
    assert {event.run for event in trace.events} == {0, 1, 2}
    assert {event.line is None for event in trace.events if event.parameter is None} == {False}
    assert "\n3 passes, " in outcome.errors
    assert outcome.words()[-1].startswith("retrograd: traced 3 backward passes")
    assert outcome.output.split() == ["0"] * 10  # modes that are on at the end of each


@pytest.mark.slow
@of("forked")
def test_forked_children_are_traced_apart(outcome: Outcome) -> None:
    folders = sorted(path.name for path in outcome.folder.glob("rank*"))
    assert len(folders) == 3
    for folder in folders:
        assert len(outcome.trace(folder).passes) == 3
        outcome.chrome(folder)


@pytest.mark.slow
@of("ranks")
def test_every_rank_of_torchrun(outcome: Outcome) -> None:
    assert outcome.code == 0
    assert sorted(path.name for path in outcome.folder.glob("rank*")) == ["rank00000", "rank00001"]
    for rank in (0, 1):
        trace = outcome.trace(f"rank0000{rank}")
        assert trace.rank == rank
        assert len(trace.passes) == 3
        assert outcome.chrome(f"rank0000{rank}").names["process_name", rank, 0] == f"rank {rank}"
        assert f"\nrank {rank}    " in outcome.errors
    assert outcome.errors.count("3 passes, ") == 1
    assert outcome.words()[-1].startswith("retrograd: traced in 2 processes")


@pytest.mark.parametrize(
    ("text", "passes"),
    [("3", (0, 3)), ("10:12", (10, 12)), ("10:", (10, None)), (":5", (0, 5)), (":", (0, None))],
)
def test_steps(text: str, passes: tuple[int, int | None]) -> None:
    assert parse_passes(text) == passes


@pytest.mark.parametrize("text", ["", "0", "-1", "3:3", "5:2", "-2:5", "a", "1:b", "1:2:3", "1.5"])
def test_steps_that_are_none(text: str) -> None:
    with pytest.raises(TraceError, match=r"--passes 10:12"):
        parse_passes(text)


def test_a_request_travels_through_the_environment() -> None:
    full = TraceRequest(
        path="/x", shown="x", passes="1:", nodes="a*", live=True, norms=True, memory=True, by="kind", sort="memory"
    )
    for request in (full, TraceRequest(path="/x", shown="x")):
        assert TraceRequest.read({"RETROGRAD_TRACE": request.write()}) == request
    assert full.span == (1, None)


@pytest.mark.parametrize(
    ("words", "slug"),
    [
        (["trace"], "cannot-launch"),
        (["trace", "no_such.py"], "cannot-launch"),
        (["trace", "-m"], "cannot-launch"),
        (["trace", "--passes", "0", SCRIPT], "bad-trace"),
        (["trace", "--passes", "x", "--", SCRIPT], "bad-trace"),
        (["trace", "-o", "/dev/null/x", SCRIPT], "run-not-writable"),
        (["replay", "no/such/bundle"], "damaged-bundle"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(
    words: list[str], slug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr()
    assert not said.out
    assert f"[{slug}]" in said.err
    assert not list(tmp_path.iterdir())


def test_a_folder_with_other_things_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").touch()
    assert main(["trace", "-o", str(tmp_path), SCRIPT]) == 2
    assert "[run-exists]" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["trace", "debug", "hangs", "replay"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: retrograd {command}")
    assert "examples:" in text


@pytest.mark.parametrize(
    "line",
    [
        "torch.ones(1).backward()",
        "y = x * x; y.register_hook(lambda g: 1 / 0); torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)",
    ],
)
def test_passes_that_were_asked_for_are_not_advised_again(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.py").write_text(f"import torch\nx = torch.ones(3, requires_grad=True)\n{line}\n")
    words = [sys.executable, "-m", "retrograd", "trace", "--passes", "0:1", "train.py"]
    done = warm.run(words, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert (
        "retrograd: backward pass 0 raised, and was not traced: torch refused it before its first node" in done.stderr
    )
    assert "nothing was traced: 1 backward pass ran: torch refused it" in done.stderr
    assert "--passes" not in done.stderr
