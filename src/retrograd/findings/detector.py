"""What a detector is: it reads a record, and says what is wrong, or why it cannot tell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from retrograd.findings.finding import Evidence, Finding, Severity, write_plainly
from retrograd.findings.record import Record


@dataclass(frozen=True, slots=True)
class Words:
    """What the documentation says of a detector.

    Attributes:
        says: what it says, in one sentence.
        example: a message that it gave.
        threshold: what is held against what.
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
        is_default: whether it runs without being asked for.
    """

    slug: ClassVar[str]
    words: ClassVar[Words]
    explains: ClassVar[tuple[str, ...]] = ()
    is_default: ClassVar[bool] = True

    @abstractmethod
    def check(self, record: Record) -> Iterable[Finding]:
        """What is wrong.

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
        **fields: Any,
    ) -> Finding:
        """A finding of this detector; ``fields`` are those of :class:`Finding`."""
        return Finding(
            detector=self.slug,
            severity=severity,
            message=write_plainly(message),
            evidence=tuple(evidence),
            precondition=tuple(precondition),
            repair=repair or self.words.repair,
            **fields,
        )
