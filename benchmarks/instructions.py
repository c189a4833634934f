"""What recording costs, counted in instructions: the same number on a machine that does other things besides.

    python benchmarks/instructions.py --nets mlp-tiny --markdown
    python benchmarks/instructions.py --only default --after 0 --steps 40      # the first steps of a run

Needs ``valgrind``, under which all takes fifty times as long: some two minutes a row. Each row is run twice, to the
same step and ``--steps`` further; the difference is theirs. A ratio of instructions is no ratio of times, since a miss
of a cache counts as none: it is for holding two versions against each other. What the background thread writes is left
out, which it does by the clock.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import torch

from contenders import Group, list_groups
from nets import NETS
from retrograd.core.limits import LIMITS
from timing import choose, say, show

BARE = "bare"
VALGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=["mlp-tiny"])
    parser.add_argument(
        "--only", nargs="+", default=["retrograd"], metavar="TEXT", help="rows whose name has one of these"
    )
    parser.add_argument("--after", type=int, default=34, help="steps that are made before any is counted")
    parser.add_argument("--steps", type=int, default=24, help="steps that are counted")
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation")
    parser.add_argument("--child", nargs=3, metavar=("NET", "ROW", "GROUP"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        train(*asked.child, asked.after, asked.steps)
    if shutil.which(VALGRIND[0]) is None:
        parser.error("valgrind is not installed: `apt-get install valgrind`")
    print("| | million instructions a step | of the bare step |\n|---|---:|---:|" if asked.markdown else "")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for net in asked.nets:
            for number, group in enumerate(list_groups(asked.after)):
                chosen = choose(group, asked.only)
                if chosen is not None:
                    count(pool, net, number, chosen, asked)


def count(pool: ThreadPoolExecutor, net: str, number: int, group: Group, asked: argparse.Namespace) -> None:
    """Print a row for each contender of a group."""
    names = [BARE, *group.contenders]
    show(f"{net}: {len(names)} rows, two runs each")
    runs = [
        pool.submit(count_instructions, net, name, number, asked.after, steps)
        for name in names
        for steps in (0, asked.steps)
    ]
    found = [run.result() for run in runs]
    bare, *counts = [(end - begin) / asked.steps for begin, end in zip(found[::2], found[1::2], strict=True)]
    for name, each in zip(group.contenders, counts, strict=True):
        cells = f"{net}, {name}", f"{each / 1e6:.2f}", f"{each / bare:.3f}"
        say(f"| {' | '.join(cells)} |" if asked.markdown else f"{cells[0]:60} {cells[1]:>8} {cells[2]:>8}")


def count_instructions(net: str, name: str, number: int, after: int, steps: int) -> int:
    """Instructions of a process that trains for so many steps."""
    child = [sys.executable, __file__, "--child", net, name, str(number), "--after", str(after), "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder:  # the child leaves its run there
        environment = {**os.environ, "PYTHONHASHSEED": "0", "TMPDIR": folder}
        done = subprocess.run([*VALGRIND, *child], env=environment, capture_output=True, text=True, check=True)
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if found is None:
        sys.exit(f"valgrind has counted nothing:\n{done.stderr}")
    return int(found[1].replace(",", ""))


def train(net_name: str, name: str, number: str, after: int, steps: int) -> None:
    """Be such a process; it ends without what follows a recording."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    LIMITS.flush_seconds = 1e6
    net, group = NETS[net_name](), list_groups(after)[int(number)]
    contender = group.bare if name == BARE else group.contenders[name]
    with contender(net) as (step, _):
        for _ in range(steps):
            step()
        os._exit(0)


if __name__ == "__main__":
    main()
