"""Backward passes that torch refuses: no graph, a graph that is freed, and what was overwritten."""

from __future__ import annotations

import re
from collections.abc import Iterator

from retrograd.core.amounts import count_of, list_names
from retrograd.core.history.facts import Call, FreedPart, Operation, Overwrite, SharedWrite, Unpacked
from retrograd.core.runs.findings import Finding, shorten_line
from retrograd.explaining.findings.chain import Chain, name_of, tensor_of
from retrograd.explaining.findings.coverage import Coverage
from retrograd.explaining.findings.detectors.graphs import tell_carried, tell_taken
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.gradients import LostGradient, ParameterGradients, find_last_cut
from retrograd.explaining.findings.record import Record

family = Family(__name__)

_OVERWRITTEN = re.compile(
    r"modified by an inplace operation: \[(?P<kind>[\w.]+) \[(?P<shape>[^\]]*)\]\]"
    r"(?:, which is output (?P<slot>\d+) of (?P<maker>\w+),)? is at version (?P<now>\d+);"
    r" expected version (?P<then>\d+)"
)

_VIEWS = ("AsStrided", "T", "Transpose", "Permute", "View", "UnsafeView", "Expand")
"""Nodes of views: what they view is written to."""


@family.detector("no-graph")
def no_graph(record: Record, entry: Entry) -> Iterator[Finding]:
    """Backward is asked of a loss that has no graph."""
    if "does not require grad and does not have a grad_fn" in record.crash.message:
        yield _say_refused(entry, record)
    elif (leaf := _find_leaf_loss(record)) is not None:
        yield _say_leaf(entry, record, leaf)


def _say_leaf(entry: Entry, record: Record, lost: LostGradient) -> Finding:
    call = next(each for each in record.called("backward"))
    return entry.finding(
        "Backward has no way from the loss to the model, so no parameter gets a gradient and nothing is trained: "
        f"{lost.sentence}",
        case="leaf",
        step=call.step,
        last_step=record.last_step,
        line=lost.line,
        evidence=[("backward", call.line), ("parameters with a gradient", 0, "0 of all")],
        repair=lost.repair,
    )


def _say_refused(entry: Entry, record: Record) -> Finding:
    lost = next((found for chain in reversed(record.chains) if (found := find_last_cut(chain))), None)
    reason, repair = _explain(record, lost)
    return entry.finding(
        f"The loss has no graph, so backward cannot run: {reason}",
        case="refused",
        step=record.once(Coverage).last or 0,
        line=lost.line if lost is not None else _find_blind_line(record) or record.crash.line,
        evidence=[("exception", record.crash.message[:160])],
        repair=repair,
    )


def _find_leaf_loss(record: Record) -> LostGradient | None:
    """The cut before a loss that is a leaf, or made of one, where no parameter ever had a gradient."""
    looked = [each.grad for each in record.parameters if each.requires_grad and each.grad]
    chains = [chain for chain in record.chains if chain.loss >= 0]
    if not looked or any(grad != "None" for grad in looked) or record.of_kind("parameter", "grad") or not chains:
        return None
    if any(chain.listed[chain.loss].node and chain.grown_from(chain.loss) & chain.of_outputs for chain in chains):
        return None
    if not any(each.name == "backward" for each in record.calls):
        return None
    return find_last_cut(chains[0])


def _explain(record: Record, lost: LostGradient | None) -> tuple[str, str]:
    if lost is not None:
        return lost.sentence, lost.repair
    if _find_blind_line(record):
        called = (
            "gradients were switched off (torch.no_grad, inference_mode or set_grad_enabled) where the model was called"
        )
        return called, "call the model outside of torch.no_grad() for the loss that is trained."
    frozen = record.once(ParameterGradients).frozen
    weighted = [path for path, each in record.modules.items() if each.get("parameters")]
    if weighted and all(path in frozen for path in weighted):
        return "no parameter of the model requires a gradient", "set requires_grad of what is to be trained."
    return "where it was lost was not seen", ""


def _find_blind_line(record: Record) -> str:
    """Where a model was called with gradients switched off, if it never was with them."""
    calls = record.called("forward")
    return calls[0].line if calls and not any(call.details.get("grad") for call in calls) else ""


@family.detector("freed-graph")
def freed_graph(record: Record, entry: Entry) -> Iterator[Finding]:
    """Backward runs a second time through a graph that is freed."""
    if "backward through the graph a second time" not in record.crash.message:
        return
    last = record.called("backward", "grad", "forward")
    line = next((call.line for call in reversed(last) if call.name != "forward"), "") or record.crash.line
    again = _same_graph(last)
    state = None if again else _find_state(record)
    part = next(iter(record.of(FreedPart)[-1:]), None)
    said = shorten_line(line)
    if again:
        message = f"Backward ({said}) runs a second time through one graph, which the pass before has freed"
        message += f" ({shorten_line(again.line)})"
        repair = "add the losses up and call backward once, or give the first call retain_graph=True."
    else:
        is_other = part is None and state is not None and not state[1]
        message = f"Backward ({said}) runs into the graph of an earlier {'pass' if is_other else 'step'}, which is "
        message += f"freed: {_describe_part(part, state)}"
        repair = _describe_repair(record, part)
    yield entry.finding(
        message,
        site=record.crash.module,
        step=record.once(Coverage).last,
        line=(state[1] if state else part.line if part is not None and not again else "") or line,
        evidence=[("exception", record.crash.message[:160]), ("backward", line)],
        repair=repair,
    )


def _describe_part(part: FreedPart | None, state: tuple[str, str] | None) -> str:
    """What was handed over: the operation that takes it, the variable that holds it, or its node at least."""
    if part is None:
        return state[0] if state else "something made in that step is used again without detach()"
    made = f" ({shorten_line(part.line)})" if part.line else ""
    if part.name:
        once = ", made once before the loop," if part.is_made_once else ""
        told = f"`{part.name}`{made}{once} is used again"
        return f"{state[0]}; {told}" if state else told
    return state[0] if state else f"what {part.node} made in that step is used again"


def _describe_repair(record: Record, part: FreedPart | None) -> str:
    """Empty for that of the detector: what is carried over is detached, if all that is trained is trained then."""
    if part is None:
        return ""
    what = f"`{part.name}`" if part.name else "it"
    starved = [name for name in part.starves if name in record.once(ParameterGradients).held]
    if not part.leaves_something:
        return f"compute {what} again in each step: nothing is trained if it is detached."
    if starved:
        verb = "get" if len(starved) > 1 else "gets"
        return f"compute {what} again in each step: {list_names(starved)} {verb} no gradient from it if it is detached."
    if part.is_made_once:
        return f"compute {what} again in each step; detach() it only if what it is made of is not to be trained."
    return ""


def _same_graph(calls: list[Call]) -> Call | None:
    """The pass before the one that failed, where no forward lies in between."""
    passes = [call for call in calls if call.name != "forward"]
    if len(passes) > 1 and calls[-1].name != "forward" and calls[-2].name != "forward":
        return passes[-2]
    return None


def _find_state(record: Record) -> tuple[str, str] | None:
    """Find a tensor that a forward takes and that was made before it: a sentence, and where it is handed in.

    Empty instead of that line where another line has made it, for another backward pass: then neither is wrong alone.
    """
    if not record.chains:
        return None
    chain = record.chains[-1]
    found = tell_carried(record, chain) or _guess_state(record, chain)
    maker = _find_other_maker(record, chain)
    return (f"{found[0]}, by `{maker.name}` ({shorten_line(maker.line)})", "") if found and maker else found


def _find_other_maker(record: Record, chain: Chain) -> Operation | None:
    """Find the maker of the tensor that is carried over, if that is another model, called at another line."""
    before = [each for each in record.chains if each is not chain and each.step <= chain.step]
    if not before or not chain.carried:
        return None
    operation, taken = chain.carried[0]
    outputs = [before[-1].listed[number] for number in before[-1].outputs]
    makers = {each.line: each for each in outputs if taken in each.makes[:1]}
    is_other = len(makers) == 1 and not any(each.module == operation.module for each in makers.values())
    return next(iter(makers.values())) if is_other and operation.line not in makers else None


def _guess_state(record: Record, chain: Chain) -> tuple[str, str] | None:
    """Find the only tensor that it takes and that is neither a parameter nor an input."""
    known = {tensor_of(each) for each in record.parameters}
    known |= {tensor_of(each) for looks in record.inputs.values() for each in looks}
    found = [
        (operation, taken)
        for operation in chain.listed
        for taken, maker in zip(operation.takes, operation.operands, strict=False)
        if maker < 0 and taken not in known and operation.node and taken.startswith(("float", "bfloat", "complex"))
    ]
    if len({taken for _, taken in found}) != 1 or not record.parameters:
        return None
    operation, taken = found[0]
    return tell_taken(operation, taken), operation.line


LOSSY = 0.9
"""‖unpacked − saved‖ / ‖saved‖ up to which hooks for saved tensors may be a meant approximation: normal numbers
in 2 bits are off by 0.8, by our measurement, a tensor that is doubled or set to zero by 1, and another one by 1.4."""


@family.detector("overwritten")
def overwritten_tensor(record: Record, entry: Entry) -> Iterator[Finding]:
    """Something that backward needs was written to."""
    facts = record.of(Overwrite)
    found = _OVERWRITTEN.search(record.crash.message)
    for fact in _first_of_each(facts):
        yield _describe_seen(entry, fact, fact.step if fact.silent else record.once(Coverage).last)
    if found is not None and not any(not fact.silent for fact in facts):
        yield _describe_error(entry, record, found)
    for shared in record.of(SharedWrite):
        yield _describe_shared(entry, shared)
    is_named = any(fact.silent for fact in facts)  # with the line that wrote
    for pair in record.of(Unpacked) if not is_named else ():
        if pair.written or pair.value > LOSSY:
            yield _describe_pair(entry, pair)


def _describe_shared(entry: Entry, fact: SharedWrite) -> Finding:
    hook = f"`{fact.hook}`{_in_brackets(fact.hook_line)}" if fact.hook else "One of the hooks"
    if fact.node == "BackwardHookFunctionBackward" and not fact.tensor:
        about = f"a gradient that it is given as hook of {fact.name or 'a module'}"
    elif fact.tensor:
        about = f"the gradient of {_name_result(fact.tensor, fact.name, fact.line)}"
    else:
        about = f"the gradient that {fact.node} gives it"
    more = f", and {fact.value - 1:.0f} more" if fact.value > 1 else ""
    harmed = _name_result(fact.harmed, fact.harmed_in, fact.harmed_line)
    return entry.finding(
        f"{hook} writes in place into {about}: the gradient of {harmed}{more} is in the same memory, is changed "
        "with it, and is wrong",
        case="shared",
        site=fact.name,
        step=fact.step,
        line=fact.hook_line or fact.line,
        evidence=[("gradients that are changed with it", fact.value, "> 0")],
    )


def _describe_pair(entry: Entry, fact: Unpacked) -> Finding:
    written = ": the saved tensor itself was written to" if fact.written else ""
    return entry.finding(
        f"Backward is given other data than was saved: for {fact.changed} of "
        f"{count_of(fact.tensors, 'saved tensor')} `{fact.unpack}` returns values that differ from what "
        f"`{fact.pack}` was given, by {fact.value:.2g} of their size{written}; so the gradients are not those of "
        "the loss",
        case="pair",
        step=fact.step,
        line=fact.line,
        evidence=[
            ("‖unpacked − saved‖ / ‖saved‖", fact.value, "> 0" if fact.written else f"> {LOSSY:g}"),
            ("pack", fact.pack_line or "unknown"),
        ],
        checked=[f"what pack was given and what unpack returned was compared at step {fact.step}"],
    )


def _describe_seen(entry: Entry, fact: Overwrite, step: int | None) -> Finding:
    place = f" in {fact.name}" if fact.name else ""
    saved = f" ({shorten_line(fact.saved_line)})" if fact.saved_line else ""
    wrote = f" ({shorten_line(fact.written_line)})" if fact.written_line else ""
    writer = f"by {fact.writer}{wrote}" if fact.writer else "by something that was not seen"
    what = f"The tensor `{fact.tensor}`" if fact.tensor else "A tensor"
    silent = "; torch does not notice, and the gradient is wrong" if fact.silent else ""
    return entry.finding(
        f"{what} that {fact.node} saved for backward{place}{saved} is overwritten {writer} before it is used{silent}",
        case="seen",
        site=fact.name,
        step=step,
        line=fact.written_line or fact.saved_line,
        evidence=[
            ("version when saved", fact.saved_version),
            ("version when used", fact.found_version, "other values" if fact.silent else "≠"),
            ("saved at", fact.saved_line or "unknown"),
        ],
        checked=["the values are not those that were saved" if fact.silent else "torch has refused to use it"],
        repair=_repair(fact.writer),
    )


def _describe_error(entry: Entry, record: Record, found: re.Match[str]) -> Finding:
    shape = found["shape"].replace(" ", "").replace(",", ", ")
    step = _find_update_between(record, shape)
    writer = Operation(name="step", line=step.line) if step is not None else _find_writer(record, found, shape)
    saver = _find_saver(record, found, shape, writer)
    by = f"by {_name_step(step)}" if step is not None else f"by {writer.name}" if writer is not None else ""
    wrote = f" {by} ({shorten_line(writer.line)})" if writer is not None else ""
    saved = f" and that {saver.name} saved ({shorten_line(saver.line)})" if saver is not None else ""
    hint = "" if writer is not None else "; `retrograd explain train.py` names the line that writes"
    return entry.finding(
        f"A tensor [{shape}] that backward needs{saved} was written to in place{wrote}: it is at version "
        f"{found['now']} and was saved at {found['then']}{hint}",
        case="error",
        site=saver.module if saver is not None else record.crash.module,
        step=record.once(Coverage).last,
        line=writer.line if writer is not None else saver.line if saver is not None else record.crash.line,
        evidence=[
            ("version when saved", int(found["then"])),
            ("version when used", int(found["now"]), "≠"),
            ("backward", record.crash.line),
        ],
        refute="" if writer is None else "another operation wrote to it, in a hook or in compiled code",
        repair=_repair(_name_step(step) if step is not None else ""),
    )


def _in_brackets(line: str) -> str:
    return f" ({shorten_line(line)})" if line else ""


def _name_result(name: str, module: str, line: str) -> str:
    """A parameter by its name, else what an operation has made."""
    if not line:
        return name or "a tensor"
    made = f"the result of {name}" if name else "what was made"
    return f"{made}{f' in {module}' if module else ''}{_in_brackets(line)}"


def _first_of_each(facts: list[Overwrite]) -> list[Overwrite]:
    found: dict[tuple[str, str, str], Overwrite] = {}
    for fact in facts:
        found.setdefault((fact.saved_line, fact.written_line, fact.tensor), fact)
    return list(found.values())


def _repair(writer: str) -> str:
    if writer.endswith(".step"):
        return (
            "call step() after the last backward() through this forward, or run the forward again after step(), or "
            "detach() what belongs to the other network."
        )
    return ""


def _find_update_between(record: Record, shape: str) -> Call | None:
    """The update between the last forward and the pass that failed, where what was overwritten may be a weight."""
    calls = record.called("forward", "backward", "grad", "step")
    begin = max((place for place, call in enumerate(calls) if call.name == "forward"), default=-1)
    steps = [call for call in calls[begin + 1 :] if call.name == "step"]
    shapes = {", ".join(map(str, each.shape)) for each in record.parameters}
    turned = ", ".join(reversed(shape.split(", ")))
    is_weight = not shapes or shape in shapes or turned in shapes
    return steps[-1] if steps and is_weight else None


def _name_step(call: Call | None) -> str:
    return f"{call.about}.step" if call is not None else ""


def is_written(operation: Operation) -> bool:
    """Check whether an operation writes into what it is given."""
    name = operation.name
    in_place = name.endswith("_") and not name.endswith("__")
    by_name = name in ("setitem", "__setitem__") or re.fullmatch(r"__i[a-z]+__", name)
    return bool(in_place or by_name or "inplace=True" in operation.arguments or "out=" in operation.arguments)


def _find_writer(record: Record, found: re.Match[str], shape: str) -> Operation | None:
    """The only operation that wrote to such a tensor; None where there are several, or none."""
    if not record.chains:
        return None
    chain = record.chains[-1]
    wrote = [each for each in chain.listed if is_written(each)]
    alike = [each for each in wrote if any(taken.endswith(f"[{shape}]") for taken in (*each.takes[:1], *each.makes))]
    named = [each for each in alike if _is_made_by(chain, each, found["maker"] or "")]
    listed = named or alike or wrote
    if len(listed) == int(found["now"]):  # each has counted the version up by one
        listed = listed[int(found["then"]) :]
    candidates = {(each.name, each.line): each for each in listed}
    return next(iter(candidates.values())) if len(candidates) == 1 else None


def _is_made_by(chain: Chain, operation: Operation, maker: str) -> bool:
    """Check whether what it wrote to is made by a node of this kind, or it made that node itself."""
    first = operation.operands[0] if operation.operands else -1
    nodes = {operation.node, chain.listed[first].node if first >= 0 else ""}
    return any(node and node.removesuffix("0").removesuffix("Backward") == _kind(maker) for node in nodes)


def _kind(maker: str) -> str:
    return maker.removesuffix("0").removesuffix("Backward")


def _find_saver(record: Record, found: re.Match[str], shape: str, writer: Operation | None) -> Operation | None:
    """The only operation that may have saved it: its maker, where that keeps its result, or what takes it before."""
    if not record.chains:
        return None
    chain = record.chains[-1]
    kind = _kind(found["maker"] or "")
    makers = [number for number, each in enumerate(chain.listed) if _kind(each.node) == kind and kind]
    makers = [number for number in makers if any(f"[{shape}]" in made for made in chain.listed[number].makes)]
    if len(makers) != 1 or kind in _VIEWS:
        return None
    maker = chain.listed[makers[0]]
    if name_of(maker) in _KEEPS_RESULT or maker is writer:
        return maker if maker is not writer else None
    users = [each for each in chain.listed if makers[0] in each.operands and not is_written(each) and each.node]
    lines = {(each.name, each.line): each for each in users}
    return next(iter(lines.values())) if len(lines) == 1 else None


_KEEPS_RESULT = frozenset(
    {"sigmoid", "tanh", "relu", "softmax", "log_softmax", "exp", "sqrt", "rsqrt", "reciprocal", "elu", "leaky_relu"}
)
"""Functions whose backward needs what they returned."""
