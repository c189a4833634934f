"""The contract between a recorder and everything that keeps its record.

A recorder hands its sink four kinds of plain data: the names of sites, rows of statistics, events, and tensors. The
history in memory and the run writer are both sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Phase = Literal["train", "forward", "eval", "no_grad", "inference", "failed"]
"""The kind of forward that rows come from.

``train`` was reached by a backward; ``forward`` had grad mode on and was never reached by one; ``eval`` is the
same with the model in eval mode; ``no_grad`` and ``inference`` ran with grad mode off; ``failed`` raised.
"""

PHASES: tuple[Phase, ...] = ("train", "forward", "eval", "no_grad", "inference", "failed")

EventKind = Literal[
    "loss", "update", "skipped", "scale", "fault", "dropped", "overwritten", "rewrite", "trigger", "note", "error",
    "call", "calls", "optimizer", "modes", "dropout", "input", "buffer", "parameter", "units", "operations", "softmax",
    "graph",
    "nonfinite", "overwrite", "shared", "unpacked", "freed", "lost", "kink", "finding",
    "read", "load", "counted", "changed",
    "targets", "spread", "attended", "signed",
    "terms",
    "zeros", "recomputed",
    "probe", "function", "scalar", "gap", "setting",
]  # fmt: skip
"""From ``call`` on: facts, see :mod:`retrograd.core.history.facts`, and findings reported during the run."""


UPDATES: tuple[EventKind, ...] = ("update", "skipped")
"""What ends a step."""

ENDS_NONE = "it ends no step"
"""How the text ends of an update that is within a step which another optimizer's ends."""

NO_GRADIENT = "no gradient came: it did not require grad, or no backward pass reached it"
"""Why the gradient of a site is not in a recording, where it is for no other reason."""

NEVER_CALLED = "the module was never called while a step was recorded"
"""Why no tensor of a module is in a recording, where none of its weights got a gradient either."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment in training.

    Attributes:
        step: optimizer updates attempted when the forward began (from 0).
        micro: micro-batch within the step (from 0).
        backward: which backward pass reached it within the micro-batch (from 0); −1 for values.
        phase: see :data:`Phase`.
    """

    step: int
    micro: int = 0
    backward: int = -1
    phase: Phase = "train"


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of statistics that were drained together.

    Attributes:
        moment: step, micro and phase of all rows; ``moment.backward`` is the pass of the gradient rows, while
            value rows among them belong to no pass.
        rows: the bytes of an array of :data:`retrograd.core.statistics.row.ROW`.
        bins: the bytes of an int64 array: the histogram stretches of those rows, one after the other.
        scale: what the gradients were multiplied by (loss scaling); the sink divides it out of gradient rows.
        custom: values of users' statistics: name → (row numbers, values), of equal length.
    """

    moment: Moment
    rows: bytes
    bins: bytes = b""
    scale: float = 1.0
    custom: dict[str, tuple[Sequence[int], Sequence[float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened once: a loss, an optimizer's update, a fault.

    Attributes:
        moment: when.
        kind: ``loss`` (value: the scalar that backward started from, unscaled), ``update`` (name: the
            optimizer, value: how many updates it has made, text: :data:`ENDS_NONE` or nothing), ``skipped`` (an
            update that loss scaling skipped), ``scale`` (value: the loss scale), ``fault`` and ``dropped`` (name: the
            site, text: why), ``overwritten``
            (name: the site whose kept tensor was changed in place), ``rewrite`` (name: the site, text: the rule that
            has changed it, value: ‖after − before‖ / ‖before‖), ``trigger``, ``note``, ``error`` (the exception that
            ended the run; name: the node that raised it, else the module; text: its kind and message).
        name: its subject.
        value: its number; NaN where there is none.
        text: its text.
        time: seconds since the epoch.
    """

    moment: Moment
    kind: EventKind
    name: str = ""
    value: float = float("nan")
    text: str = ""
    time: float = 0.0


@dataclass(slots=True)
class KeptTensor:
    """A tensor that was asked for whole or in part.

    Attributes:
        moment: when; ``moment.backward`` is −1 for values.
        site: its printed site.
        tensor: the data, on any device; detached.
        version: the tensor's version counter when it was kept. If it has moved since, the data are no longer
            what training used: the sink must then not store them as if they were, but report them overwritten.
        scale: what a gradient was multiplied by; the sink divides it out.
        overwritten: set once the version was seen to have moved.
        ready: CUDA events; once they have come, the device has computed the data.
    """

    moment: Moment
    site: str
    tensor: torch.Tensor
    version: int
    scale: float = 1.0
    overwritten: bool = False
    ready: Sequence[Any] = ()


class Sink(Protocol):
    """Keeps what a recorder sees. Methods are called from the training thread and must return at once."""

    def describe(self, **facts: Any) -> None:
        """Add facts to the manifest (JSON values): ``model``, ``selection``, ``schedule``, ``not_recorded`` …"""

    def add_sites(self, names: Sequence[str]) -> None:
        """Name the next rows: the first name ever given is row 0."""

    def add_rows(self, batch: RowBatch) -> None:
        """Keep rows of statistics."""

    def add_event(self, event: Event) -> None:
        """Keep an event."""

    def add_tensor(self, kept: KeptTensor) -> None:
        """Keep a tensor."""

    def flush(self) -> None:
        """Return once everything added can be read back."""

    def close(self, status: str = "finished") -> None:
        """Flush and end; ``status`` is ``finished`` or ``failed``. Calling it twice is harmless."""
