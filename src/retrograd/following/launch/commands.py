"""The commands of following."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import ClassVar

import retrograd as rg
from retrograd.core.addresses import path_to_read
from retrograd.core.launch.options import Command, option
from retrograd.core.notices import print_text
from retrograd.following.launch.requests import DebugRequest, TraceRequest


@dataclass(frozen=True, kw_only=True)
class Hangs(Command):
    """Show where each process of a run is in its backward pass, also when it hangs."""

    name: ClassVar[str] = "hangs"
    examples: ClassVar[str] = """
examples:
  retrograd hangs traces/train-20250131-120000
  retrograd hangs --once --limit 60 traces/train-20250131-120000

It reads what the processes leave in their files, so it also works on one that hangs, or has died.
"""

    run: Path = option("DIR", MISSING, "folder that `retrograd trace` or `rg.watch_hangs` writes to")
    once: bool = option("--once", False, "print it once, and exit")
    limit: float | None = option(
        "--limit", None, "how long a node may take until it counts as hanging", metavar="SECONDS"
    )

    def carry_out(self) -> int:
        from retrograd.following.views.hang_report import watch_run

        return watch_run(path_to_read(self.run), once=self.once, limit=self.limit)


@dataclass(frozen=True, kw_only=True)
class Replay(Command):
    """Run one node of a backward pass again, from its bundle."""

    name: ClassVar[str] = "replay"
    examples: ClassVar[str] = """
examples:
  retrograd replay traces/train-20250131-120000/rank00000/bundles/blocks.3-SoftmaxBackward0

The exit code is 0 if the node gives the same as before, bit for bit, and 1 if not, or if there is nothing to compare.
"""

    bundle: Path = option("BUNDLE", MISSING, "folder of the bundle")
    any_torch: bool = option("--any-torch", False, "try it even if another version of torch wrote it")
    trust: bool = option("--trust", False, "run it even if you did not write it, as you would a program")
    show: bool = option("--show", False, "print what it holds, and run nothing")

    def carry_out(self) -> int:
        bundle = rg.open_bundle(path_to_read(self.bundle))
        if self.show:
            print_text(str(bundle))
            return 0
        replayed = rg.replay(bundle, strict=not self.any_torch, trust=self.trust)
        print_text(str(replayed))
        return 0 if replayed else 1


COMMANDS: tuple[type[Command], ...] = (TraceRequest, DebugRequest, Hangs, Replay)
