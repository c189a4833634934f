"""What torch refuses and tells without its line: another recomputation, inference tensors, unused parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from retrograd.core.amounts import list_names
from retrograd.core.history.facts import Operation
from retrograd.core.history.saved_facts import Recomputed
from retrograd.core.runs.findings import Evidence, Finding, shorten_line
from retrograd.explaining.findings.chain import MADE_BEFORE
from retrograd.explaining.findings.coverage import Coverage
from retrograd.explaining.findings.detectors.broken_graphs import is_written
from retrograd.explaining.findings.detectors.missing_gradients import find_reason
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.gradients import LostGradient, ParameterGradients, path_of
from retrograd.explaining.findings.record import Record

family = Family(__name__)

_DIFFERS = re.compile(
    r"tensor at position (?P<place>\d+):\s*saved metadata: \{'shape': torch\.Size\(\[(?P<then>[\d, ]*)\]\), "
    r"'dtype': torch\.(?P<dtype>\w+).*\s*recomputed metadata: \{'shape': torch\.Size\(\[(?P<now>[\d, ]*)\]\), "
    r"'dtype': torch\.(?P<other>\w+)"
)
_RECOMPUTED = ("Recomputed values for the following tensors", "during the original forward and recomputation",
               "trying to save more tensors during recomputation")  # fmt: skip


@family.detector("recomputed-otherwise")
def recomputed_otherwise(record: Record, entry: Entry) -> Iterator[Finding]:
    """A checkpoint computes something else in backward than in forward."""
    message = record.crash.message
    if not any(text in message for text in _RECOMPUTED):
        for fact in record.of(Recomputed)[:1]:
            yield _describe_values(entry, record, fact)
        return
    part = _list_operations(record)
    found = _DIFFERS.search(message)
    first = _find_first(part, found) if found is not None else None
    writes = [each for each in part if is_written(each) and each.operands[:1] == (MADE_BEFORE,)]
    where = f" in {record.crash.module}" if record.crash.module else ""
    said = f"The checkpoint{where} computed something else in backward than in forward"
    evidence = [Evidence("exception", message[:160])]
    if found is not None:
        then, now = f"{found['dtype']}[{found['then']}]", f"{found['other']}[{found['now']}]"
        said += f": what it saved first that differs was {then} and is {now}"
        if first is not None:
            said += f", as `{first.name}` ({shorten_line(first.line)}) {'takes' if then in first.takes else 'makes'}"
        evidence.append(Evidence("first saved tensor that differs", int(found["place"])))
    seen = [] if writes else [_explain_values(fact) for fact in record.of(Recomputed)[-1:]]
    for _, _, why in seen:
        said += f"; {why}"
    for each in writes[:1]:
        said += (
            f"; `{each.name}` ({shorten_line(each.line)}) writes to {each.takes[0]}, which was made before, so the "
            "second run finds other values there"
        )
    yield entry.finding(
        said,
        site=record.crash.module,
        step=record.once(Coverage).last or 0,
        line=next(iter([*(each.line for each in writes), *(line for _, line, _ in seen if line)]), "")
        or (record.crash.line if first is None else first.line),
        evidence=evidence,
        refute="" if not writes else "what is written there is not read in that part",
        repair="write to it outside of the checkpointed part, once for each step; or leave that part out of the "
        "checkpoint."
        if writes
        else "",
    )


_RANDOM = ("dropout", "rand", "normal", "bernoulli", "multinomial", "rrelu", "poisson", "uniform", "exponential")


def _describe_values(entry: Entry, record: Record, fact: Recomputed) -> Finding:
    """Torch compares shapes and types alone: other values go through, and the gradients are wrong."""
    case, line, why = _explain_values(fact)
    where = f" in {fact.name}" if fact.name else ""
    evidence = [Evidence("‖second run − first run‖ / ‖first run‖", fact.value)] if fact.value == fact.value else []
    return entry.finding(
        f"The checkpoint ({shorten_line(fact.checkpoint)}) computes other values in backward than in forward{where}, "
        f"so gradients are not those of the loss: {why}",
        case=case,
        site=fact.name,
        step=fact.step,
        last_step=record.last_step,
        line=line,
        evidence=[*evidence, Evidence("checkpoint", fact.checkpoint)],
    )


def _explain_values(fact: Recomputed) -> tuple[str, str, str]:
    """The kind of reason, its line, and the reason in words."""
    first = f"`{fact.operation}`" + (f" ({shorten_line(fact.line)})" if fact.line else "")
    if fact.operation and not fact.made_again:
        return "flow", fact.line, f"the forward called {first}, and the second run did not"
    if fact.again and (fact.again, fact.again_line) != (fact.operation, fact.line) and fact.again_line:
        again = f"`{fact.again}` ({shorten_line(fact.again_line)})"
        instead = f", where the forward called {first}" if fact.operation else ""
        return "flow", fact.again_line, f"the second run called {again}{instead}"
    if any(word in fact.operation for word in _RANDOM):
        return "random", fact.line, f"{first} draws other random numbers the second time"
    if fact.made != fact.made_again:
        return "flow", fact.line, f"{first} gave {fact.made} at first, and {fact.made_again} the second time"
    if fact.written and fact.reads:
        written = f"`{fact.written}` ({shorten_line(fact.written_line)})"
        return "written", fact.written_line, f"{written} writes to a tensor that {first} finds changed the second time"
    return (
        "values",
        fact.line,
        f"{first} is the first that gives another result"
        + (", for what it takes from outside of that part has changed" if fact.reads else ""),
    )


def _list_operations(record: Record) -> list[Operation]:
    """The last operations that were noted in the module whose backward failed, or in all where it is not known."""
    module = record.crash.module
    listed = record.chains[-1].listed if record.chains else []
    return [each for each in listed if not module or each.module == module or each.module.startswith(f"{module}.")]


def _find_first(part: Sequence[Operation], found: re.Match[str]) -> Operation | None:
    """The first operation that has a node, and takes or makes a tensor of the type and size that was saved."""
    saved = f"{found['dtype']}[{found['then']}]"
    return next((each for each in part if each.node and saved in (*each.takes, *each.makes)), None)


_INFERENCE = ("Inference tensors cannot be saved for backward", "Inplace update to inference tensor outside",
              "Inference tensors do not track version counter")  # fmt: skip


@family.detector("inference-tensor")
def inference_tensor(record: Record, entry: Entry) -> Iterator[Finding]:
    """What was made in inference mode is used where gradients are recorded."""
    message = record.crash.message
    if not any(text in message for text in _INFERENCE):
        return
    maker = _find_maker(record)
    what = f"what `{maker.name}` ({shorten_line(maker.line)}) made" if maker is not None else "a tensor that was made"
    last = record.once(Coverage).last
    when = f" at step {last}" if last is not None else ""
    yield entry.finding(
        f"The run died{when}: {what} in torch.inference_mode() is used where gradients are recorded "
        f"({shorten_line(record.crash.line)})",
        site=record.crash.module,
        step=record.once(Coverage).last,
        line=maker.line if maker is not None else record.crash.line,
        evidence=[("exception", message[:160])],
    )


def _find_maker(record: Record) -> Operation | None:
    """The only operation in inference mode whose result no other one in that mode takes."""
    listed = record.chains[-1].listed if record.chains else []
    taken = {number for each in listed if each.mode == "inference" for number in each.operands}
    made = [each for number, each in enumerate(listed) if each.mode == "inference" and number not in taken]
    return made[0] if len(made) == 1 else None


_WAITED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: (?P<indices>[\d ]+)")


@family.detector("unused-in-ddp")
def unused_in_d_d_p(record: Record, entry: Entry) -> Iterator[Finding]:
    """DistributedDataParallel waits for gradients that never come."""
    if _WAITED not in record.crash.message:
        return
    names = _find_unused(record)
    lost, why = _find_why(record, names)
    what = f"a gradient of {list_names(names)}, which got none" if names else "gradients that did not come"
    found = _INDICES.search(record.crash.message)
    yield entry.finding(
        f"DistributedDataParallel waits for {what} at step {record.once(Coverage).last or 0}{why}",
        site=path_of(names[0]) if names else "",
        step=record.once(Coverage).last or 0,
        line=lost.line if lost is not None else record.crash.line,
        evidence=[
            ("exception", record.crash.message[:92]),
            *([("indices of these parameters", found["indices"].strip())] if found is not None else []),
        ],
        repair=f"{lost.repair.rstrip('.')}; or, where that is meant, DistributedDataParallel(…, "
        "find_unused_parameters=True)."
        if lost is not None
        else "",
    )


def _find_unused(record: Record) -> list[str]:
    """Parameters that require grad and had none in the last step, as many as torch counts; none where that differs.

    In a step that was not looked at they are those that torch counts, in its order, if there is one model.
    """
    looks = {each.name: each for each in record.parameters if each.requires_grad}
    now = {each.name: each.grad for each in record.parameters if each.grad and each.step == record.once(Coverage).last}
    found = _INDICES.search(record.crash.message)
    places = None if found is None else [int(each) for each in found["indices"].split()]
    if now:
        missing = [name for name in looks if now.get(name) == "None"]
        return missing if places is None or len(missing) == len(places) else []
    is_alone = len(record.models | record.root_names) == 1
    names = list(looks)
    return [names[each] for each in places] if places and is_alone and max(places) < len(names) else []


def _find_why(record: Record, names: Sequence[str]) -> tuple[LostGradient | None, str]:
    gradients = record.once(ParameterGradients)
    for path in dict.fromkeys(map(path_of, names)):
        lost, (kind, _) = find_reason(record, gradients, path, names)
        if lost is not None:
            return lost, f": {lost.sentence} ({shorten_line(lost.line)})"
        coverage = record.once(Coverage)
        if not coverage.is_whole and coverage.last not in coverage.recorded:
            return None, ""  # what that step has called was not recorded
        if kind in ("never called", "never used", "spare"):
            return None, f": {path} is not called" if kind != "never used" else ": no operation takes it"
    return None, ""


REFUSED = (*_RECOMPUTED, *_INFERENCE, _WAITED)
"""Parts of messages that are explained here."""
