"""Which of torch's operators can be followed, run again alone, and run again as a whole, to the last bit.

    python benchmarks/operators.py --markdown operators.md
    python benchmarks/operators.py --ops "linalg.*" --samples 10

For each sample of each differentiable operator (on the CPU, in float64 where there is such a thing), on one live graph:

- traced: all that can be read of its nodes is read, and ``rg.trace`` sees each of them run, and its gradients are
  those of a run that nobody looked at;
- rerun: every node is run alone by ``rg.rerun`` with what the engine gave it, and gives what the engine passed on;
- whole: ``rg.run_from`` gives the same gradients of all leaves as the engine, returned and added to ``.grad``;
- across processes: bundles of its nodes are replayed in another process, and give what they gave in this one.

An operator passes when all samples do.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from operator_samples import Operator, Outcome, find_operators, make_samples, run_sample
from retrograd.core.errors import RetrogradError
from retrograd.core.hooks.nodes import inputs_of, is_leaf, name_of, number_of, peek, root_edges, saved_of, variable_of
from retrograd.core.hooks.reach import find_nodes
from retrograd.following.bundles.writer import write_bundle
from retrograd.following.engine.one_node import rerun
from retrograd.following.engine.replayer import run_from
from retrograd.following.graph.walker import walk
from retrograd.following.tracing.tracer import trace

HERE = ("traced", "rerun", "whole")
ACROSS = "across processes"
Gradients = dict[Tensor, Tensor | None]
Ran = tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]


class Different(Exception):  # noqa: N818  # is a finding
    """Something is not as the engine has it."""


@dataclass
class Verdict:
    """What was found of one operator.

    Attributes:
        name: the operator's.
        samples, nodes: how many were looked at; leaves' nodes are not counted.
        refused: samples that torch itself cannot run.
        failures: check → the first reason why it fails.
        skipped: why it was not looked at; empty if it was.
    """

    name: str
    samples: int = 0
    nodes: int = 0
    refused: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    skipped: str = ""

    @property
    def passes_here(self) -> bool:
        return not self.failures.keys() & set(HERE)


def check_operator(operator: Operator, samples: int, bundles: Path | None = None) -> Verdict:
    """Check one operator; its bundles are left in a folder of its own, to be replayed."""
    verdict = Verdict(operator.name)
    if not operator.dtypes:
        verdict.skipped = "has no derivative on the CPU"
        return verdict
    verdict.skipped = "it returns what it is given"
    for dtype in operator.dtypes:
        for sample in make_samples(operator, dtype):
            check_sample(operator, sample, verdict, bundles)
            if verdict.samples == samples:
                break
        if verdict.samples:
            verdict.skipped = ""
            break
    return verdict


def check_sample(operator: Operator, sample: Any, verdict: Verdict, bundles: Path | None) -> None:
    try:
        outcome = run_sample(operator, sample)
        expected = run_engine(outcome) if outcome is not None else {}
    except (RuntimeError, NotImplementedError, TypeError, ValueError, ImportError) as error:
        verdict.refused += 1
        verdict.skipped = f"torch cannot run it: {first_line(error)}"
        return
    if outcome is not None:
        verdict.samples += 1
        check_outcome(outcome, expected, verdict, bundles)


def check_outcome(outcome: Outcome, expected: Gradients, verdict: Verdict, bundles: Path | None) -> None:
    nodes = find_nodes(root_edges(outcome.tensors)).nodes
    with caught(verdict, "traced"):
        look_at(nodes)
        graph = walk(outcome.tensors)
        with trace(origins=False, norms=True) as traced:
            found = run_engine(outcome)
        compare_leaves(expected, found)
        if len(graph) != len(nodes) or len(traced.events) != len(nodes):
            raise Different(f"{len(nodes)} nodes, {len(graph)} walked, {len(traced.events)} traced")
    passed = watch_engine(outcome, nodes)
    verdict.nodes += len(passed)
    with caught(verdict, "rerun"):
        for node, (incoming, outgoing) in passed.items():
            compare_all(outgoing, rerun(node, incoming), name_of(node))
    with caught(verdict, "whole"):
        compare_leaves(expected, run_ours(outcome, accumulate=False))
        compare_leaves(expected, run_ours(outcome, accumulate=True))
    if bundles is not None:
        with caught(verdict, ACROSS):
            for node, (incoming, _) in passed.items():
                write_bundle(node, incoming, bundles / f"{verdict.name}-{verdict.samples}-{number_of(node)}")


class caught:  # noqa: N801  # reads as a verb
    """Write down why a check fails, and go on."""

    def __init__(self, verdict: Verdict, check: str) -> None:
        self.failures, self.check = verdict.failures, check

    def __enter__(self) -> None:
        torch.manual_seed(1)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self.failures.setdefault(self.check, first_line(error))
            return True
        return False


def look_at(nodes: list[Any]) -> None:
    """Read everything that can be read of them."""
    for node in nodes:
        inputs_of(node), number_of(node), name_of(node)
        for value in saved_of(node).values():
            for each in value if isinstance(value, list | tuple) else (value,):
                if type(each).__name__ == "SavedTensor":
                    peek(each)


def run_engine(outcome: Outcome) -> Gradients:
    torch.manual_seed(2)
    leaves = clear_leaves(outcome)
    torch.autograd.backward(outcome.tensors, outcome.gradients, retain_graph=True)
    return {leaf: leaf.grad for leaf in leaves}


def run_ours(outcome: Outcome, *, accumulate: bool) -> Gradients:
    torch.manual_seed(2)
    leaves = clear_leaves(outcome)
    found = run_from(outcome.tensors, outcome.gradients, accumulate=accumulate)
    if not accumulate and any(leaf.grad is not None for leaf in leaves):
        raise Different("a .grad was touched")
    return {leaf: leaf.grad if accumulate else found[leaf] for leaf in leaves}


def clear_leaves(outcome: Outcome) -> list[Tensor]:
    leaves = find_leaves(outcome.tensors)
    for leaf in leaves:
        leaf.grad = None
    return leaves


def find_leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [leaf for leaf in map(variable_of, find_nodes(root_edges(tensors)).nodes) if leaf is not None]


def watch_engine(outcome: Outcome, nodes: list[Any]) -> dict[Any, Ran]:
    """What torch's engine gave each node but those of leaves, and what it passed on."""
    came: dict[Any, tuple[Tensor | None, ...]] = {}
    passed: dict[Any, Ran] = {}

    def hook(node: Any) -> Iterator[Any]:
        yield node.register_prehook(lambda incoming: came.__setitem__(node, tuple(incoming)))
        yield node.register_hook(lambda outgoing, _: passed.__setitem__(node, (came[node], tuple(outgoing))))

    handles = [handle for node in nodes if not is_leaf(node) for handle in hook(node)]
    run_engine(outcome)
    for handle in handles:
        handle.remove()
    return passed


def compare_leaves(expected: Gradients, found: Gradients) -> None:
    for leaf, gradient in expected.items():
        compare_all((gradient,), (found[leaf],), "a leaf")


def compare_all(expected: tuple[Tensor | None, ...], found: tuple[Tensor | None, ...], place: str) -> None:
    if len(expected) != len(found):
        raise Different(f"{place} gives {len(found)} gradients, not {len(expected)}")
    for slot, (one, other) in enumerate(zip(expected, found, strict=True)):
        if not same(one, other):
            raise Different(f"gradient {slot} of {place} differs from the engine's")


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are of one kind and have the same bits."""
    if one is None or other is None:
        return one is other
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    return all(torch.equal(bits(part), bits(its)) for part, its in zip(parts(one), parts(other), strict=True))


def parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that a tensor of any layout is made of."""
    match tensor.layout:
        case torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        case _:
            return list(tensor.unbind()) if tensor.is_nested else [tensor]


def bits(tensor: Tensor) -> Tensor:
    flat = torch.empty(
        tensor.numel(), dtype=tensor.dtype, device=tensor.device
    )  # strides of single elements mean nothing
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


# ---- across processes ----

REPLAY = """
import json, sys, warnings
warnings.simplefilter("ignore")
from retrograd.following.bundles.replay import replay
import torch
torch.set_num_threads(1)
for line in sys.stdin:
    path = line.strip()
    try:
        replayed = replay(path)
        reason = "" if replayed.equal else "; ".join(map(str, replayed.differences))[:200] or "differs"
    except Exception as error:
        reason = str(error).splitlines()[0]
    print(json.dumps([path, reason]), flush=True)
"""


def replay_bundles(folder: Path) -> Iterator[tuple[str, str]]:
    """Replay all bundles in another process; if that dies, in one more from there on.

    Yields:
        A bundle's name, and the reason why it fails; an empty text if it does not.
    """
    left = sorted(map(str, folder.iterdir()))
    while left:
        ran = subprocess.run(
            [sys.executable, "-c", REPLAY], input="\n".join(left), capture_output=True, text=True, check=False
        )
        for line in ran.stdout.splitlines():
            path, reason = json.loads(line)
            left.remove(path)
            yield Path(path).name, reason
        if left:
            yield Path(left.pop(0)).name, f"the other process ended with {ran.returncode}"


def check_bundles(verdicts: list[Verdict], folder: Path) -> None:
    by_name = {verdict.name: verdict for verdict in verdicts}
    for bundle, reason in replay_bundles(folder):
        if reason:
            by_name[bundle.rsplit("-", 2)[0]].failures.setdefault(ACROSS, reason)


# ---- what is printed ----


class Report:
    """Tables in Markdown."""

    def __init__(self, verdicts: list[Verdict], *, across: bool) -> None:
        self.verdicts = [verdict for verdict in verdicts if not verdict.skipped]
        self.skipped = Counter(verdict.skipped for verdict in verdicts if verdict.skipped)
        self.checks = (*HERE, ACROSS) if across else HERE

    def summary(self) -> Iterator[str]:
        samples, nodes = sum(each.samples for each in self.verdicts), sum(each.nodes for each in self.verdicts)
        refused = sum(each.refused for each in self.verdicts)
        yield f"{len(self.verdicts)} operators with {samples} samples and {nodes} nodes; torch {torch.__version__}."
        if refused:
            yield f"{refused} more samples are left out, since torch itself cannot run them."
        yield "\n| check | passes | of | share |\n|---|---:|---:|---:|"
        for check in self.checks:
            yield self._share(check, sum(check not in each.failures for each in self.verdicts))
        yield self._share("all in one process", sum(each.passes_here for each in self.verdicts))

    def failures(self) -> Iterator[str]:
        failing = [(each, check) for each in self.verdicts for check in self.checks if check in each.failures]
        if failing:
            yield "\n| operator | fails | reason |\n|---|---|---|"
        for each, check in failing:
            yield f"| {each.name} | {check} | {each.failures[check].replace('|', '¦')} |"

    def not_looked_at(self) -> Iterator[str]:
        if self.skipped:
            yield "\n| not looked at | operators |\n|---|---:|"
        for reason, number in self.skipped.most_common():
            yield f"| {reason.replace('|', '¦')} | {number} |"

    def operators(self) -> Iterator[str]:
        yield f"\n| operator | samples | nodes | {' | '.join(self.checks)} |"
        yield "|---|---:|---:|" + "---|" * len(self.checks)
        for each in self.verdicts:
            marks = " | ".join("fails" if check in each.failures else "yes" for check in self.checks)
            yield f"| {each.name} | {each.samples} | {each.nodes} | {marks} |"

    def _share(self, what: str, passes: int) -> str:
        total = len(self.verdicts)
        return f"| {what} | {passes} | {total} | {passes / max(total, 1):.2%} |"


def first_line(error: BaseException) -> str:
    text = error.problem if isinstance(error, RetrogradError) else str(error)
    return f"{type(error).__name__}: {(text.strip().splitlines() or [''])[0]}"[:200]


def check_all(operators: list[Operator], samples: int, *, across: bool) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators that torch is about to drop, and many more
        bundles = Path(folder) if across else None
        verdicts = []
        for number, operator in enumerate(track(operators, "operators", disable=not sys.stderr.isatty())):
            verdicts.append(check_operator(operator, samples, bundles))
            if number % 50 == 0:
                gc.collect()
        if bundles is not None:
            check_bundles(verdicts, bundles)
    return verdicts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="*", metavar="PATTERN", help="only operators whose name matches")
    parser.add_argument("--samples", type=int, default=3, help="how many of each operator")
    parser.add_argument("--here", action="store_true", help="leave the check across processes out")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table of all operators there")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    verdicts = check_all(find_operators(arguments.ops), arguments.samples, across=not arguments.here)
    report = Report(verdicts, across=not arguments.here)
    lines = [*report.summary(), *report.failures(), *report.not_looked_at()]
    print("\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join([*lines, *report.operators()]) + "\n")


if __name__ == "__main__":
    main()
