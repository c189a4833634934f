"""The files of a replay bundle: what they hold as plain data, written and read.

``bundle.json`` says everything, ``tensors.safetensors`` holds the memory of the tensors, ``seal.json`` a sum over both
and a signature. None holds code.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from retrograd.core.errors import DamagedBundleError
from retrograd.core.files import name_aside, to_utf8
from retrograd.core.foreign.text import expect_file, expect_object, parse_json, read_json, read_limited

FORMAT = 3
"""Number of this form of bundle."""

FACTS = "bundle.json"
TENSORS = "tensors.safetensors"
SEAL = "seal.json"

_WIDTH = 160
"""Longest line of ``bundle.json``, where that can be had."""


def write_files(folder: Path, facts: dict[str, Any], entries: dict[str, Tensor]) -> str:
    """Write all files into a folder; returns why they are not signed, empty where they are.

    Raises:
        OSError: they cannot be written.
    """
    files = {FACTS: to_utf8(_print_json({"format": FORMAT, **facts}, "")), TENSORS: safetensors.torch.save(entries)}
    total, signature, problem = sum_files(files), None, ""
    try:
        signature = sign(total)
    except OSError as error:
        problem = str(error)
    files[SEAL] = json.dumps({"sum": total, "signature": signature}).encode()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return problem


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Read facts and tensors, and find out why they may not be this user's own; an empty text where they are.

    Raises:
        DamagedBundleError: a file is missing or damaged, or this is not a bundle.
    """
    if not folder.is_dir():
        raise DamagedBundleError(
            f"There is no bundle at {folder}.",
            repair="give the folder of a bundle, as in traces/first/rank00000/bundles/NAME.",
        )
    try:
        files = {FACTS: read_limited(folder / FACTS), TENSORS: expect_file(folder / TENSORS).read_bytes()}
        facts, seal = expect_object(parse_json(files[FACTS])), read_json(folder / SEAL)
        if facts.pop("format", None) != FORMAT:
            raise damaged(folder, f"{FACTS} is not of format {FORMAT}, which this version of retrograd reads")
        total = sum_files(files)
        if seal.get("sum") != total:
            raise damaged(folder, f"{FACTS} and {TENSORS} are not the files that were written")
        others = sorted({each.name for each in folder.iterdir()} - {*files, SEAL})
        doubt = f"{others[0]!r} was put into it" if others else find_doubt(total, seal.get("signature"))
        return facts, safetensors.torch.load(files[TENSORS]), doubt
    except (OSError, ValueError, RecursionError, OverflowError, safetensors.SafetensorError) as error:
        raise damaged(folder, str(error)) from error


def damaged(folder: Path | None, why: str) -> DamagedBundleError:
    """The error that says what is wrong with a bundle."""
    return DamagedBundleError(
        f"The bundle {folder} cannot be read: {why}.",
        repair="copy the whole folder again from where it was written, or have it written again.",
    )


def _print_json(value: Any, margin: str) -> str:
    """JSON with one operation, tensor or fact a line, as far as they fit."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(margin) + len(line) <= _WIDTH or not isinstance(value, dict | list):
        return line
    inner = margin + " "
    if isinstance(value, list):
        parts, brackets = [_print_json(part, inner) for part in value], "[]"
    else:
        named = ((json.dumps(name, ensure_ascii=False), part) for name, part in value.items())
        parts, brackets = [f"{name}: {_print_json(part, inner)}" for name, part in named], "{}"
    return f"{brackets[0]}\n{inner}" + f",\n{inner}".join(parts) + f"\n{margin}{brackets[1]}"


# ---- whose a bundle is ----
#
# To run a bundle again is to run whatever it names. So one that this user's own programs have written is told from all
# others, as Jupyter does with notebooks: by an HMAC with a key that is made when the first bundle is written, and stays
# in the user's own folder. Who can read that key can write bundles that are trusted.

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
