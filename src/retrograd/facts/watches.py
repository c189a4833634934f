"""Sources that are too dear for every recording, for programs that are run to be explained.

The last three share one watch of the program. Order counts: an update is judged before it is noted as a write.
"""

from __future__ import annotations

from retrograd.facts.gradient_writes import GradientWriteWatch
from retrograd.facts.kink_watch import KinkWatch
from retrograd.facts.nonfinite_watch import NonFiniteWatch
from retrograd.facts.overwrites import OverwriteWatch
from retrograd.facts.source import MakeSource

WATCHES: tuple[MakeSource, ...] = (KinkWatch, NonFiniteWatch, OverwriteWatch, GradientWriteWatch)
