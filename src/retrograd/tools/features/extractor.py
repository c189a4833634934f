"""The features of one batch: values that modules return or take, from a forward that ends once they are all there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.amounts import count_of
from retrograd.core.errors import FeatureError
from retrograd.core.groups import gather
from retrograd.core.guesses import names_arguments
from retrograd.core.hooks.nested import flatten, replace_tensors
from retrograd.core.hooks.readings import EarlyExit, Reading, read_calls
from retrograd.core.sites.pattern import translate_glob
from retrograd.core.sites.site import Site, parse_site
from retrograd.tools.features.feature_sites import EVERY_CALL, SLOTS, FeatureSite, Slot, find_feature_sites

_Names = tuple[str, str]
"""The names of a value if its module is called once, and if it is called several times."""

Hold = Callable[[str, Any], Callable[[], Any]]
"""Takes the name of a site and what is there while the forward runs; returns what gives the feature at its end."""


@names_arguments
def extract(
    model: nn.Module, batch: Any, sites: str | Iterable[str], *, differentiable: bool = False, early_end: bool = True
) -> dict[str, Any]:
    """The features of one batch.

    The model runs once, in the mode (``train`` or ``eval``) that it is in, until the last site has been seen; no later
    layer runs, so neither do a later batch norm's statistics move nor later random numbers get drawn. A name without
    the number of a call means every call of its module, so the forward runs to its end unless the code of the model
    shows that there is but one (``self.layer4(x)`` in no loop); ``"layer4#1"`` is the first call, whatever the code
    says. The forward also runs to its end where somebody would miss it: the model has forward hooks already (of
    yours, of :func:`rg.record`), is sharded by FSDP or offloaded by accelerate.

    Args:
        model: any module but ``nn.DataParallel``. Of a ``DistributedDataParallel`` the wrapped module is run, without
            communication.
        batch: a tuple is the positional arguments, a mapping the keyword arguments, ``(args, kwargs)`` with a tuple
            and a dict both; anything else, lists and named tuples too, is the only argument.
        sites: names and globs, or a single one. A module's path stands for what it returns; further forms are
            ``"lstm:output.0"``, ``"fc:input.input"``, ``"cell#2:output"``, ``"self:output"``, ``"blocks.*"``,
            ``"blocks.*:outputs"``.
        differentiable: keep the graph, so that gradients flow from the features to inputs and parameters. Otherwise
            the forward runs without grad.
        early_end: let the forward end early.

    Returns:
        The names as they were asked, in that order, and in the place of a glob the names of what it matched. A name
        gives the tensor, or the nest of tensors where a whole nested output was asked for. In the place of a module
        that was called several times there are its calls: ``"cell#1"``, ``"cell#2"``.

        Without ``differentiable`` every tensor is a copy of its own. With it, it is the very tensor that went through
        the model, unless that was overwritten in place later: then it is a copy of what it was, through which
        gradients flow to what came before, but which later features do not depend on.

    Raises:
        NoSuchSiteError: the model has no such site; names the nearest.
        FeatureError: a forward does not have a site, or this forward did not reach it.
    """
    args, kwargs = read_batch(batch)
    hold = hold_with_graph if differentiable else copy_detached
    extractor = Extractor(model, sites, hold, differentiable=differentiable, early_end=early_end)
    return extractor.run(args, kwargs)


def read_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a batch stands for: see :func:`extract`."""
    if type(batch) is tuple:
        if len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], dict):
            return batch
        return batch, {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch,), {}


class Extractor:
    """Extracts the same sites from one batch after the other.

    Args:
        model, sites, differentiable, early_end: as in :func:`extract`.
        hold: what is done with each value when it is seen.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: str | Iterable[str],
        hold: Hold,
        *,
        differentiable: bool = False,
        early_end: bool = True,
    ) -> None:
        self._model = _unwrap(model)
        self._wanted = find_feature_sites(self._model, sites)
        self._hold = hold
        self._differentiable = differentiable
        self._early_end = early_end

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The features of one call of the model."""
        if self._differentiable and torch.is_inference_mode_enabled():
            raise FeatureError(
                "In inference mode there is no graph to keep.", repair="leave torch.inference_mode, or differentiable."
            )
        with torch.set_grad_enabled(self._differentiable):
            forward = _SeenValues(self._wanted, self._hold, EarlyExit(self._model, wanted=self._early_end), self._model)
            with read_calls(forward.readings()):
                forward.run(args, kwargs)
        return forward.collect()


class _SeenValues:
    """The values that are seen in one forward."""

    def __init__(self, wanted: list[FeatureSite], hold: Hold, early_exit: EarlyExit, model: nn.Module) -> None:
        self._wanted = wanted
        self._hold = hold
        self._early_exit = early_exit
        self._model = model
        self._calls: dict[tuple[str, Slot], int] = {}
        self._held: list[list[tuple[_Names, Callable[[], Any]]]] = [[] for _ in wanted]
        self._missing = len(wanted)
        self._failure: Exception | None = None

    def readings(self) -> list[Reading]:
        """A reading for each module of which something is wanted."""
        entries = {wanted.entry.path: wanted.entry for wanted in self._wanted}
        places = {slot: self._by_path(slot) for slot in SLOTS}
        return [
            Reading(
                entry.tapped,
                entry.module,
                see_arguments=self._reader(path, "input", places["input"].get(path, []), is_last=False),
                see_output=self._reader(
                    path, "output", places["output"].get(path, []), is_last=entry.tapped is self._model
                ),
            )
            for path, entry in entries.items()
        ]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the model; raises what went wrong while a value was held."""
        try:
            self._early_exit.run(self._model, args, kwargs)
        except Exception as error:
            self._explain_failure(error)
            raise
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback leads back here

    def collect(self) -> dict[str, Any]:
        """The features, by name."""
        found: dict[str, Any] = {}
        texts_found = {wanted.text for wanted, held in zip(self._wanted, self._held, strict=True) if held}
        for wanted, held in zip(self._wanted, self._held, strict=True):
            if not held and (not wanted.is_optional or wanted.text not in texts_found):
                raise self._explain_missing(wanted)
            found.update({names[self.count_calls(wanted) > 1]: settle() for names, settle in held})
        return found

    def count_calls(self, wanted: FeatureSite) -> int:
        """Count how often its module was called, as far as this forward has run."""
        return self._calls.get((wanted.entry.path, wanted.slot), 0)

    def _explain_failure(self, error: Exception) -> None:
        """A model that raises after all that was asked for need not have run there."""
        if all(held or wanted.is_optional for wanted, held in zip(self._wanted, self._held, strict=True)):
            plain = next((wanted for wanted in self._wanted if wanted.is_plain), None)
            if plain is not None:
                name = Site(plain.entry.path, (plain.slot, *plain.keys)).numbered
                error.add_note(
                    "retrograd: all that was asked for had been seen, and the forward went on only to learn whether "
                    f"there are further calls; with their numbers, as in {name!r}, it ends there."
                )

    def _by_path(self, slot: Slot) -> dict[str, list[int]]:
        return gather((wanted.entry.path, place) for place, wanted in enumerate(self._wanted) if wanted.slot == slot)

    def _reader(self, path: str, slot: Slot, places: list[int], *, is_last: bool) -> Callable[[Any], None] | None:
        """Make what sees the values of one slot."""

        def see(value: Any) -> None:
            call = self._calls[path, slot] = self._calls.get((path, slot), 0) + 1
            if self._failure is not None or not self._missing:
                return
            for place in places:
                if self._wanted[place].call in (call, EVERY_CALL):
                    self._take(place, call, value)
            if not is_last and (self._failure is not None or not self._missing):
                self._early_exit.take()

        return see if places else None

    def _take(self, place: int, call: int, value: Any) -> None:
        wanted = self._wanted[place]
        try:
            for names, each in _find_values(wanted, call, value):
                self._held[place].append((names, self._hold(names[call > 1], each)))
        except Exception as error:  # it shall not pass through the user's model
            error.add_note(f"while the feature {wanted.text!r} was read")
            self._failure = error
        if wanted.call != EVERY_CALL:
            self._missing -= 1

    def _explain_missing(self, wanted: FeatureSite) -> FeatureError:
        calls = self.count_calls(wanted)
        path = wanted.entry.path
        if not calls:
            return FeatureError(
                f"{wanted.text!r} was not reached: {path!r} was never called in this forward.",
                repair="ask for a module that this input goes through.",
                reason="calls of `.forward(...)`, in scripted code and in other threads are not read.",
            )
        if wanted.tensors or wanted.call <= calls:
            return FeatureError(
                f"{wanted.text!r} matches no tensor of this forward.", repair=f"ask for all that is there: {path!r}."
            )
        return FeatureError(
            f"{wanted.text!r} was not reached: {path!r} was called {count_of(calls, 'time')}.",
            repair=f"ask for {path!r} or a number up to {calls}.",
        )


def _find_values(wanted: FeatureSite, call: int, value: Any) -> list[tuple[_Names, Any]]:
    """The values that are wanted of what a slot holds, each with its names."""
    path, slot = wanted.entry.path, wanted.slot
    if not wanted.tensors and not wanted.keys:
        return [(_name(wanted, call), value)]
    tensors = {Site(path, (slot, *keys), call): tensor for keys, tensor in flatten(value, ())}
    if wanted.tensors:
        matches = translate_glob(f":{wanted.tensors}")
        found = {site: tensor for site, tensor in tensors.items() if matches(f":{site.first_call.label}")}
        return [((str(site), site.numbered), tensor) for site, tensor in found.items()]
    site = Site(path, (slot, *wanted.keys), call)
    if site not in tensors and wanted.is_optional:
        return []
    if site not in tensors:
        there = ", ".join(map(str, tensors)) or "no tensor"
        raise FeatureError(f"{wanted.text!r} is not a tensor of this call.", repair=f"there are: {there}.")
    return [(_name(wanted, call), tensors[site])]


def _name(wanted: FeatureSite, call: int) -> _Names:
    """The names of a value if its module is called once, and if it is called several times."""
    if wanted.call != EVERY_CALL:
        return wanted.name, wanted.name
    is_path = wanted.name == wanted.entry.path
    return wanted.name, f"{wanted.name}#{call}" if is_path else replace(parse_site(wanted.name), call=call).numbered


def _unwrap(model: Any) -> nn.Module:
    """The model that is called.

    Raises:
        FeatureError: it is not a module, or has replicas.
    """
    if not isinstance(model, nn.Module):
        raise FeatureError(f"{model!r} is not a torch.nn.Module.", repair="pass the model itself.")
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise FeatureError(
            "nn.DataParallel runs copies of the model in threads.",
            repair="extract from what it wraps: `model.module`.",
            reason="each copy would see a part of the batch.",
        )
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def copy_detached(name: str, value: Any) -> Callable[[], Any]:
    """Copies without a graph, in a nest like the one that was seen."""
    copied = replace_tensors(value, (), {keys: tensor.detach().clone() for keys, tensor in flatten(value, ())})
    return lambda: copied


def hold_with_graph(name: str, value: Any) -> Callable[[], Any]:
    """The very tensors that were seen; in place of those overwritten by the end of the forward, copies made before.

    Later features depend on the tensor that was seen, and not on a copy of it, so the copy is the second choice.
    """
    copies = {keys: _Backup(tensor) for keys, tensor in flatten(value, ())}
    return lambda: replace_tensors(value, (), {keys: copy.settle() for keys, copy in copies.items()})


class _Backup:
    """A tensor of a graph, and a copy that is part of the graph too."""

    __slots__ = ("_copy", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version
        self._copy = tensor.clone()

    def settle(self) -> Tensor:
        """The tensor, if it is what it was."""
        unchanged = self._version is not None and self._tensor._version == self._version
        return self._tensor if unchanged else self._copy
