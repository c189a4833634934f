"""Histograms of activations around zero, at looks: whether they are one-sided or have two modes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.groups import gather
from retrograd.core.history.data_facts import SIGNED_BINS, SIGNED_WIDTH, SignedHistogram
from retrograd.core.history.fact import NOW, tell_number
from retrograd.core.history.sink import Moment
from retrograd.core.hooks.dispatch import carry_out_unseen, without_graph
from retrograd.core.hooks.engine import grad_enabled
from retrograd.core.hooks.module import is_watched, unwatch_forward, watch_forward
from retrograd.core.hooks.names import walk_modules
from retrograd.core.hooks.nested import Keys
from retrograd.core.identities import IdentityDict
from retrograd.core.recording.deliveries import Arrays
from retrograd.core.recording.fact_source import EVERY, FactHost, FactSource
from retrograd.core.sites.site import Site
from retrograd.explaining.facts.output_tap import OutputTap, Switch
from retrograd.explaining.facts.value_look import is_readable

_MOST_WATCHED, _MOST_TENSORS, _MOST_ELEMENTS = 256, 2, 1 << 13
"""Modules, those without parts first; tensors of an output; elements of a tensor."""

_AT_ONCE = 1 << 18
"""Elements that are counted at once, which takes some thirty bytes each."""

_PER_LOOK = 32
"""Modules for which every 128th recorded step is a look; of twice as many every 256th is one."""


class SignedLooks(FactSource):
    """Counts the elements of outputs of modules in bins around zero, at looks in training."""

    rests = True

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._switch = Switch()
        self._taps: IdentityDict[nn.Module, OutputTap] = IdentityDict()
        self._moment = NOW
        self._held: dict[str, tuple[int, Tensor]] = {}
        self._seen = -1

    def model_added(self, name: str, model: nn.Module) -> None:
        """Watch those of its modules whose outputs are recorded: others get no tap, in compiled code above all."""
        entries = [each for each in walk_modules(name, model) if is_watched(each.tapped)]
        for entry in sorted(entries, key=lambda each: bool(each.module._modules)):
            if entry.is_called and len(self._taps) < _MOST_WATCHED and entry.tapped not in self._taps:
                self._taps[entry.tapped] = tap = OutputTap(self._switch, partial(self._see, entry.path))
                watch_forward(entry.tapped, tap)

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """Count, if it is time."""
        recorded = self.host.recorded
        every = EVERY * -(-len(self._taps) // _PER_LOOK)
        is_time = self.host.is_look and (recorded <= EVERY or recorded % every == 0)
        self._switch.awake = is_time and recorded != self._seen and grad_enabled() and model.training
        if self._switch.awake:
            self._moment = self.host.now

    def forward_ends(self, model: nn.Module, output: Any, failed: bool) -> None:
        """Stop counting."""
        if self._switch.awake:
            self._switch.awake = False

    def update_ends(self, optimizer: Any) -> None:
        """Of each look the first micro-batch is counted."""
        if self._held:
            self._seen = self.host.recorded

    def _see(self, path: str, tensors: Sequence[tuple[Keys, Tensor]]) -> None:
        for keys, tensor in tensors[:_MOST_TENSORS]:
            site = str(Site(path, ("output", *keys)))
            if site not in self._held and is_readable(tensor) and tensor.is_floating_point():
                sample = carry_out_unseen(partial(_sample, without_graph(tensor)))
                self._held[site] = tensor.numel(), sample

    def drain(self) -> None:
        """Count, many samples of one size together, and record it."""
        held, self._held = self._held, {}
        alike = gather(((sample.device, sample.dtype, len(sample)), site) for site, (_, sample) in held.items())
        for (_, _, size), sites in alike.items():
            most = max(_AT_ONCE // size, 1)
            for some in (sites[first : first + most] for first in range(0, len(sites), most)):
                sizes = [(site, held[site][0]) for site in some]
                bounds, counts = carry_out_unseen(partial(_count, [held[site][1] for site in some]))
                self.host.deliveries.add([bounds, counts], partial(self._note, sizes, self._moment))

    def _note(self, sizes: Sequence[tuple[str, int]], moment: Moment, arrays: Arrays) -> None:
        bounds, counts = (array.tolist() for array in arrays)
        rows = [_tell(*size, *each) for size, *each in zip(sizes, bounds, counts, strict=True)]
        self.host.note_many(SignedHistogram, "", {}, ("name", "value", "elements", "counts"), rows, moment)

    def end(self) -> None:
        """Take all hooks away."""
        for module, tap in list(self._taps.items()):
            unwatch_forward(module, tap)
        self._taps.clear()
        self._held.clear()


def _tell(site: str, elements: int, bound: float, counts: list[int]) -> str:
    return f"[{json.dumps(site)},{tell_number(bound)},{elements},{str(counts).replace(' ', '')}]"


def _sample(tensor: Tensor) -> Tensor:
    """Elements of a tensor as they are now, spread evenly over it; float32, or float64 where it is."""
    stride = -(-tensor.numel() // _MOST_ELEMENTS)
    while math.gcd(stride, tensor.numel()) > 1:  # a stride without a divisor in common meets all channels
        stride += 1
    values = tensor.reshape(-1)[::stride] if stride > 1 else tensor
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return values.to(dtype, copy=True, memory_format=torch.contiguous_format).view(-1)


def _count(samples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Count the elements of samples. Nothing waits for the device.

    Args:
        samples: of one size, type and device, ``[elements]`` each.

    Returns:
        The bound of each, float32, and its counts, int32, ``[samples, 35]``: below the bound, in each bin, at it and
        above, not finite.
    """
    values, places = torch.stack(list(samples)), SIGNED_BINS + 3
    is_finite = values.isfinite()
    finite = torch.where(is_finite, values, 0)
    largest = finite.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    mean = (finite / largest).square().sum(1, keepdim=True) / is_finite.sum(1, keepdim=True).clamp_min(1)
    bound = (SIGNED_WIDTH * largest * mean.sqrt()).float().clamp_max(torch.finfo(torch.float32).max)
    edges = bound * torch.linspace(-1, 1, SIGNED_BINS + 1, device=values.device)
    place = torch.searchsorted(edges.to(values.dtype), values, right=True)
    place = torch.where(is_finite, place, places - 1)
    place += places * torch.arange(len(values), device=values.device)[:, None]
    counts = torch.zeros(len(values) * places, dtype=torch.int32, device=values.device)
    counts.index_add_(0, place.view(-1), torch.ones_like(place, dtype=torch.int32).view(-1))
    return bound.view(-1), counts.view(-1, places)
