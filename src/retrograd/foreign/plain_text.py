"""Text of others, for a terminal: names and messages that were read may hold sequences that command it."""

from __future__ import annotations


def show_plainly(text: str, keep: str = "\n\t") -> str:
    """A text with what would command a terminal, turn its direction, or cannot be encoded, written as escapes.

    Args:
        text: any text.
        keep: characters that are left as they are, though none can see them.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else ascii(letter)[1:-1] for letter in text)
