"""What the wheel and the source archive hold; ``make dist`` installs and uses them (tests/distributions.py)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "retrograd"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str], str]:
    """Names in the source archive, and in a wheel that is made of it where there is no compiler; what PyPI shows."""
    folder = tmp_path_factory.mktemp("dist")
    tree = folder / "tree"
    built_here = shutil.ignore_patterns("*.egg-info", "__pycache__", "*.so", "*.pyd")  # a fresh clone has none of it
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=built_here)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, tree)
    build(tree, "build_sdist", folder)
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
        names = {each.name.partition("/")[2] for each in opened.getmembers() if each.isfile()}
    build(folder / archive.name.removesuffix(".tar.gz"), "build_wheel", folder)
    wheel = zipfile.ZipFile(next(folder.glob("*.whl")))
    [metadata] = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    return names, set(wheel.namelist()), wheel.read(metadata).decode()


def build(tree: Path, what: str, to: Path) -> None:
    code = f"import setuptools.build_meta as b; b.{what}({str(to)!r})"
    environment = {**os.environ, "CC": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def ours() -> set[str]:
    """All files of the package as they are written, by their name in a wheel."""
    files = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(SOURCE.parent)) for path in files if path.suffix not in {".so", ".pyd"}}


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: tuple[set[str], set[str], str]) -> None:
    """Everything is below names that begin with ours, so that uninstalling takes all of it away."""
    _, wheel, _ = built
    assert {name for name in wheel if ".dist-info/" not in name} == ours()
    assert all(name.startswith(("retrograd/", "retrograd-")) for name in wheel)
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in wheel)
    assert any(name.endswith("uPlot.LICENSE") and "dist-info" in name for name in wheel)


@pytest.mark.slow
def test_the_source_archive_has_what_a_wheel_is_built_of(built: tuple[set[str], set[str], str]) -> None:
    archive, _, _ = built
    assert {name.removeprefix("src/") for name in archive if name.startswith("src/retrograd/")} == ours()
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= archive
    assert not [name for name in archive if name.startswith("tests/")], "half of the tests would be none"


@pytest.mark.slow
def test_what_pypi_shows_leads_to_no_file_beside_it(built: tuple[set[str], set[str], str]) -> None:
    *_, shown = built
    assert "Description-Content-Type: text/markdown" in shown
    assert "pip install retrograd " in shown
    assert "a hundred causes" in shown  # a link, of which the words stay
    assert "](https://github.com/" in shown
    assert not re.findall(r"!?\[[^\]]*\]\((?!https:)[^)]*\)", shown)
