"""What the facts that findings rest on cost: a whole training step recorded by default, with them and without.

    python benchmarks/facts.py --rounds 7 --steps 250
    python benchmarks/facts.py --rounds 7 --steps 1000 --nets mlp-32

Facts are looked at more often in the first steps; so all contenders take the same steps, from the third on.
"""

from __future__ import annotations

import os
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"

from contenders import Group, bare_training, recorded
from nets import make_gpt2, make_mlp
from timing import make_parser, measure_all

NETS = {
    "gpt2-like": make_gpt2,
    "mlp-256": partial(make_mlp, 256, 64),
    "mlp-32": partial(make_mlp, 32, 64),
}


def main() -> None:
    parser = make_parser(__doc__, NETS)
    parser.set_defaults(rounds=7, seconds=0.0, steps=250)
    recording = recorded(training=True, after=0)
    group = Group(
        {"with facts, over without": recording, "not recorded, over without facts": bare_training},
        bare=recorded(training=True, sources=(), after=0),
    )
    measure_all([group], NETS, parser.parse_args())


if __name__ == "__main__":
    main()
