"""What rests on names of AOTAutograd's: operations of ours in the graph that it traces, without torch's dispatcher.

A call that is traced goes through a layer that removes writes, one that notes it in the graph and one that runs it
without values, each by way of the dispatcher; of our operations all that these find is known. What is written here is
the same node. Where a tensor is of a kind of its own, or torch has no such names, nothing is written, and the operation
is to be called. Tracing takes 5 to 9 % longer then: GPT-2-like net of two layers, and MLP of 50.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from retrograd.compiled.operations import proxy_mode
from retrograd.core.hooks.compiled import ask_once
from retrograd.core.hooks.private_names import OPTIONAL

_TRACING, _WRAPPING, _MODES = (
    "torch.fx.experimental.proxy_tensor",
    "torch._subclasses.functional_tensor",
    "torch.utils._mode_utils",
)
_has_names = ask_once(OPTIONAL["written calls"].names)


def node_of(tensor: Tensor) -> torch.fx.Node | None:
    """The node of the traced graph that stands for a tensor; None if that is not known."""
    mode = proxy_mode()
    if mode is None or not _has_names():
        return None
    with sys.modules[_WRAPPING].disable_functional_mode():
        found = _find_proxies(tensor, mode.tracer)
    return None if found is _UNKNOWN else found.node


def write_call(operation: Any, *args: Any) -> Any:
    """Write a call of an operation that changes nothing; returns its proxy, or None where it has to be called."""
    mode = proxy_mode()
    if mode is None or not _has_names() or type(mode.tracer) is not sys.modules[_TRACING].PythonKeyTracer:
        return None
    with sys.modules[_WRAPPING].disable_functional_mode():
        found = [_find_proxies(each, mode.tracer) for each in args]
    if any(each is _UNKNOWN for each in found):
        return None
    name = operation.overloadpacket.__name__
    proxy = mode.tracer.create_proxy("call_function", operation, tuple(found), {}, name=name)
    proxy.node.meta["original_aten"] = operation
    return proxy


_UNKNOWN: Any = object()


def _find_proxies(argument: Any, tracer: Any) -> Any:
    """An argument as the graph has it; ``_UNKNOWN`` if nobody knows."""
    if isinstance(argument, Tensor):
        inner = argument.from_functional() if type(argument) is FunctionalTensor else None
        find = sys.modules[_TRACING].get_proxy_slot
        slot = find(inner, tracer, None) if type(inner) is FakeTensor else None
        return _UNKNOWN if slot is None else slot.proxy
    if isinstance(argument, (list, tuple)):
        found = [_find_proxies(each, tracer) for each in argument]
        return _UNKNOWN if any(each is _UNKNOWN for each in found) else found
    return argument


def result_of(proxy: Any, like: Tensor, dtype: torch.dtype) -> Tensor:
    """What a call that was written returns: one element on the CPU.

    Args:
        proxy: of the call.
        like: one of the tensors that it was given.
        dtype: of the result.
    """
    tracing, wrapping, modes = (sys.modules[name] for name in (_TRACING, _WRAPPING, _MODES))
    with wrapping.disable_functional_mode():
        inner: Any = like.from_functional()  # type: ignore[attr-defined]
        with modes.no_dispatch():
            fake = FakeTensor(inner.fake_mode, torch.empty(1, dtype=dtype, device="meta"), torch.device("cpu"))
        with tracing.disable_proxy_modes_tracing():
            tracing.track_tensor_tree(fake, proxy, constant=None, tracer=proxy.tracer)
    result: Tensor = FunctionalTensor.to_functional(fake)
    return result
