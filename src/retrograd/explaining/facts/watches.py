"""Sources of facts of programs that are run to be explained: they cost too much for every recording."""

from __future__ import annotations

from retrograd.core.recording.fact_source import MakeSource
from retrograd.explaining.facts.gradient_writes import GradientWriteWatch
from retrograd.explaining.facts.kink_watch import KinkWatch
from retrograd.explaining.facts.nonfinite_watch import NonFiniteWatch
from retrograd.explaining.facts.overwrites import OverwriteWatch
from retrograd.explaining.facts.probe_watch import ProbeWatch

WATCHES: tuple[MakeSource, ...] = (KinkWatch, ProbeWatch, NonFiniteWatch, OverwriteWatch, GradientWriteWatch)
"""The last three share one watch of the program; an update is judged before it is noted as a write."""
