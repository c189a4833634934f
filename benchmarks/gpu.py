"""All that has to be seen on a CUDA device, in nine minutes: tests, waits, twins, costs, captures, streams, budgets.

    make gpu                                # or, uninstalled: PYTHONPATH=src python benchmarks/gpu.py
    make gpu ARGS="--only waits capture"    # some of the parts again

Parts run in the order of their worth, but for the last, which takes what time is left. Each has a process and a limit
of its own, so that one that hangs, or spoils the device for its process, costs the others nothing. What a part prints
is in ``OUT/gpu.md`` as it comes, also if all of this is killed. A line that opens with ``holds`` or ``FAILS`` is a
verdict; all others are measurements. At the end the verdicts stand together.

Without a device the same code runs on the CPU with small nets in a minute or two (``--small``), and what only a device
can do says that it was skipped: so no typing error is found on a machine that is lent by the minute.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LEAST = 15
"""Seconds under which no part is begun."""


class Part(NamedTuple):
    """What is run in one process.

    Attributes:
        name: as ``--only`` has it.
        about: one line.
        seconds: its limit.
        command: what follows the interpreter; ``gpu_parts.py NAME`` where it is empty.
        small: what follows it without a device, if that differs.
    """

    name: str
    about: str
    seconds: int
    command: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


def list_gpu_tests() -> tuple[str, ...]:
    """Files with tests of a device; the others may import what is not installed beside it."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text())
    return tuple(str(path.relative_to(ROOT)) for path in files)


PYTEST = (
    *("-m", "pytest", "-m", "gpu", "-q", "-ra", "-p", "no:cacheprovider", "--tb=short", "--import-mode=importlib"),
    *("-o", "addopts=", "-o", "minversion=7", "-W", "default"),  # other versions of what is installed fail no test
)
SAVED = ("saved_tensors.py", "--steps", "2", "--rounds", "2")
ONLY = ("--only", "nothing")
PARTS = (
    Part("build", "compile our C code in place", 45),
    Part("tests", "tests marked gpu", 90, (*PYTEST, *list_gpu_tests())),
    Part("waits", "where a recorded step waits for the device", 35),
    Part("twins", "20 steps watched and not watched, bit for bit: bf16, and fp16 with a GradScaler", 70),
    Part("cost", "wall time of a step over that of the bare step: nets bound by the host, and one by the device", 170),
    Part("capture", "CUDA graphs: a whole step captured by hand, and mode='reduce-overhead'", 55),
    Part("streams", "forwards on side streams, kept tensors", 15),
    Part(
        "budget",
        "ResNet-152, batch 256, TF32: peak and time, bare, and within 15 and 8 GB",
        200,
        (*SAVED, "--minutes", "2.2", "--nets", "resnet152", *ONLY, "budget, at most 15", "budget, at most 8"),
        (*SAVED, "--minutes", "0.1", "--nets", "resnet-small", *ONLY, "budget, at most"),
    ),
)  # fmt: skip


class Report:
    """Prints, and appends the same to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def say(self, text: str) -> None:
        print(text, flush=True)
        with self.path.open("a") as file:
            file.write(f"{text}\n")


def run_part(part: Part, report: Report, seconds: float, *, small: bool) -> tuple[str, list[str]]:
    """Run a part, and say what it prints as it comes.

    Returns:
        How it ended, and its verdicts.
    """
    words = (part.small if small else ()) or part.command or ("gpu_parts.py", part.name, *["--small"] * small)
    where = ROOT if words[0] == "-m" else HERE
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, *words], cwd=where, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        limit = threading.Timer(seconds, kill_group, [process])
        limit.start()
        try:
            verdicts = list(pass_on(process.stdout or (), report))
            code = process.wait()
        finally:
            limit.cancel()
            kill_group(process)  # after Ctrl-C
    if code == -signal.SIGKILL:
        return f"killed, at its limit of {seconds:.0f} s or for memory", verdicts
    return ("done" if code == 0 else f"exit code {code}"), verdicts


def pass_on(lines: Iterable[bytes], report: Report) -> Iterator[str]:
    """Report lines as they come, without progress, which is written over, and yield the verdicts among them."""
    for line in lines:
        text = line.decode(errors="replace").rstrip().rpartition("\r")[2].rstrip()
        if text:
            report.say(text)
        if text.startswith(("holds", "FAILS")):
            yield text


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, with all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def run_all(parts: list[Part], report: Report, minutes: float, *, small: bool) -> bool:
    """Run parts within so many minutes.

    Returns:
        Whether all have ended well and all verdicts hold.
    """
    began = time.monotonic()
    ends: dict[str, str] = {}
    verdicts: dict[str, list[str]] = {}
    for part in parts:
        left = 60 * minutes - (time.monotonic() - began)
        if left < LEAST:
            ends[part.name] = f"not begun: {left:.0f} s were left"
            continue
        report.say(f"\n## {part.name}: {part.about}\n")
        since = time.monotonic()
        end, verdicts[part.name] = run_part(part, report, min(part.seconds, left), small=small)
        ends[part.name] = f"{end}, {time.monotonic() - since:.0f} s"
        report.say(f"\n{part.name}: {ends[part.name]}")
    report.say("\n## Together\n")
    for name, end in ends.items():
        report.say(f"{name}: {end}")
        for verdict in verdicts.get(name, ()):
            report.say(f"    {verdict}")
    failed = [verdict for each in verdicts.values() for verdict in each if verdict.startswith("FAILS")]
    return not failed and all(end.startswith("done") for end in ends.values())


def main() -> None:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder for gpu.md (default: runs/gpu)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together (default: 9)")
    parser.add_argument("--small", action="store_true", help="small nets; always so without a device")
    arguments = parser.parse_args()
    report = Report(arguments.out / "gpu.md")
    small = arguments.small or not torch.cuda.is_available()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device: on the CPU, in small"
    report.say(f"# retrograd on a device\n\n{device}; torch {torch.__version__}, Python {sys.version.split()[0]}")
    parts = [part for part in PARTS if part.name in arguments.only]
    if not run_all(parts, report, arguments.minutes, small=small):
        sys.exit(1)


if __name__ == "__main__":
    main()
