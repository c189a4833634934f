"""What was found of a run: a sequence of findings, causes before symptoms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from retrograd.amounts import count_of
from retrograd.findings.finding import SEVERITIES, Finding, Severity
from retrograd.findings.telling import draw_findings

SHOWN = 5
"""How many are said by default."""


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A detector that could not be asked, and why."""

    detector: str
    reason: str


class Findings(Sequence[Finding]):
    """Findings, the worst first, causes before symptoms. True when there is one that is more than a note.

    Args:
        found: all of them, as ranked.
        not_checked: what could not be checked.
        about: what was looked at, in words: ``460 steps at 190 sites``.
        asked: slugs of all detectors that looked, or tried to.
    """

    def __init__(
        self,
        found: Iterable[Finding] = (),
        not_checked: Iterable[NotChecked] = (),
        about: str = "",
        asked: Iterable[str] = (),
    ) -> None:
        self._found = tuple(found)
        self.not_checked = tuple(not_checked)
        self.about = about
        self.asked = tuple(asked)

    @property
    def headline(self) -> str:
        """How many, in what, after how many checks; one does not apply where nothing that it looks at was recorded."""
        count = count_of(len(self), "finding") if len(self) else "no findings"
        about = f" in {self.about}" if self.about else ""
        if self.asked and not about and not len(self):
            return "no step was recorded, so there is nothing to check"
        checks = count_of(len(self.asked), "check")
        if self.not_checked:
            checks = f"{len(self.asked) - len(self.not_checked)} of {checks} apply"
        return f"{count}{about}; {checks}" if self.asked else f"{count}{about}"

    @property
    def said(self) -> tuple[Finding, ...]:
        """Those that are said by default: at most :data:`SHOWN`."""
        return self._found[:SHOWN]

    def of(self, detector: str) -> Findings:
        """Those of one detector."""
        return self._only(each for each in self._found if each.detector == detector)

    def reach(self, severity: Severity) -> bool:
        """Whether one of them, or of what they explain, is as severe as this, or worse."""
        worst = SEVERITIES[: SEVERITIES.index(severity) + 1]
        waiting = list(self._found)
        while waiting:
            finding = waiting.pop()
            if finding.severity in worst:
                return True
            waiting.extend(finding.causes)
        return False

    def _only(self, found: Iterable[Finding]) -> Findings:
        return Findings(found, self.not_checked, self.about, self.asked)

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Finding, ...]: ...
    def __getitem__(self, index: int | slice) -> Finding | tuple[Finding, ...]:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found)

    def __bool__(self) -> bool:
        return any(each.severity != "note" for each in self._found)

    def __str__(self) -> str:
        lines = [f"{each.severity:<9} {each}" for each in self._found]
        return "\n".join(lines or ["no findings"])

    def __repr__(self) -> str:
        return f"<{self.headline}>\n{self}" if self._found else f"<{self.headline}>"

    def _repr_html_(self) -> str:
        return draw_findings(self._found, self.headline)

    def as_json_lines(self) -> str:
        """One line of JSON each."""
        return "".join(f"{each.as_json()}\n" for each in self._found)

    @classmethod
    def of_dicts(cls, found: Iterable[Mapping[str, object]]) -> Findings:
        """Read them again."""
        return cls(Finding.of_dict(each) for each in found)
