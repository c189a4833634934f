"""Which of several processes this is, where a model is trained in several."""

from __future__ import annotations

import os

import torch


def count_processes() -> int:
    """In how many processes that have found each other the program runs."""
    return torch.distributed.get_world_size() if _is_connected() else 1


def has_other_processes() -> bool:
    """Whether the program runs in several processes that have found each other."""
    return count_processes() > 1


def own_rank() -> int:
    """The number of this process; before they have found each other, what the launcher says; 0 for a single one."""
    return torch.distributed.get_rank() if _is_connected() else int(os.environ.get("RANK", "0"))


def describe_process() -> str | None:
    """Which of several processes this is, ``"0 of 2"``; None where it is the only one."""
    return f"{own_rank()} of {torch.distributed.get_world_size()}" if has_other_processes() else None


def _is_connected() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
