"""The corpus of faults: its answers can be read, and a sample of it is scored as the benchmark does it."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import warm

FOLDER = Path(__file__).parents[2] / "benchmarks" / "findings"
SAMPLE = {
    "learning-rate-too-high/spirals_tanh": "learning-rate-too-high",
    "zero-grad-misplaced/housing_regression": "zero-grad-misplaced",
    "softmax-before-cross-entropy/char_lstm": "softmax-before-cross-entropy",
    "multitask_turns": "",
}
"""Case → who must speak first; nobody may where it is empty."""

TABLES: list[dict[str, Any]] = [tomllib.loads(path.read_text()) for path in sorted(FOLDER.glob("answers/*.toml"))]
HEALTHY = [name for table in TABLES for name in table.get("healthy", ())]
PLANTED = Counter(slug for table in TABLES for slug, planted in table.get("fault", {}).items() for _ in planted)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What is said of the sample."""
    command = ["score.py", "--forked", "--json", "--cache", str(tmp_path_factory.mktemp("cache")), "--only", *SAMPLE]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = warm.run(
        [sys.executable, *command], cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=160, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line["found"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("case", SAMPLE)
def test_sample_is_told_right(said: dict[str, list[dict[str, Any]]], case: str) -> None:
    alarms = [each["detector"] for each in said[case] if each["severity"] != "note"]
    assert alarms[:1] == [SAMPLE[case]] if SAMPLE[case] else not alarms


def test_every_fault_is_planted_in_a_healthy_script_that_stands_here() -> None:
    scripts = {path.stem for path in (FOLDER / "healthy").glob("*.py")}
    assert sorted(HEALTHY) == sorted(scripts)
    assert not [slug for slug, count in PLANTED.items() if count < 3]
    faults = [
        (slug, *each) for table in TABLES for slug, some in table.get("fault", {}).items() for each in some.items()
    ]
    for slug, key, answer in faults:
        text = (FOLDER / "healthy" / f"{key.partition('-')[0]}.py").read_text()
        for old, new in answer["plant"]:
            assert text.count(old) == 1, f"{slug}/{key}: {old!r}"
            text = text.replace(old, new)
        compile(text, key, "exec")
        for line in answer.get("lines", ()):
            assert sum(line in each for each in text.splitlines()) == 1, f"{slug}/{key}: {line!r}"
