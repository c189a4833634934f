"""The operations that torch carries out below autograd and autocast, and what their tensors are made of.

A tap changes nothing: torch.compile goes on compiling, versions are counted, and tensors that torch reads with another
sign, or as zeros, without having written them so, are read as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket, _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from retrograd.core.hooks.engine import (
    current_node,
    dispatch_modes,
    is_in_backward,
    is_tracing,
    is_transformed,
    uncompiled,
)
from retrograd.core.hooks.nodes import is_leaf

T = TypeVar("T")

CarryOut = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes an operation with its arguments, carries it out, and returns its result."""

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
        """Return whether torch.compile does as if it were not there; else it would compile nothing."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return whether torch wraps the method below, which loads the compiler when it is first called: seconds."""
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
    """Return whether this thread is in a call of what torch.compile has compiled.

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


def carry_out_unseen(work: Callable[[], T]) -> T:
    """Do something that is not the program's: modes that are on are not told, unless they trace."""
    if not dispatch_modes() or is_tracing():
        return work()
    with torch._C._DisableTorchDispatch():
        return work()


def read_unseen(tensor: Tensor, read: Callable[[Tensor], T]) -> T:
    """``read(tensor)``, of which modes that are on are not told; a tensor of another class answers for itself."""
    return carry_out_unseen(partial(read, tensor)) if type(tensor) in (Tensor, nn.Parameter) else read(tensor)


def without_graph(tensor: Tensor) -> Tensor:
    """A tensor, to be held. Modes beneath the tap, which are the program's, do not see it."""
    if not dispatch_modes():
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def _writes_list(operation: Any) -> bool:
    if not is_operation(operation):
        return False
    return any(
        argument.alias_info is not None and argument.alias_info.is_write and "List" in str(argument.type)
        for argument in operation._schema.arguments
    )


@contextmanager
def plain_torch() -> Iterator[None]:
    """Whatever the caller has switched on, operations are carried out as the engine does it: no modes, no graph."""
    has_modes = torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch()
    with _disable_current_modes() if has_modes else nullcontext(), torch._C._InferenceMode(False):
        torch._C._set_grad_enabled(False)  # the guard sets it back with all else
        yield


def _without_autocast() -> AbstractContextManager[object]:
    casting = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not casting:
        return nullcontext()
    stack = ExitStack()
    for device in casting:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


@contextmanager
def below_autograd() -> Iterator[None]:
    """Operations are carried out as if autograd had called them, so that a watched one does the same again."""
    with plain_torch(), _without_autocast(), torch._C._AutoDispatchBelowAutograd():
        yield


def is_operation(function: Any) -> bool:
    """Return whether this is an operation with a schema, not one that takes functions as arguments."""
    return isinstance(function, OpOverload)


def find_operation(name: str) -> Any:
    """The operation of a name as in ``"aten::add.Tensor"``; None where torch's dispatcher has none."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    found: Any = torch.ops
    for part, kind in ((namespace, ModuleType), (base, OpOverloadPacket), (overload or "default", OpOverload)):
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError):
            return None
        if not isinstance(found, kind):
            return None
    return found


def is_random(operation: Any) -> bool:
    """Return whether an operation draws from torch's default generator."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def written_arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes to."""
    declared = operation._schema.arguments
    by_name = dict(zip((argument.name for argument in declared), args, strict=False)) | dict(kwargs)
    for argument in declared:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in by_name:
            yield by_name[argument.name]


def leaf_being_added_to() -> Any:
    """The node of a leaf that an engine adds a gradient to at this moment, in this thread; None otherwise."""
    node = current_node() if is_in_backward() else None
    return node if node is not None and is_leaf(node) else None


def why_opaque(tensor: Tensor) -> str | None:
    """Why the memory of a tensor cannot be read as it is; None for a tensor where it can."""
    kind = type(tensor)
    if is_transformed(tensor):
        return "it is inside a torch.func transform"
    if torch._is_functional_tensor(tensor):
        return "it is seen while torch.compile or torch.export traces"
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"it is a {kind.__module__}.{kind.__qualname__}, a kind of tensor with rules of its own"
    if tensor.is_nested:
        return "it is a nested tensor"
    if tensor.is_quantized:
        return "it is quantized"
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return "its layout is known to oneDNN alone"
    return None


def memory_of(tensor: Tensor) -> int:
    """Identifies the memories of tensors that are alive: views of one another have the same."""
    return int(tensor.untyped_storage()._cdata)


def is_zero_symbol(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory because all of it is zero."""
    return tensor._is_zerotensor()


def make_zero_symbol(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """A tensor without memory, all of which is zero."""
    return torch._efficientzerotensor(list(shape), dtype=dtype, device=device)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Indices and values of a sparse tensor, the very tensors that it is made of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def negated(tensor: Tensor) -> Tensor:
    """A view that is read with the opposite sign."""
    return torch._neg_view(tensor)


def set_version(tensor: Tensor, version: int) -> None:
    """Set how often the memory of a tensor counts as written to, for it and all its views."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def attributes_of(node: Any) -> dict[str, Any]:
    """All that a Python Function has put on its context, besides saved tensors."""
    return dict(getattr(node, "__dict__", {}))
