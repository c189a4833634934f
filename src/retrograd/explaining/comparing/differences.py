"""Differences between two programs and their inputs, from the facts of their records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from retrograd.core.amounts import count_of, list_names
from retrograd.core.history.fact import Fact
from retrograd.core.history.facts import Buffer, Call, Input, Modes, Operation, Operations, OptimizerMade, Parameter
from retrograd.core.runs.findings import Evidence, Finding
from retrograd.explaining.comparing.pairs import plain_name
from retrograd.explaining.findings.record import Record

_NO_HYPER_PARAMETERS = {"parameters", "unknown", "initial_lr"}
"""The last is what a scheduler notes of the rate that it begins with."""
_SHOWN = 3
_COMPILED = "CompiledFunction"
"""The operation that stands for everything in compiled code."""

F = TypeVar("F", bound=Fact)


def find_differences(a: Record, b: Record, letter: str) -> list[Finding]:
    """Differences of two records, A and ``letter``, each at the first step that has it, by rising step."""
    found: list[Finding] = []
    for find in _KINDS:
        found += [each for each in find(a, b, letter) if not any(_is_said(each, other) for other in found)]
    return sorted(found, key=lambda each: each.step or 0)


def _is_said(finding: Finding, other: Finding) -> bool:
    """Return whether another finding implies it: an optimizer implies rates, a module's class its operations."""
    if finding.detector == other.detector == "learning-rate":
        return finding.site == other.site and (other.step or 0) <= (finding.step or 0)
    return finding.detector == "operations" and other.detector == "modules" and finding.site == other.site


def knows_inputs(a: Record, b: Record) -> bool:
    """Return whether both hold the inputs of their models, in each of the ranks that their rows are merged of."""
    return all(map(_knows_inputs, (a, b)))


def _knows_inputs(record: Record) -> bool:
    known = {each.rank for each in record.of(Input)}
    return bool(known) and known.issuperset(record.history.manifest.get("compacted", {}).get("ranks", ()))


def _compare_ranks(a: Record, b: Record, letter: str) -> Iterator[Finding]:
    one, other = (each.history.manifest.get("processes") for each in (a, b))
    if one is not None and other is not None and one != other:
        ranks = f"A has {count_of(one, 'rank')} and {letter} has {other}"
        yield _make("ranks", f"{ranks}: steps are given other batches, unless all ranks share one.", 0)


def _compare_parameters(a: Record, b: Record, letter: str) -> Iterator[Finding]:
    """Compare parameters at the first look, before any update."""
    differing = _differ_at_first(a, b, Parameter)
    if differing:
        which = list_names(differing)
        yield _make("initial-parameters", f"Initial parameters differ: {which}.", 0, differing[0])


def _compare_inputs(a: Record, b: Record, letter: str) -> Iterator[Finding]:
    matched = (pair for of_rank in _by_rank(a, b, Input) for pair in _match(*of_rank) if _is_other(*pair))
    pair = min(matched, key=lambda each: each[0].step, default=None)
    if pair is None:
        return
    one, other = pair
    what = (
        f"of shape {list(one.shape)} in A and {list(other.shape)} in {letter}"
        if one.shape != other.shape
        else "different"
    )
    if one.dtype != other.dtype:
        what = f"{one.dtype} in A and {other.dtype} in {letter}"
    yield _make("inputs", f"The input of the model is {what} from step {one.step} on.", one.step, one.name)


def _compare_buffers(a: Record, b: Record, letter: str) -> Iterator[Finding]:
    differing = _differ_at_first(a, b, Buffer)
    if differing:
        yield _make("initial-buffers", f"Initial buffers differ: {list_names(differing)}.", 0, differing[0])


def _compare_optimizers(a: Record, b: Record, letter: str) -> Iterator[Finding]:
    """Compare optimizers as made and as changed later."""
    made = a.of(OptimizerMade), b.of(OptimizerMade)
    if bool(made[0]) != bool(made[1]):
        run, known = ("A", made[0][0]) if made[0] else (letter, made[1][0])
        yield _make("hyper-parameters", f"Only {run} has an optimizer.", known.step, known.name, known.line)
        return
    for mine, theirs in _by_rank(a, b, OptimizerMade):
        found = next(_compare_all_made(mine, theirs, letter), None) if mine and theirs else None
        if found is not None:
            yield found
            return


def _compare_all_made(mine: Sequence[OptimizerMade], theirs: Sequence[OptimizerMade], letter: str) -> Iterator[Finding]:
    """Compare the optimizers of a process; where one of them has fewer, the rest with its last."""
    one, other = mine[0], theirs[0]
    for pair in zip_longest(mine, theirs):
        one, other = pair[0] or one, pair[1] or other
        found = _compare_made(one, other, letter, max(each.step for each in pair if each is not None))
        if found is not None:
            yield found


def _compare_made(one: OptimizerMade, other: OptimizerMade, letter: str, step: int) -> Finding | None:
    kinds = [each.type for each in (one, other)]
    if kinds[0] != kinds[1] and all(kinds):  # a run of an older version does not say it
        return _make(
            "hyper-parameters", f"A is updated by {kinds[0]}, {letter} by {kinds[1]}.", step, one.name, one.line
        )
    changed = list(_changed_options(one, other))
    if not changed:
        return None
    told = [(name, *_tell_apart(was, now)) for name, was, now in changed[:_SHOWN]]
    texts = [f"{name} is {was} in A and {now} in {letter}" for name, was, now in told]
    more = f", and {len(changed) - _SHOWN} more differ" if len(changed) > _SHOWN else ""
    evidence = [
        Evidence(f"{name} in {run}", str(value))
        for name, *values in changed[:_SHOWN]
        for run, value in zip(("A", letter), values, strict=True)
    ]
    is_rate = all(name.partition(" ")[0] == "lr" for name, _, _ in changed)
    slug = "learning-rate" if is_rate else "hyper-parameters"
    return _make(slug, f"{one.name}: {', '.join(texts)}{more}.", step, one.name, one.line, evidence)


def _tell_apart(one: Any, other: Any) -> tuple[str, str]:
    """Two settings as texts: of computed rates six digits, where these differ."""
    rounded = tuple(_tell_setting(each, lambda number: f"{number:.6g}") for each in (one, other))
    return rounded if rounded[0] != rounded[1] else (_tell_setting(one, str), _tell_setting(other, str))  # type: ignore[return-value]


def _tell_setting(value: Any, tell: Callable[[float], str]) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_tell_setting(each, tell) for each in value)
    return tell(value) if isinstance(value, float) else str(value)


def _changed_options(one: OptimizerMade, other: OptimizerMade) -> Iterator[tuple[str, Any, Any]]:
    nothing: Mapping[str, Any] = {}
    for number, (mine, theirs) in enumerate(zip_longest(one.groups, other.groups, fillvalue=nothing)):
        group = f" of group {number}" if max(len(one.groups), len(other.groups)) > 1 else ""
        for name in dict.fromkeys((*mine, *theirs)):
            if name not in _NO_HYPER_PARAMETERS and mine.get(name) != theirs.get(name):
                yield f"{name}{group}", mine.get(name), theirs.get(name)
        held = [set(map(plain_name, each.get("parameters", ()))) for each in (mine, theirs)]
        if held[0] != held[1]:
            yield f"number of parameters{group}", len(held[0]), len(held[1])


def _compare_calls(a: Record, b: Record, letter: str) -> Iterator[Finding]:
    """Find the first step with different calls, with a different rate, and with a forward in a different mode."""
    if (_first_rank(a), _first_rank(b)) not in _pair_ranks(a, b):
        return  # calls are those of the first process, and these are two different ones
    rates = modes = False
    both = min(each.last_step or 0 for each in (a, b))  # that one was recorded for longer is said besides
    for (step, mine), (_, theirs) in zip(a.calls_by_step(), b.calls_by_step(), strict=False):
        if step > both:
            return
        if _order_calls(mine) != _order_calls(theirs):
            yield _tell_calls(step, mine, theirs, letter)
            return
        for one, other in zip(mine, theirs, strict=True):
            if not rates and one.name == "step" and one.details.get("lr") != other.details.get("lr"):
                rates = True
                rate = _tell_apart(*(each.details.get("lr", ()) for each in (one, other)))
                message = (
                    f"The learning rate of {one.about} is {rate[0]} in A and {rate[1]} in {letter} from step {step} on."
                )
                yield _make("learning-rate", message, step, one.about, one.line)
            if not modes and one.details.get("training") != other.details.get("training"):
                modes = True
                mode = ["training" if each.details.get("training") else "eval" for each in (one, other)]
                modes_told = f"{mode[0]} mode in A and in {mode[1]} mode in {letter} from step {step} on"
                message = f"{one.about} is called in {modes_told}."
                yield _make("modes", message, step, one.about, one.line)


def _name_call(call: Call) -> tuple[str, str]:
    return call.name, call.about


def _order_calls(calls: Iterable[Call]) -> list[tuple[str, int]]:
    """The order of calls; their subjects are numbered by first appearance, whatever their class."""
    numbers: dict[str, int] = {}
    return [(each.name, numbers.setdefault(each.about, len(numbers))) for each in calls]


def _tell_calls(step: int, mine: Sequence[Call], theirs: Sequence[Call], letter: str) -> Finding:
    orders = zip_longest(_order_calls(mine), _order_calls(theirs))
    place = next(number for number, (one, other) in enumerate(orders) if one != other)
    one, other = (each[place] if place < len(each) else None for each in (mine, theirs))
    names = [" of ".join(filter(None, _name_call(each))) if each is not None else "nothing" for each in (one, other)]
    line = next((each.line for each in (one, other) if each is not None), "")
    message = f"At step {step} A calls {names[0]} where {letter} calls {names[1]}, as call {place + 1} of the step."
    return _make("calls", message, step, "", line)


def _compare_modes(a: Record, b: Record, letter: str) -> Iterator[Finding]:
    for one, other in _zip_by_rank(a, b, Modes):
        paths = sorted(set(one.training) ^ set(other.training)) or sorted(set(one.evaluating) ^ set(other.evaluating))
        if paths or one.step != other.step:
            step = min(one.step, other.step)
            what = f": {list_names(paths)}" if paths else ""
            yield _make(
                "modes", f"Different modules are in training mode from step {step} on{what}.", step, _first(paths)
            )
            return


def _compare_modules(a: Record, b: Record, letter: str) -> Iterator[Finding]:
    mine, theirs = _modules(a), _modules(b)
    types = [
        (path, mine[path].get("type"), theirs[path].get("type"))
        for path in mine
        if path in theirs and mine[path].get("type") != theirs[path].get("type")
    ]
    types = [each for each in types if "OptimizedModule" not in each[1:]]
    if types:
        path, one, other = types[0]
        more = f", and {len(types) - 1} more modules have different classes" if len(types) > 1 else ""
        yield _make("modules", f"{path} is {_a(str(one))} in A and {_a(str(other))} in {letter}{more}.", 0, path)
    only = [sorted(set(one) - set(other)) for one, other in ((mine, theirs), (theirs, mine))]
    for paths, run in zip(only, ("A", letter), strict=True):
        if paths:
            yield _make("modules", f"Only {run} has {list_names(paths)}.", 0, paths[0])


def _modules(record: Record) -> dict[str, Mapping[str, Any]]:
    return {plain_name(path): each for path, each in record.modules.items()}


def _compare_operations(a: Record, b: Record, letter: str) -> Iterator[Finding]:
    """Find the first operation that differs, in kind or in its arguments."""
    for one, other in _zip_by_rank(a, b, Operations):
        pairs = enumerate(zip_longest(one.operations(), other.operations()))
        found = next(
            ((place, *pair) for place, pair in pairs if _tell_operation(pair[0]) != _tell_operation(pair[1])), None
        )
        if found is not None and any(each is not None and each.name == _COMPILED for each in found[1:]):
            return
        if found is None and one.step == other.step:
            continue
        if found is None:
            step = min(one.step, other.step)
            yield _make(
                "operations",
                f"From step {step} on A or {letter} calls different operations than before.",
                step,
                one.name,
            )
            return
        yield _name_operation(one.step, *found[1:], letter)
        return


def _tell_operation(operation: Operation | None) -> Hashable:
    """The compared part of an operation: neither its line nor the format of its numbers."""
    if operation is None:
        return None
    return operation.name, plain_name(operation.module), operation.arguments, operation.operands


def _name_operation(step: int, one: Operation | None, other: Operation | None, letter: str) -> Finding:
    known = one or other
    assert known is not None
    where = f" in {known.module}" if known.module else ""
    if one is None or other is None:
        run = "A" if other is None else letter
        message = f"Only {run} calls {known.name}{where}."
    elif one.name == other.name and one.arguments != other.arguments:
        options = [set(each.arguments.split(", ")) for each in (one, other)]
        shown = [", ".join(sorted(mine - theirs)) or "without" for mine, theirs in (options, options[::-1])]
        message = f"{one.name} is called{where} with {shown[0]} in A and {shown[1]} in {letter}."
    elif one.name == other.name:
        message = f"{one.name} is called on different tensors{where} in A and in {letter}."
    else:
        message = f"{one.name} is called{where} in A, {other.name} in {letter}."
    return _make("operations", message, step, known.module, known.line)


def find_dtypes(record: Record) -> frozenset[str]:
    """Dtypes of the operands and results of operations; empty where no operation was noted."""
    told = (text for fact in record.operations for each in fact.operations() for text in (*each.takes, *each.makes))
    return frozenset(text.partition("[")[0] for text in told)


def find_context(a: Record, b: Record, letter: str) -> list[str]:
    """Other differences in how they were run, as far as both tell it, none of which is a cause by itself."""
    manifests = a.manifest, b.manifest
    named: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "commit": lambda manifest: (manifest.get("git") or {}).get("commit"),
        "uncommitted changes": lambda manifest: (manifest.get("git") or {}).get("dirty"),
        "torch": lambda manifest: (manifest.get("versions") or {}).get("torch"),
        "command": lambda manifest: " ".join(map(str, manifest.get("command") or ())) or None,
        "seed": lambda manifest: manifest.get("seed"),
        "host": lambda manifest: manifest.get("host"),
    }
    values = {name: [read(each) for each in manifests] for name, read in named.items()}
    told = {name: both for name, both in values.items() if None not in both}
    return [f"{name}: {one} in A, {other} in {letter}" for name, (one, other) in told.items() if one != other]


_KINDS: tuple[Callable[[Record, Record, str], Iterator[Finding]], ...] = (
    _compare_ranks, _compare_parameters, _compare_buffers, _compare_inputs, _compare_modules, _compare_operations,
    _compare_modes, _compare_optimizers, _compare_calls,
)  # fmt: skip


def _make(
    slug: str, message: str, step: int, site: str = "", line: str = "", evidence: Iterable[Evidence] = ()
) -> Finding:
    return Finding(
        detector=slug, severity="warning", message=message, site=site, step=step, line=line, evidence=tuple(evidence)
    )


def _differ_at_first(a: Record, b: Record, kind: type[F]) -> list[str]:
    """Names of what was not the same when it was first looked at, before any update, in the same process."""
    looks = ((_first_looks(mine), _first_looks(theirs)) for mine, theirs in _by_rank(a, b, kind))
    return list(
        dict.fromkeys(
            name
            for mine, theirs in looks
            for name, one in mine.items()
            if name in theirs and one.step == 0 and _is_other(one, theirs[name])
        )
    )


def _first_looks(facts: Iterable[F]) -> dict[str, F]:
    found: dict[str, F] = {}
    for each in facts:
        found.setdefault(plain_name(each.name), each)
    return found


def _by_rank(a: Record, b: Record, kind: type[F]) -> Iterator[tuple[list[F], list[F]]]:
    """Facts of one kind of each pair of processes that are the same one: each has a batch and a part of its own."""
    mine, theirs = a.of(kind), b.of(kind)
    for one, other in _pair_ranks(a, b):
        yield [each for each in mine if each.rank == one], [each for each in theirs if each.rank == other]


def _zip_by_rank(a: Record, b: Record, kind: type[F]) -> Iterator[tuple[F, F]]:
    """The n-th facts of a kind of the same process, by rising step."""
    pairs = (pair for of_rank in _by_rank(a, b, kind) for pair in zip(*of_rank, strict=False))
    return iter(sorted(pairs, key=lambda pair: min(each.step for each in pair)))


def _pair_ranks(a: Record, b: Record) -> list[tuple[int, int]]:
    """Ranks that both have; two records of a single rank each are compared whatever that is."""
    one, other = ({each.rank for each in record.facts} for record in (a, b))
    if len(one) == len(other) == 1:
        return [(min(one), min(other))]
    return [(rank, rank) for rank in sorted(one & other)]


def _first_rank(record: Record) -> int:
    return min((each.rank for each in record.facts), default=0)


def _match(one: Sequence[F], other: Sequence[F]) -> Iterator[tuple[F, F]]:
    """Pair facts of the same name and moment, the n-th with the n-th, in the order of the first record."""
    theirs = dict(_number(other))
    for key, fact in _number(one):
        if key in theirs:
            yield fact, theirs[key]


def _number(facts: Iterable[F]) -> Iterator[tuple[Hashable, F]]:
    seen: Counter[Hashable] = Counter()
    for fact in facts:
        key = plain_name(fact.name), fact.moment.step, fact.moment.micro
        seen[key] += 1
        yield (key, seen[key]), fact


def _is_other(one: Fact, other: Fact) -> bool:
    digests = [getattr(each, "digest", "") for each in (one, other)]
    return all(digests) and digests[0] != digests[1]


def _first(names: Sequence[str]) -> str:
    return names[0] if names else ""


def _a(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"
