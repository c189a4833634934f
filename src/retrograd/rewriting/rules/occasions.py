"""Tensors, or their norms, that a rule would have been given in a run that was recorded, as they came."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrograd.core.errors import NoSuchSiteError, RuleError
from retrograd.core.history.history import History
from retrograd.core.history.kept import Kept
from retrograd.core.history.matrix import compute_statistic
from retrograd.core.norms import join_norms
from retrograd.core.sites.site import Site, name_like, parse_site
from retrograd.rewriting.rules.norm_rule import measure_norm

TOGETHER = "together"
"""What all sites as one vector are called."""


class TensorTime(NamedTuple):
    """When a tensor was seen; these sort as the tensors came.

    ``turn`` is the call of the module, negative for a gradient: a backward pass begins with the last call.
    """

    rank: int
    step: int
    micro: int
    backward: int
    turn: int


@dataclass(frozen=True, slots=True)
class Occasion:
    """A tensor that came to a site.

    Attributes:
        when: the moment.
        site: its site as printed.
        memory: the site that its module's calls share.
        kept: the tensor, if it was kept.
        norm: its norm, if that is all there is.
        value: for a gradient, the activation that belongs to it, if that was asked for and kept.
        inputs: likewise what went into that call, by argument.
    """

    when: TensorTime
    site: str
    memory: str
    kept: Kept | None = None
    norm: float = float("nan")
    value: Kept | None = None
    inputs: Mapping[str, Kept] = field(default_factory=dict)

    def load_norm(self) -> Tensor:
        """The norm, in the precision that a rule sees it in: without dimensions, float32 unless the tensor is wider."""
        return torch.tensor(self.norm, dtype=torch.float32) if self.kept is None else measure_norm(load(self.kept))


def list_norms(history: History, name: str, rule: str) -> list[Occasion]:
    """Every norm that was recorded of a site in training.

    Raises:
        RuleError: if there is none.
    """
    rows = history[name].select(backward=None).rows
    if not len(rows["step"]):
        raise _miss(name, rule, f"record it: rg.record(model, sites={name!r}).")
    norms = compute_statistic(rows, "l2", ())  # of the finite elements, so the others are put back
    norms = np.where(rows["pos_inf"] + rows["neg_inf"] > 0, np.inf, norms)
    norms = np.where(rows["nan"] > 0, np.nan, norms)
    site = parse_site(name)
    columns = (rows[part].tolist() for part in ("rank", "step", "micro", "backward"))
    return [
        Occasion(TensorTime(rank, step, micro, backward, _turn_of(site)), name, str(site.first_call), norm=norm)
        for rank, step, micro, backward, norm in zip(*columns, norms.tolist(), strict=True)
    ]


def list_tensors(
    history: History, name: str, rule: str, *, with_values: bool, with_inputs: bool = False
) -> list[Occasion]:
    """Every tensor that was kept of a site in training.

    Args:
        history: the record.
        name: the site.
        rule: for whom, as an error says it.
        with_values: also find the activations that gradients belong to.
        with_inputs: also find what went into the calls that they belong to.

    Raises:
        RuleError: if none was kept, or an activation or input is missing.
    """
    site = parse_site(name)
    series = history[name]
    if not any(each.phase == "train" for each in series.tensors):
        raise _miss(name, rule, f"record its tensors: rg.record(model, tensors={name!r}).")
    try:
        values = series.value.tensors if with_values else [None] * len(series.tensors)
        inputs = {key: each.tensors for key, each in series.inputs.items()} if with_inputs else {}
    except NoSuchSiteError as error:
        value_name = name_like(site.value, name)
        wanted = [
            name,
            *([value_name] if with_values else []),
            *([f"{site.printed_path}:inputs"] if with_inputs else []),
        ]
        raise _miss(name, rule, f"record its tensors too: rg.record(model, tensors={wanted}).") from error
    return [
        Occasion(
            TensorTime(each.rank, each.step, each.micro, each.backward, _turn_of(site)),
            name,
            str(site.first_call),
            each,
            value=values[place],
            inputs={key: tensors[place] for key, tensors in inputs.items()},
        )
        for place, each in enumerate(series.tensors)
        if each.phase == "train"
    ]


def join_occasions(occasions: Sequence[Occasion]) -> Iterator[Occasion]:
    """All occasions of a step as one, with the norm of all their tensors as one vector.

    Args:
        occasions: in their order.

    Raises:
        RuleError: for a step of several passes.
    """
    for (rank, step), group in itertools.groupby(occasions, lambda each: each.when[:2]):
        parts = list(group)
        if len({(each.when.micro, max(each.when.backward, 0)) for each in parts}) > 1:
            raise RuleError(
                f"Step {step} has several backward passes, and the norm of their sum was not recorded.",
                repair="simulate the rule on each site by itself: leave `together` out.",
                reason="a rule on an optimizer acts on the sum, right before the update.",
            )
        norm = join_norms([each.load_norm() for each in parts]).item()
        when = TensorTime(rank, step, parts[0].when.micro, parts[0].when.backward, 1)
        yield Occasion(when, TOGETHER, TOGETHER, norm=norm)


def load(kept: Kept) -> Tensor:
    """A kept tensor.

    Raises:
        RuleError: if it was changed in place.
    """
    tensor = kept.tensor
    if tensor is None:
        raise RuleError(
            f"The tensor of {kept.site!r} at step {kept.step} was changed in place after it was kept.",
            repair="record it with rg.Keep(…, copy=True).",
        )
    return tensor.detach()


def _turn_of(site: Site) -> int:
    return -site.call if site.quantity == "grad" else site.call


def _miss(name: str, rule: str, repair: str) -> RuleError:
    return RuleError(f"{rule} cannot be simulated on {name!r}: what it needs was not recorded.", repair=repair)
