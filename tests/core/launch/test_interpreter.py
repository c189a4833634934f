from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from retrograd.core.errors import LaunchError
from retrograd.core.launch.hook_file import install_hook, remove_hook
from retrograd.core.launch.interpreter import find_obstacle
from tests.commands import ENVIRONMENT, ROOT, SCRIPTS
from tests.core.launch.recorded import HEALTHY, uncounted
from tests.core.launch.test_bootstrap import find_pythons


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links")
def test_an_isolated_child_is_recorded_where_the_hook_is_installed(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    (site_packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    paths = [str(Path(torch.__file__).parents[1]), str(ROOT / "src")]
    (site_packages / "paths.pth").write_text("\n".join(paths))
    hook = install_hook(site_packages)
    line = [sys.executable, "-m", "retrograd", "run", "-o", "run", str(python), str(SCRIPTS / "isolated_child.py")]
    done = subprocess.run(line, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"
    assert uncounted(done.stderr).splitlines()[1:] == [f"retrograd: recorded in 1 process; {HEALTHY}"]
    assert (tmp_path / "run" / "rank00000" / "rank.json").is_file()
    assert remove_hook(site_packages) == hook
    assert not hook.exists()
    remove_hook(site_packages)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be written"):
        install_hook(tmp_path / "missing")


CODE = "import sys, torch; torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward(); print('done'); sys.exit(7)"


@pytest.mark.parametrize("options", ["-I", "-S", "-E", "-uI", "-W error -I", "-X dev -BS"])
@pytest.mark.parametrize("command", ["run", "trace"])
def test_an_interpreter_that_cannot_be_reached_is_said_so_and_run(command: str, options: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    line = [sys.executable, *options.split(), str(script), "-I"]
    ours = [sys.executable, "-m", "retrograd", command, "-o", "out", *line]
    done = subprocess.run(ours, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "['-I']\n")
    option = next(letter for letter in options.rsplit(maxsplit=1)[-1] if letter in "ISE")
    name = Path(sys.executable).name
    assert done.stderr.startswith(f"retrograd: {name} -{option} cannot be recorded, traced or debugged: it ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", ["-u", "-W ignore", "-X utf8", "-W ignore::ImportWarning -B", "-s"])
def test_other_options_of_an_interpreter_are_none_of_ours(options: str) -> None:
    assert find_obstacle(["/usr/bin/python3.12", *options.split(), "-c", "-I"], {}) == ""
    assert find_obstacle(["/usr/bin/env", "python", "-I"], {}) == ""


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links")
def test_an_isolated_interpreter_is_recorded_where_the_hook_is_installed(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    (site_packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site_packages / "paths.pth").write_text("\n".join([str(Path(torch.__file__).parents[1]), str(ROOT / "src")]))
    install_hook(site_packages)
    line = [sys.executable, "-m", "retrograd", "run", "-o", "run", str(python), "-I", "-c", CODE]
    done = subprocess.run(line, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "done\n")
    assert done.stderr.splitlines()[0].startswith("retrograd: recording ")
    assert "retrograd: recorded 1 step at" in done.stderr


OLD = find_pythons("2.7", "3.6", "3.8", "3.10")


@pytest.mark.skipif(not OLD, reason="no older Python")
def test_a_python_that_is_too_old_is_said_so_and_run(tmp_path: Path) -> None:
    for python in OLD:
        ours = [sys.executable, "-m", "retrograd", "run", "-o", "out", python, "-c", "print(1)"]
        done = subprocess.run(ours, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True)
        assert done.stdout == "1\n"
        assert " is Python " in done.stderr
        assert done.stderr.endswith("Try: use Python 3.11 or later, in which retrograd is installed.\n")
        assert len(done.stderr.splitlines()) == 1
