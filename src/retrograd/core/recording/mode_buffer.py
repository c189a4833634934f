"""Buffers of what is being recorded, kept apart by the grad mode of the forward that it comes from.

Of forwards with grad it shows only later whether a backward pass follows. When a model is called twice before a
backward pass, either both calls are trained (two views of one example), or one of them is an evaluation that somebody
ran without ``no_grad``. Only the backward pass tells. Until then calls of modules are numbered on;
:mod:`retrograd.core.recording.emitter` takes the rows of an evaluation apart then.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch

from retrograd.core.history.sink import Phase
from retrograd.core.hooks.engine import grad_enabled, uncompiled
from retrograd.core.hooks.gradients import GradientWatch
from retrograd.core.hooks.listeners import HookEntry
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.reach import DeepGraphGuard
from retrograd.core.limits import LIMITS
from retrograd.core.recording.settings import Settings
from retrograd.core.statistics.custom import CustomStatistics
from retrograd.core.statistics.slab import Slab, make_slab, make_turns


class CallCount:
    """Counts the calls of one slot of a module.

    Attributes:
        serial: that of its buffer when they were last counted anew.
        count: how many there were since.
    """

    __slots__ = ("count", "serial")

    def __init__(self) -> None:
        self.serial = 0
        self.count = 0


class Forward:
    """A call of a whole model.

    Args:
        root: that model, by its identity.
        training: it is in training mode.
        counts: for each slot, how many calls of it came before, within the micro-batch.

    Attributes:
        is_evaluation: whether it is one; None while that is not decided.
    """

    __slots__ = ("_reached", "_watches", "counts", "is_evaluation", "root", "training")

    def __init__(self, root: int, training: bool, counts: Sequence[int]) -> None:
        self.root = root
        self.training = training
        self.counts = counts
        self.is_evaluation: bool | None = None
        self._reached = _ReachedFlag()
        self._watches: list[GradientWatch] | None = None

    @property
    def is_reached(self) -> bool:
        """True if a backward pass has come to what it returned."""
        return self._reached.seen

    @property
    def is_over(self) -> bool:
        """True if no backward pass can come any more, for its graph is gone; False where nothing is known."""
        watches = self._watches
        return watches is not None and not self.is_reached and all(watch.is_over for watch in watches)

    @property
    def phase(self) -> Phase:
        """Its phase as an evaluation."""
        return "forward" if self.training else "eval"

    def follow(self, output: Any, guard: DeepGraphGuard, leaf_handles: list[HookEntry]) -> None:
        """Watch for a gradient of what it has returned."""
        tensors = [tensor for _, tensor in flatten(output, ())]
        if not tensors or not grad_enabled():  # the latter in a reentrant checkpoint, which makes the graph later
            return
        self._watches = []
        for tensor in tensors:
            if tensor.grad_fn is not None:
                watch = GradientWatch(self._reached, guard, leaf_handles)
                watch.watch(tensor)
                self._watches.append(watch)

    def leave(self) -> None:
        """Take the hooks back."""
        for watch in self._watches or ():
            watch.remove()


class _ReachedFlag:
    """The hook on what a model returned: it notes that a gradient came."""

    __slots__ = ("seen",)
    __name__ = "note_gradient"  # torch asks each hook for it, which costs more where there is none
    __torch_unserializable__ = True

    def __init__(self) -> None:
        self.seen = False

    @uncompiled
    def __call__(self, gradient: torch.Tensor) -> None:
        self.seen = True


class Forwards:
    """The calls of whole models in the micro-batch that is open, in the order in which they ran.

    Attributes:
        calls: those of every slot.
    """

    def __init__(self) -> None:
        self.calls: Sequence[CallCount] = ()
        self._listed: list[Forward] = []
        self._running: Forward | None = None

    def __len__(self) -> int:
        return len(self._listed)

    def __iter__(self) -> Iterator[Forward]:
        return iter(self._listed)

    def __getitem__(self, index: int) -> Forward:
        return self._listed[index]

    def begin(self, root: int, training: bool, serial: int) -> None:
        """List a call of a model that begins."""
        self._running = None
        if len(self._listed) < LIMITS.forwards:
            counts = [calls.count if calls.serial == serial else 0 for calls in self.calls] if self._listed else []
            self._running = Forward(root, training, counts)
            self._listed.append(self._running)

    def end(self, output: Any, guard: DeepGraphGuard, leaf_handles: list[HookEntry]) -> None:
        """Follow what the call has returned that began last."""
        if self._running is not None:
            self._running.follow(output, guard, leaf_handles)
            self._running = None

    def restart(self) -> None:
        """Forget all calls when the micro-batch is closed."""
        for forward in self._listed:
            forward.leave()
        self._listed.clear()

    def may_be_joined(self, root: int) -> bool:
        """True if a call of this model that begins now may be trained together with those before it."""
        if not any(forward.root == root for forward in self._listed):
            return True
        waiting = [not forward.is_over for forward in self._listed]
        return any(waiting[:-1] if len(waiting) >= LIMITS.pending_forwards else waiting)

    def find(self, slot: int, call: int) -> int:
        """The number of the forward that a call of a slot belongs to, found by the number of the call."""
        begun = (len(each.counts) <= slot or each.counts[slot] <= call for each in self._listed)
        return max((number for number, has_begun in enumerate(begun) if has_begun), default=0)

    def decide(self, trained: set[int], *, is_reached: bool, is_closing: bool) -> bool:
        """Decide which of them are evaluations; returns whether there are any.

        Args:
            trained: the numbers of those of which gradients came.
            is_reached: a backward pass has reached the micro-batch.
            is_closing: no further pass is waited for.
        """
        trained = trained | {number for number, forward in enumerate(self._listed) if forward.is_reached}
        roots = {self._listed[number].root for number in trained}
        for number, forward in enumerate(self._listed):
            if number in trained:
                forward.is_evaluation = False
            elif forward.is_evaluation is None and (trained or not is_reached):
                is_passed_over = is_closing and forward.root in roots
                forward.is_evaluation = True if forward.is_over or is_passed_over else None
        return any(forward.is_evaluation for forward in self._listed)


class Mode(IntEnum):
    """Grad mode of a forward."""

    GRAD = 0
    NO_GRAD = 1
    INFERENCE = 2


class ModeBuffer:
    """Holds what is being recorded of the forwards of one grad mode.

    Attributes:
        mode: that grad mode.
        serial: grows when calls are to be counted anew.
        opened: what it was when the buffer was last closed.
        touched: something has been recorded since the buffer was last closed.
        reached: a backward pass has reached it since then.
        failed: a forward has raised.
        training: the model was in training mode.
        number: of the forward without grad that began last, within its step.
        forwards: the calls of whole models that have been recorded since then, where backward passes may follow them.
        kept: tensors kept since then, as tuples (recorder, tensor, version, bytes).
        scale: what the gradients that are in it were multiplied by; None for nothing.
    """

    __slots__ = (
        "_make", "_turns", "custom", "failed", "forwards", "kept", "mode", "number", "opened",
        "reached", "rows", "scale", "serial", "slabs", "touched", "training",
    )  # fmt: skip

    def __init__(
        self, mode: Mode, make: Callable[[torch.device, array[int]], Slab], custom: CustomStatistics | None
    ) -> None:
        self.mode = mode
        self._make = make
        self._turns = make_turns()
        self.custom = custom
        self.slabs: dict[torch.device, Slab] = {}
        self.rows = self.number = 0
        self.serial = self.opened = 1
        self.touched = self.reached = self.failed = False
        self.training = True
        self.scale: torch.Tensor | None = None
        self.forwards = Forwards()
        self.kept: list[tuple[Any, torch.Tensor, int, int]] = []

    def slab(self, device: torch.device) -> Slab:
        """The slab for tensors of this device.

        Raises:
            UnreadableTensorError: for a device on which nothing has values.
        """
        slab = self.slabs.get(device)
        if slab is None:
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
        self.scale = None
        self.forwards.restart()

    @property
    def may_be_reached(self) -> bool:
        """Whether the backward pass that ends now may have reached it, where no gradient is recorded that tells."""
        return self.touched or any(forward.is_reached for forward in self.forwards)

    @property
    def phase(self) -> Phase:
        """The kind of forward that this was."""
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
