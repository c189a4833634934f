"""Records of statistics: losses, updates, layers, units, types, ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from retrograd.core.history.fact import Fact
from retrograd.core.history.facts import (
    Buffer,
    Call,
    Input,
    Modes,
    NonFinite,
    Operations,
    OptimizerMade,
    Parameter,
    Softmax,
    Units,
)
from retrograd.core.history.sink import Event, Moment
from retrograd.core.history.weights_facts import Load
from retrograd.core.runs.findings import Evidence
from retrograd.explaining.findings.record import Record
from tests.explaining.findings.by_hand import Elements, make_record, spread
from tests.explaining.findings.programs import make_calls, make_chain, make_optimizer
from tests.explaining.findings.records import Make, alike, faulty, gather, unknown

FLAT, FALLING = [0.7] * 40, [0.7 * 0.9**step for step in range(40)]
LOOKS = (0, 1, 2, 4, 8, 16)

# ---- losses ----

NOISE = 1 + 0.1 * np.sin(np.arange(200) * 2.4)


def loss(losses: np.ndarray, facts: Sequence[Fact] = ()) -> Make:
    """Losses, with usual updates."""
    return lambda: make_record(
        range(len(losses)),
        lambda step: {"0:weight.update": spread(0.001)},
        [float(each) for each in losses],
        weights=lambda step: {"0:weight": 1.0},
        facts=facts,
    )


TURNS: list[Fact] = [
    make_optimizer("Adam", names=["0:weight"]),
    make_optimizer("Adam_2", names=["2:weight"]),
    *(
        call
        for step in range(8)
        for name in ("Adam", "Adam_2")
        for call in make_calls([()] * step + [("backward", "step")], step={"about": name})
    ),
]
"""Two parts of one model, each behind a pass of its own."""


def jump(losses: np.ndarray, at: int, length: int, times: float) -> np.ndarray:
    """The same losses, a stretch of them multiplied."""
    out = losses.copy()
    out[at : at + length] *= times
    return out


def _head(*values: float) -> np.ndarray:
    """As of flow matching: most of a loss is noise that no model can learn, and the rest is learned in a few steps."""
    out = 1.6 * NOISE
    out[: len(values)] += values
    return out


LINEAR = ("linear", (-1, -1), ((8, 6), (4, 6)), (8, 4))
PAIR = ((8, 4), (8, 4))
REGRESSION = make_chain(LINEAR, ("mse_loss", (0, -1), PAIR, ()), outputs=[0])
SCALED_INSIDE = make_chain(
    LINEAR, ("mul", (0, -1), ((8, 4), (4,)), (8, 4)), ("mse_loss", (1, -1), PAIR, ()), outputs=[1]
)
SCALED = make_chain(LINEAR, ("mse_loss", (0, -1), PAIR, ()), ("mul", (1, -1), ((), ()), ()), outputs=[0])
MOVING_TARGET = make_chain(
    LINEAR, ("detach", (0,), ((8, 4),), (8, 4), "", "", True), ("mse_loss", (0, 1), PAIR, ()), outputs=[0]
)
WEIGHTED_SAMPLES = make_chain(
    LINEAR,
    ("cross_entropy", (0, -1), ((8, 4), "int64[8]"), (8,), "reduction=none"),
    ("mul", (1, -1), ((8,), (8,)), (8,)),
    ("mean", (2,), ((8,),), ()),
    outputs=[0],
)

LOSSES = gather(
    faulty("diverged", loss(jump(NOISE, 120, 80, 50.0)), "warning", step=120),
    faulty("diverged", loss(jump(NOISE, 120, 80, np.nan)), "warning", step=120),
    alike("diverged", loss(NOISE), loss(jump(NOISE, 120, 3, 50.0)), loss(-NOISE)),
    unknown("diverged", loss(jump(NOISE[:5], 2, 3, 50.0)), "it takes 10"),
    faulty("loss-spike", loss(jump(NOISE, 120, 80, 50.0)), "warning", step=120),
    faulty("loss-spike", loss(jump(NOISE, 120, 8, 50.0)), "note", step=120, last_step=127),
    alike(
        "loss-spike",
        loss(jump(NOISE, 120, 2, 50.0)),
        loss(NOISE * np.linspace(5, 1, 200)),
        loss(jump(100 * 0.95 ** np.arange(200), 150, 9, 20.0)),  # small beside its start
    ),
    unknown("loss-spike", loss(NOISE[:30]), "it takes 40"),
    faulty("loss-flat", loss(NOISE), "note", step=None),
    faulty("loss-flat", loss(_head(0.0, 0.0, 0.0, 0.0, 0.0)), "note"),
    *(faulty("loss-flat", loss(NOISE, [chain]), "note") for chain in (REGRESSION, SCALED_INSIDE, SCALED)),
    alike("loss-flat", loss(NOISE * np.linspace(1, 0.5, 200)), loss(_head(1.0, 0.9, 0.8, 0.6, 0.3))),
    unknown("loss-flat", loss(NOISE[:30]), "it takes 50"),
    unknown("loss-flat", loss(NOISE, [Load(name="self", value=4)]), "were loaded"),
    unknown("loss-flat", loss(NOISE, TURNS), "trained by several optimizers"),
    unknown("loss-flat", loss(NOISE, [MOVING_TARGET]), "cut off by `detach`"),
    unknown("loss-flat", loss(NOISE, [WEIGHTED_SAMPLES]), "weights its elements"),
)

# ---- learning rates ----


def run(
    losses: Callable[[int], float], ratio: Callable[[int], float], rate: float | None = None, optimizer: str = "SGD"
) -> Make:
    """A weight of norm 10 that is changed by a ratio of it."""
    made = OptimizerMade(name=optimizer, value=1, line="train.py:7", groups=({"lr": rate},))
    return lambda: make_record(
        range(60),
        lambda step: {"0:weight.grad": spread(1.0), "0:weight.update": spread(10 * ratio(step))},
        losses,
        weights=lambda step: {"0:weight": 10.0},
        facts=[] if rate is None else [made],
        optimizer=optimizer,
    )


def _rises(scale: float, rate: float) -> Make:
    return run(lambda step: scale * (2.3 if step < 5 else 90.0), lambda step: 0.01 if step < 4 else 2.0, rate)


def _lost_by_a_logarithm() -> Record:
    made = NonFinite(
        name="", value=1, born="forward", line="train.py:4", operation="log", reason="log of 0", moment=Moment(3)
    )
    return make_record(
        range(60),
        lambda step: {"0:weight.grad": spread(1.0), "0:weight.update": spread(2.0 if step < 3 else 0.01)},
        lambda step: 80.0 - step if step < 3 else np.inf,
        weights=lambda step: {"0:weight": 10.0},
        facts=[made],
    )


def _adversaries() -> Record:
    record = make_record(
        range(30),
        lambda step: {"G.0:weight.update": spread(5.0), "D.0:weight.update": spread(5.0)},
        lambda step: 0.7 * 2.0**step,
        weights=lambda step: {"G.0:weight": 1.0, "D.0:weight": 1.0},
        modules={"G": "Sequential", "G.0": "Linear", "D": "Sequential", "D.0": "Linear"},
    )
    for event in [each for each in record.history.events if each.kind == "update"]:
        record.history.add_event(event)  # the second model's
    return Record(record.history)


def _warm_up() -> Record:
    steps = [Call(name="step", about="SGD", details={"lr": [1e-8 * (k + 1)]}, moment=Moment(k)) for k in range(60)]
    return make_record(
        range(60),
        lambda step: {"0:weight.update": spread(1e-7)},
        lambda step: 0.69,
        weights=lambda step: {"0:weight": 1.0},
        facts=[OptimizerMade(name="SGD", groups=({"lr": 1e-8},)), *steps],
    )


def still(gradient: float = 1.0, update: float = 0.0, facts: Sequence[Fact] = ()) -> Make:
    """Two weights, of which the first has this gradient and this update."""
    return lambda: make_record(
        range(10),
        lambda step: {
            "0:weight.grad": spread(gradient), "2:weight.grad": spread(1.0),
            "0:weight.update": spread(update), "2:weight.update": spread(0.1),
        },
        weights=lambda step: {"0:weight": 1.0, "2:weight": 1.0},
        facts=facts,
    )  # fmt: skip


def digests(listed: Mapping[int, str], thaws: int = 0, *, staged: bool = False, own: bool = False) -> Make:
    """A weight with these digests, which is updated from a step on; of a stage of a pipeline, trained here or not."""

    def make() -> Record:
        looks = [
            Parameter(name="0:weight", value=1.0, shape=(16,), digest=each, moment=Moment(step))
            for step, each in listed.items()
        ]
        head = {"2:weight.grad": spread(1.0), "2:weight.update": spread(0.1)} if thaws else {}
        first = {"0:weight.grad": spread(1.0), "0:weight.update": spread(0.1)}
        record = make_record(
            range(16),
            lambda step: head | (first if step >= thaws else {}),
            weights=lambda step: {"0:weight": 1.0, "2:weight": 1.0},
            facts=looks,
        )
        if staged:
            record.manifest["split"] = {"ranks": [], "stages": {"": 0}}
        record.facts.extend([OptimizerMade(name="SGD", groups=({"parameters": ["0:weight"]},))] * own)
        return record

    return make


NO_RATE = OptimizerMade(name="SGD", groups=({"lr": 0.0, "parameters": ("0:weight",)}, {"lr": 0.1}))
SAME = dict.fromkeys(range(4), "a")

STEPS = gather(
    faulty(
        "learning-rate-too-high",
        run(lambda step: 0.7 if step < 5 else 90.0, lambda step: 0.01 if step < 4 else 2.0, rate=3.0), "critical",
        "rate of 3 is", "2 times", step=4, line="train.py:7",
    ),
    faulty(
        "learning-rate-too-high",
        run(lambda step: 5.0 * 10.0**step if step < 9 else np.nan, lambda step: 1.0 if step < 9 else np.nan),
        "critical", "no longer finite", step=0,
    ),
    faulty("learning-rate-too-high", _rises(1.0, 0.1), "critical", "is too high: "),
    faulty("learning-rate-too-high", _rises(65536.0, 0.1), "critical", "is too high for a loss of "),
    faulty(  # 1e-3 · 1.15³³ > 0.1
        "learning-rate-too-high",
        run(lambda step: 4.0 * 0.9**step if step < 40 else 2.0**step, lambda step: 1e-3 * 1.15**step), "critical",
        step=33,
    ),
    alike(
        "learning-rate-too-high",
        run(lambda step: 0.7 if step != 30 else 90.0, lambda step: 0.5 if step == 29 else 0.01),  # it came back
        run(lambda step: 0.7 if step < 30 else 90.0, lambda step: 0.01),  # a usual update: it was the data
        run(lambda step: 9.0 / (step + 1), lambda step: 3.0 / (step + 1)),  # large steps that help
        run(lambda step: 0.7 + 0.1 * (step % 3), lambda step: 0.3),  # noise
        _lost_by_a_logarithm,
        run(lambda step: 0.7 if step < 10 else np.nan, lambda step: 0.01 if step < 9 else np.nan),
    ),
    unknown("learning-rate-too-high", _adversaries, "several models"),
    faulty(
        "learning-rate-too-low", run(lambda step: 0.69, lambda step: 1e-7, 1e-8, "Adam"), "warning",
        "1e-08 is too low", "6e-06",
    ),
    alike(
        "learning-rate-too-low",
        run(lambda step: 0.69, lambda step: 1e-7, 0.1),  # the gradients are small, not the rate
        run(lambda step: 9.0 / (step + 1), lambda step: 1e-7, 1e-8),  # it trains
        run(lambda step: 0.69, lambda step: 1e-3, 1e-8),  # the weights are small
        run(lambda step: 0.69, lambda step: 0.0, 0.0),  # another fault
        _warm_up,
    ),
    unknown("learning-rate-too-low", run(lambda step: 0.69, lambda step: 1e-7), "no learning rate"),
    faulty("not-updated", still(), "warning", site="0:weight", line="train.py:1"),
    faulty("not-updated", digests(SAME), "critical", "writes old values back"),
    faulty("not-updated", digests(SAME, staged=True, own=True), "critical"),
    faulty(
        "not-updated", digests({0: "made", 4: "made", **dict.fromkeys((8, 10, 12, 16), "a")}, thaws=8), "critical",
        "writes old values back",
    ),
    alike(
        "not-updated", still(0.0), still(1e-9), still(1.0, 1e-6), still(facts=[NO_RATE]),
        digests(dict(enumerate("abcd"))), digests(SAME, staged=True),  # another rank trains its own copy of it
        digests(dict.fromkeys((0, 1, 2, 4, 8), "a"), thaws=8),
        digests(dict.fromkeys((0, 1, 2, 4, 8, 12), "a"), thaws=8),
    ),
    unknown("not-updated", _adversaries, "several optimizers"),
)  # fmt: skip

# ---- hyper-parameters ----


def decay(
    weight_decay: float, gradient: float, losses: list[float] = FLAT, *, factor: float = 0.9, **group: Any
) -> Make:
    """A weight of norm 10 that loses a tenth of itself at each step, and the norm of its gradient."""
    made = {"lr": 0.1, "weight_decay": weight_decay, "parameters": ("0:weight",)} | group
    return lambda: make_record(
        range(40),
        lambda step: {"0:weight.grad": spread(gradient), "0:weight.update": spread(10 * factor**step * (1 - factor))},
        losses,
        weights=lambda step: {"0:weight": 10 * factor**step},
        facts=[OptimizerMade(name="SGD", line="train.py:5", groups=(made,))],
    )


def epsilon(value: float, gradient: float, update: float, losses: list[float] = FLAT, given: float = 0) -> Make:
    """An Adam with this ε, and the root mean squares of a gradient, its update, and what several passes add up to."""
    made = OptimizerMade(name="Adam", groups=({"lr": 1e-3, "eps": value},))
    sites = {"0:weight.grad": spread(4 * gradient), "0:weight.update": spread(4 * update)}
    sites |= {"0:weight.accumulated": spread(4 * given)} if given else {}
    return lambda: make_record(range(40), lambda step: sites, losses, facts=[made], optimizer="Adam")


def momentum(losses: list[float], **group: Any) -> Make:
    """An optimizer with these hyper-parameters."""
    made = OptimizerMade(name="SGD", line="train.py:5", groups=({"lr": 0.1} | group,))
    return lambda: make_record(range(40), lambda step: {"0:weight.update": spread(0.1)}, losses, facts=[made])


def no_optimizer() -> Record:
    """Updates of an optimizer that nothing is known of."""
    return make_record(range(40), lambda step: {"0:weight.update": spread(0.1)}, FLAT)


HYPER_PARAMETERS = gather(
    faulty(
        "weight-decay-dominates", decay(1.0, 0.1), "warning", "from 10 to 0.164 at step 39", site="SGD",
        line="train.py:5",
    ),
    faulty("weight-decay-dominates", decay(1.0, 9e9, decoupled_weight_decay=True), "warning"),
    alike(
        "weight-decay-dominates", decay(0.01, 9e9, decoupled_weight_decay=True), decay(5e-4, 0.1),
        decay(1.0, 0.1, FALLING), decay(1.0, 0.1, factor=1.0), decay(0.0, 0.1),
    ),
    unknown("weight-decay-dominates", no_optimizer, "no optimizer"),
    faulty("adam-epsilon", epsilon(10.0, 1e-3, 1e-7), "warning", "ε of Adam is 10, and its gradients are 0.001"),
    faulty("adam-epsilon", epsilon(10.0, 1e-3, 1e-7, given=4e-3), "warning", "its gradients are 0.004"),
    faulty("adam-epsilon", epsilon(10.0, 1e-3, 1e-7, FALLING), "warning"),  # no recipe has such a one
    alike(
        "adam-epsilon", epsilon(1e-8, 1e-3, 1e-3), epsilon(1e-4, 1e-3, 1e-3), epsilon(0.05, 1e-3, 1e-7, FALLING),
        epsilon(10.0, 1e-3, 1e-3),  # the updates are large all the same
        epsilon(1e-8, 1e-12, 1e-7),
        epsilon(1e-2, 0.9e-3, 1e-6, given=2e-3),  # of several passes it gets their sum
    ),
    unknown("adam-epsilon", no_optimizer, "no optimizer"),
    faulty("momentum", momentum(FLAT[:20] + [2.0] * 20, momentum=0.999), "warning", "1000 steps"),
    faulty("momentum", momentum(FALLING, betas=(0.999, 0.9)), "warning", "swapped"),
    alike(
        "momentum", momentum(FLAT, momentum=0.9), momentum(FLAT, momentum=0.99), momentum(FLAT, betas=(0.9, 0.999)),
        momentum(FLAT, betas=(0.9, 0.95)), momentum(FLAT, betas=(0.0, 0.9)),
        momentum(FLAT, momentum=0.999, dampening=0.999), momentum(FALLING, momentum=0.999),
    ),
    unknown("momentum", no_optimizer, "no optimizer"),
)  # fmt: skip

# ---- depth ----


def deep(norms: Sequence[float], losses: Sequence[float] = FLAT[:20]) -> Make:
    """Linear layers, the first one nearest to the input, with these norms of their outputs' gradients."""
    numbers = range(len(norms))
    sites = {f"{k}:output": spread(4.0) for k in numbers}
    sites |= {f"{k}:output.grad": spread(norms[k]) for k in reversed(numbers)}
    sites |= {f"{k}:weight.grad": spread(1.0) for k in numbers}
    modules = {"self": "Sequential"} | {str(k): "Linear" for k in numbers}
    return lambda: make_record(range(len(losses)), lambda step: sites, losses, modules=modules)


def _called_again() -> Record:
    sites = {f"cell#{call}:output": spread(4.0) for call in range(1, 9)}
    sites |= {f"cell#{call}:output.grad": spread(10.0 ** (call - 8)) for call in range(8, 0, -1)}
    sites |= {"cell:weight.grad": spread(1.0)}
    return make_record(range(20), lambda step: sites, FLAT[:20], modules={"self": "M", "cell": "RNNCell"})


def _lost_at_once() -> Record:
    def sites(step: int) -> Elements:
        scale = 1.0 if step == 0 else np.nan
        names = {f"{k}:output": spread(1.0) for k in range(4)}
        names |= {f"{k}:output.grad": spread(10.0 ** (-2 * k)) * scale for k in reversed(range(4))}
        return names | {f"{k}:weight.grad": spread(1.0) for k in range(4)}

    modules = {"self": "Sequential"} | {str(k): "Linear" for k in range(4)}
    return make_record(range(9), sites, [5.0] + [np.nan] * 8, modules=modules)


FALLS, GROWS = [1e-8, 1e-6, 1e-4, 1e-2, 1.0], [1e6, 1e4, 1e2, 1.0]
NO_COURSE: list[tuple[list[float], list[float]]] = [
    (FALLS, FALLING[:20]),  # it trains
    ([0.5, 1e-6, 1e-6, 1e-6, 1.0], FLAT[:20]),  # branches that begin at zero, beside a residual path
    ([1e-6, 1e-6, 1e-6, 1.0, 1.0], FLAT[:20]),  # a single layer makes it
    ([0.1, 0.2, 0.4, 0.6, 1.0], FLAT[:20]),
    ([0.0, 0.0, 0.0, 0.0, 1.0], FLAT[:20]),  # frozen, or zero-initialised
]

DEPTH = gather(
    faulty(
        "vanishing", deep(FALLS), "warning", "falls to 0.01 of itself at each of 5 layers", site="0:output",
        line="train.py:1",
    ),
    faulty("vanishing", _called_again, "warning", "8 calls of cell", site="cell#1:output.grad"),
    alike("vanishing", deep(GROWS), *(deep(*each) for each in NO_COURSE)),
    unknown("vanishing", deep([1e-9, 1.0]), "fewer than 4 layers"),
    faulty("exploding", deep(GROWS), "critical", "grows 100 times at each of 4 layers", site="0:output"),
    faulty("exploding", _lost_at_once, "critical"),  # gradients behind a NaN do not count
    alike("exploding", deep(FALLS), *(deep(norms[::-1], losses) for norms, losses in NO_COURSE)),
    unknown("exploding", deep([1.0, 1e-9]), "fewer than 4 layers"),
)  # fmt: skip

# ---- units ----


def relu(always: Sequence[int], losses: list[float] = FLAT[:20], kind: str = "ReLU", samples: int = 32) -> Make:
    """A ReLU of which so many of 64 units have been zero since step 0, in each sampled step."""
    facts = [
        Units(name="1:output", value=64, samples=samples, zero=n, always=n, since=0, moment=Moment(s))
        for s, n in zip(LOOKS, always, strict=True)
    ]
    sites = {"0:output": spread(4.0, 64), "1:output": np.maximum(spread(4.0, 64), 0), "2:output": spread(4.0)}
    modules = {"self": "Sequential", "0": "Linear", "1": kind, "2": "Linear"}
    return lambda: make_record(range(20), lambda step: sites, losses, facts=facts, modules=modules)


def dead_since_2(*alive: int) -> Make:
    """Step 2 finds all dead; the outputs of the steps before tell since when."""
    facts = [
        Units(name="1:output", value=64, samples=32, zero=64, always=64, since=2, moment=Moment(s)) for s in (2, 4, 8)
    ]

    def sites(step: int) -> Elements:
        return {"1:output": spread(1.0 if step in alive else 0.0), "0:weight.grad": spread(1.0)}

    modules = {"self": "Sequential", "0": "Linear", "1": "ReLU"}
    return lambda: make_record(range(20), sites, FLAT[:20], modules=modules, facts=facts)


def outputs(sites: Callable[[int], Elements], modules: Mapping[str, str] | None = None) -> Make:
    """Outputs at 20 steps, without a look at units."""
    return lambda: make_record(range(20), sites, FLAT[:20], **({} if modules is None else {"modules": modules}))


BELOW = {"0:output": -np.arange(1.0, 65), "0:output.grad": np.zeros(64), "0:weight.grad": np.zeros(8)}
ONE = {"self": "M", "0": "Linear"}


def bounded(kind: str, values: np.ndarray, losses: list[float] = FLAT[:20], last: str = "Linear") -> Make:
    """A layer of this kind with these outputs, between two others."""
    modules = {"self": "Sequential", "0": "Linear", "1": kind, "2": last}
    sites = {"0:output": spread(4.0), "1:output": values, "2:output": spread(4.0)}
    return lambda: make_record(range(20), lambda step: sites, losses, modules=modules)


def softmax(sure: float, entries: int = 12, losses: list[float] = FLAT[:20]) -> Make:
    """A softmax that is called as a function."""
    looks = [
        Softmax(name="block.att", line="net.py:9", value=sure, entries=entries, moment=Moment(step)) for step in LOOKS
    ]
    return lambda: make_record(range(20), lambda step: {"0:output": spread(1.0)}, losses, facts=looks)


def looked_up(rows: int) -> Make:
    """An embedding of 50 rows, of which so many are used."""
    facts = [Units(name="0:weight", value=50, samples=64, used=rows, moment=Moment(s)) for s in LOOKS]
    return lambda: make_record(range(20), lambda step: {"0:output": spread(1.0)}, FLAT[:20], facts=facts)


ONE_HOT = np.tile([1.0, 0.0, 0.0, 0.0], 8)

UNITS = gather(
    faulty("dead-units", relu([60] * 6), "warning", "94% of the units of 1", site="1", step=0, line="train.py:2"),
    faulty("dead-units", dead_since_2(), "critical", step=0),
    faulty("dead-units", dead_since_2(1), "critical", step=2),
    faulty(
        "dead-units",
        outputs(lambda s: {"0:output": spread(4.0, 64), "1:output": np.zeros(64) if s >= 7 else spread(1.0, 64)}),
        "critical", site="1", step=7, repair="Lower the learning rate; or use LeakyReLU, whose slope is nowhere 0.",
    ),
    faulty(  # as before a ReLU that is called as a function
        "dead-units", outputs(lambda step: BELOW, ONE), "critical",
        "0 (Linear) have been below zero, where no gradient passes", site="0",
        repair="Initialise the biases before it at 0; or use LeakyReLU, whose slope is nowhere 0.",
    ),
    faulty(  # the layer before it is no second one
        "dead-units", outputs(lambda step: BELOW | {"1:output": np.zeros(64), "2:output": spread(4.0)}), "critical",
        "All units of 1 (ReLU) have been zero for every sample since the first step: they were initialised that way.",
        site="1",
        evidence=(
            Evidence("share of its units that are dead", 1.0, "> 0.5"),
            Evidence("steps in which this was observed", 20, "≥ 4"),
        ),
    ),
    alike(
        "dead-units",
        relu([20] * 6),
        relu([50] * 6, FALLING[:20]),  # resting units of a net that learns
        relu([60] * 6, kind="Dropout"),
        relu([60, 50, 40, 30, 20, 10]),  # they wake up
        relu([60] * 6, samples=2),  # a few samples prove nothing
        outputs(lambda step: BELOW | {"0:output.grad": spread(1.0, 64)}, ONE),  # behind a LeakyReLU
    ),
    faulty(
        "saturated", bounded("Tanh", np.array([-1.0, 1.0, 0.999, -0.99] * 4)), "warning", site="1", step=0,
        line="train.py:2",
    ),
    faulty("saturated", bounded("Sigmoid", np.array([0.0, 1.0, 0.001, 0.999] * 4)), "warning"),
    faulty("saturated", bounded("Tanh", spread(4.0), FALLING[:20]), "warning"),  # from the start
    alike(
        "saturated", bounded("Tanh", np.array([-0.8, 0.9, 0.3, -0.5] * 4)),
        bounded("Sigmoid", np.array([0.2, 0.5, 0.7, 0.9] * 4)),
    ),
    unknown("saturated", bounded("ReLU", spread(4.0), last="Sigmoid"), "no Tanh or Sigmoid"),  # that may be certain
    faulty("attention-collapse", bounded("Softmax", ONE_HOT), "warning", site="1"),
    faulty("attention-collapse", bounded("Softmax", ONE_HOT, FALLING[:20]), "warning"),  # in all steps
    faulty("attention-collapse", softmax(0.9), "warning", site="block.att", line="net.py:9", step=0),
    alike(
        "attention-collapse", bounded("Softmax", np.tile([0.9, 0.1, 0.0, 0.0], 8), FALLING[:20]),
        bounded("Softmax", np.tile([0.7, 0.1, 0.1, 0.1], 8)), softmax(0.2), softmax(0.8, losses=FALLING[:20]),
    ),
    unknown("attention-collapse", softmax(0.9, entries=2), "no softmax"),
    faulty("embedding-unused", looked_up(1), "warning", "Only one of the 50 rows of 0 was looked up"),
    alike("embedding-unused", looked_up(9)),
    unknown("embedding-unused", relu([60] * 6), "no look at an embedding"),
)  # fmt: skip

# ---- numbers of few bits ----


def zeroed(elements: np.ndarray, share: float) -> np.ndarray:
    """The same with the first so many zero."""
    out = elements.copy()
    out[: int(share * len(out))] = 0
    return out


def typed(kind: str, sites: Elements, losses: list[float] = FLAT[:30]) -> Make:
    """A weight of this type."""
    looks = [Parameter(name="0:weight", value=1.0, shape=(8, 8), dtype=kind, grad="some")]
    return lambda: make_record(
        range(30), lambda step: sites, losses, weights=lambda step: {"0:weight": 8.0}, facts=looks
    )


def half(elements: np.ndarray, kind: str = "float16") -> Make:
    """A gradient of these elements."""
    return typed(kind, {"0:weight.grad": elements})


def rounded(kind: str, update: float, gradient: float = 0.0, losses: list[float] = FLAT[:30]) -> Make:
    """Shares of elements that are zero in the update and in the gradient."""
    sites = {"0:weight.grad": zeroed(spread(1.0, 64), gradient), "0:weight.update": zeroed(spread(1.0, 64), update)}
    return typed(kind, sites, losses)


def _skipped() -> Record:
    record = half(zeroed(SMALL, 0.5))()
    for step in range(27):
        record.history.add_event(Event(Moment(step), "skipped", "SGD"))
    return Record(record.history)


def scaled(skipped: Iterable[bool], scale: float) -> Make:
    """Updates that loss scaling has skipped or not."""

    def make() -> Record:
        listed = list(skipped)
        record = make_record(range(len(listed)), lambda step: {"0:weight.grad": spread(1.0)}, [0.7] * len(listed))
        for step, is_skipped in enumerate(listed):
            record.history.add_event(Event(Moment(step), "skipped" if is_skipped else "update", "SGD"))
            record.history.add_event(Event(Moment(step), "scale", value=scale))
        return Record(record.history)

    return make


SMALL = np.full(64, 2.0**-20)
UNTYPED = outputs(lambda step: {"0:weight.update": spread(1.0)})

PRECISION = gather(
    faulty("underflow", half(zeroed(SMALL, 0.5)), "warning", "50% of the gradients of 0:weight are zero"),
    alike("underflow", half(zeroed(np.full(64, 0.1), 0.5)), half(SMALL), _skipped),  # of a ReLU; not one is zero
    unknown("underflow", half(zeroed(SMALL, 0.5), "float32"), "of float16 were recorded"),
    unknown("underflow", UNTYPED, "no type"),
    faulty("bf16-update-lost", rounded("bfloat16", 0.9), "warning", "89% of the elements of 0:weight (bfloat16)"),
    faulty("bf16-update-lost", rounded("bfloat16", 0.7, losses=FALLING[:30]), "note"),
    alike("bf16-update-lost", rounded("float32", 0.9), rounded("bfloat16", 0.2), rounded("bfloat16", 0.9, 0.9)),
    unknown("bf16-update-lost", UNTYPED, "no type"),
    faulty("scaler-churn", scaled((step % 2 == 0 for step in range(100)), 4.0), "warning", "skipped 50 of 100", step=0,
           evidence=(Evidence("share of updates skipped after the first 20", 0.5, "> 0.2"),)),
    faulty("scaler-churn", scaled([True] * 19, 0.25), "warning"),
    faulty(  # few are skipped of all
        "scaler-churn", scaled((step >= 101 for step in range(113)), 0.5), "warning",
        evidence=(Evidence("scale in the end", 0.5, "< 1"),),
    ),
    alike(
        "scaler-churn", scaled((step < 12 for step in range(100)), 16.0),
        scaled((step % 50 == 49 for step in range(200)), 16.0),
    ),
    unknown("scaler-churn", scaled([False] * 50, 16.0), "no update was skipped"),
)  # fmt: skip

# ---- initialisation ----

DEEP = {"self": "Sequential", "0": "Linear", "1": "ReLU", "2": "Linear", "3": "ReLU", "4": "Linear"}
HEAD = (0.6, 0.4, 0.5, 0.3, 60.0)


def net(
    *sizes: float, modules: Mapping[str, str] = DEEP, loss: float = 0.7, first: int = 0, classes: int = 2,
    bias: float = 0.0,
) -> Make:  # fmt: skip
    """Layers whose outputs have these root mean squares, the last of them with a bias."""
    paths = [path for path in modules if path != "self"]
    sites: dict[str, np.ndarray] = {f"{path}:output": spread(4 * size) for path, size in zip(paths, sizes, strict=True)}
    sites |= {f"{path}:weight.grad": spread(1.0) for path in paths if modules[path] == "Linear"}
    last = ("cross_entropy", "train.py:9", "", "NllLossBackward0", (), (f"float32[8, {classes}]", "int64[8]"))
    facts = [
        Operations(name="self", listed=((*last, ("float32[]",), "", False),)),
        Input(name="self:input.x", value=0.0, std=1.0, dtype="float32", moment=Moment(0)),
        Parameter(name="4:bias", value=bias, shape=(10,), dtype="float32", moment=Moment(0)),
    ]
    steps = range(first, first + 20)
    return lambda: make_record(steps, lambda step: sites, [loss] * 20, modules=modules, facts=facts)


def weights(norms: Mapping[str, float], rows: Sequence[tuple[int, int]] = (), reached: float = 1.0) -> Make:
    """Linear layers with these norms of their weights, a gradient at their outputs, and how many rows were the same."""

    def sites(step: int) -> Elements:
        found = {f"{path}:output": spread(1.0) for path in norms}
        found |= {f"{path}:output.grad": spread(reached) for path in norms}
        found |= {f"{path}:weight.grad": spread(reached if norms[path] else 0.0) for path in norms}
        return found | {f"{path}:weight.update": spread(0.1 * norms[path]) for path in norms}

    return lambda: make_record(
        range(20),
        sites,
        FLAT[:20],
        weights=lambda step: {f"{path}:weight": norm for path, norm in norms.items()},
        modules={"self": "Sequential"} | dict.fromkeys(norms, "Linear"),
        facts=[
            Parameter(name="2:weight", value=1.0, shape=(16, 16), same_rows=same, moment=Moment(step))
            for step, same in rows
        ],
    )


TANH = DEEP | {"3": "Tanh"}
NORMED_NET = {"self": "Sequential", "0": "Linear", "1": "LayerNorm", "2": "Linear"}
ONES, ZEROS = {"0": 1.0, "2": 1.0}, {"0": 1.0, "2": 0.0, "4": 0.0}
ALL_16 = [(0, 16), (1, 16), (8, 16)]

INITIALISATION = gather(
    faulty(
        "bad-init", net(10.0, 7.0, 70.0, 50.0, 500.0), "critical", "3 layers", site="0", step=0, line="train.py:1",
    ),
    faulty("bad-init", net(*HEAD, loss=50.0, classes=10), "critical", site="4"),
    faulty("bad-init", net(*HEAD, loss=50.0, classes=10, bias=29.0), "critical"),  # the weights make 31 at least
    faulty("bad-init", net(0.6, 0.4, 30.0, 1.0, 0.5, modules=TANH), "critical", site="2"),
    alike(
        "bad-init",
        net(*HEAD, loss=2.4, classes=10),
        net(*HEAD, loss=50.0, classes=10, bias=60.0),  # nothing need be the weights'
        net(0.6, 0.4, 3.0, 1.0, 0.5, modules=TANH),
        net(0.6, 0.4, 0.3, 0.2, 0.1),
        net(1.4, 1.0, 1.4, 1.0, 1.4),  # He's
        net(0.01, 20.0, 12.0, modules=NORMED_NET),  # the norm makes it large
    ),
    unknown("bad-init", net(10.0, 7.0, 70.0, 50.0, 500.0, first=7), "first step"),
    faulty("symmetric-init", weights(ZEROS), "critical", "are zero, and stay so", site="2:weight", line="train.py:2"),
    faulty("symmetric-init", weights(ONES, ALL_16), "critical", "All 16 rows", "at step 8", site="2:weight"),
    alike(
        "symmetric-init",
        weights({"0": 1.0, "2": 1.0, "4": 0.0}),  # a single layer of zeros is meant
        weights({"a": 0.0, "mid": 1.0, "b": 0.0}),
        weights(ONES, [(0, 16), (1, 0), (8, 0)]),  # a head of zeros
        weights(ONES, [(0, 2), (1, 2), (8, 2)]),  # padding rows
        weights(ONES, ALL_16, reached=0.0),
        weights(ZEROS, reached=0.0),
    ),
    unknown("symmetric-init", outputs(lambda step: {"0:output": spread(1.0)}), "no update"),
)  # fmt: skip

# ---- batch norms, hooks and ranks ----

NORMED = {"self": "Sequential", "0": "Linear", "1": "BatchNorm1d", "2": "Linear"}


def norm(means: Sequence[float], values: int = 64, *modes: Modes) -> Make:
    """A norm of 4 channels, with its running mean in each sampled step; what goes in has a mean of sin(step)."""
    looks = [
        Buffer(name="1:running_mean", value=mean, digest=str(mean), moment=Moment(step))
        for step, mean in zip(LOOKS, means, strict=True)
    ]

    def sites(step: int) -> Elements:
        into = spread(1.0, values) + np.sin(step)
        return {"0:output": into, "1:output": spread(1.0, values), "1:weight.grad": spread(1.0, 4)}

    facts = [*looks, *(modes or [Modes(name="self")])]
    return lambda: make_record(range(20), sites, FLAT[:20], modules=NORMED, facts=facts)


def hooked(factor: float, noise: float = 0.0, weight: float = 1.0, processes: int = 1) -> Make:
    """A layer whose bias gets the sum of its output's gradient, and a factor."""

    def make() -> Record:
        random = np.random.default_rng(0)

        def sites(step: int) -> Elements:
            gradient = random.normal(size=(32, 4)) + 1
            bias = gradient.sum(axis=0) * factor * (1 + noise * random.normal())
            inputs = random.normal(size=(32, 8))
            return {
                "0:output": gradient.ravel(), "0:output.grad": gradient.ravel(), "0:bias.grad": bias,
                "0:weight.grad": weight * (gradient.T @ inputs).ravel(),
            }  # fmt: skip

        data = Input(name="self:input.x", value=0.0, std=1.0, dtype="float32")
        record = make_record(range(20), sites, FLAT[:20], facts=[data])
        record.manifest["processes"] = processes
        return record

    return make


def ranks(first: str, second: str, together: Sequence[int] = (), third: bool = False) -> Make:
    """Two ranks that are given batches with these digests, and a third that is given those of the second."""

    def make() -> Record:
        of_rank = [
            [
                Input(name="self:input.x", value=0.0, digest=each, moment=Moment(step), dtype="float32", rank=rank)
                for step, each in enumerate(given)
            ]
            for rank, given in enumerate((first, second))
        ]
        record = make_record(range(3), lambda step: {"0:output": spread(1.0)}, FLAT[:3], facts=of_rank[0])
        record.facts.extend([*of_rank[1], *(replace(each, rank=2) for each in of_rank[1] if third)])
        record.manifest["processes"] = 2
        record.manifest["split"] = {"ranks": list(together), "stages": {}}
        return record

    return make


def replicas(before: Mapping[str, str], behind: Mapping[str, str], processes: int = 2) -> Make:
    """Parameters of 16 elements, with a letter for the digest on each of two ranks, at step 0 and at step 8."""

    def make() -> Record:
        looks = [
            Parameter(name=name, value=1.0, shape=(16,), grad="some", digest=pair[rank], rank=rank, moment=Moment(step))
            for step, listed in ((0, before), (8, behind))
            for name, pair in listed.items()
            for rank in (0, 1)
        ]
        record = make_record(range(9), lambda step: {f"{name}.grad": spread(1.0) for name in before}, FLAT[:9])
        record.facts.extend(looks)
        record.manifest["processes"] = processes
        return record

    return make


def _mode(step: int, *, trains: bool, path: str = "self") -> Modes:
    return Modes(name=path, moment=Moment(step), **{"training" if trains else "evaluating": (path,)})


SAME_MEANS = [0.0] * 6
ALIKE, APART = {"0:weight": "aa", "0:bias": "bb"}, {"0:weight": "cd", "0:bias": "ef"}

COPIES = gather(
    faulty("batch-norm", norm(SAME_MEANS), "warning", "the same at step 0 and at step 16", site="1", line="train.py:2"),
    faulty("batch-norm", norm([float(np.sin(k - 1)) for k in LOOKS]), "warning", "those of the last batch alone"),
    faulty("batch-norm", norm([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 8), "warning", "from 2 values of each channel"),
    faulty("batch-norm", norm(SAME_MEANS, 64, _mode(0, trains=False, path="0")), "warning"),
    faulty("batch-norm", norm(SAME_MEANS, 64, _mode(0, trains=True), _mode(5, trains=False)), "warning"),
    faulty("batch-norm", norm(SAME_MEANS, 64, _mode(0, trains=False), _mode(5, trains=True)), "warning"),
    alike(
        "batch-norm",
        norm([0.0, *(0.1 * float(np.sin(step)) for step in LOOKS[:-1])]),
        norm(SAME_MEANS, 64, _mode(0, trains=False, path="1")),
        norm(SAME_MEANS, 64, _mode(0, trains=False)),
        norm(SAME_MEANS, 64, _mode(0, trains=True), _mode(0, trains=False)),  # a trial
        norm(SAME_MEANS, 64, _mode(0, trains=False, path="1"), _mode(0, trains=True, path="head")),  # another model
    ),
    unknown("batch-norm", deep(FALLS), "no batch norm"),
    faulty("hooks-scale", hooked(50.0), "warning", "by 50:", site="0:output", line="train.py:1"),
    faulty("hooks-scale", hooked(0.0), "warning", "by 0:"),
    faulty("hooks-scale", hooked(1.0, weight=1e-6), "warning", site="0:weight"),
    alike("hooks-scale", hooked(1.0), hooked(1.03), hooked(2.0, noise=0.3)),  # bfloat16 rounds; it is accumulated
    unknown("hooks-scale", hooked(0.5, processes=2), "several ranks"),
    faulty("ranks-disagree", ranks("abc", "abc"), "warning", "at all of 3 steps", rank=1),
    faulty("ranks-disagree", ranks("abc", "abc", (0, 1), third=True), "warning", rank=2),  # of another replica
    faulty("ranks-disagree", replicas(ALIKE, APART), "critical", step=8, site="0:weight"),
    faulty("ranks-disagree", replicas(APART, APART), "warning", step=0),
    alike(
        "ranks-disagree", ranks("abc", "def"), ranks("abc", "abf"), ranks("aaa", "aaa"),  # the last is no data
    ),
    unknown("ranks-disagree", ranks("abc", ""), "a single rank"),
    unknown("ranks-disagree", ranks("abc", "abc", (0, 1)), "share each forward"),
    unknown("ranks-disagree", replicas(ALIKE, ALIKE), "a single rank"),
    unknown("ranks-disagree", replicas(ALIKE, {"0:weight": "cd", "0:bias": "bb"}), "a single rank"),  # an expert
    unknown("ranks-disagree", replicas(APART, APART, processes=1), "found each other"),
)  # fmt: skip

ROWS = [
    *LOSSES, *STEPS, *HYPER_PARAMETERS, *DEPTH, *UNITS, *PRECISION, *INITIALISATION, *COPIES,
]  # fmt: skip
