"""Places where saved tensors wait, to be compared: plain autograd, what torch and its documentation offer, and ours.

A contender is a context manager: given a net, it attaches, yields what to measure, and leaves the net as it was.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from device import ON_DEVICE, cached_bytes, release_pinned
from nets import Block, Bottleneck, Net
from retrograd.memory.budget.planned import Planned
from retrograd.memory.policies.cpu import Cpu
from retrograd.memory.policies.disk import Disk
from retrograd.memory.policies.lossless import Lossless
from retrograd.memory.policies.policy import AsIs
from retrograd.memory.policies.precision import Bfloat16, EightBit
from retrograd.memory.policies.recompute import Recompute
from retrograd.memory.saved.keeping import Policies, keep_saved

BLOCKS = (Bottleneck, Block)


class Attached(NamedTuple):
    """What is measured: ``around`` the forward and backward of a step; ``settle`` ends what goes on behind them."""

    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    settle: Callable[[], object] = lambda: None
    cached: Callable[[], int] = lambda: 0


Contender = Callable[[Net], AbstractContextManager[Attached]]


# ---- what torch and its documentation offer -------------------------------------------------------------------


def nothing(net: Net) -> AbstractContextManager[Attached]:
    return nullcontext(Attached())


@contextmanager
def on_cpu(net: Net) -> Iterator[Attached]:
    release_pinned()
    try:
        yield Attached(lambda: save_on_cpu(pin_memory=ON_DEVICE))
    finally:
        net.model.zero_grad(set_to_none=True)
        release_pinned()


@contextmanager
def checkpointed_blocks(net: Net) -> Iterator[Attached]:
    blocks = [module for module in net.model.modules() if isinstance(module, BLOCKS)]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    try:
        yield Attached()
    finally:
        for block in blocks:
            del block.forward


def torchtune_offloader(net: Net) -> AbstractContextManager[Attached]:
    """As its recipes do: one for all steps, entered for each forward."""
    training = importlib.import_module("torchtune.training")
    offloader = training.OffloadActivations(use_pin_memory=True, use_streams=True)
    return nullcontext(Attached(lambda: offloader))


class SelfDeletingFile:
    """As in torch's tutorial on hooks for saved tensors."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __del__(self) -> None:
        Path(self.name).unlink()


@contextmanager
def one_file_each(net: Net) -> Iterator[Attached]:
    with tempfile.TemporaryDirectory() as folder:

        def pack(tensor: Tensor) -> SelfDeletingFile:
            file = SelfDeletingFile(str(Path(folder) / str(uuid4())))
            torch.save(tensor, file.name)
            return file

        def cached() -> int:
            return sum(cached_bytes(path) for path in Path(folder).iterdir())

        yield Attached(lambda: saved_tensors_hooks(pack, lambda file: torch.load(file.name)), cached=cached)


# ---- ours -----------------------------------------------------------------------------------------------------


def kept(make: Callable[[], Policies]) -> Contender:
    @contextmanager
    def attach(net: Net) -> Iterator[Attached]:
        policy = make()
        with keep_saved(net.model, policy):
            if isinstance(policy, Disk):
                yield Attached(settle=policy.flush, cached=lambda: cached_bytes(spill_path(policy)))
            else:
                yield Attached()

    return attach


def spill_path(disk: Disk) -> Path:
    """The file without a name, as this process sees it."""
    spill = disk._spill
    return Path("/proc/self/fd") / str(spill.file._descriptor if spill else -1)


def budgeted(policy: Planned) -> Contender:
    """The loss saves too, so it is for everything. The policy is the same in all rounds, and so is its plan."""

    @contextmanager
    def attach(net: Net) -> Iterator[Attached]:
        with keep_saved(None, policy):
            yield Attached()

    return attach


CONTENDERS: dict[str, Contender] = {
    "nothing (the noise)": nothing,
    "save_on_cpu": on_cpu,
    "torch.utils.checkpoint, each block": checkpointed_blocks,
    "one file for each tensor": one_file_each,
    "**keep**": kept(AsIs),
    "**disk**": kept(Disk),
    "**lossless**": kept(Lossless),
    "**bf16**": kept(Bfloat16),
    "**8 bits**": kept(EightBit),
    "**recompute, each block**": kept(lambda: {lambda candidate: isinstance(candidate.module, BLOCKS): Recompute()}),
}
if ON_DEVICE:
    for to_disk in ("one file for each tensor", "**disk**"):  # tens of GB a step
        del CONTENDERS[to_disk]
    CONTENDERS["**cpu**"] = kept(Cpu)
    if importlib.util.find_spec("torchtune") is not None:
        CONTENDERS["torchtune's offloader"] = torchtune_offloader
