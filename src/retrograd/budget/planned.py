"""Keep saved tensors under a byte budget, by a plan that is made from the first pass."""

from __future__ import annotations

import os
import threading
import weakref

import torch
from torch import Tensor

from retrograd.amounts import show_bytes
from retrograd.budget.backends import Load
from retrograd.budget.episode import Episode
from retrograd.budget.findings import Probed
from retrograd.budget.item import Item
from retrograd.budget.known_plans import KnownPlans
from retrograd.budget.ledger import Ledger
from retrograd.budget.listening import Listening
from retrograd.budget.marks import take_time
from retrograd.budget.measuring import Log
from retrograd.budget.offloader import Outlet
from retrograd.budget.origins import Origin
from retrograd.budget.plan import Plan, make_plan
from retrograd.budget.planner import keep_all, window_of
from retrograd.budget.recipe import Rerun, find_rerun
from retrograd.budget.simulation import Choice
from retrograd.budget.trial import Trial
from retrograd.hooks.operation_tap import CarryOut
from retrograd.hooks.saved import is_in_backward
from retrograd.notices import warn
from retrograd.policies.lossless import Lossless
from retrograd.policies.policy import Packed, Policy, Saved, Stays
from retrograd.policies.sizes import Budget, read_budget

_PROBED_PASSES = 32
"""Passes in which it is tried what lossless copies take, and what can be made again. A program of which no two passes
are alike is not held up for ever."""
_LEAST_BYTES = 16 * 1024


class Planned(Policy):
    """Holds no more than a budget of saved tensors in memory, at the least time that was found.

    The first pass is measured: all that is saved, when it is asked for and freed, what is computed between, and how
    fast a disk (for the CPU) or the host (for a CUDA device) takes memory away and brings it back. Then a plan chooses
    for each stretch of memory whether it stays, waits elsewhere, waits in fewer bytes, or is made again by the
    operations that made it, as it was when that was tried in the measured pass. A pass with other sizes gets a plan of
    its own, and the earlier one is used again when its sizes return.

    One device is kept within the budget: that on which the first stretch lies, or the first CUDA device of a program
    that saves on the CPU too. What lies elsewhere stays there.

    What counts, at every position of forward and backward: each stretch that autograd holds, from when it is saved to
    when autograd lets go, while it is in memory, be it for autograd, for the program or on its way. Parameters,
    buffers, gradients, workspaces and stretches below ``min_bytes`` do not count, so that the peak of the allocator
    is higher by these. In the measured pass memory is taken away as soon as the budget is near, but more is needed to
    try whether a stretch can be made again.

    Args:
        budget: bytes, such as ``"8GB"``, or a share such as ``0.5`` of what the first measured pass would hold.
        folder: where the file of what leaves the CPU is; as for :class:`~retrograd.policies.disk.disk.Disk`.
        min_bytes: smaller stretches stay, and are not counted.
        rerun: whether stretches may be made again, by running the operations that made them once more.

    Attributes:
        plans: those that are known, the one used last at the end.

    Raises:
        SavedPolicyError: ``budget`` is no size. While packing, :class:`~retrograd.errors.BudgetError`: it is too small.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        folder: str | os.PathLike[str] | None = None,
        min_bytes: int = _LEAST_BYTES,
        rerun: bool = True,
    ) -> None:
        self.budget = budget
        self.folder = folder
        self.min_bytes = min_bytes
        self.rerun = rerun
        given = read_budget(budget)
        self._bytes = given if isinstance(given, int) else None
        self._share = given if isinstance(given, float) else None
        self._known = KnownPlans()
        self._lock = threading.RLock()
        self._ledger = Ledger()
        self._lossless = Lossless(min_bytes=0)
        self._listening = Listening(min_bytes, is_allowed=rerun)
        self._tape = self._listening.tape
        self._episode: Episode | None = None
        self._outlet = Outlet(folder)
        self._probed = 0
        self._largest = 0
        self._users = 0

    @property
    def plans(self) -> list[Plan]:
        """All plans that are known, the one used last at the end.

        Raises:
            BudgetError: the pass that has just ended cannot be kept within the budget.
        """
        with self._lock:
            if self._episode is not None and self._episode.log.is_over:
                self._finish()
            return self._known.plans

    @property
    def plan(self) -> Plan | None:
        """The plan used last; None before a pass has ended."""
        plans = self.plans
        return plans[-1] if plans else None

    def pack(self, saved: Saved) -> Packed | None:
        """Do with a stretch of memory what the plan says.

        Raises:
            BudgetError: the pass before cannot be kept within the budget.
        """
        with self._lock:
            if not self._is_in_charge_of(saved.values):
                return None
            try:
                return self._pack(saved)
            except BaseException:  # an interrupt, say: what is known of this pass is not whole
                self._episode = None
                raise

    def _pack(self, saved: Saved) -> Item:
        values = saved.values
        self._largest = max(self._largest, saved.nbytes)
        episode = self._begin()
        log = episode.log
        began = log.now(values)
        number = log.add(saved)
        episode.recognise(number, self._known)
        self._tape.wanted = None if episode.known is None else episode.known.wanted
        self._tape.mark(number)
        log.is_timed = episode.known is None or not episode.known.is_timed
        log.look_after()
        origin = self._tape.find(values.untyped_storage(), saved.version) if episode.is_taped else None
        item = self._carry_out(episode, number, saved, origin)
        if origin is not None and saved.nbytes == values.untyped_storage().nbytes():
            origin.packed = weakref.ref(item)
        if episode.known is None:
            log.watch(number, item, values)
        episode.items.append(weakref.ref(item))
        log.note("pack", number, began, log.now(values))
        return item

    def _is_in_charge_of(self, values: Tensor) -> bool:
        """Whether it lies on the device that the plans are for."""
        if values.device != self._outlet.device:
            if not self._outlet.turn_to(values.device):
                return False
            self._episode = None
        return not (values.is_cuda and torch.cuda.is_current_stream_capturing())

    def watch_operations(self, stays: Stays) -> CarryOut | None:
        """The operations of a forward are seen where a plan is to be made, or has some of them run again."""
        with self._lock:
            if self._episode is not None and self._is_over(self._episode):
                self._finish()
            is_of_use, is_new = not self._known or self._known.have_reruns, self._episode is None
            return self._listening.begin_forward(stays, is_of_use=is_of_use, is_new=is_new)

    def open(self) -> None:
        """One more uses it."""
        self._users += 1

    def close(self) -> None:
        """One less does; with the last one threads end. Plans stay."""
        self._users -= 1
        if self._users:
            return
        self._tape.clear()
        self._outlet.close()
        if not self._probed and self._bytes is not None and self._largest > self._bytes:
            warn(
                f"The budget of {show_bytes(self._bytes)} cannot be met: a single tensor that was saved has"
                f" {show_bytes(self._largest)}. A second pass would have raised BudgetError."
            )

    # ---- passes ------------------------------------------------------------------------------------------------

    def _begin(self) -> Episode:
        """The pass that a stretch belongs to which is packed now."""
        episode = self._episode
        if episode is not None and self._is_over(episode):
            self._finish()
            episode = None
        if episode is None:
            episode = self._episode = Episode(self._ledger.total(), self._listening.begin_pass())
            self._outlet.see_off_all()
        return episode

    def _is_over(self, episode: Episode) -> bool:
        """Whether what is packed now belongs to another pass."""
        return episode.log.is_over or (bool(episode.log.asked) and not is_in_backward())

    def _finish(self) -> None:
        """A pass has ended: plan for the next one like it."""
        episode, self._episode = self._episode, None
        assert episode is not None
        log, known = episode.log, episode.known
        if known is not None and len(log.keys) == len(known.keys):
            planned = {number for number, one in enumerate(known.plan.recording.stretches) if one.asked is not None}
            if not log.asked <= planned:  # the pass it was made from was cut short
                self._known.forget(known)
            elif not known.is_timed and (recording := log.time_again(known.plan.recording)) is not None:
                self._known.add(known.keys, known.plan.with_times(recording), is_timed=True)
        elif known is None and log.asked and not log.is_cut_short:
            self._probed += 1
            if not self._listening.ask_for_another(episode.is_taped):
                self._make_plan(log)

    def _make_plan(self, log: Log) -> None:
        recording = log.make_recording()
        if self._bytes is None:
            assert self._share is not None
            self._bytes = max(1, int(self._share * keep_all(recording).peak))
        link = self._outlet.measure(self._window)
        if not self._users:  # the plan is asked for after the end
            self._outlet.close()
        plan = make_plan(recording, link, self._bytes, self._outlet.destination)
        # a device's kernels are slow at first, and it waits for a program that tries things; a CPU's next pass would be
        # timed with the threads that copy
        self._known.add(log.keys, plan, is_timed=plan.destination == "disk")

    # ---- stretches ---------------------------------------------------------------------------------------------

    def _carry_out(self, episode: Episode, number: int, saved: Saved, origin: Origin | None) -> Item:
        """Do what was chosen; what cannot be done elsewhere is kept."""
        values = saved.values
        choice = self._choose(episode, number, saved)
        is_probed = episode.known is None and self._probed < _PROBED_PASSES
        load: Load | None = None
        small: Packed | None = None
        rerun: Rerun | None = None
        if choice == "rerun":
            assert episode.known is not None
            rerun = self._find_rerun(saved, origin, is_held=True)
            if rerun is None or rerun.numbers != episode.known.plan.recording.stretches[number].rerun_numbers:
                rerun, choice = None, "offload"  # it is not what was tried
        if choice == "offload":
            load = self._outlet.carry_out(saved, self._window)
            if episode.known is None:  # a thread that copies holds what it copies, as the program does
                self._outlet.finish()
        elif choice == "lossless":
            small = self._lossless.pack(saved)
        elif is_probed:
            self._probe(episode.log, number, saved)
        item = Item(values, number, episode.log, self._ledger, episode.follow, load, small, rerun)
        item.witness, item.version = saved.witness, saved.version
        if load is not None:
            self._outlet.see_off(item, saved.nbytes, self._window)
        if is_probed:
            trial = self._find_rerun(saved, origin, is_held=False)
            item.trial = None if trial is None else Trial(trial)
        return item

    def _find_rerun(self, saved: Saved, origin: Origin | None, *, is_held: bool) -> Rerun | None:
        """How a stretch could be made again, if it is the whole of a storage."""
        if origin is None or saved.nbytes != saved.values.untyped_storage().nbytes():
            return None
        return find_rerun(origin, is_held=is_held)

    @property
    def _window(self) -> int:
        """Bytes that may be on their way out."""
        assert self._bytes is not None
        return window_of(self._bytes)

    def _choose(self, episode: Episode, number: int, saved: Saved) -> Choice:
        """By the plan; but nothing is kept for which there is no room now."""
        choice: Choice = "keep" if episode.known is None else episode.known.plan.choices[number]
        if choice != "keep" or self._bytes is None:
            return choice
        room = self._bytes - (self._window if episode.known is None else 0)
        return "offload" if self._ledger.total() + saved.nbytes > room else "keep"

    def _probe(self, log: Log, number: int, saved: Saved) -> None:
        """What would a lossless copy take?"""
        began = take_time(saved.values)
        small = self._lossless.pack(saved)
        squeezed = take_time(saved.values)
        if small is not None:
            small.restore()
            log.probed[number] = Probed(small.resident_bytes, began, squeezed, take_time(saved.values))
