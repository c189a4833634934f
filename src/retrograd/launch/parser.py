"""Command lines: where our options end and the user's command begins, and what a command of ours is asked for."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NoReturn

from retrograd.addresses import read_path
from retrograd.amounts import list_names
from retrograd.launch.options import Command, Option
from retrograd.launch.start import is_command

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "uv", "srun", "mpirun", "env", "bash", "sh")


def parse(words: Sequence[str], commands: Sequence[type[Command]], description: str, examples: str) -> Command:
    """Read the command that was typed; asked for help, or for what there is not, say so and end the process.

    Args:
        words: what follows ``retrograd``.
        commands: what there is.
        description: what the help says first.
        examples: what it says last.
    """
    parser, parsers = _make_parsers(commands, description, examples)
    if not words:
        parser.exit(2, parser.format_help())
    if words[0] == "help":
        words = [*words[1:2], "--help"]
    kind = next((each for each in commands if each.name == words[0]), None)
    if kind is None:
        if not words[0].startswith("-"):
            near = find_nearest(words[0], parsers)
            parsers.get(near, parser).error(
                f"there is no command {words[0]!r}{_suggest(near) or '; see `retrograd --help`'}"
            )
        parser.parse_args(words)
        parser.error("no command was given")
    options, command = split_command(words[1:], kind) if kind.runs else (list(words[1:]), [])
    if kind.takes_run and not is_command(command):
        options, command = list(words[1:]), []
    parsed, unknown = parsers[kind.name].parse_known_args(options)
    if unknown:
        names = [name for option in kind.options() for name in option.names]
        wrong = unknown[0].partition("=")[0]
        what = f"there is no option {wrong!r}" if wrong.startswith("-") else f"unexpected argument {wrong!r}"
        near = _suggest(find_nearest(wrong, names)) or _tell_owners(wrong, commands)
        parsers[kind.name].error(what + near)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(parsed).items()}
    make: Callable[..., Command] = kind
    return make(**given, **({"command": tuple(command)} if kind.runs else {}))


def find_nearest(word: str, known: Iterable[str]) -> str:
    """Find the known word that is nearest; empty where none is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), "")


def _suggest(near: str) -> str:
    return f"; the nearest is {near!r}" if near else ""


def _tell_owners(wrong: str, commands: Sequence[type[Command]]) -> str:
    """Say which commands have an option that was typed, or nearly so; empty where none has."""
    has = {each.name: {name for option in each.options() for name in option.names} for each in commands}
    near = find_nearest(wrong, {name for names in has.values() for name in names}) if wrong.startswith("-") else ""
    owners = [command for command, names in has.items() if near in names]
    return f"; {list_names(owners)} {'has' if len(owners) == 1 else 'have'} {near!r}" if near else ""


def _make_parsers(
    commands: Sequence[type[Command]], description: str, examples: str
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """A parser of all commands, and that of each, by its name."""
    parser = argparse.ArgumentParser(prog="retrograd", description=description, epilog=examples, **_FORM)
    parser.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help="print the version")
    known = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parsers: dict[str, argparse.ArgumentParser] = {}
    for kind in commands:
        does = (kind.__doc__ or "").partition("\n")[0]
        summary = does[:1].lower() + does[1:].removesuffix(".")
        each = parsers[kind.name] = known.add_parser(
            kind.name, help=summary, description=does, epilog=kind.examples, **_FORM
        )
        each.usage = kind.usage or None
        groups: dict[str, Any] = {"": each}
        for option in kind.options():
            if option.group not in groups:
                groups[option.group] = each.add_mutually_exclusive_group()
            groups[option.group].add_argument(*_name(option), **_describe(option))
    return parser, parsers


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


def _name(option: Option) -> Sequence[str]:
    return [option.field] if option.is_argument else option.names


def _describe(option: Option) -> dict[str, Any]:
    """Describe an option to argparse. A value that is not given is left to the default of the field."""
    if option.is_argument:
        told: dict[str, Any] = {"metavar": option.names[0]} | ({} if option.default is MISSING else {"nargs": "?"})
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

        print(f"retrograd {version('retrograd')}")
        parser.exit()
