"""Programs as the calls that they make, and chains of operations, written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from retrograd.core.history.fact import Fact
from retrograd.core.history.facts import Call, Operations, OptimizerMade
from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, Moment
from retrograd.explaining.findings.record import Record

LINES = {
    "zero_grad": 10, "forward": 11, "backward": 12, "clip_grad_norm_": 13, "step": 14, "scheduler.step": 15,
    "evaluate": 20, "scaler.unscale_": 16, "scaler.update": 17, "model.zero_grad": 18, "second backward": 19,
    "scaler.step": 21,
}  # fmt: skip


def make_calls(steps: Iterable[Sequence[str]], **details: Mapping[str, Any]) -> list[Call]:
    """The calls of each step by name; ``evaluate`` is a forward without grad; ``details`` by name, dots as ``__``."""
    given = {name.replace("__", "."): dict(each) for name, each in details.items()}
    return [make_call(step, name, given.get(name, {})) for step, names in enumerate(steps) for name in names]


def make_call(step: int, name: str, details: Mapping[str, Any]) -> Call:
    """A call, from a line of its own."""
    is_of_optimizer = name == "zero_grad" and details.get("about", "SGD").startswith(("SGD", "Adam"))
    usual: dict[str, dict[str, Any]] = {
        "zero_grad": {"optimizer": "SGD"} if is_of_optimizer else {},
        "forward": {"training": True, "grad": True},
        "evaluate": {"training": True, "grad": False},
        "backward": {"retain_graph": False, "create_graph": False, "held": "none"},
        "step": {"lr": [0.1]},
        "clip_grad_norm_": {"max_norm": 1.0, "parameters": 2},
    }
    own = {key: each for key, each in details.items() if key not in ("value", "about")}
    plain = {"evaluate": "forward", "model.zero_grad": "zero_grad", "second backward": "backward"}.get(name, name)
    about = {"zero_grad": "SGD", "step": "SGD", "scheduler.step": "StepLR"}
    return Call(
        name=plain,
        line=f"train.py:{LINES[name]}",
        about=str(details.get("about", "self" if name == "model.zero_grad" else about.get(plain, "self"))),
        details={**usual.get(plain if name != "evaluate" else name, {}), **own},
        value=float(details.get("value", float("nan"))),
        moment=Moment(step),
    )


def make_optimizer(name: str = "SGD", names: Sequence[str] = ("0:weight",), unknown: int = 0, **group: Any) -> Fact:
    """An optimizer of one group."""
    return OptimizerMade(
        name=name, type=name.partition("_")[0], line="train.py:5",
        groups=({"lr": 0.1, **group, "parameters": list(names), "unknown": unknown},),
        moment=Moment(0),
    )  # fmt: skip


_OF_WEIGHTS = ("linear", "addmm", "conv1d", "conv2d", "embedding", "lstm", "gru", "multi_head_attention_forward")


def make_chain(*listed: Sequence[Any], outputs: Sequence[int], loss: int | None = None, step: int = 0) -> Operations:
    """Operations as (name, operands, taken shapes, made shape, arguments, module, cuts); the last one is the loss."""
    written = []
    for number, each in enumerate(listed):
        name, operands, takes, makes, *rest = each
        arguments, module, cuts = (*rest, *("", "", False)[len(rest) :])
        taken = tuple(one if isinstance(one, str) else f"float32{list(one)}" for one in takes)
        line = f"train.py:{30 + number}"
        made = (f"float32{list(makes)}",)
        is_grown = name in _OF_WEIGHTS or any(0 <= operand < number and written[operand][3] for operand in operands)
        node = f"{name}Backward0" if is_grown and not cuts else ""
        written.append((name, line, module, node, tuple(operands), taken, made, arguments, cuts, ""))
    return Operations.pack(
        written,
        name="self",
        outputs=tuple(outputs),
        loss=len(listed) - 1 if loss is None else loss,
        moment=Moment(step),
    )


def make_program(
    facts: Iterable[Fact],
    losses: Sequence[float] = (),
    modules: Mapping[str, str] | None = None,
    error: Mapping[str, Any] | None = None,
) -> Record:
    """A record of facts and losses alone."""
    history = History()
    listed = {"self": "Sequential", "0": "Linear"} if modules is None else modules
    history.describe(
        model=[{"path": path, "type": kind, "line": f"train.py:{k}"} for k, (path, kind) in enumerate(listed.items())]
    )
    for fact in facts:
        history.add_event(Event(fact.moment, fact.kind, fact.name, fact.value, fact.text))
    for step, value in enumerate(losses):
        history.add_event(Event(Moment(step, 0, 0), "loss", value=value))
    return Record(history, error=error)
