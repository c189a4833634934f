"""Starts Python programs as forks of a process that has loaded torch already: what :mod:`tests.warm` speaks to.

Loading torch, and torch._dynamo as every optimizer does, takes four seconds of CPU. Here they are loaded once for all
programs that a test process starts. A forked child becomes the program it was asked for by the functions of the
interpreter that become it in a new process, and ends as one does: threads are waited for, and what was registered for
the end is run; only modules are not taken apart.

``torch`` is taken out of ``sys.modules`` until the program imports it, and is then found by a finder, behind those that
stand in front of it: what acts when torch is imported acts here too. What is left out: torch's own modules are not
executed again, and ``torch._dynamo`` is there before it is asked for. Frames of this file are below the program's.

It is given a folder for its sockets, one for each of the stages below; a stage forks the next when somebody asks for
it. It ends when its stdin does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import select
import socket
import sys
import tempfile
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

STAGES = ("torch", "ours")
"""What is loaded, each with what is before it: torch, and all of retrograd."""

FOLDER = Path(sys.argv[1]) if __name__ == "__main__" else Path()


class Job:
    """A program that was asked for.

    Attributes:
        words: the interpreter, its options, the program and its arguments.
        environment: its environment.
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        self.words: list[str] = asked["words"]
        self.environment: dict[str, str] = asked["environment"]
        self._asked = asked

    def settle(self, files: Sequence[int]) -> None:
        """Give this process the folder, the session and the open files of the program."""
        os.chdir(self._asked["folder"])
        if self._asked["new_session"]:
            os.setsid()
        elif self._asked["group"] >= 0:
            os.setpgid(0, self._asked["group"])
        numbers = self._asked["files"]
        above = max(numbers) + 1
        copies = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]  # numbers that none of them is to have
        for number, copy in zip(numbers, copies, strict=True):
            os.dup2(copy, number)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in numbers:
                with contextlib.suppress(OSError):  # the one of the list itself
                    os.close(number)


# ---- modules that are loaded, but not yet there ----


class Held(MetaPathFinder):
    """Loaded modules that a program finds as if they were loaded when it imports them."""

    def __init__(self) -> None:
        self.modules: dict[str, types.ModuleType] = {}
        self.lean: set[str] = set()
        self.program = ""

    def hide(self) -> None:
        """Take them out of ``sys.modules``."""
        for name in list(sys.modules):
            top = name.partition(".")[0]
            if top in ("torch", "functorch", "torchgen", "retrograd"):
                self.modules[name] = sys.modules.pop(name)
        sys.modules.pop("sitecustomize", None)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        known = self.modules[name].__spec__
        found = ModuleSpec(name, HeldLoader(self, self.modules[name]), origin=known.origin if known else None)
        found.submodule_search_locations = known.submodule_search_locations if known else None
        return found

    def restore(self, name: str) -> None:
        """Do what else is done when this module is loaded: others are loaded that it imports."""
        if name in self.lean:
            others = self.lean
        elif name == "torch":
            others = {each for each in self.modules if not each.startswith("retrograd")}
        else:
            importlib.import_module("torch")
            others = {each for each in self.modules if each.startswith("retrograd")}
        for each in others - {name, self.program}:
            sys.modules.setdefault(each, self.modules[each])


class HeldLoader(Loader):
    """Loads one of them."""

    def __init__(self, held: Held, module: types.ModuleType) -> None:
        self._held, self._module, self._spec = held, module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec
        self._held.restore(module.__name__)

    def get_code(self, name: str) -> Any:
        """Its code, for one that is run as a program."""
        assert self._spec is not None
        return self._spec.loader.get_code(name)  # type: ignore[union-attr]


HELD = Held()


def load(stage: str) -> None:
    """Load what belongs to a stage."""
    if stage == "torch":
        import numpy
        import torch
        import torch._dynamo

        assert numpy
        torch.set_num_threads(1)
    else:
        import pyarrow.parquet
        import rich.console

        HELD.hide()
        importlib.import_module("retrograd.core.cli.commands")  # what it loads needs no torch
        importlib.import_module("retrograd.core.launch.closing")
        HELD.lean = {name for name in sys.modules if name.startswith("retrograd")}
        sys.modules.update(HELD.modules)
        package = importlib.import_module("retrograd")
        for found in pkgutil.walk_packages(package.__path__, "retrograd."):
            if not any(part in found.name for part in ("bootstrap", "integrations", "cuda", "__main__")):
                importlib.import_module(found.name)
        assert pyarrow.parquet
        assert rich.console


# ---- the process that forks ----


Running = dict[int, tuple[int, socket.socket | None]]
"""Children by the file of their process: the number of each, and who waits for it, if it is no stage."""


def serve(stage: int, sockets: list[socket.socket]) -> Job:
    """Fork a child for each program that is asked for; returns in the children."""
    load(STAGES[stage])
    gc.collect()
    gc.freeze()  # what is loaded stays, and no child need look at it
    running: Running = {}
    mine, *later = sockets
    while True:
        ready, _, _ = select.select([0, mine, *later, *running], [], [])
        for each in ready:
            if each == 0:
                leave(running)
            elif each is mine:
                job = begin(mine, running, sockets)
                if job is not None:
                    return job
            elif each in running:
                finish(each, running)
            elif later:  # somebody asks for the next stage, or for one behind it
                child = os.fork()
                if not child:
                    close(running, mine)
                    return serve(stage + 1, later)
                running[os.pidfd_open(child)] = child, None
                close({}, *later)
                later = []


def begin(listening: socket.socket, running: Running, sockets: list[socket.socket]) -> Job | None:
    """Fork a child for the program that is asked for next; its job in the child, None in the parent."""
    connection, _ = listening.accept()
    size, files, _, _ = socket.recv_fds(connection, 8, 250)
    text = b""
    while len(text) < int(size, 16):
        text += connection.recv(1 << 20)
    job = Job(json.loads(text))
    child = os.fork()
    if not child:
        close(running, connection, *sockets)
        job.settle(files)
        return job
    for file in files:
        os.close(file)
    running[os.pidfd_open(child)] = child, connection
    with contextlib.suppress(OSError):  # who asked is gone
        connection.sendall(b"%16d" % child)
    return None


def close(running: Running, *sockets: socket.socket) -> None:
    """Close, in a child, what is its parent's."""
    for each in (*sockets, *(waiting for _, waiting in running.values() if waiting is not None)):
        each.close()
    for handle in running:
        os.close(handle)


def finish(handle: int, running: Running) -> None:
    """A child has ended: tell how."""
    child, waiting = running.pop(handle)
    os.close(handle)
    _, status = os.waitpid(child, 0)
    if waiting is not None:
        with contextlib.suppress(OSError):  # who asked is gone
            waiting.sendall(b"%16d" % status)
        waiting.close()


def leave(running: Running) -> NoReturn:
    """End behind the stages that were forked; programs that still run are left alone."""
    for child, waiting in running.values():
        if waiting is None:
            os.waitpid(child, 0)
    os._exit(0)


# ---- the program ----


class Become(BaseException):
    """The process is to become another program."""

    def __init__(self, job: Job) -> None:
        self.job = job


def run(job: Job) -> None:
    """Be this program, and those that it becomes."""
    from tests import warm

    warm.be_within(FOLDER)
    execute = os.execve

    def become(path: Any, words: Sequence[str], environment: dict[str, str]) -> NoReturn:
        if (known := warm.understand(words, environment)) is not None:
            asked = {"words": known, "environment": environment}
            raise Become(Job(asked))
        execute(path, words, environment)

    os.execve = become
    while True:
        try:
            prepare(job)
            start(job)
        except Become as other:
            job = other.job
        else:
            return


def prepare(job: Job) -> None:
    """Put everything as it is in an interpreter that begins."""
    import numpy

    os.environ.clear()
    os.environ.update(job.environment)
    tempfile.tempdir = None  # TMPDIR may be another one
    HELD.hide()
    _, rest = split(job.words)
    HELD.program = rest[1] if rest[0] == "-m" else ""
    others = [each for each in sys.meta_path if each is not HELD and getattr(each, "__name__", "") != "_TorchFinder"]
    sys.meta_path[:] = [HELD, *others]
    numpy.random.seed()
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    open_streams(is_buffered="-u" not in job.words and not job.environment.get("PYTHONUNBUFFERED"))
    paths = [os.path.abspath(path) for path in job.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in PATHS if path not in paths)]
    with contextlib.suppress(ModuleNotFoundError):
        import sitecustomize  # noqa: F401


def open_streams(*, is_buffered: bool) -> None:
    """Make stdin, stdout and stderr of the files that are open now, in the encoding that is asked for."""
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")[0]
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            stream = None
        else:
            is_line = name == "stderr" or os.isatty(number)
            raw = open(number, mode + "b", 0 if name != "stdin" and not is_buffered else -1, closefd=False)
            stream = io.TextIOWrapper(
                raw,
                encoding=encoding,
                errors="backslashreplace" if name == "stderr" else "strict",
                line_buffering=is_line,
                write_through=not is_buffered and name != "stdin",
            )
            stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def start(job: Job) -> None:
    """Run the program that the words name, as the interpreter would."""
    options, rest = split(job.words)
    sys.orig_argv = list(job.words)
    is_named = rest[0] in ("-m", "-c")
    sys.argv = [rest[0], *rest[2 if is_named else 1 :]]
    if "-P" not in options:
        here = {"-m": os.getcwd(), "-c": ""}
        sys.path.insert(0, here[rest[0]] if is_named else os.path.dirname(os.path.realpath(rest[0])))
    if rest[:2] == ["-m", "retrograd"]:  # which may become another program
        try:
            runpy._run_module_as_main(rest[1])  # type: ignore[attr-defined]
        except SystemExit as left:
            ENDING.code = left.code if isinstance(left.code, int) else None
            raise
        return
    if is_named:
        code = rest[1] if rest[0] == "-c" else f"import runpy; runpy._run_module_as_main({rest[1]!r})"
        failed = ctypes.pythonapi.PyRun_SimpleStringFlags(code.encode(), None)
    else:
        failed = run_file(os.path.abspath(rest[0]))
    if not failed:
        ENDING.code = 0
    elif getattr(sys, "last_type", None) is not KeyboardInterrupt:  # of which the interpreter knows by itself
        ENDING.code = 1
        raise SystemExit(1)


class Ending:
    """The end of a program, but for taking modules apart one by one, which takes half a second.

    Attributes:
        code: the exit code; None where the interpreter alone knows it.
    """

    def __init__(self) -> None:
        self.code: int | None = None

    def hasten(self) -> None:
        """End now, when everything that was registered for the end has been run."""
        if self.code is not None:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None and not stream.closed:
                    stream.flush()
            os._exit(self.code)


ENDING = Ending()


def run_file(path: str) -> int:
    """Run a script in ``__main__``; not 0 where it has raised an exception, which is printed by then."""
    open_file, run_open = ctypes.CDLL(None).fopen, ctypes.pythonapi.PyRun_SimpleFileExFlags
    open_file.restype = ctypes.c_void_p
    run_open.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
    file = open_file(os.fsencode(path), b"rb")
    if not file:
        print(f"{sys.executable}: can't open file {path!r}", file=sys.stderr)
        raise SystemExit(2)
    return int(run_open(file, os.fsencode(path), 1, None))


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of the interpreter, and what follows them."""
    rest = list(words[1:])
    options = []
    while rest and rest[0] in ("-u", "-P"):
        options.append(rest.pop(0))
    return options, rest


if __name__ == "__main__":
    atexit.register(ENDING.hasten)  # first, and so it is called last
    listening = []
    for name in STAGES:
        listening.append(socket.socket(socket.AF_UNIX))
        listening[-1].bind(str(FOLDER / name))
        listening[-1].listen(64)
    os.write(1, b"listening\n")
    os.dup2(2, 1)
    sys.path[0] = str(Path(__file__).parents[1])
    PATHS = list(sys.path[1:])
    run(serve(0, listening))
