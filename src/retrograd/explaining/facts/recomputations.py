"""Whether checkpoints compute the same in a backward pass as in the forward, operation by operation, at looks."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor

from retrograd.core.groups import reach
from retrograd.core.history.saved_facts import Recomputed
from retrograd.core.hooks.dispatch import plain_torch
from retrograd.core.hooks.engine import is_tracing, is_transformed, uncompiled, without_functions
from retrograd.core.hooks.function_mode import ForwardListener
from retrograd.core.hooks.recomputed import checkpoint_listeners
from retrograd.core.hooks.torch_calls import (
    TorchCall,
    describe_arguments,
    describe_frame,
    describe_tensor,
    is_inner,
    is_ours,
    user_line,
)
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.explaining.facts.modes import find_module

_MOST_PARTS, _MOST = 32, 1000
"""Parts of a look, and operations of a part, that are compared."""

_SAMPLE = 1024
"""Elements of a tensor that are compared, at equal distances."""

_ROUNDING = {torch.float16: 0.05, torch.bfloat16: 0.05}
_CLOSE = 0.01
"""‖second − first‖ / ‖first‖ up to which two runs are alike: kernels may add in another order."""


@dataclass(slots=True)
class Ran:
    """An operation of a run.

    Attributes:
        key: what it is called, with what, what it makes, and where: the same in both runs.
        name, line, module, made: as in :class:`Recomputed`.
        takes: which operations of the run made what it takes; −1 for one made before.
        writes: it writes to what was made before the run.
        has_grad: what it made requires grad.
        sample: of what it made.
        close: how much of it may differ.
    """

    key: tuple[str, ...]
    name: str
    line: str
    module: str
    made: str
    takes: tuple[int, ...]
    writes: bool
    has_grad: bool
    sample: Tensor | None
    close: float


class RunNotes(ForwardListener):
    """Keeps a sample of what each operation of a run makes.

    Args:
        host: knows the modules.
        is_again: it runs in a backward pass, whose line is not that of what torch's modules call.
    """

    def __init__(self, host: FactHost, *, is_again: bool) -> None:
        super().__init__()
        self._is_again = is_again
        self._host = host
        self._made: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.ran: list[Ran] = []

    @uncompiled
    def before(self, call: TorchCall) -> tuple[list[Tensor], tuple[int, ...]] | None:
        """Find out which operations made what it takes."""
        if not call.name or is_ours[call.frame.f_code.co_filename] or len(self.ran) >= _MOST or is_tracing():
            return None
        with without_functions():
            operands = call.operands
            return operands, tuple(map(self._find, operands))

    @uncompiled
    def after(self, call: TorchCall, seen: tuple[list[Tensor], tuple[int, ...]]) -> None:
        """Keep it."""
        with without_functions(), plain_torch():
            made = call.made
            if made:
                self._keep(call, made, *seen)

    def fail(self, error: Exception) -> None:
        """Compare nothing of this run."""
        self.ran = []
        self._host.fault("checkpoints", error)

    def _keep(self, call: TorchCall, made: list[Tensor], operands: list[Tensor], takes: tuple[int, ...]) -> None:
        name, first = call.name, made[0]
        is_written = name == "setitem" or (name.endswith("_") and bool(operands) and first is operands[0])
        text, place = describe_tensor(first), describe_frame(call.frame)
        line = user_line(call.frame) if not (self._is_again and is_inner[call.frame.f_code.co_filename]) else ""
        key = name, place, text, describe_arguments(name, call.args, call.kwargs)
        writes = is_written and takes[:1] == (-1,)
        module, close = self._find_module(call.frame), _ROUNDING.get(first.dtype, _CLOSE)
        sample = None if writes else _take_sample(first)
        self.ran.append(Ran(key, name, line, module, text, takes, writes, first.requires_grad, sample, close))
        if not writes:
            self._made.update({id(each): (weakref.ref(each), len(self.ran) - 1) for each in made})

    def _find(self, tensor: Tensor) -> int:
        known = self._made.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else -1

    def _find_module(self, frame: FrameType | None) -> str:
        module = find_module(frame)
        return (self._host.models.path_of(module) if module is not None else None) or ""


def _take_sample(tensor: Tensor) -> Tensor | None:
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    if not is_plain or is_transformed(tensor) or tensor.is_complex() or not tensor.numel():
        return None
    values = tensor.detach().reshape(-1)
    return values[:: -(-len(values) // _SAMPLE)].to(torch.float32, copy=True)


class ComparedRuns:
    """Both runs of a part.

    Args:
        source: who compares them.
        line: who called the checkpoint.
    """

    def __init__(self, source: Recomputations, line: str) -> None:
        self._source = weakref.ref(source)
        self.line = line
        self.moment = source.host.now
        self.runs: list[list[Ran]] = []

    @contextmanager
    def first(self) -> Iterator[None]:
        """The run in the forward."""
        yield from self._note()

    @contextmanager
    def again(self) -> Iterator[None]:
        """The run in the backward pass, which torch may end early; one more, of a kept graph, is not compared."""
        source, is_second = self._source(), len(self.runs) == 1
        try:
            yield from self._note()
        finally:
            if source is not None and is_second:
                source.compare(self)

    def _note(self) -> Iterator[None]:
        source = self._source()
        if source is None or len(self.runs) == 2:
            yield
            return
        notes = RunNotes(source.host, is_again=bool(self.runs))
        notes.start()
        try:
            yield
        finally:
            notes.stop()
            self.runs.append(notes.ran)


class Recomputations(FactSource):
    """Records the first operation of each checkpoint that gave something else when it was computed again; once."""

    rests = True

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._waiting: list[ComparedRuns] = []
        self._told: set[tuple[str, str]] = set()
        self._step, self._count = -1, 0

    def begin(self) -> None:
        """Watch checkpoints."""
        checkpoint_listeners.add(self)

    def end(self) -> None:
        """Leave nothing behind."""
        checkpoint_listeners.remove(self)

    def checkpoint_begins(self, frame: FrameType) -> ComparedRuns | None:
        """A checkpoint is called: compare its runs, at looks."""
        if not self.host.is_look:
            return None
        if self._step != self.host.step:
            self._step, self._count = self.host.step, 0
        self._count += 1
        return ComparedRuns(self, user_line(frame)) if self._count <= _MOST_PARTS else None

    def compare(self, runs: ComparedRuns) -> None:
        """Both runs are over."""
        self._waiting.append(runs)

    def drain(self) -> None:
        """Compare what was kept."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            first, again = each.runs
            fact = _find_first(first, again, each) if first and again else None
            if fact is not None and (fact.line, fact.checkpoint) not in self._told:
                self._told.add((fact.line, fact.checkpoint))
                self.host.note_fact(fact)


def _find_first(first: Sequence[Ran], again: Sequence[Ran], part: ComparedRuns) -> Recomputed | None:
    """The first difference that reaches something with a gradient; None where there is none.

    Operations that are called in one run alone count if what comes of them differs: a cache is filled in the forward.
    """
    matched = _match(first, again)
    sizes = _measure([(first[one], again[other]) for other, one in matched.items()])
    differing = {other: size for other, size in zip(matched, sizes, strict=True) if size > again[other].close}
    reached = next((place for place in sorted(differing) if again[place].has_grad), None)
    if reached is None:
        return None
    begun = [place for place in sorted(_list_before(again, reached)) if place in differing or place not in matched]
    place = begun[0] if begun else reached
    left = set(_list_before(first, matched[place])) - set(matched.values()) if place in matched else set()
    if left:
        lone = first[min(left)]
        return Recomputed(
            name=lone.module, value=float("nan"), operation=lone.name, line=lone.line, made=lone.made,
            checkpoint=part.line, moment=part.moment,
        )  # fmt: skip
    then = first[matched[place]] if place in matched else _find_other(first, matched, place)
    return _describe(then, again[place], differing.get(place, float("nan")), first, part)


def _match(first: Sequence[Ran], again: Sequence[Ran]) -> dict[int, int]:
    """Places of operations of the second run → that of the same one in the first."""
    blocks = difflib.SequenceMatcher(None, [each.key[:3] for each in first], [each.key[:3] for each in again], False)
    return {b + more: a + more for a, b, size in blocks.get_matching_blocks() for more in range(size)}


def _find_other(first: Sequence[Ran], matched: dict[int, int], place: int) -> Ran | None:
    """What the first run called instead."""
    before = max((one for other, one in matched.items() if other < place), default=-1)
    taken = set(matched.values())
    return first[before + 1] if before + 1 < len(first) and before + 1 not in taken else None


def _list_before(ran: Sequence[Ran], place: int) -> set[int]:
    return reach((place,), lambda number: (each for each in ran[number].takes if each >= 0))


def _measure(pairs: Sequence[tuple[Ran, Ran]]) -> list[float]:
    """‖second − first‖ / ‖first‖ of each; 0 where they are not compared."""
    numbers: list[list[float]] = []
    for one, other in pairs:
        if one.sample is None or other.sample is None or one.sample.shape != other.sample.shape:
            numbers.append([0.0, 1.0])
        else:
            with plain_torch():
                before, after = one.sample.to(other.sample.device).nan_to_num(), other.sample.nan_to_num()
                numbers.append(torch.stack([(after - before).norm(), before.norm()]).tolist())
    return [apart / size if size else float(apart > 0) for apart, size in numbers]


def _describe(then: Ran | None, now: Ran, size: float, first: Sequence[Ran], part: ComparedRuns) -> Recomputed:
    is_same = then is not None and then.key == now.key
    written = next((each for each in first if each.writes and each.name != "setitem"), None) if is_same else None
    return Recomputed(
        name=now.module or (then.module if then is not None else ""),
        value=size,
        operation="" if then is None else then.name,
        line="" if then is None else then.line,
        again="" if is_same else now.name,
        again_line="" if is_same else now.line,
        checkpoint=part.line,
        made="" if then is None else f"{then.made} {then.key[3]}".strip(),
        made_again=f"{now.made} {now.key[3]}".strip(),
        reads=is_same and -1 in now.takes,
        written="" if written is None else written.name,
        written_line="" if written is None else written.line,
        moment=part.moment,
    )
