"""The end of a program that has shown as many steps as were asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from retrograd.facts.source import FactHost, FactSource
from retrograd.launch.closing import say
from retrograd.runs.ranks import ask_rank


class StopAfter(FactSource):
    """Ends the program as ``sys.exit()`` does, at the begin of the forward behind the last step that was asked for.

    Nothing is under way there: what the program does when it is left, it still does.

    Args:
        limit: how many steps.
        count: tells how many have been made.
        host: the recorder.
    """

    def __init__(self, limit: int, count: Callable[[], int], host: FactHost) -> None:
        super().__init__(host)
        self._limit = limit
        self._count = count

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        if self._count() >= self._limit:
            if ask_rank() == 0:
                say(f"the program is ended here, after {self._limit} steps, as --steps asks")
            raise SystemExit(0)
