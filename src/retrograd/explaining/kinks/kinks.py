"""``rg.find_kinks``: points of a model without a derivative, found and listed, the worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor, nn

from retrograd.core.errors import AdjointError, CallError, FreedGraphError, NoGraphError
from retrograd.core.guesses import USES
from retrograd.core.history.facts import Kink
from retrograd.core.hooks.isolation import clone, copy_nest, copy_or_refuse, isolated_autograd, unseen_by_discovery
from retrograd.core.hooks.names import compiled_regions, name_models, spread_batch, walk_modules
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.nodes import inputs_of, is_freed, run_node
from retrograd.core.randomness import Randomness
from retrograd.explaining.kinks.look import Look, Sighting, look_at_node
from retrograd.explaining.kinks.point import key_of
from retrograd.following.engine.replayer import run_from
from retrograd.following.graph.graph import Graph
from retrograd.following.graph.node import Node
from retrograd.following.graph.origins import Origins, record_origins
from retrograd.following.graph.walker import walk

_HEADINGS = ("node", "at", "elements", "torch takes", "gives", "not finite", "line")


class Kinks(Sequence[Kink]):
    """Nodes whose inputs lie where their function has no derivative. Printed, it is a table.

    Attributes:
        unseen: kinds of nodes that have such points, and had not saved what would tell → how many.
    """

    def __init__(self, found: Iterable[Kink], unseen: Mapping[str, int] | None = None) -> None:
        self._found = tuple(sorted(found, key=lambda kink: (kink.nonfinite <= 0, kink.finite, kink.is_usual)))
        self.unseen = Counter(unseen or {})

    @overload
    def __getitem__(self, index: int) -> Kink: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Kink, ...]: ...
    def __getitem__(self, index: int | slice) -> Kink | tuple[Kink, ...]:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Kink]:
        return iter(self._found)

    def __str__(self) -> str:
        cells = [_HEADINGS, *map(_describe_kink, self._found)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells] if self._found else ["no kinks"]
        if self.unseen:
            nodes = ", ".join(f"{count} × {name}" for name, count in self.unseen.items())
            lines.append(f"not seen, as they have not saved what they were given: {nodes}")
        return "\n".join(lines)

    __repr__ = __str__


def _describe_kink(kink: Kink) -> tuple[str, ...]:
    return (
        f"{kink.name}:{kink.node}" if kink.name else kink.node,
        f"{kink.operation} {kink.where}",
        f"{int(kink.value):,} of {kink.total:,}",
        kink.convention,
        kink.gives,
        f"{kink.nonfinite:,}" if kink.nonfinite > 0 else "",
        kink.line.rsplit("/", 1)[-1],
    )


# ---- the search ----

_PLACES = 5
"""How many elements are shown of each node."""

_VALUES = 3

_OF_COMPLEX = "no derivative there"
"""All that is said of a complex point: the conventions are those of real functions."""

Loss = Callable[[Any], Tensor]


def find_kinks(model: nn.Module | Tensor, batch: Any = None, loss: Loss | None = None) -> Kinks:
    """Find each node of a backward graph whose inputs lie where its function has no derivative, or is not defined.

    A model is copied, and the copy is run once, forward and backward: no parameter, gradient, buffer or random state
    is changed, and nothing is recorded. Of a loss the graph is looked at, where nodes have saved what they were given;
    those that have not are in ``unseen``, and it is left as it is: no hook of yours runs, nothing is freed.

    Args:
        model: the model, in the mode in which it trains; or a loss with its graph.
        batch: what the model is called with: a tuple or list of arguments, a mapping of named ones, or the only one.
        loss: a function from what the model returns to a number. Left out, the sum of all that it returns.

    Returns:
        The kinks, the worst first, as facts of a record are; what each attribute says is told in ``Kink``.

    Raises:
        NoGraphError: nothing has a graph.
        FreedGraphError: a backward pass has freed the graph.
        AdjointError: the model cannot be copied.
        AttachError: for what is not a model.
        CallError: a model, and no batch.
    """
    if isinstance(model, Tensor):
        return _look_at_graph(model)
    next(iter(name_models(model).values()))
    if batch is None:
        raise CallError("A model is run on a batch, and there is none.", repair=f"{USES['find_kinks']}.")
    randomness = Randomness()
    try:
        with unseen_by_discovery(), isolated_autograd():
            repair = "compute the loss yourself, and give that: rg.find_kinks(loss)."
            return _look_at_model(copy_or_refuse(model, AdjointError, repair), batch, loss)
    finally:
        randomness.restore()


def _look_at_model(copied: nn.Module, batch: Any, loss: Loss | None) -> Kinks:
    args, kwargs = copy_nest(spread_batch(batch), lambda tensor: clone(tensor).requires_grad_(tensor.requires_grad))
    seen: list[Sighting] = []

    def see(sighting: Sighting) -> None:
        if bool(sighting.lie_there.any()):
            seen.append(sighting)

    eager: AbstractContextManager[Any] = (
        torch.compiler.set_stance("force_eager") if compiled_regions(walk_modules("", copied)) else nullcontext()
    )
    with eager, record_origins(copied) as origins, Look(see):
        total = (loss or _add_up)(copied(*args, **kwargs))
    return Kinks(_describe(total, seen, origins))


def _look_at_graph(loss: Tensor) -> Kinks:
    graph = walk(loss, saved=False)
    nodes = [graph.live(node) for node in graph]
    if any(map(is_freed, nodes)):
        raise FreedGraphError(
            "The graph is freed: a backward pass has dropped what its nodes had saved.",
            repair="call it before backward, or call backward(retain_graph=True).",
        )
    seen: list[Sighting] = []
    unseen: Counter[str] = Counter()
    for node in graph:
        found = look_at_node(graph.live(node))
        if found is None:
            unseen[node.name] += 1
        else:
            seen += [each for each in found if bool(each.lie_there.any())]
    return Kinks(_describe(loss, seen, None), unseen)


def _describe(total: Tensor, seen: Iterable[Sighting], origins: Origins | None) -> Iterator[Kink]:
    if not total.requires_grad:
        raise NoGraphError(
            "What was computed has no graph.", repair="give a model with parameters that require grad, in grad mode."
        )
    graph = walk(total, origins=origins, saved=False)
    numbered = {node.number: node for node in graph}
    found = [(each, node) for each in seen if (node := numbered.get(each.number)) and _fits(each, node)]
    passed = _pass_back(total, graph, [node for _, node in found])
    for sighting, node in found:
        yield _make(sighting, node, graph.live(node), passed.get(node.index, -1))


def _fits(sighting: Sighting, node: Node) -> bool:
    return key_of(node.name) in sighting.point.keys


def _pass_back(total: Tensor, graph: Graph, nodes: Sequence[Node]) -> Mapping[int, int]:
    """Count the numbers of each node that are not finite, though all that come in to it are."""
    live = {node.index: graph.live(node) for node in nodes}
    if not live:
        return {}
    incoming = run_from(total, torch.ones_like(total), to=list(live.values()))
    return {index: _count_nonfinite_made(node, incoming[node]) for index, node in live.items()}


def _count_nonfinite_made(node: Any, incoming: tuple[Tensor | None, ...] | None) -> int:
    if incoming is None or any(each is not None and not bool(each.isfinite().all()) for each in incoming):
        return 0
    return sum(int((~each.isfinite()).sum()) for each in run_node(node, incoming) if each is not None)


def _make(sighting: Sighting, node: Node, live: Any, nonfinite: int) -> Kink:
    point, mask = sighting.point, sighting.lie_there
    given = _run_with_ones(live, mask)
    is_complex = given is not None and given.is_complex()
    return Kink(
        name=node.module or "",
        value=float(mask.sum()),
        node=node.name,
        line=node.line.place if node.line else "",
        operation=point.operation,
        where=point.where,
        convention=_OF_COMPLEX if is_complex else point.convention.value,
        gives=point.gives if given is None else _print_values(given),
        total=mask.numel(),
        points=tuple(tuple(each) for each in mask.nonzero()[:_PLACES].tolist()),
        nonfinite=nonfinite,
        finite=point.is_finite,
        is_usual=point.is_usual,
    )


def _run_with_ones(node: Any, mask: Tensor) -> Tensor | None:
    """What the node gives at these points for an incoming gradient of one; None where no element tells."""
    with torch.no_grad():
        ones = [
            torch.ones(each.shape, dtype=each.dtype, device=each.device) if _is_continuous(each.dtype) else None
            for each in inputs_of(node)
        ]
        given = next((each for each in run_node(node, ones) if each is not None), None)
    if given is None or given.shape != mask.shape:
        return None
    return given[mask].resolve_conj()


def _print_values(given: Tensor) -> str:
    if given.is_complex():
        values = [_print_complex(*pair) for pair in torch.view_as_real(given).unique(dim=0).tolist()]
    else:
        values = [f"{each:.4g}" for each in given.unique().tolist()]
    return ", ".join(values[:_VALUES]) + (", …" if len(values) > _VALUES else "")


def _is_continuous(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _print_complex(real: float, imaginary: float) -> str:
    return f"{real:.4g}" if imaginary == 0 else f"{real:.4g}{imaginary:+.4g}j"


def _add_up(output: Any) -> Tensor:
    found = [
        torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        for _, tensor in flatten(output, ())
        if _is_continuous(tensor.dtype) and tensor.requires_grad
    ]
    if not found:
        raise NoGraphError(
            "Nothing that the model returns has a graph.", repair="give a model with parameters that train."
        )
    return torch.stack([each.sum() for each in found]).sum() if len(found) > 1 or found[0].dim() else found[0]
