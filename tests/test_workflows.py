"""What GitHub runs is there: commands, files and versions that the workflows name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def jobs_of(workflow: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return jobs


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in jobs_of(workflow).values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda each: each.name)
def test_each_command_of_ours_is_there(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = "\n".join(step["run"] for step in steps_of(workflow) if "run" in step)
    commands += f"\n{PROJECT['tool']['cibuildwheel']['test-command']}"
    assert set(re.findall(r"\bmake ([a-z]+)", commands)) <= targets
    files = re.findall(r"(?<![\w/])((?:tests|docs|\.ci)/[\w./]+)", commands.replace("{project}/", ""))
    assert files
    assert [name for name in files if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda each: each.name)
def test_actions_are_pinned_and_jobs_end(workflow: Path) -> None:
    used = [step["uses"] for step in steps_of(workflow) if "uses" in step]
    assert [each for each in used if not re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", each)] == []
    assert all("timeout-minutes" in job for job in jobs_of(workflow).values())


def test_the_oldest_torch_and_all_ends_of_python_are_tested() -> None:
    matrix = jobs_of(ROOT / ".github" / "workflows" / "ci.yml")["test"]["strategy"]["matrix"]["include"]
    oldest = next(each for each in PROJECT["project"]["dependencies"] if each.startswith("torch>="))
    assert f"{oldest.removeprefix('torch>=')}.0" in {each.get("torch") for each in matrix}
    named = [each.rpartition(" ")[2] for each in PROJECT["project"]["classifiers"] if "Python :: 3." in each]
    assert {named[0], named[-1]} == {each["python"] for each in matrix}
    assert f">={named[0]}" == PROJECT["project"]["requires-python"]
    assert {None, "nightly"} < {each.get("torch") for each in matrix}


def test_only_the_job_that_publishes_may_prove_who_it_is() -> None:
    workflow = ROOT / ".github" / "workflows" / "release.yml"
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
    jobs = jobs_of(workflow)
    assert {name for name, job in jobs.items() if "permissions" in job} == {"publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write", "attestations": "write"}
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert jobs["publish"]["environment"] == "pypi"


def test_all_that_names_the_version_names_the_same() -> None:
    import retrograd

    version = PROJECT["project"]["version"]
    assert retrograd.__version__ == version
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == version
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
