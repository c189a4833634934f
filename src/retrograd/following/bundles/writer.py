"""Write a replay bundle: a folder that holds all that is needed to run one node of a backward pass again, anywhere.

The node is run once more where it is, and the operations that it carries out are written down with all tensors that
they read. So what a bundle holds is not code, and it needs none: no model, no class of a Function. It is signed by this
user, so that this user's processes run it again without further questions.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import platform
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrograd.core.errors import CannotBundleError, FreedGraphError, ReplayError
from retrograd.core.files import name_aside, remove_abandoned
from retrograd.core.hooks.dispatch import attributes_of, plain_torch
from retrograd.core.hooks.isolation import run_in_fresh_thread
from retrograd.core.hooks.nodes import (
    inputs_of,
    is_freed,
    is_leaf,
    is_python,
    name_of,
    number_of,
    peek,
    run_node,
    saved_tensors_of,
)
from retrograd.core.notices import warn
from retrograd.core.randomness import random_kept
from retrograd.following.bundles.bundle import Bundle, Came, NodeFacts, NodeFailure, Versions, print_bundle
from retrograd.following.bundles.copies import MemoryCopier, TensorCopies
from retrograd.following.bundles.files import write_files
from retrograd.following.bundles.program import describe_error, read_switches
from retrograd.following.bundles.recorder import RecordedRun, record_run
from retrograd.following.bundles.replay import compare_all, find_differences, run_bundle
from retrograd.following.graph.node import Line, SavedValue
from retrograd.following.graph.walker import describe_saved, examine

_REFUSED = {
    "CheckpointFunctionBackward": (
        "it runs a part of the forward again, and a backward pass of its own that adds to the .grad of parameters",
        "use torch.utils.checkpoint with use_reentrant=False.",
    ),
    "CompiledFunctionBackward": (
        "it is a whole compiled region, whose kernels are not operations of torch",
        "run the model without torch.compile, or with backend='eager', and bundle a node of the region.",
    ),
}


def write_bundle(
    node: Any, incoming: Sequence[Tensor | None], path: str | Path, *, about: Mapping[str, Any] | None = None
) -> Path:
    """Write a replay bundle of a live node.

    The node is run: that of a Python Function once, or twice if it raises, others twice. Random generators, ``.grad``
    and the memory of tensors that it writes to are as before when this returns. Meanwhile what it reads takes its
    memory three times.

    Args:
        node: of a graph that is not freed.
        incoming: the gradients that come in, one for each result of the node's operation; None for those that do not.
        path: the folder to make. If there is one, ``-2`` is put after its name, and so on.
        about: what else to write down: ``module``, ``call``, ``parameter`` and ``line`` (a :class:`Line`, or a number
            beside ``file`` and ``function``) say where the node was made, anything else is kept as it is.

    Returns:
        The folder.

    Raises:
        FreedGraphError: a backward pass has freed what the node had saved.
        CannotBundleError: the node does something that only this process can do; or nothing can be written there.
        ReplayError: that many gradients do not come in.
    """
    _check(node, incoming)
    bundle = run_in_fresh_thread(lambda: _make(node, incoming, about or {}))
    return _write(bundle, Path(path))


def _make(node: Any, incoming: Sequence[Tensor | None], about: Mapping[str, Any]) -> Bundle:
    named = tensors_of(node)
    run = record_run(None if is_leaf(node) else node, incoming, named)  # nothing is added to the ``.grad`` of a leaf
    bundle = Bundle(
        versions=_read_versions(),
        node=describe_node(node, incoming, run, about),
        switches=read_switches(),
        operations=run.operations,
        outputs=run.outputs,
        inputs=run.inputs,
        random=run.random,
        **_join(run.memory, run.outgoing),
    )
    _prove(bundle)
    if run.error is None and (is_python(node) or is_leaf(node)):
        return bundle
    outgoing = _run_plainly(node, incoming, run)
    deviation = next(compare_all(run.outgoing.rebuild(), outgoing.rebuild()), "")
    return replace(bundle, node=replace(bundle.node, deviation=deviation), **_join(run.memory, outgoing))


def _join(memory: MemoryCopier, outgoing: TensorCopies) -> dict[str, Any]:
    """The fields of a bundle that copies fill."""
    blocks, entries = {**memory.blocks, **outgoing.blocks}, {**memory.entries, **outgoing.entries}
    return {"outgoing": outgoing.tensors, "blocks": blocks, "entries": entries}


def _check(node: Any, incoming: Sequence[Tensor | None]) -> None:
    name, expected = name_of(node), len(inputs_of(node))
    if len(incoming) != expected:
        raise ReplayError(
            f"{name} takes {expected} gradients, but {len(incoming)} were given.",
            repair="give one for each result of its operation in the forward; None for a gradient that did not come.",
        )
    if is_freed(node):
        raise FreedGraphError(
            f"{name} cannot be bundled: a backward pass has freed what it had saved.",
            repair="call backward(retain_graph=True), or bundle it before it runs.",
        )
    if name in _REFUSED:
        why, repair = _REFUSED[name]
        raise CannotBundleError(f"{name} cannot be bundled: {why}.", repair=repair)


def _run_plainly(node: Any, incoming: Sequence[Tensor | None], run: RecordedRun) -> TensorCopies:
    """Run a node where nobody watches it: some formulas go another way under a dispatch mode.

    Raises:
        CannotBundleError: there it raises nothing, but it did when it was recorded.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(run.memory.restore)
        stack.enter_context(random_kept())
        stack.enter_context(plain_torch())
        try:
            outgoing = run_node(node, [None if each is None else each.detach() for each in incoming])
        except Exception:
            if run.error is None:
                raise
            return run.outgoing
        if run.error is not None:
            raise CannotBundleError(
                f"{name_of(node)} cannot be bundled: it raises only while its operations are recorded: "
                f"{describe_error(run.error)}.",
                repair="run the node again in this process with rg.rerun.",
            ) from run.error
        return TensorCopies(outgoing, "outgoing")


def _prove(bundle: Bundle) -> None:
    """Check that the operations do what the node did.

    Raises:
        CannotBundleError: they do something else.
    """
    differences = find_differences(bundle, run_bundle(bundle))
    if differences:
        raise CannotBundleError(
            f"The operations that {bundle.node.name} carries out do not give what it gives: {differences[0]}.",
            repair="run the node again in this process with rg.rerun.",
            reason="it computes something outside of torch's operations: by kernels of its own, by numpy in place, or "
            "from a state that changes with each run.",
        )


def _read_versions() -> Versions:
    try:
        retrograd = metadata.version("retrograd")
    except metadata.PackageNotFoundError:
        retrograd = "unknown"
    return Versions(torch.__version__, retrograd, platform.python_version(), platform.platform(), time.time())


def _write(bundle: Bundle, path: Path) -> Path:
    unfinished = name_aside(path)
    try:
        remove_abandoned(path.parent)
        unfinished.mkdir(parents=True)
        problem = write_files(unfinished, print_bundle(bundle), dict(bundle.entries))
        written = _move(unfinished, path)
    except OSError as error:
        raise CannotBundleError(
            f"No bundle can be written to {path}: {error}.", repair="give a folder that can be made."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    if problem:
        warn(
            f"The bundle {written} is not signed: {problem}. It can be replayed as one that is trusted alone: "
            "rg.replay(path, trust=True), or `retrograd replay --trust`."
        )
    return written


def _move(unfinished: Path, path: Path) -> Path:
    """Give a finished folder its name, or the next one that is free."""
    for number in itertools.count(1):
        target = path if number == 1 else path.with_name(f"{path.name}-{number}")
        if target.exists():
            continue
        try:
            return unfinished.rename(target)
        except FileExistsError:  # somebody was quicker
            continue
        except OSError:
            if not target.exists():
                raise
    raise AssertionError("unreachable")


# ---- node facts ----

AROUND = 3
"""Source lines kept before and after the line of the forward."""

_LONGEST = 200
"""Letters of a value that are kept."""


def describe_node(
    node: Any, incoming: Sequence[Tensor | None], run: RecordedRun, about: Mapping[str, Any]
) -> NodeFacts:
    """Everything about a node, besides what is needed to run it.

    Args:
        node: the node.
        incoming: what came in.
        run: its record.
        about: what somebody else knows of it.
    """
    about = dict(about)
    line = _take_line(about)
    module, parameter = about.pop("module", None), about.pop("parameter", None)
    return NodeFacts(
        name=name_of(node),
        number=None if is_leaf(node) else number_of(node),
        incoming=tuple(None if each is None else Came(*each) for each in map(examine, incoming)),
        saved=(*describe_saved(node), *_describe_context(node)),
        failure=None if run.error is None else _describe_failure(node, run, run.error),
        module=module,
        call=int(about.pop("call", 1)),
        parameter=parameter,
        line=line,
        source=() if line is None else _read_source(line),
        about=about,
    )


def _describe_failure(node: Any, run: RecordedRun, error: Exception) -> NodeFailure:
    by = "operation" if run.is_operations else "Python" if is_python(node) else "autograd"
    return NodeFailure(describe_error(error), by, "".join(traceback.format_exception(error)))


def _take_line(about: dict[str, Any]) -> Line | None:
    """The line of the forward, in whichever way it was told."""
    match about.pop("line", None):
        case Line() as line:
            return line
        case int(number) if "file" in about:
            function, operation = about.pop("function", ""), about.pop("operation", "")
            return Line(str(about.pop("file")), number, str(function), str(operation))
        case None:
            return None
        case other:
            about["line"] = other
            return None


def _read_source(line: Line) -> tuple[tuple[int, str], ...]:
    numbers = range(max(1, line.line - AROUND), line.line + AROUND + 1)
    found = ((number, linecache.getline(line.file, number).rstrip("\n")) for number in numbers)
    return tuple((number, text) for number, text in found if text or number == line.line)


def _describe_context(node: Any) -> Iterator[SavedValue]:
    """Describe what a Python Function has put on its context besides saved tensors; the tensors as ``tensors_of``."""
    for name, value in _flatten(attributes_of(node)):
        if not isinstance(value, Tensor):
            yield SavedValue(name, value=_print(value))


def tensors_of(node: Any) -> dict[str, Tensor]:
    """The tensors that a node keeps, as far as they can be told without running hooks, by names for a bundle."""
    saved = {f"saved.{name}": peek(raw) for name, raw in saved_tensors_of(node)}
    context = {f"context.{name}": value for name, value in _flatten(attributes_of(node)) if isinstance(value, Tensor)}
    return {name: tensor for name, tensor in (saved | context).items() if tensor is not None}


def _flatten(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
            yield from ((f"{name}[{index}]", part) for index, part in enumerate(value))
        else:
            yield name, value


def _print(value: Any) -> str:
    try:
        return repr(value)[:_LONGEST]
    except Exception as error:  # it is the user's
        return f"{type(value).__name__}, whose repr raises {type(error).__name__}"
