"""Units of activations: which of them are zero, or at their bounds, for all samples; which rows embeddings look up.

What is reduced stays on its device until it may be read. A ReLU that is called as a function is looked at where its
argument was made, which the operations of the first look tell.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from retrograd.core.history.fact import NOW
from retrograd.core.history.facts import MADE_BEFORE, Operation, Units
from retrograd.core.history.sink import Moment
from retrograd.core.hooks.argument_taps import unwatch_arguments, watch_arguments
from retrograd.core.hooks.dispatch import carry_out_unseen, without_graph
from retrograd.core.hooks.engine import grad_enabled, is_in_backward, is_tracing, is_transformed, without_functions
from retrograd.core.hooks.module import unwatch_forward, watch_forward
from retrograd.core.hooks.names import walk_modules
from retrograd.core.hooks.nested import Keys
from retrograd.core.identities import IdentityDict
from retrograd.core.recording.deliveries import Arrays
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.core.sites.site import Site
from retrograd.explaining.facts.operation_notes import OperationNotes
from retrograd.explaining.facts.output_tap import OutputTap, Switch

OFTEN, SELDOM, SETTLED = 16, 128, 512
"""Every so many recorded steps units are looked at, for each 16 modules; the second once the third were recorded."""

_FIRST = 4
"""The first steps, all of which are looked at; and looks after which zeros last."""

_MOST_WATCHED, _MOST_CALLS, _MOST_ROWS = 64, 4, 1 << 22
"""Modules that are watched, calls of each that are looked at, rows of an embedding."""

_RECTIFIERS = (nn.ReLU, nn.ReLU6)
_RECTIFYING = ("relu", "relu_", "relu6")
_BOUNDED: dict[type[nn.Module], tuple[float, float]] = {nn.Tanh: (-0.99, 0.99), nn.Sigmoid: (0.01, 0.99)}
_CHANNELS = ("conv", "batch_norm", "group_norm", "instance_norm")


@dataclass(frozen=True, slots=True)
class _Reduced:
    """Reduced output, on its device.

    Attributes:
        samples: elements of each unit.
        reduced: of each unit how many are at the bounds, of a bounded function; of others the largest.
    """

    samples: int
    reduced: Tensor


@dataclass(slots=True)
class _Streaks:
    """Since which look each unit of a site is zero.

    Attributes:
        begins: for each unit the step, where it is zero.
        looks: for each unit, at how many looks it has been since; 0 where it is not zero.
    """

    begins: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    looks: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, is_zero: npt.NDArray[np.bool_], step: int) -> tuple[int, int]:
        """Returns how many have been zero at all looks since which step; that of most of those that were at several."""
        if len(self.begins) != len(is_zero):
            self.begins, self.looks = np.zeros((2, len(is_zero)), np.int64)
        self.looks = (self.looks + 1) * is_zero
        self.begins[self.looks == 1] = step
        longest = int(self.looks.max(initial=0))
        if not longest:
            return 0, step
        begins = np.sort(self.begins[self.looks >= min(_FIRST, longest)])
        since = int(begins[int(0.9 * (len(begins) - 1))])
        return int(np.count_nonzero(self.begins[self.looks > 0] <= since)), since


@dataclass(slots=True)
class _LookedUpRows:
    """Rows of an embedding that were looked up: a mask on its device, and how many look-ups since the last look.

    It is made when the first ones come.
    """

    rows: int
    lookups: int = 0
    mask: Tensor | None = None

    def add(self, indices: Tensor) -> None:
        if self.mask is None or self.mask.device != indices.device:
            self.mask = torch.zeros(self.rows, dtype=torch.bool, device=indices.device)
        mask = self.mask
        carry_out_unseen(lambda: mask.index_fill_(0, indices.reshape(-1).long(), True))
        self.lookups += indices.numel()


class _RowTap:
    """Observes what an embedding is called with while its switch is on."""

    def __init__(self, switch: Switch, see: Callable[[Any], None]) -> None:
        self.switch = switch
        self._see = see

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook."""
        given = (*args, *kwargs.values())
        if self.switch.awake and given and not is_in_backward() and not is_tracing():
            with without_functions():
                self._see(given[0])

    def after_call(self, module: nn.Module, output: Any) -> None:
        """Do nothing."""

    def see_in_compiled_code(self, tensors: Sequence[tuple[Keys, Tensor]], trains: bool) -> tuple[()]:
        """Receive what a call inside compiled code is made with."""
        if not is_in_backward():
            for _, tensor in tensors[:1]:
                self._see(tensor)
        return ()


class UnitLooks(FactSource):
    """Records facts about units at every 16th recorded step, later at every 128th."""

    rests = True

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._looking, self._training = Switch(), Switch()
        self._moment = NOW
        self._watches: IdentityDict[nn.Module, OutputTap] = IdentityDict()
        self._embeddings: IdentityDict[nn.Module, _RowTap] = IdentityDict()
        self._modules: dict[str, weakref.ref[nn.Module]] = {}
        self._channels_first: set[str] = set()
        self._bounded: set[str] = set()
        self._held: dict[str, list[_Reduced]] = {}
        self._streaks: dict[str, _Streaks] = {}
        self._rows: dict[str, _LookedUpRows] = {}
        self._well: set[str] = set()
        """Sites whose last fact told that all units are well; there is no other before that has changed."""

    def model_added(self, name: str, model: nn.Module) -> None:
        """Watch its activations."""
        for entry in walk_modules(name, model):
            self._modules[entry.path] = weakref.ref(entry.tapped)
            if isinstance(entry.module, (*_RECTIFIERS, *_BOUNDED)):
                self._watch_units(entry.path, _BOUNDED.get(type(entry.module)))
            elif isinstance(entry.module, nn.Embedding):
                self._watch_rows(entry.path, entry.module.num_embeddings)

    def operations_noted(self, notes: OperationNotes) -> None:
        """Watch what goes into activations that are called as functions, and into nothing else."""
        noted = notes.noted
        uses = Counter(operand for each in noted if not each.cuts for operand in each.operands)
        for each in noted:
            place = each.operands[0] if each.name in _RECTIFYING and each.operands else MADE_BEFORE
            if place >= 0:
                self._follow(noted[place], each.module, is_used_once=uses[place] == 1)

    def _follow(self, source: Operation, module: str, *, is_used_once: bool) -> None:
        if source.name.startswith(_CHANNELS):
            self._channels_first.update((module, source.module))
        made_in = self._modules.get(source.module, lambda: None)()
        is_layer = made_in is not None and not made_in._modules and module != source.module
        if is_used_once and is_layer and self._modules.get(module, lambda: None)() not in self._watches:
            self._watch_units(source.module, None)

    def _watch_units(self, path: str, bounds: tuple[float, float] | None) -> None:
        if bounds is not None:
            self._bounded.add(path)
        if sum(watch.switch is self._looking for watch in self._watches.values()) < _MOST_WATCHED:
            self._watch(path, OutputTap(self._looking, partial(self._see, path, bounds)))

    def _watch_rows(self, path: str, rows: int) -> None:
        if rows <= _MOST_ROWS:
            self._rows[path] = _LookedUpRows(rows)
            module, watch = self._modules[path](), _RowTap(self._training, partial(self._see_rows, path))
            if module is not None and module not in self._embeddings:
                self._embeddings[module] = watch
                watch_arguments(module, watch)

    def _watch(self, path: str, watch: OutputTap) -> None:
        module = self._modules[path]()
        if module is not None and module not in self._watches:
            self._watches[module] = watch
            watch_forward(module, watch)

    # ---- what happens ----

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """Sample, if it is time."""
        trains = grad_enabled() and model.training and self.host.is_recorded
        self._training.awake = trains
        self._looking.awake = trains and self._is_time(self.host.recorded)
        if self._looking.awake:
            self._moment = self.host.now

    def _is_time(self, recorded: int) -> bool:
        groups = 1 + max(len(self._watches) - 1, 0) // OFTEN
        return recorded < _FIRST or recorded % ((OFTEN if recorded < SETTLED else SELDOM) * groups) == 0

    def forward_ends(self, model: nn.Module, output: Any, failed: bool) -> None:
        """Stop sampling."""
        self._looking.awake = self._training.awake = False

    def _see(self, path: str, bounds: tuple[float, float] | None, tensors: Sequence[tuple[Keys, Tensor]]) -> None:
        for output in (tensor for keys, tensor in tensors if not keys):  # what these modules return is one tensor
            held = self._held.setdefault(path, [])
            if len(held) < _MOST_CALLS and _is_readable(output):
                unit = output.ndim - 1 if output.ndim == 3 and path not in self._channels_first else 1
                held.append(_reduce(without_graph(output), unit, bounds))

    def _see_rows(self, path: str, indices: Any) -> None:
        if type(indices) is Tensor and not is_transformed(indices):
            self._rows[path].add(indices)

    def drain(self) -> None:
        """Record what was seen."""
        held, self._held = self._held, {}
        if not held and self._moment == NOW:
            return
        for path, seen in held.items():
            alike = [each for each in seen if len(each.reduced) == len(seen[0].reduced)]
            if alike:
                samples = sum(each.samples for each in alike)
                then = partial(self._note, path, samples, self._moment)
                self.host.deliveries.add([each.reduced for each in alike], then)
        for path, rows in self._rows.items():
            if rows.mask is not None and rows.lookups:
                samples, rows.lookups = rows.lookups, 0
                fact = Units(name=_name(path), value=float(rows.rows), samples=samples, since=-1, moment=self._moment)
                self.host.deliveries.add([rows.mask.sum()], partial(self._note_rows, fact))
        self._moment = NOW

    def _note_rows(self, fact: Units, arrays: Arrays) -> None:
        self.host.note_fact(replace(fact, used=int(arrays[0])))

    def _note(self, path: str, samples: int, moment: Moment, reduced: Arrays) -> None:
        units = len(reduced[0])
        zero = saturated = always = 0
        since = moment.step
        if path in self._bounded:
            saturated = int(np.count_nonzero(sum(reduced) > 0.5 * samples))
        else:
            is_zero = np.maximum.reduce(reduced) <= 0
            zero = int(np.count_nonzero(is_zero))
            always, since = self._streaks.setdefault(path, _Streaks()).add(is_zero, since)
        if not zero and not saturated:
            if path in self._well:
                return
            self._well.add(path)
        else:
            self._well.discard(path)
        self.host.note_fact(
            Units(
                name=_name(path),
                value=float(units),
                samples=samples,
                zero=zero,
                saturated=saturated,
                always=always,
                since=since,
                moment=moment,
            )
        )

    def end(self) -> None:
        """Take all hooks away."""
        for module, watch in list(self._watches.items()):
            unwatch_forward(module, watch)
        for module, rows in list(self._embeddings.items()):
            unwatch_arguments(module, rows)
        self._watches.clear()
        self._embeddings.clear()
        self._modules.clear()


def _is_readable(output: Tensor) -> bool:
    is_plain = type(output) is Tensor and not is_transformed(output) and output.layout is torch.strided
    return is_plain and output.ndim > 1 and output.numel() > 0 and output.is_floating_point() and not output.is_meta


def _name(path: str) -> str:
    return str(Site(path, ("output",)))


def _reduce(tensor: Tensor, unit: int, bounds: tuple[float, float] | None) -> _Reduced:
    others = [each for each in range(tensor.ndim) if each != unit]

    def reduce() -> Tensor:
        if bounds is None:
            return tensor.amax(others)
        low, high = bounds
        return ((tensor < low) | (tensor > high)).sum(others)

    return _Reduced(tensor.numel() // tensor.shape[unit], carry_out_unseen(reduce))
