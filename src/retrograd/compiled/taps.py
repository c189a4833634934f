"""Taps inside compiled code: operations in its graph, which hand tensors to the taps that eager code has.

While torch.compile traces the hook on a module, :func:`trace_tap` puts an operation into the graph: ``retrograd::tap``.
When the graph is traced once more, with its backward, this becomes two: ``see`` takes what the module returned, and a
hook on that tensor, set in the trace, becomes ``see_gradient`` in the graph of the backward. Both ask at run time who
listens, so the graph is the same for every schedule and selection, and while nobody listens.

A graph knows a tap by a tensor, and a run of the graph by another: ``handles.py``.

A call through torch's dispatcher takes some 10 µs. Inductor is taught to write a plain call of :func:`see` or
:func:`see_gradient` instead: ``inductor.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node
from torch.utils.checkpoint import CheckpointPolicy

from retrograd.compiled.aot import node_of, result_of, write_call
from retrograd.compiled.handles import NOBODY, SEEN, Listeners, listeners_of, make_run_id, owner_of
from retrograd.compiled.inductor import teach_inductor
from retrograd.compiled.operations import (
    call_plainly,
    define,
    implement,
    is_rehearsed,
    library,
    new_run_id,
    proxy_mode,
    save_last_traced,
)
from retrograd.compiled.wrappers import BETWEEN, RETURNED, find_boundary, name_tensors
from retrograd.core.hooks.engine import is_transformed, uncompiled
from retrograd.core.hooks.in_graphs import is_left_alone
from retrograd.core.hooks.listeners import HookEntry, hooks_on
from retrograd.core.hooks.nested import Keys, flatten
from retrograd.core.hooks.resting import is_anybody_awake

LEFT_ALONE = 0
"""What a run id holds where rules on a value have left it alone."""


def trace_tap(handle: Tensor, value: Any, keys: Keys = ()) -> None:
    """Put a tap on a tensor, or on a nest of them that these keys lead to, into the graph that is being traced.

    Inside a transform tensors have no values of their own, and there is none; nor in what is exported.
    """
    if is_left_alone():
        return
    if type(value) is Tensor:  # tracing the search of a nest takes several times as long as all else
        _TAP([value], handle, [BETWEEN.join(keys)], torch.is_grad_enabled())
        return
    found = list(flatten(value, keys))
    if found:
        names = [BETWEEN.join(keys) for keys, _ in found]
        _TAP([tensor for _, tensor in found], handle, names, torch.is_grad_enabled())


def put_tap(create: Callable[..., Any], handle: Any, output: Any, trains: bool) -> None:
    """Put a tap on one tensor into a graph, without tracing that: ``create`` makes a node of a tracer's."""
    put_taps(create, handle, {"": output}, trains)


def put_taps(create: Callable[..., Any], handle: Any, tensors: Mapping[str, Any], trains: bool) -> None:
    """Put a tap on tensors by their names into a graph, without tracing that."""
    create("call_function", _TAP, (list(tensors.values()), handle, list(tensors), trains), {})


# ---- what runs when a graph runs ------------------------------------------------------------------------------------


@uncompiled
def see_first(
    tensors: Sequence[Tensor],
    handles: Sequence[Tensor],
    names: Sequence[str],
    trains: bool,
    others: Sequence[Tensor],
) -> Tensor:
    """Hand the tensors of the first call in a graph to its tap, and begin a run of the graph.

    Args:
        tensors: what is seen.
        handles: of the tap, and of others that see the same.
        names: of the tensors, for each of these.
        trains: grad is enabled.
        others: handles of all calls in the graph, which are not made where nobody is notified of them.

    Returns:
        The run id; ``NOBODY`` if the other calls have nobody to tell: watchers know that once they have seen one.
    """
    listeners: Listeners = {}
    _show(tensors, handles, names, trains, listeners, 0)
    if others:
        _mark_compiled(others)
    return make_run_id(listeners) if listeners or is_anybody_awake() else NOBODY


@uncompiled
def see(
    tensors: Sequence[Tensor],
    handles: Sequence[Tensor],
    names: Sequence[str],
    trains: bool,
    run_id: Tensor,
    first: int,
) -> Tensor:
    """Hand the tensors of a further call to its tap.

    Args:
        tensors: what is seen.
        handles: of the tap, and of others that see the same.
        names: of the tensors, for each of these.
        trains: grad is enabled.
        run_id: of the run.
        first: number of the first tensor in the graph.

    Returns:
        ``SEEN``: checkpoints take no graph with an operation that returns nothing.
    """
    listeners = listeners_of(run_id)
    if run_id is NOBODY:
        _mark_compiled(handles)
    elif listeners is not None:
        _show(tensors, handles, names, trains, listeners, first)
    return SEEN


@uncompiled
def see_gradient(gradient: Tensor, run_id: Tensor, numbers: Sequence[int]) -> None:
    """Hand the gradient of tensors, which is the same for these, to those who are to be notified of it."""
    listeners = listeners_of(run_id)
    if listeners:
        gradient = gradient.detach()
        for number in numbers:
            for tell in listeners.get(number, ()):
                tell(gradient)


def _show(
    tensors: Sequence[Tensor],
    handles: Sequence[Tensor],
    names: Sequence[str],
    trains: bool,
    listeners: Listeners,
    first: int,
) -> None:
    """Show them as new objects: inductor writes into one that is free without counting a version."""
    count = len(tensors)
    tensors = [tensor.detach() for tensor in tensors]
    for place, handle in enumerate(handles):
        tap = owner_of(handle)
        if tap is not None:
            own = place * count
            _show_to(tap, tensors, names[own : own + count], trains, listeners, first + own)


def _show_to(
    tap: Any, tensors: Sequence[Tensor], names: Sequence[str], trains: bool, listeners: Listeners, first: int
) -> None:
    """Show them to those who watch by a tap and are awake, and note what sees their gradients."""
    tap.is_compiled = True
    if names and names[0].startswith(RETURNED):
        tap, names = find_boundary(tap, tensors, names)
        if tap is None:
            return
    named = name_tensors(tensors, names)
    for watcher in tap.watchers:
        if watcher.switch.awake:
            for number, see in enumerate(watcher.see_in_compiled_code(named, trains), first):
                if see is not None:
                    listeners[number] = (*listeners.get(number, ()), see)


def _mark_compiled(handles: Sequence[Tensor]) -> None:
    last = owner_of(handles[-1])
    if last is not None and last.is_compiled:  # and so are those before it
        return
    for handle in handles:
        tap = owner_of(handle)
        if tap is not None:
            tap.is_compiled = True


@uncompiled
def run_id_at(run_id: Tensor, graphs: Sequence[Tensor], is_before: bool) -> Tensor:
    """The run id for one of the places where a gradient may come together; nobody is notified at the others."""
    listeners = listeners_of(run_id) if comes_together_at(graphs, is_before) else None
    return make_run_id({} if listeners is None else listeners)


def comes_together_at(graphs: Sequence[Tensor], is_before: bool) -> bool:
    """Return whether it is at this place of :func:`find_places` that a gradient comes together in this run."""
    changed = [int(graph) != LEFT_ALONE for graph in graphs]
    return not any(changed) if is_before else changed[-1] and not any(changed[:-1])


# ---- the operations -------------------------------------------------------------------------------------------------

_BEFORE = "retrograd: the tensor before rules"
_RUN = "retrograd_run"

_TAP = define("tap", "(Tensor[] tensors, Tensor handle, str[] names, bool trains) -> ()")
_SEE_FIRST = define(
    "see_first", "(Tensor[] tensors, Tensor[] handles, str[] names, bool trains, Tensor[] others) -> Tensor"
)
_SEE = define(
    "see", "(Tensor[] tensors, Tensor[] handles, str[] names, bool trains, Tensor run_id, int first) -> Tensor"
)
_SEE_GRADIENT = define("see_gradient", "(Tensor gradient, Tensor run_id, int[] numbers) -> ()")
_RUN_ID_AT = define("run_id_at", "(Tensor run_id, Tensor[] graphs, bool is_before) -> Tensor")


@uncompiled
def _tap(tensors: Sequence[Tensor], handle: Tensor, names: Sequence[str], trains: bool) -> None:
    """What ``retrograd::tap`` is made of, wherever a graph with it is traced or run."""
    if is_rehearsed(tensors) or any(map(is_transformed, tensors)):
        return
    run, first = put_tap_call(tensors, handle, names, trains)
    for number, tensor in enumerate(tensors, first):
        for place, graphs, is_before in find_places(tensor) if tensor.requires_grad else ():
            traced = run
            if graphs:
                traced = TracedRun(_RUN_ID_AT(run.run_id, graphs, is_before))
                save_last_traced(_RUN_ID_AT)
            HookEntry(partial(hand_gradient, run=traced, number=number), hooks_on(place))


def mark_rewritten(new: Tensor, before: Tensor, graph: Tensor | None) -> None:
    """Remember, while a graph is traced, the tensor that another one stands for: where rules leave the value alone.

    Args:
        new: the replacement tensor.
        before: what it was made of.
        graph: a run id that holds at run time whether rules have left the value alone; None if there are none.
    """
    node: Any = new.grad_fn
    if node is not None:
        node.metadata[_BEFORE] = before, graph


def find_places(tensor: Tensor) -> list[tuple[Tensor, list[Tensor], bool]]:
    """Where the gradient of a tensor may come together, of which one counts in each run: :func:`comes_together_at`.

    In eager code a value that rules leave alone is the tensor that the module has made, which has other uses, too.

    Returns:
        Tensors, each with run ids of the rules on values on the way, and whether it lies before all of these.
    """
    places, graphs = [], list[Tensor]()
    node: Any = tensor.grad_fn
    while node is not None and _BEFORE in node.metadata:
        before, graph = node.metadata[_BEFORE]
        if graph is not None:
            graphs = [*graphs, graph]
            places.append((tensor, graphs, False))
        tensor, node = before, before.grad_fn
    return [*places, (tensor, graphs, True)]


@dataclass(slots=True)
class TracedRun:
    """A run of the graph that is traced.

    Attributes:
        run_id: what the first call of a tap has returned; None before it.
        count: how many tensors have a number.
        last: the last call, and what it sees, with the number of the first of these; None where it was not written.
        gradients: the calls that see gradients, by what they see.
    """

    run_id: Tensor | None = None
    count: int = 0
    last: tuple[Node, Sequence[Node], int] | None = None
    gradients: dict[Node, Node] = field(default_factory=dict)

    @classmethod
    def here(cls) -> TracedRun:
        """That of the graph which this thread traces; one of its own for each call where none is."""
        mode = proxy_mode()
        if mode is None:
            return cls()
        if not hasattr(mode.tracer, _RUN):
            setattr(mode.tracer, _RUN, cls())
        run: TracedRun = getattr(mode.tracer, _RUN)
        return run


def put_tap_call(
    tensors: Sequence[Tensor], handle: Tensor, names: Sequence[str], trains: bool
) -> tuple[TracedRun, int]:
    """Put into the graph, where one is traced, that the tensors of a call are seen.

    Returns:
        The run of the graph, and the number of the first tensor in it.
    """
    run = TracedRun.here()
    first = run.count
    run.count += len(tensors)
    nodes = [node_of(tensor) for tensor in tensors]
    if _join_last(run, nodes, node_of(handle), names, trains):
        return run, first
    if run.run_id is None:
        run.run_id, call = _put_call(_SEE_FIRST, handle, tensors, [handle], names, trains, [])
        teach_inductor()
    else:
        _, call = _put_call(_SEE, handle, tensors, [handle], names, trains, run.run_id, first)
    run.last = None if call is None else (call, [each for each in nodes if each is not None], first)
    return run, first


def _join_last(
    run: TracedRun, nodes: Sequence[Node | None], handle: Node | None, names: Sequence[str], trains: bool
) -> bool:
    """Have the last call see the same tensors for this handle, too; returns whether it does.

    What a module returns is often what the last one in it has returned, and need not be read twice.
    """
    if run.last is None or handle is None or handle.op != "placeholder":
        return False
    call, seen, _ = run.last
    if nodes != seen or call.args[3] is not trains or not _is_last_of_ours(call):
        return False
    tensors, handles, known, *others = call.args
    call.args = (tensors, [*handles, handle], [*known, *names], *others)  # type: ignore[misc]
    return True


def _is_last_of_ours(call: Node) -> bool:
    """Return whether no other operation of ours has come after it."""
    node = call.next
    while node.op != "root":
        if getattr(node.target, "namespace", None) == library.ns:
            return False
        node = node.next
    return True


def _put_call(operation: Any, like: Tensor, *args: Any) -> tuple[Tensor, Node | None]:
    """Put a call of an operation into the graph that returns one element, which is saved and not computed again.

    Returns:
        What it returns; and the call where that was written.
    """
    call = write_call(operation, *args)
    if call is None:
        result: Tensor = operation(*args)
        save_last_traced(operation)
        return result, None
    call.node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return result_of(call, like, torch.uint32), call.node


@uncompiled
def hand_gradient(gradient: Tensor | None, run: TracedRun, number: int) -> None:
    """Put into the graph, where one is traced, that the gradient of a tensor is seen."""
    if gradient is None:
        return
    node = node_of(gradient)
    seen = None if node is None else run.gradients.get(node)
    if seen is not None:
        value, run_id, numbers = seen.args
        seen.args = (value, run_id, [*numbers, number])  # type: ignore[misc]
        return
    call = write_call(_SEE_GRADIENT, gradient, run.run_id, [number])
    if call is None:
        _SEE_GRADIENT(gradient, run.run_id, [number])
    elif node is not None:
        run.gradients[node] = call.node


implement(_TAP, _tap)
implement(_SEE_FIRST, see_first, new_run_id)
implement(_SEE, see, new_run_id)
implement(_SEE_GRADIENT, see_gradient, lambda *_: None)
implement(_RUN_ID_AT, run_id_at, new_run_id)

call_plainly(_SEE_FIRST, see_first, numbers_calls=True, returns=torch.uint32, handles=1, others=4)
call_plainly(_SEE, see, numbers_calls=True, returns=torch.uint32, handles=1, run_id=4)
call_plainly(_SEE_GRADIENT, see_gradient, returns=None, run_id=1)
