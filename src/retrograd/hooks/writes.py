"""Which operation wrote into which memory, as seen by a function mode: a log that explains an error afterwards."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_OURS = str(Path(__file__).parents[1])
_TORCHS = str(Path(torch.__file__).parent)
_LIMIT = 4096


class WriteLog(TorchFunctionMode):
    """Notes every write in place that a torch function makes in the thread that entered it.

    It compares version counters around each call, 3 µs an operation. Writes that do not count (through ``.data`` or
    NumPy, by hand-written kernels) are not seen, nor are those of scripted code and of autograd's own nodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._writes: deque[tuple[int, int, str]] = deque(maxlen=_LIMIT)

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = [(tensor, tensor._version) for tensor in _tensors((args, kwargs))]
        result = func(*args, **kwargs)
        for tensor, version in before:
            if tensor._version != version:
                name = getattr(func, "__name__", repr(func))
                note = (id(tensor.untyped_storage()), tensor._version, f"{name} at {program_line()}")
                self._writes.append(note)
        return result

    def begin(self) -> None:
        """Listen in this thread."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Listen no more."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def writers(self, storage: int, then: int, now: int) -> list[str]:
        """Operations that brought a storage from one version to another, and their lines."""
        seen = [what for identity, version, what in self._writes if identity == storage and then < version <= now]
        return list(dict.fromkeys(seen))


def program_line() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _TORCHS)):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        if not values.is_inference() and values.layout is torch.strided:
            yield values
    elif isinstance(values, Mapping):
        yield from _tensors(values.values())
    elif isinstance(values, Iterable) and not isinstance(values, (str, bytes)):
        for value in values:
            yield from _tensors(value)
