# ruff: noqa: INP001  # a folder of pages, not a package
"""Makes ``findings.md`` from the words of the detectors: ``python docs/make_findings.py``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from retrograd.explaining.findings.detector import Detector
from retrograd.explaining.findings.detectors import DETECTORS
from retrograd.explaining.findings.entry import Entry

_PAGE = """<!-- Made by docs/make_findings.py; change the tables beside the detectors, not this page. -->

# What is found

The detectors that [`retrograd explain`](explaining.md) asks, in the order in which they are asked: what each says,
when, and what keeps it from false alarms. *Explains* are the findings that are put under this one where both are true.

Thresholds that are *our own choice*, or *ours*, are round numbers, and were measured on [the corpus of findings
](../benchmarks/README.md#whether-findings-are-right-findings): with them none of 57 healthy trainings alarms.

{contents}
{sections}"""

_SECTION = """
## {slug}

{says}

> {example}

| | |
|---|---|
{lines}
"""


def describe_findings() -> str:
    """The page, in Markdown."""
    return _PAGE.format(contents=_list_contents(DETECTORS), sections="".join(map(_describe, DETECTORS)))


def _list_contents(detectors: Iterable[Detector]) -> str:
    return "".join(f"- [{each.slug}](#{each.slug}): {_escape(each.words.says)}\n" for each in detectors)


def _describe(detector: Detector) -> str:
    words, refute = detector.words, _list_refutes(detector) if isinstance(detector, Entry) else ""
    slugs = {each.slug for each in DETECTORS}
    named = [f"[{each}](#{each})" for each in detector.explains if each in slugs]
    explained = ", ".join([*named, *(["all notes"] if "*" in detector.explains else [])])
    lines = [
        ("threshold", _escape(words.threshold)),
        ("source", _escape(words.source)),
        ("guard", _escape(words.guard)),
        ("a false alarm if", _escape(refute)),
        ("repair", _escape(words.repair)),
        ("explains", explained),
    ]
    return _SECTION.format(
        slug=detector.slug,
        says=_escape(words.says),
        example=_escape(words.example),
        lines="\n".join(f"| {name} | {text} |" for name, text in lines if text),
    )


def _list_refutes(entry: Entry) -> str:
    return "; or ".join(each.refute for each in entry.row.grounds.values() if each.refute)


def _escape(text: str) -> str:
    """Text that no Markdown takes for more than text, but for its code; a table keeps its columns."""
    pieces = " ".join(text.split()).replace("``", "`").replace("|", "\\|").split("`")
    for number in range(0, len(pieces), 2):
        for letter in "*_<[":
            pieces[number] = pieces[number].replace(letter, f"\\{letter}")
    return "`".join(pieces)


if __name__ == "__main__":
    Path(__file__).with_name("findings.md").write_text(describe_findings(), encoding="utf-8")
