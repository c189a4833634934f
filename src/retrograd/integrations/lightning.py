"""Lightning: ``Trainer(callbacks=[RetrogradCallback()])``."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from retrograd.findings.finding import Findings
from retrograd.integrations.trained_run import Share, TrainedRun, keep_own
from retrograd.libraries import library_needed

with library_needed("lightning", "2.5"):
    from lightning.pytorch import Callback, LightningModule, Trainer

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


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
        if self.findings is not None:
            for logger in trainer.loggers:
                logger.log_metrics(self.finding_counts, step=_read_step(trainer))
                _log_text(logger, self.findings, _read_step(trainer))


def _read_step(trainer: Trainer) -> int:
    """The number under which the trainer logs the batch that comes, or has run last."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def _find_share(trainer: Trainer) -> Share:
    return trainer.strategy.broadcast if trainer.world_size > 1 else keep_own


def _log_text(logger: Logger, findings: Findings, step: int) -> None:
    """Log the findings as text, where the logger has a place for it, as TensorBoard's has."""
    add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
    if add_text is not None:
        add_text("retrograd/findings", "\n".join(f"- {line}" for line in str(findings).splitlines()), step)
