"""The calls of whole models: which forward begins, whose it is, and what has become of it."""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from retrograd.facts.facts import Facts
from retrograd.hooks.calls import count_calls
from retrograd.hooks.distributed import is_rehearsal, running_stage, running_wrapper
from retrograd.hooks.engine import current_graph_task
from retrograd.hooks.listeners import never_raise
from retrograd.progress.steps import Steps
from retrograd.recording.backward_pass import RecordedPass
from retrograd.recording.module_watch import mode_now
from retrograd.recording.site_table import SitePlacements
from retrograd.recording.taps import Taps


class ModelWatch:
    """Tells the clock and the sources of facts when a model is called.

    Args:
        backward: the pass that runs, and the clock.
        steps: told of models that run.
        taps: told when a wrapper is met around a model.
        placements: told which stage of a pipeline a model is.
        facts: told of forwards.
    """

    def __init__(
        self, backward: RecordedPass, steps: Steps, taps: Taps, placements: SitePlacements, facts: Facts
    ) -> None:
        self._clock = backward.clock
        self._backward = backward
        self.fault = backward.fault
        self._steps = steps
        self._taps = taps
        self._placements = placements
        self._facts = facts
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._roots: WeakSet[nn.Module] = WeakSet()

    def add(self, module: nn.Module, name: str | None = None) -> None:
        """Take each call of this module for a forward of its own; a model of this name, or a part of one."""
        if name is not None:
            self._names[module] = name
        if module not in self._roots:
            self._roots.add(module)
            self._taps.tap_root(module, self)

    @never_raise()
    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is called."""
        clock = self._clock
        if current_graph_task() != -1 or clock.is_paused:  # a checkpointed part is computed again
            return
        if clock.outermost is None and is_rehearsal():
            clock.pause(id(module))
            return
        self._backward.guard.begin_forward((args, kwargs))
        if clock.entered and not self._backward.is_running:
            clock.leave_backward(failed=True)  # a pass that we did not see begin has raised
        if clock.outermost is not None and not self._is_running(clock.outermost, module):
            clock.forward_left()
        wrapper = running_wrapper()
        if wrapper is not None:
            self._taps.meet_wrapper(wrapper)
        if clock.outermost is None:
            self._find_stage(module)
        clock.forward_begins(id(module), mode_now(), module.training)
        self._steps.model_runs(module)
        if clock.is_outermost:
            self._facts.forward_begins(module, (args, kwargs))
        buffer = clock.waiting_buffer
        if buffer is not None:
            buffer.forwards.begin(id(module), module.training, buffer.serial)

    @never_raise()
    def after_call(self, module: nn.Module, output: Any) -> None:
        """The call has ended; the output is None, too, where it has raised."""
        clock = self._clock
        failed = output is None and sys.exc_info()[0] is not None
        if clock.is_paused:
            clock.go_on(id(module))
        elif current_graph_task() == -1:
            buffer = clock.waiting_buffer
            if buffer is not None:
                buffer.forwards.end(output, self._backward.guard, self._backward.leaf_handles)
            if clock.is_outermost:
                self._facts.forward_ends(module, output, failed)
            self._backward.guard.pause()
            clock.forward_ends(id(module), failed)

    def _find_stage(self, model: nn.Module) -> None:
        stage = running_stage()
        self._clock.is_piped = stage is not None
        if stage is not None:
            self._placements.set_stage(self._names.get(model, ""), stage)

    def _is_running(self, outermost: int, model: nn.Module) -> bool:
        root = next((each for each in self._roots if id(each) == outermost), None)
        return root is not None and count_calls(root) > (root is model)
