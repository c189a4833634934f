from typing import Any

from retrograd.history.facts import Input
from retrograd.history.sink import Moment, Phase
from tests.findings.by_hand import ask
from tests.findings.programs import make_calls, make_optimizer, make_program

PLAIN = ("zero_grad", "forward", "backward", "step")
MODAL = {"self": "Sequential", "0": "Linear", "1": "BatchNorm1d", "2": "Dropout"}
EVAL = {"training": False}


def _calls(steps: list[tuple[str, ...]], first: int = 0, **details: Any):  # type: ignore[no-untyped-def]
    return make_calls([()] * first + steps, **details)


def test_training_goes_on_in_eval_mode() -> None:
    calls = [*_calls([PLAIN] * 5), *_calls([PLAIN] * 5, 5, forward=EVAL)]
    [found] = ask("eval-mode-in-training", make_program([make_optimizer(), *calls], modules=MODAL))
    assert (found.severity, found.step, found.line) == ("warning", 5, "train.py:11")
    assert "from step 5 on" in found.message
    assert "5 of 10 updates, with 1 batch norm and 1 dropout" in found.message


def test_training_in_eval_mode_all_the_time() -> None:
    [found] = ask("eval-mode-in-training", make_program(_calls([PLAIN] * 5, forward=EVAL), modules=MODAL))
    assert "in eval mode all the time: 5 of 5 updates" in found.message


def test_eval_mode_that_does_no_harm() -> None:
    evaluated = [(*PLAIN, "evaluate")] * 5
    assert not ask("eval-mode-in-training", make_program(_calls(evaluated, evaluate=EVAL), modules=MODAL))
    plain = {"self": "Sequential", "0": "Linear", "1": "LayerNorm"}
    assert not ask("eval-mode-in-training", make_program(_calls([PLAIN] * 5, forward=EVAL), modules=plain))
    teacher = [("zero_grad", "forward", "backward", "step")] * 5
    other = _calls(teacher, forward={**EVAL, "about": "teacher"})
    assert not ask(
        "eval-mode-in-training", make_program([make_optimizer(names=["student.0:weight"]), *other], modules=MODAL)
    )


def test_dropout_of_nothing_has_no_mode() -> None:
    record = make_program(_calls([PLAIN] * 5, forward=EVAL), modules={"self": "Sequential", "0": "Dropout"})
    assert ask("eval-mode-in-training", record)
    record.modules["0"] = {**record.modules["0"], "settings": "p=0.0, inplace=False"}
    assert not ask("eval-mode-in-training", record)


def test_an_evaluation_in_training_mode() -> None:
    steps = [PLAIN if step % 5 else ("evaluate", *PLAIN) for step in range(20)]
    [found] = ask("train-mode-in-evaluation", make_program(_calls(steps), modules=MODAL))
    assert (found.severity, found.line) == ("warning", "train.py:20")
    assert "4 evaluations, none of them in eval mode" in found.message
    behind = [*[PLAIN] * 5, ("evaluate",)]
    [found] = ask("train-mode-in-evaluation", make_program(_calls(behind), modules=MODAL))
    assert "1 evaluation, none" in found.message


def test_an_evaluation_with_grad_in_training_mode() -> None:
    calls = [*_calls([PLAIN] * 6), *_calls([("evaluate",)], 6, evaluate={"grad": True})]
    [found] = ask("train-mode-in-evaluation", make_program(calls, modules=MODAL))
    assert found.line == "train.py:20"


def test_forwards_without_grad_that_are_part_of_training() -> None:
    every = [("evaluate", *PLAIN)] * 10
    assert not ask("train-mode-in-evaluation", make_program(_calls(every), modules=MODAL))
    two = [("zero_grad", "forward", "forward", "backward", "step")] * 10
    assert not ask("train-mode-in-evaluation", make_program(_calls(two), modules=MODAL))


def test_evaluations_that_are_as_they_should_be() -> None:
    steps = [PLAIN if step % 5 else ("evaluate", *PLAIN) for step in range(20)]
    assert not ask("train-mode-in-evaluation", make_program(_calls(steps, evaluate=EVAL), modules=MODAL))
    assert not ask("train-mode-in-evaluation", make_program(_calls(steps)))  # neither batch norm nor dropout


def test_a_sample_of_predictions() -> None:
    drops = {"self": "Sequential", "0": "Linear", "1": "Dropout"}
    calls = _calls([*[PLAIN] * 5, ("evaluate",) * 5])
    assert not ask("train-mode-in-evaluation", make_program(calls, modules=drops))
    assert ask("train-mode-in-evaluation", make_program(calls, modules=MODAL))


def test_a_fixed_set_that_is_evaluated_at_every_update() -> None:
    calls = _calls([("evaluate", *PLAIN)] * 10)

    def inputs(trained: str, evaluated: str) -> list[Input]:
        phases: tuple[tuple[Phase, str], ...] = (("train", trained), ("no_grad", evaluated))
        return [
            Input(name="self:input.x", digest=digest.format(step), moment=Moment(step, phase=phase))
            for step in range(10)
            for phase, digest in phases
        ]

    fixed, varied, same = inputs("a{}", "v"), inputs("a{}", "v{}"), inputs("a", "a")
    assert ask("train-mode-in-evaluation", make_program([*calls, *fixed], modules=MODAL))
    assert not ask("train-mode-in-evaluation", make_program([*calls, *varied], modules=MODAL))
    assert not ask("train-mode-in-evaluation", make_program([*calls, *same], modules=MODAL))
