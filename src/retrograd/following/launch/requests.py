"""``retrograd trace`` and ``retrograd debug``: their options, which travel to the processes of the program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from retrograd.core.errors import TraceError
from retrograd.core.launch.options import option
from retrograd.core.launch.requests import folder_option
from retrograd.core.launch.start import Request

Passes = tuple[int, int | None]
"""First of some backward passes, counted from 0, and the one after the last; None for no end."""


@dataclass(frozen=True, kw_only=True)
class TraceRequest(Request):
    """Trace every node of some backward passes of an unmodified script."""

    name: ClassVar[str] = "trace"
    promise: ClassVar[str] = "tracing {} into {}"
    parent: ClassVar[str] = "traces"
    done: ClassVar[str] = "traced"
    leaves: ClassVar[str] = "rank*/chrome.json"
    see: ClassVar[str] = "see it in ui.perfetto.dev: {}/rank*/chrome.json"
    examples: ClassVar[str] = """
examples:
  retrograd trace train.py --lr 0.1
  retrograd trace --passes 100:102 --memory --by module train.py
  retrograd trace --live --nodes 'blocks.3*' --norms -m package.train
  retrograd trace -o traces/first torchrun --nproc-per-node 2 train.py

DIR/rank*/chrome.json opens in ui.perfetto.dev, and rg.Trace.load() reads DIR/rank*/trace.json.gz. The table goes to
stderr when the script has ended; the script's output and exit code are its own. When a traced pass raises, the
exception says in which node, and how to run that node again. After the traced passes only the last events are kept,
for `retrograd hangs DIR`.
"""

    shown: str = folder_option("traces")
    passes: str = option(
        "--passes",
        "3",
        "the first N backward passes, or A to B-1 from 0 (default: 3)",
        metavar="N|A:B",
        check=lambda _, text: parse_passes(text),
    )
    nodes: str | None = option(
        "--nodes", None, "nodes to show, as in 'blocks.3*'; the files hold all", metavar="PATTERN"
    )
    live: bool = option("--live", False, "print each of them to stderr as soon as it has run")
    norms: bool = option("--norms", False, "norms of what goes in and comes out")
    memory: bool = option("--memory", False, "bytes that each node gains")
    by: Literal["node", "module", "kind"] = option("--by", "node", "what makes a line of the table")
    sort: Literal["time", "memory"] = option("--sort", "time", "order of the table")

    @property
    def span(self) -> Passes:
        """First of the backward passes to trace, counted from 0, and the one after the last; None for no end."""
        return parse_passes(self.passes)


@dataclass(frozen=True, kw_only=True)
class DebugRequest(Request):
    """Stop inside the backward passes of an unmodified script, at a prompt."""

    name: ClassVar[str] = "debug"
    promise: ClassVar[str] = "debugging {}; a prompt opens where a backward pass stops"
    examples: ClassVar[str] = """
examples:
  retrograd debug train.py
  retrograd debug --break 'blocks.3*' 'norm > 100' -- train.py --lr 0.1
  retrograd debug --break non-finite -m package.train

A prompt opens where a pass stops: at a breakpoint, at the first gradient that is not finite, at an exception.
"""

    breakpoints: tuple[str, ...] = option(
        "--break", (), "nodes, as in 'blocks.3*', or conditions, as in non-finite and 'norm > 100'", metavar="WHERE"
    )
    nonfinite: bool = option("--no-non-finite", True, "go on where a gradient is not finite")


def parse_passes(text: str) -> Passes:
    """Read a range of backward passes: ``3`` for the first three, ``10:12`` for 10 and 11, ``10:`` for all from 10 on.

    Raises:
        TraceError: for anything else, and for none at all.
    """
    begin, colon, end = text.rpartition(":")
    try:
        first, last = int(begin or 0), (int(end) if end or not colon else None)
    except ValueError:
        first, last = 0, 0
    if first < 0 or (last is not None and last <= first):
        raise TraceError(
            f"--passes {text} selects no backward pass.",
            repair="--passes 3 for the first three, --passes 10:12 for the passes 10 and 11, counted from 0.",
        )
    return first, last


REQUESTS: tuple[type[Request], ...] = (TraceRequest, DebugRequest)
