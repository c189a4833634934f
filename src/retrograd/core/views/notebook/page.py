"""A console that makes HTML for a notebook of what views print: here, and nowhere else, tables become HTML.

Colours are those of the notebook: text is inherited, lines and shades are parts of it, and what must stand out has
colours that are mixed with that of the text. So it follows light and dark themes without knowing which one there is.
"""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from retrograd.core.amounts import count_more
from retrograd.core.foreign.text import show_plainly
from retrograd.core.views.terminal import BLOCKS, PIPED_WIDTH, ConsoleFile

MOST_ROWS = 40
MOST_LINES = 200
"""Lines of a text that are shown."""

_RULE = "1px solid color-mix(in srgb, currentColor 25%, transparent)"
_TABLE = "border-collapse:collapse;margin:.3em 0;font-size:90%;font-variant-numeric:tabular-nums"
_LINES = "margin:.3em 0;padding:0;white-space:pre;overflow-x:auto;background:none;color:inherit;font-size:90%"
_COLOURS = {
    name: f"color-mix(in srgb, {colour} 70%, currentColor)"
    for name, colour in {"red": "#d9534f", "yellow": "#b07d00", "green": "#3d9a50", "cyan": "#2391ad"}.items()
}
"""At least 4.5:1 on white, and on the dark grounds of notebooks: with their text, they are darker or lighter."""


class Markup(str):
    """HTML that is put into a cell as it is; all other texts are escaped."""

    __slots__ = ()


class NotebookPage(ConsoleFile):
    """A file for views to print to, whose text is HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.console: NotebookConsole = NotebookConsole()

    def as_html(self) -> str:
        """All that was printed."""
        return f'<div class="retrograd">{"".join(self.console.finish())}</div>'


class NotebookConsole(Console):
    """Keeps what is printed as HTML."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), width=PIPED_WIDTH, highlight=False, markup=False, emoji=False)
        self._parts: list[str] = []
        self._lines: list[str] = []

    def print(self, *objects: Any, style: str | Style | None = None, **options: Any) -> None:
        """Add tables and lines of text."""
        for each in objects:
            if isinstance(each, Table):
                self._end_lines()
                self._parts.append(self._draw_rich(each))
            else:
                text = each.copy() if isinstance(each, Text) else Text(str(each))
                if style is not None:
                    text.stylize(style)
                self._lines += [self._draw_text(line) for line in text.split(allow_blank=True)]

    def add(self, markup: str) -> None:
        """Add HTML as it is."""
        self._end_lines()
        self._parts.append(markup)

    def finish(self) -> list[str]:
        """All parts."""
        self._end_lines()
        return self._parts

    def _end_lines(self) -> None:
        if self._lines:
            shown, left = self._lines[:MOST_LINES], len(self._lines) - MOST_LINES
            rest = [escape(count_more(left, "line"))] if left > 0 else []
            text = "\n".join([*shown, *rest])
            self._parts.append(f'<pre style="{_LINES}">{text}</pre>')
        self._lines = []

    def _draw_rich(self, table: Table) -> str:
        titles = [(str(column.header), column.justify == "right") for column in table.columns]
        cells = zip(*([self._draw_cell(cell) for cell in column.cells] for column in table.columns), strict=True)
        return draw_table(titles, list(cells))

    def _draw_cell(self, cell: Any) -> Markup:
        return Markup(self._draw_text(cell if isinstance(cell, Text) else Text(str(cell))))

    def _draw_text(self, text: Text) -> str:
        text = text.copy()
        text.stylize_before(text.style)  # which rich leaves to what it prints to
        return "".join(_draw_piece(piece.text, piece.style) for piece in text.render(self))


def draw_table(titles: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]]) -> str:
    """A table as HTML.

    Args:
        titles: each with whether its column has numbers.
        rows: texts, which are escaped unless they are :class:`Markup`; of many the first are shown.
    """
    head = "".join(_draw_cell("th", escape(title), is_number) for title, is_number in titles)
    aligned = [is_number for _, is_number in titles]
    lines = [_draw_row(row, aligned) for row in rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        lines.append(f'<tr><td colspan="{len(titles)}" style="text-align:left">{_more(rows)}</td></tr>')
    return f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _more(rows: Sequence[Any]) -> str:
    return f"and {len(rows) - MOST_ROWS:,} more"


def _draw_row(row: Iterable[str], aligned: Iterable[bool]) -> str:
    cells = (cell if isinstance(cell, Markup) else escape(cell) for cell in row)
    return f"<tr>{''.join(_draw_cell('td', cell, right) for cell, right in zip(cells, aligned, strict=True))}</tr>"


def _draw_cell(kind: str, content: str, is_number: bool) -> str:
    side = "right" if is_number else "left"
    rule = f";border-bottom:{_RULE}" if kind == "th" else ""
    return f'<{kind} style="text-align:{side};padding:.1em .6em;white-space:pre{rule}">{content}</{kind}>'


def _draw_piece(text: str, style: Style | None) -> str:
    said = ["font-family:monospace"] * (text.strip(BLOCKS) != text)  # a curve, whose gaps are as wide as its blocks
    if style is None:
        style = Style.null()
    said += ["font-weight:600"] * bool(style.bold)
    if style.color is not None and style.color.name in _COLOURS:
        said.append(f"color:{_COLOURS[style.color.name]}")
    elif style.dim:
        said.append("opacity:.7")
    return f'<span style="{";".join(said)}">{escape(text)}</span>' if said else escape(text)


def escape(text: str) -> str:
    """A text that is neither markup nor turns the direction of what follows."""
    return html.escape(show_plainly(text, keep="\n"))
