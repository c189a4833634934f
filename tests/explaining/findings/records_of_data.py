"""Records of targets beside tokens, of outputs over a batch, of masks, and of inputs of evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd.core.history.data_facts import AttendedTokens, Spread, Targets
from retrograd.core.history.fact import Fact
from retrograd.core.history.facts import Call, Input, Units
from retrograd.core.history.sink import Moment, Phase
from retrograd.explaining.findings.record import Record
from tests.explaining.findings.programs import make_chain, make_optimizer, make_program
from tests.explaining.findings.records import Make, alike, faulty, gather, unknown

LOOKS = (0, 1, 2, 4, 8, 16, 32)


def program(chain: Any, facts: Sequence[Fact]) -> Make:
    """Facts of looks, beside the operations of a step."""
    return lambda: make_program([*facts, chain])


def nothing() -> Record:
    """A record of no operation and no look."""
    return make_program([])


# ---- targets ----

TOKENS: tuple[Any, ...] = ("embedding", (-1, -1), ("int64[4, 9]", (7, 6)), (4, 9, 6), "", "0")
LOGITS = ("linear", (0, -1), ((4, 9, 6), (7, 6)), (4, 9, 7), "", "1")
LOSS = ("cross_entropy", (2, -1), ((36, 7), "int64[36]"), (), "reduction=mean")
FLAT = ("flatten", (1,), ((4, 9, 7),), (36, 7))
MODEL = make_chain(TOKENS, LOGITS, FLAT, LOSS, outputs=[1])
SLICED = make_chain(
    TOKENS, LOGITS, ("getitem", (1,), ((4, 9, 7),), (4, 8, 7), "(:, 1:)"), ("flatten", (2,), ((4, 8, 7),), (32, 7)),
    ("cross_entropy", (3, -1), ((32, 7), "int64[32]"), (), "reduction=mean"), outputs=[1],
)  # fmt: skip
MASKED = make_chain(
    TOKENS,
    ("where", (-1, -1, 0), ("bool[4, 9, 1]", (6,), (4, 9, 6)), (4, 9, 6)),
    ("linear", (1, -1), ((4, 9, 6), (7, 6)), (4, 9, 7)),
    ("cross_entropy", (2, -1), ((36, 7), "int64[36]"), ()),
    outputs=[2],
)
MULTIPLIED = make_chain(
    TOKENS, ("mul", (0, -1), ((4, 9, 6), (4, 9, 1)), (4, 9, 6)), ("linear", (1, -1), ((4, 9, 6), (7, 6)), (4, 9, 7)),
    ("cross_entropy", (2, -1), ((36, 7), "int64[36]"), ()), outputs=[2],
)  # fmt: skip
NARROW = make_chain(
    TOKENS, ("linear", (0, -1), ((4, 9, 6), (2, 6)), (4, 9, 2)), ("linear", (1, -1), ((4, 9, 2), (7, 2)), (4, 9, 7)),
    ("cross_entropy", (2, -1), ((36, 7), "int64[36]"), ()), outputs=[2],
)  # fmt: skip
POOLED = make_chain(
    TOKENS,
    ("mean", (0,), ((4, 9, 6),), (4, 1, 6), "dim=1"),
    ("add", (1, -1), ((4, 1, 6), (9, 6)), (4, 9, 6)),
    ("linear", (2, -1), ((4, 9, 6), (7, 6)), (4, 9, 7)),
    ("cross_entropy", (3, -1), ((36, 7), "int64[36]"), ()),
    outputs=[3],
)


def targets(equal: int, *, others: float = 0.2, line: int = 33, **fields: Any) -> list[Fact]:
    """Targets that are the token so many positions ahead, at each of two looks."""
    shifts = [others] * 6
    shifts[equal + 2] = fields.pop("there", 1.0)
    known = {"elements": 36, "classes": 7, "seen": 7, "share": 0.2, "tokens": "train.py:30", "axis": 1, **fields}
    return [
        Targets(
            line=f"train.py:{line}",
            loss="cross_entropy",
            dtype="int64",
            shifts=tuple(shifts),
            moment=Moment(step),
            **known,
        )
        for step in (0, 1)
    ]


WEIGHTED = make_chain(
    TOKENS,
    LOGITS,
    FLAT,
    ("cross_entropy", (2, -1), ((36, 7), "int64[36]"), (36,), "reduction=none"),
    ("mul", (3, -1), ((36,), (36,)), (36,)),
    ("sum", (4,), ((36,),), ()),
    outputs=[1],
)
PADDED = {"share": 0.8, "tail": 1.0, "lengths": 4, "filler": True, "most": 0}


def classes(listed: Sequence[int], **fields: Any) -> list[Fact]:
    """Batches of one class each, by its number; −1 is a batch of several."""
    return [
        Targets(line="train.py:31", loss="cross_entropy", elements=16, classes=5, moment=Moment(step),
                seen=1 if most >= 0 else 5, most=max(most, 0), share=1.0 if most >= 0 else 0.3, **fields)
        for step, most in zip(LOOKS, listed, strict=False)
    ]  # fmt: skip


LAYER = ("linear", (-1, -1), ((16, 6), (5, 6)), (16, 5))
CLASSIFIER = make_chain(LAYER, ("cross_entropy", (0, -1), ((16, 5), "int64[16]"), ()), outputs=[0])
CONTRAST = make_chain(
    LAYER, ("cat", (0, -1), ((16, 5), (16, 9)), (16, 14), "dim=1"),
    ("cross_entropy", (1, -1), ((16, 14), "int64[16]"), ()), outputs=[0],
)  # fmt: skip

TARGETS = gather(
    faulty("targets-shifted-twice", program(MODEL, targets(2)), "critical", "two positions ahead", site="1"),
    faulty("targets-shifted-twice", program(SLICED, targets(3, line=34, elements=32)), "critical"),
    alike(
        "targets-shifted-twice",
        program(MODEL, targets(1)),
        program(MODEL, targets(2, others=1.0)),  # rows of one token
        program(MODEL, targets(2, there=0.99)),
        program(SLICED, targets(2, line=34, elements=32)),  # the next one of logits[:, 1:]
    ),
    unknown("targets-shifted-twice", nothing, "no loss with integer targets"),
    unknown("targets-shifted-twice", program(MODEL, targets(2, line=99)), "not among the operations"),
    faulty("targets-not-shifted", program(MODEL, targets(0)), "warning", "learns to copy", line="train.py:33"),
    alike(
        "targets-not-shifted",
        program(MODEL, targets(1)),
        program(MODEL, targets(0, ignored=30)),  # too few
        *(program(each, targets(0)) for each in (MASKED, MULTIPLIED, NARROW)),
        program(POOLED, targets(0, line=34)),
    ),
    unknown("targets-not-shifted", nothing, "no loss with integer targets"),
    faulty(
        "padding-in-loss", program(MODEL, targets(1, **PADDED)), "warning", "80% of the targets", line="train.py:33"
    ),
    alike(
        "padding-in-loss",
        program(MODEL, targets(1, **{**PADDED, "share": 0.4})),
        program(MODEL, targets(1, **{**PADDED, "tail": 0.98})),
        program(MODEL, targets(1, **{**PADDED, "filler": False})),
        program(MODEL, targets(1, **{**PADDED, "lengths": 1})),
        program(WEIGHTED, targets(1, **PADDED)),
    ),
    unknown("padding-in-loss", nothing, "no loss with integer targets"),
    faulty(
        "sorted-labels", program(CLASSIFIER, classes([0, 0, 1, 1, 2, 3, 4])), "warning", "each of the 7", "5 classes"
    ),
    alike(
        "sorted-labels",
        program(CLASSIFIER, classes([0, 0, 0, 0, 0, 0, 0])),
        program(CLASSIFIER, classes([0, 0, 0, 0, 0, 0, 1])),  # rare ones
        program(CLASSIFIER, classes([0, 1, -1, -1, 2, 3, 4])),
        program(CONTRAST, classes([0, 0, 1, 1, 2, 3, 4])),
        program(CLASSIFIER, [*classes([0] * 7), *classes([1] * 7)]),  # real ones and generated ones
    ),
    unknown(
        "sorted-labels",
        program(CLASSIFIER, [*classes([0, 0, 1, 1, 2, 3, 4]), make_optimizer(), make_optimizer("SGD_2")]),
        "several optimizers",
    ),
    unknown("sorted-labels", nothing, "no loss with integer targets"),
)

# ---- outputs ----

ENCODER = ("linear", (-1, -1), ((8, 6), (4, 6)), (8, 4), "", "0")
BOTH = (ENCODER, ENCODER)
PULLED = make_chain(
    *BOTH, ("sub", (0, 1), ((8, 4), (8, 4)), (8, 4)), ("pow", (2,), ((8, 4),), (8, 4), "2"),
    ("mean", (3,), ((8, 4),), ()), outputs=[0, 1],
)  # fmt: skip
STOPPED = make_chain(
    *BOTH, ("detach", (1,), ((8, 4),), (8, 4), "", "", True),
    ("cosine_similarity", (0, 2), ((8, 4), (8, 4)), (8,)), ("mean", (3,), ((8,),), ()), outputs=[0, 1],
)  # fmt: skip
PUSHED = make_chain(
    *BOTH, ("matmul", (0, 1), ((8, 4), (4, 8)), (8, 8)), ("cross_entropy", (2, -1), ((8, 8), "int64[8]"), ()),
    outputs=[0, 1],
)  # fmt: skip
TAUGHT = make_chain(
    *BOTH, ("mse_loss", (0, 1), ((8, 4), (8, 4)), ()), ("mse_loss", (0, -1), ((8, 4), (8, 4)), ()),
    ("add", (2, 3), ((), ()), ()), outputs=[0, 1],
)  # fmt: skip
MARGIN = make_chain(
    *BOTH, ("pairwise_distance", (0, 1), ((8, 4), (8, 4)), (8,)), ("pairwise_distance", (0, 1), ((8, 4), (8, 4)), (8,)),
    ("sub", (2, 3), ((8,), (8,)), (8,)), ("mean", (4,), ((8,),), ()), outputs=[0, 1],
)  # fmt: skip


def spreads(values: Sequence[float], size: float = 1.0, given: float = 0.9, samples: int = 8) -> list[Fact]:
    """The spread of outputs at looks."""
    return [
        Spread(name="self:output", value=value, size=size, given=given, samples=samples, moment=Moment(step))
        for step, value in zip(LOOKS, values, strict=False)
    ]


FALLS, STAYS, SAME = (0.5, 0.4, 0.2, 0.1, 0.05), (0.5, 0.4, 0.3, 0.3, 0.2), (1e-15, 0.0, 1e-15, 0.0)
DEAD: Fact = Units(name="0:output", value=4, samples=8, zero=4, moment=Moment(0))

OUTPUTS = gather(
    faulty(
        "representation-collapse", program(PULLED, spreads(FALLS)), "critical", "from 0.5 to 0.05", line="train.py:32"
    ),
    faulty("representation-collapse", program(STOPPED, spreads((0.5, 0.1, 1e-2, 1e-5))), "critical"),
    alike(
        "representation-collapse",
        program(PULLED, spreads(STAYS)),
        program(STOPPED, spreads(FALLS)),  # a gradient is stopped, and it may come back
        program(PULLED, spreads(FALLS, given=0.0)),
        *(program(each, spreads(FALLS)) for each in (PUSHED, TAUGHT, MARGIN)),
    ),
    unknown("representation-collapse", nothing, "spread of outputs"),
    faulty("output-ignores-input", program(PULLED, spreads(SAME)), "critical", "does not depend", site="self"),
    alike(
        "output-ignores-input",
        program(PULLED, spreads((*SAME[:3], 1e-6))),
        program(PULLED, spreads(SAME, given=0.0)),
        program(PULLED, spreads(SAME, size=0.0)),
        program(PULLED, spreads(SAME, samples=2)),
    ),
    unknown("output-ignores-input", program(PULLED, [*spreads(SAME), DEAD]), "a whole layer is zero"),
    unknown("output-ignores-input", nothing, "spread of outputs"),
)

# ---- masks, and evaluation ----

FILLED = make_chain(
    ("ne", (-1,), ("int64[4, 9]",), (4, 9), "0"),
    ("masked_fill", (-1, 0), ((4, 9, 9), "bool[4, 9]"), (4, 9, 9), "-inf"),
    ("mean", (1,), ((4, 9, 9),), ()), outputs=[1],
)  # fmt: skip


def mask(**fields: Any) -> list[Fact]:
    """What a padding mask lets pass, at two looks."""
    known = {"value": 0.4, "kept": 1, "hidden": 9, "only": 0, "lengths": 3, **fields}
    return [AttendedTokens(name="att", line="train.py:31", moment=Moment(step), **known) for step in (0, 1)]


def given(phase: Phase, mean: float, std: float, steps: Sequence[int] = LOOKS) -> list[Fact]:
    """An input, at some steps."""
    return [
        Input(
            name="self:input.x", value=mean, std=std, shape=(16, 6), dtype="float32", moment=Moment(step, 0, 0, phase)
        )
        for step in steps
    ]


CALL = Call(
    name="forward", line="train.py:20", about="self", details={"training": False, "grad": False}, moment=Moment(9)
)
INSIDE = make_chain(
    ("sub", (-1, -1), ((16, 6), (6,)), (16, 6)), ("linear", (0, -1), ((16, 6), (5, 6)), (16, 5)),
    ("cross_entropy", (1, -1), ((16, 5), "int64[16]"), ()), outputs=[1],
)  # fmt: skip


def scored(*masked: tuple[Any, ...], weighs: bool = True) -> Any:
    """Scores of attention, what is done to them, softmax, and the sum of values that it weighs."""
    number = len(masked)
    taken = (4, 9, 9)
    return make_chain(
        ("linear", (-1, -1), ((4, 9, 6), (9, 6)), taken), *masked,
        ("softmax", (number,), (taken,), taken, "dim=-1"),
        ("matmul" if weighs else "log", (number + 1, *([-1] if weighs else [])),
         (taken, (4, 9, 6)) if weighs else (taken,), (4, 9, 6)),
        ("mean", (number + 2,), ((4, 9, 6),), ()), outputs=[number + 2],
    )  # fmt: skip


PAD: tuple[Any, ...] = ("eq", (-1,), ("int64[4, 1, 9]",), (4, 1, 9))
AS_FLOAT: tuple[Any, ...] = ("float", (1,), ("bool[4, 1, 9]",), (4, 1, 9))
WITH_PAD = ((4, 9, 9), (4, 1, 9))
BIG: tuple[Any, ...] = ("mul", (2,), ((4, 1, 9),), (4, 1, 9), "-1000000000.0")
FILL_PAD = ((4, 9, 9), "bool[4, 1, 9]")


def attending(mask: str, name: str = "scaled_dot_product_attention", arguments: str = "") -> Any:
    """Attention of torch that is given a mask."""
    made = ("float", (1,), ("bool[4, 1, 9]",), (4, 1, 9)) if mask.startswith("float") else PAD
    return make_chain(
        ("linear", (-1, -1), ((4, 9, 6), (6, 6)), (4, 9, 6)), PAD, made,
        (name, (0, 0, 0, 2), (*["float32[4, 9, 6]"] * 3, mask), (4, 9, 6), arguments),
        ("mean", (3,), ((4, 9, 6),), ()), outputs=[3],
    )  # fmt: skip


WEAK = (
    scored(PAD, AS_FLOAT, ("add", (0, 2), WITH_PAD, (4, 9, 9))),
    scored(PAD, ("mul", (0, 1), FILL_PAD, (4, 9, 9)), ("div", (2,), ((4, 9, 9),), (4, 9, 9), "8.0")),
    scored(PAD, ("masked_fill", (0, 1), FILL_PAD, (4, 9, 9), "1e-09")),
    attending("float32[4, 1, 9]"),
    attending("float32[4, 1, 9]", "multi_head_attention_forward", "6, 2, key_padding_mask=tensor"),
)

MASKS = gather(
    faulty(
        "mask-hides-nothing", program(WEAK[0], []), "warning", "is added to the scores as 1 and 0", line="train.py:33"
    ),
    faulty("mask-hides-nothing", program(WEAK[1], []), "warning", "multiplies the scores by 1 and 0"),
    faulty("mask-hides-nothing", program(WEAK[2], []), "warning", "sets scores to 1e-09"),
    *(faulty("mask-hides-nothing", program(each, []), "warning", "is added to the scores") for each in WEAK[3:]),
    alike(
        "mask-hides-nothing",
        program(scored(PAD, ("masked_fill", (0, 1), FILL_PAD, (4, 9, 9), "-inf")), []),
        program(scored(PAD, ("masked_fill", (0, 1), FILL_PAD, (4, 9, 9), "-1000000000.0")), []),
        program(scored(PAD, AS_FLOAT, BIG, ("add", (0, 3), WITH_PAD, (4, 9, 9))), []),
        program(  # and then hidden
            scored(PAD, ("mul", (0, 1), FILL_PAD, (4, 9, 9)), ("masked_fill", (2, 1), FILL_PAD, (4, 9, 9), "-inf")),
            [],
        ),
        program(scored(("add", (0, -1), ((4, 9, 9), "bool[4, 9, 9]"), (4, 9, 9))), []),  # neighbours in a graph
        program(scored(("add", (0, -1), WITH_PAD, (4, 9, 9))), []),  # of numbers nothing tells that they are 0 and 1
        program(scored(PAD, AS_FLOAT, ("add", (0, 2), WITH_PAD, (4, 9, 9)), weighs=False), []),  # classes
        program(attending("bool[4, 1, 9]"), []),
    ),
    unknown("mask-hides-nothing", nothing, "no operations"),
    faulty("mask-inverted", program(FILLED, mask()), "critical", "token 0 alone", line="train.py:30", site="att"),
    alike(
        "mask-inverted",
        program(FILLED, mask(kept=9, hidden=1)),
        program(FILLED, mask(lengths=1)),  # the same positions in all rows, as of a token for the class
        program(FILLED, mask(hidden=1)),
    ),
    unknown("mask-inverted", nothing, "no padding mask"),
    *(
        faulty(
            "evaluation-inputs",
            program(CLASSIFIER, [*given("train", 0.0, 1.0), *given("no_grad", mean, std, (9, 19)), CALL]),
            "warning",
            line="train.py:20",
        )
        for mean, std in ((120.0, 60.0), (0.0, 0.01), (30.0, 1.0))
    ),
    alike(
        "evaluation-inputs",
        program(CLASSIFIER, [*given("train", 0.0, 1.0), *given("no_grad", 2.0, 4.0, (9, 19))]),
        program(
            CLASSIFIER, [*given("train", 0.0, 1.0), *given("eval", 120.0, 60.0, (9,)), *given("eval", 0.0, 1.0, (19,))]
        ),
        program(CLASSIFIER, [*given("train", 0.0, 1.0), *given("no_grad", 0.0, 0.0, (9, 19))]),
        program(INSIDE, [*given("train", 0.0, 1.0), *given("no_grad", 120.0, 60.0, (9, 19))]),
    ),
    unknown(
        "evaluation-inputs", program(CLASSIFIER, given("train", 0.0, 1.0)), "no inputs of training and of evaluation"
    ),
)

ROWS = [*TARGETS, *OUTPUTS, *MASKS]
