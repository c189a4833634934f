"""What autograd's nodes, and the tensors that they save, are called in plain words."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources

_ENDING = re.compile(r"Backward\d*$")


def name_plainly(node: str) -> str:
    """Say what a node such as ``"AddmmBackward0"`` is the gradient of; an empty text if that is not known."""
    return _read_names()["operations"].get(_ENDING.sub("", node), "")


def name_saved_plainly(node: str, slot: str) -> str:
    """Say what a node saves: ``AddmmBackward0`` and ``mat1`` are the first factor of a matrix product plus bias.

    Names that are not in the table stay as torch writes them.
    """
    kind = _ENDING.sub("", node)
    tensors = _read_names()["tensors"]
    return f"{name_plainly(node) or kind}: {tensors.get(f'{kind}.{slot}') or tensors.get(slot, slot)}"


@cache
def _read_names() -> dict[str, dict[str, str]]:
    text = resources.files("retrograd.following.graph").joinpath("plain_names.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
