"""What an inventory of saved tensors costs: CPU time of forward and backward against that of the bare step.

    python benchmarks/inventory.py --rounds 15 --markdown

``interleaved.py`` says how it is measured. Each step has an inventory of its own, and the time that it takes to put
the table together is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

import retrograd as rg
from contenders import Attached, Contender, Group
from interleaved import measure_group
from nets import TRACED, Net, make_resnet
from options import make_parser, print_measures

NETS: dict[str, Callable[[], Net]] = {"ResNet-50, 96 px": make_resnet, **TRACED}


def inventory(*, timed: bool) -> Contender:
    """An inventory of each step."""

    @contextmanager
    def contender(net: Net) -> Iterator[Attached]:
        def step() -> None:
            with rg.take_inventory(net.model, timed=timed):
                net.step()

        yield Attached(step)

    return contender


@contextmanager
def hooks_by_hand(net: Net) -> Iterator[Attached]:
    """Saved-tensor hooks that add up bytes, which is less than an inventory, and switches off a check of torch's."""

    def step() -> None:
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            net.step()

    yield Attached(step)


CONTENDERS: dict[str, Contender] = {
    "inventory": inventory(timed=False),
    "inventory, operations timed": inventory(timed=True),
    "saved-tensor hooks by hand that add up bytes": hooks_by_hand,
}


def main() -> None:
    parser = make_parser(__doc__, NETS)
    arguments = parser.parse_args()
    measures = [
        measure
        for net in arguments.nets
        for measure in measure_group(net, NETS[net], Group(CONTENDERS), arguments.rounds, arguments.seconds)
    ]
    print_measures(measures, arguments)


if __name__ == "__main__":
    main()
