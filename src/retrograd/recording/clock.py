"""When: steps, micro-batches, passes and phases, counted from what the hooks tell.

    step      updates attempted when the forward began
    micro     within a step: a forward that follows a backward begins the next micro-batch
    backward  within a micro-batch: which backward pass reached it

A step is over once its update has been made, and the next one begins with the next forward; so whatever comes in
between (the update of a second optimizer, another backward over the same graph) still belongs to it. With several
optimizers the one that updates most often makes the steps. Models that do not run together share no step: each update
of a model that is trained after another, or apart from it, is a step of its own, and they are counted on in one row.
Where no optimizer of torch is seen, a step has been made when a forward follows a backward and parameters have been
changed in between.

A stage of a pipeline has several micro-batches under way at once: they are calls of one.

Forwards are kept apart in buffers by their grad mode, so that an evaluation, or a teacher's forward in the middle of
a step, never mixes with the forward that is waiting for its backward. Forwards that wait for none (without grad, or
in eval mode) merge into one record a step. A forward with grad whose graph is gone when the next one begins, or that no
backward has reached where it did reach another forward of the same model, is an evaluation too: see :mod:`mode_buffer`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from retrograd.history.sink import Moment
from retrograd.progress.steps import Steps
from retrograd.recording.mode_buffer import Mode, ModeBuffer, ModeBuffers
from retrograd.recording.schedule import Schedule

_PATIENCE = 2.0
"""Seconds after which forwards that wait for no backward are emitted though the step goes on."""


HandOver = Callable[[ModeBuffer, Moment, bool], None]
"""Takes what a buffer holds: of a pass when another one over the same forward begins, or all, and it begins anew."""


class Clock:
    """Tells every tap whether and where to record.

    Args:
        schedule: which steps are recorded.
        buffers: where forwards are recorded.
        hand_over: takes what they hold when it is complete.
        steps: says whether an optimizer makes the steps.
        parameters_touched: asked, when no optimizer has been seen, whether an update was made by hand.
        step: number of the first step.

    Attributes:
        on: this step is recorded.
        awake: taps have something to do: the step is recorded, or the next forward may begin a new one.
        stale: a backward or an update has ended, so the next forward begins something new.
        entered: the running backward pass has reached a tap.
        is_piped: a stage of a pipeline runs, whose forwards and passes of a step come in any order: as one micro-batch.
        is_free: no model has run so far, so nothing tells where a forward begins: each pass is a micro-batch.
        was_reached: a backward pass that concerned us has ended in this step.
        buffer: the buffer of the forward that runs now; None outside of the recorded models' own forward.
    """

    __slots__ = (
        "_aside",
        "_emitted_at",
        "_hand_over",
        "_over",
        "_parameters_touched",
        "_paused",
        "_roots",
        "_saw_forward",
        "_schedule",
        "_steps",
        "_stopped",
        "awake",
        "backward",
        "buffer",
        "buffers",
        "entered",
        "is_free",
        "is_piped",
        "micro",
        "on",
        "stale",
        "step",
        "thread",
        "was_reached",
    )

    def __init__(
        self,
        schedule: Schedule,
        buffers: ModeBuffers,
        hand_over: HandOver,
        steps: Steps,
        parameters_touched: Callable[[], bool],
        step: int = 0,
    ) -> None:
        self._schedule = schedule
        self._hand_over = hand_over
        self._parameters_touched = parameters_touched
        self._steps = steps
        self._roots: list[int] = []
        self._emitted_at = time.monotonic()
        self._over = self._stopped = self._saw_forward = False
        self._aside: list[bool] = []
        self._paused: tuple[int, bool, bool] | None = None
        self.was_reached = self.is_free = False
        self.buffers = buffers
        self.buffer: ModeBuffer | None = None
        self.thread = threading.get_ident()
        self.step = step
        self.micro = 0
        self.backward = -1
        self.stale = self.entered = self.is_piped = False
        self.on = self.awake = schedule(step)

    @property
    def moment(self) -> Moment:
        """Now, for gradients of the micro-batch that is being recorded."""
        return Moment(self.step, self.micro, max(self.backward, 0), self.buffers.grad.phase)

    @property
    def coming(self) -> int:
        """Number of the step that a forward would belong to that began now."""
        return self.step + self._over

    @property
    def outermost(self) -> int | None:
        """The outermost recorded model that runs now, or was left by Ctrl-C."""
        return self._roots[0] if self._roots else None

    @property
    def is_outermost(self) -> bool:
        """Whether a recorded model runs that no other one has called."""
        return len(self._roots) == 1

    @property
    def waiting_buffer(self) -> ModeBuffer | None:
        """The buffer of the outermost call that runs now, if that is recorded and a backward pass may follow it."""
        is_outermost = len(self._roots) == 1 and self.on
        return self.buffer if is_outermost and self.buffer is self.buffers.grad else None

    # ---- forward ----

    def forward_begins(self, root: int, mode: Mode, training: bool) -> None:
        """A recorded model, known by its identity, is called. A root within a root begins nothing."""
        self._roots.append(root)
        self.is_free = False
        if len(self._roots) > 1:
            return
        self.thread = threading.get_ident()
        buffer = self.find_buffer(mode)
        if mode is not Mode.GRAD:
            self._merge_forward(buffer)
        elif buffer.touched and not buffer.reached:
            self._follow_forward(buffer, root, training)
        if not buffer.touched:
            buffer.training = training
        self.buffer = buffer

    def forward_ends(self, root: int, failed: bool) -> None:
        """A call that began has returned, or raised."""
        if root not in self._roots:
            return
        while self._roots.pop() != root:
            pass
        if not self._roots:
            self._finish_forward(failed)

    @property
    def is_paused(self) -> bool:
        """Whether a forward runs that nobody trains with."""
        return self._paused is not None

    def pause(self, root: int) -> None:
        """Such a forward of a model, known by its identity, begins."""
        self._paused = root, self.on, self.awake
        self.on = self.awake = False

    def go_on(self, root: int) -> None:
        """Go on after such a forward, if it was that model's."""
        if self._paused is not None and self._paused[0] == root:
            _, self.on, self.awake = self._paused
            self._paused = None

    def forward_left(self) -> None:
        """The outermost call was left without a word, by Ctrl-C."""
        self._roots.clear()
        self._finish_forward(failed=True)

    def find_buffer(self, mode: Mode) -> ModeBuffer:
        """The buffer for a forward of this mode that begins now."""
        if self.stale:
            self._turn(mode)
        self._saw_forward = True
        return self.buffers[mode]

    # ---- backward ----

    def begin_pass(self) -> None:
        """A backward pass begins, and no model has run so far."""
        if self.stale:
            self._turn(Mode.GRAD)
        elif not self._steps.has_leader and self._parameters_touched():  # which shows only by what the pass goes to
            self.step += 1
            self.micro = 0
            self.on = self.awake = self._schedule(self.step)

    def enter_backward(self) -> bool:
        """A backward pass has reached its first tap; returns whether anything is recorded still.

        That the step is recorded is not asked: the hooks on outputs were set when it was.
        """
        if self._aside:
            return False
        if self._over and not self._saw_forward:  # the forwards are run by a compiled function
            self._advance()
            if not self.on:
                return False
        if self._stopped:
            return False
        self.entered = True
        grad = self.buffers.grad
        if self.backward < 0 or not self.is_piped:
            if self.backward >= 0:  # a second pass over the same micro-batch
                self._hand_over(grad, self.moment, False)
            self.backward += 1
        grad.touched = grad.reached = True
        return True

    def leave_backward(self, failed: bool = False) -> None:
        """The running pass has ended and concerned us; the next forward begins something new."""
        self.entered = False
        self.was_reached = True
        if failed:
            self.buffers.grad.failed = self.buffers.grad.touched
        if not self._roots:  # a pass within a forward (forces, penalties) ends nothing
            self.stale = self.awake = True

    def step_aside(self) -> None:
        """Begin a computation of a node's own, which is not part of the running pass."""
        self._aside.append(self.entered)
        self.entered = False

    def come_back(self) -> None:
        """Go on with the pass after such a computation."""
        self.entered = self._aside.pop()

    # ---- updates ----

    def end_step(self) -> None:
        """An update has ended the step."""
        self.settle()  # a second update without a forward in between
        self._over = self.stale = self.awake = True

    def settle(self) -> None:
        """Begin the next step at once if this one is over, so that all of it can be read."""
        if self._over:
            self._advance()

    # ---- handing over ----

    def close(self, buffer: ModeBuffer) -> None:
        """Emit what a buffer holds and begin it anew."""
        if buffer.touched:
            moment = Moment(
                self.step, self.micro if buffer.mode is Mode.GRAD else 0, max(self.backward, 0), buffer.phase
            )
            self._hand_over(buffer, moment, True)
            buffer.restart()
            self._emitted_at = time.monotonic()
        else:
            buffer.forwards.restart()
        if buffer.mode is Mode.GRAD:
            self.backward = -1

    def close_all(self) -> None:
        """Emit what all buffers hold."""
        for buffer in self.buffers.all:
            self.close(buffer)

    def stop(self) -> None:
        """Record nothing any more."""
        self._schedule = _never
        self._stopped = True
        self.on = self.awake = self.stale = False

    def _finish_forward(self, failed: bool) -> None:
        buffer, self.buffer = self.buffer, None
        if failed and buffer is not None and buffer.touched:
            buffer.failed = True
            self.close(buffer)

    def _follow_forward(self, buffer: ModeBuffer, root: int, training: bool) -> None:
        """A forward with grad begins while no pass has come to those before it."""
        if buffer.training and buffer.forwards.may_be_joined(root):
            return
        if buffer.training or training:
            self.close(buffer)
        else:
            self._merge_forward(buffer)
            buffer.forwards.restart()

    def _merge_forward(self, buffer: ModeBuffer) -> None:
        """Count calls anew but keep the rows: this forward adds to the one before it."""
        if buffer.touched and time.monotonic() - self._emitted_at > _PATIENCE:
            self.close(buffer)
        buffer.serial += 1

    def _turn(self, mode: Mode) -> None:
        """A forward begins after a backward or an update."""
        if self._over or (not self._steps.has_leader and self._parameters_touched()):
            self._advance()
        elif mode is Mode.GRAD:
            if not self.is_piped:
                self.close(self.buffers.grad)
                self.micro += 1
            self.stale = False
            self.awake = self.on

    def _advance(self) -> None:
        self.close_all()
        self.step += 1
        self.micro = 0
        self.stale = self._over = self._saw_forward = self.was_reached = False
        self.on = self.awake = self._schedule(self.step)


def _never(step: int) -> bool:
    return False
