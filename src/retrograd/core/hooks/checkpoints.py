"""Checkpointed parts of a forward: which one runs, what its checkpoint keeps, and a checkpoint around a call.

Torch has no name for such a part. What stands for it is the object that torch itself keeps for it from the forward
to the backward pass: a frame whose saved-tensor hooks are set, or the context of the reentrant kind's node.

A :class:`Recomputation` is torch's own non-reentrant checkpoint, around a call whose beginning and end are known from
hooks.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from types import CodeType, FrameType
from typing import Any, Generic, NoReturn, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._higher_order_ops.cond import CondAutogradOp
from torch.autograd.graph import _engine_run_backward
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction, _StopRecomputationError

from retrograd.core.hooks.engine import current_graph_task, grad_enabled
from retrograd.core.hooks.functions import begins_function
from retrograd.core.hooks.listeners import Listeners, Patch, Undo, replace
from retrograd.core.hooks.nodes import saved_of
from retrograd.core.hooks.saved import is_plain, push_pair, remove_pair, top_pair, version_of, witness_version

T = TypeVar("T")

EnoughComputed: type[Exception] = _StopRecomputationError
"""Raised by torch, wherever a tensor is saved, when all that a part had saved is there again."""

SWITCH_GRAD = torch._C._set_grad_enabled
"""What all switches of grad mode come down to."""

_SAVES = "_checkpoint_hook.__init__.<locals>.pack_hook"
_LOADS = "_checkpoint_hook.__init__.<locals>.unpack_hook"
_COMPUTE_AGAIN = (CheckpointFunction, CondAutogradOp)  # a branch of torch.cond is computed again as well
_FORWARD: dict[int, CodeType] = {id(each.forward.__code__): each.forward.__code__ for each in _COMPUTE_AGAIN}
_BACKWARD: dict[int, CodeType] = {id(each.backward.__code__): each.backward.__code__ for each in _COMPUTE_AGAIN}
"""By identity: to hash code takes some microseconds, and whole stacks are looked through."""

_RUN: CodeType = _engine_run_backward.__code__


def is_failure(error: BaseException | None) -> bool:
    """Return whether a backward pass that ended with this error has failed: a part that had enough may have left it."""
    return error is not None and not isinstance(error, EnoughComputed)


def parts_running() -> list[Any]:
    """Find what stands for the checkpointed parts, one within the other, whose forward runs for the first time now.

    A part within one that is computed again runs for the first time then: torch makes it anew.
    """
    parts = [] if grad_enabled() else _reentrant_parts()  # that kind runs without grad, and is found on the stack
    save, load = top_pair() or (None, None)
    if getattr(save, "__qualname__", "") == _SAVES:
        parts += _other_parts(save, load)
    return parts


def is_reentrant(code: CodeType) -> bool:
    """Return whether a frame of this code runs a part for the first time that will be computed again, without grad."""
    return id(code) in _FORWARD


def is_computed_again() -> bool:
    """Return whether a backward pass will compute what runs now again, with grad, though it runs without."""
    return not grad_enabled() and any(part.next_functions for part in _reentrant_parts())  # none: no pass comes to it


def _reentrant_parts() -> list[Any]:
    parts: list[Any] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None and (code := id(frame.f_code)) not in _BACKWARD:
        if code in _FORWARD:
            parts.append(frame.f_locals["ctx"])
        frame = frame.f_back
    return parts


class GradSwitch:
    """Whether gradients are on outside of all Functions, as calls of torch's switch tell, from now on.

    In the forward of a Function they are off, whatever they are around its call.
    """

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = grad_enabled()

    def switched(self, is_on: bool, frame: FrameType) -> None:
        """The switch was called, from this frame."""
        if not _is_in_function(frame):
            self.is_on = is_on


def _is_in_function(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _RUN:
        if begins_function(frame.f_code):
            return True
        frame = frame.f_back
    return False


def find_cut_checkpoint(frame: FrameType | None) -> FrameType | None:
    """Find what called the outermost reentrant checkpoint around a frame, if no input of it requires grad.

    It runs its function without grad, and no backward pass comes to it, which would run it again with grad. Where
    gradients are off around its call too, that is so whatever it is given.
    """
    found = None
    while frame is not None and frame.f_code is not _RUN:
        if "Checkpoint" in frame.f_code.co_qualname and begins_function(frame.f_code):  # torch's, or another library's
            part = frame.f_locals.get(frame.f_code.co_varnames[0])
            if getattr(part, "next_functions", ()) or any(getattr(part, "needs_input_grad", ())):
                return None
            found = frame
        frame = frame.f_back
    return found and found.f_back


def _other_parts(save: Any, load: Any) -> list[Any]:
    """Each has pushed hooks of its own; those below the top ones can only be seen without these."""
    own = inspect.unwrap(save)
    part = dict(zip(own.__code__.co_freevars, own.__closure__, strict=True))["frame"].cell_contents
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        below = top_pair()
        if below is None or below[0].__qualname__ != _SAVES:
            return [part]
        if save is not own:  # the pair around the checkpoint's own, which is next
            return _other_parts(*below)
        return [part, *_other_parts(*below)]
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(save, load)


def part_computed_again() -> Any:
    """Find what stands for the part that a backward pass computes again now; None outside of one.

    The reentrant kind runs a pass of its own over what it has computed again. What a node or a hook of that pass runs
    is not part of it any more.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _RUN:
        if id(frame.f_code) in _BACKWARD:
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
        """Return whether a call was made in this part."""
        return part is not None and part in self._parts

    @property
    def is_any(self) -> bool:
        """Whether a part in which calls were made is still held."""
        return len(self._parts) > 0

    def find_next(self, part: Any) -> T | None:
        """The call that a backward pass, which computes a part again, comes to now; None where there were fewer."""
        calls, positions = ([], {}) if part is None else self._parts.get(part, ([], {}))
        task = current_graph_task()
        position = positions.get(task, 0)
        positions[task] = position + 1
        if position >= len(calls):
            return None
        self.add(calls[position])  # parts within this one are made anew
        return calls[position]


#
# A checkpoint with ``use_reentrant=False`` packs each saved tensor into an empty holder. When the first of them is
# wanted it runs its function again, and keeps what that saves until each of the holders has been unpacked. Its own
# hooks are the innermost, so no others see these tensors: their class is replaced by one that tells of them.

_NAME = "_recomputation_hook"


class RecomputeListener(Protocol):
    """Notified of what checkpoints keep when they run their function again. Must not raise."""

    def recomputed(self, holder: object, tensor: Tensor) -> None:
        """Receive a tensor that was computed again, and the holder that stands for it."""


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


Versions = tuple[int, int]
"""Numbers of writes to something: in the forward, and now."""


class RecomputationGuard(Protocol):
    """Ensures that the second run of a forward is like the first, and raises where it is not."""

    def end_first(self) -> None:
        """The first run is over, or has raised."""

    def second_run(self) -> AbstractContextManager[None]:
        """Return a block for the second run, and for each further one of a retained graph."""

    def take_sample(self, tensor: Tensor) -> Any:
        """Return a sample of a tensor that the first run saves; None if it is not to be compared."""

    def compare(self, sample: Any, tensor: Tensor) -> None:
        """The second run has saved this tensor in its place."""

    def refuse_run(self, error: Exception) -> NoReturn:
        """The second run has saved other tensors; ``error`` is what torch says of it."""

    def refuse_saved(self, size: torch.Size, dtype: torch.dtype, versions: Versions, storage: int) -> NoReturn:
        """A saved tensor has been written to; ``storage`` is the identity of its memory."""

    def refuse_parameter(self, name: str, versions: Versions) -> NoReturn:
        """A parameter has."""


_generate: Any = checkpoint._checkpoint_without_reentrant_generator
_OPTIONS: dict[str, Any] = {
    "preserve_rng_state": True,
    "context_fn": None,
    "determinism_check": "default",
    "debug": False,
    "early_stop": True,
}  # others in other versions
_UNPACKED_TWICE = "already unpacked once"
"""In what torch says of a Function whose backward asks for its saved tensors twice."""
_NAMES = [name for name in inspect.signature(_generate).parameters if name in _OPTIONS]


class Recomputation:
    """A call of a module whose saved tensors are dropped, and computed again by another call in the backward pass.

    Made before the forward; :meth:`end` is called after it, also when it raised.

    Args:
        module: what is called.
        args: with what.
        kwargs: and by name.
        guard: sees to it that both runs are alike.
        is_whole: the second run does not stop as soon as it has saved all that is needed.
    """

    __slots__ = ("_running", "_second_run")

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        guard: RecomputationGuard,
        *,
        is_whole: bool = False,
    ) -> None:
        second_run = self._second_run = _SecondRun(module, guard)

        def contexts() -> tuple[Any, Any]:
            return _FirstRun(guard), second_run

        options = _OPTIONS | {"context_fn": contexts, "early_stop": not is_whole}
        self._running: Iterator[None] = _generate(module, *(options[name] for name in _NAMES), *args, **kwargs)
        next(self._running)

    def end(self) -> None:
        """The forward is over, or has raised."""
        self._second_run.end_first()
        with suppress(StopIteration):
            next(self._running)


class _FirstRun:
    """The checks that a checkpoint's pair of hooks does not make: for writes, as autograd does, and of the values.

    What is written to after it was saved is written to in the second run too, and the gradient would be wrong. The pair
    that is set here asks the checkpoint's own, and is known as such by its name and ``__wrapped__``.
    """

    def __init__(self, guard: RecomputationGuard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        pair = top_pair()
        assert pair is not None, "a checkpoint sets its pair first"
        guard = self._guard

        @functools.wraps(pair[0])
        def pack(tensor: Tensor) -> Any:
            holder = pair[0](tensor)
            if is_plain(tensor):
                storage = id(tensor.untyped_storage())
                holder.counted = witness_version(tensor), version_of(tensor), tensor.size(), storage
                holder.sample = guard.take_sample(tensor)
            return holder

        @functools.wraps(pair[1])
        def unpack(holder: Any) -> Tensor:
            counted = getattr(holder, "counted", None)
            if counted is not None and version_of(counted[0]) != counted[1]:
                witness, version, size, storage = counted
                guard.refuse_saved(size, witness.dtype, (version, version_of(witness)), storage)
            try:
                tensor: Tensor = pair[1](holder)
            except checkpoint.CheckpointError as error:
                if _UNPACKED_TWICE in str(error):
                    raise
                guard.refuse_run(error)
            if getattr(holder, "sample", None) is not None:
                guard.compare(holder.sample, tensor)
            return tensor

        self._pack = pack
        try:
            push_pair(pack, unpack)
        except BaseException:  # an interrupt: the checkpoint takes off what is on top, and that has to be its own
            remove_pair(pack)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            remove_pair(self._pack)
        except BaseException:
            remove_pair(self._pack)
            raise
        vars(self._pack).pop("_user_hooks", None)  # those below the checkpoint's own, which drops them here too


class _SecondRun:
    """The same as the first: by parameters as they were, and with buffers afterwards as they were before.

    Running statistics count each batch once. It can be entered again, since a retained graph is run several times.
    """

    def __init__(self, module: nn.Module, guard: RecomputationGuard) -> None:
        self._module = module
        self._guard = guard
        self._stack = ExitStack()
        self._parameters = [(parameter, version_of(parameter)) for parameter in module.parameters()]
        self._before: list[tuple[nn.Module, str, Tensor | None, Tensor | None]] = []

    def end_first(self) -> None:
        """Let those change again that the forward itself writes to, as an embedding with ``max_norm`` does."""
        self._parameters = [each for each in self._parameters if version_of(each[0]) == each[1]]
        self._guard.end_first()

    def __enter__(self) -> None:
        for parameter, version in self._parameters:
            if version_of(parameter) != version:
                names = (name for name, other in self._module.named_parameters() if other is parameter)
                self._guard.refuse_parameter(next(names, ""), (version, version_of(parameter)))
        self._before = [
            (part, name, buffer, None if buffer is None else buffer.detach().clone())
            for part in self._module.modules()
            for name, buffer in part._buffers.items()
        ]
        self._stack.enter_context(self._guard.second_run())

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for part, name, buffer, value in self._before:
            part._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.data.copy_(value)  # no new version: what was saved of a buffer has not changed
        self._before = []
