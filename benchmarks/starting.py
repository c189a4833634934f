"""How much later a script begins under ``retrograd``: CPU time of whole processes, over that of the bare interpreter.

    python benchmarks/starting.py --markdown

Every command is run once in each round, with the bare one that it is compared with right before and after it; the
difference is taken to the mean of these two. ``nothing, again`` is the bare interpreter against itself: the noise.
Processes that a command starts and waits for are counted. The folder of bytecode is filled before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMMAND = str(Path(sysconfig.get_path("scripts"), "retrograd"))
WITHOUT = [sys.executable, "nothing.py"]
WITH_TORCH = [sys.executable, "torch_alone.py"]


@dataclass(frozen=True)
class Row:
    """A command, and what it is compared with."""

    name: str
    words: Sequence[str]
    bare: Sequence[str] = tuple(WITHOUT)


ROWS = (
    Row("nothing, again", WITHOUT),
    Row("`import retrograd`", [sys.executable, "imports.py"]),
    Row("`retrograd run` of a script that does nothing", [COMMAND, "run", "nothing.py"]),
    Row("`retrograd run` of one that imports torch", [COMMAND, "run", "torch_alone.py"], tuple(WITH_TORCH)),
    Row("`retrograd --help`", [COMMAND, "--help"]),
    Row("`retrograd run --help`", [COMMAND, "run", "--help"]),
    Row("a command that there is not", [COMMAND, "rnu", "nothing.py"]),
    Row("an option that there is not", [COMMAND, "run", "--site", "x", "nothing.py"]),
    Row("a run that there is not", [COMMAND, "report", "runs/nowhere"]),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", default="", help="measure the rows whose name contains this")
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation")
    asked = parser.parse_args()
    print("| | bare | more CPU time | quartiles |\n|---|---:|---:|---:|" if asked.markdown else "ms of CPU time")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {"nothing": "", "torch_alone": "import torch\n", "imports": "import retrograd\n"}.items():
            Path(folder, f"{name}.py").write_text(text)
        for row in ROWS:
            if asked.only in row.name:
                print(describe(row, *measure(row, asked.rounds, folder), markdown=asked.markdown), flush=True)


def measure(row: Row, rounds: int, folder: str) -> tuple[float, list[float]]:
    """The median of the bare command in milliseconds, and by how much each round of the other one is longer."""
    time_process(row.words, folder)
    bare = [time_process(row.bare, folder)]
    more = []
    for _ in range(rounds):
        taken = time_process(row.words, folder)
        bare.append(time_process(row.bare, folder))
        more.append(taken - (bare[-1] + bare[-2]) / 2)
    return statistics.median(bare), more


def describe(row: Row, bare: float, more: list[float], *, markdown: bool) -> str:
    low, middle, high = statistics.quantiles(more, n=4)
    if markdown:
        return f"| {row.name} | {bare:.0f} ms | {middle:+.0f} ms | {low:+.0f} {high:+.0f} |"
    return f"{row.name:48} {bare:7.1f} {middle:+7.1f} [{low:+.1f} {high:+.1f}]"


def time_process(words: Sequence[str], folder: str) -> float:
    """CPU time of a process and of those that it waits for, in milliseconds."""
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 2):  # 2: it was not to be carried out
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
    return (used.ru_utime + used.ru_stime) * 1000


if __name__ == "__main__":
    main()
