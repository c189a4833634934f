"""The operations that torch carries out below autograd, and what their tensors are made of.

A :class:`OperationWatch` slows everything down and makes ``torch._foreach_*_`` forget to count versions, so it is only
for a single node that is run once more, never around training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from retrograd.hooks.engine import current_graph_task, current_node, is_transformed
from retrograd.hooks.nodes import is_leaf

CarryOut = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes an operation with its arguments, carries it out, and returns its result."""


_LAZY = tuple(getattr(torch._C.DispatchKey, name) for name in ("Conjugate", "Negative", "ZeroTensor"))
"""Tensors that torch reads with another sign, or as zeros, without having written them so."""


class OperationWatch(TorchDispatchMode):
    """While it is entered, every operation below autograd is handed to ``carry_out`` instead of being carried out.

    Args:
        carry_out: inside of it operations are no longer watched.
    """

    supports_higher_order_operators = True  # so that they come to us too, who can say what is wrong with them

    def __init__(self, carry_out: CarryOut) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._carry_out = carry_out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with ExitStack() as stack:
            for key in _LAZY:  # else copies of conjugated tensors come out wrong
                stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
            return self._carry_out(func, args, kwargs or {})


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
    """Whether this is an operation with a schema, not one that takes functions as arguments."""
    return isinstance(function, OpOverload)


def entry_of(function: Any) -> Any:
    """What carries out an operation when it is called, with one Python frame less where torch only passes it on."""
    return function._op if type(function) is OpOverload else function


def find_operation(name: str) -> Any:
    """The operation of a name as in ``"aten::add.Tensor"``; None where this process has none."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except (AttributeError, RuntimeError):
        return None
    return found if is_operation(found) else None


def is_random(operation: Any) -> bool:
    """Whether an operation draws from torch's default generator."""
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
    node = current_node() if current_graph_task() != -1 else None
    return node if node is not None and is_leaf(node) else None


def why_opaque(tensor: Tensor) -> str | None:
    """Why the memory of a tensor cannot be read as it is; None for a tensor where it can."""
    kind = type(tensor)
    if is_transformed(tensor):
        return "it is seen inside a torch.func transform"
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
    """Tells apart the memories of tensors that are alive: views of one another have the same."""
    return int(tensor.untyped_storage()._cdata)


def is_zero_symbol(tensor: Tensor) -> bool:
    """Whether a tensor has no memory because all of it is zero."""
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


def check_sparse(tensor: Tensor) -> None:
    """Check that the indices of a sparse tensor lie inside of it: operations take that for granted.

    Raises:
        RuntimeError: they do not.
    """
    if tensor.layout is torch.sparse_coo:
        indices, values = sparse_parts(tensor)
        check_sparse_parts(indices, values, tensor.shape, tensor.is_coalesced())
    else:
        outer, inner, values = sparse_parts(tensor)
        torch._validate_sparse_compressed_tensor_args(outer, inner, values, tensor.shape, tensor.layout)


def check_sparse_parts(indices: Tensor, values: Tensor, shape: Sequence[int], is_coalesced: bool | None) -> None:
    """Check that indices and values make a sparse tensor of this shape.

    Raises:
        RuntimeError: they do not.
    """
    torch._validate_sparse_coo_tensor_args(indices, values, list(shape), is_coalesced)


def negated(tensor: Tensor) -> Tensor:
    """A view that is read with the opposite sign."""
    return torch._neg_view(tensor)


def set_version(tensor: Tensor, version: int) -> None:
    """Set how often the memory of a tensor counts as written to, for it and all its views."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def attributes_of(node: Any) -> dict[str, Any]:
    """What a Python Function has put on its context, besides saved tensors."""
    return dict(getattr(node, "__dict__", {}))
