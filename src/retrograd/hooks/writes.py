"""Which operation wrote into which memory, as seen by a function mode: a log that explains an error afterwards."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.hooks.engine import uncompiled
from retrograd.hooks.frames import describe_frame, is_inner, user_frame
from retrograd.hooks.function_mode import FunctionListener
from retrograd.hooks.saved import is_plain

_OPTIMIZERS = str(Path(torch.__file__).parent / "optim")
_LIMIT = 4096
_TO_ARRAYS = (Tensor.numpy, Tensor.__array__)
"""Functions whose result shares memory with what they are given, out of torch's sight."""


class Write(NamedTuple):
    """A write in place.

    Attributes:
        storage: identity of the memory.
        version: of the tensor that was written to, afterwards.
        writer: the torch function; of an optimizer its update, as in ``SGD.step``.
        line: who called it.
        order: how many writes came before.
    """

    storage: int
    version: int
    writer: str
    line: str
    order: int = 0

    def __str__(self) -> str:
        return f"{self.writer} at {self.line}"


class WriteNotes(FunctionListener):
    """The last writes in place that torch functions made: version counters are compared around each, 3 µs a call.

    Writes that do not count (through NumPy, by hand-written kernels) are not seen, nor are those of scripted code and
    of autograd's own nodes. A write through ``.data`` is seen, with the version of what ``.data`` gave; and where NumPy
    was given the memory.

    Attributes:
        writes: the writes.
        count: how many there were.
    """

    def __init__(self) -> None:
        self.writes: deque[Write] = deque(maxlen=_LIMIT)
        self.count = 0
        self._arrays: deque[Write] = deque(maxlen=_LIMIT)

    @uncompiled
    def before(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> list[tuple[Tensor, int]]:
        """Return the tensors that a function is given, and their versions."""
        seen: list[tuple[Tensor, int]] = []
        _find_versions(args, seen)
        if kwargs:
            _find_versions(kwargs.values(), seen)
        return seen

    @uncompiled
    def after(self, seen: list[tuple[Tensor, int]], function: Any, result: Any, frame: FrameType) -> None:
        """Note what it has written to."""
        for tensor, version in seen:
            if tensor._version != version and is_plain(tensor):
                self._note(self.writes, tensor, _name_writer(function, frame), frame)
        if function in _TO_ARRAYS and seen and is_plain(seen[0][0]):
            self._note(self._arrays, seen[0][0], "NumPy, which was given its memory", frame)

    def _note(self, notes: deque[Write], tensor: Tensor, writer: str, frame: FrameType) -> None:
        storage = id(tensor.untyped_storage())
        notes.append(Write(storage, tensor._version, writer, program_line(frame), self.count))
        self.count += 1

    def note_update(self, tensors: Iterable[Tensor], writer: str, line: str) -> None:
        """Note that an optimizer has written to these."""
        for tensor in tensors:
            if is_plain(tensor):
                self.writes.append(Write(id(tensor.untyped_storage()), tensor._version, writer, line, self.count))
                self.count += 1

    def since(self, storage: int, order: int) -> Write | None:
        """The last that wrote to a storage since there were so many; else who gave its memory to NumPy."""
        wrote = [each for each in self.writes if each.storage == storage and each.order >= order]
        given = [each for each in self._arrays if each.storage == storage]
        return next(iter((*reversed(wrote), *reversed(given))), None)

    def between(self, storage: int, then: int, now: int) -> list[Write]:
        """Those that brought a storage from one version to another, each writer and line once."""
        seen = [each for each in self.writes if each.storage == storage and then < each.version <= now]
        return list({(each.writer, each.line): each for each in reversed(seen)}.values())[::-1]


def program_line(frame: FrameType | None = None) -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours, from this one outwards."""
    return describe_frame(user_frame(frame or sys._getframe(1)))


def _name_writer(function: Any, frame: FrameType | None) -> str:
    """The name of a torch function; that of an optimizer's update, where it is part of one."""
    while frame is not None and is_inner[frame.f_code.co_filename]:
        if frame.f_code.co_name == "step" and frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return f"{type(frame.f_locals.get('self')).__name__}.step"
        frame = frame.f_back
    return str(getattr(function, "__name__", function))


def _find_versions(values: Iterable[Any], seen: list[tuple[Tensor, int]]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            try:
                seen.append((value, value._version))
            except RuntimeError:  # made in inference mode: it has none, and no graph has saved it
                continue
        elif isinstance(value, list | tuple):
            _find_versions(value, seen)
        elif isinstance(value, dict):
            _find_versions(value.values(), seen)
