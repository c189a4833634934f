"""What tracing costs: CPU time of forward and backward against that of the bare step, interleaved in one process.

    python benchmarks/tracing.py --rounds 15 --markdown

``timing.py`` says how it is measured. The events are kept to the end of each measurement, as a trace does.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

import retrograd as rg
from contenders import Attached, Contender, Group
from nets import TRACED, Net
from timing import make_parser, measure_all

try:
    from torch.utils._debug_mode import DebugMode
except ImportError:  # torch < 2.10
    DebugMode = None


def around(make: Callable[[], AbstractContextManager[Any]]) -> Contender:
    """A context manager that stands around the steps."""

    @contextmanager
    def contender(net: Net) -> Iterator[Attached]:
        with make():
            yield Attached(net.step)

    return contender


@contextmanager
def watching_for_hangs(net: Net) -> Iterator[Attached]:
    with tempfile.TemporaryDirectory() as folder, rg.watch_hangs(folder, limit=60):
        yield Attached(net.step)


@contextmanager
def anomaly_mode(net: Net) -> Iterator[Attached]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=False):
            yield Attached(net.step)


@contextmanager
def hooks_by_hand(net: Net) -> Iterator[Attached]:
    """A pre-hook on every node that does nothing, as logging of torch does it."""

    def step() -> None:
        loss = net.loss(net.model(net.inputs))
        queue = [loss.grad_fn]
        seen = set(queue)
        for node in queue:
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    queue.append(following)
        handles = [node.register_prehook(lambda incoming: None) for node in queue]
        loss.backward()
        for handle in handles:
            handle.remove()

    yield Attached(step)


CONTENDERS: dict[str, Contender] = {
    "ring of last events, for hangs": watching_for_hangs,
    "trace, events only": around(lambda: rg.trace(origins=False)),
    "trace, with origins": around(rg.trace),
    "origins alone, for rg.walk": around(rg.record_origins),
    "trace, with norms and memory": around(lambda: rg.trace(norms=True, memory=True)),
    "empty pre-hooks by hand": hooks_by_hand,
    "detect_anomaly(check_nan=False)": anomaly_mode,
} | ({"torch.utils._debug_mode.DebugMode": around(DebugMode)} if DebugMode is not None else {})


if __name__ == "__main__":
    measure_all([Group(CONTENDERS)], TRACED, make_parser(__doc__, TRACED).parse_args())
