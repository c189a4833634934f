"""Sources that are too dear for every recording, for programs that are run to be explained."""

from __future__ import annotations

from retrograd.explaining.facts.exact_watch import ExactWatch
from retrograd.explaining.facts.kink_watch import KinkWatch
from retrograd.explaining.facts.source import MakeSource

WATCHES: tuple[MakeSource, ...] = (KinkWatch, ExactWatch)
