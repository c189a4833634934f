"""The record of a run as detectors read it."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from retrograd.core.groups import gather
from retrograd.core.history.curve import Curve
from retrograd.core.history.fact import Fact, JsonObject
from retrograd.core.history.facts import (
    Buffer,
    Call,
    Input,
    Modes,
    Operations,
    OptimizerMade,
    Parameter,
    Units,
    expand_calls,
    read_facts,
)
from retrograd.core.history.history import History
from retrograd.core.history.outline import RecordOutline
from retrograd.core.history.rows import encode_phase
from retrograd.core.history.series import Series
from retrograd.core.history.sink import Event
from retrograd.core.sites.site import ROOT, Site, accumulated_gradient, parse_leniently
from retrograd.explaining.findings.chain import Chain, name_of
from retrograd.explaining.findings.updates import Update, by_optimizer, find_updates

MOST_ROWS = 1 << 18
"""Rows of sites that are read together and held, some 130 bytes each; histograms take more."""

MOST_HELD = 3
"""How many times so many rows are held."""

MOST_NUMBERS = 1 << 23
"""Numbers of statistics that are read together, eight bytes each."""

FloatArray = npt.NDArray[np.float64]

F = TypeVar("F", bound=Fact)
T = TypeVar("T")


class CannotTell(Exception):  # noqa: N818  # no error: an answer
    """Raised where a detector's precondition does not hold, with the reason: ``no learning rate was recorded``."""


@dataclass(frozen=True, slots=True)
class Crash:
    """The exception that ended a run; all is empty where there was none.

    Attributes:
        kind: its class.
        message: what it said.
        module: path of the module in which it was raised, or of the node that raised.
        node: that node.
        line: ``file:line`` of the innermost line of the program.
        in_backward: a backward pass raised it.
    """

    kind: str = ""
    message: str = ""
    module: str = ""
    node: str = ""
    line: str = ""
    in_backward: bool = False


class Numbers(NamedTuple):
    """Statistics of a site: one number a step.

    Attributes:
        steps: those that have data, rising: int64, shape ``[n]``.
        of: of each statistic, by its name: float64, shape ``[n]``.
    """

    steps: npt.NDArray[np.int64]
    of: Mapping[str, FloatArray]


class AlikeSites:
    """Series of a long record. Whoever asks for a second site of a kind will ask for others: they are read together.

    Args:
        record: of what.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._asked: dict[Hashable, str] = {}
        self._held: OrderedDict[Hashable, History] = OrderedDict()

    def read(self, name: str, *, histograms: bool = False) -> Series | None:
        """The series of a site, with its rows held; None for the first one of its kind, which is read alone."""
        kind = self._kinds.get(name)
        if kind is None or (self._asked.setdefault(kind, name) == name and not histograms):
            return None
        history, listed = self._record.history, self._sites[kind]
        count = MOST_ROWS * len(history.rows.codes) // history.rows.count
        if count < 2:
            return None
        part = listed.index(name) // count
        key = kind, part, histograms
        held = self._held.pop(key, None)
        if held is None:
            while len(self._held) >= MOST_HELD:
                self._held.popitem(last=False)
            held = history.only(listed[part * count : (part + 1) * count], histograms=histograms)
        self._held[key] = held
        return held[name]

    @cached_property
    def _kinds(self) -> dict[str, Hashable]:
        """Of each site what it is: its kind and quantity, the type of its module and its name there."""
        return {
            str(site): (site.kind, site.quantity, self._record.type_of(site.path), site.keys)
            for site in self._record.sites
        }

    @cached_property
    def _sites(self) -> dict[Hashable, list[str]]:
        return gather((kind, name) for name, kind in self._kinds.items())


class Record:
    """A history with its facts, and what detectors ask of both, each computed once.

    Args:
        history: what was recorded.
        status: how the run fares: ``finished``, ``failed``, ``running``, ``stopped``; empty where it is not known.
        error: the exception that ended it, as in ``rank.json``.
        events: those of each process; left out where there is one.
        missing: finds what was not recorded, or is lost, in words: some turns out when it is read; empty for nothing.

    Attributes:
        is_mixed: parameters that no step updates together are trained in turn: a loss is of one or of another.
    """

    def __init__(
        self,
        history: History,
        *,
        status: str = "",
        error: Mapping[str, Any] | None = None,
        events: Mapping[int, Sequence[Event]] | None = None,
        missing: Callable[[], str] = str,
    ) -> None:
        self._events = events
        self.history = history
        self.manifest = history.manifest
        self.status = status
        self.error = error
        self._part: tuple[int, int | None, frozenset[str]] | None = None
        self.is_mixed = False
        self.missing = missing
        self._series: dict[str, Series] = {}
        self._alike = AlikeSites(self)
        self._made: dict[Callable[[Record], Any], Any] = {}

    def take_part(self, first: int, end: int | None, optimizers: frozenset[str], is_mixed: bool) -> Record:
        """The record of some steps, and of what these optimizers train in them.

        Args:
            first: the first step.
            end: the step behind the last one; None for the end of the run.
            optimizers: their names.
            is_mixed: as the attribute.
        """
        part = Record(self.history, status=self.status, error=self.error, events=self._events, missing=self.missing)
        part._part, part.is_mixed = (first, end, optimizers), is_mixed
        return part

    def in_part(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these steps the record is of."""
        if self._part is None:
            return np.ones(len(steps), np.bool_)
        first, end, _ = self._part
        return (steps >= first) & (steps < (np.iinfo(np.int64).max if end is None else end))

    def is_trained(self, parameter: str) -> bool:
        """True for a parameter that the record is of."""
        return self._part is None or any(parameter in made.parameters for made in self.optimizers.values())

    # ---- sites ----

    @cached_property
    def sites(self) -> list[Site]:
        """All recorded sites, in the order in which they were first reached in a step: forward, backward, update."""
        names, codes = self.history.site_names, self.history.rows.codes
        order = np.argsort(self._outline.orders[codes], kind="stable")
        return [parse_leniently(names[code]) for code in codes[order]]

    @cached_property
    def _outline(self) -> RecordOutline:
        return self.history.outline

    def of_kind(self, kind: str, quantity: str = "value") -> list[Site]:
        """Recorded sites of one kind (``output``, ``input``, ``parameter``, ``watched``), in order of execution."""
        return [site for site in self.sites if site.kind == kind and site.quantity == quantity]

    def gradient_of(self, parameter: Site) -> Site | None:
        """What an optimizer gets for a parameter: of several passes what they left; None where it was not recorded."""
        known = (site for site in (accumulated_gradient(parameter), parameter.grad) if str(site) in self.history)
        return next(known, None)

    def series(self, site: Site | str, *, histograms: bool = False) -> Series:
        """A site over the training steps.

        Args:
            site: it, or its name.
            histograms: they will be asked for, too.

        Raises:
            NoSuchSiteError: it was not recorded.
        """
        name = str(site)
        found = self._series[name] if name in self._series else self.history[name]
        if found.is_streamed:  # of a long record all series are more than memory holds
            return self._alike.read(name, histograms=histograms) or found
        self._series[name] = found
        return found

    def numbers(
        self, groups: Iterable[Sequence[Site | str]], statistics: Sequence[str]
    ) -> Iterator[tuple[Numbers, ...]]:
        """Statistics of the sites of each group over the training steps; those of many groups are read together.

        Args:
            groups: sites that are asked for at once.
            statistics: their names.

        Raises:
            NoSuchSiteError: a site was not recorded.
        """
        names = tuple(dict.fromkeys(("count", *statistics)))
        steps = self._outline.steps.get(encode_phase("train"), np.empty(0, np.int64))
        room = MOST_NUMBERS // (max(len(steps), 1) * len(names))
        for some in _share(groups, room):
            lines = {
                site: line for line, site in enumerate(dict.fromkeys(map(str, itertools.chain.from_iterable(some))))
            }
            values = {name: np.full((len(lines), len(steps)), np.nan) for name in names}
            for matrices in self.history.matrices(names, list(lines)):
                for name, matrix in zip(names, matrices, strict=True):
                    values[name][:, np.searchsorted(steps, matrix.steps)] = matrix.values
            for group in some:
                yield tuple(_pick_numbers(steps, values, lines[str(site)]) for site in group)

    @cached_property
    def steps(self) -> npt.NDArray[np.int64]:
        """Steps that were recorded, rising."""
        steps = self._outline.all_steps
        return steps if self._part is None else steps[self.in_part(steps)]

    @property
    def first_step(self) -> int:
        """The first recorded step."""
        return int(self.steps[0])

    @cached_property
    def last_step(self) -> int | None:
        """The last recorded step that was made; where none is known to be, that has rows; None where there is none."""
        made = self.history.made_steps
        made = made[self.in_part(made)]
        steps = made if len(made) else self.steps
        return int(steps[-1]) if len(steps) else None

    @cached_property
    def loss(self) -> Curve:
        """The loss of each recorded step."""
        loss = self.history.loss
        if self._part is None:
            return loss
        chosen = self.in_part(loss.steps)
        return Curve(loss.steps[chosen], loss.values[chosen])

    # ---- what is made of it ----

    def once(self, make: Callable[[Record], T]) -> T:
        """Make something of this record once, for all who ask."""
        if make not in self._made:
            self._made[make] = make(self)
        made: T = self._made[make]
        return made

    @cached_property
    def first_rank(self) -> int:
        """The lowest rank of which there are facts: 0, unless others were chosen to record."""
        return min((each.rank for each in self.all_facts), default=0)

    @property
    def processes(self) -> int:
        """Number of processes of the program that have found each other; 0 where that is not known."""
        found = self.manifest.get("processes", 0)
        return found if isinstance(found, int) else 0

    @property
    def together(self) -> frozenset[int]:
        """Ranks that share each forward, and so each batch, with rank 0 (tensor parallelism); empty where none do."""
        ranks = self._split.get("ranks")
        return frozenset(rank for rank in ranks if isinstance(rank, int)) if isinstance(ranks, list) else frozenset()

    @property
    def is_staged(self) -> bool:
        """True if rank 0 runs stages of a pipeline."""
        return bool(self._split.get("stages"))

    @property
    def _split(self) -> Mapping[str, Any]:
        found = self.manifest.get("split")
        return found if isinstance(found, Mapping) else {}

    @property
    def crash(self) -> Crash:
        """The exception that ended the run."""
        error = self.error or {}
        texts = {name: str(error.get(name) or "") for name in ("kind", "message", "module", "node")}
        lines = error.get("lines") or [""]
        return Crash(**texts, line=str(lines[-1]).split(" in ")[0], in_backward=bool(error.get("in_backward")))

    # ---- facts ----

    @cached_property
    def events(self) -> list[Event]:
        """All events but losses and updates."""
        return self.history.few_events

    @cached_property
    def facts(self) -> list[Fact]:
        """All facts, those of one process after those of the other, in their order."""
        found = self.all_facts
        return found if self._part is None else [fact for fact in found if self._is_of_part(fact)]

    @cached_property
    def all_facts(self) -> list[Fact]:
        """All facts of the whole run, also where the record is of a part of it."""
        by_rank = self._events if self._events is not None else {0: self.events}
        return [fact for rank, events in by_rank.items() for fact in read_facts(events, rank)]

    def _is_of_part(self, fact: Fact) -> bool:
        if isinstance(fact, OptimizerMade):
            return self._part is None or fact.name in self._part[2]
        return bool(self.in_part(np.array([fact.step]))[0])

    def of(self, kind: type[F]) -> list[F]:
        """Facts of one kind, in their order."""
        return [each for each in self.facts if isinstance(each, kind)]

    @cached_property
    def calls(self) -> list[Call]:
        """Calls that the program made, in their order, of every step, also of those that were not recorded.

        Of several processes those of the first one.
        """
        calls = expand_calls(each for each in self.all_facts if each.rank == self.first_rank)
        return calls if self._part is None else [call for call in calls if self._is_of_part(call)]

    def called(self, *names: str) -> list[Call]:
        """The calls of these names, in their order."""
        return [call for call in self.calls if call.name in names]

    def calls_by_step(self) -> Iterator[tuple[int, list[Call]]]:
        """The calls of each step. What is called behind an update is of the next step."""
        yield from sorted(gather((call.step, call) for call in self.calls).items())

    @cached_property
    def updates(self) -> list[Update]:
        """Calls of the program, from one update of an optimizer to the next."""
        return find_updates(self.calls, by_hand=self.is_changed is not False)

    def updates_by_program(self) -> dict[str, list[Update]]:
        """The updates of each optimizer that is stepped by the program itself.

        Raises:
            CannotTell: there is none. One that calls the program back (LBFGS) has an order of its own.
        """
        found = {name: each for name, each in by_optimizer(self.updates).items() if not name.startswith("LBFGS")}
        if not found:
            raise CannotTell("no update was recorded of which the calls before it are known")
        return found

    @cached_property
    def is_changed(self) -> bool | None:
        """True if any parameter was changed while this was recorded; None where nothing tells."""
        updates = [str(site) for site in self.of_kind("parameter", "update")]
        if updates and any((found.values > 0).any() for [found] in self.history.matrices(["abs_max"], updates)):
            return True
        digests = gather(((look.rank, look.name), look.digest) for look in self.parameters if look.digest)
        if any(len(set(each)) > 1 for each in digests.values()):
            return True
        return False if any(len(each) > 1 for each in digests.values()) else None

    @cached_property
    def optimizers(self) -> dict[str, OptimizerMade]:
        """Optimizers by name: ``SGD``, ``SGD_2``; one of several ranks holds what it holds on any."""
        found: dict[str, dict[int, OptimizerMade]] = {}
        for each in self.of(OptimizerMade):
            found.setdefault(each.name, {})[each.rank] = each
        return {name: _join(list(by_rank.values())) for name, by_rank in found.items()}

    def need_optimizers(self) -> None:
        """Make sure that there is one.

        Raises:
            CannotTell: there is none.
        """
        if not self.optimizers:
            raise CannotTell("no optimizer was recorded")

    @property
    def optimizer_line(self) -> str:
        """Where the first optimizer was constructed; empty where that is not known."""
        return next((made.line for made in self.optimizers.values() if made.line), "")

    @cached_property
    def parameters(self) -> list[Parameter]:
        """Samples of parameters."""
        return self.of(Parameter)

    @cached_property
    def looks(self) -> dict[str, list[Parameter]]:
        """Samples of each parameter, by its name."""
        return gather((look.name, look) for look in self.parameters)

    @cached_property
    def last_looks(self) -> dict[str, Parameter]:
        """The last sample of each parameter that its model still had then, on the first rank that has it."""
        last = {name: [look for look in looks if look.rank == looks[0].rank][-1] for name, looks in self.looks.items()}
        ends: dict[tuple[str, int], int] = {}
        for name, look in last.items():
            part = self.model_of(name), look.rank
            ends[part] = max(look.step, ends.get(part, 0))
        return {name: look for name, look in last.items() if look.step == ends[self.model_of(name), look.rank]}

    def model_of(self, name: str) -> str:
        """The path of the recorded model that a site belongs to."""
        model = parse_leniently(name).path.partition(".")[0]
        return model if model in self.models or ROOT not in self.root_names else ROOT

    @cached_property
    def units(self) -> list[Units]:
        """Samples of units of outputs."""
        return self.of(Units)

    @cached_property
    def buffers(self) -> list[Buffer]:
        """Samples of buffers."""
        return self.of(Buffer)

    @cached_property
    def modes(self) -> list[Modes]:
        """Modules that train and modules that evaluate, at the steps at which that changed."""
        return self.of(Modes)

    @cached_property
    def operations(self) -> list[Operations]:
        """Operations between a forward and its backward, at the steps at which they changed."""
        return self.of(Operations)

    @cached_property
    def chains(self) -> list[Chain]:
        """The noted operations as graphs."""
        return [Chain(each) for each in self.operations]

    def need_chains(self) -> list[Chain]:
        """The operations of the steps at which they were noted.

        Raises:
            CannotTell: there are none.
        """
        if not self.chains:
            raise CannotTell("no operations between the model's output and the loss were recorded")
        return self.chains

    def place_of(self, chain: Chain, number: int) -> tuple[str, str]:
        """The module of an operation, and its line: where the module was made, if it is a module for this alone.

        The call of an ``nn.Softmax`` is torch's, and its line that of whoever called the outermost such module.
        """
        operation = chain.listed[number]
        name = name_of(operation)
        is_its_own = self.type_of(operation.module).lower() in (name.replace("_", ""), f"{name}1d")
        made = self.line_of(operation.module) if is_its_own else ""
        return operation.module, made or operation.line

    def root_of(self, chain: Chain) -> int:
        """The operation that backward begins from, before a scaler has multiplied it; −1 where it is not known."""
        is_scaled = chain.name(chain.loss) == "mul" and any(call.name.startswith("scaler.") for call in self.calls)
        return chain.operands(chain.loss)[0] if is_scaled and chain.operands(chain.loss) else chain.loss

    @cached_property
    def inputs(self) -> dict[str, list[Input]]:
        """Tensors that models were called with, by the name of the argument."""
        return gather((each.name, each) for each in self.of(Input))

    @cached_property
    def modules(self) -> dict[str, Mapping[str, Any]]:
        """Entries of the manifest about modules, by path."""
        listed = self.manifest.get("model", ())
        return {str(each.get("path", "")): each for each in listed if isinstance(each, Mapping)}

    @cached_property
    def models(self) -> frozenset[str]:
        """Paths of all recorded models, also of those that only other models call; empty where that is not known."""
        return frozenset(path for path, each in self.modules.items() if each.get("root"))

    @cached_property
    def root_names(self) -> frozenset[str]:
        """Paths of the recorded models themselves: ``self`` for a single one."""
        return frozenset((ROOT,)) if ROOT in self.modules else frozenset(p for p in self.modules if "." not in p)

    def line_of(self, name: str) -> str:
        """Where a module, or that of a parameter, was constructed; empty where that is not known."""
        return str(self.modules.get(name.partition(":")[0], {}).get("line", ""))

    def type_of(self, name: str) -> str:
        """The class of a module, or of that of a parameter, as in ``ReLU``; empty where it is not known."""
        return str(self.modules.get(name.partition(":")[0], {}).get("type", ""))


def _share(groups: Iterable[Sequence[T]], room: int) -> Iterator[list[Sequence[T]]]:
    """Groups one after the other, as many at a time as have ``room`` members together, and one at least."""
    some: list[Sequence[T]] = []
    for group in groups:
        if some and sum(map(len, some)) + len(group) > room:
            yield some
            some = []
        some.append(group)
    if some:
        yield some


def _pick_numbers(steps: npt.NDArray[np.int64], values: Mapping[str, FloatArray], line: int) -> Numbers:
    has_rows = ~np.isnan(values["count"][line])
    return Numbers(steps[has_rows], {name: each[line][has_rows] for name, each in values.items()})


def _join(made: Sequence[OptimizerMade]) -> OptimizerMade:
    """One optimizer as several ranks have made it, each with the parameters of its part of the model: as the first."""
    first, *others = made
    if not others:
        return first
    groups: list[JsonObject] = []
    for at, group in enumerate(first.groups):
        same = [each.groups[at] for each in made if at < len(each.groups)]
        names = dict.fromkeys(name for each in same for name in each.get("parameters", ()))
        unknown = max(int(each.get("unknown", 0)) for each in same)
        groups.append({**group, "parameters": list(names), "unknown": unknown})
    return replace(first, groups=tuple(groups))
