"""What is said of a case: it is recorded once, kept, and explained from its record."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from children import run_in_child
from corpus import Case

import retrograd as rg
from retrograd.core.launch.requests import RunRequest

LIMIT_SECONDS = 300
SOURCE = Path(rg.__file__).parent
READS = ("findings", "views", "cli.py")
"""What only reads a record: a change of it needs no second recording."""


@dataclass(frozen=True)
class Way:
    """How scripts are run.

    Attributes:
        mode: ``run`` records and explains the record; ``explain`` is ``retrograd explain train.py``.
        every: which steps are recorded.
        overhead: a budget for them, in place of ``every``.
        seed: is added to the script's own.
        forked: in a child that has torch already, not by the command; for ``run`` alone.
        cache: where recordings are kept.
    """

    cache: Path
    mode: str = "run"
    every: int = 1
    overhead: str | None = None
    seed: int = 0
    forked: bool = False


def findings_of(case: Case, way: Way) -> list[dict[str, Any]]:
    """What is said by default of this case, as the fields of findings; a new recording where there is none yet."""
    files = [path for kind in ("py", "so", "toml") for path in sorted(SOURCE.rglob(f"*.{kind}"))]
    recorders = [path for path in files if not set(path.relative_to(SOURCE).parts[:1]) & set(READS)]
    folder = way.cache / _digest(
        [
            case.seeded(way.seed).encode(),
            repr((way.mode, way.overhead or way.every)).encode(),
            *(path.read_bytes() for path in recorders),
        ]
    )
    said = folder / f"findings-{_digest(path.read_bytes() for path in files)}.json"
    if not said.exists():
        found = _explain_run(case, way, folder) if way.mode == "run" else _explain_script(case, way, folder)
        said.write_text(json.dumps(found))
    read: list[dict[str, Any]] = json.loads(said.read_text())
    return read


def _explain_run(case: Case, way: Way, folder: Path) -> list[dict[str, Any]]:
    if not (folder / "run" / "manifest.json").exists():
        script = _prepare(case, way, folder)
        if way.forked and "mp.spawn" not in case.text:
            steps = {"overhead": way.overhead} if way.overhead else {"every": way.every}
            request = RunRequest(path=str(folder / "run"), shown="run", command=(str(script),), **steps)
            run_in_child(script, folder / "log.txt", lambda: _begin(request), LIMIT_SECONDS)
        else:
            steps = ("--overhead", way.overhead) if way.overhead else ("--every", str(way.every))
            _call("run", "-o", str(folder / "run"), *steps, script.name, folder=folder)
    if not (folder / "run" / "manifest.json").exists():
        return []  # nothing was recorded: the program never came to a backward pass
    return [each.as_dict() for each in rg.explain(folder / "run").said]


def _explain_script(case: Case, way: Way, folder: Path) -> list[dict[str, Any]]:
    script = _prepare(case, way, folder)
    output = _call("explain", "--json", script.name, folder=folder)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
    return [line for line in lines if "detector" in line][:5]


def _prepare(case: Case, way: Way, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script = folder / "train.py"
    script.write_text(case.seeded(way.seed))
    return script


def _begin(request: RunRequest) -> None:
    from retrograd.core.launch.session import start_session

    os.environ["RETROGRAD_RUN"] = request.write()
    os.environ["RETROGRAD_SPEAKER"] = str(os.getpid())
    start_session()


def _call(*words: str, folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "retrograd", *words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    return done.stdout


def _digest(parts: Iterable[bytes]) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(part)
    return made.hexdigest()[:20]
