"""Graphs as text, exactly."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.errors import GraphError
from retrograd.following.graph.graph import Graph
from retrograd.following.graph.node import Edge, Line, Node, SavedValue, TensorInfo
from retrograd.following.graph.walker import walk
from retrograd.following.views.graph_text import MOST_LINES, list_entries, print_graph
from retrograd.following.views.picture.folds import Fold, make_outline
from tests.following.graph.by_hand import make_graph
from tests.following.views.test_graph_picture import graph_of, leaf, node, residual_net

TREE = """\
15 nodes, 4 leaves with 12 elements, 64 B saved for the backward
├── NllLossBackward0  float32[2, 3]
├── head  AddmmBackward0  float32[2, 3]
├── blocks  12 nodes, 4 leaves with 12 elements, 64 B saved
│   ├── blocks.3  3 nodes, 1 leaf with 3 elements, 16 B saved
│   ├── blocks.2  3 nodes, 1 leaf with 3 elements, 16 B saved
│   ├── blocks.1  3 nodes, 1 leaf with 3 elements, 16 B saved
│   └── blocks.0  3 nodes, 1 leaf with 3 elements, 16 B saved
└── stem  MmBackward0  float32[2, 3]
"""

BLOCK = """\
│   └── blocks.0  3 nodes, 1 leaf with 3 elements, 16 B saved
│       ├── AddBackward0  float32[2, 3]  /src/net.py:12 in forward (add)
│       ├── second  MmBackward0  float32[2, 3]  → weight float32[3]  saved self float32[4]
│       └── first  MmBackward0  float32[2, 3]
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Plain(io.TextIOWrapper):
    """A file that has ASCII alone."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii", newline="\n")

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]


def text_of(graph: Graph, depth: int | None = None) -> str:
    file = io.StringIO()
    print_graph(graph, depth=depth, file=file)
    return file.getvalue()


def test_a_tree_by_module_opens_to_a_depth() -> None:
    assert text_of(residual_net(), 2) == TREE
    assert text_of(residual_net(), 1).count("\n") == 5
    assert BLOCK in text_of(residual_net(), 4)
    assert text_of(residual_net(), 99) == text_of(residual_net(), 4)


@pytest.mark.parametrize("blocks", [1, 8, 40])
def test_the_default_depth_fills_about_a_screen(blocks: int) -> None:
    graph = residual_net(blocks)
    texts = [text_of(graph, depth) for depth in (1, 2, 3, 4)]
    fitting = [text for text in texts if text.count("\n") <= MOST_LINES + 1]
    assert text_of(graph) == fitting[-1]


def test_runs_of_equal_kinds_become_one_line() -> None:
    nodes = [node(i, None, i + 1) for i in range(200)]
    assert text_of(graph_of([*nodes, node(200, name="CatBackward0")])).splitlines()[1:] == [
        "├── 1 MulBackward0  float32[2, 3]  → 2",
        "├── … 199 × MulBackward0",
        "└── 201 CatBackward0  float32[2, 3]",
    ]
    nodes = [node(i, None, i + 1, name="ABC"[i % 3]) for i in range(3000)]
    assert text_of(graph_of([*nodes, node(3000, name="A")])).splitlines()[-2:] == [
        "├── … 999 × (A, B, C)",
        "└── 3001 A  float32[2, 3]",
    ]


@pytest.mark.parametrize("kinds", ["ABCDEFG", "AAA", "AAAA", "ABABABAB", "AABAABAABAAB", "ABCABD", "ABAABAAAB"])
def test_entries_stand_for_every_node_once_and_in_order(kinds: str) -> None:
    nodes = [node(i, None, *([i + 1] if i + 1 < len(kinds) else []), name=kind) for i, kind in enumerate(kinds)]
    said = ""
    for entry in list_entries(make_outline(nodes).top):
        assert not isinstance(entry, Fold)
        said += "".join(each.name for each in entry[0]) * entry[1]
    assert said == kinds


def test_a_file_of_ascii_gets_ascii() -> None:
    file = Plain()
    print_graph(
        graph_of([*(node(i, None, i + 1) for i in range(9)), node(9, "héad", 10), leaf(10, "héad.w")]), file=file
    )
    lines = file.text().splitlines()
    assert lines[1:3] == ["|-- MulBackward0  float32[2, 3]", "|-- ... 8 x MulBackward0"]
    assert lines[3] == "`-- h\\xe9ad  MulBackward0  float32[2, 3]  -> w float32[3]"


def test_names_cannot_steer_the_terminal() -> None:
    evil = "\x1b[2J[red]x\n"
    graph = graph_of(
        [
            node(
                0, evil, 1, name=evil, line=Line(evil, 1, evil, evil), saved=(SavedValue(evil, TensorInfo((), evil)),)
            ),
            leaf(1, evil),
        ]
    )
    text = text_of(graph, 3)
    assert "\x1b" not in text
    assert "[red]" in text
    assert len(text.splitlines()) == 2


def test_a_terminal_gets_colours_and_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = Terminal()
    print_graph(residual_net(), depth=4, file=file)
    text = file.getvalue()
    assert "\x1b[" in text
    assert "blocks.0" in text
    assert max(map(len, strip(text).splitlines())) <= 60
    assert "".join(strip(text).split()).replace("│", "") == "".join(text_of(residual_net(), 4).split()).replace("│", "")


def strip(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_leaves_are_named_by_the_module_that_feeds_them() -> None:
    nodes = [node(0, "head", 1, 2, 3), leaf(1, "head:weight"), leaf(2, "embed:weight"), leaf(3, None)]
    assert text_of(graph_of(nodes), 2).splitlines()[-1] == (
        "└── head  MulBackward0  float32[2, 3]  → weight float32[3], embed:weight float32[3], unnamed leaf float32[3]"
    )


def test_an_empty_graph_is_said_and_a_depth_of_none_refused() -> None:
    assert text_of(make_graph([], ())) == "0 nodes, 0 leaves with 0 elements, 0 B saved for the backward\n"
    with pytest.raises(GraphError, match="depth=0"):
        text_of(residual_net(), 0)


def test_a_node_that_knows_little_is_printed() -> None:
    graph = make_graph([Node(0, "ViewBackward0", 5, (None,), (None, Edge(1, 0))), Node(1, "Unknown", 4)], (Edge(0, 0),))
    assert text_of(graph).splitlines()[1:] == ["├── 1 ViewBackward0  not known  → 2", "└── 2 Unknown"]


def test_without_modules_nodes_say_which_nodes_they_feed() -> None:
    a = torch.randn(3, requires_grad=True)
    b = torch.randn(3, requires_grad=True)
    product = a * b
    loss = (product + product.exp()).sum()
    file = io.StringIO()
    print_graph(walk(loss, names={"a": a, "b": b}, saved=False), file=file)
    assert file.getvalue().splitlines()[1:] == [
        "├── 1 SumBackward0  float32[]  → 2",
        "├── 2 AddBackward0  float32[3]  → 4, 3",
        "├── 3 ExpBackward0  float32[3]  → 4",
        "└── 4 MulBackward0  float32[3]  → a float32[3], b float32[3]",
    ]


@pytest.mark.parametrize("name", ["graph.svg", "graph.html"])
def test_a_loss_is_drawn_as_its_graph(tmp_path: Path, name: str) -> None:
    loss = nn.Linear(4, 1)(torch.ones(8, 4)).square().mean()
    drawn = [rg.draw_graph(each, tmp_path / f"{i}{name}") for i, each in enumerate((loss, [loss], rg.walk(loss)))]
    assert len({path.read_bytes() for path in drawn}) == 1
    assert rg.format_graph(loss) == rg.format_graph(rg.walk(loss))
