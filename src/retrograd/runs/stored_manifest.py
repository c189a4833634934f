"""The manifest of a run, read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrograd.errors import DamagedRunError
from retrograd.foreign.text import check_kinds, read_json
from retrograd.runs.layout import FORMAT

_Told = dict[str, Any] | None
_Texts = str | list[Any] | None

_KINDS = {
    "versions": _Told,
    "command": _Texts,
    "started": str | None,
    "status": str | None,
    "git": dict[str, Any] | str | None,
    "model": dict[str, Any] | list[Any] | None,
    "selection": _Texts,
    "schedule": _Texts,
    "tensors": _Texts,
    "statistics": dict[str, Any] | list[Any] | None,
    "histogram": dict[str, Any] | bool | None,
    "not_recorded": dict[str, Any] | list[Any] | None,
    "faults": _Told,
    "resumed": list[Any],
    "sites": list[str],
}
"""What readers take for granted of a manifest."""


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        DamagedRunError: it cannot be read, or was written by a later version.
    """
    try:
        content = read_json(path)
        check_kinds(content, _KINDS)
    except (OSError, ValueError) as error:
        raise DamagedRunError(f"{str(path)!r} cannot be read: {error}.", repair="restore that file.") from error
    if content.get("format") != FORMAT:
        raise DamagedRunError(
            f"{str(path)!r} has the format {content.get('format')!r}, and this version reads {FORMAT}.",
            repair="install the version of retrograd that wrote the run.",
        )
    return content
