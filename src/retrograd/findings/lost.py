"""Where the gradient of a module's parameters was lost, by the operations between it and the loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from retrograd.findings.chain import Chain, name_of
from retrograd.history.facts import Operation

How = Literal["cut", "no_grad", "left torch", "not in the loss", "flat"]

DETACHING = frozenset({"detach", "data", "deepcopy"})
LEAVING = frozenset({"item", "tolist", "numpy", "array", "float", "int", "bool", "index", "complex"})
"""Functions that make numbers and arrays, as :func:`retrograd.findings.chain.name_of` says them."""

COPYING = frozenset({"tensor", "as_tensor", "new_tensor", "asarray", "scalar_tensor"})
FLAT = frozenset({"round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside"})
"""Functions whose derivative is zero everywhere."""

_BLIND = {"no_grad": "torch.no_grad()", "inference": "torch.inference_mode()"}


@dataclass(frozen=True, slots=True)
class LostGradient:
    """Where a gradient was lost.

    Attributes:
        how: in a word.
        line: who called the operation.
        operation: its name.
        sentence: what it did, to be said behind a colon.
        repair: what to do.
    """

    how: How
    line: str
    operation: str
    sentence: str
    repair: str


def find_lost(chains: Iterable[Chain], path: str) -> LostGradient | None:
    """Why no gradient comes to the parameters of a module that was called; None where the operations do not tell."""
    for chain in chains:
        mine = [number for number, each in enumerate(chain.listed) if each.module == path]
        lost = _look_behind(chain, mine) if mine else None
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
                return LostGradient("flat", operation.line, operation.name, sentence, repair)
    return None


def find_last_cut(chain: Chain) -> LostGradient | None:
    """Where the loss itself lost its graph: the last cut that it was made behind, or by which numbers left torch."""
    behind = [number for number in sorted(chain.of_loss) if chain.listed[number].cuts]
    left = [number for number, each in enumerate(chain.listed) if each.cuts and name_of(each) in LEAVING | COPYING]
    for number in (*reversed(behind), *reversed(left)):
        return describe_cut(chain.listed[number])
    return None


def _look_behind(chain: Chain, mine: list[int]) -> LostGradient | None:
    blind = [number for number in mine if chain.listed[number].cuts and chain.listed[number].mode in _BLIND]
    if len(blind) == len(mine):
        return describe_cut(chain.listed[blind[0]])
    reached, cuts = _follow(chain, mine)
    if chain.loss in reached:
        return None
    behind = [cut for cut in cuts if cut in chain.of_loss]
    if behind:
        return describe_cut(chain.listed[behind[0]])
    left = [cut for cut in cuts if _leaves(chain, cut)]
    if left:
        return describe_cut(chain.listed[left[0]])
    if chain.loss < 0 or any(number in chain.of_loss for number in mine):
        return None
    last = chain.listed[mine[-1]]
    sentence = f"what `{last.name}` made there is no part of the loss"
    return LostGradient("not in the loss", last.line, last.name, sentence, "add it to the loss, or freeze the layer.")


def _leaves(chain: Chain, cut: int) -> bool:
    """Whether numbers leave torch by a cut, or behind it."""
    behind = {cut, *chain.descendants((cut,))}
    return any(name_of(chain.listed[number]) in LEAVING | COPYING for number in behind)


def _follow(chain: Chain, begun: list[int]) -> tuple[set[int], list[int]]:
    """What is made of some operations with a graph all the way, and the cuts that end the way, in order."""
    reached = {number for number in begun if not chain.listed[number].cuts}
    cuts = [number for number in begun if chain.listed[number].cuts]
    for number, operation in enumerate(chain.listed):
        if number not in reached and any(each in reached for each in chain.operands(number)):
            if operation.cuts:
                cuts.append(number)
            elif operation.node:
                reached.add(number)
    return reached, sorted(set(cuts))


def describe_cut(operation: Operation) -> LostGradient:
    """What an operation did that took an operand with a graph and gave a result without one."""
    name = name_of(operation)
    shown = operation.name.strip("_") if operation.name.startswith("__") else operation.name
    if name in DETACHING:
        what, repair = f"`{shown}` cuts it off from the graph", f"leave `{shown}` out there."
    elif name in LEAVING:
        what = f"`{shown}` makes a number or an array of it, which has no graph"
        repair = f"stay with tensors: leave `{shown}` out there."
    elif name in COPYING:
        what, repair = f"`{shown}` copies it without its graph", "use the tensor itself."
    elif operation.mode in _BLIND:
        where = _BLIND[operation.mode]
        what, repair = f"`{shown}` runs in {where}", f"run the forward outside of {where}."
        return LostGradient("no_grad", operation.line, shown, what, repair)
    else:
        what = f"`{shown}` has no derivative, so what comes after it has no graph"
        repair = "use a differentiable function there: softmax for argmax, a loss of logits for a count of hits."
    how: How = "left torch" if name in LEAVING else "cut"
    return LostGradient(how, operation.line, shown, what, repair)
