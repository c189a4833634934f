import math

import pytest

from retrograd.findings.record import Record
from retrograd.history.facts import Operations
from tests.findings.by_hand import ask
from tests.findings.programs import make_chain, make_program


def make_ending(*between: str, loss: str = "cross_entropy", arguments: str = "dim=1") -> Operations:
    """A linear layer, what stands behind it, and a loss."""
    listed: list[tuple[object, ...]] = [("linear", (-1, -1, -1), ((8, 6), (5, 6), (5,)), (8, 5), "", "2")]
    for number, name in enumerate(between):
        listed.append((name, (number,), ((8, 5),), (8, 5), arguments, "3"))
    listed.append((loss, (len(between), -1), ((8, 5), "int64[8]"), (), "reduction=mean"))
    return make_chain(*listed, outputs=[len(between)])


def record(*between: str, loss: str = "cross_entropy", arguments: str = "dim=1") -> Record:
    return make_program([make_ending(*between, loss=loss, arguments=arguments)])


def test_softmax_twice() -> None:
    [found] = ask("softmax-before-cross-entropy", record("softmax"))
    assert (found.severity, found.site, found.line) == ("critical", "3", "train.py:31")
    least = -math.log(math.e / (math.e + 4))  # all of the probability on the right one of 5
    assert f"cannot fall below {least:.3g}" in found.message


@pytest.mark.parametrize(
    ("detector", "between", "loss", "severity"),
    [
        ("softmax-before-cross-entropy", ("softmax", "view"), "cross_entropy", "critical"),
        ("softmax-before-cross-entropy", ("sigmoid",), "cross_entropy", "warning"),
        ("activation-on-logits", ("relu",), "cross_entropy", "warning"),
        ("activation-on-logits", ("tanh", "view"), "cross_entropy", "warning"),
        ("softmax-before-cross-entropy", ("log_softmax",), "cross_entropy", "note"),
        ("sigmoid-before-bce-with-logits", ("sigmoid", "sigmoid"), "binary_cross_entropy", "critical"),
        ("nll-on-probabilities", ("softmax",), "kl_div", "critical"),
        ("sigmoid-before-bce-with-logits", ("sigmoid", "squeeze"), "binary_cross_entropy_with_logits", "critical"),
        ("relu-on-output", ("relu",), "binary_cross_entropy_with_logits", "warning"),
        ("nll-on-probabilities", ("softmax",), "nll_loss", "critical"),
        ("nll-on-probabilities", (), "nll_loss", "critical"),
        ("bce-on-logits", (), "binary_cross_entropy", "critical"),
        ("bce-on-logits", ("clamp",), "binary_cross_entropy", "critical"),
        ("nll-on-probabilities", ("matmul", "add"), "nll_loss", "critical"),
        ("bce-on-logits", ("tanh",), "binary_cross_entropy", "critical"),
    ],
)
def test_what_a_loss_must_not_be_given(detector: str, between: tuple[str, ...], loss: str, severity: str) -> None:
    assert [each.severity for each in ask(detector, record(*between, loss=loss))] == [severity]


def test_where_something_is_missing_it_is_the_line_of_the_loss() -> None:
    assert [each.line for each in ask("nll-on-probabilities", record(loss="nll_loss"))] == ["train.py:31"]
    assert [each.line for each in ask("nll-on-probabilities", record("softmax", loss="nll_loss"))] == ["train.py:31"]
    added = record("matmul", "add", loss="nll_loss")
    assert [each.line for each in ask("nll-on-probabilities", added)] == ["train.py:33"]


@pytest.mark.parametrize(
    "detector",
    [
        "softmax-before-cross-entropy",
        "sigmoid-before-bce-with-logits",
        "nll-on-probabilities",
        "bce-on-logits",
        "relu-on-output",
    ],
)
@pytest.mark.parametrize(
    ("between", "loss"),
    [
        ((), "cross_entropy"),
        (("softmax", "linear"), "cross_entropy"),
        (("softmax", "log"), "nll_loss"),
        (("log_softmax",), "nll_loss"),
        (("log_softmax",), "kl_div"),
        (("sigmoid",), "binary_cross_entropy"),
        (("sigmoid", "clamp"), "binary_cross_entropy"),
        (("sigmoid", "mul"), "binary_cross_entropy_with_logits"),
        ((), "binary_cross_entropy_with_logits"),
        (("softmax",), "mse_loss"),
    ],
)
def test_what_losses_are_made_for(detector: str, between: tuple[str, ...], loss: str) -> None:
    assert not ask(detector, record(*between, loss=loss))


def test_dropout_of_outputs() -> None:
    [found] = ask("dropout-misplaced", record("dropout", arguments="p=0.3, training=True"))
    assert (found.severity, found.line) == ("warning", "train.py:31")
    assert "(p = 0.3) is the last thing before cross_entropy, so 30%" in found.message


def test_dropout_of_nearly_everything() -> None:
    [found] = ask("dropout-misplaced", record("dropout", "linear", arguments="p=0.95, training=True"))
    assert "drops 95%" in found.message


def test_dropout_where_it_belongs() -> None:
    assert not ask("dropout-misplaced", record("dropout", "linear", arguments="p=0.5, training=True"))
    assert not ask("dropout-misplaced", record("dropout", arguments="p=0.0, training=True"))
    assert not ask("dropout-misplaced", record("dropout", arguments="p=0.5, training=False"))
