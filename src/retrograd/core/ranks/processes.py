"""In which processes a program runs, and which of them this is."""

from __future__ import annotations

import os

import torch


def count_processes() -> int:
    """In how many processes that have found each other the program runs."""
    return torch.distributed.get_world_size() if is_connected() else 1


def has_other_processes() -> bool:
    """Return whether the program runs in several processes that have found each other."""
    return count_processes() > 1


def own_rank() -> int:
    """The number of this process; before they have found each other, what the launcher says; 0 for a single one."""
    return torch.distributed.get_rank() if is_connected() else int(os.environ.get("RANK", "0"))


def describe_process() -> str | None:
    """Name this process among several, ``"0 of 2"``; None where it is the only one."""
    return f"{own_rank()} of {torch.distributed.get_world_size()}" if has_other_processes() else None


def is_connected() -> bool:
    """Return whether the processes of the program, which may be one alone, have found each other."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
