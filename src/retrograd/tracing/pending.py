"""Gradients on their way: what has been computed when a pass fails, and has not reached the node that it goes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from retrograd.engine.fitting import InputBuffer, check_number
from retrograd.engine.gradients import Gradients
from retrograd.engine.replayer import run_from
from retrograd.errors import StepperError
from retrograd.hooks.nodes import edges_of, root_edges

Incoming = tuple[Tensor | None, ...]


class Pending:
    """The gradients that can finish a pass that has failed: ``trace.pending``, where the trace is resumable.

    Attributes:
        node: torch's node that was running last.
        incoming: the gradients that came in to it, after the program's own hooks.
    """

    def __init__(self, roots: Sequence[Any], gradients: Sequence[Any]) -> None:
        self.node: Any = None
        self.incoming: Incoming = ()
        self._roots = tuple(roots)  # before torch 2.13 the object of a Python Function does not keep its node
        self._buffers: dict[Any, InputBuffer] = {}
        for (node, slot), gradient in zip(root_edges(list(roots)), gradients, strict=True):
            self._arrive(node, slot, gradient)

    def begins(self, node: Any, incoming: Incoming) -> None:
        """A node takes what has arrived for it."""
        self._buffers.pop(node, None)
        self.node, self.incoming = node, incoming

    def ends(self, node: Any, outgoing: Incoming) -> None:
        """A node has run."""
        self.node, self.incoming = None, ()
        edges = edges_of(node)
        check_number(node, outgoing, edges)
        for gradient, (following, slot) in zip(outgoing, edges, strict=False):
            if following is not None:
                self._arrive(following, slot, gradient)

    @property
    def waiting(self) -> dict[Any, Incoming]:
        """The nodes that something has arrived for, and what; the one that failed is not among them."""
        return {node: tuple(buffer.gradients) for node, buffer in self._buffers.items()}

    def resume(self, incoming: Tensor | Sequence[Tensor | None] | None = None, *, accumulate: bool = True) -> Gradients:
        """Finish the pass with :func:`rg.run_from`, from the node that failed on.

        What ran before is not run again. With ``accumulate`` every ``.grad`` becomes what the whole pass would give.

        Args:
            incoming: gradients for the node that failed, instead of those that came in.
            accumulate: whether to add to the ``.grad`` of the leaves.

        Raises:
            StepperError: no node had begun, or all had ended.
            Exception: whatever a node raises.
        """
        if self.node is None:
            raise StepperError(
                "The pass did not fail inside a node, so there is nowhere to go on from.",
                repair="run it from another node: rg.run_from({node: gradients}).",
            )
        if incoming is None:
            given = self.incoming
        elif isinstance(incoming, Tensor):
            given = (incoming, *self.incoming[1:])
        else:
            given = tuple(incoming)
        return run_from({**self.waiting, self.node: given}, accumulate=accumulate)

    def _arrive(self, node: Any, slot: int, gradient: Tensor | None) -> None:
        if node not in self._buffers:
            self._buffers[node] = InputBuffer(node)
        self._buffers[node].add(slot, gradient)
