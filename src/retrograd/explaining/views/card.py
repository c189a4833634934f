"""A card in a notebook."""

from __future__ import annotations

from retrograd.core.runs.findings import shorten_line
from retrograd.core.views.notebook.page import NotebookPage, escape
from retrograd.explaining.card.card import Card, CardEntry


def draw_card(card: Card) -> str:
    """Each line with its topic, and what it leaves out folded away."""
    page = NotebookPage()
    page.console.add(f'<table style="text-align:left">{"".join(map(_draw_line, card.lines))}</table>')
    return page.as_html()


def _draw_line(line: CardEntry) -> str:
    place = f" <small>{escape(shorten_line(line.line))}</small>" if line.line else ""
    text = escape(": ".join(filter(None, (line.label, line.text))))
    more = "".join(f"<dd>{escape(detail)}</dd>" for detail in line.details)
    folded = f"<details><summary>more</summary><dl>{more}</dl></details>" if more else ""
    cells = f'<th style="text-align:left;vertical-align:top">{escape(line.topic)}</th>'
    return f'<tr>{cells}<td style="text-align:left">{text}{place}{folded}</td></tr>'
