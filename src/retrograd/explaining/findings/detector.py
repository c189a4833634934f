"""The base class of detectors: one reads a record, and says what is wrong, or why it cannot tell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from retrograd.core.history.fact import Fact
from retrograd.core.runs.findings import Evidence, Finding, Severity, write_plainly
from retrograd.explaining.findings.record import Record
from retrograd.explaining.findings.updates import Update


@dataclass(frozen=True, slots=True)
class Words:
    """Words of the documentation about a detector.

    Attributes:
        says: what it says, in one sentence.
        example: a message that it gave.
        threshold: what is compared with what.
        source: where the threshold is from.
        guard: what keeps it from false alarms.
        repair: what to do.
    """

    says: str
    example: str
    threshold: str
    source: str
    guard: str
    repair: str


class Detector(ABC):
    """Finds one fault, or one family of them.

    Attributes:
        slug: its name: ``dead-units``.
        words: for the page of documentation.
        explains: slugs of detectors of symptoms, whose findings need no saying once this one has spoken, unless they
            began before. ``"*"`` stands for all that are notes.
        is_of_losses: it judges a course of losses: of models that are trained one after the other, each by itself.
    """

    slug: str
    words: Words
    explains: tuple[str, ...] = ()
    is_of_losses: bool = False

    @abstractmethod
    def check(self, record: Record) -> Iterable[Finding]:
        """Find what is wrong.

        Raises:
            CannotTell: the record does not hold what is needed.
        """

    def find(
        self,
        severity: Severity,
        message: str,
        *,
        evidence: Iterable[Evidence] = (),
        precondition: Iterable[str] = (),
        repair: str = "",
        span: Record | Sequence[Fact | Update] = (),
        **fields: Any,
    ) -> Finding:
        """Make a finding of this detector.

        Args:
            severity: how bad it is.
            message: one sentence.
            evidence: the values that it rests on.
            precondition: what was checked so that this is no false alarm.
            repair: what to do; that of its ``words`` when left out.
            span: a record, facts or updates, whose first and last step are those of the finding.
            fields: other fields of :class:`Finding`.
        """
        if isinstance(span, Record):
            fields |= {"step": span.first_step, "last_step": span.last_step}
        elif span:
            fields |= {"step": span[0].step, "last_step": span[-1].step}
        return Finding(
            detector=self.slug,
            severity=severity,
            message=write_plainly(message),
            evidence=tuple(evidence),
            precondition=tuple(precondition),
            repair=repair or self.words.repair,
            **fields,
        )
