import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from retrograd.core.limits import LIMITS
from retrograd.core.runs.manifest import Manifest, gather_facts, gather_git
from retrograd.core.runs.settings import read_settings
from tests.core.history.made import make_steps
from tests.core.runs.written import add_step, open_writer


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    git("init")
    (tmp_path / "train.py").write_text("pass")
    git("add", "train.py")
    git("commit", "--no-gpg-sign", "-m", "first")
    return tmp_path


def test_the_commit_and_whether_it_is_clean(repository: Path) -> None:
    assert gather_git() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (repository / "notes").write_text("of no account")
    assert gather_git() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (repository / "train.py").write_text("print('changed')")
    assert gather_git() == {"commit": git("rev-parse", "HEAD"), "dirty": True}


def test_outside_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert gather_git() is None
    monkeypatch.setenv("PATH", "")
    assert gather_git() is None


def test_a_git_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "git"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(LIMITS, "git_seconds", 0.2)
    assert gather_git() is None


def test_what_a_run_tells(repository: Path) -> None:
    torch.manual_seed(123)
    writer = open_writer(repository / "run")
    writer.describe(model={"blocks": 2, "type": torch.nn.Linear}, budget=Path("x"))
    writer.describe(model={"blocks": 3})
    add_step(writer, make_steps([0])[0])
    writer.close()
    found = json.loads((repository / "run" / "manifest.json").read_text())
    assert found["git"] == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    assert found["seed"] == 123
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert found["versions"]["python"] == ".".join(str(number) for number in sys.version_info[:3])
    assert found["command"] == sys.orig_argv
    assert found["model"] == {"blocks": 3}
    assert found["budget"] == "x"
    assert found["sites"][:2] == ["a:output", "a:output.grad"]


def test_a_kernel_tells_its_notebook_instead_of_how_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrograd.core.runs.manifest.is_notebook", lambda: True)
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/first try.ipynb")
    assert read_settings(gather_facts())["script"] == "first try.ipynb"
    monkeypatch.delenv("JPY_SESSION_NAME")
    assert gather_facts()["command"] == []
    monkeypatch.undo()
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/first try.ipynb")  # a script that a notebook has started
    assert gather_facts()["command"] == sys.orig_argv


def test_it_is_written_only_when_there_is_something_new(tmp_path: Path) -> None:
    kept = Manifest(tmp_path / "manifest.json")
    kept.write()
    first = (tmp_path / "manifest.json").stat().st_ino
    kept.name_sites([])
    kept.write()
    assert (tmp_path / "manifest.json").stat().st_ino == first
    (tmp_path / "manifest.json").unlink()  # somebody's doing
    kept.write()
    assert (tmp_path / "manifest.json").exists()
    kept.name_sites(["a:output"])
    kept.write()
    assert json.loads((tmp_path / "manifest.json").read_text())["sites"] == ["a:output"]
