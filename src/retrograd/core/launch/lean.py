"""Arrow for a process of ours that reads runs: without what it does not need, and giving back what it has used."""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder


def load_lean_arrow() -> None:
    """Load pyarrow without pandas, and have it give free memory back; for a process of ours alone.

    With the first array that it makes it loads pandas, if it finds it: a quarter of a second. It looks for it once; who
    imports pandas himself gets it. Of its allocators mimalloc, the default, keeps 20 to 40 MB that are free, where a
    long run is read; with jemalloc it takes no longer. With that of the system many ranks take more.
    """
    is_new = "pandas" not in sys.modules
    if is_new:
        sys.meta_path.insert(0, _NoPandas)
    try:
        import pyarrow

        if "jemalloc" in pyarrow.supported_memory_backends() and not os.environ.get("ARROW_DEFAULT_MEMORY_POOL"):
            pyarrow.set_memory_pool(pyarrow.jemalloc_memory_pool())
        pyarrow.array([0])
    finally:
        if is_new:
            sys.meta_path.remove(_NoPandas)


class _NoPandas(MetaPathFinder):
    """Finds no pandas, and looks for nothing else."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is left alone", name=name)
