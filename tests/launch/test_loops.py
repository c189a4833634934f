"""Training loops of every kind that one process can run."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.launch.conftest import Record
from tests.launch.recorded import outputs, parameters

NET = outputs("body.0", "body.1", "body", "head", "self")
UPDATES = parameters("body.0", "head")
GRADIENTS = parameters("body.0", "head", update=False)


def test_a_plain_loop_and_its_evaluation(record: Record) -> None:
    outcome = record("plain_loop.py")
    assert outcome.sites() == NET | UPDATES
    assert outcome.moments() == [(step, 0) for step in range(4)]
    assert {row["site"] for row in outcome.rows() if row["phase"] == "no_grad"} == {
        site for site in NET if not site.endswith(".grad")
    }
    losses = outcome.output.split()[:4]
    assert [repr(event["value"]) for event in outcome.events("loss")] == losses
    assert outcome.words[0].startswith("retrograd: recording ")
    assert outcome.words[-1] == "retrograd: recorded 4 steps at 18 sites; see it with: retrograd report run"
    assert len(outcome.words) == 2
    assert outcome.status() == "finished"


def test_a_method_other_than_forward(record: Record) -> None:
    outcome = record("other_method.py")
    assert outcome.sites() == outputs("body.0", "body.1", "body", "head") | UPDATES
    assert outcome.moments() == [(step, 0) for step in range(3)]


def test_two_nets_with_an_optimizer_each(record: Record) -> None:
    outcome = record("gan.py")
    paths = [f"{net}{layer}" for net in ("generator", "critic") for layer in ("", ".0", ".1", ".2")]
    weights = [f"{net}{layer}" for net in ("generator", "critic") for layer in (".0", ".2")]
    assert outcome.sites() == outputs(*paths) | parameters(*weights)
    assert len(outcome.events("update")) == 6
    assert len(outcome.events("loss")) == 9
    seen = Counter(row["site"] for row in outcome.rows() for _ in range(row["calls"]))
    assert seen["generator:output"] == seen["generator:output.grad"] == 3
    assert seen["critic:output"] == seen["critic:output.grad"] == 9


def test_accumulated_gradients(record: Record) -> None:
    outcome = record("accumulation.py")
    assert outcome.sites() == NET | UPDATES
    assert outcome.moments() == [(step, micro) for step in range(3) for micro in range(2)]
    assert len(outcome.events("update")) == 3


def test_a_scaled_loss_and_a_skipped_update(record: Record) -> None:
    outcome = record("scaler.py")
    assert outcome.sites() == NET | UPDATES
    assert outcome.moments() == [(step, 0) for step in range(4)]
    assert [event["step"] for event in outcome.events("skipped")] == [1]
    assert [event["step"] for event in outcome.events("update")] == [0, 2, 3]
    losses, scales = outcome.output.split()[::2], outcome.output.split()[1::2]
    assert [repr(event["value"]) for event in outcome.events("loss")] == losses
    assert [event["value"] for event in outcome.events("scale")] == [1024.0, *map(float, scales[:3])]
    gradients = [row for row in outcome.rows() if row["step"] == 1 and row["site"] == "head:weight.grad"]
    assert sum(row["nan"] + row["pos_inf"] + row["neg_inf"] for row in gradients) == 16


@pytest.mark.parametrize("how", ["data", "no_grad"])
def test_updates_by_hand(record: Record, how: str) -> None:
    outcome = record("manual_sgd.py", how)
    assert outcome.sites() == NET | GRADIENTS
    assert outcome.moments() == [(step, 0) for step in range(3)]


def test_gradients_that_are_asked_for(record: Record) -> None:
    outcome = record("autograd_grad.py")
    assert outcome.sites() == NET | GRADIENTS
    assert outcome.moments() == [(step, 0) for step in range(3)]


def test_several_evaluations_within_an_update(record: Record) -> None:
    outcome = record("lbfgs.py")
    assert outcome.sites() == NET | UPDATES
    evaluations = len(outcome.output.split())
    assert len(outcome.moments()) == evaluations
    assert {step for step, _ in outcome.moments()} == {0, 1, 2}


@pytest.mark.parametrize("how", ["reentrant", "other"])
def test_a_checkpointed_part_is_called_once(record: Record, how: str) -> None:
    outcome = record("checkpointed.py", how)
    assert outcome.sites() == outputs("stem", "block.0", "block.1", "block", "head", "self") | parameters(
        "stem", "block.0", "head"
    )
    assert outcome.moments() == [(step, 0) for step in range(3)]
    assert {row["calls"] for row in outcome.rows()} == {1}
