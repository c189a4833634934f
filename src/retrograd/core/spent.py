"""CPU time that threads of ours spend beside the training thread."""

from __future__ import annotations

import threading
import time


class _Spent(threading.local):
    seconds = 0.0


_total = 0.0
_here = _Spent()


def note_spent() -> None:
    """Add what the thread that asks has spent since it last did; where two do so at once, one may be left out."""
    global _total  # a lock would be held for good in a process that is forked meanwhile
    before, _here.seconds = _here.seconds, time.thread_time()
    _total += _here.seconds - before


def seconds_spent() -> float:
    """What all such threads have spent, in seconds."""
    return _total
