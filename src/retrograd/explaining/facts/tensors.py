"""Parameters, buffers and inputs of models: read at some steps, without waiting for a device."""

from __future__ import annotations

import ctypes
import json
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from retrograd.core.groups import gather
from retrograd.core.history.fact import tell_number
from retrograd.core.history.facts import Buffer, Input, Parameter
from retrograd.core.history.sink import Moment, Phase
from retrograd.core.hooks.backward import runs_in_another_thread
from retrograd.core.hooks.dispatch import carry_out_unseen
from retrograd.core.hooks.engine import grad_enabled
from retrograd.core.hooks.names import ArgumentNames, walk_buffers, walk_parameters
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.parts import gradient_of
from retrograd.core.hooks.storages import first_bytes
from retrograd.core.identities import IdentityDict, IdentitySet
from retrograd.core.limits import LIMITS
from retrograd.core.ranks.placements import is_flattened, is_sharded
from retrograd.core.recording.deliveries import Arrays, Deliveries
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.core.sites.site import ROOT, Site
from retrograd.core.statistics.row import ROW
from retrograd.core.statistics.slab import Slab, UnreadableTensorError, make_slab, take
from retrograd.explaining.facts.calls import OptimizerNotes

_BUFFER = 1 << 20
"""Elements of the largest buffer that is read."""
_PARAMETER_EACH = ("name", "value", "shape", "dtype", "requires_grad", "grad", "digest", "same_rows", "tied", "held")
_BUFFER_EACH = ("name", "value", "dtype", "min", "max", "digest")

_quote = lru_cache(maxsize=1 << 14)(json.dumps)
"""A name as JSON."""


_EACH_PASS = 16
"""Passes of a step behind each of which gradients are read."""


class StateSource(FactSource):
    """Records parameters and buffers as they are before the first forward of a sampled step, and in the end.

    What gradients there are is asked behind the backward passes of that step: behind each of the first, then behind
    the 32nd, the 64th and so on, for a program without an optimizer makes all of them in one step. A parameter that had
    none so far is asked behind each, and all of them before an update.
    """

    rests = True

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._has_same_rows: IdentityDict[nn.Module, set[str]] = IdentityDict()
        self._readings = Readings()
        self._optimizers = host.share(OptimizerNotes)
        self._looks: dict[str, _ModelLook] = {}
        self._step = -1
        self._passes = 0
        self._has_skipped = False

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """A recorded model is called."""
        if not self.host.is_look or not grad_enabled():
            return
        step = self.host.step
        if step != self._step:
            self._write()
            self._step, self._passes, self._has_skipped = step, 0, False
        for name, each in self.host.models:
            if name not in self._looks:
                self._look(name, each)

    def backward_ends(self, failed: bool) -> None:
        """A backward pass has ended."""
        if failed or not self._looks or self.host.step != self._step or runs_in_another_thread():
            return
        self._passes += 1
        self._has_skipped = self._passes > _EACH_PASS and bool(self._passes & (self._passes - 1))
        for look in self._looks.values():
            look.read_gradients(self._readings, only_new=self._has_skipped)

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update: read what was accumulated meanwhile."""
        if self._has_skipped and self.host.step == self._step and not runs_in_another_thread():
            self._has_skipped = False
            for look in self._looks.values():
                look.read_gradients(self._readings)

    def drain(self) -> None:
        """Record what was looked at, when its step is over."""
        if self._looks and self.host.step != self._step:
            self._write()

    def end(self) -> None:
        """Recording ends: look a last time."""
        self._write()
        self._step = self.host.step
        for name, model in self.host.models:
            self._look(name, model)
        self._write()

    def _look(self, name: str, model: nn.Module) -> None:
        known = self._has_same_rows.get(model)
        look = self._looks[name] = _ModelLook(name, model, self._readings, known, self._optimizers.list_held())
        self._has_same_rows[model] = look.has_same_rows

    def _write(self) -> None:
        looks, self._looks = self._looks, {}
        if looks:
            self._readings.collect(self.host.deliveries, partial(self._note, looks, Moment(self._step)))

    def _note(self, looks: Mapping[str, _ModelLook], moment: Moment, found: Found) -> None:
        for name, look in looks.items():
            self.host.note_many(Parameter, name, {}, _PARAMETER_EACH, look.tell_parameters(found), moment)
            self.host.note_many(Buffer, name, {}, _BUFFER_EACH, look.tell_buffers(found), moment)


class _ModelLook:
    """A look at one model."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        readings: Readings,
        with_same_rows: set[str] | None,
        held: IdentitySet[torch.Tensor],
    ) -> None:
        self._name = name
        self._names: dict[int, list[str]] = {}
        self._tensors: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._parameters: dict[str, tuple[int | None, list[int], str, str, int]] = {}
        self._buffers: list[tuple[str, str, int]] = []
        self._gradients: dict[str, list[int]] = {}
        self._has_gradients = False
        for site, parameter in self._walk(model):
            rows = 0
            if _may_have_rows(parameter) and (with_same_rows is None or site in with_same_rows):
                rows = carry_out_unseen(partial(count_same_rows, parameter))
            shape, requires_grad = list(parameter.shape), "true" if parameter.requires_grad else "false"
            self._parameters[site] = readings.read(parameter), shape, name_type(parameter.dtype), requires_grad, rows
        for site, buffer in walk_buffers([(name, model)]):
            if 0 < buffer.numel() <= _BUFFER and (buffer.is_floating_point() or buffer.numel() == 1):
                number = readings.read(buffer)
                if number is not None:
                    self._buffers.append((site, name_type(buffer.dtype), number))
        self._held = self._find_held(held)

    def _find_held(self, held: IdentitySet[torch.Tensor]) -> frozenset[str] | None:
        """The parameters that optimizers hold; None where they hold none, or what is made of them."""
        found = [(site, find()) for site, find in self._tensors]
        mine = frozenset(site for site, parameter in found if parameter is not None and parameter in held)
        is_spread = any(each is not None and (is_sharded(each) or is_flattened(each)) for _, each in found)
        return None if is_spread else mine or None

    @property
    def has_same_rows(self) -> set[str]:
        """Parameters of which rows are equal."""
        return {site for site, facts in self._parameters.items() if facts[-1]}

    def _walk(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter once, under its first name."""
        for site, parameter in walk_parameters([(self._name, model)]):
            names = self._names.setdefault(id(parameter), [])
            names.append(site)
            if len(names) == 1 and not torch.nn.parameter.is_lazy(parameter):
                self._tensors.append((site, weakref.ref(parameter)))
                yield site, parameter

    def read_gradients(self, readings: Readings, *, only_new: bool = False) -> None:
        """Sample the gradients that there are; ``only_new``: of parameters that had none so far."""
        self._has_gradients = True
        for site, find in self._tensors:
            parameter = None if only_new and site in self._gradients else find()
            gradient = None if parameter is None else gradient_of(parameter)
            if gradient is not None:
                number = readings.read(gradient, has_digest=False)
                if number is not None:
                    self._gradients.setdefault(site, []).append(number)

    def tell_parameters(self, found: dict[int, TensorReading]) -> list[str]:
        """The parameters as rows in JSON."""
        tied = {names[0]: json.dumps(names[1:]) for names in self._names.values() if len(names) > 1}
        rows = []
        for site, (number, shape, dtype, requires_grad, same_rows) in self._parameters.items():
            reading = found.get(number) if number is not None else None
            rms, digest = ("null", "") if reading is None else (tell_number(reading.rms), reading.digest)
            grad = self._describe_gradient(site, found)
            held = "null" if self._held is None else json.dumps(site in self._held)
            rows.append(
                f'[{_quote(site)},{rms},{shape},"{dtype}",{requires_grad},"{grad}","{digest}",{same_rows},'
                f"{tied.get(site, '[]')},{held}]"
            )
        return rows

    def _describe_gradient(self, site: str, found: dict[int, TensorReading]) -> str:
        read = [found[number] for number in self._gradients.get(site, ())]
        if not read:
            return "None" if self._has_gradients else ""
        return "zero" if all(each.zeros == each.elements for each in read) else "some"

    def tell_buffers(self, found: dict[int, TensorReading]) -> list[str]:
        """The buffers as rows in JSON."""
        rows = []
        for site, dtype, number in self._buffers:
            reading = found[number]
            numbers = ",".join(map(tell_number, (reading.min, reading.max)))
            rows.append(f'[{_quote(site)},{tell_number(reading.mean)},"{dtype}",{numbers},"{reading.digest}"]')
        return rows


def _may_have_rows(parameter: torch.Tensor) -> bool:
    return (
        type(parameter) in (torch.nn.Parameter, torch.Tensor)
        and parameter.device.type == "cpu"
        and parameter.dim() >= 2
        and len(parameter) > 1
        and parameter.numel() > 0
    )


# ---- what models are called with ----

_MOST = 6
"""Tensors of one call."""
_ELEMENTS = 1 << 20
"""Elements of a tensor that is read as a whole; of a larger one some rows are read, except at looks."""
_WAITING = 256
"""Tensors that may wait to be collected."""

_EACH = ("step", "phase", "value", "min", "max", "std", "nonfinite", "digest")

Head = tuple[str, tuple[int, ...], str]
"""Name, shape and type."""


class InputSource(FactSource):
    """Records tensors that models are called with: at the first call with, and without, grad in a recorded step."""

    rests = True

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._arguments: IdentityDict[nn.Module, ArgumentNames] = IdentityDict()
        self._names: dict[tuple[str, tuple[str, ...]], str] = {}
        self._readings = Readings()
        self._pending: list[tuple[int, int, Phase, Head]] = []
        self._since = 0.0
        self._step = -1
        self._seen: set[tuple[str, bool]] = set()

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """A recorded model is called."""
        if not self.host.is_recorded or len(self._pending) > _WAITING:
            return
        step = self.host.step
        if step != self._step:
            self._step = step
            self._seen.clear()
        name = self.host.models.find(model) or ROOT
        has_grad = grad_enabled()
        if (name, has_grad) in self._seen:
            return
        self._seen.add((name, has_grad))
        phase: Phase = "no_grad" if not has_grad else "train" if model.training else "eval"
        if model not in self._arguments:
            self._arguments[model] = ArgumentNames(model)
        for keys, tensor in _bind(arguments, self._arguments[model]):
            self._read(step, phase, self._name(name, keys), tensor)

    def drain(self) -> None:
        """Collect what was read."""
        if len(self._pending) >= LIMITS.facts_at_once or (
            self._pending and time.monotonic() - self._since > LIMITS.facts_seconds
        ):
            self._write()

    def end(self) -> None:
        """Recording ends."""
        self._write()

    def _read(self, step: int, phase: Phase, name: str, tensor: torch.Tensor) -> None:
        shape, dtype = tuple(tensor.shape), name_type(tensor.dtype)
        if tensor.numel() > _ELEMENTS and len(tensor) > 1 and not self.host.is_look:
            tensor = tensor[:: min(len(tensor), -(-tensor.numel() // _ELEMENTS))]
        number = self._readings.read(tensor)
        if number is not None:
            if not self._pending:
                self._since = time.monotonic()
            self._pending.append((number, step, phase, (name, shape, dtype)))

    def _name(self, model: str, keys: tuple[str, ...]) -> str:
        name = self._names.get((model, keys))
        if name is None:
            name = self._names[model, keys] = str(Site(model, keys))
        return name

    def _write(self) -> None:
        pending, self._pending = self._pending, []
        self._readings.collect(self.host.deliveries, partial(self._note, pending, Moment(self._step)))

    def _note(self, pending: Sequence[tuple[int, int, Phase, Head]], moment: Moment, found: Found) -> None:
        rows = gather((head, _tell(step, phase, found[number])) for number, step, phase, head in pending)
        for (name, shape, dtype), texts in rows.items():
            self.host.note_many(Input, name, {"shape": shape, "dtype": dtype}, _EACH, texts, moment)


def _bind(arguments: Any, names: ArgumentNames) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    args, kwargs = arguments
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor) and names.names:  # nearly always
        yield ("input", names.names[0]), args[0]
        return
    for count, found in enumerate(flatten(names.bind(args, kwargs), ("input",))):
        if count == _MOST:
            return
        yield found


def _tell(step: int, phase: Phase, reading: TensorReading) -> str:
    numbers = (reading.mean, reading.min, reading.max, reading.std)
    told = ",".join(map(tell_number, numbers))
    return f'[{step},"{phase}",{told},{reading.nonfinite},"{reading.digest}"]'


# ---- numbers read without waiting ----

_FIELDS: Mapping[str, Any] = ROW.fields or {}
_BEGIN, _END = _FIELDS["count"][1], _FIELDS["reference"][1]
"""The part of a row that tells of what was read."""


@cache
def name_type(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


class TensorReading(NamedTuple):
    """Numbers that were read of a tensor.

    Attributes:
        elements: how many.
        nonfinite, zeros: elements that are not finite, or zero.
        mean, std, rms, min, max: of the finite ones; NaN where there is none.
        digest: the same for the same values in the same order; empty where none was asked for.
    """

    elements: int
    nonfinite: int
    zeros: int
    mean: float
    std: float
    rms: float
    min: float
    max: float
    digest: str


Found = dict[int, TensorReading]


class Readings:
    """Tensors that have been read and are not collected yet, each with a number."""

    def __init__(self) -> None:
        self._slabs: dict[torch.device, Slab] = {}
        self._heads: list[bytes | Tensor | None] = []

    def __len__(self) -> int:
        return len(self._heads)

    def read(self, tensor: Tensor, *, has_digest: bool = True) -> int | None:
        """Read a tensor as it is now; returns its number, None if it has no elements that can be read."""
        number = len(self._heads)
        try:
            slab = self._slabs.get(tensor.device)
            if slab is None:
                slab = self._slabs[tensor.device] = make_slab(tensor.device, histogram=False)
            if len(slab) <= number:
                slab.grow(2 * number + 16)
            slab.observe(tensor, number)
        except UnreadableTensorError:
            return None
        self._heads.append(first_bytes(tensor) if has_digest else None)
        return number

    def collect(self, deliveries: Deliveries, then: Callable[[Found], None]) -> None:
        """Send for all that was read; ``then`` takes it by number. Numbers begin anew."""
        heads, self._heads = self._heads, []
        if not heads:
            then({})
            return
        taken = [take(slab) for slab in self._slabs.values()]
        far = gather((head.device, number) for number, head in enumerate(heads) if isinstance(head, Tensor))
        joined = [torch.cat([cast("Tensor", heads[number]) for number in numbers]) for numbers in far.values()]
        sent = [each.numbers for each in taken if each.numbers is not None]

        def hand_on(arrays: Arrays) -> None:
            known: list[bytes | None] = [None if isinstance(head, Tensor) else head for head in heads]
            for numbers, array in zip(far.values(), arrays, strict=False):
                ends = np.cumsum([len(cast("Tensor", heads[number])) for number in numbers])
                for number, part in zip(numbers, np.split(array, ends[:-1]), strict=True):
                    known[number] = part.tobytes()
            came = iter(arrays[len(far) :])
            found: Found = {}
            for each in taken:
                rows, _ = each.finish() if each.numbers is None else each.finish(next(came))
                found.update(_understand(rows, known))
            then(found)

        deliveries.add([*joined, *sent], hand_on)


def _understand(rows: bytes, heads: list[bytes | None]) -> Iterator[tuple[int, TensorReading]]:
    table = np.frombuffer(rows, ROW)
    numbers = table["row"].tolist()
    nonfinite = table["nan"] + table["pos_inf"] + table["neg_inf"]
    n = (table["count"] - nonfinite).astype(np.float64)
    n[n == 0] = np.nan
    with np.errstate(all="ignore"):
        mean, variance = table["sum"] / n, table["m2"] / n
        rms = np.sqrt(variance + mean * mean)
    low, high = (np.where(np.isnan(n), np.nan, table[name]) for name in ("min", "max"))
    columns = (table["count"], nonfinite, table["zeros"], mean, np.sqrt(variance), rms, low, high)
    digests = [_digest(rows, place, heads[number]) for place, number in enumerate(numbers)]
    readings = map(TensorReading, *(column.tolist() for column in columns), digests)
    return zip(numbers, readings, strict=True)


def _digest(rows: bytes, place: int, head: bytes | None) -> str:
    if head is None:
        return ""
    begin = place * ROW.itemsize
    return f"{zlib.crc32(rows[begin + _BEGIN : begin + _END], zlib.crc32(head)):08x}"


def count_same_rows(tensor: Tensor, rows: int = 4096, columns: int = 64) -> int:
    """Count the rows of a matrix on the CPU that are equal to another one of it, bit for bit.

    Of more rows or columns than that the first are looked at; where these are equal and there are more columns, all of
    those rows. None where they hold what is not finite: NaN is equal to nothing.
    """
    matrix = tensor.detach()[:rows].flatten(1)
    suspects = _group(matrix[:, :columns])
    if matrix.shape[1] > columns and suspects:
        suspects = _group(matrix[suspects]) if len(suspects) * matrix.shape[1] <= 1 << 22 else suspects
    if suspects and not bool(matrix[suspects].isfinite().all()):
        return 0
    return len(suspects)


def _group(matrix: Tensor) -> list[int]:
    """Numbers of the rows that are equal to another."""
    width = matrix.shape[1] * matrix.element_size()
    content = matrix.contiguous()
    data = ctypes.string_at(content.data_ptr(), len(matrix) * width)
    places = gather((data[row * width : (row + 1) * width], row) for row in range(len(matrix)))
    return [row for same in places.values() if len(same) > 1 for row in same]
