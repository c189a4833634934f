"""Parameters that get no gradient, and those that get one and are in no optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from retrograd.core.amounts import list_names
from retrograd.core.runs.findings import MISSING_GRADIENT, Finding
from retrograd.explaining.findings.coverage import IN_FULL, Coverage
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.gradients import (
    LOOSE,
    LostGradient,
    ParameterGradients,
    find_flat,
    find_lost,
    is_rehearsal,
    path_of,
)
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.zero_gradients import explain_zero, find_zero

family = Family(__name__)

FEWEST = 3
"""Recorded steps in which others have a gradient; our own choice."""

_LISTS = ("ModuleList", "ModuleDict")

_UNKNOWN = "see that what it makes is a part of the loss, or freeze these parameters."

_NOT_CALLED = (
    "use it in forward, or leave it out; where its weights are used without a call, compute what is made of them in "
    "each step, and do not detach it."
)

_ZERO = (
    "see where it becomes zero, which rg.explain_gradients names (dead units, or two factors that both begin at zero "
    "and so stay there), or freeze these parameters."
)


@family.detector(MISSING_GRADIENT)
def missing_gradient(record: Record, entry: Entry) -> Iterator[Finding]:
    """An optimizer holds parameters that never get a gradient."""
    gradients = record.once(ParameterGradients)
    record.need_optimizers()
    trained = [name for name, (_, some) in gradients.steps.items() if some >= FEWEST]
    if not trained:
        raise CannotTell(f"no parameter's gradient was recorded in {FEWEST} steps")
    missing = [
        name
        for name in sorted(gradients.held & gradients.selected)
        if not (gradients.is_trained(name) or name.startswith(LOOSE) or gradients.may_be_frozen(name))
        and not gradients.has_hidden_one(name)
        and not (gradients.may_have_had_one(name) or gradients.is_unseen(name))
    ]
    groups: dict[tuple[str, str], tuple[LostGradient | None, list[str]]] = {}
    for path in dict.fromkeys(map(path_of, missing)):
        lost, key = find_reason(record, gradients, path, missing)
        groups.setdefault(key, (lost, []))[1].extend(name for name in missing if path_of(name) == path)
    for (kind, _), (lost, names) in groups.items():
        if kind:
            yield _describe_missing_gradient(entry, record, kind, lost, names, trained)


def _describe_missing_gradient(
    entry: Entry, record: Record, kind: str, lost: LostGradient | None, names: list[str], trained: Sequence[str]
) -> Finding:
    if not record.once(Coverage).is_whole:
        return _describe_in_part(entry, record, kind, lost, names, trained)
    gradients = record.once(ParameterGradients)
    steps = max(gradients.steps[name][1] for name in trained)
    gets = "get nothing but zeros for a gradient" if kind in ("zero", "faint") else "never get a gradient"
    verb = gets if len(names) > 1 else gets.replace("get", "gets", 1)
    path = path_of(names[0])
    is_note = kind in ("spare", "unknown", "unseen", "faint") or (kind == "zero" and lost is None)
    root = root_of(record, names[0])
    twin = _find_twin(record, gradients, root) if kind == "never called" else ""
    reason = f": {root} is never called, and {twin}, whose parameters have the same names, is in no optimizer"
    return entry.finding(
        f"{list_names(names)} {verb} in {steps} steps, while {list_names(list(trained), 1)} "
        f"{'does' if len(trained) == 1 else 'do'}{reason if twin else _describe_reason(kind, lost, path)}",
        severity="note" if is_note else "warning",
        site=path,
        span=record,
        line=lost.line if lost is not None else record.line_of(path),
        evidence=[
            ("steps with a gradient", 0, "= 0"),
            ("steps in which others have one", steps, f"≥ {FEWEST}"),
            ("parameters", len(names)),
            *([("operation", lost.operation)] if lost is not None else []),
        ],
        repair=f"make the optimizer with the parameters of {twin}." if twin else _describe_repair(kind, lost),
    )


def _describe_in_part(
    entry: Entry, record: Record, kind: str, lost: LostGradient | None, names: list[str], trained: Sequence[str]
) -> Finding:
    """Describe what recorded steps tell, where others were not recorded: whether these gave a gradient is not known.

    Of parameters that are the same at all looks, from the first to the last, no update has used one.
    """
    gradients, coverage = record.once(ParameterGradients), record.once(Coverage)
    steps = max(gradients.steps[name][1] for name in trained)
    is_zero = kind in ("zero", "faint")
    spans = [gradients.find_unchanged(name) for name in names]
    same = None if None in spans else (max(each[0] for each in spans if each), min(each[1] for each in spans if each))
    is_note = same is None or kind in ("spare", "unknown", "unseen", "faint") or (kind == "zero" and lost is None)
    what = "got nothing but zeros for a gradient at all of" if is_zero else "got a gradient at none of"
    kept = f" and did not change from step {same[0]} to step {same[1]}" if same else ""
    path = path_of(names[0])
    return entry.finding(
        f"{list_names(names)} {what} {coverage.tell()}{kept}, while {list_names(list(trained), 1)} did"
        f"{' not' if is_zero else ''}{_describe_reason(kind, lost, path, is_whole=False)}.",
        severity="note" if is_note else None,
        site=path,
        span=record,
        line=lost.line if lost is not None else record.line_of(path),
        evidence=[
            ("recorded steps with a gradient", 0, "= 0"),
            ("recorded steps in which others have one", steps, f"≥ {FEWEST}"),
            ("parameters", len(names)),
            *([("operation", lost.operation)] if lost is not None else []),
        ],
        checked=[
            "an optimizer holds them",
            "they are not frozen",
            "at recorded steps no pass gave them one but zeros",
            *([f"they are the same, bit for bit, at all looks from step {same[0]} to step {same[1]}"] if same else []),
        ],
        repair=_describe_repair(kind, lost)
        if same
        else f"To learn whether other steps give them one, {IN_FULL}; if none does, {_describe_repair(kind, lost)}",
    )


def _find_twin(record: Record, gradients: ParameterGradients, root: str) -> str:
    """Another model with parameters of the same names that gets gradients, and of which no optimizer holds any.

    It is looked for where the optimizer holds nothing of the model but what is never called, as of a copy.
    """
    mine = {name.removeprefix(f"{root}.") for name in gradients.held if root_of(record, name) == root}
    if any(path == root or path.startswith(f"{root}.") for path in gradients.called):
        return ""
    for other in sorted((record.models | record.root_names) - {root}):
        names = [
            name for name, (_, some) in gradients.steps.items() if some >= FEWEST and root_of(record, name) == other
        ]
        if mine == {name.removeprefix(f"{other}.") for name in names} and not gradients.held & set(names):
            return other
    return ""


def find_reason(
    record: Record, gradients: ParameterGradients, path: str, missing: Sequence[str]
) -> tuple[LostGradient | None, tuple[str, str]]:
    """Why parameters of a module get no gradient: where it was lost; the kind of reason, and what tells it apart."""
    if path not in gradients.called:
        return None, ("spare" if _is_one_of_several(record, gradients, path) else "never called", "")
    mine = [name for name in missing if path_of(name) == path]
    if any(name in gradients.steps for name in mine):
        of_module = [name for name in (*gradients.steps, *gradients.held) if path_of(name) == path]
        fact = find_zero(record, mine)
        kind, sentence = explain_zero(fact)
        if any(map(gradients.is_trained, of_module)) and kind not in ("clamped", "step function"):
            return None, ("", "")  # a bias before a norm, and the like
        flat = find_flat(record.chains, path)
        if flat is not None:
            return flat, ("zero", flat.line)
        if fact is None or not sentence:
            return None, ("zero", "")
        found = LostGradient(fact.line, fact.operation or fact.node, sentence, _ZERO)
        return found, ("zero" if kind in ("clamped", "step function", "cancels") else "faint", f"{fact.line} {kind}")
    if not any(gradients.may_be_used(name) for name in mine):
        return None, ("never used", path)
    trained = {path_of(name) for name in gradients.steps if gradients.is_trained(name)}
    lost = find_lost(record.chains, path, trained)
    if lost is None and record.chains and all(is_rehearsal(chain, trained) for chain in record.chains):
        return None, ("unseen", "")
    return lost, (
        "lost" if lost is not None else "unknown",
        (lost.cause or f"{lost.line} {lost.operation}") if lost else "",
    )


def tell_reasons(record: Record, names: Sequence[str]) -> dict[str, str]:
    """Why parameters never got a gradient, in words, for those of which the noted operations tell.

    Args:
        record: of what they belong to.
        names: all parameters that got none.
    """
    if not record.chains:
        return {}
    gradients, told, is_whole = record.once(ParameterGradients), {}, record.once(Coverage).is_whole
    names = [name for name in names if not (gradients.may_have_had_one(name) or gradients.is_unseen(name))]
    for path in dict.fromkeys(map(path_of, names)):
        lost, (kind, _) = find_reason(record, gradients, path, names)
        reason = _describe_reason(kind, lost, path, is_whole=is_whole).removeprefix(": ")
        told.update({name: reason for name in names if reason and path_of(name) == path})
    return told


def _describe_repair(kind: str, lost: LostGradient | None) -> str:
    if lost is not None:
        return lost.repair
    if kind == "never called":
        return _NOT_CALLED
    if kind == "zero":
        return _ZERO
    return "use it in forward, or leave it out." if kind in ("never used", "spare") else _UNKNOWN


def _describe_reason(kind: str, lost: LostGradient | None, path: str, *, is_whole: bool = True) -> str:
    if lost is not None:
        return f": {lost.sentence}"
    if kind == "never called":
        return f": {path} is never called" if is_whole else f": {path} was not called at any of these"
    if kind == "never used":
        return ": no operation takes it" if is_whole else ": no operation that was seen takes it"
    if kind == "unseen":
        return ": why is not known, for the forward that gives the others theirs was not seen"
    if kind == "spare":
        return f": {path} was not called, as others like it were"
    return ""


def _is_one_of_several(record: Record, gradients: ParameterGradients, path: str) -> bool:
    """Check whether it lies in a list of layers of which others were called, or beside one of nearly the same name."""
    parts = path.split(".")
    for depth in range(len(parts)):
        parent, name = ".".join(parts[:depth]), parts[depth]
        beside = [
            each.removeprefix(f"{parent}.") if parent else each
            for each in gradients.called
            if (each.startswith(f"{parent}.") if parent else "." not in each)
        ]
        siblings = {each.split(".")[0] for each in beside} - {name}
        if siblings and (record.type_of(parent) in _LISTS or any(_look_alike(name, each) for each in siblings)):
            return True
    return False


def _look_alike(name: str, other: str) -> bool:
    """Check whether two names are the same but for a number or a last word: ``head_a``, ``head2``."""
    stems = {_stem(each) for each in (name, other)}
    return len(stems) == 1 and _is_branch(name)


def _stem(name: str) -> str:
    return name.rstrip("0123456789").rpartition("_")[0] or name.rstrip("0123456789")


def _is_branch(name: str) -> bool:
    return "_" in name or _stem(name) in ("head", "expert", "branch", "task", "exit", "aux", "classifier", "decoder")


@family.detector("not-optimized")
def not_optimized(record: Record, entry: Entry) -> Iterator[Finding]:
    """Parameters get gradients and are in no optimizer."""
    gradients = record.once(ParameterGradients)
    if not gradients.held:
        raise CannotTell("no optimizer was recorded that holds parameters of a recorded model")
    if any(made.unknown for made in record.optimizers.values()):
        raise CannotTell("an optimizer holds tensors that belong to no recorded model")
    if record.is_staged and not gradients.held <= gradients.selected:
        raise CannotTell("stages of a pipeline have parameters of one name")
    for root in sorted(record.models | record.root_names):
        names = [name for name in gradients.steps if root_of(record, name) == root]
        alone = [name for name in names if name not in gradients.held and gradients.steps[name][1] >= FEWEST]
        trained = [name for name in names if name in gradients.held and gradients.is_trained(name)]
        elsewhere = [name for name in gradients.steps if name in gradients.held and gradients.is_trained(name)]
        if alone and trained:
            yield _describe_not_optimized(entry, record, alone, trained)
        elif alone and elsewhere and _come_before(record, alone, elsewhere) and gradients.are_fresh(alone):
            yield _describe_not_optimized(entry, record, alone, elsewhere)


def _describe_not_optimized(entry: Entry, record: Record, alone: list[str], trained: list[str]) -> Finding:
    gradients = record.once(ParameterGradients)
    steps = max(gradients.steps[name][1] for name in alone)
    is_backbone = _come_before(record, alone, trained) and not gradients.are_fresh(alone)
    verb = "get gradients" if len(alone) > 1 else "gets gradients"
    tail = (
        "as befits layers that are kept on purpose; freezing them would save their backward pass"
        if is_backbone
        else f"while {list_names(trained, 2)} {'is' if len(trained) == 1 else 'are'} trained"
    )
    path = path_of(alone[0])
    return entry.finding(
        f"{list_names(alone)} {verb} in {steps} steps and {'are' if len(alone) > 1 else 'is'} in no optimizer, {tail}",
        severity="note" if is_backbone else "warning",
        site=path,
        span=record,
        line=record.optimizer_line or record.line_of(path),
        evidence=[
            ("parameters with gradients in no optimizer", len(alone), "> 0"),
            ("steps in which they had one", steps, f"≥ {FEWEST}"),
            ("parameters of the model in an optimizer", len(trained), "> 0"),
        ],
    )


def root_of(record: Record, name: str) -> str:
    """The model that a parameter belongs to."""
    first = path_of(name).split(".")[0]
    return first if first in record.models else next(iter(record.root_names), "")


def _come_before(record: Record, alone: Sequence[str], trained: Sequence[str]) -> bool:
    """Check whether the forward reaches all modules of these before any that is trained."""
    order = {path: place for place, path in reversed(list(enumerate(site.path for site in record.of_kind("output"))))}
    early = [order.get(path_of(name), -1) for name in alone]
    late = [order.get(path_of(name), -1) for name in trained]
    return max(early) < min(late)


@family.detector("layers-in-a-list")
def layers_in_a_list(record: Record, entry: Entry) -> Iterator[Finding]:
    """Layers that a model calls and that are not registered in it."""
    gradients = record.once(ParameterGradients)
    by_program = {call.about for call in record.called("forward")} & record.models
    if not by_program:
        raise CannotTell("no call of a model was recorded")
    if not gradients.held:
        raise CannotTell("no optimizer was recorded that holds parameters of a recorded model")
    found: dict[str, list[str]] = {}
    for root in sorted(record.models - by_program):
        names = [name for name in gradients.steps if path_of(name).split(".")[0] == root]
        is_called = root in gradients.called
        is_alone = not any(name in gradients.held for name in names)
        if is_called and is_alone and any(gradients.steps[name][1] >= FEWEST for name in names):
            found[root] = names
    if found:
        yield _describe_layers_in_a_list(entry, record, found, sorted(by_program))


def _describe_layers_in_a_list(
    entry: Entry, record: Record, found: dict[str, list[str]], callers: Sequence[str]
) -> Finding:
    roots = [f"{root} ({record.type_of(root)})" for root in found]
    several = len(roots) > 1
    names = [name for each in found.values() for name in each]
    first = next(iter(found))
    return entry.finding(
        f"{list_names(roots)} {'are' if several else 'is'} called inside of {list_names(list(callers), 2)} and "
        f"{'get' if several else 'gets'} gradients, but {'are' if several else 'is'} not registered in it: "
        f"{'they are' if several else 'it is'} kept in a Python list or dict, and no optimizer holds "
        f"{'them' if several else 'it'}",
        site=first,
        span=record,
        line=record.line_of(first) or _first_line(record, first),
        evidence=[("layers", len(roots), "> 0"), ("parameters with gradients in no optimizer", len(names), "> 0")],
    )


def _first_line(record: Record, path: str) -> str:
    found = (each.line for chain in record.chains for each in chain.listed if each.module.split(".")[0] == path)
    return next(filter(None, found), "")
