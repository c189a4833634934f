"""What is installed here, and what is slower or off because something is missing: ``retrograd doctor``."""

from __future__ import annotations

import json
import os
import platform
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import retrograd as rg
from retrograd.core.amounts import count_of
from retrograd.core.hooks.private_names import GLOBAL_TABLES, NEEDED, OPTIONAL, is_there, write_name
from retrograd.core.launch.hook_file import HOOK
from retrograd.core.launch.interpreter import BOOTSTRAP
from retrograd.core.notices import print_text, waiting
from retrograd.core.runs.layout import PARENT

_LIBRARIES = ("torch", "numpy", "pyarrow", "safetensors", "rich", "triton")

_PARTS = {
    "core.statistics._kernel": "statistics on the CPU are computed by torch's operations, in about six times the time",
    "core.hooks._native": "graphs are followed in Python, which is slower; losses that an evaluation computes itself "
    "are not recorded",
}
"""Each compiled part, and what happens without it."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        is_fine: False where something is missing, slower or off.
        found: what there is.
        without: what follows from it, and what to do; empty where it is fine.
        names: private names of torch, and whether they are there.
    """

    name: str
    is_fine: bool
    found: str
    without: str = ""
    names: dict[str, bool] = field(default_factory=dict)


def print_health(*, as_json: bool) -> int:
    """Print what is installed, and what follows from what is missing; returns 0 where nothing is, else 1."""
    versions = {"retrograd": rg.__version__, "python": platform.python_version()}
    versions |= {name: _find_version(name) for name in _LIBRARIES}
    with waiting("looking at torch"):
        checks = [each for check in _CHECKS for each in _try(check)]
    missing = sum(not each.is_fine for each in checks)
    if as_json:
        told = {"is_fine": not missing, "versions": versions, "checks": [asdict(each) for each in checks]}
        print_text(json.dumps(told, ensure_ascii=False, indent=1), is_json=True)
        return int(missing > 0)
    print_text(", ".join(f"{name} {each or 'not installed'}" for name, each in versions.items()))
    for each in checks:
        if not (each.is_fine and each.names):  # those are summed up in one line
            print_text(f"{'ok' if each.is_fine else 'NO'}  {each.name}: {each.found}")
            print_text(f"    {each.without}\n" if each.without else "", end="")
    failed = ", ".join(each.name for each in checks if not each.is_fine)
    print_text(f"{count_of(missing, 'check')} of {len(checks)} failed: {failed}" if missing else "nothing is missing")
    return int(missing > 0)


def _find_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _try(check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Its answers; where it fails, as with another torch it may, that is one."""
    try:
        yield from check()
    except Exception as error:
        yield Check(check.__name__.strip("_").replace("_", " "), False, f"{type(error).__name__}: {error}")


def _import_retrograd() -> Iterator[Check]:
    rg.record, rg.rewrite, rg.trace, rg.take_inventory  # noqa: B018  # loads them
    yield Check("import retrograd", True, str(Path(rg.__file__).parent))


def _check_parts() -> Iterator[Check]:
    for part, without in _PARTS.items():
        try:
            yield Check(part, True, f"compiled, {import_module(f'retrograd.{part}').__file__}")
        except ImportError as error:
            repair = "With a C compiler: `pip install --force-reinstall --no-deps --no-cache-dir retrograd`"
            yield Check(part, False, str(error), f"{without}. {repair}")


def _check_names() -> Iterator[Check]:
    count = 0
    for each in (*NEEDED, *OPTIONAL.values()):
        names = {write_name(name): is_there(name) for name in each.names}
        missing = [name for name, there in names.items() if not there]
        count += len(names) - len(missing)
        without = f"without: {each.without}" if missing else ""
        yield Check(
            each.buys, not missing, f"torch has no {', '.join(missing)}" if missing else "there", without, names
        )
    yield Check("private names of torch", True, f"{count} are there")


def _check_device() -> Iterator[Check]:
    torch: Any = import_module("torch")
    if not torch.cuda.is_available():
        other = torch.accelerator.current_accelerator(check_available=True)
        found = (
            f"{other.type}: statistics by torch's operations" if other else f"cpu, {torch.get_num_threads()} threads"
        )
        yield Check("device", True, found)
        return
    has_triton = find_spec("triton") is not None
    without = "" if has_triton else "without triton, statistics are computed by torch's operations, which takes longer"
    found = f"{torch.cuda.get_device_name()}, capability {torch.cuda.get_device_capability()}"
    yield Check("device", has_triton, found, without)


def _check_folders() -> Iterator[Check]:
    for name, folder, repair in (
        ("folder of runs", PARENT if PARENT.is_dir() else Path.cwd(), "`retrograd run -o PATH` writes elsewhere"),
        ("temporary folder", Path(tempfile.gettempdir()), "set TMPDIR: torch.compile and --open write there"),
    ):
        is_fine = os.access(folder, os.W_OK | os.X_OK)
        found = f"{folder.absolute()} can{'' if is_fine else 'not'} be written to"
        yield Check(name, is_fine, found, "" if is_fine else repair)


def _check_others() -> Iterator[Check]:
    """What others run in every process of this environment."""
    found = [
        f"{hook!r} in {module}.{name}"
        for module, names in GLOBAL_TABLES.items()
        for name in names
        for hook in getattr(import_module(module), name).values()
    ]
    specs = [spec for name in ("sitecustomize", "usercustomize") if (spec := find_spec(name)) and spec.origin]
    found += [f"{each.origin}" for each in specs if Path(str(each.origin)).parent != BOOTSTRAP]
    found += [f"{each.value}, a backend that torch loads" for each in entry_points(group="torch.backends")]
    yield Check("hooks of others", True, "; ".join(found) or "none on all modules or optimizers, no sitecustomize")
    is_hooked = (Path(sysconfig.get_path("purelib")) / HOOK).is_file()
    yield Check("python -I", True, "is recorded" if is_hooked else "is not recorded before `retrograd install-hook`")


_CHECKS = (_import_retrograd, _check_parts, _check_names, _check_device, _check_folders, _check_others)
