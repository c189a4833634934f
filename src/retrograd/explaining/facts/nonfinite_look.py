"""Where the first number that is not finite is made, from what the graph of a failing step still holds.

The loss is looked at before each pass. Where it is not finite its graph tells which node made that. A backward pass has
freed its graph when its gradients turn out not to be finite: so the few nodes whose derivative may be infinite are
looked at before each pass, at the places at which they were found at the looks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from retrograd.core.history.fact import NOW
from retrograd.core.history.facts import NonFinite, Operation
from retrograd.core.history.sink import Moment
from retrograd.core.hooks.engine import next_sequence_number, without_functions
from retrograd.core.hooks.finite import is_fine, read_saved
from retrograd.core.hooks.nodes import edges_of, number_of
from retrograd.core.recording.deliveries import is_far
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.explaining.facts.nonfinite_reasons import (
    UNNAMED_LEAF,
    describe_values,
    find_gradient_reason,
    operation_of,
)
from retrograd.explaining.facts.operation_notes import OperationNotes

if TYPE_CHECKING:
    from retrograd.explaining.facts.graph_births import BornInGraph

_PARTED = frozenset(
    {"SqrtBackward0", "RsqrtBackward0", "ReciprocalBackward0", "PowBackward0", "LogBackward0", "Log2Backward0",
     "Log10Backward0", "Log1PBackward0", "AcosBackward0", "AsinBackward0", "DivBackward0", "ExpBackward0"}
)  # fmt: skip
"""Kinds of nodes whose derivative may be infinite where the function is not, or not be needed there."""

_MOST_PARTED, _MOST_SEARCHED, _DEEPEST = 6, 5000, 64
"""Paths that are looked at; nodes that are searched for them, and their greatest distance from the loss."""

MOST_TOLD = 4
"""Times that a loss which was finite before is not, and that are looked into."""

Path = tuple[int, ...]
"""The edge to take from each node, beginning at the loss."""


class _Structure:
    """Operations between a forward and its pass, at a look.

    Args:
        step: of the look.
        notes: the operations.
    """

    def __init__(self, step: int, notes: OperationNotes) -> None:
        made = [(span, each) for span, each in zip(notes.spans, notes.noted, strict=False) if span[0] < span[1]]
        self.step = step
        self._made = sorted(made, key=lambda each: each[0])
        self._firsts = [first for (first, _), _ in self._made]

    def find(self, number: int, kinds: Mapping[int, str]) -> Operation | None:
        """Find the operation that a node belongs to; None where the nodes of a step are not those of this look.

        Args:
            number: of the node, counted from the first one of the forward.
            kinds: classes of nodes of that step, its own among them, by such numbers.
        """
        found = self._at(number)
        return found[1] if found is not None and all(map(self._fits, kinds, kinds.values())) else None

    def _fits(self, number: int, kind: str) -> bool:
        """Return whether a node can be of the operation that made nodes at its place."""
        found = self._at(number)
        return (
            found is None or found[1].node == kind or number < found[0][1] - 1
        )  # its last one, the result's, is noted

    def _at(self, number: int) -> tuple[tuple[int, int], Operation] | None:
        index = bisect_right(self._firsts, number) - 1
        return self._made[index] if index >= 0 and number < self._made[index][0][1] else None


@dataclass(frozen=True, slots=True)
class _Warning:
    """A node whose derivative is not finite, though all that it took and made is."""

    moment: Moment
    number: int
    kinds: Mapping[int, str]
    kind: str
    reason: str
    operands: Mapping[str, str]


class NonFiniteLook(FactSource):
    """Records where the first number was made that is not finite, as far as that is known."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._structures: deque[_Structure] = deque(maxlen=4)
        self._paths: list[tuple[Path, str]] = []
        self._warning: _Warning | None = None
        self._base = 0
        self._told = 0
        self._is_open = self._is_over = False
        self._fine = NOW
        """When the last loss was finite that was looked at: a weight that is not was written after that."""

    def operations_noted(self, notes: OperationNotes) -> None:
        """Remember them, for their lines."""
        self._structures.appendleft(_Structure(self.host.step, notes))

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """Nodes are counted from here."""
        if not self._is_open:
            self._base = next_sequence_number()
            self._is_open = True

    def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
        """Check the loss before its backward."""
        self._is_open = False
        with without_functions():
            known = [root for root in roots if not is_far(root) and root.grad_fn is not None]
            bad = [root for root in known if not is_fine(root)]
        if bad and not self._is_over and self._told < MOST_TOLD:
            self._told += 1
            from retrograd.explaining.facts.graph_births import find_birth

            self._tell(find_birth(bad))
        self._is_over = bool(bad)
        if bad or not known:
            return
        self._fine = self.host.now
        if self.host.is_look:
            self._paths = list(_find_parted(known[0].grad_fn))
        self._warning = next(self._look_ahead(known[0].grad_fn), None) if self._paths else None

    def _look_ahead(self, root: Any) -> Iterator[_Warning]:
        for path, kind in self._paths:
            nodes = _follow(root, path)
            if not nodes or type(node := nodes[-1]).__name__ != kind:
                continue
            saved = read_saved(node)
            reason = find_gradient_reason(kind, saved)
            if reason:
                operands = {name: describe_values(each) for name, each in saved.items() if isinstance(each, Tensor)}
                kinds = {number_of(each): type(each).__name__ for each in nodes}
                yield _Warning(self.host.now, number_of(node) - self._base, self._count(kinds), kind, reason, operands)

    def _tell(self, born: BornInGraph | None) -> None:
        if born is None:
            return
        warning = self._warning
        if born.born == "update" and warning is not None:
            self.host.note_fact(self._describe_warning(warning))
        else:
            self.host.note_fact(self._describe(born))

    def _describe_warning(self, warning: _Warning) -> NonFinite:
        return NonFinite(
            **self._locate(warning.number, warning.kinds, operation_of(warning.kind), warning.moment.step),
            born="backward",
            reason=warning.reason,
            operands=warning.operands,
            certain=False,
            moment=warning.moment,
        )

    def _describe(self, born: BornInGraph) -> NonFinite:
        parameter = self.host.name_parameter(born.leaf) if born.leaf is not None else None
        return NonFinite(
            **(self._find_place(born) if born.leaf is None else {"name": parameter or ""}),
            born="input" if born.born == "update" and not parameter else born.born,
            reason=born.reason if born.born == "forward" else self._tell_broken(born),
            operands={name: describe_values(each) for name, each in born.operands.items()},
            made=born.made,
            certain=born.is_made,
            moment=self._fine if born.born == "update" and parameter else NOW,
        )

    def _tell_broken(self, born: BornInGraph) -> str:
        """Why a tensor is not finite that the graph took so."""
        return UNNAMED_LEAF if born.leaf is not None and not self.host.name_parameter(born.leaf) else ""

    def _find_place(self, born: BornInGraph) -> dict[str, Any]:
        """Operation, module and line of what a graph has made."""
        return self._locate(born.number - self._base, self._count(born.kinds), born.operation, self.host.step)

    def _count(self, kinds: Mapping[int, str]) -> Mapping[int, str]:
        """Number nodes from the first one of the forward."""
        return {number - self._base: kind for number, kind in kinds.items() if number >= self._base}

    def _locate(self, number: int, kinds: Mapping[int, str], operation: str, step: int) -> dict[str, Any]:
        """Operation, module and line of a node, where its step has the nodes of a step at which these were noted."""
        for structure in self._structures:
            found = structure.find(number, kinds)
            if found is not None:
                noted = -1 if structure.step == step else structure.step
                return {"name": found.module, "operation": found.name, "line": found.line, "noted": noted}
        return {"operation": operation}


def _find_parted(root: Any) -> Iterator[tuple[Path, str]]:
    """The nearest nodes whose derivative may be infinite, and how they are reached.

    At a look the whole graph has been counted, and guarded, before.
    """
    waiting: deque[tuple[Any, Path]] = deque([(root, ())])
    known = {root}
    count = 0
    while waiting and len(known) < _MOST_SEARCHED and count < _MOST_PARTED:
        node, path = waiting.popleft()
        if type(node).__name__ in _PARTED and not _is_harmless(node):
            count += 1
            yield path, type(node).__name__
        for edge, (following, _) in enumerate(edges_of(node)):
            if following is not None and following not in known and len(path) < _DEEPEST:
                known.add(following)
                waiting.append((following, (*path, edge)))


def _is_harmless(node: Any) -> bool:
    exponent = read_saved(node).get("exponent", 0) if type(node).__name__ == "PowBackward0" else 0
    return isinstance(exponent, int | float) and exponent >= 1


def _follow(root: Any, path: Path) -> list[Any]:
    """The nodes on a path; none where there is no such path any more."""
    nodes = [root]
    for edge in path:
        edges = edges_of(nodes[-1])
        if edge >= len(edges) or edges[edge][0] is None:
            return []
        nodes.append(edges[edge][0])
    return nodes
