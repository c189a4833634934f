"""Ways to train that are compared: a bare step, hooks by hand, retrograd.

A contender is a context manager: given a net, it attaches, yields what to measure, and leaves the net as it was.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import retrograd as rg
from nets import Net
from retrograd.core.recording.fact_source import MakeSource
from retrograd.core.recording.recorder import Recorder


class Attached(NamedTuple):
    """What is measured: any number of steps, then ``finish``, which does what has been put off."""

    step: Callable[[], object]
    finish: Callable[[], object] = lambda: None


Contender = Callable[[Net], AbstractContextManager[Attached]]

OUTPUTS = ("*:output", "*:output.grad")


def bare(net: Net) -> AbstractContextManager[Attached]:
    return nullcontext(Attached(net.step))


def bare_training(net: Net) -> AbstractContextManager[Attached]:
    return nullcontext(Attached(net.training_step))


@contextmanager
def hooks_by_hand(net: Net, see: Callable[[Tensor], object]) -> Iterator[Attached]:
    """What ``see`` returns for every output and its gradient, held until the step's end."""
    seen: list[object] = []

    def see_gradient(grad: Tensor) -> None:
        seen.append(see(grad))

    def see_output(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(see(output))
        if output.requires_grad:
            output.register_hook(see_gradient)

    def step() -> None:
        net.step()
        seen.clear()

    handles = [module.register_forward_hook(see_output) for module in net.model.modules()]
    yield Attached(step)
    for handle in handles:
        handle.remove()


def references_by_hand(net: Net) -> AbstractContextManager[Attached]:
    return hooks_by_hand(net, Tensor.detach)


def norms_by_hand(net: Net) -> AbstractContextManager[Attached]:
    return hooks_by_hand(net, lambda tensor: torch.linalg.vector_norm(tensor.detach()))


@contextmanager
def retained_gradients(net: Net) -> Iterator[Attached]:
    """``retain_grad()`` on every output."""
    outputs: list[Tensor] = []

    def see_output(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    def step() -> None:
        net.step()
        outputs.clear()

    handles = [module.register_forward_hook(see_output) for module in net.model.modules()]
    yield Attached(step)
    for handle in handles:
        handle.remove()


@contextmanager
def full_backward_hooks(net: Net) -> Iterator[Attached]:
    """``register_full_backward_hook`` on every module; outputs and their gradients are held."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # the net's input needs no gradient
    seen: list[object] = []

    def step() -> None:
        net.step()
        seen.clear()

    handles = [
        handle
        for module in net.model.modules()
        for handle in (
            module.register_forward_hook(lambda module, args, output: seen.append(output.detach())),
            module.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output)),
        )
    ]
    yield Attached(step)
    for handle in handles:
        handle.remove()


def recorded(
    *, training: bool = False, sources: Sequence[MakeSource] | None = None, after: int = 3, **options: Any
) -> Contender:
    """A recording to a run folder with these options of ``rg.record``.

    Args:
        training: whether every parameter is updated.
        sources: of facts; those of every recording by default.
        after: how many steps are made before any is measured: of the first ones many are looked at for facts, later
            on one of 128 is.
        **options: of ``rg.record``.
    """

    @contextmanager
    def attach(net: Net) -> Iterator[Attached]:
        step = net.training_step if training else net.step
        with (
            noting(sources),
            tempfile.TemporaryDirectory() as folder,
            rg.record(net.model, f"{folder}/run", **options) as recording,
        ):
            for _ in range(after):
                step()
            yield Attached(step, recording.flush)

    return attach


@contextmanager
def noting(sources: Sequence[MakeSource] | None) -> Iterator[None]:
    """Recordings that begin in here have these sources of facts; None for their own."""
    options = Recorder.__init__.__kwdefaults__
    default = options["sources"]
    options["sources"] = default if sources is None else tuple(sources)
    try:
        yield
    finally:
        options["sources"] = default


PLAIN: dict[str, Contender] = {
    "nothing attached": bare,
    "hooks by hand: references": references_by_hand,
    "hooks by hand: one norm": norms_by_hand,
    "retain_grad": retained_gradients,
    "register_full_backward_hook": full_backward_hooks,
}


def list_ours(after: int = 3) -> dict[str, Contender]:
    """Recordings of outputs and their gradients, measured after so many steps."""
    return {
        "retrograd: not scheduled": recorded(after=after, sites=OUTPUTS, schedule=lambda step: False),
        "retrograd: references": recorded(
            after=after, sites=OUTPUTS, tensors=rg.Keep(OUTPUTS, last=1), statistics=False
        ),
        "retrograd: statistics": recorded(after=after, sites=OUTPUTS, histogram=False),
        "retrograd: statistics, histogram": recorded(after=after, sites=OUTPUTS),
        "retrograd: functions, one named": recorded(after=after, sites="*/gelu"),
        "retrograd: functions, all": recorded(after=after, sites="*/*"),
    }


@dataclass(frozen=True)
class Group:
    """Contenders that are interleaved, and the bare step that stands between them."""

    contenders: dict[str, Contender]
    bare: Contender = bare


def list_groups(after: int) -> list[Group]:
    """All that is compared. The second group's steps update every parameter, so that there are updates to record."""
    everything = recorded(training=True, after=after)
    return [
        Group(PLAIN | list_ours(after)),
        Group({"retrograd: all that it records by default": everything}, bare=bare_training),
    ]
