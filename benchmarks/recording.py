"""What recording costs: CPU time of a step against that of the bare step, interleaved in one process.

    python benchmarks/recording.py --rounds 15 --nets gpt2 mlp mlp-tiny --markdown

``interleaved.py`` says how it is measured. What a background thread writes is paid for, and so is the flush at the end
of each measurement. README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch

from contenders import GROUPS
from interleaved import measure_group, print_table
from nets import NETS
from peers import peer_groups


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one measurement")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave other libraries out")
    parser.add_argument("--markdown", action="store_true", help="print the table of the README")
    parser.add_argument("--json", action="store_true", help="print the measures as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    measures = [
        measure
        for group in GROUPS + (peer_groups() if arguments.peers else [])
        for net in arguments.nets
        for measure in measure_group(net, NETS[net], group, arguments.rounds, arguments.seconds)
    ]
    if arguments.json:
        print(json.dumps([asdict(measure) for measure in measures], indent=1))
    else:
        print_table(measures, arguments.nets, arguments.markdown)


if __name__ == "__main__":
    main()
