"""What extracting features costs, and what the early end saves: CPU time against that of the bare forward.

    python benchmarks/features.py --rounds 15 --markdown

``interleaved.py`` says how it is measured. Both nets are in ``eval`` mode and run without grad. Half-way is the output
of the half-way block, behind which the forward may end; the last is the output of the last block, before the head.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from contenders import Attached, Contender, Group
from interleaved import measure_group, print_table
from nets import GPT2, RESNETS, Net, ResNet, make_gpt2, make_resnet

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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one measurement")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--markdown", action="store_true", help="print the table of README.md")
    parser.add_argument("--json", action="store_true", help="print the measures as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    group = Group({name: CONTENDERS[name] for name in arguments.only}, bare_forward)
    measures = [
        measure
        for net in arguments.nets
        for measure in measure_group(net, NETS[net], group, arguments.rounds, arguments.seconds)
    ]
    if arguments.json:
        print(json.dumps([asdict(measure) for measure in measures], indent=1))
    else:
        print_table(measures, arguments.nets, arguments.markdown)


if __name__ == "__main__":
    main()
