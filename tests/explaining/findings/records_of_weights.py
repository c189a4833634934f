"""Records of weights that something else than an update has written."""

from __future__ import annotations

from dataclasses import replace

from retrograd.core.history.fact import Fact
from retrograd.core.history.facts import OptimizerMade
from retrograd.core.history.sink import Moment
from retrograd.core.history.weights_facts import Changed, CountedOn, Load, StateRead
from retrograd.explaining.findings.record import Record
from tests.explaining.findings.programs import make_calls, make_program
from tests.explaining.findings.records import Make, alike, faulty, gather, unknown

PLAIN = ("zero_grad", "forward", "backward", "step")


def trained(*facts: Fact) -> Make:
    """Sixty steps of SGD, and these facts."""

    def make() -> Record:
        calls = make_calls([PLAIN] * 60)
        return make_program(sorted([*facts, *calls], key=lambda fact: fact.step))

    return make


UNMATCHED = Load(
    name="self", value=0.0, moment=Moment(0), type="Net", line="train.py:9", strict=False, missing=6, unexpected=6,
    missing_keys=("a",), unexpected_keys=("module.a",), prefix="module.", matching=6, changed=False,
)  # fmt: skip
MATCHED = replace(
    UNMATCHED, value=6.0, missing=0, unexpected=0, prefix="", matching=0, changed=True, line="train.py:12"
)
OWN = Load(name="self", value=6.0, moment=Moment(40), type="Net", line="train.py:20", same=6, changed=False)

LOADED = gather(
    faulty("keys-not-loaded", trained(UNMATCHED), "critical", "none of the 6", "without 'module.'", line="train.py:9"),
    faulty("keys-not-loaded", trained(replace(UNMATCHED, prefix="+net.")), "critical", "with 'net.' in front"),
    faulty(
        "keys-not-loaded", trained(replace(OWN, moment=Moment(0), prefix="module.", matching=6, file=1)), "critical",
        "is given the module's own tensors", line="train.py:20",
    ),
    alike(
        "keys-not-loaded",
        trained(replace(UNMATCHED, prefix="", matching=0)),  # another model's
        trained(replace(UNMATCHED, value=10.0, missing=2, unexpected=2, matching=2)),  # another head
        trained(UNMATCHED, MATCHED),
        trained(MATCHED),
    ),
    unknown("keys-not-loaded", trained(), "no load_state_dict"),
    faulty(
        "snapshot-not-copied", trained(replace(OWN, taken=10, taken_line="train.py:15")), "critical", "taken by "
        "state_dict() at step 10", site="self", line="train.py:15", step=10,
    ),
    faulty("snapshot-not-copied", trained(replace(OWN, taken=40)), "warning", "loads its own state at step 40"),
    alike(
        "snapshot-not-copied",
        trained(replace(OWN, taken=10, same=0, changed=True)),
        trained(replace(OWN, moment=Moment(0), taken=0)),  # before the first update nothing is lost
        trained(replace(OWN, same=3, taken=10)),
    ),
    unknown("snapshot-not-copied", trained(), "no load_state_dict"),
)  # fmt: skip


def average(step: int, **fields: object) -> Load:
    """Averaged weights are loaded, and stay."""
    made = Load(
        name="self", value=6.0, moment=Moment(step), type="Net", line="train.py:30", changed=True, stays=True,
        evaluated=True, written=step,
    )  # fmt: skip
    return replace(made, **fields)  # type: ignore[arg-type]


AVERAGES = gather(
    faulty("averages-not-put-back", trained(average(20), average(40)), "warning", "2 times", line="train.py:30"),
    alike(
        "averages-not-put-back",
        trained(average(40)),
        trained(average(20, stays=False), average(40, stays=False)),  # put back
        trained(average(20, written=1), average(40, written=2)),  # the best ones so far
        trained(average(20, evaluated=False), average(40, evaluated=False)),  # Lookahead
    ),
    unknown("averages-not-put-back", trained(), "no load_state_dict"),
)  # fmt: skip

GROUP = {"lr": 0.001, "momentum": 0.9, "parameters": 2, "initial_lr": 0.1}
READ = StateRead(
    name="last.pt", value=2.0, moment=Moment(0), line="train.py:5", number=1, counters={"epoch": 7},
    parts=(
        {"path": "model", "kind": "weights", "tensors": 2},
        {"path": "optim", "kind": "optimizer", "groups": [GROUP], "state": 2, "keys": ["momentum_buffer"], "step": -1},
    ),
)  # fmt: skip
RESTORED = Load(
    name="self", value=2.0, moment=Moment(0), type="Net", line="train.py:6", changed=True, stays=True, file=1
)
MADE = OptimizerMade(
    name="SGD", type="SGD", number=1, moment=Moment(0), line="train.py:12", value=2.0,
    groups=({"lr": 0.1, "momentum": 0.9, "parameters": ["a", "b"], "unknown": 0},),
)  # fmt: skip
COUNTED = CountedOn(name="epoch", value=7.0, moment=Moment(16), counter="epoch", file=1, line="train.py:14")
OPTIMIZER = Load(name="SGD", value=2.0, moment=Moment(0), of="optimizer", type="SGD", line="train.py:7")


def without_state(rate: float) -> StateRead:
    """A file in which the optimizer has no state."""
    parts = (READ.parts[0], {**READ.parts[1], "state": 0, "keys": [], "groups": [{**GROUP, "lr": rate}]})
    return replace(READ, parts=parts)


RESUMED = gather(
    faulty(
        "resume-incomplete", trained(READ, RESTORED, MADE, COUNTED), "warning", "last.pt", "from 0.001 to 0.1",
        site="SGD", line="train.py:6",
    ),
    faulty("resume-incomplete", trained(without_state(0.01), RESTORED, MADE, COUNTED), "warning", "rate of SGD begins"),
    alike(
        "resume-incomplete",
        trained(READ, RESTORED, MADE),  # a new task
        trained(READ, RESTORED, OPTIMIZER, MADE, COUNTED),
        trained(READ, replace(RESTORED, missing=1), MADE, COUNTED),
        trained(without_state(0.1), RESTORED, MADE, COUNTED),
        trained(READ, RESTORED, replace(MADE, groups=({**MADE.groups[0], "parameters": ["a"]},)), COUNTED),
    ),
    unknown("resume-incomplete", trained(), "no file that torch.load reads"),
)  # fmt: skip

FLIP = Changed(name="fc:weight", value=1.0, moment=Moment(38), optimizer="SGD", since=37, compared=6, bit=62)

CHANGED = gather(
    faulty("bit-flipped", trained(FLIP), "critical", "One bit of fc:weight", site="fc:weight", step=38),
    faulty("bit-flipped", trained(replace(FLIP, of="exp_avg")), "critical", "One bit of exp_avg of fc:weight"),
    alike(
        "bit-flipped",
        trained(replace(FLIP, bit=-1)),  # a write by hand
        trained(FLIP, replace(FLIP, moment=Moment(40), bit=-1)),
        trained(*(replace(FLIP, name=name) for name in "abc")),
    ),
    unknown("bit-flipped", trained(), "none was compared"),
)

ROWS = gather(LOADED, AVERAGES, RESUMED, CHANGED)
