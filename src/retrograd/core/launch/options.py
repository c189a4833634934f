"""A table for each command: the fields of its class are its options, for the parser and for the documentation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

Check = Callable[[str, Any], object]
"""Given the name of an option and its value, raises if that value is not possible."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a command.

    Attributes:
        names: as they are typed, as in ``-o`` and ``--output``; an argument has one name without a dash.
        help: what it does, in a few words.
        metavar: what stands for its value in the help; empty for its choices or its name.
        check: raises for a value that is not possible; None where each one is.
        group: options of the same group exclude one another; empty for none.
        field: the field of the command that it sets.
        default: the value where it is not given; :data:`dataclasses.MISSING` where it must be given.
        type: type of one value; ``bool`` for a switch.
        choices: the only values there are; empty for any.
        is_list: whether it takes several values.
    """

    names: tuple[str, ...]
    help: str
    metavar: str = ""
    check: Check | None = None
    group: str = ""
    field: str = ""
    default: Any = None
    type: type = str
    choices: tuple[str, ...] = ()
    is_list: bool = False

    @property
    def is_argument(self) -> bool:
        """True if it is typed without a name."""
        return not self.names[0].startswith("-")

    @property
    def is_switch(self) -> bool:
        """True if it is typed without a value."""
        return self.type is bool


def option(names: str, default: Any, does: str, **details: Any) -> Any:
    """A field of a command that an option sets; the type of the field says how its value is written.

    ``bool`` is a switch, a ``tuple`` takes one value or several, and ``Literal`` allows its values alone.

    Args:
        names: as they are typed, as in ``"-o --output"``; a name without a dash is that of an argument.
        default: the value where it is not given; :data:`dataclasses.MISSING` where it must be given.
        does: what it does, in a few words.
        details: ``metavar``, ``check`` and ``group`` of :class:`Option`.
    """
    return field(default=default, metadata={"option": Option(names=tuple(names.split()), help=does, **details)})


class Command(ABC):
    """A command of ours: a dataclass of its options, which knows how to carry itself out.

    The first line of its docstring is what the help says of it.

    Attributes:
        name: as it is typed.
        examples: what stands below its options in the help.
        usage: what stands above them; empty for what argparse makes of the options.
        runs: whether a command of the user's follows its options, in the field ``command``.
        takes_run: whether the folder of a run may stand in that command's place.
        reads: whether it reads a run, which is quicker without pandas.
    """

    name: ClassVar[str]
    examples: ClassVar[str] = ""
    usage: ClassVar[str] = ""
    runs: ClassVar[bool] = False
    takes_run: ClassVar[bool] = False
    reads: ClassVar[bool] = False

    @classmethod
    @cache
    def options(cls) -> list[Option]:
        """Its options, in the order of its fields."""
        hints = get_type_hints(cls)
        return [
            replace(each.metadata["option"], field=each.name, default=each.default, **_read_type(hints[each.name]))
            for each in fields(cls)  # type: ignore[arg-type]  # every command is a dataclass
            if "option" in each.metadata
        ]

    def check(self) -> None:
        """Find what can be found wrong before anything runs.

        Raises:
            RetrogradError: saying what.
        """
        for each in self.options():
            value = getattr(self, each.field)
            if each.check is not None and value is not None:
                each.check(each.names[-1], value)

    @abstractmethod
    def carry_out(self) -> int | None:
        """Do what was asked for; returns the exit code, None for 0.

        Raises:
            RetrogradError: it cannot be done.
        """


def _read_type(hint: Any) -> dict[str, Any]:
    """Return how a value of this type is written on the command line."""
    if NoneType in get_args(hint):  # T | None
        return _read_type(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return _read_type(get_args(hint)[0]) | {"is_list": True}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    return {"type": hint}


# ---- completion in a shell ----

_BASH = """\
_retrograd() {{
  local words
  case "${{COMP_WORDS[1]}}" in
{cases}
  *) words="" ;;
  esac
  [ "$COMP_CWORD" = 1 ] && words="{names}"
  case "${{COMP_WORDS[COMP_CWORD]}}" in -*) ;; *) [ "$COMP_CWORD" = 1 ] || words="" ;; esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _retrograd retrograd
"""


def write_completion(commands: Sequence[type[Command]], shell: str) -> str:
    """The script that a shell reads: ``bash``, ``zsh`` or ``fish``."""
    words = {each.name: [name for option in each.options() for name in option.names] for each in commands}
    options = {command: [name for name in names if name.startswith("-")] for command, names in words.items()}
    if shell == "fish":
        return _write_fish(options)
    cases = "\n".join(f'  {command}) words="{" ".join(names)} --help" ;;' for command, names in options.items())
    script = _BASH.format(cases=cases, names=" ".join(options))
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _write_fish(options: dict[str, list[str]]) -> str:
    lines = [f"complete -c retrograd -n __fish_use_subcommand -a '{' '.join(options)}'"]
    for command, names in options.items():
        for name in names:
            kind = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            lines.append(f"complete -c retrograd -n '__fish_seen_subcommand_from {command}' {kind}")
    return "\n".join(lines) + "\n"
