"""A finding: plain data that a person can check."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, overload

from retrograd.core.addresses import bounded
from retrograd.core.amounts import count_of
from retrograd.core.cells import show_line
from retrograd.core.drawings import drawn_by
from retrograd.core.errors import CallError
from retrograd.core.files import to_utf8, write_whole
from retrograd.core.foreign.text import parse_object, show_plainly
from retrograd.core.guesses import Guided
from retrograd.core.history.history import History
from retrograd.core.libraries import load_library
from retrograd.core.plugins import find_provided
from retrograd.core.runs.layout import FINDINGS
from retrograd.core.runs.reader import Given, Run

Severity = Literal["critical", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note")
"""The worst first."""

MISSING_GRADIENT = "missing-gradient"
"""The detector of parameters without a gradient; a page leads from its findings to the sites of these."""

EVERYWHERE = ""
"""The site of what is true of the whole run."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A value that a finding rests on.

    Attributes:
        name: what was measured: ``share of dead units``.
        value: the number, or text.
        threshold: what it was compared with, in words: ``> 0.5``; empty for what is given besides.
    """

    name: str
    value: float | int | str
    threshold: str = ""

    def __str__(self) -> str:
        value = show_line(self.value) if isinstance(self.value, str) else write_plainly(f"{self.value:.4g}")
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
        plain = make_plain(asdict(self))
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
        return show_plainly(f"{self.message.removesuffix('.')}{place if place not in self.message else ''}")


def shorten_line(line: str) -> str:
    """``train.py:48`` of ``/home/me/train.py:48``."""
    return show_line(line).rsplit("/", 1)[-1]


def make_plain(value: Any) -> Any:
    """A value as JSON has it: lists for tuples, and text for a number that is not finite."""
    if isinstance(value, dict):
        return {name: make_plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [make_plain(each) for each in value]
    if hasattr(value, "item"):  # of numpy
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ---- numbers as people read them ----

_EXPONENT = re.compile(r"(?<![\w.])(\d(?:\.\d+)?)e\+0([1-5])\b")


def write_plainly(text: str) -> str:
    """A text in which numbers up to a million have no exponent: ``170`` for ``1.7e+02``."""
    return _EXPONENT.sub(lambda found: f"{float(found[0]):,.0f}", text)


# ---- findings ----

SHOWN = 5
"""How many are said by default."""


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A detector that could not be asked, and why."""

    detector: str
    reason: str


class Findings(Guided, Sequence[Finding]):
    """Findings, the worst first, causes before symptoms. True when there is one that is more than a note.

    Args:
        found: all of them, as ranked.
        not_checked: what could not be checked.
        about: what was looked at, in words: ``460 steps at 190 sites``.
        asked: slugs of all detectors that looked, or tried to.
        missing: what is missing in what was looked at, in words: ``9,280 of 9,600 rows``; empty for nothing.
        unread: where all rows are damaged, of how many steps they are, in words; else empty.
    """

    def __init__(
        self,
        found: Iterable[Finding] = (),
        not_checked: Iterable[NotChecked] = (),
        about: str = "",
        asked: Iterable[str] = (),
        missing: str = "",
        unread: str = "",
    ) -> None:
        self._found = tuple(found)
        self.not_checked = tuple(not_checked)
        self.about = about
        self.asked = tuple(asked)
        self.missing = missing
        self.unread = unread

    @property
    def headline(self) -> str:
        """The number of findings, in what, and how many of all checks applied to it."""
        if self.not_checked and not self.asked:
            return f"nothing was checked: {self.not_checked[0].reason}"
        count = count_of(len(self), "finding") if len(self) else "no findings"
        about = f" in {self.about}" if self.about and not self.unread else ""
        count = f"0 of {self.unread} could be read: {count}" if self.unread else count
        about += f", without {self.missing}" if self.missing else ""
        if self.asked and not about and not len(self):
            return "no step was recorded, so there is nothing to check"
        checks = count_of(len(self.asked), "check")
        if self.not_checked:
            checks = f"{len(self.asked) - len(self.not_checked)} of {checks} applied"
        return f"{count}{about}; {checks}" if self.asked else f"{count}{about}"

    @property
    def said(self) -> tuple[Finding, ...]:
        """Findings that are printed by default: at most :data:`SHOWN`."""
        return self._found[:SHOWN]

    def of(self, detector: str) -> Findings:
        """Select the findings of one detector."""
        return self._only(each for each in self._found if each.detector == detector)

    def reach(self, severity: Severity) -> bool:
        """Check whether a finding, or one that it explains, is as severe as this, or worse."""
        worst = SEVERITIES[: SEVERITIES.index(severity) + 1]
        waiting = list(self._found)
        while waiting:
            finding = waiting.pop()
            if finding.severity in worst:
                return True
            waiting.extend(finding.causes)
        return False

    def _only(self, found: Iterable[Finding]) -> Findings:
        return Findings(found, self.not_checked, self.about, self.asked, self.missing, self.unread)

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Finding, ...]: ...
    def __getitem__(self, index: int | slice) -> Finding | tuple[Finding, ...]:
        if isinstance(index, str):
            raise CallError("Findings are asked by place.", repair=f"findings.of({index!r}), those of a detector.")
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found)

    def __eq__(self, other: object) -> bool:
        """True for the same findings in any sequence: ``rg.explain(run) == []`` where there are none."""
        if not isinstance(other, Findings | list | tuple):
            return NotImplemented
        return list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(each.detector for each in self._found))

    def __bool__(self) -> bool:
        return any(each.severity != "note" for each in self._found)

    def __str__(self) -> str:
        lines = [f"{each.severity:<9} {each}" for each in self._found]
        return "\n".join(lines or ["no findings"])

    def __repr__(self) -> str:
        return f"<{self.headline}>\n{self}" if self._found else f"<{self.headline}>"

    _repr_html_ = drawn_by("retrograd.core.views.notebook.records", "draw_findings")

    def to_pandas(self) -> Any:
        """A line each as a ``pandas.DataFrame``, with the attributes of :class:`Finding` as columns.

        Raises:
            LibraryError: pandas is not installed.
        """
        found = [each.as_dict() for each in self._found]
        columns = [field.name for field in fields(Finding)]
        return load_library("pandas", "pandas", "2.0").DataFrame(found, columns=columns)

    def as_json_lines(self) -> str:
        """Write each finding as one line of JSON."""
        return "".join(f"{each.as_json()}\n" for each in self._found)


# ---- beside the sentence ----


def list_place(finding: Finding) -> list[str]:
    """Where and since when: ``at blocks.3``, ``steps 40 to 59``, ``rank 1``, ``train.py:48``; what is known of it."""
    step = "" if finding.step is None else f"step {finding.step:,}"
    if finding.step is not None and finding.last_step is not None and finding.last_step > finding.step:
        step = f"steps {finding.step:,} to {finding.last_step:,}"
    rank = "" if finding.rank is None else f"rank {finding.rank}"
    site = f"at {finding.site}" if finding.site else ""
    return [part for part in (site, step, rank, show_line(finding.line)) if part]


def tell_repair(finding: Finding) -> str:
    """Return as a sentence what to do; empty where that is not known."""
    text = finding.repair.rstrip()
    return text and f"{text[0].upper()}{text[1:]}{'' if text[-1] in '.!?' else '.'}"


def list_grounds(finding: Finding) -> Iterator[tuple[str, str]]:
    """List the grounds of a finding, each with its heading."""
    yield from (("measured", str(each)) for each in finding.evidence)
    yield from (("checked", each) for each in finding.precondition)
    if finding.refute:
        yield "false alarm if", finding.refute
    yield from (("explains", f"{each} [{each.detector}]") for each in finding.causes)


# ---- in the folder of a run ----


def store_findings(run: Path, findings: Findings) -> None:
    """Write all findings of a run, the worst first.

    Raises:
        OSError: the folder cannot be written.
    """
    with write_whole(run / FINDINGS) as file:
        file.write(to_utf8(findings.as_json_lines()))


def read_findings(record: Run | History) -> Findings:
    """Read the findings that are kept in a folder, else those that were reported while it was recorded."""
    file = record.path / FINDINGS if isinstance(record, Run) else None
    history = record.history if isinstance(record, Run) else record
    try:
        lines = [] if file is None else _read_lines(file)
        reported = lines or [event.text for event in history.few_events if event.kind == "finding"]
        return Findings([Finding.of_dict(parse_object(line)) for line in reported], about="the record so far")
    except (OSError, ValueError, TypeError):
        return Findings(about="the record so far")


def read_last_findings(run: Run) -> Findings:
    """Read the findings that are kept in a folder, without looking for any: none where rows were written since."""
    written = max((float(rank.facts.get("written", 0.0)) for rank in run.ranks), default=0.0)
    if _find_time(run.path / FINDINGS) < written or run.status == "running":
        reason = f"that takes seconds for {count_of(run.history.rows.count, 'row')}; ask: retrograd explain {run.path}"
        return Findings((), [NotChecked("explain", reason)], missing=run.missing)
    found = read_findings(run)
    return Findings(found, about="the record, when this was last asked", missing=run.missing)


@bounded
def _find_time(file: Path) -> float:
    """When it was written; minus infinity where there is none."""
    return file.stat().st_mtime if file.is_file() else -math.inf


@bounded
def _read_lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


# ---- anew ----


def explain_run(run: Given) -> Findings:
    """Explain a run, as :func:`retrograd.explain` does."""
    explain = find_provided("explain")
    return Findings((), [_NOBODY]) if explain is None else explain(run)


class Explained(NamedTuple):
    """What a page tells of a run.

    Attributes:
        findings: what is wrong with it.
        reasons: why parameters never got a gradient, by name, as far as that is known.
        card: what it did: lines with ``topic``, ``label``, ``text``, ``line`` and ``details``.
    """

    findings: Findings
    reasons: Mapping[str, str] = MappingProxyType({})
    card: Sequence[Mapping[str, Any]] = ()


def explain_for_page(run: Given, names: Sequence[str]) -> Explained:
    """Explain a run, and why parameters of these names never got a gradient."""
    explain = find_provided("explain_for_page")
    return Explained(Findings((), [_NOBODY])) if explain is None else explain(run, names)


_NOBODY = NotChecked("explain", "the part of retrograd that explains runs is not installed")
