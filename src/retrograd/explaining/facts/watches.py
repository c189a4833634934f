"""Sources that are too dear for every recording, for programs that are run to be explained.

The last three share one watch of the program. Order counts: an update is judged before it is noted as a write.
"""

from __future__ import annotations

from retrograd.explaining.facts.gradient_writes import GradientWriteWatch
from retrograd.explaining.facts.kink_watch import KinkWatch
from retrograd.explaining.facts.nonfinite_watch import NonFiniteWatch
from retrograd.explaining.facts.overwrites import OverwriteWatch
from retrograd.explaining.facts.source import MakeSource

WATCHES: tuple[MakeSource, ...] = (KinkWatch, NonFiniteWatch, OverwriteWatch, GradientWriteWatch)
