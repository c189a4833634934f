"""Hooks that read what modules take and return while one forward runs, and end it once all of that has been seen."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as module_hooks

from retrograd.core.hooks.engine import current_graph_task, grad_enabled, is_compiling, uncompiled
from retrograd.core.hooks.listeners import Hook, hidden_hooks
from retrograd.core.hooks.module import set_after, set_before
from retrograd.core.hooks.names import ArgumentNames
from retrograd.core.hooks.parts import modules_of
from retrograd.core.hooks.saved import top_pair


@dataclass(frozen=True, slots=True)
class Reading:
    """A request to read the calls of one module.

    Attributes:
        tapped: the module that gets the hooks.
        module: the module whose arguments have the names; another one where ``tapped`` is a wrapper.
        see_arguments: notified of the arguments of each call, by their names, before the module can overwrite them.
        see_output: notified of what each call returns.
    """

    tapped: nn.Module
    module: nn.Module
    see_arguments: Callable[[dict[str, Any]], None] | None = None
    see_output: Callable[[Any], None] | None = None


@contextlib.contextmanager
def read_calls(readings: Iterable[Reading]) -> Iterator[None]:
    """Read while the block runs, behind all hooks that are there: calls of this thread that are no recomputation."""
    entries = []
    here = _OnePlace()
    hidden_hooks.hold()
    try:
        for each in readings:
            if each.see_arguments is not None:
                before = _BeforeRead(each.module, each.see_arguments, here)
                entries.append(set_before(each.tapped, before))
            if each.see_output is not None:
                entries.append(set_after(each.tapped, _AfterRead(each.see_output, here)))
        yield
    finally:
        for entry in entries:
            entry.remove()
        hidden_hooks.release()


class _OnePlace:
    """The thread and the backward pass, if any, in which the forward was begun."""

    __slots__ = ("_task", "_thread")

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._task = current_graph_task()

    @uncompiled
    def is_here(self) -> bool:
        return threading.get_ident() == self._thread and current_graph_task() == self._task


class _BeforeRead(Hook):
    __slots__ = ("_here", "_names", "_see")

    def __init__(self, module: nn.Module, see: Callable[[dict[str, Any]], None], here: _OnePlace) -> None:
        self._names = ArgumentNames(module)
        self._see = see
        self._here = here

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling() or not self._here.is_here():
            return
        self._see(self._names.bind(args, kwargs))


class _AfterRead(Hook):
    __slots__ = ("_here", "_see")

    def __init__(self, see: Callable[[Any], None], here: _OnePlace) -> None:
        self._see = see
        self._here = here

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not is_compiling() and self._here.is_here():
            self._see(output)


_TIDY_UP = frozenset({"FullyShardedDataParallel", "FSDPModule", "DistributedDataParallel"})
"""Wrappers that put something in order after the forward that they wrap."""

_OFFLOADED = "_hf_hook"
"""Attribute of the modules whose ``forward`` accelerate has wrapped, to bring weights in before it and out after it."""


class ForwardEnded(BaseException):
    """Ends a forward from a hook within it, and is caught by whoever began that forward.

    It is not an ``Exception``: nothing has failed, and code that handles failures need not know of it.
    """

    def __init__(self, early_exit: EarlyExit) -> None:
        self.early_exit = early_exit
        super().__init__("the forward is ended: all that was asked of it has been seen")


class EarlyExit:
    """An early exit from one forward, for its hooks; to be made right before that forward.

    The exit is closed where somebody would miss the end of the forward (see :func:`can_end_early`).
    """

    def __init__(self, model: nn.Module, *, wanted: bool = True) -> None:
        self._is_open = wanted and can_end_early(model)
        self._saving = top_pair()

    def take(self) -> None:
        """End the forward, if the exit is open.

        The exit is closed where tensors are saved by hooks that this forward has set: a checkpointed part that never
        ended cannot be computed again.
        """
        if self._is_open and not (grad_enabled() and top_pair() != self._saving):
            raise ForwardEnded(self)

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the model, and come back when it returns or a hook takes this exit."""
        try:
            model(*args, **kwargs)
        except ForwardEnded as end:
            if end.early_exit is not self:  # it belongs to a forward around this one
                raise


def can_end_early(model: nn.Module) -> bool:
    """Return whether nobody misses the end of a forward of this model.

    Torch calls no forward hook of the modules that an early end passes through. So there must not be any; nor a
    wrapper that has to tidy up after each forward (FSDP, DDP inside of the model, accelerate's offloading).
    """
    return not module_hooks._global_forward_hooks and not any(map(_needs_its_end, modules_of(model)))


def _needs_its_end(module: nn.Module) -> bool:
    return (
        bool(module._forward_hooks)
        or _OFFLOADED in vars(module)
        or any(kind.__name__ in _TIDY_UP for kind in type(module).__mro__)
    )
