"""A pattern: one way to say which sites are meant.

    "blocks.*:output.grad"      glob over whole names; ``*`` matches dots too
    "blocks.%:output.grad"      ``%`` matches one name between dots: the blocks, and not what is in them
    "blocks.3"                  no colon: everything that is recorded by default of these modules
    "*:parameters.grad"         all sites of a kind: ``outputs``, ``inputs`` or ``parameters``; see below
    "re:^blocks[.][0-3]:"       regular expression, searched; a compiled one does as well
    nn.LayerNorm                a module type: everything that is recorded by default of its instances
    model.blocks[3]             a module, where the model is at hand: the same as its name
    lambda c: c.site.path ...   any predicate on a :class:`Candidate`

Functions that modules call are meant by patterns that name them, behind a slash or by the nodes that they make, and by
no others:

    "*/relu"                    everything that is recorded of these functions: output and gradient
    "blocks.*/softmax:output"   glob over whole names, as for modules; "*/*" for all functions
    "*:ReluBackward0"           the gradient that comes to nodes of this kind, made by functions of these modules

A pattern without a ``#`` means every call: names are held against it without their call. One with a ``#`` is held
against names with the number of the call, of the first one too: ``fc#1:output``, ``fc#*:output.grad``, ``fc#2``.

Patterns for all sites of one kind: ``*:parameters.grad``, ``blocks.*:outputs``, ``fc#2:inputs.grad``.

    PATH[#CALL]:outputs[.grad]                 every tensor that these modules return
    PATH[#CALL]:inputs[.grad]                  every tensor that they are called with
    PATH:parameters[.grad|.update]             every parameter of their own

A text that is the name of a site or of a module is that before it is a pattern, where the names are known:
``cols.user[id]:output``. A ``%`` in front never means the model itself: ``%:output`` is of its direct children.

What only a name of its own stands for, a rank's own gradient (``fc:weight.local.grad``) and what rules have changed
(``fc:weight.before.grad``), is not among the parameters. No site is called like this: a parameter by the name of
``outputs`` has the site ``fc:parameter.outputs``.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from retrograd.core.errors import PatternError
from retrograd.core.sites.site import BEFORE, LOCAL, OPTIMIZER, ROOT, WATCH, Kind, Quantity, Site, says_call

_CALL = re.compile(r"[1-9][0-9]*|[0-9*?\[\]!-]*[*?\[][0-9*?\[\]!-]*")


MAGIC = re.compile(r"[*?\[%]")
"""What makes a text a glob."""

_ONE_NAME = "\ue000"
_SETS = re.compile(r"\[!?\]?[^\]]*\]|%")


@functools.lru_cache(1024)
def translate_glob(glob: str) -> Callable[[str], object]:
    """The question whether a glob matches all of a text, or is that text."""
    marked = _SETS.sub(lambda found: _ONE_NAME if found[0] == "%" else found[0], glob)
    start = rf"(?!{ROOT}(?:[:#]|\Z)|{WATCH})" if marked.startswith(_ONE_NAME) else ""
    match = re.compile(start + fnmatch.translate(marked).replace(_ONE_NAME, "[^.:#]+")).match
    return (lambda text: text == glob or match(text)) if MAGIC.search(glob) else match


def escape_glob(text: str) -> str:
    """The glob that matches this text alone."""
    return MAGIC.sub(lambda found: f"[{found[0]}]", text)


def check_call(pattern: str, call: str) -> None:
    """Make sure that what stands behind a ``#`` can be the number of a call.

    Raises:
        PatternError: if no call has such a number.
    """
    if not _CALL.fullmatch(call):
        raise PatternError(
            f"{pattern!r} asks for a call number {call!r}.",
            repair="write 'fc#1:output' for the first call, 'fc#*:output' or 'fc:output' for every call.",
            reason="the calls of a module are counted from 1.",
        )


_QUANTITIES: dict[str, tuple[str, ...]] = {"outputs": ("grad",), "inputs": ("grad",), "parameters": ("grad", "update")}
_KINDS: dict[str, Kind] = {"outputs": "output", "inputs": "input", "parameters": "parameter"}
_FORM = re.compile(
    r'(?P<path>"(?:[^"\\]|\\.)*"|[^:#]+)(?:#(?P<call>[^:]*))?:(?P<kind>outputs|inputs|parameters)(?:\.(?P<rest>.*))?'
)


@dataclass(frozen=True, slots=True)
class KindPattern:
    """All sites of one kind.

    Attributes:
        path: a glob over the paths of modules.
        call: a glob over the numbers of calls; None for every call.
        kind: of which kind.
        quantity: values, gradients or updates.
    """

    path: str
    call: str | None
    kind: Kind
    quantity: Quantity

    def matches(self, site: Site) -> bool:
        """Return whether a site is meant."""
        return (
            site.kind == self.kind
            and site.quantity == self.quantity
            and not (site.kind == "parameter" and site.keys[1:] and site.keys[-1] in (BEFORE, LOCAL))
            and bool(translate_glob(self.path)(site.printed_path))
            and (self.call is None or bool(translate_glob(self.call)(str(site.call))))
        )

    def may_match_later(self, site: Site) -> bool:
        """Return whether it may match another call of what has this site."""
        return self.call is not None and site.kind == self.kind and bool(translate_glob(self.path)(site.printed_path))


def parse_kinds(pattern: str) -> KindPattern | None:
    """Read a pattern for a kind; None for a pattern of another form.

    Raises:
        PatternError: if it asks for what no site of this kind has.
    """
    form = None if pattern.startswith(WATCH) else _FORM.fullmatch(pattern)
    if form is None:
        return None
    kind, rest, call = form["kind"], form["rest"], form["call"]
    if rest is not None and rest not in _QUANTITIES[kind]:
        forms = " or ".join(f"'{form['path']}:{kind}{tail}'" for tail in ("", *(f".{q}" for q in _QUANTITIES[kind])))
        raise PatternError(f"{pattern!r} asks for {rest!r} of {kind}.", repair=f"write {forms}.")
    if call is not None:
        check_call(pattern, call)
        if kind == "parameters" and rest is not None:
            raise PatternError(
                f"{pattern!r} asks for one call of a {rest}.",
                repair=f"write '{form['path']}:{kind}.{rest}'.",
                reason="a parameter has one for all calls of its module.",
            )
    quantity: Quantity = "grad" if rest == "grad" else "update" if rest == "update" else "value"
    return KindPattern(form["path"], call, _KINDS[kind], quantity)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A site that could be recorded.

    Attributes:
        site: its name, at the first call.
        module: the module that has it; None for a tensor watched by hand.
        node: for the output of a function that this module calls, the kind of node that it has made, where a pattern
            asks for that; empty where there is none. None for everything else.
    """

    site: Site
    module: Any = None
    node: str | None = None

    @property
    def is_default(self) -> bool:
        """True if it is recorded when nothing is asked for: outputs and gradients of all kinds, and updates."""
        site = self.site
        if site.slot == "input":
            return False
        return site.is_watched or site.slot == "output" or site.quantity != "value"


Pattern = str | re.Pattern[str] | type | Callable[[Candidate], bool]
Test = Callable[[Candidate], bool]


def is_module(pattern: object) -> bool:
    """Return whether it is a module itself; torch is not loaded for the question."""
    return hasattr(type(pattern), "named_modules")


_CALLED = re.compile(r'(?P<path>(?:"(?:[^"\\]|\\.)*"|[^#"])*)#(?P<call>[^:]*)(?::.*)?', re.DOTALL)


def compile_pattern(pattern: Pattern) -> Test:
    """The question whether a site is meant.

    Raises:
        PatternError: for a pattern of the wrong kind, or an empty one.
    """
    if isinstance(pattern, str):
        regex = as_regex(pattern)
        if regex is not None:
            return compile_pattern(regex)
        if not pattern:
            raise PatternError("An empty pattern selects no site.", repair="use '*' for every site.")
        return _compile_nodes(pattern) or _compile_glob(pattern)
    if isinstance(pattern, re.Pattern):
        name = name_for(asks_for_call(pattern))
        return lambda candidate: pattern.search(name(candidate.site)) is not None
    if isinstance(pattern, type):
        return lambda candidate: isinstance(candidate.module, pattern) and candidate.is_default
    if is_module(pattern):
        return lambda candidate: candidate.module is pattern and candidate.is_default
    if callable(pattern):
        return lambda candidate: bool(pattern(candidate))
    raise PatternError(
        f"{pattern!r} is not a pattern.",
        repair="give a glob such as 'blocks.*:output', a compiled regex, a module type, or a predicate.",
    )


UNKNOWN_NODE = "?"
"""In place of a kind of node that is not known yet, so that it may be any."""

_NODES = re.compile(r"(?P<path>[^:#]+):(?P<node>[^.:#]*Backward[^.:#]*)(?:\.grad)?")


def asks_for_node(pattern: Pattern) -> bool:
    """Return whether a pattern means gradients by the kind of node that they come to: ``*:ReluBackward0``."""
    return isinstance(pattern, str) and not pattern.startswith("re:") and _NODES.fullmatch(pattern) is not None


def names_functions(pattern: Pattern) -> bool:
    """Return whether a pattern may mean functions that modules call: ``*/relu:output.grad``, ``*:ReluBackward0``."""
    regex = as_regex(pattern)
    text: object = pattern if regex is None else regex.pattern
    if not isinstance(text, str):
        return False
    return asks_for_node(pattern) or "/" in _NO_FUNCTION.sub("", text).partition(":")[0]


_NO_FUNCTION = re.compile(rf"{WATCH}|{OPTIMIZER}")


def _compile_nodes(pattern: str) -> Test | None:
    found = _NODES.fullmatch(pattern)
    if found is None:
        return None
    in_path, in_node = translate_glob(found["path"]), translate_glob(found["node"])
    return lambda candidate: (
        candidate.site.quantity == "grad"
        and bool(candidate.node and (candidate.node == UNKNOWN_NODE or in_node(candidate.node)))
        and bool(in_path(candidate.site.path.rpartition("/")[0]))
    )


def as_regex(pattern: Pattern) -> re.Pattern[str] | None:
    """The regular expression that a pattern is; None if it is of another kind.

    Raises:
        PatternError: if it is not a valid one.
    """
    if isinstance(pattern, re.Pattern):
        return pattern
    if not isinstance(pattern, str) or not pattern.startswith("re:"):
        return None
    try:
        return re.compile(pattern[3:])
    except re.error as error:
        raise PatternError(
            f"{pattern[3:]!r} is not a regular expression: {error}.", repair="correct the expression."
        ) from None


def asks_for_call(pattern: Pattern) -> bool:
    """Return whether a pattern says which calls of modules it means."""
    regex = as_regex(pattern)
    if regex is not None:
        return "#" in regex.pattern
    return isinstance(pattern, str) and says_call(pattern)


def name_for(by_call: bool) -> Callable[[Site], str]:
    """The names that a pattern is held against: with the number of the call, or without."""
    return _print_numbered if by_call else _print_plain


def describe_pattern(pattern: Pattern) -> str:
    """A pattern as it was written, for people."""
    if isinstance(pattern, str):
        return repr(pattern)
    if isinstance(pattern, re.Pattern):
        return f"'re:{pattern.pattern}'"
    return f"a {type(pattern).__name__}" if is_module(pattern) else getattr(pattern, "__qualname__", repr(pattern))


def _compile_glob(pattern: str) -> Test:
    kinds = parse_kinds(pattern)
    if kinds is not None:
        return lambda candidate: kinds.matches(candidate.site)
    called = _CALLED.fullmatch(pattern) if says_call(pattern) else None
    if called is not None:
        check_call(pattern, called["call"].removesuffix(".grad") if pattern.startswith(WATCH) else called["call"])
    if ":" in pattern or pattern.startswith(WATCH) or pattern == "*":
        matches, name = translate_glob(pattern), name_for(called is not None)
        return lambda candidate: bool(matches(name(candidate.site)))
    if called is not None:
        return _compile_calls(called["path"], called["call"])
    in_path = translate_glob(pattern)
    return lambda candidate: bool(in_path(candidate.site.path)) and candidate.is_default


def _compile_calls(path: str, call: str) -> Test:
    """The sites of some calls of modules that are recorded by default."""
    in_path, in_call = translate_glob(path), translate_glob(call)
    return lambda candidate: (
        candidate.site.kind == "output" and bool(in_path(candidate.site.path) and in_call(str(candidate.site.call)))
    )


def _print_plain(site: Site) -> str:
    return str(site.first_call)


def _print_numbered(site: Site) -> str:
    """No text for what has no calls: the gradient of a parameter, and its update."""
    return "" if site.kind == "parameter" and site.quantity != "value" else site.numbered
