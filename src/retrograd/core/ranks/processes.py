"""In which processes a program runs, and which of them this is. Loads without torch."""

from __future__ import annotations

import os
import sys
from typing import Any


def count_processes() -> int:
    """In how many processes that have found each other the program runs."""
    found = _find_others()
    return 1 if found is None else int(found.get_world_size())


def has_other_processes() -> bool:
    """Return whether the program runs in several processes that have found each other."""
    return count_processes() > 1


def is_one_of_several() -> bool:
    """Return whether the program runs in several processes, whether or not they have found each other by now."""
    started = os.environ.get("WORLD_SIZE", "")
    return has_other_processes() or (started.isdecimal() and int(started) > 1)


def find_rank() -> int | None:
    """Find this process's rank: torch.distributed's, else the launcher's ``RANK``; None where it is not known (yet)."""
    found = _find_others()
    if found is not None:
        return int(found.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def ask_rank() -> int:
    """Find this process's rank, as far as it is known by now; 0 for a single one."""
    return find_rank() or 0


def describe_process() -> str | None:
    """Name this process among several, ``"0 of 2"``; None where it is the only one."""
    return f"{ask_rank()} of {count_processes()}" if has_other_processes() else None


def is_loader_worker() -> bool:
    """Tell whether this process makes batches for another one: what it runs backward is part of no training."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def _find_others() -> Any:
    """``torch.distributed`` where the processes of the program, which may be one alone, have found each other."""
    distributed = sys.modules.get("torch.distributed")  # not imported for this: `retrograd run` does without torch
    is_there = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if is_there else None
