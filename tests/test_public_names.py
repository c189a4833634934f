"""What a user may rely on: the names that ``import retrograd as rg`` gives."""

from __future__ import annotations

import inspect
import pkgutil

import pytest

import retrograd as rg

PUBLIC = {
    "History",
    "Keep",
    "Recording",
    "RetrogradError",
    "RetrogradWarning",
    "every",
    "log_schedule",
    "on_jump",
    "on_nonfinite",
    "open_run",
    "plan",
    "record",
    "watch",
    "write_report",
}


def test_the_list_is_the_contract() -> None:
    assert {
        name for name, thing in vars(rg).items() if not name.startswith("_") and not inspect.ismodule(thing)
    } == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_has_a_docstring_of_its_own(name: str) -> None:
    thing = getattr(rg, name)
    assert inspect.isclass(thing) or inspect.isroutine(thing)
    assert "__doc__" in vars(thing) or inspect.isroutine(thing)
    assert thing.__doc__, f"rg.{name} has no docstring"


def test_no_submodule_shares_the_name_of_something_exported() -> None:
    assert not PUBLIC & {module.name for module in pkgutil.iter_modules(rg.__path__)}


def test_the_package_says_its_version() -> None:
    assert rg.__version__ == "0.1.0"
