"""A replay bundle: a folder that holds all that is needed to run one node of a backward pass again, anywhere.

The node is run once more where it is, and the operations that it carries out are written down with all tensors that
they read. So what a bundle holds is not code, and it needs none: no model, no class of a Function.
"""

from __future__ import annotations

import contextlib
import itertools
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrograd.bundles.contents import (
    Bundle,
    Versions,
    parse_bundle,
    print_bundle,
)
from retrograd.bundles.copies import Copies, StoredTensor
from retrograd.bundles.files import damaged, read_files, write_files
from retrograd.bundles.memory import Memory, copy_tensors
from retrograd.bundles.node_facts import describe_node, tensors_of
from retrograd.bundles.program import Program, describe_error
from retrograd.bundles.recorder import Recorded, record_program
from retrograd.bundles.running import find_deviation, find_differences, run_bundle
from retrograd.bundles.switches import read_random, read_switches
from retrograd.errors import (
    BundleVersionError,
    CannotBundleError,
    FreedGraphError,
    ReplayError,
    UnsafeBundleError,
)
from retrograd.files import name_aside, remove_abandoned
from retrograd.hooks.dispatch import plain_torch
from retrograd.hooks.nodes import inputs_of, is_freed, is_leaf, is_python, name_of, run_node
from retrograd.hooks.thread_state import run_in_fresh_thread
from retrograd.randomness import random_kept

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
        path: the folder to make. If there is one, ``-2`` is put behind its name, and so on.
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


def read_bundle(path: str | Path, *, strict: bool = True) -> Bundle:
    """Read a replay bundle.

    Args:
        path: its folder.
        strict: whether to refuse what another version of torch has written.

    Raises:
        DamagedBundleError: it cannot be read.
        BundleVersionError: another version of torch has written it.
    """
    path = Path(path)
    facts, entries = read_files(path)
    try:
        written_with = str(facts["versions"]["torch"])
        if strict and written_with != torch.__version__:
            raise BundleVersionError(
                f"The bundle {path} was written with torch {written_with}; this is torch {torch.__version__}.",
                repair="replay it with that version, or with strict=False.",
                reason="between versions of torch operations change, and give other bits.",
            )
        return parse_bundle(path, facts, entries)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError, OverflowError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def _make(node: Any, incoming: Sequence[Tensor | None], about: Mapping[str, Any]) -> Bundle:
    named = tensors_of(node)
    recorded = _record_leaf(incoming) if is_leaf(node) else record_program(node, incoming, named)
    facts = describe_node(node, incoming, recorded, about)
    bundle = Bundle(
        None,
        facts,
        _read_versions(),
        recorded.program,
        Copies(tuple(recorded.memory.blocks), recorded.inputs),
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


def _record_leaf(incoming: Sequence[Tensor | None]) -> Recorded:
    """A leaf's node adds what comes in to ``.grad``; nothing is added here."""
    memory = Memory()
    there = [None if each is None else memory.store(each.detach()) for each in incoming]
    inputs: tuple[StoredTensor, ...] = tuple(each for each in there if each is not None)
    names = tuple(f"incoming.{index}" for index, each in enumerate(there) if each is not None)
    numbers = itertools.count()
    outputs = tuple(None if each is None else next(numbers) for each in there)
    program = Program(len(inputs), (), outputs)
    return Recorded(program, names, inputs, memory, (read_random(()),), copy_tensors(incoming))


def _run_plainly(node: Any, incoming: Sequence[Tensor | None], recorded: Recorded) -> Copies:
    """What a node gives where nobody watches it: some formulas go another way under a dispatch mode.

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
