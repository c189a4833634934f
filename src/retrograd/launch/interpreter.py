"""How Python interpreters find us: by ``PYTHONPATH``, or, where they ignore it, by the file of ``hook_file.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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
_SECONDS = 10.0


def find_obstacle(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Find out why we cannot reach a Python interpreter that is started like this; empty if we can.

    It is asked, since it may have been prepared by ``retrograd install-hook``.
    """
    options = set(_list_options(command)) & _REASONS.keys()
    if not options or _is_reached(command[0], options, environment):
        return ""
    option = next(option for option in _REASONS if option in options)
    reason, repair = _REASONS[option]
    name = f"{Path(command[0]).name} -{option}"
    return f"{name} cannot be recorded, traced or debugged: {reason}. It runs as without us. Repair: {repair}"


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


def _is_reached(python: str, options: set[str], environment: Mapping[str, str]) -> bool:
    import subprocess

    words = [python, *(f"-{option}" for option in options), "-c", _ASK]
    try:
        asked = subprocess.run(
            words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return asked.returncode == _REACHED
