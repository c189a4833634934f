"""Gradients as torch finds them: of one tensor, of a module's input *through this module*, of one use of a tensor.

A tensor's gradient is watched with the least work, and with nothing inserted into the graph.

For a module's input the nodes between the outputs and the input's gradient edge are found by walking back from the
outputs and stopping at that edge. A node whose next edge is the input's edge computes a part of the gradient; the sum
of the parts is what a full backward hook calls ``grad_input``, with nothing inserted into the graph.

A tensor has one gradient, the sum over all its uses. Where rules change one use and leave the others alone, that use is
given another tensor over the same memory, with a node of ours between (:func:`branch`): for rewriting alone, never for
reading.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.core.hooks.engine import is_compiling, next_sequence_number, uncompiled
from retrograd.core.hooks.listeners import HookEntry, SeeGradient, enter_node, hooks_on
from retrograd.core.hooks.nodes import LEAF_NUMBER, number_of
from retrograd.core.hooks.reach import FREE_DEPTH, DeepGraphGuard
from retrograd.core.hooks.storages import is_held_elsewhere

ChangeGradient = Callable[[Tensor | None], Tensor | None]


def watch_gradient(tensor: Tensor, see: SeeGradient) -> HookEntry:
    """Call ``see(gradient)`` with what each pass finds for a tensor; for a leaf, before it is added to ``.grad``.

    Where tensors are pickled whole, torch says so of each hook that is not marked with ``__torch_unserializable__``.
    """
    return HookEntry(see, hooks_on(tensor))


def change_gradient(tensor: Tensor, change: ChangeGradient) -> None:
    """Let ``change(gradient)`` take the place of a tensor's gradient, before all hooks that the tensor has by now.

    So the rules of an outer module, whose result it may be too, come before those of an inner one, and all of them
    before whoever reads. :func:`leave_gradient` takes the hook back.
    """
    table: Any = tensor._backward_hooks
    if table is None:
        table = hooks_on(tensor)
    if not table:
        table[change] = change
        return
    earlier = list(table.items())
    table.clear()  # torch goes by the order of insertion, whatever is moved within the table
    table[change] = change
    table.update(earlier)


def leave_gradient(tensor: Tensor, change: ChangeGradient) -> None:
    """Stop calling ``change``."""
    if tensor._backward_hooks is not None:
        tensor._backward_hooks.pop(change, None)  # type: ignore[call-overload]


def after_accumulation(leaf: Tensor, see: SeeGradient) -> Callable[[], None]:
    """Call ``see(leaf)`` whenever a gradient has been added to its ``.grad``; returns what takes the hook back."""
    table: Any = leaf._post_accumulate_grad_hooks
    if table is None:
        leaf._post_accumulate_grad_hooks = table = OrderedDict()
    return HookEntry(see, table).remove


def shares_memory(tensor: Tensor) -> bool:
    """Return whether anything besides this one tensor holds the memory that its elements lie in, as far as can be seen.

    A gradient of which that is not so becomes the ``.grad`` of a parameter as it is, and is written into later.
    """
    return tensor.layout is not torch.strided or is_held_elsewhere(tensor)


class GradientWatch:
    """The hooks that one place sets on tensors, so that they can be taken back.

    ``watch(tensor)`` does what ``tensor.register_hook(see)`` does, for half its cost: the handle that torch makes for
    each hook is left out, and only the last hooked tensor's table of hooks is remembered (weakly).

    Args:
        see: called with the gradient; with None where a node has several outputs and others of them were used.
        guard: notified of every node that is looked at.
        leaf_handles: gathers the handles of hooks on leaves. Those outlive the graph, so whoever owns the list removes
            them when the step is over.
        leaf_found: called when a tensor is a leaf: its gradient may become its ``.grad``, and be changed later.

    Attributes:
        see, guard: the same.
    """

    __slots__ = ("_leaf_found", "_leaf_handles", "_table", "guard", "see")

    def __init__(
        self,
        see: SeeGradient,
        guard: DeepGraphGuard,
        leaf_handles: list[HookEntry],
        leaf_found: Callable[[], None] = lambda: None,
    ) -> None:
        self.see = see
        self.guard = guard
        self._leaf_handles = leaf_handles
        self._leaf_found = leaf_found
        self._table: weakref.ref[OrderedDict[Any, Any]] | None = None

    def watch(self, tensor: Tensor) -> None:
        """Call ``see(gradient)`` when the gradient of this tensor, as it is now, has been computed."""
        node = tensor.grad_fn  # before the table is asked for: an in-place change of a base renews both
        if node is None:
            self._watch_leaf(tensor)
            return
        table: Any = tensor._backward_hooks
        if table is None:
            tensor._backward_hooks = table = OrderedDict()
            node._register_hook_dict(tensor)
        table[self.see] = self.see  # torch's own keys are numbers, so ours never meets one
        self._table = weakref.ref(table)
        guard = self.guard
        guard.count += 1
        if guard.count > FREE_DEPTH:
            guard.string(node)

    @property
    def is_over(self) -> bool:
        """True if the tensor that was hooked last is gone, and its node too, so that no gradient of it can come."""
        return self._table is not None and self._table() is None

    def _watch_leaf(self, leaf: Tensor) -> None:
        hooks = leaf._backward_hooks
        if hooks is None or self.see not in hooks.values():
            self._leaf_handles.append(watch_gradient(leaf, self.see))
            self._leaf_found()

    def remove(self) -> None:
        """Take back the hook that was set last."""
        table = self._table() if self._table is not None else None
        if table is not None:
            table.pop(self.see, None)
        self._table = None


def edge_of(tensor: Tensor) -> tuple[GradientEdge, int] | None:
    """Where the gradient of this tensor goes, as it is now, and the number of the oldest node on the way there.

    None when it needs none. A tensor that was branched off stands for what it came from, for there arrives what rules
    have made of its gradient.
    """
    if not tensor.requires_grad:
        return None
    return origin_of(tensor) or (get_gradient_edge(tensor), LEAF_NUMBER)


class InputGradient:
    """Adds the parts of one input's gradient in one call, and hands the sum on once a pass.

    Args:
        see: called with the sum.
        edge: the input's edge, taken before the module ran.
        first_number: sequence number of a node before the module's own that leads to that edge.
    """

    __slots__ = ("_handles", "_missing", "_parts", "_see", "_total", "edge", "first_number")

    def __init__(self, see: Callable[[Tensor], None], edge: GradientEdge, first_number: int = LEAF_NUMBER) -> None:
        self._see = see
        self.edge: GradientEdge | None = edge
        self.first_number = first_number
        self._parts = 0
        self._missing = 0
        self._total: Tensor | None = None
        self._handles: list[HookEntry] = []

    def expect(self, handle: HookEntry) -> None:
        """Expect another part, through this hook."""
        self._parts += 1
        self._missing += 1
        self._handles.append(handle)

    @uncompiled
    def add(self, part: Tensor | None) -> None:
        """A node has run; ``part`` is None where it found nothing to pass on."""
        if is_compiling():
            return
        if part is not None:
            self._total = part if self._total is None else self._total.detach() + part.detach()
        self._missing -= 1
        if self._missing == 0:
            self.finish()

    add.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Hand on what has come: the pass is over, or all parts are there."""
        total, self._total = self._total, None
        self._missing = self._parts
        if total is not None:
            self._see(total)

    def drop(self) -> None:
        """Forget what has come: the pass has failed."""
        self._total = None
        self._missing = self._parts

    def remove(self) -> None:
        """Take the hooks back."""
        self.drop()
        while self._handles:
            self._handles.pop().remove()

    def let_go(self) -> None:
        """All hooks are set: hold the graph no longer."""
        self.edge = None

    @property
    def unfinished(self) -> bool:
        """True if some parts have come and others have not (a branch that this pass does not run)."""
        return self._missing != self._parts


Change = Callable[[Tensor | None], Tensor | None]
Wanted = dict[tuple[Any, int], list[InputGradient]]


def hook_input_gradients(
    inputs: Sequence[InputGradient],
    outputs: Iterable[Tensor],
    first_number: int,
    guard: DeepGraphGuard,
    leaf_handles: list[HookEntry],
) -> None:
    """Set hooks on all nodes of one module call that feed the edges of its inputs.

    An input that is handed on as an output has all of that tensor's gradient: one tensor cannot be told from itself.

    Args:
        inputs: what to feed.
        outputs: the module's outputs that require grad.
        first_number: sequence number of the first node that the call could have made; older nodes lie outside.
        guard: notified of every node that is looked at.
        leaf_handles: gathers the handles of hooks on leaves, which outlive the graph.
    """
    wanted: Wanted = {}
    for gradient in inputs:
        if gradient.edge is not None:
            wanted.setdefault((gradient.edge.node, gradient.edge.output_nr), []).append(gradient)
    ends = {node for node, _ in wanted}
    starts = []
    for output in outputs:
        node, number = get_gradient_edge(output)[:2]
        starts.append(node)
        for gradient in wanted.pop((node, number), ()):
            _hand_on(gradient, output, leaf_handles)
    made = _walk(starts, ends, min([first_number, *(gradient.first_number for gradient in inputs)]))
    for node in made:
        slots = _find_slots(node, wanted)
        if slots:
            handle = enter_node(node.register_hook, _Feed(slots))
            for _, gradient in slots:
                gradient.expect(handle)
    for gradient in inputs:
        gradient.let_go()
    for node in sorted(made, key=number_of):
        guard.saw(node)


def change_input_gradient(
    edge: GradientEdge,
    outputs: Iterable[Tensor],
    first_number: int,
    change: Change,
    guard: DeepGraphGuard,
    watched: Any,
) -> bool:
    """Let ``change`` take the place of what one node hands on to an edge; returns whether it is one node alone.

    Args:
        edge: the edge of a module's input, as it was before the module ran.
        outputs: the module's outputs that require grad.
        first_number: sequence number of the first node that the call could have made.
        change: called with the gradient; what it returns, if not None, flows on.
        guard: notified of every node that is looked at.
        watched: a node whose gradient ``change`` acts on already; where it is that one, nothing is left to be done.
    """
    made = _walk([output.grad_fn for output in outputs], {edge.node}, first_number)
    for node in sorted(made, key=number_of):
        guard.saw(node)
    feeding = [
        (node, slot) for node in made for slot, each in enumerate(node.next_functions) if each == tuple(edge)[:2]
    ]
    if len(feeding) != 1:
        return False
    node, slot = feeding[0]
    if node is not watched:
        enter_node(node.register_hook, _ResultChange(slot, change))
    return True


def _hand_on(gradient: InputGradient, output: Tensor, leaf_handles: list[HookEntry]) -> None:
    handle = watch_gradient(output, gradient.add)
    gradient.expect(handle)
    if output.is_leaf:
        leaf_handles.append(handle)


def _walk(starts: Iterable[Any], ends: set[Any], first_number: int) -> list[Any]:
    """All nodes that the call made, as far as they can be reached without passing an end."""
    seen = set(ends)
    found: list[Any] = []
    queue = list(starts)
    while queue:
        node = queue.pop()
        if node is not None and node not in seen and first_number <= number_of(node) < LEAF_NUMBER:
            seen.add(node)
            found.append(node)
            queue.extend(following for following, _ in node.next_functions)
    return found


def _find_slots(node: Any, wanted: Wanted) -> list[tuple[int, InputGradient]]:
    """The slots of a node that feed wanted edges, and what they feed."""
    return [(slot, gradient) for slot, edge in enumerate(node.next_functions) for gradient in wanted.get(edge, ())]


class _Feed:
    """The hook behind a node: hands its results on."""

    __slots__ = ("_slots",)

    def __init__(self, slots: list[tuple[int, InputGradient]]) -> None:
        self._slots = slots

    @uncompiled
    def __call__(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> None:
        for slot, gradient in self._slots:
            gradient.add(grad_inputs[slot])


class _ResultChange:
    """The hook behind a node: changes one of its results."""

    __slots__ = ("_change", "_slot")

    def __init__(self, slot: int, change: Change) -> None:
        self._slot = slot
        self._change = change

    @uncompiled
    def __call__(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        changed = self._change(grad_inputs[self._slot])
        if changed is None:
            return None
        return (*grad_inputs[: self._slot], changed, *grad_inputs[self._slot + 1 :])


_origins = WeakIdKeyDictionary()


def branch(tensor: Tensor, use: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """A tensor that has the same elements in the same memory, and a gradient of its own.

    Args:
        tensor: one that requires grad, while grad is enabled.
        use: makes it, in one node; left out, it is a view.
    """
    edge, number = get_gradient_edge(tensor), next_sequence_number()
    branched = tensor.view_as(tensor) if use is None else use(tensor)
    _origins[branched] = (edge, number)
    return branched


def origin_of(tensor: Tensor) -> tuple[GradientEdge, int] | None:
    """For a tensor that was branched off: the edge of what it came from, and the number of the node between."""
    found: tuple[GradientEdge, int] | None = _origins.get(tensor) if len(_origins) else None
    return found
