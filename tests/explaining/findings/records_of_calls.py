"""Records of what programs call, and in which order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from retrograd.core.history.fact import Fact
from retrograd.core.history.facts import ActiveDropout, Call, Input, OptimizerMade
from retrograd.core.history.sink import Event, Moment, Phase
from retrograd.explaining.findings.record import Record
from tests.explaining.findings.by_hand import make_record, spread
from tests.explaining.findings.programs import make_call, make_calls, make_chain, make_optimizer, make_program
from tests.explaining.findings.records import Make, alike, faulty, gather, unknown

PLAIN = ("zero_grad", "forward", "backward", "step")
TWICE = ("zero_grad", "forward", "backward", "second backward", "step")


def calls(steps: Sequence[Sequence[str]], *facts: Fact, **details: Any) -> Make:
    """A program that makes these calls in each step."""
    return lambda: make_program([*facts, *make_calls(steps, **details)])


# ---- updates ----


def _ahead(line: str) -> Record:
    made = make_calls([("forward", "backward", "step")] * 5 + [("forward", "backward")])
    record = make_program([make_optimizer(), *(replace(c, line=line) if c.name == "step" else c for c in made)])
    record.status = "finished"
    return record


def _two_optimizers() -> Record:
    made = make_calls([PLAIN] * 6) + make_calls([("zero_grad", "backward")] * 6, zero_grad={"about": "Adam_2"})
    return make_program(sorted(made, key=lambda call: call.step))


SKIPPED = ("zero_grad", "forward", "backward", "scaler.step", "scaler.update")
MEAN_OF_8 = ("mean", (-1,), ((8,),), ())
BY_4 = make_chain(MEAN_OF_8, ("div", (0,), ((),), (), "4"), outputs=[])
BY_2 = make_chain(MEAN_OF_8, ("div", (0,), ((),), (), "2"), outputs=[])
CLEARED_WITHIN = [(*("zero_grad", "forward", "backward") * 4, "step")] * 3

UPDATES = gather(
    faulty(
        "optimizer-never-steps", calls([("zero_grad", "forward", "backward") * 6]), "critical", "backward ran 6 times",
        site="SGD", line="train.py:12",
    ),
    faulty("optimizer-never-steps", _two_optimizers, "critical", site="Adam_2", line="train.py:12"),
    alike(
        "optimizer-never-steps",
        calls([("forward", "backward") * 6]),  # gradients may be all that is wanted
        calls([("forward", "backward") * 40], forward={"training": False}),
        calls([PLAIN] * 6),
        calls([SKIPPED] * 30, make_optimizer(), scaler__step={"about": "SGD"}, scaler__update={"value": 2.0}),
    ),
    unknown("optimizer-never-steps", lambda: make_program([]), "no calls"),
    faulty(
        "backward-never-called", calls([("zero_grad", "forward", "step")] * 4), "critical", "no backward pass ever ran",
        line="train.py:14",
    ),
    alike("backward-never-called", calls([PLAIN] * 4), calls([("zero_grad", "forward", "step")] * 2)),
    unknown("backward-never-called", calls([("forward", "backward")] * 4), "no update"),
    faulty(
        "step-before-backward",
        calls([("zero_grad", "forward", "step")] + [("backward", "zero_grad", "forward", "step")] * 5),
        "critical", "6 of 6 updates", line="train.py:14",
    ),
    faulty("step-before-backward", lambda: _ahead("train.py:9"), "note", "at the start of each round"),
    alike(
        "step-before-backward",
        lambda: _ahead("train.py:14"),
        calls([("zero_grad", "forward", "backward", "evaluate", "step")] * 6),
        calls([PLAIN] * 6),
    ),
    unknown("step-before-backward", lambda: make_program([]), "no update"),
    faulty(
        "step-too-seldom", calls([(*("zero_grad", "forward", "backward") * 8, "step")] * 3), "critical",
        "of 24 backward passes, 21 are followed by zero_grad", line="train.py:14",
    ),
    alike(
        "step-too-seldom",
        calls([(*("forward", "second backward", "zero_grad") * 7, "forward", "backward", "step")] * 3),  # adversarial
        calls([("zero_grad", *("forward", "backward") * 8, "step")] * 3),
    ),
    unknown("step-too-seldom", calls(CLEARED_WITHIN, BY_4), "meant to be accumulated"),
)  # fmt: skip

# ---- gradients that add up ----


def _gan(*facts: Fact, clears_both: bool, zero_grad: str = "") -> Record:
    """A critic whose gradients are cleared, and a generator whose own are, or not; ``zero_grad`` is of which module."""
    made: list[Fact] = [
        *facts,
        make_optimizer("Adam", names=["D.0:weight"]),
        make_optimizer("Adam_2", names=["G.0:weight"]),
    ]
    for step in range(6):
        for name, names, held in (("Adam", PLAIN, "none"), ("Adam_2", PLAIN if clears_both else PLAIN[1:], "some")):
            about = {"about": name}
            cleared = {"about": zero_grad} if zero_grad else about
            made += make_calls([()] * step + [names], zero_grad=cleared, step=about, backward={"held": held})
    return make_program(made)


def _losses(of_step: Sequence[tuple[float, int]], steps: int = 5, every: int = 1, names: Sequence[str] = TWICE) -> Make:
    """Backward begins from these losses of micro-batches in each step; of some steps they are recorded."""

    def make() -> Record:
        record = make_program(make_calls([names] * steps))
        for step in range(0, steps, every):
            for place, (value, micro) in enumerate(of_step):
                record.history.add_event(Event(Moment(step, micro, place), "loss", value=value + step))
        return record

    return make


TERM = ("mse_loss", (-1, -1), ((8, 1), (8, 1)), (), "reduction=mean")
PARTS = [TERM, MEAN_OF_8]
TOTAL = [*PARTS, ("add", (0, 1), ((), ()), ())]


def _counted_twice(last: int) -> Make:
    return calls(
        [TWICE] * 5, make_chain(*PARTS, outputs=[], loss=0), make_chain(*TOTAL, outputs=[], loss=last)
    )  # fmt: skip


LINEAR_LOSS = [
    ("linear", (-1, -1), ((4, 3), (2, 3)), (4, 2)), ("cross_entropy", (0, -1), ((4, 2), (4,)), (), "reduction=mean"),
]  # fmt: skip
MEAN = make_chain(*LINEAR_LOSS, outputs=[0])
DIVIDED = make_chain(*LINEAR_LOSS, ("div", (1,), ((),), (), "4"), outputs=[0])
FOUR = [(*("forward", "backward") * 4, "step", "zero_grad")] * 5
FOUR_CLIPPED = [(*("forward", "backward") * 4, "clip_grad_norm_", "step", "zero_grad")] * 5
ADAM = {"about": "Adam"}
SUM_OF_TWO = make_chain(TERM, TERM, ("add", (0, 1), ((), ()), ()), outputs=[])
SOME = {"held": "some"}
NEVER = [("forward", "backward", "step")]

GRADIENTS = gather(
    faulty(  # of the whole run: what the first pass leaves is never cleared
        "missing-zero-grad", calls(NEVER * 10, make_optimizer(), backward=SOME), "critical",
        "never cleared: all 9 updates of SGD after the first", step=0, last_step=9, line="train.py:12",
    ),
    faulty(
        "missing-zero-grad", calls([PLAIN if step % 5 == 0 else NEVER[0] for step in range(20)], backward=SOME),
        "critical", "mostly not cleared: 16 of the 19",
    ),
    faulty("missing-zero-grad", lambda: _gan(clears_both=False), "critical", site="Adam_2"),
    alike(
        "missing-zero-grad",
        lambda: _gan(clears_both=True),
        calls([PLAIN] * 10, make_optimizer()),
        calls(NEVER * 10, make_optimizer()),  # .grad was None when backward began
        calls(NEVER * 10, make_optimizer(), backward={"held": "zero"}),
        calls([("forward", "backward", "step", "zero_grad")] * 10, make_optimizer()),
        calls([("model.zero_grad", "forward", "backward", "step")] * 10, make_optimizer(), backward=SOME),
        calls([(*("forward", "backward") * 2, "step", "zero_grad")] * 6, backward=SOME),
        calls(NEVER * 3, backward=SOME),  # two updates
    ),
    unknown("missing-zero-grad", calls(NEVER * 9, step={"about": "LBFGS"}), "no update"),
    faulty(
        "zero-grad-misplaced", calls([("forward", "backward", "zero_grad", "step")] * 4, make_optimizer()), "critical",
        "before 4 of 4 updates", step=0, line="train.py:10",
    ),
    faulty(
        "zero-grad-misplaced", calls(CLEARED_WITHIN, BY_4), "critical",
        "of 4 backward passes before an update the gradients of 3 are cleared", line="train.py:10",
    ),
    alike(
        "zero-grad-misplaced",
        calls(CLEARED_WITHIN, make_chain(MEAN_OF_8, outputs=[])),
        lambda: _gan(BY_2, clears_both=True, zero_grad="self"),  # a pass that another optimizer has used is not lost
        calls([("zero_grad", "forward", "backward", "zero_grad", "step")] * 4, make_optimizer(),
              zero_grad={"about": "Adam_2"}),
        calls([("forward", "backward", "model.zero_grad", "step")] * 4, make_optimizer(names=["0:weight", "1:weight"]),
              **{"model.zero_grad": {"about": "1"}}),
        calls([PLAIN] * 4),
    ),
    unknown(
        "zero-grad-misplaced", calls([("forward", "backward", "zero_grad", "step")] * 4, step={"about": "LBFGS"}),
        "no update",
    ),
    faulty(
        "double-backward", _losses([(0.5, 0), (0.5, 0)]), "warning",
        "2 times from the same loss (0.5) before 5 of 5 updates", line="train.py:19",
    ),
    faulty("double-backward", _losses([(0.5, 0), (0.5, 0)], 10, every=5), "warning", "(0.5) before 2 of 2 updates"),
    faulty(
        "double-backward", _counted_twice(2), "warning",
        "from mse_loss, and then from a sum that holds it, before 5 of 5",
    ),
    alike(
        "double-backward",
        _losses([(0.5, 0), (0.25, 0)], 10, every=5),
        _counted_twice(1),
        _losses([(0.5, 0), (0.25, 0)]),
        _losses([(0.5, 0), (0.5, 1)]),
        _losses([(0.5, 0)], names=PLAIN),
    ),
    unknown("double-backward", lambda: make_program([]), "no update"),
    faulty("accumulation-not-divided", calls(FOUR, MEAN), "warning", "4 micro-batches", line="train.py:12"),
    faulty("accumulation-not-divided", calls(FOUR, MEAN, step=ADAM, zero_grad=ADAM), "note"),
    *(
        faulty(
            "accumulation-not-divided",
            calls(FOUR_CLIPPED, MEAN, step=ADAM, clip_grad_norm_={"max_norm": 1.0, "value": norm}), severity,
        )
        for norm, severity in [(0.9, "note"), (3.0, "warning"), (5.0, "note")]  # the mean is clipped too at 5
    ),
    faulty(
        "accumulation-not-divided",
        calls([(*("forward", "forward", "backward") * 4, "step", "zero_grad")] * 5, SUM_OF_TWO), "warning",
        "4 micro-batches",
    ),
    faulty(
        "accumulation-not-divided",
        calls([*FOUR, ("forward", "backward", "step")], make_optimizer(), make_optimizer("Adam_2"), MEAN), "warning",
    ),
    alike(
        "accumulation-not-divided",
        calls(FOUR, DIVIDED),
        calls([("forward", "backward", "forward", "second backward", "step", "zero_grad")] * 5, MEAN),
        calls([PLAIN] * 5, MEAN),
    ),
    unknown("accumulation-not-divided", calls(FOUR), "no operations"),
)  # fmt: skip

# ---- clipping ----

CLIPPED = ("zero_grad", "forward", "backward", "clip_grad_norm_", "step")
SCALED = (*CLIPPED, "scaler.update")
BEHIND = [PLAIN, *[("clip_grad_norm_", *PLAIN)] * 4]
BEFORE = [("zero_grad", "forward", "clip_grad_norm_", "backward", "step")] * 5
MICRO = [("zero_grad", *("forward", "backward", "clip_grad_norm_") * 2, "step")] * 5
LARGE = {"value": 65536.0}
FLAT, FALLING = [0.7] * 40, [0.7 * 0.9**step for step in range(40)]


def _two_take_turns() -> Record:
    second = make_calls([("forward", "backward", "step")], step={"about": "Adam_2"})
    return make_program([*make_calls([CLIPPED] * 5), *second])


def _updated(gradient: float = 1.0, **clip: float) -> Make:
    sites = {"0:weight.grad": spread(gradient), "0:weight.update": spread(0.1)}
    made = make_calls([CLIPPED] * 5, clip_grad_norm_=clip)
    return lambda: make_record(range(5), lambda step: sites, facts=made)


def _bounded(norms: Sequence[float], bound: float, losses: Sequence[float] = FLAT, optimizer: str = "SGD") -> Make:
    made = [
        Call(name="clip_grad_norm_", line="train.py:8", value=norm, details={"max_norm": bound}, moment=Moment(k))
        for k, norm in enumerate(norms)
    ]
    sites = {"0:weight.update": spread(0.1)}
    return lambda: make_record(range(40), lambda step: sites, losses, facts=made, optimizer=optimizer)


CLIPPING = gather(
    faulty("clip-after-step", calls(BEHIND), "warning", "after the update", line="train.py:13"),
    alike("clip-after-step", calls(BEFORE), calls([CLIPPED] * 5), calls(MICRO)),
    unknown("clip-after-step", _two_take_turns, "take turns"),
    faulty("clip-before-backward", calls(BEFORE), "warning", "before backward", step=0),
    alike("clip-before-backward", calls(BEHIND), calls([CLIPPED] * 5), calls(MICRO)),
    unknown("clip-before-backward", calls([PLAIN] * 5), "nothing is clipped"),
    faulty(
        "clip-before-unscale", calls([SCALED] * 5, scaler__update=LARGE), "warning",
        "to 1 is called without scaler.unscale_ before it, at a scale of 65536",
    ),
    alike(
        "clip-before-unscale",
        calls([("forward", "backward", "scaler.unscale_", "clip_grad_norm_", "step", "scaler.update")] * 5,
              scaler__update=LARGE),
    ),
    unknown("clip-before-unscale", calls([SCALED] * 5, scaler__update={"value": 1.0}), "no loss is scaled"),
    unknown("clip-before-unscale", calls([CLIPPED] * 5), "no loss is scaled"),
    faulty(
        "clip-other-parameters", _updated(parameters=0, value=0.0), "warning",
        "is given no parameters, and SGD updates others", line="train.py:13",
    ),
    alike("clip-other-parameters", _updated(value=3.0)),
    unknown("clip-other-parameters", _updated(gradient=0.0, value=0.0), "all gradients are zero"),  # decay changes them
    unknown("clip-other-parameters", calls([CLIPPED] * 5, clip_grad_norm_={"value": 0.0}), "all gradients are zero"),
    faulty(
        "clip-always-on", _bounded([2.0] * 40, 1e-3), "warning", "leaves 0.0005 of the gradient at 40 of 40 steps",
        "learning rate", line="train.py:8",
        precondition=("the loss has not fallen", "updates are in proportion to gradients"),
    ),
    faulty("clip-always-on", _bounded([2.0] * 40, 1e-3, FALLING), "note"),
    faulty("clip-always-on", _bounded([2.0] * 40, 1e-3, optimizer="Adam"), "note"),  # it knows no size of the gradient
    faulty("clip-always-on", _bounded([2.0] * 40, 1e-3, FALLING, "Adam"), "note"),
    alike("clip-always-on", _bounded([2.0] * 40, 1.0), _bounded([2e3] * 20 + [0.5] * 20, 1.0)),
    unknown("clip-always-on", _bounded([2.0] * 5, 1e-3), "it takes 20"),
)  # fmt: skip

# ---- learning rates ----


def _scheduled(rates: Sequence[float], kind: str = "StepLR", losses: Sequence[float] = (), every: int = 1) -> Make:
    """A program with these learning rates, whose scheduler is stepped behind each update, or every n-th."""
    made = []
    for step, rate in enumerate(rates):
        made += [make_call(step, "backward", {}), make_call(step, "step", {"lr": [rate]})]
        if step % every == every - 1:
            made.append(make_call(step + 1, "scheduler.step", {"about": kind}))
    made.sort(key=lambda call: call.step)
    return lambda: make_program(made, losses or [1.0] * len(rates))


def _groups(*first: float) -> Make:
    groups = ({"lr": 0.0, "parameters": ["0:weight", "0:bias"]}, {"lr": 0.1, "parameters": ["1:weight"]})
    made = OptimizerMade(name="SGD", line="train.py:5", groups=groups, moment=Moment(0))
    return lambda: make_program([made, *(make_call(k, "step", {"lr": [rate, 0.1]}) for k, rate in enumerate(first))])


def _epochs(*names: str, rate: float = 0.2, status: str = "finished") -> Make:
    def make() -> Record:
        record = make_program([make_optimizer(initial_lr=rate), *(make_call(0, name, {}) for name in names)])
        record.status = status
        return record

    return make


COLLAPSED = [0.1 * 0.05 ** (step // 10) for step in range(100)]
COSINE = [0.05 * (1 + math.cos(math.pi * step / 100)) for step in range(100)]
WAVES = [0.05 * (1 + math.cos(math.pi * step / 8)) for step in range(100)]
LEARNED = [10.0 * 0.8**step for step in range(100)]
JUMP = [0.01] * 20 + [1.0] * 20
RISE = [0.5] * 20 + [5.0] * 20
AHEAD = (*("step", "step", "scheduler.step") * 4, "step", "step")
HEALTHY = (
    _scheduled(COSINE, "CosineAnnealingLR"), _scheduled(COLLAPSED, losses=LEARNED), _scheduled([0.1] * 100),
)  # fmt: skip

RATES = gather(
    faulty(
        "scheduler-per-step", _scheduled(COLLAPSED), "warning",
        "from 0.1 to 0.00025 after 20 of 100 updates by StepLR, which is stepped once per update", line="train.py:15",
    ),
    faulty("scheduler-per-step", _scheduled(WAVES, "CosineAnnealingLR"), "warning", "6 times between"),
    alike("scheduler-per-step", _scheduled(WAVES, "CosineAnnealingWarmRestarts"), *HEALTHY),
    unknown("scheduler-per-step", calls([PLAIN] * 5), "no scheduler"),
    faulty(
        "lr-zero", _scheduled([0.0] * 20, "LambdaLR"), "critical", "is 0 at all 20 updates (LambdaLR)",
        line="train.py:15",
    ),
    faulty("lr-zero", _scheduled(COLLAPSED, "LambdaLR"), "warning", step=20),
    faulty("lr-zero", _scheduled(COLLAPSED, every=10), "warning", "by StepLR: hardly anything"),
    faulty("lr-zero", _scheduled([0.1] * 30 + [0.0] * 70, losses=LEARNED), "warning", step=30),  # for all the rest
    faulty(
        "lr-zero", _groups(*[0.0] * 5), "warning", "of 0:weight and 0:bias is 0 at all 5 updates", site="0:weight",
        line="train.py:5",
    ),
    alike(
        "lr-zero", _scheduled(COLLAPSED), _scheduled([0.0, 0.05, *[0.1] * 20]), _groups(0.0, 0.0, 0.1, 0.1, 0.1),
        _scheduled([0.1] * 90 + [0.0] * 10, losses=LEARNED), *HEALTHY,
    ),
    unknown("lr-zero", lambda: make_program([]), "no learning rate"),
    faulty(
        "scheduler-before-step", _epochs("scheduler.step", "forward", "backward", "step"), "warning",
        line="train.py:15",
    ),
    faulty("scheduler-before-step", _epochs(*AHEAD), "warning", "before the updates of its epoch"),
    alike(
        "scheduler-before-step",
        _epochs("forward", "backward", "step", "scheduler.step"),
        _epochs(*AHEAD, rate=0.1),  # none before the first update either, it seems
        _epochs(*AHEAD, status="stopped"),
        _epochs(*("step", "step", "scheduler.step") * 5),
    ),
    unknown("scheduler-before-step", _epochs("forward", "backward", "step"), "no scheduler"),
    faulty(
        "lr-jump", _scheduled(JUMP, losses=RISE), "warning",
        "from 0.01 to 1 at step 20, and the loss goes from 0.5 to 5", step=20,
    ),
    alike(
        "lr-jump",
        _scheduled(JUMP, losses=[0.5] * 40),
        _scheduled([0.1, *[0.001] * 19, *[0.1] * 20], losses=RISE),  # a restart
        _scheduled([0.0, 0.001, 0.1, *[1.0] * 37], losses=[0.5] * 3 + [5.0] * 37),  # a warm-up
    ),
    unknown("lr-jump", lambda: make_program([]), "no learning rate"),
)  # fmt: skip

# ---- training and evaluation ----

MODAL = {"self": "Sequential", "0": "Linear", "1": "BatchNorm1d", "2": "Dropout"}
DROPS = {"self": "Sequential", "0": "Linear", "1": "Dropout"}
EVAL = {"training": False}


def modal(*made: Sequence[Fact], modules: dict[str, str] = MODAL, settings: str = "") -> Make:
    """A program of a model with a batch norm and a dropout."""

    def make() -> Record:
        record = make_program([fact for each in made for fact in each], modules=modules)
        if settings:
            record.modules["0"] = {**record.modules["0"], "settings": settings}
        return record

    return make


def _given(trained: str, evaluated: str) -> list[Fact]:
    phases: tuple[tuple[Phase, str], ...] = (("train", trained), ("no_grad", evaluated))
    return [
        Input(name="self:input.x", digest=digest.format(step), moment=Moment(step, phase=phase))
        for step in range(10)
        for phase, digest in phases
    ]


TRAINED = make_calls([PLAIN] * 5)
LATER = make_calls([()] * 5 + [PLAIN] * 5, forward=EVAL)
EACH_FIFTH = [PLAIN if step % 5 else ("evaluate", *PLAIN) for step in range(20)]
EACH_TIME = make_calls([("evaluate", *PLAIN)] * 10)
WRONG_MODE = make_calls([PLAIN] * 5, forward=EVAL)
ONLY_DROPOUT = {"self": "Sequential", "0": "Dropout"}

DROPS_ALWAYS = ActiveDropout(name="blocks.0", value=0.4, operation="dropout", line="net.py:8")

MODES = gather(
    faulty(
        "eval-mode-in-training", modal([make_optimizer()], TRAINED, LATER), "warning", "from step 5 on",
        "5 of 10 updates, with 1 batch norm and 1 dropout", step=5, line="train.py:11",
    ),
    faulty("eval-mode-in-training", modal(WRONG_MODE), "warning", "in eval mode all the time: 5 of 5 updates"),
    faulty("eval-mode-in-training", modal(WRONG_MODE, modules=ONLY_DROPOUT), "warning"),
    alike("eval-mode-in-training", modal(make_calls([(*PLAIN, "evaluate")] * 5, evaluate=EVAL))),
    unknown(
        "eval-mode-in-training", modal(WRONG_MODE, modules={"self": "Sequential", "1": "LayerNorm"}), "no batch norm",
    ),
    unknown(
        "eval-mode-in-training", modal(WRONG_MODE, modules=ONLY_DROPOUT, settings="p=0.0, inplace=False"), "no dropout",
    ),
    unknown(  # a teacher
        "eval-mode-in-training",
        modal([make_optimizer(names=["student.0:weight"])],
              make_calls([PLAIN] * 5, forward={**EVAL, "about": "teacher"})), "no update of a model",
    ),
    faulty(
        "train-mode-in-evaluation", modal(make_calls(EACH_FIFTH)), "warning",
        "4 evaluations, none of them in eval mode", line="train.py:20",
    ),
    faulty(
        "train-mode-in-evaluation", modal(TRAINED, make_calls([()] * 5 + [("evaluate",)])), "warning", "1 evaluation,"
    ),
    faulty(
        "train-mode-in-evaluation",
        modal(make_calls([PLAIN] * 6), make_calls([()] * 6 + [("evaluate",)], evaluate={"grad": True})), "warning",
        line="train.py:20",
    ),
    faulty("train-mode-in-evaluation", modal(TRAINED, make_calls([()] * 5 + [("evaluate",) * 5])), "warning"),
    faulty("train-mode-in-evaluation", modal(EACH_TIME, _given("a{}", "v")), "warning"),  # a fixed set
    alike(
        "train-mode-in-evaluation",
        modal(TRAINED, make_calls([()] * 5 + [("evaluate",) * 5]), modules=DROPS),  # a sample of predictions
        modal(EACH_TIME),
        modal(EACH_TIME, _given("a{}", "v{}")),
        modal(EACH_TIME, _given("a", "a")),
        modal(make_calls([("zero_grad", "forward", "forward", "backward", "step")] * 10)),
        modal(make_calls(EACH_FIFTH, evaluate=EVAL)),
    ),
    faulty(
        "dropout-in-evaluation", modal(make_calls(EACH_FIFTH, evaluate=EVAL), [DROPS_ALWAYS]), "warning",
        "drops 40% in eval mode", site="blocks.0", line="net.py:8",
    ),
    alike("dropout-in-evaluation", modal(make_calls(EACH_FIFTH, evaluate=EVAL))),
    unknown("dropout-in-evaluation", modal(make_calls([PLAIN] * 5)), "without grad"),
    unknown(
        "train-mode-in-evaluation", modal(make_calls(EACH_FIFTH), modules={"self": "Sequential", "0": "Linear"}),
        "no batch norm",
    ),
)  # fmt: skip

# ---- optimizers ----


def _halves(later: float, gradient: float = 1.0, **group: Any) -> Make:
    """Two weights with updates of 0.1 until step 10; then that of the second is as given, and its gradient is."""
    return lambda: make_record(
        range(20),
        lambda step: {
            "0:weight.grad": spread(1.0), "2:weight.grad": spread(gradient if step >= 10 else 1.0),
            "0:weight.update": spread(0.1), "2:weight.update": spread(later if step >= 10 else 0.1),
        },
        weights=lambda step: {"0:weight": 1.0, "2:weight": 1.0},
        facts=[make_optimizer(names=["0:weight", "2:weight"]), *make_calls([("step",)] * 20, step=group)],
    )  # fmt: skip


def _held(*names: str, unknown: int = 0) -> Make:
    sites = {"0:weight.grad": np.ones(4), "2:weight.grad": np.ones(4), "0:weight.update": spread(0.1)}
    made = make_optimizer(names=names, unknown=unknown)
    return lambda: make_record(range(4), lambda step: sites, facts=[made])


def _created(*made: Fact, steps: bool = False) -> Make:
    updates = [
        call
        for k in range(1, 1 + len(made) * steps)
        for call in make_calls([()] * k + [("backward", "step")], step={"about": f"Adam_{k}"})
    ]
    return lambda: make_program([*made, *updates])


NUMBERS = range(1, 6)

OPTIMIZERS = gather(
    faulty(
        "optimizer-made-anew", _created(*[make_optimizer(f"Adam_{k}") for k in NUMBERS], steps=True), "warning",
        "Adam is created again 5 times for the same parameters, at every update", line="train.py:5",
    ),
    faulty("optimizer-made-anew", _created(*[make_optimizer(f"SGD_{k}", momentum=0.0) for k in NUMBERS]), "note"),
    faulty("optimizer-made-anew", _created(*[make_optimizer(f"SGD_{k}", momentum=0.9) for k in NUMBERS]), "warning"),
    alike(
        "optimizer-made-anew",
        _created(*[make_optimizer(f"Adam_{k}", names=[f"model{k}.0:weight"]) for k in NUMBERS]),
        _created(make_optimizer("Adam"), make_optimizer("Adam_2")),
    ),
    unknown("optimizer-made-anew", lambda: make_program([]), "no optimizer"),
    faulty(
        "optimizer-before-change", _held("0:weight", unknown=1), "critical",
        "updates 1 tensor that no recorded model has, while 2:weight has gradients", site="2:weight", line="train.py:5",
    ),
    faulty(
        "optimizer-before-change", _halves(0.0), "critical",
        "2:weight has gradients and has not been updated any more since step 10", site="2:weight", step=10,
        line="train.py:5",
    ),
    alike(
        "optimizer-before-change", _held("0:weight", "2:weight", unknown=3), _held("0:weight"), _halves(0.1),
        _halves(0.0, gradient=0.0), _halves(0.0, lr=[0.1, 0.0]),
    ),
    unknown("optimizer-before-change", lambda: make_program([]), "no optimizer"),
)  # fmt: skip

ROWS = [*UPDATES, *GRADIENTS, *CLIPPING, *RATES, *MODES, *OPTIMIZERS]
