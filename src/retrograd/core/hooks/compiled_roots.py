"""What a compiled module returns and its own graph uses further: the gradient from within never reaches its boundary.

Torch calls the hooks of a module whose forward it compiles outside of the graph. So when the trace of such a forward
ends, those of its outputs that the graph itself uses get a tap in it, like those of modules within; the hook at the
boundary takes all others (an argument that is returned among them, whose gradients come together at the boundary).

The tap is found by a fixed key in the module's table of hooks, and nothing else of that table is guarded: like blocks
share a graph, and hooks come and go.

A rule at the boundary would change one part of such a gradient alone: ``compiled_parts.py``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from operator import attrgetter
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.hooks.compiled import ask_once, is_called_around, when_loaded
from retrograd.core.hooks.compiled_parts import uses_of
from retrograd.core.hooks.compiled_taps import BETWEEN, RETURNED, put_taps
from retrograd.core.hooks.engine import has_transform
from retrograd.core.hooks.listeners import TAP, TAP_OF_WRAPPER, Undo, replace
from retrograd.core.hooks.nested import flatten

_NAMES = {
    "torch._dynamo.variables": attrgetter("TensorVariable", "UserFunctionVariable", "CellVariable", "base"),
    "torch._dynamo.source": attrgetter("AttrSource", "DictGetItemSource"),
    "torch._dynamo.resume_execution": attrgetter("ContinueExecutionCache.generated_code_metadata"),
    "torch._dynamo.exc": attrgetter("Unsupported"),
}
"""What a tap there is made of: where one of these is missing, there is none."""


def _find_ends(room: ModuleType) -> Undo:
    """Have torch put these taps into the graph where the trace of a forward ends."""
    owner: Any = vars(room)["InstructionTranslator"]
    original, has_names = owner._return, ask_once(_NAMES)

    @functools.wraps(original)
    def end_trace(self: Any, instruction: Any) -> Any:
        if instruction.opname == "RETURN_VALUE" and not self.export and not has_transform() and has_names():
            _put_taps(self)
        return original(self, instruction)

    return replace(owner, "_return", end_trace)


def tap_roots() -> Undo:
    """Have outputs that are used within tapped; returns what takes that back."""
    return when_loaded("torch._dynamo.symbolic_convert", _find_ends)


def _put_taps(translator: Any) -> None:
    module, source = _find_returning(translator)
    if module is None or source is None:
        return
    variables, sources = sys.modules["torch._dynamo.variables"], sys.modules["torch._dynamo.source"]
    hooks = module._forward_hooks
    if is_called_around(module):
        hooks, source = module._compiled_call_impl._forward_hooks, sources.AttrSource(source, "_compiled_call_impl")  # type: ignore[union-attr]
    numbers = [number for number in (TAP, TAP_OF_WRAPPER) if number in hooks]
    used = _find_used(translator, translator.stack[-1]) if numbers else None
    if not used:
        return
    table = sources.AttrSource(source, "_forward_hooks")
    for number in numbers:
        hook: Any = hooks[number]
        found = sources.AttrSource(sources.DictGetItemSource(table, number), "handle")
        handle = variables.base.VariableTracker.build(translator, hook.handle, source=found, realize=True)
        put_taps(translator.output.create_proxy, handle.as_proxy(), used, torch.is_grad_enabled())


def _find_returning(translator: Any) -> tuple[nn.Module | None, Any]:
    """The module whose forward is traced, or what is left of it behind a break of the graph; and how that finds it."""
    code = _code_of(translator)
    name = code.co_varnames[0] if code.co_argcount else ""
    module, variable = translator.f_locals.get(name), translator.symbolic_locals.get(name)
    if not isinstance(module, nn.Module) or not _is_forward_of(code, module):
        return None, None
    if isinstance(variable, sys.modules["torch._dynamo.variables"].CellVariable):
        variable = translator.output.side_effects.load_cell(variable)
    return module, getattr(variable, "source", None)


def _code_of(translator: Any) -> CodeType:
    """The code that is traced, whole where the graph has broken."""
    cache: Any = sys.modules["torch._dynamo.resume_execution"]
    whole = cache.ContinueExecutionCache.generated_code_metadata.get(translator.f_code)
    code: CodeType = translator.f_code if whole is None else whole.code
    return code


def _is_forward_of(code: CodeType, module: nn.Module) -> bool:
    forward = inspect.getattr_static(type(module), "forward", None)
    own = vars(module).get("forward")
    if own is not None and getattr(getattr(own, "_torchdynamo_orig_callable", None), "__func__", None) is not forward:
        return False
    return getattr(forward, "__code__", None) is code


def _find_used(translator: Any, output: Any) -> dict[str, Any]:
    """Of what is returned, the tensors that were made in this graph and are used in it, by their names."""
    variables = sys.modules["torch._dynamo.variables"]
    output = output.realize() if hasattr(output, "realize") else output
    if isinstance(output, variables.TensorVariable):
        found = [(RETURNED, output)]
    else:
        try:
            listed = variables.UserFunctionVariable(_list_tensors).call_function(translator, [output], {})
        except sys.modules["torch._dynamo.exc"].Unsupported:
            return {}
        found = [(name.as_python_constant(), tensor) for name, tensor in (pair.items for pair in listed.items)]
    return {name: tensor.as_proxy() for name, tensor in found if _is_used(tensor)}


def _list_tensors(value: Any) -> list[tuple[str, Tensor]]:
    return [(RETURNED + BETWEEN.join(keys), tensor) for keys, tensor in flatten(value, ())]


def _is_used(tensor: Any) -> bool:
    node = tensor.as_proxy().node
    is_made_here = node.op.startswith("call") and tensor.python_type() is Tensor
    return is_made_here and any(True for _ in uses_of(node))
