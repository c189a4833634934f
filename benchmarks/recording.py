"""What recording costs: CPU time of a step against that of the bare step, interleaved in one process.

    python benchmarks/recording.py --rounds 15 --nets gpt2 mlp mlp-tiny --markdown

``timing.py`` says how it is measured. What a background thread writes is paid for, and so is the flush at the end
of each measurement. README.md says how to read the table.
"""

from __future__ import annotations

from contenders import GROUPS
from nets import NETS
from peers import peer_groups
from timing import make_parser, measure_all


def main() -> None:
    parser = make_parser(__doc__, NETS)
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave other libraries out")
    arguments = parser.parse_args()
    measure_all(GROUPS + (peer_groups() if arguments.peers else []), NETS, arguments)


if __name__ == "__main__":
    main()
