"""Installs a wheel and a source archive in clean environments outside of the tree, and uses them: ``make dist``.

    python tests/distributions.py dist/*.whl dist/*.tar.gz
    python tests/distributions.py                            what this Python has installed, with its compiled parts

Each gets an environment of its own, made with the Python that runs this. The source archive is installed where there is
no compiler. A script is recorded, explained and reported; then the package is uninstalled, and nothing may be left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e4)  # far too high
x = torch.randn(64, 8)
for _ in range(30):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
"""

SAID_ONCE = "Statistics are computed by torch's operations"
COMPILED = ("core.statistics._kernel", "core.hooks._native")


class Environment:
    """Programs of a virtual environment, run in a folder of their own.

    Args:
        folder: where.
        prefix: that of the environment.
        has_compiler: whether they find the compiler of this machine.
    """

    def __init__(self, folder: Path, prefix: Path, *, has_compiler: bool = True) -> None:
        self.folder, self._prefix = folder, prefix
        self._bin = prefix / ("Scripts" if os.name == "nt" else "bin")
        self._variables = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
        if not has_compiler:
            self._variables |= {"PATH": str(self._bin), "CC": "/nonexistent", "CXX": "/nonexistent"}

    def run(self, *words: str, codes: tuple[int, ...] = (0,)) -> tuple[int, str, str]:
        """Run a program of it in its folder; returns the exit code, stdout and stderr."""
        line = [str(self._bin / words[0]), *words[1:]]
        done = subprocess.run(line, cwd=self.folder, env=self._variables, capture_output=True, text=True, check=False)
        if done.returncode not in codes:
            raise SystemExit(f"{' '.join(words)} returned {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.returncode, done.stdout, done.stderr

    def install(self, *what: str) -> None:
        """Install with pip."""
        self.run("python", "-m", "pip", "install", "--disable-pip-version-check", "-q", *what)

    def list_files(self) -> set[Path]:
        """All files of the environment, save what Python has compiled."""
        files = (path for path in self._prefix.rglob("*") if path.is_file())
        return {path for path in files if path.suffix != ".pyc"}


def try_archive(archive: Path, folder: Path, *, has_compiler: bool) -> None:
    """Install one, use it, and take it away again."""
    subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
    environment = Environment(folder, folder / "environment", has_compiler=has_compiler)
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    environment.install("-c", str(ROOT / "constraints.txt"), *dependencies)
    before = environment.list_files()
    environment.install("--no-cache-dir", str(archive.absolute()))  # pip would take what it has built earlier
    use(environment, has_compiler=has_compiler)
    environment.run("python", "-m", "pip", "uninstall", "-q", "-y", "retrograd")
    left = environment.list_files() - before
    assert not left, f"left behind: {sorted(map(str, left))}"
    print(f"{archive.name}: installed, used and uninstalled{'' if has_compiler else ' without a compiler'}")


def use(environment: Environment, *, has_compiler: bool) -> None:
    """Record a script whose rate is far too high, find that out, and ask whether all is there."""
    (environment.folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    said = environment.run("retrograd", "run", "-o", "runs/first", "train.py")[2]
    assert said.count(SAID_ONCE) == (not has_compiler), said
    found = environment.run("retrograd", "explain", "--json", "--fail-on", "critical", "runs/first", codes=(1,))[1]
    assert json.loads(found.splitlines()[0])["detector"] == "learning-rate-too-high", found
    environment.run("retrograd", "report", "runs/first")
    assert (environment.folder / "runs" / "first" / "report.html").stat().st_size > 100_000
    code, told, _ = environment.run("retrograd", "doctor", "--json", codes=(0, 1))
    missing = {each["name"] for each in json.loads(told)["checks"] if not each["is_fine"]}
    assert missing == (set() if has_compiler else set(COMPILED)), told
    assert code == bool(missing)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for given in map(Path, sys.argv[1:]):
            is_wheel = given.suffix == ".whl"
            try_archive(given, Path(scratch, "wheel" if is_wheel else "source"), has_compiler=is_wheel)
        if not sys.argv[1:]:
            use(Environment(Path(scratch), Path(sys.prefix)), has_compiler=True)
