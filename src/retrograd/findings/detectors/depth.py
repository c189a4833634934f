"""Gradients that fall or grow from layer to layer, or from call to call, on their way to the input."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from retrograd.findings.detector import CannotTell, Detector, Words
from retrograd.findings.detectors.learning_rate import first_large
from retrograd.findings.finding import Evidence, Finding
from retrograd.findings.layers import Layer, Layers, median_of_first
from retrograd.findings.record import Record
from retrograd.findings.training import FloatArray, Training

LEAST = 4
"""Layers, or calls, that make a depth."""

DECADES = 3.0
"""Decimal places between the ends."""

STEADY = 0.75
"""Share of neighbours that go the same way."""


class Chain(NamedTuple):
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
        """What the gradient is multiplied by from one to the next, towards the input."""
        return float(10 ** (-self.decades / (len(self.norms) - 1)))

    def is_steady(self) -> bool:
        """Whether most neighbours go the way of the whole, and no single one makes it."""
        ways = np.diff(np.log10(self.norms)) * np.sign(self.decades)
        largest = np.max(ways, initial=0.0)
        return bool((ways > 0.05).mean() >= STEADY and largest < 0.6 * abs(self.decades))


def list_chains(record: Record) -> list[Chain]:
    """The depth of the model, and the calls of each layer that is called again and again, at the first steps."""
    layers = record.once(Layers).listed
    until = _first_disturbed(record)
    norms = median_of_first(record.once(Layers).gradients("l2"), until)
    kept = [place for place, layer in enumerate(layers) if layer.weighs and norms[place] > 0]
    chains = []
    if len(kept) >= LEAST and np.isfinite(norms[kept]).all():
        chains.append(Chain([str(layers[k].site) for k in kept], norms[kept], layers[kept[0]], "layers", np.inf))
    for layer in layers:
        chain = _chain_calls(record, layer, until) if layer.site.grad in record.sites else None
        chains += [chain] if chain else []
    return chains


def _first_disturbed(record: Record) -> int | None:
    """The first step whose gradients are no longer those of the model as it was made."""
    large = first_large(record.once(Training).updates) if record.of_kind("parameter", "update") else None
    steps = [each for each in (record.once(Training).lost, None if large is None else large + 1) if each is not None]
    return min(steps, default=None)


def _chain_calls(record: Record, layer: Layer, until: int | None) -> Chain | None:
    site = str(layer.site.grad)
    calls = record.series(site).calls
    if len(calls) < LEAST:
        return None
    numbered = [replace(layer.site.grad, call=call).numbered for call in calls]
    norms = median_of_first(record.history.matrix("l2", numbered), until)
    if not (np.isfinite(norms) & (norms > 0)).all():
        return None
    ends = [replace(layer.site, call=call).numbered for call in (calls[0], calls[-1])]
    first, last = record.history.matrix("rms", ends).values[:, 0]
    return Chain(numbered, norms, layer, f"calls of {layer.path}", float(last / first) if first > 0 else 0.0)


class _Depth(Detector):
    """What both have in common."""

    def check(self, record: Record) -> Iterator[Finding]:
        """Follow the gradient from the loss to the input."""
        record.once(Training).need_loss(5)
        chains = list_chains(record)
        if not chains:
            raise CannotTell(f"fewer than {LEAST} layers or calls in a row have gradients")
        meant = [chain for chain in chains if self.is_meant(chain) and chain.is_steady()]
        if meant and not record.once(Training).fell:
            yield self.tell(record, max(meant, key=lambda chain: chain.growth))

    @abstractmethod
    def is_meant(self, chain: Chain) -> bool:
        """Whether it goes this way."""

    @abstractmethod
    def tell(self, record: Record, chain: Chain) -> Finding:
        """The finding."""

    def describe(self, record: Record, chain: Chain) -> dict[str, Any]:
        """What both say."""
        return {
            "site": chain.names[0],
            "step": int(record.steps[0]),
            "last_step": record.last_step,
            "line": chain.layer.line,
            "evidence": [
                Evidence(f"‖∂L/∂output‖ at {chain.names[0]}", float(chain.norms[0])),
                Evidence(f"‖∂L/∂output‖ at {chain.names[-1]}", float(chain.norms[-1])),
                Evidence("factor from one to the next", chain.factor),
                Evidence("decimal places between the ends", abs(chain.decades), f"≥ {DECADES:g}"),
            ],
            "precondition": [
                f"at least {STEADY:.0%} of neighbours go the same way, and no single one makes it",
                "the loss has not fallen by a tenth",
            ],
        }


class Vanishing(_Depth):
    """Gradients that fall geometrically on their way to the input."""

    slug = "vanishing"
    words = Words(
        says="The gradient falls by a like factor at each layer, or each call, and next to nothing is left at the "
        "first.",
        example="The gradient falls to 0.13 of itself at each of 10 layers, from 0.12 at 18:output to 1.7e-09 at "
        "0:output: the first layers learn next to nothing.",
        threshold="Over at least 4 layers that have weights the norm of the outputs' gradients falls by 1000 in all, "
        "at three of four neighbours, and the loss has not fallen by a tenth.",
        source="AutoTrainer: a ratio of first to last below 1e-3; the rest is measured by us.",
        guard="A loss that falls, residual paths and zero-initialised branches (no steady fall), and frozen layers.",
        repair="Use ReLU or a kin in place of sigmoid, weights of variance 2/fan_in, a norm or a residual path.",
    )
    explains = ("loss-flat", "not-updated", "underflow")

    def is_meant(self, chain: Chain) -> bool:
        """Whether it falls towards the input."""
        return chain.decades >= DECADES

    def tell(self, record: Record, chain: Chain) -> Finding:
        """The finding."""
        return self.find(
            "warning",
            f"The gradient falls to {chain.factor:.2g} of itself at each of {len(chain.norms)} {chain.what}, from "
            f"{chain.norms[-1]:.2g} at {chain.names[-1]} to {chain.norms[0]:.2g} at {chain.names[0]}: the first "
            "learn next to nothing.",
            refute="the loss falls when the last layers alone are trained",
            **self.describe(record, chain),
        )


class Exploding(_Depth):
    """Gradients that grow geometrically on their way to the input."""

    slug = "exploding"
    words = Words(
        says="The gradient grows by a like factor at each layer, or each call, on its way to the input.",
        example="The gradient grows 5.9 times at each of 7 layers, from 0.15 at 12:output to 6,400 at 0:output.",
        threshold="Over at least 4 layers that have weights the norm of the outputs' gradients grows by 1000 in all, "
        "at three of four neighbours, and the loss has not fallen by a tenth.",
        source="AutoTrainer: a ratio above 70; raised to 1000 by us.",
        guard="A loss that falls; a single layer that makes the growth; sums that are no chain.",
        repair="Use weights of variance 2/fan_in, a norm after each layer, or clip the norm of the gradient.",
    )
    explains = (
        "learning-rate-too-high", "diverged", "loss-spike", "loss-flat", "loss-noisy", "nan-forward",
        "nan-backward", "nan-update", "overflow-headroom",
    )  # fmt: skip

    def is_meant(self, chain: Chain) -> bool:
        """Whether it grows towards the input."""
        return chain.decades <= -DECADES

    def tell(self, record: Record, chain: Chain) -> Finding:
        """The finding."""
        return self.find(
            "critical",
            f"The gradient grows {chain.factor:.2g} times at each of {len(chain.norms)} {chain.what}, from "
            f"{chain.norms[-1]:.2g} at {chain.names[-1]} to {chain.norms[0]:.2g} at {chain.names[0]}.",
            refute="the norms at these sites do not rise towards the input at other steps",
            **self.describe(record, chain),
        )
