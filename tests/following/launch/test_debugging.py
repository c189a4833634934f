"""The prompt inside a backward pass: driven in this process, through a pipe, and at a terminal."""

from __future__ import annotations

import gc
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrograd.following.launch.debugger import DebuggedPass, Debugger, Orders
from retrograd.following.launch.prompt import _HELP, Prompt, _names_of
from retrograd.following.launch.requests import DebugRequest
from retrograd.following.stepping.breakpoints import parse_breakpoint
from tests import warm
from tests.commands import ENVIRONMENT, SCRIPTS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).relu()
        return self.head(hidden.square().sum(1, keepdim=True).sqrt() * hidden).square().mean()


def make(*, bad: bool = False) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(3, 4)
    if bad:  # the root of 0
        x[1] = 0
        net.body.bias.data.zero_()
    return net, x


def train(net: Net, x: Tensor, passes: int = 1) -> list[Tensor]:
    for _ in range(passes):
        loss = net(x)
        loss.backward()
    return [parameter.grad for parameter in net.parameters()]


def debug(run: Callable[[], Any], commands: str, *breakpoints: str, result: list[Any] | None = None) -> str:
    """What is said when these commands are given one by one, in all prompts that open."""
    source, output = StringIO(commands.replace("; ", "\n") + "\n"), StringIO()

    def ask(scene: DebuggedPass, orders: Orders) -> None:
        Prompt(scene, orders, source, output).run()

    debugger = Debugger([parse_breakpoint(text) for text in breakpoints], ask)
    debugger.start()
    try:
        value = run()
        if result is not None:
            result.append(value)
    finally:
        debugger.close()
    return output.getvalue()


def stops(said: str) -> list[str]:
    """The lines that say which node the pass is at."""
    return [line.strip() for line in said.splitlines() if line.startswith("  node ")]


@pytest.mark.parametrize(
    ("breakpoints", "commands"),
    [
        ([], ""),
        (["*"], "finish"),
        (["*"], "s 3; s; next; info; list; finish"),
        (["norm > 0"], "c; " * 100),
        (["non-finite", "kind AddmmBackward0", "head:bias"], "where; next; info; next; next; next; next; next"),
    ],
)
def test_results_are_those_without(breakpoints: list[str], commands: str) -> None:
    expected = [grad.clone() for grad in train(*make(), passes=3)]
    result: list[Any] = []
    debug(lambda: train(*make(), passes=3), commands, *breakpoints, result=result)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(result[0], expected, strict=True))


def test_one_of_several_gradients_can_be_set_before_the_node_has_run() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    debug(lambda: (x * y).sum().backward(), "set outgoing[1] = y.detach(); finish", "MulBackward0")
    assert torch.equal(x.grad, torch.full((2,), 3.0))
    assert torch.equal(y.grad, torch.full((2,), 3.0))


def test_the_first_that_is_not_finite_is_caught_where_it_is_made() -> None:
    said = debug(lambda: train(*make(bad=True)), "info; p saved['result'].min(); next", "non-finite")
    assert len(stops(said)) == 1
    assert "just ran: SqrtBackward0 of self" in said
    assert "1 of 3 not finite (1 nan)" in said
    assert "tensor(0.)" in said
    assert "->" in said
    assert "hidden.square()" in said


def test_it_is_caught_once_a_pass() -> None:
    said = debug(lambda: train(*make(bad=True), passes=3), "next; next; next", "non-finite")
    assert [line.partition(" stopped")[0] for line in said.splitlines() if "stopped" in line] == [
        "Backward pass 1",
        "Backward pass 2",
        "Backward pass 3",
    ]


def test_a_loss_that_is_not_finite_is_caught_at_the_root() -> None:
    x = torch.tensor([1.0], requires_grad=True)
    said = debug(lambda: (x * 2).backward(torch.tensor([float("nan")])), "next", "non-finite")
    assert "what comes in is not finite" in said
    assert "MulBackward0" in said


def test_gradients_can_be_mended() -> None:
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    said = debug(lambda: x.sqrt().sum().backward(), "set outgoing[0] = outgoing[0].clamp(max=9); c", "non-finite")
    assert "outgoing[0] float32[2]  0.25 to 9" in said
    assert torch.equal(x.grad, torch.tensor([9.0, 0.25]))
    x.grad = None
    debug(lambda: x.exp().sum().backward(), "set incoming[0] = incoming[0] * 2; c", "ExpBackward0")
    assert torch.equal(x.grad, x.detach().exp() * 2)
    x.grad = None
    debug(lambda: x.exp().sum().backward(), "set outgoing[0] = incoming[0] * 2; finish", "ExpBackward0")
    assert torch.equal(x.grad, torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("set", "Write: set incoming[0] = EXPRESSION"),
        ("set incoming[3] = 1", "There is no incoming[3]"),
        ("set incoming[0] = 1", "is not a tensor"),
        ("set incoming[0] = nothing", "NameError"),
        ("set outgoing[0] = torch.zeros(9)", "float32[9]"),
        ("p 1 / 0", "ZeroDivisionError"),
        ("p )", "SyntaxError"),
        ("p sum(range(4)) + len(incoming)", "\n7\n"),
        ("p x.shape, local", "(torch.Size([3, 4]), 'here')"),
        ("p node.name", "'SqrtBackward0'"),
        ("p [torch.is_grad_enabled() for each in [1]]", "[False]"),
        ("break", "Set one with: break non-finite"),
        ("break norm >", "is not a breakpoint"),
        ("break nowhere*", "matches no node of this pass"),
        ("breaks", "1  kind SqrtBackward0"),
        ("clear 1", "cleared kind SqrtBackward0"),
        ("clear 7", "no such breakpoint"),
        ("clear", "no such breakpoint"),
        ("until SqrBackward0", "the nearest are SqrtBackward0"),
        ("until", "is not a breakpoint"),
        ("nodes head*", "AccumulateGrad of head:weight"),
        ("nodes norm > 1", "not about nodes"),
        ("nodes hed", "matches no node"),
        ("bogus", "There is no command 'bogus'"),
        ("help", "quit, q, exit"),
        ("help until", "as in: until blocks.3*"),
        ("up", "gives incoming[0]: MulBackward0 of self"),
        ("up 2", "There are 1."),
        ("up; up; info", "Gradients are known where the pass is"),
        ("down", "gets outgoing[0]: SumBackward1 of self"),
        ("down; p node.name, incoming, sorted(saved)", "('SumBackward1', None, ["),
        ("down; where", "about to run: SqrtBackward0 of self"),
        ("up; up; up; up; up; up; up; up; up; up; up", "The pass begins here"),
        ("list", "-> "),
        ("info", "saved result"),
    ],
)
def test_commands(command: str, answer: str) -> None:
    def run() -> None:
        local, (net, x) = "here", make()
        net(x).backward()
        assert local

    said = debug(run, f"{command}; finish", "kind SqrtBackward0")
    assert answer in said


def test_how_to_go_on() -> None:
    said = debug(lambda: train(*make()), "s; step 2; until body:weight; s", "MeanBackward0")
    names = [line.rpartition(": ")[2].split()[0] for line in stops(said)]
    assert names == ["MeanBackward0", "PowBackward0", "AccumulateGrad", "AccumulateGrad"]
    assert "node 1 of " in said


def test_steps_go_on_into_the_next_pass() -> None:
    x = torch.ones(2, requires_grad=True)

    def run() -> None:
        for _ in range(2):
            (x * 2).sum().backward()

    said = debug(run, "s 3; finish", "SumBackward0")
    assert [line for line in said.splitlines() if line.startswith("Backward")] == [
        "Backward pass 1 stopped: breakpoint SumBackward0",
        "Backward pass 2 stopped: breakpoint SumBackward0",
    ]


def test_an_exception_is_shown_where_it_was_raised_and_goes_on() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            secret = 17
            raise KeyError(secret)

    x = torch.ones(2, requires_grad=True)
    said: list[str] = []

    def run() -> None:
        with pytest.raises(KeyError, match="17"):
            Bad.apply(x * 2).sum().backward()

    said = debug(run, "p secret + 1; step; until *; set incoming[0] = 1; list; continue")
    assert "raised: KeyError: 17" in said
    assert "raised: BadBackward" in said
    assert "raise KeyError(secret)" in said
    assert "\n18\n" in said
    assert said.count("The pass has ended in the exception") == 3


def test_an_exception_between_two_nodes() -> None:
    x = torch.ones(2, requires_grad=True)

    def run() -> None:
        y = x * 2
        y.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()

    said = debug(run, "info; c")
    assert "raised after this node had run" in said
    assert "SumBackward0" in said


def test_quit_ends_the_script_and_leaves_nothing() -> None:
    net, x = make()
    loss = net(x)
    with pytest.raises(SystemExit) as raised:
        debug(lambda: loss.backward(retain_graph=True), "quit", "kind SqrtBackward0")
    assert raised.value.code == 1
    assert net.body.weight.grad is None


def test_the_end_of_input_lets_it_run_without_stops() -> None:
    said = debug(lambda: train(*make(), passes=3), "where", "kind SqrtBackward0")
    assert len(stops(said)) == 2  # when it stops, and for the command


def test_a_pass_inside_a_pass_is_gone_through() -> None:
    net, x = make()
    x.requires_grad_()

    def run() -> None:
        checkpoint(net.body, x, use_reentrant=True).sum().backward()

    said = debug(run, "s; " * 20, "*")
    assert len(stops(said)) == 3
    assert net.body.weight.grad is not None


def test_another_thread_is_not_stopped_meanwhile() -> None:
    net, x = make()
    grads: list[list[Tensor]] = []

    def ask(scene: DebuggedPass, orders: Orders) -> None:
        thread = threading.Thread(target=lambda: grads.append(train(*make())))
        thread.start()
        thread.join()

    debugger = Debugger([parse_breakpoint("SqrtBackward0")], ask)
    debugger.start()
    train(net, x)
    debugger.close()
    assert len(grads) == 1
    assert torch.equal(grads[0][0], net.body.weight.grad)


def test_passes_leave_no_cycles() -> None:
    net, x = make()

    def run() -> None:
        net(x).backward()
        found = []
        gc.disable()
        try:
            for _ in range(3):  # what Python loads and drops for the first time is garbage of its own
                gc.collect()
                net(x).backward()
                found.append(gc.collect())
            assert 0 in found
        finally:
            gc.enable()

    debug(run, "info; s; list; up; p node; c; " * 8, "SqrtBackward0", "non-finite")


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("wh", ["where"]),
        ("un", ["until"]),
        ("break non", ["non-finite"]),
        ("break kind Sq", ["kind SqrtBackward0"]),
        ("break head:w", ["head:weight"]),
        ("until body:Add", ["body:AddmmBackward0"]),
        ("nodes head:b", ["head:bias"]),
        ("p net.hea", ["net.head"]),
        ("p net.head.bia", ["net.head.bias"]),
        ("p incom", ["incoming"]),
        ("p torch.is_tens", ["torch.is_tensor"]),
        ("p no.such.thing", []),
        ("set outgo", ["outgoing"]),
    ],
)
def test_completion(line: str, choices: list[str]) -> None:
    found: list[list[str]] = []

    def ask(scene: DebuggedPass, orders: Orders) -> None:
        prompt = Prompt(scene, orders, None, StringIO())
        for delimiters in (" ", " \t\n`~!@#$%^&*()-=+[{]}\\|;:'\",<>/?"):  # those of readline are the second
            begin = max((line.rfind(each) for each in delimiters), default=-1) + 1
            if begin == 0:
                found.append([line[:begin] + name for name in prompt.completenames(line[begin:])])
                continue
            complete = getattr(prompt, f"complete_{line.split(maxsplit=1)[0]}")
            word_begin = line.index(" ") + 1
            completed = complete(line[begin:], line, begin, len(line))
            found.append([line[word_begin:begin] + each for each in completed])

    debugger = Debugger([parse_breakpoint("SqrtBackward0")], ask)
    debugger.start()
    train(*make())
    debugger.close()
    assert found == [choices, choices]


def test_all_commands_have_help() -> None:
    helped = {name for usage, _ in _HELP for name in _names_of(usage)}
    commands = {name[3:] for name in dir(Prompt) if name.startswith("do_")} - {"EOF", "help", "h"}
    assert helped == commands


def test_the_request_travels() -> None:
    request = DebugRequest(breakpoints=("norm > 3", "a*"), nonfinite=False)
    assert DebugRequest.read({"RETROGRAD_DEBUG": request.write()}) == request


class Running:
    """Commands of ours, begun at once and two at a time, for they take seconds to load torch."""

    COMMANDS: ClassVar = {
        "piped": ["--break", "net.head:bias", "--", "makes_nan.py"],
        "bare": [],
        "wrong": ["--break", "norm of something", "--", "makes_nan.py"],
        "module": ["-m", "fails_in_backward", "raise"],
        "quiet": ["--no-non-finite", "makes_nan.py"],
    }
    INPUT: ClassVar = {
        "piped": "p step; clear 1; next; p step; set outgoing[1] = outgoing[1].nan_to_num(); q",
        "module": "where",
        "quiet": "",
    }

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)
        self._futures: dict[str, Future[tuple[int, str, str]]] = {
            name: self._pool.submit(self._run, name) for name in self.COMMANDS
        }

    def result(self, name: str) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        return self._futures[name].result()

    def close(self) -> None:
        self._pool.shutdown()

    def _run(self, name: str) -> tuple[int, str, str]:
        words = self.COMMANDS[name]
        command = ["-m", "retrograd", "debug", *words] if words else ["makes_nan.py"]
        done = warm.run(
            [sys.executable, *command],
            input=self.INPUT.get(name, "").replace("; ", "\n"),
            cwd=SCRIPTS,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.close()


def test_commands_through_a_pipe(running: Running) -> None:
    code, output, errors = running.result("piped")
    assert code == 1
    assert output == running.result("bare")[1].splitlines(keepends=True)[0]
    assert "(retrograd) p step\n0\n" in errors
    assert "(retrograd) p step\n1\n" in errors
    assert "about to run: AccumulateGrad of net.head:bias" in errors
    assert "just ran: DivBackward0 of self, at makes_nan.py:" in errors
    assert "backward() called at makes_nan.py:" in errors
    assert "Traceback" not in errors


def test_a_script_that_is_never_stopped(running: Running) -> None:
    bare, (code, output, errors) = running.result("bare"), running.result("quiet")
    assert (code, output) == bare[:2]
    assert [line for line in errors.splitlines() if line.startswith("retrograd: ")][1:] == [
        "retrograd: 3 backward passes ran, and nothing was found to stop at"
    ]


def test_a_wrong_breakpoint_is_told_before_anything_runs(running: Running) -> None:
    code, output, errors = running.result("wrong")
    assert (code, output) == (2, "")
    assert "is not a breakpoint" in errors


def test_a_module_that_raises(running: Running) -> None:
    code, output, errors = running.result("module")
    assert code == 1
    assert len(output.splitlines()) == 1
    assert "Backward pass 2 raised: ArithmeticError: as planned" in errors
    assert errors.count("(retrograd) ") == 2
    assert errors.endswith("ArithmeticError: as planned\n")


def test_a_person_at_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "retrograd", "debug", "--break", "net.head:bias", "--", "makes_nan.py"]
    process = subprocess.Popen(  # a warm one was seen to wait for ever here
        words, cwd=SCRIPTS, env={**ENVIRONMENT, "TERM": "dumb"}, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said = ""
    for line in ("p 40 + 2\n", "until net.bo\t0:we\t\n", "nod\t *:weight\n"):
        said += read_until(ours, "(retrograd) ")
        os.write(ours, line.encode())
    said += read_until(ours, "(retrograd) ")
    answer = ""
    while not answer and process.poll() is None:  # readline misses a signal that comes before it waits
        process.send_signal(signal.SIGINT)
        answer = read_until(ours, "(retrograd) ", seconds=1)
    has_ended = False
    while not has_ended:  # a signal that was sent once more may have ended a line that was half read
        os.write(ours, b"finish\n")
        said += read_until(ours, "", seconds=20)
        with suppress(subprocess.TimeoutExpired):
            has_ended = process.wait(timeout=5) is not None
    assert process.wait() == 0
    os.close(ours)
    assert "\r\n42\r\n" in said
    assert "about to run: AccumulateGrad of net.body.0:weight" in said
    assert "AccumulateGrad of net.head:weight" in said
    assert said.rstrip().endswith("0")


def read_until(terminal: int, mark: str, seconds: float = 120) -> str:
    text, deadline = "", time.monotonic() + seconds
    while time.monotonic() < deadline and not (mark and text.endswith(mark)):
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # it has ended
                break
            text += part.decode()
    return text
