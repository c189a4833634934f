"""A finding: plain data that a person can check."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["critical", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note")
"""The worst first."""

EVERYWHERE = ""
"""The site of what is true of the whole run."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A value that a finding rests on.

    Attributes:
        name: what was measured: ``share of dead units``.
        value: the number, or text.
        threshold: what it was held against, in words: ``> 0.5``; empty for what is told beside.
    """

    name: str
    value: float | int | str
    threshold: str = ""

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else write_plainly(f"{self.value:.4g}")
        return f"{self.name}: {value}{f' ({self.threshold})' if self.threshold else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong, or a symptom.

    Attributes:
        detector: slug of who says it.
        severity: ``critical`` (the run is lost, or its result is wrong), ``warning`` (it trains worse than it could),
            ``note`` (a symptom, or something to know).
        site: name of a site, path of a module, or of an optimizer; empty for the whole run.
        step: the first step at which it is so; None where it is of no step.
        last_step: the last one.
        rank: in which process; None where it is so in all.
        line: ``file:line`` of the forward, of the call, or of the construction; empty where that is not known.
        message: one sentence.
        evidence: the values that it rests on.
        precondition: what was checked so that this is no false alarm.
        refute: what would show that it is wrong.
        repair: what to do.
        causes: findings that this one explains, and that are not said besides.
    """

    detector: str
    severity: Severity
    message: str
    site: str = EVERYWHERE
    step: int | None = None
    last_step: int | None = None
    rank: int | None = None
    line: str = ""
    evidence: tuple[Evidence, ...] = ()
    precondition: tuple[str, ...] = ()
    refute: str = ""
    repair: str = ""
    causes: tuple[Finding, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Its fields as JSON values; a number that is not finite is text."""
        plain = _plain(asdict(self))
        assert isinstance(plain, dict)
        return plain

    def as_json(self) -> str:
        """Write it as one line of JSON."""
        return json.dumps(self.as_dict(), ensure_ascii=False, allow_nan=False)

    @classmethod
    def of_dict(cls, found: Mapping[str, Any]) -> Finding:
        """Read it again.

        Raises:
            TypeError: there is no such field.
            ValueError: a severity that is none.
        """
        fields = dict(found)
        if fields.get("severity") not in SEVERITIES:
            raise ValueError(f"{fields.get('severity')!r} is not a severity")
        fields["evidence"] = tuple(Evidence(**each) for each in fields.get("evidence", ()))
        fields["precondition"] = tuple(fields.get("precondition", ()))
        fields["causes"] = tuple(cls.of_dict(each) for each in fields.get("causes", ()))
        return cls(**fields)

    def __str__(self) -> str:
        place = f" ({shorten_line(self.line)})" if self.line else ""
        return f"{self.message.removesuffix('.')}{place if place not in self.message else ''}"


def shorten_line(line: str) -> str:
    """``train.py:48`` of ``/home/me/train.py:48``."""
    return line.rsplit("/", 1)[-1]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "item"):  # of numpy
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ---- numbers as people read them ----

_EXPONENT = re.compile(r"(?<![\w.])(\d(?:\.\d+)?)e\+0([1-5])\b")


def write_plainly(text: str) -> str:
    """A text in which numbers up to a million have no exponent: ``170`` for ``1.7e+02``."""
    return _EXPONENT.sub(lambda found: f"{float(found[0]):,.0f}", text)


def count_more(count: int, one: str) -> str:
    """``1 more layer``, ``3 more layers``."""
    return f"{count} more {one}{'s' * (count != 1)}"
