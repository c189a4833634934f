"""At which node of a backward pass the first gradient that is not finite is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from retrograd.hooks.backward import EngineRun
from retrograd.hooks.backward_look import BackwardLook
from retrograd.hooks.engine import current_node, without_functions
from retrograd.hooks.node_tap import NodeTap, NodeTaps
from retrograd.hooks.nodes import is_python, name_of, number_of, peek, saved_of, variable_of
from retrograd.hooks.reach import PassNodes, read_links
from retrograd.hooks.result_watch import BornOperation, is_fine

_WATCHED = frozenset(
    {"SqrtBackward0", "RsqrtBackward0", "ReciprocalBackward0", "PowBackward0", "PowBackward1", "StdBackward0",
     "DivBackward0", "LogBackward0", "Log2Backward0", "Log10Backward0", "Log1PBackward0", "AcosBackward0",
     "AsinBackward0", "AtanhBackward0", "AcoshBackward0", "ExpBackward0", "MulBackward0", "NormBackward1",
     "LinalgVectorNormBackward0", "LogsumexpBackward0", "NormBackward0", "NormBackward2", "Atan2Backward0"}
)  # fmt: skip
"""Kinds of nodes of which values are needed to say why: they are held until the pass has ended."""


class BornGradient(NamedTuple):
    """A node that took finite gradients and gave one that is not.

    Attributes:
        node: its class.
        number: its sequence number.
        saved: what it had saved, where that was watched.
        leaf: the leaf at which it was found; None for another node.
        inside: what was kept of the operation of a Python Function that made it; None if it is none.
        source: ``file:line`` of the ``backward`` of that Function; empty for another node.
    """

    node: str
    number: int
    saved: dict[str, Any]
    leaf: Tensor | None
    inside: Any = None
    source: str = ""


class GradientBirths:
    """Watches one run of the engine, in the thread that asked for it, for what comes to a leaf.

    Args:
        taps: of the watcher.
        run: the run that is about to begin.
        fault: told of an error of ours.
        see: told of what a Python Function makes in its backward.
    """

    def __init__(
        self,
        taps: NodeTaps,
        run: EngineRun,
        fault: Callable[[Exception], None],
        see: Callable[[BornOperation], Any],
    ) -> None:
        self._look = BackwardLook(see, fault)
        self._taps = taps
        self._fault = fault
        self._pass = PassNodes(run)
        self._ran: list[Any] = []
        self._saved: dict[int, dict[str, Any]] = {}
        self._found: tuple[Any, Tensor | None] | None = None
        self._is_over = self._is_applied = False
        self._tap: NodeTap = taps.tap(self._pass, self._see_first, self._see, self._see_leaf)

    def end(self) -> BornGradient | None:
        """The run has ended: what was found, if anything."""
        self._taps.end(self._tap)
        self._look.next_node(None)
        try:
            return self._blame(*self._found) if self._found is not None and self._is_applied else None
        finally:
            self._pass.release()
            self._ran.clear()
            self._saved.clear()
            self._found = None

    def _see_first(self, incoming: Tensor | None) -> None:
        self._see((incoming,))

    def _see_leaf(self, incoming: tuple[Tensor | None, ...]) -> None:
        """What has come to no leaf has been masked."""
        if not self._is_applied:
            self._see(incoming)
            self._is_applied = self._found is not None and not _are_fine(incoming)

    def _see(self, incoming: tuple[Tensor | None, ...]) -> None:
        self._look.next_node(None)
        if self._is_over or self._found is not None:
            return
        try:
            node = current_node()
            if not _are_fine(incoming):
                self._found = node, variable_of(node)
                return
            self._ran.append(node)
            self._look.next_node(node)
            if type(node).__name__ in _WATCHED:
                self._saved[id(node)] = read_saved(node)
        except Exception as error:
            self._is_over = True
            self._fault(error)

    def _blame(self, node: Any, leaf: Tensor | None) -> BornGradient | None:
        """The node that ran before this one and gave it what is not finite."""
        reach = self._pass.reach
        place = reach.nodes.index(node)
        givers = {
            id(reach.nodes[giver])
            for giver, edges in enumerate(read_links(reach.links))
            if any(edge is not None and edge[0] == place for edge in edges)
        }
        ran = [each for each in self._ran if id(each) in givers]
        if not ran:
            return None
        blamed = next((each for each in reversed(ran) if id(each) in self._saved), ran[-1])
        saved = self._saved.get(id(blamed), {})
        return BornGradient(
            name_of(blamed), number_of(blamed), saved, leaf, self._look.found_in(blamed), source_of(blamed)
        )


def source_of(node: Any) -> str:
    """``file:line`` of the ``backward`` of a Python ``Function``; empty for another node."""
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None) if is_python(node) else None
    code = getattr(backward, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _are_fine(incoming: tuple[Tensor | None, ...]) -> bool:
    with without_functions():
        return all(each is None or is_fine(each) for each in incoming)


def read_saved(node: Any) -> dict[str, Any]:
    """What a node has saved: its tensors, detached, and plain values."""
    found: dict[str, Any] = {}
    for name, value in saved_of(node).items():
        if type(value).__name__ == "SavedTensor":
            tensor = peek(value)
            if tensor is not None:
                found[name] = tensor
        elif not isinstance(value, list | tuple) or not any(type(each).__name__ == "SavedTensor" for each in value):
            found[name] = value
    return found
