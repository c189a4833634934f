"""Transformers: ``Trainer(…, callbacks=[RetrogradCallback()])``."""

from __future__ import annotations

from typing import Any

from retrograd.integrations.processes import share_from_first, wait_for_all
from retrograd.integrations.trained_run import TrainedRun
from retrograd.libraries import library_needed

with library_needed("transformers", "5.0"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_KEY = "retrograd"


class RetrogradCallback(TrainedRun, TrainerCallback):
    """Records each ``trainer.train``, by the trainer's ``global_step``: the first update is step 1.

    See :class:`retrograd.integrations.trained_run.TrainedRun` for its arguments. The trainer tells nobody that
    it has raised: the recording ends as failed with the process, at the end of a ``with`` statement around
    the training, when the callback is forgotten, or when the trainer begins again.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Begin to record."""
        self._take_state(_find_saved(state).get(_KEY, {}).get("attributes", {}))
        self._begin(more["model"], state.global_step, share_from_first(), is_new=state.global_step == 0)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Begin a step, which may be of several batches."""
        if self.recording is not None and self.is_recording:
            self.recording.begin_step(state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Put what is needed to go on where the trainer saves it, as it saves the state of callbacks."""
        if self.is_recording:
            _find_saved(state)[_KEY] = {"args": {}, "attributes": self._make_state()}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """End the recording, say what is wrong, and add it to the trainer's log."""
        if self._end():
            wait_for_all()
            if state.is_world_process_zero:
                self._tell()
                if self.findings is not None:
                    state.log_history.append({**self.finding_counts, "step": state.global_step})


def _find_saved(state: TrainerState) -> dict[str, Any]:
    """What the trainer saves of its callbacks, by their names."""
    saved: Any = state.stateful_callbacks
    assert isinstance(saved, dict)
    return saved
