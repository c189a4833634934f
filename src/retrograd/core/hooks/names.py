"""Names of the modules of a model, of their parameters and arguments, and the sites that each module has.

Paths leave out what wrappers put in: DDP, FSDP, compilers, checkpoints.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.core.errors import AttachError
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.parts import is_compiled, modules_of
from retrograd.core.identities import IdentityDict
from retrograd.core.sites.pattern import Candidate
from retrograd.core.sites.site import ROOT, WATCH, Site


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A module of a recorded model.

    Attributes:
        path: its path, without the names that wrappers (DDP, FSDP, torch.compile, checkpointing) put in.
        module: the module itself.
        tapped: where its hooks are set: the module, or the outermost of the wrappers that change how it is run.
        parameters: its own parameters, those of its children left out, by name.
        is_called: it has a ``forward``, unlike containers such as ``ModuleList``.
    """

    path: str
    module: nn.Module
    tapped: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]
    is_called: bool

    def candidates(self) -> Iterator[Candidate]:
        """Every site of this module that is known before it has run; ``input`` stands for arguments that are not."""
        if self.is_called:
            for site in (Site(self.path, ("output",)), *self._argument_sites()):
                yield Candidate(site, self.module)
                yield Candidate(site.grad, self.module)
        for name, parameter in self.parameters:
            site = parameter_site(self.path, name)
            yield Candidate(site, self.module)
            if parameter.requires_grad:
                yield Candidate(site.grad, self.module)
                yield Candidate(site.update, self.module)

    def _argument_sites(self) -> list[Site]:
        names, takes_others = known_arguments(self.module)
        sites = [Site(self.path, ("input", name)) for name in names]
        return [*sites, Site(self.path, ("input",))] if takes_others else sites


def name_models(models: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Models by name; a single one has the empty name.

    Raises:
        AttachError: for anything that is not a module, and for replicas that run in threads of their own.
    """
    named = dict(models) if isinstance(models, Mapping) else {"": models}
    for name, model in named.items():
        if not isinstance(model, nn.Module):
            raise AttachError(
                f"{type(model).__name__} is not a torch.nn.Module.",
                repair="pass the model, or a dict of models by name: rg.record({'generator': G, 'critic': D}).",
            )
        if any(isinstance(module, nn.DataParallel) for module in modules_of(model)):
            raise AttachError(
                "nn.DataParallel can be neither recorded nor rewritten.",
                repair="use DistributedDataParallel, or run the model on one device.",
                reason="its replicas are created in every step and run in threads, which would share what is kept.",
            )
        if any(sign in name for sign in ":#/"):
            raise AttachError(
                f"{name!r} is not a valid name of a model.", repair="use letters, digits, dots and underscores."
            )
    if not named:
        raise AttachError("There is no model to record.", repair="pass at least one.")
    return named


class ModelNames:
    """The names of models, and the paths of their modules, as sites have them. It holds none of them."""

    def __init__(self) -> None:
        self._names: IdentityDict[nn.Module, str] = IdentityDict()
        self._paths: IdentityDict[nn.Module, str] = IdentityDict()

    def add(self, name: str, model: nn.Module) -> None:
        """Name a model; modules that have a path already keep it."""
        self._names[model] = name
        for path, module in walk_paths(name, model):
            self._paths.setdefault(module, path or ROOT)

    def __iter__(self) -> Iterator[tuple[str, nn.Module]]:
        """The models that are still there, with their names."""
        return ((name, model) for model, name in self._names.items())

    def name_of(self, model: nn.Module) -> str | None:
        """The name of a model, empty for a single one; None for what is no model of its own."""
        return self._names.get(model)

    def path_of(self, module: nn.Module) -> str | None:
        """The path of a module, ``"self"`` for a model without a name; None if it belongs to no model."""
        return self._paths.get(module)

    def find(self, module: nn.Module) -> str | None:
        """The name of a model, or else the path of a module; None if it belongs to no model."""
        name = self._names.get(module)
        return self._paths.get(module) if name is None else name or ROOT


def walk_modules(name: str, model: nn.Module) -> list[NamedModule]:
    """The modules of a model, parents before children, each once, and one for each path.

    A wrapper has the path of what it wraps, and the wrapped module stands for both. Hooks are set on the wrapper where
    that changes what is run (torch.compile, FSDP, checkpointing), and on the module under DDP, which hands outputs on.
    """
    found: dict[str, NamedModule] = {}
    paths = list(walk_paths(name, model))
    sharded = {(id(each.module), each.key): each.parameter for _, module in paths for each in fsdp_parameters(module)}
    for plain, module in paths:
        path = plain or ROOT
        if type(module).__name__ not in REPLICATING:
            entry = _named(path, module, sharded)
            found[path] = _merge(found[path], entry) if path in found else entry
    return list(found.values())


def _named(path: str, module: nn.Module, sharded: Mapping[tuple[int, str], nn.Parameter]) -> NamedModule:
    own = module._parameters.items()
    return NamedModule(
        path=path,
        module=module,
        tapped=module,
        parameters=tuple((key, sharded.get((id(module), key), value)) for key, value in own if value is not None),
        is_called="forward" in vars(module) or getattr(type(module), "forward", None) is not nn.Module.forward,
    )


def _merge(wrapper: NamedModule, wrapped: NamedModule) -> NamedModule:
    return replace(wrapped, tapped=wrapper.tapped, parameters=(*wrapper.parameters, *wrapped.parameters))


def compiled_regions(entries: Iterable[NamedModule]) -> tuple[str, ...]:
    """Beginnings of the paths of modules inside compiled ones; an empty text where the whole model is compiled."""
    return tuple(beginning_of(entry.path) for entry in entries if is_compiled(entry.tapped))


def beginning_of(path: str) -> str:
    """The beginning of the paths of all modules within this one."""
    return "" if path == ROOT else f"{path}."


REPLICATING = frozenset({"DistributedDataParallel", "DataParallel"})
"""Types of wrappers whose one part is called ``module``."""

_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_SLOTS = frozenset({"output", "input", "parameter", "outputs", "inputs", "parameters"})


def walk_paths(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, parents before children, with its path; the empty text for a model without a name.

    A wrapper has the path of what it wraps.
    """
    seen: set[int] = set()
    waiting = [(name, model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        children = [
            (_join(path, module, key), child) for key, child in module._modules.items() if isinstance(child, nn.Module)
        ]
        waiting.extend(reversed(children))


def list_modules(models: Iterable[tuple[str, nn.Module]]) -> list[NamedModule]:
    """The modules of some named models, see :func:`walk_modules`."""
    return [entry for name, model in models for entry in walk_modules(name, model)]


def list_swapped(before: Iterable[tuple[str, nn.Module | None]], now: Iterable[NamedModule]) -> list[str]:
    """Paths where another module has come into the place of one that is not in the model any more; outermost ones.

    Args:
        before: paths with the modules that were there, parents before children; None for one that is gone.
        now: modules of the same models.
    """
    before = list(before)
    known = {id(module) for _, module in before}
    there = {entry.path: id(entry.module) for entry in now}
    left = set(there.values())
    found: list[str] = []
    for path, module in before:
        is_swapped = path in there and there[path] not in known and id(module) not in left
        if is_swapped and not path.startswith(tuple(map(beginning_of, found))):
            found.append(path)
    return found


def parameter_site(path: str, name: str) -> Site:
    """The site of a module's parameter. One that is called like a slot, or like all of them, does not get its name."""
    return Site(path, ("parameter", name) if name in _SLOTS else (name,))


def walk_parameters(models: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of some named models with its name, ``"blocks.3.fc:weight"``; tied ones with all of theirs."""
    for prefix, model in models:
        for path, module in walk_paths(prefix, model):
            for key, parameter in list(module._parameters.items()):
                if parameter is not None:
                    yield _name_parameter(path, key), parameter


def walk_leaves(models: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of some named models as a backward graph may have it, with its name.

    FSDP2 shards a parameter, and gathers the whole one into a tensor of its own, which is then the leaf of the graph.
    Such tensors come after all that are parameters of a module at the moment.
    """
    named = list(models)
    yield from walk_parameters(named)
    for prefix, model in named:
        modules = list(walk_paths(prefix, model))
        path_of = {id(module): path for path, module in modules}
        for _, module in modules:
            for each in fsdp_parameters(module):
                if each.whole is not None and id(each.module) in path_of:
                    yield _name_parameter(path_of[id(each.module)], each.key), each.whole


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter that FSDP2 shards.

    Attributes:
        module: the module that it belongs to.
        key: its name there.
        parameter: the one that optimizers have, a part; where a forward has gathered it, the module has another.
        whole: the one that forwards use, the leaf of their graphs; None before it was gathered for the first time.
    """

    module: nn.Module
    key: str
    parameter: nn.Parameter
    whole: nn.Parameter | None


def fsdp_parameters(module: nn.Module) -> Iterator[ShardedParameter]:
    """The parameters that FSDP2 shards at this very module; tied ones once for each of their homes."""
    for group in fsdp_groups(module):
        for each in group.fsdp_params:
            home, whole = each._module_info, getattr(each, "_unsharded_param", None)
            yield ShardedParameter(home.module, home.param_name, each.sharded_param, whole)
            for shared, key in zip(home.shared_modules, home.shared_param_names, strict=True):
                yield ShardedParameter(shared, key, each.sharded_param, whole)


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Groups of parameters that FSDP2 shards at this very module."""
    if not any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
        return []
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def walk_buffers(models: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every buffer of some named models with its name, as a parameter would have it."""
    for prefix, model in models:
        for path, module in walk_paths(prefix, model):
            for key, buffer in list(module._buffers.items()):
                if buffer is not None:
                    yield _name_parameter(path, key), buffer


@lru_cache(maxsize=1 << 14)
def _name_parameter(path: str, key: str) -> str:
    return str(parameter_site(path or ROOT, key))


def _join(path: str, module: nn.Module, key: str) -> str:
    is_wrapped = key in _WRAPPED or (key == "module" and type(module).__name__ in REPLICATING)
    return path if is_wrapped else f"{path}.{key}" if path else key


_NO_TENSORS = frozenset({"bool", "int", "str", "None"})


class ArgumentNames:
    """Names of the arguments of a module's calls.

    Args:
        module: the module, which is not held.

    Attributes:
        names: those of its positional arguments.
        rest: the name under which further ones go.
    """

    __slots__ = ("names", "rest")

    def __init__(self, module: nn.Module) -> None:
        parameters = _parameters_of(module)
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names."""
        bound = dict(zip(self.names, args, strict=False))
        if len(args) > len(self.names):
            bound[self.rest] = args[len(self.names) :]
        bound.update(kwargs)
        return bound

    def unbind(
        self, bound: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Named arguments in the form of this call, which they take the place of."""
        names = self.names[: len(args)]
        rest = bound[self.rest] if len(args) > len(names) else ()
        return (*(bound[name] for name in names), *rest), {name: bound[name] for name in kwargs}


def spread_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a model: a tuple or list holds several, a mapping named ones; anything else is the only one."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if type(batch) in (tuple, list) else ((batch,), {})  # a named tuple is one argument


def known_arguments(module: nn.Module) -> tuple[list[str], bool]:
    """Names of all arguments that a module is known to take, and whether it takes others too.

    Those are left out that are annotated as something else than tensors.
    """
    parameters = _parameters_of(module)
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in named if not _is_no_tensor(p.annotation)]
    return names, len(named) < len(parameters) or not parameters


def _is_no_tensor(annotation: object) -> bool:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation).removeprefix("typing.")
    parts = re.split(r"\s*\|\s*", text.removeprefix("Optional[").removesuffix("]"))
    return all(part in _NO_TENSORS for part in parts) and parts != ["None"]


def _parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    try:
        inner = module._modules.get("_orig_mod") if is_compiled(module) else None  # its wrapper takes anything
        return list(inspect.signature((inner or module).forward).parameters.values())
    except (TypeError, ValueError):  # a forward written in C tells nothing
        return []


_watched_leaves = WeakIdKeyDictionary()


def name_watched_leaves(name: str, value: Any) -> None:
    """Remember the names of the leaves, which are not held, in a tensor or nest of tensors that is watched by hand."""
    for keys, tensor in flatten(value, ()):
        if tensor.requires_grad and tensor.is_leaf:
            _watched_leaves[tensor] = name, keys


def watched_name(leaf: torch.Tensor) -> str | None:
    """The name that a leaf was watched by: ``"watch/a"``."""
    found = _watched_leaves.get(leaf) if len(_watched_leaves) else None
    return None if found is None else str(Site(WATCH + found[0], found[1]))
