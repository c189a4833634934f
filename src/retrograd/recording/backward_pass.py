"""The backward pass that runs: whether its gradients are recorded, and the hooks on its graph that are taken back."""

from __future__ import annotations

import threading

import torch

from retrograd.hooks.backward import EngineRun, has_asked_for_a_pass
from retrograd.hooks.engine import at_end_of_backward, is_compiling, is_tracing, is_transformed
from retrograd.hooks.gradients import InputGradient
from retrograd.hooks.listeners import Entry, never_raise
from retrograd.hooks.reach import DeepGraphGuard
from retrograd.progress.steps import Steps
from retrograd.recording.clock import Clock
from retrograd.recording.event_log import EventLog
from retrograd.recording.manual_updates import ManualUpdates


class RecordedPass:
    """Asked by every hook on a gradient whether to record it. Follows the runs of the engine.

    Args:
        clock: told of passes that reach a recorded tensor.
        steps: says whether an optimizer makes the steps.
        manual: where none does, shown the parameters when a pass has ended.
        events: takes faults.

    Attributes:
        clock: that clock.
        is_running: a pass has begun and not ended, as far as anybody has told.
        losses: what it starts from, where the step is recorded.
        scale: what its gradients are multiplied by; None for nothing.
        guard: told of every node of the graph that is looked at.
        leaf_handles: hooks on leaves, which outlive the graph.
        input_gradients: gradients of inputs, which come in parts.
    """

    def __init__(self, clock: Clock, steps: Steps, manual: ManualUpdates, events: EventLog) -> None:
        self.clock = clock
        self._steps = steps
        self._manual = manual
        self.fault = events.fault
        self.is_running = False
        self.losses: tuple[torch.Tensor, ...] = ()
        self.scale: torch.Tensor | None = None
        self.guard = DeepGraphGuard()
        self.leaf_handles: list[Entry] = []
        self.input_gradients: list[InputGradient] = []
        self._old_input_gradients: list[InputGradient] = []

    def begin(self, roots: tuple[torch.Tensor, ...], scale: torch.Tensor | None) -> None:
        """A pass starts from these tensors, whose gradients are multiplied by ``scale``."""
        self.scale = scale
        if self.clock.on:
            self.losses = tuple(root.detach().clone() for root in roots if _is_loss(root))

    def enter(self) -> bool:
        """The pass has reached its first recorded tensor; returns whether it is recorded."""
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
        """The pass has ended, and concerned us."""
        self.finish_inputs(failed)
        self.guard.restart()
        self.clock.leave_backward(failed)
        if not self._steps.has_leader:
            self._manual.remember()

    @never_raise()
    def run_begins(self, run: EngineRun) -> None:
        """Told of every run of the engine.

        One inside a pass that hands its gradients back (a Function that solves an equation backwards, say) is a
        computation of that Function's own. One that adds to ``.grad`` is a part of the pass: a checkpointed one.
        """
        if self._is_aside(run):
            self.clock.step_aside()

    @never_raise()
    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """Told when such a run has ended."""
        if self._is_aside(run):
            self.clock.come_back()

    def _is_aside(self, run: EngineRun) -> bool:
        is_ours = threading.get_ident() == self.clock.thread or not has_asked_for_a_pass()
        return run.is_nested and not run.accumulates and is_ours

    def forget_graph(self) -> None:
        """A forward and all passes over its graph are done with."""
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


def _is_loss(root: torch.Tensor) -> bool:
    is_plain = type(root) is torch.Tensor and not root.is_meta and not is_transformed(root)
    return is_plain and root.numel() == 1 and root.is_floating_point()
