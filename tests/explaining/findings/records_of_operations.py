"""Records of operations and graphs: what a loss is given, shapes, targets, graphs that grow, runs that died."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from retrograd.core.history.fact import Fact
from retrograd.core.history.facts import GraphSize, Input, NonFinite, Parameter
from retrograd.core.history.sink import Moment, Phase
from retrograd.explaining.findings.record import Record
from tests.explaining.findings.by_hand import make_record, spread
from tests.explaining.findings.programs import make_calls, make_chain, make_optimizer, make_program
from tests.explaining.findings.records import Make, Row, alike, faulty, gather, unknown

Listed = tuple[Any, ...]


def chain(
    *listed: Listed, outputs: Sequence[int] = (0,), losses: Sequence[float] = (), also: Iterable[Fact] = ()
) -> Make:
    """A program that runs these operations in a step."""
    return lambda: make_program([*also, make_chain(*listed, outputs=outputs)], losses)


def nothing() -> Record:
    """A record of no operation."""
    return make_program([])


# ---- what a loss is given ----


def ending(*between: str, loss: str = "cross_entropy", arguments: str = "dim=1") -> Make:
    """A linear layer, what stands behind it, and a loss."""
    listed: list[Listed] = [("linear", (-1, -1, -1), ((8, 6), (5, 6), (5,)), (8, 5), "", "2")]
    listed += [(name, (number,), ((8, 5),), (8, 5), arguments, "3") for number, name in enumerate(between)]
    listed.append((loss, (len(between), -1), ((8, 5), "int64[8]"), (), "reduction=mean"))
    return chain(*listed, outputs=[len(between)])


FLOOR = -math.log(math.e / (math.e + 4))  # all of the probability on the right one of 5
BCE, BCE_LOGITS = "binary_cross_entropy", "binary_cross_entropy_with_logits"

RIGHT = (
    ending(), ending("softmax", "linear"), ending("softmax", "log", loss="nll_loss"),
    ending("log_softmax", loss="nll_loss"), ending("log_softmax", loss="kl_div"), ending("sigmoid", loss=BCE),
    ending("sigmoid", "clamp", loss=BCE), ending("sigmoid", "mul", loss=BCE_LOGITS), ending(loss=BCE_LOGITS),
    ending("softmax", loss="mse_loss"),
)  # fmt: skip
"""What losses are made for."""

WRONG: list[tuple[str, Make, str, dict[str, Any]]] = [
    ("softmax-before-cross-entropy", ending("softmax", "view"), "critical", {"line": "train.py:31"}),
    ("softmax-before-cross-entropy", ending("sigmoid"), "warning", {}),
    ("softmax-before-cross-entropy", ending("log_softmax"), "note", {}),
    ("activation-on-logits", ending("relu"), "warning", {}),
    ("activation-on-logits", ending("tanh", "view"), "warning", {}),
    ("sigmoid-before-bce-with-logits", ending("sigmoid", "squeeze", loss=BCE_LOGITS), "critical", {}),
    ("sigmoid-before-bce-with-logits", ending("sigmoid", "sigmoid", loss=BCE), "critical", {}),
    ("relu-on-output", ending("relu", loss=BCE_LOGITS), "warning", {}),
    ("nll-on-probabilities", ending("softmax", loss="kl_div"), "critical", {}),
    ("nll-on-probabilities", ending("softmax", loss="nll_loss"), "critical", {"line": "train.py:31"}),
    ("nll-on-probabilities", ending(loss="nll_loss"), "critical", {"line": "train.py:31"}),  # something is missing
    ("nll-on-probabilities", ending("matmul", "add", loss="nll_loss"), "critical", {"line": "train.py:33"}),
    ("bce-on-logits", ending(loss=BCE), "critical", {}),
    ("bce-on-logits", ending("clamp", loss=BCE), "critical", {}),
    ("bce-on-logits", ending("tanh", loss=BCE), "critical", {}),
]
DROPS = "p=0.3, training=True"

LOSS_INPUTS = gather(
    faulty(
        "softmax-before-cross-entropy", ending("softmax"), "critical", f"cannot fall below {FLOOR:.3g}", site="3",
        line="train.py:31",
    ),
    *(faulty(slug, make, severity, **fields) for slug, make, severity, fields in WRONG),
    *(alike(slug, *RIGHT) for slug in dict.fromkeys(slug for slug, *_ in WRONG)),
    *(unknown(slug, nothing, "no operations") for slug in dict.fromkeys(slug for slug, *_ in WRONG)),
    faulty(
        "dropout-misplaced", ending("dropout", arguments=DROPS), "warning",
        "(p = 0.3) is the last thing before cross_entropy, so 30%", line="train.py:31",
    ),
    faulty(
        "dropout-misplaced", ending("dropout", "linear", arguments="p=0.95, training=True"), "warning", "drops 95%",
    ),
    alike(
        "dropout-misplaced", ending("dropout", "linear", arguments="p=0.5, training=True"),
        ending("dropout", arguments="p=0.0, training=True"), ending("dropout", arguments="p=0.5, training=False"),
    ),
    unknown("dropout-misplaced", nothing, "no operations"),
)  # fmt: skip

# ---- what a loss asks for ----

RANDOM = np.random.default_rng(0)
MSE: Listed = ("mse_loss", (0, -1), ((8, 1), (8, 1)), (), "reduction=mean")
LINEAR: Listed = ("linear", (-1, -1), ((8, 6), (1, 6)), (8, 1))
NEG: Listed = ("neg", (1,), ((),), ())
SUM_LOSS: Listed = ("mse_loss", (0, -1), ((8, 1), (8, 1)), (), "reduction=sum")
LOG_SOFTMAX: Listed = ("log_softmax", (0,), ((8, 3),), (8, 3), "dim=1")
AWAY, RISING, FALLING = [-1.0, -1.5, -2.0, -4.0, -9.0], [1.0, 1.5, 2.0, 4.0, 9.0], [1.0, 0.8, 0.6, 0.4, 0.2]
SUM_FALLING, SUM_RISING = [8.0 * 0.9**step for step in range(20)], [8.0 * 1.1**step for step in range(20)]


def regression(activation: str, output: np.ndarray, target: np.ndarray) -> Make:
    """A mean squared error, with the gradient that it has by its formula."""
    gradient = 2 * (output - target) / output.size
    made = make_chain(
        LINEAR, (activation, (0,), ((8, 1),), (8, 1), "", "1"), (*MSE[:1], (1, -1), *MSE[2:]), outputs=[1]
    )
    sites = {"self:output": output, "self:output.grad": gradient}
    return lambda: make_record(range(5), lambda step: sites, facts=[made])


def terms(*last: Listed) -> Make:
    """A loss of a mean squared error (0) and a tenth of a divergence (2)."""
    first = [("mse_loss", (-1, -1), ((8, 1), (8, 1)), ()), ("kl_div", (-1, -1), ((8, 3), (8, 3)), ()),
             ("mul", (1,), ((),), (), "0.1")]  # fmt: skip
    return chain(*first, *last, outputs=(), losses=[-1.0, -2.0, -5.0, -9.0])


def lost(reason: str, sizes: Sequence[float]) -> Make:
    """A sum whose loss is lost behind outputs of these sizes."""
    born = NonFinite(name="0", born="forward", operation="log", reason=reason, moment=Moment(19))
    return lambda: make_record(
        range(20), lambda step: {"0:output": np.full(4, sizes[step]), "0:weight.update": np.full(4, 1e-3)},
        [*SUM_RISING[:19], np.nan], weights=lambda step: {"0:weight": 1.0},
        facts=[make_optimizer(), make_chain(LINEAR, SUM_LOSS, outputs=[0]), born],
    )  # fmt: skip


def summed(losses: Sequence[float], name: str = "SGD", loss: Listed = SUM_LOSS) -> Make:
    """A linear model with this loss."""
    return chain(LINEAR, loss, losses=losses, also=[make_optimizer(name)])


BETWEEN = {"relu": (0, 4), "sigmoid": (0, 1), "tanh": (-1, 1), "linear": (-5, 5)}
BELOW_0 = RANDOM.normal(size=64) * 3
ONE, TWO = [make_optimizer()], [make_optimizer(), make_optimizer("Adam_2")]
UP = [make_optimizer(maximize=True)]
ADD, SUB = "add", "sub"


def _sum(name: str, first: int, second: int) -> Listed:
    return (name, (first, second), ((), ()), ())


def _minus(number: int) -> Listed:
    return ("neg", (number,), ((),), ())


SENSE = gather(
    faulty(
        "relu-on-output", regression("relu", np.maximum(RANDOM.normal(size=64), 0), BELOW_0), "critical",
        "cannot be below 0", site="1", line="train.py:2",
    ),
    faulty(
        "relu-on-output", regression("sigmoid", RANDOM.uniform(0.2, 0.8, 64), RANDOM.normal(5, 1, 64)), "critical",
        "cannot be above 1",
    ),
    alike(
        "relu-on-output",
        *(regression(name, RANDOM.uniform(*ends, 64), RANDOM.uniform(*ends, 64)) for name, ends in BETWEEN.items()),
        chain(("sigmoid", (-1,), ((8, 1),), (8, 1)), ("l1_loss", (0, -1), ((8, 1), (8, 1)), ())),
    ),
    faulty(
        "loss-wrong-sign", chain(LINEAR, MSE, NEG, losses=AWAY, also=ONE), "critical", "negative of mse_loss",
        line="train.py:32",
    ),
    *(
        faulty("loss-wrong-sign", terms(*last), "critical")
        for last in [
            (_sum(ADD, 0, 2), _minus(3)),  # −(mse + 0.1 kl)
            (_minus(0), _sum(SUB, 3, 2)),  # −mse − 0.1 kl
            (_sum(ADD, 0, 2), ("mul", (3,), ((),), (), "-0.5")),
        ]
    ),
    faulty(
        "loss-wrong-sign",
        chain(LINEAR, LOG_SOFTMAX, ("getitem", (1,), ((8, 3),), (8,), "(tensor, tensor)"), ("mean", (2,), ((8,),), ()),
              losses=AWAY, also=ONE), "critical", "without a minus",
    ),
    faulty(
        "loss-wrong-sign", chain(LINEAR, MSE, losses=RISING, also=UP), "critical", "The optimizer maximises mse_loss",
    ),
    alike(
        "loss-wrong-sign",
        terms(_sum(SUB, 2, 0), _minus(3)),  # mse − …: one of each sign
        terms(_minus(0), _sum(SUB, 3, 2), _minus(4)),  # of an ELBO
        terms(_sum(SUB, 0, 2), ("mul", (3,), ((),), (), "2")),
        chain(LINEAR, MSE, losses=FALLING, also=ONE),
        chain(LINEAR, MSE, NEG, losses=AWAY, also=UP),
        chain(LOG_SOFTMAX, ("mean", (0,), ((8, 3),), ()), NEG, losses=FALLING, also=ONE),
    ),
    unknown("loss-wrong-sign", chain(LINEAR, MSE, NEG, losses=AWAY, also=TWO), "several optimizers"),
    faulty(
        "loss-reduction-sum", summed(SUM_RISING), "warning",
        "sums over [8, 1], so gradients are 8 times those of the mean",
    ),
    faulty(  # by steps that grow, which follows from the sum
        "loss-reduction-sum", lost("overflow of float32", [10.0**step for step in range(20)]), "warning", step=0,
    ),
    alike(
        "loss-reduction-sum", summed(SUM_FALLING), summed(SUM_RISING, "Adam"), summed(SUM_RISING, loss=MSE),
        lost("log of 0", [1.0] * 20),
    ),
    unknown("loss-reduction-sum", nothing, "no operations"),
)  # fmt: skip

# ---- inputs ----


ONE_KEY: Listed = ("matmul", (-1, -1), ((8, 6), (6, 1)), (8, 1))


def single(scores: Listed) -> Make:
    """Weights that are normalised over one element, of a layer, or of a query with the only key that there is."""
    weighted: Listed = ("mul", (1, -1), ((8, 1), (8, 6)), (8, 6))
    layer: Listed = ("linear", (2, -1), ((8, 6), (3, 6)), (8, 3))
    loss: Listed = ("cross_entropy", (3, -1), ((8, 3), "int64[8]"), ())
    return chain(scores, ("softmax", (0,), ((8, 1),), (8, 1), "dim=1"), weighted, layer, loss, outputs=(3,))


CLASSES = (("linear", (-1, -1), ((8, 6), (3, 6)), (8, 3)), ("cross_entropy", (0, -1), ((8, 3), "int64[8]"), ()))
NORMED = (
    ("layer_norm", (-1,), ((8, 6),), (8, 6)), ("linear", (0, -1), ((8, 6), (3, 6)), (8, 3)),
    ("cross_entropy", (1, -1), ((8, 3), "int64[8]"), ()),
)  # fmt: skip


def given(
    std: float, losses: Sequence[float], *also: Fact, listed: Sequence[Listed] = CLASSES, dtype: str = "float32"
) -> Make:
    """A classifier that is given inputs with a mean of 1.5 times this standard deviation."""
    inputs = [
        Input(name="self:input.x", value=1.5 * std, std=std, max=3 * std, shape=(8, 6), dtype=dtype, moment=Moment(k))
        for k in range(2)
    ]
    return chain(*listed, outputs=[len(listed) - 2], losses=losses, also=[*inputs, *also])


def far(error: float, losses: Sequence[float], name: str = "mse_loss") -> Make:
    """A regression whose outputs are within ±0.5."""
    made = make_chain(LINEAR, (name, *MSE[1:]), outputs=[0])
    sites = {"self:output": np.linspace(-0.5, 0.5, 8)}
    return lambda: make_record(range(len(losses)), lambda step: sites, [error * each for each in losses], facts=[made])


def drifting(factor: float, losses: Sequence[float], phase: Phase = "train") -> Make:
    """A model whose inputs are so many times larger at each step."""
    inputs = [
        Input(
            name="self:input.x", std=factor**k, value=0.0, shape=(8, 6), dtype="float32", moment=Moment(k, phase=phase)
        )
        for k in range(20)
    ]
    return chain(*CLASSES, outputs=[len(CLASSES) - 2], losses=losses, also=inputs)


def _born(kind: str, reason: str) -> NonFinite:
    return NonFinite(name="", born=kind, operation="log", reason=reason, moment=Moment(2))


NO_BETTER, LOST, FLAT = [40.0, 20.0, 1.4, 1.3, 1.2, 1.1], [40.0, 20.0, np.nan, np.nan], [1.1] * 10
HARDLY = [1.0, 0.99, 0.98, 0.99, 0.97, 0.96]

INPUTS = gather(
    faulty(
        "input-unscaled", given(80.0, NO_BETTER), "warning", "mean 120 and standard deviation 80",
        "no better than guessing (1.1)",  # log 3
    ),
    faulty("input-unscaled", far(4e10, HARDLY), "warning", "off by 200,000 in mse_loss", line="train.py:31"),  # √4e10
    faulty("input-unscaled", far(3e4, HARDLY, "l1_loss"), "warning", "off by 30,000 in l1_loss"),
    faulty("input-unscaled", given(80.0, LOST, _born("forward", "log of 0")), "critical"),
    alike(
        "input-unscaled", given(80.0, [4.0, 1.0, 0.3, 0.2, 0.1, 0.1]), given(1.0, FLAT),
        given(80.0, FLAT, listed=NORMED),
        far(4e10, [1.0, 0.5, 0.3, 0.2, 0.1, 0.1]),  # it learns
        given(80.0, LOST, _born("input", "")),
        given(80.0, LOST, _born("forward", "softmax over a row that is all −inf")),
    ),
    faulty("input-drifts", drifting(1.3, [1.1] * 20), "warning", "goes from 1 to 146"),  # 1.3 ** 19
    alike(
        "input-drifts", drifting(1.3, [1.1 - 0.05 * k for k in range(20)]), drifting(1.02, [1.1] * 20),
        drifting(0.7, [1.1] * 20), drifting(1.3, [1.1] * 20, "no_grad"),
    ),
    unknown("input-drifts", drifting(1.3, [1.1] * 6), "it takes 16"),
    unknown("input-unscaled", given(80.0, FLAT, dtype="int64"), "no input of floating type"),
    unknown("input-unscaled", far(2500.0, [1.0] * 6), "no input of floating type"),  # targets are off by 50
)  # fmt: skip

# ---- shapes ----

MEAN_OF_64: list[Listed] = [("pow", (1,), ((8, 8),), (8, 8)), ("mean", (2,), ((8, 8),), ())]
TO_CLASSES: Listed = ("linear", (-1, -1), ((8, 6), (2, 6)), (8, 2))
LOGITS: Listed = ("linear", (-1, -1), ((8, 7, 6), (7, 6)), (8, 7, 7))
SCORES: Listed = ("matmul", (-1, -1), ((8, 5, 4), (8, 4, 5)), (8, 5, 5))
SOFT: tuple[Any, ...] = ("softmax", (0,), ((8, 5, 5),), (8, 5, 5))


def over(dim: str) -> Make:
    """Log-probabilities over a dimension."""
    return chain(
        TO_CLASSES, ("log_softmax", (0,), ((8, 2),), (8, 2), dim), ("nll_loss", (1, -1), ((8, 2), "int64[8]"), ()),
        outputs=(1,),
    )  # fmt: skip


def attention(dim: str) -> Make:
    """Weights that are summed over the last dimension."""
    return chain(
        SCORES,
        (*SOFT, f"dim={dim}"),
        ("dropout", (1,), ((8, 5, 5),), (8, 5, 5), "p=0.1, training=True"),
        ("matmul", (2, -1), ((8, 5, 5), (8, 5, 4)), (8, 5, 4)),
        ("mean", (3,), ((8, 5, 4),), ()),
        outputs=(3,),
    )


def pooling(dim: str) -> Make:
    """Weights that are summed over dimension 1."""
    return chain(
        ("linear", (-1, -1), ((8, 5, 4), (1, 4)), (8, 5, 1)),
        ("squeeze", (0,), ((8, 5, 1),), (8, 5), "dim=-1"),
        ("softmax", (1,), ((8, 5),), (8, 5), f"dim={dim}"),
        ("unsqueeze", (2,), ((8, 5),), (8, 5, 1), "dim=-1"),
        ("mul", (3, 0), ((8, 5, 1), (8, 5, 4)), (8, 5, 4)),
        ("sum", (4,), ((8, 5, 4),), (8, 4), "dim=1"),
        ("linear", (5, -1), ((8, 4), (2, 4)), (8, 2)),
        ("mean", (6,), ((8, 2),), ()),
        outputs=(6,),
    )


def gate(dim: str) -> Make:
    """Weights of which the largest is picked along the last dimension."""
    return chain(
        ("linear", (-1, -1), ((8, 5), (3, 5)), (8, 3)),
        ("softmax", (0,), ((8, 3),), (8, 3), f"dim={dim}"),
        ("max", (1,), ((8, 3),), (8,), "dim=-1"),
        ("mul", (2, -1), ((8,), (8,)), (8,)),
        ("linear", (3, -1), ((8,), (8,)), (8,)),
        ("mean", (4,), ((8,),), ()),
        outputs=(4,),
    )


def last_step(index: str, first: str) -> Make:
    """The last element of what a recurrent layer gives out, batch first or not."""
    return chain(
        ("lstm", (-1,), ((32, 9, 4),), (32, 9, 16), f"True, 1, 0.0, True, False, {first}"),
        ("getitem", (0,), ((32, 9, 16),), (32, 16), index),
        ("mean", (1,), ((32, 16),), ()),
        outputs=(1,),
    )


def reshaped(before: tuple[int, ...], behind: tuple[int, ...]) -> Make:
    """A view."""
    return chain(("view", (-1,), (before,), behind), ("mean", (0,), (behind,), ()))


def stack(*widths: int, between: str = "dropout", stages: bool = False) -> Make:
    """Linear layers of these widths, with something between them."""

    def make() -> Record:
        listed: list[Listed] = []
        for number, (before, behind) in enumerate(pairwise(widths)):
            listed.append(("linear", (2 * number - 1, -1), ((8, before), (behind, before)), (8, behind)))
            listed.append((between, (2 * number,), ((8, behind),), (8, behind), "p=0.1"))
        last = len(listed) - 1
        listed.append(("cross_entropy", (last, -1), ((8, widths[-1]), "int64[8]"), ()))
        record = make_program([make_chain(*listed, outputs=(last,))])
        record.manifest["split"] = {"ranks": [], "stages": {"": 0} if stages else {}}
        return record

    return make


def sequence(kind: str, behind: str, *, by_samples: bool = True) -> Make:
    """A layer that runs along dimension 0 of (16, 9, 4), and its result, of which dimension 1 is averaged or kept."""
    size = (16, 4) if behind == "mean" else (16, 9, 4)
    operands = (-1, -1, -1) if kind == "multi_head_attention_forward" else (-1,)
    layer = (kind, operands, ((16, 9, 4),) * len(operands), (16, 9, 4), "True, 1, 0.0, True, False, False")
    pooled = ("mean", (0,), ((16, 9, 4),), (16, 4), "dim=1")
    target = f"float32{list(size)}" if by_samples else "float32[9, 4]"
    loss = ("mse_loss", (1, -1) if behind == "mean" else (0, -1), (size, target), ())
    listed = [layer, pooled, loss] if behind == "mean" else [layer, loss]
    return chain(*listed, outputs=(len(listed) - 2,), also=[INPUT])


INPUT = Input(name="self:input.x", shape=(16, 9, 4), dtype="float32", moment=Moment(0))


def samples(listed: Sequence[Listed], along: str) -> Make:
    """Weights over dimension 0 of (16, 9), the samples, that are used so."""
    score: Listed = ("linear", (-1, -1), ((16, 9, 4), (1, 4)), (16, 9, 1))
    flat: Listed = ("squeeze", (0,), ((16, 9, 1),), (16, 9), "dim=-1")
    return chain(score, flat, ("softmax", (1,), ((16, 9),), (16, 9), along), *listed, outputs=(3,), also=[INPUT])


BY_HAND: list[Listed] = [
    ("einsum", (2, -1), ((16, 9), (16, 9, 4)), (16, 4), "bt,btd->bd"), ("mean", (3,), ((16, 4),), ()),
]  # fmt: skip
ITSELF: list[Listed] = [
    ("t", (2,), ((16, 9),), (9, 16)), ("matmul", (3, -1), ((9, 16), (16, 4)), (9, 4)), ("mean", (4,), ((9, 4),), ()),
]  # fmt: skip


def placed(*code: Listed, shape: tuple[int, ...] = (16, 1, 4), layer: str = "attention") -> Make:
    """Something that is added to (16, 9, 4), and a layer that runs along dimension 1."""
    number = len(code)
    added = ("add", (-1, number - 1), ((16, 9, 4), shape), (16, 9, 4))
    turned = ("transpose", (number,), ((16, 9, 4),), (9, 16, 4), "0, 1")
    kind = "multi_head_attention_forward" if layer == "attention" else layer
    mixes = (kind, (number + 1,) * 3, ((9, 16, 4),) * 3, (9, 16, 4), "True, 1, 0.0, True, False, False")
    last = ("mean", (number + 2,), ((9, 16, 4),), ())
    return chain(*code, added, turned, mixes, last, outputs=(number + 2,), also=[INPUT])


def counted(size: int, shape: tuple[int, ...]) -> tuple[Listed, ...]:
    """An embedding of ``arange``."""
    return (
        ("arange", (), (), (size,), str(size)), ("unsqueeze", (0,), ((size,),), shape[:-1], "1"),
        ("embedding", (1, -1), (shape[:-1], (32, 4)), shape),
    )  # fmt: skip


def row_of(index: str, table: tuple[int, ...], shape: tuple[int, ...]) -> Listed:
    """What an index picks of a table."""
    return ("getitem", (-1,), (table,), shape, index)


def dropped(name: str, *, goes_on: bool = True, known: bool = True) -> Make:
    """A function behind a linear layer, the result of which nobody takes."""
    listed = (TO_CLASSES, (name, (0,), ((8, 2),), (8, 2), "", "head"))
    last: Listed = ("mean", (0 if goes_on else -1,), ((8, 2),), ())
    fact = make_chain(*listed, last, outputs=(0,))
    return lambda: make_program([replace(fact, dropped=(1,) if known else None)])


MIXED = [
    ((32, 12, 6), (12, 32, 6)), ((32, 12, 6), (32, 6, 12)), ((32, 12, 24), (32, 4, 12, 6)),
    ((32, 4, 12, 6), (32, 12, 24)),
]  # fmt: skip
IN_ORDER = [
    ((32, 12, 24), (32, 12, 4, 6)), ((32, 12, 4, 6), (32, 12, 24)), ((32, 12, 6), (384, 6)), ((32, 1, 12), (32, 12, 1)),
    ((8, 8, 6), (8, 8, 6)), ((32, 4, 24), (32, 4, 4, 6)), ((32, 64), (32, 1, 8, 8)),
]  # fmt: skip


def masked(
    losses: Sequence[int], mask: Sequence[int], name: str = "mul", last: Iterable[tuple[str, Sequence[int], str]] = ()
) -> Make:
    """Losses of each token, and a mask of yes and no, added up."""
    shape = list(torch.broadcast_shapes(tuple(losses), tuple(mask)))
    takes: tuple[Any, ...] = (losses, mask) if name == "mul" else (f"bool{list(mask)}", losses, ())
    return chain(
        ("linear", (-1, -1), ((*losses, 4), (2, 4)), losses),
        ("ne", (-1,), (f"int64{list(mask)}",), mask),
        *([("float", (1,), (f"bool{list(mask)}",), mask)] if name == "mul" else []),
        (name, (0, 2) if name == "mul" else (1, 0, -1), takes, shape),
        *ended(3 if name == "mul" else 2, shape, last),
    )


def ended(number: int, shape: Sequence[int], last: Iterable[tuple[str, Sequence[int], str]]) -> list[Listed]:
    """What is made of a result until it is one number."""
    listed: list[Listed] = []
    for name, made, arguments in (*last, ("sum", (), "")):
        listed.append((name, (number,), (shape,), made, arguments))
        number, shape = number + 1, made
    return listed


def against(
    output: Sequence[int], target: Sequence[int], *, is_added: bool = False,
    last: Iterable[tuple[str, Sequence[int], str]] = (),
) -> Make:  # fmt: skip
    """Outputs minus targets, squared; ``is_added``: the targets' dimension was added for it."""
    shape = list(torch.broadcast_shapes(tuple(output), tuple(target)))
    made = [("unsqueeze", (-1,), (output,), target, "dim=1")] if is_added else []
    return chain(
        ("linear", (-1, -1), ((*output[:-1], 4), (2, 4)), output), *made,
        ("sub", (0, 1 if is_added else -1), (output, target), shape),
        ("square", (1 + is_added,), (shape,), shape), *ended(2 + is_added, shape, last),
    )  # fmt: skip


SHAPES = gather(
    faulty(
        "broadcast-loss", chain(LINEAR, ("sub", (0, -1), ((8, 1), (8,)), (8, 8)), *MEAN_OF_64), "critical",
        "float32[8, 1] and float32[8] broadcast to [8, 8] in sub", line="train.py:31",
    ),
    faulty(
        "broadcast-loss", chain(LINEAR, ("mse_loss", (0, -1), ((8, 1), (8,)), ())), "critical",
        "broadcast to [8, 8] in mse_loss",
    ),
    faulty(
        "broadcast-loss", masked((8, 5), (8, 1, 5)), "critical",
        "float32[8, 5] and float32[8, 1, 5] broadcast to [8, 8, 5] in mul, so each output is masked by the masks",
        line="train.py:33",
    ),
    faulty("broadcast-loss", masked((8, 5), (8, 1, 5), "where"), "critical", "broadcast to [8, 8, 5] in where"),
    faulty("broadcast-loss", masked((8, 5), (8, 1, 5), last=(("sum", (8, 8), "dim=-1"),)), "critical"),
    faulty("broadcast-loss", against((8, 1, 5), (8, 5)), "critical", "compared with the targets of all samples"),
    alike(
        "broadcast-loss",
        masked((8, 5), (8, 5)),
        masked((8, 5), (8, 1)),
        masked((8, 5), (7, 1, 5)),  # classes that are masked apart
        masked((8, 1, 5), (8, 5, 1)),
        against((8, 1, 5), (8, 5), last=(("sum", (8, 8), "dim=-1"),)),  # distances of all pairs
        against((8, 5), (8, 1, 5), is_added=True),  # differences of all pairs
        chain(  # frequencies of a time code, as many as samples
            ("getitem", (-1,), ((8,),), (8, 1), "(:, None)"), ("mul", (0, -1), ((8, 1), (8,)), (8, 8)),
            ("linear", (1, -1), ((8, 8), (1, 8)), (8, 1)), ("mean", (2,), ((8, 1),), ()), outputs=(2,),
        ),
        chain(LINEAR, ("sub", (0, -1), ((8, 1), (8, 1)), (8, 1)), ("mean", (1,), ((8, 1),), ())),
        chain(LINEAR, ("sub", (0, 0), ((8, 1), (8,)), (8, 8)), ("mean", (1,), ((8, 8),), ())),  # all pairs
        chain(LINEAR, ("add", (0, -1), ((8, 1), (1,)), (8, 1)), ("mean", (1,), ((8, 1),), ())),  # a bias
        chain(("mul", (-1, -1), ((8, 1), (8,)), (8, 8)), ("linear", (0, -1), ((8, 8), (1, 8)), (8, 1)), outputs=(1,)),
    ),
    unknown("broadcast-loss", nothing, "no operations"),
    faulty("wrong-dim", over("dim=0"), "critical", "over dimension 0 of [8, 2], which is the batch"),
    faulty(
        "wrong-dim",
        chain(LINEAR, ("softmax", (0,), ((8, 1),), (8, 1), "dim=1"), (BCE, (1, -1), ((8, 1), (8, 1)), ())), "critical",
        "which has one element: its result is always 1",
    ),
    faulty("wrong-dim", single(LINEAR), "critical", "which has one element: its result is always 1"),
    *(faulty("wrong-dim", attention(dim), "critical") for dim in ("1", "-2", "0")),
    faulty("wrong-dim", pooling("0"), "critical", "by softmax over dimension 0, and summed over dimension 1"),
    faulty("wrong-dim", gate("0"), "critical"),
    faulty(
        "wrong-dim", chain(LOGITS, ("cross_entropy", (0, -1), ((8, 7, 7), "int64[8, 7]"), ())), "critical",
        "takes dimension 1 of [8, 7, 7] for classes",
    ),
    faulty("wrong-dim", last_step("(:, -1, :)", "False"), "critical"),
    faulty("wrong-dim", last_step("-1", "True"), "critical"),
    alike(
        "wrong-dim", over("dim=-1"), single(ONE_KEY), attention("-1"), attention("2"), pooling("1"), gate("-1"),
        gate("1"),
        chain(  # slots, normalised again
            SCORES, (*SOFT, "dim=1"), ("div", (1, -1), ((8, 5, 5), (8, 5, 1)), (8, 5, 5)),
            ("matmul", (2, -1), ((8, 5, 5), (8, 5, 4)), (8, 5, 4)), ("mean", (3,), ((8, 5, 4),), ()), outputs=(3,),
        ),
        chain(LOGITS, ("transpose", (0,), ((8, 7, 7),), (8, 7, 7), "1, 2"),
              ("cross_entropy", (1, -1), ((8, 7, 7), "int64[8, 7]"), ())),
        last_step("-1", "False"), last_step("(:, -1)", "True"), last_step("0", "True"),
        chain(  # the last state of a layer, and not the last step
            ("lstm", (-1,), ((32, 9, 4),), (32, 9, 16), "True, 1, 0.0, True, False, True"),
            ("getitem", (0,), ((1, 32, 16),), (32, 16), "-1"), ("mean", (1,), ((32, 16),), ()), outputs=(1,),
        ),
        sequence("lstm", "keep"), sequence("multi_head_attention_forward", "keep"),
        samples(BY_HAND, "dim=1"), samples(ITSELF, "dim=0"),
    ),
    *(
        faulty("wrong-dim", sequence(kind, "mean"), "critical", "runs along dimension 0", line="train.py:30")
        for kind in ("lstm", "multi_head_attention_forward")
    ),
    faulty("wrong-dim", samples(BY_HAND, "dim=0"), "critical", "in which samples are", line="train.py:32"),
    unknown("wrong-dim", nothing, "no operations"),
    *(faulty("reshape-mixes-batch", reshaped(*each), "critical") for each in MIXED),
    alike(
        "reshape-mixes-batch", *(reshaped(*each) for each in IN_ORDER),
        chain(("permute", (-1,), ((32, 12, 6),), (12, 32, 6), "1, 0, 2"),
              ("reshape", (0,), ((12, 32, 6),), (32, 12, 6)), ("mean", (1,), ((32, 12, 6),), ())),
    ),
    unknown("reshape-mixes-batch", nothing, "no operations"),
    faulty(
        "positions-shared", placed(*counted(16, (16, 1, 4))), "critical", "all 9 entries of a sequence",
        line="train.py:30",
    ),
    faulty("positions-shared", placed(row_of(":16", (64, 1, 4), (16, 1, 4))), "critical", line="train.py:30"),
    faulty("positions-shared", placed(row_of("9", (64, 4), (4,)), shape=(4,)), "critical", line="train.py:30"),
    alike(
        "positions-shared",
        placed(*counted(9, (1, 9, 4)), shape=(1, 9, 4)),
        placed(row_of("(:, :9)", (1, 64, 4), (1, 9, 4)), shape=(1, 9, 4)),
        placed(row_of("2", (3, 4), (4,)), shape=(4,)),  # a class of tokens
        placed(*counted(16, (16, 1, 4)), layer="lstm"),  # knows the order by itself
        placed(("mean", (-1,), ((16, 9, 4),), (16, 1, 4), "dim=1")),  # made of the inputs
    ),
    unknown("positions-shared", nothing, "no operations"),
    faulty("result-dropped", dropped("masked_fill"), "critical", "goes on unchanged to mean", line="train.py:31"),
    faulty("result-dropped", dropped("relu"), "warning", site="head"),
    alike("result-dropped", dropped("relu", goes_on=False), dropped("batch_norm"), dropped("linear")),
    unknown("result-dropped", dropped("relu", known=False), "not recorded"),
    faulty(
        "missing-nonlinearity", stack(6, 64, 64, 2), "warning", "between the 3 affine layers", line="train.py:32",
    ),
    alike(
        "missing-nonlinearity", stack(6, 64, 2, between="relu"), stack(6, 64, 2, between="layer_norm"),
        stack(64, 8, 64), stack(6, 2),
        chain(  # weights that are made of data
            ("linear", (-1, -1), ((8, 6), (6, 6)), (8, 6)), ("tanh", (0,), ((8, 6),), (8, 6)),
            ("linear", (-1, 1), ((8, 6), (8, 6)), (8, 8)), ("linear", (2, -1), ((8, 8), (9, 8)), (8, 9)),
            ("mean", (3,), ((8, 9),), ()), outputs=(3,),
        ),
    ),
    unknown("missing-nonlinearity", stack(6, 64, 64, 2, stages=True), "stages of a pipeline"),
)  # fmt: skip

# ---- graphs ----

LOOKS = (0, 1, 2, 4, 8, 16, 32)
GROWING = [9.0 + 5 * step for step in LOOKS]
KEPT_LOSS = make_chain(("linear", (-1,), ((4, 3),), (4, 1), "", "0"), ("mean", (0,), ((4, 1),), ()), outputs=[0])
INNER_LOSS = make_chain(("mean", (-1,), ((4, 1),), (), "", "0"), outputs=[0])
STATE = Input(name="self:input.state", dtype="float32", shape=(1, 4, 8), moment=Moment(1))
TAKES = "without detach: `lstm` (train.py:30) takes float32[1, 4, 8] that was made before this forward"


def sizes(nodes: Sequence[float], alive: Sequence[int] = (0,) * 7, also: Sequence[Fact] = ()) -> Make:
    """Graphs of so many nodes, with so many of earlier steps alive."""
    facts = [
        GraphSize(value=value, alive=held, moment=Moment(step))
        for step, value, held in zip(LOOKS, nodes, alive, strict=True)
    ]
    made = make_calls([("forward", "backward", "step")] * 33)
    return lambda: make_record(range(33), lambda step: {"0:weight.grad": spread(1.0)}, facts=[*facts, *made, *also])


def carried(*also: Fact) -> Make:
    """A graph that grows, as a state of size [1, 4, 8] is handed on."""
    lstm = ("lstm", (-1, -2, -1), ((2, 4, 3), (1, 4, 8), (32, 3)), (2, 4, 8), "", "rnn")
    made = make_chain(lstm, ("mean", (0,), ((2, 4, 8),), ()), outputs=[0], step=1)
    return sizes(GROWING, also=[made, *also])


def returned() -> Record:
    """A graph that grows by a state that a cell takes and returns."""
    cell = ("rnn_tanh_cell", (-1, -2, -1), ((4, 3), (4, 8), (8, 3)), (4, 8), "", "cell")
    return sizes(GROWING, also=[make_chain(cell, ("mean", (0,), ((4, 8),), ()), outputs=[0], step=1)])()


def passes(*nodes: float, lines: int = 1) -> Make:
    """Steps of as many passes, whose graphs have these numbers of nodes."""
    facts = [GraphSize(value=n, moment=Moment(step, micro)) for step in range(3) for micro, n in enumerate(nodes)]
    names = ("forward", *["backward", "second backward"][:lines] * len(nodes), "step")
    return lambda: make_program([*facts, *make_calls([names] * 3)])


def kept(*alive: int, also: Sequence[Fact] = ()) -> Make:
    """Graphs of earlier steps that are alive."""
    return sizes([9.0] * 7, alive, also)


def tied(first: str, second: str, kind: str = "Embedding") -> Make:
    """The digests of two weights, a letter a step."""
    facts = [
        Parameter(name=name, digest=digest, shape=(50, 16), moment=Moment(step))
        for name, listed in (("emb:weight", first), ("head:weight", second))
        for step, digest in enumerate(listed)
    ]
    return lambda: make_program(facts, modules={"self": "LM", "emb": kind, "head": "Linear"})


def places(*paths: str, calls: int, kind: str = "Sequential") -> Make:
    """A container with these children, and how often the first is called."""
    layer = ("linear", (-1, -1), ((8, 8), (8, 8)), (8, 8), "", "0")
    made = make_chain(*[layer] * calls, ("mean", (calls - 1,), ((8, 8),), ()), outputs=[calls - 1])
    return lambda: make_program([made], modules={"self": kind} | dict.fromkeys(paths, "Linear"))


GRAPHS = gather(
    faulty(
        "graph-grows", sizes(GROWING), "critical",
        "grows by 5 nodes a step: backward ran through 9 nodes at step 0 and 169 at step 32", line="train.py:12",
    ),
    faulty("graph-grows", carried(), "critical", TAKES, line="train.py:30"),
    faulty("graph-grows", carried(STATE), "critical", line="train.py:11"),
    faulty("graph-grows", returned, "critical", line="train.py:11"),
    faulty(
        "graph-grows", passes(20, 28, 36, 44, 52, 60, 68), "critical",
        "grows by 8 nodes a pass: backward ran through 20 nodes in pass 0 of step 0 and 68 in pass 6",
    ),
    alike(
        "graph-grows", sizes([9.0] * 7), sizes([9.0, 40.0, 12.0, 33.0, 21.0, 50.0, 30.0]),
        passes(20, 20, 20, 20, 20),
        sizes([10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0]), sizes([5.0, 6.0, 20.0, 21.0, 22.0, 23.0, 24.0]),
    ),
    unknown("graph-grows", passes(20, 28, 36, 44, 52, 60, 68, lines=2), "a trend needs 4"),  # several losses
    unknown("graph-grows", passes(20, 70), "a trend needs 4"),
    faulty(
        "graph-leaks", kept(*LOOKS), "warning", "32 graphs of earlier steps are still held at step 32", step=1,
        line="train.py:12",
    ),
    faulty("graph-leaks", kept(*LOOKS, also=[KEPT_LOSS]), "warning", "made in train.py:31", line="train.py:31"),
    faulty("graph-leaks", kept(*LOOKS, also=[INNER_LOSS]), "warning", line="train.py:12"),
    faulty(
        "graph-leaks", kept(0, 1, 2, 4, 8, 16, 2), "warning",  # for an epoch
        "16 graphs of earlier steps are still held at step 16, so memory grows with every step until", step=1,
        last_step=16,
    ),
    alike(
        "graph-leaks", kept(0, 1, 2, 4, 4, 4, 2), kept(0, 1, 2, 4, 8, 8, 8), kept(0, 0, 2, 4, 8, 16, 2), kept(*[0] * 7),
        kept(0, 1, 2, 4, 5, 5, 5), kept(0, 1, 2, 4, 8, 9, 10),
    ),
    unknown("graph-leaks", nothing, "a trend needs 4"),
    faulty("weights-untied", tied("ab", "ac"), "warning", site="head:weight", step=1, line="train.py:2"),
    alike("weights-untied", tied("ab", "ab"), tied("ab", "xy"), tied("ab", "ac", kind="Linear")),
    unknown("weights-untied", nothing, "no digests"),
    faulty(
        "shared-weights", places("0", "3", calls=3), "warning", "The module 0 stands at 3 places of a Sequential",
        site="0", line="train.py:0",
    ),
    faulty("shared-weights", places("0", calls=3, kind="ModuleList"), "warning", "at 3 places of a ModuleList"),
    alike(
        "shared-weights", places("0", calls=1, kind="ModuleList"), places("0", "1", "2", calls=3),
        places("0", "3", calls=1), places("0", "3", calls=3, kind="Net"),  # others were taken out
    ),
)  # fmt: skip

# ---- runs that died ----


def died(message: str, modules: dict[str, str] | None = None, kind: str = "RuntimeError", looks: Sequence[Fact] = (),
         **fields: object) -> Make:  # fmt: skip
    """A run that was ended by an exception."""
    error = {"kind": kind, "message": message, "lines": ["/home/me/train.py:7 in main", "/home/me/net.py:9 in forward"]}
    return lambda: make_program(looks, modules=modules, error=error | fields)


PRODUCT = "mat1 and mat2 shapes cannot be multiplied ({} and {})"
NO_LAYER = PRODUCT.format("16x3", "6x3")
CHANNELS = "Given groups=1, expected input[2, 3, 8, 8] to have 4 channels, but got 3 channels instead"
PICKS = {"in_backward": True, "node": "PickFirstBackward"}
WEIGHT = Parameter(name="fc2:weight", shape=(8, 6), value=0.1, moment=Moment(0))
SHAPE_REPAIR = "print both shapes at this line: the first must have as many columns as the second has rows."
OF_THE_LINE = "read the line that it names."
WRONG_GRADIENT = (
    "Function PickBackward returned an invalid gradient at index 1 - got [6, 16] but expected shape compatible with "
    "[16, 6]"
)

DEATHS = gather(
    faulty(
        "failed", died(PRODUCT.format("64x144", "256x6"), {"fc2": "Linear"}, module="fc2"), "critical",
        "in fc2: a layer that takes 256 features is given 144", PRODUCT.format("64x144", "256x6"), site="fc2",
        line="/home/me/net.py:9", repair="set the layer's in_features to 144, or bring its input into that shape.",
    ),
    *(  # what a hook, a backward or a forward of the program's own multiplies is not said to be a layer's
        faulty("failed", make, "critical", "a matrix of 16 × 3 is multiplied with one of 6 × 3", repair=SHAPE_REPAIR)
        for make in (
            died(NO_LAYER, {"fc2": "Linear"}, in_backward=True, module="fc2"),
            died(NO_LAYER, {"self": "Net"}, module="self"),
            died(NO_LAYER, {"fc2": "Linear"}, looks=[WEIGHT], module="fc2"),  # its own product would be with 6 × 8
        )
    ),
    faulty("failed", died(NO_LAYER, **PICKS), "critical", "a matrix of 16 × 3", ", in the backward of PickFirst: "),
    faulty("failed", died(CHANNELS), "critical", "a convolution that takes 4 channels is given 3"),
    faulty("failed", died(CHANNELS, in_backward=True, node="UpBackward"), "critical", repair=OF_THE_LINE),
    faulty(
        "failed", died(WRONG_GRADIENT, in_backward=True, node="PickBackward"), "critical",
        "for input 1, of shape [16, 6], a gradient of shape [6, 16] is returned",
    ),
    faulty(
        "failed", died("no such file", kind="FileNotFoundError"), "critical",
        message="The run died: FileNotFoundError: no such file",
    ),
    faulty(
        "failed", died("Target 5 is out of bounds.", kind="IndexError", in_backward=True), "critical",
        "in backward: target 5 is not a class of the model",
    ),
    alike("failed", nothing, died("", kind="KeyboardInterrupt")),
)  # fmt: skip

ROWS: list[Row] = [*LOSS_INPUTS, *SENSE, *INPUTS, *SHAPES, *GRAPHS, *DEATHS]
