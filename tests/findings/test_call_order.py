from dataclasses import replace

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.findings.explain import make_record
from retrograd.findings.finding import Finding
from retrograd.history.sink import Event, Moment
from tests.findings.by_hand import ask
from tests.findings.programs import make_calls, make_chain, make_optimizer, make_program

PLAIN = ("zero_grad", "forward", "backward", "step")


def test_an_optimizer_that_never_steps() -> None:
    [found] = ask("optimizer-never-steps", make_program(make_calls([("zero_grad", "forward", "backward") * 6])))
    assert (found.severity, found.site, found.line) == ("critical", "SGD#1", "train.py:12")
    assert "backward ran 6 times" in found.message


def test_one_of_two_optimizers_never_steps() -> None:
    calls = make_calls([PLAIN] * 6) + make_calls([("zero_grad", "backward")] * 6, zero_grad={"about": "Adam#2"})
    [found] = ask("optimizer-never-steps", make_program(sorted(calls, key=lambda call: call.step)))
    assert (found.site, found.line) == ("Adam#2", "train.py:12")


def test_an_update_at_the_begin_of_a_round() -> None:
    calls = make_calls([("forward", "backward", "step")] * 5 + [("forward", "backward")])
    early = [replace(call, line="train.py:9") if call.name == "step" else call for call in calls]
    record, usual = make_program([make_optimizer(), *early]), make_program([make_optimizer(), *calls])
    record.status = usual.status = "finished"
    assert [found.severity for found in ask("step-before-backward", record)] == ["note"]
    assert not ask("step-before-backward", usual)


def test_gradients_may_be_all_that_is_wanted() -> None:
    few = make_calls([("forward", "backward") * 6])
    maps = make_calls([("forward", "backward") * 40], forward={"training": False})
    for calls in (few, maps, make_calls([PLAIN] * 6)):
        assert not ask("optimizer-never-steps", make_program(calls))


def test_updates_that_loss_scaling_has_skipped() -> None:
    skipped = ("zero_grad", "forward", "backward", "scaler.step", "scaler.update")
    calls = make_calls([skipped] * 30, scaler__step={"about": "SGD#1"}, scaler__update={"value": 2.0})
    record = make_program([make_optimizer(), *calls])
    assert [update.optimizer for update in record.updates] == ["SGD#1"] * 30
    assert not ask("optimizer-never-steps", record)
    made = (*skipped[:4], "step", "scaler.update")
    both = make_calls([skipped, made, made], scaler__step={"about": "SGD#1"}, scaler__update={"value": 2.0})
    assert [update.call.name for update in make_program(both).updates] == ["scaler.step", "step", "step"]


def test_updates_without_a_backward_pass() -> None:
    [found] = ask("backward-never-called", make_program(make_calls([("zero_grad", "forward", "step")] * 4)))
    assert (found.severity, found.line) == ("critical", "train.py:14")
    assert not ask("backward-never-called", make_program(make_calls([PLAIN] * 4)))
    assert not ask("backward-never-called", make_program(make_calls([("zero_grad", "forward", "step")] * 2)))


def _adversaries(*, generator_runs: bool) -> list[Finding]:
    """What is said of two networks that are trained in turn, the second perhaps without a backward pass."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    of_first, of_second = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second))
    with rg.record({"first": first, "second": second}) as recording:
        for _ in range(5):
            of_second.zero_grad()
            second(first(torch.randn(4, 3)).detach()).square().mean().backward()
            of_second.step()
            of_first.zero_grad()
            loss = second(first(torch.randn(4, 3))).square().mean()
            if generator_runs:
                loss.backward()
            of_first.step()
    seen = make_record(recording)
    return [*ask("backward-never-called", seen), *ask("step-before-backward", seen)]


def test_one_of_two_that_never_has_a_gradient() -> None:
    [found] = _adversaries(generator_runs=False)
    assert (found.detector, found.severity) == ("backward-never-called", "critical")
    assert "of its parameters has ever had a gradient" in found.message
    assert not _adversaries(generator_runs=True)


def test_an_update_before_its_backward_pass() -> None:
    steps = [("zero_grad", "forward", "step")] + [("backward", "zero_grad", "forward", "step")] * 5
    [found] = ask("step-before-backward", make_program(make_calls(steps)))
    assert (found.severity, found.line) == ("critical", "train.py:14")
    assert "6 of 6 updates" in found.message


def test_a_forward_without_grad_may_stand_before_an_update() -> None:
    steps = [("zero_grad", "forward", "backward", "evaluate", "step")] * 6
    assert not ask("step-before-backward", make_program(make_calls(steps)))
    assert not ask("step-before-backward", make_program(make_calls([PLAIN] * 6)))


def test_gradients_that_are_thrown_away() -> None:
    steps = [(*("zero_grad", "forward", "backward") * 8, "step")] * 3
    [found] = ask("step-too-seldom", make_program(make_calls(steps)))
    assert "of 24 backward passes, 21 are followed by zero_grad" in found.message
    assert found.line == "train.py:14"


def test_gradients_of_adversarial_examples_are_thrown_away_on_purpose() -> None:
    steps = [(*("forward", "second backward", "zero_grad") * 7, "forward", "backward", "step")] * 3
    assert not ask("step-too-seldom", make_program(make_calls(steps)))
    accumulation = [("zero_grad", *("forward", "backward") * 8, "step")] * 3
    assert not ask("step-too-seldom", make_program(make_calls(accumulation)))


def _with_losses(steps: int, losses: tuple[float, ...], micros: tuple[int, ...]) -> list[Event]:
    return [
        Event(Moment(step, micro, k), "loss", value=value + step)
        for step in range(steps)
        for k, (value, micro) in enumerate(zip(losses, micros, strict=True))
    ]


def _record(calls: list, events: list[Event]):  # type: ignore[type-arg, no-untyped-def]
    record = make_program(calls)
    for event in events:
        record.history.add_event(event)
    return record


def test_the_same_loss_twice() -> None:
    calls = make_calls([("zero_grad", "forward", "backward", "second backward", "step")] * 5)
    [found] = ask("double-backward", _record(calls, _with_losses(5, (0.5, 0.5), (0, 0))))
    assert (found.severity, found.line) == ("warning", "train.py:19")
    assert "2 times from the same loss (0.5) before 5 of 5 updates" in found.message


def test_the_same_loss_twice_where_few_steps_were_recorded() -> None:
    calls = make_calls([("zero_grad", "forward", "backward", "second backward", "step")] * 10)
    seldom = [each for each in _with_losses(10, (0.5, 0.5), (0, 0)) if each.moment.step % 5 == 0]
    [found] = ask("double-backward", _record(calls, seldom))
    assert "2 times from the same loss (0.5) before 2 of 2 updates" in found.message
    apart = [each for each in _with_losses(10, (0.5, 0.25), (0, 0)) if each.moment.step % 5 == 0]
    assert not ask("double-backward", _record(calls, apart))


def test_a_loss_that_counts_twice() -> None:
    first = [("mse_loss", (-1, -1), ((8, 1), (8, 1)), (), "reduction=mean"), ("mean", (-1,), ((8,),), ())]
    total = [*first, ("add", (0, 1), ((), ()), ())]
    passes = [make_chain(*first, outputs=[], loss=0), make_chain(*total, outputs=[], loss=2)]
    calls = make_calls([("zero_grad", "forward", "backward", "second backward", "step")] * 5)
    [found] = ask("double-backward", make_program([*passes, *calls]))
    assert "from mse_loss, and then from a sum that holds it, before 5 of 5" in found.message
    apart = [make_chain(*first, outputs=[], loss=0), make_chain(*total, outputs=[], loss=1)]
    assert not ask("double-backward", make_program([*apart, *calls]))


def test_several_losses_and_micro_batches_are_no_repetition() -> None:
    calls = make_calls([("zero_grad", "forward", "backward", "second backward", "step")] * 5)
    assert not ask("double-backward", _record(calls, _with_losses(5, (0.5, 0.25), (0, 0))))
    assert not ask("double-backward", _record(calls, _with_losses(5, (0.5, 0.5), (0, 1))))
    assert not ask("double-backward", _record(make_calls([PLAIN] * 5), _with_losses(5, (0.5,), (0,))))


MEAN = make_chain(
    ("linear", (-1, -1), ((4, 3), (2, 3)), (4, 2)), ("cross_entropy", (0, -1), ((4, 2), (4,)), (), "reduction=mean"),
    outputs=[0],
)  # fmt: skip
DIVIDED = make_chain(
    ("linear", (-1, -1), ((4, 3), (2, 3)), (4, 2)), ("cross_entropy", (0, -1), ((4, 2), (4,)), (), "reduction=mean"),
    ("div", (1,), ((),), (), "4"), outputs=[0],
)  # fmt: skip
FOUR = [(*("forward", "backward") * 4, "step", "zero_grad")] * 5


def test_means_that_are_added_up() -> None:
    [found] = ask("accumulation-not-divided", make_program([*make_calls(FOUR), MEAN]))
    assert (found.severity, found.line) == ("warning", "train.py:12")
    assert "4 micro-batches" in found.message
    adam = make_calls(FOUR, step={"about": "Adam#1"}, zero_grad={"about": "Adam#1"})
    assert [each.severity for each in ask("accumulation-not-divided", make_program([*adam, MEAN]))] == ["note"]


@pytest.mark.parametrize(("norm", "severity"), [(0.9, "note"), (3.0, "warning"), (5.0, "note")])
def test_sums_that_are_clipped_where_their_mean_is_not(norm: float, severity: str) -> None:
    four = [(*("forward", "backward") * 4, "clip_grad_norm_", "step", "zero_grad")] * 5
    calls = make_calls(four, step={"about": "Adam#1"}, clip_grad_norm_={"max_norm": 1.0, "value": norm})
    assert [each.severity for each in ask("accumulation-not-divided", make_program([*calls, MEAN]))] == [severity]


def test_sums_of_means_behind_two_forwards() -> None:
    term = ("mse_loss", (-1, -1), ((8, 1), (8, 1)), (), "reduction=mean")
    total = make_chain(term, term, ("add", (0, 1), ((), ()), ()), outputs=[])
    four = [(*("forward", "forward", "backward") * 4, "step", "zero_grad")] * 5
    assert "4 micro-batches" in ask("accumulation-not-divided", make_program([*make_calls(four), total]))[0].message


def test_losses_that_are_divided_or_from_several_lines() -> None:
    assert not ask("accumulation-not-divided", make_program([*make_calls(FOUR), DIVIDED]))
    two = [("forward", "backward", "forward", "second backward", "step", "zero_grad")] * 5
    assert not ask("accumulation-not-divided", make_program([*make_calls(two), MEAN]))
    assert not ask("accumulation-not-divided", make_program([*make_calls([PLAIN] * 5), MEAN]))
    gan = [make_optimizer(), make_optimizer("Adam#2"), *make_calls([*FOUR, ("forward", "backward", "step")], step={})]
    assert len(ask("accumulation-not-divided", make_program([*gan, MEAN]))) == 1
