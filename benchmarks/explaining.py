"""What it costs to watch a program that is run to be explained: a whole training step, recorded and watched, bare.

    python benchmarks/explaining.py --rounds 7 --seconds 2 --markdown

``timing.py`` says how it is measured. The first steps of a run are dearer, for they are looked at more closely:
steps 0, 1, 2, 4, 8 and so on, later every 128th. ``--after`` says how many are made before it is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"

from contenders import Group, bare_training, recorded
from nets import NETS, Net, make_resnet
from retrograd.explaining.facts.sources import SOURCES
from retrograd.explaining.facts.watches import WATCHES
from timing import make_parser, measure_all

EXPLAINED: dict[str, Callable[[], Net]] = {**NETS, "resnet": partial(make_resnet, batch=2, pixels=64)}


def main() -> None:
    parser = make_parser(__doc__, EXPLAINED)
    parser.add_argument("--each", action="store_true", help="also each of the watches alone")
    parser.add_argument("--after", type=int, default=130, help="steps that are made before it is measured")
    arguments = parser.parse_args()
    measured = {"retrograd run": SOURCES, "retrograd explain": (*SOURCES, *WATCHES)}
    if arguments.each:
        measured |= {getattr(each, "__name__", ""): (*SOURCES, each) for each in WATCHES}
    contenders = {
        name: recorded(training=True, sources=sources, after=arguments.after) for name, sources in measured.items()
    }
    measure_all([Group(contenders, bare=bare_training)], EXPLAINED, arguments)


if __name__ == "__main__":
    main()
