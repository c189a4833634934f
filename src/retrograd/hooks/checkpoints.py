"""Checkpointed parts of a forward: which one runs, first or again, and what its checkpoint keeps.

Torch has no name for such a part. What stands for it is the object that torch itself keeps for it from the forward
to the backward pass: a frame whose saved-tensor hooks are set, or the context of the reentrant kind's node.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction, _StopRecomputationError

from retrograd.hooks.engine import current_graph_task, grad_enabled
from retrograd.hooks.listeners import Listeners
from retrograd.hooks.nodes import saved_of
from retrograd.hooks.patches import Patch, Undo, replace

T = TypeVar("T")

EnoughComputed: type[Exception] = _StopRecomputationError
"""What torch raises, wherever a tensor is saved, when all that a part had saved is there again."""

_SAVES = "_checkpoint_hook.__init__.<locals>.pack_hook"
_LOADS = "_checkpoint_hook.__init__.<locals>.unpack_hook"
_FORWARD: CodeType = CheckpointFunction.forward.__code__
_BACKWARD: CodeType = CheckpointFunction.backward.__code__
_RUN: CodeType = _engine_run_backward.__code__


def is_failure(error: BaseException | None) -> bool:
    """Whether a backward pass that ended with this error has failed, and was not left by a part that had enough."""
    return error is not None and not isinstance(error, EnoughComputed)


def parts_running() -> list[Any]:
    """What stands for the checkpointed parts, one within the other, whose forward runs now for the first time.

    A part within one that is computed again runs for the first time then: torch makes it anew.
    """
    parts = [] if grad_enabled() else _reentrant_parts()  # that kind runs without grad, and is found on the stack
    save, load = _top_hooks() or (None, None)
    if getattr(save, "__qualname__", "") == _SAVES:
        parts += _other_parts(save, load)
    return parts


def _reentrant_parts() -> list[Any]:
    parts: list[Any] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _BACKWARD:
        if frame.f_code is _FORWARD:
            parts.append(frame.f_locals["ctx"])
        frame = frame.f_back
    return parts


def _other_parts(save: Any, load: Any) -> list[Any]:
    """Each has pushed hooks of its own; those below the top ones can only be seen without these."""
    own = inspect.unwrap(save)
    part = dict(zip(own.__code__.co_freevars, own.__closure__, strict=True))["frame"].cell_contents
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        below = _top_hooks()
        if below is None or below[0].__qualname__ != _SAVES:
            return [part]
        if save is not own:  # the pair around the checkpoint's own, which is next
            return _other_parts(*below)
        return [part, *_other_parts(*below)]
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(save, load)


def _top_hooks() -> tuple[Any, Any] | None:
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def part_computed_again() -> Any:
    """What stands for the part that a backward pass computes again now; None outside of one.

    The reentrant kind runs a pass of its own over what it has computed again. What a node or a hook of that pass runs
    is not part of it any more.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _RUN:
        if frame.f_code is _BACKWARD:
            return frame.f_locals["ctx"]
        if frame.f_code.co_qualname == _LOADS:
            return frame.f_locals["frame"]
        frame = frame.f_back
    return None


class CallsOfParts(Generic[T]):
    """Calls that are made within checkpointed parts, in their order: each is found again when its part is.

    What is noted of a call lives as long as the parts it was made in. A part that several backward passes compute again
    gives each of them its calls from the first.
    """

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: WeakKeyDictionary[Any, tuple[list[T], dict[int, int]]] = WeakKeyDictionary()

    def add(self, call: T) -> None:
        """A call is made for the first time; all parts that run now will find it again."""
        for part in parts_running():
            self._parts.setdefault(part, ([], {}))[0].append(call)

    def knows(self, part: Any) -> bool:
        """Whether a call was made in this part."""
        return part is not None and part in self._parts

    def find_next(self, part: Any) -> T | None:
        """The call that a backward pass, which computes a part again, comes to now; None where there were fewer."""
        calls, positions = self._parts.get(part, ([], {}))
        task = current_graph_task()
        position = positions.get(task, 0)
        positions[task] = position + 1
        if position >= len(calls):
            return None
        self.add(calls[position])  # parts within this one are made anew
        return calls[position]


# ---- what they keep ----
#
# A checkpoint with ``use_reentrant=False`` packs each saved tensor into an empty holder. When the first of them is
# wanted it runs its function again, and keeps what that saves until each of the holders has been unpacked. Its own
# hooks are the innermost, so no others see these tensors: their class is replaced by one that tells of them.

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
