"""``rg.rerun``: run one node of a live graph again, alone.

A gradient on its way from one node to the next is reduced, cast and added up as the engine does it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor

from retrograd.core.errors import ReplayError
from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.nodes import (
    edges_of,
    inputs_of,
    is_leaf,
    is_python,
    name_of,
    number_of,
    root_edges,
    run_node,
    variable_of,
)
from retrograd.core.hooks.reach import find_nodes, guard_nodes
from retrograd.following.graph.walker import describe

Incoming = Tensor | None | Sequence[Tensor | None]


def rerun(
    node: Any, incoming: Incoming = (), *more: Tensor | None, raw: bool = False, create_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Run one node with these gradients, without the rest of the graph, as often as you like until it is freed.

    No hook is run: neither those on the node, nor those on tensors. No ``.grad`` is touched: not by a leaf's node, and
    not by a node that runs a backward pass of its own (reentrant checkpointing), where every ``.grad`` is put back.
    (What else such a pass runs, it runs: hooks on the tensors inside, the forward once more.)

    Args:
        node: a node of C++ or of a Python ``Function``; or a tensor, for the node that made it.
        incoming: one gradient for each result of the node's operation, of its shape, dtype and device; None where
            nothing comes in. A single one may be given bare; given for a tensor, it is the gradient of that tensor.
        more: the other gradients, where they are given bare: ``rg.rerun(node, *gradients)``.
        raw: whether to return what the node itself returned. By default each gradient is as the engine hands it on:
            summed over dimensions that were broadcast, and cast, to what the node that it goes to takes.
        create_graph: whether the run is recorded, for derivatives of it.

    Returns:
        One gradient for each edge (``node.next_functions``), as torch's hooks on the node would see them: None where
        there is none. (Of a Python ``Function`` that takes other things than tensors, None also for edges that lead
        nowhere, which hooks see.) Of a leaf's node: what it would add to ``.grad``.

    Raises:
        ReplayError: the gradients do not fit.
        NoGraphError: the tensor has no graph.
        FreedGraphError: a backward pass has freed what the node had saved.
    """
    if more:
        incoming = (incoming, *more)  # type: ignore[arg-type]  # one that is a list is refused
    ((found, slot),) = root_edges([node])
    gradients = arrange(found, slot if isinstance(node, Tensor) else None, incoming)
    if is_leaf(found):
        return gradients
    try:
        with torch.set_grad_enabled(create_graph):
            outgoing = _run_alone(found, gradients)
            return outgoing if raw else fit_outgoing(found, outgoing)
    except Exception as error:
        note(error, found, gradients)
        raise


def arrange(node: Any, slot: int | None, incoming: Incoming) -> tuple[Tensor | None, ...]:
    """Arrange gradients, one for each that the node takes, and each of the right kind.

    Args:
        node: the node.
        slot: where a bare gradient belongs; None: it is the only one.
        incoming: as the caller gave it.

    Raises:
        ReplayError: they are too few or too many, or one does not fit.
    """
    expected = wanted_by(node)
    if incoming is None or isinstance(incoming, Tensor):
        alone = slot is None
        incoming = (incoming,) if alone else [incoming if place == slot else None for place in range(len(expected))]
    gradients = tuple(incoming)
    if len(gradients) != len(expected):
        raise ReplayError(
            f"{name_of(node)} takes {len(expected)} gradients, not {len(gradients)}.",
            repair="give a tuple with one for each result of its operation, and None where nothing comes in.",
        )
    for place, (gradient, wanted) in enumerate(zip(gradients, expected, strict=True)):
        if gradient is not None and not _is_as_wanted(gradient, wanted):
            raise ReplayError(
                f"Incoming gradient {place} of {name_of(node)} must be {wanted}, and is {_name(gradient)}.",
                repair="give it the shape, dtype and device of the operation's result in the forward; "
                "nothing is broadcast or cast here.",
            )
    return gradients


def note(error: BaseException, node: Any, incoming: Sequence[Tensor | None]) -> None:
    """Add to an error which node raised it, and what came in to it."""
    number = "" if is_leaf(node) else f" (number {number_of(node)})"
    kinds = ", ".join("nothing" if each is None else _name(each) for each in incoming)
    error.add_note(f"retrograd: raised when {name_of(node)}{number} was run again; coming in: {kinds}")


def _run_alone(node: Any, incoming: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    if not is_python(node):
        return run_node(node, incoming)
    with CaughtGradients():
        return run_node(node, incoming)


def _is_as_wanted(gradient: Any, wanted: GradientSpec) -> bool:
    return (
        isinstance(gradient, Tensor)
        and (wanted.shape is None or wanted.shape == gradient.shape)
        and wanted.dtype in (None, gradient.dtype)
        and wanted.device == gradient.device
    )


def _name(gradient: Any) -> str:
    return str(describe(gradient)) if isinstance(gradient, Tensor) else type(gradient).__name__


# ---- nested passes ----


class CaughtGradients:
    """While it is entered, backward passes that this thread runs find something else in every ``.grad``.

    The node that ran the pass may read what was put there (a checkpoint does so with its own inputs), so
    :meth:`settle` is to be called once that node has returned.

    Args:
        begin_with: gives what a leaf's ``.grad`` shall be when a pass begins; a pass may write to it. Nothing by
            default.
    """

    def __init__(self, begin_with: Callable[[Tensor], Tensor | None] = lambda leaf: None) -> None:
        self._begin_with = begin_with
        self._thread = threading.get_ident()
        self._before: dict[int, tuple[ref[Tensor], Tensor | None]] = {}

    def __enter__(self) -> Self:
        backward_followers.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        backward_followers.remove(self)
        self.settle()

    def run_begins(self, run: EngineRun) -> None:
        """Put what was in ``.grad`` aside."""
        if threading.get_ident() != self._thread or not run.accumulates:
            return
        for leaf in _find_leaves(run):
            known = self._before.get(id(leaf))
            if known is None or known[0]() is not leaf:
                self._before[id(leaf)] = ref(leaf), leaf.grad
                leaf.grad = self._begin_with(leaf)

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """Do nothing: the node that ran the pass may still read ``.grad``."""

    def settle(self) -> list[tuple[Tensor, Tensor]]:
        """Put every ``.grad`` back.

        Returns:
            Leaves, and what their ``.grad`` had become. Leaves that the nested pass made for itself are gone.
        """
        if not self._before:
            return []
        became = []
        for find, before in self._before.values():
            leaf = find()
            if leaf is None:
                continue
            gradient, leaf.grad = leaf.grad, before
            if gradient is not None:
                became.append((leaf, gradient))
        self._before.clear()
        return became


def _find_leaves(run: EngineRun) -> Iterator[Tensor]:
    """Find the leaves whose ``.grad`` a pass may change."""
    if run.inputs:
        yield from (each for each in run.inputs if isinstance(each, Tensor))
        return
    nodes = find_nodes(root_edges(run.roots)).nodes
    guard_nodes(nodes)
    for node in nodes:
        leaf = variable_of(node)
        if leaf is not None:
            yield leaf


# ---- fitting ----


class GradientSpec(NamedTuple):
    """A gradient that a node takes.

    Attributes:
        shape: None for nested tensors, whose shape is not looked at.
        dtype: None where any will do.
        device: where it is to be.
    """

    shape: torch.Size | None
    dtype: torch.dtype | None
    device: torch.device

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.") if self.dtype else "any dtype"
        where = "" if self.device.type == "cpu" else f" on {self.device}"
        return f"{dtype}{list(self.shape) if self.shape is not None else '[nested]'}{where}"


def wanted_by(node: Any) -> tuple[GradientSpec, ...]:
    """All gradients that a node takes."""
    leaf = variable_of(node)
    return tuple(
        [
            GradientSpec(
                None if each.is_nested_tensor else torch.Size(each.shape),
                each.dtype if leaf is None else _grad_dtype(leaf),
                each.device,
            )
            for each in inputs_of(node)
        ]
    )


def _grad_dtype(leaf: Tensor) -> torch.dtype | None:
    return getattr(leaf, "grad_dtype", leaf.dtype)  # older versions of torch have no such attribute


def fit(gradient: Tensor, wanted: GradientSpec) -> Tensor:
    """A gradient as the next node takes it: summed over dimensions that the forward had broadcast, and cast.

    Raises:
        ReplayError: it has no such shape, nor one that such a shape is broadcast to.
    """
    shape, dtype, device = wanted
    if shape is not None and gradient.shape != shape:
        gradient = _reduce(gradient, shape)
    if dtype is not None and gradient.dtype != dtype:
        gradient = gradient.to(dtype)
    if gradient.device != device and not gradient.dim():
        gradient = gradient.to(device)
    return gradient


class InputBuffer:
    """The gradients that have come in to a node, each as the node takes it, and added up.

    Attributes:
        gradients: the sums; None where nothing has come in.
    """

    __slots__ = ("_specs", "gradients")

    def __init__(self, node: Any) -> None:
        self._specs = wanted_by(node)
        self.gradients: list[Tensor | None] = [None] * len(self._specs)

    def add(self, slot: int, gradient: Tensor | None) -> None:
        """Another gradient comes in.

        Raises:
            ReplayError: it does not fit.
        """
        if gradient is None:
            return
        gradient = fit(gradient, self._specs[slot])
        before = self.gradients[slot]
        self.gradients[slot] = gradient if before is None else add(before, gradient)


def fit_outgoing(node: Any, outgoing: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients that a node returned, each as the node that it goes to takes it; as it is where it goes nowhere."""
    edges = edges_of(node)
    check_number(node, outgoing, edges)
    return tuple(
        [
            fit(gradient, wanted_by(following)[slot]) if gradient is not None and following is not None else gradient
            for gradient, (following, slot) in zip(outgoing, edges, strict=False)
        ]
    )


def check_number(node: Any, outgoing: Sequence[Tensor | None], edges: Sequence[Any]) -> None:
    """Raises ReplayError where a node returned fewer gradients than it has edges."""
    if len(outgoing) < len(edges):
        raise ReplayError(f"{name_of(node)} returned {len(outgoing)} gradients for {len(edges)} edges.")


def add(old: Tensor, new: Tensor) -> Tensor:
    """The sum of two gradients that come in to one node, in the order in which the engine adds them."""
    if old.layout != torch.strided and new.layout == torch.strided:
        return new + old
    return old + new


def add_to_grad(leaf: Tensor, gradient: Tensor) -> None:
    """Add to ``.grad`` as the node of a leaf does, without the hooks that run after it."""
    before = leaf.grad
    if before is None:
        leaf.grad = gradient.clone() if torch.is_grad_enabled() else _copy(gradient, leaf)
    elif torch.is_grad_enabled() or (before.layout != torch.strided and gradient.layout == torch.strided):
        leaf.grad = add(before, gradient)
    else:
        before += gradient


def _copy(gradient: Tensor, leaf: Tensor) -> Tensor:
    """A copy in the memory layout of the leaf, as torch promises it of ``.grad``."""
    if gradient.layout != torch.strided or leaf.layout != torch.strided or gradient.is_nested:
        return gradient.clone()
    return torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)


def _reduce(gradient: Tensor, shape: torch.Size) -> Tensor:
    try:
        return gradient.sum_to_size(shape)
    except RuntimeError as error:
        raise ReplayError(
            f"A gradient of shape {list(gradient.shape)} cannot be summed to {list(shape)}.",
            repair="check the backward of the node that returned it.",
        ) from error
