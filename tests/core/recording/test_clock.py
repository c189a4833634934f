"""The clock alone, driven with the events that hooks would tell it of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.core.history.sink import Moment
from retrograd.core.progress.steps import Leader, Steps
from retrograd.core.recording import clock as clock_module
from retrograd.core.recording.clock import Clock
from retrograd.core.recording.mode_buffer import Mode, ModeBuffer, ModeBuffers
from retrograd.core.recording.schedule import every
from retrograd.core.recording.settings import Settings

A, B = 1, 2
"""Optimizers, and as ``ROOT`` models, are numbers to the clock."""
ROOT = 10


class Led(Steps):
    """Steps whose optimizers are numbers, and whose updates by hand are told."""

    def __init__(self, leader: Leader, touched: Callable[[], bool]) -> None:
        super().__init__()
        self._leader = leader
        self._touched = touched

    def were_updated_by_hand(self, *, by_gradients: bool = True) -> bool:
        return not self.has_leader and self._touched()


class Driver:
    """A clock whose buffers note what happened in them: F3 is the third forward, G a gradient that came."""

    def __init__(self, schedule: Any = None, touched: Any = lambda: False) -> None:
        self.buffers = ModeBuffers(Settings())
        self.emitted: list[tuple[Moment, str]] = []
        self.leader = Leader()
        self.clock = Clock(schedule or every(1), self.buffers, self.emit, Led(self.leader, touched), 0)
        self.notes: dict[Mode, list[str]] = {mode: [] for mode in Mode}
        self.forwards = 0

    def emit(self, buffer: ModeBuffer, moment: Moment, is_closing: bool) -> None:
        self.emitted.append((moment, " ".join(self.notes[buffer.mode])))
        self.notes[buffer.mode].clear()

    def forward(self, mode: Mode = Mode.GRAD, *, training: bool = True, failed: bool = False, root: int = ROOT) -> None:
        self.clock.forward_begins(root, mode, training)
        self.forwards += 1
        if self.clock.on:
            buffer = self.clock.buffer
            assert buffer is not None
            buffer.touched = True
            self.notes[buffer.mode].append(f"F{self.forwards}")
        self.clock.forward_ends(root, failed)

    def backward(self, failed: bool = False) -> None:
        if self.clock.enter_backward():
            self.notes[Mode.GRAD].append("G")
        self.clock.leave_backward(failed)

    def update(self, optimizer: int = A) -> None:
        self.leader.update_begins(optimizer)
        self.end_update(optimizer)

    def end_update(self, optimizer: int = A) -> None:
        if self.leader.ends_step(optimizer):
            self.clock.end_step()

    def play(self, score: str) -> list[tuple[int, int, int, str, str]]:
        """F forward, E in eval mode, N without grad, I inference, X raising, B backward, U and V updates of A and B."""
        moves = {
            "F": self.forward,
            "E": lambda: self.forward(training=False),
            "N": lambda: self.forward(Mode.NO_GRAD),
            "I": lambda: self.forward(Mode.INFERENCE),
            "X": lambda: self.forward(failed=True),
            "B": self.backward,
            "Y": lambda: self.backward(failed=True),
            "U": self.update,
            "V": lambda: self.update(B),
        }
        for move in score.replace(" ", ""):
            moves[move]()
        self.clock.close_all()
        return [(m.step, m.micro, m.backward, m.phase, text) for m, text in self.emitted]


SCORES = {
    "a plain loop": ("FBU FBU", "0.0.0 train F1 G | 1.0.0 train F2 G"),
    "accumulation": (
        "FB FBU FB FBU",
        "0.0.0 train F1 G | 0.1.0 train F2 G | 1.0.0 train F3 G | 1.1.0 train F4 G",
    ),
    "two forwards for one backward": ("FFBU", "0.0.0 train F1 F2 G"),
    "two backwards over one forward": ("FBBU", "0.0.0 train F1 G | 0.0.1 train G"),
    "evaluation after each step": (
        "FBU NN FBU II",
        "0.0.0 train F1 G | 1.0.0 train F4 G | 1.0.0 no_grad F2 F3 | 2.0.0 inference F5 F6",
    ),
    "evaluation with grad": ("FBU EE FBU", "0.0.0 train F1 G | 1.0.0 eval F2 F3 | 1.0.0 train F4 G"),
    "training in eval mode": ("EBU EBU", "0.0.0 train F1 G | 1.0.0 train F2 G"),
    "a teacher in between": ("FNBU", "0.0.0 train F1 G | 0.0.0 no_grad F2"),
    "a forward that raises": ("FBU X FBU", "0.0.0 train F1 G | 1.0.0 failed F2 | 1.0.0 train F3 G"),
    "a backward that raises": ("FY FBU", "0.0.0 failed F1 G | 0.1.0 train F2 G"),
    "no backward at all": ("FFF", "0.0.0 forward F1 F2 F3"),
    "two optimizers one after the other": ("FBUV FBUV", "0.0.0 train F1 G | 1.0.0 train F2 G"),
    "two optimizers by turns": (
        "FBU FBV FBU FBV FB",
        "0.0.0 train F1 G | 1.0.0 train F2 G | 1.1.0 train F3 G | 2.0.0 train F4 G | 2.1.0 train F5 G",
    ),
    "a second backward after the update": ("FBUB FB", "0.0.0 train F1 G | 0.0.1 train G | 1.0.0 train F2 G"),
    "updates without a forward": ("FBUU FB", "0.0.0 train F1 G | 2.0.0 train F2 G"),
    "one that updates more often leads": (
        "FBV FBUV FBU FBU FBU",
        "0.0.0 train F1 G | 1.0.0 train F2 G | 2.0.0 train F3 G | 2.1.0 train F4 G | 3.0.0 train F5 G",
    ),
}
"""What happens, and what is emitted for it: step.micro.backward, phase and what the buffer held."""


@pytest.mark.parametrize("name", SCORES)
def test_what_belongs_where(name: str) -> None:
    score, expected = SCORES[name]
    emitted = [
        f"{step}.{micro}.{backward} {phase} {text}" for step, micro, backward, phase, text in Driver().play(score)
    ]
    assert emitted == expected.split(" | ")


def test_only_scheduled_steps_are_recorded() -> None:
    assert Driver(every(2)).play("FBU FBU NN FBU FBU") == [
        (0, 0, 0, "train", "F1 G"),
        (1, 0, 0, "train", "G"),  # of hooks on parameters, which ask for themselves whether the step is recorded
        (2, 0, 0, "train", "F5 G"),
        (2, 0, 0, "no_grad", "F3 F4"),
        (3, 0, 0, "train", "G"),
    ]


def test_a_loop_without_an_optimizer_steps_when_parameters_were_touched() -> None:
    touched = iter([True, False, True, True])
    driver = Driver(touched=lambda: next(touched))
    assert driver.play("FB FB FB FB FB") == [
        (0, 0, 0, "train", "F1 G"),
        (1, 0, 0, "train", "F2 G"),
        (1, 1, 0, "train", "F3 G"),
        (2, 0, 0, "train", "F4 G"),
        (3, 0, 0, "train", "F5 G"),
    ]


def test_a_closure_runs_within_the_update() -> None:
    driver = Driver(touched=lambda: True)
    for _ in range(2):
        driver.leader.update_begins(A)
        for _ in range(3):
            driver.forward()
            driver.backward()
        driver.end_update(A)
    driver.clock.close_all()
    assert [(m.step, m.micro) for m, _ in driver.emitted] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_a_pass_within_a_forward_ends_nothing() -> None:
    driver = Driver()
    driver.clock.forward_begins(ROOT, Mode.GRAD, training=True)
    driver.backward()
    driver.clock.forward_ends(ROOT, failed=False)
    driver.backward()
    driver.update()
    driver.clock.close_all()
    assert [(m.step, m.micro, m.backward) for m, _ in driver.emitted] == [(0, 0, 0), (0, 0, 1)]


def test_a_model_within_a_model_begins_nothing() -> None:
    driver = Driver()
    driver.clock.forward_begins(ROOT, Mode.GRAD, training=True)
    driver.forward(root=ROOT + 1)
    driver.forward(root=ROOT, failed=True)  # it calls itself, and catches what that raises
    assert driver.clock.buffer is driver.buffers.grad
    assert not driver.emitted
    driver.clock.forward_ends(ROOT, failed=False)
    assert driver.clock.buffer is None


def test_a_forward_that_was_left_is_failed() -> None:
    driver = Driver()
    driver.clock.forward_begins(ROOT, Mode.GRAD, training=True)
    driver.clock.forward_begins(ROOT + 1, Mode.GRAD, training=True)
    driver.buffers.grad.touched = True
    assert driver.clock.outermost == ROOT
    driver.clock.forward_left()
    assert driver.clock.outermost is None
    assert driver.play("FBU") == [(0, 0, 0, "failed", ""), (0, 0, 0, "train", "F1 G")]


def test_the_step_that_comes_is_known_before_it_begins() -> None:
    driver = Driver()
    driver.forward()
    driver.backward()
    assert driver.clock.coming == 0
    driver.update()
    assert (driver.clock.coming, driver.clock.step) == (1, 0)
    driver.clock.settle()
    assert (driver.clock.coming, driver.clock.step) == (1, 1)
    assert len(driver.emitted) == 1


def test_a_long_evaluation_is_emitted_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(clock_module.time, "monotonic", lambda: now)
    driver = Driver()
    for _ in range(4):
        now += 1.5
        driver.forward(Mode.NO_GRAD)
    assert [text for _, text in driver.emitted] == ["F1", "F2 F3"]  # whenever 2 s have gone by


def test_after_the_end_nothing_is_recorded() -> None:
    driver = Driver()
    driver.forward()
    driver.clock.close_all()
    driver.clock.stop()
    assert not driver.clock.enter_backward()
    driver.update()
    driver.clock.find_buffer(Mode.GRAD)
    assert not driver.clock.on
    assert len(driver.emitted) == 1


@given(st.text(alphabet="FENIXBYUV", max_size=40), st.integers(1, 3))
def test_any_order_of_events_keeps_the_rules(score: str, n: int) -> None:
    driver = Driver(every(n))
    records = driver.play(score)
    forwards = [word for *_, text in records for word in text.split() if word.startswith("F")]
    assert len(forwards) == len(set(forwards)), "no forward is recorded twice"
    if n == 1:
        assert len(forwards) == driver.forwards, "and none is lost"
    steps = [step for step, _, _, phase, _ in records if phase not in ("no_grad", "inference")]
    assert steps == sorted(steps)
    keys = [record[:4] for record in records if record[3] == "train" and record[4].startswith("F")]
    assert len(keys) == len(set(keys)), "each trained micro-batch has its own number"
    assert driver.clock.coming <= score.count("U") + score.count("V")
