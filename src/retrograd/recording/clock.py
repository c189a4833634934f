"""When: steps, micro-batches, passes and phases, counted from what the hooks tell.

    step      updates attempted when the forward began
    micro     within a step: a forward that follows a backward begins the next micro-batch
    backward  within a micro-batch: which backward pass reached it

With several optimizers the one that updates most often makes the steps. Where no optimizer of torch is seen, a step
has been made when a forward follows a backward and parameters or gradients have been touched in between.

Forwards are kept apart in lanes by their grad mode, so that an evaluation, or a teacher's forward in the middle of
a step, never mixes with the forward that is waiting for its backward. Forwards that wait for none (without grad, or
in eval mode) merge into one record a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from retrograd.history.sink import Moment
from retrograd.recording.lane import Lane, Lanes, Mode
from retrograd.recording.schedule import Schedule


_PATIENCE = 2.0
"""Seconds after which forwards that wait for no backward are emitted though the step goes on."""


class Clock:
    """Tells every tap whether and where to record.

    Args:
        schedule: which steps are recorded.
        lanes: where forwards are recorded.
        emit: called as ``emit(lane, moment)`` when what a lane holds is complete.
        parameters_touched: asked, when no optimizer has been seen, whether an update was made by hand.
        step: number of the first step.

    Attributes:
        on: this step is recorded.
        awake: taps have something to do: the step is recorded, or the next forward may begin a new one.
        stale: a backward has ended, so the next forward begins a micro-batch.
        entered: the running backward pass has reached a tap.
        lane: the lane of the forward that runs now; None outside of the recorded models' own forward.
    """

    __slots__ = (
        "_emit",
        "_emitted_at",
        "_followers",
        "_leader",
        "_parameters_touched",
        "_roots",
        "_schedule",
        "awake",
        "backward",
        "entered",
        "lane",
        "lanes",
        "micro",
        "on",
        "stale",
        "step",
        "thread",
    )

    def __init__(
        self,
        schedule: Schedule,
        lanes: Lanes,
        emit: Callable[[Lane, Moment], None],
        parameters_touched: Callable[[], bool],
        step: int = 0,
    ) -> None:
        self._schedule = schedule
        self._emit = emit
        self._parameters_touched = parameters_touched
        self._leader: int | None = None
        self._followers: set[int] = set()
        self._roots: list[int] = []
        self._emitted_at = time.monotonic()
        self.lanes = lanes
        self.lane: Lane | None = None
        self.thread = threading.get_ident()
        self.step = step
        self.micro = 0
        self.backward = -1
        self.stale = self.entered = False
        self.on = self.awake = bool(schedule(step))

    @property
    def moment(self) -> Moment:
        """Now, for gradients of the micro-batch that is being recorded."""
        return Moment(self.step, self.micro, max(self.backward, 0), self.lanes.grad.phase)

    def forward_begins(self, root: int, mode: Mode, training: bool) -> None:
        """A recorded model is called. ``root`` is its identity: a root within a root begins nothing, but one that is
        still open when it begins again was left by Ctrl-C."""
        if root in self._roots:
            del self._roots[self._roots.index(root) :]
        self._roots.append(root)
        if len(self._roots) > 1:
            return
        self.thread = threading.get_ident()
        lane = self.find_lane(mode)
        if mode is not Mode.GRAD:
            self._merge_forward(lane)
        elif lane.touched and not lane.reached:
            if lane.training != training:
                self.close(lane)
            elif not training:
                self._merge_forward(lane)
        lane.training = training
        self.lane = lane

    def forward_ends(self, root: int, failed: bool) -> None:
        """That call has returned, or raised."""
        if root in self._roots:
            del self._roots[self._roots.index(root) :]
        if not self._roots and self.lane is not None:
            lane, self.lane = self.lane, None
            if failed:
                lane.failed = True
                self.close(lane)

    def find_lane(self, mode: Mode) -> Lane:
        """The lane for a forward of this mode that begins now."""
        if self.stale and mode is Mode.GRAD:
            self._turn()
        return self.lanes[mode]

    def enter_backward(self) -> bool:
        """A backward pass has reached its first tap; returns whether it is recorded."""
        if not self.on:
            return False
        self.entered = True
        if self.backward >= 0:  # a second pass over the same micro-batch
            self._emit(self.lanes.grad, self.moment)
        self.backward += 1
        self.lanes.grad.touched = self.lanes.grad.reached = True
        return True

    def leave_backward(self) -> None:
        """The running pass has ended and concerned us; the next forward begins something new."""
        self.entered = False
        self.stale = self.awake = True
        self._roots.clear()
        self.lane = None

    def update_made(self, optimizer: int) -> None:
        """An optimizer, known by its identity, has updated or was skipped by loss scaling."""
        if self._leader in (None, optimizer) or optimizer in self._followers:
            self._leader = optimizer
            self._followers.clear()
            self._advance()
        else:
            self._followers.add(optimizer)

    def close(self, lane: Lane) -> None:
        """Emit what a lane holds and begin it anew."""
        if not lane.touched:
            return
        moment = Moment(self.step, self.micro if lane.mode is Mode.GRAD else 0, max(self.backward, 0), lane.phase)
        self._emit(lane, moment)
        lane.restart()
        self._emitted_at = time.monotonic()

    def close_all(self) -> None:
        """Emit what all lanes hold."""
        for lane in self.lanes.all:
            self.close(lane)

    def stop(self) -> None:
        """Record nothing any more."""
        self._schedule = _never
        self.on = self.awake = False

    def _merge_forward(self, lane: Lane) -> None:
        """Count calls anew but keep the rows: this forward adds to the one before it."""
        if lane.touched and time.monotonic() - self._emitted_at > _PATIENCE:
            self.close(lane)
        lane.serial += 1

    def _turn(self) -> None:
        self.stale = False
        if self._leader is None and self._parameters_touched():
            self._advance()
            return
        self.close(self.lanes.grad)
        self.micro += 1
        self.backward = -1
        self.awake = self.on

    def _advance(self) -> None:
        self.close_all()
        self.step += 1
        self.micro = 0
        self.backward = -1
        self.stale = False
        self.on = self.awake = bool(self._schedule(self.step))


def _never(step: int) -> bool:
    return False
