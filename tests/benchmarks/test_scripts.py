"""Benchmarks are run by hand, so nobody would see that something they need has another name now."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = {path.stem: path for folder in (FOLDER, FOLDER / "findings") for path in sorted(folder.glob("*.py"))}


def find_missing(script: str) -> Iterator[str]:
    """Names of ours, or of another script, that this one uses and that are not there; also within its functions."""
    for each in ast.walk(ast.parse(SCRIPTS[script].read_text())):
        if isinstance(each, ast.ImportFrom) and each.module and each.module.partition(".")[0] == "retrograd":
            yield from (f"{each.module}.{alias.name}" for alias in each.names if not is_there(each.module, alias.name))
        elif isinstance(each, ast.ImportFrom) and each.module in SCRIPTS:
            there = list_names(each.module)
            yield from (f"{each.module}.{alias.name}" for alias in each.names if alias.name not in there)
        elif isinstance(each, ast.Import):
            ours = [alias.name for alias in each.names if alias.name.startswith("retrograd.")]
            yield from (name for name in ours if not is_there(*name.rsplit(".", 1)))
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "rg":
            yield from [] if is_there("retrograd", each.attr) else [f"rg.{each.attr}"]


def is_there(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("retrograd"):
            pytest.skip(f"{error.name} is not installed")
        return False
    return True


def list_names(script: str) -> set[str]:
    """What a script has at its top level."""
    found: set[str] = set()
    for each in ast.parse(SCRIPTS[script].read_text()).body:
        if isinstance(each, ast.FunctionDef | ast.ClassDef):
            found.add(each.name)
        elif isinstance(each, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in each.names}
        else:
            found |= {name.id for name in ast.walk(each) if isinstance(name, ast.Name)}
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_script_uses_is_there(script: str) -> None:
    assert list(find_missing(script)) == []
