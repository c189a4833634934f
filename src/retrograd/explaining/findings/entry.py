"""Detectors of ours: each is an entry of a table of words, and a predicate."""

from __future__ import annotations

import functools
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from retrograd.core.runs.findings import Evidence, Finding, Severity
from retrograd.explaining.findings.chain import Chain
from retrograd.explaining.findings.detector import Detector, Words
from retrograd.explaining.findings.record import Record

Measured = Evidence | tuple[str, float | int | str] | tuple[str, float | int | str, str]
"""What was measured, its value, and what that was compared with."""


@dataclass(frozen=True, slots=True)
class Grounds:
    """What a table holds of one kind of finding.

    Attributes:
        checked: as ``precondition`` of :class:`Finding`.
        refute, repair: as those of :class:`Finding`; its detector's repair where that is empty.
        severity: how bad it is; None for that of its detector.
    """

    checked: tuple[str, ...] = ()
    refute: str = ""
    repair: str = ""
    severity: Severity | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What a table holds of a detector.

    Attributes:
        severity: of its findings, where the predicate does not decide.
        words: for the page of documentation; its repair is that of findings which have none of their own.
        explains: as that of :class:`Detector`.
        grounds: of its findings, by their kind; empty for the usual one.
    """

    severity: Severity
    words: Words
    explains: tuple[str, ...]
    grounds: Mapping[str, Grounds]


class Entry(Detector):
    """A detector of ours, by its slug in the table of its family.

    Args:
        family: whose table has its words.
        slug: its name.
        predicate: makes the findings of a record, by :meth:`finding`.
        is_of_losses: as that of :class:`Detector`.
    """

    def __init__(self, family: Family, slug: str, predicate: Predicate, *, is_of_losses: bool) -> None:
        self.slug, self.is_of_losses = slug, is_of_losses
        self._family, self._predicate = family, predicate

    @cached_property
    def row(self) -> Row:
        """What the table holds of it; read when it is needed, for most runs need none."""
        return self._family.rows[self.slug]

    @cached_property
    def words(self) -> Words:  # type: ignore[override]
        """As that of :class:`Detector`."""
        return self.row.words

    @cached_property
    def explains(self) -> tuple[str, ...]:  # type: ignore[override]
        """As that of :class:`Detector`."""
        return self.row.explains

    def check(self, record: Record) -> Iterable[Finding]:
        """See :class:`Detector`."""
        return self._predicate(record, self)

    def finding(
        self,
        message: str,
        *,
        case: str = "",
        severity: Severity | None = None,
        evidence: Iterable[Measured] = (),
        checked: Iterable[str] = (),
        **fields: Any,
    ) -> Finding:
        """Make a finding; what is left out is taken from the table.

        Args:
            message: one sentence.
            case: which of the kinds of findings of this detector, by its name in the table; empty for the usual one.
            severity: how bad it is, where that is not always the same.
            evidence: the values that it rests on.
            checked: what was checked so that this is no false alarm.
            fields: ``span`` and ``repair`` as for :meth:`find`, and other fields of :class:`Finding`.
        """
        grounds = self.row.grounds[case]
        return self.find(
            severity or grounds.severity or self.row.severity,
            message,
            evidence=[each if isinstance(each, Evidence) else Evidence(*each) for each in evidence],
            precondition=tuple(checked) or grounds.checked,
            **{"refute": grounds.refute, "repair": grounds.repair, **fields},
        )

    def finding_at(self, record: Record, chain: Chain, number: int, message: str, **fields: Any) -> Finding:
        """Make a finding about an operation: at its module, its step and its line."""
        site, line = record.place_of(chain, number)
        return self.finding(message, **{"site": site, "step": chain.step, "line": line, **fields})


Predicate = Callable[[Record, Entry], Iterable[Finding]]
"""Makes the findings of a record. It may raise :class:`CannotTell`, as ``check`` of a :class:`Detector`."""

JudgeOperation = Callable[[Record, Chain, int, Entry], Finding | None]
"""Judges one operation of those that the loss is made of; None where nothing is wrong with it."""


class Family:
    """The detectors of one file. Their words are in a table beside it: ``loss.toml`` for ``loss.py``.

    A ``{NAME}`` there is a constant of the file, so that a text shows the threshold that is used.

    Args:
        module: ``__name__`` of the file.
        constants: others that the words show.
    """

    def __init__(self, module: str, **constants: object) -> None:
        self._module, self._constants = module, constants
        self.entries: list[Entry] = []

    def detector(self, slug: str, *, of_losses: bool = False) -> Callable[[Predicate], Predicate]:
        """Make the decorated predicate a detector."""

        def add(predicate: Predicate) -> Predicate:
            self.entries.append(Entry(self, slug, predicate, is_of_losses=of_losses))
            return predicate

        return add

    @cached_property
    def rows(self) -> Mapping[str, Row]:
        """The table, by slug.

        Raises:
            TypeError: a row lacks a field, or has one too many.
        """
        module = sys.modules[self._module]
        table = tomllib.loads(Path(str(module.__file__)).with_suffix(".toml").read_text(encoding="utf-8"))
        groups = table.pop("symptoms", {})
        constants = {**vars(module), **self._constants}
        return {slug: _read_row(row, groups, constants) for slug, row in table.items()}


_WORDS = ("says", "example", "threshold", "source", "guard", "repair")
_USUAL = ("checked", "refute")


def _read_row(row: Mapping[str, Any], groups: Mapping[str, list[str]], constants: Mapping[str, object]) -> Row:
    """Read a row; in ``explains`` the name of a group stands for all its members."""
    words = {name: text.format_map(constants) for name, text in row.items() if name in _WORDS}
    cases = {name: each for name, each in row.items() if isinstance(each, dict)}
    usual = {name: each for name, each in row.items() if name in _USUAL}
    fields = {name: each for name, each in row.items() if name not in (*_WORDS, *_USUAL, *cases)}
    explained = (groups.get(each, [each]) for each in fields.pop("explains", ()))
    return Row(
        words=Words(**words),
        explains=tuple(slug for each in explained for slug in each),
        grounds={name: _read_grounds(each) for name, each in {"": usual, **cases}.items()},
        **fields,
    )


def _read_grounds(given: Mapping[str, Any]) -> Grounds:
    return Grounds(**{**given, "checked": tuple(given.get("checked", ()))})


def first_operation(judge: JudgeOperation) -> Predicate:
    """Find the first operation that is wrong, of those that the loss is made of."""

    @functools.wraps(judge)
    def check(record: Record, entry: Entry) -> Iterator[Finding]:
        for chain in record.need_chains():
            for number in sorted(chain.of_loss):
                found = judge(record, chain, number, entry)
                if found is not None:
                    yield found
                    return

    return check
