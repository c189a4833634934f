"""What it costs to watch a program that is run to be explained: a whole training step, recorded and watched, bare.

    python benchmarks/explaining.py --rounds 7 --seconds 2 --markdown

``interleaved.py`` says how it is measured. The first steps of a run are dearer, for they are looked at more closely:
steps 0, 1, 2, 4, 8 and so on, later every 128th. ``--after`` says how many are made before it is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"

from contenders import Attached, Contender, Group, bare_training, recorded
from interleaved import measure_group
from nets import NETS, Net, make_resnet
from options import make_parser, print_measures
from retrograd.facts.facts import SOURCES, WATCHES
from retrograd.facts.source import MakeSource
from retrograd.recording.recorder import Recorder

EXPLAINED: dict[str, Callable[[], Net]] = {**NETS, "resnet": partial(make_resnet, batch=2, pixels=64)}


def watched(sources: Sequence[MakeSource], after: int) -> Contender:
    """A recording by default with these sources of facts, that has gone on for so many steps."""

    @contextmanager
    def attach(net: Net) -> Iterator[Attached]:
        options = Recorder.__init__.__kwdefaults__
        default, options["sources"] = options["sources"], tuple(sources)
        try:
            with recorded(training=True)(net) as attached:
                for _ in range(after):
                    attached.step()
                yield attached
        finally:
            options["sources"] = default

    return attach


def main() -> None:
    parser = make_parser(__doc__, EXPLAINED)
    parser.add_argument("--each", action="store_true", help="also each of the watches alone")
    parser.add_argument("--after", type=int, default=130, help="steps that are made before it is measured")
    arguments = parser.parse_args()
    measured = {"retrograd run": SOURCES, "retrograd explain": (*SOURCES, *WATCHES)}
    if arguments.each:
        measured |= {getattr(each, "__name__", ""): (*SOURCES, each) for each in WATCHES}
    contenders = {name: watched(sources, arguments.after) for name, sources in measured.items()}
    group = Group(contenders, bare=bare_training)
    measures = [
        measure
        for net in arguments.nets
        for measure in measure_group(net, EXPLAINED[net], group, arguments.rounds, arguments.seconds)
    ]
    print_measures(measures, arguments)


if __name__ == "__main__":
    main()
