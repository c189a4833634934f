"""Findings as text for a terminal: plain where nobody looks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from functools import partial

from retrograd.core.amounts import count_of
from retrograd.core.foreign.text import show_plainly
from retrograd.core.runs.findings import Finding, Findings, Severity, list_grounds, list_place, tell_repair

_COLOURS: dict[Severity, str] = {"critical": "1;31", "warning": "1;33", "note": "1;36"}
_INDENT = 11
"""Columns in front of what is said: the longest severity, and a gap."""


def format_findings(
    findings: Findings,
    *,
    every: bool = False,
    verbose: bool = False,
    not_checked: bool = False,
    card: Sequence[str] = (),
    width: int | None = None,
    colour: bool = False,
) -> str:
    """Findings as text.

    Args:
        findings: what was found.
        every: all of them, else at most five.
        verbose: what each rests on, and what it explains.
        not_checked: what could not be checked, and why.
        card: lines that say what the run did.
        width: columns that a line may have; None for any number.
        colour: mark severities with colours.
    """
    shown = findings[:] if every else findings.said
    show = partial(_show, width=width)
    headline = f"{findings.headline}{'; --not-checked lists the rest' if findings.not_checked else ''}"
    lines = [show(f"{headline}{'; this is what it did:' if card and not len(findings) else ''}"), ""]
    lines += [*map(show, card), ""] if card else []
    for finding in shown:
        lines += [_mark(show(_head(finding)), finding.severity if colour else None)]
        lines += [*map(show, _tell(finding, verbose)), ""]
    if len(shown) < len(findings):
        lines += [f"{len(findings) - len(shown)} more: --all", ""]
    if not_checked:
        left = [show(f"not checked: {each.detector}: {each.reason}") for each in findings.not_checked]
        lines += [*(left or ["everything was checked"]), ""]
    return "\n".join(lines[:-1])


def list_findings(findings: Findings) -> list[str]:
    """A line for each that is said by default: severity, sentence, line."""
    return [show_plainly(f"{each.severity:<8}  {each}", keep="") for each in findings.said]


def _head(finding: Finding) -> str:
    return f"{finding.severity:<9}  {finding.message.removesuffix('.')}"


def _mark(head: str, severity: Severity | None) -> str:
    """The severity at the head of a line, in its colour."""
    if severity is None:
        return head
    return f"\033[{_COLOURS[severity]}m{severity}\033[0m{head[len(severity) :]}"


def _tell(finding: Finding, verbose: bool) -> Iterator[str]:
    gap = " " * _INDENT
    yield gap + " · ".join((*list_place(finding), finding.detector))
    if finding.repair:
        yield f"{gap}to do: {tell_repair(finding)}"
    if verbose:
        yield from (f"{gap}{name}: {text}" for name, text in list_grounds(finding))
    elif finding.causes:
        yield f"{gap}explains {count_of(len(finding.causes), 'other finding')}: -v"


def _show(line: str, width: int | None) -> str:
    """A line that a terminal can be given, broken where it is too long."""
    plain = show_plainly(line, keep="")
    if width is None or len(plain) <= width:
        return plain
    gap = " " * _INDENT
    return textwrap.fill(plain, max(width, 40), subsequent_indent=gap, break_long_words=False, break_on_hyphens=False)
