"""Torch's ``autograd.Function`` from within: what its ``apply`` comes down to, and the class of its nodes.

None of the names that are asked for here is public. Where one of them is missing, torch's own ``apply`` and its nodes
are left as they are: a Function then works as well, and is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from retrograd.core.hooks.engine import uncompiled

FunctionClass = Any
"""A subclass of ``torch.autograd.Function``."""

transforms_active: Callable[[], bool] | None = getattr(torch._C, "_are_functorch_transforms_active", None)
"""Return whether this thread is inside a ``torch.func`` transform."""

unwrap_if_dead: Callable[[Any], Any] | None = getattr(torch._C._functorch, "unwrap_if_dead", None)
"""The tensor itself; of one that a ``torch.func`` transform left behind, what it stood for."""

APPLY: CodeType | None = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
"""Code of the call of a Python Function, in whose forward no graph is made; from torch 2.15 on it has no frame."""


@lru_cache(maxsize=4096)
def begins_function(code: CodeType) -> bool:
    """Return whether a frame of this code is the outermost of a call of a Python Function, in which no graph is made.

    That is its ``forward`` where ``apply`` has no frame.
    """
    return code is APPLY or any(
        _code_of(vars(each).get("forward")) is code for each in _subclasses(torch.autograd.Function)
    )


def forwards_by_code() -> dict[CodeType, FunctionClass]:
    """The code of each forward that the process has by now, with its Function."""
    found = {}
    for each in _subclasses(torch.autograd.Function):
        code = _code_of(vars(each).get("forward"))
        if code is not None:
            found[code] = each
    return found


def _code_of(method: Any) -> CodeType | None:
    return getattr(getattr(method, "__func__", method), "__code__", None)


def _subclasses(owner: type) -> Iterator[type]:
    classes: list[type] = type.__subclasses__(owner)
    for each in classes:
        yield each
        yield from _subclasses(each)


_ASKS = frozenset(
    {"_is_setup_context_defined", "setup_context", "forward", "super", "__class__", "apply", "RuntimeError"}
    | {"torch", "_C", "_are_functorch_transforms_active", "custom_function_call"}
    | {"_functorch", "utils", "unwrap_dead_wrappers"}
)
"""What ``Function.apply`` uses, up to torch 2.14."""

_NODE_ASKS = frozenset(
    {"_forward_cls", "backward", "vjp", "Function", "RuntimeError", "_get_user_fn", "getattr", "list"}
)
"""What the ``apply`` of a node uses: it asks which method of the Function there is, and whether it takes a list."""

_all_need_gradients: Any = getattr(torch.autograd.Function, "needs_input_grad", None)

NODES_ARE_KNOWN = _all_need_gradients is not None and hasattr(torch.autograd.Function, "_backward_cls")
"""Whether :func:`refine_node` can refine the nodes of a Function."""


def inner_apply(function: FunctionClass) -> Callable[..., Any] | None:
    """What is left of ``function.apply`` outside of transforms, given tensors that none left behind, and no keywords.

    None where ``apply`` is compiled as it is, or does more than is known here.
    """
    if not _uses_no_more(APPLY, _ASKS) or transforms_active is None or unwrap_if_dead is None:
        return None
    inner: Callable[..., Any] = super(torch.autograd.Function, function).apply
    return inner


def _uses_no_more(code: CodeType | None, known: frozenset[str]) -> bool:
    """Return whether all that a code asks for is known; of code that is not Python's, nothing is."""
    return code is not None and known.issuperset(code.co_names + code.co_freevars)


def refine_node(function: FunctionClass, methods: dict[str, Any]) -> None:
    """Have nodes of a Function hold the call that they are of, with attributes of ours.

    Nothing is done where nodes are not known: they are objects of Python, which take the attributes one by one.

    The engine finds ``backward`` where it looks for ``apply``, and calls it without asking which method there is; not
    where torch's ``apply`` does more than is known here.

    Args:
        function: it has a ``backward`` or none, and no ``vjp``.
        methods: what its nodes have beside it.
    """
    if not NODES_ARE_KNOWN:
        return
    kind = function._backward_cls
    body = {"__slots__": ("retrograd_call",), "__module__": kind.__module__, **methods}
    written = vars(function).get("backward")
    if written is not None and _uses_no_more(getattr(kind.apply, "__code__", None), _NODE_ASKS):
        body["apply"] = written.__func__
    function._backward_cls = type(kind.__name__, (kind,), body)


@uncompiled
def _without_last(node: Any) -> tuple[bool, ...]:
    needed: tuple[bool, ...] = _all_need_gradients.__get__(node)
    return needed[:-1]


@uncompiled
def _set_needed(node: Any, needed: tuple[bool, ...]) -> None:
    _all_need_gradients.__set__(node, (*needed, False))


needs_without_last = property(_without_last, _set_needed)
"""``needs_input_grad`` of a node whose Function takes one argument more than its user knows of."""
