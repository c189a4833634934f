"""Numbers of which a step has one: norms over all parameters, rates, losses of evaluations, and what users log.

They are taken from what is hooked already, at recorded steps, and no device is waited for. What does
not change from step to step (learning rates, the size of a batch) is noted when it changes.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import Optimizer

from retrograd.core.history.scalar_names import (
    BATCH,
    EVAL_LOSS,
    GRAD_NORM,
    GRAD_NORM_CLIPPED,
    LR,
    MEMORY,
    OWN,
    REFERENCE,
    SHARDS,
    UPDATE_RATIO,
)
from retrograd.core.history.sink import Moment, RowBatch
from retrograd.core.hooks.dispatch import carry_out_unseen
from retrograd.core.hooks.engine import without_functions
from retrograd.core.hooks.optimizer import held_by
from retrograd.core.identities import IdentityDict
from retrograd.core.limits import LIMITS
from retrograd.core.norms import join_norms, norm
from retrograd.core.ranks.placements import is_flattened, is_sharded, is_summand, own_values
from retrograd.core.recording.batches import BatchCount
from retrograd.core.recording.clock import Clock
from retrograd.core.recording.deliveries import Deliveries
from retrograd.core.recording.evaluation_losses import EvaluationLosses, Number, hold
from retrograd.core.recording.sink_log import EventLog
from retrograd.core.sites.site import Site
from retrograd.core.statistics.row import ROW
from retrograd.core.statistics.slab import sum_squares

_AGAIN = 32
"""Steps after which what has not changed is noted again, for those who read the newest steps alone."""

_SMALL = 8192
"""Elements of gradients, on the average, up to which calls of torch take longer than reading them does."""

_EPSILON = 1e-6
"""What torch adds to a norm before it divides by it."""


@dataclass(slots=True, eq=False)
class _Clip:
    """Gradients that were clipped together.

    Attributes:
        ids: identities of the parameters, or of their gradients.
        norm: their norm before; None where that is not known.
        limit: the norm that they were clipped to, if that tells the norm after; None where it is to be read.
        scale: what they were multiplied by then.
        is_whole: the norm is over all processes, though each has a part of the gradients.
    """

    ids: frozenset[int]
    norm: Number | None
    limit: float | None
    scale: Number = 1.0
    is_whole: bool = False


@dataclass(slots=True)
class _StepNorms:
    """Norms of parts of all gradients of a step, by what was measured together: squares add up."""

    before: dict[object, tuple[Number, Number]] = field(default_factory=dict)
    after: dict[object, tuple[Number, Number, float | None]] = field(default_factory=dict)
    is_known: bool = True
    is_partial: bool = False
    is_clipped: bool = False
    is_sharded: bool = False


class GradientNorms:
    """The norm over all parameters of the gradients that optimizers get, before and after clipping.

    Attributes:
        passes: how many backward passes have ended.
        has_parts: each process has a part of the parameters.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.has_parts = False
        self.scale: Number = 1.0
        """What gradients that lie there are multiplied by."""
        self._clips: list[_Clip] = []
        self._begun: IdentityDict[Optimizer, int] = IdentityDict()
        self._steps: dict[int, _StepNorms] = {}

    def pass_ends(self, scale: torch.Tensor | None) -> None:
        """Record a pass whose gradients are multiplied by ``scale``."""
        self.passes += 1
        self.scale = 1.0 if scale is None else scale
        self._clips.clear()

    def clip_norm(self, parameters: Sequence[torch.Tensor], found: Any, limit: float, norm_type: float) -> None:
        """Record a call of ``clip_grad_norm_``, which has found this norm."""
        known = hold(found) if norm_type == 2.0 else None
        is_told = norm_type == 2.0 and isinstance(self.scale, float)
        is_whole = is_sharded(found) and not is_summand(found)
        self._add_clip(parameters, known, limit if is_told else None, is_whole=is_whole)

    def clip_value(self, gradients: Sequence[torch.Tensor]) -> None:
        """Record a call of ``clip_grad_value_``, which has not changed anything yet."""
        norms = _measure(gradients)
        self._add_clip(gradients, norms[0] if len(norms) == 1 else None, None)

    def _add_clip(
        self, tensors: Sequence[torch.Tensor], norm: Number | None, limit: float | None, *, is_whole: bool = False
    ) -> None:
        ids = frozenset(map(id, tensors))
        before = next((clip for clip in self._clips if clip.ids & ids), None)
        if before is None:
            self._clips.append(_Clip(ids, norm, limit, self.scale, is_whole))
            return
        before.limit = None  # clipped twice: what was first is the norm before, and the norm after is read
        if before.ids != ids:
            before.ids, before.norm = before.ids | ids, None

    def update_begins(self, optimizer: Optimizer, step: int, *, may_read: bool = True) -> None:
        """Measure the gradients of an optimizer that is about to update, or take what clipping has found alone."""
        self._begun[optimizer] = self.passes
        self._take(optimizer, step, may_read)

    def update_ends(self, optimizer: Optimizer, step: int, *, may_read: bool = True) -> None:
        """Measure them now, where the update's closure has computed them."""
        if self._begun.pop(optimizer, self.passes) != self.passes:
            self._take(optimizer, step, may_read)

    def _take(self, optimizer: Optimizer, step: int, may_read: bool) -> None:
        if not (may_read or self._clips):
            self._steps.setdefault(step, _StepNorms()).is_partial = True
            return
        parameters = held_by(optimizer)
        pairs = [(each, gradient) for each in parameters if each.is_leaf and (gradient := each.grad) is not None]
        held = [gradient for _, gradient in pairs]
        norms = self._steps.setdefault(step, _StepNorms())
        clips = [clip for clip in self._clips if any(_is_among(pair, clip.ids) for pair in pairs)]
        norms.is_clipped |= bool(clips)
        has_parts = any(is_sharded(each) or is_flattened(each) for each in parameters[:1])
        self.has_parts |= has_parts
        covered = clips[0].ids if len(clips) == 1 else frozenset().union(*(clip.ids for clip in clips))
        for clip in clips:
            norms.is_known &= clip.norm is not None
            norms.before[clip] = 1.0 if clip.norm is None else clip.norm, clip.scale
        rest = [pair[1] for pair in pairs if not _is_among(pair, covered)] if clips else held
        if clips and all(clip.limit is not None for clip in clips) and not rest:
            norms.after.update((clip, (clip.norm, clip.scale, clip.limit)) for clip in clips)  # type: ignore[misc]
            norms.is_sharded |= has_parts and not all(clip.is_whole for clip in clips)
            return
        if not may_read:
            norms.is_partial = True
            return
        norms.is_sharded |= has_parts
        norms.is_known &= not any(clip.is_whole for clip in clips)  # the rest is known of this process alone
        scaler = getattr(optimizer, "grad_scale", None)  # set where an optimizer divides by it while it steps
        scale: Number = hold(scaler) if isinstance(scaler, torch.Tensor) else 1.0
        for number, found in enumerate(_measure(rest)):
            norms.before[(id(optimizer), number)] = found, scale
            if not clips:
                norms.after[(id(optimizer), number)] = found, scale, None
        for number, found in enumerate(_measure(held) if clips else ()):
            norms.after[(id(optimizer), number)] = found, scale, None

    def take_finished(self, end: int) -> Iterator[tuple[int, str, list[tuple[Number, Number, float | None]], str]]:
        """Take what is known of steps before ``end``: the step, the name, the parts, and how they add up over ranks."""
        for step in [step for step in self._steps if step < end]:
            norms = self._steps.pop(step)
            text = SHARDS if norms.is_sharded else OWN
            if norms.is_partial:
                continue
            if norms.is_known and norms.before:
                yield step, GRAD_NORM, [(*part, None) for part in norms.before.values()], text
            if norms.is_clipped and norms.after:
                yield step, GRAD_NORM_CLIPPED, list(norms.after.values()), text


def _is_among(pair: tuple[torch.Tensor, torch.Tensor], ids: frozenset[int]) -> bool:
    return id(pair[0]) in ids or id(pair[1]) in ids


def _measure(gradients: Sequence[torch.Tensor]) -> list[Number]:
    """The norm of all of them: a number for each device."""
    if gradients and sum(map(torch.numel, gradients)) <= _SMALL * len(gradients):
        squares = sum_squares(list(gradients))
        if squares is not None:
            return [math.sqrt(squares)]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        values = own_values(gradient) if is_sharded(gradient) else gradient
        values = values.coalesce().values() if values.is_sparse else values
        by_device.setdefault(values.device, []).append(values)
    return [hold(carry_out_unseen(lambda values=values: _norm_of(values))) for values in by_device.values()]  # type: ignore[misc]


@torch.no_grad()
def _norm_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    if {each.dtype for each in tensors} in ({torch.float32}, {torch.float64}):
        return get_total_norm(tensors, foreach=tensors[0].device.type in ("cpu", "cuda"))
    return join_norms([norm(each).float() for each in tensors])


# ---- memory ----

_OF_PROCESS = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def measure_memory(tensors: Sequence[torch.Tensor]) -> float | None:
    """Bytes of the devices on which some tensors are, or of the process where that is the CPU; None if not known."""
    devices = {each.device for each in tensors if each.device.type == "cuda"}
    if devices:
        return float(sum(torch.cuda.memory_allocated(device) for device in devices))
    with suppress(OSError, ValueError, IndexError):
        return float(int(_OF_PROCESS.read_text(encoding="ascii").split()[1]) * _PAGE)
    return None


# ---- all of them ----


class ScalarWatch:
    """Notes the scalars of a recording.

    Args:
        clock: says when it is.
        events: takes them.
        name: finds the name of an optimizer.
        describe: takes facts for the manifest.
        deliveries: bring numbers from devices.
        see_optimizer: called with each optimizer at its first update, and when its groups change.
    """

    def __init__(
        self,
        clock: Clock,
        events: EventLog,
        name: Callable[[Optimizer], str],
        describe: Callable[..., None],
        deliveries: Deliveries,
        see_optimizer: Callable[[Optimizer], None],
    ) -> None:
        self._see_optimizer = see_optimizer
        self._clock, self._events, self._name, self._describe = clock, events, name, describe
        self._deliveries = deliveries
        self.norms = GradientNorms()
        self.evaluations = EvaluationLosses(clock, events.fault)
        self._waiting: list[tuple[Moment, str, str, Number]] = []
        self._updates: dict[int, tuple[float, float]] = {}
        self._rates: dict[str, tuple[int, Any]] = {}
        self._batch: tuple[int, str, int] = (-_AGAIN, "", -1)
        self._batches = BatchCount(describe)
        self._optimizers: IdentityDict[Optimizer, int] = IdentityDict()
        self._described: dict[str, dict[str, Any]] = {}
        self._measured_memory = 0.0
        self._of_updates: dict[bytes, Any] = {}

    # ---- what happens ----

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """A model is called by the program itself."""
        self.evaluations.forward_begins()
        if not self._clock.is_noted or not torch.is_grad_enabled() or not model.training:
            return
        self._batches.forward_begins(model, arguments, self._clock.step)

    def pass_ends(self, scale: torch.Tensor | None) -> None:
        """A backward pass of the models has ended."""
        self._batches.pass_ends()
        self.norms.pass_ends(scale)

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        """Such a call has ended."""
        if not (model.training and torch.is_grad_enabled()):
            self.evaluations.forward_ends(model, output)

    def called(self, name: str, about: object, frame: FrameType, **details: Any) -> None:
        """The program clips gradients, or divides them by the scale of the loss."""
        if not self._clock.is_noted:
            return
        try:
            if name == "scaler.unscale_":
                self.norms.scale = 1.0
            elif name.startswith("clip_grad"):
                parameters = [about] if isinstance(about, torch.Tensor) else list(about)  # type: ignore[call-overload]
                if name == "clip_grad_norm_":
                    self.norms.clip_norm(parameters, details["value"], details["max_norm"], details["norm_type"])
                elif self._clock.on:
                    self.norms.clip_value(parameters)
        except Exception as error:
            self._events.fault(name, error)

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update."""
        with without_functions():
            self.norms.update_begins(optimizer, self._clock.step, may_read=self._clock.on)
        self._see_rates(optimizer)
        if self._optimizers.get(optimizer) != len(optimizer.param_groups):
            self._optimizers[optimizer] = len(optimizer.param_groups)
            self._describe_optimizer(optimizer)
            self._see_optimizer(optimizer)

    def update_ends(self, optimizer: Optimizer) -> None:
        """It has updated."""
        with without_functions():
            self.norms.update_ends(optimizer, self._clock.step, may_read=self._clock.on)
        now = time.monotonic()
        if now - self._measured_memory > LIMITS.memory_seconds:
            self._measured_memory = now
            memory = measure_memory(held_by(optimizer))
            if memory is not None:
                self._note(self._clock.step, MEMORY, memory)

    def see_rows(self, batch: RowBatch, numbers: bytes, sites: Sequence[Site]) -> None:
        """Add up the updates among rows that are handed over; ``numbers`` are those of the rows."""
        chosen = self._of_updates.get(numbers)
        if chosen is None:
            if len(self._of_updates) > _AGAIN:
                self._of_updates.clear()
            rows = np.frombuffer(numbers, np.int32).tolist()
            chosen = np.flatnonzero([sites[row].quantity == "update" for row in rows])
            self._of_updates[numbers] = chosen
        if len(chosen):
            table = np.frombuffer(batch.rows, ROW).take(chosen)
            finite = table["count"] - table["nan"] - table["pos_inf"] - table["neg_inf"]
            squares = float(table["m2"].sum() + (table["sum"] ** 2 / np.maximum(finite, 1)).sum())
            before = self._updates.get(batch.moment.step, (0.0, 0.0))
            self._updates[batch.moment.step] = before[0] + squares, before[1] + float(table["reference"].sum())

    def log(self, numbers: Mapping[str, Any], step: int | None) -> None:
        """Take what the program logs."""
        moment = Moment(self._clock.step if step is None else step)
        for name, number in numbers.items():
            self._waiting.append((moment, name, "", hold(number)))
        if len(self._waiting) > LIMITS.facts_at_once and threading.get_ident() == self._clock.thread:
            self._deliveries.deliver()  # no step may end for long
            self._write()

    def drain(self, *, is_last: bool = False) -> None:
        """Hand over what is complete, when its numbers have come."""
        clock = self._clock
        end = clock.step + (is_last or clock.is_over)
        norms = list(self.norms.take_finished(end))
        for step in [step for step in self._batches.samples if step < end]:
            count, kind = self._batches.samples.pop(step)
            if self._batch[1:] != (kind, count) or step - self._batch[0] >= _AGAIN:
                self._batch = step, kind, count
                self._note(step, BATCH, float(count), kind)
        evaluations = list(self.evaluations.take_finished(end))
        if not (norms or evaluations or self._updates or self._waiting):
            return
        numbers: list[Number] = [
            each for _, _, parts, _ in norms for found, scale, _ in parts for each in (found, scale)
        ]
        numbers += [each for _, total, count in evaluations for each in (total, count)]

        def hand_on(values: list[float]) -> None:
            came = iter(values)
            self._note_updates(end)
            for step, name, parts, text in norms:
                self._note_norm(step, name, [(next(came), next(came), limit) for _, _, limit in parts], text)
            for step, _, _ in evaluations:
                total, count = next(came), next(came)
                self._note(step, EVAL_LOSS, total / count if count else float("nan"))
            self._write()

        self._deliveries.add_numbers(numbers, hand_on)

    # ---- keeping ----

    def _note_updates(self, end: int) -> None:
        """Note updates of steps before ``end``, of which all rows have been seen."""
        for step in [step for step in self._updates if step < end]:
            squares, reference = self._updates.pop(step)
            if reference > 0 and self.norms.has_parts:
                self._note(step, UPDATE_RATIO, squares**0.5, SHARDS)
                self._note(step, UPDATE_RATIO, reference**0.5, REFERENCE)
            elif reference > 0:
                self._note(step, UPDATE_RATIO, (squares / reference) ** 0.5)

    def _note_norm(self, step: int, name: str, parts: Sequence[tuple[float, float, float | None]], text: str) -> None:
        squares = 0.0
        for found, scale, limit in parts:
            value = found / scale
            if limit is not None:
                value *= min(1.0, limit / (value + _EPSILON))
            squares += value * value
        self._note(step, name, squares**0.5, text)

    def _note(self, step: int, name: str, value: Number, text: str = OWN) -> None:
        self._waiting.append((Moment(step), name, text, value))

    def _write(self) -> None:
        """Hand over what is waiting, when its numbers have come."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._deliveries.add_numbers([each[-1] for each in waiting], partial(self._write_down, waiting))

    def _write_down(self, waiting: Sequence[tuple[Moment, str, str, Number]], values: Sequence[float]) -> None:
        for (moment, name, text, _), value in zip(waiting, values, strict=True):
            self._events.note("scalar", name, value=value, text=text, moment=moment)

    def _see_rates(self, optimizer: Optimizer) -> None:
        name, step = self._name(optimizer), self._clock.step
        for number, group in enumerate(optimizer.param_groups):
            rate = group.get("lr")
            if rate is None:
                continue
            key, now = f"{name}[{number}]", hold(rate)
            before = self._rates.get(key)
            if before is None or isinstance(now, torch.Tensor) or before[1] != now or step - before[0] >= _AGAIN:
                self._rates[key] = step, now
                self._note(step, LR, now, key)

    def _describe_optimizer(self, optimizer: Optimizer) -> None:
        name = self._name(optimizer)
        groups = [
            {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        told = [{key: value for key, value in group.items() if value is not _NOT_PLAIN} for group in groups]
        self._described[name] = {"name": name, "type": type(optimizer).__name__, "groups": told}
        self._describe(optimizers=list(self._described.values())[: LIMITS.described_optimizers])


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        found = [_plain(each) for each in value]
        return _NOT_PLAIN if any(each is _NOT_PLAIN for each in found) else found
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return float(value)
    return value if isinstance(value, bool | int | float | str | None) else _NOT_PLAIN
