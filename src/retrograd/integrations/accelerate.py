"""Accelerate: ``RetrogradTracker().watch(accelerator, model)``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from retrograd.core.errors import RecordingError
from retrograd.core.libraries import library_needed
from retrograd.core.ranks.processes import ask_rank
from retrograd.core.recording.record import Recording
from retrograd.integrations.boards import Board
from retrograd.integrations.processes import share_from_first, wait_for_all
from retrograd.integrations.trained_run import Status, TrainedRun

with library_needed("accelerate", "1.0"):
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker


class RetrogradTracker(TrainedRun, GeneralTracker):
    """Records a loop of Accelerate's from :meth:`watch` to ``accelerator.end_training()``; a step is an update.

    See :class:`retrograd.integrations.trained_run.TrainedRun` for its arguments. What is logged with
    ``accelerator.log`` is for the other trackers, and not recorded; with it they are given what is critical.
    """

    name = "retrograd"
    requires_logging_directory = False
    main_process_only = False
    _abandoned: Status = "finished"
    _accelerator: weakref.ref[Accelerator] | None = None
    _step: int | None = None

    @property
    def tracker(self) -> Recording | None:
        """The recording; None before :meth:`watch`."""
        return self.recording

    def watch(self, accelerator: Accelerator, model: nn.Module) -> None:
        """Begin to record a model, which the accelerator has prepared, in each of its processes.

        Raises:
            RetrogradError: what :func:`retrograd.record` raises.
        """
        plain = accelerator.unwrap_model(model)
        self._begin(plain, None, share_from_first(), is_new=self._state is None)
        self._accelerator, self._step = weakref.ref(accelerator), None
        others = [each for each in accelerator.trackers if each is not self]
        accelerator.trackers[:] = [self, *others]  # to end in all processes, and before those that take the findings

    def finish(self) -> None:
        """End the recording, say what is wrong, and give it to the other trackers."""
        if self._end():
            self._state = None
            wait_for_all()
            if ask_rank() == 0:
                self._tell()
                self._log_findings(self._log_numbers, self._list_boards, self._find_step())

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        """Give the other trackers what was found to be critical since the last call."""
        self._step = step
        self._log_critical(self._log_numbers, self._list_boards, self._find_step())

    def _log_numbers(self, numbers: dict[str, float]) -> None:
        for tracker in self._list_others():
            tracker.log(numbers, step=self._step)

    def _list_boards(self) -> list[Board]:
        return [tracker.tracker for tracker in self._list_others()]

    def _list_others(self) -> Iterator[GeneralTracker]:
        accelerator = self._accelerator and self._accelerator()
        return (each for each in (accelerator.trackers if accelerator else ()) if each is not self)

    def _find_step(self) -> int:
        """The step for the log: the one that the loop has given, or of the recording."""
        if self._step is not None:
            return self._step
        return 0 if self.recording is None else self.recording.step

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, after ``accelerator.register_for_checkpointing(tracker)``."""
        return self._make_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint.

        Raises:
            RecordingError: it goes on already.
        """
        if self.is_recording:
            raise RecordingError(
                "A checkpoint is loaded while its model is being recorded.",
                repair="call `tracker.watch(accelerator, model)` after `accelerator.load_state(…)`.",
                reason="the recording would hold steps that the checkpoint takes back.",
            )
        self._take_state(state)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_accelerator": None}
