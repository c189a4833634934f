"""The clock: steps, micro-batches, passes and phases, counted from what the hooks tell.

    step      updates attempted when the forward began
    micro     within a step: a forward that follows a backward begins the next micro-batch
    backward  within a micro-batch: which backward pass reached it

A step is over once its update has been made, and the next one begins with the next forward; so whatever comes in
between (the update of a second optimizer, another backward over the same graph) still belongs to it. With several
optimizers the one that updates most often makes the steps, of those that take turns the last. Models that do not run
together share no step: each update of a model that is trained after another, or apart from it, is a step of its own,
and they are counted on in one row. Where no optimizer of torch is seen, a step has been made when a forward follows a
backward and parameters have been changed in between. Where somebody says which step begins (a trainer that counts),
nothing else begins one.

A stage of a pipeline has several micro-batches in flight at once: as calls of one.

Forwards are kept apart in buffers by their grad mode, so that an evaluation, or a teacher's forward in the middle of
a step, never mixes with the forward that is waiting for its backward. Forwards that wait for none (without grad, or
in eval mode) merge into one record a step. A forward with grad whose graph is gone when the next one begins, or that no
backward has reached where it did reach another forward of the same model, is an evaluation too: see :mod:`mode_buffer`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from retrograd.core.history.sink import Moment
from retrograd.core.hooks.backward import EngineRun, has_asked_for_a_pass
from retrograd.core.hooks.dispatch import carry_out_unseen
from retrograd.core.hooks.engine import at_end_of_backward, is_compiling, is_tracing, is_transformed, without_functions
from retrograd.core.hooks.gradients import InputGradient
from retrograd.core.hooks.listeners import HookEntry, never_raise
from retrograd.core.hooks.reach import DeepGraphGuard
from retrograd.core.hooks.resting import RestingTaps
from retrograd.core.limits import LIMITS
from retrograd.core.progress.steps import Steps
from retrograd.core.recording.mode_buffer import Mode, ModeBuffer, ModeBuffers
from retrograd.core.recording.schedule import Schedule
from retrograd.core.sites.site import Site

Fault = Callable[[Site | str, Exception], None]
"""Takes an error of ours and where it came up."""

HandOver = Callable[[ModeBuffer, Moment, bool], None]
"""Takes what a buffer holds: of a pass when another one over the same forward begins, or all, and it begins anew."""


class Clock:
    """Decides for every tap whether and where to record.

    Args:
        schedule: which steps are recorded.
        buffers: where forwards are recorded.
        hand_over: takes what they hold when it is complete.
        steps: says whether updates were made by hand.
        step: number of the first step.
        may_want: whether a step that has not begun may be recorded, as far as that is known.

    Attributes:
        on: this step is recorded.
        is_budgeted: numbers of which a step has one are recorded at every step.
        measures_updates: where the step is recorded, updates of weights are, too.
        awake: taps have something to do: the step is recorded, or the next forward may begin a new one.
        stale: a backward or an update has ended, so the next forward begins something new.
        entered: the running backward pass has reached a tap.
        is_piped: a stage of a pipeline runs, whose forwards and passes of a step come in any order: as one micro-batch.
        is_second_half: such a stage runs the half of a pass that is for the parameters alone: only these are recorded.
        is_apart: forwards without grad are not merged: each has a record, numbered within its step, as tokens are.
        is_led: somebody says which step begins.
        is_over: the step has had its update, and waits for what begins the next.
        is_free: no model has run so far, so nothing tells where a forward begins: each pass is a micro-batch.
        was_reached: a backward pass that concerned us has ended in this step.
        buffer: the buffer of the forward that runs now; None outside of the recorded models' own forward.
    """

    __slots__ = (
        "_aside",
        "_emitted_at",
        "_hand_over",
        "_is_in_gap",
        "_may_want",
        "_paused",
        "_resting",
        "_roots",
        "_saw_forward",
        "_schedule",
        "_steps",
        "_stopped",
        "_ungraded",
        "awake",
        "backward",
        "buffer",
        "buffers",
        "entered",
        "is_apart",
        "is_budgeted",
        "is_free",
        "is_led",
        "is_over",
        "is_piped",
        "is_second_half",
        "measures_updates",
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
        step: int = 0,
        may_want: Schedule = lambda step: True,
    ) -> None:
        self._schedule = schedule
        self._may_want = may_want
        self._hand_over = hand_over
        self._steps = steps
        self._roots: list[int] = []
        self._emitted_at = time.monotonic()
        self.is_over = self._stopped = self._saw_forward = self.is_led = self.is_apart = False
        self._is_in_gap = False
        self.is_budgeted, self.measures_updates = False, True
        self._ungraded = 0
        self._aside: list[bool] = []
        self._paused: tuple[int, bool, bool] | None = None
        self._resting = RestingTaps(id(self))
        self.was_reached = self.is_free = False
        self.buffers = buffers
        self.buffer: ModeBuffer | None = None
        self.thread = threading.get_ident()
        self.step = step
        self.micro = 0
        self.backward = -1
        self.stale = self.entered = self.is_piped = self.is_second_half = False
        self.on = self.awake = schedule(step)

    @property
    def moment(self) -> Moment:
        """Now, for gradients of the micro-batch that is being recorded."""
        return Moment(self.step, self.micro, max(self.backward, 0), self.buffers.grad.phase)

    @property
    def is_noted(self) -> bool:
        """True if numbers of which this step has one are recorded: losses, rates, updates."""
        return self.on or (self.is_budgeted and not self._stopped)

    @property
    def may_have_passed(self) -> bool:
        """True if the pass that ends is taken for one of the models, in a step that is not recorded otherwise."""
        is_open = self._saw_forward and not self.is_over  # behind the update others train
        return self.is_noted and not self.on and (is_open or self.is_free)

    @property
    def coming(self) -> int:
        """Number of the step that a forward would belong to that began now."""
        return self.step + self.is_over

    @property
    def outermost(self) -> int | None:
        """The outermost recorded model that runs now, or was left by Ctrl-C."""
        return self._roots[0] if self._roots else None

    @property
    def is_outermost(self) -> bool:
        """True if a recorded model runs that no other one has called."""
        return len(self._roots) == 1

    @property
    def waiting_buffer(self) -> ModeBuffer | None:
        """The buffer of the outermost call that runs now, if that is recorded and a backward pass may follow it."""
        is_outermost = len(self._roots) == 1 and self.on
        return self.buffer if is_outermost and self.buffer is self.buffers.grad else None

    # ---- forward ----

    def forward_begins(self, root: int, mode: Mode, training: bool) -> None:
        """Begin a call of a recorded model, known by its identity; a root within a root begins nothing."""
        self._roots.append(root)
        self.is_free = False
        if len(self._roots) > 1:
            return
        self.thread = threading.get_ident()
        buffer = self.find_buffer(mode)
        if mode is not Mode.GRAD:
            if self.is_apart and buffer.touched:
                self.close(buffer)
            self._merge_forward(buffer)
            buffer.number = self._ungraded
            self._ungraded += 1
        elif buffer.touched and not buffer.reached:
            self._follow_forward(buffer, root, training)
        if not buffer.touched:
            buffer.training = training
        self.buffer = buffer

    def rest(self) -> None:
        """Let taps rest that have nothing to do, until the call of a recorded model that has begun has ended.

        In a gap of a schedule (an update has ended the step before, and this one was known not to be recorded), until
        an update ends a step of which that is not known: else any other call of a part of the model may begin one.
        Those of sources of facts rest until such a call in which they have something to do.
        """
        self._resting.rest()

    def forward_ends(self, root: int, failed: bool) -> None:
        """End a call that has returned, or raised."""
        if root not in self._roots:
            return
        while self._roots.pop() != root:
            pass
        if not self._roots:
            self._finish_forward(failed)

    @property
    def is_paused(self) -> bool:
        """True while a forward runs that nobody trains with."""
        return self._paused is not None

    def pause(self, root: int) -> None:
        """Record nothing while a forward of this model runs, known by its identity, that nobody trains with."""
        self._paused = root, self.on, self.awake
        self.on = self.awake = False

    def go_on(self, root: int) -> None:
        """Go on recording after such a forward, if it was of this model."""
        if self._paused is not None and self._paused[0] == root:
            _, self.on, self.awake = self._paused
            self._paused = None

    def forward_left(self) -> None:
        """End all calls: the outermost was left by Ctrl-C, which runs no hooks."""
        self._roots.clear()
        self._finish_forward(failed=True)

    def find_buffer(self, mode: Mode) -> ModeBuffer:
        """Find the buffer for a forward of this mode that begins now; the step or micro-batch may end thereby."""
        if self.stale:
            self._turn(mode)
        self._saw_forward = True
        return self.buffers[mode]

    # ---- backward ----

    def begin_pass(self) -> None:
        """Begin a backward pass where no model has run so far."""
        if self.stale:
            self._turn(Mode.GRAD)
        elif not self.is_led and self._steps.were_updated_by_hand():  # which shows only by what the pass goes to
            self.step += 1
            self.micro = 0
            self.on = self.awake = self._schedule(self.step)

    def enter_backward(self) -> bool:
        """Record that a backward pass has reached its first tap; returns whether it is recorded.

        That the step is recorded is not asked: the hooks on outputs were set when it was.
        """
        if self._aside or self.is_second_half:
            return False
        if self.is_over and not self._saw_forward and not self.is_led:  # the forwards are run by a compiled function
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
        """End a pass that has reached a tap; the next forward begins something new."""
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

    def begin_step(self, step: int) -> None:
        """Begin this step, or go on with it; from now on no step begins otherwise."""
        self.is_led = True
        if step != self.step:
            self._advance(step)

    def end_step(self) -> None:
        """End the step after its update."""
        self.settle()  # a second update without a forward in between
        self.is_over = self.stale = self.awake = True
        self._is_in_gap = not self._may_want(self.step + 1)
        if not self._is_in_gap:
            self._resting.wake()

    def settle(self) -> None:
        """Begin the next step at once if this one is over, to flush it."""
        if self.is_over and self.is_led:
            self.close_all()
        elif self.is_over:
            self._advance()

    # ---- handing over ----

    def close(self, buffer: ModeBuffer) -> None:
        """Emit what a buffer holds and begin it anew."""
        if buffer.touched:
            micro = self.micro if buffer.mode is Mode.GRAD else buffer.number if self.is_apart else 0
            moment = Moment(self.step, micro, max(self.backward, 0), buffer.phase)
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
            if buffer.touched or buffer.mode is Mode.GRAD:  # the others list no forwards
                self.close(buffer)

    def stop(self) -> None:
        """Record nothing any more."""
        self._schedule = _never
        self._stopped = True
        self.on = self.awake = self.stale = False
        self._resting.remove()

    def _finish_forward(self, failed: bool) -> None:
        if failed or not self._is_in_gap:
            self._resting.wake()
        buffer, self.buffer = self.buffer, None
        if failed and buffer is not None and buffer.touched:
            buffer.failed = True
            self.close(buffer)

    def _follow_forward(self, buffer: ModeBuffer, root: int, training: bool) -> None:
        """Join a forward with grad to those before it, which no pass has reached, or close them."""
        if buffer.training and buffer.forwards.may_be_joined(root):
            return
        if buffer.training or training:
            self.close(buffer)
        else:
            self._merge_forward(buffer)
            buffer.forwards.restart()

    def _merge_forward(self, buffer: ModeBuffer) -> None:
        """Count calls anew but keep the rows: this forward adds to the one before it."""
        if buffer.touched and time.monotonic() - self._emitted_at > LIMITS.pending_seconds:
            self.close(buffer)
        buffer.serial += 1

    def _turn(self, mode: Mode) -> None:
        """Begin a step or a micro-batch with the first forward after a backward or an update."""
        by_gradients = not self.is_piped
        if not self.is_led and (self.is_over or self._steps.were_updated_by_hand(by_gradients=by_gradients)):
            self._advance()
        elif mode is Mode.GRAD:
            if not self.is_piped:
                self.close(self.buffers.grad)
                self.micro += 1
            self.stale = False
            self.awake = self.on

    def _advance(self, step: int | None = None) -> None:
        self.close_all()
        self._is_in_gap &= step in (None, self.step + 1)
        self.step = self.step + 1 if step is None else step
        self.micro = self._ungraded = 0
        self.stale = self.is_over = self._saw_forward = self.was_reached = False
        self.on = self.awake = self._schedule(self.step)
        if self.on:
            self._resting.wake()  # the model that runs trains by itself


def _never(step: int) -> bool:
    return False


class RecordedPass:
    """Decides for every hook on a gradient whether to record it, and follows the runs of the engine.

    Args:
        clock: notified of passes that reach a recorded tensor.
        steps: notified of the end of passes that concerned us.
        fault: takes faults.

    Attributes:
        clock: that clock.
        is_running: a pass has begun and not ended, as far as anybody has told.
        losses: what it starts from, where the step is recorded.
        scale: what its gradients are multiplied by; None for nothing.
        guard: notified of every node of the graph that is looked at.
        leaf_handles: hooks on leaves, which outlive the graph.
        input_gradients: gradients of inputs, which come in parts.
    """

    def __init__(self, clock: Clock, steps: Steps, fault: Fault) -> None:
        self.clock = clock
        self._steps = steps
        self.fault = fault
        self.is_running = False
        self.losses: tuple[torch.Tensor, ...] = ()
        self.scale: torch.Tensor | None = None
        self.guard = DeepGraphGuard()
        self.leaf_handles: list[HookEntry] = []
        self.input_gradients: list[InputGradient] = []
        self._old_input_gradients: list[InputGradient] = []

    def begin(self, roots: tuple[torch.Tensor, ...], scale: torch.Tensor | None) -> None:
        """Begin a pass from these tensors, whose gradients are multiplied by ``scale``."""
        self.scale = scale
        if self.clock.is_noted and not is_tracing():
            losses = [root for root in roots if is_loss(root)]
            with without_functions():
                self.losses = carry_out_unseen(lambda: tuple(loss.detach().clone() for loss in losses))

    def enter(self) -> bool:
        """Record that the pass has reached its first recorded tensor; returns whether it is recorded."""
        if is_compiling():  # compiled autograd traces hooks too
            return False
        try:
            if is_tracing() or not self.clock.enter_backward():
                return False
            self.clock.buffers.grad.scale = self.scale
            if not self.is_running:
                at_end_of_backward(self.leave)
        except Exception as error:
            self.fault("enter_backward", error)
        return self.clock.entered

    def finish_inputs(self, failed: bool) -> None:
        """Hand on those gradients of inputs of which this pass has brought a part and will bring no more."""
        for gradient in self.input_gradients:
            if failed:
                gradient.drop()
            elif gradient.unfinished:
                gradient.finish()

    @never_raise()
    def leave(self, failed: bool = False) -> None:
        """End a pass that has reached a recorded tensor."""
        self.finish_inputs(failed)
        self.guard.restart()
        self.clock.leave_backward(failed)
        self._steps.pass_ends()

    @never_raise()
    def run_begins(self, run: EngineRun) -> None:
        """Step aside from the pass for a run of the engine that is not a part of it.

        A run inside a pass that hands its gradients back (a Function that solves an equation backwards, say) is a
        computation of that Function's own. One that adds to ``.grad`` is a part of the pass: a checkpointed one. What
        gives gradients with a graph of their own, for a penalty or an inner step, starts from no loss of the training.
        """
        if self._is_aside(run):
            self.clock.step_aside()
        elif run.creates_graph and not run.accumulates and self.clock.thread == threading.get_ident():
            self.losses = ()

    @never_raise()
    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """Go on with the pass after such a run."""
        if self._is_aside(run):
            self.clock.come_back()

    def _is_aside(self, run: EngineRun) -> bool:
        is_ours = threading.get_ident() == self.clock.thread or not has_asked_for_a_pass()
        return run.is_nested and not run.accumulates and is_ours

    def forget_graph(self) -> None:
        """Take back the hooks on a graph when all passes over it are done."""
        self.guard.restart()
        self._old_input_gradients = self.input_gradients[:]
        self.input_gradients.clear()
        for handle in self.leaf_handles:
            handle.remove()
        self.leaf_handles.clear()

    def remove(self) -> None:
        """Take the hooks of inputs back."""
        for gradient in (*self._old_input_gradients, *self.input_gradients):
            gradient.remove()
        self._old_input_gradients.clear()
        self.input_gradients.clear()


def is_loss(root: torch.Tensor) -> bool:
    """Return whether a pass that starts from this tensor has it for a loss: one number that can be read."""
    is_plain = type(root) is torch.Tensor and not root.is_meta and not is_transformed(root)
    return is_plain and root.numel() == 1 and root.is_floating_point()
