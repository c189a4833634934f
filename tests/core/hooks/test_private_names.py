"""The table of torch's private names is what the source uses, no more and no less."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from retrograd.core.hooks.private_names import NEEDED, OPTIONAL
from tests import warm
from tests.sources import SOURCE, trees

TABLE = "retrograd.core.hooks.private_names"
NOT_TORCHS = {
    "_getframe", "_current_frames",  # Python's
    "_asdict", "_fields",  # of named tuples
    "_HANDLER", "_batches_that_stepped",  # of our own compiled code, and of Lightning
    "torch._C",  # as a whole
}  # fmt: skip
MODULE = re.compile(r"torch(\.\w+)*\._\w+(\.\w+)*")


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def list_trees() -> list[ast.Module]:
    return [tree for name, tree in trees().items() if name != TABLE]


def defined() -> set[str]:
    """Every name that our own source gives to something."""
    found: set[str] = set()
    for tree in list_trees():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name("self" | "cls"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Assign(targets=[ast.Name("__slots__")], value=value):
                    found |= {each.value for each in ast.walk(value) if isinstance(each, ast.Constant)}
    return found


def dotted(node: ast.expr) -> str:
    """``torch.a.b`` as text; empty where it begins with anything else than torch."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(["torch", *reversed(parts)]) if isinstance(node, ast.Name) and node.id == "torch" else ""


def names_in(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """The private names of torch's in a file: dotted ones as far as they are written, and attributes of objects."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute() if text := dotted(node):
                if id(node) not in inner and is_private(text):
                    yield text
            case ast.Attribute(attr=name) if is_private(name) and name not in ours | NOT_TORCHS:
                yield f".{name}"
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "torch":
                yield from (text for each in node.names if is_private(text := f"{module}.{each.name}"))
            case ast.Constant(value=str(text)) if MODULE.fullmatch(text):
                yield text


def as_used(name: str) -> str:
    """A name of the table as the source has it: attributes of objects without their holder."""
    return f".{name.partition(':')[2].removeprefix('self.')}" if ":" in name else name


def test_the_table_has_what_is_used_and_nothing_else() -> None:
    ours = defined()
    used = {name for tree in list_trees() for name in names_in(tree, ours)}
    needed = list(dict.fromkeys(as_used(name) for each in NEEDED for name in each.names))
    optional = {name for each in OPTIONAL.values() for name in each.names}
    known = {each for name in optional for each in (name.partition(":")[0], name.replace(":", "."))}
    known |= {f".{name.rpartition('.')[2]}" for name in optional}
    print(f"{len(needed)} names that are needed, {len(optional)} that may be missing")
    assert sorted(used - set(needed) - known - NOT_TORCHS) == [], "used, and not in the table"
    assert sorted(set(needed) - used) == [], "in the table, and not used"
    assert len(names := [name for each in NEEDED for name in each.names]) == len(set(names))


def test_each_group_that_may_be_missing_is_asked_for() -> None:
    asked = {
        key
        for tree in list_trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "OPTIONAL"
        for key in [ast.literal_eval(node.slice)]
    }
    assert asked == set(OPTIONAL)


def test_the_page_is_made_of_it() -> None:
    docs = SOURCE.parents[1] / "docs"
    made = runpy.run_path(str(docs / "make_private_names.py"))
    assert (docs / "private_names.md").read_text() == made["build_page"]()


FIXED = re.compile(
    r"\.|.*:self\.|torch\._C\._functions\.AccumulateGrad:|torch\._C\._FunctionBase\.|.*\.queue_callback$"
    r"|torch\.Tensor:_backward_hooks$"
)
"""Names that cannot be taken away from a torch that has them: of C types, or given to each object."""

TAKEN = [
    pytest.param(name, each.without, marks=[pytest.mark.thorough] if place else [])
    for each in NEEDED
    for place, name in enumerate(name for name in each.names if not FIXED.match(name))
]


@cache
def use_without(name: str) -> dict[str, Any]:
    words = [sys.executable, str(Path(__file__).with_name("without_name.py")), *([name] if name else [])]
    done = warm.run(words, capture_output=True, text=True, timeout=200, check=True, stage="torch")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.slow
@pytest.mark.parametrize(("name", "without"), TAKEN)
def test_without_a_name_what_the_table_says_happens_and_no_result_is_wrong(name: str, without: str) -> None:
    """What is not known without it raises, or is warned of; all else is what it was."""
    usual, found = use_without(""), use_without(name)
    assert usual.pop("there", True)
    assert not found["there"], "retrograd doctor would not miss it"
    raised = {use for use, told in found.items() if use not in ("there", "said") and str(told).startswith("raised ")}
    if without == "retrograd cannot be imported":
        assert "load" in raised
    if not (raised or found["said"]):  # what needs it is not among these uses
        assert {**found, "there": True} == {**usual, "there": True}
    if not found["said"]:
        assert {use: told for use, told in found.items() if use not in (*raised, "there")} == {
            use: told for use, told in usual.items() if use not in (*raised, "there")
        }


def test_with_all_names_nothing_raises() -> None:
    """Else nothing is proved by what is above."""
    assert "raised " not in json.dumps(use_without(""))
