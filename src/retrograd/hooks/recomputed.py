"""What checkpoints keep: the arguments of their function, and, once they have run it again, what it saved.

A checkpoint (``use_reentrant=False``) packs each saved tensor into an empty holder. When the first of them is wanted
it runs its function again, and keeps what that saves until each of the holders has been unpacked. Its own hooks are
the innermost, so no others see these tensors. The class of those hooks is replaced by one that tells of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.utils import checkpoint

from retrograd.hooks.listeners import Listeners
from retrograd.hooks.nodes import saved_of
from retrograd.hooks.patches import Patch, Undo, replace

_NAME = "_recomputation_hook"


class RecomputeListener(Protocol):
    """Told of what checkpoints keep when they run their function again. Must not raise."""

    def recomputed(self, holder: object, tensor: Tensor) -> None:
        """What this holder stands for is there again."""


def frame_of(raw: Any) -> Any | None:
    """The checkpoint that a ``SavedTensor`` was packed by; None if it was none."""
    unpack = getattr(raw, "unpack_hook", None)
    for cell in getattr(unpack and inspect.unwrap(unpack), "__closure__", None) or ():
        frame = cell.cell_contents
        if type(frame).__name__ == "_CheckpointFrame":
            return frame
    return None


def arguments_of(frame: Any) -> Iterator[Tensor]:
    """The tensors that a checkpoint will run its function with."""
    saver = getattr(frame, "input_saver", None)  # in torch 2.11 a tensor, whose node saves itself and them
    kept = getattr(frame, "saved_args", ()) if saver is None else saved_of(saver.grad_fn)["tensors"][1:]
    for each in kept:
        held = getattr(each, "data", None)
        if isinstance(held, Tensor):
            yield held


def _replace_hooks() -> list[Undo]:
    original: Any = getattr(checkpoint, _NAME)

    class _TellingHook(original):  # type: ignore[misc]
        """The same, telling of each tensor before it is packed."""

        def __init__(self, frame: Callable[[], Any], group: Any) -> None:
            super().__init__(frame, group)
            pack: Any = vars(self)["pack_hook"]

            def pack_and_tell(tensor: Tensor) -> Any:
                _tell(frame(), group, tensor)
                return pack(tensor)

            vars(pack_and_tell).update(vars(pack))  # torch marks its own
            self.pack_hook = pack_and_tell

    return [replace(checkpoint, _NAME, _TellingHook)]


recompute_listeners = Listeners[RecomputeListener](Patch(_replace_hooks))


def _tell(frame: Any, group: Any, tensor: Tensor) -> None:
    place = frame.recomp_counter[group] if frame is not None else 0
    if frame is None or place >= len(frame.weak_holders):
        return
    holder = frame.weak_holders[place]()
    if holder is not None:
        for listener in recompute_listeners:
            listener.recomputed(holder, tensor)
