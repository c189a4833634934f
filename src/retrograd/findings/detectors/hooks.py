"""Gradients that something multiplies on their way: a hook of the program, or one of its Functions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from retrograd.findings.detector import CannotTell, Detector, Words
from retrograd.findings.finding import Evidence, Finding
from retrograd.findings.layers import Layer, Layers
from retrograd.findings.record import Record
from retrograd.findings.training import FloatArray, divide

APART = 0.1
"""What the sums may differ by in relation; bfloat16 makes 0.03."""

STEADY = 0.02
"""Spread of the factor over steps, in relation."""

PASSING = ("Flatten", "Identity", "Unflatten")
"""Modules that give on what they take."""

LEAST = 5
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
        "than 5 steps, and off 1 by 10 %; or a weight's gradient is below 0.001 of ‖∂L/∂b‖·rms(x)·√fan_in at all of "
        "10 steps.",
        source="The derivative of a layer by its bias is 1; over 34 healthy runs the factor is 1.000, in bfloat16 "
        "within 3 %.",
        guard="Sums that cancel are left out, and so are several ranks, whose gradients are averaged.",
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
        if len(np.unique(record.history.rows["rank"])) > 1:
            raise CannotTell("gradients of several ranks were averaged")
        first = next((layer for layer in layers if layer.type not in PASSING), None)
        for layer in (layer for layer in layers if layer.weighs):
            factors = compare_sums(record, layer)
            if len(factors) >= LEAST and _is_off(factors):
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
            f"{factor:.3g} times the sum of the output's gradient at each of {len(factors)} steps.",
            site=str(layer.site),
            step=int(record.steps[0]),
            last_step=record.last_step,
            line=layer.line,
            evidence=[Evidence("sum of the bias's gradient over the output's", factor, f"off 1 by {APART:g}")],
            precondition=["the factor is the same at all steps", "the sums do not cancel", "there is one rank"],
            refute="without hooks the factor is the same",
        )

    def _tell_weight(self, record: Record, layer: Layer, shares: FloatArray) -> Finding:
        return self.find(
            "warning",
            f"Something makes the gradient of {layer.path}:weight small: it is {np.median(shares):.2g} of what the "
            "gradient of the bias and the layer's input say, at all steps.",
            site=f"{layer.path}:weight",
            step=int(record.steps[0]),
            last_step=record.last_step,
            line=layer.line,
            evidence=[Evidence("norm over ‖∂L/∂b‖·rms(x)·√fan_in", float(np.median(shares)), f"< {LOW:g}")],
            precondition=["it is so at all steps", "the input is not zero"],
            refute="without hooks it is as small",
        )


def compare_sums(record: Record, layer: Layer) -> FloatArray:
    """At each step the sum of the bias's gradient over that of the output's; steps at which that cancels left out."""
    bias, output = f"{layer.path}:bias.grad", str(layer.site.grad)
    if bias not in record.history or output not in record.history:
        return np.empty(0)
    below, above = record.series(bias), record.series(output)
    if not np.array_equal(below.steps, above.steps):
        return np.empty(0)
    total = above.mean * above.count
    kept = (np.abs(total) > 1e-2 * above.l1) & (above.nonfinite == 0) & (below.nonfinite == 0)
    factors = divide(below.mean * below.count, total)[kept]
    return np.asarray(factors[np.isfinite(factors)])


def compare_norms(record: Record, layer: Layer) -> FloatArray:
    """At each step the norm of the weight's gradient over ‖∂L/∂b‖ · rms(x) · √fan_in, x being the model's input."""
    names = [f"{layer.path}:weight.grad", f"{layer.path}:bias.grad"]
    if any(name not in record.history for name in names):
        return np.empty(0)
    weight, bias = (record.series(name) for name in names)
    inputs = _input_rms(record, len(weight))
    if not len(weight) or len(weight) != len(bias) or len(inputs) != len(weight):
        return np.empty(0)
    said = bias.l2 * inputs * np.sqrt(weight.count / np.maximum(bias.count, 1))
    shares = divide(weight.l2, said)
    return np.asarray(shares[np.isfinite(shares) & (weight.l2 > 0)])


def _input_rms(record: Record, steps: int) -> FloatArray:
    """Root mean square of the model's only input, at so many steps; nothing where it has several."""
    floats = [listed for listed in record.inputs.values() if listed and "float" in listed[0].dtype]
    known = [each.value**2 + each.std**2 for each in floats[0]] if len(floats) == 1 else []
    return np.full(steps, np.sqrt(np.median(known))) if known and np.isfinite(known).all() else np.empty(0)


def _is_off(factors: FloatArray) -> bool:
    middle = float(np.median(factors))
    low, high = np.quantile(factors, [0.1, 0.9])
    return abs(middle - 1) > APART and bool(high - low <= STEADY * abs(middle))
