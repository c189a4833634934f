"""Lightning: ``Trainer(callbacks=[RetrogradCallback()])``."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from retrograd.core.libraries import library_needed
from retrograd.integrations.boards import Board
from retrograd.integrations.trained_run import Share, TrainedRun, keep_own

with library_needed("lightning", "2.5"):
    from lightning.pytorch import Callback, LightningModule, Trainer


class RetrogradCallback(TrainedRun, Callback):
    """Records each ``trainer.fit``, by the steps that the trainer logs.

    See :class:`retrograd.integrations.trained_run.TrainedRun` for its arguments.
    """

    _trainer: weakref.ref[Trainer] | None = None
    """Whose run the state is of; None for that of a checkpoint."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to record."""
        if self._trainer is not None and self._trainer() is not trainer:
            self._state = None
        self._begin(pl_module, _read_step(trainer), _find_share(trainer), is_new=trainer.global_step == 0)
        self._trainer = weakref.ref(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step, or go on with it where gradients are accumulated."""
        if self.recording is not None and self.is_recording:
            self.recording.begin_step(_read_step(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what is critical, as soon as it is found."""
        if trainer.is_global_zero:
            step = _read_step(trainer)
            self._log_critical(partial(_log_numbers, trainer, step), partial(_list_boards, trainer), step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record which epoch begins."""
        self._take_numbers({"epoch": trainer.current_epoch}, _read_step(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what the module has logged."""
        if not trainer.sanity_checking:
            self._take_numbers(trainer.callback_metrics)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what the module has logged."""
        self._take_numbers(trainer.callback_metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the recording, and say what is wrong."""
        self._state = self._make_state()
        if self._end():
            trainer.strategy.barrier("retrograd")  # all ranks have written their folders
            self._tell_logger(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the recording as failed."""
        self._state = self._make_state()
        if self._end("failed", exception):
            self._tell_logger(trainer)

    def state_dict(self) -> dict[str, Any]:
        """State for the trainer's checkpoint."""
        return self._make_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint."""
        self._take_state(state_dict)
        self._trainer = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_trainer": None}

    def _tell_logger(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        self._tell()
        step = _read_step(trainer)
        self._log_findings(partial(_log_numbers, trainer, step), partial(_list_boards, trainer), step)


def _read_step(trainer: Trainer) -> int:
    """The number under which the trainer logs the batch that comes, or has run last."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def _find_share(trainer: Trainer) -> Share:
    return trainer.strategy.broadcast if trainer.world_size > 1 else keep_own


def _log_numbers(trainer: Trainer, step: int, numbers: dict[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=step)


def _list_boards(trainer: Trainer) -> list[Board]:
    return [getattr(logger, "experiment", None) for logger in trainer.loggers]
