"""Names and globs of sites that are asked of a forward, held against a model.

layer4                  what the module returns, whole, in every call; ``layer4:output`` is the same
lstm:output.0           one tensor of a nested output
fc:input.input          an argument by its name; ``fc:input`` is the dict of all of them
rnn.cell#2:output       the second call of a module
blocks.*                glob over paths: what each of these modules returns, in the model's order
lstm:output.*           glob after the colon: each tensor whose name it matches
blocks.*:outputs        all tensors that these modules return; ``:inputs``, all that they are called with
cell#*                  each tensor of every call

A value of every call has the name as it was asked for where there was one call, and the number of the call in it where
there were several: ``cell#1``, ``cell#2``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from retrograd.core.errors import FeatureError, NoSuchSiteError, SiteSyntaxError
from retrograd.core.hooks.names import NamedModule, compiled_regions, walk_modules
from retrograd.core.hooks.parts import is_compiled
from retrograd.core.sites.pattern import MAGIC, Candidate, KindPattern, parse_kinds, translate_glob
from retrograd.core.sites.selection import Selection
from retrograd.core.sites.site import ROOT, WATCH, Site, parse_site, says_call
from retrograd.tools.features.called_once import is_called_once

Slot = Literal["output", "input"]
SLOTS: tuple[Slot, Slot] = ("output", "input")

EVERY_CALL = 0

_PARTS = re.compile(r"(?P<path>[^:#]+)(?:#(?P<call>[1-9][0-9]*|\*))?(?::(?P<slot>.+))?")
_NO_VALUE = re.compile(r":.*\.(grad|update)")


@dataclass(frozen=True, slots=True)
class FeatureSite:
    """A slot of a module that is asked for, or what lies in it.

    Attributes:
        text: as the user wrote it.
        name: the key in the result; for every call that of a module that is called once, and names of tensors that a
            glob finds are made as they are found.
        entry: the module.
        slot: which side of it.
        call: which of its calls, from 1, or ``EVERY_CALL``.
        keys: the way to one tensor in the slot; empty for all that is there.
        tensors: a glob over the names of tensors in the slot, in place of ``keys``.
        is_optional: it was found by a glob, so the forward need not reach it.
    """

    text: str
    name: str
    entry: NamedModule
    slot: Slot = "output"
    call: int = EVERY_CALL
    keys: tuple[str, ...] = ()
    tensors: str = ""
    is_optional: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether nothing is said of calls, so that a module that is called once is meant as well."""
        return self.call == EVERY_CALL and not says_call(self.text)


def find_feature_sites(model: nn.Module, sites: str | Iterable[str]) -> list[FeatureSite]:
    """Find the slots that names and globs ask for, in the order asked, and a glob's in the order of the model.

    Raises:
        FeatureError: for what cannot be extracted: a gradient, a parameter, a module that is never called, one that
            lies inside a compiled one.
        NoSuchSiteError: for what the model does not have, naming the nearest.
    """
    texts = [sites] if isinstance(sites, str) else list(sites)
    if not texts:
        raise FeatureError("No site is asked for.", repair="name at least one, such as 'layer4' or 'fc:input.input'.")
    search = _NamedModules(walk_modules("", model))
    found = [wanted for text in texts for wanted in search.find(text)]
    return [
        replace(wanted, call=1) if wanted.is_plain and is_called_once(model, wanted.entry.module) else wanted
        for wanted in found
    ]


class _NamedModules:
    """The modules of a model, by their paths."""

    def __init__(self, entries: Sequence[NamedModule]) -> None:
        self._entries = {entry.path: entry for entry in entries}
        self._compiled = compiled_regions(entries)

    def find(self, text: Any) -> Iterator[FeatureSite]:
        _check_form(text)
        kinds = parse_kinds(text)
        if kinds is not None:
            yield from self._find_kind(text, kinds)
            return
        named = self._named(text)
        if named is not None:
            yield self._check(named)
            return
        found = list(self._glob(text)) if MAGIC.search(text) else []
        if not found:
            raise self._name_nearest(text)
        yield from found

    def _named(self, text: str) -> FeatureSite | None:
        """Find the slot for a text that is the name of a module, of one of its calls, or of a site."""
        if text in self._entries:
            return FeatureSite(text, text, self._entries[text])
        path, _, call = text.partition("#")
        if path in self._entries and call.isdecimal() and int(call):
            return FeatureSite(text, text, self._entries[path], call=int(call))
        site = _parse_or_none(text)
        return self._at_site(text, site) if site is not None and site.path in self._entries else None

    def _find_kind(self, text: str, kinds: KindPattern) -> Iterator[FeatureSite]:
        """All tensors of one kind."""
        if kinds.kind not in SLOTS:
            raise _parameter(text)
        calls = "" if kinds.call is None else f"#{kinds.call}"
        found = list(self._glob(f"{kinds.path}{calls}:{kinds.kind}*"))
        if not found:
            raise self._name_nearest(text)
        yield from (replace(each, text=text) for each in found)

    def _at_site(self, text: str, site: Site) -> FeatureSite:
        for slot in SLOTS:
            if site.slot == slot:
                call = site.call if says_call(text) else EVERY_CALL
                return FeatureSite(text, text, self._entries[site.path], slot, call, site.keys[1:])
        if any(site.slot == name for name, _ in self._entries[site.path].parameters):
            raise _parameter(text)
        raise self._name_nearest(text)

    def _glob(self, text: str) -> Iterator[FeatureSite]:
        parts = _PARTS.fullmatch(text)
        if parts is None:
            return
        matches = translate_glob(parts["path"])
        entries = [entry for entry in self._entries.values() if entry.is_called and matches(entry.path)]
        seen = [entry for entry in entries if not self._is_hidden(entry)]
        if entries and not seen:
            raise _inside_compiled(text)
        for entry in seen:
            yield from _glob_slots(text, entry, parts["call"], parts["slot"])

    def _check(self, wanted: FeatureSite) -> FeatureSite:
        entry = wanted.entry
        if not entry.is_called:
            raise FeatureError(
                f"{wanted.text!r} is of a {type(entry.module).__name__}, which is never called and returns nothing.",
                repair=f"ask for its parts: '{entry.path}.*'.",
            )
        if self._is_hidden(entry):
            raise _inside_compiled(wanted.text)
        return wanted

    def _is_hidden(self, entry: NamedModule) -> bool:
        """Return whether its hooks would be compiled: it lies in a compiled module, or was compiled in place."""
        is_in_place = is_compiled(entry.tapped) and type(entry.tapped).__name__ != "OptimizedModule"
        inside = any(
            entry.path.startswith(region) and not (region == "" and entry.path == ROOT) for region in self._compiled
        )
        return is_in_place or inside

    def _name_nearest(self, text: str) -> NoSuchSiteError:
        known = [
            candidate
            for entry in self._entries.values()
            for candidate in entry.candidates()
            if candidate.site.quantity == "value" and candidate.site.slot in SLOTS
        ]
        known = known or [Candidate(Site(ROOT, ("output",)))]
        try:
            Selection([text]).check(known)
        except NoSuchSiteError as error:
            return error
        return NoSuchSiteError(
            f"The pattern {text!r} matches no site.", repair="`rg.plan_recording(model)` prints all sites."
        )


def _check_form(text: Any) -> None:
    if not isinstance(text, str) or not text or text.startswith(("re:", "!")):
        raise FeatureError(
            f"{text!r} is not a valid name of a feature.",
            repair="give names and globs: 'layer4', 'blocks.*', 'fc:input.input'.",
        )
    if text.startswith(WATCH):
        raise FeatureError(
            f"{text!r} is a tensor watched by hand.", repair="ask for the module that returns it, or use rg.record."
        )
    if no_value := _NO_VALUE.fullmatch(text, text.find(":") if ":" in text else len(text)):
        what = "a gradient" if no_value[1] == "grad" else "an update"
        raise FeatureError(
            f"{text!r} is {what}.",
            repair=f"record it: `with rg.record(model, sites={text!r}, tensors={text!r}) as recording: ...`, "
            "or extract with differentiable=True and ask torch.autograd.grad.",
            reason="features come from a forward alone; there is no backward pass in it.",
        )


def _glob_slots(text: str, entry: NamedModule, call: str | None, slot: str | None) -> Iterator[FeatureSite]:
    """List the slots of a module that a glob asks for."""
    number = EVERY_CALL if call in (None, "*") else int(str(call))
    if slot is None and call != "*":
        yield FeatureSite(text, f"{entry.path}#{call}" if call else entry.path, entry, call=number, is_optional=True)
    elif call == "*" or MAGIC.search(slot or ""):
        tensors = slot or "output"
        tensors = tensors if MAGIC.search(tensors) else f"{tensors}*"  # each tensor of each call has a name of its own
        for each in SLOTS:
            if translate_glob(tensors.partition(".")[0])(each):
                yield FeatureSite(text, "", entry, each, number, tensors=tensors, is_optional=True)
    elif (site := _parse_or_none(f"_:{slot}")) is not None and site.slot in SLOTS:
        here = Site(entry.path, site.keys, max(number, 1))
        name = here.numbered if call else str(here)
        yield FeatureSite(text, name, entry, site.slot, number, site.keys[1:], is_optional=True)


def _parameter(text: str) -> FeatureError:
    return FeatureError(
        f"{text!r} is a parameter, not a feature.",
        repair="read it from the model: model.get_parameter(...).",
        reason="it is the same for every batch.",
    )


def _inside_compiled(text: str) -> FeatureError:
    return FeatureError(
        f"{text!r} lies inside a compiled module.",
        repair="extract from the model as it was before torch.compile (`compiled._orig_mod`), or at the boundary.",
        reason="hooks would be compiled into it, and change what it was compiled to.",
    )


def _parse_or_none(text: str) -> Site | None:
    try:
        return parse_site(text)
    except SiteSyntaxError:
        return None
