"""Folders in object storage, by their address: ``s3://bucket/runs/a`` is used as a path of ``pathlib`` is.

Such a path is a ``UPath`` of universal-pathlib, above the file systems of fsspec; a folder of this machine stays a
``pathlib.Path``. :func:`open_folder` decides which of them is meant, and :func:`is_remote` tells them apart.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import contextvars
import importlib
import importlib.util
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial, wraps
from pathlib import Path, PurePath
from types import MethodType
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeVar, cast
from urllib.parse import unquote, urlsplit

from retrograd.core.errors import NotARunError, RetrogradError, RunUnreachableError, RunWriteError
from retrograd.core.limits import LIMITS

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]+):(?P<slashes>/{1,2})(?P<rest>.*)", re.DOTALL)
_OF_THIS_MACHINE = frozenset({"file", "local"})
_READ_ONLY = frozenset({"http", "https", "data", "github", "git"})
P = ParamSpec("P")
T = TypeVar("T")

_COPY = "give a folder on a local or mounted disk; copy it when the program has ended, if it is to be kept."


def is_address(given: str | os.PathLike[str]) -> bool:
    """Return whether this is an address, such as ``s3://bucket/run``, or would be if pathlib had not folded it."""
    return is_remote(given) or _ADDRESS.match(os.fspath(given)) is not None


def is_remote(path: object) -> bool:
    """Return whether this path, which :func:`open_folder` gave, or one below it, is not of this machine."""
    return not isinstance(path, PurePath | str | bytes) and hasattr(path, "storage_options")


def local_folder(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder that is to be written, as the current directory has it.

    Raises:
        RunWriteError: an address, such as ``s3://bucket/run``, which would be taken for a folder called ``s3:``.
    """
    if is_address(path):
        raise RunWriteError(
            f"{str(path)!r} is an address, not a folder.",
            repair=_COPY,
            reason="files are continued in place, or mapped into memory, which object stores cannot do.",
        )
    return Path(path).absolute()


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path as it is given, if it is one of this machine.

    Raises:
        RunWriteError: it is an address.
    """
    if is_address(path):
        local_folder(path)
    return Path(path)


def path_to_read(path: str | os.PathLike[str]) -> Path:
    """The path of what is read by what reads from this machine alone.

    Raises:
        NotARunError: it is an address.
    """
    if is_address(path):
        raise NotARunError(
            f"{str(path)!r} is an address, and this command reads from this machine alone.",
            repair="ask `retrograd explain`, `view` or `report`, which read a run from a store; or copy it to a disk.",
        )
    return Path(path)


def read_path(word: str | os.PathLike[str]) -> Path:
    """The path that somebody has typed: one of this machine as it is, or at an address.

    Raises:
        RunWriteError: no folder can be at that address.
    """
    return open_folder(word) if is_address(word) else Path(word)


def open_folder(given: str | os.PathLike[str]) -> Path:
    """The folder that a user means: absolute, as the current directory has it, or at an address.

    ``file:///runs/a`` is a folder of this machine. Nothing is asked of a store yet.

    Raises:
        RunWriteError: no folder can be at that address, or what is needed for it is not installed.
    """
    if is_remote(given):
        return _with_listings(given, are_kept=False)
    found = _ADDRESS.fullmatch(os.fspath(given))
    if found is None:
        return Path(given).absolute()
    scheme = found["scheme"].lower()
    _check(os.fspath(given), found)
    if scheme in _OF_THIS_MACHINE:
        return Path(unquote(urlsplit(os.fspath(given)).path)).absolute()
    return _reach(f"{scheme}://{found['rest']}", scheme)


def _check(address: str, found: re.Match[str]) -> None:
    scheme, rest = found["scheme"].lower(), found["rest"]
    host, _, inner = rest.partition("/")
    if "@" in host:
        raise RunWriteError(
            f"An address of {scheme}:// holds a name or a password.",
            repair="leave it out, and give credentials in the environment or a profile of that store.",
            reason="an address is shown in messages, and is part of the command that the manifest stores.",
        )
    if found["slashes"] == "/" and scheme not in _OF_THIS_MACHINE:
        raise RunWriteError(
            f"{address!r} needs '://' after its scheme.",
            repair=f"write {scheme}://…, as text: pathlib.Path folds two slashes into one.",
            reason=f"it would be taken for a folder called {scheme + ':'!r}.",
        )
    if scheme in _READ_ONLY:
        raise RunWriteError(f"{scheme}:// is read-only, and its folders cannot be listed.", repair=_COPY)
    if scheme in _OF_THIS_MACHINE and host not in ("", "localhost"):
        raise RunWriteError(f"{address!r} is on another machine.", repair=f"write {scheme}:///FOLDER.")
    if scheme not in _OF_THIS_MACHINE and not (host and inner.strip("/")) and scheme != "memory":
        raise RunWriteError(
            f"{address!r} names no folder.", repair=f"give one inside of it: {scheme}://{host or 'BUCKET'}/runs/a."
        )
    if {".", ".."} & set(rest.split("/")):
        raise RunWriteError(
            f"{address!r} holds '.' or '..' as a folder.",
            repair="write the address without '.' and '..'.",
            reason="in object storage they are names like any other.",
        )


def _reach(address: str, scheme: str) -> Path:
    try:
        upath = importlib.import_module("upath")
    except ImportError as error:
        raise RunWriteError(
            f"{address!r} is an address, and what is needed for one is not installed.",
            repair=f"pip install 'retrograd[remote]'{_name_package(scheme)}, or give a local folder.",
        ) from error
    try:
        folder = upath.UPath(address.rstrip("/"), use_listings_cache=False)  # others write there too
        assert folder.fs is not None  # it is made here, or fails
    except ImportError as error:
        raise RunWriteError(
            f"{address!r} cannot be reached: {error}.", repair=f"pip install{_name_package(scheme) or ' it'}."
        ) from error
    except ValueError as error:
        raise RunWriteError(
            f"{address!r} cannot be reached: {error}.",
            repair="give an address that fsspec knows, such as s3://BUCKET/runs/a.",
        ) from error
    return cast(Path, folder)


def _name_package(scheme: str) -> str:
    known = importlib.import_module("fsspec.registry").known_implementations if _has_fsspec() else {}
    text = str(known.get(scheme, {}).get("err", ""))
    named = re.search(r"\b(s3fs|gcsfs|adlfs|\w+fs)\b", text)
    return f" {named[1]}" if named else {"s3": " s3fs", "s3a": " s3fs", "gs": " gcsfs", "gcs": " gcsfs"}.get(scheme, "")


def _has_fsspec() -> bool:
    return importlib.util.find_spec("fsspec") is not None


# ---- stores that do not answer ----


def bounded(read: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Path, P], T]:
    """Make a function, whose first argument is a path, raise where the store of that path answers nothing at all.

    A client may wait for half an hour, or for ever. So another thread asks, and is left to itself when it has waited
    for too long and the store does not answer a small question either: what is merely slow, since it is large, is
    waited for. The function must change nothing of ours, since it may end long after it was given up.
    """

    @wraps(read)
    def read_or_raise(path: Path, /, *args: P.args, **named: P.kwargs) -> T:
        if not is_remote(path):
            return read(path, *args, **named)
        answer = _ask(partial(read, path, *args, **named))
        while not _is_there(answer):
            sign = _ask(partial(_touch, path))
            if not _is_there(answer) and not sign.done():
                raise RunUnreachableError(
                    f"{str(path)!r} cannot be reached: its store has not answered for "
                    f"{LIMITS.silence_seconds:g} seconds.",
                    repair="check the address, the endpoint, the network and its proxies, and try again.",
                    reason="a connection was taken up, or waited for, and then nothing came.",
                )
        return answer.result()

    return read_or_raise


def _ask(call: Callable[[], T]) -> Future[T]:
    """What a call will return, which another thread makes; the end of the program does not wait for it."""
    future: Future[T] = Future()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(_settle, call, future), name="retrograd-store", daemon=True).start()
    return future


def _settle(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
        del future  # which holds the error, which holds this frame


def _is_there(answer: Future[Any]) -> bool:
    return bool(concurrent.futures.wait([answer], LIMITS.silence_seconds / 2).done)


def _touch(path: Path) -> None:
    """Request the first byte of an object, whether it is there or not."""
    store, name = store_of(path)
    store.cat_file(name, start=0, end=1)


# ---- what differs from files ----


def store_of(path: Path) -> tuple[Any, str]:
    """The file system of a remote path, and its name there."""
    remote: Any = path
    return remote.fs, remote.path


def put(path: Path, data: bytes) -> None:
    """Write a remote object, which appears whole.

    Raises:
        Exception: whatever the store's client raises; see :func:`is_refusal`.
    """
    store, name = store_of(path)
    store.pipe_file(name, data)


@bounded
def fetch(path: Path, start: int | None = None, end: int | None = None) -> bytes:
    """All of a remote object, or its bytes from ``start`` to ``end``, in one request.

    Raises:
        FileNotFoundError: it is not there.
    """
    store, name = store_of(path)
    return bytes(store.cat_file(name, start=start, end=end))


@bounded
def open_remote(path: Path) -> bytes | BinaryIO:
    """The bytes of a remote object; of a large one a file of its store, each reading of which is a request.

    Raises:
        FileNotFoundError: it is not there.
    """
    if path.stat().st_size <= LIMITS.whole_bytes:
        return fetch(path)
    store, name = store_of(path)
    return cast(BinaryIO, store.open(name, "rb", cache_type="none"))


@bounded
def list_names(folder: Path) -> dict[str, bool]:
    """The names in a remote folder, and whether each is a folder; empty where nothing is there."""
    store, name = store_of(folder)
    try:
        found = store.ls(name, detail=True)
    except FileNotFoundError:
        return {}
    entries = {each["name"].rstrip("/").rpartition("/")[2]: each["type"] == "directory" for each in found}
    return {name: is_folder for name, is_folder in entries.items() if name not in ("", folder.name) or is_folder}


def remembering(folder: Path) -> Path:
    """The same folder; in object storage, one whose names and sizes are those of the last :func:`list_anew`."""
    return _with_listings(folder, are_kept=True) if is_remote(folder) else folder


@bounded
def list_anew(folder: Path) -> None:
    """List all that is below a remote folder at once, if its store keeps listings: a request for a thousand names."""
    if is_remote(folder):
        store, name = store_of(folder)
        store.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            store.find(name, detail=True)


def _with_listings(folder: Any, *, are_kept: bool) -> Path:
    return cast(Path, type(folder)(str(folder), **{**folder.storage_options, "use_listings_cache": are_kept}))


def is_refusal(error: BaseException) -> bool:
    """Return whether this was raised by the system or by a store, and not by a fault of ours.

    Clients of stores have errors of their own, that of a network which is down among them.
    """
    return isinstance(error, OSError) or _is_of_store(error)


@contextlib.contextmanager
def reaching(path: Path) -> Iterator[None]:
    """Turn what the client of a store raises into an error of ours.

    Raises:
        RunUnreachableError: the store could not be asked, or refuses to answer.
    """
    try:
        yield
    except (RetrogradError, FileNotFoundError):
        raise
    except Exception as error:
        if not is_remote(path) or not _is_of_store(error):
            raise
        raise RunUnreachableError(
            f"{str(path)!r} cannot be reached: {error}.",
            repair="check the address, the network, and the credentials that are in the environment.",
        ) from error


def _is_of_store(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in ("fsspec", "upath"):
            return True
        trace = trace.tb_next
    return False


def call_at_end(method: Callable[[], None], path: Path) -> None:
    """Call a method when the program ends, while what it writes to can still be reached; later ones first.

    Clients of stores resolve names in a pool of threads, which Python closes before it calls what ``atexit`` knows.
    """
    register = getattr(threading, "_register_atexit", None)
    if not is_remote(path) or register is None:
        atexit.register(method)
        return
    importlib.import_module("concurrent.futures.thread")  # what it has registered is called after this
    reference = weakref.WeakMethod(cast(MethodType, method))

    def end() -> None:
        if (found := reference()) is not None:
            found()

    register(end)
