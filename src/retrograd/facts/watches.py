"""Sources that are too dear for every recording, for programs that are run to be explained."""

from __future__ import annotations

from retrograd.facts.exact_watch import ExactWatch
from retrograd.facts.kink_watch import KinkWatch
from retrograd.facts.source import MakeSource

WATCHES: tuple[MakeSource, ...] = (KinkWatch, ExactWatch)
