"""Torch's own non-reentrant checkpoint, around a call whose beginning and end are known from hooks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from retrograd.hooks.saved import is_plain, push_pair, remove_pair, top_pair, version_of, witness_version

Versions = tuple[int, int]
"""How often something had been written to in the forward, and now."""


class Guard(Protocol):
    """Sees to it that the second run of a forward is like the first, and raises where it is not."""

    def end_first(self) -> None:
        """The first run is over, or has raised."""

    def second_run(self) -> AbstractContextManager[None]:
        """What the second run, and another one of a retained graph, is made in."""

    def take_sample(self, tensor: Tensor) -> Any:
        """What is to be kept of a tensor that the first run saves; None if it is not to be compared."""

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
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], guard: Guard, *, is_whole: bool = False
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

    def __init__(self, guard: Guard) -> None:
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

    def __init__(self, module: nn.Module, guard: Guard) -> None:
        self._module = module
        self._guard = guard
        self._stack = ExitStack()
        self._parameters = [(parameter, version_of(parameter)) for parameter in module.parameters()]
        self._before: list[tuple[nn.Module, str, Tensor | None, Tensor | None]] = []

    def end_first(self) -> None:
        """What the forward itself writes to may change again: an embedding with ``max_norm`` does."""
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
