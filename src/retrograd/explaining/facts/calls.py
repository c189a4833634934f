"""Calls that the program makes, in order, with their line; and its optimizers.

Most steps make the same calls from the same lines. So a step whose calls were seen before is noted as a repetition of
that step, with its numbers alone, many steps at a time.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.core.history.fact import tell_number
from retrograd.core.history.facts import MOST_OPTIMIZERS, Call, OptimizerMade, Repeats
from retrograd.core.history.sink import Moment
from retrograd.core.hooks.backward import EngineRun, backward_followers, runs_in_another_thread
from retrograd.core.hooks.discovery import constructed_optimizers, construction_line
from retrograd.core.hooks.dispatch import read_unseen
from retrograd.core.hooks.engine import grad_enabled
from retrograd.core.hooks.optimizer import call_listeners, held_by
from retrograd.core.hooks.parts import gradient_of, parameters_of
from retrograd.core.hooks.torch_calls import program_frame
from retrograd.core.identities import IdentityDict, IdentitySet
from retrograd.core.limits import LIMITS
from retrograd.core.recording.deliveries import is_far
from retrograd.core.recording.fact_source import FactHost, FactSource

Details = tuple[tuple[str, Any], ...]
Key = tuple[str, str, int, str, Details]
"""Parts of a call that are the same when it is repeated: name, file and line, what it is about, details."""

Numbers = tuple[Any, Any]
"""Parts of a repeated call that differ: its value, and learning rates."""

_NOTHING: Numbers = (None, None)
_MOST_WAITING = 1024
"""Steps whose numbers may wait on a device."""
_MOST_CALLS = 2000
"""Calls of one step that are noted."""
_MOST_SAMPLED = 200
"""Parameters of a model that are looked at for one with a gradient."""
_MOST_PATTERNS = 256
"""Steps that later ones can be repetitions of."""


class CallSource(FactSource):
    """Records calls."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._optimizers = host.share(OptimizerNotes)
        self._thread = threading.get_ident()
        self._step = 0
        self._keys: list[Key] = []
        self._numbers: list[Numbers] = []
        self._patterns: dict[int, int] = {}
        self._last: dict[int, str] = {}
        self._made: list[tuple[int, int, list[Numbers]]] = []
        self._since = 0.0
        self._updating: weakref.ref[Optimizer] | None = None
        self._sampled: list[weakref.ref[torch.Tensor]] = []

    # ---- what happens ----

    def begin(self) -> None:
        """Recording begins."""
        self._step = self.host.step
        call_listeners.add(self)
        backward_followers.add(self)

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """A recorded model is called."""
        self._thread = threading.get_ident()
        self._turn()
        about = self.host.models.find(model) or ""
        self._add("forward", about, sys._getframe(1), (("training", model.training), ("grad", grad_enabled())))

    def run_begins(self, run: EngineRun) -> None:
        """A backward pass is about to run; of another thread's nothing is looked at: this one may clear gradients."""
        if run.is_nested or threading.get_ident() != self._thread:
            return
        details: Details = (("retain_graph", run.keeps_graph), ("create_graph", run.creates_graph))
        if run.accumulates:
            details = (*details, ("held", self._look_at_gradients()))
        if run.inputs:
            details = (*details, ("inputs", len(run.inputs)))
        self._add("backward" if run.accumulates else "grad", "", sys._getframe(1), details)

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """A backward pass has ended."""
        if run.accumulates and not run.is_nested and error is None and threading.get_ident() == self._thread:
            self._sample_gradients()

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update."""
        if threading.get_ident() != self._thread:
            return
        self._updating = weakref.ref(optimizer)
        self._optimizers.see(optimizer)

    def update_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has updated, or loss scaling has skipped it."""
        if threading.get_ident() != self._thread:
            return
        if self._updating is not None and self._updating() is optimizer:  # a closure's calls come before
            self._updating = None
            about = self._optimizers.find(optimizer)
            self._add("step", about, sys._getframe(1), (), (None, _hold([g.get("lr") for g in optimizer.param_groups])))
        self._turn()

    def called(self, name: str, about: object, frame: FrameType, **details: Any) -> None:
        """The program has called something."""
        if threading.get_ident() != self._thread:
            return
        try:
            numbers = _hold(details.pop("value", None)), _hold(details.pop("lr", None))
            if isinstance(about, Optimizer):
                details["optimizer"] = type(about).__name__
            if name.startswith("clip"):
                details["parameters"] = len(about) if isinstance(about, list | tuple) else 1
            self._add(name, self._describe(about), frame, tuple(details.items()), numbers)
        except Exception as error:
            self.host.fault(name, error)

    def drain(self) -> None:
        """A device may be waited for."""
        if len(self._made) >= LIMITS.facts_at_once or (
            self._made and time.monotonic() - self._since > LIMITS.facts_seconds
        ):
            self._write()

    def end(self) -> None:
        """Recording ends."""
        call_listeners.remove(self)
        backward_followers.remove(self)
        self._close_step()
        self._write()
        self._optimizers.end()

    # ---- gradients ----

    def _sample_gradients(self) -> None:
        """Choose parameters that have a gradient."""
        if runs_in_another_thread():
            return
        for find in self._sampled:
            parameter = find()
            if parameter is not None and gradient_of(parameter) is not None:
                return
        every = [each for _, model in self.host.models for each in islice(parameters_of(model), _MOST_SAMPLED)]
        found = [each for each in every if gradient_of(each) is not None]
        self._sampled = [weakref.ref(each) for each in (*found[:1], *found[-1:])]

    def _look_at_gradients(self) -> str:
        if runs_in_another_thread():
            return "unknown"
        held: list[torch.Tensor] = []
        for find in self._sampled:
            parameter = find()
            gradient = None if parameter is None else gradient_of(parameter)
            if gradient is not None:
                held.append(gradient)
        if not held:
            return "none"
        if any(map(is_far, held)):
            return "unknown"
        return "some" if any(read_unseen(gradient, _has_some) for gradient in held) else "zero"

    # ---- keeping ----

    def _describe(self, about: object) -> str:
        if isinstance(about, Optimizer):
            return self._optimizers.find(about)
        if isinstance(about, nn.Module):
            return self.host.models.find(about) or ""
        return "" if about is None or isinstance(about, list | tuple | torch.Tensor) else type(about).__name__

    def _add(self, name: str, about: str, frame: FrameType, details: Details = (), numbers: Numbers = _NOTHING) -> None:
        if threading.get_ident() == self._thread and len(self._keys) < _MOST_CALLS:
            caller = program_frame(frame)
            self._keys.append((name, caller.f_code.co_filename, caller.f_lineno, about, details))
            self._numbers.append(numbers)

    def _turn(self) -> None:
        """Close the step if another has begun."""
        step = self.host.step
        if step != self._step:
            self._close_step()
            self._step = step

    def _close_step(self) -> None:
        if not self._keys:
            return
        keys, numbers = self._keys, self._numbers
        self._keys, self._numbers = [], []
        pattern = hash(tuple(keys))
        like = self._patterns.get(pattern)
        if like is None:
            self._write()
            begins_anew = self._learn(pattern)
            then = partial(self._note_all, keys, numbers, self._step, begins_anew)
            self.host.deliveries.add_numbers(_flatten(numbers), then)
        else:
            if not self._made:
                self._since = time.monotonic()
            self._made.append((self._step, like, numbers))
            if len(self._made) >= _MOST_WAITING:
                self._write()

    def _learn(self, pattern: int) -> bool:
        """Take a pattern for that of this step; returns whether there had been too many."""
        begins_anew = len(self._patterns) >= _MOST_PATTERNS
        if begins_anew:
            self._patterns.clear()
        self._patterns[pattern] = self._step
        return begins_anew

    def _note_all(
        self, keys: list[Key], numbers: list[Numbers], step: int, begins_anew: bool, values: list[float]
    ) -> None:
        """Record each call."""
        if begins_anew:
            self._last.clear()
        known = list(_fill(numbers, iter(values)))
        self._last[step] = ";".join(map(_tell, known))
        for (name, file, line, about, details), (value, rates) in zip(keys, known, strict=True):
            lr = {} if rates is None else {"lr": list(rates)}
            self.host.note_fact(
                Call(
                    name=name,
                    value=float("nan") if value is None else value,
                    moment=Moment(step),
                    line=f"{file}:{line}",
                    about=about,
                    details=dict(details) | lr,
                )
            )

    def _write(self) -> None:
        """Record the steps that wait."""
        made, self._made = self._made, []
        if made:
            numbers = [each for _, _, of_step in made for each in _flatten(of_step)]
            self.host.deliveries.add_numbers(numbers, partial(self._note_repeats, made))

    def _note_repeats(self, made: Sequence[tuple[int, int, list[Numbers]]], values: list[float]) -> None:
        came = iter(values)
        told = [self._tell_repeat(step, like, list(_fill(numbers, came))) for step, like, numbers in made]
        steps = tuple(json.loads(f"[{','.join(told)}]"))
        self.host.note_fact(Repeats(value=len(steps), moment=Moment(steps[-1][0]), steps=steps))

    def _tell_repeat(self, step: int, like: int, numbers: list[Numbers]) -> str:
        """A repetition as JSON, with the numbers that are not those of the step like this one before."""
        now = list(map(_tell, numbers))
        before, self._last[like] = self._last[like], ";".join(now)
        if before == self._last[like]:
            return f"[{step},{like},[]]"
        pairs = enumerate(zip(now, before.split(";"), strict=True))
        return f"[{step},{like},[{','.join(f'[{index},{new}]' for index, (new, old) in pairs if new != old)}]]"


def _hold(number: Any) -> Any:
    """A number as it is now, not waited for where it is on a device."""
    if isinstance(number, list | tuple):
        return [_hold(each) for each in number]
    if isinstance(number, torch.Tensor):
        return read_unseen(number, _copy)
    return number


def _copy(number: torch.Tensor) -> Any:
    return number.detach().clone() if is_far(number) else number.item()


def _has_some(gradient: torch.Tensor) -> bool:
    return bool(gradient.any())


def _flatten(numbers: Sequence[Numbers]) -> list[Any]:
    """The numbers of calls, without those that are none."""
    return [each for value, rates in numbers for each in (value, *(rates or ())) if each is not None]


def _fill(numbers: Sequence[Numbers], came: Iterator[float]) -> Iterator[Numbers]:
    """The same, as they have come."""
    for value, rates in numbers:
        known = None if value is None else next(came)
        yield known, None if rates is None else tuple(None if each is None else next(came) for each in rates)


def _tell(numbers: Numbers) -> str:
    """Numbers as the inside of a JSON list."""
    if numbers == _NOTHING:
        return "null,null"
    value, rates = numbers
    told = "null" if rates is None else f"[{','.join(map(tell_number, rates))}]"
    return f"{'null' if value is None else tell_number(value)},{told}"


# ---- optimizers ----

_PLAIN = (bool, int, float, str, type(None))


class OptimizerNotes:
    """Records each optimizer at its first update, and when its groups change."""

    def __init__(self, host: FactHost) -> None:
        self._host = host
        self._groups: IdentityDict[Optimizer, tuple[int, ...]] = IdentityDict()
        self._held: IdentitySet[torch.Tensor] = IdentitySet()

    def list_held(self) -> IdentitySet[torch.Tensor]:
        """The tensors that optimizers hold, or held, which have updated."""
        for optimizer in self._groups:
            self._held.update(held_by(optimizer))
        return self._held

    def find(self, optimizer: Optimizer) -> str:
        """Its name: ``SGD``, ``SGD_2``."""
        return self._host.optimizers.find(optimizer, MOST_OPTIMIZERS)

    def see(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update."""
        groups = tuple([len(group["params"]) for group in optimizer.param_groups])
        if self._groups.get(optimizer) != groups:
            self._groups[optimizer] = groups
            self._held.update(held_by(optimizer))
            self._note(optimizer)

    def end(self) -> None:
        """Recording ends: note those that hold parameters of the recorded models and have never updated."""
        for optimizer in constructed_optimizers():
            if optimizer not in self._groups and any(
                self._host.name_parameter(parameter)
                for group in optimizer.param_groups
                for parameter in group["params"]
            ):
                self._note(optimizer, has_updated=False)

    def _note(self, optimizer: Optimizer, *, has_updated: bool = True) -> None:
        number = self._host.optimizers.number(optimizer)
        if number > MOST_OPTIMIZERS:
            return
        self._host.note_fact(
            OptimizerMade(
                name=self.find(optimizer),
                type=type(optimizer).__name__,
                number=number,
                value=sum(len(group["params"]) for group in optimizer.param_groups),
                line=construction_line(optimizer),
                groups=tuple(self._describe(group) for group in optimizer.param_groups),
                has_updated=has_updated,
            )
        )

    def _describe(self, group: Mapping[str, Any]) -> dict[str, Any]:
        names = [self._host.name_parameter(parameter) for parameter in group["params"]]
        known = [name for name in names if name is not None]
        settings = {name: _plain(value) for name, value in group.items() if name != "params" and _is_plain(value)}
        return settings | {"parameters": known, "unknown": len(names) - len(known)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return float(value) if isinstance(value, torch.Tensor) else value
