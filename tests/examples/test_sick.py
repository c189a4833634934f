"""Each sick script is told its fault, and that is what stands in the examples' README."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import retrograd as rg
from tests import warm
from tests.examples.scripts import EXAMPLES

ROW = re.compile(r"^\| \[(sick_\w+\.py)\]\(\S+\) \| (.+) \|$", re.MULTILINE)
TOLD = dict(ROW.findall((EXAMPLES / "README.md").read_text()))


def mask(text: str) -> str:
    """A sentence without its measured numbers, which are others with other versions of torch."""
    return re.sub(r"(?<![\w:])\d+(\.\d+)?(e[+-]?\d+)?", "N", text)


def test_the_readme_lists_all_of_them() -> None:
    assert sorted(TOLD) == sorted(path.name for path in EXAMPLES.glob("sick_*.py"))
    assert len(TOLD) == 5


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("sick_*.py")))
def test_a_sick_script_is_told_its_fault(name: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "retrograd", "run", "-o", "run", str(EXAMPLES / name)]
    done = warm.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    findings = rg.explain(tmp_path / "run")
    first = findings[0]
    assert mask(f"{first.severity}: {first}") == mask(TOLD[name])
    assert f"  {first.severity:<8}  {first}\n" in done.stderr
    assert [each for each in findings[1:] if each.severity != "note"] == [], "one fault, one alarm"


@pytest.mark.parametrize("name", sorted(TOLD))
def test_the_line_is_that_of_the_fault(name: str) -> None:
    script, _, number = TOLD[name].rstrip(")").rpartition("(")[2].partition(":")
    assert script == name
    assert 0 < int(number) <= len((EXAMPLES / name).read_text().splitlines())
