"""What the facts that findings rest on cost: a whole training step recorded by default, with them and without.

    python benchmarks/facts.py --rounds 7 --steps 250
    python benchmarks/facts.py --rounds 7 --steps 1000 --nets mlp-32

Facts are looked at more often in the first steps; so all contenders take the same steps, from the third on. Beside it
what those about states, data, terms of losses, zeros and checkpoints add to the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"

from contenders import Attached, Group, bare_training, recorded
from nets import Net, make_gpt2, make_mlp
from retrograd.explaining.facts import operations
from retrograd.explaining.facts.modes import DropoutSource
from retrograd.explaining.facts.recomputations import Recomputations
from retrograd.explaining.facts.softmax_looks import SoftmaxLooks
from retrograd.explaining.facts.sources import SOURCES
from retrograd.explaining.facts.spread_looks import SpreadLooks
from retrograd.explaining.facts.state_changes import StateChanges
from retrograd.explaining.facts.weights import LoadSource
from retrograd.explaining.facts.zero_gradients import ZeroGradients
from timing import make_parser, measure_all

SILENT = (LoadSource, DropoutSource, SpreadLooks, ZeroGradients, StateChanges, Recomputations)
"""Sources for faults that make no number look sick; with these go the looks at targets and at terms of losses."""

NETS = {
    "gpt2-like": make_gpt2,
    "mlp-256": partial(make_mlp, 256, 64),
    "mlp-32": partial(make_mlp, 32, 64),
}


@contextmanager
def record_without_silent(net: Net) -> Iterator[Attached]:
    """A recording with the other facts alone."""
    looks, operations.LOOKS = operations.LOOKS, (SoftmaxLooks,)
    sources = [each for each in SOURCES if each not in SILENT]
    try:
        with recorded(training=True, sources=sources, after=0)(net) as attached:
            yield attached
    finally:
        operations.LOOKS = looks


def main() -> None:
    parser = make_parser(__doc__, NETS)
    parser.set_defaults(rounds=7, seconds=0.0, steps=250)
    recording = recorded(training=True, after=0)
    group = Group(
        {"with facts, over without": recording, "not recorded, over without facts": bare_training},
        bare=recorded(training=True, sources=(), after=0),
    )
    added = Group({"with those of silent faults, over the others": recording}, bare=record_without_silent)
    measure_all([group, added], NETS, parser.parse_args())


if __name__ == "__main__":
    main()
