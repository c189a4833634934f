"""What compiled code returns and computes with further: its gradient comes out of the graph in part alone.

A hook on such an output, wherever it is set outside, would see and change that part. So when a graph is compiled, those
of its outputs are found that it uses, and each time it runs they are marked, in the graph that autograd has of it:
whoever is about to change a gradient asks :func:`find_part`. Of a graph that was compiled while nobody asked nothing is
known; where it gives one tensor with a gradient, all of that gradient comes from outside.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from retrograd.core.hooks.compiled import has_compiled_code, when_loaded
from retrograd.core.hooks.listeners import Patch, Undo, replace
from retrograd.core.hooks.nodes import edges_of, inputs_of, name_of, names_of, root_edges
from retrograd.core.hooks.reach import find_nodes, guard_nodes

_MARK = "retrograd: outputs that are used within"
_NODE = "CompiledFunctionBackward"

_known: WeakSet[type] = WeakSet()
"""Classes of the nodes of those graphs of which it is known what they use."""

compiled_graphs: list[str] = []
"""Not empty as soon as there may be compiled code: nothing is asked of tensors before."""


class Part(Enum):
    """How much of the gradient of a tensor comes to a hook on it."""

    WHOLE = "all"
    SOME = "what comes from outside of the graph that uses it too"
    UNKNOWN = "nobody has looked at the graph that returns it"


def find_part(tensor: Tensor) -> Part:
    """How much of its gradient a hook on this tensor would be called with."""
    node: Any = tensor.grad_fn
    if node is None:
        return Part.WHOLE
    if tensor.output_nr in node.metadata.get(_MARK, ()):
        return Part.SOME
    made = _find_compiled(tensor)
    return Part.WHOLE if made is None or type(made) in _known or len(inputs_of(made)) == 1 else Part.UNKNOWN


def _find_compiled(tensor: Tensor) -> Any:
    """The node of the compiled code that returned a tensor; views of what that has made are made outside of it."""
    node: Any = tensor.grad_fn
    while node is not None and name_of(node) != _NODE:
        edges = edges_of(node) if tensor._is_view() else ()
        node = edges[0][0] if len(edges) == 1 else None
    return node


def uses_of(node: Any) -> Iterator[Any]:
    """What computes with the value of a node of a graph; taps only look at it."""
    for user in node.users:
        if getattr(user.target, "namespace", "") != "retrograd" or user.target._schema.returns:
            yield user


def _wrap_compiler(room: ModuleType) -> Undo:
    """Have each graph that is compiled mark its outputs."""
    owner: Any = vars(room)["OutputGraph"]
    original = owner.call_user_compiler

    @functools.wraps(original)
    def call_user_compiler(self: Any, graph: Any, inputs: Any) -> Any:
        compiled_graphs[:] = [_NODE]
        used = _find_used(graph)
        compiled = original(self, graph, inputs)
        if isinstance(getattr(compiled, "__self__", compiled), torch.fx.GraphModule):  # its operations run one by one
            return compiled
        return _marking(compiled, used)

    if has_compiled_code():
        compiled_graphs[:] = [_NODE]
    return replace(owner, "call_user_compiler", call_user_compiler)


known_graphs = Patch(lambda: [when_loaded("torch._dynamo.output_graph", _wrap_compiler)])
"""While somebody holds it, it is known of each graph that is compiled which of its outputs it uses."""


def hold_known_graphs() -> Undo:
    """Hold it; returns what releases it."""
    known_graphs.hold()
    return known_graphs.release


def _find_used(graph: torch.fx.GraphModule) -> list[int]:
    """The places of those outputs that the graph makes and computes with, where a gradient may come back."""
    (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
    each = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return [place for place, node in enumerate(each) if isinstance(node, torch.fx.Node) and _is_used(graph, node)]


def _is_used(graph: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    if not node.op.startswith("call"):
        return False
    value = node.meta.get("example_value")
    same = [node, *(each for each in graph.graph.nodes if each.meta.get("example_value") is value is not None)]
    written = max(same)  # the last operation that gives this tensor: the first, or one that has written into it
    for user in (user for each in same for user in uses_of(each)):
        if user > written and user.op != "output" and _may_train(user.meta.get("example_value")):
            return True
    return node.target is operator.getitem and any(
        isinstance(part, torch.fx.GraphModule) and node.args[1] in _find_used(part)
        for part in _find_parts(graph, node.args[0])
    )


def _find_parts(graph: torch.fx.GraphModule, node: Any) -> list[Any]:
    """The graphs that an operation runs, as that of a checkpointed part."""
    names = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
    return [getattr(graph, name, None) for name in names]


def _may_train(value: Any) -> bool:
    """Tell whether a gradient may come back through this result of an operation."""
    return bool(value.requires_grad) if isinstance(value, Tensor) else not isinstance(value, (int, float, torch.SymInt))


def _marking(compiled: Callable[..., Any], used: Sequence[int]) -> Callable[..., Any]:
    """Compiled code that marks what it returns."""
    is_known = False

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        nonlocal is_known
        outputs = compiled(*args)
        for place in used:
            node = outputs[place].grad_fn
            if node is not None:
                node.metadata.setdefault(_MARK, set()).add(outputs[place].output_nr)
        if not is_known:
            made = [_find_compiled(each) for each in outputs if isinstance(each, Tensor)]
            kinds = {type(node) for node in made if node is not None}
            _known.update(kinds)
            is_known = bool(kinds)
        return outputs

    return run


def runs_compiled_code(roots: Sequence[Tensor]) -> bool:
    """Tell whether a pass from these tensors goes through what compiled code has made."""
    reach = find_nodes(root_edges([root for root in roots if root.grad_fn is not None]))
    found = any(_NODE in name for name in names_of(reach.nodes))
    guard_nodes(reach.nodes, reach.links)
    return found
