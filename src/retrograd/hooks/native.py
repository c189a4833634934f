"""The compiled twins of what runs for every node and operation; None where there was no compiler."""

from __future__ import annotations

import sys
from types import ModuleType

native: ModuleType | None
try:
    from retrograd.hooks import _native
except ImportError:  # installed without a compiler
    native = None
else:
    native = _native if sys.byteorder == "little" else None  # it writes numbers as they lie in memory
