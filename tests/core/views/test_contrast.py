"""Text and marks can be told from what lies behind them, in both themes (WCAG 2.2: 4.5 for text, 3 for marks)."""

from __future__ import annotations

import re
from importlib import resources

import pytest
from rich.text import Text

from retrograd.core.views.notebook.page import NotebookPage

CSS = resources.files("retrograd.core.views.page").joinpath("css/theme.css").read_text()
COLORS = resources.files("retrograd.core.views.report").joinpath("js/colors.js").read_text()

TEXT = [
    ("ink", "surface"), ("ink", "page"), ("ink", "raised"), ("ink", "well"), ("ink", "bad-soft"),
    ("muted", "surface"), ("muted", "page"), ("muted", "raised"), ("muted", "well"),
    ("accent", "surface"), ("accent", "accent-soft"),
    ("bad-ink", "surface"), ("bad-ink", "bad-soft"), ("bad-ink", "raised"),
    ("good", "surface"), ("warn", "surface"),
]  # fmt: skip
MARKS = [
    ("value", "surface"),
    ("grad", "surface"),
    ("update", "surface"),
    ("loss", "surface"),
    ("bad", "surface"),
    ("without", "surface"),
]
MARKS += [(f"run-{number}", "surface") for number in range(8)]


def read_colors(theme: str) -> dict[str, str]:
    blocks = re.findall(r":root(\[data-theme=\"dark\"\])? \{(.*?)\n\}", CSS, re.DOTALL)
    colors: dict[str, str] = {}
    for dark, block in blocks:
        if not dark or theme == "dark":
            colors.update(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    return colors


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(front: str, back: str) -> float:
    light, dark = sorted((luminance(front), luminance(back)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("front", "back", "least"), [(*pair, 4.5) for pair in TEXT] + [(*pair, 3.0) for pair in MARKS])
def test_contrast(theme: str, front: str, back: str, least: float) -> None:
    colors = read_colors(theme)
    assert contrast(colors[front], colors[back]) >= least


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_zero_of_one_run_is_no_large_ratio(theme: str) -> None:
    """Told apart by lightness alone: under deuteranopia white and the pale end of teal were one colour."""
    [ends] = re.findall(rf'{theme}: \["(#\w+)",.*"(#\w+)"\]', COLORS)
    for end in ends:
        assert contrast(read_colors(theme)["gone"], end) >= 1.6


@pytest.mark.parametrize(
    ("ink", "ground"),
    [("#212121", "#ffffff"), ("#212121", "#f5f5f5"), ("#e0e0e0", "#111111"), ("#cccccc", "#1f1f1f")],
    ids=["JupyterLab", "its even rows", "JupyterLab, dark", "VS Code, dark"],
)
@pytest.mark.parametrize("name", ["red", "yellow", "green", "cyan"])
def test_contrast_in_notebooks(name: str, ink: str, ground: str) -> None:
    """Colours are mixed with that of the text, and what has one is not dimmed besides."""
    page = NotebookPage()
    page.console.print(Text("text", style=f"{name} dim"))
    markup = page.as_html()
    found = re.search(r"color:color-mix\(in srgb, (#[0-9a-f]{6}) (\d+)%, currentColor\)", markup)
    assert found
    assert "opacity" not in markup
    share = int(found[2]) / 100
    pairs = [(int(found[1][i : i + 2], 16), int(ink[i : i + 2], 16)) for i in (1, 3, 5)]
    mixed = "#" + "".join(f"{round(share * one + (1 - share) * other):02x}" for one, other in pairs)
    assert contrast(mixed, ground) >= 4.5
