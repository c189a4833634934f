"""The exception that ended a run, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator

from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.coverage import Coverage
from retrograd.explaining.findings.detectors.refused import REFUSED
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import CannotTell, Crash, Record

family = Family(__name__)

_PRODUCT = re.compile(
    r"mat1 and mat2 shapes cannot be multiplied \((?P<rows>\d+)x(?P<got>\d+) and (?P<want>\d+)x(?P<columns>\d+)\)"
)

_CHANNELS = re.compile(
    r"expected input\[(?P<shape>[^\]]*)\] to have (?P<want>\d+) channels, but got (?P<got>\d+) channels"
)

_WRONG_GRADIENT = re.compile(
    r"returned an invalid gradient at index (?P<index>\d+) - got \[(?P<got>[^\]]*)\] but expected shape compatible "
    r"with \[(?P<want>[^\]]*)\]"
)

_IN_A_BACKWARD = (
    "print the shapes at this line: the gradient that comes in has the shape of what forward returned, and the one "
    "that is returned for an input has the shape of that input."
)

_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"Target (?P<target>-?\d+) is out of bounds",
        ("target {target} is not a class of the model: it has fewer outputs than there are classes, or classes count "
        "from 1"),
        "give the last layer as many outputs as there are classes, and count classes from 0.",
    ),
    (
        r"device-side assert triggered",
        ("an index is out of bounds on the device: a class that the model has no output for, or a row that an "
        "embedding has not"),
        "run it on the CPU, or with CUDA_LAUNCH_BLOCKING=1, to see which index it is.",
    ),
    (
        (r"mat1 and mat2 must have the same dtype|expected (?:m1 and m2|scalar type)|Expected object of scalar type|"
        r"expected scalar type|Found dtype (?P<a>\w+) but expected (?P<b>\w+)|should be the same"),
        "tensors of different types or devices meet in one operation",
        "convert inputs, targets and model to the same dtype and device.",
    ),
    (
        r"Expected all tensors to be on the same device",
        "tensors of different devices meet in one operation",
        "move model, inputs and targets to the same device.",
    ),
    (
        r"out of memory",
        "the device has no memory left",
        "use smaller batches, and look for losses or outputs that are kept with their graphs.",
    ),
    (
        r"does not require grad and does not have a grad_fn",
        "backward is asked of a tensor that has no graph",
        "look for detach, no_grad, .item(), .data or a new tensor between the model and the loss.",
    ),
    (
        r"Trying to backward through the graph a second time",
        "backward runs through a graph whose saved tensors an earlier pass has freed",
        "detach what is carried over from one step to the next, or compute it anew.",
    ),
    (
        r"modified by an inplace operation",
        "a tensor that backward needed was written to before it was used",
        "write to a copy, or use the operation that makes a new tensor.",
    ),
    (
        r"grad can be implicitly created only for scalar outputs",
        "backward is asked of a loss that is not a single number",
        "reduce the loss with .mean() or .sum() first.",
    ),
    (
        r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\)",
        "sizes {a} and {b} meet in one operation and do not broadcast",
        "print both shapes at this line: one of them has its dimensions in another order or number.",
    ),
    (
        r"shape '(?P<shape>[^']*)' is invalid for input of size (?P<size>\d+)",
        "{size} elements cannot be viewed as {shape}",
        "compute the shape from the input's, as in x.flatten(1).",
    ),
    (
        r"all elements of (?:input|target) should be between 0 and 1",
        "binary_cross_entropy is given what is not a probability: logits, or NaN",
        "use binary_cross_entropy_with_logits, or apply sigmoid first.",
    ),
    (
        r"index out of range in self",
        "an embedding is asked for a row that it does not have",
        "give the embedding as many rows as the largest index plus one.",
    ),
    (
        r"Expected more than 1 value per channel when training",
        "batch norm in training mode is given a single sample",
        "drop the last, smaller batch (drop_last=True), or call eval() where this is an evaluation.",
    ),
    (
        r"view size is not compatible with input tensor's size and stride",
        "view is asked of a tensor whose elements do not lie in that order",
        "use reshape, or contiguous() first.",
    ),
    (
        r"Can't call numpy\(\) on Tensor that requires grad",
        "numpy() is asked of a tensor with a graph",
        "call detach() first, if no gradient is to pass there.",
    ),
    (
        r"leaf Variable that requires grad is being used in an in-place operation",
        "a parameter is written to where gradients are recorded",
        "write to it under torch.no_grad().",
    ),
)  # fmt: skip


@family.detector("failed")
def failed(record: Record, entry: Entry) -> Iterator[Finding]:
    """The run died."""
    crash = record.crash
    if not record.error:
        if record.status in ("failed", "stopped"):
            raise CannotTell("the process ended without a word")
        return
    if crash.kind == "KeyboardInterrupt" or any(text in crash.message for text in REFUSED):
        return
    meaning, repair = explain_shapes(record)
    if not meaning:
        meaning, repair = explain_error(crash.message)
    where = f" in {crash.module}" if crash.module else ""
    last = record.once(Coverage).last
    when = f" at step {last}" if last is not None else ""
    during = _describe_pass(crash) if crash.in_backward else ""
    said = f"{crash.kind}: {shorten(crash.message)}"
    yield entry.finding(
        f"The run died{when}{where}{during}: {f'{meaning} ({said})' if meaning else said}",
        site=crash.module,
        step=last,
        line=crash.line,
        evidence=[("exception", said), *([("node", crash.node)] if crash.node else [])],
        repair=repair,
    )


def _describe_pass(crash: Crash) -> str:
    """Name the backward pass, or the backward of a Function that the program has written."""
    function = crash.node.removesuffix("Backward")
    return f", in the backward of {function}" if function != crash.node else ", in backward"


def explain_shapes(record: Record) -> tuple[str, str]:
    """Return whose shapes do not fit, and what to do; empty texts where it is no such error, or not known whose.

    A layer is named only where it is the layer that has raised: what a backward or a hook multiplies is no layer's.
    """
    crash = record.crash
    product, channels = _PRODUCT.search(crash.message), _CHANNELS.search(crash.message)
    wrong = _WRONG_GRADIENT.search(crash.message)
    if wrong is not None:
        return (
            f"for input {wrong['index']}, of shape [{wrong['want']}], a gradient of shape [{wrong['got']}] is returned",
            f"return a gradient of shape [{wrong['want']}] there: sum over what was broadcast, or transpose.",
        )
    if product is not None:
        rows, got, want, columns = map(int, product.group("rows", "got", "want", "columns"))
        if not crash.in_backward and _is_of_layer(record, (columns, want)):
            return (
                f"a layer that takes {want} features is given {got}",
                f"set the layer's in_features to {got}, or bring its input into that shape.",
            )
        repair = "print both shapes at this line: the first must have as many columns as the second has rows."
        return (
            f"a matrix of {rows} × {got} is multiplied with one of {want} × {columns}",
            _IN_A_BACKWARD if crash.node else repair,
        )
    if channels is not None and not crash.in_backward:
        return (
            f"a convolution that takes {channels['want']} channels is given {channels['got']}",
            f"set in_channels to {channels['got']}, or permute the input to (batch, channels, …).",
        )
    return "", ""


def _is_of_layer(record: Record, weight: tuple[int, int]) -> bool:
    """Check whether the module that has raised has a weight of this shape; by its class where no weight was seen."""
    looks = record.looks.get(f"{record.crash.module}:weight")
    return looks[0].shape == weight if looks else record.type_of(record.crash.module) == "Linear"


def explain_error(message: str) -> tuple[str, str]:
    """Return what a message of torch's means, and what to do; empty texts for one that is not known."""
    for pattern, meaning, repair in _KNOWN:
        found = re.search(pattern, message)
        if found:
            values = {name: value or "" for name, value in found.groupdict().items()}
            return meaning.format(**values), repair.format(**values)
    return "", ""


def shorten(message: str, most: int = 160) -> str:
    """The first line of a message, cut."""
    first = message.strip().splitlines()[0] if message.strip() else ""
    return first if len(first) <= most else f"{first[: most - 1]}…"
