"""Compiled twins of what runs for every node and operation; None without a compiler."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def _load() -> ModuleType | None:
    try:
        module = importlib.import_module("retrograd.core.hooks._native")
    except ImportError:  # installed without a compiler
        return None
    return module if hasattr(module, "show_calls") else None  # not built anew since


native = _load() if sys.byteorder == "little" else None  # it writes numbers as they lie in memory
