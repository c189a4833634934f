"""The run that a command is about: the one that was named, or the newest. Loads without torch, and within a moment."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from retrograd.core.addresses import is_remote, open_folder
from retrograd.core.amounts import count_of, list_names
from retrograd.core.errors import NotARunError
from retrograd.core.foreign.text import show_plainly
from retrograd.core.limits import LIMITS
from retrograd.core.notices import print_text, say, waiting
from retrograd.core.runs.layout import find_latest, find_rank_folders, is_run, list_runs_in

if TYPE_CHECKING:
    from retrograd.core.runs.reader import Run


@contextlib.contextmanager
def reading(given: Path | None) -> Iterator[Run]:
    """Open the run that was named, or the newest; of one that takes seconds it is said how far it is, and how fast.

    Raises:
        NotARunError, DamagedRunError: there is none, or it cannot be read.
    """
    from retrograd.core.runs.reader import open_run

    path = choose_run(given)
    with waiting(f"opening {path}"):
        run = open_run(path)
        rows = run.history.rows
        what = f"{count_of(rows.count, 'row')} in {count_of(len(rows.parts), 'file')} of {path}"
    with waiting(f"reading {what}", is_long=rows.count > LIMITS.explained_rows, follows=True):
        yield run


def is_command(words: Sequence[str]) -> bool:
    """Return whether this is a command to be run, not the folder of a run."""
    if not words or is_run(open_folder(words[0])):
        return False
    first = words[0]
    return first == "-m" or first.endswith(".py") or Path(first, "__main__.py").is_file() or bool(shutil.which(first))


def check_run(given: Path | None, *, can_be_parent: bool = True) -> None:
    """Check that a folder is a run, or holds runs; nothing is asked of a store, and None is no folder.

    Raises:
        NotARunError: it is neither.
    """
    if given is None or is_remote(given):
        return
    if not (can_be_parent and list_runs_in(given)):
        find_rank_folders(open_folder(given))


def check_is_no_script(given: Path | None) -> None:
    """Refuse what is no run where a script has that name and ``.py``: that was meant.

    Raises:
        NotARunError: naming the script.
    """
    script = Path(f"{given}.py")
    if given is not None and not is_run(given) and script.is_file():
        raise NotARunError(
            f"{str(given)!r} is not a run.",
            repair=f"`retrograd explain {shlex.quote(str(script))}` runs the script of that name, and explains it.",
        )


def choose_run(given: Path | None) -> Path:
    """The run that was named; the newest of a folder of runs, or of where runs are recorded, which is then said.

    Raises:
        NotARunError: there is none.
    """
    if given is None:
        newest = find_latest()
        say(f"the newest run: {newest}")
        return newest
    runs = [] if is_remote(given) or is_run(given) else list_runs_in(given)
    if not runs:
        return given
    newest = find_latest(given)
    others = [run.name for run in runs if run != newest]
    see = f"name one, or see `retrograd ls {shlex.quote(str(given))}`"
    beside = f", beside {list_names(others)}: {see}" if others else ""
    say(show_plainly(f"the newest of {count_of(len(runs), 'run')} in {given}: {newest}{beside}", keep=""))
    return newest


def tell_page(path: Path, *, is_opened: bool, file: TextIO | None = None) -> None:
    """Print which file was written, and show it in the browser if that is wanted."""
    print_text(str(path), file=file)
    if is_opened:
        show_in_browser(path.absolute().as_uri(), path)


def show_in_browser(address: str, file: Path) -> None:
    """Show a file, which may lead to an address, in the browser of whoever sits here, or say where the page is."""
    if not webbrowser.open(file.absolute().as_uri()):
        say(f"no browser was found; open {address}")
