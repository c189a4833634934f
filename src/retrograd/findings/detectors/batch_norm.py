"""Statistics of batch norms that are never updated, that forget all, or that are of next to nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from retrograd.findings.detector import CannotTell, Detector, Words
from retrograd.findings.finding import Evidence, Finding
from retrograd.findings.layers import Layer, Layers
from retrograd.findings.record import Record
from retrograd.history.facts import Buffer, Modes
from retrograd.sites.site import ROOT

FEW = 4
"""Values of a channel from which statistics are too noisy."""


class BatchNorm(Detector):
    """What a batch norm remembers, or what it is computed from, is wrong."""

    slug = "batch-norm"
    words = Words(
        says="A batch norm's running statistics are never updated, are those of the last batch, or come from a few "
        "values.",
        example="The running statistics of 1 (BatchNorm2d) are the same at step 0 and at step 32: they are never "
        "updated.",
        threshold="Equal digests of running_mean at no fewer than 3 looks while it trains; a mean of running_mean "
        "equal to that "
        "of the last batch to 1e-4 at no fewer than 3; fewer than 4 values a channel.",
        source="Ioffe and Szegedy 2015; the first two are exact, 4 is ours.",
        guard="A norm in eval mode is another fault, or meant; so is one that gets no batch.",
        repair="Leave momentum at 0.1, train with batches of 16 or more, or use LayerNorm or GroupNorm.",
    )
    explains = ("loss-noisy", "loss-flat")

    def check(self, record: Record) -> Iterator[Finding]:
        """Look at each batch norm."""
        norms = [(k, layer) for k, layer in enumerate(record.once(Layers).listed) if "BatchNorm" in layer.type]
        if not norms:
            raise CannotTell("there is no batch norm that was called in training")
        for k, layer in norms:
            if record.modes and not any(_trains(modes, layer.path) for modes in record.modes):
                continue
            found = self._judge(record, layer, k)
            if found is not None:
                yield found
                return

    def _judge(self, record: Record, layer: Layer, place: int) -> Finding | None:
        looks = [each for each in record.buffers if each.name == f"{layer.path}:running_mean"]
        few = self._count_values(record, layer)
        if 0 < few < FEW:
            return self._tell_few(record, layer, few)
        if len({each.step for each in looks}) < 3:
            return None
        if len({each.digest for each in looks}) == 1:
            return self._tell_same(record, layer, looks)
        return self._tell_last(record, layer, looks) if self._is_last_batch(record, looks, place) else None

    @staticmethod
    def _count_values(record: Record, layer: Layer) -> float:
        """Values of each channel in a batch; 0 where that is not known."""
        scale = f"{layer.path}:weight.grad"
        if scale not in record.history:
            return 0.0
        channels, values = record.series(scale).count, record.series(layer.site)
        calls = np.maximum(values.rows["calls"][:1], 1) if len(values) else np.ones(1)
        return float(values.count[0] / channels[0] / calls[0]) if len(values) and len(channels) else 0.0

    @staticmethod
    def _is_last_batch(record: Record, looks: list[Buffer], place: int) -> bool:
        """Whether the mean over channels is that of what went in at that very step, or at the one before."""
        if place == 0:
            return False
        into = record.series(record.once(Layers).listed[place - 1].site)
        means = dict(zip(into.steps.tolist(), into.mean.tolist(), strict=True))
        spread = float(np.std(list(means.values()))) if len(means) > 1 else 0.0
        same = [
            any(
                abs(means.get(look.step - back, np.inf) - look.value) < 1e-4 * max(abs(look.value), spread)
                for back in (0, 1)
            )
            for look in looks
            if look.step > 0
        ]
        return len(same) >= 3 and all(same) and spread > 0

    def _tell_same(self, record: Record, layer: Layer, looks: list[Buffer]) -> Finding:
        return self._tell(
            record,
            layer,
            f"The running statistics of {layer.path} ({layer.type}) are the same at step {looks[0].step} and at step "
            f"{looks[-1].step}: they are never updated, and eval mode will use them.",
            Evidence("looks with the same digest", len(looks), "≥ 3, all of them"),
        )

    def _tell_last(self, record: Record, layer: Layer, looks: list[Buffer]) -> Finding:
        return self._tell(
            record,
            layer,
            f"The running statistics of {layer.path} ({layer.type}) are those of the last batch alone: a momentum of 1 "
            "forgets all others.",
            Evidence("looks at which they are", len(looks), "≥ 3, all of them"),
        )

    def _tell_few(self, record: Record, layer: Layer, few: float) -> Finding:
        return self._tell(
            record,
            layer,
            f"{layer.path} ({layer.type}) computes its statistics from {few:g} values of each channel.",
            Evidence("values of a channel", few, f"< {FEW}"),
        )

    def _tell(self, record: Record, layer: Layer, text: str, evidence: Evidence) -> Finding:
        return self.find(
            "warning",
            text,
            site=layer.path,
            step=int(record.steps[0]),
            last_step=record.last_step,
            line=layer.line,
            evidence=[evidence],
            precondition=["it is in training mode"],
            refute="its buffers differ between two steps of training",
        )


def _trains(modes: Modes, path: str) -> bool:
    """Whether a module was in training mode: as the nearest module around it that is listed."""
    parts = path.split(".")
    for length in range(len(parts), -1, -1):
        name = ".".join(parts[:length]) or ROOT
        if name in modes.training or name in modes.evaluating:
            return name in modes.training
    return True
