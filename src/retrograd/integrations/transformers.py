"""Transformers: ``Trainer(…, callbacks=[RetrogradCallback()])``."""

from __future__ import annotations

import sys
import weakref
from functools import partial
from types import FrameType
from typing import Any

from retrograd.core.frames import read_locals
from retrograd.core.libraries import library_needed
from retrograd.integrations.boards import Board
from retrograd.integrations.processes import share_from_first, wait_for_all
from retrograd.integrations.trained_run import TrainedRun

with library_needed("transformers", "5.0"):
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_KEY = "retrograd"


class RetrogradCallback(TrainedRun, TrainerCallback):
    """Records each ``trainer.train``, by the trainer's ``global_step``: the first update is step 1.

    See :class:`retrograd.integrations.trained_run.TrainedRun` for its arguments. The trainer tells nobody that
    it has raised: the recording ends as failed with the process, at the end of a ``with`` statement around
    the training, when the callback is forgotten, or when the trainer begins again.
    """

    _trainer: weakref.ref[Trainer] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Begin to record."""
        self._take_state(_find_saved(state).get(_KEY, {}).get("attributes", {}))
        self._go_first()
        self._begin(more["model"], state.global_step, share_from_first(), is_new=state.global_step == 0)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Begin a step, which may be of several batches."""
        if self.recording is not None and self.is_recording:
            self.recording.begin_step(state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Put what is needed to go on where the trainer saves it, with the state of callbacks; log what is critical."""
        if self.is_recording:
            _find_saved(state)[_KEY] = {"args": {}, "attributes": self._make_state()}
            if state.is_world_process_zero:
                self._log_critical(partial(self._add_to_log, state, control), self._list_boards, state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Record what the trainer logs."""
        logs = {name: value for name, value in (more.get("logs") or {}).items() if not name.startswith(_KEY)}
        self._take_numbers(logs, state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """End the recording, say what is wrong, and add it to the trainer's log."""
        if self._end():
            wait_for_all()
            if state.is_world_process_zero:
                self._tell()
                self._log_findings(partial(self._add_to_log, state, control), self._list_boards, state.global_step)

    def _go_first(self) -> None:
        """Stand before the trainer's reporters, which end with the training and take nothing from then on."""
        trainer = _find_trainer()
        self._trainer = None
        if trainer is not None:
            self._trainer = weakref.ref(trainer)
            callbacks = trainer.callback_handler.callbacks
            callbacks[:] = [self, *(each for each in callbacks if each is not self)]

    def _add_to_log(self, state: TrainerState, control: TrainerControl, numbers: dict[str, float]) -> None:
        trainer = None if self._trainer is None else self._trainer()
        if trainer is None:
            state.log_history.append({**numbers, "step": state.global_step})
            return
        is_due = control.should_log
        trainer.log(numbers)
        control.should_log = is_due  # what is logged by the way is not the log that is due

    def _list_boards(self) -> list[Board]:
        """What the trainer's own reporters write to."""
        trainer = None if self._trainer is None else self._trainer()
        callbacks = trainer.callback_handler.callbacks if trainer is not None else ()
        writers = [getattr(each, "tb_writer", None) for each in callbacks]
        return [*writers, *(getattr(getattr(each, "_wandb", None), "run", None) for each in callbacks)]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_trainer": None}


def _find_trainer() -> Trainer | None:
    """The trainer that calls us, which a callback is not given."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner: Any = read_locals(frame).get("self")
        if issubclass(type(owner), Trainer):  # isinstance would ask the object itself
            trainer: Trainer = owner
            return trainer
        frame = frame.f_back
    return None


def _find_saved(state: TrainerState) -> dict[str, Any]:
    """What the trainer saves of its callbacks, by their names."""
    saved: Any = state.stateful_callbacks
    assert isinstance(saved, dict)
    return saved
