"""Gradients that vanish or explode from layer to layer, or that something multiplies on their way."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np

from retrograd.core.runs.findings import Evidence, Finding, Severity
from retrograd.explaining.findings.detector import Detector, Words
from retrograd.explaining.findings.detectors.learning_rate import first_large
from retrograd.explaining.findings.layers import Layer, Layers, median_of_first, take_first
from retrograd.explaining.findings.numbers import divide
from retrograd.explaining.findings.record import CannotTell, Numbers, Record
from retrograd.explaining.findings.training import FloatArray, Training

LEAST = 4
"""Layers, or calls, that make a depth."""

DECADES = 3.0
"""Decimal places between the ends."""

STEADY = 0.75
"""Share of neighbours that go the same way."""


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
        """Tell whether most neighbours go the way of the whole, and no single one makes it."""
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


class _DepthDetector(Detector):
    """Finds gradients that fall, or grow, geometrically over the depth of a model.

    Attributes:
        severity: how bad that is.
        way: 1 for gradients that fall towards the input, −1 for those that grow.
        refute: what would show that it is wrong.
    """

    severity: ClassVar[Severity]
    way: ClassVar[int]
    refute: ClassVar[str]

    def check(self, record: Record) -> Iterator[Finding]:
        """Follow the gradient from the loss to the input."""
        record.once(Training).need_loss(5)
        stacks = record.once(list_stacks)
        if not stacks:
            raise CannotTell(f"fewer than {LEAST} layers or calls in a row have gradients")
        meant = [stack for stack in stacks if self.way * stack.decades >= DECADES and stack.is_steady()]
        if meant and not record.once(Training).fell:
            yield self._tell(record, max(meant, key=lambda stack: stack.growth))

    @abstractmethod
    def describe(self, stack: Stack) -> str:
        """Say in a sentence how the gradient falls, or grows."""

    def advise(self, record: Record) -> str:
        """Say what to do; empty for what its words say."""
        return ""

    def _tell(self, record: Record, stack: Stack) -> Finding:
        return self.find(
            self.severity,
            self.describe(stack),
            site=stack.names[0],
            span=record,
            line=stack.layer.line,
            evidence=[
                Evidence(f"‖∂L/∂output‖ at {stack.names[0]}", float(stack.norms[0])),
                Evidence(f"‖∂L/∂output‖ at {stack.names[-1]}", float(stack.norms[-1])),
                Evidence("factor from one to the next", stack.factor),
                Evidence("decimal places between the ends", abs(stack.decades), f"≥ {DECADES:g}"),
            ],
            precondition=[
                f"at least {STEADY:.0%} of neighbours go the same way, and no single one makes it",
                "the loss has not fallen by a tenth",
            ],
            refute=self.refute,
            repair=self.advise(record),
        )


class Vanishing(_DepthDetector):
    """Gradients that fall geometrically on their way to the input."""

    slug = "vanishing"
    severity = "warning"
    way = 1
    refute = "the loss falls when the last layers alone are trained"
    words = Words(
        says="The gradient falls by a like factor at each layer, or each call, and next to nothing is left at the "
        "first.",
        example="The gradient falls to 0.13 of itself at each of 10 layers, from 0.12 at 18:output to 1.7e-09 at "
        "0:output: the first layers learn next to nothing.",
        threshold=f"Over at least {LEAST} layers that have weights the norm of the outputs' gradients falls by "
        f"{10**DECADES:g} in all, at three of four neighbours, and the loss has not fallen by a tenth.",
        source="AutoTrainer: a ratio of first to last below 1e-3; the rest is measured by us.",
        guard="A loss that falls, residual paths and zero-initialised branches (no steady fall), and frozen layers.",
        repair="Use ReLU or a kin in place of sigmoid, else weights of variance 2/fan_in; or a norm after each layer, "
        "or a residual path.",
    )
    explains = ("loss-flat", "not-updated", "underflow")

    def describe(self, stack: Stack) -> str:
        """See :class:`_DepthDetector`."""
        return (
            f"The gradient falls to {stack.factor:.2g} of itself at each of {len(stack.norms)} {stack.what}, from "
            f"{stack.norms[-1]:.2g} at {stack.names[-1]} to {stack.norms[0]:.2g} at {stack.names[0]}: the first "
            "learn next to nothing."
        )

    def advise(self, record: Record) -> str:
        """See :class:`_DepthDetector`: weights of no size help where the slope is 1/4 at most."""
        is_flat = any(layer.type == "Sigmoid" for layer in record.once(Layers).listed)
        first = "ReLU or a kin in place of sigmoid" if is_flat else "weights of variance 2/fan_in"
        return f"Use {first}, a norm after each layer, or a residual path."


class Exploding(_DepthDetector):
    """Gradients that grow geometrically on their way to the input."""

    slug = "exploding"
    severity = "critical"
    way = -1
    refute = "the norms at these sites do not rise towards the input at other steps"
    words = Words(
        says="The gradient grows by a like factor at each layer, or each call, on its way to the input.",
        example="The gradient grows 5.9 times at each of 7 layers, from 0.15 at 12:output to 6,400 at 0:output.",
        threshold=f"Over at least {LEAST} layers that have weights the norm of the outputs' gradients grows by "
        f"{10**DECADES:g} in all, at three of four neighbours, and the loss has not fallen by a tenth.",
        source="AutoTrainer: a ratio above 70; raised to 1000 by us.",
        guard="A loss that falls; a single layer that makes the growth; sums that are no chain.",
        repair="Use weights of variance 2/fan_in, or a norm after each layer.",
    )
    explains = (
        "learning-rate-too-high", "diverged", "loss-spike", "loss-flat", "loss-noisy", "nan-forward",
        "nan-backward", "nan-update", "overflow-headroom",
    )  # fmt: skip

    def describe(self, stack: Stack) -> str:
        """See :class:`_DepthDetector`."""
        return (
            f"The gradient grows {stack.factor:.2g} times at each of {len(stack.norms)} {stack.what}, from "
            f"{stack.norms[-1]:.2g} at {stack.names[-1]} to {stack.norms[0]:.2g} at {stack.names[0]}."
        )


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


class HooksScale(Detector):
    """A gradient that is multiplied by a constant between a layer's output and its parameters."""

    slug = "hooks-scale"
    words = Words(
        says="A layer's parameters get a constant times the gradient that its output's gradient says.",
        example="Something multiplies the gradient behind b:output by 50: the gradient of b:bias is 50 times the sum "
        "of the output's gradient at each of 58 steps.",
        threshold="The sum of a bias's gradient over the sum of its output's gradient is the same to 2 % at no fewer "
        f"than {LEAST_STEPS} steps, and off 1 by 10 %; or a weight's gradient is below {LOW:g} of "
        "‖∂L/∂b‖·rms(x)·√fan_in at all of 10 steps.",
        source="The derivative of a layer by its bias is 1; over 34 healthy runs the factor is 1.000, in bfloat16 "
        "within 3 %.",
        guard="Sums that cancel are left out, and so are several ranks, whose gradients are averaged, and programs "
        "that call torch.autograd.grad, which gives outputs a gradient that never reaches parameters.",
        repair="Look at register_hook and at the backward of your own Functions behind this layer; leave the "
        "gradient as it is.",
    )
    explains = (
        "vanishing",
        "exploding",
        "loss-flat",
        "loss-noisy",
        "not-updated",
        "learning-rate-too-high",
        "diverged",
        "missing-gradient",
    )

    def check(self, record: Record) -> Iterator[Finding]:
        """Hold the gradients of parameters against those of outputs."""
        layers = record.once(Layers).listed
        if record.processes > 1 or len(record.history.rows.ranks) > 1:
            raise CannotTell("gradients of several ranks were averaged")
        if any(call.name == "grad" or call.details.get("inputs") for call in record.called("grad", "backward")):
            raise CannotTell("a pass for chosen inputs gives outputs a gradient that never reaches the parameters")
        first = next((layer for layer in layers if layer.type not in PASSING), None)
        weighing = [layer for layer in layers if layer.weighs]
        for layer, factors in zip(weighing, compare_sums(record, weighing), strict=True):
            if len(factors) >= LEAST_STEPS and _is_off(factors):
                yield self._tell_output(record, layer, factors)
                return
            shares = compare_norms(record, layer) if layer is first else np.empty(0)
            if len(shares) >= 10 and shares.max() < LOW:
                yield self._tell_weight(record, layer, shares)
                return

    def _tell_output(self, record: Record, layer: Layer, factors: FloatArray) -> Finding:
        factor = float(np.median(factors))
        return self.find(
            "warning",
            f"Something multiplies the gradient behind {layer.site} by {factor:.3g}: the gradient of "
            f"{layer.path}:bias is "
            f"{factor:.3g} times the sum of the output's gradient, at the median of {len(factors)} steps.",
            site=str(layer.site),
            span=record,
            line=layer.line,
            evidence=[Evidence("sum of the bias's gradient over the output's", factor, f"off 1 by {APART:g}")],
            precondition=[
                "the factor is the same at four steps of five",
                "the sums do not cancel",
                "there is one rank",
            ],
            refute="without hooks the factor is the same",
        )

    def _tell_weight(self, record: Record, layer: Layer, shares: FloatArray) -> Finding:
        return self.find(
            "warning",
            f"Something makes the gradient of {layer.path}:weight small: it is {np.median(shares):.2g} of what the "
            "gradient of the bias and the layer's input say, at all steps.",
            site=f"{layer.path}:weight",
            span=record,
            line=layer.line,
            evidence=[Evidence("norm over ‖∂L/∂b‖·rms(x)·√fan_in", float(np.median(shares)), f"< {LOW:g}")],
            precondition=["it is so at all steps", "the input is not zero"],
            refute="without hooks it is as small",
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
