"""Lines on stderr, what takes long among them, and warnings.

Ours point at the program's line; those of others are printed as often as without us.

Nothing here raises. Loads without torch.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from retrograd.core.errors import RetrogradWarning
from retrograd.core.limits import LIMITS

_OURS = f"{Path(__file__).parents[1]}/"


_SPELLINGS = {"…": "...", "→": "->", "←": "<-", "×": "x", "−": "-", "–": "-", "·": "-", "µ": "u", "≥": ">=", "≤": "<="}
"""How our own signs are written where an encoding does not have them."""


def _spell(error: UnicodeError) -> tuple[str, int]:
    """Replace what cannot be encoded: our own signs by what stands for them, anything else by its escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(_SPELLINGS.get(letter) or ascii(letter)[1:-1] for letter in letters), error.end


def _escape_json(error: UnicodeError) -> tuple[str, int]:
    r"""Replace what cannot be encoded by ``\\uXXXX``, as JSON writes it, so that the value stays the same."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in zip(units[::2], units[1::2], strict=True)), error.end


_SPELLED, _JSON = "retrograd.spelled", "retrograd.json"
codecs.register_error(_SPELLED, _spell)
codecs.register_error(_JSON, _escape_json)


def fit_text(text: str, file: IO[str], *, is_json: bool = False) -> str:
    """Write a text in characters that the encoding of a file has.

    Args:
        text: what is to be printed.
        file: where; one without an encoding holds any text.
        is_json: the text is JSON, and has to stay the same JSON.
    """
    encoding = getattr(file, "encoding", None)
    if not isinstance(encoding, str):
        return text
    with suppress(LookupError):
        return text.encode(encoding, _JSON if is_json else _SPELLED).decode(encoding)
    return text


def print_text(
    text: str, *, file: IO[str] | None = None, end: str = "\n", flush: bool = False, is_json: bool = False
) -> None:
    """Print a text on standard output, or in a file, in characters that it has: whatever prints text of ours does so.

    Args:
        text: what to print.
        file: where to; ``sys.stdout`` when left out. Nothing is printed where there is none.
        end: what follows the text.
        flush: hand it on at once.
        is_json: the text is JSON, and has to stay the same JSON.
    """
    file = sys.stdout if file is None else file
    if file is not None:
        file.write(fit_text(text + end, file, is_json=is_json))  # in one piece: other threads and ranks print too
        if flush:
            file.flush()


def say(words: str) -> None:
    """Print one line on stderr, also where the script has put something else into ``sys.stderr``."""
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):  # nobody listens, or the script has closed it
            print_text(f"retrograd: {words}", file=sys.__stderr__, flush=True)


_apart = threading.Event()
_shown: set[tuple[str, str, int]] = set()


def warn_apart() -> None:
    """From now on warn on stderr, once a line, whatever the program does with its warnings, which are left alone.

    A filter of the program's that is for our warnings alone is followed as ever.
    """
    _apart.set()


def warn(text: str) -> None:
    """Warn, in the middle of a training step.

    Where the program turns warnings into errors, or shows them in a way that fails, it goes to stderr instead: what we
    have to say must not end a step.
    """
    frame = _find_program(sys._getframe(1))
    names = sys.__dict__ if frame is None else frame.f_globals
    file, line = ("sys", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    if _apart.is_set() and not any(each[2] is RetrogradWarning for each in warnings.filters):
        if (text, file, line) in _shown:
            return
        _shown.add((text, file, line))
    else:
        module, registry = names.get("__name__", "<string>"), names.setdefault("__warningregistry__", {})
        with suppress(Exception):
            warnings.warn_explicit(text, RetrogradWarning, file, line, module, registry)
            return
    with suppress(Exception):  # there may be no stderr
        print_text(warnings.formatwarning(text, RetrogradWarning, file, line), file=sys.stderr, end="")


def warn_of_fault(what: str, error: Exception, then: str = "Training goes on.") -> None:
    """Warn of an error of ours: what could not be done, why, and what follows."""
    warn(f"retrograd could not {what}: {type(error).__name__}: {error}. {then}")


# ---- what takes long ----

_far: dict[str, str] = {}
_read = [0]
"""Rows that were read since the line is there."""
_ends: list[Callable[[], None]] = []
"""What takes each line away that is shown."""


def tell_far(**far: str) -> None:
    """Report how far a long task is, as ``part="47 of 132"``, for whoever waits."""
    _far.update(far)


def tell_read(rows: int) -> None:
    """Report that so many rows more were read: a long task says how many that is in a second."""
    _read[0] += rows


@contextmanager
def waiting(words: str, *, is_long: bool = False, follows: bool = False) -> Iterator[None]:
    """Show on a terminal what is under way, how far, how fast and since when, in one line that is gone in the end.

    In a pipe or a file it is a line as soon as it is known to be long, else after a moment, and another one every few
    seconds. Within another one nothing is said.

    Args:
        words: what is under way.
        is_long: it is known to take seconds.
        follows: what is not long says nothing in a pipe, however long it takes.
    """
    if _ends or (follows and not is_long and not is_seen()):
        yield
        return
    is_over = threading.Event()
    _far.clear()
    _read[0] = 0
    if is_long and not is_seen():
        say(words)
    shown = threading.Thread(target=_show_far, args=(words, is_over, is_long), name="retrograd-waiting", daemon=True)

    def end() -> None:
        is_over.set()
        shown.join()

    shown.start()
    _ends.append(end)
    try:
        yield
    finally:
        end()
        _ends.remove(end)


@contextmanager
def showing(words: str) -> Iterator[None]:
    """Show the same where no thread can be started any more: at once, and neither how far nor since when."""
    line = f"retrograd: {words}"[: _find_width() - 1] if is_seen() else ""
    with suppress(OSError, ValueError):
        if line:
            print(line, end="\r", file=sys.__stderr__, flush=True)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            if line:
                print(" " * len(line), end="\r", file=sys.__stderr__, flush=True)


def end_waiting() -> None:
    """Take the line away, before anything else is printed."""
    for end in _ends:
        end()


def is_seen() -> bool:
    """Return whether stderr is a terminal."""
    with suppress(OSError, ValueError, AttributeError):
        return bool(sys.__stderr__ is not None and sys.__stderr__.isatty())
    return False


def _find_width() -> int:
    """Columns of the terminal; 80 where it does not tell."""
    with suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(sys.__stderr__.fileno()).columns or 80  # type: ignore[union-attr]
    return 80


def _show_far(words: str, is_over: threading.Event, is_said: bool) -> None:
    begun, width = time.monotonic(), 0
    is_terminal = is_seen()
    first = [LIMITS.quiet_seconds] if is_terminal or not is_said else []
    pauses = itertools.chain(first, itertools.repeat(LIMITS.blink_seconds if is_terminal else LIMITS.progress_seconds))
    with suppress(OSError, ValueError):  # nobody listens any more
        for pause in pauses:
            if is_over.wait(pause):
                break
            far = _print_far(time.monotonic() - begun)
            if not is_terminal:
                say(f"{words}{far}")
                continue
            room = _find_width() - len(f"retrograd: {far}") - 1
            line = f"retrograd: {words if len(words) <= room else f'{words[: max(room - 1, 0)]}…'}{far}"
            line = fit_text(line, sys.__stderr__)[: _find_width() - 1] if sys.__stderr__ else line
            print(f"\r{line:<{width}}", end="", file=sys.__stderr__, flush=True)
            width = len(line)
        if width:
            print(f"\r{'':<{width}}\r", end="", file=sys.__stderr__, flush=True)


def _print_far(seconds: float) -> str:
    """How far it is, how fast, and since when."""
    far = "".join(f", {name} {text}" for name, text in list(_far.items()))
    rate = _read[0] / max(seconds, 1e-3)
    fast = f", {rate / 1e6:.1f} million rows/s" if rate >= 1e5 else f", {rate:,.0f} rows/s" if rate >= 1 else ""
    return f"{far}{fast}, {seconds:.0f} s"


class Notices:
    """Warnings that are given once each."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def warn_once(self, kind: str, text: str) -> None:
        """Warn, unless something of this kind was said before."""
        if kind not in self._kinds:
            self._kinds.add(kind)
            warn(text)


def _find_program(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is not ours, torch's or of a ``with``."""
    torch: Any = sys.modules.get("torch")
    inner = (_OURS, contextlib.__file__, *((f"{Path(torch.__file__).parent}/",) if torch is not None else ()))
    while frame is not None and frame.f_code.co_filename.startswith(inner):
        frame = frame.f_back
    return frame


_HOOKS = ("_filters_mutated", "_filters_mutated_lock_held")
"""By one of these the module tells, whenever filters change, that all warnings are to be printed once more."""

_threads: Counter[int] = Counter()
_lock = threading.Lock()
_undo: list[Callable[[], None]] = []


@contextmanager
def warnings_kept() -> Iterator[None]:
    """Whatever is imported or run inside of it, a warning that was printed once is not printed again for it.

    Python forgets what it has printed whenever anybody changes its filters, and packages do so when they are loaded.
    Changes that another thread makes meanwhile count as ever.
    """
    thread = threading.get_ident()
    with _lock:
        _threads[thread] += 1
        if not _undo:
            _undo.extend(_make_deaf(name) for name in _HOOKS if hasattr(warnings, name))
    try:
        yield
    finally:
        with _lock:
            _threads[thread] -= 1
            if not _threads[thread]:
                del _threads[thread]
            while _undo and not _threads:
                _undo.pop()()


def _make_deaf(name: str) -> Callable[[], None]:
    original = getattr(warnings, name)

    def hear() -> None:
        if threading.get_ident() not in _threads:
            original()

    def undo() -> None:
        if getattr(warnings, name) is hear:
            setattr(warnings, name, original)

    setattr(warnings, name, hear)
    return undo
