"""A placed scene as SVG. ``js/draw.js`` draws the same in the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from xml.sax.saxutils import escape, quoteattr

from retrograd.core.views.page.frame import SHARED
from retrograd.following.graph.node import Node
from retrograd.following.views.picture.folds import Gradient
from retrograd.following.views.picture.placing import Placed
from retrograd.following.views.picture.scene import LABEL_LINE, Connector, Thing
from retrograd.following.views.picture.words import LABEL, LETTER, NOTE_LINE, PILL, PILL_LINE, TITLE_LINE, Box, clean

BORDER = 16.0
_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse" markerUnits="userSpaceOnUse"><path class="tip" d="M0 0.5 L8 4 L0 7.5 Z"/></marker>'
    "</defs>"
)
_THEME = re.compile(r":root(?P<dark>\[data-theme=\"dark\"\])? \{(?P<rules>.*?)\n\}", re.DOTALL)
_COLOR = re.compile(r"--([\w-]+): (#[0-9a-f]{6});")


def draw_svg(placed: Placed, title: str, description: str) -> str:
    """A complete SVG file in the colours that the reader's system prefers, light or dark."""
    width, height = placed.width + 2 * BORDER, placed.height + 2 * BORDER
    size = f'width="{width:.0f}" height="{height:.0f}"'
    corner = f"{-BORDER:.0f}"
    box = f'viewBox="{corner} {corner} {width:.0f} {height:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" role="img" {size} {box}>',
        f"<title>{_text(title)}</title>",
        f"<desc>{_text(description)}</desc>",
        f"<style>{_color_css()}</style>",
        _TIP,
        f'<rect class="ground" x="{corner}" y="{corner}" {size}/>',
        *_draw_sheet(placed, 0.0, 0.0),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _draw_sheet(placed: Placed, left: float, top: float) -> Iterator[str]:
    for line in placed.sheet.lines:
        yield from _draw_line(placed, line, left, top)
    for i, thing in enumerate(placed.sheet.things):
        spot = placed.spots[i]
        x, y = left + spot.x, top + spot.y
        if i in placed.inner:
            inner = placed.inner[i]
            yield _draw_frame(thing, inner, x - spot.left, y)
            yield from _draw_sheet(inner, x - spot.left, y)
            yield "</g>"
        elif thing.box is not None:
            name, kind = quoteattr(thing.name), "fold" if thing.box.is_fold else "node"
            at = f'transform="translate({x:.1f} {y:.1f})"'
            shapes = "".join(map(_draw_shape, list_shapes(thing.box)))
            title = f"<title>{_text(_tooltip(thing))}</title>"
            yield f'<g class="box {kind}" data-name={name} {at}>{title}{shapes}</g>'
        elif placed.sheet.fold.above is None:
            title = "<title>the backward starts here</title>"
            yield f'<circle class="start" cx="{x:.1f}" cy="{y:.1f}" r="4.5">{title}</circle>'
        else:
            yield f'<circle class="port" cx="{x:.1f}" cy="{y:.1f}" r="2"/>'


def _draw_frame(thing: Thing, inner: Placed, x: float, y: float) -> str:
    name = quoteattr(thing.name)
    return (
        f'<g class="open" data-name={name}><title>{_text(thing.name)}</title>'
        f'<rect class="frame" x="{x:.1f}" y="{y:.1f}" width="{inner.width:.1f}" height="{inner.height:.1f}" rx="10"/>'
        f'<path class="sign" d="M{x + 11:.1f} {y + 13:.1f} l4 4 l4 -4"/>'
        f'<text class="heading" x="{x + 25:.1f}" y="{y + 19:.1f}">{_text(inner.sheet.fold.title)}</text>'
    )


Shape = tuple[str, dict[str, str | float], str]
"""An element: its tag, its attributes, and its text."""


def list_shapes(box: Box) -> list[Shape]:
    """What there is in a closed box, from the middle of its upper edge."""
    shapes: list[Shape] = [_block("back", 0, box.width, box.height, 7)]
    if box.is_fold:
        shapes.append(("path", {"class": "sign", "d": f"M{10 - box.width / 2:g} 12 l4 4 l-4 4"}, ""))
    y = 7 + TITLE_LINE - 4
    shapes.append(("text", {"class": "title", "y": y}, box.title))
    for note in box.notes:
        y += NOTE_LINE
        shapes.append(("text", {"class": "note", "y": y}, note))
    y += 7
    for pill in box.pills:
        shapes.append(_block("pill", y, 2 * round(len(pill) * LETTER * PILL / 2 + 7), 16, 8))
        shapes.append(("text", {"class": "leaf", "y": y + 11.5}, pill))
        y += PILL_LINE
    for i, label in enumerate(reversed(box.labels)):
        y = -13 - i * LABEL_LINE
        shapes.append(_block("ground", y - 9, 2 * round(len(label) * LETTER * LABEL / 2 + 2), 12))
        shapes.append(("text", {"class": "label", "y": y}, label))
    return shapes


def _block(kind: str, y: float, width: float, height: float, round_by: float = 0) -> Shape:
    return "rect", {"class": kind, "x": -width / 2, "y": y, "width": width, "height": height, "rx": round_by}, ""


def _draw_shape(shape: Shape) -> str:
    tag, attributes, text = shape
    written = " ".join(
        f'{name}="{value}"' if isinstance(value, str) else f'{name}="{value:g}"' for name, value in attributes.items()
    )
    return f"<{tag} {written}>{_text(text)}</{tag}>" if text else f"<{tag} {written}/>"


def _draw_line(placed: Placed, line: Connector, left: float, top: float) -> Iterator[str]:
    """One line, or one for each gradient where it ends at an open fold, whose gates are apart."""
    apart = line.sender in placed.inner or line.taker in placed.inner
    groups = [(gradient,) for gradient in line.gradients] if apart else [line.gradients]
    things = placed.sheet.things
    ends_at_box = line.taker not in placed.inner and things[line.taker].box is not None
    for i, gradients in enumerate(groups):
        path = trace_line(placed, line, gradients[0], (i - (len(groups) - 1) / 2) * 4, left, top)
        tip = ' marker-{}="url(#tip)"'.format("start" if line.turned else "end") if ends_at_box else ""
        kind = "line turned" if line.turned else "line"
        sender, taker = (quoteattr(things[end].name) for end in (line.sender, line.taker))
        names = " ".join(f"{node}.{slot}" for node, slot in gradients)
        yield f'<path class="{kind}" data-from={sender} data-to={taker} data-gradients="{names}" d="{path}"{tip}/>'


def trace_line(placed: Placed, line: Connector, gradient: Gradient, aside: float, left: float, top: float) -> str:
    """The path of a line: straight down through rows, curved between them.

    Args:
        placed: the sheet it is on.
        line: which.
        gradient: at whose gate it ends where an end is an open fold.
        aside: how far from the middle of its bends it passes.
        left: where the sheet is.
        top: likewise.
    """
    first, last = line.chain[0], line.chain[-1]
    x, y = _end_of(placed, first, gradient, first == line.taker)
    y += placed.spots[first].height
    row = placed.sheet.row_of[first]
    parts = [f"M{left + x:.1f} {top + y:.1f}"]
    for number in line.chain[1:]:
        if placed.bottoms[row] > y:
            parts.append(f"V{top + placed.bottoms[row]:.1f}")
        y, row = placed.bottoms[row], placed.sheet.row_of[number]
        bend = number != last
        to = placed.spots[number].x + aside if bend else _end_of(placed, last, gradient, last == line.taker)[0]
        head, down = placed.heads[row], placed.tops[row]
        if to != x:
            middle, ends = (y + head) / 2, f"{left + to:.1f} {top + head:.1f}"
            parts.append(f"C{left + x:.1f} {top + middle:.1f} {left + to:.1f} {top + middle:.1f} {ends}")
        parts.append(f"V{top + down:.1f}")
        x, y = to, down
    return " ".join(parts)


def _end_of(placed: Placed, number: int, gradient: Gradient, enters: bool) -> tuple[float, float]:
    """The end of a line at a thing: in the middle, or at the gate of an open fold."""
    spot = placed.spots[number]
    if number not in placed.inner:
        return spot.x, spot.y
    return spot.x - spot.left + placed.inner[number].gates[*gradient, enters], spot.y


def _tooltip(thing: Thing) -> str:
    node = thing.content
    if not isinstance(node, Node):
        return thing.name
    return f"{node.place}\n{node.line}" if node.line is not None else node.place


def _color_css() -> str:
    """The style sheet with the colours of both themes: readers of SVG files do not all know variables."""
    css = resources.files("retrograd.following.views.picture").joinpath("css/graph.css").read_text(encoding="utf-8")
    theme = SHARED.joinpath("css/theme.css").read_text(encoding="utf-8")
    light, dark = ({}, {})  # type: dict[str, str], dict[str, str]
    for match in _THEME.finditer(theme):
        (dark if match["dark"] else light).update(_COLOR.findall(match["rules"]))
    return f"{_put_in(css, light)}\n@media (prefers-color-scheme: dark) {{\n{_put_in(css, dark)}}}"


def _put_in(css: str, colors: dict[str, str]) -> str:
    return re.sub(r"var\(--([\w-]+)\)", lambda match: colors[match[1]], css)


def _text(text: str) -> str:
    return escape(clean(text))
