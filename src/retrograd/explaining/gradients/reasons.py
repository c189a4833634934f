"""Why the gradient of one tensor is what it is, judged from what was seen of forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from retrograd.core.hooks.flow import Cut, FlowNotes, ParameterUse
from retrograd.core.hooks.nodes import name_of
from retrograd.explaining.findings.gradients import CHECKPOINT, CUTS
from retrograd.explaining.gradients.passes import FlowEnd, PassSeen, Why, has_nonzero

State = Literal["None", "zero", "some"]

FINE: frozenset[str] = frozenset({"has one", "not yet", "frozen"})
"""Nothing is missing: there is one, there will be one, or none is wanted."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the gradient of one tensor is what it is.

    Attributes:
        name: that of the parameter, or the one that was given to the tensor.
        grad: what its ``.grad`` is: ``"None"``, ``"zero"`` (every element) or ``"some"``.
        why: in a word.
        message: one sentence.
        line: ``file:line`` where it went wrong; empty where that is not known, or where nothing is wrong.
        repair: what to do; empty where nothing is wrong.
    """

    name: str
    grad: State
    why: Why
    message: str
    line: str = ""
    repair: str = ""

    @property
    def is_fine(self) -> bool:
        """True if nothing is missing."""
        return self.why in FINE

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return f"{self.name}: .grad is {self.grad}: {self.message}{where}"


# ---- from what was seen to a reason ----

WITH = "put `with rg.explain_gradients(model) as why:` around forward and backward: that names the line"

_ZEROS: dict[Why, tuple[str, str]] = {
    "step function": (
        "{kind} is flat: its derivative is zero everywhere",
        "pass the gradient straight through (`x + (x.round() - x).detach()`), or use a smooth function",
    ),
    "dead units": (
        "every path to it leads through units of {kind} that are off for this whole batch",
        "look at the inputs of these units; a lower learning rate, another initialisation or a leaky activation helps",
    ),
    "saturated": ("every path to it leads through {kind} at its bounds, where it is flat", "scale its inputs down"),
    "not picked": (
        "{kind} picks other elements than those that it feeds",
        "nothing, if other batches pick them; else look at the index or the mask",
    ),
    "zero factor": (
        "{kind} multiplies by zeros: the other factor (an input, a weight, a mask) is zero",
        "look at the other factor; a gate that begins at zero leaves it unless what it multiplies is zero, too",
    ),
    "cancels": (
        "the two gradients that {kind} gave add up to exactly zero",
        "see that it is not given the same tensor twice, as in x - x or the ratio of a policy to itself",
    ),
    "hook": ("a hook behind {kind} made its gradient zero", "take the hook away, or let it return what it was given"),
    "no derivative": ("{kind} gave no gradient for it", "return a gradient for that input in its backward"),
    "zero": ("its gradient becomes zero in {kind}", "look at what this operation was given"),
}

_CUTS: dict[str, tuple[Why, str, str]] = {
    "no_grad": (
        "no_grad",
        "`{function}` ran{ran} while gradients were switched off",
        "run the forward outside of no_grad()",
    ),
    "inference_mode": ("inference_mode", *CUTS["inference"]),
    **{how: ("cut", *CUTS[how]) for how in ("detached", "left torch", "copied", "no derivative")},
}


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that is asked of.

    Attributes:
        place: its bit.
        name: what it is called.
        tensor: itself.
        module: path of the module that has it; empty where it is none's.
    """

    place: int
    name: str
    tensor: Tensor
    module: str = ""


@dataclass(frozen=True, slots=True)
class Observations:
    """Observations of forward and backward.

    Attributes:
        passes: backward passes in order, or the graph of a loss.
        notes: the forward; None where it was not watched.
        called: paths of the modules that were called; None where that was not watched.
        leaves: all that are asked of.
    """

    passes: Sequence[PassSeen] = ()
    notes: FlowNotes | None = None
    called: frozenset[str] | None = None
    leaves: Sequence[Leaf] = ()


def state_of(tensor: Tensor) -> State:
    """State of its ``.grad``."""
    grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
    if grad is None:
        return "None"
    return "zero" if has_nonzero(grad) is False else "some"


def judge(leaf: Leaf, seen: Observations) -> Reason:
    """Why its gradient is what it is."""
    tensor = leaf.tensor
    state = state_of(tensor)
    if not tensor.requires_grad:
        return _judge_frozen(leaf, seen, state)
    if not tensor.is_leaf:
        return _judge_inner(leaf, state)
    reaching = [each for each in seen.passes if leaf.place in each.reached]
    if reaching:
        return _judge_reached(leaf, seen, state, reaching)
    return _judge_unreached(leaf, seen, state)


def _judge_frozen(leaf: Leaf, seen: Observations, state: State) -> Reason:
    line = seen.notes.frozen.get(leaf.place, "") if seen.notes is not None else ""
    stale = "; what is in .grad is of before" if state == "some" else ""
    return Reason(leaf.name, state, "frozen", f"it is frozen: requires_grad is False{stale}", line)


def _judge_inner(leaf: Leaf, state: State) -> Reason:
    if leaf.tensor.retains_grad and state != "None":
        why: Why = "has one" if state == "some" else "zero"
        return Reason(leaf.name, state, why, "it keeps its gradient" if state == "some" else "its gradient is zero")
    node = leaf.tensor.grad_fn
    if leaf.tensor.retains_grad:
        return Reason(leaf.name, state, "not yet", "it will keep its gradient when backward() runs through it")
    kind = name_of(node)
    moved = "to another device or type " if kind.startswith("ToCopy") else ""
    behind = [following for following, _ in getattr(node, "next_functions", ()) if following is not None]
    source = ""
    if any(name_of(each) == "AccumulateGrad" for each in behind):
        source = "; the gradient goes to the leaf that it was made of"
    return Reason(
        leaf.name,
        state,
        "not a leaf",
        f"it is not a leaf: {kind.rstrip('0').removesuffix('Backward')} made it {moved}from another tensor{source}",
        repair="call retain_grad() on it before backward(), or make it a leaf: `x = x.detach().requires_grad_()`",
    )


def _judge_reached(leaf: Leaf, seen: Observations, state: State, reaching: list[PassSeen]) -> Reason:
    if state == "some":
        return Reason(leaf.name, state, "has one", "it has a gradient")
    writing = [each for each in reaching if each.accumulates]
    if any(each.reached[leaf.place] for each in writing):
        return _judge_cleared(leaf, seen, state)
    lost = next((each.lost[leaf.place] for each in writing if each.lost.get(leaf.place)), ())
    if lost:
        return _judge_lost(leaf, state, lost)
    if all(not each.is_watched for each in reaching):
        return _judge_by_graph(leaf, state, reaching)
    if not writing:
        message = "torch.autograd.grad() returns gradients, and writes none into .grad"
        return Reason(leaf.name, state, "returned", message, reaching[-1].line, "use what it returns, or backward()")
    if any(each.failed for each in writing):
        return Reason(leaf.name, state, "failed", "the backward pass failed before it got there", writing[-1].line)
    if all(each.has_inputs for each in writing):
        message = "backward(inputs=…) was asked for the gradients of others"
        return Reason(
            leaf.name, state, "not asked for", message, writing[-1].line, "name it in inputs=, or leave that out"
        )
    return Reason(leaf.name, state, "zero", "the gradient that backward() began with is zero", writing[-1].line)


def _judge_cleared(leaf: Leaf, seen: Observations, state: State) -> Reason:
    cleared = seen.notes.cleared if seen.notes is not None else {}
    grad = leaf.tensor.grad
    line = cleared.get(id(leaf.tensor), "") or ("" if grad is None else cleared.get(id(grad), ""))
    how = "zero_grad() cleared it" if line else "something cleared it (zero_grad() elsewhere, or a hook)"
    return Reason(leaf.name, state, "cleared", f"it had a gradient, and {how}", line, "look at it before zero_grad()")


def _judge_lost(leaf: Leaf, state: State, lost: Sequence[FlowEnd]) -> Reason:
    first = lost[0]
    message, repair = _ZEROS[first.end.why]
    kind = first.end.kind.rstrip("0").removesuffix("Backward")
    where = f" of {first.module}" if first.module else ""
    more = f"; so it is in {len(lost) - 1} more places" if len(lost) > 1 else ""
    return Reason(leaf.name, state, first.end.why, message.format(kind=f"{kind}{where}") + more, first.line, repair)


def _judge_by_graph(leaf: Leaf, state: State, reaching: list[PassSeen]) -> Reason:
    if state == "zero":
        return Reason(leaf.name, state, "zero", "its gradient is zero although the loss leads to it", repair=WITH)
    if any(each.is_freed for each in reaching):
        message = "backward has run through this graph: zero_grad() cleared it since, or grad() or inputs= left it out"
        return Reason(leaf.name, state, "cleared", message, repair=WITH)
    return Reason(leaf.name, state, "not yet", "this loss leads to it: backward() gives it a gradient")


def _judge_unreached(leaf: Leaf, seen: Observations, state: State) -> Reason:
    stale = "; what is in .grad is of an earlier pass" if state != "None" else ""
    why, message, line, repair = _find_gap(leaf, seen)
    return Reason(leaf.name, state, why, message + stale, line, repair)


def _find_gap(leaf: Leaf, seen: Observations) -> tuple[Why, str, str, str]:
    notes = seen.notes
    if notes is None:
        return _find_gap_by_graph(leaf, seen)
    mine = [cut for cut in notes.cuts if cut.sources >> leaf.place & 1]
    losses = {cut for each in seen.passes for cut in each.cuts}
    behind = [cut for cut in mine if cut in losses]
    if behind:
        return describe_cut(behind[0])
    uses = notes.uses[leaf.place]
    if not seen.passes:
        return "no backward", "no backward pass ran", "", "call loss.backward()"
    blind = [use for use in uses if not use.has_gradients]
    if uses and len(blind) == len(uses):
        if mine:
            return describe_cut(next((cut for cut in mine if cut.line == blind[0].line), mine[0]))
        return describe_use_in_function(blind)
    if not uses:
        return _unused(leaf, seen)
    left = [cut for cut in notes.leaving if cut in mine]
    if left:
        why, message, line, repair = describe_cut(left[0])
        return why, f"{message}, and nothing else made of it is part of the loss", line, repair
    last = uses[-1]
    message = f"what {last.function} made of it is not part of the loss"
    return "not in the loss", message, last.line, "add what is made of it to the loss, or freeze it"


def describe_use_in_function(uses: Sequence[ParameterUse]) -> tuple[Why, str, str, str]:
    """Nothing but the forward of a Function took it, where no graph is made."""
    first = next((use for use in uses if use.checkpoint), uses[0])
    if first.checkpoint:
        message, repair = (text.format(function=first.function) for text in CHECKPOINT)
        return "checkpoint", message, first.checkpoint, repair
    message = f"`{first.function}` took it in the forward of a Function, of which no gradient came back for it"
    return "not in the loss", message, first.line, "hand it to the Function as an argument, and return its gradient"


def _unused(leaf: Leaf, seen: Observations) -> tuple[Why, str, str, str]:
    if _is_copied(leaf, seen):
        message = "the loss was computed from another tensor of this shape: another copy of the model was called"
        return "another copy", message, "", "call the model whose parameters the optimizer holds"
    if leaf.module and seen.called is not None and leaf.module not in seen.called:
        return "never called", f"its module {leaf.module} was not called", "", "call it in forward, or leave it out"
    return "not used", "no operation took it", "", "use it in forward, or leave it out"


def _is_copied(leaf: Leaf, seen: Observations) -> bool:
    """Return whether nothing that is asked for is reached, and leaves that look the same are."""
    strangers = {each for one in seen.passes for each in one.strangers}
    keys = {(tuple(each.tensor.shape), str(each.tensor.dtype)) for each in seen.leaves}
    is_reached = any(one.reached for one in seen.passes)
    key = tuple(leaf.tensor.shape), str(leaf.tensor.dtype)
    return not is_reached and key in strangers and strangers <= keys


def _find_gap_by_graph(leaf: Leaf, seen: Observations) -> tuple[Why, str, str, str]:
    if not seen.passes:
        return "unknown", "no loss was given", "", WITH
    if not all(each.has_graph for each in seen.passes):
        return "no graph", "the loss has no graph", "", WITH
    if _is_copied(leaf, seen):
        return _unused(leaf, seen)
    message = "the loss does not lead to it: it was not used, or what is made of it was cut off or left out"
    return "unknown", message, "", WITH


def describe_cut(cut: Cut) -> tuple[Why, str, str, str]:
    """The word, the sentence, the line and the repair of a cut."""
    why, message, repair = _CUTS[cut.how]
    where = f"in {cut.module}, " if cut.module else ""
    line = cut.switched or cut.line
    ran = f", at {cut.line}," if cut.switched else ""
    return why, where + message.format(function=cut.function, ran=ran), line, repair.format(function=cut.function)
