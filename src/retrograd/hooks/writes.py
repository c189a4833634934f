"""Which operation wrote into which memory, as seen by a function mode: a log that explains an error afterwards."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from retrograd.hooks.module_calls import ModuleCall
from retrograd.hooks.saved import is_plain

_OURS = str(Path(__file__).parents[1])
_TORCHS = str(Path(torch.__file__).parent)
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim")
_LIMIT = 4096


class Write(NamedTuple):
    """A write in place.

    Attributes:
        storage: identity of the memory.
        version: of the tensor that was written to, afterwards.
        writer: the torch function; of an optimizer its update, as in ``SGD.step``.
        line: who called it.
    """

    storage: int
    version: int
    writer: str
    line: str

    def __str__(self) -> str:
        return f"{self.writer} at {self.line}"


class WriteNotes:
    """The last writes in place that torch functions made. It compares version counters around each call.

    Writes that do not count (through NumPy, by hand-written kernels) are not seen, nor are those of scripted code and
    of autograd's own nodes. A write through ``.data`` is seen, with the version of what ``.data`` gave.
    """

    def __init__(self) -> None:
        self.writes: deque[Write] = deque(maxlen=_LIMIT)

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, int]]:
        """What a function is about to be given, and the versions of that."""
        seen: list[tuple[Tensor, int]] = []
        _find_versions(args, seen)
        if kwargs:
            _find_versions(kwargs.values(), seen)
        return seen

    def after(
        self,
        seen: list[tuple[Tensor, int]],
        function: Any,
        result: Any,
        frame: FrameType,
        call: ModuleCall | None = None,
    ) -> None:
        """It has returned."""
        for tensor, version in seen:
            if tensor._version != version and is_plain(tensor):
                storage, writer = id(tensor.untyped_storage()), _name_writer(function, frame)
                self.writes.append(Write(storage, tensor._version, writer, program_line(frame)))

    def between(self, storage: int, then: int, now: int) -> list[Write]:
        """Those that brought a storage from one version to another, each writer and line once."""
        seen = [each for each in self.writes if each.storage == storage and then < each.version <= now]
        return list({(each.writer, each.line): each for each in reversed(seen)}.values())[::-1]


class WriteLog(TorchFunctionMode):
    """Notes every write in place that a torch function makes in the thread that entered it, 3 µs an operation.

    Attributes:
        notes: what was seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes = WriteNotes()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        seen = self.notes.before(args, kwargs)
        result = func(*args, **kwargs)
        self.notes.after(seen, func, result, sys._getframe(1))
        return result

    def begin(self) -> None:
        """Listen in this thread."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Listen no more."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def program_line(frame: FrameType | None = None) -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours, from this one outwards."""
    frame = frame or sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _TORCHS)):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _name_writer(function: Any, frame: FrameType | None) -> str:
    """The name of a torch function; that of an optimizer's update, where it is part of one."""
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _TORCHS)):
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
