"""Functions that are differentiated twice and keep what their forward computes."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.core.history.facts import LostPart
from retrograd.core.runs.findings import Evidence, Finding, shorten_line
from retrograd.explaining.findings.detector import Detector, Words
from retrograd.explaining.findings.record import Record


class LostSecondDerivative(Detector):
    """A second derivative lacks a part, in silence."""

    slug = "second-derivative"
    words = Words(
        says="A Function that is differentiated twice saves what its forward computes and does not return, so the "
        "second derivative lacks what goes through it.",
        example="Cube (train.py:18) is differentiated twice, and saves what `mul` (train.py:8) computes in its "
        "forward: to autograd that is a constant, and the second derivative lacks what goes through it.",
        threshold="a saved tensor that an operation in the Function's own forward made of something with a graph, and "
        "a later pass through the gradients",
        source="torch's tutorial on double backward with custom Functions",
        guard="what is drawn at random, has no derivative (masks, signs, rounding) or is returned is left alone; so is "
        "a Function that no pass differentiates twice",
        repair="save the arguments and compute it again in backward, or return it from forward as a further output.",
    )
    explains = ("missing-gradient",)

    def check(self, record: Record) -> Iterator[Finding]:
        """See :class:`Detector`."""
        for fact in record.of(LostPart):
            called = f" ({shorten_line(fact.called)})" if fact.called else ""
            yield self.find(
                "critical",
                f"{fact.name}{called} is differentiated twice, and saves what `{fact.operation}` "
                f"({shorten_line(fact.line)}) computes in its forward: to autograd that is a constant, and the second "
                "derivative lacks what goes through it",
                step=fact.step,
                line=fact.line,
                evidence=[Evidence("saved and not returned", f"`{fact.operation}`")],
                precondition=["it is made of what has a graph", "a pass has run through the gradients of another"],
                refute="its backward takes no derivative through that tensor on purpose",
            )
