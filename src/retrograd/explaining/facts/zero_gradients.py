"""Where in a backward pass gradients become exactly zero: followed at the look after one at which some were.

Whether gradients are zero is read at looks alone. A pass is followed only where a parameter got nothing but zeros
before, and only a few times in a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from retrograd.core.groups import gather
from retrograd.core.history.facts import Operation
from retrograd.core.history.saved_facts import ZeroGradient
from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.dispatch import carry_out_unseen, plain_torch, without_graph
from retrograd.core.hooks.engine import is_transformed, without_functions
from retrograd.core.hooks.node_tap import NodeGradients, NodeHooks
from retrograd.core.hooks.nodes import number_of, variable_of
from retrograd.core.hooks.parts import gradient_of
from retrograd.core.hooks.reach import PassNodes
from retrograd.core.hooks.torch_calls import TorchCall
from retrograd.core.recording.deliveries import Arrays
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.explaining.facts.value_look import ValueLook

if TYPE_CHECKING:
    from retrograd.explaining.gradients.passes import End

_MOST_FOLLOWED = 4
"""Passes that are followed in a run."""

_MOST_NODES = 20_000
"""A larger graph is not followed."""

_FEW = 8
"""Parameters that a fact names."""


class NodeOperations(ValueLook):
    """Finds the operation that a node belongs to, while a pass is to be followed."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self.made: dict[int, Operation] = {}

    @classmethod
    def of(cls, host: FactHost) -> NodeOperations:
        """The one of a recording."""
        return host.share(cls)

    def see(self, number: int, noted: Operation, call: TorchCall) -> None:
        """Remember the number of its node; that of a view that was written to is not asked for."""
        if self.is_wanted and noted.node and noted.node != "CopySlices":
            node = call.made[0].grad_fn
            if node is not None:
                self.made[number_of(node)] = noted


class ZeroGradients(FactSource):
    """Records where the gradients of parameters became zero that had nothing but zeros at a look before."""

    rests = True

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._operations = NodeOperations.of(host)
        self._read: list[tuple[list[str], Tensor]] = []
        self._zero: frozenset[str] = frozenset()
        self._followed: list[Followed] = []
        self._running: tuple[EngineRun, Followed] | None = None
        self._told: set[tuple[str, str, str, tuple[str, ...]]] = set()
        self._left = _MOST_FOLLOWED

    def begin(self) -> None:
        """Recording begins."""
        backward_followers.add(self)

    def end(self) -> None:
        """Recording ends."""
        backward_followers.remove(self)

    def update_begins(self, optimizer: Optimizer) -> None:
        """Ask of each gradient whether all of it is zero, at looks."""
        self._operations.made.clear()
        if not self.host.is_look or not self._left:
            return
        held = [each for group in optimizer.param_groups for each in group["params"]]
        named = [(name, each) for each in held if (name := self.host.name_parameter(each)) is not None]
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, each in named:
            gradient = gradient_of(each)
            if gradient is not None and _is_plain(gradient):
                by_device.setdefault(gradient.device, {})[name] = without_graph(gradient)
        self._read += [(list(found), _ask_all(list(found.values()))) for found in by_device.values()]

    def run_begins(self, run: EngineRun) -> None:
        """A pass begins: follow it, if gradients were zero at the look before."""
        is_plain = not (run.is_nested or run.is_batched or run.creates_graph) and run.accumulates
        if self._zero and self._left and self._running is None and is_plain and self.host.is_look:
            try:
                followed = Followed(run, self._zero, self.host)
                self._running = (run, followed) if followed.begin() else None
            except Exception as error:
                self.host.fault("zero gradients", error)

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """It has ended: what was seen is read when a device may be waited for."""
        if self._running is not None and self._running[0] is run:
            (_, followed), self._running = self._running, None
            followed.end(self._operations.made)
            if error is None:
                self._followed.append(followed)
                self._left -= 1

    def drain(self) -> None:
        """Read what was zero, and where it became so."""
        read, self._read = self._read, []
        if read:
            names = [name for found, _ in read for name in found]
            self.host.deliveries.add([some for _, some in read], partial(self._take_zero, names))
        followed, self._followed = self._followed, []
        for each in followed:
            self.host.deliveries.add(each.asked, partial(self._note, each))

    def _take_zero(self, names: Sequence[str], arrays: Arrays) -> None:
        answers = np.concatenate(arrays).tolist()
        self._zero = frozenset(name for name, each in zip(names, answers, strict=True) if not each)
        self._operations.is_wanted = bool(self._zero) and self._left > 0

    def _note(self, followed: Followed, arrays: Arrays) -> None:
        for fact in followed.tell([bool(each) for each in arrays]):
            key = fact.line, fact.operation, fact.why, fact.parameters
            if key not in self._told:
                self._told.add(key)
                self.host.note_fact(fact)


def _is_plain(gradient: Tensor) -> bool:
    return type(gradient) is Tensor and gradient.layout is torch.strided and gradient.numel() > 0


def _ask_all(gradients: list[Tensor]) -> Tensor:
    return carry_out_unseen(lambda: torch.stack([each.any() for each in gradients]))


class Followed:
    """A pass of which is noted what comes into each node, and what goes out, without waiting for a device.

    Args:
        run: the pass.
        wanted: parameters whose gradients may be zero.
        host: names parameters.
    """

    def __init__(self, run: EngineRun, wanted: frozenset[str], host: FactHost) -> None:
        from retrograd.explaining.gradients.passes import ZeroWatch

        self._moment = host.now
        self._pass = PassNodes(run)
        self._watch = ZeroWatch(self._pass.nodes, self._pass.reach)
        leaves = [(place, variable_of(node)) for place, node in enumerate(self._pass.reach.nodes)]
        named = [(place, host.name_parameter(leaf)) for place, leaf in leaves if leaf is not None]
        self._leaves = {place: name for place, name in named if name is not None and name in wanted}
        self._seen: list[tuple[bool, int, tuple[int | None, ...]]] = []
        self._asked: list[Tensor] = []
        self._made: list[Operation | None] = []
        self._hooks: NodeHooks | None = None

    def begin(self) -> bool:
        """Put hooks on the nodes; not on those of a large graph, or of one that leads to none of the parameters."""
        if not self._leaves or len(self._pass.nodes) > _MOST_NODES:
            self._pass.release()
            return False
        self._hooks = NodeHooks(self._pass.nodes, self, alone=True)
        return True

    def before(self, index: int, incoming: NodeGradients) -> None:
        """A node is about to run."""
        self._seen.append((True, index, self._ask(incoming)))

    def after(self, index: int, outgoing: NodeGradients) -> None:
        """A node has run."""
        self._seen.append((False, index, self._ask(outgoing)))

    def _ask(self, gradients: NodeGradients) -> tuple[int | None, ...]:
        """Ask which of them are not zero: for each the place of the answer; −1 where that cannot be told."""
        return tuple(None if each is None else self._ask_one(each) for each in gradients)

    def _ask_one(self, gradient: Tensor) -> int:
        if type(gradient) is not Tensor or is_transformed(gradient) or gradient.layout is not torch.strided:
            return -1
        with without_functions(), plain_torch():
            self._asked.append((gradient.detach() != 0).any())
        return len(self._asked) - 1

    def end(self, made: dict[int, Operation]) -> None:
        """The pass has ended: hold no node."""
        if self._hooks is not None:
            self._hooks.remove()
        self._made = [made.get(number_of(node)) for node in self._pass.reach.nodes]
        self._pass.release()

    @property
    def asked(self) -> list[Tensor]:
        """What was asked, a truth each."""
        return self._asked

    def tell(self, answers: Sequence[bool]) -> Iterator[ZeroGradient]:
        """Where the gradients became zero: each place with the parameters behind it; ``answers`` to what was asked."""
        for is_before, index, places in self._seen:
            some = tuple(None if each is None else each < 0 or answers[each] for each in places)
            if is_before:
                self._watch.note_in(index, any(some))
            else:
                self._watch.note_out(index, some)
        zero = ((place, name) for place, name in self._leaves.items() if not self._watch.came(place))
        behind = gather((end, name) for place, name in zero for end in self._watch.find_ends(place)[:1])
        for end, names in sorted(behind.items(), key=lambda each: -len(each[1]))[:_FEW]:
            yield self._describe(end, names)

    def _describe(self, end: End, names: list[str]) -> ZeroGradient:
        made = self._made[end.place]
        return ZeroGradient(
            name="" if made is None else made.module,
            value=float(len(names)),
            operation="" if made is None else made.name,
            node=end.kind,
            line="" if made is None else made.line,
            why=end.why,
            arguments="" if made is None else made.arguments,
            parameters=tuple(names[:_FEW]),
            moment=self._moment,
        )
