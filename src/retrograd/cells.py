"""Source files as people know them: a cell of the notebook that runs here has a number, and its file means nothing."""

from __future__ import annotations

import sys


def show_file(file: str) -> str:
    """``In[2]`` for a cell that this process has run; any other file as it is."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)  # not imported: only what runs in it has cells
    shell = ask() if ask is not None else None
    named = shell.compile.format_code_name(file) if shell is not None else None
    return str(named[1]) if named else file


def show_line(line: str) -> str:
    """``In[2]:20`` for a line of such a cell, given as ``file:20``; any other line as it is."""
    file, colon, number = line.rpartition(":")
    return f"{show_file(file)}{colon}{number}"
