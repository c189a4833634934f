"""A run that is recorded to an address: written to a folder of this machine, its files put there as they are closed.

A part never changes once it is closed, so each is put once; what describes the run is put after them. Of a process
that is killed what was put lies there, and the rest in the local folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from retrograd.core.addresses import bounded, is_refusal, is_remote, open_folder, put, store_of
from retrograd.core.errors import RunError, RunExistsError, RunUnreachableError, RunWriteError
from retrograd.core.files import UNFINISHED
from retrograd.core.foreign.text import read_json
from retrograd.core.notices import Notices, warnings_kept
from retrograd.core.runs.layout import LOCK, MANIFEST, PARENT, RANK_FILE, RING, rank_name

_TOLD_LAST = (RANK_FILE, MANIFEST)


Put = dict[Path, tuple[int, int]]
"""Files that lie at the address, by their local paths, with their bytes and when they were written as they were put."""


def local_folder_of(path: str | os.PathLike[str]) -> Path:
    """The folder of this machine that a run is written to: its own, or that of its address below ``runs``."""
    folder = open_folder(path)
    if not is_remote(folder):
        return folder
    words, number = (
        re.sub(r"[^\w.-]+", "-", str(folder)).strip("-"),
        hashlib.blake2s(str(folder).encode(), digest_size=4),
    )
    return (PARENT / f"{words[-60:]}-{number.hexdigest()}").absolute()


def prepare(address: Path, local: Path, rank: int, *, resume: bool) -> Put:
    """Check that a rank can be recorded to an address; fetch what is there where it is resumed on another machine.

    Returns:
        What lies there of that rank.

    Raises:
        RunExistsError: something of that rank lies there already, or another machine has gone on with it.
        RunWriteError: nothing can be put there.
    """
    try:
        return _prepare(address, local, rank, resume)
    except Exception as error:
        is_far = isinstance(error, RunUnreachableError)
        if not is_far and (isinstance(error, RunError) or not is_refusal(error)):
            raise
        what = error.problem.removesuffix(".") if isinstance(error, RunUnreachableError) else str(error)
        raise RunWriteError(
            f"The run folder {str(address)!r} cannot be written: {what}.",
            repair="check the address, whether its bucket is there, and the credentials in the environment.",
        ) from None  # of a store's client: fifty lines that say the same


@bounded
def _prepare(address: Path, local: Path, rank: int, resume: bool) -> Put:
    own = rank_name(rank)
    there, here = _read_written(address / own / RANK_FILE), _read_written(local / own / RANK_FILE)
    if there is not None and not resume:
        raise RunExistsError(
            f"{str(address)!r} already holds a run.",
            repair="give another address; a recording can go on with that run (resume=True, --resume).",
            reason="two runs in one folder could not be distinguished.",
        )
    if there is not None and here is None:
        store, name = store_of(address)
        for each in store.find(name):
            target = local / each[len(name) :].lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            store.get_file(each, str(target))
    elif there is not None and here is not None and there > here:
        raise RunExistsError(
            f"{str(address)!r} was written later than {str(local)!r}, from which it would be continued.",
            repair=f"remove {str(local)!r}: what lies at the address is fetched then.",
            reason="another machine has continued the run, and its steps would be removed.",
        )
    put(address / own / LOCK, b"")
    store, name = store_of(address)
    found = {
        local / each[len(name) :].lstrip("/"): int(about["size"])
        for each, about in store.find(f"{name}/{own}", detail=True).items()
        if not each.endswith(LOCK)
    }
    here_now = {path: _make_key(path) or (-1, 0) for path in found}
    return {path: here_now[path] if here_now[path][0] == size else (size, 0) for path, size in found.items()}


def _make_key(path: Path) -> tuple[int, int] | None:
    """Bytes of a file, and when it was written; None where it is not there."""
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return found.st_size, found.st_mtime_ns
    return None


def _read_written(path: Path) -> float | None:
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return float(read_json(path).get("written", 0.0))
    return None


class Upload:
    """Puts the files of a rank to an address, in a thread of its own; training never waits for it.

    Args:
        run: the local run folder.
        address: where its files are put.
        there: what lies there already.
        find_folder: returns the folder of the rank, and whether the manifest is this process's to put.
    """

    def __init__(self, run: Path, address: Path, there: Put, find_folder: Callable[[], tuple[Path, bool]]) -> None:
        self._run, self._address, self._find_folder = run, address, find_folder
        self._notices = Notices()
        self._put = dict(there)
        self._wake, self._idle = threading.Event(), threading.Event()
        self._idle.set()
        self._is_over = self._has_failed = self._is_silent = False
        self._thread = threading.Thread(target=warnings_kept()(self._go_on), name="retrograd-upload", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Have what is new put soon."""
        self._idle.clear()
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Wait until what was asked for is put; once a store has not answered, not again before it has."""
        if not self._is_silent and not self._idle.wait(seconds):
            self._is_silent = True
            self._notices.warn_once(
                "flush",
                f"{self._address} has not answered a flush for {seconds:g} seconds. Training goes on; what is recorded "
                f"lies in {self._run} until it answers.",
            )

    def end(self, seconds: float) -> None:
        """Put what is left, and say where it lies if that cannot be done."""
        self._is_over = True
        self.ask()
        self._thread.join(seconds)
        if self._thread.is_alive() or self._has_failed:
            why = "has not answered" if self._thread.is_alive() else "cannot be written"
            self._notices.warn_once(
                "end",
                f"{self._address} {why} at the end of the recording. All of it is in {self._run}: copy that folder "
                f"there when it can be reached, as by `aws s3 cp --recursive` or fsspec's `put`.",
            )

    def silence(self) -> None:
        """In a forked child: put nothing."""
        self._is_over = True

    def _go_on(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            is_last = self._is_over
            try:
                self._put_new()
                self._has_failed = False
            except Exception as error:  # whatever a client raises; training goes on
                self._has_failed = True
                self._notices.warn_once(
                    "store",
                    f"{self._address} cannot be written: {error}. Training goes on; what is recorded lies in "
                    f"{self._run}, and is put there once it can be.",
                )
            if not self._wake.is_set():
                self._idle.set()
                self._is_silent = False
            if is_last:
                return

    def _put_new(self) -> None:
        folder, has_manifest = self._find_folder()
        files = [path for path in folder.rglob("*") if path.is_file() and _is_to_be_put(path)]
        files += [self._run / MANIFEST] if has_manifest and (self._run / MANIFEST).exists() else []
        for path in sorted(files, key=lambda path: (path.name in _TOLD_LAST, path.name == MANIFEST, str(path))):
            with contextlib.suppress(FileNotFoundError):  # it was merged into a larger one meanwhile
                self._put_file(path)
        for path in self._put.keys() - set(files):
            if not path.exists() and (path.parent.exists() or folder not in path.parents):
                store, name = store_of(self._address / path.relative_to(self._run).as_posix())
                with contextlib.suppress(FileNotFoundError):
                    store.rm_file(name)
                del self._put[path]

    def _put_file(self, path: Path) -> None:
        key = _make_key(path)
        if key is not None and self._put.get(path) != key:
            put(self._address / path.relative_to(self._run).as_posix(), path.read_bytes())
            self._put[path] = key


def _is_to_be_put(path: Path) -> bool:
    return not path.name.startswith((UNFINISHED, LOCK, RING.partition(".")[0] + "."))
