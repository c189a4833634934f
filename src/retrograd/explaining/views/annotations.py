"""Findings where code is reviewed: annotations of GitHub Actions, and SARIF 2.1.0."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import retrograd as rg
from retrograd.core.foreign.text import show_plainly
from retrograd.core.runs.findings import Finding, Severity, list_place, tell_repair
from retrograd.explaining.findings.detectors import DETECTORS

_COMMANDS: dict[Severity, str] = {"critical": "error", "warning": "warning", "note": "notice"}
_LEVELS: dict[Severity, str] = {"critical": "error", "warning": "warning", "note": "note"}
_BASE = "%SRCROOT%"


def find_root() -> Path:
    """The folder of the repository: what GitHub Actions says, else the nearest with a ``.git``, else this one."""
    here = Path.cwd()
    given = os.environ.get("GITHUB_WORKSPACE")
    found = Path(given) if given else next((each for each in (here, *here.parents) if (each / ".git").exists()), here)
    return found.resolve()


def format_github(findings: Iterable[Finding], root: Path) -> str:
    """Commands of GitHub Actions, a line each: an annotation for each finding, at its line where that is in ``root``.

    Source: https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
    """
    return "".join(f"{line}\n" for line in _list_commands(findings, root))


def _list_commands(findings: Iterable[Finding], root: Path) -> Iterator[str]:
    for finding in findings:
        file, line = _find_line(finding.line, root)
        place = {"file": file.as_posix(), "line": line} if file is not None and not file.is_absolute() else {}
        about = {**place, "title": f"retrograd: {finding.detector}"}
        properties = ",".join(f"{name}={_escape_property(str(value))}" for name, value in about.items())
        yield f"::{_COMMANDS[finding.severity]} {properties}::{_escape(_tell(finding, with_line=not place))}"


def _tell(finding: Finding, *, with_line: bool) -> str:
    """What is said of a finding, with its place and what to do; its line where nothing else tells that."""
    finding = finding if with_line else replace(finding, line="")
    repair = tell_repair(finding)
    lines = (finding.message, " · ".join(list_place(finding)), f"To do: {repair}" if repair else "")
    return "\n".join(show_plainly(line, keep="") for line in lines if line)


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(show_plainly(text)).replace(":", "%3A").replace(",", "%2C")


def _find_line(line: str, root: Path) -> tuple[Path | None, int]:
    """The file of ``file:line``, relative to ``root`` where it is in there, and the line; None where there is none."""
    name, _, number = line.rpartition(":")
    file = Path(name)
    if not name or not number.isdecimal() or not file.is_file():
        return None, 0
    file = file.resolve()
    return (file.relative_to(root) if file.is_relative_to(root) else file), max(int(number), 1)


def format_sarif(findings: Sequence[Finding], root: Path, place: str = "") -> str:
    """A log in SARIF 2.1.0, as code scanning takes it.

    Args:
        findings: a result each; their fields are its properties.
        root: paths in it are relative to it.
        place: ``file:line`` for a finding without one: GitHub takes no result that is nowhere.
    """
    rules = list(dict.fromkeys(each.detector for each in findings))
    words = {each.slug: each.words for each in DETECTORS}
    told = [
        {"id": slug, "shortDescription": {"text": words[slug].says}, "help": {"text": words[slug].repair}}
        if slug in words
        else {"id": slug}
        for slug in rules
    ]
    driver = {"name": "retrograd", "version": rg.__version__, "rules": told}
    results = [{"ruleIndex": rules.index(each.detector), **_describe(each, root, place)} for each in findings]
    run = {
        "tool": {"driver": driver},
        "originalUriBaseIds": {_BASE: {"uri": f"{root.as_uri().removesuffix('/')}/"}},
        "results": results,
    }
    log = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _describe(finding: Finding, root: Path, place: str) -> dict[str, Any]:
    file, line = _find_line(finding.line, root)
    if file is None:
        file, line = _find_line(place, root)
    location: dict[str, Any] = {}
    if file is not None:
        is_ours = not file.is_absolute()
        artifact = {"uri": quote(file.as_posix()), "uriBaseId": _BASE} if is_ours else {"uri": file.as_uri()}
        location["physicalLocation"] = {"artifactLocation": artifact, "region": {"startLine": line}}
    if finding.site:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.site}]
    return {
        "ruleId": finding.detector,
        "level": _LEVELS[finding.severity],
        "message": {"text": _tell(finding, with_line=file is None)},
        **({"locations": [location]} if location else {}),
        "properties": finding.as_dict(),
    }
