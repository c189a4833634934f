"""What `retrograd doctor` says, here and where something is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from retrograd.core.cli import doctor, main
from retrograd.core.hooks import private_names
from retrograd.core.hooks.private_names import NEEDED, OPTIONAL, PrivateNames, write_name
from tests.compiled.lacking import Lacking


@pytest.fixture
def few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the compiler take seconds to load; one test looks at all."""
    monkeypatch.setattr(doctor, "OPTIONAL", {})


def examine(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, object]]]:
    code = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["is_fine"] == (code == 0)
    return code, {each["name"]: each for each in told["checks"]}


def test_here_nothing_is_missing_and_each_name_is_told(tmp_path: Path) -> None:
    """In an interpreter of its own, which has loaded nothing before."""
    line = [sys.executable, "-m", "retrograd", "doctor", "--json"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    told = json.loads(done.stdout)
    names = {name: there for each in told["checks"] for name, there in each["names"].items()}
    assert names == {write_name(name): True for each in (*NEEDED, *OPTIONAL.values()) for name in each.names}
    assert {name: told["versions"][name] for name in ("torch", "numpy")} == {
        "torch": version("torch"),
        "numpy": version("numpy"),
    }
    lacks = {each["name"] for each in told["checks"] if not each["is_fine"]}
    assert lacks <= {"core.statistics._kernel", "core.hooks._native"}  # where there was no compiler
    assert done.returncode == bool(lacks)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("few_names")
def test_a_kernel_that_was_not_built_is_told_with_the_repair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "retrograd.core.statistics._kernel", None)  # as where it is no file
    code, checks = examine(capsys)
    kernel = checks["core.statistics._kernel"]
    assert code == 1
    assert not kernel["is_fine"]
    assert "six times" in str(kernel["without"])
    assert "pip install --force-reinstall" in str(kernel["without"])
    assert main(["doctor"]) == 1
    assert "NO  core.statistics._kernel: " in capsys.readouterr().out


def test_a_missing_name_is_told_with_what_is_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each group one."""
    groups = [*NEEDED, *OPTIONAL.values()]
    lacking = {write_name(next(name for name in each.names if not name.startswith("."))) for each in groups}
    there = private_names.is_there
    monkeypatch.setattr(doctor, "is_there", lambda name: write_name(name) not in lacking and there(name))
    code, checks = examine(capsys)
    assert code == 1
    for each in groups:
        found = checks[each.buys]
        missing = [name for name in dict.fromkeys(map(write_name, each.names)) if name in lacking]
        assert found["found"] == f"torch has no {', '.join(missing)}"
        assert found["without"] == f"without: {each.without}"


@pytest.mark.usefixtures("few_names")
def test_a_check_that_fails_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Another torch may lack what we ask it with."""
    monkeypatch.setattr(torch, "cuda", Lacking(torch.cuda, "is_available"))
    code, checks = examine(capsys)
    assert code == 1
    assert "no is_available" in str(checks["check device"]["found"])


@pytest.mark.usefixtures("few_names")
def test_hooks_of_others_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    def of_somebody(module: torch.nn.Module, args: object) -> None: ...

    assert "of_somebody" not in str(examine(capsys)[1]["hooks of others"]["found"])
    hook = torch.nn.modules.module.register_module_forward_pre_hook(of_somebody)
    try:
        found = str(examine(capsys)[1]["hooks of others"]["found"])
    finally:
        hook.remove()
    assert "of_somebody" in found
    assert "torch.nn.modules.module._global_forward_pre_hooks" in found


@pytest.mark.usefixtures("few_names")
def test_a_folder_that_cannot_be_written_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    monkeypatch.setattr(doctor, "PARENT", tmp_path)
    code, checks = examine(capsys)
    assert code == 1
    assert checks["folder of runs"]["found"] == f"{tmp_path} cannot be written to"
    assert "-o PATH" in str(checks["folder of runs"]["without"])


def test_a_name_is_found_where_it_is_and_missed_where_it_is_not() -> None:
    assert private_names.is_there("torch.nn.Module:_call_impl")
    assert private_names.is_there("torch.optim.Optimizer:self._optimizer_step_pre_hooks")
    assert private_names.is_there("torch._C._nn.nll_loss_nd")
    assert not private_names.is_there("torch.nn.Module:_calls")
    assert not private_names.is_there("torch.optim.Optimizer:self._optimizer_step_pre")
    assert not private_names.is_there("torch.no_such.room:_name")
    assert isinstance(NEEDED[0], PrivateNames)
