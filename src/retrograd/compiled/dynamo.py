"""What rests on names of Dynamo's, the layer of torch.compile that traces Python.

Where a name is missing, torch does what is done here its own way: calls of modules with taps take longer to trace, a
like module that is not watched may run the same graph, and of what a compiled module returns and its own graph uses
only the part of the gradient is seen that comes to its boundary.

*Calls of modules with nothing but taps.* Torch traces ``nn.Module._call_impl`` line by line for each module with a
hook, which takes longer than most of its layers (a quarter of all tracing of a net with taps, and more); of a module
without any it traces the forward alone. While there are taps, so it does of a module that has nothing but taps, and
their operations are put into the graph directly. What is guarded is the same: how many hooks each table has, and of
which class each is. A module with any other hook, or with a call of its own, is left to torch. Torch does not guard
that a module of its own classes has no hook: a like module with a tap would run the same graph, and be seen no more. So
while there are taps that is guarded.

*What a compiled module returns and its own graph uses further.* The gradient from within never reaches its boundary. So
when the trace of a forward ends, those of its outputs that the graph itself uses get a tap in it, like those of modules
within; the hook at the boundary takes all others (an argument that is returned among them, whose gradients come
together at the boundary). The tap is found by a fixed key in the module's table of hooks, and nothing else of that
table is guarded: like blocks share a graph, and hooks come and go.

*What a graph uses of its outputs*, for rules: a rule at the boundary would change one part of such a gradient alone
(``parts.py``).
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from inspect import getattr_static
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from retrograd.compiled.handles import is_handle
from retrograd.compiled.inputs import put_entry, put_exit, trace_entry, trace_exit
from retrograd.compiled.parts import mark_outputs
from retrograd.compiled.taps import put_tap, put_taps, trace_tap
from retrograd.compiled.wrappers import BETWEEN, RETURNED
from retrograd.core.hooks.compiled import ask_once, do_nothing, is_called_around, when_loaded
from retrograd.core.hooks.engine import has_transform
from retrograd.core.hooks.in_graphs import READERS, TracedEntry, TracedHook, TracedTap
from retrograd.core.hooks.listeners import TAP, TAP_OF_WRAPPER, Undo, replace
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.private_names import OPTIONAL

_TAPS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "tap": (trace_tap, put_tap),
    "exit": (trace_exit, put_exit),
}
"""Of each operation of a hook after forwards, how it is traced, and put into a graph for a single tensor."""

_CALLS, _GUARDS = "torch._dynamo.variables.nn_module", "torch._dynamo.guards"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_MARKS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
_OF_ALL = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)


def has_taps_alone(module: nn.Module) -> bool:
    """Return whether the call of a module is torch's own, and nothing that is traced is among its hooks but taps."""
    kind = type(module)
    return (
        kind.__call__ is nn.Module.__call__
        and kind._call_impl is nn.Module._call_impl
        and any(isinstance(hook, TracedHook) for hook in module._forward_hooks.values())
        and all(isinstance(hook, READERS) for table in _HOOKS for hook in getattr(module, table).values())
        and not any(getattr(module, table) for table in _OF_BACKWARD)
        and not any(getattr(modules, table) for table in _OF_ALL)
        and "__call__" not in module.__dict__
        and "_call_impl" not in module.__dict__
        and "forward" not in module.__dict__
        and isinstance(getattr_static(module, "forward"), FunctionType)
    )


def _shorten_calls(room: ModuleType) -> Undo:
    """Have torch's stand-in for a module go past the search for hooks."""
    rooms: Any = room
    owner = rooms.UnspecializedNNModuleVariable
    original, has_names = owner.call_function, ask_once(OPTIONAL["short calls"].names)

    @functools.wraps(original)
    def call_function(self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        is_short = self.source is not None and has_taps_alone(self.value) and has_names()
        if is_short and not rooms.is_lazy_module(self.value) and _guards_tables(self, translator):
            return _trace_call(rooms, self, translator, args, kwargs)
        return original(self, translator, args, kwargs)

    return replace(owner, "call_function", call_function)


def _trace_call(room: Any, variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call: the forward, and each tap before and after it."""
    module = variable.value
    hooks = _find_hooks(room, variable, translator)
    room.guard_to_detect_forward_monkeypatching(variable.source, module)
    with room.record_nn_module_stack(str(id(module)), variable.get_nn_module_stack_source(), translator, module):
        for hook, handle in hooks:
            if isinstance(hook, TracedEntry):
                _trace_entry(room, translator, hook, handle, hook.names.bind(tuple(args), kwargs))
        output = variable.call_method(translator, "forward", args, kwargs)
        for hook, handle in hooks:
            if isinstance(hook, TracedTap):
                _trace_after(room, translator, hook, handle, output)
    return output


def _guards_tables(variable: Any, translator: Any) -> bool:
    """Guard how many hooks each table has; tells whether there are as many as before tracing began."""
    here = [(variable, variable.value, table) for table in (*_HOOKS, *_OF_BACKWARD, *_MARKS)]
    of_all = [(translator.nn_modules_globals_vt, modules, table) for table in _OF_ALL]
    return all(
        _read_length(each, translator, table) == len(getattr(owner, table)) for each, owner, table in here + of_all
    )


def _read_length(variable: Any, translator: Any, name: str) -> int:
    """Have the compiler read a table of hooks. From torch 2.15 on the method that does it has another name."""
    read: Callable[..., Any] = getattr(variable, "tp_getattro_impl", None) or variable.var_getattr
    length: int = _realize(read(translator, name)).len()
    return length


def _find_hooks(room: Any, variable: Any, translator: Any) -> list[tuple[TracedHook, Any]]:
    """The hooks that are traced, each with its handle in the graph, and a guard on the class of each hook."""
    found = []
    for name in _HOOKS:
        table = room.AttrSource(variable.source, name)
        hooks = dict.items(getattr(variable.value, name))  # in the order of the keys that are guarded
        for place, (number, hook) in enumerate(hooks):
            source = room.DictGetItemSource(table, room.ConstDictKeySource(table, place))
            room.VariableTracker.build(translator, hook, source=source, realize=True)
            if isinstance(hook, TracedHook):
                if number in (TAP, TAP_OF_WRAPPER):  # what is of this class has this number, and is found sooner by it
                    source = room.DictGetItemSource(table, number)
                handle = room.AttrSource(source, "handle")
                found.append((hook, room.VariableTracker.build(translator, hook.handle, source=handle, realize=True)))
    return found


def _trace_after(room: Any, translator: Any, hook: TracedTap, handle: Any, output: Any) -> None:
    trace, put = _TAPS[hook.operation]
    output = _realize(output)
    if _is_plain_tensor(room, output):
        put(translator.output.create_proxy, handle.as_proxy(), output.as_proxy(), torch.is_grad_enabled())
        return
    room.variables.UserFunctionVariable(trace).call_function(translator, [handle, output], {})


def _trace_entry(room: Any, translator: Any, hook: TracedEntry, handle: Any, arguments: dict[str, Any]) -> None:
    variables = room.variables
    found = {name: _realize(value) for name, value in arguments.items() if type(value) is not tuple}
    tensors = {name: value for name, value in found.items() if not isinstance(value, variables.ConstantVariable)}
    if len(found) == len(arguments) and all(_is_plain_tensor(room, value) for value in tensors.values()):
        proxies = {name: value.as_proxy() for name, value in tensors.items()}
        put_entry(translator.output.create_proxy, handle.as_proxy(), proxies, torch.is_grad_enabled())
        return
    nest = {
        variables.ConstantVariable.create(name): variables.TupleVariable(list(value)) if type(value) is tuple else value
        for name, value in arguments.items()
    }
    trace = variables.UserFunctionVariable(trace_entry)
    trace.call_function(translator, [handle, variables.ConstDictVariable(nest)], {})


def _realize(variable: Any) -> Any:
    return variable.realize() if hasattr(variable, "realize") else variable


def _is_plain_tensor(room: Any, variable: Any) -> bool:
    is_tensor = type(variable) is room.variables.TensorVariable and variable.python_type() is Tensor
    return is_tensor and not has_transform()


def _guard_missing_taps(room: ModuleType) -> Undo:
    """Have torch guard that a module has no forward hook, whatever its class is."""
    if not ask_once(OPTIONAL["missing hooks"].names)():
        return do_nothing
    owner: Any = vars(room)["GuardBuilder"]
    original = owner.EMPTY_NN_MODULE_HOOKS_DICT

    @functools.wraps(original)
    def guard_table(self: Any, guard: Any) -> None:
        if guard.name.endswith("_forward_hooks"):
            self.SEQUENCE_LENGTH(guard)
        else:
            original(self, guard)

    return replace(owner, "EMPTY_NN_MODULE_HOOKS_DICT", guard_table)


def _trust_handles(room: ModuleType) -> Undo:
    """Have torch not guard of which kind handles are: a hook of a class that is guarded has no other."""
    if not ask_once(OPTIONAL["handles"].names)():
        return do_nothing
    owner: Any = vars(room)["GuardBuilder"]
    original = owner.TENSOR_MATCH

    @functools.wraps(original)
    def guard_tensor(self: Any, guard: Any, value: Any = None) -> None:
        if not (guard.name.endswith(".handle") and is_handle(self.get(guard))):
            original(self, guard, value)

    return replace(owner, "TENSOR_MATCH", guard_tensor)


# ---- what a compiled module returns and its own graph uses ----------------------------------------------------------


def _find_ends(room: ModuleType) -> Undo:
    """Have torch put these taps into the graph where the trace of a forward ends."""
    owner: Any = vars(room)["InstructionTranslator"]
    original, has_names = owner._return, ask_once(OPTIONAL["boundaries"].names)

    @functools.wraps(original)
    def end_trace(self: Any, instruction: Any) -> Any:
        if instruction.opname == "RETURN_VALUE" and not self.export and not has_transform() and has_names():
            _put_taps(self)
        return original(self, instruction)

    return replace(owner, "_return", end_trace)


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


# ---- what a graph that is compiled uses of its outputs --------------------------------------------------------------


def uses_of(node: Any) -> Iterator[Any]:
    """What computes with the value of a node of a graph; taps only look at it."""
    for user in node.users:
        if getattr(user.target, "namespace", "") != "retrograd" or user.target._schema.returns:
            yield user


def _wrap_compiler(room: ModuleType) -> Undo:
    """Have each graph that is compiled mark its outputs."""
    if not ask_once(OPTIONAL["graph outputs"].names)():
        return do_nothing
    owner: Any = vars(room)["OutputGraph"]
    original = owner.call_user_compiler

    @functools.wraps(original)
    def call_user_compiler(self: Any, graph: Any, inputs: Any) -> Any:
        used = _find_used_outputs(graph)
        compiled = original(self, graph, inputs)
        if isinstance(getattr(compiled, "__self__", compiled), torch.fx.GraphModule):  # its operations run one by one
            return compiled
        return mark_outputs(compiled, used)

    return replace(owner, "call_user_compiler", call_user_compiler)


def _find_used_outputs(graph: torch.fx.GraphModule) -> list[int]:
    """The places of those outputs that the graph makes and computes with, where a gradient may come back."""
    (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
    each = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return [
        place for place, node in enumerate(each) if isinstance(node, torch.fx.Node) and _is_used_output(graph, node)
    ]


def _is_used_output(graph: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    if not node.op.startswith("call"):
        return False
    value = node.meta.get("example_value")
    same = [node, *(each for each in graph.graph.nodes if each.meta.get("example_value") is value is not None)]
    written = max(same)  # the last operation that gives this tensor: the first, or one that has written into it
    for user in (user for each in same for user in uses_of(each)):
        if user > written and user.op != "output" and _may_train(user.meta.get("example_value")):
            return True
    return node.target is operator.getitem and any(
        isinstance(part, torch.fx.GraphModule) and node.args[1] in _find_used_outputs(part)
        for part in _find_parts(graph, node.args[0])
    )


def _find_parts(graph: torch.fx.GraphModule, node: Any) -> list[Any]:
    """The graphs that an operation runs, as that of a checkpointed part."""
    names = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
    return [getattr(graph, name, None) for name in names]


def _may_train(value: Any) -> bool:
    """Return whether a gradient may come back through this result of an operation."""
    return bool(value.requires_grad) if isinstance(value, Tensor) else not isinstance(value, (int, float, torch.SymInt))


# ---- what is entered ------------------------------------------------------------------------------------------------


def watch_calls() -> list[Undo]:
    """Have calls with nothing but taps traced in short, and guarded; and outputs that are used within tapped."""
    return [
        when_loaded(_CALLS, _shorten_calls),
        when_loaded(_GUARDS, _guard_missing_taps),
        when_loaded(_GUARDS, _trust_handles),
        when_loaded("torch._dynamo.symbolic_convert", _find_ends),
    ]


def watch_graphs() -> list[Undo]:
    """Have each graph that is compiled mark those of its outputs that it uses."""
    return [when_loaded("torch._dynamo.output_graph", _wrap_compiler)]
