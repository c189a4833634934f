"""Data inside a page: as JSON that ends no script, or packed as gzip in base64. ``js/payload.js`` reads both."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any


def escape_json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return _print_json(value).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def pack_json(value: Any) -> str:
    """Packed JSON; equal values give equal text."""
    return pack_bytes(_print_json(value).encode())


def pack_bytes(data: bytes) -> str:
    """Packed bytes; equal bytes give equal text."""
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode("ascii")


def _print_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
