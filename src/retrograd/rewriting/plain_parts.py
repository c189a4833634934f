"""Plain tensors of models under tensor parallelism: which of them are parts of a tensor, and of which one.

``parallelize_module`` hands local parts on as plain tensors unless it is told not to (``use_local_output=False``). A
rule that needs all elements gets the whole where the tensor has just left a ``DTensor``. Further on nothing says how
the parts belong together, nor whether the program has put them together itself: there a warning says so.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from retrograd.core.errors import CannotRewriteError
from retrograd.core.hooks.checkpoints import parts_running
from retrograd.core.hooks.engine import grad_enabled
from retrograd.core.identities import IdentitySet
from retrograd.core.notices import Notices
from retrograd.core.ranks.placements import (
    PlainPlacements,
    PlainShare,
    find_share,
    find_tensor_parallel_ranks,
    is_sharded,
)
from retrograd.core.ranks.processes import has_other_processes


class PlainParts:
    """What is known of the plain tensors of some models.

    Args:
        is_wanted: whether a rule may need all elements of a tensor.

    Attributes:
        is_any: a plain tensor may be a part of one.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self.is_any = False
        self._is_wanted = is_wanted
        self._placements = PlainPlacements(())
        self._seen: IdentitySet[nn.Module] = IdentitySet()
        self._notices = Notices()

    def forward_begins(self, module: nn.Module, arguments: Any) -> None:
        """Find the ranks that share a forward, and remember what a model is called with."""
        if not self._is_wanted or not has_other_processes():
            return
        if module not in self._seen:
            self._seen.add(module)
            self._placements = PlainPlacements(self._placements.ranks or find_tensor_parallel_ranks(module))
            self.is_any = bool(self._placements.ranks)
        self._placements.see_data(arguments)

    def find(self, tensor: Tensor, site: str, known: PlainShare | None, *, is_placed: bool) -> PlainShare | None:
        """What a tensor is a part of, None for a whole.

        Args:
            tensor: an activation.
            site: where it is.
            known: what this has told of the site before.
            is_placed: whether it has told anything.

        Raises:
            CannotRewriteError: nothing says whether it is a part, and it will be computed again with grad, where that
                is known: the rule would do something else the second time.

        Warns:
            UserWarning: once, where it may be a part and nothing says of what.
        """
        if is_sharded(tensor) or isinstance(tensor, nn.Parameter):
            return None
        share = find_share(tensor)
        if share is not None:
            is_cut = any(each.is_shard() for each in share.placements)
            return share if is_cut or not share.keeps_gradient else None
        if known is not None and known.fits(tensor) and not (grad_enabled() and tensor.grad_fn is not None):
            return known
        if is_placed and known is None:
            return None
        placement = self._placements.place(tensor)
        if placement is None and parts_running():
            raise _refuse_unknown(site)
        if placement is None:
            self._notices.warn_once(
                "unplaced",
                f"It is not known whether the tensor at {site} is a whole one: it was computed without grad, and other "
                "processes share the forward. A rule there takes it for a whole one.",
            )
        elif placement.holds == "shard":
            self._notices.warn_once(
                "part",
                f"A rule at {site} needs the whole tensor, and acts on what this process has: that was computed of the "
                "local part of a DTensor, so it is a part too, unless the program has put the parts together itself. "
                "To have the whole, hand the tensor on as a DTensor (use_local_output=False in the plan of "
                "parallelize_module).",
            )
        return None


def _refuse_unknown(site: str) -> CannotRewriteError:
    return CannotRewriteError(
        f"A rule at {site} needs the whole tensor, and it is not known whether this is one.",
        repair="use `checkpoint(…, use_reentrant=False)`; or hand the tensor on as a DTensor (`use_local_output=False` "
        "in the plan of parallelize_module).",
        reason="a reentrant checkpoint computes it without grad first, and other processes share the forward.",
    )


def refuse_part(site: str) -> CannotRewriteError:
    """The error for a rule that needs the whole of what this process has a part of."""
    return CannotRewriteError(
        f"A rule at {site} needs the whole tensor, and this process has a part of it.",
        repair="hand the tensor on as a DTensor (`use_local_output=False` in the plan of parallelize_module); or write "
        "the rule as a class of rg.rules.Rule with `is_elementwise = True`, if each element of its result follows from "
        "that element alone.",
        reason="the program says of its gradient (`grad_placements`) that it lies in another way than the tensor does.",
    )
