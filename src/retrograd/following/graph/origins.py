"""Where in the forward a node was made: in which call of which module, and at which source line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any, Self

import torch
from torch import nn

from retrograd.core.hooks.calls import Logs, ModuleCall, ThreadLog
from retrograd.core.hooks.forward_log import ForwardLog
from retrograd.core.hooks.torch_calls import called_name, line_at
from retrograd.core.hooks.writes import WriteNotes
from retrograd.following.graph.module_names import GivenNames, SeenNames, find_names
from retrograd.following.graph.node import Line
from retrograd.following.graph.origin import Origin, latest_origins

LIMIT = 1_000_000
"""Operations of one thread that are remembered; some 200 bytes each."""

_DEEPEST = 8
"""Steps back for which operations in backward passes of backward passes are followed."""


class NodePlaces:
    """Where nodes were made, as logs of threads tell.

    Args:
        logs: gives the logs of a thread, or of all where it is given None, in the order in which they are asked.
    """

    def __init__(self, logs: Callable[[int | None], Iterable[ThreadLog]]) -> None:
        self._logs = logs
        self._lines: dict[tuple[int, int, int], tuple[CodeType, Any, Line]] = {}
        """Identity of code, offset, identity of function → code and function, so that nothing else gets their
        identities, and their line."""

    def find(self, number: int, thread: int | None = None) -> Origin | None:
        """Where the node with this sequence number was made; None where nothing is known of it."""
        found = (self._find_in(log, number) for log in self._logs(thread))
        return next((origin for origin in found if origin is not None), None)

    def clear(self) -> None:
        """Forget the lines."""
        self._lines.clear()

    def _find_in(self, log: ThreadLog, number: int) -> Origin | None:
        operation = log.operation_at(number)
        if operation is None:
            call = log.call_at(number)
            return Origin(call.path, call.call) if call is not None else None
        _, _, code, offset, function, owner = operation
        call = self._resolve(log, owner)
        line = self._line(code, offset, function) if code is not None else None
        return Origin(call.path, call.call, line) if call is not None else Origin(line=line)

    def _resolve(self, log: ThreadLog, owner: ModuleCall | int | None) -> ModuleCall | None:
        """The module call that an operation belongs to. One called by a node's backward belongs to that of the node."""
        for _ in range(_DEEPEST):
            if not isinstance(owner, int):
                return owner
            logs = (log, *self._logs(None))
            number = owner
            operation = next((found for each in logs if (found := each.operation_at(number)) is not None), None)
            owner = operation[-1] if operation is not None else log.call_at(number)
        return None

    def _line(self, code: CodeType, offset: int, function: Any) -> Line:
        key = (id(code), offset, id(function))
        known = self._lines.get(key)
        if known is None:
            name = function if isinstance(function, str) else called_name(function)
            line = Line(code.co_filename, line_at(code, offset), code.co_name, name)
            known = self._lines[key] = (code, function, line)
        return known[2]


class Origins:
    """Where the nodes of a forward were made: from :func:`record_origins`, which see.

    It records while it is entered, and may be entered again. Numbers of nodes count within one thread. Nothing is held
    but numbers, names and code.

    Attributes:
        writes: the last writes in place, where they are noted.
    """

    def __init__(self, log: ForwardLog, names: GivenNames | SeenNames, writes: WriteNotes | None = None) -> None:
        self._log = log
        self._names = names
        self.writes = writes
        self._places = NodePlaces(log.logs)
        self._turn = 0
        self._is_unasked = False

    def __enter__(self) -> Self:
        self._log.start()
        self._is_unasked = True
        self._turn = latest_origins.enter(self)
        return self

    def __del__(self) -> None:
        """Leave what a ``with`` without ``as`` has noted for the walk that comes."""
        if self._is_unasked and latest_origins is not None and latest_origins.is_last(self._turn):
            latest_origins.hold(Origins(self._log, self._names, self.writes))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._log.stop()

    def find(self, number: int, thread: int | None = None) -> Origin | None:
        """Where the node with this sequence number was made; None where nothing is known of it.

        Args:
            number: the node's sequence number.
            thread: number of the thread that made it, as ``threading.get_ident()`` gives it. Left out, the calling
                thread is asked first, then the others, the newest first.
        """
        self._is_unasked = False
        return self._places.find(number, thread)

    def name_parameter(self, tensor: torch.Tensor) -> str | None:
        """The name of a parameter, as in ``"blocks.3.fc:weight"``; None for another tensor.

        Known are the parameters of the models given, or of those that were called.
        """
        return self._names.name_of(tensor)

    @property
    def models(self) -> list[tuple[str, nn.Module]]:
        """The models given, or those that were called, with their names."""
        return list(self._names.models())

    @property
    def spans(self) -> list[ForwardSpan]:
        """Every call of a module that has ended, in the order in which they began."""
        spans = [_describe(call, log.thread) for log in self._log.logs() for call in list(log.ended)]
        return sorted(spans, key=lambda span: (span.begin, -span.end))

    def clear(self) -> None:
        """Forget what was seen so far, as at the end of a training step. Calls that still run are kept."""
        self._log.clear()
        self._places.clear()


def record_origins(
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    *,
    lines: bool = True,
    writes: bool = False,
    limit: int = LIMIT,
) -> Origins:
    """Record where the nodes of a forward are made, while it runs, at a cost of microseconds an operation.

        with rg.record_origins() as origins:
            loss = model(x).sum()
        graph = rg.walk(loss)

    Compiled code is left alone: what it makes has the line that called it. Threads that were running before are
    listened to within calls of modules; those that begin later, everywhere.

    Args:
        model: paths of modules are relative to it; a dict of models gives them prefixes. Left out, they are relative
            to the outermost module that is called.
        lines: note source lines; else only calls of modules.
        writes: with the lines, note also what was written to in place.
        limit: operations of one thread that are remembered, and as many calls of modules; beyond it the older half is
            forgotten.

    Returns:
        A block to be entered around the forward.

    Raises:
        TraceError: ``model`` is not a module; or, on entering, it is being recorded to already.
    """
    names = find_names(model)
    notes = WriteNotes() if writes and lines else None
    listeners = () if notes is None else (notes,)
    return Origins(ForwardLog(names, Logs(limit), *listeners, lines=lines), names, notes)


def _describe(call: ModuleCall, thread: int) -> ForwardSpan:
    return ForwardSpan(
        module=call.path,
        call=call.call,
        thread=thread,
        begin=call.begin,
        end=call.end,
        first=call.first,
        last=call.last,
        recompute=call.is_recomputed,
    )


@dataclass(frozen=True, slots=True)
class ForwardSpan:
    """A call of a module in the forward.

    Attributes:
        module: its path.
        call: which call of it in its forward: 1, 2, …
        thread: number of the thread.
        begin, end: when, on the clock of ``time.perf_counter_ns``.
        first, last: sequence numbers of the nodes it could make: from ``first`` up to but not including ``last``.
        recompute: whether a checkpoint ran it again during a backward pass.
    """

    module: str
    call: int
    thread: int
    begin: int
    end: int
    first: int
    last: int
    recompute: bool = False
