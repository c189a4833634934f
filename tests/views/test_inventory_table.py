"""Inventories as text, exactly."""

from __future__ import annotations

import io

import pytest

from retrograd.errors import SavedTensorError
from retrograd.saved.inventory import Inventory
from retrograd.views.inventory_table import print_inventory
from tests.views.invented_inventory import invent_inventory, make_inventory, saved

BY_MODULE = """\
1 backward pass: 4 tensors are kept beside parameters and buffers, 7 kB; copies of all would take 11 kB
module tensors resident share asked at peak made again by
blocks.0 2 6 kB 85.7% 6 kB 6 kB relu of what it was given
stem 1 1 kB 14.3% 1 kB 1 kB
head 1 0 B 0.0% 4 kB 0 B relu of what it was given
peak: 7 kB at position 2 of 6, while head:AddmmBackward0 is made
"""

BY_TENSOR = """\
1 backward pass: 4 tensors are kept beside parameters and buffers, 7 kB; copies of all would take 11 kB
tensor resident share asked made again by line
blocks.0:ReluBackward0 result float32[1000] 4 kB 57.1% 4 kB relu of what it was given model.py:11
blocks.0:ReluBackward0 self float32[500] 2 kB 28.6% 2 kB matrix product of both factors model.py:13
and 2 more
peak: 7 kB at position 2 of 6, while head:AddmmBackward0 is made
"""


def table(inventory: Inventory, **options: object) -> list[str]:
    file = io.StringIO()
    print_inventory(inventory, file=file, **options)  # type: ignore[arg-type]
    assert "\x1b" not in file.getvalue()
    return [" ".join(line.split()) for line in file.getvalue().splitlines()]


def test_by_module() -> None:
    assert table(invent_inventory()) == BY_MODULE.splitlines()


def test_by_tensor() -> None:
    assert table(invent_inventory(), by="tensor", limit=2) == BY_TENSOR.splitlines()


def test_by_node() -> None:
    names = [line.split()[0] for line in table(invent_inventory(), by="node")[2:-1]]
    assert names == ["ReluBackward0", "ConvolutionBackward0", "AddmmBackward0"]


def test_a_pattern_chooses_modules() -> None:
    lines = table(invent_inventory(), modules="blocks.*")
    assert lines[0].startswith("1 backward pass: 2 tensors")
    assert len(lines) == 4
    with pytest.raises(SavedTensorError, match=r"the largest are stem, blocks\.0, head"):
        table(invent_inventory(), modules="block")


def test_what_is_not_in_it_is_said() -> None:
    assert table(Inventory()) == ["no backward pass was seen"]
    rows = [saved(0, resident=8, released=1)]
    assert table(make_inventory(rows, notes=("2 CopySlices: hidden",)))[-1] == "2 CopySlices: hidden"


def test_names_cannot_steer_the_terminal() -> None:
    rows = [saved(0, module="a\x1b[2Jb", resident=8, released=1)]
    assert "a\\x1b[2Jb" in "\n".join(table(make_inventory(rows)))


def test_an_unknown_grouping() -> None:
    with pytest.raises(SavedTensorError, match="module, node, tensor"):
        table(invent_inventory(), by="kind")
