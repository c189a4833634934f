"""The result of a search: kinks, the worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload

from retrograd.history.facts import Kink

_HEADINGS = ("node", "at", "elements", "torch takes", "gives", "not finite", "line")


class Kinks(Sequence[Kink]):
    """Nodes whose inputs lie where their function has no derivative. Printed, it is a table.

    Attributes:
        unseen: kinds of nodes that have such points, and had not saved what would tell → how many.
    """

    def __init__(self, found: Iterable[Kink], unseen: Mapping[str, int] | None = None) -> None:
        self._found = tuple(sorted(found, key=lambda kink: (kink.nonfinite <= 0, kink.finite, kink.is_usual)))
        self.unseen = Counter(unseen or {})

    @overload
    def __getitem__(self, index: int) -> Kink: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Kink, ...]: ...
    def __getitem__(self, index: int | slice) -> Kink | tuple[Kink, ...]:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Kink]:
        return iter(self._found)

    def __str__(self) -> str:
        cells = [_HEADINGS, *map(_describe, self._found)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells] if self._found else ["no kinks"]
        if self.unseen:
            nodes = ", ".join(f"{count} × {name}" for name, count in self.unseen.items())
            lines.append(f"not seen, as they have not saved what they were given: {nodes}")
        return "\n".join(lines)

    __repr__ = __str__


def _describe(kink: Kink) -> tuple[str, ...]:
    return (
        f"{kink.name}:{kink.node}" if kink.name else kink.node,
        f"{kink.operation} {kink.where}",
        f"{int(kink.value):,} of {kink.total:,}",
        kink.convention,
        kink.gives,
        f"{kink.nonfinite:,}" if kink.nonfinite > 0 else "",
        kink.line.rsplit("/", 1)[-1],
    )
