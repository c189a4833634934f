"""What rewriting costs: CPU time of a step against that of the same rule written as a bare hook.

    python benchmarks/rewriting.py --rounds 15 --markdown

A rule acts on the gradient of every module's output. By hand it is a ``register_hook`` on the output, set by a forward
hook, and that is what stands between any two contenders here; ``timing.py`` says how it is measured. Then: what a
rule holds that keeps the last gradients of every site, against those gradients themselves.
"""

from __future__ import annotations

import argparse
import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from contenders import Attached, Contender, Group, bare
from nets import NETS, Net
from timing import make_parser, measure_all, show

SITES = "*:output.grad"
MAX_NORM = 1e-3
DECAY = 0.9
LAST = 8

Hook = Callable[[Tensor], Tensor | None]


# ---- the hooks that a person would write ----


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def clip(gradient: Tensor) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_`` clips."""
    norm = torch.linalg.vector_norm(gradient)
    return gradient * torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0)


def make_damping() -> Hook:
    """Never more than the running norm of the gradients before, into which nothing enters that is not finite."""
    kept: dict[str, Tensor] = {}

    def damp(gradient: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(gradient)
        usual = kept.get("norm", norm)
        kept["norm"] = torch.where(torch.isfinite(norm), DECAY * usual + (1 - DECAY) * norm, usual)
        return gradient * torch.clamp(usual / norm, max=1.0)

    return damp


def make_history() -> Hook:
    """Keeps the last gradients and changes none."""
    return deque(maxlen=LAST).append


# ---- the same as rules ----


def halve_by_rule(gradient: Tensor, state: Any) -> Tensor:
    return halve(gradient)


def clip_by_rule(gradient: Tensor, state: Any) -> Tensor:
    return clip(gradient)


def damp_by_rule(gradient: Tensor, state: Any) -> Tensor:
    """With the state as a dict, operation by operation what the hook does."""
    norm = torch.linalg.vector_norm(gradient)
    usual = state.get("norm", norm)
    state.put("norm", torch.where(torch.isfinite(norm), DECAY * usual + (1 - DECAY) * norm, usual))
    return gradient * torch.clamp(usual / norm, max=1.0)


def damp_by_average(gradient: Tensor, state: Any) -> Tensor:
    """With the average that a state has, whose weights are those of Adam's."""
    norm, average = torch.linalg.vector_norm(gradient), state.ema("norm", DECAY)
    usual = norm if average.is_new else average.value
    average.add(norm)
    return gradient * torch.clamp(usual / norm, max=1.0)


def keep_last(gradient: Tensor, state: Any) -> None:
    state.last("gradient", LAST).add(gradient)


# ---- contenders ----


def by_hand(make_hook: Callable[[], Hook]) -> Contender:
    """A hook on the output of each module, set by a forward hook of the module; each has a hook of its own."""

    def set_hook(hook: Hook, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(hook)

    @contextmanager
    def attach(net: Net) -> Iterator[Attached]:
        handles = [module.register_forward_hook(partial(set_hook, make_hook())) for module in net.model.modules()]
        yield Attached(net.step)
        for handle in handles:
            handle.remove()

    return attach


def rewritten(make_rule: Callable[[], Any]) -> Contender:
    """The rule on every output's gradient."""

    @contextmanager
    def attach(net: Net) -> Iterator[Attached]:
        with rg.rewrite(net.model, {SITES: make_rule()}):
            yield Attached(net.step)

    return attach


def compared(name: str, make_hook: Callable[[], Hook], rules: dict[str, Callable[[], Any]]) -> Group:
    """The bare step, a hook by hand and rules, between any two of which stands the hook by hand."""
    hand = by_hand(make_hook)
    contenders = {"nothing attached": bare, "the hook by hand": hand} | {
        f"**{kind}**": rewritten(make_rule) for kind, make_rule in rules.items()
    }
    return Group({f"{name}: {kind}": contender for kind, contender in contenders.items()}, bare=hand)


GROUPS = [
    compared(
        "scale",
        lambda: halve,
        {"the same function as a rule": lambda: halve_by_rule, "rg.rules.Scale": lambda: rg.rules.Scale(0.5)},
    ),
    compared(
        "clip",
        lambda: clip,
        {"the same function as a rule": lambda: clip_by_rule, "rg.rules.ClipNorm": lambda: rg.rules.ClipNorm(MAX_NORM)},
    ),
    compared(
        "damp",
        make_damping,
        {"the same function as a rule": lambda: damp_by_rule, "with state.ema": lambda: damp_by_average},
    ),
    compared("history", make_history, {"state.last": lambda: keep_last}),
]


# ---- what a history holds ----


def live_bytes() -> int:
    """Bytes of all distinct storages of the tensors that are alive."""
    gc.collect()
    storages = [thing.untyped_storage() for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure_history(net: Net) -> tuple[int, int]:
    """What keeping the last gradients adds to the bytes that are alive, and the bytes of those gradients."""
    seen: list[Tensor] = []
    with by_hand(lambda: seen.append)(net) as (step, _):
        step()
    gradients = {gradient.data_ptr(): gradient.nbytes for gradient in seen}
    seen.clear()
    net.step()
    before = live_bytes()
    with rg.rewrite(net.model, {SITES: keep_last}) as rewriting:
        for _ in range(LAST + 3):
            net.step()
        held = live_bytes() - before
        del rewriting
    return held, LAST * sum(gradients.values())


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, NETS)
    parser.add_argument("--quick", action="store_true", help="a first look: three short rounds of the smallest net")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds, arguments.nets = 3, 0.3, ["mlp-tiny"]
    return arguments


def main() -> None:
    arguments = parse_arguments()
    measure_all(GROUPS, NETS, arguments)
    if arguments.json or not any(text in "history" for text in arguments.only):
        return
    for name in arguments.nets:
        show(f"{name}: bytes of a history")
        held, gradients = measure_history(NETS[name]())
        show("")
        print(f"{name}: the last {LAST} gradients are {gradients:,} bytes; held for them: {held:,}")


if __name__ == "__main__":
    main()
