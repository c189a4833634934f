"""Keeps what a command does not need from being loaded."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder


def keep_pandas_out() -> None:
    """Let pyarrow find no pandas, which it loads with the first array that it makes: a quarter of a second.

    It looks for it once, so this is for a process of ours alone. Whoever imports pandas himself gets it.
    """
    if "pandas" in sys.modules:
        return
    sys.meta_path.insert(0, _NoPandas)
    try:
        import pyarrow

        pyarrow.array([0])
    finally:
        sys.meta_path.remove(_NoPandas)


class _NoPandas(MetaPathFinder):
    """Finds no pandas, and looks for nothing else."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is left alone", name=name)
