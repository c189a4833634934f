"""The ``retrograd`` command: record a training script, and look at what was recorded.

Whoever types ``retrograd run`` waits for what is loaded here before the script begins, so the commands that run a
program are all that is: the others come with ``retrograd.core.cli.commands`` where one of them is meant.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence

from retrograd.core.errors import RetrogradError, RetrogradWarning
from retrograd.core.launch.options import Command
from retrograd.core.launch.parser import parse
from retrograd.core.notices import print_text

_ABOUT = "Record what happens inside loss.backward(), see it, and say what is wrong."

_EXAMPLES = """
examples:
  retrograd run train.py --lr 0.1                record an unmodified script
  retrograd explain                              what is wrong with the newest run, and what to do
  retrograd compare runs/first runs/second       where two runs diverge, and why
  retrograd report runs/train-20250131-120000    one HTML file that shows the whole run
  retrograd serve                                the same page, live, while the newest run trains
  retrograd view runs/train-20250131-120000      a table in the terminal
  retrograd ls                                   all runs below runs/
  retrograd trace train.py --lr 0.1              every node of the first backward passes
  retrograd inventory train.py --lr 0.1          what autograd keeps in one step, and where
  retrograd debug train.py --lr 0.1              stop inside loss.backward(), and look
"""


def main(words: Sequence[str] | None = None) -> int:
    """Carry out a command line.

    Args:
        words: what follows ``retrograd``; that of the process by default.

    Returns:
        The exit code: 0, 1 for a replay that differs or a pass that hangs, or 2 for what cannot be carried out.
        ``run``, ``trace``, ``inventory`` and ``debug`` do not return: the process becomes the command.
    """
    if words is None:
        _print_warnings_plainly()
    try:
        asked = parse(sys.argv[1:] if words is None else words, load_commands, _ABOUT, _EXAMPLES)
        if not asked.runs or asked.reads:
            asked.check()
        if words is None and asked.reads:
            _load_lean_arrow()
        code = asked.carry_out()
        sys.stdout.flush()
    except RetrogradError as error:
        _tell(error)
        return 2
    except MemoryError as error:
        _tell(f"there is too little memory for it{f': {error}' if str(error) else ''}.")
        return 2
    except BrokenPipeError:  # the reader has seen enough, as in `retrograd view RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # die of it, so that a shell script around us stops too
        return 128 + signal.SIGINT
    return code or 0


def load_commands() -> Sequence[type[Command]]:
    """All commands, in the order of the help."""
    from retrograd.core.cli.commands import COMMANDS

    return COMMANDS


def _load_lean_arrow() -> None:
    from retrograd.core.launch.lean import load_lean_arrow

    load_lean_arrow()


def _print_warnings_plainly() -> None:
    """Print our warnings as lines of a command: no line of a program has caused them."""
    usual = warnings.formatwarning

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, RetrogradWarning):
            return _make_line(message)
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning


def _tell(error: RetrogradError | str) -> None:
    print_text(_make_line(error), file=sys.stderr, end="")


def _make_line(told: object) -> str:
    from retrograd.core.foreign.text import show_plainly

    return f"retrograd: {show_plainly(str(told))}\n"
