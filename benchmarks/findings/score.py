"""How well findings name what was planted, and how often they alarm where nothing was.

    python benchmarks/findings/score.py --markdown
    python benchmarks/findings/score.py --forked --list --only 'dead-units/*' digits_mlp
    python benchmarks/findings/score.py --mode explain --every 5 --seeds 0 1

``README.md``, one folder up, says what is counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from children import load_first
from corpus import HERE, Case, choose_cases, read_corpus
from recorded import Way, findings_of


@dataclass(frozen=True)
class Outcome:
    """A case and what was said of it."""

    case: Case
    found: Sequence[dict[str, Any]]

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """What is more than a note."""
        return [each for each in self.found if each["severity"] != "note"]

    @property
    def right(self) -> list[dict[str, Any]]:
        """The alarms that name the cause."""
        return [each for each in self.alarms if each["detector"] in self.case.slugs]

    @property
    def is_noticed(self) -> bool:
        return bool(self.found)

    @property
    def is_first(self) -> bool:
        return bool(self.alarms) and self.alarms[0]["detector"] in self.case.slugs

    @property
    def misleading(self) -> list[dict[str, Any]]:
        """The alarms that name neither the cause nor what follows from it."""
        accepted = self.case.slugs | self.case.also
        return [each for each in self.alarms if each["detector"] not in accepted]

    @property
    def has_place(self) -> bool:
        return any(is_place(each["site"], pattern) for each in self.right for pattern in self.case.sites)

    @property
    def has_line(self) -> bool:
        return any(line_number(each["line"]) in self.case.lines for each in self.right)

    @property
    def has_step(self) -> bool:
        first, last = self.case.first or (0, 0)
        return any(each["step"] is not None and first <= each["step"] <= last for each in self.right)


def is_place(site: str, pattern: str) -> bool:
    """Whether a finding's site is what the answer says: the module itself, what is in it, or one of its tensors."""
    path = site.rpartition("self:")[2] if site.startswith("self:") else site
    path = re.split(r":|\.(?:weight|bias)", path)[0]
    return fnmatch(path, pattern) or fnmatch(path, f"{pattern}.*") or fnmatch(path, f"*.{pattern}")


def line_number(line: str) -> int:
    """``train.py:12`` → 12; −1 where there is no number."""
    found = re.search(r":(\d+)", line)
    return int(found[1]) if found else -1


def wilson(right: int, of: int) -> str:
    """A share in percent with its interval of 95 % after Wilson."""
    if not of:
        return "–"
    z, share = 1.96, right / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return (
        f"{100 * share:.0f} % ({right} of {of}; {100 * max(0, middle - half):.0f}–{100 * min(1, middle + half):.0f} %)"
    )


def share(outcomes: Iterable[Outcome], name: str) -> str:
    values = [bool(getattr(each, name)) for each in outcomes]
    return wilson(sum(values), len(values))


def summarise(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """What is measured, each with its figure."""
    faulty = [each for each in outcomes if each.case.slug]
    healthy = [each for each in outcomes if not each.case.slug]
    named = [each for each in faulty if each.right]
    misled = sum(len(each.misleading) for each in faulty)
    return [
        ("cause named", share(faulty, "right")),
        ("noticed", share(faulty, "is_noticed")),
        ("first alarm is the cause", share(faulty, "is_first")),
        ("misleading alarms a script", f"{misled / max(1, len(faulty)):.2f} ({misled} in {len(faulty)})"),
        ("place right, of the named", share([each for each in named if each.case.sites], "has_place")),
        ("line right, of the named", share([each for each in named if each.case.lines], "has_line")),
        ("first step right, of the named", share([each for each in named if each.case.first], "has_step")),
        ("healthy with any alarm", share(healthy, "alarms")),
    ]


def print_table(rows: Iterable[Sequence[str]], head: Sequence[str]) -> None:
    print(f"| {' | '.join(head)} |\n|---|{'---:|' * (len(head) - 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def print_detectors(outcomes: Sequence[Outcome]) -> None:
    """For each fault how often it was named, and how often its detector alarmed where it should not."""
    of_slug = {slug: [each for each in outcomes if each.case.slug == slug] for slug in sorted(_slugs(outcomes))}
    misled = Counter(each["detector"] for one in outcomes if one.case.slug for each in one.misleading)
    false = Counter(name for one in outcomes if not one.case.slug for name in {a["detector"] for a in one.alarms})
    rows = [
        (
            slug,
            f"{sum(bool(one.right) for one in cases)} of {len(cases)}" if cases else "–",
            str(misled[slug]),
            str(false[slug]),
        )
        for slug, cases in of_slug.items()
    ]
    print_table(rows, ("detector", "named", "misleading", "on healthy scripts"))


def _slugs(outcomes: Iterable[Outcome]) -> set[str]:
    return {one.case.slug for one in outcomes if one.case.slug} | {
        a["detector"] for one in outcomes for a in one.alarms
    }


def print_misses(outcomes: Iterable[Outcome]) -> None:
    """Cases that went wrong, with what was said instead."""
    for one in outcomes:
        problems = find_problems(one)
        if problems:
            print(f"{one.case.name}: {', '.join(problems)}")
            if one.case.slug:
                right = " | ".join(sorted(one.case.slugs))
                print(f"    right: {right}; lines {sorted(one.case.lines)}; sites {one.case.sites}")
            for each in one.found:
                where = f"{each['site'] or '-'} step {each['step']} {each['line'] or '-'}"
                print(f"    {each['severity']} {each['detector']} [{where}]: {each['message']}")


def find_problems(one: Outcome) -> list[str]:
    """What is not as it should be, in words."""
    if not one.case.slug:
        return ["FALSE ALARM"] if one.alarms else []
    told = {
        "MISSED": not one.right,
        "NOT NOTICED": not one.is_noticed,
        "not first": bool(one.right) and not one.is_first,
        "misleading": bool(one.misleading),
        "wrong place": bool(one.right and one.case.sites) and not one.has_place,
        "wrong line": bool(one.right and one.case.lines) and not one.has_line,
        "wrong step": bool(one.right and one.case.first) and not one.has_step,
    }
    return [name for name, is_so in told.items() if is_so]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--corpus", type=Path, default=HERE, help="folder of scripts and answers")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "retrograd-findings")
    parser.add_argument("--mode", choices=("run", "explain"), default="run")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--overhead", metavar="SHARE", help="a budget in its place, as in 5%%")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="are added to those of the scripts")
    parser.add_argument("--forked", action="store_true", help="record in children of one process, which is quicker")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each case")
    parser.add_argument("--list", action="store_true", help="print what went wrong")
    parser.add_argument("--markdown", action="store_true", help="print the tables of README.md")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    cases = choose_cases(read_corpus(arguments.corpus), arguments.only)
    if arguments.forked:
        load_first(case.text for case in cases)
    way = Way(arguments.cache.absolute(), arguments.mode, arguments.every, arguments.overhead, forked=arguments.forked)
    outcomes = [Outcome(case, findings_of(case, replace(way, seed=seed))) for seed in arguments.seeds for case in cases]
    if arguments.json:
        for one in outcomes:
            print(json.dumps({"name": one.case.name, "problems": find_problems(one), "found": one.found}))
        return
    if arguments.list:
        print_misses(outcomes)
    print_table(summarise(outcomes), ("", "share, with an interval of 95 %"))
    if arguments.markdown:
        print_detectors(outcomes)


if __name__ == "__main__":
    main()
