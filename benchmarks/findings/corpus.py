"""The corpus: healthy scripts, and what is planted into them to make faulty ones, each with its answer.

Tables in ``answers/`` say of each healthy script when it has trained well, and of each fault which text of which
healthy script is replaced by what. So the repair of a fault is known: it is the script as it was.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SEED = re.compile(r'(manual_seed\(|set_seed\(|seed_everything\(|seed", type=int, default=|seed: int = )(\d+)')
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?|nan|inf")


@dataclass(frozen=True)
class Case:
    """A script and what is to be said of it.

    Attributes:
        name: ``slug/base`` of a faulty one, the file's name of a healthy one.
        text: its source.
        slug: the fault; empty when it is healthy.
        slugs: what counts as its name: this slug, and others that say the same.
        also: what may be said besides, because it follows.
        sites: patterns of its place; empty where that is the whole run, or is not held against anything.
        lines: numbers of lines that are right; empty where no line is the answer.
        first: first and last step at which it may be said to begin.
        better: ``<`` or ``>``, and ``good``, the number: so it is for the last number that a good training prints.
        silent: why it is a fault though that number is good.
    """

    name: str
    text: str
    slug: str = ""
    slugs: frozenset[str] = frozenset()
    also: frozenset[str] = frozenset()
    sites: tuple[str, ...] = ()
    lines: frozenset[int] = frozenset()
    first: tuple[int, int] | None = None
    better: str = ""
    good: float = 0.0
    silent: str = ""
    base: str = field(default="")

    def seeded(self, seed: int) -> str:
        """Its source with another seed: all seeds in it are moved by so many."""
        return SEED.sub(lambda found: f"{found[1]}{int(found[2]) + seed}", self.text)

    def trained_well(self, printed: str) -> bool:
        """Whether the last number in what it printed is good."""
        numbers = NUMBER.findall((printed.strip().splitlines() or [""])[-1])
        if not numbers:
            return False
        last = float(numbers[-1])
        return last < self.good if self.better == "<" else last > self.good


def read_corpus(folder: Path = HERE) -> list[Case]:
    """All cases, faulty ones first.

    Raises:
        ValueError: a text that is to be replaced, or that marks a line, is not there exactly once.
    """
    answers = read_answers(folder)
    healthy = {name: _healthy(folder, name, good) for name, good in answers["healthy"].items()}
    return [*_faulty(answers, healthy), *healthy.values()]


def read_answers(folder: Path = HERE) -> dict[str, dict[str, Any]]:
    """What all tables say: under ``healthy``, ``consequences`` and ``fault``, the faults of a kind under its slug."""
    answers: dict[str, dict[str, Any]] = {"healthy": {}, "consequences": {}, "fault": {}}
    for path in sorted((folder / "answers").glob("*.toml")):
        table = tomllib.loads(path.read_text())
        for slug, planted in table.pop("fault", {}).items():
            answers["fault"].setdefault(slug, {}).update(planted)
        for name, said in table.items():
            answers[name].update(said)
    return answers


def choose_cases(cases: Iterable[Case], patterns: Iterable[str]) -> list[Case]:
    """Those whose name is like one of the patterns."""
    return [case for case in cases if any(fnmatch(case.name, pattern) for pattern in patterns)]


def _healthy(folder: Path, name: str, good: str) -> Case:
    text = (folder / "healthy" / f"{name}.py").read_text()
    return Case(name, text, better=good[0], good=float(good[1:]), base=name)


def _faulty(answers: Mapping[str, Any], healthy: Mapping[str, Case]) -> Iterator[Case]:
    consequences = answers["consequences"]
    for slug, planted in answers["fault"].items():
        for key, answer in planted.items():
            base = healthy[key.partition("-")[0]]
            slugs = frozenset({slug, *answer.get("or", ())})
            name = f"{slug}/{key}"
            text = _plant(name, base.text, answer["plant"])
            yield Case(
                name,
                text,
                slug,
                slugs,
                frozenset({*answer.get("also", ()), *(each for one in slugs for each in consequences.get(one, ()))}),
                tuple(answer.get("sites", ())),
                frozenset(_number(name, text, line) for line in answer.get("lines", ())),
                tuple(answer["first"]) if "first" in answer else None,
                base.better,
                base.good,
                answer.get("silent", ""),
                base.name,
            )


def _plant(name: str, text: str, plant: list[list[str]]) -> str:
    for old, new in plant:
        if text.count(old) != 1:
            raise ValueError(f"{name}: {text.count(old)} times in the healthy script: {old!r}")
        text = text.replace(old, new)
    return text


def _number(name: str, text: str, line: str) -> int:
    found = [number for number, each in enumerate(text.splitlines(), 1) if line in each]
    if len(found) != 1:
        raise ValueError(f"{name}: in {len(found)} lines: {line!r}")
    return found[0]
