"""Python programs that begin with torch loaded: in a tenth of a second, where a new interpreter takes four.

:func:`run` and :class:`Popen` are those of :mod:`subprocess`, and take the same arguments. A program of this
interpreter is started by :mod:`tests.zygote`, as a fork of a process that has loaded torch; anything else, and what
depends on how an interpreter begins (options, ``PYTHON…`` variables), by :mod:`subprocess` itself. Processes that a
program of ours starts in turn are treated alike.

A test of the start itself (the bootstrap, what is imported when, interpreters of others) uses :mod:`subprocess`, and so
does one test of each command at least.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLD = tuple(f"PYTHON{name}" for name in ("WARNINGS", "HASHSEED", "HOME", "INSPECT", "OPTIMIZE", "MALLOC"))
"""Variables that act when an interpreter begins."""

_lock = threading.Lock()
_folder: Path | None = None


class Popen(subprocess.Popen[Any]):
    """A process, started by the zygote where that can be.

    Args:
        stage: what is loaded in it: ``torch`` or ``ours``; told from the words by default.
    """

    _connection: socket.socket | None = None

    def __init__(self, *arguments: Any, stage: str = "", **options: Any) -> None:
        self._stage = stage
        super().__init__(*arguments, **options)

    def _execute_child(self, *arguments: Any) -> None:  # type: ignore[override]
        if not _begin(self, *arguments):
            super()._execute_child(*arguments)  # type: ignore[misc]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(flags)  # type: ignore[misc, no-any-return]
        return _wait(self, flags)

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self._connection is None:
            return super()._internal_poll(_deadstate=_deadstate)  # type: ignore[misc, no-any-return]
        return _poll(self)


def run(
    words: Sequence[str],
    *,
    input: str | None = None,  # noqa: A002
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a program until it ends, as :func:`subprocess.run` does."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Popen(words, **options) as process:
        try:
            output, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(list(words), process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def understand(words: Sequence[str], environment: Mapping[str, str]) -> list[str] | None:
    """The words of a program that the zygote can start, with the interpreter in front; None for another one."""
    if any(environment.get(name) for name in COLD) or not hasattr(os, "pidfd_open"):
        return None
    program, *rest = map(os.fspath, words)
    program = shutil.which(program, path=environment.get("PATH")) or program
    mine = Path(sys.executable)
    if Path(program).parent == mine.parent and Path(program).name in ("torchrun", "accelerate"):
        rest = [program, *rest]
    elif not (Path(program).parent == mine.parent and Path(program).name.startswith("python")):
        return None
    first = next((number for number, word in enumerate(rest) if word not in ("-u", "-P")), len(rest))
    if not rest[first:] or (rest[first].startswith("-") and rest[first] not in ("-m", "-c")):
        return None
    return [str(mine), *rest] if rest[first] in ("-m", "-c") or Path(rest[first]).is_file() else None


def be_within(folder: Path) -> None:
    """Have all processes that this one starts be started by the zygote of this folder."""
    global _folder
    _folder = folder
    cold_execute, cold_wait, cold_poll = (
        getattr(subprocess.Popen, name) for name in ("_execute_child", "_try_wait", "_internal_poll")
    )

    def execute(self: Any, *arguments: Any) -> None:
        if not _begin(self, *arguments):
            cold_execute(self, *arguments)

    def wait(self: Any, flags: int) -> Any:
        return _wait(self, flags) if getattr(self, "_connection", None) is not None else cold_wait(self, flags)

    def poll(self: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(self, "_connection", None) is not None:
            return _poll(self)
        return cold_poll(self, *arguments, **options)

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
    subprocess.Popen._try_wait = wait  # type: ignore[attr-defined]
    subprocess.Popen._internal_poll = poll  # type: ignore[attr-defined]


def _begin(
    process: Any, words: Any, executable: Any, prepare: Any, close_fds: bool, pass_fds: Sequence[int], cwd: Any,
    env: Mapping[str, str] | None, _startup: Any, _flags: Any, shell: bool, p2cread: int, p2cwrite: int, c2pread: int,
    c2pwrite: int, errread: int, errwrite: int, _restore: bool, gid: Any, gids: Any, uid: Any, umask: int,
    new_session: bool, group: int,
) -> bool:  # fmt: skip
    """Have the zygote start what :mod:`subprocess` has prepared; False if it cannot."""
    environment = dict(os.environ if env is None else env)
    if prepare is not None or shell or isinstance(words, str | bytes) or executable is not None:
        return False
    folder = Path(cwd or ".").absolute()
    known = understand([os.fspath(word) for word in words], environment)
    if known is None:
        return False
    stage = getattr(process, "_stage", "") or _choose_stage(known, environment)
    files = {0: p2cread, 1: c2pwrite, 2: errwrite}
    files = {number: file if file >= 0 else number for number, file in files.items()}
    files |= {file: file for file in pass_fds}
    asked = {
        "words": known,
        "environment": environment,
        "folder": str(folder),
        "new_session": new_session,
        "group": group,
        "files": list(files),
    }
    text = json.dumps(asked).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(_find_zygote() / stage))
    socket.send_fds(connection, [b"%08x" % len(text)], list(files.values()))
    connection.sendall(text)
    process.pid = int(_receive(connection))
    process._connection = connection
    process._child_created = True
    process._closed_child_pipe_fds = True
    nothing = getattr(process, "_devnull", None)
    for mine, theirs in ((p2cwrite, p2cread), (c2pread, c2pwrite), (errread, errwrite)):
        if mine != -1 and theirs not in (-1, nothing):
            os.close(theirs)
    if nothing is not None:
        os.close(nothing)
    return True


def _choose_stage(words: Sequence[str], environment: Mapping[str, str]) -> str:
    is_ours = any("retrograd" in word for word in words[1:4])
    return "ours" if is_ours or any(name.startswith("RETROGRAD_") for name in environment) else "torch"


def _wait(process: Any, flags: int) -> tuple[int, int]:
    if flags & os.WNOHANG and not select.select([process._connection], [], [], 0)[0]:
        return 0, 0
    status = _receive(process._connection)
    process._connection.close()
    return process.pid, int(status or 9)


def _poll(process: Any) -> int | None:
    if process.returncode is None and process._waitpid_lock.acquire(False):
        try:
            ended, status = _wait(process, os.WNOHANG)
            if ended:
                process._handle_exitstatus(status)
        finally:
            process._waitpid_lock.release()
    found: int | None = process.returncode
    return found


def _receive(connection: socket.socket) -> bytes:
    return connection.recv(16, socket.MSG_WAITALL)


def _find_zygote() -> Path:
    """The folder of the zygote of this process, which is started when it is first asked for."""
    global _folder
    with _lock:
        if _folder is None:
            folder = Path(tempfile.mkdtemp(prefix="zygote-"))
            root = Path(__file__).parents[1]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
            zygote = subprocess.Popen(
                [sys.executable, str(root / "tests" / "zygote.py"), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                cwd=root,
            )
            assert zygote.stdin is not None
            assert zygote.stdout is not None
            zygote.stdout.readline()  # it listens
            atexit.register(_end, zygote, folder)
            _folder = folder
    return _folder


def _end(zygote: subprocess.Popen[bytes], folder: Path) -> None:
    zygote.communicate()
    shutil.rmtree(folder)
