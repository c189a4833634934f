"""Gradients of parameters split by sample: exact, from the inputs of modules and the gradients of their outputs.

The gradient of a parameter is linear in the gradient of the module's output, so it is a sum over samples wherever a
module treats each by itself. No second pass through the model is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # as everybody calls it
from torch import Tensor, nn

from retrograd.core.amounts import list_names
from retrograd.core.errors import CallError, FeatureError, NothingKeptError
from retrograd.core.guesses import USES, names_arguments
from retrograd.core.history.history import History
from retrograd.core.history.kept import Kept
from retrograd.core.hooks.names import list_modules
from retrograd.core.recording.record import Recording
from retrograd.core.sites.site import ROOT, Site

_KEEP = 'keep both: rg.record(model, tensors=["*:inputs", "*:outputs.grad"]).'

Parameters = dict[str, Tensor]
Forward = Callable[[Any, Tensor, Parameters], Tensor]


def _transpose(module: Any, x: Tensor, p: Parameters) -> Tensor:
    convolve: Any = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[len(module.kernel_size)]
    sizes = module.stride, module.padding, module.output_padding
    found: Tensor = convolve(x, p["weight"], p.get("bias"), *sizes, module.groups, module.dilation)
    return found


_FORWARDS: dict[type[nn.Module], Forward] = {
    nn.Linear: lambda m, x, p: F.linear(x, p["weight"], p.get("bias")),
    nn.Embedding: lambda m, x, p: F.embedding(x, p["weight"], m.padding_idx),
    nn.LayerNorm: lambda m, x, p: F.layer_norm(x, m.normalized_shape, p.get("weight"), p.get("bias"), m.eps),
    nn.RMSNorm: lambda m, x, p: F.rms_norm(x, m.normalized_shape, p.get("weight"), m.eps),
    nn.GroupNorm: lambda m, x, p: F.group_norm(x, m.num_groups, p.get("weight"), p.get("bias"), m.eps),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), lambda m, x, p: m._conv_forward(x, p["weight"], p.get("bias"))),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transpose),
    **dict.fromkeys(
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        lambda m, x, p: F.instance_norm(x, weight=p.get("weight"), bias=p.get("bias"), eps=m.eps),
    ),
}
"""Type of module → its output for a batch, from these parameters."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A parameter as a module has it."""

    path: str
    module: nn.Module
    name: str


class PerSampleGradients(Mapping[str, Tensor]):
    """Gradients split by sample, by the name of the parameter; each is computed when it is asked for.

    Those that cannot be split are not among them; asked for, they say why.

    Args:
        history: what was kept.
        uses: the modules that have a parameter, by its name.
        step: of which step.
        batch_dim: the dimension of inputs and outputs that counts samples.
    """

    def __init__(self, history: History, uses: Mapping[str, list[_Use]], step: int, batch_dim: int) -> None:
        self._history = history
        self._uses = uses
        self._batch_dim = batch_dim
        self.step = step

    def __getitem__(self, name: str) -> Tensor:
        """The gradient of each sample: ``[samples, *parameter.shape]``.

        Raises:
            KeyError: no parameter has this name.
            FeatureError: its gradient is no sum over samples, or not known to be one.
            NothingKeptError: the inputs of its module, or the gradients of the outputs, were not kept.
        """
        uses = self._uses[name]
        for use in uses:
            if reason := _refuse(use.module):
                raise FeatureError(
                    f"The gradient of {name!r} cannot be split by sample: {use.path} is {type(use.module).__name__}.",
                    repair="ask for the others: they are listed by iterating over the result.",
                    reason=reason,
                )
        parts = [part for use in uses for part in self._split(use)]
        if not parts:
            raise NothingKeptError(
                f"Nothing was kept of {list_names([use.path for use in uses])} at step {self.step}.",
                repair=_KEEP,
                reason="a gradient is split by the inputs of the module and the gradients of its outputs.",
            )
        return _add_up(name, parts)

    def __iter__(self) -> Iterator[str]:
        return (name for name, uses in self._uses.items() if not any(_refuse(use.module) for use in uses))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<gradients by sample of {list_names(list(self))}, step {self.step}>"

    def norms(self) -> dict[str, Tensor]:
        """The Euclidean norm of each sample's gradient, by parameter: ``[samples]``; one parameter at a time."""
        return {name: torch.linalg.vector_norm(self[name].flatten(1), dim=1) for name in self}

    def _split(self, use: _Use) -> Iterator[tuple[int, Tensor]]:
        """The number of the micro-batch, and the gradients of its samples, of each call that a pass reached."""
        site = Site(use.path, ("output",)).grad
        asked = Site(use.path, ("input", next(iter(inspect.signature(use.module.forward).parameters))))
        if str(site) not in self._history or str(asked) not in self._history:
            return
        inputs = {_call_of(kept): kept for kept in self._list(asked)}
        for kept in self._list(site):
            if _call_of(kept) not in inputs:
                raise NothingKeptError(f"The input of {use.path} at step {kept.step} was not kept.", repair=_KEEP)
            gradient, x = _read(kept), _read(inputs[_call_of(kept)])
            yield kept.micro, self._compute(use, x, gradient)

    def _list(self, site: Site) -> list[Kept]:
        kept = self._history[str(site)].tensors
        return [each for each in kept if each.step == self.step and each.phase == "train"]

    def _compute(self, use: _Use, x: Tensor, gradient: Tensor) -> Tensor:
        parameters = {name: value.detach() for name, value in use.module.named_parameters(recurse=False)}
        forward = _find_forward(use.module)
        assert forward is not None
        wanted = parameters[use.name]
        x, gradient = x.movedim(self._batch_dim, 0), gradient.movedim(self._batch_dim, 0).to(wanted.dtype)
        x = x.to(wanted.dtype) if x.is_floating_point() else x

        def split(one: Tensor, its_gradient: Tensor) -> Tensor:
            pull: Any = torch.func.vjp(
                lambda value: forward(use.module, one.unsqueeze(0), parameters | {use.name: value}), wanted
            )[1]
            found: Tensor = pull(its_gradient.unsqueeze(0))[0]
            return found

        with torch.no_grad(), torch.autocast(wanted.device.type, enabled=False):
            found: Tensor = torch.func.vmap(split)(x, gradient)
        return found


@names_arguments
def per_sample_gradients(recording: Recording, *, step: int | None = None, batch_dim: int = 0) -> PerSampleGradients:
    """Split the gradients of parameters by sample, from what a recording has kept.

        with rg.record(model, tensors=["*:inputs", "*:outputs.grad"]) as recording:
            loss.backward()
        rg.per_sample_gradients(recording)["fc.weight"]        # [samples, *fc.weight.shape]

    They are gradients of the loss as it was: their sum is ``.grad``. Of a mean over B samples, each is 1/B of the
    gradient of its own loss, which Opacus calls per-sample gradient. Calls of a module, positions of a sequence and
    modules that share a parameter are added up; samples of further micro-batches of a step come after one another.

    For Linear, Conv1d to 3d, ConvTranspose1d to 3d, Embedding, LayerNorm, RMSNorm, GroupNorm, and InstanceNorm. A
    parameter that code outside of these modules uses too has more in its ``.grad`` than is split here.

    Args:
        recording: open or closed, of a model that is still there, with the weights that it had in that step.
        step: which one; the last of which a gradient was kept when left out.
        batch_dim: the dimension of inputs and outputs that counts samples: 1 for (T, B, d).

    Raises:
        NothingKeptError: no gradient of an output was kept.
        CallError: it is no recording.
    """
    if not isinstance(recording, Recording):
        raise CallError(
            f"rg.per_sample_gradients() takes a recording, not {type(recording).__name__}.",
            repair=f"{USES['per_sample_gradients']}.",
        )
    history = recording.history
    uses: dict[int, list[_Use]] = {}
    names: dict[int, str] = {}
    for entry in list_modules(recording.models.items()):
        for name, parameter in entry.parameters:
            uses.setdefault(id(parameter), []).append(_Use(entry.path, entry.module, name))
            names.setdefault(id(parameter), name if entry.path == ROOT else f"{entry.path}.{name}")
    if step is None:
        kept = [each for several in uses.values() for use in several for each in _list_gradients(history, use.path)]
        if not kept:
            raise NothingKeptError("No gradient of a module's output was kept.", repair=_KEEP)
        step = max(each.step for each in kept)
    return PerSampleGradients(history, {names[key]: several for key, several in uses.items()}, step, batch_dim)


def _list_gradients(history: History, path: str) -> list[Kept]:
    site = str(Site(path, ("output",)).grad)
    return list(history[site].tensors) if site in history else []


def _call_of(kept: Kept) -> tuple[int, str, int]:
    return kept.micro, kept.phase, kept.call


def _read(kept: Kept) -> Tensor:
    tensor = kept.tensor
    if tensor is None:
        raise NothingKeptError(
            f"{kept.site!r} was overwritten in place after step {kept.step} had kept it.",
            repair='keep copies: tensors=rg.Keep(["*:inputs", "*:outputs.grad"], copy=True).',
        )
    return tensor


def _find_forward(module: nn.Module) -> Forward | None:
    """What computes a module's output; None for a module that computes it in another way."""
    return next(
        (each for kind, each in _FORWARDS.items() if type(module).forward is kind.forward and isinstance(module, kind)),
        None,
    )


def _refuse(module: nn.Module) -> str:
    """Why the gradients of a module's parameters cannot be split by sample; empty if they can."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "it mixes the samples of a batch in training, so no part of a gradient belongs to one alone."
    if isinstance(module, nn.Embedding) and (module.scale_grad_by_freq or module.max_norm is not None):
        return "scale_grad_by_freq and max_norm depend on the whole batch."
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats and not module.training:
        return "it normalises by running statistics, which may have changed since."
    return "" if _find_forward(module) else "how it treats samples is not known."


def _add_up(name: str, parts: list[tuple[int, Tensor]]) -> Tensor:
    by_micro: dict[int, Tensor] = {}
    for micro, part in parts:
        there = by_micro.get(micro)
        if there is not None and there.shape != part.shape:
            raise FeatureError(
                f"{name!r} is used for {len(there)} samples and for {len(part)} in one forward.",
                repair="say which dimension counts samples: rg.per_sample_gradients(recording, batch_dim=…).",
            )
        by_micro[micro] = part if there is None else there + part
    return torch.cat([by_micro[micro] for micro in sorted(by_micro)])
