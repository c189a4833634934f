"""Calls of functions of ours in what inductor writes, without torch's dispatcher and where they cost least.

Inductor puts loops that follow each other into one function of C++, and whatever is called between them ends it. A net
with a call behind each of its layers had half as many functions again, each of which takes a compiler a second, and
loops that find nothing in the cache. So a call waits until a function ends anyhow, or somebody needs what it gives. The
tensors that it is given live until then.

None of the names that are asked for here is public. Where one of them is missing, or means something else, torch's own
form of a call is left, and its order: both are right, and slower.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.node import has_side_effect

from retrograd.notices import warn

_plain: dict[Any, Callable[..., Any]] = {}
_numbering: set[Any] = set()
_unknown: list[str] = []
"""What an inductor of another torch lacks: it is taught nothing."""


def call_plainly(operation: Any, function: Callable[..., Any], *, numbers_calls: bool = False) -> None:
    """Have inductor write a call of a function of ours for an operation.

    Args:
        operation: the operation.
        function: with the same arguments.
        numbers_calls: it counts calls, so it must not be put before or behind others that do.
    """
    has_side_effect(operation)
    _plain[operation] = function
    if numbers_calls:
        _numbering.add(operation)


def teach_inductor() -> None:
    """Have inductor write plain calls. It is loaded by now, or is not used for this graph."""
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None or _unknown:
        return
    try:
        _teach(lowering)
    except (AttributeError, KeyError) as error:
        _warn_of_other(error)


def _warn_of_other(error: Exception) -> None:
    _unknown.append(str(error))
    warn(
        f"torch {torch.__version__} has another Inductor than retrograd knows ({error}); what is seen in the code that "
        "it makes costs more."
    )


def _teach(lowering: Any) -> None:
    new = [operation for operation in _plain if operation not in lowering.lowerings]
    if not new:
        return
    register, kind = lowering.register_lowering, _plain_call(lowering)

    def lower(operation: Any) -> Callable[..., Any]:
        def make(*args: Any) -> Any:
            box = lowering.ir.TensorBox.create
            return torch.utils._pytree.tree_map_only(lowering.ir.IRNode, box, kind.create(operation, *args))

        return make

    for operation in new:
        register(operation, type_promotion_kind=None)(lower(operation))


@functools.cache
def _plain_call(lowering: Any) -> Any:
    """The class of these calls, which wait from now on."""
    ir, graph_of, star = lowering.ir, lowering.V, lowering.ir.dependencies.StarDep

    class PlainCall(ir.FallbackKernel):  # type: ignore[name-defined, misc]
        """One call of a function of ours. Those that number calls are made in the order of the trace."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            graph, self.before = graph_of.graph, None
            if self.op_overload in _numbering:
                self.before, graph.retrograd_last = getattr(graph, "retrograd_last", None), self

        def codegen(self, wrapper: Any) -> None:
            if graph_of.graph.cpp_wrapper or not hasattr(wrapper, "add_import_once"):
                super().codegen(wrapper)
                return
            operation: Any = self.op_overload
            function = _plain[operation]
            name = f"retrograd_{function.__name__}"
            wrapper.add_import_once(f"from {function.__module__} import {function.__name__} as {name}")
            call = f"{name}({', '.join(self.codegen_args())})"
            wrapper.writeline(f"{self.get_name()} = {call}" if operation._schema.returns else call)

        def get_read_writes(self) -> Any:
            """What torch goes by when it puts operations in order."""
            read_writes = super().get_read_writes()
            if self.before is not None:
                read_writes.reads.add(star(self.before.get_name()))
            return read_writes

    _have_calls_wait(PlainCall)
    return PlainCall


def _have_calls_wait(kind: Any) -> None:
    """Change the order of operations just before torch asks which of them reads a tensor last."""
    scheduler: Any = sys.modules["torch._inductor.scheduler"].Scheduler
    original, result = scheduler.compute_last_usage, sys.modules["torch._inductor.ir"].MultiOutput

    @functools.wraps(original)
    def compute_last_usage(self: Any) -> None:
        if not _unknown:
            try:
                self.nodes = _put_late(self.nodes, kind, result)
            except AttributeError as error:
                _warn_of_other(error)
        original(self)

    scheduler.compute_last_usage = compute_last_usage


def _put_late(nodes: Sequence[Any], kind: Any, result: Any) -> list[Any]:
    """The same nodes, with each call as late as it can be before the next node that ends a function of C++.

    Args:
        nodes: in torch's order.
        kind: the class of the calls.
        result: that of what is one of several results of a node.
    """
    found: list[Any] = []
    waiting: list[Any] = []
    for node in nodes:
        needs_call = _needs(node, waiting)
        if isinstance(node.node, kind) or (needs_call and isinstance(node.node, result)):
            waiting.append(node)
            continue
        if needs_call or node.is_extern() or node.is_template():
            found += waiting
            waiting = []
        found.append(node)
    return found + waiting


def _needs(node: Any, calls: Sequence[Any]) -> bool:
    """Tell whether a node must come after one of these: it reads what that gives, or writes into what that reads."""
    before = {dependency.name for dependency in node.unmet_dependencies}
    return any(not before.isdisjoint(call.get_buffer_names()) for call in calls)
