from tests.findings.by_hand import ask
from tests.findings.programs import make_calls, make_chain, make_optimizer, make_program

PLAIN = ("zero_grad", "forward", "backward", "step")


def test_gradients_that_are_never_cleared() -> None:
    calls = make_calls([("forward", "backward", "step")] * 10, backward={"held": "some"})
    [found] = ask("missing-zero-grad", make_program([make_optimizer(), *calls]))
    # of the whole run: what the first pass leaves is never cleared
    assert (found.severity, found.step, found.last_step, found.line) == ("critical", 0, 9, "train.py:12")
    assert "never cleared: 9 of 9 updates of SGD#1" in found.message


def test_gradients_that_are_cleared_once_an_epoch() -> None:
    steps = [PLAIN if step % 5 == 0 else ("forward", "backward", "step") for step in range(20)]
    [found] = ask("missing-zero-grad", make_program(make_calls(steps, backward={"held": "some"})))
    assert "mostly not cleared: 16 of 19" in found.message


def test_gradients_that_are_cleared_in_other_ways() -> None:
    by_hand = make_calls([("forward", "backward", "step")] * 10)  # .grad was None when backward began
    to_zero = make_calls([("forward", "backward", "step")] * 10, backward={"held": "zero"})
    behind = make_calls([("forward", "backward", "step", "zero_grad")] * 10)
    of_model = make_calls([("model.zero_grad", "forward", "backward", "step")] * 10, backward={"held": "some"})
    for calls in (make_calls([PLAIN] * 10), by_hand, to_zero, behind, of_model):
        assert not ask("missing-zero-grad", make_program([make_optimizer(), *calls]))


def test_accumulation_clears_once_an_update() -> None:
    steps = [("forward", "backward", "forward", "backward", "step", "zero_grad")] * 6
    assert not ask("missing-zero-grad", make_program(make_calls(steps, backward={"held": "some"})))


def _gan(*, clears_both: bool):  # type: ignore[no-untyped-def]
    """A critic whose gradients are cleared, and a generator whose own are, or not."""
    critic = make_optimizer("Adam#1", names=["D.0:weight"]), make_optimizer("Adam#2", names=["G.0:weight"])
    calls = []
    for step in range(6):
        calls += make_calls([()] * step + [("zero_grad", "forward", "backward", "step")], zero_grad={"about": "Adam#1"},
                            step={"about": "Adam#1"})  # fmt: skip
        names = ("zero_grad", "forward", "backward", "step") if clears_both else ("forward", "backward", "step")
        calls += make_calls([()] * step + [names], zero_grad={"about": "Adam#2"}, step={"about": "Adam#2"},
                            backward={"held": "some"})  # fmt: skip
    return make_program([*critic, *calls])


def test_one_of_two_optimizers_is_never_cleared() -> None:
    [found] = ask("missing-zero-grad", _gan(clears_both=False))
    assert found.site == "Adam#2"
    assert not ask("missing-zero-grad", _gan(clears_both=True))


def test_two_updates_tell_nothing() -> None:
    assert not ask(
        "missing-zero-grad", make_program(make_calls([("forward", "backward", "step")] * 3, backward={"held": "some"}))
    )


def test_gradients_that_are_cleared_before_they_are_used() -> None:
    calls = make_calls([("forward", "backward", "zero_grad", "step")] * 4)
    [found] = ask("zero-grad-misplaced", make_program([make_optimizer(), *calls]))
    assert (found.severity, found.step, found.line) == ("critical", 0, "train.py:10")
    assert "before 4 of 4 updates" in found.message


def test_gradients_that_are_cleared_between_micro_batches() -> None:
    calls = make_calls([(*("zero_grad", "forward", "backward") * 4, "step")] * 3)
    divided = make_chain(("mean", (-1,), ((8,),), ()), ("div", (0,), ((),), (), "4"), outputs=[])
    [found] = ask("zero-grad-misplaced", make_program([divided, *calls]))
    assert found.line == "train.py:10"
    assert "of 4 backward passes before an update the gradients of 3 are cleared" in found.message
    assert not ask("step-too-seldom", make_program([divided, *calls]))
    plain = make_chain(("mean", (-1,), ((8,),), ()), outputs=[])
    assert not ask("zero-grad-misplaced", make_program([plain, *calls]))


def test_other_parameters_may_be_cleared_there() -> None:
    other = make_calls([("zero_grad", "forward", "backward", "zero_grad", "step")] * 4, zero_grad={"about": "Adam#2"})
    assert not ask("zero-grad-misplaced", make_program([make_optimizer(), *other]))
    part = make_calls([("forward", "backward", "model.zero_grad", "step")] * 4, **{"model.zero_grad": {"about": "1"}})
    assert not ask("zero-grad-misplaced", make_program([make_optimizer(names=["0:weight", "1:weight"]), *part]))
    assert not ask("zero-grad-misplaced", make_program(make_calls([PLAIN] * 4)))


def test_an_optimizer_with_a_closure_is_left_alone() -> None:
    calls = make_calls([("forward", "backward", "zero_grad", "step")] * 4, step={"about": "LBFGS#1"})
    assert not ask("zero-grad-misplaced", make_program(calls))
