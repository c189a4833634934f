"""Where the first number that is not finite was born: as a recording saw it, or as far as its rows tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.core.history.facts import Input, NonFinite, Operation
from retrograd.core.history.rows import encode_phase
from retrograd.core.sites.site import Site, parse_leniently, read_accumulated
from retrograd.explaining.findings.chain import Chain, argument_of, count, name_of, shape_of
from retrograd.explaining.findings.record import Record
from retrograd.explaining.findings.training import Training

GREW = 1e3
"""Losses and outputs that are so many times what they were at first have grown to what is not finite."""

HUGE = 10.0
"""‖Δw‖/‖w‖ of an update behind which numbers have grown in one step."""

_WITHOUT_SIZE = (
    "−inf",
    "ctc_loss",
    "is ignored",
    "of one element",
    "of no elements",
    "over none",
    "0 / 0",
    "whose eps ",
)
"""Words of reasons that have nothing to do with how large numbers have become."""

_MAKING = frozenset(
    {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "div", "true_divide", "rdiv", "rtruediv", "reciprocal", "pow",
     "rpow", "exp", "expm1", "exp2", "softmax", "log_softmax", "std", "var", "acos", "asin", "atanh", "acosh", "norm",
     "logsumexp", "atan2", "nll_loss", "cross_entropy", "logit", "erfinv"}
)  # fmt: skip
"""Operations that make what is not finite of what is, without large numbers."""

_PARTING = frozenset(
    {"sqrt", "rsqrt", "pow", "acos", "asin", "atanh", "log", "log2", "log10", "reciprocal", "div", "exp", "true_divide",
     "atan2"}
)  # fmt: skip
"""Operations whose derivative may not be finite where they are; that of ``norm`` and ``std`` is made 0 by torch."""


def _is_spread_of_one(operation: Operation) -> bool:
    """Return whether it is a standard deviation of a single element, which is 0 / 0."""
    taken = shape_of(operation.takes[0]) if operation.takes else None
    is_plain = argument_of(operation, "correction") is None and argument_of(operation, "unbiased") is None
    return name_of(operation) in ("std", "var") and taken is not None and count(taken) == 1 and is_plain


@dataclass(frozen=True, slots=True)
class Birth:
    """The birth of the first number that is not finite.

    Attributes:
        born: ``input``, ``forward``, ``backward`` or ``update``.
        step: when.
        site: path of the module, or name of the site; empty for what is outside of all modules.
        line, operation, reason, operands: as of the fact; what is not known is empty.
        is_seen: a recording saw it made; else it is concluded from rows.
        seen_at: the first site at which it shows in the rows; empty where there is none.
        rank: in which process; None where that is not told apart.
        is_beside: it came in, and not with the model's inputs, for they are finite at that step.
        noted: the step whose operations tell the operation; None where a recording saw it made.
        is_behind: it is made between the site, which is given it for a gradient, and the loss.
        is_watched: the operations of that step were watched as they ran.
        is_certain: that it is made there was seen; else it may only have come in there.
        is_outside: it is made outside of all modules, which is known.
        made: what it is: ``NaN``, ``inf`` or ``−inf``; empty where that is not known.
        reached: where it went, in words; empty where no record tells.
    """

    born: str
    step: int
    site: str = ""
    line: str = ""
    operation: str = ""
    reason: str = ""
    operands: Mapping[str, Any] = field(default_factory=dict)
    is_seen: bool = False
    seen_at: str = ""
    rank: int | None = None
    is_beside: bool = False
    noted: int | None = None
    is_behind: bool = False
    is_watched: bool = False
    is_certain: bool = True
    is_outside: bool = False
    made: str = ""
    reached: str = ""


def _is_refuted(fact: NonFinite, shown: Birth, *, are_gradients_bad: bool) -> bool:
    """Return whether rows show that an update was the first, or was not: it was seen in the weights, or supposed.

    Args:
        fact: what was seen.
        shown: what rows show.
        are_gradients_bad: gradients of weights are not finite at that step: what the forward made has come to them.
    """
    if "update" not in (fact.born, shown.born):
        return False
    is_supposed = not fact.watched and fact.born == "backward"
    is_same = shown.step == fact.step and fact.born == "update"
    is_behind = is_same and not fact.operation
    is_later = shown.step < fact.step or (shown.step == fact.step and is_supposed)
    return is_later or (is_same and are_gradients_bad) or (is_behind and shown.born in ("backward", "update"))


class Births:
    """Finds the birth of the first number that is not finite.

    Args:
        record: what it reads.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._rows = self._find_bad_rows()
        skipped = [event.moment.step for event in record.events if event.kind == "skipped"]
        self.skipped = frozenset(skipped)
        """Steps whose update loss scaling has skipped."""

    @cached_property
    def first(self) -> Birth | None:
        """The first one; None where all that matters is finite."""
        facts = [fact for fact in self._record.of(NonFinite) if not self._is_expected(fact)]
        shown = self._find_in_rows()
        if not facts:
            return shown
        # a graph tells of the weights that its step began with: an update of the step before
        fact = min(facts, key=lambda each: (each.step - each.watched, not each.watched, not each.line, not each.reason))
        if shown is not None and _is_refuted(fact, shown, are_gradients_bad=self._are_gradients_bad(shown.step)):
            return shown
        birth = Birth(
            born=fact.born,
            step=fact.step,
            site=fact.name,
            line=fact.line,
            operation=fact.operation,
            reason=fact.reason,
            operands=fact.operands,
            is_seen=True,
            rank=fact.rank if len({each.rank for each in facts}) > 1 or self._has_ranks else None,
            seen_at=shown.seen_at if shown is not None else "",
            noted=fact.noted if fact.noted >= 0 else None,
            is_watched=fact.watched,
            is_certain=fact.certain or (shown is not None and (shown.born, shown.step) == ("backward", fact.step)),
            is_outside=bool(fact.line) and not fact.name and bool(self._record.sites),
            made=fact.made or (shown.made if shown is not None and shown.step == fact.step else ""),
            reached=self._reach_of(fact.step),
        )
        return self._look_behind(birth) if birth.born == "input" else birth

    # ---- what came in ----

    def _look_behind(self, birth: Birth) -> Birth:
        """Return whether what an operation was given was made without a graph, of inputs that are finite."""
        given = [fact for fact in self._record.of(Input) if fact.step == birth.step]
        if not given or any(fact.nonfinite for fact in given):
            return birth
        makers = list(self._list_makers(birth))
        if not makers:
            return replace(birth, is_beside=True)
        alone = [each for each in makers if _is_spread_of_one(each)]
        making = {(each.name, each.line): each for each in alone or makers if name_of(each) in _MAKING}
        chain = self._chain_of(birth.step)
        noted = chain.step if chain is not None else None
        made = replace(
            birth, born="forward", site=makers[-1].module, operation="", is_seen=False, operands={}, noted=noted
        )
        if len(making) != 1:
            return made
        [maker] = making.values()
        reason = f"{name_of(maker)} of one element" if alone else ""
        return replace(made, site=maker.module, operation=maker.name, line=maker.line, reason=reason)

    def _list_makers(self, birth: Birth) -> Iterator[Operation]:
        """The operations without a graph that made what it was given, in their order."""
        chain = self._chain_of(birth.step)
        if chain is None:
            return
        taking = [
            number
            for number, each in enumerate(chain.listed)
            if (each.name, each.line, each.module) == (birth.operation, birth.line, birth.site)
        ]
        plain = {made for taken in taking for made in chain.operands(taken) if not chain.listed[made].node}
        numbers = frozenset[int]().union(*(chain.ancestors(each) for each in plain))
        yield from (chain.listed[each] for each in sorted(numbers) if not chain.listed[each].node)

    def _chain_of(self, step: int) -> Chain | None:
        return next((each for each in reversed(self._record.chains) if each.step <= step), None)

    @cached_property
    def is_sudden(self) -> bool:
        """True if there is one, and no growth of numbers came before it."""
        return self.first is not None and self.growth < 1

    @property
    def is_of_size(self) -> bool:
        """True if numbers that are too large may have made it."""
        birth = self.first
        return birth is not None and birth.born != "input" and not any(words in birth.reason for words in _WITHOUT_SIZE)

    @cached_property
    def growth(self) -> float:
        """Growth of numbers before it, over what counts as growth: 1 and more explains an overflow."""
        birth = self.first
        if birth is None or not self.is_of_size:
            return 0.0
        return max(self._grown_updates(birth.step), self._grown_loss(birth.step), self._grown_outputs(birth.step))

    def _grown_updates(self, step: int) -> float:
        if not self._record.of_kind("parameter", "update"):
            return 0.0
        updates = self._record.once(Training).updates
        return float(np.nanmax(updates.ratio[updates.steps < step], initial=0.0)) / HUGE

    def _grown_loss(self, step: int) -> float:
        loss = self._record.loss
        values = loss.values[(loss.steps <= step) & np.isfinite(loss.values)]
        start = float(np.median(np.abs(values[:3]))) if len(values) else 0.0
        return float(np.abs(values[-1]) / start / GREW) if len(values) > 1 and start > 0 else 0.0

    def _grown_outputs(self, step: int) -> float:
        sites = [str(site) for site in self._record.of_kind("output")]
        if not sites:
            return 0.0
        before = np.empty((len(sites), 0))  # the first of all, and the last two before
        for [matrix] in self._record.history.matrices(["abs_max"], sites):
            found = np.concatenate((before, matrix.values[:, matrix.steps <= step]), axis=1)
            before = found if found.shape[1] < 4 else found[:, [0, -2, -1]]
        if before.shape[1] < 2:
            return 0.0
        with np.errstate(all="ignore"):
            ratio = before[:, -2:] / before[:, :1]
        return float(np.nanmax(np.where(np.isfinite(ratio), ratio, 0.0), initial=0.0)) / GREW

    @property
    def _has_ranks(self) -> bool:
        return any(rank > 0 for rank in self._record.history.rows.ranks)

    def _is_expected(self, fact: NonFinite) -> bool:
        """Loss scaling has skipped the update: gradients overflow while it searches."""
        return fact.born in ("backward", "update") and fact.step in self.skipped

    # ---- from the rows ----

    def _find_in_rows(self) -> Birth | None:
        step = self._first_step()
        if step is None:
            return None
        rows, names = self._rows, self._record.history.site_names
        index = np.flatnonzero(rows["step"] == step)
        index = index[np.lexsort((rows["order"][index], rows["micro"][index]))]
        reached = self._reach_of(step)
        if not len(index):
            outputs = self._record.of_kind("output")
            is_outside = any(site.path in self._record.root_names for site in outputs)
            return self._conclude(Birth("forward", step, is_outside=is_outside, reached=reached))
        first = parse_leniently(names[rows["site"][index[0]]])
        is_behind = first.quantity != "value" and step in self._lost_steps
        birth = self._place(first, step, is_behind=is_behind)
        ranks = np.unique(rows["rank"][index])
        rank = int(rows["rank"][index[0]]) if self._has_ranks and len(ranks) == 1 else None
        made = "NaN" if rows["nan"][index[0]] else "inf" if rows["pos_inf"][index[0]] else "−inf"
        return self._conclude(replace(birth, seen_at=str(first), rank=rank, made=made, reached=reached))

    def _reach_of(self, step: int) -> str:
        """Describe where non-finite values went at a step: to the loss, or to a weight; empty where not known."""
        if step in self._lost_steps:
            return f"the loss of step {step} is not finite"
        sites = self._list_bad_weights(step)
        return f"it is in {self._record.history.site_names[sites[0]]} at step {step}" if len(sites) else ""

    def are_weights_bad(self, step: int | None) -> bool:
        """Return whether weights, their gradients or updates are not finite at a step."""
        return len(self._list_bad_weights(step)) > 0

    def _are_gradients_bad(self, step: int) -> bool:
        names = self._record.history.site_names
        return any(parse_leniently(names[site]).quantity == "grad" for site in self._list_bad_weights(step))

    def _list_bad_weights(self, step: int | None) -> npt.NDArray[Any]:
        rows = self._rows
        return np.asarray(rows["site"][(rows["step"] == step) & self._of_weights[rows["site"]]])

    def _place(self, first: Site, step: int, *, is_behind: bool) -> Birth:
        if is_behind:  # the loss is lost, and all that the model gave is finite
            return Birth("forward", step, is_outside=True)
        if parameter := read_accumulated(first):
            reason = "its .grad is not finite before the update, though what each pass gave is"
            return replace(self._place_update(str(parameter), step, knows_step=False), reason=reason)
        if first.quantity == "update":
            return self._place_update(str(first.value), step, knows_step=True)
        if first.quantity == "grad":
            return Birth("backward", step, first.path, is_behind=first.kind == "output")
        return Birth("input" if first.kind == "input" else "forward", step, first.path)

    def _place_update(self, parameter: str, step: int, *, knows_step: bool) -> Birth:
        """The optimizer that holds a parameter, the line of its step, and whether its eps is 0, if its step did it."""
        for name, made in self._record.optimizers.items():
            for group in made.groups:
                if parameter in group.get("parameters", ()):
                    steps = [call for call in self._record.calls if call.name == "step" and call.about == name]
                    line = next((call.line for call in reversed(steps) if call.step <= step), "")
                    reason = self._judge_epsilon(name, group.get("eps"), parameter, step) if knows_step else ""
                    return Birth("update", step, parameter, (reason and made.line) or line, f"{name}.step", reason)
        return Birth("update", step, parameter)

    def _judge_epsilon(self, optimizer: str, epsilon: Any, parameter: str, step: int) -> str:
        """Return a text that eps is 0, or so small that float16 has it as 0; empty where it is neither."""
        kind = next((look.dtype for look in self._record.looks.get(parameter, ())), "")
        if not isinstance(epsilon, int | float) or (epsilon and not (kind == "float16" and np.float16(epsilon) == 0)):
            return ""
        rows = self._record.series(f"{parameter}.update").rows
        what = "0 / 0" if rows["nan"][rows["step"] == step].any() else "division by 0"
        return f"{what} in {optimizer}, whose eps {f'of {epsilon:g} is 0 in float16' if epsilon else 'is 0'}"

    def _conclude(self, birth: Birth) -> Birth:
        """Name the operation, where one alone can have made it."""
        chain = self._chain_of(birth.step)
        if chain is None or birth.born not in ("forward", "backward"):
            return birth
        listed = list(self._list_candidates(birth, chain))
        lines = {(operation.name, operation.line) for operation in listed}
        if len(lines) != 1:
            return birth
        operation = listed[0]
        birth = replace(birth, operation=operation.name, line=operation.line, noted=chain.step)
        inside = replace(birth, site=operation.module, is_behind=False, is_outside=False)
        return inside if operation.module else birth

    def _list_candidates(self, birth: Birth, chain: Chain) -> Iterator[Operation]:
        names = _MAKING if birth.born == "forward" else _PARTING
        for number in sorted(chain.of_loss):
            operation = chain.listed[number]
            if operation.name.rstrip("_") in names and self._may_be(chain, number, birth):
                yield operation

    @staticmethod
    def _may_be(chain: Chain, number: int, birth: Birth) -> bool:
        operation = chain.listed[number]
        if birth.born == "backward":
            is_square = operation.name.startswith("pow") and operation.arguments in ("2", "3", "4", "exponent=2")
            return bool(operation.node) and not is_square
        return operation.module == birth.site if birth.site else number in chain.behind_outputs

    def _is_harmless(self, step: int) -> bool:
        """Return whether loss scaling has skipped the update, or gradients that overflowed were cleared unused."""
        if step in self.skipped:
            return True
        rows, sites = self._rows, [parse_leniently(name) for name in self._record.history.site_names]
        is_update = np.array([site.quantity == "update" for site in sites], np.bool_)
        of_step = is_update[rows["site"][rows["step"] == step]]
        is_scaled = any(call.name.startswith("scaler.") for call in self._record.calls)
        return is_scaled and not bool(of_step.any())

    def _find_bad_rows(self) -> Mapping[str, npt.NDArray[Any]]:
        """Rows of training that hold what is not finite; −inf of a value may be a mask."""
        phases = [encode_phase(each) for each in ("train", "failed", "forward")]
        told = ("step", "site", "micro", "order", "rank", "nan", "pos_inf")
        found: dict[str, list[npt.NDArray[Any]]] = {name: [np.empty(0, np.int64)] for name in told}
        for piece in self._record.history.rows.nonfinite_pieces((*told, "phase", "neg_inf")):
            masked = piece["neg_inf"] * ~self._values[piece["site"]]
            bad = np.flatnonzero(piece["nan"] + piece["pos_inf"] + masked)
            bad = bad[np.isin(piece["phase"][bad], phases)]
            for name in told if len(bad) else ():
                found[name].append(piece[name][bad])
        return {name: np.concatenate(columns) for name, columns in found.items()}

    @cached_property
    def _values(self) -> npt.NDArray[np.bool_]:
        """For each site, by its code, whether it is a value that no parameter holds."""
        sites = [parse_leniently(name) for name in self._record.history.site_names]
        return np.array([site.quantity == "value" and site.kind != "parameter" for site in sites], np.bool_)

    @cached_property
    def _of_weights(self) -> npt.NDArray[np.bool_]:
        """For each site, by its code, whether it is of a parameter: its gradient, its update or its value."""
        return np.array(
            [parse_leniently(name).kind == "parameter" for name in self._record.history.site_names], np.bool_
        )

    @cached_property
    def _has_all_gradients(self) -> bool:
        """True if all gradients that weights have had were recorded: what is in none of them has come to none."""
        of_sites = {str(site.value) for site in self._record.of_kind("parameter", "grad")}
        had = [{each.name, *each.tied} for each in self._record.parameters if each.grad == "some"]
        return bool(of_sites) and all(names & of_sites for names in had)

    @cached_property
    def _lost_steps(self) -> frozenset[int]:
        loss = self._record.loss
        return frozenset(map(int, loss.steps[~np.isfinite(loss.values)]))

    def _first_step(self) -> int | None:
        """The first step at which the loss, or what trains the weights, is not finite."""
        rows, sites = self._rows, self._rows["site"]
        is_meant = self._of_weights[sites] if self._has_all_gradients else ~self._values[sites]
        harmful = (int(step) for step in np.unique(rows["step"][is_meant]) if not self._is_harmless(int(step)))
        told = {*self._lost_steps, *islice(harmful, 1)}
        if not told and self._record.status == "failed":
            told = set(map(int, np.unique(rows["step"])))
        return min(told, default=None)
