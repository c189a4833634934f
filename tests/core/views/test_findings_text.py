"""Findings in a terminal."""

from __future__ import annotations

import re

from retrograd.core.runs.findings import Finding, Findings
from retrograd.core.views.findings_text import format_findings, list_findings
from tests.explaining.findings.made import MADE, SYMPTOM

TEXT = """\
2 findings in 400 steps at 60 sites; 2 of 3 checks applied; --not-checked lists the rest

critical   NaN is made in blocks.1.conv1, step 312: softmax over a row that is all -inf
           at blocks.1.conv1 · steps 312 to 399 · /home/me/train.py:48 · nan-origin
           to do: Mask with a large negative number, not with -inf.
           explains 1 other finding: -v

warning    92 % of the units of blocks.2.act1 have been dead since step 40
           at blocks.2.act1:output · step 40 · rank 1 · dead-units
"""

GROUNDS = [
    "measured: rows that are all -inf: 3 (> 0)",
    "measured: smallest operand: -inf",
    "checked: the operands of softmax were looked at in the failing step",
    "false alarm if: a softmax of these rows that is finite",
    "explains: The loss has not fallen since step 12 [flat-loss]",
]


def test_what_is_said() -> None:
    assert format_findings(MADE) == TEXT.rstrip("\n")


def test_what_each_rests_on() -> None:
    text = format_findings(MADE, verbose=True)
    assert [line.strip() for line in text.splitlines()][5:10] == GROUNDS


def test_what_could_not_be_checked() -> None:
    assert "not checked: scheduler: no learning rate was recorded" in format_findings(MADE, not_checked=True)
    assert "everything was checked" in format_findings(Findings(), not_checked=True)


def test_a_healthy_run() -> None:
    healthy = Findings((), (), "3 steps at 4 sites", ["a"])
    assert format_findings(healthy) == "no findings in 3 steps at 4 sites; 1 check"


def test_five_are_printed_and_the_rest_counted() -> None:
    many = Findings([SYMPTOM] * 7)
    assert format_findings(many).count("The loss") == 5
    assert "2 more: --all" in format_findings(many)
    assert format_findings(many, every=True).count("The loss") == 7


def test_no_line_is_wider_than_the_terminal() -> None:
    text = format_findings(MADE, verbose=True, width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert "".join(text.split()) == "".join(format_findings(MADE, verbose=True).split())


def test_colours_are_for_terminals_and_a_run_has_none_of_its_own() -> None:
    hostile = Findings([Finding(detector="a", severity="critical", message="\x1b]0;owned\x07 \u202e", site="\x9b31m")])
    for colour in (False, True):
        text = format_findings(hostile, colour=colour)
        assert "owned" in text
        assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text) == ["\x1b"] * (2 * colour)
    assert not re.search(r"[\x00-\x1f]", "".join(list_findings(hostile)))
