# ruff: noqa: INP001  # a folder of pages, not a package
"""Makes ``commands.md`` from the options of the commands: ``python docs/make_commands.py``."""

from __future__ import annotations

from pathlib import Path

from retrograd.core.cli.commands import COMMANDS
from retrograd.core.launch.options import describe_commands

if __name__ == "__main__":
    Path(__file__).with_name("commands.md").write_text(describe_commands(COMMANDS), encoding="utf-8")
