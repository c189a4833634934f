"""Taps inside compiled code: operations in its graph, which hand tensors to the taps that eager code has.

While torch.compile traces the hook on a module, :func:`trace_tap` puts an operation into the graph: ``retrograd::tap``.
When the graph is traced once more, with its backward, this becomes two: ``see`` takes what the module returned, and a
hook on that tensor, set in the trace, becomes ``see_gradient`` in the graph of the backward. Both ask at run time who
listens, so the graph is the same for every schedule and selection, and while nobody listens.

A graph knows a tap by a tensor, its *handle*. A number or a name would be guarded, and like blocks would be compiled
one by one; with a tensor they share a graph. Another tensor, the *ticket*, stands for those who are to be told of the
gradients of this run of the graph: the first call of a tap makes it, the others are given it, and autograd saves it
with the activations. Both are found by their address, which costs as much as an attribute, and by their content where
somebody has copied them.

A call through torch's dispatcher takes some 10 µs. Inductor is taught to write a plain call of :func:`see` or
:func:`see_gradient` instead: ``inductor.py``.
"""

from __future__ import annotations

import operator
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.node import Node, has_side_effect
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from retrograd.core.hooks import inductor
from retrograd.core.hooks.engine import (
    dispatch_modes,
    has_transform,
    is_transformed,
    knows_at_once,
    uncompiled,
    without_transforms,
)
from retrograd.core.hooks.inductor import call_plainly, teach_inductor
from retrograd.core.hooks.listeners import Entry, SeeGradient, hooks_on
from retrograd.core.hooks.nested import Keys, flatten
from retrograd.core.hooks.resting import is_anybody_awake
from retrograd.core.hooks.saved import belongs_to_checkpoint, top_pair
from retrograd.core.hooks.traced_calls import node_of, proxy_mode, result_of, traced_nodes, write_call

T = TypeVar("T")

Told = dict[int, tuple[SeeGradient, ...]]
"""Who is told of the gradients in a run of a graph, by the number that a tensor has in it."""

BETWEEN = "\x1f"
"""Between the keys of a tensor, which the graph holds as one text."""

RETURNED = "\x1e"
"""Before them, where the whole graph is the call of the module that returns the tensor."""


class CompiledTap(Protocol):
    """What a handle leads to."""

    is_compiled: bool
    """It is a part of a graph that has run."""

    def see_compiled(
        self, tensors: Sequence[Tensor], names: Sequence[str], trains: bool, told: Told, first: int
    ) -> None:
        """See the tensors of a call, each with its name; those who see their gradients go to ``told``.

        Args:
            tensors: what is seen.
            names: of the tensors.
            trains: grad is enabled.
            told: of the run of the graph.
            first: number of the first tensor in the graph.
        """


class Numbered(Generic[T]):
    """Things, each with a tensor that stands for it in a graph.

    Args:
        dtype: one that no tensor of a program has: inductor writes into memory of the same size and dtype that is free.

    Attributes:
        by_address: the things, by the address of what their tensor holds.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.by_address: dict[int, T] = {}
        self._by_number: dict[int, T] = {}
        self._next = 0

    def add(self, thing: T) -> Tensor:
        """The tensor that stands for it from now on."""
        number = self._next
        self._next += 1
        modes = _disable_current_modes() if dispatch_modes() else nullcontext()
        with modes, without_transforms(), torch.inference_mode(False):
            tensor = torch.tensor([number], dtype=self._dtype, device="cpu")
        self._by_number[number] = self.by_address[tensor.data_ptr()] = thing
        weakref.finalize(tensor, self._remove, number, tensor.data_ptr()).atexit = False
        return tensor

    def find(self, tensor: Tensor) -> T | None:
        """What it stands for; None if that is gone."""
        found = self.by_address.get(tensor.data_ptr())
        return self._by_number.get(int(tensor)) if found is None else found

    def _remove(self, number: int, address: int) -> None:
        if self.by_address.get(address) is self._by_number.pop(number):
            del self.by_address[address]


_taps: Numbered[Callable[[], CompiledTap | None]] = Numbered(torch.int64)
_tickets: Numbered[Told] = Numbered(torch.uint32)


def make_handle(tap: CompiledTap) -> Tensor:
    """The handle of a tap, which is not held."""
    return _taps.add(weakref.ref(tap))


def is_handle(value: Any) -> bool:
    """Tell whether this is the handle of a tap."""
    is_like_one = type(value) is Tensor and value.dtype is torch.int64 and value.layout is torch.strided
    return is_like_one and value.data_ptr() in _taps.by_address


def make_ticket(told: Told) -> Tensor:
    """The ticket of a run of a graph."""
    ticket = _tickets.add(told)
    if top_pair() is not None and not belongs_to_checkpoint():
        _packed.append(ticket)
    return ticket


_packed: deque[Tensor] = deque(maxlen=1_000)
"""Tickets that hooks on saved tensors may copy, and leave nothing else of them."""

forget_tickets = _packed.clear
"""Hold no ticket any more, since taps have other watchers."""


_find_tap, _find_told = _taps.by_address.get, _tickets.by_address.get
"""What runs at each site asks here first: a call of Python's is a third of what it costs."""

LEFT_ALONE = 0
"""What a ticket holds where rules on a value have left it alone."""

NOBODY = make_ticket({})
"""The ticket of a run of a graph in which nobody is told of anything more."""

SEEN = make_ticket({})
"""What a call returns that has nothing to return."""


@knows_at_once
def is_left_alone() -> bool:
    """While a graph is traced, tell whether it is exported, or this part of it is inside a ``torch.func`` transform."""
    return has_transform() or torch.compiler.is_exporting()


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
        others: handles of all calls in the graph, which are not made where nobody is told of them.

    Returns:
        The ticket; ``NOBODY`` if the other calls have nobody to tell: watchers know that once they have seen one.
    """
    told: Told = {}
    _show(tensors, handles, names, trains, told, 0)
    if others:
        _mark_compiled(others)
    return make_ticket(told) if told or is_anybody_awake() else NOBODY


@uncompiled
def see(
    tensors: Sequence[Tensor],
    handles: Sequence[Tensor],
    names: Sequence[str],
    trains: bool,
    ticket: Tensor,
    first: int,
) -> Tensor:
    """Hand the tensors of a further call to its tap.

    Args:
        tensors: what is seen.
        handles: of the tap, and of others that see the same.
        names: of the tensors, for each of these.
        trains: grad is enabled.
        ticket: of the run.
        first: number of the first tensor in the graph.

    Returns:
        ``SEEN``: checkpoints take no graph with an operation that returns nothing.
    """
    told = _told_by(ticket)
    if ticket is NOBODY:
        _mark_compiled(handles)
    elif told is not None:
        _show(tensors, handles, names, trains, told, first)
    return SEEN


@uncompiled
def see_gradient(gradient: Tensor, ticket: Tensor, numbers: Sequence[int]) -> None:
    """Hand the gradient of tensors, which is the same for these, to those who are to be told of it."""
    told = _told_by(ticket)
    if told:
        gradient = gradient.detach()
        for number in numbers:
            for tell in told.get(number, ()):
                tell(gradient)


def _show(
    tensors: Sequence[Tensor],
    handles: Sequence[Tensor],
    names: Sequence[str],
    trains: bool,
    told: Told,
    first: int,
) -> None:
    """Show them as new objects: inductor writes into one that is free without counting a version."""
    count = len(tensors)
    tensors = [tensor.detach() for tensor in tensors]
    for place, handle in enumerate(handles):
        tap = _tap_of(handle)
        if tap is not None:
            own = place * count
            tap.see_compiled(tensors, names[own : own + count], trains, told, first + own)


def _mark_compiled(handles: Sequence[Tensor]) -> None:
    last = _tap_of(handles[-1])
    if last is not None and last.is_compiled:  # and so are those before it
        return
    for handle in handles:
        tap = _tap_of(handle)
        if tap is not None:
            tap.is_compiled = True


def _tap_of(handle: Tensor) -> CompiledTap | None:
    find = _find_tap(handle.data_ptr()) or _taps.find(handle)
    return find() if find is not None else None


def _told_by(ticket: Tensor) -> Told | None:
    told = _find_told(ticket.data_ptr())
    return _tickets.find(ticket) if told is None else told


@uncompiled
def ticket_at(ticket: Tensor, graphs: Sequence[Tensor], is_before: bool) -> Tensor:
    """The ticket for one of the places where a gradient may come together; nobody is told at the others."""
    told = _told_by(ticket) if comes_together_at(graphs, is_before) else None
    return make_ticket({} if told is None else told)


def comes_together_at(graphs: Sequence[Tensor], is_before: bool) -> bool:
    """Tell whether it is at this place of :func:`find_places` that a gradient comes together in this run."""
    changed = [int(graph) != LEFT_ALONE for graph in graphs]
    return not any(changed) if is_before else changed[-1] and not any(changed[:-1])


def name_tensors(tensors: Sequence[Tensor], names: Sequence[str]) -> list[tuple[Keys, Tensor]]:
    """Tensors, each with its keys."""
    if len(tensors) == 1 and not names[0]:
        return [((), tensors[0])]
    return [(tuple(name.split(BETWEEN)) if name else (), tensor) for name, tensor in zip(names, tensors, strict=True)]


# ---- the operations -------------------------------------------------------------------------------------------------


def version_of(spec: Any) -> int:
    """What a file and ``inductor.py`` contain, as a number, for names of operations: caches have older graphs."""
    value = 0
    specs: tuple[Any, ...] = spec, inductor.__spec__
    for each in specs:
        value = zlib.crc32(each.loader.get_data(each.origin), value)
    return value


_VERSION = version_of(__spec__)
_BEFORE = "retrograd: the tensor before rules"
_RUN = "retrograd_run"
_WITHOUT_VALUES = (FakeTensor, FunctionalTensor)

_UNSAFE = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
"""CUDA graphs are cut here: what is recorded in one would be seen once, when it is made."""

library = torch.library.Library("retrograd", "DEF")


def define(name: str, signature: str, version: int = _VERSION) -> Any:
    """Define an operation; returns it."""
    library.define(f"{name}_{version:08x}{signature}", tags=_UNSAFE)
    return getattr(torch.ops.retrograd, f"{name}_{version:08x}").default


_TAP = define("tap", "(Tensor[] tensors, Tensor handle, str[] names, bool trains) -> ()")
_SEE_FIRST = define(
    "see_first", "(Tensor[] tensors, Tensor[] handles, str[] names, bool trains, Tensor[] others) -> Tensor"
)
_SEE = define(
    "see", "(Tensor[] tensors, Tensor[] handles, str[] names, bool trains, Tensor ticket, int first) -> Tensor"
)
_SEE_GRADIENT = define("see_gradient", "(Tensor gradient, Tensor ticket, int[] numbers) -> ()")
_TICKET_AT = define("ticket_at", "(Tensor ticket, Tensor[] graphs, bool is_before) -> Tensor")


@uncompiled
def _tap(tensors: Sequence[Tensor], handle: Tensor, names: Sequence[str], trains: bool) -> None:
    """What ``retrograd::tap`` is made of, wherever a graph with it is traced or run."""
    if is_rehearsed(tensors) or any(map(is_transformed, tensors)):
        return
    run, first = put_sight(tensors, handle, names, trains)
    for number, tensor in enumerate(tensors, first):
        for place, graphs, is_before in find_places(tensor) if tensor.requires_grad else ():
            told = run
            if graphs:
                told = TracedRun(_TICKET_AT(run.ticket, graphs, is_before))
                save_last_traced(_TICKET_AT)
            Entry(partial(hand_gradient, run=told, number=number), hooks_on(place))


def mark_rewritten(new: Tensor, before: Tensor, graph: Tensor | None) -> None:
    """Remember, while a graph is traced, the tensor that another one stands for: where rules leave the value alone.

    Args:
        new: what is gone on with.
        before: what it was made of.
        graph: a ticket of which it can be told at run time whether rules have left it alone; None if there are none.
    """
    node: Any = new.grad_fn
    if node is not None:
        node.metadata[_BEFORE] = before, graph


def find_places(tensor: Tensor) -> list[tuple[Tensor, list[Tensor], bool]]:
    """Where the gradient of a tensor may come together, of which one counts in each run: :func:`comes_together_at`.

    In eager code a value that rules leave alone is the tensor that the module has made, which has other uses, too.

    Returns:
        Tensors, each with tickets of the rules on values on the way, and whether it lies before all of these.
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
        ticket: what the first call of a tap has returned; None before it.
        count: how many tensors have a number.
        last: the last call, and what it sees, with the number of the first of these; None where it was not written.
        gradients: the calls that see gradients, by what they see.
    """

    ticket: Tensor | None = None
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


def put_sight(tensors: Sequence[Tensor], handle: Tensor, names: Sequence[str], trains: bool) -> tuple[TracedRun, int]:
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
    if run.ticket is None:
        run.ticket, call = _put_call(_SEE_FIRST, handle, tensors, [handle], names, trains, [])
        teach_inductor()
    else:
        _, call = _put_call(_SEE, handle, tensors, [handle], names, trains, run.ticket, first)
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
    """Tell whether no other operation of ours has come after it."""
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
        value, ticket, numbers = seen.args
        seen.args = (value, ticket, [*numbers, number])  # type: ignore[misc]
        return
    call = write_call(_SEE_GRADIENT, gradient, run.ticket, [number])
    if call is None:
        _SEE_GRADIENT(gradient, run.ticket, [number])
    elif node is not None:
        run.gradients[node] = call.node


def save_last_traced(operation: object) -> None:
    """What this operation of ours has given goes to the backward graph, and is not computed again in checkpoints."""
    node = next((node for node in reversed(traced_nodes()) if node.target is operation), None)
    if node is not None:
        results = [user for user in node.users if user.target is operator.getitem]  # where there are several
        for each in (node, *results):  # of a tuple both: results are taken for views of it, which may be made again
            each.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def count_traced(operation: object) -> int:
    """How often this operation is in the graph that is being traced."""
    return sum(node.target is operation for node in traced_nodes())


def is_rehearsed(tensors: Sequence[Tensor]) -> bool:
    """Tell whether a compiler runs this for shapes alone: without values, and nothing is put into a graph."""
    return bool(tensors) and isinstance(tensors[0], _WITHOUT_VALUES) and proxy_mode() is None


def new_ticket(*_: object) -> Tensor:
    """A ticket where a graph is traced. On the CPU, whatever is seen."""
    return torch.empty(1, dtype=torch.uint32, device="cpu")


for _operation, _run, _key in (
    (_TAP, _tap, "CompositeImplicitAutograd"),
    (_SEE_FIRST, see_first, "CompositeExplicitAutograd"),
    (_SEE, see, "CompositeExplicitAutograd"),
    (_SEE_GRADIENT, see_gradient, "CompositeExplicitAutograd"),
    (_TICKET_AT, ticket_at, "CompositeExplicitAutograd"),
):
    library.impl(_operation._schema.name.partition("::")[2], _run, _key)
torch.library.register_fake(_SEE_FIRST._schema.name, new_ticket, lib=library)
torch.library.register_fake(_SEE._schema.name, new_ticket, lib=library)
torch.library.register_fake(_TICKET_AT._schema.name, new_ticket, lib=library)
torch.library.register_fake(_SEE_GRADIENT._schema.name, lambda *_: None, lib=library)
has_side_effect(_TAP)

call_plainly(_SEE_FIRST, see_first, numbers_calls=True, returns=torch.uint32, handles=1, others=4)
call_plainly(_SEE, see, numbers_calls=True, returns=torch.uint32, handles=1, ticket=4)
call_plainly(_SEE_GRADIENT, see_gradient, returns=None, ticket=1)
