"""``pytest --retrograd`` and ``rg_record``, in suites of others."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest

import retrograd as rg
from tests import warm
from tests.commands import ENVIRONMENT

TRAIN = """
import os
import pytest
import torch
from torch import nn


def train(lr=0.1, steps=5, inside=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
    return model

"""
PLACE = ".pytest_cache/d/retrograd"


def run_pytest(folder: Path, code: str, *words: str, **variables: str) -> tuple[int, str]:
    """Exit code and output of pytest, in a suite that has this one file."""
    (folder / "test_it.py").write_text(TRAIN + code, encoding="utf-8")
    environment = {**ENVIRONMENT, "PYTHONPATH": "", "COLUMNS": "80", **variables}
    command = [sys.executable, "-m", "pytest", "-W", "error", "-W", "ignore::pytest.PytestAssertRewriteWarning", *words]
    done = warm.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    return done.returncode, done.stdout + done.stderr


def list_runs(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_pytest_finds_it() -> None:
    """Where this fails the package was installed before it had a plugin: ``pip install -e .`` again."""
    assert [each.value for each in entry_points(group="pytest11", name="retrograd")] == [
        "retrograd.integrations.pytest_plugin"
    ]


SUITE = """
import multiprocessing

left = []

@pytest.fixture(scope="module")
def shared():
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def use(shared):
    model, optimizer = shared
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()

def test_well():
    train()

def test_shared(shared):
    use(shared)

def test_ill():
    train(lr=1e30)

def test_fails():
    left.append(train())
    left.append(torch.optim.Adam(left[0].parameters()))
    assert 0

def test_without_an_optimizer():
    nn.Sequential(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()

def test_shared_again(shared):
    use(shared)

def test_raises():
    train()
    raise OSError("gone")

def test_skips():
    train()
    pytest.skip("late")

def test_forward_alone():
    nn.Linear(2, 2)(torch.ones(1, 2))

def test_nothing():
    pass

@pytest.fixture
def broken():
    train()
    raise OSError("gone")

def test_with_a_broken_fixture(broken):
    pass

def test_forks():
    train(steps=3)
    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
    assert child.exitcode == 0

@pytest.mark.parametrize("name", ["<img src=x>", "../..", "$(id)", "é" * 300, "a b\\n", "a-b", "a b", ""])
def test_names(name):
    train(lr=1e30)

def test_weights():
    weights = torch.cat([each.detach().flatten() for each in train(steps=20).parameters()])
    torch.save([weights, torch.rand(3)], "weights.pt")
"""


class Suite(NamedTuple):
    """What has become of it."""

    folder: Path
    said: str

    def open(self, name: str) -> rg.Run:
        return rg.open_run(self.folder / PLACE / f"test_it.test_{name}")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """A suite that has been run with ``--retrograd``."""
    folder = tmp_path_factory.mktemp("suite")
    code, said = run_pytest(folder, SUITE, "--retrograd")
    assert code == 1, said
    assert "2 failed, 17 passed, 1 skipped, 1 error" in said
    return Suite(folder, said)


def test_tests_that_train_are_recorded_and_no_others(suite: Suite) -> None:
    names = [each for each in list_runs(suite.folder / PLACE) if not each.startswith("test_it.test_names")]
    assert names == [
        f"test_it.test_{name}"
        for name in (
            "fails", "forks", "ill", "raises", "shared", "shared_again", "skips", "weights", "well",
            "with_a_broken_fixture", "without_an_optimizer",
        )
    ]  # fmt: skip
    steps = {"well": 5, "ill": 5, "fails": 5, "shared": 3, "forks": 3, "without_an_optimizer": 1, "weights": 20}
    assert {name: len(suite.open(name).history.made_steps) for name in steps} == steps
    assert suite.open("well").history.manifest["command"] == ["pytest", "test_it.py::test_well"]


def test_what_is_wrong_is_said_at_the_end(suite: Suite) -> None:
    told = suite.said.partition("= retrograd =")[2].splitlines()
    assert "test_it.py::test_well" not in told
    place = told.index("test_it.py::test_ill")
    assert told[place + 1].startswith("  critical  The learning rate of 1e+30 is too high")
    assert told[place + 2] == f"  more: retrograd explain {PLACE}/test_it.test_ill"
    assert f"19 tests trained, 10 with findings; runs in {PLACE}" in told


def test_a_verdict_of_a_test_is_no_failure_of_its_run(suite: Suite) -> None:
    names = ("well", "fails", "skips", "raises", "with_a_broken_fixture")
    assert [suite.open(name).status for name in names] == ["finished", "finished", "finished", "failed", "finished"]
    assert suite.open("raises").ranks[0].facts["error"]["message"] == "gone"


def test_what_other_tests_left_behind_is_not_recorded(suite: Suite) -> None:
    """A model that is alive since an earlier test has no name and no site; one that is used has."""
    models = {
        name: {site.partition(":")[0] for site in suite.open(name).history.sites}
        for name in ("shared", "fails", "without_an_optimizer", "shared_again")
    }
    assert models == {
        "shared": {"self"},
        "fails": {"0", "1", "2", "self"},
        "without_an_optimizer": {"0", "self"},
        "shared_again": {"self"},
    }
    assert suite.open("shared").history.sites == suite.open("shared_again").history.sites


def test_names_of_any_kind(suite: Suite) -> None:
    names = [each for each in list_runs(suite.folder / PLACE) if each.startswith("test_it.test_names")]
    assert len(names) == 8
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.=+-_") for name in names)
    assert suite.said.count(f"more: retrograd explain {PLACE}/test_it.test_names-") == 8
    assert set(list_runs(suite.folder)) - {"__pycache__"} == {".pytest_cache", "test_it.py", "weights.pt"}


def test_forks_of_a_test_are_recorded_beside_it(suite: Suite) -> None:
    ranks = suite.open("forks").ranks
    assert [rank.is_extra for rank in ranks] == [False, True]
    assert [rank.status for rank in ranks] == ["finished"] * 2


def test_rg_record_and_training_that_is_the_same_without_us(suite: Suite, tmp_path: Path) -> None:
    code, said = run_pytest(
        tmp_path,
        SUITE
        + """
import retrograd as rg

def test_rg_record(rg_record, tmp_path):
    model = nn.Linear(4, 1)
    with rg_record(model) as first:
        model(torch.ones(1, 4)).sum().backward()
    rg.testing.assert_healthy(first)
    second = rg_record(model, every=2)
    third = rg_record(model, "mine")
    assert [each.path.relative_to(tmp_path).as_posix() for each in (first, second, third)] == ["run", "run-2", "mine"]
    assert not first.is_open and second.is_open

def test_rg_record_then():
    from retrograd.core.recording.record import _active
    assert not _active
""",
        "-k",
        "weights or rg_record",
    )
    assert code == 0, said
    assert (tmp_path / "weights.pt").read_bytes() == (suite.folder / "weights.pt").read_bytes()
    assert "retrograd =" not in said


def test_a_finding_fails_a_test_where_it_is_to(tmp_path: Path) -> None:
    tests = """
def test_well():
    train()

def test_ill():
    train(lr=1e30)

def test_of_its_own_fault():
    train(lr=1e30)
    assert not "mine"
"""
    words = ("--retrograd-fail-on", "critical", "--retrograd-dir", "here", "-p", "no:cacheprovider")
    code, said = run_pytest(tmp_path, tests, *words)
    assert code == 1
    assert "2 failed, 1 passed" in said
    assert "--retrograd-fail-on:\ncritical  The learning rate of 1e+30" in said
    assert "assert not 'mine'" in said
    assert list_runs(tmp_path / "here") == [f"test_it.test_{name}" for name in ("ill", "of_its_own_fault", "well")]
    code, said = run_pytest(tmp_path, "def test_ill():\n    pass\n\ndef test_well():\n    train()\n", *words)
    assert code == 0, said  # each in the place of the last one
    assert list_runs(tmp_path / "here") == ["test_it.test_of_its_own_fault", "test_it.test_well"]


def test_workers_of_xdist_tell_what_they_have_found(tmp_path: Path) -> None:
    tests = """
@pytest.mark.parametrize("lr", [0.1, 1e30, 0.05, 1e25])
def test_it(lr):
    train(lr)
"""
    code, said = run_pytest(tmp_path, tests, "--retrograd", "-n", "2")
    assert code == 0, said
    assert said.count("  critical  ") == 2
    assert f"4 tests trained, 2 with findings; runs in {PLACE}" in said


def test_other_plugins_may_be_missing(tmp_path: Path) -> None:
    words = ("--retrograd", "-p", "no:cacheprovider", "-p", "no:tmpdir")
    (temporary := tmp_path / "temporary").mkdir()
    code = "def test_it():\n    train()\n"
    assert run_pytest(tmp_path, code, *words, "-p", "no:terminal", TMPDIR=str(temporary)) == (0, "")
    assert not (tmp_path / PLACE).exists()
    assert not list(temporary.glob("retrograd-*"))  # nobody has been told of it
    _, said = run_pytest(tmp_path, code, *words, TMPDIR=str(temporary))
    [kept] = temporary.glob("retrograd-*")
    assert f"runs in {kept.relative_to(tmp_path)}" in said


def test_nothing_is_loaded_where_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_it():\n    assert not {'torch', 'numpy', 'pyarrow', 'rich'} & sys.modules.keys()\n"
    )
    again = "import retrograd, sys, pytest; sys.exit(pytest.main(['-W', 'error']))"  # as in a notebook
    for words in (["-m", "pytest"], ["-m", "pytest", "-p", "no:retrograd"], ["-c", again]):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
