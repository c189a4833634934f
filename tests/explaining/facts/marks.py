"""Lines of a source file that are marked by a comment at their end: ``loss.backward()  # at: backward``."""

from __future__ import annotations

from pathlib import Path


def marked(file: str) -> dict[str, str]:
    """Mark → ``file:line``."""
    lines = enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1)
    return {line.rpartition("# at: ")[2]: f"{file}:{number}" for number, line in lines if "# at: " in line}
