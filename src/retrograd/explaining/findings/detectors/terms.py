"""Terms of a loss that train nothing, or not what they are meant to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator

from retrograd.core.history.facts import CARRIED, MADE_BEFORE, Call, Operation
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.chain import LOSSES, VIEWS, Chain, argument_of, factor_of, tensor_of
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.gradients import BLIND, COPYING, DETACHING, LEAVING, describe_cut
from retrograd.explaining.findings.loss_terms import SQUARES, Loss, Term, list_losses, write
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.updates import clears

family = Family(__name__)

LEAST = 0.01
"""Share of a loss from which on a term is worth a word; our own choice."""

NOTHING = 1e-5
"""Share of a loss below which a term is zero but for rounding, as a divergence of equal sides; our own choice."""

TUNED = 0.1
"""A weight below it may have been chosen for a sum; our own choice."""

MANY = 8
"""Samples of a batch from which on their sum is told from their mean."""

LOOKS = 3
"""Passes in which two sides must have been equal, bit for bit."""

_FAR = 400
"""Calls behind a backward pass among which an update is looked for."""

_THROUGH = VIEWS | {"mul", "neg", "div"}


def _need_losses(record: Record) -> list[Loss]:
    record.need_chains()
    losses = record.once(list_losses)
    if not any(loss.parts for loss in losses):
        raise CannotTell("the numbers that the loss is made of were not recorded")
    return losses


class Graph:
    """What a result is differentiated by.

    Attributes:
        numbers: the operations that a backward pass from it goes through.
        modules: those with parameters of their own that train among them.
        is_known: nothing else with a graph is part of it.
    """

    def __init__(self, record: Record, chain: Chain, number: int) -> None:
        has_node = number >= 0 and bool(chain.listed[number].node)
        self.numbers = set(chain.grown_from(number)) if has_node else set[int]()
        self.modules: set[str] = set()
        self.is_known = number >= 0
        for each in self.numbers:
            operation = chain.listed[each]
            layers = _list_layers(record, operation)
            self.modules.update(layers)
            is_made = any(chain.listed[one].node for one in chain.operands(each))
            self.is_known &= CARRIED not in operation.operands and bool(layers or is_made)


def _list_layers(record: Record, operation: Operation) -> list[str]:
    """The modules whose parameters an operation takes: its own, or of a part of it, with a tensor of that shape."""
    module = operation.module
    if not module or record.modules.get(module, {}).get("trainable"):
        return [module] if module else []
    made = zip(operation.takes, operation.operands, strict=False)
    taken = {each for each, maker in made if maker == MADE_BEFORE}
    looks = (each[0] for name, each in record.looks.items() if name.startswith(f"{module}."))
    return [each.name.partition(":")[0] for each in looks if each.requires_grad and tensor_of(each) in taken]


def _holders(record: Record, module: str) -> set[str]:
    """The optimizers that hold parameters of a module."""
    return {
        name
        for name, made in record.optimizers.items()
        if any(each.startswith(f"{module}:") for each in made.parameters)
    }


def _list_users(record: Record, line: str) -> set[str]:
    """The optimizers that read what the backward passes of a line gave: they update before it is cleared."""
    calls, found = record.calls, set[str]()
    places = [place for place, call in enumerate(calls) if call.name == "backward" and call.line == line]
    for place in [*places[:20], *places[20::20]]:
        cleared: set[str] = set()
        for call in calls[place + 1 : place + _FAR]:
            if call.name in ("step", "scaler.step"):
                found |= {call.about} - cleared
            cleared |= {name for name in record.optimizers if clears(call, name, record.optimizers)}
            if len(cleared | found) >= len(record.optimizers):
                break
    return found


# ---- terms without effect ----


@family.detector("term-without-effect")
def term_without_effect(record: Record, entry: Entry) -> Iterator[Finding]:
    """A part of the loss that no parameter learns from."""
    losses = _need_losses(record)
    said: set[str] = set()
    each = (judge(record, loss, losses, entry) for loss in losses for judge in (_judge_terms, _judge_numbers))
    for finding in (*itertools.chain(*each), *_judge_equal(record, losses, entry)):
        if finding.line not in said:
            said.add(finding.line)
            yield finding


def _judge_terms(record: Record, loss: Loss, losses: list[Loss], entry: Entry) -> Iterator[Finding]:
    chain = loss.chain
    if not chain.listed[loss.number].node:
        return
    for term in loss.terms:
        is_seen = term.share >= LEAST or (term.share < NOTHING and not term.has_graph)
        if not is_seen or term.number < 0 or term.sign < 0 or _has_graph_elsewhere(loss, losses, term):
            continue
        if term.has_graph:
            yield from _judge_trained(record, loss, term, entry)
            continue
        case, line, why, repair = _find_cause(record, loss, losses, term)
        if case:
            yield _describe(
                record, loss, term, entry, why, case=case, line=line, **({"repair": repair} if repair else {})
            )


def _describe(record: Record, loss: Loss, term: Term, entry: Entry, why: str, **fields: object) -> Finding:
    share = f", {term.share:.0%} of the loss," if term.share >= LEAST else ""
    line = str(fields.pop("line", "")) or term.line
    return entry.finding_at(
        record,
        loss.chain,
        term.number,
        f"The term {term.text}{share} trains nothing: {why}",
        **{
            "site": _site_of(loss.chain, term.number),
            "line": line,
            "evidence": [
                ("the loss", loss.text),
                ("share of the term", term.share, f"≥ {LEAST}" if term.share >= LEAST else f"< {NOTHING}"),
                ("line of the loss", loss.line),
            ],
            **fields,
        },
    )


def _has_graph_elsewhere(loss: Loss, losses: list[Loss], term: Term) -> bool:
    """Check whether the same operation of a line made a term with a graph, too: it is off for a while."""
    name = loss.chain.name(term.number)
    return not term.has_graph and any(
        each.has_graph and each.line == term.line and other.chain.name(each.number) == name
        for other in losses
        for each in other.terms
    )


def _find_cause(record: Record, loss: Loss, losses: list[Loss], term: Term) -> tuple[str, str, str, str]:
    """Why a term has no graph, where it should: the case, its line, the reason and the repair; empty where it may."""
    chain = loss.chain
    before = chain.ancestors(term.number)
    if _is_meant(record, loss, losses, term) or _is_entropy(chain, before):
        return "", "", "", ""
    users = _list_users(record, loss.called) if loss.called else set()
    trained = [
        each for each in sorted(before) if chain.listed[each].cuts and _comes_of_trained(record, chain, each, users)
    ]
    if trained:
        cut = trained[-1] if chain.listed[trained[-1]].mode not in BLIND else trained[0]
        lost = describe_cut(chain.listed[cut])
        return "cut", lost.line, lost.sentence, lost.repair
    names = {chain.name(each) for each in before}
    ungraded = [call for call in _list_grads(record, loss) if not call.details.get("create_graph")]
    if ungraded and names & SQUARES and not any(chain.listed[each].module for each in before):
        return "penalty", ungraded[-1].line, "autograd.grad made the gradient that it is made of without a graph", ""
    distance = next((each for each in sorted(before, reverse=True) if chain.name(each) in LOSSES), -1)
    if distance >= 0 and not _has_frozen(record, chain, before):
        sides = [chain.listed[each] for each in chain.operands(distance)[:1]]
        side = next((each.line for each in sides if not each.module), "")
        made = f"both sides of {chain.name(distance)} are made of data, or of a model that is not trained here"
        return "data", side or chain.listed[distance].line, made, ""
    return "", "", "", ""


def _comes_of_trained(record: Record, chain: Chain, cut: int, users: Collection[str] = ()) -> bool:
    """Check whether what is cut off comes of a module that an optimizer holds, or is a parameter itself.

    Where ``users`` are known, one of these optimizers: a teacher was held by that which has trained it.
    """
    operation = chain.listed[cut]
    if not operation.module and operation.operands == (MADE_BEFORE,):
        return any(
            tensor_of(each) in operation.takes for name in _list_held(record) for each in record.looks.get(name, ())
        )
    before = {chain.listed[each].module for each in chain.ancestors(cut)} - {""}
    held = [_holders(record, module) for module in before]
    return any(names & set(users) if users else names for names in held)


def _is_of_trained(record: Record, chain: Chain, cut: int) -> bool:
    return CARRIED in chain.listed[cut].operands or _comes_of_trained(record, chain, cut)


def _list_held(record: Record) -> list[str]:
    return [name for made in record.optimizers.values() for name in made.parameters]


def _list_grads(record: Record, loss: Loss) -> list[Call]:
    return [call for call in record.called("grad") if call.step == loss.chain.step]


def _has_frozen(record: Record, chain: Chain, before: frozenset[int]) -> bool:
    """Check whether a layer of a model that an optimizer holds in part has made it, and is frozen."""
    layers = {chain.listed[each].module for each in before if not chain.listed[each].mode} - {""}
    held = {name.partition(":")[0].partition(".")[0] for name in _list_held(record)}
    return any(each.partition(".")[0] in held or each in held for each in layers)


def _is_meant(record: Record, loss: Loss, losses: list[Loss], term: Term) -> bool:
    """Check whether a term is detached itself, for what is detached is trained by itself, or it shifts a value."""
    chain = loss.chain
    if chain.name(term.number) not in DETACHING:
        return False
    source = chain.maker(term.number, 0, frozenset())
    lines = {chain.listed[each].line for each in (source,) if each >= 0}
    return (
        source < 0
        or chain.name(source) == "sub"
        or any(
            other.chain.listed[each.number].line in lines
            for other in losses
            if other.line != loss.line
            for each in other.terms
            if each.number >= 0
        )
    )


def _is_entropy(chain: Chain, before: frozenset[int]) -> bool:
    """Check whether it is Σ p log p: the part of a divergence that is the same for any model."""
    logs = {each for each in before if chain.name(each) in ("log", "log_softmax", "xlogy", "entr", "logsigmoid")}
    products = [each for each in before if chain.name(each) == "mul" and len(chain.listed[each].operands) == 2]
    return any(
        chain.name(chain.maker(each, place, VIEWS | {"clamp", "detach"})) in ("log", "log_softmax")
        for each in products
        for place in (0, 1)
    ) or any(chain.name(each) in ("xlogy", "entr") for each in logs)


def _judge_trained(record: Record, loss: Loss, term: Term, entry: Entry) -> Iterator[Finding]:
    """Judge a term with a graph: does the optimizer that is stepped behind this pass hold what it depends on?"""
    users = _list_users(record, loss.called) if loss.called else set()
    if not users or any(made.unknown for made in record.optimizers.values()):
        return
    graph = Graph(record, loss.chain, term.number)
    held = {module: _holders(record, module) for module in graph.modules}
    if not graph.is_known or not held or any(names & users for names in held.values()):
        return
    if any(not names for names in held.values()) and len(loss.terms) < 2:
        return  # an optimizer of somebody's own, perhaps
    layers = sorted({module.partition(".")[0] for module in held})
    name = ", ".join(sorted(users))
    cuts = [each for each in sorted(loss.chain.ancestors(term.number)) if loss.chain.listed[each].cuts]
    cut = next((each for each in cuts if _is_of_trained(record, loss.chain, each)), -1)
    why = f"it depends on {', '.join(layers)} alone, and {name}, stepped behind this pass, holds none of that"
    lost = describe_cut(loss.chain.listed[cut]) if cut >= 0 else None
    line = lost.line if lost is not None else term.line
    tail = f"; {lost.sentence}" if lost is not None else ""
    yield _describe(record, loss, term, entry, why + tail, case="other", line=line)


def _judge_numbers(record: Record, loss: Loss, _: list[Loss], entry: Entry) -> Iterator[Finding]:
    """Judge plain numbers that are added: is one of them what ``item`` has made of a result with a graph?"""
    chain, parts = loss.chain, next((each for each in loss.parts if each.step == loss.chain.step), None)
    if parts is None:
        return
    copies = [term.number for term in loss.terms if term.number >= 0 and chain.name(term.number) in COPYING]
    sums = [each for each in Graph(record, chain, loss.number).numbers if _adds_number(chain, each)]
    for number in sorted((*copies, *sums)):
        added = _number_of(chain, number)
        for left in (each for each in range(number) if chain.name(each) in LEAVING and chain.operands(each)):
            source = chain.operands(left)[0]
            weight = added / (parts.sum_of(source) or math.nan)
            is_it = chain.listed[source].node and abs(float(f"{weight:.2g}") - weight) < 1e-5 * abs(weight)
            if is_it and abs(added) >= LEAST * abs(parts.value):
                lost = describe_cut(chain.listed[left])
                text = f"{weight:.2g} · {write(record, chain, source)}".removeprefix("1 · ")
                yield entry.finding(
                    f"The term {text} trains nothing: {lost.sentence}",
                    case="cut",
                    site=_site_of(chain, source),
                    step=chain.step,
                    line=lost.line,
                    evidence=[("the number that is added", added), ("line of the loss", chain.listed[number].line)],
                    repair=lost.repair + ".",
                )
                return


def _adds_number(chain: Chain, number: int) -> bool:
    is_sum = chain.name(number) in ("add", "sub") and len(chain.listed[number].operands) == 1
    return is_sum and not chain.made(number)


def _number_of(chain: Chain, number: int) -> float:
    """The plain number among the arguments of an operation; NaN for none."""
    try:
        return float(chain.listed[number].arguments.split(",")[0])
    except ValueError:
        return math.nan


def _judge_equal(record: Record, losses: list[Loss], entry: Entry) -> Iterator[Finding]:
    """Differences, ratios and distances of two sides that are the same, whenever they were looked at."""
    looks: dict[str, list[tuple[int, bool, Chain, int]]] = {}
    for loss in losses:
        graph = Graph(record, loss.chain, loss.number)
        for number in sorted(graph.numbers & {each for parts in loss.parts for each in parts.equal}):
            found = looks.setdefault(loss.chain.listed[number].line, [])
            found += [(parts.step, number in parts.equal, loss.chain, number) for parts in loss.parts]
    for found in looks.values():
        steps = {step for step, *_ in found}
        _, _, chain, number = found[0]
        if len(steps) < LOOKS or not all(is_equal for _, is_equal, *_ in found) or len(chain.operands(number)) < 2:
            continue
        lines = [chain.listed[each].line for each in chain.operands(number)[:2]]
        is_ratio = any(chain.name(each) == "exp" for each in chain.users(number)) or chain.name(number) == "div"
        yield entry.finding(
            f"{'A ratio' if is_ratio else f'`{chain.name(number)}`'} is taken of a result and itself: both sides are "
            f"computed alike and with a graph, so it is {'1' if is_ratio else '0'} and its gradient is zero",
            case="equal",
            site=_site_of(chain, number).partition(".")[0],
            step=min(steps),
            last_step=max(steps),
            line=lines[1] if lines[1] != lines[0] else chain.listed[number].line,
            evidence=[
                ("steps at which both sides were equal, bit for bit", len(steps), f"≥ {LOOKS}"),
                ("line of the first side", lines[0]),
                ("line of the difference or ratio", chain.listed[number].line),
            ],
        )
        return


# ---- straight through ----


@family.detector("straight-through-loss")
def straight_through_loss(record: Record, entry: Entry) -> Iterator[Finding]:
    """A loss that is to train a codebook is taken of what the straight-through estimator gave."""
    for chain in record.need_chains():
        if chain.loss < 0:
            continue
        graph = Graph(record, chain, chain.loss).numbers
        for cut in (each for each in sorted(chain.of_loss) if chain.name(each) in DETACHING):
            difference = chain.maker(cut, 0, frozenset())
            if chain.name(difference) != "sub" or len(chain.operands(difference)) < 2:
                continue
            code, given = chain.operands(difference)
            passed = [each for each in chain.users(cut) if chain.name(each) == "add" and given in chain.operands(each)]
            if not passed or code in graph or not chain.listed[code].node:
                continue
            layer = _find_layer(record, chain, code)
            loss = _find_distance(chain, passed[0], given, graph)
            if layer and loss >= 0:
                yield _describe_straight_through(record, chain, entry, layer, loss, code)
                return


def _describe_straight_through(record: Record, chain: Chain, entry: Entry, layer: str, loss: int, code: int) -> Finding:
    name = chain.name(loss)
    return entry.finding(
        f"`{name}` holds the straight-through result against what it was made of, so nothing of it trains {layer}: "
        "its gradient goes past the codes",
        site=layer,
        step=chain.step,
        line=chain.listed[loss].line,
        evidence=[
            ("one side of it", "x + (codes − x).detach()"),
            ("the other side", "x, detached or not"),
            ("line of the codes", chain.listed[code].line),
        ],
    )


def _find_layer(record: Record, chain: Chain, code: int) -> str:
    """The module whose weights the codes are, that an optimizer holds; empty where there is none."""
    of_code = Graph(record, chain, code)
    return next((each for each in sorted(of_code.modules) if _holders(record, each)), "")


def _find_distance(chain: Chain, passed: int, given: int, graph: set[int]) -> int:
    """A distance of what a straight-through estimator gave to what it was given; −1 for none."""
    for number in sorted(graph):
        if chain.name(number) not in LOSSES | {"sub"} or len(chain.operands(number)) < 2:
            continue
        sides = [chain.maker(number, place, VIEWS) for place in (0, 1)]
        whole = [chain.maker(number, place, VIEWS | DETACHING) for place in (0, 1)]
        if passed in sides and given in whole and (chain.name(number) in LOSSES or _is_squared(chain, number)):
            return number
    return -1


def _is_squared(chain: Chain, number: int) -> bool:
    users = chain.users(number)
    return any(chain.name(each) in SQUARES or chain.listed[each].operands == (number, number) for each in users)


# ---- targets of Q-learning ----


@family.detector("td-target-gradient")
def td_target_gradient(record: Record, entry: Entry) -> Iterator[Finding]:
    """The target of a temporal difference has a graph, and pulls the same network towards its prediction."""
    for chain in record.need_chains():
        for number in sorted(chain.of_loss) if chain.loss >= 0 else ():
            target = _find_target(record, chain, number)
            if target >= 0:
                module = next((each for each in sorted(Graph(record, chain, target).modules)), "")
                yield entry.finding(
                    f"The target of `{chain.name(number)}` is made by `{chain.name(target)}` of the network that is "
                    "trained, and has a graph: the target is moved towards the prediction, too",
                    site=module.partition(".")[0],
                    step=chain.step,
                    line=chain.listed[target].line,
                    evidence=[
                        ("made of the same network in two calls", module),
                        ("the target", "reward + factor · value, with a graph"),
                        ("line of the loss", chain.listed[number].line),
                    ],
                )
                return


_PICKS = frozenset({"max", "amax", "gather", "take_along_dim", "min", "minimum", "maximum"})


def _find_target(record: Record, chain: Chain, number: int) -> int:
    """What picked the value in the target of a distance: r + γ · max Q(s'), with a graph; −1 where it is none such."""
    name, operands = chain.name(number), chain.operands(number)
    if (name not in LOSSES and not (name == "sub" and _is_squared(chain, number))) or len(operands) != 2:
        return -1
    for target, prediction in (operands[::-1], operands):
        value = _follow_target(chain, target)
        if value < 0 or chain.name(value) not in _PICKS:
            continue
        theirs, mine = Graph(record, chain, value), Graph(record, chain, prediction)
        is_second = not (theirs.numbers & mine.numbers) and mine.is_known
        if is_second and theirs.modules and theirs.modules <= mine.modules:
            return value
    return -1


def _follow_target(chain: Chain, target: int) -> int:
    """The value in ``reward + factor · value``; −1 where a result is not made so."""
    while chain.name(target) in VIEWS:
        target = chain.maker(target, 0, VIEWS)
    if chain.name(target) != "add" or len(chain.listed[target].operands) != 2:
        return -1
    graphs = [each for each in chain.operands(target) if chain.listed[each].node]
    if len(graphs) != 1 or CARRIED in chain.listed[target].operands:
        return -1
    value, is_discounted = graphs[0], False
    while chain.name(value) in _THROUGH:
        inner = [each for each in chain.operands(value) if chain.listed[each].node]
        if len(inner) != 1:
            return -1
        is_discounted |= chain.name(value) == "mul" and 0 < factor_of(chain, value) <= 1
        is_discounted |= chain.name(value) == "mul" and len(chain.listed[value].operands) == 2
        value = inner[0]
    return value if is_discounted else -1


# ---- sums and signs ----


@family.detector("summed-before-mask")
def summed_before_mask(record: Record, entry: Entry) -> Iterator[Finding]:
    """A sum over the whole batch is spread over its samples again."""
    for chain in record.need_chains():
        graph = Graph(record, chain, chain.loss).numbers
        for number in sorted(graph):
            spread = _find_spread(chain, number, graph)
            if spread >= 0:
                shape, wide = list(chain.taken(number) or ()), list(chain.made(spread))
                yield entry.finding_at(
                    record,
                    chain,
                    number,
                    f"`{chain.name(number)}` makes one number of {shape}, which `{chain.name(spread)}` then spreads "
                    f"over {wide} again: each sample is charged with the sum of all",
                    site=_site_of(chain, number),
                    evidence=[
                        ("shape that is summed", str(shape)),
                        ("shape over which the sum is spread", str(wide)),
                        ("line at which it is spread", chain.listed[spread].line),
                    ],
                )
                return


def _find_spread(chain: Chain, number: int, graph: set[int]) -> int:
    """What spreads a sum over a batch over its samples again, to be summed or averaged; −1 for none."""
    shape = chain.taken(number) or ()
    if chain.name(number) != "sum" or chain.made(number) or len(shape) < 2 or shape[0] < 2:
        return -1
    waiting = [number]
    while waiting:
        for user in chain.users(waiting.pop()):
            wide, name = chain.made(user), chain.name(user)
            if user not in graph or name not in ("mul", "add", "sub", "neg", "div", *VIEWS):
                continue
            if not math.prod(wide) > 1:
                waiting.append(user)
            elif _is_by_sample(chain, user, shape) and _is_reduced(chain, user):
                return user
    return -1


def _is_by_sample(chain: Chain, user: int, shape: tuple[int, ...]) -> bool:
    """Check whether the other operand has the batch in front, and is no more than a weight or a loss of each sample."""
    wide = chain.made(user)
    if wide[0] != shape[0] or len(wide) > len(shape) or wide != shape[: len(wide)] or wide == shape:
        return False
    operands = chain.listed[user].operands
    if len(operands) != 2 or chain.name(user) == "div":
        return False
    return chain.name(user) == "mul" or all(each >= 0 for each in operands)


def _is_reduced(chain: Chain, number: int) -> bool:
    """Check whether nothing but sums and factors stand between a result and a single number."""
    while True:
        users = [each for each in chain.users(number) if each in chain.of_loss]
        if len(users) != 1 or chain.name(users[0]) not in ("add", "sub", "mul", "div", "neg", "sum", "mean", *VIEWS):
            return False
        if not chain.made(users[0]):
            return chain.name(users[0]) in ("sum", "mean")
        number = users[0]


@family.detector("summed-beside-mean")
def summed_beside_mean(record: Record, entry: Entry) -> Iterator[Finding]:
    """A term is summed over the samples of a batch, beside one that is averaged over them."""
    for loss in _need_losses(record):
        averaged = {batch for term in loss.terms if term.has_graph for batch in _list_batches(loss.chain, term, "mean")}
        for term in loss.terms:
            weight = _weight_of(loss, term)
            summed = {batch for batch in _list_batches(loss.chain, term, "sum") if batch in averaged}
            if summed and term.has_graph and weight >= TUNED:
                batch = max(summed)
                yield entry.finding_at(
                    record,
                    loss.chain,
                    term.number,
                    f"The term {term.text} is summed over the {batch} samples of a batch, beside a term that is "
                    f"averaged over them: it counts {batch} times as much as for each sample",
                    site=_site_of(loss.chain, term.number),
                    evidence=[
                        ("the loss", loss.text),
                        ("largest share of the term", term.share),
                        ("its weight", weight, f"≥ {TUNED:g}"),
                    ],
                )
                return


def _list_batches(chain: Chain, term: Term, reduction: str) -> list[int]:
    """The size of the first dimension of what a term is reduced from, where it is reduced in this way at once."""
    if term.number < 0 or chain.made(term.number):
        return []
    name, shape = chain.name(term.number), chain.taken(term.number) or ()
    how = (argument_of(chain.listed[term.number], "reduction") or "mean") if name in LOSSES else name
    is_all = name in LOSSES or "dim=" not in chain.listed[term.number].arguments
    return [shape[0]] if how == reduction and is_all and len(shape) > 1 and shape[0] >= MANY else []


def _weight_of(loss: Loss, term: Term) -> float:
    """What a term is multiplied by, at most; 0 where that is not known."""
    sums = [parts.sum_of(term.number) for parts in loss.parts]
    weights = [abs(value / one) for value, one in zip(term.values, sums, strict=True) if one and math.isfinite(value)]
    return max(weights, default=0.0)


@family.detector("log-prob-as-entropy")
def log_prob_as_entropy(record: Record, entry: Entry) -> Iterator[Finding]:
    """The log-probability of the actions that were taken is added as if it were an entropy, with the wrong sign."""
    for loss in _need_losses(record):
        chain = loss.chain
        graph = Graph(record, chain, loss.number).numbers
        for term in loss.terms:
            source = _find_bare(chain, term) if len(loss.terms) > 1 else -1
            product = _find_product(chain, source, graph) if source >= 0 else -1
            if product >= 0 and _counts_down(chain, term):
                yield entry.finding_at(
                    record,
                    chain,
                    term.top,
                    f"The term {'−' * (term.sign < 0)}{term.text} makes the log-probability of the actions that were "
                    "taken larger, where an entropy is to be: the policy gets more certain, whatever they gave",
                    site=_site_of(chain, source).partition(".")[0],
                    evidence=[
                        ("the log-probability, with a plain weight", term.text),
                        ("line at which the same is weighted by what the actions gave", chain.listed[product].line),
                        ("line of the log-probability", chain.listed[source].line),
                    ],
                )
                return


def _site_of(chain: Chain, number: int) -> str:
    """The last module behind an operation; the model where there is none."""
    modules = [chain.listed[each].module for each in sorted(chain.ancestors(number)) if chain.listed[each].module]
    return modules[-1] if modules else chain.fact.name


def _find_bare(chain: Chain, term: Term) -> int:
    """What a term is the mean or the sum of, if nothing weights its elements; −1 for none."""
    number = term.number
    if number < 0 or not term.has_graph or chain.name(number) not in ("mean", "sum"):
        return -1
    return chain.maker(number, 0, VIEWS | {"neg"})


def _counts_down(chain: Chain, term: Term) -> bool:
    """Check whether a term falls as what it is the mean of grows."""
    inner, sign = chain.operands(term.number)[0], term.sign
    while chain.name(inner) in VIEWS | {"neg"}:
        sign = -sign if chain.name(inner) == "neg" else sign
        inner = chain.operands(inner)[0]
    return sign < 0


def _find_product(chain: Chain, source: int, graph: set[int]) -> int:
    """Where the same log-probabilities are weighted by numbers without a graph, one for each; −1 for nowhere."""
    if not _is_log_probability(chain, source):
        return -1
    waiting = [source]
    while waiting:
        for user in chain.users(waiting.pop()):
            if user not in graph:
                continue
            operands = chain.listed[user].operands
            if chain.name(user) == "mul" and len(operands) == 2 and math.prod(chain.made(user)) > 1:
                others = [each for each in operands if each < 0 or not chain.listed[each].node]
                if len(others) == 1 and others[0] != CARRIED:
                    return user
            if chain.name(user) in (*VIEWS, "neg"):
                waiting.append(user)
    return -1


def _is_log_probability(chain: Chain, number: int) -> bool:
    """Check whether an operation ends a log-probability of what was sampled: of a category, or of a Gaussian."""
    name = chain.name(number)
    if name in ("gather", "getitem", "sum"):
        inner = chain.maker(number, 0, VIEWS | {"sum"})
        while chain.name(inner) == "broadcast_tensors":  # of a distribution: of the places, and of what is picked from
            inner = next((each for each in chain.operands(inner) if chain.listed[each].node), MADE_BEFORE)
        is_normalized = chain.name(inner) == "sub" and chain.name(chain.maker(inner, 1)) == "logsumexp"
        is_log = is_normalized or chain.name(inner) in ("log_softmax", "log")
        return is_log or _is_log_probability_of_normal(chain, inner)
    return _is_log_probability_of_normal(chain, number)


def _is_log_probability_of_normal(chain: Chain, number: int) -> bool:
    constants = [factor_of(chain, each) for each in chain.ancestors(number) if chain.name(each) in ("sub", "add")]
    is_normal = any(abs(abs(each) - 0.5 * math.log(2 * math.pi)) < 1e-3 for each in constants)
    return chain.name(number) in ("sub", "add") and is_normal
