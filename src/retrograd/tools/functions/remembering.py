"""The memory of a Function: saved with the model, moved with it, and the same for all threads.

A forward may read what its Function has remembered. When a checkpointed part of a model is computed again, calls and
backward passes that came since have added to that; the part must compute what it computed before, so its Functions
find the memory that they found then.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.core.errors import FunctionError
from retrograd.core.hooks.checkpoints import CallsOfParts, parts_running
from retrograd.core.hooks.engine import is_tracing, is_transformed
from retrograd.rewriting.memory.memory import Memory


class _ThreadMemories(threading.local):
    """Memories that stand for others in one thread.

    Attributes:
        recalled: what stands for the memory of a Function, by its identity.
        remembers_nothing: memories are left as they are.
    """

    def __init__(self) -> None:
        self.recalled: dict[int, Memory] = {}
        self.remembers_nothing = False


_calls: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Function → what it remembered at each of its calls in checkpointed parts."""

_here = _ThreadMemories()


def note_memory(function: object, memory: Memory) -> None:
    """A call begins that was not there before; it may be in parts that are computed again later."""
    if parts_running():
        _calls.setdefault(function, CallsOfParts[Mapping[str, Any]]()).add(memory.snapshot())


def recalled_memory(function: object) -> Memory | None:
    """The memory that stands for a Function's own in this thread now."""
    return _here.recalled.get(id(function)) if _here.recalled else None


@contextmanager
def recalling(function: object, memory: Memory, part: Any) -> Iterator[None]:
    """In the block, which is a call of that part, the Function has the memory of then; what it adds is lost."""
    recalled = Memory()
    calls = _calls.get(function)
    snapshot = calls.find_next(part) if calls is not None else None
    recalled.restore(snapshot if snapshot is not None else memory.snapshot())
    earlier = _here.recalled
    _here.recalled = {**earlier, id(function): recalled}
    try:
        yield
    finally:
        _here.recalled = earlier


_KIND = "/last"
"""How a memory marks the names of last tensors."""

_STATE = "_extra_state"
"""The key of a module's own state in a state_dict."""

_lock = threading.RLock()
"""One for all memories, so that each can be copied and pickled. It is held for as long as a tuple is made."""


class Remembered:
    """The last tensors that were remembered, by name: a tuple, oldest first, detached; empty when there are none."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __getitem__(self, name: str) -> tuple[Tensor, ...]:
        return self._memory.last(name, sys.maxsize)[:]

    def __contains__(self, name: object) -> bool:
        return f"{name}{_KIND}" in self._memory

    def __iter__(self) -> Iterator[str]:
        with _lock:
            kept = self._memory.snapshot()
        return (name.removesuffix(_KIND) for name in kept if name.endswith(_KIND))

    def __repr__(self) -> str:
        return f"Remembered({', '.join(f'{name}: {len(self[name])}' for name in self)})"


class Remembering(nn.Module):
    """A module with a memory, which is part of its ``state_dict`` as soon as there is something in it.

    Attributes:
        memory: numbers, averages and windows by name; see :class:`~retrograd.rewriting.memory.memory.Memory`. Threads
            that use it at the same time need a lock of their own around it; ``remember`` has one.
    """

    _memory: Memory

    def __new__(cls, *_args: Any, **_options: Any) -> Self:
        made = super().__new__(cls)
        nn.Module.__init__(made)  # so that an __init__ which forgets to call it does no harm
        made._memory = Memory()
        return made

    @property
    def memory(self) -> Memory:
        """The memory; in a forward that is computed again, what was remembered when it first ran."""
        return recalled_memory(self) or self._memory

    def remember(self, name: str, value: Tensor, last: int = 8) -> None:
        """Put a copy of a tensor by, detached. ``self.remembered[name]`` has it.

        A copy, because autograd may hand the same memory on to the ``.grad`` of a parameter, to which later passes
        add. In a part of the model that is checkpointed, ``forward`` runs twice, and is only remembered once. While
        ``torch.export`` traces, nothing is: its tensors have no values.

        Args:
            name: any text.
            value: of any shape, which may change from call to call.
            last: how many tensors to keep under this name; the oldest goes.

        Raises:
            FunctionError: ``value`` is not a tensor, or is inside of a transform of ``torch.func``.
        """
        if not isinstance(value, Tensor):
            raise FunctionError(
                f"{type(self).__name__} is to remember {value!r} as {name!r}, which is not a tensor.",
                repair="keep numbers by `self.memory.put(name, value)`.",
            )
        if _here.remembers_nothing or is_tracing():
            return
        if is_transformed(value):
            raise FunctionError(
                f"{type(self).__name__} is to remember {name!r} inside of torch.func.vmap or torch.func.grad.",
                repair="return it as an output, rg.Auxiliary(value), and keep that after the transform.",
                reason="there a tensor stands for many or for a level of differentiation, and is void afterwards.",
            )
        copy = value.detach().clone()
        with _lock:
            self.memory.last(name, last).add_own(copy)

    @property
    def remembered(self) -> Remembered:
        """The last tensors that were remembered, by name."""
        return Remembered(self.memory)

    def get_extra_state(self) -> dict[str, Any]:
        """The contents of the memory, for the ``state_dict``. A subclass may add to it."""
        with _lock:
            return self.memory.state_dict()

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take the memory of a ``state_dict``; what was remembered before is dropped."""
        with _lock:
            self.memory.load_state_dict(state)
        held = next(self.parameters(), None)
        if held is not None:
            self._move_memory(lambda _: held.device)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # torch's own place for this; an empty memory leaves no key that another model would miss
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = destination.get(prefix + _STATE)
        if isinstance(state, dict) and not state:
            del destination[prefix + _STATE]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        *others: Any,
    ) -> None:
        # a state without memory is that of an empty one; only where there is something to lose is it missed
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *others)
        plain = type(self).get_extra_state is Remembering.get_extra_state
        if plain and not self.memory.snapshot() and prefix + _STATE in missing_keys:
            missing_keys.remove(prefix + _STATE)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # what was remembered is a record: it follows to another device, and keeps its dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._move_memory(lambda tensor: fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).device)
        return self

    def _move_memory(self, device_of: Callable[[Tensor], torch.device]) -> None:
        def moved(kept: Any) -> Any:
            if isinstance(kept, tuple):
                return tuple(map(moved, kept))
            return kept.to(device_of(kept)) if isinstance(kept, Tensor) else kept

        with _lock:
            self.memory.restore({name: moved(kept) for name, kept in self.memory.snapshot().items()})


@contextmanager
def remembering_nothing() -> Iterator[None]:
    """Remember nothing in this thread, for as long as the block runs."""
    before, _here.remembers_nothing = _here.remembers_nothing, True
    try:
        yield
    finally:
        _here.remembers_nothing = before
