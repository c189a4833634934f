"""Text for a terminal: tables, curves in one line, and names and numbers short enough for it."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TextIO, cast

import numpy as np

from retrograd.core.amounts import show_bytes
from retrograd.core.foreign.text import show_plainly
from retrograd.core.notices import end_waiting, fit_text
from retrograd.core.randomness import random_kept
from retrograd.core.views.downsample import FloatArray, reduce_columns

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


PIPED_WIDTH = 10_000  # nothing is cut or wrapped for a program that reads the output


P = ParamSpec("P")


def giving_text(show: Callable[P, None]) -> Callable[P, str]:
    """Turn a function that prints something into one that returns its text: plain, and nothing is cut.

    Args:
        show: takes ``file``, where to print, besides its data. The new function takes the same arguments without it.
    """

    @functools.wraps(show)
    def give(*args: P.args, **options: P.kwargs) -> str:
        page = io.StringIO()
        show(*args, **{**options, "file": page})  # type: ignore[arg-type]
        return page.getvalue()

    give.__name__ = give.__qualname__ = show.__name__.replace("print_", "format_")
    give.__doc__ = f"Return the text that :func:`{show.__name__}` prints; takes the same arguments without ``file``."
    return give


class _FittingFile:
    """A file for rich, which knows no encoding, and fills each line of a table up to its width.

    Args:
        file: where to write; it is asked for everything else.
        is_piped: leave out blanks at the ends of lines.
    """

    def __init__(self, file: TextIO, *, is_piped: bool) -> None:
        self._file = file
        self._is_piped = is_piped

    def write(self, text: str) -> None:
        if self._is_piped:
            text = "\n".join(line.rstrip(" ") for line in text.split("\n"))
        self._file.write(fit_text(text, self._file))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class ConsoleFile(io.StringIO):
    """A file with a console of its own, which makes something else than text of what is printed to it."""

    console: Console


def open_console(file: TextIO | None = None) -> Console:
    """A console that colours for a terminal and prints plainly, uncut, for anything else."""
    if isinstance(file, ConsoleFile):
        return file.console
    end_waiting()
    with random_kept():
        from rich.console import Console
    file = sys.stdout if file is None else file
    piped = not file.isatty()
    written = cast("TextIO", _FittingFile(file, is_piped=piped))
    width = PIPED_WIDTH if piped else None
    # what rich does for Jupyter leaves the file empty
    console = Console(file=written, width=width, highlight=False, markup=False, emoji=False, force_jupyter=False)
    console.on_broken_pipe = _raise_again  # type: ignore[method-assign]  # rich would end the process with 1
    return console


def _raise_again() -> None:
    error = sys.exc_info()[1]
    assert error is not None
    raise error


def make_table(console: Console, columns: Mapping[str, str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """A table: plain and uncut for a pipe, as wide as the window in a terminal.

    Args:
        console: where it will be printed.
        columns: titles and kinds: a "name" wraps in a terminal, a "number" is aligned right, a "text" does neither.
        rows: a cell for each column; strings may come from a run, and are made safe to print.
    """
    if "rich.table" not in sys.modules:
        with random_kept():  # nowhere else: a cell that follows a recording must not set back what training has drawn
            import_module("rich.table")
    from rich import box
    from rich.table import Table
    from rich.text import Text

    is_seen = console.is_terminal
    ruled = box.SIMPLE_HEAD if is_seen else None
    table = Table(box=ruled, pad_edge=False, show_edge=False, collapse_padding=is_seen, header_style="bold")
    for title, kind in columns.items():
        if kind == "name":
            table.add_column(title, overflow="fold" if is_seen else "ignore", no_wrap=not is_seen)
        else:
            table.add_column(title, justify="right" if kind == "number" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(print_name(console, cell)) if isinstance(cell, str) else cell for cell in row))
    return table


def show_frames(console: Console, frames: Iterable[RenderableType]) -> None:
    """Show frames until they end, or Ctrl-C: each in the place of the one before, or below it for a pipe."""
    with contextlib.suppress(KeyboardInterrupt):
        if not console.is_terminal:
            for frame in frames:
                console.print(frame)
            return
        with random_kept():
            from rich.live import Live
        with Live(console=console, auto_refresh=False) as live:
            for frame in frames:
                live.update(frame, refresh=True)


def can_print(console: Console, text: str) -> bool:
    """Whether the console's encoding has these characters."""
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True


def print_name(console: Console, name: str) -> str:
    """A name from a run in characters that the console has, with none that would steer the terminal."""
    return fit_text(show_plainly(name, keep=""), console.file)


def print_number(value: float) -> str:
    """Three significant digits, or all before the point; a dash for NaN."""
    if math.isnan(value):
        return "-"
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    if 999.5 <= abs(value) < 1e5:
        return f"{value:.0f}"
    return f"{value:.2e}" if abs(value) >= 1e5 or abs(value) < 1e-3 else f"{value:.3g}"


def print_quantity(value: float, unit: str) -> str:
    """A scalar with its unit, bytes in the largest that fits; NaN is printed."""
    if unit == "B" and math.isfinite(value):
        return show_bytes(value)
    return f"{print_loss(value)} {unit}".rstrip()


def print_loss(value: float) -> str:
    """A loss; NaN is printed, for it is what the loss is."""
    return "NaN" if math.isnan(value) else print_number(value)


def print_share(value: float) -> str:
    """A share in per cent, or a dash for NaN."""
    return "-" if math.isnan(value) else f"{100 * value:.1f}%"


BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = "_.-~=+*#"
"""Shown where block elements cannot be printed."""

NOT_RECORDED = " "


def draw_sparkline(values: FloatArray, width: int = 24, *, logarithmic: bool = True, blocks: str = BLOCKS) -> str:
    """Draw numbers as blocks of rising height, at most ``width`` of them.

    A block shows the largest of the numbers that share it. Numbers that are not finite are left out, and so are
    those that are not positive on a logarithmic scale, unless all are zero.

    Args:
        values: shape (n,).
        width: how many characters may be used.
        logarithmic: whether heights are those of the logarithms.
        blocks: characters, from the lowest.
    """
    n = len(values)
    if n == 0:
        return ""
    highest = reduce_columns(np.where(np.isfinite(values), values, np.nan)[None, :], -(-n // width)).high[0]
    if logarithmic and np.nanmax(highest, initial=0.0) > 0:
        highest = np.log(np.where(highest > 0, highest, np.nan))
    return "".join(shade_numbers(highest, blocks))


def shade_numbers(values: FloatArray, shades: str, low: float | None = None, high: float | None = None) -> list[str]:
    """A character for each number: the first of ``shades`` for the lowest, the last for the highest.

    Args:
        values: any numbers; NaN becomes :data:`NOT_RECORDED`.
        shades: characters.
        low: number that the first character stands for; the smallest when left out.
        high: number that the last character stands for; the largest when left out.
    """
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return [NOT_RECORDED] * len(values)
    low = float(known.min()) if low is None else low
    high = float(known.max()) if high is None else high
    span = high - low if high > low else 1.0
    places = np.clip((values - low) / span * len(shades), 0, len(shades) - 1)
    return [NOT_RECORDED if np.isnan(place) else shades[int(place)] for place in places]
