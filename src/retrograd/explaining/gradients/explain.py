"""``rg.explain_gradients``: why ``.grad`` is None, or zero, as a mapping that may watch a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from retrograd.core.amounts import count_of, list_names
from retrograd.core.errors import GraphError
from retrograd.core.groups import gather
from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.calls import Logs
from retrograd.core.hooks.flow import FlowNotes
from retrograd.core.hooks.forward_log import ForwardLog
from retrograd.core.hooks.names import walk_parameters
from retrograd.core.hooks.optimizer import held_by
from retrograd.core.runs.findings import Evidence, Finding, Findings
from retrograd.core.sites.site import parse_site
from retrograd.explaining.gradients.passes import PassSeen, PassWatch, look_at_graph
from retrograd.explaining.gradients.reasons import (
    WITH,
    Leaf,
    Observations,
    Reason,
    describe_cut,
    describe_use_in_function,
    judge,
)
from retrograd.following.graph.module_names import find_names
from retrograd.following.graph.origins import LIMIT, Origins

Model = nn.Module | Mapping[str, nn.Module]


def explain_gradients(
    model: Model,
    loss: Any = None,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> GradientReasons:
    """Explain why the gradient of each parameter is None, or zero, or why it is there.

    Around forward and backward it names the line where a gradient was lost::

        with rg.explain_gradients(model) as why:
            loss = criterion(model(batch), target)
            loss.backward()
        print(why)

    Given a loss, before or after ``backward()`` and without any preparation, it tells what the graph of the loss tells,
    and says what only a block could tell: ``print(rg.explain_gradients(model, loss))``.

    Nothing is changed: in a block, gradients are looked at node by node, which waits for the device.

    Args:
        model: whose parameters are asked of; or several models by name.
        loss: a tensor, or several in a list, tuple or dict.
        optimizer: tells also what no optimizer holds, and what one holds that the model has not.
        tensors: further tensors by name.

    Returns:
        A mapping from names, ``"fc:weight"``, to a :class:`~retrograd.explaining.gradients.reasons.Reason` each. Its
        ``missing`` are those where something is missing or zero, and its ``findings`` put together what has one cause.

    Raises:
        GraphError: ``model`` is not a module, or a tensor is none.
    """
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    _check(models, tensors or {})
    leaves = list(_find_leaves(models, tensors or {}))
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    reasons = GradientReasons(models, leaves, list(_find_held(optimizers, leaves)))
    if optimizers:
        reasons.hold_against([each for one in optimizers for each in held_by(one)])
    if loss is not None:
        reasons.look_at(loss)
    return reasons


def _find_leaves(models: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> Iterator[Leaf]:
    known: set[int] = set()
    for name, tensor in (*walk_parameters(models.items()), *tensors.items()):
        if id(tensor) not in known:
            module = parse_site(name).path if ":" in name and name not in tensors else ""
            yield Leaf(len(known), name, tensor, module)
            known.add(id(tensor))


def _find_held(optimizers: Sequence[Optimizer], leaves: Sequence[Leaf]) -> Iterator[Leaf]:
    known = {id(leaf.tensor) for leaf in leaves}
    for number, optimizer in enumerate(optimizers):
        for group, settings in enumerate(optimizer.param_groups):
            for index, tensor in enumerate(settings["params"]):
                if id(tensor) not in known:
                    yield Leaf(len(known), f"optimizer {number}, group {group}, tensor {index}", tensor)
                    known.add(id(tensor))


def _check(models: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
    for model in models.values():
        if not isinstance(model, nn.Module):
            raise GraphError(
                f"{type(model).__name__} is not a torch.nn.Module.",
                repair="give the model first: rg.explain_gradients(model, loss).",
            )
    for name, each in tensors.items():
        if not isinstance(each, Tensor):
            raise GraphError(f"{name!r} names a {type(each).__name__}.", repair="give tensors by name: {'x': x}.")


# ---- the mapping of reasons ----

DETECTOR = "explain-gradients"
"""Who says these findings."""


class GradientReasons(Mapping[str, Reason]):
    """Why the gradient of each tensor is what it is, by name; made by :func:`explain_gradients`, which see.

    A context manager: what runs in its block is watched. The reasons are those of the moment when they are first asked
    for, or of the end of the block.
    """

    def __init__(self, models: Mapping[str, nn.Module], leaves: Sequence[Leaf], held: Sequence[Leaf] = ()) -> None:
        self._models = models
        self._leaves = list(leaves)
        self._held = list(held)
        self._optimized: set[int] | None = None
        self._places = WeakTensorKeyDictionary()
        for leaf in leaves:
            self._places.setdefault(leaf.tensor, leaf.place)
        self._seen = Observations(leaves=leaves)
        self._reasons: dict[str, Reason] | None = None
        self._watch: _BlockWatch | None = None

    # ---- reading ----

    def __getitem__(self, name: str) -> Reason:
        return self._known()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    @property
    def missing(self) -> dict[str, Reason]:
        """Reasons where something is missing, or zero."""
        return {name: reason for name, reason in self._known().items() if not reason.is_fine}

    @property
    def loss(self) -> Reason | None:
        """Why the loss has no graph; None where it has one."""
        if all(each.has_graph for each in self._seen.passes):
            return None
        return _judge_loss(next(each for each in self._seen.passes if not each.has_graph), self._seen)

    @property
    def findings(self) -> Findings:
        """Findings, one for each cause, with the names of all that it concerns."""
        reasons = self.missing.values() if self.loss is None else [self.loss]
        groups = gather(((each.why, each.message, each.line), each) for each in reasons)
        return Findings(map(_find, groups.values()), about=count_of(len(self), "tensor"))

    def __str__(self) -> str:
        rows = [(each.name, each.grad, each.why, each.message, each.line) for each in self._known().values()]
        loss = self.loss
        head = [f"The loss has no graph: {loss.message}{f' ({loss.line})' if loss.line else ''}", ""] if loss else []
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {grad:<{widths[1]}}  {why:<{widths[2]}}  {message}{f' ({line})' if line else ''}"
            for name, grad, why, message, line in rows
        ]
        hints = dict.fromkeys(each.repair for each in self._known().values() if each.why == "unknown")
        return "\n".join([*head, *lines, *hints])

    def __repr__(self) -> str:
        return f"<GradientReasons of {count_of(len(self), 'tensor')}, {len(self.missing)} without a gradient>"

    def of(self, tensor: Tensor, name: str = "tensor") -> Reason:
        """Why the gradient of another tensor is what it is."""
        place = self._places.get(tensor)
        if place is not None:
            return self[next(leaf.name for leaf in self._leaves if leaf.place == place)]
        return judge(Leaf(len(self._leaves), name, tensor), self._seen)

    # ---- seeing ----

    def look_at(self, loss: Any) -> None:
        """Inspect the graph of a loss; nothing is run."""
        roots = [each for each in _tensors_of(loss) if each.requires_grad]
        seen = look_at_graph(roots, self._places) if roots else PassSeen(has_graph=False)
        self._seen = Observations([seen], leaves=self._leaves)

    def hold_against(self, optimized: Sequence[Tensor]) -> None:
        """Search also for what is in no optimizer."""
        self._optimized = set(map(id, optimized))

    def __enter__(self) -> Self:
        self._reasons = None
        self._watch = _BlockWatch(self._models, self._leaves, self._places)
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        watch, self._watch = self._watch, None
        assert watch is not None
        watch.stop()
        self._seen = watch.evidence(self._leaves)
        self._reasons = self._judge()
        if isinstance(error, RuntimeError) and watch.passes:
            self._explain_error(error, watch.passes)

    def _explain_error(self, error: RuntimeError, passes: Sequence[PassSeen]) -> None:
        last = passes[-1]
        if not last.has_graph:
            reason = _judge_loss(last, self._seen)
            error.add_note(f"retrograd: the loss has no graph: {reason.message} ({reason.line or 'no line is known'})")
        elif last.failed and last.freed and "second time" in str(error):
            before = [each.line for each in passes[:-1] if each.line]
            earlier = f"by backward() at {before[-1]}" if before else "by a pass before this block"
            error.add_note(
                f"retrograd: {last.freed} was freed {earlier}; what is computed before that pass and used again behind"
                " it must be computed again, or detached"
            )

    def _known(self) -> dict[str, Reason]:
        if self._watch is not None:
            return self._judge()
        if self._reasons is None:
            self._reasons = self._judge()
        return self._reasons

    def _judge(self) -> dict[str, Reason]:
        seen = self._seen if self._watch is None else self._watch.evidence(self._leaves)
        found = {leaf.name: judge(leaf, seen) for leaf in self._leaves}
        if self._optimized is not None:
            for leaf in self._leaves:
                reason = found[leaf.name]
                is_trained = leaf.module and leaf.tensor.requires_grad and id(leaf.tensor) not in self._optimized
                if is_trained and reason.is_fine:
                    found[leaf.name] = _say_not_optimized(reason)
            found |= {leaf.name: self._judge_held(leaf, seen) for leaf in self._held}
        return found

    def _judge_held(self, leaf: Leaf, seen: Observations) -> Reason:
        """Tensors that an optimizer holds and the model does not."""
        shape = tuple(leaf.tensor.shape)
        twin = next((each for each in self._leaves if tuple(each.tensor.shape) == shape), None)
        state = judge(leaf, seen).grad
        if twin is None:
            return Reason(leaf.name, state, "not in the model", "the optimizer holds it, and the model does not")
        return Reason(
            leaf.name,
            state,
            "another copy",
            f"the optimizer holds a tensor of the shape of {twin.name} that is not the model's: it was made for another"
            " copy of the model, or before a layer was replaced",
            repair="make the optimizer after the model is complete and on its device",
        )


class _BlockWatch:
    """Watches forward and backward of a block."""

    def __init__(
        self, models: Mapping[str, nn.Module], leaves: Sequence[Leaf], places: WeakTensorKeyDictionary
    ) -> None:
        self.passes: list[PassSeen] = []
        self._places = places
        logs = Logs(LIMIT)
        self._notes = FlowNotes([leaf.tensor for leaf in leaves], logs)
        names = find_names(models)
        self._origins = Origins(ForwardLog(names, logs, self._notes), names)
        self._running: dict[EngineRun, PassWatch] = {}
        self._lock = threading.RLock()

    def start(self) -> None:
        """Begin."""
        self._origins.__enter__()
        backward_followers.add(self)

    def stop(self) -> None:
        """End."""
        backward_followers.remove(self)
        self._origins.__exit__(None, None, None)

    def run_begins(self, run: EngineRun) -> None:
        """A backward pass begins."""
        with self._lock:
            if not run.is_batched:
                self._running[run] = PassWatch(run, self._places, self._notes, self._origins)

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """A backward pass has ended."""
        with self._lock:
            watch = self._running.pop(run, None)
            if watch is not None:
                self.passes.append(watch.end(failed=error is not None))

    def evidence(self, leaves: Sequence[Leaf]) -> Observations:
        """Collect the observations so far."""
        called = frozenset(span.module for span in self._origins.spans if span.module is not None)
        return Observations(tuple(self.passes), self._notes, called, leaves)


def _judge_loss(seen: PassSeen, evidence: Observations) -> Reason:
    if seen.cuts:
        why, message, line, repair = describe_cut(seen.cuts[-1])
        return Reason("loss", "None", why, message, line, repair)
    if not torch.is_grad_enabled() and evidence.notes is None:
        message = "gradients are switched off here, and may have been when it was computed"
        return Reason("loss", "None", "no_grad", message, repair="compute it outside of no_grad()")
    inside = [use for uses in getattr(evidence.notes, "uses", ()) for use in uses if use.checkpoint]
    if inside:
        why, message, line, repair = describe_use_in_function(inside)
        return Reason("loss", "None", why, message, line, repair)
    trained = [leaf.name for leaf in evidence.leaves if leaf.tensor.requires_grad]
    if evidence.leaves and not trained:
        message = "no parameter requires a gradient"
        return Reason("loss", "None", "frozen", message, repair="set requires_grad of what is to be trained")
    if evidence.notes is None:
        return Reason("loss", "None", "no graph", "where it was lost was not seen", repair=WITH)
    message = "it is not made of any of these tensors"
    return Reason("loss", "None", "no graph", message, repair="compute it from what the model returns")


def _say_not_optimized(reason: Reason) -> Reason:
    return Reason(
        reason.name, reason.grad, "not optimized", f"{reason.message}, and no optimizer holds it",
        repair="give it to the optimizer: Optimizer(model.parameters())",
    )  # fmt: skip


def _find(group: Sequence[Reason]) -> Finding:
    first = group[0]
    names = list_names([each.name for each in group])
    is_loss = first.name == "loss"
    what = "The loss has no graph" if is_loss else f"{names}: .grad is {first.grad}"
    return Finding(
        detector=DETECTOR,
        severity="critical" if is_loss else "warning",
        site=first.name if not is_loss else "",
        line=first.line,
        message=f"{what}: {first.message}",
        evidence=(Evidence("why", first.why), Evidence("tensors", len(group))),
        repair=first.repair,
    )


def _tensors_of(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors_of(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors_of(value)
