"""The files of ``src/retrograd`` as syntax trees, by the names of their modules."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "retrograd"


def name_module(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> dict[str, ast.Module]:
    """They are parsed when a test asks for them: to collect the tests takes no time for it."""
    return {name_module(path): ast.parse(path.read_text(), str(path)) for path in sorted(SOURCE.rglob("*.py"))}
