"""Whose a replay bundle is: a signature over all of its files, by a key that only this user can read.

To run a bundle again is to run whatever it names. So one that this user's own programs have written is told from all
others, as Jupyter does with notebooks: by an HMAC with a key that is made when the first bundle is written, and stays
in the user's own folder. Who can read that key can write bundles that are trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from retrograd.core.files import name_aside
from retrograd.core.foreign.text import expect_file

FOLDER = "XDG_DATA_HOME"
"""Environment variable: the folder for a user's data, on any platform, instead of the one that the platform has."""

_BYTES = 32


def find_key() -> Path:
    """The file of this user's key, which need not be there.

    Raises:
        OSError: this user has no home.
    """
    try:
        return _find_folder() / "retrograd" / "bundles.key"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def sum_files(files: Mapping[str, bytes]) -> str:
    """A sum over the names and contents of files: it tells damage, not who wrote them, for anybody can sum them."""
    total = hashlib.sha256(b"retrograd bundle")
    for name, data in sorted(files.items()):
        for part in (name.encode(), data):  # with their lengths, so that no part can begin in another
            total.update(len(part).to_bytes(8, "little"))
            total.update(part)
    return total.hexdigest()


def sign(total: str) -> str:
    """Sign a sum over files; this user's key is made if there is none.

    Raises:
        OSError: there is no key that can be used.
    """
    path = find_key()
    if not path.exists():
        _make_key(path)
    return _sign(_read_key(path), total)


def find_doubt(total: str, signature: object) -> str:
    """Why files of this sum may not be this user's own; empty where they are."""
    if not isinstance(signature, str):
        return "it is not signed"
    try:
        path = find_key()
        if not path.exists():
            return f"it is signed by another user, or on another machine: there is no key at {path}"
        own = _sign(_read_key(path), total)
    except OSError as error:
        return str(error)
    is_own = hmac.compare_digest(own.encode(), signature.encode())
    return "" if is_own else "it is signed by another user or on another machine, or was changed since"


def _sign(key: bytes, total: str) -> str:
    return hmac.digest(key, total.encode(), "sha256").hex()


def _find_folder() -> Path:
    given = Path(os.environ.get(FOLDER, ""))
    if given.is_absolute():  # another is to be ignored, says the specification
        return given
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ("Library/Application Support" if sys.platform == "darwin" else ".local/share")


def _make_key(path: Path) -> None:
    """Make a key, whole from the beginning, and never in place of one that another process has just made."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = name_aside(path)
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123 - of a number
            file.write(secrets.token_bytes(_BYTES))
        os.link(aside, path)
    except FileExistsError:
        return
    finally:
        aside.unlink(missing_ok=True)


def _read_key(path: Path) -> bytes:
    with expect_file(path).open("rb") as file:
        found = os.fstat(file.fileno())
        if os.name == "posix" and found.st_uid != os.geteuid():
            raise OSError(f"the key {path} belongs to another user")
        if os.name == "posix" and found.st_mode & 0o077:
            raise OSError(
                f"others can read or change the key {path} (mode {found.st_mode & 0o777:o}); remove it, and the next "
                "bundle that is written makes another"
            )
        key = file.read(_BYTES + 1)
    if len(key) != _BYTES:
        raise OSError(f"{path} is not a key of {_BYTES} bytes; remove it, and the next bundle makes another")
    return key
