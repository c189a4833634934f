"""Text of others, for a terminal: names and messages that were read may hold sequences that command it."""

from __future__ import annotations

import re

_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, marks that turn the direction of text, and surrogates that stand alone."""


def show_plainly(text: str) -> str:
    """A text with what would command a terminal, or cannot be encoded, written as escapes."""
    return _COMMANDS.sub(lambda match: ascii(match[0])[1:-1], text)
