"""Points without a derivative that matter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from retrograd.findings.detector import CannotTell, Detector, Words
from retrograd.findings.finding import Evidence, Finding
from retrograd.findings.record import Record
from retrograd.history.facts import Kink

UNUSUAL_SHARE = 0.5
"""Of the elements of a kink that is not usual. Max-pooling of images with a plain background has ties in a third of
its windows."""
LEAST_LOOKS = 2
"""Steps at which that many lay there, of those that were looked at."""

Place = tuple[str, str, str, str, str]


class Kinks(Detector):
    """Says where gradients come from points at which a function has none."""

    slug = "kinks"
    words = Words(
        says="The inputs of an operation lie where it has no derivative: the gradient there is infinite or NaN, or made"
        " by a rule of torch's for most elements.",
        example="sqrt is called at 0 for 3 of 64 elements in encoder, where torch gives ∞ for a gradient",
        threshold="one element where torch gives no number; half of all elements otherwise, at two looks",
        source="torch's note on functions without gradient, measured in docs/kinks.md; the share is ours",
        guard="seen in the graph of the loss, between a forward and its backward; what every model has, such as zeros"
        " in front of a ReLU, is left out",
        repair="keep the argument away from that point: add a small ε under a root or a logarithm, or use"
        " torch.linalg.vector_norm for a norm",
    )

    def check(self, record: Record) -> Iterable[Finding]:
        """What is seen only where a program is run to be explained."""
        facts = record.of(Kink)
        if not facts:
            raise CannotTell("points without a derivative are looked at by `retrograd explain SCRIPT` alone")
        places: dict[Place, list[Kink]] = {}
        for each in facts:
            places.setdefault((each.name, each.operation, each.where, each.node, each.line), []).append(each)
        return self._judge(places)

    def _judge(self, places: dict[Place, list[Kink]]) -> Iterator[Finding]:
        for kinks in places.values():
            first = kinks[0]
            if not first.finite:
                yield self._tell(kinks, "where torch gives {0.gives} for a gradient", "not finite")
            elif not first.is_usual and _is_crowded(kinks):
                rule = "where torch gives {0.gives}: {0.convention}"
                yield self._tell(kinks, rule, f"share > {UNUSUAL_SHARE} at {LEAST_LOOKS} looks")

    def _tell(self, kinks: list[Kink], rule: str, threshold: str) -> Finding:
        first = kinks[0]
        inside = f" in {first.name}" if first.name else ""
        message = (
            f"{first.operation} is called {first.where} for {int(first.value):,} of {first.total:,} elements{inside},"
            f" {rule.format(first)}"
        )
        return self.find(
            "note",
            message,
            site=first.name,
            step=first.step,
            last_step=kinks[-1].step,
            line=first.line,
            evidence=[
                Evidence("gives", first.gives, threshold if not first.finite else ""),
                Evidence("share of elements", first.value / first.total, threshold if first.finite else ""),
                Evidence("looks at which it was so", len({each.step for each in kinks})),
            ],
            precondition=["its node is in the graph of the loss"],
            refute="a finite gradient of everything in front of it, at that step: then what is given is masked later",
        )


def _is_crowded(kinks: list[Kink]) -> bool:
    crowded = {each.step for each in kinks if each.value > UNUSUAL_SHARE * each.total}
    return len(crowded) >= LEAST_LOOKS
