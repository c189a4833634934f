"""How much, how many and how long: one object, so that whoever wants others sets them in one place.

Here are the limits that decide what is recorded, kept or waited for. A constant of a measure or of an algorithm stands
where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Limits:
    """The limits of this process; read each time they are asked."""

    # ---- what is recorded ----

    calls: int = 100
    """Calls of one module within a micro-batch that get records of their own; later ones merge into the last."""

    forwards: int = 100
    """Calls of models within a micro-batch that are told apart."""

    pending_forwards: int = 8
    """Of so many calls, all over but the last, the last is not waited for either: they are an evaluation."""

    pending_seconds: float = 2.0
    """Seconds after which forwards that wait for no backward are emitted though the step goes on."""

    closed_batches: int = 8
    """Closed micro-batches whose gradients are still known when they come late."""

    copied_bytes: int = 1024**3
    """Bytes of weights that are copied at most while an optimizer steps: 1 GiB. Parameters beyond it are left out."""

    waiting_bytes: int = 64 << 20
    """Bytes of such copies that wait for the next update, at most: what a recording holds between updates."""

    fault_warnings: int = 5
    """Different errors of ours that are warned of; all are counted."""

    end_seconds: float = 5.0
    """For how long the end of a recording waits for another thread, so that nothing is left behind."""

    # ---- programs that are recorded from outside ----

    models: int = 32
    """Models recorded in one process: who makes more of them makes a new one every round."""

    other_processes: int = 8
    """Processes beside the history of a run that are explained with it."""

    rows_at_end: int = 16_000_000
    """Rows of a run that is explained when its program has ended: about ten seconds of work."""

    verdict_seconds: float = 60.0
    """For how long a program that has ended is held up at most."""

    mirror_seconds: float = 60.0
    """The same for its mirror: where this process is all that keeps a container, it is to be told the last of it."""

    page_seconds: float = 10.0
    """For how long a page is still answered when the program is over: it asks for the end, and for the findings."""

    page_pause: float = 0.5
    """Seconds between two looks whether that program lives."""

    # ---- what is shown at a terminal ----

    quiet_seconds: float = 0.5
    """Seconds until somebody at a terminal is told what is under way."""

    blink_seconds: float = 0.2
    """And from one look at it to the next."""

    quiet_check_seconds: float = 2.0
    """Seconds until a check of a backward tells how far it is."""

    # ---- what follows a run from a thread of its own ----

    look_share: float = 0.1
    """Of the time of one processor, what samples may take: after an expensive one the pause is longer."""

    last_look_seconds: float = 60.0
    """For how long the last look holds up whoever ends it."""

    # ---- passes that are stopped ----

    interrupt_seconds: float = 0.1
    """Seconds after which a thread that waits asks whether it was interrupted; not all systems tell it."""

    abandoned_seconds: float = 5.0
    """For how long a stepper which nobody holds any more waits for a node to come to its end."""

    # ---- files and budgets ----

    shard_bytes: int = 64 << 20
    """Bytes after which a file of features is written: what a killed process has to do again."""

    shard_seconds: float = 60.0
    """Or so many seconds after the last one."""

    measured_passes: int = 32
    """Passes in which it is tried what can be recomputed. A program of which no two passes are alike is not held up for
    good."""

    plans: int = 16
    """Plans of a budget that are kept: one for each sequence of sizes, such as that of a last, smaller batch."""


LIMITS = Limits()
