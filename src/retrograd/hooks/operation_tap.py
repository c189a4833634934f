"""Every operation that a thread carries out below autograd and autocast, while it trains.

What is seen changes nothing: torch.compile goes on compiling, versions are counted, and tensors that torch reads with
another sign, or as zeros, without having written them so, are read as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.hooks.dispatch import is_operation
from retrograd.hooks.engine import dispatch_modes, is_tracing, uncompiled

CarryOut = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_CONJUGATE = torch._C.DispatchKey.Conjugate
_AS_EVER = (_CONJUGATE, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor)
_COUNTING = (*_AS_EVER, torch._C.DispatchKey.ADInplaceOrView)
_COMPILED_CALL = "_TorchDynamoContext.__call__.<locals>.compile_wrapper"
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


class OperationTap(TorchDispatchMode):
    """Hands every operation of the thread that it is put on to ``carry_out``, which carries it out.

    Args:
        carry_out: given an operation with its arguments; returns its result.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether torch.compile does as if it were not there; else it would compile nothing."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps the method below, which loads the compiler when it is first called: seconds."""
        return False

    def __init__(self, carry_out: CarryOut) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._carry_out = carry_out
        self._known: dict[int, tuple[Any, tuple[Any, ...]]] = {}  # by id, since torch hashes operations in Python

    @uncompiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = self._known.get(id(func))
        if known is None:  # what writes into lists leaves counting to the operations that it is made of
            known = self._known[id(func)] = func, _COUNTING if _writes_list(func) else _AS_EVER
        keys = known[1]
        if not _is_excluded(_CONJUGATE):  # called by torch's Python code, with everything as ever
            return self._carry_out(func, args, kwargs or {})
        for key in keys:  # the dispatcher has excluded them for as long as this runs
            _exclude(key, False)
        try:
            return self._carry_out(func, args, kwargs or {})
        finally:
            for key in keys:
                _exclude(key, True)

    def put_on(self) -> None:
        """Listen in this thread.

        Entering a mode as one does sets flags of the whole process, which threads that end in another order leave set.
        """
        if self._carry_out is not _carry_on or is_in_compiled_call():
            torch._C._push_on_torch_dispatch_stack(self)

    def end(self) -> None:
        """Hand nothing over any more, in whatever thread it is on; it goes with the next tensor that is saved there."""
        self._carry_out = _carry_on

    def take_off(self) -> None:
        """Listen no more; modes that were entered since stay."""
        above = []
        while torch._C._len_torch_dispatch_stack():
            mode = torch._C._pop_torch_dispatch_stack(None)
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            torch._C._push_on_torch_dispatch_stack(mode)


def is_in_compiled_call() -> bool:
    """Whether this thread is in a call of what torch.compile has compiled.

    When that is left torch sets back whether modes are asked at all. A tap that has been taken off meanwhile would
    leave a thread in which torch asks modes that are not there, and every operation fails.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_qualname != _COMPILED_CALL:
        frame = frame.f_back
    return frame is not None


def _carry_on(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def hide_taps() -> list[OperationTap]:
    """Take off the taps that are on top in this thread, for a moment: what is done is not the program's.

    Returns:
        Them, in the order in which they are to be put on again.
    """
    hidden: list[OperationTap] = []
    while (top := dispatch_modes() - 1) >= 0:
        tap = torch._C._get_dispatch_stack_at(top)
        if not isinstance(tap, OperationTap):
            break
        torch._C._pop_torch_dispatch_stack(None)
        hidden.insert(0, tap)
    return hidden


def carry_out_unseen(work: Callable[[], Tensor]) -> Tensor:
    """Do something that is not the program's: modes that are on are not told, unless they trace."""
    if not dispatch_modes() or is_tracing():
        return work()
    with torch._C._DisableTorchDispatch():
        return work()


def without_graph(tensor: Tensor) -> Tensor:
    """A tensor, to be held. Modes beneath the tap, which are the program's, do not see it."""
    if not dispatch_modes():
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def copy_values(tensor: Tensor) -> Tensor:
    """A copy that has no graph. Modes beneath the tap, which are the program's, do not see it."""
    with torch._C._DisableTorchDispatch():
        return tensor.detach().clone()


def _writes_list(operation: Any) -> bool:
    if not is_operation(operation):
        return False
    return any(
        argument.alias_info is not None and argument.alias_info.is_write and "List" in str(argument.type)
        for argument in operation._schema.arguments
    )
