"""The operations between a model's inputs and the loss, as a graph that detectors ask."""

from __future__ import annotations

import math
import re
from functools import cached_property

from retrograd.core.groups import gather, reach
from retrograd.core.history.facts import Input, Operation, Operations, Parameter

MADE_BEFORE = -1

CARRIED = -2
"""Made before, and it has a graph."""

VIEWS = frozenset(
    {
        "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t", "T", "mT",
        "swapaxes", "movedim", "contiguous", "clone", "to", "type_as", "float", "double", "half", "bfloat16",
        "__getitem__", "getitem", "select", "narrow", "identity", "expand", "expand_as", "view_as", "reshape_as",
        "chunk", "split", "unbind", "H", "requires_grad_", "cpu", "cuda"
    }
)  # fmt: skip
"""Functions that hand their operand on, in another shape or place."""

RESHAPES = frozenset({"view", "reshape", "unflatten", "flatten", "view_as", "reshape_as"})
"""Functions that keep elements in their order."""

AFFINE = frozenset({"linear", "conv1d", "conv2d", "conv3d", "addmm", "baddbmm"})
"""Layers with a weight that are affine in their input."""

SOFTMAXES = frozenset({"softmax", "log_softmax"})

LOSSES = frozenset(
    {
        "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
        "kl_div", "binary_cross_entropy_with_logits", "poisson_nll_loss", "gaussian_nll_loss", "hinge_embedding_loss",
        "ctc_loss", "margin_ranking_loss", "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
        "triplet_margin_loss", "cosine_embedding_loss", "multilabel_soft_margin_loss"
    }
)  # fmt: skip
"""Functions of torch that are losses: not negative, and the smaller the better."""

_TENSOR = re.compile(r"(?P<dtype>[a-z0-9_]+)\[(?P<shape>[0-9, ]*)\]")


def name_of(operation: Operation) -> str:
    """``add`` for ``add_``, ``__add__`` and ``__radd__``, ``getitem`` for ``__getitem__``."""
    name = operation.name.rsplit(".", 1)[-1].strip("_")
    return {"radd": "add", "iadd": "add", "isub": "sub", "rmul": "mul", "imul": "mul", "truediv": "div",
            "itruediv": "div", "rtruediv": "rdiv", "subtract": "sub", "multiply": "mul", "divide": "div",
            "true_divide": "div", "negative": "neg"}.get(name, name)  # fmt: skip


def shape_of(tensor: str) -> tuple[int, ...] | None:
    """``(4, 3)`` of ``float32[4, 3]``; None for what is not a tensor."""
    found = _TENSOR.fullmatch(tensor)
    return tuple(int(each) for each in found["shape"].split(",") if each.strip()) if found else None


def tensor_of(look: Input | Parameter) -> str:
    """``float32[4, 3]`` of what was looked at, as operations write their tensors."""
    return f"{look.dtype}{list(look.shape)}"


def is_float(tensor: str) -> bool:
    """Check whether a tensor is of a floating type."""
    return tensor.startswith(("float", "bfloat", "double", "half"))


def argument_of(operation: Operation, name: str) -> str | None:
    """The text of an argument that was passed by name."""
    found = re.search(rf"(?:^|[,(\s]){name}=((?:'[^']*')|(?:\([^)]*\))|(?:\[[^\]]*\])|[^,)\s]+)", operation.arguments)
    return found[1].strip("'\"") if found else None


class Chain:
    """The operations of one step.

    Args:
        fact: what was noted.

    Attributes:
        listed: the operations, in order.
        step: of which step.
    """

    def __init__(self, fact: Operations) -> None:
        self.fact = fact
        self.listed = fact.operations()
        self.step = fact.step
        self.loss = fact.loss if 0 <= fact.loss < len(self.listed) else MADE_BEFORE
        self.outputs = tuple(each for each in fact.outputs if 0 <= each < len(self.listed))

    def __len__(self) -> int:
        return len(self.listed)

    def operands(self, number: int) -> tuple[int, ...]:
        """The operations that made the operands of one."""
        return tuple(each for each in self.listed[number].operands if 0 <= each < len(self.listed))

    @cached_property
    def of_loss(self) -> frozenset[int]:
        """The operations that the loss is made of, itself among them; all where the loss is not known."""
        return self.ancestors(self.loss) if self.loss >= 0 else frozenset(range(len(self.listed)))

    @cached_property
    def of_outputs(self) -> frozenset[int]:
        """The operations that the model's outputs are made of, those among them."""
        return frozenset[int]().union(*(self.ancestors(each) for each in self.outputs))

    @cached_property
    def behind_outputs(self) -> frozenset[int]:
        """The operations that are made of the model's outputs, those not among them."""
        return self.descendants(self.outputs)

    def ancestors(self, number: int) -> frozenset[int]:
        """The operations that one is made of, itself among them."""
        return frozenset(reach((number,), self.operands))

    def grown_from(self, number: int) -> frozenset[int]:
        """The operations that a backward pass from one comes to, itself among them."""
        return frozenset(reach((number,), lambda one: (each for each in self.operands(one) if self.listed[each].node)))

    def descendants(self, numbers: tuple[int, ...]) -> frozenset[int]:
        """The operations that are made of some, the given ones not among them."""
        begun, found = set(numbers), set()
        for number in range(len(self.listed)):
            if any(each in begun or each in found for each in self.operands(number)):
                found.add(number)
        return frozenset(found)

    def maker(self, number: int, operand: int = 0, through: frozenset[str] = VIEWS) -> int:
        """The operation that made an operand, those passed over that only hand on what they get; −1 for none."""
        operands = self.listed[number].operands
        found = operands[operand] if operand < len(operands) else MADE_BEFORE
        while 0 <= found < len(self.listed) and name_of(self.listed[found]) in through and self.listed[found].operands:
            found = self.listed[found].operands[0]
        return found if 0 <= found < len(self.listed) else MADE_BEFORE

    @cached_property
    def _users(self) -> dict[int, list[int]]:
        return gather((each, number) for number in range(len(self)) for each in dict.fromkeys(self.operands(number)))

    @cached_property
    def carried(self) -> list[tuple[Operation, str]]:
        """Operations that take a tensor with a graph that was made before all of them, each with that tensor."""
        return [
            (each, taken)
            for each in self.listed
            for taken, maker in zip(each.takes, each.operands, strict=False)
            if maker == CARRIED
        ]

    def users(self, number: int) -> list[int]:
        """The operations that take what one made."""
        return self._users.get(number, [])

    def name(self, number: int) -> str:
        """The name of an operation; empty for −1."""
        return name_of(self.listed[number]) if number >= 0 else ""

    def made(self, number: int) -> tuple[int, ...]:
        """The shape of what an operation made; empty where it is not known."""
        makes = self.listed[number].makes if number >= 0 else ()
        return (shape_of(makes[0]) or ()) if makes else ()

    def taken(self, number: int, operand: int = 0) -> tuple[int, ...] | None:
        """The shape of an operand."""
        takes = self.listed[number].takes
        return shape_of(takes[operand]) if operand < len(takes) else None

    def losses(self) -> list[int]:
        """The losses of torch that the loss is made of, in order."""
        return [each for each in sorted(self.of_loss) if self.name(each) in LOSSES]


_AS_NUMBERS = VIEWS | {"rsub", "long", "int"}


def is_mask(chain: Chain, number: int, place: int) -> bool:
    """Check whether an operand says yes or no of each element, as a bool or as 1 and 0."""
    given, maker = chain.listed[number].takes[place], chain.listed[number].operands[place]
    while not given.startswith("bool"):
        if chain.name(maker) in ("tril", "triu"):
            return chain.name(chain.maker(maker)).startswith("ones")
        if maker < 0 or chain.name(maker) not in _AS_NUMBERS or not chain.listed[maker].takes:
            return False
        given, maker = chain.listed[maker].takes[0], chain.listed[maker].operands[0]
    return True


def factor_of(chain: Chain, number: int) -> float:
    """The plain number that an operation multiplies or divides a tensor by; 0 where it is none."""
    try:
        return float(chain.listed[number].arguments.strip())
    except ValueError:
        return 0.0


def count(shape: tuple[int, ...]) -> int:
    """Elements of a shape."""
    return math.prod(shape)
