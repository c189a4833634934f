"""What is being recorded, kept apart by the grad mode of the forward it comes from."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch

from retrograd.history.sink import Phase
from retrograd.recording.forwards import Forwards
from retrograd.recording.settings import Settings
from retrograd.statistics.custom import CustomStatistics
from retrograd.statistics.slab import Slab, UnreadableTensorError, make_slab, make_turns


class Mode(IntEnum):
    """Grad mode of a forward."""

    GRAD = 0
    NO_GRAD = 1
    INFERENCE = 2


class ModeBuffer:
    """What is being recorded of the forwards of one grad mode.

    Attributes:
        mode: that grad mode.
        serial: grows when calls are to be counted anew.
        opened: what it was when the buffer was last closed.
        touched: something has been recorded since the buffer was last closed.
        reached: a backward pass has reached it since then.
        failed: a forward has raised.
        training: the model was in training mode.
        forwards: the calls of whole models that have been recorded since then, where backward passes may follow them.
        kept: tensors kept since then, as tuples (recorder, tensor, version, bytes).
    """

    __slots__ = (
        "_make", "_turns", "custom", "failed", "forwards", "kept", "mode", "opened",
        "reached", "rows", "serial", "slabs", "touched", "training",
    )  # fmt: skip

    def __init__(
        self, mode: Mode, make: Callable[[torch.device, array[int]], Slab], custom: CustomStatistics | None
    ) -> None:
        self.mode = mode
        self._make = make
        self._turns = make_turns()
        self.custom = custom
        self.slabs: dict[torch.device, Slab] = {}
        self.rows = 0
        self.serial = self.opened = 1
        self.touched = self.reached = self.failed = False
        self.training = True
        self.forwards = Forwards()
        self.kept: list[tuple[Any, torch.Tensor, int, int]] = []

    def slab(self, device: torch.device) -> Slab:
        """The slab for tensors of this device.

        Raises:
            UnreadableTensorError: for a device on which nothing has values.
        """
        slab = self.slabs.get(device)
        if slab is None:
            if device.type == "meta":
                raise UnreadableTensorError("a meta tensor has no elements")
            slab = self.slabs[device] = self._make(device, self._turns)
            slab.grow(self.rows)
        return slab

    def grow(self, rows: int) -> None:
        """Have rows for so many sites."""
        self.rows = rows
        for slab in self.slabs.values():
            slab.grow(rows)

    def restart(self) -> None:
        """Begin anew after all has been emitted."""
        self.serial += 1
        self.opened = self.serial
        self.touched = self.reached = self.failed = False
        self.forwards.restart()

    @property
    def phase(self) -> Phase:
        """What kind of forward this was."""
        if self.failed:
            return "failed"
        if self.mode is Mode.INFERENCE:
            return "inference"
        if self.mode is Mode.NO_GRAD:
            return "no_grad"
        if self.reached:
            return "train"
        return "forward" if self.training else "eval"


class ModeBuffers:
    """The three buffers of a recorder, which share the numbering of rows."""

    def __init__(self, settings: Settings) -> None:
        def make(device: torch.device, turns: array[int]) -> Slab:
            return make_slab(device, settings.histogram, turns)

        self.all = tuple(ModeBuffer(mode, make, settings.make_custom()) for mode in Mode)
        self.grad = self.all[Mode.GRAD]
        self.rows = 0

    def __getitem__(self, mode: Mode) -> ModeBuffer:
        return self.all[mode]

    def add_row(self) -> int:
        """Make room for one more site and return its row."""
        self.rows += 1
        for buffer in self.all:
            buffer.grow(self.rows)
        return self.rows - 1
