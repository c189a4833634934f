"""Compiled twins of what runs for every node, operation, recorded tensor and module; None without a compiler."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def _load(name: str, newest: str) -> ModuleType | None:
    try:
        module = importlib.import_module(f"retrograd.core.hooks.{name}")
    except ImportError:  # installed without a compiler
        return None
    return module if hasattr(module, newest) else None  # not built anew since


native = (
    _load("_native", "number_nodes") if sys.byteorder == "little" else None
)  # it writes numbers as they lie in memory
taps = _load("_taps", "OutputTap")
resting = _load("_resting", "take_out")
