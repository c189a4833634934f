"""The runs of a folder, each in a line: what its small files tell, so that a thousand runs are listed in a moment."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from retrograd.core.addresses import is_remote
from retrograd.core.errors import DamagedRunError, NotARunError, RunError
from retrograd.core.foreign.text import parse_object, read_json
from retrograd.core.history.sink import UPDATES
from retrograd.core.runs.layout import (
    EVENTS,
    FINDINGS,
    LOCK,
    MANIFEST,
    MERGED,
    RANK_FILE,
    STATISTICS,
    find_rank_folders,
    is_extra,
    is_run,
    is_truncated,
    last_written,
    list_parts,
)
from retrograd.core.runs.lock import is_locked
from retrograd.core.runs.manifest import check_manifest, is_newer
from retrograd.core.runs.settings import Setting, read_settings

if TYPE_CHECKING:
    import pyarrow as pa

_STATUSES = ("failed", "running", "stopped")
"""What is reported of several processes, the first of these that one of them has."""

_LARGEST_FINDINGS = 1 << 24

_AT_ONCE = 16
"""Runs of a store that are asked for at one time."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run, as a list tells it.

    Attributes:
        name: the name of its folder.
        started: when it began, in seconds since the epoch; 0 where that is not known.
        written: when it was last written to.
        last_step: the last step that was made and recorded: that has an update, or where none is known a loss, or
            rows; None where there is none yet.
        status: ``running``, ``finished``, ``failed``, ``stopped``, ``damaged`` where a file of it is torn, or ``newer
            format`` where a later version of retrograd has written it.
        loss: that of the last step that was made, over its micro-batches and ranks, which may be NaN; None where none
            was seen.
        findings: how many are kept, by severity; None where nobody has asked yet.
        lost: how many rows were recorded and could not be written.
        found: names of the detectors of the findings, each once.
        settings: what it was started with, see :func:`retrograd.core.runs.settings.read_settings`.
    """

    name: str
    started: float
    written: float
    last_step: int | None
    status: str
    loss: float | None
    findings: Mapping[str, int] | None
    lost: int = 0
    found: tuple[str, ...] = ()
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def as_facts(self) -> dict[str, Any]:
        """All of it as JSON values; a number that is not finite is text."""
        settings = {name: to_plain(value) for name, value in self.settings.items()}
        return {**asdict(self), "found": list(self.found), "loss": to_plain(self.loss), "settings": settings}

    def as_json(self) -> str:
        """Write it as one line of JSON; a number that is not finite is text."""
        return json.dumps(self.as_facts(), ensure_ascii=False, allow_nan=False)


def to_plain(value: Any) -> Any:
    """A number that is not finite as text, for JSON; all else as it is."""
    return value if not isinstance(value, float) or abs(value) < float("inf") else str(value)


def find_runs(parent: Path) -> list[Path]:
    """The folders in a folder that are runs; of a run, itself.

    Raises:
        NotARunError: there is no such folder.
    """
    if not parent.is_dir():
        raise NotARunError(f"{str(parent)!r} is not a folder.", repair="name the folder that holds the runs.")
    if is_run(parent):
        return [parent if parent.name else parent.absolute()]
    folders = [path for path in sorted(parent.iterdir()) if path.is_dir()]
    return [path for path, is_one in zip(folders, each_run(is_run, folders), strict=True) if is_one]


def each_run(read: Callable[[Path], T], runs: Sequence[Path]) -> list[T]:
    """What a function reads of each run; of a store many at one time, for each answer of it takes a while."""
    if not runs or not is_remote(runs[0]):
        return [read(run) for run in runs]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(read, runs))


def read_line(run: Path) -> RunLine:
    """What the small files of a run tell; one that cannot be read is ``damaged``."""
    try:
        folders = find_rank_folders(run)
        content = read_json(run / MANIFEST) if (run / MANIFEST).exists() else None
        if content is not None and is_newer(content):
            return RunLine(run.name, 0.0, last_written(run), None, "newer format", None, None)
        manifest = {} if content is None else check_manifest(run / MANIFEST, content)
        ranks = [(folder, read_json(folder / RANK_FILE)) for folder in folders if (folder / RANK_FILE).exists()]
        ends = _find_ends([each for each in folders if len(folders) == 1 or not is_extra(each.name)])
        listed = _read_findings(run / FINDINGS)
        rows = max((facts["last_step"] for _, facts in ranks if _is_step(facts.get("last_step"))), default=None)
        return RunLine(
            name=run.name,
            started=_read_time(manifest.get("started")),
            written=last_written(run),
            last_step=next((step for step in (ends.update, ends.step, rows) if step is not None), None),
            status="damaged"
            if any(map(_has_truncated_parts, folders))
            else _find_status([(folder, facts) for folder, facts in ranks if not is_extra(folder.name)]),
            loss=ends.loss,
            findings=None if listed is None else _count_findings(listed),
            lost=sum(_count_lost(facts) for _, facts in ranks),
            found=tuple(dict.fromkeys(name for each in listed or () if (name := str(each.get("detector") or "")))),
            settings=read_settings(manifest),
        )
    except (OSError, ValueError, RunError):
        return RunLine(run.name, 0.0, last_written(run), None, "damaged", None, None)


def _has_truncated_parts(folder: Path) -> bool:
    """Return whether a part file of a rank ends otherwise than a Parquet file does."""
    return any(is_truncated(path) for kind in (STATISTICS, MERGED, EVENTS) for _, path in list_parts(folder / kind))


def _count_lost(facts: Mapping[str, Any]) -> int:
    lost = facts.get("lost")
    rows = lost.get("rows") if isinstance(lost, Mapping) else 0
    return rows if isinstance(rows, int) else 0


def _is_step(told: object) -> bool:
    return isinstance(told, int) and not isinstance(told, bool)


def _read_time(text: object) -> float:
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return dt.datetime.fromisoformat(str(text)).timestamp()
    return 0.0


def _find_status(ranks: Iterable[tuple[Path, Mapping[str, Any]]]) -> str:
    found = {_status_of(folder, facts) for folder, facts in ranks} or {"stopped"}
    return next((status for status in _STATUSES if status in found), "finished")


def _status_of(folder: Path, facts: Mapping[str, Any]) -> str:
    status = str(facts.get("status", "running"))
    is_alive = bool(facts.get("copied")) or is_locked(folder / LOCK)  # a copy tells how it was when it was made
    return "stopped" if status == "running" and not is_alive else status


class _Ends(NamedTuple):
    """The step of a run's last update, the last step up to it that has a loss, and that loss, as in the history."""

    update: int | None
    step: int | None
    loss: float | None


def _find_ends(folders: Sequence[Path]) -> _Ends:
    """Where a run ends, from the last part files of events alone.

    Args:
        folders: of the ranks that are part of the history.
    """
    from retrograd.core.history.events import LossSums, read_losses

    tables = [table for folder in folders for table in _read_last_events(folder)]
    update = max((step for step in map(_find_last_update, tables) if step is not None), default=None)
    found = [read_losses(table) for table in tables]
    last = max((step for losses in found if (step := losses.last(update)) is not None), default=None)
    if last is None:
        return _Ends(update, None, None)
    sums = LossSums()
    for losses in found:
        sums.add(losses.since(last))
    return _Ends(update, last, float(sums.curve.values[0]))


def _find_last_update(table: pa.Table) -> int | None:
    from retrograd.core.history.table import find_made

    steps = find_made(table)
    return int(steps.max()) if len(steps) else None


def _read_last_events(folder: Path) -> Iterator[pa.Table]:
    """Events of a rank, the last part first, until its last update and all losses of that step are among them.

    Where no part has an update, it is the step of the last loss.
    """
    from retrograd.core.history.events import read_losses
    from retrograd.core.history.table import OF_LOSSES, find_kinds

    paths = [path for _, path in list_parts(folder / EVENTS)]
    update, last, has_updates = None, None, None
    for table in read_events(paths[::-1], (*OF_LOSSES, "text")):  # by which updates are told apart
        yield table
        update = _find_last_update(table) if update is None else update
        if update is None and has_updates is None:
            has_updates = any(find_kinds(kinds, UPDATES).any() for kinds in read_events(paths, ["kind"]))
        if update is None and has_updates:
            continue
        losses = read_losses(table)
        last = losses.last(update) if last is None else last
        if last is not None and (losses.steps < last).any():
            return


def read_events(paths: Iterable[Path], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Columns of part files, one after the other; those that are gone or torn are passed over."""
    from retrograd.core.runs.parts import read_part

    for path in paths:
        with contextlib.suppress(FileNotFoundError, DamagedRunError):  # merged into a larger one meanwhile, or torn
            yield read_part(path, list(columns))


def _read_findings(path: Path) -> list[Mapping[str, Any]] | None:
    if not path.is_file() or path.stat().st_size > _LARGEST_FINDINGS:
        return None
    return [parse_object(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _count_findings(listed: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    counts = dict.fromkeys(("critical", "warning", "note"), 0)
    for severity in (each.get("severity") for each in listed):
        if isinstance(severity, str) and severity in counts:
            counts[severity] += 1
    return counts
