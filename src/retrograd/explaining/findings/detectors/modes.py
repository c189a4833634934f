"""Training mode where the model is evaluated, and eval mode where it is trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from retrograd.core.amounts import count_of
from retrograd.core.history.facts import ActiveDropout, Call
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import Training
from retrograd.explaining.findings.updates import Update, is_within

family = Family(__name__)

ATTENTION = "scaled_dot_product_attention"
"""Function that drops without asking whether the model trains."""

SHARE = 0.1
"""Share of the updates whose forwards must have run in eval mode, and at least three; our own choice."""

SELDOM = 1 / 3
"""An evaluation comes before at most so many of the updates; what comes more often is part of training."""

SAMPLED = 5
"""So many forwards from one line may be a sample of predictions (Monte-Carlo dropout)."""

SAME = 3
"""Inputs without grad that were the same and show a fixed set; our own choice."""


class ModalLayers(NamedTuple):
    """The layers of a model whose mode matters: how many normalise by the batch, and how many drop."""

    batch_norms: int
    dropouts: int

    def __str__(self) -> str:
        counts = ((self.batch_norms, "batch norm"), (self.dropouts, "dropout"))
        return " and ".join(count_of(count, kind) for count, kind in counts if count)


def count_modal(record: Record, model: str) -> ModalLayers:
    """Layers of a model whose mode matters.

    Raises:
        CannotTell: there is none.
    """
    paths = [path for path in record.modules if model in ("", "self") or is_within(f"{path}:", model)]
    types = {path: record.type_of(path) for path in paths}
    norms = sum("BatchNorm" in kind for kind in types.values())
    drops = {path for path, kind in types.items() if "Dropout" in kind} - _never_dropping(record)
    if not norms and not drops:
        raise CannotTell("no layer behaves otherwise in eval mode: there is no batch norm and no dropout")
    return ModalLayers(norms, len(drops))


def _never_dropping(record: Record) -> set[str]:
    """Dropouts with p = 0, by what they show of themselves."""
    settings = {path: str(record.modules[path].get("settings", "")) for path in record.modules}
    return {path for path, text in settings.items() if re.search(r"\bp=0(\.0*)?(,|$)", text)}


def list_trained(record: Record) -> dict[str, list[Update]]:
    """The models that are called by the program and updated, each with the updates of its parameters.

    Raises:
        CannotTell: there is none.
    """
    found: dict[str, list[Update]] = {}
    models = {call.about for call in record.called("forward")}
    for update in record.updates:
        made = record.optimizers.get(update.optimizer)
        names = made.parameters if made else []
        for model in models:
            if model in ("", "self") or not made or any(is_within(name, model) for name in names):
                found.setdefault(model, []).append(update)
    if not found:
        raise CannotTell("no update of a model that is called was recorded")
    return found


@family.detector("eval-mode-in-training")
def eval_mode_in_training(record: Record, entry: Entry) -> Iterator[Finding]:
    """Training goes on in eval mode."""
    for model, updates in list_trained(record).items():
        layers = count_modal(record, model)
        used = [(update, call) for update in updates if (call := _find_forward(update, model)) is not None]
        wrong = [(update, call) for update, call in used if call.details.get("training") is False]
        if len(wrong) >= max(min(3, len(used)), SHARE * len(used)) > 0:
            yield _describe_eval_mode_in_training(
                entry, model, wrong, len(used), layers, _find_evaluation(record, model)
            )


def _describe_eval_mode_in_training(
    entry: Entry, model: str, wrong: list[tuple[Update, Call]], among: int, layers: ModalLayers, evaluation: Call | None
) -> Finding:
    update, call = wrong[0]
    always = len(wrong) == among
    since = "all the time" if always else f"from step {update.step} on, after an evaluation"
    return entry.finding(
        f"The model is trained in eval mode {since}: {len(wrong)} of {among} updates, with {layers} that do not train",
        site="" if model in ("", "self") else model,
        step=update.step,
        last_step=wrong[-1][0].step,
        line=call.line,
        evidence=[
            ("updates whose forward ran in eval mode", len(wrong), f"≥ 3 and {SHARE:.0%} of {among}"),
            *([("line of the evaluation", evaluation.line)] if evaluation and not always else []),
        ],
        checked=[f"the model that is called is in eval mode, and it has {layers}"],
    )


def _find_forward(update: Update, model: str) -> Call | None:
    """The last forward with grad of a model before an update, which the update is made of."""
    calls = update.named("forward")
    return next((call for call in reversed(calls) if call.about == model and call.details.get("grad")), None)


def _find_evaluation(record: Record, model: str) -> Call | None:
    """The first evaluation in eval mode."""
    return next(
        (
            call
            for call in record.calls
            if call.name == "forward" and call.about == model and not call.details.get("training", True)
        ),
        None,
    )


@family.detector("train-mode-in-evaluation")
def train_mode_in_evaluation(record: Record, entry: Entry) -> Iterator[Finding]:
    """An evaluation runs in training mode."""
    if record.once(Training).is_contest:
        raise CannotTell("several models are trained against each other, and one may sample as it trains")
    for model, updates in list_trained(record).items():
        layers = count_modal(record, model)
        calls = [call for call in record.called("forward") if call.about == model]
        if any(not call.details.get("training", True) for call in calls):
            continue
        wrong, periods = find_evaluations(record, model, updates)
        is_seldom = periods <= max(1, SELDOM * len(updates))
        if not wrong or _is_sampled(wrong, periods, layers):
            continue
        if is_seldom or is_fixed_set(record, model):
            often = "most updates have no such forward before them"
            checked = often if is_seldom else "what these forwards are given is never trained with"
            yield _describe_train_mode_in_evaluation(entry, model, wrong, periods, layers, checked)


def _describe_train_mode_in_evaluation(
    entry: Entry, model: str, wrong: list[Call], periods: int, layers: ModalLayers, checked: str
) -> Finding:
    return entry.finding(
        f"The model is evaluated in training mode, with {layers} that behave as in training: "
        f"{count_of(periods, 'evaluation')}, none of them in eval mode",
        site="" if model in ("", "self") else model,
        span=wrong,
        line=wrong[0].line,
        evidence=[
            ("forwards without backward in training mode", len(wrong), "> 0"),
            ("forwards in eval mode", 0, "none"),
        ],
        checked=[f"the model has {layers}", checked],
    )


@family.detector("dropout-in-evaluation")
def dropout_in_evaluation(record: Record, entry: Entry) -> Iterator[Finding]:
    """Dropout that is called as a function works in eval mode."""
    if not any(not call.details.get("grad") for call in record.called("forward")):
        raise CannotTell("no forward without grad was recorded")
    by_line = {fact.line: fact for fact in reversed(record.of(ActiveDropout))}
    for line, fact in reversed(by_line.items()):
        written = "training=self.training" if fact.operation != ATTENTION else "dropout_p=p if self.training else 0.0"
        yield entry.finding(
            f"`{fact.operation}` drops {fact.value:.0%} in eval mode, too, so evaluations are random and worse than "
            f"the model: it is not told `{written}`",
            site=fact.name,
            step=fact.step,
            line=line,
            evidence=[("share that is dropped in eval mode", fact.value, "> 0")],
            repair=f"pass `{written}`, or use a module, which model.eval() switches off.",
        )


def find_evaluations(record: Record, model: str, updates: list[Update]) -> tuple[list[Call], int]:
    """Forwards of a model that no backward pass follows, and in how many stretches between updates they are.

    One with grad counts where the program calls the model from other lines in most stretches.
    """
    ends = [id(update.call) for update in updates]
    stretches: list[list[Call]] = [[]]
    for call in record.calls:
        if id(call) in ends:
            stretches.append([])
        elif call.name in ("forward", "backward", "grad"):
            stretches[-1].append(call)
    usual = _usual_lines(stretches[: len(updates)], model)
    found = [_pick_evaluations(each, model, usual) for each in stretches]
    return [call for each in found for call in each], sum(bool(each) for each in found)


def _usual_lines(stretches: list[list[Call]], model: str) -> set[str]:
    """Lines of forwards with grad that most stretches have."""
    seen: dict[str, int] = {}
    for each in stretches:
        for line in {call.line for call in each if _is_forward(call, model) and call.details.get("grad")}:
            seen[line] = seen.get(line, 0) + 1
    return {line for line, count in seen.items() if count > SELDOM * len(stretches)}


def _is_forward(call: Call, model: str) -> bool:
    return call.name == "forward" and call.about == model


def _pick_evaluations(stretch: list[Call], model: str, usual: set[str]) -> list[Call]:
    found, has_pass = [], False
    for call in reversed(stretch):
        has_pass |= call.name in ("backward", "grad")
        if _is_forward(call, model):
            is_unused = not has_pass and call.line not in usual
            if is_unused or not call.details.get("grad"):
                found.append(call)
    return found[::-1]


def _is_sampled(calls: list[Call], periods: int, layers: ModalLayers) -> bool:
    """Check whether one model with dropout alone is called many times from one line, once: a sample of predictions."""
    return periods == 1 and not layers.batch_norms and len(calls) >= SAMPLED and len({call.line for call in calls}) == 1


def is_fixed_set(record: Record, model: str) -> bool:
    """Check whether what a model is given without grad is always the same, and never what it is trained with."""
    given: dict[str, set[str]] = {"train": set(), "no_grad": set()}
    count = 0
    for name, listed in record.inputs.items():
        if is_within(name, model or "self"):
            for each in listed:
                given.setdefault(each.moment.phase, set()).add(f"{name} {each.digest}")
                count += each.moment.phase == "no_grad"
    names = {each.partition(" ")[0] for each in given["no_grad"]}
    return (
        count >= SAME * len(names) > 0 and len(given["no_grad"]) == len(names) and not given["no_grad"] & given["train"]
    )
