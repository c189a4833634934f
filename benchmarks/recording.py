"""What recording costs: CPU time of a step against that of the bare step, interleaved in one process.

    python benchmarks/recording.py --rounds 15 --nets gpt2 mlp mlp-tiny --markdown

``interleaved.py`` says how it is measured. What a background thread writes is paid for, and so is the flush at the end
of each measurement. README.md says how to read the table.
"""

from __future__ import annotations

import argparse

from contenders import GROUPS
from interleaved import measure_group
from nets import NETS
from options import make_parser, print_measures
from peers import peer_groups


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, NETS)
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave other libraries out")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    measures = [
        measure
        for group in GROUPS + (peer_groups() if arguments.peers else [])
        for net in arguments.nets
        for measure in measure_group(net, NETS[net], group, arguments.rounds, arguments.seconds)
    ]
    print_measures(measures, arguments)


if __name__ == "__main__":
    main()
