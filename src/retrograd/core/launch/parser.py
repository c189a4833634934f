"""Command lines: where our options end and the user's command begins, and what a command of ours is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from retrograd.core.addresses import read_path
from retrograd.core.launch.options import Command, Option
from retrograd.core.launch.requests import list_requests
from retrograd.core.notices import print_text

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "uv", "srun", "mpirun", "env", "bash", "sh")


Load = Callable[[], Sequence[type[Command]]]
"""Gives all commands, in the order of the help."""


def parse(words: Sequence[str], load: Load, description: str, examples: str) -> Command:
    """Read the command that was typed; asked for help, or for what there is not, say so and end the process.

    Args:
        words: what follows ``retrograd``.
        load: gives all commands. It is asked where those that run a program, which are known here, do not suffice.
        description: what the help says first.
        examples: what it says last.
    """
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    kind = _find(words[0], list_requests()) or _find(words[0], load()) if words else None
    if kind is None:
        _leave(words, load(), description, examples)
    parser = _make_parser(kind)
    options, command = split_command(words[1:], kind) if kind.runs else (list(words[1:]), [])
    if kind.takes_run and not _is_command(command):
        options, command = list(words[1:]), []
    parsed, unknown = parser.parse_known_args(options)
    if unknown:
        names = [name for option in kind.options() for name in option.names]
        wrong = unknown[0].partition("=")[0]
        what = f"there is no option {wrong!r}" if wrong.startswith("-") else f"unexpected argument {wrong!r}"
        parser.error(what + (_suggest(find_nearest(wrong, names)) or _tell_owners(wrong, load())))
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(parsed).items()}
    make: Callable[..., Command] = kind
    return make(**given, **({"command": tuple(command)} if kind.runs else {}))


def _is_command(words: Sequence[str]) -> bool:
    from retrograd.core.launch.chosen_run import is_command

    return is_command(words)


def _find(name: str, commands: Iterable[type[Command]]) -> type[Command] | None:
    return next((each for each in commands if each.name == name), None)


def _leave(words: Sequence[str], commands: Sequence[type[Command]], description: str, examples: str) -> NoReturn:
    """End the process where no command was typed: with help if that was asked for, else saying what is missing."""
    parser = _make_table(commands, description, examples)
    if not words:
        parser.exit(2, parser.format_help())
    if words[0].startswith("-"):
        parser.parse_known_args(words[:1])  # help and the version end the process
        wrong = words[0].partition("=")[0]
        parser.error(f"there is no option {wrong!r} before a command{_tell_owners(wrong, commands)}")
    near = find_nearest(words[0], [each.name for each in commands])
    meant = _find(near, commands)
    where = parser if meant is None else _make_parser(meant)
    where.error(f"there is no command {words[0]!r}{_suggest(near) or '; see `retrograd --help`'}")


def find_nearest(word: str, known: Iterable[str]) -> str:
    """Find the known word that is nearest; empty where none is near."""
    import difflib

    return next(iter(difflib.get_close_matches(word, list(known), n=1)), "")


def _suggest(near: str) -> str:
    return f"; the nearest is {near!r}" if near else ""


def _tell_owners(wrong: str, commands: Sequence[type[Command]]) -> str:
    """Return which commands have an option that was typed, or nearly so; empty where none has."""
    from retrograd.core.amounts import list_names

    has = {each.name: {name for option in each.options() for name in option.names} for each in commands}
    near = find_nearest(wrong, {name for names in has.values() for name in names}) if wrong.startswith("-") else ""
    owners = [command for command, names in has.items() if near in names]
    return f"; {list_names(owners)} {'has' if len(owners) == 1 else 'have'} {near!r}" if near else ""


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        print_text(message, file=sys.stderr if file is None else file, end="")


def _make_table(commands: Sequence[type[Command]], description: str, examples: str) -> argparse.ArgumentParser:
    """A parser that knows what commands there are, but not what each of them takes."""
    parser = _Parser(prog="retrograd", description=description, epilog=examples, **_FORM)
    parser.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help="print the version")
    known = parser.add_subparsers(title="commands", metavar="COMMAND")
    for kind in commands:
        does = _tell(kind)
        known.add_parser(kind.name, help=does[:1].lower() + does[1:].removesuffix("."))
    return parser


def _make_parser(kind: type[Command]) -> argparse.ArgumentParser:
    """The parser of one command."""
    parser = _Parser(
        prog=f"retrograd {kind.name}",
        usage=kind.usage or None,
        description=_tell(kind),
        epilog=kind.examples,
        **_UNSEEN,
    )
    groups: dict[str, Any] = {"": parser}
    for option in kind.options():
        if option.group not in groups:
            groups[option.group] = parser.add_mutually_exclusive_group()
        groups[option.group].add_argument(*_name(option), **_describe(option))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def _tell(kind: type[Command]) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def split_command(words: Sequence[str], kind: type[Command]) -> tuple[list[str], list[str]]:
    """Our options, and the command after them.

    The command begins at ``--``, at ``-m``, or at the first word that belongs to no option. A list of patterns ends
    at what can only be a command: a ``.py`` file or a launcher.

    Args:
        words: what follows the name of our command.
        kind: that command.
    """
    options = {name: option for option in kind.options() for name in option.names if not option.is_switch}
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            return list(words[:position]), list(words[position + 1 :])
        if word == "-m" or not word.startswith("-"):
            break
        position += 1
        if word in options:
            position += 1
            while options[word].is_list and position < len(words) and not _ends_list(words[position]):
                position += 1
    return list(words[:position]), list(words[position:])


_FORM: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
_UNSEEN: dict[str, Any] = _FORM | {"formatter_class": partial(argparse.RawDescriptionHelpFormatter, width=80)}
"""The same until something is shown: to ask for the width of the terminal loads modules, which takes a while."""


def _name(option: Option) -> Sequence[str]:
    return [option.field] if option.is_argument else option.names


def _describe(option: Option) -> dict[str, Any]:
    """Describe an option to argparse. A value that is not given is left to the default of the field."""
    if option.is_argument:
        told: dict[str, Any] = {"metavar": option.names[0]}
        told |= {} if option.default is MISSING else {"nargs": "?", "default": option.default}
    else:
        told = {"dest": option.field, "required": option.default is MISSING, "default": argparse.SUPPRESS}
    told["help"] = option.help
    if option.is_switch:
        return told | {"action": "store_false" if option.default else "store_true"}
    if option.is_list:
        told |= {"nargs": "+", "action": "extend"}
    if option.metavar:
        told["metavar"] = option.metavar
    told["type"] = read_path if option.type is Path else option.type
    return told | ({"choices": option.choices} if option.choices else {})


def _ends_list(word: str) -> bool:
    name = Path(word).name.rstrip("0123456789.")  # python3.12
    return word.startswith("-") or word.endswith(".py") or name in _LAUNCHERS


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print_text(f"retrograd {version('retrograd')}")
        parser.exit()
