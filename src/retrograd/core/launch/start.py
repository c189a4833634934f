"""Requests: commands of ours that run a program of the user's, and travel to each process below it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

from retrograd.core.addresses import is_remote, local_folder, open_folder, reaching
from retrograd.core.errors import LaunchError, RunWriteError
from retrograd.core.launch.interpreter import BOOTSTRAP, OURS, find_obstacle
from retrograd.core.launch.options import Command
from retrograd.core.notices import say
from retrograd.core.runs.dated import DATE, make_dated

UNDONE = f"{OURS}UNDONE"
"""Environment variable for the bootstrap, which may not load JSON: ``undone`` and ``path`` of the request, as lines."""


@dataclass(frozen=True, kw_only=True)
class Request(Command):
    """A command that runs a program, and travels to each of its processes: as JSON, in one environment variable.

    Attributes:
        variable: that environment variable, made from the name. Where it is missing, nothing is done.
        promise: said before the program starts, with ``{}`` for the command and for the folder.
        parent: where folders of such requests lie; empty for a request that needs none.
        done: what is done, for the last line: ``"recorded"``; empty where there is nothing to say.
        undone: what is said before the reason why it was not done, as in ``"nothing was recorded: "``.
        leaves: what each process that has done it leaves in the folder, as a glob.
        see: how to see it, with ``{}`` for the folder.
        command: what the user asked to run.
        path: folder for what is found, absolute, since a script may change its directory; empty if there is none.
        shown: the same as the user wrote it, for messages.
    """

    variable: ClassVar[str]
    runs: ClassVar[bool] = True
    promise: ClassVar[str]
    parent: ClassVar[str] = ""
    done: ClassVar[str] = ""
    undone: ClassVar[str]
    leaves: ClassVar[str] = ""
    see: ClassVar[str] = ""

    command: tuple[str, ...] = ()
    path: str = ""
    shown: str = ""

    def __init_subclass__(cls) -> None:
        cls.variable = f"{OURS}{cls.name.upper()}"
        cls.usage = make_usage(cls.name)
        cls.undone = f"nothing was {cls.done}: " if cls.done else ""

    def write(self) -> str:
        """The request as the text of :attr:`variable`."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """The request that this process was started with.

        Raises:
            KeyError: if it was not started by this command.
        """
        given = json.loads(environment[cls.variable])
        values: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        return cls(**values)

    def greet(self) -> str:
        """The line that is said before the program starts; empty for none."""
        return self.promise.format(shlex.join(self.command), self.shown)

    def choose_folder(self) -> Self:
        """Give the request a folder that can be made. One with a date is made: nobody else shall have it.

        Not for a program that is no Python: it may record nothing, and then nobody would be there to remove it.

        Raises:
            RetrogradError: the folder cannot be written, or holds something already.
        """
        shown = self.shown or name_folder(self.command, self.parent)
        if DATE in self.shown:
            from retrograd.core.runs.ranks import check_dated

            check_dated(shown, resume=getattr(self, "resume", False))
        find = open_folder if self.parent == "runs" else local_folder
        path = find(shown)
        if is_remote(path):
            shown = make_dated(shown)
            path = find(shown)
            with reaching(path):
                self._check_vacant(path)
            return replace(self, path=str(path), shown=shown)
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise RunWriteError(
                f"{str(path)!r} cannot be made: {str(there)!r} is not a folder that we may write to.",
                repair="give another folder: -o DIR.",
            )
        if there == path:
            self._check_vacant(path)
        shown = make_dated(shown, is_made=_is_python(self.command))
        return replace(self, path=str(find(shown)), shown=shown)

    def _check_vacant(self, folder: Path) -> None:
        from retrograd.core.runs.ranks import check_vacant

        check_vacant(folder, resume=getattr(self, "resume", False))

    def carry_out(self) -> NoReturn:
        """Print what will be done, or why it will not be done, and become the command in either case.

        Raises:
            RetrogradError: for anything that can be found wrong before the command runs.
        """
        words = resolve_command(self.command, self.name)
        self.check()
        request = self.choose_folder() if self.parent else self
        environment = make_environment(request, os.environ)
        if said := find_obstacle(words, environment) or request.greet():
            say(said)
        if note := self.find_misplaced():
            say(note)
        replace_process(words, {**environment, **request.accompany()})

    def find_misplaced(self) -> str:
        """A line about an option of ours that stands after a script which does not speak of it; empty for none."""
        place = next((place for place, word in enumerate(self.command) if word.endswith(".py")), None)
        if place is None or getattr(self, "quiet", False):
            return ""
        ours = {name for option in self.options() for name in option.names if name.startswith("--")}
        given = [word.partition("=")[0] for word in self.command[place + 1 :]]
        try:
            text = Path(self.command[place]).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        found = next((word for word in given if word in ours and word[2:] not in text), "")
        script = Path(self.command[place]).name
        return found and f"{found}, behind {script}, is passed to it; options of retrograd stand before the script"

    def accompany(self) -> Mapping[str, str]:
        """Start what runs beside the program; returns variables for its environment.

        Raises:
            LaunchError: it cannot be started.
        """
        return {}


def make_usage(name: str, *more: str) -> str:
    """The usage of a command that runs a program, in all its forms, with ``more`` before them."""
    lines = [
        *more,
        "[--] train.py [ARGS]",
        "[--] -m MODULE [ARGS]",
        "[--] torchrun | accelerate launch | any program [ARGS]",
    ]
    return "\n       ".join(f"retrograd {name} [OPTIONS] {line}" for line in lines)


# ---- the program ----


def resolve_command(command: Sequence[str], verb: str = "run") -> list[str]:
    """Find what to execute: scripts and modules by this Python, anything else as it is.

    Args:
        command: what the user typed.
        verb: the command of ours before it, for messages.

    Raises:
        LaunchError: if there is no such script, module or program.
    """
    if not command:
        raise LaunchError(f"No command was given to {verb}.", repair=f"retrograd {verb} train.py [ARGS]")
    first = command[0]
    if first == "-m":
        _check_module(command[1:2], verb)
    elif first.endswith(".py") or not (program := _find_program(first)):
        _check_script(Path(first))
    else:
        return [program, *command[1:]]
    return [sys.executable, *command]


def _find_program(name: str) -> str | None:
    import shutil

    return shutil.which(name)


def _check_script(script: Path) -> None:
    if script.is_file() or Path(script, "__main__.py").is_file():
        return
    import difflib

    files = [str(path) for path in script.parent.glob("*.py")]
    near = difflib.get_close_matches(str(script), files, n=1)
    raise LaunchError(
        f"The script {str(script)!r} does not exist.",
        repair=f"the nearest is {near[0]!r}." if near else "give the path of a Python script, or a program on PATH.",
    )


def _check_module(name: Sequence[str], verb: str) -> None:
    if not name:
        raise LaunchError("No module was given after -m.", repair=f"retrograd {verb} -m package.module [ARGS]")
    top = name[0].partition(".")[0]
    if top not in sys.builtin_module_names and PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
        raise LaunchError(
            f"The module {top!r} cannot be found.", repair="install it, or run from the folder that holds it."
        )


def _is_python(command: Sequence[str]) -> bool:
    """Return whether a command runs Python, by its name or by its first line, as that of torchrun."""
    if command[0] == "-m" or command[0].endswith(".py") or Path(command[0]).name.startswith("python"):
        return True
    try:
        with Path(_find_program(command[0]) or command[0]).open("rb") as file:
            first = file.readline(200)
    except OSError:
        return False
    return first.startswith(b"#!") and b"python" in first


def name_folder(command: Sequence[str], parent: str = "runs") -> str:
    """The name of a new folder for what becomes of this command: ``runs/<script>-{date}``."""
    scripts = [word for word in command if word.endswith(".py")]
    name = command[1] if command[0] == "-m" else Path([*scripts, command[0]][0]).stem
    return f"{parent}/{name}-{DATE}"


# ---- its process ----


def make_environment(request: Request, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which every Python process does as requested, and nothing else that we were asked before."""
    hidden = environment.get("PYTHONPATH")
    paths = [path for path in hidden.split(os.pathsep) if path != str(BOOTSTRAP)] if hidden else []
    theirs = {name: value for name, value in environment.items() if not name.startswith(OURS)}
    return {
        **theirs,
        request.variable: request.write(),
        UNDONE: f"{request.undone}\n{request.path}",
        "PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), *paths]),
    }


def make_own_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process of ours beside the program: it finds us, and is asked nothing."""
    theirs = {name: value for name, value in environment.items() if not name.startswith((OURS, "PYTHONW"))}
    hidden = theirs.get("PYTHONPATH")
    paths = [path for path in hidden.split(os.pathsep) if path != str(BOOTSTRAP)] if hidden else []
    return {**theirs, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *paths])}


def replace_process(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become the command, so that signals reach it and its exit code is ours.

    Raises:
        LaunchError: if the system refuses to execute it.
    """
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these, and what it executes would inherit that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(command[0], list(command), dict(environment))
    except OSError as error:
        raise LaunchError(f"{command[0]!r} cannot be executed: {error.strerror}.") from error
