"""How Python interpreters find us: by ``PYTHONPATH``, or, where they ignore it, by the file of ``hook_file.py``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

BOOTSTRAP = Path(__file__).parent / "bootstrap"
"""Folder of the ``sitecustomize`` that every Python process below finds first."""

OURS = "RETROGRAD_"
"""Prefix of all our environment variables."""

_PYTHON = re.compile(r"python[\d.]*[dt]?(\.exe)?")
_REASONS = {
    "S": ("it does not load the module site, which loads us", "leave -S away."),
    "I": ("it ignores PYTHONPATH, by which it would find us", "leave -I away, or run `retrograd install-hook` there."),
    "E": ("it ignores PYTHONPATH, by which it would find us", "leave -E away, or run `retrograd install-hook` there."),
}
"""Option → why it keeps us out, and what to do."""

_WITH_VALUE = "WX"
_LAST = "cm"
_ASK = "import os, sys; os._exit(any(getattr(each, '__name__', '') == '_TorchFinder' for each in sys.meta_path))"
_REACHED = 1
_ASK_VERSION = "import sys; sys.stdout.write('%d.%d' % sys.version_info[:2])"
_OLDEST = (3, 11)
"""The oldest Python that we run in, as in ``pyproject.toml``."""

_SECONDS = 10.0


def find_obstacle(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Find out why we cannot reach a Python interpreter that is started like this; empty if we can.

    It is asked, since it may have been prepared by ``retrograd install-hook``.
    """
    if _PYTHON.fullmatch(Path(command[0]).name) and (version := _find_old_version(command[0], environment)):
        return (
            f"{Path(command[0]).name} is Python {version}, and cannot be recorded, traced or debugged. It runs as "
            f"without us. Try: use Python {'.'.join(map(str, _OLDEST))} or later, in which retrograd is installed."
        )
    options = set(_list_options(command)) & _REASONS.keys()
    if not options or _is_reached(command[0], options, environment):
        return ""
    option = next(option for option in _REASONS if option in options)
    reason, repair = _REASONS[option]
    name = f"{Path(command[0]).name} -{option}"
    return f"{name} cannot be recorded, traced or debugged: {reason}. It runs as without us. Try: {repair}"


def _list_options(command: Sequence[str]) -> Iterator[str]:
    """The options of a Python interpreter, as letters."""
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return
    words = iter(command[1:])
    for word in words:
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, "")
            continue
        if not word.startswith("-") or word == "-":
            return
        letters = re.split(f"[{_WITH_VALUE}{_LAST}]", word[1:], maxsplit=1)
        yield from letters[0]
        ending = word[1 + len(letters[0]) :]
        if ending and ending[0] in _LAST:
            return
        if len(ending) == 1:  # its value is the next word
            next(words, "")


def _find_old_version(python: str, environment: Mapping[str, str]) -> str:
    """The version of a Python that is older than we need; empty for any other, and where it is not known."""
    if os.path.realpath(python) == os.path.realpath(sys.executable):
        return ""
    asked = _ask([python, "-S", "-c", _ASK_VERSION], environment)
    found = re.fullmatch(rb"(\d+)\.(\d+)", asked.stdout) if asked is not None else None
    is_old = found is not None and (int(found[1]), int(found[2])) < _OLDEST
    return found[0].decode() if found is not None and is_old else ""


def _is_reached(python: str, options: set[str], environment: Mapping[str, str]) -> bool:
    asked = _ask([python, *(f"-{option}" for option in options), "-c", _ASK], environment)
    return asked is not None and asked.returncode == _REACHED


def _ask(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[bytes] | None:
    import subprocess

    try:
        return subprocess.run(
            words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
