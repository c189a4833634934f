"""Which steps of a run were recorded, and which were not: what is said of all of them needs all of them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from retrograd.core.amounts import count_of
from retrograd.core.history.facts import Gap
from retrograd.core.history.rows import encode_phase
from retrograd.core.history.steps import number_steps
from retrograd.core.recording.schedule import describe_schedule
from retrograd.explaining.findings.record import Record

IntArray = npt.NDArray[np.int64]

IN_FULL = "record that stretch in full (`retrograd run --overhead none`, or rg.record without a schedule)"
"""What to do to learn what steps would tell that were not recorded."""


class Coverage:
    """Steps that were made, and those of them that were recorded.

    Calls of the program are known of every step; statistics of those alone that were recorded.

    Args:
        record: what it reads.
    """

    def __init__(self, record: Record) -> None:
        self._record = record

    @cached_property
    def is_whole(self) -> bool:
        """True where every step was recorded, as far as the record tells."""
        manifest = self._record.manifest
        if describe_schedule(manifest) in ("", "every step"):
            return True
        if str(manifest.get("schedule")).startswith("within a budget") and not self._has_gaps:
            return True
        return not len(np.setdiff1d(self.made, self.recorded))

    @cached_property
    def _has_gaps(self) -> bool:
        """True if a budget has left steps out, or updates; of a part of the run also where it did so before it."""
        return any(isinstance(fact, Gap) and max(fact.value, fact.updates) > 1 for fact in self._record.all_facts)

    @cached_property
    def made(self) -> IntArray:
        """Steps that an update ended, or a pass where nothing tells of one, rising: also those not recorded."""
        record = self._record
        made = record.history.made_steps
        steps, _ = number_steps(np.concatenate((made[record.in_part(made)], self._updated)))
        return steps

    @cached_property
    def recorded(self) -> IntArray:
        """Steps of training that have statistics, rising."""
        steps = self._record.history.outline.steps.get(encode_phase("train"), np.empty(0, np.int64))
        return steps[self._record.in_part(steps)]

    @property
    def last(self) -> int | None:
        """The last step that was made, recorded or not; None where there is none."""
        if self.is_whole or not len(self.made):
            return self._record.last_step
        return max(int(self.made[-1]), self._record.last_step or 0)

    def tell(self) -> str:
        """How many steps were recorded, of how many: ``the 100 recorded of 1,000 steps``."""
        count = len(np.intersect1d(self.recorded, self.made)) or len(self.recorded)
        return f"the {count:,} recorded of {count_of(len(self.made), 'step')}"

    def tell_since(self, step: int, before: int | None) -> str:
        """Since when it is so: where steps up to it were not recorded, since when at the latest.

        Args:
            step: the first recorded one at which it was so.
            before: the last recorded one before that; None where there is none.
        """
        if self.is_whole or before is None or step - before < 2:
            return f"since step {step}"
        return f"since step {step} at the latest (not yet at step {before})"

    def list_updates(self, first: int, end: int) -> IntArray:
        """The steps from one to before another that an update ended; all, where no call tells of one."""
        steps = self._updated
        return steps[(steps >= first) & (steps < end)] if len(steps) else np.arange(first, end)

    @cached_property
    def _updated(self) -> IntArray:
        """Steps at which the program has called an optimizer, rising."""
        return np.array(sorted({call.step for call in self._record.called("step")}), np.int64)
