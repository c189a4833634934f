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

    ``name`` is the module, ``value`` is ‖second − first‖ / ‖first‖ of what it made, over at most 1,024 of its elements;
    NaN where another operation was called.

    Attributes:
        operation, line: what was called in the forward, and where; empty where the second run called more.
        again, again_line: what was called in its place when it was computed again; empty for the very same.
        checkpoint: who called the checkpoint.
        made, made_again: what it made, and its arguments that are no tensors: ``float32[4, 3] 0.5``; the latter is
            empty where it was not called again.
        reads: an operand was made before that part.
        written, written_line: what writes to a tensor that was made before that part, and where; empty for nothing.
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
    written: str = ""
    written_line: str = ""
