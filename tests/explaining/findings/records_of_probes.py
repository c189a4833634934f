"""Records of what copies of a model and of Functions answered."""

from __future__ import annotations

from typing import Any

from retrograd.core.history.probe_facts import FunctionCheck, Probe
from retrograd.core.history.sink import Moment
from tests.explaining.findings.programs import make_program
from tests.explaining.findings.records import Make, Row, alike, faulty, gather, unknown

AT = Moment(2)


def answer(question: str, **fields: Any) -> Make:
    """A program whose model was asked."""
    given = {"value": 1.0, "operation": "softmax", "module": "1", "line": "train.py:31", "shape": (64, 6)} | fields
    return lambda: make_program([Probe(name="self", question=question, moment=AT, **given)], modules=MODULES)


MODULES = {"self": "Net", "1": "Softmax", "2": "LSTM", "3": "Attention"}


def samples(**fields: Any) -> Make:
    return answer("samples", **fields)


def positions(**fields: Any) -> Make:
    return answer("positions", **{"next_token": True, "module": "3", "operation": "bmm", "reason": "because"} | fields)


def check(verdict: str, value: float = float("nan"), **fields: Any) -> Make:
    """A program with one Function."""
    fact = FunctionCheck(
        name="Scale", verdict=verdict, value=value, argument="x", line="train.py:14", called="train.py:23", moment=AT,
        **fields,
    )  # fmt: skip
    return lambda: make_program([fact])


LSTM = {"operation": "lstm", "module": "2"}

ROWS: list[Row] = gather(
    faulty("samples-mix", samples(), "critical", "depends on the others", line="train.py:1", site="1", step=2),
    faulty("samples-mix", samples(module="3"), "critical", line="train.py:31"),
    faulty("samples-mix", samples(**LSTM, shape=(100, 8, 64)), "critical", line="train.py:2"),
    faulty("samples-mix", samples(operation="reshape", module="self"), "critical", line="train.py:31"),
    alike(
        "samples-mix",
        samples(value=0.0),
        samples(only_batch_norm=True),
        samples(fits_other=True),
        samples(shape=(64,)),  # a weight for each sample
        samples(**LSTM, shape=(50, 64)),  # one sequence
        samples(**LSTM, shape=(50, 1, 64)),
        samples(operation="mean"),
        samples(operation="matmul", shape=(64, 64)),  # pairs of samples
        samples(operation=""),
    ),
    unknown("samples-mix", samples(value=float("nan"), why_not="It is compiled."), "it is compiled"),
    unknown("samples-mix", lambda: make_program([]), "no copy of the model was asked"),
    faulty("future-seen", positions(), "critical", "depends on later ones: because", line="train.py:31", site="3"),
    faulty(
        "future-seen", positions(next_token=False, has_mask=True, reason="the result of `where` is not used"), "warning"
    ),
    alike(
        "future-seen",
        positions(value=0.0),
        positions(next_token=False),
        positions(next_token=False, has_mask=True),
        positions(only_batch_norm=True),
    ),
    unknown("future-seen", positions(value=float("nan"), why_not="The model raises"), "the model raises"),
    unknown("future-seen", samples(), "no copy of the model was asked"),
    faulty(
        "own-backward", check("factor", 1 / 3), "critical", "Scale (train.py:23) gives for `x` is 0.3333 times",
        line="train.py:14",
    ),
    faulty("own-backward", check("factor", -2.0, is_linear=True), "critical", "-2 times"),
    faulty("own-backward", check("other", is_linear=True), "critical", "not that of its forward, which is linear"),
    faulty("own-backward", check("constant"), "critical", "the same, whatever gradient"),
    alike(
        "own-backward", check("right"), check("straight-through"), check("identity"), check("other"),
        check("factor", -1.0), check("factor", 1.001),
    ),
    unknown("own-backward", check("not checked", why_not="it draws random numbers"), "it draws random numbers"),
    unknown("own-backward", lambda: make_program([]), "no Function was held against"),
)  # fmt: skip
