"""The sources of facts of every recording."""

from __future__ import annotations

from retrograd.core.recording.fact_source import MakeSource
from retrograd.explaining.facts.calls import CallSource
from retrograd.explaining.facts.changing_settings import ChangingSettings
from retrograd.explaining.facts.freed_graphs import FreedGraphs
from retrograd.explaining.facts.modes import DropoutSource, ModeSource
from retrograd.explaining.facts.nonfinite_look import NonFiniteLook
from retrograd.explaining.facts.operations import ForwardOperations
from retrograd.explaining.facts.recomputations import Recomputations
from retrograd.explaining.facts.saved_pairs import SavedPairs
from retrograd.explaining.facts.second_derivatives import SecondDerivatives
from retrograd.explaining.facts.signed_looks import SignedLooks
from retrograd.explaining.facts.spread_looks import SpreadLooks
from retrograd.explaining.facts.state_changes import StateChanges
from retrograd.explaining.facts.tensors import InputSource, StateSource
from retrograd.explaining.facts.units import UnitLooks
from retrograd.explaining.facts.weights import LoadSource
from retrograd.explaining.facts.zero_gradients import ZeroGradients

SOURCES: tuple[MakeSource, ...] = (
    CallSource, ChangingSettings, ModeSource, InputSource, StateSource, ForwardOperations, UnitLooks, NonFiniteLook,
    FreedGraphs, SavedPairs, SecondDerivatives, LoadSource, DropoutSource, SpreadLooks, ZeroGradients, StateChanges,
    Recomputations, SignedLooks,
)  # fmt: skip
