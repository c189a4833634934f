"""Facts about what backward is given: gradients that are exactly zero, and what checkpoints compute again."""

from __future__ import annotations

from dataclasses import dataclass

from retrograd.core.history.fact import Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroGradient(Fact):
    """Where in a backward pass the gradient of parameters became exactly zero. ``name`` is the module.

    ``value`` is how many parameters lie behind.

    Attributes:
        operation: the torch function that made the node; empty where operations were not noted.
        node: class of the node that was given a gradient and gave zeros.
        line: who called it in the forward.
        why: ``step function``, ``dead units``, ``saturated``, ``not picked``, ``zero factor``, ``no derivative``,
            ``hook``, ``zero``; or ``cancels``: two gradients that are not zero add up to zero.
        arguments: of the operation, that are no tensors, as text.
        parameters: the first few of them.
    """

    kind = "zeros"
    operation: str = ""
    node: str = ""
    line: str = ""
    why: str = ""
    arguments: str = ""
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed(Fact):
    """The first operation of a checkpointed part that gave something else when it was computed again.

    ``name`` is the module, ``value`` is ‖second − first‖ / ‖first‖ of what it made, NaN where that cannot be compared:
    another operation was called, or the size is another one.

    Attributes:
        operation, line: what was called in the forward, and where; empty where the second run called more.
        again, again_line: what was called in its place when it was computed again; empty for the same one.
        checkpoint: who called the checkpoint.
        made, made_again: what it made: ``float32[4, 3]``.
        reads: the first operand that differs had been made before that part, so it was written to meanwhile.
    """

    kind = "recomputed"
    operation: str = ""
    line: str = ""
    again: str = ""
    again_line: str = ""
    checkpoint: str = ""
    made: str = ""
    made_again: str = ""
    reads: bool = False
