import pytest

from retrograd.history.fact import Fact
from tests.findings.by_hand import ask, make_record, spread
from tests.findings.programs import make_calls, make_program

CLIPPED = [("zero_grad", "forward", "backward", "clip_grad_norm_", "step")] * 5


def test_clipping_behind_the_update() -> None:
    steps = [("zero_grad", "forward", "backward", "step")] + [
        ("clip_grad_norm_", "zero_grad", "forward", "backward", "step")
    ] * 4
    [found] = ask("clip-after-step", make_program(make_calls(steps)))
    assert (found.severity, found.line) == ("warning", "train.py:13")
    assert "after the update" in found.message
    assert not ask("clip-before-backward", make_program(make_calls(steps)))


def test_clipping_before_backward() -> None:
    steps = [("zero_grad", "forward", "clip_grad_norm_", "backward", "step")] * 5
    [found] = ask("clip-before-backward", make_program(make_calls(steps)))
    assert "before backward" in found.message
    assert not ask("clip-after-step", make_program(make_calls(steps)))
    assert found.step == 0


def test_clipping_where_it_belongs() -> None:
    micro = [("zero_grad", *("forward", "backward", "clip_grad_norm_") * 2, "step")] * 5
    for steps in (CLIPPED, micro):
        assert not ask("clip-after-step", make_program(make_calls(steps)))
        assert not ask("clip-before-backward", make_program(make_calls(steps)))
    two = [*make_calls(CLIPPED), *make_calls([("forward", "backward", "step")], step={"about": "Adam#2"})]
    assert not ask("clip-after-step", make_program(two))


def test_clipping_of_scaled_gradients() -> None:
    steps = [("zero_grad", "forward", "backward", "clip_grad_norm_", "step", "scaler.update")] * 5
    [found] = ask("clip-before-unscale", make_program(make_calls(steps, scaler__update={"value": 65536.0})))
    assert "to 1 is called without scaler.unscale_ before it, at a scale of 65536" in found.message


def test_clipping_of_gradients_that_are_not_scaled() -> None:
    steps = [("forward", "backward", "scaler.unscale_", "clip_grad_norm_", "step", "scaler.update")] * 5
    assert not ask("clip-before-unscale", make_program(make_calls(steps, scaler__update={"value": 65536.0})))
    ones = [("forward", "backward", "clip_grad_norm_", "step", "scaler.update")] * 5
    assert not ask("clip-before-unscale", make_program(make_calls(ones, scaler__update={"value": 1.0})))
    assert not ask("clip-before-unscale", make_program(make_calls(CLIPPED)))


def _updated(facts: list[Fact], gradient: float = 1.0):  # type: ignore[no-untyped-def]
    sites = {"0:weight.grad": spread(gradient), "0:weight.update": spread(0.1)}
    return make_record(range(5), lambda step: sites, facts=facts)


def test_clipping_of_nothing() -> None:
    calls = make_calls(CLIPPED, clip_grad_norm_={"parameters": 0, "value": 0.0})
    [found] = ask("clip-other-parameters", _updated(list(calls)))
    assert "is given no parameters, and SGD#1 updates others" in found.message
    assert found.line == "train.py:13"


def test_clipping_of_something() -> None:
    assert not ask("clip-other-parameters", _updated(list(make_calls(CLIPPED, clip_grad_norm_={"value": 3.0}))))
    nothing_learned = make_calls(CLIPPED, clip_grad_norm_={"value": 0.0})
    assert not ask("clip-other-parameters", _updated(list(nothing_learned), gradient=0.0))  # weight decay changes them
    assert not ask("clip-other-parameters", make_program(nothing_learned))


@pytest.mark.parametrize(
    ("optimizer", "falls", "severity"),
    [("SGD", False, "warning"), ("SGD", True, "note"), ("Adam", False, "note"), ("Adam", True, "note")],
)
def test_clipping_at_each_step_is_told_by_optimizer_and_loss(optimizer: str, falls: bool, severity: str) -> None:
    calls = make_calls(
        [("forward", "backward", "clip_grad_norm_", "step")] * 30,
        clip_grad_norm_={"value": 900.0},
        step={"about": f"{optimizer}#1"},
    )
    losses = [0.7 * 0.9**step if falls else 0.7 for step in range(30)]
    sites = {"0:weight.grad": spread(1.0), "0:weight.update": spread(0.1)}
    [found] = ask(
        "clip-always-on", make_record(range(30), lambda step: sites, losses, facts=calls, optimizer=optimizer)
    )
    assert found.severity == severity
    assert ("learning rate" in found.message) == (optimizer == "SGD")  # Adam's update knows no size of the gradient
    assert found.precondition[0] == ("the loss falls" if falls else "the loss has not fallen")
