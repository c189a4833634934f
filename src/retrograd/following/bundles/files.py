"""The two files of a replay bundle: what they hold as plain data, written and read.

``bundle.json`` says everything, ``tensors.safetensors`` holds the memory of the tensors. Neither holds code.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from retrograd.core.errors import DamagedBundleError
from retrograd.core.files import to_utf8
from retrograd.core.foreign.text import expect_file, read_json
from retrograd.following.bundles.copies import MemoryBlock, StoredTensor, TensorCopies
from retrograd.following.bundles.program import BundledOperation, Program, Raised

FORMAT = 2
"""Number of this form of bundle."""

FACTS = "bundle.json"
TENSORS = "tensors.safetensors"

_PLAIN = frozenset({
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
})  # fmt: skip
"""Kinds of element that every reader of safetensors knows; the others are stored as bytes."""

_WIDTH = 160
"""Longest line of ``bundle.json``, where that can be had."""

_DEFAULTS = StoredTensor((), "")


def write_files(folder: Path, facts: dict[str, Any], entries: dict[str, Tensor]) -> None:
    """Write both files into a folder."""
    data = safetensors.torch.save(entries)
    (folder / TENSORS).write_bytes(data)
    facts = {"format": FORMAT, "digest": digest({"format": FORMAT, **facts}, data), **facts}
    (folder / FACTS).write_bytes(to_utf8(_print_json(facts, "")))


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read both files.

    Raises:
        DamagedBundleError: one is missing or damaged, or this is not a bundle.
    """
    if not folder.is_dir():
        raise DamagedBundleError(
            f"There is no bundle at {folder}.",
            repair="give the folder of a bundle, as in traces/first/rank00000/bundles/NAME.",
        )
    try:
        facts = read_json(folder / FACTS)
        if facts.get("format") != FORMAT:
            raise damaged(folder, f"{FACTS} is not of format {FORMAT}, which this version of retrograd reads")
        data = expect_file(folder / TENSORS).read_bytes()
        if digest({key: value for key, value in facts.items() if key != "digest"}, data) != facts.get("digest"):
            raise damaged(folder, f"{FACTS} and {TENSORS} are not the files that were written")
        return facts, safetensors.torch.load(data)
    except (OSError, ValueError, RecursionError, OverflowError, safetensors.SafetensorError) as error:
        raise damaged(folder, str(error)) from error


def digest(facts: dict[str, Any], data: bytes) -> str:
    """A sum over everything in a bundle: it tells damage, not who wrote it, for whoever changes one can sum it again.

    Args:
        facts: all that stands in ``bundle.json`` besides the sum itself.
        data: the bytes of the tensor file.
    """
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(
        data, digest_size=16, key=hashlib.blake2b(text.encode(), digest_size=64).digest()
    ).hexdigest()


def damaged(folder: Path | None, why: str) -> DamagedBundleError:
    """The error that says what is wrong with a bundle."""
    return DamagedBundleError(
        f"The bundle {folder} cannot be read: {why}.",
        repair="copy the whole folder again from where it was written, or have it written again.",
    )


def print_copies(copies: TensorCopies, names: Sequence[str], entries: dict[str, Tensor]) -> dict[str, Any]:
    """Copies in the terms of JSON.

    Args:
        copies: what to print.
        names: of the tensors; a block is named after the first that lies in it.
        entries: name → what goes into the tensor file, to add to.
    """
    owners = _name_blocks(copies, names)
    for owner, block in zip(owners, copies.blocks, strict=True):
        entries[owner] = _shape_block(block)
    return {
        "blocks": [
            {"entry": owner, "start": block.start, "skew": block.skew, "device": block.device}
            for owner, block in zip(owners, copies.blocks, strict=True)
        ],
        "tensors": [
            {"name": name, "tensor": None if stored is None else _print_stored(stored)}
            for name, stored in zip(names, copies.tensors, strict=True)
        ],
    }


def parse_copies(data: dict[str, Any], entries: dict[str, Tensor]) -> tuple[TensorCopies, tuple[str, ...]]:
    """Copies, and the names of the tensors.

    Raises:
        ValueError, KeyError, TypeError: that is not what :func:`print_copies` wrote.
    """
    blocks = tuple(
        MemoryBlock(
            _bytes_of(entries[each["entry"]]), _count(each["start"]), _count(each["skew"]), _device(each["device"])
        )
        for each in data["blocks"]
    )
    stored = tuple(None if each["tensor"] is None else _parse_stored(each["tensor"]) for each in data["tensors"])
    copies = TensorCopies(blocks, stored)
    copies.check()
    return copies, tuple(str(each["name"]) for each in data["tensors"])


def print_program(program: Program) -> dict[str, Any]:
    """A program in the terms of JSON."""
    return {
        "operations": [
            {name: value for name, value in asdict(operation).items() if value is not None}
            for operation in program.operations
        ],
        "outputs": list(program.outputs),
    }


def parse_program(data: dict[str, Any], inputs: int) -> Program:
    """Read the output of :func:`print_program`.

    Raises:
        ValueError, KeyError, TypeError: it wrote no such thing.
    """
    operations = tuple(_parse_operation(each) for each in data["operations"])
    return Program(inputs, operations, tuple(None if each is None else _count(each) for each in data["outputs"]))


def parse_raised(data: dict[str, Any] | None) -> Raised | None:
    """An exception as text."""
    return None if data is None else Raised(str(data["kind"]), str(data["text"]))


def _parse_operation(data: dict[str, Any]) -> BundledOperation:
    random = data.get("random")
    return BundledOperation(
        str(data["name"]),
        tuple(data["args"]),
        {str(name): value for name, value in data["kwargs"].items()},
        data.get("result"),
        None if random is None else _count(random),
        parse_raised(data.get("raises")),
    )


def _print_stored(stored: StoredTensor) -> dict[str, Any]:
    told = {field.name: getattr(stored, field.name) for field in fields(stored) if field.name != "parts"}
    told = {name: value for name, value in told.items() if value != getattr(_DEFAULTS, name) or name == "shape"}
    return told | ({"parts": [_print_stored(part) for part in stored.parts]} if stored.parts else {})


def _parse_stored(data: dict[str, Any]) -> StoredTensor:
    block = data.get("block")
    return StoredTensor(
        shape=tuple(map(_count, data["shape"])),
        dtype=str(data["dtype"]),
        device=_device(data.get("device", "cpu")),
        layout=str(data.get("layout", "strided")),
        block=None if block is None else _count(block),
        strides=tuple(map(_count, data.get("strides", ()))),
        offset=_count(data.get("offset", 0)),
        conjugated=bool(data.get("conjugated", False)),
        negated=bool(data.get("negated", False)),
        parts=tuple(map(_parse_stored, data.get("parts", ()))),
        coalesced=bool(data.get("coalesced", False)),
    )


def _name_blocks(copies: TensorCopies, names: Sequence[str]) -> list[str]:
    owners: dict[int, str] = {}
    for name, stored in zip(names, copies.tensors, strict=True):
        for index, number in enumerate(_blocks_in(stored)):
            owners.setdefault(number, f"{name}.part{index}" if index else name)
    return [owners.get(number, f"unnamed.{number}") for number in range(len(copies.blocks))]


def _blocks_in(stored: StoredTensor | None) -> Iterator[int]:
    if stored is not None:
        yield from itertools.chain.from_iterable(map(_blocks_in, stored.parts))
        if stored.block is not None:
            yield stored.block


def _shape_block(block: MemoryBlock) -> Tensor:
    """The bytes as the tensor that they are, where that is one that anybody can read."""
    if block.dtype not in _PLAIN:
        return block.data
    return block.data.view(getattr(torch, block.dtype)).reshape(block.shape)


def _bytes_of(entry: Tensor) -> Tensor:
    return entry.reshape(-1).view(torch.uint8)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value


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


def _device(value: Any) -> str:
    try:
        return str(torch.device(value))
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{value!r} is not a device") from error
