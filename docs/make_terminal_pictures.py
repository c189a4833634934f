# ruff: noqa: INP001  # a folder of pages, not a package
"""Draws docs/images/followed.svg and listed.svg: what commands print in a terminal about runs that were just recorded.

.venv/bin/python docs/make_terminal_pictures.py

The runs are of examples/train_digits.py and of two of its sick sisters; the first is looked at while it trains.
"""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PROGRAM = Path(sys.executable).with_name("retrograd")
IMAGES = ROOT / "docs" / "images"
WIDTH, HEIGHT = 80, 40
LONG_ENOUGH = 25  # seconds of training that are followed
_MOVES = re.compile(r"\x1b\[(?:\?25[hl]|\d*A|2K)|\r")


def read_terminal(words: list[str], folder: str, *, until: float | None = None) -> str:
    """What a command writes to a terminal of its own, with its colours; interrupted after some seconds."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    with subprocess.Popen(
        [PROGRAM, *words], cwd=folder, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment
    ) as command:
        os.close(theirs)
        if until is not None:
            time.sleep(until)
            command.send_signal(signal.SIGINT)
        written = b""
        while True:
            try:
                written += os.read(ours, 1 << 16)
            except OSError:  # the end
                break
    os.close(ours)
    return written.decode()


def draw(command: str, text: str, target: Path) -> None:
    """A picture of a terminal in which a command was typed; without fonts from elsewhere."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115, PTH123
    console.print(f"[bold]$[/] {command}")
    console.print(Text.from_ansi(text.strip("\n")))
    console.print()
    drawn = console.export_svg(title="", unique_id=target.stem)
    target.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))


if __name__ == "__main__":
    example = str(ROOT / "examples" / "train_digits.py")
    with tempfile.TemporaryDirectory() as home:
        for name in ("sick_learning_rate", "sick_no_zero_grad"):
            script = str(ROOT / "examples" / f"{name}.py")
            words = [PROGRAM, "run", "-o", f"runs/{name}", script]
            subprocess.run(words, cwd=home, check=False, capture_output=True)
        words = [PROGRAM, "run", "-q", "-o", "runs/digits", example]
        with subprocess.Popen(words, cwd=home, stdout=subprocess.DEVNULL) as training:
            while not list(Path(home, "runs", "digits").glob("rank*/statistics/*.parquet")):
                time.sleep(0.1)
            frames = read_terminal(["view", "--follow", "runs/digits"], home, until=LONG_ENOUGH)
            listed = read_terminal(["ls"], home)
            training.terminate()
    last = _MOVES.sub("", frames[frames.rindex("\x1b[2K", 0, frames.rindex("running")) :])
    draw("retrograd view --follow", last, IMAGES / "followed.svg")
    draw("retrograd ls", _MOVES.sub("", listed), IMAGES / "listed.svg")
