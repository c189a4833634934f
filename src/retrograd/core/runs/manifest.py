"""The manifest of a run: what was run, and on what."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrograd.core.cells import is_notebook
from retrograd.core.errors import DamagedRunError, RunUnreachableError
from retrograd.core.files import remove_abandoned, write_json
from retrograd.core.foreign.text import check_kinds, read_json
from retrograd.core.limits import LIMITS
from retrograd.core.notices import warnings_kept
from retrograd.core.runs.layout import FORMAT

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
    "ranks": _Told,
    "compacted": dict[str, Any],
    "sites": list[str],
    "optimizers": list[Any] | None,
}
"""Entries of a manifest that readers rely on."""

_COMPACTED_KINDS = {"ranks": list[int], "differing": dict[str, list[int]]}
_CHOSEN_KINDS = {"every": int, "listed": list[int]}


@warnings_kept()  # to ask for the platform a process is started
def gather_facts() -> dict[str, Any]:
    """Gather what can be told at once: the manifest of a run that has just begun."""
    torch: Any = sys.modules["torch"]  # a run is recorded with it, and read without
    return {
        "format": FORMAT,
        "versions": {
            "retrograd": _find_version(),
            "torch": torch.__version__,
            "numpy": importlib.metadata.version("numpy"),
            "python": platform.python_version(),
        },
        "command": _find_command(),
        "seed": torch.initial_seed(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "pid": os.getpid(),
        "started": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }


def _find_command() -> list[str]:
    """The command line, or the notebook that has started this kernel: how a kernel is started says nothing."""
    notebook = os.environ.get("JPY_SESSION_NAME")
    return list(filter(None, [notebook])) if is_notebook() else list(sys.orig_argv)


def gather_git() -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None outside a repository, or if git takes too long."""
    commit = _ask_git("rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _ask_git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _ask_git(*arguments: str) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        answer = subprocess.run(
            ["git", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMITS.git_seconds,
            env=environment,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _find_version() -> str:
    try:
        return importlib.metadata.version("retrograd")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class Manifest:
    """The manifest of a run, as the lowest rank that records writes it.

    Args:
        path: the file.
        resume: the run goes on, so this session is added to the ``resumed`` of the file that is there.

    Raises:
        DamagedRunError: the file is there and cannot be read.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        remove_abandoned(path.parent, path.name)
        self._session = gather_facts()
        self._content = self._session
        if resume and path.exists():
            self._content = read_manifest(path)
            self._content.setdefault("resumed", []).append(self._session)
        self._earlier_sites: tuple[str, ...] = tuple(self._content.get("sites", ()))
        self._is_new = True
        self._lock = threading.Lock()

    def describe(self, facts: dict[str, Any]) -> None:
        """Add facts to the run."""
        with self._lock:
            self._content.update(facts)
            self._is_new = True

    def find_git(self) -> None:
        """Add the commit to this session; it may take seconds."""
        git = gather_git()
        with self._lock:
            self._session["git"] = git
            self._is_new = True

    def name_sites(self, names: Sequence[str]) -> None:
        """Store the sites of this session, beside those of sessions before."""
        sites = list(dict.fromkeys((*self._earlier_sites, *names)))
        if sites != self._content.get("sites", []):
            self.describe({"sites": sites})

    def write(self) -> None:
        """Write the file, if there is anything new, or if somebody has removed it.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            if self._is_new or not self.path.exists():
                write_json(self.path, self._content)
                self._is_new = False


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        DamagedRunError: it cannot be read, or was written by a later version.
    """
    try:
        content = read_json(path)
    except RunUnreachableError:
        raise
    except (OSError, ValueError) as error:
        raise _explain(path, error) from error
    return check_manifest(path, content)


def check_manifest(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The content of a manifest, which somebody else may have written.

    Raises:
        DamagedRunError: it is no manifest, or was written by a later version.
    """
    if content.get("format") != FORMAT:
        newer = "a later version has written it" if is_newer(content) else "no version writes that"
        raise DamagedRunError(
            f"{str(path)!r} has the format {content.get('format')!r}, and this version reads {FORMAT}: {newer}.",
            repair="install the version of retrograd that wrote the run."
            if is_newer(content)
            else "restore that file.",
        )
    try:
        check_kinds(content, _KINDS)
        check_kinds(content.get("compacted", {}), _COMPACTED_KINDS)
        if content.get("ranks") is not None:
            check_kinds({**dict.fromkeys(_CHOSEN_KINDS), **content["ranks"]}, _CHOSEN_KINDS)
    except ValueError as error:
        raise _explain(path, error) from error
    return content


def is_newer(content: dict[str, Any]) -> bool:
    """Return whether a later version of retrograd has written a manifest."""
    told = content.get("format")
    return isinstance(told, int) and not isinstance(told, bool) and told > FORMAT


def _explain(path: Path, error: Exception) -> DamagedRunError:
    return DamagedRunError(f"{str(path)!r} cannot be read: {error}.", repair="restore that file.")
