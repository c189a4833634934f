"""A site: one named place in a model that has a value and a gradient.

    blocks.3.attn:output          value of a module's output
    blocks.3.attn:output.grad     its gradient
    blocks.3.attn:output.logits   one leaf of a nested output
    blocks.3.attn:input.x.grad    gradient of an argument, through this module alone
    blocks.3.fc:weight.update     what the optimizer added to a parameter
    blocks.3.fc:weight.local.grad what this process alone has found of a gradient that several reduce
    rnn.cell#2:output             second call of a reused module in one micro-step
    watch/logits.grad             a tensor watched by hand
    optimizer/SGD:0.2.grad        a parameter of no module: the third of the first group of an optimizer
    watch/state:0.grad            one of a nest of tensors watched by hand
    self:output                   the recorded model itself

Without a number a name is of every call, ``rnn.cell#1:output`` of the first alone. Of a site itself the call is always
known: the first one is printed without its number, so a module that is called once has one name.

A key or path that would be misread is printed as a JSON string: ``fc:output."a.b"``, ``"odd:name":output``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Literal

from retrograd.core.errors import SiteSyntaxError

Quantity = Literal["value", "grad", "update"]
Kind = Literal["output", "input", "parameter", "watched"]

ROOT = "self"
"""Path of the recorded model itself."""

WATCH = "watch/"
"""Prefix of the path of tensors that are watched by hand."""

OPTIMIZER = "optimizer/"
"""Prefix of the path of tensors that an optimizer updates and that belong to no module."""

BEFORE = "before"
"""The last key of a site whose tensor is recorded as it was before rules changed it: ``fc:output.before.grad``."""

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_]+")
_PLAIN_PATH = re.compile(r'(?!")[^:#]+')
_RESERVED_KEYS = frozenset({"grad", "update"})
_KEY = re.compile(rf"\.(?:(?P<plain>[A-Za-z0-9_]+)|(?P<quoted>{_QUOTED}))")
_SITE = re.compile(rf'(?P<path>{_QUOTED}|(?!")[^:#]+)(?:#(?P<call>[1-9][0-9]*))?:(?P<slot>.+)', re.DOTALL)
_CALL_SIGN = re.compile(rf"{_QUOTED}|#")
_WATCH_SITE = re.compile(r"(?P<path>watch/[^:#]+?)(?:#(?P<call>[1-9][0-9]*))?(?P<grad>\.grad)?")


@dataclass(frozen=True, slots=True)
class Site:
    """Where a tensor was seen.

    Attributes:
        path: module path as in ``named_modules()``, ``"self"`` for the model itself, ``watch/NAME`` for a
            tensor watched by hand.
        keys: the slot and the way into it: ``("output",)``, ``("output", "logits")``, ``("input", "x")``,
            ``("weight",)``; for a watched tensor the way into the nest, empty if it is none.
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
        return self.keys[0] if self.keys and not self.is_watched else ""

    @property
    def is_watched(self) -> bool:
        """True if the tensor was watched by hand."""
        return self.path.startswith(WATCH)

    @property
    def kind(self) -> Kind:
        """The kind of tensor: a module's output or input, a parameter, or a tensor watched by hand."""
        if self.is_watched:
            return "watched"
        slot = self.slot
        return "output" if slot == "output" else "input" if slot == "input" else "parameter"

    @property
    def value(self) -> Site:
        """The site of the value that this gradient or update belongs to."""
        return replace(self, quantity="value")

    @property
    def grad(self) -> Site:
        """The site of this value's gradient."""
        return replace(self, quantity="grad")

    @property
    def update(self) -> Site:
        """The site of what an optimizer adds to this parameter."""
        return replace(self, quantity="update")

    @property
    def first_call(self) -> Site:
        """The same place at the module's first call."""
        return replace(self, call=1)

    @property
    def label(self) -> str:
        """The text after the path, for the value: ``output``, ``#2:output.logits``, ``weight``."""
        return self._print_label("" if self.call == 1 else f"#{self.call}")

    @property
    def numbered_label(self) -> str:
        """The same with the number of the first call, too: ``#1:output``."""
        return self._print_label(f"#{self.call}")

    @property
    def printed_path(self) -> str:
        """Its path as it stands in its name."""
        return self.path if not self.keys or _PLAIN_PATH.fullmatch(self.path) else json.dumps(self.path)

    @property
    def numbered(self) -> str:
        """Its name with the number of the call, of the first one too: ``rnn.cell#1:output``."""
        return self._print(f"#{self.call}")

    def __str__(self) -> str:
        return self._print("" if self.call == 1 else f"#{self.call}")

    def _print(self, call: str) -> str:
        colon = ":" if self.keys and not call else ""
        tail = "" if self.quantity == "value" else f".{self.quantity}"
        return f"{self.printed_path}{colon}{self._print_label(call)}{tail}"

    def _print_label(self, call: str) -> str:
        keys = ".".join(_print_key(key) for key in self.keys)
        return f"{call}:{keys}" if call and keys else call + keys


LOCAL = "local"
"""The last key of the site of a process's own addend: of a gradient that several reduce, or of any sum."""


def own_addend(site: Site) -> Site:
    """The site of this process's addend of what a site would have: ``fc:output.local.grad``."""
    return site if site.keys[-1:] == (LOCAL,) else replace(site, keys=(*site.keys, LOCAL))


def local_gradient(parameter: Site) -> Site:
    """The site of this process's own part of a parameter's gradient: ``fc:weight.local.grad``."""
    return replace(parameter, keys=(*parameter.keys, LOCAL), quantity="grad")


ACCUMULATED = "accumulated"
"""The last key of the site of what an optimizer gets of several passes."""


def accumulated_gradient(parameter: Site) -> Site:
    """The site of what an optimizer gets of several passes, before it updates: ``fc:weight.accumulated``."""
    return replace(parameter, keys=(*parameter.keys, ACCUMULATED))


def read_accumulated(site: Site) -> Site | None:
    """The parameter of which this is what an optimizer gets; None for any other site."""
    is_one = site.kind == "parameter" and site.keys[1:] and site.keys[-1] == ACCUMULATED
    return replace(site, keys=site.keys[:-1]) if is_one else None


def parse_site(text: str) -> Site:
    """Read the name of a site. ``str(parse_site(text))`` is ``text`` in its shortest form.

    Raises:
        SiteSyntaxError: if the text is not of the form ``path[#call]:slot[.key …][.grad|.update]`` or
            ``watch/NAME[#call][:key …][.grad]``.
    """
    if match := _WATCH_SITE.fullmatch(text):
        return Site(match["path"], call=int(match["call"] or 1), quantity="grad" if match["grad"] else "value")
    match = _SITE.fullmatch(text)
    path = _read_quoted(match["path"]) if match else None
    slot = _parse_slot(match["slot"]) if match else None
    if match is None or not path or slot is None:
        raise SiteSyntaxError(
            f"{text!r} is not the name of a site.",
            repair="write a module path, a colon and a slot, as in 'blocks.3.attn:output.grad'.",
        )
    keys, quantity = slot
    return Site(path, keys, int(match["call"] or 1), quantity)


def parse_leniently(text: str) -> Site:
    """Read the name of a site; one that is none, as of a foreign record, is the path of a site of its own."""
    try:
        return parse_site(text)
    except SiteSyntaxError:
        return Site(text)


def name_like(site: Site, text: str) -> str:
    """The name of a site, with the number of its call where another name has that of its own."""
    return site.numbered if says_call(text) else str(site.first_call)


def says_call(text: str) -> bool:
    """Return whether a name of a site, or a glob over names, says which call it is of."""
    return any(found[0] == "#" for found in _CALL_SIGN.finditer(text))


def check_watch_name(name: str) -> None:
    """Make sure that a tensor can be watched under this name.

    Raises:
        SiteSyntaxError: if it could not be told from the name of another site.
    """
    match = _WATCH_SITE.fullmatch(WATCH + name)
    if match is None or match["path"] != WATCH + name:
        raise SiteSyntaxError(
            f"{name!r} is not a valid name of a watched tensor.",
            repair="leave out ':' and '#', and do not end it in '.grad'.",
        )


def _print_key(key: str) -> str:
    if _PLAIN_KEY.fullmatch(key) and key not in _RESERVED_KEYS:
        return key
    return json.dumps(key)


def _parse_slot(text: str) -> tuple[tuple[str, ...], Quantity] | None:
    keys: list[str] = []
    position = 0
    text = "." + text
    while position < len(text):
        match = _KEY.match(text, position)
        if match is None:
            return None
        position = match.end()
        key = match["plain"] or _read_quoted(match["quoted"])
        if key is None:
            return None
        if match["plain"] in _RESERVED_KEYS:
            return (tuple(keys), "grad" if key == "grad" else "update") if keys and position == len(text) else None
        keys.append(key)
    return tuple(keys), "value"


def _read_quoted(text: str) -> str | None:
    """Read a JSON string; any other text as it is; None when the string is not valid."""
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except json.JSONDecodeError:
        return None
