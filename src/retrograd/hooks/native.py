"""Compiled twins of what runs for every node, operation, recorded tensor and module; None without a compiler."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def _load(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"retrograd.hooks.{name}")
    except ImportError:  # installed without a compiler
        return None


native = _load("_native") if sys.byteorder == "little" else None  # it writes numbers as they lie in memory
taps = _load("_taps")
resting = _load("_resting")
