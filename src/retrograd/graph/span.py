"""One call of a module as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForwardSpan:
    """One call of a module in the forward.

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
