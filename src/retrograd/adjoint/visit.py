"""A call that is about to be made, and what is asked for of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from retrograd.adjoint.by_hand import Adjoint
from retrograd.sites.site import Site


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    Attributes:
        wants: whether a site, for which the derivative could be checked, is selected.
        probes: pairs of random vectors for each call.
        seed: of their generator.
        in_double: whether to compute in float64 where the module can.
        adjoint: what is to be compared instead of the backward; only of the outermost call.
    """

    wants: Callable[[Site, nn.Module], bool]
    probes: int
    seed: int
    in_double: bool
    adjoint: Adjoint | None = None


@dataclass(frozen=True, slots=True)
class Visit:
    """A module that is about to be called.

    Attributes:
        module: a copy of it, as it is now, with the hooks of its user.
        original: the module that it was copied from.
        args: what it is called with.
        kwargs: what it is called with by name.
        caller: its path, and which of its calls this is.
        within: the calls that this one is made in.
    """

    module: nn.Module
    original: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    caller: tuple[str, int]
    within: tuple[tuple[str, int], ...]
