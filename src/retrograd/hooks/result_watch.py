"""Every result of the forward, looked at for numbers that are not finite, and which operations these go back to.

It costs some five microseconds an operation, and waits for the device where that is not the CPU: it is for programs
that are run to be explained.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrograd.hooks.engine import (
    current_graph_task,
    dispatch_modes,
    is_tracing,
    is_transformed,
    next_sequence_number,
    uncompiled,
    uncompiled_itself,
    without_functions,
)
from retrograd.hooks.function_names import is_bare, name_function, tensors_of
from retrograd.hooks.module_calls import OUTSIDE
from retrograd.hooks.operation_tap import carry_out_unseen, without_graph
from retrograd.hooks.quiet_mode import QuietMode, lowest_place
from retrograd.hooks.thread_logs import user_frame

_first = itemgetter(0)

_MASKING = frozenset(
    {"masked_fill", "where", "full", "full_like", "new_full", "fill", "setitem", "tensor", "as_tensor", "from_numpy"}
)
"""Functions by which a program writes −inf, or inf, on purpose."""


class BornOperation(NamedTuple):
    """An operation that made numbers that are not finite. It holds its tensors: not to be kept.

    Attributes:
        name, args, kwargs, result: the operation.
        broken: an operand that was not finite when the program brought it: a parameter, an input.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    broken: Tensor | None


class ResultWatch(QuietMode):
    """Looks at results in the thread that starts it, but for those of a backward pass.

    Args:
        name_module: the path of a module, None where it has no name.
        see: told of each birth, while the operation's frame is on the stack; what it returns tells the birth.
        fault: told of an error of ours; nothing is looked at behind it.

    Attributes:
        newest: the birth that the newest scalar goes back to, of those that are not finite.
    """

    def __init__(
        self,
        name_module: Callable[[nn.Module], str | None],
        see: Callable[[BornOperation], Any],
        fault: Callable[[Exception], None],
    ) -> None:
        super().__init__()
        self._name_module = name_module
        self._lines: list[tuple[int, int, CodeType, int]] = []
        self._spans: list[list[Any]] = []
        self._open: list[list[Any]] = []
        self._see = see
        self._fault = fault
        self._is_broken = False
        self.newest: Any = None
        self._births: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        """Identity of a tensor that is not finite → the birth that it goes back to; None where that was on purpose."""

    def begin(self) -> None:
        """Look from now on."""
        if not self.is_started:
            self.start(lowest_place())

    def forget(self) -> None:
        """Forget everything: the graph is done with."""
        self.newest = None
        self._births.clear()
        self._lines.clear()
        self._spans.clear()
        self._open.clear()

    def end(self) -> None:
        """Look no more."""
        self.stop()
        self.forget()

    def birth_of(self, tensor: Tensor) -> Any:
        """What a tensor goes back to that is not finite; None where nothing is known."""
        known = self._births.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def place_of(self, number: int) -> tuple[str, str]:
        """Line and module of the operation that made the node with this number; empty where that is not known."""
        index = bisect_right(self._lines, number, key=_first) - 1
        line = ""
        if index >= 0 and number < self._lines[index][1]:
            _, _, code, offset = self._lines[index]
            found = next(itertools.islice(code.co_positions(), offset // 2, None), (None,))[0]
            line = f"{code.co_filename}:{found or code.co_firstlineno}"
        spans = [span for span in self._spans if span[0] <= number and (span[1] is None or number < span[1])]
        return line, spans[-1][2] if spans else ""

    @uncompiled_itself
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next_sequence_number()
        result = self.frames.call(sys._getframe(1), function, args, kwargs)
        if current_graph_task() == OUTSIDE and self.is_started and not self._is_broken:
            last = next_sequence_number()
            if last != first:
                frame = user_frame(sys._getframe(1))
                self._lines.append((first, last, frame.f_code, frame.f_lasti))
            self._look(function, args, kwargs or {}, result)
        return result

    @uncompiled
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        super()._before(module, args)
        path = self._name_module(module)
        if path is not None and current_graph_task() == OUTSIDE:
            self._open.append([next_sequence_number(), None, path, id(module)])
            self._spans.append(self._open[-1])

    @uncompiled
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        super()._after(module, args, output)
        while self._open and any(span[3] == id(module) for span in self._open):
            span = self._open.pop()  # one that was left by Ctrl-C ends with that around it
            span[1] = next_sequence_number()
            if span[3] == id(module):
                break

    @uncompiled
    def _look(self, function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        name = name_function(function)
        made = args[0] if name == "setitem" else result
        if not name or made is None:
            return
        try:
            with without_functions():
                if type(made) is Tensor:
                    if not is_fine(made):
                        self._trace(name, args, kwargs, result, [made])
                elif isinstance(made, tuple | list):
                    bad = [each for each in tensors_of(made, None) if not is_fine(each)]
                    if bad:
                        self._trace(name, args, kwargs, result, bad)
        except Exception as error:
            self._is_broken = True
            self._fault(error)

    def _trace(self, name: str, args: Any, kwargs: dict[str, Any], result: Any, made: list[Tensor]) -> None:
        """Find out what these go back to."""
        operands = [] if is_bare(name) else [each for each in tensors_of(args, kwargs) if not is_fine(each)]
        births = [self._births[id(each)] for each in operands if self._knows(each)]
        given = [each for each in operands if not self._knows(each)]
        carried = next((birth for _, birth in births if birth is not None), None)
        broken = next((each for each in given if each.isnan().any() or isinstance(each, torch.nn.Parameter)), None)
        is_meant = bool(operands) or name.rstrip("_") in _MASKING
        if carried is None and (broken is not None or not is_meant or any(bool(each.isnan().any()) for each in made)):
            carried = self._see(BornOperation(name, args, kwargs, result, broken))
        for each in made:
            if carried is not None and each.ndim == 0:
                self.newest = carried
            self._births[id(each)] = weakref.ref(each), carried
            base = each._base if each._is_view() else None
            if base is not None and (name.endswith("_") or name == "setitem"):
                self._births[id(base)] = weakref.ref(base), carried

    def _knows(self, tensor: Tensor) -> bool:
        known = self._births.get(id(tensor))
        return known is not None and known[0]() is tensor


def is_fine(tensor: Tensor) -> bool:
    """Whether all elements are finite; true of what has none to be read."""
    if not tensor.is_floating_point() or is_transformed(tensor) or is_tracing():
        return True
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta or _is_traced():
        return True
    if dispatch_modes():
        return bool(carry_out_unseen(lambda: without_graph(tensor).isfinite().all()))
    if tensor.numel() == 1:
        return math.isfinite(tensor.item())
    values = tensor.detach()
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())


_PLAIN = (Tensor, torch.nn.Parameter)


def _is_traced() -> bool:
    return torch._C._get_tracing_state() is not None
