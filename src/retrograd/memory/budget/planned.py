"""Keep saved tensors under a byte budget, by a plan that is made from the first pass."""

from __future__ import annotations

import math
import os
import re
import threading
import weakref

import torch
from torch import Tensor

from retrograd.core.amounts import parse_bytes, show_bytes
from retrograd.core.errors import SavedPolicyError
from retrograd.core.hooks.engine import is_in_backward
from retrograd.core.notices import warn
from retrograd.memory.budget.measuring import PassNotes
from retrograd.memory.budget.offloader import Load, Offloader
from retrograd.memory.budget.plan import Plan, make_plan
from retrograd.memory.budget.planned_pass import ByteCounter, Item, KnownPlans, PlannedPass
from retrograd.memory.budget.planner import keep_all, window_of
from retrograd.memory.budget.simulation import Choice
from retrograd.memory.policies.policy import Saved, UsedPolicy
from retrograd.memory.policies.transfers import InFlight

Budget = int | float | str

_SHARE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")

_LEAST_BYTES = 16 * 1024


class Planned(UsedPolicy):
    """Holds no more than a budget of saved tensors in memory, at the least time that was found.

    The first pass is measured: all that is saved, when it is asked for and freed, what is computed between, and how
    fast a disk (for the CPU) or the host (for a CUDA device) takes memory away and brings it back. Then a plan chooses
    for each storage range whether it stays or waits elsewhere. A pass with other sizes gets a plan of its own, and the
    earlier one is used again when its sizes return.

    One device is kept within the budget: that on which the first range lies, or the first CUDA device of a program
    that saves on the CPU too. What lies elsewhere stays there.

    What counts, at every position of forward and backward: each range that autograd holds, from when it is saved to
    when autograd lets go, while it is in memory, be it for autograd, for the program or in flight. Parameters,
    buffers, gradients, workspaces and ranges below ``min_bytes`` do not count, so that the peak of the allocator
    is higher by these. In the measured pass memory is taken away as soon as the budget is near.

    Args:
        budget: bytes, such as ``"8GB"``, or a share such as ``0.5`` of what the first measured pass would hold.
        folder: where the file of what leaves the CPU is; as for :class:`~retrograd.memory.policies.disk.Disk`.
        min_bytes: smaller ranges stay, and are not counted.

    Attributes:
        plans: those that are known, the one used last at the end.

    Raises:
        SavedPolicyError: ``budget`` is not a size.
        BudgetError: while packing, the budget is too small.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        folder: str | os.PathLike[str] | None = None,
        min_bytes: int = _LEAST_BYTES,
    ) -> None:
        super().__init__()
        self.budget = budget
        self.folder = folder
        self.min_bytes = min_bytes
        given = read_budget(budget)
        self._bytes = given if isinstance(given, int) else None
        self._share = given if isinstance(given, float) else None
        self._known = KnownPlans()
        self._lock = threading.RLock()
        self._counter = ByteCounter()
        self._pass: PlannedPass | None = None
        self._offloader = Offloader(folder)
        self._leaving: InFlight[weakref.ref[Item]] = InFlight()
        self._measured = 0
        self._largest = 0

    @property
    def plans(self) -> list[Plan]:
        """All plans that are known, the one used last at the end.

        Raises:
            BudgetError: the pass that has just ended cannot be kept within the budget.
        """
        with self._lock:
            if self._pass is not None and self._pass.log.is_over:
                self._finish()
            return self._known.plans

    @property
    def plan(self) -> Plan | None:
        """The plan used last; None before a pass has ended."""
        plans = self.plans
        return plans[-1] if plans else None

    def pack(self, saved: Saved) -> Item | None:
        """Do with a storage range what the plan says.

        Raises:
            BudgetError: the pass before cannot be kept within the budget.
        """
        with self._lock:
            if not self._is_in_charge_of(saved.values):
                return None
            try:
                return self._pack(saved)
            except BaseException:  # an interrupt, say: what is known of this pass is not whole
                self._pass = None
                raise

    def _pack(self, saved: Saved) -> Item:
        values = saved.values
        self._largest = max(self._largest, saved.nbytes)
        current = self._begin()
        log = current.log
        began = log.now(values)
        number = log.add(saved)
        current.recognise(number, self._known)
        log.is_timed = current.known is None or not current.known.is_timed
        log.look_after()
        item = self._place(current, number, saved)
        if current.known is None:
            log.watch(number, item, values)
        current.items.append(weakref.ref(item))
        log.note("pack", number, began, log.now(values))
        return item

    def _is_in_charge_of(self, values: Tensor) -> bool:
        """Return whether values lie on the device that the plans are for."""
        if values.device != self._offloader.device:
            if not self._offloader.turn_to(values.device):
                return False
            self._pass = None
        return not (values.is_cuda and torch.cuda.is_current_stream_capturing())

    def release(self) -> None:
        """End threads. Plans stay."""
        self._offloader.close()
        if not self._measured and self._bytes is not None and self._largest > self._bytes:
            warn(
                f"The budget of {show_bytes(self._bytes)} cannot be met: a single tensor that was saved has"
                f" {show_bytes(self._largest)}. A second pass would have raised BudgetError."
            )

    # ---- passes ------------------------------------------------------------------------------------------------

    def _begin(self) -> PlannedPass:
        """Return the pass of the range that is packed now; a new one if the last one is over."""
        current = self._pass
        if current is not None and self._is_over(current):
            self._finish()
            current = None
        if current is None:
            current = self._pass = PlannedPass(self._counter)
            self._free(self._leaving.drain())
        return current

    def _is_over(self, current: PlannedPass) -> bool:
        """Return whether what is packed now belongs to another pass."""
        return current.log.is_over or (bool(current.log.asked) and not is_in_backward())

    def _finish(self) -> None:
        """End a pass: plan for the next one like it."""
        current, self._pass = self._pass, None
        assert current is not None
        log, known = current.log, current.known
        if known is not None and len(log.keys) == len(known.keys):
            planned = {number for number, one in enumerate(known.plan.recording.ranges) if one.asked is not None}
            if not log.asked <= planned:  # the pass it was made from was cut short
                self._known.forget(known)
            elif not known.is_timed and (recording := log.time_again(known.plan.recording)) is not None:
                self._known.add(known.keys, known.plan.with_times(recording), is_timed=True)
        elif known is None and log.asked and not log.is_cut_short:
            self._measured += 1
            self._make_plan(log)

    def _make_plan(self, log: PassNotes) -> None:
        recording = log.make_recording()
        if self._bytes is None:
            assert self._share is not None
            self._bytes = max(1, int(self._share * keep_all(recording).peak))
        link = self._offloader.measure(self._window)
        if not self._users:  # the plan is asked for after the end
            self._offloader.close()
        plan = make_plan(recording, link, self._bytes, self._offloader.destination)
        # a device's kernels are slow at first; a CPU's next pass would be timed with the threads that copy
        self._known.add(log.keys, plan, is_timed=plan.destination == "disk")

    # ---- ranges ---------------------------------------------------------------------------------------------

    def _place(self, current: PlannedPass, number: int, saved: Saved) -> Item:
        """Do what was chosen; what cannot be done elsewhere is kept."""
        load: Load | None = None
        if self._choose(current, number, saved) == "offload":
            load = self._offloader.copy_out(saved, self._window)
            if current.known is None:  # a thread that copies holds what it copies, as the program does
                self._offloader.finish()
        item = Item(saved.values, number, current, load)
        if load is not None:
            self._free(self._leaving.add(weakref.ref(item), saved.nbytes, self._window))
        return item

    @staticmethod
    def _free(leaving: list[weakref.ref[Item]]) -> None:
        """Free what was copied out."""
        for reference in leaving:
            if (item := reference()) is not None:
                item.leave()

    @property
    def _window(self) -> int:
        """Bytes that may be in flight on their way out."""
        assert self._bytes is not None
        return window_of(self._bytes)

    def _choose(self, current: PlannedPass, number: int, saved: Saved) -> Choice:
        """Choose by the plan; but nothing is kept for which there is no room now."""
        choice: Choice = "keep" if current.known is None else current.known.plan.choices[number]
        if choice != "keep" or self._bytes is None:
            return choice
        room = self._bytes - (self._window if current.known is None else 0)
        return "offload" if self._counter.total() + saved.nbytes > room else "keep"


def read_budget(budget: Budget) -> int | float:
    """Read a budget: bytes, or a share.

    Args:
        budget: bytes (``8_000_000_000``, ``"8GB"``, ``"500 MiB"``; a kB is 1000 bytes, a KiB 1024), or a share of
            what would be held: ``0.5``, ``"50%"``.

    Returns:
        Bytes as an int, or the share as a float in (0, 1].

    Raises:
        SavedPolicyError: it is neither.
    """
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    if isinstance(budget, float) and math.isfinite(budget) and 0 < budget <= 1:
        return budget
    if isinstance(budget, str) and (percent := _SHARE.fullmatch(budget)) and 0 < float(percent[1]) <= 100:
        return float(percent[1]) / 100
    is_size = isinstance(budget, str) and not budget[-1:].isdigit()  # a number alone may be meant as a share
    if is_size and (found := parse_bytes(str(budget))):
        return found
    raise SavedPolicyError(
        f"{budget!r} is not a valid budget.",
        repair='give bytes (8_000_000_000 or "8GB") or a share of what would be held (0.5, "50%").',
    )
