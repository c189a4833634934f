"""What a comparison of two runs says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from retrograd.comparing.divergence import Divergence
from retrograd.findings.finding import Finding

Verdict = Literal["identical", "same within noise", "different"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs held against each other. It is true when they are the same, but for noise.

    Attributes:
        verdict: ``identical`` (to the last bit of all that was recorded), ``same within noise``, or ``different``.
        noise: where the noise floor comes from.
        first: where they are not the same for the first time, be it by a last bit; None where they are identical.
        parting: where they are farther apart than noise makes them for the first time; None where they never are.
        largest: the largest distance of all rows, relative to the sizes of their tensors.
        findings: what is not the same, grouped by cause: the first ones are before or at the parting.
        context: what else is not the same in how they were run, such as the commit.
        about: what was compared.
    """

    verdict: Verdict
    noise: str
    first: Divergence | None
    parting: Divergence | None
    largest: float
    findings: tuple[Finding, ...]
    context: tuple[str, ...]
    about: str

    def __bool__(self) -> bool:
        return self.verdict != "different"

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        lines = [f"{self.verdict}{self._tell_where()}"]
        for finding in self.findings:
            lines.append(f"  {finding.severity:<7}  {finding}")
            lines += [f"           and so: {each}" for each in finding.causes]
        lines += [f"  also     {each}" for each in self.context]
        return "\n".join([*lines, f"compared: {self.about}"])

    __repr__ = __str__

    def as_json_lines(self) -> str:
        """One line of JSON for the verdict, and one for each finding."""
        place = self.parting or self.first
        head = {
            "verdict": self.verdict,
            "noise": self.noise,
            "site": place.site if place else "",
            "step": place.step if place else None,
            "distance": place.distance if place else 0.0,
            "limit": place.limit if place else None,
            "context": list(self.context),
        }
        plain = {name: str(value) if value == float("inf") else value for name, value in head.items()}
        lines = [json.dumps(plain, ensure_ascii=False, allow_nan=False), *(each.as_json() for each in self.findings)]
        return "".join(f"{line}\n" for line in lines)

    def _tell_where(self) -> str:
        if self.parting is not None:
            place = self.parting
            return (
                f": they part at {place}, {place.distance:.2g} of its size apart"
                f" (by noise {place.limit:.2g}: {self.noise})"
            )
        if self.first is not None:
            return (
                f": they are not the same from {self.first} on, by {self.first.distance:.2g} of its size there and by"
                f" {self.largest:.2g} at most ({self.noise})"
            )
        return ""
