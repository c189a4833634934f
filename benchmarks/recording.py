"""What recording costs: CPU time of a step against that of the bare step, interleaved in one process.

    python benchmarks/recording.py --rounds 15 --nets gpt2 mlp mlp-tiny --markdown

``timing.py`` says how it is measured. What a background thread writes is paid for, and so is the flush at the end
of each measurement. The first steps of a run are dearer, for they are looked at more closely: steps 0, 1, 2, 4, 8 and
so on, later every 128th. With ``--after 130 --steps 128`` one such look is measured, among the steps that it is for.
README.md says how to read the table.
"""

from __future__ import annotations

from contenders import list_groups
from nets import NETS
from peers import peer_groups
from timing import make_parser, measure_all


def main() -> None:
    parser = make_parser(__doc__, NETS)
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave other libraries out")
    parser.add_argument("--after", type=int, default=3, help="steps that a recording makes before it is measured")
    arguments = parser.parse_args()
    measure_all(list_groups(arguments.after) + (peer_groups() if arguments.peers else []), NETS, arguments)


if __name__ == "__main__":
    main()
