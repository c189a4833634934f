"""A site: one named place in a model that has a value and a gradient.

    blocks.3.attn:output          value of a module's output
    blocks.3.attn:output.grad     its gradient
    blocks.3.attn:output.logits   one leaf of a nested output
    blocks.3.attn:input.x.grad    gradient of an argument, through this module alone
    blocks.3.fc:weight.update     what the optimizer added to a parameter
    rnn.cell#2:output             second call of a reused module in one micro-step
    watch/logits.grad             a tensor watched by hand
    self:output                   the recorded model itself
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Literal

from retrograd.errors import SiteSyntaxError

Quantity = Literal["value", "grad", "update"]

ROOT = "self"
"""Path of the recorded model itself."""

WATCH = "watch/"
"""Prefix of the path of tensors that are watched by hand."""

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_]+")
_RESERVED_KEYS = frozenset({"grad", "update"})
_KEY = re.compile(r'\.(?:(?P<plain>[A-Za-z0-9_]+)|(?P<quoted>"(?:[^"\\]|\\.)*"))')
_MODULE_SITE = re.compile(r"(?P<path>[^:#]+)(?:#(?P<call>[1-9][0-9]*))?:(?P<slot>.+)", re.DOTALL)
_WATCH_SITE = re.compile(r"watch/(?P<name>[^:#]+?)(?:#(?P<call>[1-9][0-9]*))?(?P<grad>\.grad)?")


@dataclass(frozen=True, slots=True)
class Site:
    """Where a tensor was seen.

    Attributes:
        path: module path as in ``named_modules()``, ``"self"`` for the model itself, ``watch/NAME`` for a
            tensor watched by hand.
        keys: the slot and the way into it: ``("output",)``, ``("output", "logits")``, ``("input", "x")``,
            ``("weight",)``; empty for a watched tensor.
        call: which call of the module within one micro-step, from 1.
        quantity: the value itself, its gradient, or a parameter's update.
    """

    path: str
    keys: tuple[str, ...] = ()
    call: int = 1
    quantity: Quantity = "value"

    @property
    def slot(self) -> str:
        """First key: ``"output"``, ``"input"`` or a parameter's name; empty for a watched tensor."""
        return self.keys[0] if self.keys else ""

    @property
    def value(self) -> Site:
        """The site of the value that this gradient or update belongs to."""
        return replace(self, quantity="value")

    @property
    def grad(self) -> Site:
        """The site of this value's gradient."""
        return replace(self, quantity="grad")

    @property
    def first_call(self) -> Site:
        """The same place at the module's first call."""
        return replace(self, call=1)

    def __str__(self) -> str:
        call = "" if self.call == 1 else f"#{self.call}"
        tail = "" if self.quantity == "value" else f".{self.quantity}"
        if not self.keys:
            return f"{self.path}{call}{tail}"
        return f"{self.path}{call}:{'.'.join(_print_key(key) for key in self.keys)}{tail}"


def parse_site(text: str) -> Site:
    """Read the name of a site. ``str(parse_site(text))`` is ``text`` in its shortest form.

    Raises:
        SiteSyntaxError: if the text is not of the form ``path[#call]:slot[.key …][.grad|.update]`` or
            ``watch/NAME[#call][.grad]``.
    """
    if match := _WATCH_SITE.fullmatch(text):
        return Site(
            WATCH + match["name"],
            call=int(match["call"] or 1),
            quantity="grad" if match["grad"] else "value",
        )
    match = _MODULE_SITE.fullmatch(text)
    keys = _parse_keys(match["slot"]) if match else None
    if match is None or not keys or text.startswith(WATCH):
        raise SiteSyntaxError(
            f"{text!r} is not the name of a site.",
            repair="write a module path, a colon and a slot, as in 'blocks.3.attn:output.grad'.",
        )
    last = keys[-1]
    quantity: Quantity = "value"
    if len(keys) > 1 and last in (".grad", ".update"):
        quantity = "grad" if last == ".grad" else "update"
        keys = keys[:-1]
    return Site(match["path"], tuple(keys), int(match["call"] or 1), quantity)


def _print_key(key: str) -> str:
    if _PLAIN_KEY.fullmatch(key) and key not in _RESERVED_KEYS:
        return key
    return json.dumps(key)


def _parse_keys(text: str) -> list[str] | None:
    """Keys of a slot; an unquoted reserved word comes back with its dot, so that it differs from a key."""
    keys: list[str] = []
    position = 0
    text = "." + text
    while position < len(text):
        match = _KEY.match(text, position)
        if match is None:
            return None
        if match["quoted"] is not None:
            try:
                keys.append(json.loads(match["quoted"]))
            except json.JSONDecodeError:
                return None
        elif match["plain"] in _RESERVED_KEYS:
            if match.end() != len(text):
                return None
            keys.append("." + match["plain"])
        else:
            keys.append(match["plain"])
        position = match.end()
    return keys
