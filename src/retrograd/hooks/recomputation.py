"""Torch's own non-reentrant checkpoint, around a call whose beginning and end are known from hooks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

from torch import Tensor, nn
from torch.utils import checkpoint

_generate: Any = checkpoint._checkpoint_without_reentrant_generator
_OPTIONS: dict[str, Any] = {
    "preserve_rng_state": True,
    "context_fn": None,
    "determinism_check": "default",
    "debug": False,
    "early_stop": True,
}
_NAMES = [name for name in inspect.signature(_generate).parameters if name in _OPTIONS]


class Recomputation:
    """A call of a module whose saved tensors are dropped, and computed again by another call in the backward pass.

    Made before the forward; :meth:`end` is called after it, also when it raised.
    """

    __slots__ = ("_running",)

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def contexts() -> tuple[Any, Any]:
            return nullcontext(), _UnchangedBuffers(module)

        options = [contexts if name == "context_fn" else _OPTIONS[name] for name in _NAMES]  # others in other versions
        self._running: Iterator[None] = _generate(module, *options, *args, **kwargs)
        next(self._running)

    def end(self) -> None:
        """The forward is over, or has raised."""
        with suppress(StopIteration):
            next(self._running)


class _UnchangedBuffers:
    """Buffers are afterwards what they were before: running statistics count each batch once.

    A context manager that can be entered again, since a retained graph is run several times.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: list[tuple[nn.Module, str, Tensor | None, Tensor | None]] = []

    def __enter__(self) -> None:
        self._before = [
            (part, name, buffer, None if buffer is None else buffer.detach().clone())
            for part in self._module.modules()
            for name, buffer in part._buffers.items()
        ]

    def __exit__(self, *_: object) -> None:
        for part, name, buffer, value in self._before:
            part._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.data.copy_(value)  # no new version: what was saved of a buffer has not changed
        self._before = []
