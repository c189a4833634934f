"""The norm of gradients that ``FullyShardedDataParallel`` (FSDP1) hands out in stretches, as if they were whole.

Of a parameter that it has flattened each process has a stretch, or nothing, and nothing leads from there to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.hooks.live_objects import list_instances
from retrograd.core.norms import join_norms
from retrograd.core.ranks.norms import total_norm
from retrograd.core.ranks.placements import is_flattened


class FlatGradients:
    """Gradients of parameters some of which FSDP1 may have flattened."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._groups: list[tuple[Any, set[int]]] = []

    def measure_norm(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """The norm of all gradients, the same in each process; None where no process can have any.

        One collective for each process group that has parameters in stretches, to which all its processes come.
        """
        flattened = [id(each) for each in parameters if is_flattened(each)]
        if not self._known.issuperset(flattened):
            self._known, self._groups = set(flattened), _find_groups(flattened)
        apart = set().union(*(members for _, members in self._groups))
        norms = [self._join(group, [each for each in parameters if id(each) in own]) for group, own in self._groups]
        rest = [each.grad for each in parameters if each.grad is not None and id(each) not in apart]
        if rest:
            norms.append(total_norm(rest))
        return join_norms(norms) if norms else None

    @staticmethod
    def _join(group: Any, parameters: list[Tensor]) -> Tensor:
        gradients = [each.grad for each in parameters if each.grad is not None]  # an empty stretch has none
        square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
        if gradients:
            square += total_norm(gradients).square()
        torch.distributed.all_reduce(square, group=group)
        return square.sqrt()


def _find_groups(flattened: list[int]) -> list[tuple[Any, set[int]]]:
    """Process groups, each with those of the parameters that are in stretches all over it.

    A wrapper leads to its parameters, and they not to it, so all modules of the process are looked at. The groups come
    in the order of the parameters, which all processes share.
    """
    groups: dict[int, tuple[Any, set[int]]] = {}
    for thing in list_instances(nn.Module):
        if type(thing).__name__ != "FullyShardedDataParallel":
            continue
        handle = getattr(thing, "_handle", None)
        if handle is None or not handle.uses_sharded_strategy:  # else each process has the whole
            continue
        parts = handle.flat_param._params if handle._use_orig_params else [handle.flat_param]
        own = {id(each) for each in parts}.intersection(flattened)
        if own:
            group = handle.process_group
            groups.setdefault(id(group), (group, set()))[1].update(own)
    return sorted(groups.values(), key=lambda found: min(flattened.index(each) for each in found[1]))
