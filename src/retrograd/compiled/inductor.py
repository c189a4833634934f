"""What rests on names of Inductor's: calls of our functions in what it writes, where they cost least.

Inductor puts loops that follow each other into one function of C++, and whatever is called between them ends it. A net
with a call behind each of its layers had half as many functions again, each of which takes a compiler a second, and
loops that find nothing in the cache. So a call is made where no function has begun, and waits otherwise until one ends
anyhow, or somebody needs what it gives. The tensors that it is given live until then.

None of the names that are asked for here is public. Where one of them is missing, or means something else, torch's own
form of a call is left, and its order: both are right, and slower.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from retrograd.compiled.operations import UNKNOWN, Form, forms
from retrograd.core.hooks.compiled import ask_once
from retrograd.core.hooks.private_names import OPTIONAL
from retrograd.core.notices import warn

_has_names = ask_once(OPTIONAL["plain calls"].names)
_unknown: list[str] = []
"""What an inductor of another torch lacks: it is taught nothing."""


def teach_inductor() -> None:
    """Have inductor write plain calls. It is loaded by now, or is not used for this graph."""
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None or _unknown or not _has_names():
        return
    try:
        _teach(lowering)
    except (AttributeError, KeyError) as error:
        _warn_of_other(error)


def _warn_of_other(error: Exception) -> None:
    _unknown.append(str(error))
    warn(
        f"torch {torch.__version__} has an Inductor that retrograd does not support ({error}); what is recorded in "
        "the code that it makes costs more."
    )


def _teach(lowering: Any) -> None:
    new = [operation for operation in forms if operation not in lowering.lowerings]
    if not new:
        return
    register, each_leaf = lowering.register_lowering, torch.utils._pytree.tree_map_only
    plain, short = _plain_calls(lowering)

    def lower(operation: Any) -> Callable[..., Any]:
        def make(*args: Any) -> Any:
            box = lowering.ir.TensorBox.create
            made = short.make(operation, args) if forms[operation].returns is not UNKNOWN else None
            if made is None:
                made = plain.create(operation, *args)
            return each_leaf(lowering.ir.IRNode, box, made)

        return make

    for operation in new:
        register(operation, type_promotion_kind=None)(lower(operation))


@functools.cache
def _plain_calls(lowering: Any) -> tuple[Any, Any]:
    """The classes of these calls, which wait from now on: for any operation, and for those whose result is known."""
    signature(lowering.ir.ExternKernelAlloc).parameters["op_overload"]
    kind = _make_call(lowering)
    found = _make_plain_call(lowering, kind), _make_short_call(lowering, kind)
    _have_calls_wait(lowering, kind)
    return found


def _make_call(lowering: Any) -> Any:
    ir, graph_of, star = lowering.ir, lowering.V, lowering.ir.dependencies.StarDep

    class Call(ir.ExternKernelAlloc):  # type: ignore[name-defined, misc]
        """One call of a function of ours. Those that number calls are made in the order of the trace."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            graph, self.before = graph_of.graph, None
            if forms[self.op_overload].numbers_calls:
                self.before, graph.retrograd_last = getattr(graph, "retrograd_last", None), self

        def codegen(self, wrapper: Any) -> None:
            if _is_all_cpp(graph_of.graph) or not hasattr(wrapper, "add_import_once"):
                super().codegen(wrapper)
                return
            form, arguments = forms[self.op_overload], self.codegen_args()
            if form.others is not None:
                arguments[form.others] = f"[{', '.join(_find_handles(graph_of.graph, Call))}]"
            result = self.get_name() if self.op_overload._schema.returns else None
            wrapper.writeline(_write_call(wrapper, form, arguments, result))

        def name_tensors(self, place: int | None) -> list[str]:
            """How the tensors of one of its arguments are written."""
            return [] if place is None else self.codegen_args()[place].strip("[]").split(", ")

        def get_read_writes(self) -> Any:
            """What torch goes by when it puts operations in order."""
            read_writes = super().get_read_writes()
            if self.before is not None:
                read_writes.reads.add(star(self.before.get_name()))
            return read_writes

    return Call


def _find_handles(graph: Any, kind: Any) -> list[str]:
    """The handles that are given to the graph, as they are written."""
    calls: list[Any] = [each for each in getattr(graph, "operations", ()) if isinstance(each, kind)]
    handles = [name for each in calls for name in each.name_tensors(forms[each.op_overload].handles)]
    return [handle for handle in dict.fromkeys(handles) if handle in getattr(graph, "graph_inputs", ())]


def _write_call(wrapper: Any, form: Form, arguments: Sequence[str], result: str | None) -> str:
    """The line that makes a call.

    Args:
        wrapper: what the line is written into.
        form: of the call.
        arguments: as they are written.
        result: name of what it returns, if it returns anything.
    """

    def name_of(name: str) -> str:
        wrapper.add_import_once(f"from {form.function.__module__} import {name} as retrograd_{name}")
        return f"retrograd_{name}"

    call = f"{name_of(form.function.__name__)}({', '.join(arguments)})"
    if form.run_id is None:
        return call if result is None else f"{result} = {call}"
    run_id, nobody = arguments[form.run_id], name_of("NOBODY")
    if result is None:
        return f"if {run_id} is not {nobody}: {call}"
    return f"{result} = {nobody} if {run_id} is {nobody} else {call}"


def _is_all_cpp(graph: Any) -> bool:
    """Return whether what calls the kernels is written in C++ too, or may be."""
    return bool(getattr(graph, "cpp_wrapper", True))


def _make_plain_call(lowering: Any, kind: Any) -> Any:
    class PlainCall(kind, lowering.ir.FallbackKernel):  # type: ignore[misc]
        """A call for any operation: torch runs that without values, to learn what it returns."""

    return PlainCall


def _make_short_call(lowering: Any, kind: Any) -> Any:
    ir, graph_of, on_cpu = lowering.ir, lowering.V, torch.device("cpu")
    no_layout, fixed_layout, node, freeze = ir.NoneLayout, ir.FixedLayout, ir.IRNode, _freezing(ir)

    class ShortPlainCall(kind):  # type: ignore[misc]
        """A call for an operation whose result is known: torch has much less to do for each.

        Attributes:
            arguments: of the function, with places in ``inputs`` instead of tensors.
        """

        @classmethod
        def make(cls, operation: Any, args: Sequence[Any]) -> Any:
            """Put a call into the graph that is lowered; None where torch has to do it."""
            inputs: list[Any] = []

            def take(tensor: Any) -> _Place:
                inputs.append(freeze(cls.realize_input(tensor)))
                return _Place(len(inputs) - 1)

            arguments = _change_each(args, node, take)
            result, devices = forms[operation].returns, {each.get_device() for each in inputs}
            if _is_all_cpp(graph_of.graph) or (result is not None and devices != {on_cpu}):
                return None  # torch would leave the device for the time of a call that belongs to the CPU
            if result is None:
                layout = no_layout(device=next((each for each in devices if each != on_cpu), on_cpu))
            else:
                layout = fixed_layout(on_cpu, result, [1], [1])
            call = cls(layout, inputs, op_overload=operation)
            call.arguments = arguments
            return call

        def codegen_args(self) -> list[str]:
            """What is written between the parentheses."""

            def write(place: _Place) -> _Text:
                return _Text(self.inputs[place.index].codegen_reference())

            return [repr(each) for each in _change_each(self.arguments, _Place, write)]

        def has_side_effects(self) -> bool:
            """It is made, whether or not its result is used."""
            return True

    return ShortPlainCall


@dataclass(frozen=True, slots=True)
class _Place:
    """One of the tensors that a call is given."""

    index: int


class _Text(str):
    """What is written as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def _change_each(arguments: Sequence[Any], kind: type, change: Callable[[Any], Any]) -> list[Any]:
    """The same arguments, and lists of them, with those of a kind changed."""
    return [
        _change_each(each, kind, change)
        if isinstance(each, (list, tuple))
        else change(each)
        if isinstance(each, kind)
        else each
        for each in arguments
    ]


def _freezing(ir: Any) -> Callable[[Any], Any]:
    """What has an input keep its layout from now on, and returns it."""
    has_layout, ask_for_layout = ir.is_storage_and_layout, ir.as_storage_and_layout

    def freeze(tensor: Any) -> Any:
        if has_layout(tensor):
            ask_for_layout(tensor, freeze=True)
        return tensor

    return freeze


def _have_calls_wait(lowering: Any, kind: Any) -> None:
    """Change the order of operations just before torch asks which of them reads a tensor last."""
    scheduler: Any = sys.modules["torch._inductor.scheduler"].Scheduler
    original, graph_of, result = scheduler.compute_last_usage, lowering.V, sys.modules["torch._inductor.ir"].MultiOutput

    @functools.wraps(original)
    def compute_last_usage(self: Any) -> None:
        if not _unknown:
            try:
                self.nodes = _put_late(self.nodes, kind, result)
                _trust_run_ids(self.nodes, kind, graph_of.graph.wrapper_code)
            except AttributeError as error:
                _warn_of_other(error)
        original(self)

    scheduler.compute_last_usage = compute_last_usage


def _trust_run_ids(nodes: Sequence[Any], kind: type, wrapper: Any) -> None:
    """Have nobody check the sizes of handles and run ids, which takes as long as the calls."""
    expected = getattr(wrapper, "_pending_input_asserts", {})
    for node in nodes:
        call: Any = node.node if isinstance(node.node, kind) else None
        if call is not None:
            form = forms[call.op_overload]
            for name in (*call.name_tensors(form.handles), *call.name_tensors(form.run_id)):
                expected.pop(name, None)


def _put_late(nodes: Sequence[Any], kind: Any, result: Any) -> list[Any]:
    """The same nodes, with each call behind a node that ends a function of C++, or just before the next one.

    Args:
        nodes: in torch's order.
        kind: the class of the calls.
        result: that of what is one of several results of a node.
    """
    found: list[Any] = []
    waiting: list[Any] = []
    has_loops = False  # since the last function has ended
    for node in nodes:
        needs_call, is_call = _needs(node, waiting), isinstance(node.node, kind)
        if (is_call and (has_loops or needs_call)) or (needs_call and isinstance(node.node, result)):
            waiting.append(node)
            continue
        ends = node.is_extern() or node.is_template()
        if needs_call or (ends and not is_call):
            found += waiting
            waiting = []
        has_loops = not ends
        found.append(node)
    return found + waiting


def _needs(node: Any, calls: Sequence[Any]) -> bool:
    """Return whether a node must come after one of these: it reads what that gives, or writes into what that reads."""
    before = {dependency.name for dependency in node.unmet_dependencies}
    return any(not before.isdisjoint(call.get_buffer_names()) for call in calls)
