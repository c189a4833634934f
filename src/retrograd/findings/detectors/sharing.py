"""Weights that are shared by accident, or no longer shared."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.findings.detector import CannotTell, Detector, Words
from retrograd.findings.finding import Evidence, Finding
from retrograd.findings.record import Record
from retrograd.history.facts import Parameter


class WeightsUntied(Detector):
    """Two weights begin as copies and drift apart."""

    slug = "weights-untied"
    words = Words(
        says="An embedding and an output layer begin with the same values and then differ: they are copies, not one "
        "weight.",
        example="emb:weight and head:weight are equal at step 0 and differ at step 1: they are two copies and not "
        "tied.",
        threshold="a weight of an Embedding and one of another module, of one shape, equal bit for bit at the first "
        "look and "
        "different at a later one",
        source="our own choice",
        guard="layers that are copies of each other (cloned blocks) are of one type, and are left alone",
        repair="assign the parameter itself: head.weight = emb.weight.",
    )

    def check(self, record: Record) -> Iterator[Finding]:
        """See :class:`Detector`."""
        looks: dict[str, list[Parameter]] = {}
        for fact in record.of(Parameter):
            if fact.digest and len(fact.shape) == 2:
                looks.setdefault(fact.name, []).append(fact)
        if not looks:
            raise CannotTell("no digests of parameters were recorded")
        for first, second in _pair_equal(record, looks):
            apart = _find_apart(looks[first], looks[second])
            if apart is not None:
                yield self.find(
                    "warning",
                    f"{first} and {second} are equal at step {looks[first][0].step} and differ at step {apart}: they "
                    "are two copies "
                    "and not tied",
                    site=second,
                    step=apart,
                    line=str(record.modules.get(second.rpartition(":")[0], {}).get("line", "")),
                    evidence=[
                        Evidence("shape", str(list(looks[first][0].shape))),
                        Evidence("equal bit for bit", "at first"),
                    ],
                    precondition=["one is of an embedding, the other of an output layer"],
                    refute="one was only initialised from the other",
                )


def _pair_equal(record: Record, looks: dict[str, list[Parameter]]) -> Iterator[tuple[str, str]]:
    """An embedding's weight and another's that are equal at the first look."""
    embeddings = [name for name in looks if record.type_of(name.rpartition(":")[0]) == "Embedding"]
    for first in embeddings:
        for second in looks:
            is_other = second not in embeddings and second not in looks[first][0].tied
            if is_other and looks[first][0].digest == looks[second][0].digest:
                yield first, second


def _find_apart(first: list[Parameter], second: list[Parameter]) -> int | None:
    """The first step at which both were looked at and differ."""
    others = {fact.step: fact.digest for fact in second}
    return next((fact.step for fact in first if others.get(fact.step, fact.digest) != fact.digest), None)
