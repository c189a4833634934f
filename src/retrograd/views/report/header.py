"""The head of the page: which run this is."""

from __future__ import annotations

import datetime as dt
import shlex
from collections.abc import Mapping
from typing import Any

_STATUS_KINDS = {"finished": "good", "running": "warn", "stopped": "warn", "failed": "bad"}


def make_header(
    manifest: Mapping[str, Any], duration: float | None, counts: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Terms and their texts, for what the manifest tells.

    Args:
        manifest: the run's.
        duration: seconds from its beginning to what was written last.
        counts: further terms that are counted from the data.
    """
    versions = manifest.get("versions") or {}
    terms = [
        ("started", _print_time(manifest.get("started"))),
        ("duration", _print_duration(duration)),
        *counts.items(),
        ("torch", versions.get("torch")),
        ("python", versions.get("python")),
        ("retrograd", versions.get("retrograd")),
        ("git commit", _print_commit(manifest.get("git"))),
        ("seed", manifest.get("seed")),
        ("host", manifest.get("host")),
    ]
    return [(term, str(text)) for term, text in terms if text not in (None, "")]


def make_status(status: str | None) -> dict[str, str] | None:
    """How the run ended, and with which colour that is said."""
    return {"text": status, "kind": _STATUS_KINDS.get(status, "warn")} if status else None


def print_command(manifest: Mapping[str, Any]) -> str:
    """The command line as it can be typed."""
    command = manifest.get("command") or ""
    return command if isinstance(command, str) else shlex.join(map(str, command))


def _print_time(text: str | None) -> str | None:
    try:
        return dt.datetime.fromisoformat(text or "").strftime("%d %b %Y, %H:%M %Z").strip()
    except ValueError:
        return text


def _print_duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _print_commit(git: Any) -> str | None:
    if not isinstance(git, Mapping):
        return str(git)[:12] if git else None
    changed = " with changes" if git.get("dirty") else ""
    return f"{str(git.get('commit', ''))[:12]}{changed}"
