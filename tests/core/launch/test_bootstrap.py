"""What every Python process below ``retrograd run`` goes through before it runs anything of its own."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from retrograd.core.launch.requests import RunRequest
from retrograd.core.launch.start import BOOTSTRAP, Request, make_environment
from retrograd.following.launch.requests import TraceRequest
from retrograd.memory.launch.requests import InventoryRequest
from tests.commands import ENVIRONMENT

REQUEST = RunRequest(path="/nowhere/run", shown="run", command=("train.py",))


def run(code: str, environment: dict[str, str], *flags: str) -> str:
    return subprocess.run(
        [sys.executable, *flags, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def look(code: str) -> tuple[str, str]:
    """What code prints in an interpreter without us, and below us."""
    return run(code, ENVIRONMENT), run(code, make_environment(REQUEST, ENVIRONMENT))


def test_nothing_is_imported_that_is_not_there_anyway() -> None:
    code = "import sys; print(*sorted(sys.modules))"
    bare, ours = (set(names.split()) for names in look(code))
    assert ours - bare == {"atexit", "sitecustomize"}


def test_a_process_that_ends_without_torch_says_so_and_loads_nothing_for_it() -> None:
    line = [sys.executable, "-X", "importtime", "-c", "pass"]
    environment = make_environment(REQUEST, ENVIRONMENT)
    said = subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stderr
    loaded = [each.rpartition("|")[2].strip() for each in said.splitlines() if each.startswith("import time:")]
    assert said.splitlines()[-1] == "retrograd: nothing was recorded: torch was not imported"
    assert "site" in loaded
    assert not [name for name in loaded if name.partition(".")[0] in ("retrograd", "json", "re")]


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("kind", [RunRequest, TraceRequest, InventoryRequest])
def test_the_bootstrap_says_what_is_said_of_a_folder_where_nothing_is(
    kind: type[Request], is_there: bool, tmp_path: Path
) -> None:
    if is_there:
        (tmp_path / "out").mkdir()
    environment = make_environment(kind(path=str(tmp_path / "out"), shown="out"), ENVIRONMENT)
    ended = subprocess.run([sys.executable, "-c", ""], env=environment, capture_output=True, text=True, check=True)
    assert ended.stderr == f"retrograd: nothing was {kind.done}: torch was not imported\n"


@pytest.mark.parametrize("closed", ["sys.__stderr__.close()", "sys.__stderr__ = None", "import os; os.close(2)"])
def test_a_script_that_closes_stderr_ends_as_without_us(closed: str) -> None:
    code = f"import sys; {closed}; print(1)"
    bare, ours = (
        subprocess.run([sys.executable, "-c", code], env=each, capture_output=True, text=True, check=False)
        for each in (ENVIRONMENT, make_environment(REQUEST, ENVIRONMENT))
    )
    assert (ours.returncode, ours.stdout, ours.stderr) == (bare.returncode, "1\n", bare.stderr)


def test_the_program_finds_its_paths_as_they_are_without_us() -> None:
    bare, ours = look("import sys; print(sys.path)")
    assert ours == bare


@pytest.mark.parametrize("is_package", [False, True])
def test_the_users_own_sitecustomize_is_run(tmp_path: Path, is_package: bool) -> None:
    target = tmp_path / "sitecustomize" / "__init__.py" if is_package else tmp_path / "sitecustomize.py"
    target.parent.mkdir(exist_ok=True)
    target.write_text("import sys; sys.mine = __name__")
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])}
    code = "import sys, sitecustomize; print(sys.mine, sitecustomize.__file__)"
    assert run(code, make_environment(REQUEST, environment)).split() == ["sitecustomize", str(target)]


def test_an_error_in_the_users_sitecustomize_is_told_as_without_us(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('mine')")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    said = [
        subprocess.run([sys.executable, "-c", "print(1)"], env=each, capture_output=True, text=True, check=True).stderr
        for each in (environment, make_environment(REQUEST, environment))
    ]
    assert said[0] == said[1].replace("retrograd: nothing was recorded: torch was not imported\n", "")
    assert "ValueError: mine" in said[0]


def test_an_interpreter_that_we_did_not_start_is_left_alone() -> None:
    environment = {**ENVIRONMENT, "PYTHONPATH": str(BOOTSTRAP)}
    assert run("import sys; print('TorchFinder' in repr(sys.meta_path))", environment) == "False\n"


def test_a_torch_that_cannot_be_imported_raises_as_without_us(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('no such library')")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
for attempt in range(2):
    try:
        import torch
    except OSError as error:
        print(error)
"""
    bare, ours = look(code)
    assert ours == bare == "no such library\n" * 2


def test_torch_keeps_its_own_loader(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("ok = 1")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import torch
print(type(torch.__spec__.loader), vars(torch.__loader__).keys())
"""
    bare, ours = look(code)
    assert ours == bare


def test_the_environment_carries_the_request() -> None:
    environment = make_environment(
        REQUEST,
        {"PYTHONPATH": os.pathsep.join(["a", str(BOOTSTRAP), "", "b"]), "HOME": "h", "RETROGRAD_SPEAKER": "1"},
    )
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(BOOTSTRAP), "a", "", "b"]
    assert environment["HOME"] == "h"
    assert json.loads(environment["RETROGRAD_RUN"])["path"] == "/nowhere/run"
    assert "RETROGRAD_SPEAKER" not in environment
    assert make_environment(REQUEST, {})["PYTHONPATH"] == str(BOOTSTRAP)


@pytest.mark.parametrize("before", ["enable", "disable"])
@pytest.mark.parametrize("torch", ["", "raise OSError('no such library')"])
def test_garbage_is_collected_as_the_program_wants_it(before: str, torch: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(torch)
    code = f"""
import gc, sys
sys.path.insert(0, {str(tmp_path)!r})
gc.{before}()
try:
    import torch
except OSError:
    pass
print(gc.isenabled())
"""
    assert run(code, make_environment(REQUEST, ENVIRONMENT)) == f"{before == 'enable'}\n"


NEWER = (ast.AnnAssign, ast.AsyncFunctionDef, ast.JoinedStr, ast.Match, ast.NamedExpr, ast.Nonlocal, ast.Starred)
"""What Python 2.7 does not know."""


def test_every_python_can_read_the_bootstrap() -> None:
    tree = ast.parse((BOOTSTRAP / "sitecustomize.py").read_bytes().decode("ascii"))
    assert not [node for node in ast.walk(tree) if isinstance(node, NEWER)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            given = node.args
            assert not [*given.posonlyargs, *given.kwonlyargs]
            assert not [each for each in given.args if each.annotation]
            assert node.returns is None
        if isinstance(node, ast.ClassDef):
            assert not node.keywords
        if isinstance(node, ast.Raise):
            assert node.cause is None
        if isinstance(node, ast.Call):
            assert not (isinstance(node.func, ast.Name) and node.func.id in ("print", "super"))


def find_pythons(*versions: str) -> list[str]:
    """Those of these versions that this machine has."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [python for version in versions for python in sorted(root.glob(f"{version}.*/bin/python"))]
    installed = filter(None, (shutil.which(f"python{version}") for version in versions))
    return [*map(str, found), *(each for each in installed if Path(each).parent.name != "shims")]


OLD = find_pythons("2.7", "3.5", "3.6", "3.7", "3.8", "3.9", "3.10")
OTHER = find_pythons("3.12", "3.13", "3.14")


def run_python(python: str, code: str, environment: dict[str, str]) -> tuple[str, str]:
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def end_in(python: str, code: str, environment: dict[str, str]) -> tuple[str, str]:
    """What is printed by a process that was started by this Python, and has become another one."""
    program = f"import os; os.execv({python!r}, [{python!r}, '-c', {code!r}])"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


@pytest.mark.skipif(not OLD, reason="no older Python")
def test_an_older_python_runs_as_without_us() -> None:
    for python in OLD:
        bare, ours = (
            (*run_python(python, "print(1)", each), *end_in(python, "print(1)", each))
            for each in (ENVIRONMENT, make_environment(REQUEST, ENVIRONMENT))
        )
        assert ours == bare == ("1\n", "", "1\n", ""), python


@pytest.mark.skipif(not OLD, reason="no older Python")
def test_an_older_python_runs_the_users_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.stdout.write('mine')")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    for python in OLD:
        assert run_python(python, "", make_environment(REQUEST, environment)) == ("mine", "")


@pytest.mark.skipif(not OTHER, reason="no other Python")
def test_a_python_without_this_package_imports_torch_and_ends_as_without_us(tmp_path: Path) -> None:
    """Also where it took over from a process that had recorded."""
    (tmp_path / "torch.py").write_text("ok = 1")
    (tmp_path / "run" / "rank00000").mkdir(parents=True)
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(tmp_path)
    ours = make_environment(RunRequest(path=str(tmp_path / "run"), shown="run", command=("train.py",)), environment)
    for python in OTHER:
        said, complained = run_python(python, "import torch; print(torch.ok)", ours)
        assert said == "1\n"
        assert complained.startswith("retrograd: it did not start, and the script runs without it: ")
        assert len(complained.splitlines()) == 1
        said, complained = end_in(python, "print(1)", ours)
        assert said == "1\n"
        assert complained.startswith("retrograd: what was recorded before this Python took over is not known here: ")
        assert len(complained.splitlines()) == 1
