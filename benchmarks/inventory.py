"""What an inventory of saved tensors costs: CPU time of forward and backward against that of the bare step.

    python benchmarks/inventory.py --markdown

``timing.py`` says how it is measured. Each step has an inventory of its own, and the time that it takes to put
the table together is counted. Then inventories of two large nets on the ``meta`` device, which needs no memory, are
held against what saved-tensor hooks count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

import retrograd as rg
from contenders import Attached, Contender, Group
from nets import Net, make_cells, make_gpt2, make_gpt2_medium, make_resnet
from timing import make_parser, measure_all, show

NETS: dict[str, Callable[[], Net]] = {
    "ResNet-50, 96 px": make_resnet,
    "gpt2": make_gpt2,
    "LSTM cell": make_cells,
}
LARGE: dict[str, Callable[[], Net]] = {
    "ResNet-152, 256 images of 224 px": lambda: make_resnet(152, 256, 224),
    "GPT-2 medium, 32 sequences of 1024": make_gpt2_medium,
}


# ---- time -----------------------------------------------------------------------------------------------------


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


# ---- bytes ----------------------------------------------------------------------------------------------------


def count_by_hooks(net: Net) -> tuple[int, int]:
    """Bytes of the memory, and of all tensors, that hooks see being saved; without parameters and buffers."""
    permanent = {tensor.untyped_storage()._cdata for tensor in (*net.model.parameters(), *net.model.buffers())}
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)  # so that no other memory gets its identity
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        net.loss(net.model(net.inputs))
    saved = [tensor for tensor in saved if tensor.untyped_storage()._cdata not in permanent]
    distinct = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in saved)}
    return sum(distinct.values()), sum(tensor.numel() * tensor.element_size() for tensor in saved)


def print_bytes(markdown: bool) -> None:
    """Two counts of the bytes that large nets keep, of each the inventory's and that by hooks."""
    print("| | kept, GB | by hooks | copies of them, GB | by hooks |\n|---|---:|---:|---:|---:|" if markdown else "")
    for name, make in LARGE.items():
        show(name)
        with torch.device("meta"):
            net = make()
            found = rg.take_inventory(net.model, net.inputs, net.loss)
            distinct, asked = count_by_hooks(net)
        show("")
        counts = [f"{count / 1e9:.2f}" for count in (found.resident, distinct, found.asked, asked)]
        if markdown:
            print("|", name, *(f"| {count}" for count in counts), "|")
        else:
            print(f"{name}: {counts[0]} GB kept, by hooks {counts[1]}; copies {counts[2]} GB, by hooks {counts[3]}")


def main() -> None:
    parser = make_parser(__doc__, NETS)
    parser.set_defaults(rounds=5, seconds=0.5)
    arguments = parser.parse_args()
    measure_all([Group(CONTENDERS)], NETS, arguments)
    if not arguments.json:
        print_bytes(arguments.markdown)


if __name__ == "__main__":
    main()
