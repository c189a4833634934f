"""Where the first number that is not finite is made, from what the graph of a failing step still holds.

The loss is looked at before each pass. Where it is not finite its graph tells which node made that. A backward pass has
freed its graph when its gradients turn out not to be finite: so the few nodes whose derivative may be infinite are
looked at before each pass, at the places at which they were found at the looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from retrograd.facts.graph_births import BornInGraph, find_birth
from retrograd.facts.nonfinite_reasons import describe_values, find_gradient_reason, operation_of
from retrograd.facts.source import FactHost, FactSource
from retrograd.history.fact import NOW
from retrograd.history.facts import NonFinite
from retrograd.history.sink import Moment
from retrograd.hooks.engine import next_sequence_number, without_functions
from retrograd.hooks.nodes import edges_of, number_of
from retrograd.hooks.nonfinite import is_fine, read_saved
from retrograd.hooks.operation_notes import NotedOperation, OperationNotes

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


@dataclass(frozen=True, slots=True)
class _Structure:
    """Operations between a forward and its pass, at a look."""

    noted: Sequence[NotedOperation]
    spans: Sequence[tuple[int, int]]

    def find(self, number: int, kind: str) -> NotedOperation | None:
        """The operation that a node belongs to, by its number, counted from the first one of the forward."""
        for operation, (first, last) in zip(self.noted, self.spans, strict=False):
            if first <= number < last and (operation.node == kind or last - first > 1):
                return operation
        return None

    def find_only(self, kind: str) -> NotedOperation | None:
        """The one operation whose result is of this kind of node; None where there are several."""
        found = [operation for operation in self.noted if operation.node == kind]
        return found[0] if len({operation.line for operation in found}) == 1 else None


@dataclass(frozen=True, slots=True)
class _Warning:
    """A node whose derivative is not finite, though all that it took and made is."""

    moment: Moment
    kind: str
    number: int
    reason: str
    operands: Mapping[str, str]


class NonFiniteLook(FactSource):
    """Notes where the first number was made that is not finite, as far as that is known."""

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
        self._structures.appendleft(_Structure(tuple(notes.noted), tuple(notes.spans)))

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """Nodes are counted from here."""
        if not self._is_open:
            self._base = next_sequence_number()
            self._is_open = True

    def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
        """Is the loss finite?"""
        self._is_open = False
        with without_functions():
            known = [root for root in roots if root.is_cpu and root.grad_fn is not None]
            bad = [root for root in known if not is_fine(root)]
        if bad and not self._is_over and self._told < MOST_TOLD:
            self._told += 1
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
            node = _follow(root, path)
            if type(node).__name__ != kind:
                continue
            saved = read_saved(node)
            reason = find_gradient_reason(kind, saved)
            if reason:
                operands = {name: describe_values(each) for name, each in saved.items() if isinstance(each, Tensor)}
                yield _Warning(self.host.now, kind, number_of(node) - self._base, reason, operands)

    def _tell(self, born: BornInGraph | None) -> None:
        if born is None:
            return
        warning = self._warning
        if born.born == "update" and warning is not None:
            self.host.note_fact(self._describe_warning(warning))
        else:
            self.host.note_fact(self._describe(born))

    def _describe_warning(self, warning: _Warning) -> NonFinite:
        operation = self._find_operation(warning.number, warning.kind)
        return NonFinite(
            name=operation.module if operation is not None else "",
            born="backward",
            operation=operation.name if operation is not None else operation_of(warning.kind),
            line=operation.line if operation is not None else "",
            reason=warning.reason,
            operands=warning.operands,
            moment=warning.moment,
        )

    def _describe(self, born: BornInGraph) -> NonFinite:
        operation = self._find_operation(born.number - self._base, born.kind) if born.leaf is None else None
        parameter = self.host.name_parameter(born.leaf) if born.leaf is not None else None
        return NonFinite(
            name=operation.module if operation is not None else parameter or "",
            born=born.born,
            operation=operation.name if operation is not None else born.operation,
            line=operation.line if operation is not None else "",
            reason=born.reason,
            operands={name: describe_values(each) for name, each in born.operands.items()},
            moment=self._fine if born.born == "update" else NOW,
        )

    def _find_operation(self, number: int, kind: str) -> NotedOperation | None:
        found = [structure.find(number, kind) for structure in self._structures]
        found += [structure.find_only(kind) for structure in list(self._structures)[:1]]
        return next((operation for operation in found if operation is not None), None)


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


def _follow(root: Any, path: Path) -> Any:
    node = root
    for edge in path:
        edges = edges_of(node)
        if node is None or edge >= len(edges):
            return None
        node = edges[edge][0]
        if node is None:
            return None
    return node
