"""Inventories as text, exactly."""

from __future__ import annotations

import io
import re

import pytest

from retrograd.core.errors import SavedTensorError
from retrograd.memory.inventory.inventory import Inventory
from retrograd.memory.views.inventory_table import print_inventory
from tests.memory.views.invented_inventory import invent_inventory, make_inventory, saved

BY_MODULE = """\
1 backward pass: 4 tensors saved besides parameters and buffers, 7 kB (11 kB if none shared memory)
module tensors resident share asked at peak recomputed by
blocks.0 2 6 kB 85.7% 6 kB 6 kB relu of its inputs
stem 1 1 kB 14.3% 1 kB 1 kB
head 1 0 B 0.0% 4 kB 0 B relu of its inputs
peak: 7 kB at position 2 of 6, when the forward creates head:AddmmBackward0
"""

BY_TENSOR = """\
1 backward pass: 4 tensors saved besides parameters and buffers, 7 kB (11 kB if none shared memory)
tensor resident share asked recomputed by line
blocks.0:ReluBackward0 result float32[1000] 4 kB 57.1% 4 kB relu of its inputs model.py:11
blocks.0:ReluBackward0 self float32[500] 2 kB 28.6% 2 kB matrix product of both factors model.py:13
and 2 more
peak: 7 kB at position 2 of 6, when the forward creates head:AddmmBackward0
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def table(inventory: Inventory, **options: object) -> list[str]:
    file = io.StringIO()
    print_inventory(inventory, file=file, **options)  # type: ignore[arg-type]
    assert "\x1b" not in file.getvalue()
    assert " \n" not in file.getvalue()
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
    whose = "1 backward pass: 2 tensors saved besides parameters and buffers, 6 kB of 7 kB (6 kB if none shared memory)"
    assert lines[0] == whose
    assert len(lines) == 4
    with pytest.raises(SavedTensorError, match=r"the largest are stem, blocks\.0, head"):
        table(invent_inventory(), modules="block")


def test_how_long_a_tensor_took_stands_beside_it_where_it_was_measured() -> None:
    rows = [saved(0, resident=8, released=1, seconds=0.00125), saved(1, resident=4, released=1)]
    head, first, second = table(make_inventory(rows), by="tensor")[1:4]
    assert head == "tensor resident share asked made in recomputed by line"
    assert " 1.250 ms relu" in first
    assert " ms " not in second
    assert "made in" not in table(make_inventory(rows))[1]


@pytest.mark.parametrize(("columns", "is_spared"), [(62, True), (130, False)])
def test_a_narrow_terminal_is_spared_columns(columns: int, is_spared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    file = Terminal()
    print_inventory(invent_inventory(), file=file)
    lines = re.sub(r"\x1b\[\d*m", "", file.getvalue()).splitlines()
    (head,) = (line.split() for line in lines if "tensors" in line and "resident" in line)
    spared = [] if is_spared else ["share", "asked"]
    assert head == ["module", "tensors", "resident", *spared, "at", "peak", "recomputed", "by"]
    assert max(map(len, lines)) <= columns


def test_what_is_not_in_it_is_said() -> None:
    assert table(Inventory()) == ["no backward pass was recorded"]
    rows = [saved(0, resident=8, released=1)]
    assert table(make_inventory(rows, notes=("2 CopySlices: hidden",)))[-1] == "2 CopySlices: hidden"


def test_names_cannot_steer_the_terminal() -> None:
    rows = [saved(0, module="a\x1b[2Jb", resident=8, released=1)]
    assert "a\\x1b[2Jb" in "\n".join(table(make_inventory(rows)))
    assert "a\\x1b[2Jb" in str(make_inventory(rows))
    assert "\x1b" not in str(make_inventory(rows, notes=("\x1b[2J",)))


def test_an_unknown_grouping() -> None:
    with pytest.raises(SavedTensorError, match="module, node, tensor"):
        table(invent_inventory(), by="kind")
