"""What could be recorded of a model: its modules under their plain names, and the sites of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from retrograd.errors import AttachError
from retrograd.hooks.arguments import known_arguments
from retrograd.hooks.construction import construction_line
from retrograd.hooks.module import is_compiled
from retrograd.hooks.module_paths import REPLICATING, parameter_site, walk_paths
from retrograd.sites.pattern import Candidate
from retrograd.sites.site import ROOT, Site

_MOST_SETTINGS = 300
"""Characters of what a module shows of itself."""


@dataclass(frozen=True, slots=True)
class NamedModule:
    """One module of a recorded model.

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
                f"{model!r} is not a torch.nn.Module.",
                repair="pass the model, or a dict of models by name: rg.record({'generator': G, 'critic': D}).",
            )
        if any(isinstance(module, nn.DataParallel) for module in model.modules()):
            raise AttachError(
                "nn.DataParallel can be neither recorded nor rewritten.",
                repair="use DistributedDataParallel, or run the model on one device.",
                reason="its replicas are made anew in every step and run in threads, which would share what is kept.",
            )
        if any(sign in name for sign in ":#/"):
            raise AttachError(f"{name!r} cannot name a model.", repair="use letters, digits, dots and underscores.")
    if not named:
        raise AttachError("There is no model to record.", repair="pass at least one.")
    return named


def walk_modules(name: str, model: nn.Module) -> list[NamedModule]:
    """The modules of a model, parents before children, each once, and one for each path.

    A wrapper has the path of what it wraps, and the wrapped module stands for both. Hooks are set on the wrapper where
    that changes what is run (torch.compile, FSDP, checkpointing), and on the module under DDP, which hands outputs on.
    """
    found: dict[str, NamedModule] = {}
    for plain, module in walk_paths(name, model):
        path = plain or ROOT
        if type(module).__name__ not in REPLICATING:
            entry = _named(path, module)
            found[path] = _merge(found[path], entry) if path in found else entry
    return list(found.values())


def _named(path: str, module: nn.Module) -> NamedModule:
    return NamedModule(
        path=path,
        module=module,
        tapped=module,
        parameters=tuple((key, value) for key, value in module._parameters.items() if value is not None),
        is_called="forward" in vars(module) or getattr(type(module), "forward", None) is not nn.Module.forward,
    )


def _merge(wrapper: NamedModule, wrapped: NamedModule) -> NamedModule:
    return replace(wrapped, tapped=wrapper.tapped, parameters=(*wrapper.parameters, *wrapped.parameters))


def compiled_regions(entries: Iterable[NamedModule]) -> tuple[str, ...]:
    """What the paths begin with of modules that lie inside compiled ones; an empty text where the whole model is."""
    return tuple(beginning_of(entry.path) for entry in entries if is_compiled(entry.tapped))


def beginning_of(path: str) -> str:
    """What the paths of all modules within this one begin with."""
    return "" if path == ROOT else f"{path}."


def describe_model(name: str, model: nn.Module) -> list[dict[str, str | int]]:
    """The structure of a model as plain data: a row a module.

    Returns:
        Of each ``path``, ``type``, number of own ``parameters`` and of those that are ``trainable``, their ``dtype``,
        ``settings`` as it shows them itself, and the ``line`` that constructed it; empty where they are not known. The
        model itself comes first, and is marked as ``root``.
    """
    described: list[dict[str, str | int]] = [
        {
            "path": entry.path,
            "type": type(entry.module).__name__,
            "parameters": sum(_size(parameter) for _, parameter in entry.parameters),
            "trainable": sum(_size(parameter) for _, parameter in entry.parameters if parameter.requires_grad),
            "dtype": ", ".join(dict.fromkeys(str(each.dtype).removeprefix("torch.") for _, each in entry.parameters)),
            "settings": _show_settings(entry.module),
            "line": construction_line(entry.module),
        }
        for entry in walk_modules(name, model)
    ]
    for root in described[:1]:
        root["root"] = True
    return described


def _show_settings(module: nn.Module) -> str:
    try:
        text = module.extra_repr()
    except Exception:  # the user's own, of a module that may not be complete
        return ""
    return text[:_MOST_SETTINGS] if isinstance(text, str) else ""


def _size(parameter: torch.Tensor) -> int:
    return 0 if torch.nn.parameter.is_lazy(parameter) else parameter.numel()
