"""Findings that are made by hand."""

from __future__ import annotations

from retrograd.core.runs.findings import Evidence, Finding, Findings, NotChecked

SYMPTOM = Finding(detector="flat-loss", severity="note", message="The loss has not fallen since step 12.", step=12)

BORN = Finding(
    detector="nan-origin",
    severity="critical",
    message="NaN is made in blocks.1.conv1, step 312: softmax over a row that is all -inf.",
    site="blocks.1.conv1",
    step=312,
    last_step=399,
    line="/home/me/train.py:48",
    evidence=(Evidence("rows that are all -inf", 3, "> 0"), Evidence("smallest operand", "-inf")),
    precondition=("the operands of softmax were looked at in the failing step",),
    refute="a softmax of these rows that is finite",
    repair="mask with a large negative number, not with -inf",
    causes=(SYMPTOM,),
)

DEAD = Finding(
    detector="dead-units",
    severity="warning",
    message="92 % of the units of blocks.2.act1 have been dead since step 40.",
    site="blocks.2.act1:output",
    step=40,
    rank=1,
    evidence=(Evidence("share of dead units", 0.92, "> 0.5"),),
)

MADE = Findings(
    [BORN, DEAD],
    [NotChecked("scheduler", "no learning rate was recorded")],
    about="400 steps at 60 sites",
    asked=("nan-origin", "dead-units", "scheduler"),
)
"""A critical one with all that there is, a warning without most of it, and a detector that could not tell."""
