"""What copies of the model and its Functions answered, and Functions that are differentiated twice."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.core.history.facts import LostPart
from retrograd.core.history.probe_facts import FunctionCheck, Probe
from retrograd.core.runs.findings import Finding, shorten_line
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import CannotTell, Record

family = Family(__name__)

_ALONG_BATCH = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward",
                          "scaled_dot_product_attention"})  # fmt: skip
"""Layers that work along a dimension of theirs, and may have been given the batch in its place."""

_MOVES = frozenset({"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"})
_SOFTMAXES = frozenset({"softmax", "log_softmax"})


@family.detector("samples-mix")
def mixed_samples(record: Record, entry: Entry) -> Iterator[Finding]:
    """A layer works along the batch."""
    for fact in _need(record, "samples"):
        if fact.value == 1 and not fact.only_batch_norm and not fact.fits_other and _is_mistaken(fact):
            yield entry.finding(
                f"What the model returns for one sample depends on the others of its batch: {fact.reason}",
                site=fact.module,
                step=fact.step,
                line=_line_of(record, fact),
                evidence=[("operation", fact.operation), ("its result", str(list(fact.shape))),
                          ("called with", fact.called_with)],
            )  # fmt: skip
            return


def _is_mistaken(fact: Probe) -> bool:
    """Check that it is a layer with two dimensions to choose from, and that it works along the first.

    What takes sums over a batch (normalising by hand, pooling of bags, pairs of samples) does so on purpose.
    """
    if fact.operation in _ALONG_BATCH:
        return len(fact.shape) > 2 and fact.shape[1] > 1 and fact.shape[0] > 1
    return fact.operation in _MOVES or (fact.operation in _SOFTMAXES and len(fact.shape) > 1)


@family.detector("future-seen")
def seen_future(record: Record, entry: Entry) -> Iterator[Finding]:
    """A model that is to predict the next token is given it."""
    for fact in _need(record, "positions"):
        is_unused = fact.has_mask and "is not used" in fact.reason
        if fact.value == 1 and not fact.only_batch_norm and (fact.next_token or is_unused):
            said = [("targets", "the input, one position on")] if fact.next_token else []
            said += [("a causal mask", "is computed")] if fact.has_mask else []
            yield entry.finding(
                f"What the model returns for a position depends on later ones: {fact.reason}",
                severity="critical" if fact.next_token else "warning",
                site=fact.module,
                step=fact.step,
                line=_line_of(record, fact),
                evidence=[*said, ("called with", fact.called_with)],
            )
            return


def _need(record: Record, question: str) -> list[Probe]:
    """The answers of models.

    Raises:
        CannotTell: nothing was asked.
    """
    asked = [each for each in record.of(Probe) if each.question == question]
    if not asked:
        raise CannotTell("no copy of the model was asked, as `retrograd explain train.py` does")
    answers = [each for each in asked if not each.why_not]
    if not answers:
        raise CannotTell(asked[0].why_not[:1].lower() + asked[0].why_not[1:].removesuffix("."))
    return answers


def _line_of(record: Record, fact: Probe) -> str:
    """Where a module was made that is for this operation alone, else who called it."""
    kind = record.type_of(fact.module).lower()
    is_its_own = kind in (fact.operation.replace("_", ""), fact.operation.partition("_")[0], "multiheadattention")
    return (record.line_of(fact.module) if is_its_own else "") or fact.line


@family.detector("own-backward")
def wrong_backward(record: Record, entry: Entry) -> Iterator[Finding]:
    """A Function whose backward is not that of its forward."""
    checked = record.of(FunctionCheck)
    if not checked:
        raise CannotTell("no Function was held against differences, as `retrograd explain train.py` does")
    if all(each.verdict == "not checked" for each in checked):
        raise CannotTell(f"{checked[0].name} was not checked: {checked[0].why_not}")
    for fact in checked:
        is_scaled = fact.verdict == "factor" and abs(abs(fact.value) - 1) > _CLOSE
        if is_scaled:
            case, how = "", f"{fact.value:.4g} times that of its forward"
        elif fact.verdict == "constant":
            case, how = "constant", "the same, whatever gradient of its output backward is given"
        elif fact.is_linear and fact.verdict == "other":
            case, how = "", "not that of its forward, which is linear"
        else:
            continue
        yield entry.finding(
            f"The gradient that {fact.name} ({shorten_line(fact.called)}) gives for `{fact.argument}` is {how}",
            case=case,
            step=fact.step,
            line=fact.line,
            evidence=[("gradient over finite differences", fact.value, "1")] if is_scaled else
            [("finite differences in float64", "differ by no one factor")],
        )  # fmt: skip


_CLOSE = 1e-2


# ---- second derivatives ----


@family.detector("second-derivative")
def lost_second_derivative(record: Record, entry: Entry) -> Iterator[Finding]:
    """A second derivative lacks a part, in silence."""
    for fact in record.of(LostPart):
        called = f" ({shorten_line(fact.called)})" if fact.called else ""
        yield entry.finding(
            f"{fact.name}{called} is differentiated twice, and saves what `{fact.operation}` "
            f"({shorten_line(fact.line)}) computes in its forward: to autograd that is a constant, and the second "
            "derivative lacks what goes through it",
            step=fact.step,
            line=fact.line,
            evidence=[("saved and not returned", f"`{fact.operation}`")],
        )
