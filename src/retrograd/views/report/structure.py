"""The model's modules with their numbers of parameters, as lines of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrograd.sites.site import ROOT


def list_modules(model: Any) -> list[tuple[int, str, str, int]]:
    """Depth, name, type and parameters (those of the modules inside included) of each module.

    Args:
        model: the manifest's ``model``: mappings with ``path``, ``type`` and ``parameters``, a module's own.
    """
    entries = [entry for entry in model or () if isinstance(entry, Mapping) and "path" in entry]
    paths = [str(entry["path"]) for entry in entries]
    totals = _add_up(paths, [_count(entry.get("parameters")) for entry in entries])
    return [
        (_depth(path, paths), path, str(entry.get("type", "")), totals[path])
        for path, entry in zip(paths, entries, strict=True)
    ]


def _count(told: Any) -> int:
    return told if isinstance(told, int) else 0


def _add_up(paths: Sequence[str], own: Sequence[int]) -> dict[str, int]:
    totals = dict.fromkeys(paths, 0)
    for path, n in zip(paths, own, strict=True):
        for above in {path, *_ancestors(path)} & totals.keys():
            totals[above] += n
    return totals


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    above = [".".join(parts[:n]) for n in range(1, len(parts))]
    return above if path == ROOT else [ROOT, *above]


def _depth(path: str, paths: Sequence[str]) -> int:
    known = set(paths)
    return sum(above in known for above in _ancestors(path))
