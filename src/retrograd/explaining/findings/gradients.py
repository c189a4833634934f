"""Gradients of parameters: which get some, and where those of the others are lost."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

import numpy as np

from retrograd.core.amounts import count_of
from retrograd.core.groups import gather
from retrograd.core.history.facts import Operation, Parameter
from retrograd.core.sites.site import ROOT, parse_leniently
from retrograd.explaining.findings.chain import MADE_BEFORE, Chain, name_of, tensor_of
from retrograd.explaining.findings.coverage import Coverage
from retrograd.explaining.findings.record import Record

_ENOUGH, _NEAR = 32, 0.15
"""Elements of which a root mean square tells something, and how far it may be off: three of its standard errors."""

LOOSE = "optimizer/"
"""How names of tensors begin that an optimizer holds and no model has."""


class ParameterGradients:
    """Gradients of parameters, as far as a record tells.

    Args:
        record: what it reads.
    """

    def __init__(self, record: Record) -> None:
        self._record = record

    @cached_property
    def steps(self) -> dict[str, tuple[int, int]]:
        """Name of a parameter → in how many steps it had a gradient, and in how many one that was not all zeros."""
        rows, steps = self._record.history.rows, self._record.steps
        sites = [parse_leniently(name) for name in self._record.history.site_names]
        wanted = [code for code in rows.codes if sites[code].kind == "parameter" and sites[code].quantity == "grad"]
        line = np.full(len(sites), -1)
        line[wanted] = np.arange(len(wanted))
        any_at, some_at = (np.zeros((len(wanted), len(steps)), np.bool_) for _ in range(2))
        for piece in rows.pieces(("site", "step", "zeros", "count"), codes=np.array(wanted, np.int64)):
            chosen = np.flatnonzero(line[piece["site"]] >= 0)
            at = line[piece["site"][chosen]], np.searchsorted(steps, piece["step"][chosen])
            any_at[at] = True
            some = piece["zeros"][chosen] < piece["count"][chosen]
            some_at[at[0][some], at[1][some]] = True
        counts = zip(any_at.sum(axis=1).tolist(), some_at.sum(axis=1).tolist(), strict=True)
        return {str(sites[code].value): found for code, found in zip(wanted, counts, strict=True)}

    @cached_property
    def selected(self) -> frozenset[str]:
        """Parameters whose gradients are recorded where there are any: a site is named before it has rows."""
        sites = map(parse_leniently, self._record.history.site_names)
        return frozenset(str(site.value) for site in sites if site.kind == "parameter" and site.quantity == "grad")

    def is_trained(self, name: str) -> bool:
        """Check whether it had a gradient that was not all zeros."""
        return self.steps.get(name, (0, 0))[1] > 0

    def has_hidden_one(self, name: str) -> bool:
        """Check whether an update changed it though backward gave it nothing: something has written its ``.grad``."""
        return name not in self.steps and name in self._changed

    def may_have_had_one(self, name: str) -> bool:
        """Check whether a step that was not recorded has changed it, though no recorded step gave it a gradient.

        Where updates of recorded steps change it without one, as weight decay does, that tells nothing.
        """
        if self._record.once(Coverage).is_whole or self.is_trained(name):
            return False
        return self.has_changed(name) and name not in self._changed

    def has_changed(self, name: str) -> bool:
        """Check whether it was not the same at all looks."""
        return len({look.digest for look in self._list_looks(name)}) > 1

    def is_unseen(self, name: str) -> bool:
        """Check whether its model was called with grad, and at no step that was recorded."""
        coverage, model = self._record.once(Coverage), self._record.model_of(name)
        if coverage.is_whole:
            return False
        steps = self._forwards.get(model, ())
        return len(steps) > 0 and not np.isin(steps, coverage.recorded).any()

    def find_unchanged(self, name: str) -> tuple[int, int] | None:
        """The first and the last step at which it was looked at, where it was the same at all looks."""
        looks = self._list_looks(name)
        if len({look.digest for look in looks}) != 1 or looks[0].step == looks[-1].step:
            return None
        return looks[0].step, looks[-1].step

    def _list_looks(self, name: str) -> list[Parameter]:
        """Looks at its values, of one rank."""
        looks = [look for look in self._record.looks.get(name, ()) if look.digest]
        return [look for look in looks if look.rank == looks[0].rank]

    @cached_property
    def _forwards(self) -> dict[str, list[int]]:
        """The steps at which each model was called with grad."""
        calls = (call for call in self._record.called("forward") if call.details.get("grad", True))
        return gather((call.about or ROOT, call.step) for call in calls)

    @cached_property
    def _changed(self) -> frozenset[str]:
        """Parameters without a gradient that is not all zeros, which an update of a recorded step has changed."""
        updates = [site for site in self._record.of_kind("parameter", "update") if not self.is_trained(str(site.value))]
        found = self._record.numbers([(site,) for site in updates], ("abs_max",))
        changed = zip(updates, found, strict=True)
        return frozenset(str(site.value) for site, (each,) in changed if (each.of["abs_max"] > 0).any())

    @cached_property
    def held(self) -> frozenset[str]:
        """Parameters that an optimizer holds."""
        made = self._record.optimizers.values()
        return frozenset(name for each in made for name in each.parameters) - {""}

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Modules and parameters that require no gradient, as far as that is known."""
        looked = {each.name: each.requires_grad for each in self._record.parameters}
        modules = {
            path for path, each in self._record.modules.items() if each.get("parameters") and not each.get("trainable")
        }
        return frozenset({name for name, requires in looked.items() if not requires} | modules)

    def may_be_frozen(self, name: str) -> bool:
        """Check whether it requires no gradient, or nobody can tell."""
        path = path_of(name)
        if name in self.frozen or path in self.frozen:
            return True
        if any(each.name == name for each in self._record.parameters):
            return False
        module = self._record.modules.get(path, {})
        return module.get("parameters") != module.get("trainable")

    def are_fresh(self, names: list[str]) -> bool:
        """Check whether most weights among these are as large as torch makes them: 1 / √(3 · fan-in), uniform."""
        looks = {each.name: each for each in reversed(self._record.parameters)}
        weights = [looks[name] for name in names if name in looks and len(looks[name].shape) > 1]
        made = [each for each in weights if _is_as_made(each.shape, each.value)]
        return len(made) > len(weights) / 2

    def may_be_used(self, name: str) -> bool:
        """Check whether an operation took a tensor like this parameter, or nobody can tell."""
        looks = {each.name: tensor_of(each) for each in self._record.parameters}
        taken = {each for chain in self._record.chains for one in chain.listed for each in one.takes}
        is_seen = any(looks.get(other) in taken for other, (_, some) in self.steps.items() if some)
        return name not in looks or not is_seen or looks[name] in taken

    @cached_property
    def called(self) -> frozenset[str]:
        """Modules that were called, or in whose calls operations ran."""
        seen = {site.path for site in self._record.sites if site.kind in ("output", "input")}
        return frozenset(seen | {each.module for chain in self._record.chains for each in chain.listed})


def _is_as_made(shape: tuple[int, ...], rms: float) -> bool:
    size, fan_in = math.prod(shape), math.prod(shape[1:])
    expected = 1 / math.sqrt(3 * fan_in) if fan_in else 0.0
    return size >= _ENOUGH and abs(rms / expected - 1) < _NEAR if expected else False


def path_of(name: str) -> str:
    """The path of the module of a parameter."""
    return parse_leniently(name).path


# ---- where a gradient is lost ----

DETACHING = frozenset({"detach", "data", "deepcopy"})
LEAVING = frozenset({"item", "tolist", "numpy", "array", "float", "int", "bool", "index", "complex"})
"""Functions that make numbers and arrays, as :func:`retrograd.explaining.findings.chain.name_of` says them."""

COPYING = frozenset({"tensor", "as_tensor", "new_tensor", "asarray", "scalar_tensor"})
FLAT = frozenset({"round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside"})
"""Functions whose derivative is zero everywhere."""

CHECKPOINT = (
    "the reentrant checkpoint ran `{function}` without a graph, and no input of it requires grad: no pass comes to it",
    "pass use_reentrant=False to checkpoint, or let an input require grad (model.enable_input_require_grads())",
)
"""What a reentrant checkpoint does to parameters inside of it, and the repair."""

BLIND = frozenset({"no_grad", "inference"})
"""Modes in which no operation makes a node."""

CUTS = {
    "detached": ("`{function}` cuts it off from the graph", "leave `{function}` out there"),
    "left torch": (
        "`{function}` makes a number or an array of it, which has no graph",
        "stay with tensors: leave `{function}` out there",
    ),
    "copied": ("`{function}` copies it without its graph", "use the tensor itself"),
    "no_grad": ("`{function}` runs in torch.no_grad()", "run the forward outside of torch.no_grad()"),
    "inference": ("`{function}` runs in torch.inference_mode()", "run the forward outside of torch.inference_mode()"),
    "no derivative": (
        "`{function}` has no derivative, so what comes after it has no graph",
        "use a differentiable function there: softmax for argmax, a loss of logits for a count of hits",
    ),
}
"""Ways to lose a graph, each with a sentence and a repair."""


@dataclass(frozen=True, slots=True)
class LostGradient:
    """Where a gradient was lost.

    Attributes:
        line: who called the operation.
        operation: its name.
        sentence: what it did, to be said behind a colon.
        repair: what to do.
        cause: what tells it from other causes: the operation, or all that ran in the same torch.no_grad().
    """

    line: str
    operation: str
    sentence: str
    repair: str
    cause: str = ""


def find_lost(chains: Iterable[Chain], path: str, trained: Collection[str] = ()) -> LostGradient | None:
    """Why no gradient comes to the parameters of a module that was called; None where the operations do not tell.

    Args:
        chains: the noted operations.
        path: of the module.
        trained: modules that do get gradients. Where they ran without a graph too, another forward gave them theirs.
    """
    for chain in chains:
        mine = [number for number, each in enumerate(chain.listed) if each.module == path]
        lost = _look_behind(chain, mine) if mine and not is_rehearsal(chain, trained) else None
        if lost is not None:
            return lost
    return None


def find_flat(chains: Iterable[Chain], path: str) -> LostGradient | None:
    """An operation between a module and the loss that lets zeros pass alone."""
    for chain in chains:
        mine = tuple(number for number, each in enumerate(chain.listed) if each.module == path)
        for number in sorted(chain.descendants(mine) & chain.of_loss):
            operation = chain.listed[number]
            if name_of(operation) in FLAT and operation.node:
                sentence = f"`{operation.name}` is flat, its derivative is zero everywhere"
                repair = "pass the gradient straight through: x + (x.round() - x).detach()."
                return LostGradient(operation.line, operation.name, sentence, repair)
    return None


def find_last_cut(chain: Chain) -> LostGradient | None:
    """Where the loss itself lost its graph: the last cut that it was made behind, or by which numbers left torch."""
    behind = [number for number in sorted(chain.of_loss) if chain.listed[number].cuts]
    left = [number for number, each in enumerate(chain.listed) if each.cuts and name_of(each) in LEAVING | COPYING]
    for number in (*reversed(behind), *reversed(left)):
        return describe_cut(chain.listed[number])
    return next((_describe_checkpoint(each) for each in reversed(chain.listed) if each.checkpoint), None)


def _look_behind(chain: Chain, mine: list[int]) -> LostGradient | None:
    inside = [number for number in mine if chain.listed[number].checkpoint]
    if inside and not any(chain.listed[number].node for number in mine):
        return _describe_checkpoint(chain.listed[inside[0]])
    ended = [number for number in mine if chain.listed[number].cuts or chain.listed[number].node]
    blind = [number for number in ended if chain.listed[number].cuts and chain.listed[number].mode in BLIND]
    if blind and len(blind) == len(ended):
        return _describe_blind(chain, blind[0])
    reached, cuts = _follow(chain, mine)
    if chain.loss in reached:
        return None
    behind = [cut for cut in cuts if cut in chain.of_loss]
    if behind:
        return _describe_straight_through(chain, mine, behind) or describe_cut(chain.listed[behind[0]])
    left = [cut for cut in cuts if _leaves(chain, cut)]
    if left:
        return describe_cut(chain.listed[left[0]])
    if chain.loss < 0 or any(number in chain.of_loss for number in mine):
        return None
    last = chain.listed[mine[-1]]
    sentence = f"what `{last.name}` made there is no part of the loss"
    return LostGradient(last.line, last.name, sentence, "add it to the loss, or freeze the layer.")


def is_rehearsal(chain: Chain, trained: Collection[str]) -> bool:
    """Check whether modules that get gradients ran here, and all of them without a graph."""
    ran = [each for each in chain.listed if each.module in trained and (each.node or each.cuts)]
    return bool(ran) and all(each.cuts and each.mode in BLIND for each in ran)


def _leaves(chain: Chain, cut: int) -> bool:
    """Check whether numbers leave torch by a cut, or behind it."""
    behind = {cut, *chain.descendants((cut,))}
    return any(name_of(chain.listed[number]) in LEAVING | COPYING for number in behind)


def _follow(chain: Chain, begun: list[int]) -> tuple[set[int], list[int]]:
    """Follow the graph from some operations: all that it reaches, and the cuts at which it ends, in order."""
    reached = {number for number in begun if not chain.listed[number].cuts}
    cuts = [number for number in begun if chain.listed[number].cuts]
    for number, operation in enumerate(chain.listed):
        if number not in reached and any(each in reached for each in chain.operands(number)):
            if operation.cuts:
                cuts.append(number)
            elif operation.node:
                reached.add(number)
    return reached, sorted(set(cuts))


def _describe_blind(chain: Chain, number: int) -> LostGradient:
    """Describe a stretch of operations without grad mode, by the first of them that would have made a node."""
    mode = chain.listed[number].mode
    while number and chain.listed[number - 1].mode == mode:
        number -= 1
    cuts = [each for each in takewhile(lambda each: each.mode == mode, chain.listed[number:]) if each.cuts]
    lost = describe_cut(cuts[0])
    more = count_of(len(cuts) - 1, "more operation")
    sentence = lost.sentence.replace(" runs in ", f" and {more} run in ") if len(cuts) > 1 else lost.sentence
    return replace(lost, sentence=sentence, cause=f"{mode} {number}")


def describe_cut(operation: Operation) -> LostGradient:
    """Describe how an operation that took an operand with a graph gave a result without one."""
    function = operation.name.strip("_") if operation.name.startswith("__") else operation.name
    sentence, repair = (text.format(function=function) for text in CUTS[_find_way(operation)])
    return LostGradient(operation.line, function, sentence, f"{repair}.")


def _describe_checkpoint(operation: Operation) -> LostGradient:
    sentence, repair = CHECKPOINT
    return LostGradient(operation.checkpoint, "checkpoint", sentence.format(function=operation.name), f"{repair}.")


def _describe_straight_through(chain: Chain, mine: list[int], cuts: list[int]) -> LostGradient | None:
    """Describe ``x + (q - x).detach()``, which hands the gradient to x alone, as it is meant to; None if it is none."""
    cut = next((each for each in cuts if _is_straight_through(chain, each)), None)
    if cut is None:
        return None
    operation = chain.listed[cut]
    sentence = f"`{operation.name}` is that of a straight-through estimator, which hands the gradient past it"
    before = chain.ancestors(cut)
    flat = [number for number in sorted(chain.descendants(tuple(mine)) & before) if chain.name(number) in FLAT]
    repair = (
        f"subtract what `{chain.name(flat[0])}` takes, and add `{operation.name}` of the difference to that."
        if flat
        else "add a loss of what is made there, as mse_loss(q, x.detach()) of a codebook, or freeze it."
    )
    return LostGradient(operation.line, operation.name, sentence, repair)


def _is_straight_through(chain: Chain, cut: int) -> bool:
    """Check whether a difference is detached, and added to what was subtracted."""
    difference = chain.maker(cut, 0, frozenset())
    if chain.name(cut) not in DETACHING or chain.name(difference) != "sub":
        return False
    subtracted = (*chain.listed[difference].operands, MADE_BEFORE, MADE_BEFORE)[1]
    sums = [chain.listed[user].operands for user in chain.users(cut) if chain.name(user) == "add"]
    return subtracted >= 0 and any(subtracted in each for each in sums)


def _find_way(operation: Operation) -> str:
    name = name_of(operation)
    for names, way in ((DETACHING, "detached"), (LEAVING, "left torch"), (COPYING, "copied")):
        if name in names:
            return way
    return operation.mode if operation.mode in BLIND else "no derivative"
