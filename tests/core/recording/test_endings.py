"""The exception that ended a run is in its record."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.runs.ending import MOST_LETTERS


class Fragile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, raises: bool) -> torch.Tensor:
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.raises:
            raise ArithmeticError("as planned")
        return gradient, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, raises: bool = False) -> torch.Tensor:
        y: torch.Tensor = self.head(Fragile.apply(self.body(x), raises))
        return y


def fail_in_backward(net: nn.Module) -> None:
    net(torch.randn(5, 3), raises=True).sum().backward()


def fail_in_forward(net: nn.Module) -> None:
    net(torch.randn(5, 2))


def change_in_place(net: nn.Module) -> None:
    y = net.body(torch.randn(5, 3)).exp()  # type: ignore[operator]
    z = net.head(y)  # type: ignore[operator]
    y.add_(1)
    z.sum().backward()


FAILURES = {
    "backward": (fail_in_backward, ("ArithmeticError", True, "FragileBackward", "head"), "in backward"),
    "forward": (fail_in_forward, ("RuntimeError", False, None, "body.0"), "in forward"),
    "in place": (change_in_place, ("RuntimeError", True, None, "head"), "in change_in_place"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("in_folder", [True, False])
def test_where_it_came_from(name: str, in_folder: bool, tmp_path: Path) -> None:
    fail, expected, line = FAILURES[name]
    net = Net()
    with (
        pytest.raises((ArithmeticError, RuntimeError)) as caught,
        rg.record(net, tmp_path / "run" if in_folder else None) as recording,
    ):
        net(torch.randn(5, 3)).sum().backward()
        fail(net)
    if in_folder:
        error = json.loads((tmp_path / "run/rank00000/rank.json").read_text())["error"]
        history = rg.open_run(tmp_path / "run").history
    else:
        error, history = recording.history.manifest["error"], recording.history
    assert (error["kind"], error["in_backward"], error["node"], error["module"]) == expected
    assert error["message"] == str(caught.value)
    assert error["lines"][-1].endswith(line)
    (event,) = (event for event in history.events if event.kind == "error")
    assert event.text == f"{error['kind']}: {error['message']}"
    assert event.name == (error["node"] or error["module"])
    assert history.manifest["status"] == "failed"


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


HOSTILE = {
    "controls": (ValueError("a\x00b\x1b[31mc\u202e\ud800"), "a\\x00b\\x1b[31mc\\u202e\\ud800"),
    "speechless": (UnspeakableError(), "(its text cannot be had: ValueError)"),
    "of two lines": (ValueError("a\nb"), "a\nb"),
    "interrupt": (KeyboardInterrupt(), ""),
    "exit": (SystemExit(7), "7"),
    "exit with words": (SystemExit("no data"), "no data"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_it_says_can_be_written_and_read(name: str, tmp_path: Path) -> None:
    error, message = HOSTILE[name]
    net = Net()
    with pytest.raises(type(error)), rg.record(net, tmp_path / "run"):
        net(torch.randn(5, 3)).sum().backward()
        raise error
    (rank,) = rg.open_run(tmp_path / "run").ranks
    assert (rank.status, rank.facts["error"]["message"]) == ("failed", message)
    assert [
        event.text.partition(": ")[2] for event in rg.open_run(tmp_path / "run").history.events if event.kind == "error"
    ] == [message]


def test_a_message_of_megabytes_is_cut(tmp_path: Path) -> None:
    net = Net()
    with pytest.raises(ValueError, match="x"), rg.record(net, tmp_path / "run"):
        net(torch.randn(5, 3)).sum().backward()
        raise ValueError("\x00" * 5_000_000 + "x")
    message = rg.open_run(tmp_path / "run").ranks[0].facts["error"]["message"]
    assert message == "\\x00" * MOST_LETTERS + "… (5,000,001 letters)"


@pytest.mark.parametrize("error", [None, SystemExit(), SystemExit(0), GeneratorExit()], ids=repr)
def test_what_is_no_failure(error: BaseException | None) -> None:
    net = Net()
    with contextlib.suppress(SystemExit, GeneratorExit), rg.record(net) as recording:
        net(torch.randn(5, 3)).sum().backward()
        if error is not None:
            raise error
    assert recording.history.manifest["status"] == "finished"
    assert "error" not in recording.history.manifest
    assert not [event for event in recording.history.events if event.kind == "error"]


def test_an_exit_that_stands_for_an_exception_tells_of_that() -> None:
    """As processes end that ``torch.multiprocessing`` has spawned."""
    net = Net()
    with pytest.raises(SystemExit), rg.record(net) as recording:
        try:
            fail_in_backward(net)
        except ArithmeticError:
            raise SystemExit(1)  # noqa: B904
    error = recording.history.manifest["error"]
    assert (error["kind"], error["node"], error["module"]) == ("ArithmeticError", "FragileBackward", "head")


def test_the_node_of_an_rg_function_is_named() -> None:
    class FragileToo(rg.Function):
        def forward(self, ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        def backward(self, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("as planned")

    net = nn.Sequential(nn.Linear(3, 4), FragileToo())
    with pytest.raises(ArithmeticError), rg.record(net) as recording:
        net(torch.randn(5, 3)).sum().backward()
    assert recording.history.manifest["error"]["node"] == "FragileTooBackward"


def test_what_is_to_be_called_at_the_end_is_called_once_whenever_it_comes() -> None:
    recording, called = rg.record(nn.Linear(2, 2)), []
    recording.call_when_closed(lambda: called.append("before"))
    assert (recording.is_open, called) == (True, [])
    recording.close()
    recording.close()
    assert (recording.is_open, called) == (False, ["before"])
    recording.call_when_closed(lambda: called.append("after"))
    assert called == ["before", "after"]
