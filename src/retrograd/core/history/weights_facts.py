"""Facts about weights that something else than an update has written: states loaded, files read, values changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from retrograd.core.history.fact import Fact, JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRead(Fact):
    """A file that ``torch.load`` has read. ``name`` is that of the file, empty for an open one; ``value`` its tensors.

    Attributes:
        line: who called it.
        number: of all files that were read, from 1.
        parts: what it holds, each with its ``path`` (``optimizer``), empty where it is the whole file, and ``kind``:
            ``weights`` with the number of ``tensors``; ``optimizer`` with ``groups`` (settings, and ``parameters``: how
            many), ``state`` (how many of these have one), ``keys`` of such a state and ``step`` where it counts;
            ``scheduler`` with ``step`` (its last epoch) and ``lr``.
        counters: whole numbers in it by their path, as in ``epoch``.
    """

    kind = "read"
    line: str = ""
    number: int = 0
    parts: tuple[JsonObject, ...] = ()
    counters: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Fact):
    """A state that ``load_state_dict`` has taken; of one line and module the first 20, then those at powers of two.

    ``name`` is the path of a module (``self`` for a model without a name; its class where it is part of no recorded
    model), the optimizer as in ``SGD_2``, or the class of a scheduler. ``value``: how many keys were copied; of an
    optimizer, how many parameters have a state.

    Attributes:
        of: ``module``, ``optimizer`` or ``scheduler``.
        type: its class.
        line: who called it.
        times: how often this line has loaded it.
        strict: whether missing and unexpected keys raise.
        missing, unexpected: how many keys are; ``missing_keys`` and ``unexpected_keys`` the first three.
        prefix: what all unexpected keys have in front of missing ones, as in ``module.``; with a ``+`` in front where
            the missing ones have it.
        matching: keys that would be copied without, or with, that prefix, and have the right shape.
        same: how many of the copied tensors are the very memory that they are copied to.
        changed: a value is not what it was before; null where that was not read.
        stays: at the next update the weights are still those that were loaded, and not those of before; null where
            that was not read, or both are the same.
        evaluated: a forward without grad came between it and the next with grad.
        taken, taken_line: step and line of the ``state_dict()`` whose result was loaded; −1 where that is not known.
        written: how many operations have written into its tensors since they were made; −1 where that is not known.
        file: ``number`` of the file that it was read from; 0 where that is not known.
        lr, count: of an optimizer its learning rates and the step that it counts; of a scheduler its last epoch.
    """

    kind = "load"
    of: str = "module"
    type: str = ""
    line: str = ""
    times: int = 1
    strict: bool = True
    missing: int = 0
    unexpected: int = 0
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    prefix: str = ""
    matching: int = 0
    same: int = 0
    changed: bool | None = None
    stays: bool | None = None
    evaluated: bool = False
    taken: int = -1
    taken_line: str = ""
    written: int = -1
    file: int = 0
    lr: tuple[float, ...] = ()
    count: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedOn(Fact):
    """A variable of the program that counts on from a number that a file holds. ``name`` is that of the variable.

    ``value``: what it was when training began; the moment is that of a later step, at which it was larger.

    Attributes:
        counter: path of the number in the file: ``epoch``, ``scheduler.last_epoch``.
        file: number of the file.
        line: where the loop is.
    """

    kind = "counted"
    counter: str = ""
    file: int = 0
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed(Fact):
    """Tensors that were not what the last update has left, when the next one began; both steps were recorded.

    ``name`` is the site of the first of them, ``value`` how many there were. Of one optimizer the first 20 times are
    noted, then those at powers of two; what may be a single bit always, up to 20.

    Attributes:
        of: ``parameter``, ``buffer``, or the name of a state of an optimizer: ``exp_avg``.
        optimizer: whose update it was; empty for a buffer.
        sites: the first three.
        since: the step of that update.
        times: how often this has been so.
        compared: how many tensors were.
        dtype: of the first.
        bit: the sums of its eight-byte words before and after differ by exactly two to the power of this; −1 where
            they do not, or several tensors have changed.
    """

    kind = "changed"
    of: str = "parameter"
    optimizer: str = ""
    sites: tuple[str, ...] = ()
    since: int = -1
    times: int = 1
    compared: int = 0
    dtype: str = ""
    bit: int = -1
