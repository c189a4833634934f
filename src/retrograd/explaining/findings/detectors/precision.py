"""Numbers that a format of few bits cannot hold: gradients that become zero, updates that round away."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from retrograd.core.amounts import count_of
from retrograd.core.history.matrix import join_matrices
from retrograd.core.history.sink import UPDATES
from retrograd.core.history.table import find_kinds
from retrograd.core.runs.findings import Evidence, Finding
from retrograd.core.sites.site import Site
from retrograd.core.statistics.row import EXPONENT_BIAS
from retrograd.explaining.findings.births import Births
from retrograd.explaining.findings.detector import Detector, Words
from retrograd.explaining.findings.layers import Layers
from retrograd.explaining.findings.numbers import median
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import Training

SUBNORMAL = EXPONENT_BIAS - 14
"""First exponent bin of the normal numbers of half precision."""

FEWEST = 5
"""Steps that it takes."""

LOST = 0.5
"""Share of a parameter's elements that updates leave as they are, from which on they are lost."""

NEARLY_ALL = 0.8
"""Share from which on it is a warning where the loss falls, too."""

NARROW = ("bfloat16", "float16", "bf16", "half")
"""Types whose weights updates may round away."""

HALF = ("float16", "half")

SEARCH, CHURN = 20, 0.2
"""Updates in which loss scaling searches for a scale; share of later ones from which on it skips too many."""


class Underflow(Detector):
    """Gradients in half precision that are too small for it."""

    slug = "underflow"
    words = Words(
        says="Gradients of half precision lie below its normal numbers, and many are zero.",
        example="78 % of the gradients of 0:weight are zero, and 99 % of the rest lie below 6.1e-05, the smallest "
        "normal number of float16.",
        threshold="More than 20 % of the elements zero, and more than half of the rest below 2⁻¹⁴, at the median of "
        "steps.",
        source="Transformer Engine's underflows % (5 and 20 %); Micikevicius et al. 2018 on scaling of the loss.",
        guard="What is of float16 alone; zeros that a ReLU makes stand beside gradients of normal size.",
        repair="Keep the weights in float32 and compute under autocast: to float16 with torch.amp.GradScaler, or to "
        "bfloat16.",
    )
    explains = (
        "vanishing", "loss-flat", "not-updated", "learning-rate-too-low", "missing-gradient", "dead-units",
        "bf16-update-lost",
    )  # fmt: skip

    def check(self, record: Record) -> Iterator[Finding]:
        """Look at zeros and exponents."""
        sites = _of_type(record, HALF, "grad")
        is_scaled = any(call.name.startswith("scaler.") for call in record.calls)
        sites += [] if is_scaled else _list_half_outputs(record)  # it does what is advised: why is not known
        if not sites:
            of_scaled = " outside of autocast with loss scaling, which is what is advised" if is_scaled else ""
            raise CannotTell(f"neither parameters nor outputs of float16 were recorded{of_scaled}")
        measured = [(site, *self._measure(record, site)) for site in sites]
        low = [each for each in measured if (each[1] > 0.2 and each[2] > 0.5) or (each[1] > 0.05 and each[2] > 0.9)]
        if len(low) < max(0.25 * len(sites), 1):
            return
        site, zeros, share = max(low, key=lambda each: each[1])
        yield self.find(
            "warning",
            f"{zeros:.0%} of the gradients of {site.value} are zero, and {share:.0%} of the rest lie below 6.1e-05, "
            f"the smallest normal number of float16; so it is at {len(low)} of {len(sites)} places.",
            site=str(site.value),
            span=record,
            line=record.line_of(site.path),
            evidence=[
                Evidence("share of zeros", zeros, "> 0.2, or > 0.05 where nearly all the rest is small"),
                Evidence("share of the rest below 2⁻¹⁴", share, "> 0.5, or > 0.9"),
            ],
            precondition=["the gradient is of float16", "the zeros stand beside what lies below the normal numbers"],
            refute="with the loss multiplied by 1024 as many are zero",
        )

    @staticmethod
    def _measure(record: Record, site: Site) -> tuple[float, float]:
        series = record.series(site, histograms=True)
        scales = np.full(len(series.steps), np.inf)  # the least of all micro-batches of a step
        np.minimum.at(scales, np.searchsorted(series.steps, series.rows["step"]), series.rows["scale"])
        is_told = (scales >= 1) & ~np.isin(series.steps, list(record.once(Births).skipped))
        if is_told.sum() < FEWEST:  # a scale that has collapsed has overflowed before
            return 0.0, 0.0
        bins = series.exponents[1][is_told]
        scale = float(np.median(scales[is_told]))  # it was divided out: what is small was larger by that
        lowest = max(SUBNORMAL - round(np.log2(scale)), 0) if scale > 0 else SUBNORMAL
        total = bins.sum(axis=1)
        below = bins[:, :lowest].sum(axis=1)
        low = np.where(total > 0, below / np.maximum(total, 1), 1.0)
        return float(np.median(series.zero_share[is_told])), float(np.median(low))


class UpdateLost(Detector):
    """Updates that round away in weights of few bits."""

    slug = "bf16-update-lost"
    words = Words(
        says="Updates are smaller than half the distance between neighbouring weights, so most round away.",
        example="92 % of the elements of 0:weight (bfloat16) stay as they are at an update, though 98 % have a "
        "gradient: updates round away.",
        threshold="At the median of at least 10 updates more than half of a parameter's elements unchanged, by half "
        "more than have no gradient.",
        source="Practice of weights in float32 (Micikevicius et al. 2018; Zamirai et al. 2020 for bfloat16); bounds "
        "ours.",
        guard="Weights of bfloat16 or float16 alone; elements whose gradient is zero are not counted; a rate of zero "
        "is none.",
        repair="Keep the weights in float32 and compute under autocast, or round stochastically.",
    )
    explains = ("loss-flat", "not-updated", "learning-rate-too-low")

    def check(self, record: Record) -> Iterator[Finding]:
        """Look at the zeros of updates, beside those of gradients."""
        updates = record.once(Training).updates
        if len(updates.steps) < 10:
            raise CannotTell(f"{len(updates.steps)} updates were recorded, and it takes 10")
        found = list(self._measure(record))
        lost = [each for each in found if each[1] > LOST and each[1] > each[2] + LOST * (1 - each[2])]
        if not lost or len(lost) < 0.5 * len(found) or record.once(Training).rate == 0:
            return
        site, still, zeros, kind = max(lost, key=lambda each: updates.elements[updates.sites.index(each[0])])
        fell = record.once(Training).fell
        yield self.find(
            "note" if fell and still < NEARLY_ALL else "warning",
            f"{still:.0%} of the elements of {site.value} ({kind}) stay as they are at an update, though "
            f"{1 - zeros:.0%} have a gradient: updates round away, at {len(lost)} of "
            f"{count_of(len(found), 'parameter')}.",
            site=str(site.value),
            step=int(updates.steps[0]),
            last_step=record.last_step,
            line=record.optimizer_line,
            evidence=[
                Evidence("share of elements unchanged", still, f"> {LOST:g}"),
                Evidence("share without a gradient", zeros, "by half less"),
            ],
            precondition=[f"the weights are of {kind}", "the elements have a gradient"],
            refute="in float32 as many elements stay as they are",
        )

    @staticmethod
    def _measure(record: Record) -> Iterator[tuple[Site, float, float, str]]:
        """List parameters of few bits: the share that updates leave, the share without a gradient, and the type."""
        updates, types, known = record.once(Training).updates, _need_types(record), set(record.sites)
        narrow = [
            site
            for site, elements in zip(updates.sites, updates.elements, strict=True)
            if any(name in types.get(str(site.value), "") for name in NARROW)
            and site.value.grad in known
            and elements >= 8
        ]
        found = record.numbers([(site, site.value.grad) for site in narrow], ("zero_share",))
        for site, (update, gradient) in zip(narrow, found, strict=True):
            still = float(np.nan_to_num(median(update.of["zero_share"])))
            yield site, still, float(np.median(gradient.of["zero_share"])), types[str(site.value)]


class OverflowHeadroom(Detector):
    """Values in half precision that are near its largest number."""

    slug = "overflow-headroom"
    words = Words(
        says="Values of half precision come near the largest number that it has.",
        example="The outputs of 4 reach 4.9e+04 of 6.6e+04 that float16 has.",
        threshold="Largest magnitude at least half of 65504, at the median of steps.",
        source="Transformer Engine and Hugging Face's DebugUnderflowOverflow; half is ours.",
        guard="Outputs of models of float16 alone; a single step is none.",
        repair="Compute it in float32 or bfloat16, or scale what is too large.",
    )
    explains = ()

    def check(self, record: Record) -> Iterator[Finding]:
        """Look at the largest magnitudes."""
        if not _of_type(record, HALF, "grad"):
            raise CannotTell("no parameter of float16 was recorded")
        peaks = join_matrices(list(record.once(Layers).values("abs_max")))
        for layer, values in zip(record.once(Layers).listed, peaks.values, strict=True):
            known = values[np.isfinite(values)]
            if len(known) >= 3 and 32752 <= np.median(known) <= 65504:
                yield self.find(
                    "note",
                    f"The outputs of {layer.path} reach {np.median(known):.2g} of 6.6e+04 that float16 has.",
                    site=layer.path,
                    step=int(peaks.steps[0]),
                    last_step=record.last_step,
                    line=layer.line,
                    evidence=[Evidence("largest magnitude, median of steps", float(np.median(known)), "≥ 32752")],
                    precondition=["parameters are of float16"],
                    refute="these outputs are of another type",
                )
                return


class ScalerChurn(Detector):
    """A loss scale that is halved again and again."""

    slug = "scaler-churn"
    words = Words(
        says="Loss scaling skips many updates: gradients overflow at any scale, or the scale is raised too often.",
        example="Loss scaling has skipped 31 of 60 updates: gradients overflow at a scale of 0.5 too.",
        threshold=f"More than {SEARCH} skipped updates and more than {CHURN:.0%} of those after the first {SEARCH}; or "
        "a scale below 1 in the end.",
        source="torch.amp.GradScaler halves at an overflow, and doubles after 2000 steps: one in 2000 is usual. "
        "Bounds ours.",
        guard=f"The search for a scale at the begin (the first {SEARCH} updates) is not counted.",
        repair="Find the value that overflows, and compute it in float32 or bfloat16: no scale helps. Where the scale "
        "is raised again and again, raise growth_interval; where it is set by hand, leave that out.",
    )
    explains = ("loss-flat", "not-updated", "underflow")

    def check(self, record: Record) -> Iterator[Finding]:
        """Count skipped updates."""
        first = next((event for event in record.events if event.kind == "skipped"), None)
        if first is None:
            raise CannotTell("no update was skipped by loss scaling")
        tried = record.history.all_events.pieces(["kind"], UPDATES)
        skipped = np.concatenate([find_kinds(piece, ["skipped"]) for piece in tried])
        late = skipped[SEARCH:]
        scales = {event.moment.step: event.value for event in record.events if event.kind == "scale"}
        churns = len(late) >= 10 and late.mean() > CHURN and skipped.sum() > SEARCH
        last = scales[max(scales)] if scales else 1.0
        if not churns and not last < 1:
            return
        why, repair = self._judge(scales, {event.moment.step for event in record.events if event.kind == "skipped"})
        yield self.find(
            "warning",
            f"Loss scaling has skipped {skipped.sum()} of {len(skipped)} updates: {why}.",
            step=first.moment.step,
            last_step=record.last_step,
            line=next((call.line for call in record.called("scaler.step")), ""),
            evidence=[
                Evidence(f"share of updates skipped after the first {SEARCH}", float(late.mean()), f"> {CHURN:g}")
                if churns
                else Evidence("scale in the end", last, "< 1")
            ],
            precondition=["the search for a scale is over"],
            refute="the gradients of these steps are finite at a scale of 1",
            repair=repair,
        )

    @staticmethod
    def _judge(scales: dict[int, float], skipped: set[int]) -> tuple[str, str]:
        """Say why updates are skipped, and what to do, by the scales of steps: those that were skipped and the others.

        Args:
            scales: that of each recorded step.
            skipped: the steps whose update was skipped.
        """
        lost = sorted(skipped & scales.keys())
        if not lost:
            return "gradients overflow", ""
        after = [(scales[step], scales[then]) for step, then in pairwise(sorted(scales)) if step in skipped]
        held = [scale for before, scale in after if scale >= before]
        lowest = min(scales[step] for step in lost[len(lost) // 2 :])
        if len(held) > len(after) / 2:
            return (
                f"the scale is {held[-1]:g} again after an update that overflowed, and torch halves it there",
                "let scaler.update() choose the scale: leave its argument, and other writes to the scale, out.",
            )
        fine = [scale for step, scale in scales.items() if step not in skipped and step > lost[0]]
        if fine and max(fine) < lowest:
            return (
                f"gradients overflow at a scale of {lowest:g}, to which it is raised again and again",
                "raise growth_interval of the GradScaler: after so many updates it raises the scale (2000 by default).",
            )
        return (
            f"gradients overflow at a scale of {lowest:g} too",
            "find the value that overflows, and compute it in float32 or bfloat16: no scale helps.",
        )


def _need_types(record: Record) -> dict[str, str]:
    """Types of parameters, by name.

    Raises:
        CannotTell: none was recorded.
    """
    if not record.parameters:
        raise CannotTell("no type of a parameter was recorded")
    return {fact.name: fact.dtype for fact in record.parameters}


def _of_type(record: Record, types: tuple[str, ...], quantity: str) -> list[Site]:
    """Parameters of these types of which a quantity was recorded.

    Raises:
        CannotTell: no type was recorded.
    """
    known = _need_types(record)
    found = record.of_kind("parameter", quantity)
    return [site for site in found if known.get(str(site.value), "").removeprefix("torch.") in types]


def _list_half_outputs(record: Record) -> list[Site]:
    """Gradients of the outputs of layers whose operations make float16, as under autocast."""
    half = {
        operation.module
        for noted in record.operations[:1]
        for operation in noted.operations()
        if any(made.startswith("float16") for made in operation.makes)
    }
    return [
        each.site.grad for each in record.once(Layers).listed if each.path in half and each.site.grad in record.sites
    ]
