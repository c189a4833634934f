"""Run the node of a replay bundle again, in any process, and compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from retrograd.bundles.bundle import read_bundle
from retrograd.bundles.contents import Bundle, Came
from retrograd.bundles.program import BundledOperation
from retrograd.bundles.running import find_differences, rebuild_outgoing, run_bundle
from retrograd.errors import GraphError
from retrograd.foreign.text import show_plainly

_MOST_OPERATIONS = 20


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """What came of running the node of a bundle again. It is true where it came out the same.

    Attributes:
        bundle: what was run.
        outputs: the gradients that it gave; empty where it raised.
        expected: those that it gave when the bundle was written.
        equal: whether they are the same bit for bit, or the same exception was raised; None where there is nothing to
            compare: other gradients came in, or the exception came from code that is not in the bundle.
        error: the exception that was raised.
        differences: what is not the same, or was not compared, a line each.
    """

    bundle: Bundle
    outputs: tuple[Tensor | None, ...]
    expected: tuple[Tensor | None, ...]
    equal: bool | None
    error: Exception | None
    differences: list[str]

    def __bool__(self) -> bool:
        return self.equal is True

    def __str__(self) -> str:
        return describe(self)

    def __repr__(self) -> str:
        outcome = {True: "the same", False: "not the same", None: "not compared"}[self.equal]
        return f"<Replayed {self.bundle.node.place}: {outcome}>"


def replay(
    bundle: Bundle | str | Path,
    *,
    incoming: Sequence[Tensor | None] | None = None,
    strict: bool = True,
    trusted: bool = False,
) -> Replayed:
    """Run the node of a bundle again, and compare what it gives with what it gave, bit for bit.

    Neither the model nor its code is needed, but custom operations must be registered. What somebody else has written
    may be opened: only operations that compute are carried out, after their sizes and indices have been looked at. The
    random generators and switches of torch are as before when this returns.

    Args:
        bundle: a bundle, or its folder.
        incoming: other gradients to run it with; then nothing is compared. Numbers that the node's code has read out of
            the gradients (``.item()``, sizes) stay those of the recorded run.
        strict: whether to refuse a bundle that another version of torch has written.
        trusted: you know who wrote it, so that whatever it names may be carried out, custom operations among it.

    Raises:
        DamagedBundleError: the bundle cannot be read.
        BundleVersionError: another version of torch has written it.
        UnsafeBundleError: it is not trusted, and asks for more than to compute.
        ReplayError: this process lacks an operation or a device, or the gradients do not fit.
    """
    if not isinstance(bundle, Bundle):
        bundle = read_bundle(bundle, strict=strict)
    ran = run_bundle(bundle, incoming, trusted=trusted)
    expected = rebuild_outgoing(bundle)
    if incoming is not None:
        notes = [] if bundle.node.failure is None or ran.error else [_say_cut_short(bundle)]
        return Replayed(bundle, ran.outputs, expected, None, ran.error, notes)
    differences = find_differences(bundle, ran)
    equal: bool | None = not differences
    if differences and bundle.node.deviation:
        differences.append("torch takes another formula for this node while its operations are recorded")
    failure = bundle.node.failure
    if equal and failure is not None and failure.by != "operation":
        differences, equal = [_say_not_raised(bundle)], None
    return Replayed(bundle, ran.outputs, expected, equal, ran.error, differences)


def replay_folder(folder: str | Path, *, trusted: bool = False) -> Iterator[tuple[Path, Replayed | GraphError]]:
    """Replay every bundle in a folder.

    Args:
        folder: where they are.
        trusted: as of :func:`replay`.

    Yields:
        Each bundle's folder, in order of their names, with what came of it, or with why it was not run.
    """
    for path in sorted(Path(folder).iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            try:
                yield path, replay(path, trusted=trusted)
            except GraphError as error:
                yield path, error


def describe(replayed: Replayed) -> str:
    """What was run and what came of it, for a person to read."""
    return show_plainly("\n".join(_describe(replayed)))


def _describe(replayed: Replayed) -> Iterator[str]:
    bundle, node = replayed.bundle, replayed.bundle.node
    number = "" if node.number is None else f", number {node.number}"
    yield f"{node.place}{number}, written with torch {bundle.versions.torch}"
    if node.line is not None:
        yield f"  made at {node.line}"
        yield from (f"  {'>' if number == node.line.line else ' '} {number:5} {text}" for number, text in node.source)
    yield from (f"  came in  {index}: {_say_came(came)}" for index, came in enumerate(node.incoming))
    yield from (f"  saved    {each.name}: {each.tensor or each.value}" for each in node.saved)
    yield from (f"  kept     {name}: {text}" for name, text in (node.attributes or {}).items())
    yield from _describe_operations(bundle.program.operations)
    yield from (f"  went out {index}: {_say_output(replayed, index)}" for index in range(len(replayed.outputs)))
    if node.failure is not None:
        yield f"  raised   {node.failure.error}"
    if replayed.error is not None:
        yield f"  raised now {type(replayed.error).__name__}: {replayed.error}"
    yield {True: "The same.", False: "Not the same.", None: "Not compared."}[replayed.equal]
    yield from (f"  {each}" for each in replayed.differences)


def _describe_operations(operations: Sequence[BundledOperation]) -> Iterator[str]:
    for index, operation in enumerate(operations[:_MOST_OPERATIONS]):
        yield f"  ran      {index}: {operation.name}"
    if len(operations) > _MOST_OPERATIONS:
        yield f"  ran      … and {len(operations) - _MOST_OPERATIONS} more operations"


def _say_came(came: Came | None) -> str:
    if came is None:
        return "None"
    return f"{came.tensor}, {came.nonfinite} not finite" if came.nonfinite else str(came.tensor)


def _say_output(replayed: Replayed, index: int) -> str:
    output = replayed.outputs[index]
    if output is None:
        return "None"
    text = f"{str(output.dtype).removeprefix('torch.')}{list(output.shape)}"
    start = f"outgoing {index}: "
    found = [each.removeprefix(start) for each in replayed.differences if each.startswith(start)]
    if found or replayed.equal is None:
        return f"{text}, {found[0]}" if found else text
    return f"{text}, the same"


def _say_not_raised(bundle: Bundle) -> str:
    failure = bundle.node.failure
    assert failure is not None
    code = "Python code" if failure.by == "Python" else "autograd itself"
    return f"raised by {code}, not by an operation: {failure.error}\n{failure.traceback}".rstrip()


def _say_cut_short(bundle: Bundle) -> str:
    count = len(bundle.program.operations)
    return f"{bundle.node.name} raised when it was recorded: what would have come after {count} operations is not known"
