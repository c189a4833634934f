"""Graphs as pictures: held against the graph itself, contracted by brute force; and the page in a browser."""

from __future__ import annotations

import random
import re
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, expect

from retrograd.core.errors import GraphError
from retrograd.following.graph.graph import Graph
from retrograd.following.graph.node import Edge, Line, Node, SavedValue, TensorInfo
from retrograd.following.views.graph_picture import MOST_BOXES, draw_graph
from retrograd.following.views.picture.folds import Fold, make_outline, order_nodes, shown_parts
from retrograd.following.views.picture.layers import arrange
from tests.browser import Visit
from tests.core.views.test_contrast import luminance, read_colors
from tests.following.graph.by_hand import make_graph

HOSTILE = "</title><script>alert(1)</script>&\"'<img src=x onerror=alert(2)>\x00\ud800"
DRAWN = ("svg", "title", "desc", "style", "defs", "marker", "path", "rect", "circle", "text", "g")
SVG = "{http://www.w3.org/2000/svg}"


def node(index: int, module: str | None = None, *edges: int | tuple[int, int] | None, **more: Any) -> Node:
    """A node whose edges lead to slot 0, or to the slot given beside."""
    ends = tuple(None if e is None else Edge(*(e if isinstance(e, tuple) else (e, 0))) for e in edges)
    more = {"number": 10_000_000 - index, "incoming": (TensorInfo((2, 3), "float32"),), **more}
    return Node(index, more.pop("name", "MulBackward0"), edges=ends, module=module, **more)


def leaf(index: int, name: str | None, shape: tuple[int, ...] = (3,)) -> Node:
    return Node(index, "AccumulateGrad", None, incoming=(TensorInfo(shape, "float32"),), parameter=name)


def graph_of(nodes: list[Node]) -> Graph:
    return make_graph(nodes, (Edge(0, 0),))


def residual_net(blocks: int = 4) -> Graph:
    """``blocks.N`` of two layers and a sum, each with a way around; then a head."""
    nodes = [node(0, None, 1, name="NllLossBackward0"), node(1, "head", 2, name="AddmmBackward0")]
    leaves = []
    for block in reversed(range(blocks)):
        i = len(nodes)
        path = f"blocks.{block}"
        nodes += [
            node(i, path, i + 1, i + 3, name="AddBackward0", line=Line("/src/net.py", 12, "forward", "add")),
            node(
                i + 1,
                f"{path}.second",
                i + 2,
                name="MmBackward0",
                saved=(SavedValue("self", TensorInfo((4,), "float32")),),
            ),
            node(i + 2, f"{path}.first", i + 3, name="MmBackward0"),
        ]
        leaves.append((i + 1, f"{path}.second.weight"))
    nodes.append(node(len(nodes), "stem", name="MmBackward0"))
    for taker, name in leaves:
        nodes.append(leaf(len(nodes), name))
        old = nodes[taker]
        nodes[taker] = Node(
            taker,
            old.name,
            old.number,
            old.incoming,
            (*old.edges, Edge(len(nodes) - 1, 0)),
            saved=old.saved,
            module=old.module,
        )
    return graph_of(nodes)


def random_graph(seed: int, *, tidy: bool) -> Graph:
    """A random graph with random modules.

    Args:
        seed: which.
        tidy: whether modules are made one after the other, as in a forward, or mixed, so that folds are in circles.
    """
    dice = random.Random(seed)
    count = dice.randint(5, 70)
    paths = ["a.x", "a.y", "a", "b.x.u", "b.x.v", "b.y", "c.u", "c.v", None, "self"]
    modules = [dice.choice(paths) for _ in range(count)]
    if tidy:
        modules.sort(key=lambda path: str(path))
    nodes = []
    for i in range(count):
        later = range(i + 1, count)
        ends = [(dice.choice(later), dice.randint(0, 1)) for _ in range(dice.randint(1, 3)) if later]
        ends += [(i + 1, 0)] if i + 1 < count else []
        infos = (TensorInfo((dice.randint(1, 9),), "float32"), TensorInfo((), "float32"))
        nodes.append(node(i, modules[i], *ends, incoming=infos))
    return graph_of(nodes)


class Picture:
    """An SVG file, read.

    Attributes:
        boxes: name of a closed box → left, top, right, bottom.
        frames: the same of open folds.
        lines: from, to, gradients, path, and the frame that the line is in.
    """

    def __init__(self, root: ET.Element) -> None:
        self.root = root
        self.boxes: dict[str, tuple[float, ...]] = {}
        self.frames: dict[str, tuple[float, ...]] = {}
        self.lines: list[tuple[str, str, list[str], str, str]] = []
        self._read(root, "")

    def _read(self, element: ET.Element, frame: str) -> None:
        for child in element:
            kind = child.get("class", "")
            name = child.get("data-name", "")
            if kind.startswith("line"):
                ends = child.get("data-from", ""), child.get("data-to", "")
                self.lines.append((*ends, child.get("data-gradients", "").split(), child.get("d", ""), frame))
            elif kind.startswith("box"):
                self.boxes[name] = rectangle(child)
            elif kind == "open":
                self.frames[name] = rectangle(child)
                self._read(child, name)

    def crossings(self) -> set[tuple[str, str, str]]:
        """What leads from box to box, through the borders of open folds: from, to, gradient."""
        out: dict[tuple[str, str], set[str]] = {}
        for sender, taker, gradients, _, frame in self.lines:
            for gradient in gradients:
                ends = self._end(sender, frame, gradient, "out"), self._end(taker, frame, gradient, "in")
                out.setdefault((ends[0], gradient), set()).add(ends[1])
        found = set()
        for start, gradient in out:
            if start not in self.boxes:
                continue
            ways = [start]
            for way in ways:
                ways.extend(out.get((way, gradient), ()))
            found |= {(start, end, gradient) for end in ways[1:] if end in self.boxes}
        return found

    def _end(self, name: str, frame: str, gradient: str, side: str) -> str:
        if re.fullmatch(r"(in|out)-\d+-\d+", name):
            return f"{frame}|{name}"
        return f"{name}|{side}-{gradient.replace('.', '-')}" if name in self.frames else name


def rectangle(group: ET.Element) -> tuple[float, ...]:
    back = next(child for child in group if child.get("class") in ("back", "frame"))
    x, y, width, height = (float(back.get(key, "nan")) for key in ("x", "y", "width", "height"))
    right, down = map(float, re.findall(r"-?[0-9.]+", group.get("transform", "0 0")))
    return x + right, y + down, x + right + width, y + down + height


Draw = Callable[..., Picture]


@pytest.fixture
def draw(tmp_path: Path) -> Draw:
    def draw(graph: Graph, depth: int | None = None) -> Picture:
        return Picture(ET.parse(draw_graph(graph, tmp_path / "graph.svg", depth=depth)).getroot())

    return draw


def box_of(each: Node, shown: set[str]) -> str:
    """By brute force: the node's own box, or the closed module around it."""
    if f"n{each.index}" in shown:
        return f"n{each.index}"
    parts = (each.module or "").split(".")
    return next(name for n in range(len(parts)) if (name := ".".join(parts[: n + 1]) + "#1") in shown)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("tidy", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_boxes_and_lines_are_those_of_the_contracted_graph(draw: Draw, seed: int, tidy: bool, depth: int) -> None:
    graph = random_graph(seed, tidy=tidy)
    picture = draw(graph, depth)
    shown = set(picture.boxes)
    homes = {each.index: box_of(each, shown) for each in graph}
    assert set(homes.values()) == shown
    wanted = {
        (homes[each.index], homes[edge.node], f"{edge.node}.{edge.slot}")
        for each in graph
        for edge in each.edges
        if edge is not None and homes[each.index] != homes[edge.node]
    }
    assert picture.crossings() == wanted


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("depth", [1, 2, 9])
def test_no_boxes_overlap_and_no_line_crosses_one(draw: Draw, seed: int, depth: int) -> None:
    picture = draw(random_graph(seed, tidy=True), depth)
    boxes = sorted(picture.boxes.items())
    for i, (_, (left, top, right, bottom)) in enumerate(boxes):
        for _, other in boxes[i + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
    for sender, taker, _, path, _ in picture.lines:
        for x, y in points_of(path):
            for name, (left, top, right, bottom) in boxes:
                assert name in (sender, taker) or not (left < x < right and top + 1 < y < bottom - 1), (sender, taker)


def points_of(path: str) -> Iterator[tuple[float, float]]:
    """Points along a path of M, V and C commands."""
    x = y = 0.0
    for command, text in re.findall(r"([MVC])([^MVC]*)", path):
        numbers = [float(number) for number in text.split()]
        if command == "M":
            x, y = numbers
        elif command == "V":
            yield from ((x, y + (numbers[0] - y) * step / 20) for step in range(21))
            y = numbers[0]
        else:
            (x1, y1), (x2, y2), (x3, y3) = zip(numbers[::2], numbers[1::2], strict=True)
            for step in range(21):
                t, u = step / 20, 1 - step / 20
                yield (
                    u**3 * x + 3 * u * u * t * x1 + 3 * u * t * t * x2 + t**3 * x3,
                    u**3 * y + 3 * u * u * t * y1 + 3 * u * t * t * y2 + t**3 * y3,
                )
            x, y = x3, y3


def test_ways_around_are_drawn_in_every_block(draw: Draw) -> None:
    picture = draw(residual_net(4), 3)
    sums = [each for each in residual_net(4) if each.name == "AddBackward0"]
    assert len(picture.boxes) == 2 + 4 * 3 + 1
    for each, below in pairwise(sums):
        around = (f"n{each.index}", f"n{below.index}", f"{below.index}.0")
        through = (f"blocks.{len(sums) - 1 - sums.index(each)}.first#1", f"n{below.index}", f"{below.index}.0")
        assert {around, through} <= picture.crossings()


def test_gradients_go_down(draw: Draw) -> None:
    picture = draw(residual_net(4), 9)
    for sender, taker, _ in picture.crossings():
        assert picture.boxes[sender][3] < picture.boxes[taker][1]


def test_the_default_depth_shows_no_more_boxes_than_are_legible(draw: Draw) -> None:
    assert len(draw(residual_net(6)).boxes) == 2 + 6 * 3 + 1
    assert len(draw(residual_net(40)).boxes) == 2 + 40 + 1
    assert len(draw(residual_net(70)).boxes) <= MOST_BOXES


def test_calls_of_a_module_are_folds_of_their_own(draw: Draw) -> None:
    nodes = [node(0, None, 1)]
    for i in range(1, 9, 2):  # a cell in a loop, and a layer in it
        call = 4 - i // 2
        nodes += [node(i, "cell.layer", i + 1, call=call), node(i + 1, "cell", i + 2, call=call)]
    nodes.append(node(9, "stem"))
    assert set(draw(graph_of(nodes), 1).boxes) == {"n0", "cell#4", "cell#3", "cell#2", "cell#1", "stem#1"}
    assert {"cell.layer#2", "n6"} <= set(draw(graph_of(nodes), 2).boxes)


def test_calls_of_a_module_without_nodes_are_told_by_what_is_in_it(draw: Draw) -> None:
    nodes = [node(i, f"pair.{'ab'[i % 2]}", *([i + 1] if i < 3 else []), call=2 - i // 2) for i in range(4)]
    assert set(draw(graph_of([*nodes, node(4, "stem")]), 1).boxes) == {"pair#2", "pair#1", "stem#1"}


def test_long_lists_are_cut_into_stretches(draw: Draw) -> None:
    nodes = [node(i, None, i + 1) for i in range(5000)]
    picture = draw(graph_of([*nodes, node(5000)]))
    assert len(picture.boxes) <= MOST_BOXES
    outline = make_outline([*nodes[:-1], node(4999)], most=MOST_BOXES)
    stack = [outline.top]
    for fold in stack:
        assert len(fold.parts) <= MOST_BOXES
        stack.extend(fold.folds)
    everything = list(shown_parts(outline.top, 99))
    assert [part.index for part in everything if not isinstance(part, Fold)] == list(range(5000))


def test_leaves_are_pills_of_the_boxes_that_feed_them(draw: Draw) -> None:
    shared = leaf(3, "embed:weight", (50, 3))
    graph = graph_of([node(0, "head", 1, 3), node(1, "embed", 2, 3), node(2, "embed", 3), shared])
    picture = draw(graph, 9)
    assert set(picture.boxes) == {"head#1", "n1", "n2"}
    pills = [text.text for text in picture.root.iter(f"{SVG}text") if text.get("class") == "leaf"]
    assert pills == ["embed:weight [50, 3]", "weight [50, 3]", "weight [50, 3]"]


def test_labels_are_the_shapes_that_arrive(draw: Draw) -> None:
    half = TensorInfo((4, 8), "bfloat16")
    graph = graph_of([node(0, None, 1, (1, 1), (2, 0)), node(1, None, 2), node(2, None, 3, incoming=(half,)), node(3)])
    wide = [node(0, None, 1, (1, 1)), node(1, incoming=(half, half))]
    labels = [t.text for t in draw(graph).root.iter(f"{SVG}text") if t.get("class") == "label"]
    assert sorted(filter(None, labels)) == ["[2, 3]", "[2, 3]", "[2, 3]", "bfloat16[4, 8]"]
    labels = [t.text for t in draw(graph_of(wide)).root.iter(f"{SVG}text") if t.get("class") == "label"]
    assert sorted(filter(None, labels)) == ["2 × [4, 8]", "float32[2, 3]"]


def test_the_same_graph_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "a.html"):
        first = draw_graph(residual_net(), tmp_path / name).read_bytes()
        assert draw_graph(residual_net(), tmp_path / name).read_bytes() == first


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_names_stay_text_and_nothing_is_loaded(tmp_path: Path, suffix: str) -> None:
    nodes = [
        node(
            0,
            HOSTILE,
            1,
            2,
            name=HOSTILE,
            line=Line(HOSTILE, 1, HOSTILE, HOSTILE),
            saved=(SavedValue(HOSTILE, value=HOSTILE),),
        ),
        node(1, HOSTILE.replace(".", "")),
        leaf(2, HOSTILE),
    ]
    text = draw_graph(graph_of(nodes), tmp_path / f"graph.{suffix}").read_text(encoding="utf-8")
    assert "<img" not in text
    assert "<script>alert" not in text
    assert re.findall(r"https?://[^\s\"'<]*", text) == (["http://www.w3.org/2000/svg"] if suffix == "svg" else [])
    assert not re.search(r"url\((?!#tip\))|@import", text)
    if suffix == "html":
        assert "src=" not in text
    else:
        assert {e.tag.removeprefix(SVG) for e in ET.fromstring(text).iter()} <= set(DRAWN)
        assert not [
            e for e in ET.fromstring(text).iter() if e.get("href") or any(key.startswith("on") for key in e.attrib)
        ]
        titles = [t.text or "" for t in ET.fromstring(text).iter(f"{SVG}title")]
        assert any("</title><script>alert(1)</script>&\"'<img src=x onerror=alert(2)>\ufffd\ufffd" in t for t in titles)


@pytest.mark.parametrize(
    ("name", "depth"), [("graph.png", None), ("graph", None), ("graph.svg", 0), ("missing/graph.svg", None)]
)
def test_what_cannot_be_drawn_is_said(tmp_path: Path, name: str, depth: int | None) -> None:
    with pytest.raises(GraphError, match="Try:"):
        draw_graph(residual_net(), tmp_path / name, depth=depth)


def test_an_empty_graph_and_a_single_node_are_drawn(draw: Draw) -> None:
    assert draw(make_graph([], ())).boxes == {}
    assert len(draw(graph_of([node(0)])).boxes) == 1


def test_nodes_are_in_the_order_of_the_engine() -> None:
    nodes = [node(0, None, 1, 2, number=9), node(1, None, 3, number=3), node(2, None, 3, number=5), node(3, number=7)]
    assert order_nodes(nodes) == [0, 2, 1, 3]


def test_circles_are_broken_and_rows_go_down() -> None:
    lines = [(0, 1), (1, 2), (2, 1), (2, 3), (0, 3)]
    arrangement = arrange([100.0] * 4, lines, first=1, last=1)
    row_of = {number: r for r, row in enumerate(arrangement.rows) for number in row}
    assert arrangement.turned == [False, False, True, False, False]
    for chain in arrangement.chains:
        assert [row_of[number] for number in chain] == list(range(row_of[chain[0]], row_of[chain[-1]] + 1))
    assert row_of[0] == 0
    assert row_of[3] == max(row_of.values())


# ---- in a browser ----


def shapes(page: Page) -> dict[str, list[float]]:
    """Numbers of all boxes, frames and lines of the page, by name."""
    return page.evaluate(
        """() => {
            const numbers = (element, names) => names.map((name) => Number(element.getAttribute(name)));
            const found = {};
            for (const box of document.querySelectorAll(".box")) {
                const [x, y, width, height] = numbers(box.querySelector(".back"), ["x", "y", "width", "height"]);
                const [right, down] = box.getAttribute("transform").match(/-?[0-9.]+/g).map(Number);
                found[box.dataset.name] = [x + right, y + down, width, height];
            }
            for (const frame of document.querySelectorAll(".open")) {
                const name = frame.querySelector(".handle").dataset.name;
                found[name] = numbers(frame.querySelector(".frame"), ["x", "y", "width", "height"]);
            }
            for (const line of document.querySelectorAll(".line")) {
                const { from, to, gradients } = line.dataset;
                const frame = line.parentNode.querySelector(":scope > .handle")?.dataset.name ?? "";
                found[[frame, from, to, gradients]] = line.getAttribute("d").match(/-?[0-9.]+/g).map(Number);
            }
            return found;
        }"""
    )


def expected_shapes(picture: Picture) -> dict[str, list[float]]:
    rectangles = {name: [x, y, r - x, b - y] for name, (x, y, r, b) in (picture.boxes | picture.frames).items()}
    return rectangles | {
        f"{frame},{sender},{taker},{' '.join(gradients)}": [float(n) for n in re.findall(r"-?[0-9.]+", path)]
        for sender, taker, gradients, path, frame in picture.lines
    }


def assert_same(page: Page, picture: Picture) -> None:
    found, expected = shapes(page), expected_shapes(picture)
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(numbers, abs=0.21), name


def box(page: Page, name: str) -> Any:
    return page.locator(f'#world [data-name="{name}"]')


@pytest.fixture
def opened(visit: Visit, tmp_path: Path) -> Callable[..., Page]:
    def opened(graph: Graph, depth: int | None = None) -> Page:
        return visit.open(draw_graph(graph, tmp_path / "graph.html", depth=depth))

    return opened


@pytest.mark.browser
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_the_page_draws_as_the_picture_at_every_depth(
    opened: Callable[..., Page], draw: Draw, seed: int | None
) -> None:
    graph = residual_net() if seed is None else random_graph(seed, tidy=seed == 1)
    page = opened(graph, 1)
    assert_same(page, draw(graph, 1))
    for depth in (2, 3, 4):
        page.locator("#unfold").click()
        assert_same(page, draw(graph, depth))
    page.locator("#fold").click()


@pytest.mark.browser
def test_a_click_opens_and_closes_a_module(opened: Callable[..., Page], draw: Draw) -> None:
    page = opened(residual_net(), 1)
    first = page.locator(".box.fold[aria-expanded=false]")
    before = first.count()
    box(page, "blocks.3#1").wait_for(state="detached")
    blocks = page.locator('.box[aria-label^="blocks"]')
    blocks.click()
    frame = page.locator(".handle[aria-expanded=true]")
    expect(frame).to_have_count(1)
    expect(box(page, "blocks.3#1")).to_have_attribute("aria-expanded", "false")
    frame.click()
    expect(first).to_have_count(before)
    assert_same(page, draw(residual_net(), 1))


@pytest.mark.browser
def test_the_keyboard_opens_closes_and_walks(opened: Callable[..., Page]) -> None:
    page = opened(residual_net(), 1)
    page.locator("#theme").focus()
    page.keyboard.press("Tab")
    focused = page.locator("#world :focus")
    expect(focused).to_have_attribute("data-name", "n0")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(focused).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("Enter")
    expect(focused).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_attribute("data-name", "blocks.3#1")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(focused).to_have_attribute("aria-label", re.compile("AddBackward0"))
    page.keyboard.press("ArrowLeft")
    expect(focused).to_have_attribute("data-name", "blocks.3#1")
    page.keyboard.press("ArrowLeft")
    expect(focused).to_have_attribute("aria-expanded", "false")
    expect(page.locator('#world [tabindex="0"]')).to_have_count(1)


@pytest.mark.browser
def test_details_of_a_node_are_shown_and_kept(opened: Callable[..., Page]) -> None:
    page = opened(residual_net(), 3)
    details = page.locator("#details")
    box(page, "n2").hover()
    expect(details).to_contain_text("/src/net.py:12 in forward")
    expect(page.locator(".line.near")).to_have_count(3)
    box(page, "n2").click()
    box(page, "n0").hover()
    expect(details.locator("h2")).to_have_text("AddBackward0")
    page.keyboard.press("Escape")
    box(page, "n0").hover()
    expect(details.locator("h2")).to_have_text("NllLossBackward0")


@pytest.mark.browser
def test_the_search_opens_what_it_finds(opened: Callable[..., Page]) -> None:
    page = opened(residual_net(6), 1)
    page.keyboard.press("/")
    page.keyboard.type("BLOCKS.1.second.WEIGHT")
    expect(page.locator("#found")).to_have_text("1 found, Enter shows")
    expect(page.locator(".match")).to_have_count(0)
    page.keyboard.press("Enter")
    expect(page.locator("#found")).to_have_text("1 of 1")
    expect(page.locator(".match")).to_have_attribute("aria-label", re.compile("MmBackward0.*weight"))
    expect(page.locator(".match")).to_be_in_viewport()
    expect(page.locator("#details")).to_contain_text("→ blocks.1.second.weight")
    page.locator("#search").fill("backward0")
    page.keyboard.press("Shift+Enter")
    expect(page.locator("#found")).to_have_text("21 of 21")
    page.locator("#search").fill("nowhere")
    expect(page.locator("#found")).to_have_text("nothing found")


@pytest.mark.browser
def test_it_zooms_moves_and_changes_its_theme(opened: Callable[..., Page]) -> None:
    page = opened(residual_net(20), 2)
    last = box(page, "stem#1")
    expect(last).not_to_be_in_viewport()
    page.locator("#whole").click()
    expect(last).to_be_in_viewport()
    page.locator("#actual").click()
    before = box(page, "blocks.10#1").or_(page.locator(".handle").first).first.bounding_box()
    page.mouse.move(300, 400)
    page.mouse.wheel(0, 200)
    page.wait_for_timeout(50)
    after = box(page, "blocks.10#1").or_(page.locator(".handle").first).first.bounding_box()
    assert before is not None
    assert after is not None
    assert after["y"] == pytest.approx(before["y"] - 200, abs=2)
    light = page.evaluate("getComputedStyle(document.querySelector('#details')).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.querySelector('#details')).backgroundColor") != light


@pytest.mark.browser
def test_a_large_graph_says_what_is_left_out(opened: Callable[..., Page], tmp_path: Path) -> None:
    nodes = [node(i, None, i + 1) for i in range(40_000)]
    page = opened(graph_of([*nodes, node(40_000)]))
    expect(page.locator("#notice")).to_contain_text("cannot be opened here")
    assert (tmp_path / "graph.html").stat().st_size < 3e6


@pytest.mark.browser
def test_hostile_names_do_nothing_in_the_page(opened: Callable[..., Page]) -> None:
    graph = graph_of([node(0, HOSTILE, 1, name=HOSTILE), node(1, HOSTILE, 2), leaf(2, HOSTILE)])
    page = opened(graph, 9)
    page.keyboard.press("/")
    page.keyboard.type("script")
    page.keyboard.press("Enter")
    expect(page.locator(".match").first).to_be_in_viewport()


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_is_open_is_saved_as_a_picture(
    opened: Callable[..., Page], draw: Draw, tmp_path: Path, theme: str
) -> None:
    graph = residual_net()
    page = opened(graph, 1)
    page.locator("#unfold").click()
    if theme == "dark":
        page.locator("#theme").click()
    saved = {ending: _save(page, ending, tmp_path) for ending in ("svg", "png")}
    root = ET.parse(saved["svg"]).getroot()
    picture, wanted = Picture(root), draw(graph, 2)
    assert picture.boxes.keys() == wanted.boxes.keys()
    assert len(picture.lines) == len(wanted.lines)
    assert all(read_colors(theme)[name] in saved["svg"].read_text() for name in ("page", "surface", "ink"))
    assert "var(" not in saved["svg"].read_text()
    wide, high = (int(root.attrib[name].split(".")[0]) for name in ("width", "height"))
    assert saved["png"].read_bytes()[16:24] == (2 * wide).to_bytes(4) + (2 * high).to_bytes(4)


def _save(page: Page, ending: str, folder: Path) -> Path:
    with page.expect_download() as download:
        page.locator(f"#save-{ending}").click()
    assert download.value.suggested_filename == f"graph.{ending}"
    path = folder / f"saved.{ending}"
    download.value.save_as(path)
    return path


@pytest.mark.browser
def test_hostile_names_stay_text_in_a_saved_picture(opened: Callable[..., Page], tmp_path: Path) -> None:
    graph = graph_of([node(0, HOSTILE, 1, name=HOSTILE), node(1, HOSTILE, 2), leaf(2, HOSTILE)])
    page = opened(graph, 9)
    root = ET.parse(_save(page, "svg", tmp_path)).getroot()
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= set(DRAWN)
    assert _save(page, "png", tmp_path).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [name for name in dir(torch._C._functions) if name.startswith("Addmm")])
def test_a_box_says_in_plain_words_what_it_is(draw: Draw, name: str) -> None:
    graph = graph_of([node(0, None, 1, name=name), node(1, name="RareBackward0")])
    notes = [each.text for each in draw(graph, 1).root.iter(f"{SVG}text") if each.get("class") == "note"]
    assert notes == ["matrix product plus bias"]


def test_plain_words_are_those_of_nodes_that_torch_has() -> None:
    text = resources.files("retrograd.following.graph").joinpath("plain_names.toml").read_text()
    have = {re.sub(r"Backward\d*$", "", name) for name in dir(torch._C._functions)}
    assert set(tomllib.loads(text)["operations"]) <= have


# ---- colours ----


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    ("front", "back"), [("ink", "accent-soft"), ("muted", "accent-soft"), ("muted", "page"), ("ink", "well")]
)
def test_contrast(theme: str, front: str, back: str) -> None:
    colors = read_colors(theme)
    light, dark = sorted((luminance(colors[front]), luminance(colors[back])), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_a_path_that_comes_first_is_refused(tmp_path: Path) -> None:
    loss, path = torch.ones(2, requires_grad=True).sum(), tmp_path / "g.html"
    for first in (path, str(path)):
        with pytest.raises(GraphError, match=r"rg\.draw_graph\(loss, "):
            draw_graph(first, loss)  # type: ignore[arg-type]
    assert not path.exists()
    assert draw_graph(loss, path) == path
