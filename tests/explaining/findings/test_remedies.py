"""What findings advise is tried: of each detector a faulty program, and the same with the remedy in it.

A remedy is quoted from what the finding says. The program is then changed so, is run again, and the fault is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from retrograd.core.history.history import History
from retrograd.core.recording.fact_source import MakeSource
from retrograd.core.recording.recorder import Recorder
from retrograd.core.runs.ending import describe_exception
from retrograd.core.runs.findings import Finding, Findings
from retrograd.explaining.facts.probe_watch import ProbeWatch
from retrograd.explaining.facts.sources import SOURCES
from retrograd.explaining.facts.watches import WATCHES
from retrograd.explaining.findings.detectors import DETECTORS
from retrograd.explaining.findings.explain import explain_record
from retrograd.explaining.findings.record import Record
from tests.explaining.findings.remedies import FAULTS, IN_A_HOOK, NO_CHANGE_OF_CODE, Fault

TRAINING = "# training\n"
"""The line of a program at which recording begins."""


WATCHED: dict[str, Sequence[MakeSource]] = {
    "kinks": WATCHES, "samples-mix": (ProbeWatch,), "future-seen": (ProbeWatch,), "own-backward": (ProbeWatch,)
}  # fmt: skip
"""What detectors need that read what is noted where a script is explained."""


def explain_program(text: str, path: Path, watches: Sequence[MakeSource] = ()) -> Findings:
    """What is said of a program, which may raise; ``watches``: what is noted besides."""
    setup, training = text.split(TRAINING)
    path.write_text(text)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(setup, str(path), "exec"), names)
    history, failure = History(), None
    recorder = Recorder(names.get("models") or names["net"], history, sources=(*SOURCES, *watches))
    recorder.attach()
    try:
        exec(compile("\n" * setup.count("\n") + training, str(path), "exec"), names)
    except (RuntimeError, ValueError, IndexError) as raised:
        failure = describe_exception(raised, recorder.find_path)
    recorder.close("failed" if failure else "finished", failure)
    return explain_record(Record(history, status="failed" if failure else "finished", error=failure))


def list_all(found: Findings) -> Iterator[Finding]:
    """List all findings, and those that they explain."""
    for each in found:
        yield each
        yield from each.causes


@pytest.mark.filterwarnings("ignore")  # torch warns of some of these faults
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_remedy_helps(fault: Fault, tmp_path: Path) -> None:
    watches = WATCHES if fault.kind == IN_A_HOOK else WATCHED.get(fault.slug, ())
    said = [
        each
        for each in list_all(explain_program(fault.faulty, tmp_path / "train.py", watches))
        if each.detector == fault.slug
    ]
    assert said, f"{fault.slug} does not see the fault"
    assert fault.words in said[0].repair
    after = explain_program(fault.mended, tmp_path / "train.py", watches)
    assert fault.slug not in {each.detector for each in list_all(after)}
    assert not [str(each) for each in after if each.severity != "note"]


def test_every_detector_is_tried() -> None:
    tried = {fault.slug for fault in FAULTS}
    assert tried | NO_CHANGE_OF_CODE.keys() == {each.slug for each in DETECTORS}
    assert not tried & NO_CHANGE_OF_CODE.keys()
