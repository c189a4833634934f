"""Arguments of modules inside compiled code: a pair of operations around each call, which eager hooks stand for.

``retrograd::enter`` hands what a module is called with to its tap, as ``retrograd::tap`` does with what it returns.
``retrograd::leave`` finds the gradients of the arguments through this module alone. When the graph is traced with its
backward there is an autograd graph, the same as in eager code, so the same search is made in it, and the parts of a
gradient are added by operations of the graph: what runs afterwards is one ``see_gradient`` an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from retrograd.compiled.operations import define, implement, is_rehearsed
from retrograd.compiled.taps import hand_gradient, put_tap_call
from retrograd.compiled.wrappers import BETWEEN
from retrograd.core.hooks.compiled import compiled_call_listeners
from retrograd.core.hooks.engine import at_end_of_backward, is_transformed, next_sequence_number, uncompiled
from retrograd.core.hooks.gradients import InputGradient, edge_of, hook_input_gradients
from retrograd.core.hooks.in_graphs import is_left_alone
from retrograd.core.hooks.listeners import Undo
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.reach import DeepGraphGuard


def trace_entry(handle: Tensor, arguments: Any) -> None:
    """Put into the graph that is being traced that a module is called with these, by their names."""
    if is_left_alone():
        return
    found = list(flatten(arguments, ()))
    names = [BETWEEN.join(keys) for keys, _ in found]
    _ENTER([tensor for _, tensor in found], handle, names, torch.is_grad_enabled())


def trace_exit(handle: Tensor, output: Any) -> None:
    """Put into the graph that is being traced that the call returns this."""
    if not is_left_alone():
        _LEAVE([tensor for _, tensor in flatten(output, ())], handle)


def put_entry(create: Callable[..., Any], handle: Any, tensors: dict[str, Any], trains: bool) -> None:
    """Put it there without tracing that: ``create`` makes a node of a tracer's."""
    create("call_function", _ENTER, (list(tensors.values()), handle, list(tensors), trains), {})


def put_exit(create: Callable[..., Any], handle: Any, output: Any, trains: bool) -> None:
    """Put it there without tracing that."""
    create("call_function", _LEAVE, ([output], handle), {})


_ENTER = define("enter", "(Tensor[] tensors, Tensor handle, str[] names, bool trains) -> ()")
_LEAVE = define("leave", "(Tensor[] outputs, Tensor handle) -> ()")


class _TracedGradient(InputGradient):
    """Adds the parts of a gradient while a backward is traced; those of branches that it does not have never come."""

    __slots__ = ()

    @uncompiled
    def add(self, part: Tensor | None) -> None:
        if not self.unfinished:
            at_end_of_backward(self._end)
        super().add(part)

    @uncompiled
    def _end(self) -> None:
        if self.unfinished:
            self.finish()


@dataclass(frozen=True, slots=True)
class _Entered:
    """A call that has begun, where a graph is traced with its backward or run by torch's own operations.

    Attributes:
        handle: of its tap.
        first_number: sequence number of the first node that it could make.
        gradients: of its arguments.
    """

    handle: Tensor
    first_number: int
    gradients: list[InputGradient]


class _Here(threading.local):
    """The calls that this thread is in; what a compiled call that raises leaves of them goes when it ends."""

    def __init__(self) -> None:
        self.entered: list[_Entered] = []

    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        pass

    def compiled_call_ends(self) -> None:
        self.entered.clear()


_here = _Here()


def forget_failed_calls() -> Undo:
    """Have nothing left of calls that raise while they are traced, from now on."""
    compiled_call_listeners.add(_here)
    return partial(compiled_call_listeners.remove, _here)


@uncompiled
def _enter(tensors: Sequence[Tensor], handle: Tensor, names: Sequence[str], trains: bool) -> None:
    """What ``retrograd::enter`` is made of, wherever a graph with it is traced or run."""
    if is_rehearsed([handle]):
        return
    gradients: list[InputGradient] = []
    if not any(map(is_transformed, tensors)):
        run, first = put_tap_call(tensors, handle, names, trains)
        for number, tensor in enumerate(tensors, first):
            found = edge_of(tensor) if trains else None
            if found is not None:
                gradients.append(_TracedGradient(partial(hand_gradient, run=run, number=number), *found))
    _here.entered.append(_Entered(handle, next_sequence_number(), gradients))


@uncompiled
def _leave(outputs: Sequence[Tensor], handle: Tensor) -> None:
    """What ``retrograd::leave`` is made of."""
    if is_rehearsed([handle]):
        return
    while _here.entered:  # calls further in have raised
        entered = _here.entered.pop()
        if entered.handle is handle:
            ends = [tensor for tensor in outputs if tensor.requires_grad]
            hook_input_gradients(entered.gradients, ends, entered.first_number, DeepGraphGuard(), [])
            return


implement(_ENTER, _enter)
implement(_LEAVE, _leave)
