"""The processes of a trainer that leaves them to torch."""

from __future__ import annotations

from typing import Any

from torch import distributed

from retrograd.integrations.trained_run import Share, keep_own


def share_from_first() -> Share:
    """What gives all processes what the first one has."""
    return _broadcast if _are_several() else keep_own


def wait_for_all() -> None:
    """Wait until all processes have come here."""
    if _are_several():
        distributed.barrier()


def _are_several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _broadcast(value: Any) -> Any:
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]
