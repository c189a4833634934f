"""Ranks that were to hold the same, and do not, or that were to be given different data, and are not."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.findings.detector import CannotTell, Detector, Words
from retrograd.findings.finding import Evidence, Finding
from retrograd.findings.record import Record
from retrograd.history.facts import Input

ALIKE = 3
"""Steps at which ranks must have been given the same."""


class RanksDisagree(Detector):
    """Replicas that are no replicas, or that all see the same data."""

    slug = "ranks-disagree"
    words = Words(
        says="Ranks that train copies of one model differ in it, or are given the same batches.",
        example="Ranks 0 and 1 have been given the same batches at all of 40 steps: the work of one is wasted.",
        threshold="Copies that differ in what was recorded of them; or equal digests of all inputs at all of at least "
        "3 steps.",
        source="The BLOOM run and TrainCheck (OSDI 2025) on replicas; both are exact.",
        guard="Copies are only what the recorder knows to be one; sharded parameters are none. Inputs that are the "
        "same at "
        "all steps are no data.",
        repair="Wrap the model in DistributedDataParallel, and give each rank its part: DistributedSampler.",
    )
    explains = ("loss-noisy", "diverged")

    def check(self, record: Record) -> Iterator[Finding]:
        """Compare ranks."""
        differing = record.history.disagreements
        if differing:
            first = min(differing, key=lambda each: each.step)
            yield self.find(
                "critical",
                f"Ranks {first.shown} and {first.other} hold copies of {first.site} that differ from step "
                f"{first.step} on"
                f"{f', and of {len(differing) - 1} more' if len(differing) > 1 else ''}.",
                site=first.site,
                step=first.step,
                rank=first.other,
                evidence=[Evidence("sites that differ", len(differing), "> 0")],
                precondition=["the recorder knows them to be copies"],
                refute="the parameters are the same on both",
                repair="See what only one rank does: an update without a reduced gradient, or weights that were "
                "loaded.",
            )
            return
        yield from self._compare_inputs(record)

    def _compare_inputs(self, record: Record) -> Iterator[Finding]:
        ranks = sorted({each.rank for each in record.of(Input)})
        if len(ranks) < 2:
            raise CannotTell("inputs of a single rank were recorded")
        digests: dict[int, dict[tuple[int, int, str], str]] = {rank: {} for rank in ranks}
        for each in record.of(Input):
            digests[each.rank][each.step, each.moment.micro, each.name] = each.digest
        first, second = (digests[rank] for rank in ranks[:2])
        shared = [key for key in first if key in second]
        steps = {key[0] for key in shared}
        varies = len({first[key] for key in shared}) > len({key[2] for key in shared})
        if len(steps) >= ALIKE and varies and all(first[key] == second[key] for key in shared):
            yield self.find(
                "warning",
                f"Ranks {ranks[0]} and {ranks[1]} have been given the same batches at all of {len(steps)} steps: the "
                "work "
                "of one is wasted.",
                step=min(steps),
                last_step=max(steps),
                rank=ranks[1],
                evidence=[Evidence("steps with the same inputs", len(steps), f"≥ {ALIKE}, all of them")],
                precondition=["the inputs differ from step to step"],
                refute="the targets of the ranks differ, or the model is split over them",
            )
