"""Facts by kind: what a recording notes beside statistics, so that a run can be explained from its record alone.

Lines are ``file:line`` of the user's source, empty where that is not known; parameters and modules have the names that
their sites have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from retrograd.core.history.data_facts import AttendedTokens, LossParts, SignedHistogram, Spread, Targets
from retrograd.core.history.fact import Fact, JsonObject
from retrograd.core.history.probe_facts import FunctionCheck, Probe
from retrograd.core.history.saved_facts import Recomputed, ZeroGradient
from retrograd.core.history.sink import Event, Moment
from retrograd.core.history.weights_facts import Changed, CountedOn, Load, StateRead


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Fact):
    """A call that the program made, in the order made.

    ``name`` is one of ``forward``, ``backward``, ``grad``, ``zero_grad``, ``step``, ``clip_grad_norm_``,
    ``clip_grad_value_``, ``scheduler.step``, ``scaler.unscale_``, ``scaler.step``, ``scaler.update``. ``value`` is the
    norm before clipping, and the scale after ``scaler.update``. What is called behind the update of a step belongs to
    the next one; ``step`` stands behind the calls of its closure. Of a step that calls the same as an earlier one,
    :class:`Repeats` tells. What is called before a model is recorded is not known: under ``retrograd run`` what comes
    before its first forward.

    Attributes:
        line: where it was called.
        about: the optimizer as ``SGD`` or ``SGD_2``, the scheduler's class, or the path of a module (``self`` for a
            model without a name).
        details: what else is known, by name: ``lr`` (one for each group) of ``step`` and ``scheduler.step``;
            ``max_norm``, ``norm_type`` and ``parameters`` (how many) of ``clip_grad_norm_``; ``clip_value``;
            ``set_to_none``; ``retain_graph``, ``create_graph``, ``inputs`` (how many) of ``backward`` and ``grad``;
            ``optimizer`` of ``zero_grad`` and of calls of a scaler: the class of the optimizer that they are of;
            ``held`` of ``backward``: what ``.grad`` of some parameters held before it, ``none``, ``zero``, ``some``, or
            ``unknown`` where that would have been waited for; ``training`` and ``grad`` (grad mode) of ``forward``.
    """

    kind = "call"
    line: str = ""
    about: str = ""
    details: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats(Fact):
    """Steps that made the same calls as an earlier one, from the same lines; ``value``: how many.

    Attributes:
        steps: for each its number, that of the earlier step whose calls are noted, and the numbers that are not those
            of the step before of the same kind: of which call (from 0), its ``value`` or null, its ``lr`` or null.
    """

    kind = "calls"
    steps: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap(Fact):
    """From this step on one of each ``value`` steps is recorded, by a budget for overhead, not always the first.

    Attributes:
        updates: the same for updates of weights.
        reason: ``begin``, ``measure``, ``cost`` (of recorded and unrecorded steps), or what began a window that is
            recorded in full: ``loss``, ``nonfinite``, ``gradient``, ``phase``.
        share: of the time that a step takes by itself: what is expected at this gap.
    """

    kind = "gap"
    updates: int = 1
    reason: str = ""
    share: float = math.nan


MOST_OPTIMIZERS = 50
"""Optimizers of one class that are noted one by one; those after them have the name of the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMade(Fact):
    """An optimizer at its first update, and when its groups have changed; of each class the first 50.

    ``name`` is that of its sites: ``SGD``, ``SGD_2``; ``value`` the number of its parameters.

    Attributes:
        type: its class: ``SGD``.
        number: its number among the optimizers of its class, from 1.
        line: where it was constructed.
        groups: of each group its hyper-parameters by name, with ``parameters``: their names, and ``unknown``: how many
            of them belong to no recorded model.
        has_updated: whether it has; one that never has is noted when the recording ends.
    """

    kind = "optimizer"
    type: str = ""
    number: int = 0
    line: str = ""
    groups: tuple[JsonObject, ...] = ()
    has_updated: bool = True

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters of all groups."""
        return [str(name) for group in self.groups for name in group.get("parameters", ())]

    @property
    def unknown(self) -> int:
        """How many tensors it holds that belong to no recorded model."""
        return sum(int(group.get("unknown", 0)) for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChanged(Fact):
    """A setting of an optimizer that changes, other than its learning rate. ``name`` is that of the optimizer's sites.

    ``value`` is how often it has changed: it is noted at 1, 2, 4, 8 … changes, and when the recording ends. The last
    one holds for all updates so far.

    Attributes:
        setting: ``momentum``; ``betas.0`` for the first of several numbers.
        group: of which group of parameters, from 0.
        first, low, high, last: the number at the first update, the lowest, the highest, and that of the last update.
    """

    kind = "setting"
    setting: str = ""
    group: int = 0
    first: float = math.nan
    low: float = math.nan
    high: float = math.nan
    last: float = math.nan

    @property
    def course(self) -> list[float]:
        """The first number, the lowest and the highest where they are neither end, and the last."""
        return [self.first, *({self.low, self.high} - {self.first, self.last}), self.last]


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes(Fact):
    """Which modules are in training mode, when it is not as at the forward before. ``name`` is that of the model.

    A module that is in neither list is as the one around it. A change inside a large model that leaves the model's own
    flag alone may be seen some forwards later; of each model the first 100 changes are noted, then those to what is
    new.

    Attributes:
        training: paths of modules in training mode; of a subtree that is all alike its root, as in ``blocks``.
        evaluating: the same of those in eval mode.
    """

    kind = "modes"
    training: tuple[str, ...] = ()
    evaluating: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveDropout(Fact):
    """A call of dropout that drops, in the forward of a model in eval mode without grad. ``name`` is the module.

    ``value`` is the share that it drops.

    Attributes:
        operation: the function: ``dropout``, or ``scaled_dot_product_attention``.
        line: who called it.
    """

    kind = "dropout"
    operation: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input(Fact):
    """A tensor that a model was called with. ``name`` is as in ``self:input.x``; ``value`` its mean.

    Of each recorded step those of the first call with grad mode, and of the first one without, at most six. Of a tensor
    of more than a million elements some rows are read.

    Attributes:
        shape, dtype: what it is.
        min, max, std: of its finite elements; integers too.
        nonfinite: elements that are not finite.
        digest: the same for the same values, of the same type and shape.
    """

    kind = "input"
    shape: tuple[int, ...] = ()
    dtype: str = ""
    min: float = math.nan
    max: float = math.nan
    std: float = math.nan
    nonfinite: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer(Fact):
    """A buffer before the first forward of a step that was looked at, and when recording ended.

    Floating ones, and numbers. ``name`` is as in ``bn:running_var``; ``value`` its mean.

    Attributes:
        dtype, min, max, digest: as of an input.
    """

    kind = "buffer"
    dtype: str = ""
    min: float = math.nan
    max: float = math.nan
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(Fact):
    """A parameter before the first forward of a step that was looked at, and when recording ended.

    ``name`` is that of its site; ``value`` its root mean square.

    Attributes:
        shape, dtype: what it is.
        requires_grad: whether it does.
        grad: ``None``, ``zero`` or ``some``, as ``.grad`` was behind the backward passes of that step; empty where
            there was none.
        digest: as of an input.
        same_rows: rows of a matrix that are equal to another row of it, bit for bit.
        tied: other names of the same tensor.
        held: an optimizer that has updated, by then or before, holds this very tensor; None where none holds any of
            its model, and in a run of an older version.
    """

    kind = "parameter"
    shape: tuple[int, ...] = ()
    dtype: str = ""
    requires_grad: bool = True
    grad: str = ""
    digest: str = ""
    same_rows: int = 0
    tied: tuple[str, ...] = ()
    held: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Units(Fact):
    """Units (channels, features) of a module's output, when it was looked at. ``name`` is the site; ``value`` how many.

    Of a layer that a ReLU follows which is called as a function, a unit that is nowhere above zero counts as zero.

    Attributes:
        samples: elements of each.
        zero: units that are zero in all of them.
        saturated: units of which most elements are at the bounds of their function (tanh, sigmoid).
        always: units that have been zero at all looks since ``since``.
        since: the step of the first of these looks; most of those that last have been zero since then.
        used: of an embedding: rows that have been looked up so far.
    """

    kind = "units"
    samples: int = 0
    zero: int = 0
    saturated: int = 0
    always: int = 0
    since: int = 0
    used: int = -1


MADE_BEFORE = -1
"""The number of the operation that made a tensor, where that is none of those noted."""

CARRIED = -2
"""The same, where the tensor has a graph: it is not a parameter, and no data."""


class Operation(NamedTuple):
    """A torch function that the program called.

    Attributes:
        name: of the function: ``softmax``.
        line: who called it.
        module: path of the innermost module call; empty outside of all.
        node: class of the node of the result: ``SoftmaxBackward0``; empty where it has no graph.
        operands: for each tensor that it took the number of the operation that made it; −1 for one made before,
            −2 where that has a graph: it is carried over.
        takes, makes: those tensors, and the results, as in ``float32[4, 3]``.
        arguments: what is not a tensor, as text: ``dim=-1``.
        cuts: an operand had a graph or required a gradient, and the result has none though it is made of it.
        mode: empty with grad mode on; ``no_grad`` or ``inference``; ``function`` in the forward of a Python Function,
            which has a graph of its own.
        checkpoint: line of the reentrant checkpoint that ran it, where no backward pass comes to that because no input
            of it requires grad, and an operand of this does.
    """

    name: str
    line: str = ""
    module: str = ""
    node: str = ""
    operands: tuple[int, ...] = ()
    takes: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    arguments: str = ""
    cuts: bool = False
    mode: str = ""
    checkpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations(Fact):
    """The operations from the start of a forward to its backward, in order; written when they are not as before.

    ``name`` is that of the model; ``value`` how many nodes the graph of the loss has.

    Attributes:
        listed: for each operation its fields, in the order of :class:`Operation`, where numbers of ``texts`` stand for
            texts; see :meth:`operations`.
        texts: all texts, each once.
        outputs: numbers of the operations that made the models' outputs.
        loss: number of the operation that made what backward began from; −1 where that is not among them, or no
            backward began.
        is_cut: there were more operations, which are not listed.
        dropped: numbers of operations that are called by a statement which takes no result, nor does another operation;
            None in runs of versions that did not record it.
    """

    kind = "operations"
    listed: tuple[tuple[Any, ...], ...] = ()
    texts: tuple[str, ...] = ()
    outputs: tuple[int, ...] = ()
    loss: int = -1
    is_cut: bool = False
    dropped: tuple[int, ...] | None = None

    def operations(self) -> list[Operation]:
        """The operations."""
        return [self._read(one) for one in self.listed]

    def _read(self, one: tuple[Any, ...]) -> Operation:
        return Operation(
            **{name: self._spell(name, value) for name, value in zip(Operation._fields, one, strict=False)}
        )

    def _spell(self, name: str, value: Any) -> Any:
        if name in ("operands", "cuts"):
            return value
        if isinstance(value, tuple):
            return tuple(self._spell(name, each) for each in value)
        return self.texts[value] if isinstance(value, int) else value

    @classmethod
    def pack(cls, operations: Iterable[Operation], **fields: Any) -> Self:
        """Make the fact of operations."""
        texts: dict[str, int] = {}

        def number(text: str) -> int:
            return texts.setdefault(text, len(texts))

        def pack_field(value: Any) -> Any:
            if isinstance(value, str):
                return number(value)
            is_texts = isinstance(value, tuple) and value and isinstance(value[0], str)
            return tuple(map(number, value)) if is_texts else value

        listed = tuple(tuple(map(pack_field, one)) for one in operations)
        return cls(listed=listed, texts=tuple(texts), **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax(Fact):
    """The softmax functions of one line of a module's forward, when they were looked at. ``name`` is the module.

    ``value`` is Σp² / Σp, 1 where each picks one; of n alike it is 1 / n.

    Attributes:
        line: where it is called.
        entries: numbers that add up to one, along its dimension.
    """

    kind = "softmax"
    line: str = ""
    entries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSize(Fact):
    """The graph that a backward pass began from, when it was looked at. ``value``: its nodes.

    Attributes:
        alive: graphs of earlier steps that are still held.
        looks, parts: how many graphs were looked at before, and of how many of them a part is still held.
        held, module, line: the operation that made what is held of one of them, in which module, and who called it; or
            the class of its node alone.
        variable, stored: the variable that holds one of them, as in ``losses`` or ``self.mean``, and the line that
            stores there; empty where it was not found.
        ring, ring_line: a Function that keeps its output as an attribute of ``ctx``, ``Exp.y``, and who called it.
    """

    kind = "graph"
    alive: int = 0
    looks: int = 0
    parts: int = 0
    held: str = ""
    module: str = ""
    line: str = ""
    variable: str = ""
    stored: str = ""
    ring: str = ""
    ring_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite(Fact):
    """Where a number that is not finite was made for the first time. ``name`` is the module, or the site.

    Attributes:
        born: ``input``, ``forward``, ``backward``, ``update`` or ``collective``.
        operation: torch function or node that made it.
        line: who called that in the forward.
        reason: why, in terms of values: ``log of 0``; empty where that was not seen.
        operands: what was seen of each operand: ``{"self": "min 0, 3 of 40 are 0"}``.
        made: what that is: ``NaN``, ``inf`` or ``−inf``; empty where that was not seen.
        watched: each operation was watched as it ran; else it was found in the graph of the failing step.
        noted: the step whose operations tell operation, line and module; −1 where that is the failing step.
        certain: all that it took was seen to be finite, or the reason was; else it may have come in there.
    """

    kind = "nonfinite"
    born: str = ""
    operation: str = ""
    line: str = ""
    reason: str = ""
    operands: JsonObject = field(default_factory=dict)
    made: str = ""
    watched: bool = False
    noted: int = -1
    certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Overwrite(Fact):
    """A tensor that autograd had saved was written to before it was used. ``name`` is the module that saved it.

    Attributes:
        tensor: what it is: ``weight`` of a module, ``self``, ``result``.
        node: who saved it.
        saved_line, written_line: where.
        writer: the operation that wrote.
        saved_version, found_version: of the tensor.
        silent: torch does not raise.
    """

    kind = "overwrite"
    tensor: str = ""
    node: str = ""
    saved_line: str = ""
    written_line: str = ""
    writer: str = ""
    saved_version: int = 0
    found_version: int = 0
    silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWrite(Fact):
    """A hook wrote into a gradient that is in the same memory as one that another node had yet to use.

    ``name`` is the module whose hook it is, or that made the tensor of the hook, ``value`` how many were harmed.

    Attributes:
        hook, hook_line: the function, or ``backward`` of a Function, and where it begins; empty where a module has
            several hooks.
        node: the node at which it was called.
        tensor: name of a parameter, or of the operation that made the tensor; empty for hooks of modules and Functions.
        line: where it was made; empty where that is not known.
        harmed, harmed_in, harmed_line: the same of one of the others: its tensor, module and line.
    """

    kind = "shared"
    hook: str = ""
    hook_line: str = ""
    node: str = ""
    tensor: str = ""
    line: str = ""
    harmed: str = ""
    harmed_in: str = ""
    harmed_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreedPart(Fact):
    """What a backward pass was refused for: a part of its graph that an earlier pass has freed.

    ``name`` is the variable that holds it, as in ``state`` or ``self.state``, empty where none was found; ``value`` how
    many nodes of that part newer ones take.

    Attributes:
        node: class of the node that is taken.
        line: the only one that assigns the variable; empty where there are several.
        is_made_once: that line lies outside of the loop in which backward is called; null where that is not known.
        leaves_something: the pass would come to a leaf without that part, too: detached from it, it would train on.
        starves: parameters that it comes to through that part alone: detached from it, they would get nothing here.
    """

    kind = "freed"
    node: str = ""
    line: str = ""
    is_made_once: bool | None = None
    leaves_something: bool = True
    starves: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked(Fact):
    """Hooks of the program's for saved tensors gave other data than they were given.

    ``value`` is the largest ‖difference‖ / ‖saved‖ of a tensor, over at most 4,096 of its elements.

    Attributes:
        pack, unpack: names of the two functions.
        pack_line, line: where they begin.
        tensors: how many were compared at that step.
        changed: how many of them differ.
        written: that tensor is the very memory that was saved, so it was written to.
    """

    kind = "unpacked"
    pack: str = ""
    unpack: str = ""
    pack_line: str = ""
    line: str = ""
    tensors: int = 0
    changed: int = 0
    written: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPart(Fact):
    """A Function that was differentiated twice, and saves what its forward computes and does not return.

    ``name`` is that of the Function.

    Attributes:
        operation: what computes that in its forward.
        line: who calls this.
        called: who called the Function; empty where that was not seen.
    """

    kind = "lost"
    operation: str = ""
    line: str = ""
    called: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kink(Fact):
    """A node whose inputs lie where its function has no derivative. ``name`` is the module, ``value`` how many do.

    Attributes:
        node: its class.
        line: who called it in the forward.
        operation: what it computes: ``sqrt``.
        where: the points: ``at 0``.
        convention: what torch takes there, after the rules of its note on functions that have no gradient.
        gives: the gradient that torch gives there, for an incoming one of one.
        total: elements looked at; of a pooling, windows.
        points: the indices of the first few that lie there.
        nonfinite: numbers that are not finite which it made of a gradient that was; −1 where that was not seen.
        finite: what torch gives there is.
        is_usual: that elements lie there is nothing to wonder about: zeros in front of a ReLU.
    """

    kind = "kink"
    node: str = ""
    line: str = ""
    operation: str = ""
    where: str = ""
    convention: str = ""
    gives: str = ""
    total: int = 0
    points: tuple[tuple[int, ...], ...] = ()
    nonfinite: int = -1
    finite: bool = True
    is_usual: bool = False


FACTS: tuple[type[Fact], ...] = (
    Call, Repeats, OptimizerMade, SettingChanged, Modes, ActiveDropout, Input, Buffer, Parameter, Units, Operations,
    Softmax, GraphSize,
    NonFinite, Overwrite, SharedWrite, Unpacked, FreedPart, LostPart, Kink,
    Gap,
    StateRead, Load, CountedOn, Changed,
    Targets, Spread, AttendedTokens, SignedHistogram,
    LossParts,
    Recomputed, ZeroGradient,
    Probe, FunctionCheck,
)  # fmt: skip
"""Every kind of fact."""

_OF_KIND: dict[str, type[Fact]] = {each.kind: each for each in FACTS}


def read_facts(events: Iterable[Event], rank: int = 0) -> list[Fact]:
    """The facts among events, in their order; what cannot be read is passed over."""
    found = []
    for event in events:
        if event.kind in _OF_KIND:
            try:
                found.extend(_OF_KIND[event.kind].all_of_event(event, rank))
            except (ValueError, TypeError):
                continue
    return found


# ---- calls of every step ----


def expand_calls(facts: Iterable[Fact]) -> list[Call]:
    """All calls of a process, by step, in the order made. Repetitions of a missing step are skipped."""
    patterns: dict[int, list[Call]] = {}
    found: list[Call] = []
    for fact in facts:
        if isinstance(fact, Call):
            patterns.setdefault(fact.step, []).append(fact)
            found.append(fact)
        elif isinstance(fact, Repeats):
            for step, like, changes in fact.steps:
                if like in patterns:
                    now = patterns[like] = list(_repeat(patterns[like], step, changes))
                    found.extend(now)
    return sorted(found, key=lambda call: call.step)


def _repeat(calls: list[Call], step: int, changes: Iterable[tuple[int, Any, Any]]) -> Iterator[Call]:
    moment = Moment(step)
    changed = {index: (value, rates) for index, value, rates in changes}
    for index, call in enumerate(calls):
        value, details = call.value, call.details
        if index in changed:
            new, rates = changed[index]
            value = float("nan") if new is None else float(new)
            details = details if rates is None else {**details, "lr": list(rates)}
        yield Call(
            name=call.name,
            value=value,
            moment=moment,
            rank=call.rank,
            line=call.line,
            about=call.about,
            details=details,
        )
