"""A library that is missing or too old is told; and nobody pays for what they do not use."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrograd.core.errors import LibraryError
from retrograd.core.libraries import library_needed

LIBRARIES = {"lightning": "lightning", "transformers": "transformers", "accelerate": "accelerate"}


def test_one_that_is_not_installed() -> None:
    with pytest.raises(LibraryError) as raised, library_needed("no-such-trainer", "1.0"):
        pytest.fail("nothing is imported")
    assert isinstance(raised.value, ImportError)
    assert "retrograd[no-such-trainer]" in raised.value.repair


@pytest.mark.parametrize(("found", "is_enough"), [("2.4.9", False), ("2.5.0rc1", True), ("10.0", True), ("2.10", True)])
def test_one_that_is_too_old(found: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrograd.core.libraries.version", lambda _: found)
    if is_enough:
        with library_needed("trainer", "2.5"):
            return
    with pytest.raises(LibraryError, match=rf"{found}.*2\.5 or newer"), library_needed("trainer", "2.5"):
        pytest.fail("nothing is imported")


def test_one_that_is_broken() -> None:
    with pytest.raises(LibraryError, match="cannot be imported"), library_needed("pytest", "1.0"):
        importlib.import_module("no_such_module")


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_told_by_the_file_for_it(name: str) -> None:
    code = f"""
import sys
sys.modules[{LIBRARIES[name]!r}] = None
from retrograd.core.errors import LibraryError
try:
    import retrograd.integrations.{name}
except LibraryError as error:
    print(error)
"""
    told = run(code)
    assert "[missing-library]" in told
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        assert "is not installed" in told
    else:
        assert "cannot be imported" in told


def test_retrograd_loads_none_of_it() -> None:
    code = """
import sys
import retrograd as rg
[getattr(rg, name) for name in rg.__all__]
print(sorted(name for name in sys.modules if name.startswith("retrograd.integrations")))
print([name for name in ("lightning", "transformers", "accelerate") if name in sys.modules])
"""
    assert run(code).split() == ["[]", "[]"]


def run(code: str) -> str:
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": source},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout
