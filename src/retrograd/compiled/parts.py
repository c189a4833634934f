"""What compiled code returns and computes with further: its gradient comes out of the graph in part alone.

A hook on such an output, wherever it is set outside, would see and change that part. So when a graph is compiled, those
of its outputs are found that it uses, and each time it runs they are marked, in the graph that autograd has of it:
whoever is about to change a gradient asks :func:`find_part`. Of a graph that was compiled while nobody asked nothing is
known; where it gives one tensor with a gradient, all of that gradient comes from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor

from retrograd.core.hooks.in_graphs import Part
from retrograd.core.hooks.nodes import edges_of, inputs_of, name_of, names_of, root_edges
from retrograd.core.hooks.reach import find_nodes, guard_nodes

_MARK = "retrograd: outputs that are used within"
_NODE = "CompiledFunctionBackward"

_known: WeakSet[type] = WeakSet()
"""Classes of the nodes of those graphs of which it is known what they use."""


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


def mark_outputs(compiled: Callable[..., Any], used: Sequence[int]) -> Callable[..., Any]:
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
    """Return whether a pass from these tensors goes through what compiled code has made."""
    reach = find_nodes(root_edges([root for root in roots if root.grad_fn is not None]))
    found = any(_NODE in name for name in names_of(reach.nodes))
    guard_nodes(reach.nodes, reach.links)
    return found
