"""Gradients that are never cleared, or cleared before they are used."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.findings.detector import Detector, Words
from retrograd.findings.finding import Evidence, Finding
from retrograd.findings.record import Record
from retrograd.findings.updates import BY_HAND, Update, clears, list_cleared_passes
from retrograd.history.facts import Call

SHARE = 0.5
"""Share of the updates that must be concerned. A habit, not one step; our own choice."""

HELD = {"some", "unknown"}
"""Contents of ``.grad`` before a backward pass that adds to it."""

FEWEST = 3
"""Updates after which gradients that were never cleared are told from a warm-up."""


class MissingZeroGrad(Detector):
    """Gradients are never cleared."""

    slug = "missing-zero-grad"
    words = Words(
        says="Gradients are not cleared between updates, so each update is made of the sum of all batches so far.",
        example="Gradients are never cleared: 39 of 39 updates of SGD#1 add to what the batches before had left in "
        ".grad.",
        threshold="no zero_grad between updates, and .grad is neither None nor zero when backward begins, in more "
        "than half of at least 3 updates",
        source="TrainCheck (OSDI 2025) names the fault; the share and the number are our own choice",
        guard="accumulation, which clears every k-th step, has several backward passes an update, not none that is "
        "preceded by clearing; gradients set to None or zero by hand, and those of torch.autograd.grad, are seen as "
        "such",
        repair="call optimizer.zero_grad() before loss.backward().",
    )
    explains = (
        "exploding", "diverged", "loss-flat", "loss-noisy", "loss-spike", "learning-rate-too-high", "dead-units",
        "saturated", "vanishing", "clip-always-on", "nan-forward", "nan-backward", "nan-update",
        "loss-wrong-sign",
    )  # fmt: skip

    def check(self, record: Record) -> Iterator[Finding]:
        """See :class:`Detector`."""
        updates_of = record.updates_by_program()
        cleared = {name for name, updates in updates_of.items() if any(_is_cleared(each, record) for each in updates)}
        for optimizer, updates in updates_of.items():
            later = [update for update in updates if not update.is_first and update.named("backward")]
            stale = [update for update in later if _adds(update, record)]
            others = cleared - {optimizer}
            if others and optimizer not in cleared:  # what .grad held was asked of parameters of all of them
                stale = [update for update in later if update.named("backward")[-1].details.get("held") in HELD]
            if len(stale) >= FEWEST and len(stale) > SHARE * len(later):
                yield self._describe(optimizer, stale, later)

    def _describe(self, optimizer: str, stale: list[Update], later: list[Update]) -> Finding:
        is_never = len(stale) == len(later)
        how = "never" if is_never else "mostly not"
        whose = f"updates of {optimizer}" if optimizer else "updates by hand"
        return self.find(
            "critical",
            f"Gradients are {how} cleared: {len(stale)} of {len(later)} {whose} add to what the batches before had "
            "left in .grad, so each is made of their sum",
            site=optimizer,
            step=0 if is_never else stale[0].step,
            last_step=stale[-1].step,
            line=stale[0].named("backward")[-1].line,
            evidence=[
                Evidence("updates without zero_grad before them", len(stale), f"> {SHARE:g} of {len(later)}"),
                Evidence(".grad when backward began", str(stale[-1].named("backward")[0].details.get("held", ""))),
            ],
            precondition=["no zero_grad was called, and .grad was neither None nor zero when backward began"],
            refute="gradients are cleared in a way that leaves .grad as it is, or their sum is meant",
        )


def _adds(update: Update, record: Record) -> bool:
    held = {call.details.get("held") for call in update.named("backward")}
    return held <= HELD and not _is_cleared(update, record)


def _is_cleared(update: Update, record: Record) -> bool:
    return any(clears(call, update.optimizer, record.optimizers) for call in update.before)


class MisplacedZeroGrad(Detector):
    """Gradients are cleared between backward and the update."""

    slug = "zero-grad-misplaced"
    words = Words(
        says="Gradients are cleared after backward and before the update, which then has nothing to go by.",
        example="SGD#1 is given cleared gradients: zero_grad is called between backward and step before 50 of 50 "
        "updates.",
        threshold="zero_grad of the same optimizer, or of a module that holds all its parameters, after the last "
        "backward pass before the update, in more than half of the updates",
        source="our own choice",
        guard="clearing another optimizer's parameters there (as GANs do) is not meant; one with a closure is left out",
        repair="call zero_grad before loss.backward(), or after optimizer.step().",
    )
    explains = (
        "not-updated", "loss-flat", "missing-gradient", "learning-rate-too-low", "vanishing", "bad-init",
        "symmetric-init", "clip-after-step", "clip-before-backward",
    )  # fmt: skip

    def check(self, record: Record) -> Iterator[Finding]:
        """See :class:`Detector`."""
        for optimizer, updates in record.updates_by_program().items():
            cleared = [update for update in updates if _find_clearing(update, record) is not None]
            lost = [update for update in updates if list_cleared_passes(update, record.optimizers)]
            if optimizer != BY_HAND and cleared and len(cleared) > SHARE * len(updates):
                yield self._describe_cleared(optimizer, cleared, len(updates), record)
            elif len(lost) > SHARE * len(updates) and record.is_divided:
                yield self._describe_lost(optimizer, lost, len(updates), record)

    def _describe_cleared(self, optimizer: str, cleared: list[Update], among: int, record: Record) -> Finding:
        call = _find_clearing(cleared[0], record)
        return self.find(
            "critical",
            f"{optimizer} is given cleared gradients: zero_grad is called between backward and step before "
            f"{len(cleared)} of {among} updates, so nothing is learned",
            site=optimizer,
            span=cleared,
            line=call.line if call else "",
            evidence=[Evidence("updates from cleared gradients", len(cleared), f"> {SHARE:g} of {among}")],
            precondition=[f"what is cleared are the parameters of {optimizer}"],
            refute="parameters change from update to update by their gradients",
        )

    def _describe_lost(self, optimizer: str, lost: list[Update], among: int, record: Record) -> Finding:
        passes = lost[-1].named("backward")
        unused = list_cleared_passes(lost[-1], record.optimizers)
        return self.find(
            "critical",
            f"zero_grad is called between the micro-batches of {optimizer}: of {len(passes)} backward passes before "
            f"an update the gradients of {len(unused)} are cleared, though the loss is divided for their sum",
            site=optimizer,
            span=lost,
            line=next((call.line for call in lost[-1].before if clears(call, optimizer, record.optimizers)), ""),
            evidence=[
                Evidence("updates before which gradients are cleared unused", len(lost), f"> {SHARE:g} of {among}")
            ],
            precondition=["the loss is divided, and the passes are from one line"],
            refute="only the last micro-batch is meant to count",
        )


def _find_clearing(update: Update, record: Record) -> Call | None:
    if not update.named("backward"):
        return None
    behind = update.after_last("backward")
    return next((call for call in behind if clears(call, update.optimizer, record.optimizers)), None)
