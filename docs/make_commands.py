# ruff: noqa: INP001  # a folder of pages, not a package
"""Makes ``commands.md`` from the options of the commands: ``python docs/make_commands.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrograd.core.cli.commands import COMMANDS
from retrograd.core.launch.options import Command, Option

_PAGE = """<!-- Made by docs/make_commands.py; change the options, not this page. -->

# Commands

`retrograd COMMAND --help` says the same. Put `--` before a program that follows an option with several values.

{contents}
## Exit codes

| code | of | means |
|---|---|---|
| 0 | all | it was done; of `compare` and `replay`: the same, but for noise |
| 1 | `explain --fail-on` | a finding is this severe, or worse |
| | `compare`, `replay` | not the same |
| | `hangs` | a pass hangs |
| 2 | all | it cannot be done, and stderr says why: an error of usage, no run, a run of which no row can be read |
| 130, 141 | all | interrupted by Ctrl-C; the reader of a pipe has gone |
| any | `run`, `explain train.py`, `trace`, `inventory`, `debug` | that of the program; 128 + N by signal N |

{sections}"""

_SECTION = """
## {name}

{does}

| option | what it does |
|---|---|
{options}
"""


def describe_commands(commands: Sequence[type[Command]]) -> str:
    """The page, in Markdown."""
    contents = "".join(f"- [{each.name}](#{each.name}): {_tell(each)}\n" for each in commands)
    return _PAGE.format(contents=contents, sections="".join(map(_describe, commands)))


def _describe(command: type[Command]) -> str:
    options = "\n".join(f"| `{_write(each)}` | {_escape(each.help)} |" for each in command.options())
    examples = command.examples.removeprefix("\nexamples:\n").partition("\n\n")
    shown = f"\n```\n{examples[0].strip()}\n```\n".replace("\n  ", "\n") if command.examples else ""
    after = f"\n{examples[2]}" if examples[2] else ""
    return _SECTION.format(name=command.name, does=_tell(command), options=options) + shown + after


def _escape(text: str) -> str:
    return text.replace("<", r"\<").replace("%%", "%")  # which argparse writes twice


def _tell(command: type[Command]) -> str:
    return (command.__doc__ or "").partition("\n")[0]


def _write(option: Option) -> str:
    """An option as it is typed, with what stands for its value."""
    value = (option.metavar or " | ".join(option.choices)).replace("|", r"\|")
    more = " …" if option.is_list else ""
    return ", ".join(option.names) + (f" {value}{more}" if value else "")


if __name__ == "__main__":
    Path(__file__).with_name("commands.md").write_text(describe_commands(COMMANDS), encoding="utf-8")
