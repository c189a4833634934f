"""What the facts that findings rest on cost: a whole training step recorded by default, with them and without.

python benchmarks/facts.py --rounds 7 --steps 250
python benchmarks/facts.py --rounds 7 --steps 1000 --nets mlp-32

Facts are looked at more often in the first steps; so all contenders take the same steps, from the third on.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from contenders import Attached, Contender, Group, bare_training, recorded
from interleaved import measure_group, print_table
from nets import Net, make_gpt2, make_mlp
from retrograd.recording.recorder import Recorder

NETS = {
    "gpt2-like": partial(make_gpt2),
    "mlp-256": partial(make_mlp, 256, 64),
    "mlp-32": partial(make_mlp, 32, 64),
}


def without_facts(contender: Contender) -> Contender:
    """The same recording with no source of facts."""

    @contextmanager
    def attach(net: Net) -> Iterator[Attached]:
        options = Recorder.__init__.__kwdefaults__
        default, options["sources"] = options["sources"], ()
        try:
            with contender(net) as attached:
                yield attached
        finally:
            options["sources"] = default

    return attach


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recording = recorded(training=True)
    group = Group(
        {"with facts, over without": recording, "not recorded, over without facts": bare_training},
        bare=without_facts(recording),
    )
    measures = [
        measure
        for name in arguments.nets
        for measure in measure_group(name, NETS[name], group, arguments.rounds, 0.0, arguments.steps)
    ]
    print_table(measures, arguments.nets, arguments.markdown)


if __name__ == "__main__":
    main()
