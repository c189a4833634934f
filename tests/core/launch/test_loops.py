"""Training loops of every kind that one process can run."""

from __future__ import annotations

from collections import Counter

import pytest

from retrograd.core.runs.listing import read_line
from retrograd.core.runs.reader import open_run
from retrograd.core.views.table import format_table
from retrograd.explaining.findings.explain import explain
from tests.core.launch.recorded import HEALTHY, Outcome, outputs, parameters, recorded, steps

NET = outputs("body.0", "body.1", "body", "head", "self")
UPDATES = parameters("body.0", "head")
GRADIENTS = parameters("body.0", "head", update=False)


@recorded("plain_loop.py")
def test_a_plain_loop_and_its_evaluation(outcome: Outcome) -> None:
    assert outcome.sites() == NET | UPDATES
    assert outcome.moments() == steps(4)
    assert {row["site"] for row in outcome.rows() if row["phase"] == "no_grad"} == {
        site for site in NET if not site.endswith(".grad")
    }
    losses = outcome.output.split()[:4]
    assert [repr(event["value"]) for event in outcome.events("loss")] == losses
    assert outcome.words[0].startswith("retrograd: recording ")
    assert outcome.words[1:] == [f"retrograd: recorded 4 steps at 18 sites; {HEALTHY}"]
    assert outcome.status() == "finished"


@recorded("other_method.py")
def test_a_method_other_than_forward(outcome: Outcome) -> None:
    assert outcome.sites() == outputs("body.0", "body.1", "body", "head") | UPDATES
    assert outcome.moments() == steps(3)


@recorded("gan.py")
def test_two_nets_with_an_optimizer_each(outcome: Outcome) -> None:
    paths = [f"{net}{layer}" for net in ("generator", "critic") for layer in ("", ".0", ".1", ".2")]
    weights = [f"{net}{layer}" for net in ("generator", "critic") for layer in (".0", ".2")]
    assert outcome.sites() == outputs(*paths) | parameters(*weights)
    assert len(outcome.events("update")) == 6
    assert len(outcome.events("loss")) == 9
    seen = Counter(row["site"] for row in outcome.rows() for _ in range(row["calls"]))
    assert seen["generator:output"] == seen["generator:output.grad"] == 3
    assert seen["critic:output"] == seen["critic:output.grad"] == 9


@recorded("accumulation.py")
def test_accumulated_gradients(outcome: Outcome) -> None:
    accumulated = {site.replace(".update", ".accumulated") for site in UPDATES if site.endswith(".update")}
    assert outcome.sites() == NET | UPDATES | accumulated
    assert outcome.moments() == steps(3, micros=2)
    assert len(outcome.events("update")) == 3


@recorded("scaler.py")
def test_a_scaled_loss_and_a_skipped_update(outcome: Outcome) -> None:
    assert outcome.sites() == NET | UPDATES
    assert outcome.moments() == steps(4)
    assert [event["step"] for event in outcome.events("skipped")] == [1]
    assert [event["step"] for event in outcome.events("update")] == [0, 2, 3]
    losses, scales = outcome.output.split()[::2], outcome.output.split()[1::2]
    assert [repr(event["value"]) for event in outcome.events("loss")] == losses
    assert [event["value"] for event in outcome.events("scale")] == [1024.0, *map(float, scales[:3])]
    gradients = [row for row in outcome.rows() if row["step"] == 1 and row["site"] == "head:weight.grad"]
    assert sum(row["nan"] + row["pos_inf"] + row["neg_inf"] for row in gradients) == 16


@recorded("manual_sgd.py data", "manual_sgd.py no_grad")
def test_updates_by_hand(outcome: Outcome) -> None:
    assert outcome.sites() == NET | GRADIENTS
    assert outcome.moments() == steps(3)


@recorded("autograd_grad.py")
def test_gradients_that_are_asked_for(outcome: Outcome) -> None:
    assert outcome.sites() == NET | GRADIENTS
    assert outcome.moments() == steps(3)


@recorded("lbfgs.py")
def test_several_evaluations_within_an_update(outcome: Outcome) -> None:
    assert outcome.sites() == NET | UPDATES
    assert len(outcome.moments()) == len(outcome.output.split())
    assert {step for step, _ in outcome.moments()} == {0, 1, 2}


@recorded("checkpointed.py reentrant", "checkpointed.py other")
def test_a_checkpointed_part_is_called_once(outcome: Outcome) -> None:
    paths = ("stem", "block.0", "block.1", "block", "head", "self")
    assert outcome.sites() == outputs(*paths) | parameters("stem", "block.0", "head")
    assert outcome.moments() == steps(3)
    assert {row["calls"] for row in outcome.rows()} == {1}


@recorded("plain_tensors.py optimizer")
def test_plain_tensors_with_an_optimizer(outcome: Outcome) -> None:
    assert outcome.sites() == {"optimizer/SGD:0.0.grad", "optimizer/SGD:0.0.update"}
    assert outcome.moments() == steps(5)
    assert [repr(event["value"]) for event in outcome.events("loss")] == outcome.output.split()
    assert outcome.words[1:] == [f"retrograd: recorded 5 steps at 2 sites; {HEALTHY}"]


@recorded("plain_tensors.py by_hand")
def test_plain_tensors_that_are_updated_by_hand(outcome: Outcome) -> None:
    assert [event["step"] for event in outcome.events("loss")] == list(range(5))
    assert [repr(event["value"]) for event in outcome.events("loss")] == outcome.output.split()
    assert "rg.watch(" in outcome.words[1]
    assert outcome.words[2:] == [f"retrograd: recorded 5 steps at 0 sites; {HEALTHY}"]
    assert read_line(outcome.run).last_step == 4
    history = open_run(outcome.run).history
    assert history.made_steps.tolist() == list(range(5))
    assert "steps 0 to 4" in format_table(history)
    assert "rg.watch(" in format_table(history)


@recorded("behind.py")
def test_what_runs_behind_the_last_update_makes_no_step(outcome: Outcome) -> None:
    assert outcome.words[-1].startswith("retrograd: recorded 3 steps at ")
    assert explain(outcome.run).about.startswith("3 steps at ")
    line = read_line(outcome.run)
    assert line.last_step == 2
    assert line.loss == pytest.approx(sum(map(float, outcome.output.split()[8:12])) / 4)
    table = format_table(outcome.run)
    assert "steps 0 to 2" in table
    assert f"loss {line.loss:.3g}" in table


@recorded("behind_two.py critic", "behind_two.py heads")
def test_an_optimizer_that_updates_less_often_makes_no_step_behind_the_last(outcome: Outcome) -> None:
    """It runs behind the last update of the other, and with it another forward."""
    assert outcome.words[-1].startswith("retrograd: recorded 12 steps at ")
    history = open_run(outcome.run).history
    assert history.made_steps.tolist() == list(range(12))
    line = read_line(outcome.run)
    assert line.last_step == 11
    assert repr(line.loss) == outcome.output.split()[-1]
    assert "steps 0 to 11" in format_table(outcome.run)
    assert len(outcome.events("update")) == 16


@recorded(*(f"successive.py {kind}" for kind in ("plain", "closure", "quiet", "inside")))
def test_models_one_after_the_other_that_share_nothing(outcome: Outcome) -> None:
    """Each of them trains well, so nothing is wrong; each step is recorded under the name of its model."""
    assert outcome.words[-1].startswith("retrograd: recorded 20 steps at ")
    assert outcome.words[-1].endswith(HEALTHY)
    assert {event["step"] for event in outcome.events("update")} == set(range(20))
    found: dict[str, set[int]] = {}
    for row in outcome.rows():
        if row["site"].endswith("weight.grad"):
            found.setdefault(row["site"], set()).add(row["step"])
    assert sorted(map(sorted, found.values())) == [list(range(10)), list(range(10, 20))]
    assert not [site for site in found if site.startswith("optimizer/")]


@recorded("own_ways.py odd")
def test_a_model_that_cannot_be_looked_at_is_left_out_alone(outcome: Outcome) -> None:
    assert outcome.words[1] == "retrograd: Odd is not recorded: RuntimeError('call me')"
    assert {row["step"] for row in outcome.rows() if row["site"].endswith(":weight.update")} == set(range(5))
    assert len({site.partition(":")[0] for site in outcome.sites()}) == 1


@recorded(*(f"own_ways.py {kind}" for kind in ("getattr", "elementwise", "thread")))
def test_modules_that_answer_in_ways_of_their_own(outcome: Outcome) -> None:
    assert outcome.words[-1].startswith("retrograd: recorded 5 steps at ")
    assert outcome.moments() == steps(5)


@recorded("transforms.py first", "transforms.py learned", filters="error")
def test_a_model_that_runs_with_other_weights(outcome: Outcome) -> None:
    """No warning of torch's is caused: under these filters it would end the program."""
    assert outcome.words[-1].startswith("retrograd: recorded 5 steps at ")
    updated = {row["site"] for row in outcome.rows() if row["site"].endswith(".update") and row["step"] == 4}
    assert updated & {"self:weight.update", "0:weight.update"}
    assert {"net.0:output", "0:output"} & outcome.sites()


@recorded("folds.py")
def test_models_one_after_the_other(outcome: Outcome) -> None:
    assert outcome.moments() == steps(30)
    assert [event["step"] for event in outcome.events("update")] == list(range(30))
    assert [repr(event["value"]) for event in outcome.events("loss")] == outcome.output.split()
    for fold, name in enumerate(("", "net.", "net_2.")):
        found = {row["step"] for row in outcome.rows() if row["site"] == f"{name}0:output.grad"}
        assert found == set(range(10 * fold, 10 * fold + 10))
    assert {(row["step"], row["phase"]) for row in outcome.rows() if row["phase"] != "train"} == {
        (10, "forward"), (20, "forward"), (30, "forward"),
    }  # fmt: skip


@recorded("adjoint.py")
def test_a_function_that_differentiates_in_its_backward(outcome: Outcome) -> None:
    assert [repr(event["value"]) for event in outcome.events("loss")] == outcome.output.split()
    assert {
        (row["step"], row["backward"], row["calls"]) for row in outcome.rows() if row["site"] == "0:weight.grad"
    } == {(step, 0, 1) for step in range(4)}


@recorded("ten_threads.py")
def test_passes_of_ten_threads_that_begin_at_once(outcome: Outcome) -> None:
    assert outcome.output == "errors: 0\n"
    assert [event["value"] for event in outcome.events("loss")] == [250.0] * 10
    assert not outcome.events("fault")
