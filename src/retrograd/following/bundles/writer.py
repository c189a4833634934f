"""Write a replay bundle: a folder that holds all that is needed to run one node of a backward pass again, anywhere.

The node is run once more where it is, and the operations that it carries out are written down with all tensors that
they read. So what a bundle holds is not code, and it needs none: no model, no class of a Function.
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

from retrograd.core.errors import (
    CannotBundleError,
    FreedGraphError,
    ReplayError,
    UnsafeBundleError,
)
from retrograd.core.files import name_aside, remove_abandoned
from retrograd.core.hooks.dispatch import attributes_of, plain_torch
from retrograd.core.hooks.isolation import run_in_fresh_thread
from retrograd.core.hooks.nodes import (
    inputs_of,
    is_freed,
    is_leaf,
    is_python,
    is_saved_tensor,
    name_of,
    number_of,
    peek,
    run_node,
    saved_of,
    saved_tensors_of,
)
from retrograd.core.randomness import random_kept
from retrograd.following.bundles.bundle import (
    Bundle,
    Came,
    NodeFacts,
    NodeFailure,
    Versions,
    print_bundle,
)
from retrograd.following.bundles.copies import MemoryCopier, StoredTensor, TensorCopies, copy_tensors
from retrograd.following.bundles.files import write_files
from retrograd.following.bundles.program import Program, describe_error, read_random, read_switches
from retrograd.following.bundles.recorder import RecordedProgram, record_program
from retrograd.following.bundles.replay import find_deviation, find_differences, run_bundle
from retrograd.following.graph.node import Line, SavedValue
from retrograd.following.graph.walker import describe, examine

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
    recorded = _record_leaf(incoming) if is_leaf(node) else record_program(node, incoming, named)
    facts = describe_node(node, incoming, recorded, about)
    bundle = Bundle(
        None,
        facts,
        _read_versions(),
        recorded.program,
        TensorCopies(tuple(recorded.memory.blocks), recorded.inputs),
        recorded.names,
        recorded.outgoing,
        recorded.random,
        read_switches(),
    )
    bundle = replace(bundle, refusal=_prove(bundle))
    if recorded.error is not None or not (is_python(node) or is_leaf(node)):
        outgoing = _run_plainly(node, incoming, recorded)
        deviation = find_deviation(recorded.outgoing, outgoing)
        bundle = replace(bundle, outgoing=outgoing, node=replace(facts, deviation=deviation))
    return bundle


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


def _record_leaf(incoming: Sequence[Tensor | None]) -> RecordedProgram:
    """A leaf's node adds what comes in to ``.grad``; nothing is added here."""
    memory = MemoryCopier()
    there = [None if each is None else memory.store(each.detach()) for each in incoming]
    inputs: tuple[StoredTensor, ...] = tuple(each for each in there if each is not None)
    names = tuple(f"incoming.{index}" for index, each in enumerate(there) if each is not None)
    numbers = itertools.count()
    outputs = tuple(None if each is None else next(numbers) for each in there)
    program = Program(len(inputs), (), outputs)
    return RecordedProgram(program, names, inputs, memory, (read_random(()),), copy_tensors(incoming))


def _run_plainly(node: Any, incoming: Sequence[Tensor | None], recorded: RecordedProgram) -> TensorCopies:
    """Run a node where nobody watches it: some formulas go another way under a dispatch mode.

    Raises:
        CannotBundleError: there it raises nothing, but it did when it was recorded.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(recorded.memory.restore)
        stack.enter_context(random_kept())
        stack.enter_context(plain_torch())
        try:
            outgoing = run_node(node, [None if each is None else each.detach() for each in incoming])
        except Exception:
            if recorded.error is None:
                raise
            return recorded.outgoing
        if recorded.error is not None:
            raise CannotBundleError(
                f"{name_of(node)} cannot be bundled: it raises only while its operations are recorded: "
                f"{describe_error(recorded.error)}.",
                repair="run the node again in this process with rg.rerun.",
            ) from recorded.error
        return copy_tensors(outgoing)


def _prove(bundle: Bundle) -> str:
    """Check that the program does what the node did.

    Returns:
        Why a reader who does not trust the writer will refuse to run it; empty where none will.

    Raises:
        CannotBundleError: it does something else.
    """
    refusal = ""
    try:
        ran = run_bundle(bundle)
    except UnsafeBundleError as error:
        ran, refusal = run_bundle(bundle, trusted=True), error.problem
    differences = find_differences(bundle, ran)
    if differences:
        raise CannotBundleError(
            f"The operations that {bundle.node.name} carries out do not give what it gives: {differences[0]}.",
            repair="run the node again in this process with rg.rerun.",
            reason="it computes something outside of torch's operations: by kernels of its own, by numpy in place, or "
            "from a state that changes with each run.",
        )
    return refusal


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
        write_files(unfinished, *print_bundle(bundle))
        return _move(unfinished, path)
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


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
    raise AssertionError("numbers do not end")


def _not_written(path: Path, error: OSError) -> CannotBundleError:
    return CannotBundleError(f"No bundle can be written to {path}: {error}.", repair="give a folder that can be made.")


# ---- node facts ----

AROUND = 3
"""Source lines kept before and after the line of the forward."""

_LONGEST = 200


def describe_node(
    node: Any, incoming: Sequence[Tensor | None], recorded: RecordedProgram, about: Mapping[str, Any]
) -> NodeFacts:
    """Everything about a node, besides what is needed to run it.

    Args:
        node: the node.
        incoming: what came in.
        recorded: its run.
        about: what somebody else knows of it.
    """
    about = dict(about)
    line = _take_line(about)
    module, parameter = about.pop("module", None), about.pop("parameter", None)
    return NodeFacts(
        name=name_of(node),
        number=None if is_leaf(node) else number_of(node),
        incoming=tuple(map(_describe_came, incoming)),
        saved=describe_saved(node),
        attributes=describe_attributes(node),
        failure=None if recorded.error is None else _describe_failure(node, recorded, recorded.error),
        module=module,
        call=int(about.pop("call", 1)),
        parameter=parameter,
        line=line,
        source=() if line is None else _read_source(line),
        about=about,
    )


def _describe_came(tensor: Tensor | None) -> Came | None:
    found = examine(tensor)
    return None if found is None else Came(*found)


def _describe_failure(node: Any, recorded: RecordedProgram, error: Exception) -> NodeFailure:
    by = "operation" if recorded.is_operations else "Python" if is_python(node) else "autograd"
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


def describe_saved(node: Any) -> tuple[SavedValue, ...]:
    """The tensors that a node keeps, and how often each has been written to."""
    return tuple(_describe(name, peek(raw)) for name, raw in saved_tensors_of(node))


def describe_attributes(node: Any) -> dict[str, str]:
    """Describe the attributes of a node that are not tensors."""
    found = [*_flatten(saved_of(node)), *_flatten(attributes_of(node))]
    return {name: _print(value) for name, value in found if not is_saved_tensor(value) and not _is_tensor(value)}


def tensors_of(node: Any) -> dict[str, Tensor]:
    """The tensors that a node keeps, as far as they can be told without running hooks, by names for a bundle."""
    saved = {f"saved.{name}": peek(raw) for name, raw in saved_tensors_of(node)}
    others = {f"context.{name}": value for name, value in _flatten(attributes_of(node)) if _is_tensor(value)}
    return {name: tensor for name, tensor in (saved | others).items() if tensor is not None}


def _describe(name: str, tensor: Tensor | None) -> SavedValue:
    if tensor is None:
        return SavedValue(name, value="not to be told: None, or packed by hooks")
    version = None if tensor.is_inference() else tensor._version
    return SavedValue(name, describe(tensor), version=version)


def _flatten(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, list | tuple) and any(is_saved_tensor(part) or _is_tensor(part) for part in value):
            yield from ((f"{name}[{index}]", part) for index, part in enumerate(value))
        else:
            yield name, value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _print(value: Any) -> str:
    try:
        return repr(value)[:_LONGEST]
    except Exception as error:  # it is the user's
        return f"{type(value).__name__}, whose repr raises {type(error).__name__}"
