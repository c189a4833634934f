"""Activations between the model's output and the loss that the loss applies itself, or needs."""

from __future__ import annotations

import math
from abc import abstractmethod

from retrograd.core.runs.findings import Evidence, Finding, Severity
from retrograd.explaining.findings.chain import AFFINE, LOSSES, SOFTMAXES, VIEWS, Chain, argument_of
from retrograd.explaining.findings.detector import OperationDetector, Words
from retrograd.explaining.findings.record import Record

THROUGH = VIEWS | {"dropout"}
"""Functions that may follow an activation before the loss."""

SQUASHED = (
    "loss-flat", "learning-rate-too-low", "vanishing", "saturated", "loss-noisy", "dead-units", "relu-on-output",
    "diverged", "exploding", "learning-rate-too-high", "loss-wrong-sign", "bad-init", "not-updated", "nan-forward",
)  # fmt: skip
"""Symptoms of a loss that is applied to the wrong thing."""

_LAYERS = {"linear": "a linear layer", "conv2d": "a convolution", "conv1d": "a convolution"}


class BeforeLoss(OperationDetector):
    """An activation that stands before a loss that it does not suit."""

    def judge(self, record: Record, chain: Chain, number: int) -> Finding | None:
        """See :class:`OperationDetector`."""
        maker = chain.maker(number, 0, THROUGH) if chain.name(number) in LOSSES else -1
        found = self.judge_maker(chain, number, maker) if maker >= 0 else None
        return None if found is None else self._describe(record, chain, number, maker, *found)

    @abstractmethod
    def judge_maker(self, chain: Chain, loss: int, maker: int) -> tuple[Severity, str] | None:
        """Judge the operation that made what a loss takes.

        Returns:
            How bad it is, and the message; None where nothing is wrong.
        """

    def _describe(
        self, record: Record, chain: Chain, loss: int, maker: int, severity: Severity, message: str
    ) -> Finding:
        line = record.place_of(chain, maker)[1]
        is_layer = chain.name(maker) in AFFINE | {"add"}  # with which nothing is wrong: something is missing behind it
        return self.find_at(
            record,
            chain,
            maker,
            severity,
            message,
            line=chain.listed[loss].line if is_layer or not line else line,
            evidence=[
                Evidence("what makes the loss's input", chain.name(maker)),
                Evidence("the loss", chain.name(loss)),
                Evidence("line of the loss", chain.listed[loss].line),
            ],
            precondition=["nothing but views stands between the two, as seen while they ran"],
            refute="the loss is an addition of its own, beside one that is right",
        )


class SoftmaxBeforeCrossEntropy(BeforeLoss):
    """Softmax twice."""

    slug = "softmax-before-cross-entropy"
    words = Words(
        says="cross_entropy is given probabilities, and takes the softmax of them again.",
        example="cross_entropy is given the result of softmax and applies softmax again, so its gradient is squashed "
        "and the loss cannot fall below 0.313.",
        threshold="softmax or sigmoid made the first argument of cross_entropy, with nothing but views or dropout in "
        "between",
        source="torch's documentation of CrossEntropyLoss: it expects unnormalised logits",
        guard="softmax inside of the model (attention, gates) is not directly before the loss; log_softmax twice "
        "changes nothing and is a note",
        repair="give cross_entropy the logits; apply softmax only where probabilities are shown.",
    )
    explains = SQUASHED

    def judge_maker(self, chain: Chain, loss: int, maker: int) -> tuple[Severity, str] | None:
        """See :class:`BeforeLoss`."""
        if chain.name(loss) != "cross_entropy":
            return None
        name = chain.name(maker)
        if name == "softmax":
            least = _least_loss(chain, loss)
            floor = f" and the loss cannot fall below {least:.3g}" if least else ""
            return "critical", (
                "cross_entropy is given the result of softmax and applies softmax again, so its gradient is "
                f"squashed{floor}"
            )
        if name == "sigmoid":
            return "warning", "cross_entropy is given the result of sigmoid, between 0 and 1, where it expects logits"
        if name == "log_softmax":
            return (
                "note",
                "cross_entropy is given the result of log_softmax and applies it again, which changes nothing",
            )
        return None


class ActivationOnLogits(BeforeLoss):
    """Logits that an activation keeps within bounds."""

    slug = "activation-on-logits"
    words = Words(
        says="cross_entropy is given logits that went through an activation, which keeps them within bounds.",
        example="cross_entropy is given the result of relu, so no logit is below 0 and those at 0 learn nothing.",
        threshold="relu, relu6 or tanh made the first argument of cross_entropy, with nothing but views or dropout in "
        "between",
        source="torch's documentation of CrossEntropyLoss: it expects unnormalised logits",
        guard="an activation that a scale or a layer follows is not directly before the loss",
        repair="leave out the activation after the last layer: cross_entropy takes any number as a logit.",
    )
    explains = SQUASHED

    def judge_maker(self, chain: Chain, loss: int, maker: int) -> tuple[Severity, str] | None:
        """See :class:`BeforeLoss`."""
        name = chain.name(maker)
        if chain.name(loss) != "cross_entropy":
            return None
        if name in ("relu", "relu6"):
            message = "cross_entropy is given the result of relu, so no logit is below 0 and those at 0 learn nothing"
            return "warning", message
        if name == "tanh":
            return "warning", "cross_entropy is given the result of tanh, so all logits lie within −1 … 1"
        return None


def _least_loss(chain: Chain, loss: int) -> float:
    """The cross entropy of a probability of 1 for the right one of n classes."""
    shape = chain.taken(loss) or ()
    classes = shape[1] if len(shape) > 1 else 0
    return math.log(1 + (classes - 1) / math.e) if classes > 1 else 0.0


class SigmoidBeforeLogitsLoss(BeforeLoss):
    """Sigmoid twice."""

    slug = "sigmoid-before-bce-with-logits"
    words = Words(
        says="binary_cross_entropy_with_logits is given probabilities, and takes the sigmoid of them again.",
        example="binary_cross_entropy_with_logits is given the result of sigmoid and applies sigmoid again, so no "
        "probability leaves 0.5 … 0.73.",
        threshold="sigmoid or softmax made its first argument, with nothing but views or dropout in between",
        source="torch's documentation of BCEWithLogitsLoss: it combines a sigmoid and the loss",
        guard="gates inside of the model are not directly before the loss",
        repair="give it the logits, or use binary_cross_entropy.",
    )
    explains = SQUASHED

    def judge_maker(self, chain: Chain, loss: int, maker: int) -> tuple[Severity, str] | None:
        """See :class:`BeforeLoss`."""
        name = chain.name(maker)
        if chain.name(loss) == "binary_cross_entropy" and name == "sigmoid":
            return _judge_twice(chain, maker)
        if chain.name(loss) != "binary_cross_entropy_with_logits":
            return None
        if name in ("sigmoid", "softmax"):
            return "critical", (
                f"binary_cross_entropy_with_logits is given the result of {name} and applies sigmoid again, so no "
                "probability leaves 0.5 … 0.73"
            )
        return None


def _judge_twice(chain: Chain, maker: int) -> tuple[Severity, str] | None:
    """Judge a sigmoid that is given probabilities itself."""
    before = chain.name(chain.maker(maker, 0, THROUGH))
    if before not in ("sigmoid", "softmax"):
        return None
    return "critical", f"sigmoid is given the result of {before}, so no probability leaves 0.5 … 0.73"


class NllOnProbabilities(BeforeLoss):
    """A likelihood without its logarithm."""

    slug = "nll-on-probabilities"
    words = Words(
        says="nll_loss is given probabilities or logits, where it expects logarithms of probabilities.",
        example="nll_loss is given the result of softmax, where it expects log-probabilities: its value is not a "
        "likelihood.",
        threshold="softmax, sigmoid, relu or an affine layer made its first argument, with nothing but views or "
        "dropout in between",
        source="torch's documentation of NLLLoss: the input is expected to contain log-probabilities",
        guard="everything else (log, logsigmoid, a mixture's logsumexp) is left alone",
        repair="apply log_softmax before nll_loss, or give the logits to cross_entropy.",
    )
    explains = SQUASHED

    def judge_maker(self, chain: Chain, loss: int, maker: int) -> tuple[Severity, str] | None:
        """See :class:`BeforeLoss`."""
        name, function = chain.name(maker), chain.name(loss)
        if function == "kl_div" and name == "softmax":
            return "critical", "kl_div is given the result of softmax first, where it expects log-probabilities"
        is_product = name == "add" and chain.name(chain.maker(maker, 0, frozenset())) in ("matmul", "mm", "sparse_mm")
        if function != "nll_loss" or not (is_product or name in ("softmax", "sigmoid", "relu", *_LAYERS)):
            return None
        is_share = name in ("softmax", "sigmoid")
        end = "its value is not a likelihood" if is_share else "it falls without bound as they grow"
        return "critical", (
            f"nll_loss is given the result of {'a linear layer' if is_product else _LAYERS.get(name, name)}, where it "
            f"expects log-probabilities: {end}"
        )


class BceOnLogits(BeforeLoss):
    """A binary cross entropy of what is not a probability."""

    slug = "bce-on-logits"
    words = Words(
        says="binary_cross_entropy is given logits, where it expects probabilities.",
        example="binary_cross_entropy is given the result of a linear layer, where it expects numbers from 0 to 1.",
        threshold="an affine layer, tanh, relu or log_softmax made its first argument, with nothing but views in "
        "between",
        source="torch's documentation of BCELoss; it raises for numbers outside of 0 … 1",
        guard="any other operation in between is left alone",
        repair="use binary_cross_entropy_with_logits, or apply sigmoid first.",
    )
    explains = (*SQUASHED, "failed")

    def judge_maker(self, chain: Chain, loss: int, maker: int) -> tuple[Severity, str] | None:
        """See :class:`BeforeLoss`."""
        if chain.name(maker) == "clamp":  # which hides that they are none
            maker = chain.maker(maker, 0, THROUGH)
        name = chain.name(maker)
        if chain.name(loss) != "binary_cross_entropy" or name not in (*_LAYERS, "tanh", "relu", "log_softmax"):
            return None
        what = _LAYERS.get(name, name)
        return "critical", f"binary_cross_entropy is given the result of {what}, where it expects numbers from 0 to 1"


class DropoutMisplaced(OperationDetector):
    """Dropout where it falsifies the output, or leaves next to nothing."""

    slug = "dropout-misplaced"
    words = Words(
        says="Dropout sets outputs to zero right before the loss, or drops nearly everything.",
        example="Dropout (p = 0.5) is the last thing before cross_entropy, so half of the logits are set to zero at "
        "each step.",
        threshold="p > 0 and nothing but views, softmax or sigmoid between dropout and a loss, or p ≥ 0.9 anywhere",
        source="0.9 is our own choice; dropout of outputs is named by UMLAUT (CHI 2021)",
        guard="dropout before the last layer, and of p = 0, is left alone; so is what the loss takes as its target",
        repair="move dropout before the last layer; where it drops nearly everything, lower p.",
    )
    explains = ("loss-noisy", "loss-flat", "learning-rate-too-low", "dead-units", "exploding", "learning-rate-too-high")

    def judge(self, record: Record, chain: Chain, number: int) -> Finding | None:
        """See :class:`OperationDetector`."""
        p = drop_rate(chain, number)
        if not p:
            return None
        loss = next((each for each in chain.losses() if _last_dropout(chain, each) == number), None)
        if loss is None:
            loss = _loss_by_hand(chain, number)
        if loss is None and p < 0.9:
            return None
        if loss is not None:
            message = (
                f"Dropout (p = {p:g}) is the last thing before {chain.name(loss)}, so {p:.0%} of the model's outputs "
                "are set to zero at each step"
            )
        else:
            message = f"Dropout drops {p:.0%} of what it is given, and leaves next to nothing to learn from"
        return self.find_at(
            record,
            chain,
            number,
            "warning",
            message,
            evidence=[Evidence("p", p, "> 0 before the loss, or ≥ 0.9 anywhere")],
            precondition=["it runs in training mode, and the loss depends on it"],
            refute="outputs are dropped on purpose, as in a consistency loss",
            repair="lower p." if loss is None else "move dropout before the last layer.",
        )


def drop_rate(chain: Chain, number: int) -> float:
    """The share that an operation drops; 0 where it is not dropout, or off."""
    name = chain.name(number)
    if not name.endswith("dropout") and name not in ("dropout1d", "dropout2d", "dropout3d"):
        return 0.0
    operation = chain.listed[number]
    if argument_of(operation, "training") == "False":
        return 0.0
    text = argument_of(operation, "p") or operation.arguments.split(",")[0]
    try:
        return float(text)
    except ValueError:
        return 0.0


def _last_dropout(chain: Chain, loss: int) -> int:
    return chain.maker(loss, 0, VIEWS | SOFTMAXES | {"sigmoid"})


def _loss_by_hand(chain: Chain, number: int) -> int | None:
    """A difference to a target whose one side is what was dropped, and that is then squared or made absolute."""
    for user in chain.users(number):
        for each in [user, *chain.users(user)]:
            if chain.name(each) == "sub" and number == chain.maker(each, 0) and _is_distance(chain, each):
                return each
    return None


def _is_distance(chain: Chain, number: int) -> bool:
    return any(chain.name(each) in ("pow", "square", "abs") for each in chain.users(number))
