"""What it costs to watch a program that is run to be explained: a whole training step, recorded and watched, bare.

    python benchmarks/explaining.py --rounds 7 --seconds 2 --markdown

``interleaved.py`` says how it is measured. The first steps of a run are dearer, for they are looked at more closely;
``--first N`` measures these: N steps each time, from the first on.
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


def watched(sources: Sequence[MakeSource]) -> Contender:
    """A recording by default with these sources of facts."""

    @contextmanager
    def attach(net: Net) -> Iterator[Attached]:
        options = Recorder.__init__.__kwdefaults__
        default, options["sources"] = options["sources"], tuple(sources)
        try:
            with recorded(training=True)(net) as attached:
                yield attached
        finally:
            options["sources"] = default

    return attach


def main() -> None:
    parser = make_parser(__doc__, EXPLAINED)
    parser.add_argument("--each", action="store_true", help="also each of the watches alone")
    arguments = parser.parse_args()
    contenders = {"retrograd run": watched(SOURCES), "retrograd explain": watched((*SOURCES, *WATCHES))}
    if arguments.each:
        contenders |= {each.__name__: watched((*SOURCES, each)) for each in WATCHES}
    group = Group(contenders, bare=bare_training)
    measures = [
        measure
        for net in arguments.nets
        for measure in measure_group(net, EXPLAINED[net], group, arguments.rounds, arguments.seconds)
    ]
    print_measures(measures, arguments)


if __name__ == "__main__":
    main()
