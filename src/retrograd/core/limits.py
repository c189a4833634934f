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

    full_seconds: float = 60.0
    """For how long ``retrograd run`` records every step, before it keeps to a budget for overhead."""

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

    # ---- what is said while somebody waits ----

    quiet_seconds: float = 0.5
    """Seconds until it is said what is under way."""

    blink_seconds: float = 0.2
    """And at a terminal from one look at it to the next."""

    progress_seconds: float = 5.0
    """In a pipe or a file, from one line to the next."""

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

    # ---- records that are read ----

    shown_sites: int = 40
    """Lines of `retrograd view` on a run of more than ``explained_rows``: a screenful."""

    held_rows: int = 1 << 18
    """Rows of a stored record of which whole columns are held; of a longer one some steps are read at a time."""

    merged_cells: int = 1 << 19
    """Sites times steps that are held once they are merged; a cell takes some 120 bytes."""

    cells_at_once: int = 1 << 18
    """Sites times steps that are merged at one time where all of them are more than are held."""

    rows_at_once: int = 1 << 17
    """Rows of row groups of a file that are read together, as far as they lie beside each other."""

    table_bytes: int = 1_000_000_000
    """Bytes of all rows as one table, such as ``history.to_pandas()``: 1 GB. More of them raise an error."""

    histograms_at_once: int = 1 << 13
    """Histograms that are unpacked, or added up, at one time: each takes some 500 bytes then."""

    held_events: int = 1 << 16
    """Events that are held; of more of them losses and updates are read when they are asked for."""

    open_groups: int = 2048
    """Row groups of all files that are kept open; the footer of each takes some twenty kilobytes."""

    explained_rows: int = 1_000_000
    """Rows of a run that is explained while somebody waits, or anew while it grows: about a second of work."""

    stale_seconds: float = 120.0
    """A run at an address whose process has not told for so long that it runs was killed: there are no locks."""

    listed_bytes: int = 32 << 20
    """Bytes of events of a run whose loss a list of runs draws: about a million steps."""

    list_seconds: float = 0.5
    """For how long the page of a folder waits for losses before it is given those that have been read."""

    # ---- records that are written ----

    flush_seconds: float = 2.0
    """Seconds between two parts that are written, and between two looks at them."""

    fan_in: int = 32
    """Neighbouring part files of one size that become one; see ``core/runs/parts.py``."""

    part_rows: int = 1_000_000
    """Parts larger than this are let be, so that no merge takes long."""

    group_rows: int = 1 << 16
    """Rows that are held in memory, and sorted by site, while parts are merged."""

    site_rows: int = 1 << 14
    """Rows of a row group where a part is sorted by site: what is read of it for one site."""

    compacted_part_rows: int = 1 << 17
    """Rows of a part file of a compacted run."""

    compacted_group_rows: int = 1 << 14
    """Rows of one of its row groups: what is read at least."""

    compacted_cells: int = 1 << 16
    """Rows that are merged at one time by compacting; with its histogram a row takes some 500 bytes."""

    last_words_seconds: float = 60.0
    """How long the end of a run, or a flush, waits for a store; a disk it waits for as long as that takes."""

    git_seconds: float = 5.0
    """For how long git is waited for when a run begins."""

    facts_at_once: int = 64
    """Steps of calls, and tensors looked at, that are noted at one time."""

    facts_seconds: float = 1.0
    """Or what there is of them after this time."""

    memory_seconds: float = 0.2
    """Between two measurements of the memory that is in use."""

    described_optimizers: int = 50
    """Optimizers whose arguments the manifest holds."""

    deliveries_behind: int = 8
    """Times that something is handed over, after which numbers that a device has not sent yet are waited for."""

    early_scalars: int = 1000
    """Scalars that are logged before a recording begins and kept for it, where one is to come."""

    # ---- stores of objects ----

    silence_seconds: float = 60.0
    """Seconds after which a store that has answered nothing at all is not waited for any longer."""

    whole_bytes: int = 16 << 20
    """A file up to this size is fetched in one request."""

    # ---- pages of runs that go on ----

    tool_letters: int = 20_000
    """Letters of JSON that a tool gives to an agent, but for one entry that is longer: some 5,000 tokens."""

    tool_steps: int = 200
    """Steps of a series that it gives."""

    page_columns: int = 1000
    """Columns in which the steps are drawn at first; when there are twice as many, each holds twice as many steps."""

    page_look_seconds: float = 1.0
    """Seconds between two looks at the files, however many pages ask."""

    compared_pause: float = 5.0
    """Seconds after which a page of runs of which one goes on asks whether there is anything new, at least."""

    connections: int = 64
    """Connections that a server of pages has at one time; a new one then takes the place of the oldest that is idle."""

    connection_seconds: float = 60.0
    """For how long a connection may be idle, or an answer may take to be sent."""

    answers_at_once: int = 16
    """Answers that are computed at one time; a browser asks for six, which may all wait for one slow run."""

    answer_cells: int = 1 << 25
    """Numbers of one answer: statistics times sites times columns. A page asks for some 4,000 × 2,000 at most, of two
    or three statistics; a cell of exponents counts as 64."""

    # ---- files and budgets ----

    shard_bytes: int = 64 << 20
    """Bytes of a file of tensors; the next one begins behind it. Of features, what a killed process has to do again."""

    shard_seconds: float = 60.0
    """Or so many seconds after the last one."""

    plans: int = 16
    """Plans of a budget that are kept: one for each sequence of sizes, such as that of a last, smaller batch."""


LIMITS = Limits()
