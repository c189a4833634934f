"""Gradients that vanish or explode from layer to layer, that something multiplies, or that are exactly zero."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from retrograd.core.amounts import list_names
from retrograd.core.history.saved_facts import ZeroGradient
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.chain import name_of
from retrograd.explaining.findings.coverage import Coverage
from retrograd.explaining.findings.detectors.learning_rate import first_large
from retrograd.explaining.findings.detectors.missing_gradients import root_of
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.gradients import LOOSE, ParameterGradients, path_of
from retrograd.explaining.findings.layers import Layer, Layers, median_of_first, take_first
from retrograd.explaining.findings.numbers import divide
from retrograd.explaining.findings.record import CannotTell, Numbers, Record
from retrograd.explaining.findings.training import FloatArray, Training
from retrograd.explaining.findings.zero_gradients import explain_zero, find_zero

LEAST = 4
"""Layers, or calls, that make a depth."""

DECADES = 3.0
"""Decimal places between the ends."""

STEADY = 0.75
"""Share of neighbours that go the same way."""


family = Family(__name__, RATIO=10**DECADES)


class Stack(NamedTuple):
    """Places in the order of the forward, with the norm of the gradient at each.

    Attributes:
        names: of sites.
        norms: ‖∂L/∂output‖₂, all finite and above zero.
        layer: the first of them, nearest to the input.
        what: what they are: ``layers``, ``calls of cell``.
        growth: of the outputs themselves, last over first.
    """

    names: list[str]
    norms: FloatArray
    layer: Layer
    what: str
    growth: float

    @property
    def decades(self) -> float:
        """Log₁₀ of the last over the first: positive where the gradient falls towards the input."""
        return float(np.log10(self.norms[-1] / self.norms[0]))

    @property
    def factor(self) -> float:
        """Factor of the gradient from one to the next, towards the input."""
        return float(10 ** (-self.decades / (len(self.norms) - 1)))

    def is_steady(self) -> bool:
        """Check whether most neighbours go the way of the whole, and no single one makes it."""
        ways = np.diff(np.log10(self.norms)) * np.sign(self.decades)
        largest = np.max(ways, initial=0.0)
        return bool((ways > 0.05).mean() >= STEADY and largest < 0.6 * abs(self.decades))


def list_stacks(record: Record) -> list[Stack]:
    """The depth of the model, and the calls of each layer that is called again and again, at the first steps."""
    layers = record.once(Layers).listed
    until = _first_disturbed(record)
    norms = median_of_first(record.once(Layers).gradients("l2"), until)
    kept = [place for place, layer in enumerate(layers) if layer.weighs and norms[place] > 0]
    stacks = []
    if len(kept) >= LEAST and np.isfinite(norms[kept]).all():
        stacks.append(Stack([str(layers[k].site) for k in kept], norms[kept], layers[kept[0]], "layers", np.inf))
    known, called = set(record.sites), Counter(site.first_call for site in record.sites)
    for layer in layers:
        gradient = layer.site.grad
        is_called_again = gradient in known and called[gradient.first_call] >= LEAST
        stack = _stack_calls(record, layer, until) if is_called_again else None
        stacks += [stack] if stack else []
    return stacks


def _first_disturbed(record: Record) -> int | None:
    """The first step whose gradients are no longer those of the model as it was made."""
    large = first_large(record.once(Training).updates) if record.of_kind("parameter", "update") else None
    steps = [each for each in (record.once(Training).lost, None if large is None else large + 1) if each is not None]
    return min(steps, default=None)


def _stack_calls(record: Record, layer: Layer, until: int | None) -> Stack | None:
    site = str(layer.site.grad)
    calls = record.series(site).calls
    if len(calls) < LEAST:
        return None
    numbered = [replace(layer.site.grad, call=call).numbered for call in calls]
    norms = median_of_first((only for [only] in record.history.matrices(["l2"], numbered)), until)
    if not (np.isfinite(norms) & (norms > 0)).all():
        return None
    ends = [replace(layer.site, call=call).numbered for call in (calls[0], calls[-1])]
    first, last = take_first((only for [only] in record.history.matrices(["rms"], ends)), 1).values[:, 0]
    return Stack(numbered, norms, layer, f"calls of {layer.path}", float(last / first) if first > 0 else 0.0)


def _find_course(
    record: Record, entry: Entry, way: int, describe: Callable[[Stack], str], repair: str
) -> Iterator[Finding]:
    """Find gradients that fall (``way`` is 1), or grow (−1), geometrically from the loss to the input."""
    record.once(Training).need_loss(5)
    stacks = record.once(list_stacks)
    if not stacks:
        raise CannotTell(f"fewer than {LEAST} layers or calls in a row have gradients")
    meant = [stack for stack in stacks if way * stack.decades >= DECADES and stack.is_steady()]
    if not meant or record.once(Training).fell:
        return
    stack = max(meant, key=lambda stack: stack.growth)
    yield entry.finding(
        describe(stack),
        site=stack.names[0],
        span=record,
        line=stack.layer.line,
        evidence=[
            (f"‖∂L/∂output‖ at {stack.names[0]}", float(stack.norms[0])),
            (f"‖∂L/∂output‖ at {stack.names[-1]}", float(stack.norms[-1])),
            ("factor from one to the next", stack.factor),
            ("decimal places between the ends", abs(stack.decades), f"≥ {DECADES:g}"),
        ],
        checked=[
            f"at least {STEADY:.0%} of neighbours go the same way, and no single one makes it",
            "the loss has not fallen by a tenth",
        ],
        repair=repair,
    )


@family.detector("vanishing")
def vanishing(record: Record, entry: Entry) -> Iterator[Finding]:
    """Gradients that fall geometrically on their way to the input."""

    def describe(stack: Stack) -> str:
        return (
            f"The gradient falls to {stack.factor:.2g} of itself at each of {len(stack.norms)} {stack.what}, from "
            f"{stack.norms[-1]:.2g} at {stack.names[-1]} to {stack.norms[0]:.2g} at {stack.names[0]}: the first "
            "learn next to nothing."
        )

    is_flat = any(layer.type == "Sigmoid" for layer in record.once(Layers).listed)  # whose slope is 1/4 at most
    first = "ReLU or a similar function in place of sigmoid" if is_flat else "weights of variance 2/fan_in"
    return _find_course(record, entry, 1, describe, f"Use {first}, a norm after each layer, or a residual path.")


@family.detector("exploding")
def exploding(record: Record, entry: Entry) -> Iterator[Finding]:
    """Gradients that grow geometrically on their way to the input."""

    def describe(stack: Stack) -> str:
        return (
            f"The gradient grows {stack.factor:.2g} times at each of {len(stack.norms)} {stack.what}, from "
            f"{stack.norms[-1]:.2g} at {stack.names[-1]} to {stack.norms[0]:.2g} at {stack.names[0]}."
        )

    return _find_course(record, entry, -1, describe, "")


# ---- gradients that are multiplied ----

APART = 0.1
"""Relative difference of the sums that is allowed; bfloat16 makes 0.03."""

STEADY_FACTOR = 0.02
"""Spread of the factor over steps, in relation."""

PASSING = ("Flatten", "Identity", "Unflatten")
"""Modules that give on what they take."""

LEAST_STEPS = 5
"""Steps at which the sums can be compared."""

LOW = 1e-3
"""Norm of a weight's gradient over what its bias's gradient and its input say."""


@family.detector("hooks-scale")
def hooks_scale(record: Record, entry: Entry) -> Iterator[Finding]:
    """A gradient that is multiplied by a constant between a layer's output and its parameters."""
    layers = record.once(Layers).listed
    if record.processes > 1 or len(record.history.rows.ranks) > 1:
        raise CannotTell("gradients of several ranks were averaged")
    if any(call.name == "grad" or call.details.get("inputs") for call in record.called("grad", "backward")):
        raise CannotTell("a pass for chosen inputs gives outputs a gradient that never reaches the parameters")
    first = next((layer for layer in layers if layer.type not in PASSING), None)
    weighing = [layer for layer in layers if layer.weighs]
    for layer, factors in zip(weighing, compare_sums(record, weighing), strict=True):
        if len(factors) >= LEAST_STEPS and _is_off(factors):
            yield _describe_output(entry, record, layer, factors)
            return
        shares = compare_norms(record, layer) if layer is first else np.empty(0)
        if len(shares) >= 10 and shares.max() < LOW:
            yield _describe_weight(entry, record, layer, shares)
            return


def _describe_output(entry: Entry, record: Record, layer: Layer, factors: FloatArray) -> Finding:
    factor = float(np.median(factors))
    return entry.finding(
        f"Something multiplies the gradient behind {layer.site} by {factor:.3g}: the gradient of "
        f"{layer.path}:bias is "
        f"{factor:.3g} times the sum of the output's gradient, at the median of {len(factors)} steps.",
        case="output",
        site=str(layer.site),
        span=record,
        line=layer.line,
        evidence=[("sum of the bias's gradient over the output's", factor, f"off 1 by {APART:g}")],
    )


def _describe_weight(entry: Entry, record: Record, layer: Layer, shares: FloatArray) -> Finding:
    return entry.finding(
        f"Something makes the gradient of {layer.path}:weight small: it is {np.median(shares):.2g} of what the "
        "gradient of the bias and the layer's input say, at all steps.",
        case="weight",
        site=f"{layer.path}:weight",
        span=record,
        line=layer.line,
        evidence=[("norm over ‖∂L/∂b‖·rms(x)·√fan_in", float(np.median(shares)), f"< {LOW:g}")],
    )


def compare_sums(record: Record, layers: Sequence[Layer]) -> Iterator[FloatArray]:
    """Of each layer the sum of its bias's gradient over that of its output's, at steps where that does not cancel."""
    pairs = [(f"{layer.path}:bias.grad", str(layer.site.grad)) for layer in layers]
    are_there = [all(name in record.history for name in pair) for pair in pairs]
    found = record.numbers(itertools.compress(pairs, are_there), ("mean", "count", "l1", "nonfinite"))
    for is_there in are_there:
        yield _compare_sums(*next(found)) if is_there else np.empty(0)


def _compare_sums(bias: Numbers, output: Numbers) -> FloatArray:
    if not np.array_equal(bias.steps, output.steps):
        return np.empty(0)
    below, above = bias.of, output.of
    total = above["mean"] * above["count"]
    is_sure = np.abs(total) > 1e-2 * above["l1"]
    kept = is_sure & (above["nonfinite"] == 0) & (below["nonfinite"] == 0)
    factors = divide(below["mean"] * below["count"], total)[kept]
    return np.asarray(factors[np.isfinite(factors)])


def compare_norms(record: Record, layer: Layer) -> FloatArray:
    """At each step the norm of the weight's gradient over ‖∂L/∂b‖ · rms(x) · √fan_in, x being the model's input."""
    names = [f"{layer.path}:weight.grad", f"{layer.path}:bias.grad"]
    if any(name not in record.history for name in names) or not len(_input_rms(record, 1)):
        return np.empty(0)
    [(weight, bias)] = record.numbers([names], ("l2", "count"))
    if not len(weight.steps) or len(weight.steps) != len(bias.steps):
        return np.empty(0)
    inputs = _input_rms(record, len(weight.steps))
    said = bias.of["l2"] * inputs * np.sqrt(weight.of["count"] / np.maximum(bias.of["count"], 1))
    shares = divide(weight.of["l2"], said)
    return np.asarray(shares[np.isfinite(shares) & (weight.of["l2"] > 0)])


def _input_rms(record: Record, steps: int) -> FloatArray:
    """Root mean square of the model's only input, at so many steps; nothing where it has several."""
    floats = [listed for listed in record.inputs.values() if listed and "float" in listed[0].dtype]
    known = [each.value**2 + each.std**2 for each in floats[0]] if len(floats) == 1 else []
    return np.full(steps, np.sqrt(np.median(known))) if known and np.isfinite(known).all() else np.empty(0)


def _is_off(factors: FloatArray) -> bool:
    middle = float(np.median(factors))
    low, high = np.quantile(factors, [0.1, 0.9])
    return abs(middle - 1) > APART and bool(high - low <= STEADY_FACTOR * abs(middle))


# ---- zero in all steps ----

FEWEST = 4
"""Recorded steps with a gradient; our own choice."""

_SATISFIED = ("dead units", "not picked")
"""Why the gradient of a loss is zero that has reached zero, as a hinge does."""

_ROUNDED = ("zero factor", "saturated", "zero")
"""Why a gradient may seem to become zero that is too small for half precision."""


@family.detector("zero-gradient")
def zero_gradient(record: Record, entry: Entry) -> Iterator[Finding]:
    """All that an optimizer holds, or all of a model, gets nothing but zeros."""
    gradients = record.once(ParameterGradients)
    record.need_optimizers()
    names = [name for name in sorted(gradients.held) if gradients.steps.get(name, (0, 0))[0] >= FEWEST]
    if not names:
        raise CannotTell(f"no parameter's gradient was recorded in {FEWEST} steps")
    zero = {name for name in names if not gradients.steps[name][1] and not name.startswith(LOOSE)}
    for group in _list_groups(record, names):
        if set(group) <= zero:
            fact = find_zero(record, group)
            if fact is None or not (_is_satisfied(record, fact) or _is_rounded(record, fact)):
                yield _describe(entry, record, group, fact, is_all=set(names) <= zero)
            return


def _list_groups(record: Record, names: Sequence[str]) -> Iterator[list[str]]:
    """All parameters; those of each optimizer; those of each model."""
    yield list(names)
    for made in record.optimizers.values():
        if (held := [name for name in names if name in made.parameters]) and not made.unknown:
            yield held
    for root in sorted(record.models):
        if mine := [name for name in names if root_of(record, name) == root]:
            yield mine


def _is_satisfied(record: Record, fact: ZeroGradient) -> bool:
    """Check whether the loss is nothing but zero because there is nothing left to gain."""
    return fact.why in _SATISFIED and len(record.loss.values) > 0 and not record.loss.values.any()


def _is_rounded(record: Record, fact: ZeroGradient) -> bool:
    """Check whether it may be too small for half precision, which is no fault of that operation."""
    if fact.why not in _ROUNDED:
        return False
    listed = [each for chain in record.chains for each in chain.listed]
    mine = [each for each in listed if each.line == fact.line and each.name == fact.operation]
    return any(text.startswith("float16") for each in mine or listed for text in (*each.takes, *each.makes))


def _describe(
    entry: Entry, record: Record, names: Sequence[str], fact: ZeroGradient | None, *, is_all: bool
) -> Finding:
    gradients = record.once(ParameterGradients)
    steps = max(gradients.steps[name][0] for name in names)
    whose = "of all parameters" if is_all else f"of {list_names(list(names), 2)}"
    so = ", so nothing is trained" if is_all else ", so they are not trained"
    case, reason = explain_zero(fact)
    is_known = record.once(Coverage).is_whole or not any(map(gradients.has_changed, names))
    return entry.finding(
        f"The gradients {whose} are exactly zero in all of {steps} recorded steps"
        f"{so if is_known else '; they have changed, and what other steps gave them is not known'}"
        f"{f': {reason}' if reason else ''}",
        case=case,
        severity=None if is_known else "note",
        site=path_of(names[0] if fact is None else fact.parameters[0]),
        span=record,
        line=_find_line(record, fact) if fact is not None else record.line_of(path_of(names[0])),
        evidence=[
            ("steps in which a gradient was not zero", 0, f"of {steps}"),
            ("parameters", len(names)),
            *([("node that was given a gradient, and gave zeros", fact.node)] if fact is not None else []),
        ],
    )


def _find_line(record: Record, fact: ZeroGradient) -> str:
    """Where it was called; of a difference of equals, where the second of them was made."""
    if fact.why == "cancels":
        for chain in record.chains:
            for number, each in enumerate(chain.listed):
                maker = chain.maker(number, 1)
                if each.line == fact.line and name_of(each) in ("sub", "div") and maker >= 0:
                    return chain.listed[maker].line or fact.line
    return fact.line
