"""The JSON files of a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from retrograd.files import to_utf8, write_whole


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file; what JSON does not know is written as its text."""
    with write_whole(path) as file:
        file.write(to_utf8(json.dumps(content, indent=2, default=str, ensure_ascii=False)))
