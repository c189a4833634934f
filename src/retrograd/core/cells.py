"""The shell of IPython that runs here, and source files as people know them: its cells have numbers, and no files."""

from __future__ import annotations

import sys
from typing import Any


def find_shell() -> Any:
    """The shell that runs here, or None. IPython is not loaded to find out."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return ask() if ask is not None else None


def is_notebook() -> bool:
    """True where a shell runs and shows HTML."""
    formatter = getattr(find_shell(), "display_formatter", None)
    return formatter is not None and "text/html" in formatter.active_types


def show_file(file: str) -> str:
    """``In[2]`` for a cell that this process has run; any other file as it is."""
    shell = find_shell()
    named = shell.compile.format_code_name(file) if shell is not None else None
    return str(named[1]) if named else file


def show_line(line: str) -> str:
    """``In[2]:20`` for a line of such a cell, given as ``file:20``; any other line as it is."""
    file, colon, number = line.rpartition(":")
    return f"{show_file(file)}{colon}{number}"
