"""Every result of the forward, looked at for numbers that are not finite, and which operations these go back to.

It costs some five microseconds an operation, and waits for the device where that is not the CPU: it is for programs
that are run to be explained.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.hooks.dispatch import carry_out_unseen, without_graph
from retrograd.hooks.engine import (
    dispatch_modes,
    is_tracing,
    is_transformed,
    without_functions,
)
from retrograd.hooks.function_names import is_bare, name_function, tensors_of

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


class ResultWatch:
    """Looks at results, and follows those that are not finite.

    Args:
        see: told of each birth, while the operation's frame is on the stack; what it returns tells the birth.
        search: what a tensor goes back to that is not finite, and was seen to be made by nobody; None if not known.

    Attributes:
        newest: the birth that the newest scalar goes back to, of those that are not finite.
    """

    def __init__(self, see: Callable[[BornOperation], Any], search: Callable[[Tensor], Any]) -> None:
        self._see = see
        self._search = search
        self.newest: Any = None
        self._births: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        """Identity of a tensor that is not finite → the birth that it goes back to; None where that was on purpose."""

    def forget(self) -> None:
        """Forget everything: the graph is done with."""
        self.newest = None
        self._births.clear()

    def birth_of(self, tensor: Tensor) -> Any:
        """What a tensor goes back to that is not finite; None where nothing is known."""
        known = self._births.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def look(self, function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> bool:
        """Look at a result; whether something is not finite, and not on purpose."""
        name = name_function(function)
        made = args[0] if name == "setitem" else result
        if not name or made is None:
            return False
        if type(made) is Tensor:
            bad = [] if is_fine(made) else [made]
        elif isinstance(made, tuple | list):
            bad = [each for each in tensors_of(made, None) if not is_fine(each)]
        else:
            bad = []
        return bool(bad) and self._trace(name, args, kwargs, result, bad)

    def _trace(self, name: str, args: Any, kwargs: dict[str, Any], result: Any, made: list[Tensor]) -> bool:
        """Find out what these go back to; whether that is a birth."""
        operands = [] if is_bare(name) else [each for each in tensors_of(args, kwargs) if not is_fine(each)]
        births = [self._births[id(each)] for each in operands if self._knows(each)]
        given = [each for each in operands if not self._knows(each)]
        carried = next((birth for _, birth in births if birth is not None), None)
        if carried is None:
            carried = next(filter(None, (self._search(each) for each in given if each.grad_fn is not None)), None)
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
        return carried is not None

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


def are_fine(tensors: list[Tensor]) -> bool:
    """Whether these are finite, by a norm of each; False where one may not be, and has to be looked at."""
    if not tensors or dispatch_modes() or _is_traced() or is_tracing():
        return not tensors
    with torch.no_grad(), without_functions():
        if not all(map(_has_norm, tensors)) or len({each.device for each in tensors}) > 1:
            return False
        return all(map(math.isfinite, torch.stack(torch._foreach_norm(tensors)).tolist()))


def _has_norm(tensor: Tensor) -> bool:
    is_plain = type(tensor) in _PLAIN and tensor.is_floating_point() and not is_transformed(tensor)
    return is_plain and tensor.layout is torch.strided and not tensor.is_meta


_PLAIN = (Tensor, torch.nn.Parameter)


def _is_traced() -> bool:
    return torch._C._get_tracing_state() is not None
