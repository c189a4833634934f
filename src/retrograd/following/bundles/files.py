"""The files of a replay bundle: what they hold as plain data, written and read.

``bundle.json`` says everything, ``tensors.safetensors`` holds the memory of the tensors, ``seal.json`` a sum over both
and a signature. None holds code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from retrograd.core.errors import DamagedBundleError
from retrograd.core.files import to_utf8
from retrograd.core.foreign.text import expect_file, expect_object, parse_json, read_json, read_limited
from retrograd.following.bundles.signing import find_doubt, sign, sum_files

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
    files = {
        FACTS: to_utf8(_print_json({"format": FORMAT, **facts}, "")),
        TENSORS: safetensors.torch.save(entries),
    }
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
