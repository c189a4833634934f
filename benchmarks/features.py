"""What extracting features costs, and what the early end saves: CPU time against that of the bare forward.

    python benchmarks/features.py --rounds 15 --markdown

``timing.py`` says how it is measured. Both nets are in ``eval`` mode and run without grad. Half-way is the output
of the half-way block, behind which the forward may end; the last is the output of the last block, before the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from contenders import Attached, Contender, Group
from nets import GPT2, RESNETS, Net, ResNet, make_gpt2, make_resnet
from timing import make_parser, measure_all

NETS: dict[str, Callable[[], Net]] = {"resnet": make_resnet, "gpt2": make_gpt2}

SITES: dict[type[nn.Module], dict[str, Sequence[str]]] = {
    ResNet: {
        "half-way": ["layer2"],
        "the last": ["layer4"],
        "every block": [
            f"layer{stage}.{block}" for stage, depth in enumerate(RESNETS[50], 1) for block in range(depth)
        ],
    },
    GPT2: {"half-way": ["h.2"], "the last": ["h.5"], "every block": [f"h.{number}" for number in range(6)]},
}
"""Kind of net → what is extracted."""


@contextmanager
def evaluating(net: Net) -> Iterator[None]:
    net.model.eval()
    with torch.no_grad():
        yield
    net.model.train()


@contextmanager
def bare_forward(net: Net) -> Iterator[Attached]:
    with evaluating(net):
        yield Attached(lambda: net.model(net.inputs))


def hooks_by_hand(sites: str) -> Contender:
    """Forward hooks that keep a copy of each output; the forward runs to its end."""

    @contextmanager
    def contender(net: Net) -> Iterator[Attached]:
        features: dict[str, Tensor] = {}

        def keep(path: str) -> Callable[..., None]:
            def see(module: nn.Module, args: Any, output: Tensor) -> None:
                features[path] = output.detach().clone()

            return see

        paths = SITES[type(net.model)][sites]
        handles = [net.model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
        with evaluating(net):
            yield Attached(lambda: net.model(net.inputs))
        for handle in handles:
            handle.remove()

    return contender


def extracting(sites: str, **options: Any) -> Contender:
    @contextmanager
    def contender(net: Net) -> Iterator[Attached]:
        paths = SITES[type(net.model)][sites]
        with evaluating(net):
            yield Attached(lambda: rg.extract(net.model, net.inputs, paths, **options))

    return contender


CONTENDERS: dict[str, Contender] = {
    "nothing attached": bare_forward,
    "half-way: hook by hand": hooks_by_hand("half-way"),
    "half-way: rg.extract": extracting("half-way"),
    "half-way: rg.extract(early_end=False)": extracting("half-way", early_end=False),
    "the last: hook by hand": hooks_by_hand("the last"),
    "the last: rg.extract": extracting("the last"),
    "every block: hooks by hand": hooks_by_hand("every block"),
    "every block: rg.extract": extracting("every block"),
}


if __name__ == "__main__":
    measure_all([Group(CONTENDERS, bare_forward)], NETS, make_parser(__doc__, NETS).parse_args())
