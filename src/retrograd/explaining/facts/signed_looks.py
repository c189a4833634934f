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
                count = partial(_count, without_graph(tensor), _stride_of(tensor))
                self._held[site] = tensor.numel(), carry_out_unseen(count)

    def drain(self) -> None:
        """Record what was counted."""
        held, self._held = self._held, {}
        for sites in gather((counted.device, site) for site, (_, counted) in held.items()).values():
            sizes = [(site, held[site][0]) for site in sites]
            numbers = torch.stack([held[site][1] for site in sites])
            self.host.deliveries.add([numbers], partial(self._note, sizes, self._moment))

    def _note(self, sizes: Sequence[tuple[str, int]], moment: Moment, arrays: Arrays) -> None:
        rows = [_tell(*size, *each) for size, each in zip(sizes, arrays[0].tolist(), strict=True)]
        self.host.note_many(SignedHistogram, "", {}, ("name", "value", "elements", "counts"), rows, moment)

    def end(self) -> None:
        """Take all hooks away."""
        for module, tap in list(self._taps.items()):
            unwatch_forward(module, tap)
        self._taps.clear()
        self._held.clear()


def _tell(site: str, elements: int, bound: float, *counts: float) -> str:
    return f"[{json.dumps(site)},{tell_number(bound)},{elements},[{','.join(str(int(n)) for n in counts)}]]"


def _stride_of(tensor: Tensor) -> int:
    """Every so many elements are counted; a stride without a divisor in common with a dimension meets all channels."""
    elements = tensor.numel()
    stride = -(-elements // _MOST_ELEMENTS)
    while math.gcd(stride, elements) > 1:
        stride += 1
    return stride


def _count(tensor: Tensor, stride: int) -> Tensor:
    """The bound, and counts: below it, in each bin, at it and above, not finite. Nothing waits for the device."""
    values = tensor.reshape(-1)[::stride]
    values = (values if values.dtype == torch.float64 else values.float()).contiguous()
    is_finite = values.isfinite()
    finite = torch.where(is_finite, values, 0)
    largest = finite.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    mean = (finite / largest).square().sum() / is_finite.sum().clamp_min(1)
    bound = (SIGNED_WIDTH * largest * mean.sqrt()).float().clamp_max(torch.finfo(torch.float32).max)
    edges = bound * torch.linspace(-1, 1, SIGNED_BINS + 1, device=values.device)
    place = torch.bucketize(values, edges.to(values.dtype), right=True)
    place = torch.where(is_finite, place, SIGNED_BINS + 2)
    counts = torch.zeros(SIGNED_BINS + 3, dtype=torch.int32, device=values.device)
    counts.index_add_(0, place, torch.ones_like(place, dtype=torch.int32))
    return torch.cat([bound.reshape(1), counts.float()])
