"""``pytest --retrograd`` and ``rg_record``, in suites of others."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

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


def run_pytest(folder: Path, code: str, *words: str) -> tuple[int, str]:
    """Exit code and output of pytest, in a suite that has this one file."""
    (folder / "test_it.py").write_text(TRAIN + code, encoding="utf-8")
    environment = {**ENVIRONMENT, "PYTHONPATH": "", "COLUMNS": "80"}
    command = [sys.executable, "-m", "pytest", "-W", "error", *words]
    done = warm.run(command, stage="ours", cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    return done.returncode, done.stdout + done.stderr


def list_runs(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_pytest_finds_it() -> None:
    """Where this fails the package was installed before it had a plugin: ``pip install -e .`` again."""
    assert [each.value for each in entry_points(group="pytest11", name="retrograd")] == [
        "retrograd.integrations.pytest_plugin"
    ]


def test_tests_that_train_are_recorded_and_no_others(tmp_path: Path) -> None:
    code, said = run_pytest(
        tmp_path,
        """
def test_well():
    train()

def test_ill():
    train(lr=1e30)

def test_without_an_optimizer():
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()

def test_forward_alone():
    nn.Linear(2, 2)(torch.ones(1, 2))

def test_nothing():
    pass
""",
        "--retrograd",
    )
    assert code == 0, said
    names = ["test_it.test_ill", "test_it.test_well", "test_it.test_without_an_optimizer"]
    assert list_runs(tmp_path / PLACE) == names
    runs = [rg.open_run(tmp_path / PLACE / name) for name in names]
    assert [len(run.history.made_steps) for run in runs] == [5, 5, 1]
    assert [run.status for run in runs] == ["finished"] * 3
    told = said.partition("= retrograd =")[2].splitlines()
    assert told[1] == "test_it.py::test_ill"
    assert told[2].startswith("  critical  The learning rate of 1e+30 is too high")
    assert told[3:5] == [
        f"  more: retrograd explain {PLACE}/test_it.test_ill",
        f"3 tests trained, 1 with findings; runs in {PLACE}",
    ]


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
    code, said = run_pytest(tmp_path, tests, "--retrograd-fail-on", "critical", "--retrograd-dir", "here")
    assert code == 1
    assert "2 failed, 1 passed" in said
    assert "--retrograd-fail-on:\ncritical  The learning rate of 1e+30" in said
    assert "assert not 'mine'" in said
    assert list_runs(tmp_path / "here") == [f"test_it.test_{name}" for name in ("ill", "of_its_own_fault", "well")]
    assert rg.open_run(tmp_path / "here/test_it.test_of_its_own_fault").status == "finished"  # a verdict is no failure


def test_a_run_that_raises_has_failed(tmp_path: Path) -> None:
    code, _ = run_pytest(
        tmp_path,
        """
def test_it():
    train()
    raise OSError("gone")

def test_skips():
    train()
    pytest.skip("late")
""",
        "--retrograd",
    )
    assert code == 1
    run = rg.open_run(tmp_path / PLACE / "test_it.test_it")
    assert run.status == "failed"
    assert run.ranks[0].facts["error"]["message"] == "gone"
    assert rg.open_run(tmp_path / PLACE / "test_it.test_skips").status == "finished"


def test_training_is_the_same(tmp_path: Path) -> None:
    code = """
def test_it():
    weights = torch.cat([each.detach().flatten() for each in train(steps=20).parameters()])
    torch.save([weights, torch.rand(3)], os.environ["PYTEST_CURRENT_TEST"].partition("::")[0] + ".pt")
"""
    found = []
    for words in ([], ["--retrograd"]):
        assert run_pytest(tmp_path, code, *words)[0] == 0
        found.append((tmp_path / "test_it.py.pt").read_bytes())
    assert found[0] == found[1]


def test_what_other_tests_left_behind_is_not_recorded(tmp_path: Path) -> None:
    """A model that is alive since an earlier test has no name, no site and no finding; one that is used has."""
    _, said = run_pytest(
        tmp_path,
        """
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

def test_first(shared):
    use(shared)

def test_second():
    left.append(train())
    left.append(torch.optim.Adam(left[0].parameters()))
    assert 0

def test_third():
    nn.Sequential(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()

def test_fourth(shared):
    use(shared)
""",
        "--retrograd",
    )
    assert "1 failed, 3 passed" in said
    names = [f"test_it.test_{name}" for name in ("first", "second", "third", "fourth")]
    first, second, third, fourth = (rg.open_run(tmp_path / PLACE / name).history for name in names)
    assert set(first.sites) == set(fourth.sites)
    assert all(site.startswith("self:") for site in first.sites)
    assert [len(each.made_steps) for each in (first, fourth)] == [3, 3]
    assert {site.partition(":")[0] for site in second.sites} == {"0", "1", "2", "self"}
    assert {site.partition(":")[0] for site in third.sites} == {"0", "self"}


def test_a_test_that_is_run_again_has_one_run(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, "\ndef test_it():\n    train()\n", "--retrograd")[0] == 0
    assert list_runs(tmp_path / PLACE) == ["test_it.test_it"]
    assert run_pytest(tmp_path, "\ndef test_it():\n    pass\n", "--retrograd")[0] == 0
    assert list_runs(tmp_path / PLACE) == []


def test_names_of_any_kind(tmp_path: Path) -> None:
    code, said = run_pytest(
        tmp_path,
        """
@pytest.mark.parametrize("name", ["<img src=x>", "../..", "$(id)", "é" * 300, "a b\\n", "a-b", "a b", ""])
def test_it(name):
    train(lr=1e30)
""",
        "--retrograd",
    )
    assert code == 0, said
    names = list_runs(tmp_path / PLACE)
    assert len(names) == 8
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.=+-_") for name in names)
    assert said.count("more: retrograd explain .pytest_cache/d/retrograd/test_it.test_it-") == 8
    assert set(list_runs(tmp_path)) - {"__pycache__"} == {".pytest_cache", "test_it.py"}


def test_forks_of_a_test_are_recorded_beside_it(tmp_path: Path) -> None:
    code, said = run_pytest(
        tmp_path,
        """
import multiprocessing

def test_it():
    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
    assert child.exitcode == 0
    train(steps=3)
""",
        "--retrograd",
    )
    assert code == 0, said
    run = rg.open_run(tmp_path / PLACE / "test_it.test_it")
    assert len(run.ranks) == 2
    assert [rank.status for rank in run.ranks] == ["finished"] * 2


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


@pytest.mark.parametrize("name", ["cacheprovider", "terminal"])
def test_other_plugins_may_be_missing(tmp_path: Path, name: str) -> None:
    code, said = run_pytest(tmp_path, "\ndef test_it():\n    train()\n", "--retrograd", "-p", f"no:{name}")
    assert code == 0, said
    assert not said if name == "terminal" else "1 test trained, none with findings" in said
    assert (tmp_path / PLACE).exists() == (name != "cacheprovider")


def test_nothing_is_loaded_where_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_it():\n    assert not {'torch', 'numpy', 'pyarrow', 'rich'} & sys.modules.keys()\n"
    )
    for words in ([], ["-p", "no:retrograd"]):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", *words],
            cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout


def test_rg_record(tmp_path: Path) -> None:
    code, said = run_pytest(
        tmp_path,
        """
import retrograd as rg

def test_it(rg_record, tmp_path):
    model = nn.Linear(4, 1)
    with rg_record(model) as first:
        model(torch.ones(1, 4)).sum().backward()
    rg.testing.assert_healthy(first)
    second = rg_record(model, every=2)
    third = rg_record(model, "mine")
    assert [each.path.relative_to(tmp_path).as_posix() for each in (first, second, third)] == ["run", "run-2", "mine"]
    assert not first.is_open and second.is_open

def test_then():
    from retrograd.core.recording.record import _active
    assert not _active
""",
    )
    assert code == 0, said
