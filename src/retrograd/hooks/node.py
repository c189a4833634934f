"""The gradient of a module's input *through this module*, from hooks on the nodes that feed it.

The nodes between the outputs and the input's gradient edge are found by walking back from the outputs and
stopping at that edge. A node whose next edge is the input's edge computes a part of the gradient; the sum of the
parts is what a full backward hook calls ``grad_input``, with nothing inserted into the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from retrograd.hooks.deep_graphs import DeepGraphGuard

_ALWAYS = 2**63  # AccumulateGrad carries the largest number: it is a leaf, and nothing lies behind it


def edge_of(tensor: torch.Tensor) -> GradientEdge | None:
    """Where the gradient of this tensor goes, as it is now; None when it needs none."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None


class InputGradient:
    """Adds the parts of one input's gradient in one call, and hands the sum on once a pass.

    Args:
        see: called with the sum.
        edge: the input's edge, taken before the module ran.
    """

    __slots__ = ("_handles", "_missing", "_parts", "_see", "_total", "edge")

    def __init__(self, see: Callable[[torch.Tensor], None], edge: GradientEdge) -> None:
        self._see = see
        self.edge: GradientEdge | None = edge
        self._parts = 0
        self._missing = 0
        self._total: torch.Tensor | None = None
        self._handles: list[RemovableHandle] = []

    def expect(self) -> None:
        """One more node feeds the edge."""
        self._parts += 1
        self._missing += 1

    def own(self, handle: RemovableHandle) -> None:
        """Take over a hook that feeds this gradient."""
        self._handles.append(handle)

    def add(self, part: torch.Tensor | None) -> None:
        """A node has run; ``part`` is None where it found nothing to pass on."""
        if part is not None:
            self._total = part if self._total is None else self._total.detach() + part.detach()
        self._missing -= 1
        if self._missing == 0:
            self.finish()

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
        """Whether some parts have come and others have not (a branch that this pass does not run)."""
        return self._missing != self._parts


def hook_input_gradients(
    inputs: Sequence[InputGradient],
    outputs: Iterable[torch.Tensor],
    first_number: int,
    guard: DeepGraphGuard,
) -> None:
    """Set hooks on all nodes of one module call that feed the edges of its inputs.

    Args:
        inputs: what to feed.
        outputs: the module's outputs that require grad.
        first_number: sequence number of the first node that the call could have made; older nodes lie outside.
        guard: told of every node that is looked at.
    """
    wanted: dict[tuple[Any, int], list[InputGradient]] = {}
    for gradient in inputs:
        if gradient.edge is not None:
            wanted.setdefault((gradient.edge.node, gradient.edge.output_nr), []).append(gradient)
    stops = {node for node, _ in wanted}
    queue: list[Any] = []
    seen: set[Any] = set()
    for output in outputs:
        node = output.grad_fn
        targets = wanted.get((node, output.output_nr))
        if targets:  # the module hands its input on: its gradient is the output's
            for gradient in targets:
                gradient.expect()
                gradient.own(output.register_hook(gradient.add))
        elif node is not None and node not in seen:
            seen.add(node)
            queue.append(node)
    made: list[Any] = []
    while queue:
        node = queue.pop()
        made.append(node)
        slots = []
        for slot, (following, number) in enumerate(node.next_functions):
            if following is None:
                continue
            for gradient in wanted.get((following, number), ()):
                gradient.expect()
                slots.append((slot, gradient))
            if following in seen or following in stops or following._sequence_nr() >= _ALWAYS:
                continue
            seen.add(following)
            if following._sequence_nr() >= first_number:
                queue.append(following)
        if slots:
            handle = node.register_hook(_feed(slots))
            for _, gradient in slots:
                gradient.own(handle)
    for gradient in inputs:
        gradient.let_go()
    for node in sorted(made, key=lambda item: item._sequence_nr()):
        guard.saw(node)


def _feed(slots: list[tuple[int, InputGradient]]) -> Callable[[tuple[Any, ...], tuple[Any, ...]], None]:
    def after_node(grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> None:
        for slot, gradient in slots:
            gradient.add(grad_inputs[slot])

    return after_node
