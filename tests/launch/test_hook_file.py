from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from retrograd.errors import LaunchError
from retrograd.launch.hook_file import install_hook, remove_hook
from tests.launch.conftest import ENVIRONMENT, ROOT, SCRIPTS


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links")
def test_an_isolated_child_is_recorded_where_the_hook_is_installed(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    (site_packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    paths = [sysconfig.get_path("purelib"), str(ROOT / "src")]
    (site_packages / "paths.pth").write_text("\n".join(paths))
    hook = install_hook(site_packages)
    line = [sys.executable, "-m", "retrograd.cli", "run", "-o", "run", str(python), str(SCRIPTS / "isolated_child.py")]
    done = subprocess.run(line, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"
    assert done.stderr.splitlines()[1:] == ["retrograd: recorded in 1 process; see it with: retrograd report run"]
    assert (tmp_path / "run" / "rank00000" / "rank.json").is_file()
    assert remove_hook(site_packages) == hook
    assert not hook.exists()
    remove_hook(site_packages)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be written"):
        install_hook(tmp_path / "missing")
