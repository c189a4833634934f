"""A plan of what a recording would take in, before training starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from retrograd.amounts import count_of, show_bytes
from retrograd.hooks.names import name_models, walk_modules
from retrograd.recording.keep import Keep, find_keep
from retrograd.recording.settings import Settings
from retrograd.sites.pattern import Pattern
from retrograd.statistics.row import BINS, ROW

_BYTES_A_ROW = ROW.itemsize
_BYTES_A_HISTOGRAM = 8 * BINS


@dataclass(frozen=True)
class PlannedSite:
    """A site that would be recorded.

    Attributes:
        name: its printed name.
        kind: the type of the module that has it.
        elements: how many elements it has; None for what is only known once the model runs.
        statistics: it gets a row.
        tensor_bytes: bytes of its tensor a step, where that is kept; None where unknown.
    """

    name: str
    kind: str
    elements: int | None
    statistics: bool
    tensor_bytes: int | None = 0


@dataclass(frozen=True)
class RecordingPlan:
    """A list of what would be recorded; print it.

    Attributes:
        sites: every site that would be.
        memory: bytes of rows that are held while training.
        bytes_per_step: bytes of statistics a recorded step, before compression.
    """

    sites: tuple[PlannedSite, ...]
    memory: int
    bytes_per_step: int

    def __str__(self) -> str:
        width = max((len(site.name) for site in self.sites), default=4)
        lines = [f"{'site':<{width}}  {'module':<20} {'elements':>12}  kept"]
        for site in self.sites:
            elements = "when it runs" if site.elements is None else f"{site.elements:,}"
            kept = "tensor" if site.tensor_bytes != 0 else ""
            kept = f"statistics {kept}".strip() if site.statistics else kept
            lines.append(f"{site.name:<{width}}  {site.kind:<20} {elements:>12}  {kept}")
        held, a_step = show_bytes(self.memory), show_bytes(self.bytes_per_step)
        total = f"{count_of(len(self.sites), 'site')}; statistics: {held} held, at most {a_step} a step"
        tensors = [site.tensor_bytes for site in self.sites if site.tensor_bytes != 0]
        if tensors:
            total += (
                f"; tensors of {count_of(len(tensors), 'site')}, {show_bytes(sum(filter(None, tensors)))} a step known"
            )
        lines.append(total)
        return "\n".join(lines)


def plan_recording(
    model: nn.Module | Mapping[str, nn.Module],
    *,
    sites: Pattern | Iterable[Pattern] | None = None,
    tensors: Keep | Pattern | Iterable[Keep | Pattern] | None = None,
    histogram: bool = True,
) -> RecordingPlan:
    """Tell what :func:`record` would record, given the same arguments, without running the model.

    The shapes of activations are known only once the model runs, and so are the leaves of nested outputs.

    Raises:
        SiteError: for an invalid pattern, or one that matches nothing.
    """
    settings = Settings(sites=sites, tensors=tensors, histogram=histogram)
    entries = [entry for name, each in name_models(model).items() for entry in walk_modules(name, each)]
    candidates = [candidate for entry in entries for candidate in entry.candidates()]
    settings.check(candidates)
    sizes: dict[tuple[int, str], torch.Tensor] = {
        (id(entry.module), name): parameter for entry in entries for name, parameter in entry.parameters
    }
    planned = []
    for candidate in candidates:
        statistics = settings.wants_statistics(candidate)
        keep = find_keep(settings.keeps, candidate)
        if not statistics and keep is None:
            continue
        parameter = sizes.get((id(candidate.module), candidate.site.keys[-1]))
        planned.append(
            PlannedSite(
                name=str(candidate.site),
                kind=type(candidate.module).__name__,
                elements=None if parameter is None else parameter.numel(),
                statistics=statistics,
                tensor_bytes=0 if keep is None else None if parameter is None else parameter.nbytes,
            )
        )
    rows = sum(site.statistics for site in planned)
    size = rows * (_BYTES_A_ROW + (_BYTES_A_HISTOGRAM if histogram else 0))
    return RecordingPlan(tuple(planned), memory=size, bytes_per_step=size)
