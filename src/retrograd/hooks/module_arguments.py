"""Which memory was handed to modules without having been made by a recorded operation: inputs of the model."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from retrograd.hooks.compiled import compiled_call_listeners, keep_compiled_modules_quiet
from retrograd.hooks.engine import is_compiling, is_transformed, uncompiled
from retrograd.hooks.module import set_before_all
from retrograd.hooks.saved_reading import hold_key, key_of, storages_of, tensors_in
from retrograd.hooks.tables import Entry


class ModuleArguments:
    """Notes the memory of arguments that have no graph, of every module called between ``start`` and ``stop``.

    Attributes:
        at_next_call: called once, before the next module is.
    """

    def __init__(self) -> None:
        self._held: dict[int, object] = {}
        self._undo: list[Callable[[], None]] = []
        self._entry: Entry | None = None
        self.at_next_call: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin to listen."""
        self._register()
        compiled_call_listeners.add(self)
        self._undo.append(lambda: compiled_call_listeners.remove(self))

    def stop(self) -> None:
        """Listen no more. What was noted stays."""
        while self._undo:
            self._undo.pop()()
        self._remove()
        self.at_next_call = None

    def note(self, value: Any) -> None:
        """Note the memory of a tensor, or of those in tuples, lists and dicts, no deeper than two levels."""
        for _, tensor in tensors_in(value, ""):
            if tensor.grad_fn is None and not isinstance(tensor, nn.Parameter) and not is_transformed(tensor):
                for storage, _ in storages_of(tensor):
                    key = key_of(storage)
                    if key not in self._held:
                        self._held[key] = hold_key(storage)

    def has(self, tensor: Tensor) -> bool:
        """Whether a module was handed this tensor, or one in the same memory."""
        return any(key_of(storage) in self._held for storage, _ in storages_of(tensor))

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def _register(self) -> None:
        self._entry = set_before_all(self._see)
        self._undo_quiet = keep_compiled_modules_quiet(self._entry.number)

    def _remove(self) -> None:
        if self._entry is not None:
            self._entry.remove()
            self._undo_quiet()
            self._entry = None

    @uncompiled
    def _see(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if is_compiling():
            return
        callback, self.at_next_call = self.at_next_call, None
        if callback is not None:
            callback()
        self.note(args)

    @uncompiled
    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        """Compiled code begins: torch would take the hook for a part of it."""
        self._remove()

    @uncompiled
    def compiled_call_ends(self) -> None:
        """It has ended."""
        if self._undo and self._entry is None:
            self._register()
