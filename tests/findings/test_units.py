import numpy as np
import pytest

from retrograd.findings.record import CannotTell, Record
from retrograd.history.facts import Softmax, Units
from retrograd.history.sink import Moment
from tests.findings.by_hand import Elements, ask, check, make_record, spread

FLAT = [0.7] * 20
FALLING = [0.7 * 0.9**step for step in range(20)]
LOOKS = (0, 1, 2, 4, 8, 16)


def make_relu(always: list[int], losses: list[float] = FLAT, of: int = 64, kind: str = "ReLU") -> Record:
    """A ReLU of which so many units have been zero since step 0, at each look."""
    facts = [
        Units(name="1:output", value=of, samples=32, zero=n, always=n, since=0, moment=Moment(s))
        for s, n in zip(LOOKS, always, strict=True)
    ]
    sites = {"0:output": spread(4.0, 64), "1:output": np.maximum(spread(4.0, 64), 0), "2:output": spread(4.0)}
    modules = {"self": "Sequential", "0": "Linear", "1": kind, "2": "Linear"}
    return make_record(range(20), lambda step: sites, losses, facts=facts, modules=modules)


def test_most_units_of_a_relu() -> None:
    [found] = ask("dead-units", make_relu([60] * 6))
    assert (found.severity, found.site, found.step, found.line) == ("warning", "1", 0, "train.py:2")
    assert found.message.startswith("94% of the units of 1")


@pytest.mark.parametrize(
    ("always", "losses", "kind"),
    [
        ([20] * 6, FLAT, "ReLU"),
        ([50] * 6, FALLING, "ReLU"),  # resting units of a net that learns
        ([60] * 6, FLAT, "Dropout"),
        ([60, 50, 40, 30, 20, 10], FLAT, "ReLU"),  # they wake up
    ],
)
def test_layers_that_live(always: list[int], losses: list[float], kind: str) -> None:
    assert not ask("dead-units", make_relu(always, losses, kind=kind))


@pytest.mark.parametrize(("alive", "since"), [((), 0), ((1,), 2)])
def test_units_that_began_dead_did_so_before_the_first_look(alive: tuple[int, ...], since: int) -> None:
    """A look at step 2 finds all dead; the outputs of the steps before tell since when."""
    facts = [
        Units(name="1:output", value=64, samples=32, zero=64, always=64, since=2, moment=Moment(s)) for s in (2, 4, 8)
    ]

    def sites(step: int) -> Elements:
        return {"1:output": spread(1.0 if step in alive else 0.0), "0:weight.grad": spread(1.0)}

    record = make_record(
        range(20), sites, FLAT, modules={"self": "Sequential", "0": "Linear", "1": "ReLU"}, facts=facts
    )
    [found] = ask("dead-units", record)
    assert found.step == since


def test_a_few_samples_prove_nothing() -> None:
    facts = [Units(name="1:output", value=64, samples=2, always=60, moment=Moment(s)) for s in LOOKS]
    sites = {"1:output": np.maximum(spread(4.0, 64), 0)}
    assert not ask("dead-units", make_record(range(20), lambda step: sites, FLAT, facts=facts))


def test_a_relu_that_is_all_zero_without_looks() -> None:
    def sites(step: int) -> Elements:
        return {"0:output": spread(4.0, 64), "1:output": np.zeros(64) if step >= 7 else spread(1.0, 64)}

    [found] = ask("dead-units", make_record(range(20), sites, FLAT))
    assert (found.severity, found.site, found.step) == ("critical", "1", 7)
    assert found.repair.startswith("Lower the learning rate")


def test_a_layer_below_zero_that_gets_no_gradient() -> None:
    """As behind a ReLU that is called as a function."""
    below = {"0:output": -np.arange(1.0, 65), "0:output.grad": np.zeros(64), "0:weight.grad": np.zeros(8)}
    [found] = ask("dead-units", make_record(range(20), lambda step: below, FLAT, modules={"self": "M", "0": "Linear"}))
    assert (found.severity, found.site) == ("critical", "0")
    assert "0 (Linear) have been below zero, where no gradient passes" in found.message
    assert found.repair == "Initialise the biases before it at 0; or use LeakyReLU, whose slope is nowhere 0."
    alive = below | {"0:output.grad": spread(1.0, 64)}  # behind a LeakyReLU
    assert not ask("dead-units", make_record(range(20), lambda step: alive, FLAT, modules={"self": "M", "0": "Linear"}))


def test_a_layer_before_a_dead_relu_is_no_second_one() -> None:
    below = {"0:output": -np.arange(1.0, 65), "0:output.grad": np.zeros(64), "0:weight.grad": np.zeros(8)}
    sites = below | {"1:output": np.zeros(64), "2:output": spread(4.0)}
    [found] = ask("dead-units", make_record(range(20), lambda step: sites, FLAT))
    assert (found.severity, found.site) == ("critical", "1")
    assert "more" not in found.message
    [share, _] = found.evidence
    assert (share.name, share.value, share.threshold) == ("share of its units that are dead", 1, "> 0.5")


def make_bounded(kind: str, values: np.ndarray, losses: list[float] = FLAT, last: str = "Linear") -> Record:
    modules = {"self": "Sequential", "0": "Linear", "1": kind, "2": last}
    sites = {"0:output": spread(4.0), "1:output": values, "2:output": spread(4.0)}
    return make_record(range(20), lambda step: sites, losses, modules=modules)


def test_functions_at_their_bounds() -> None:
    [found] = ask("saturated", make_bounded("Tanh", np.array([-1.0, 1.0, 0.999, -0.99] * 4)))
    assert (found.site, found.step, found.line) == ("1", 0, "train.py:2")
    assert len(ask("saturated", make_bounded("Sigmoid", np.array([0.0, 1.0, 0.001, 0.999] * 4)))) == 1
    assert len(ask("saturated", make_bounded("Tanh", spread(4.0), FALLING))) == 1  # it began so


def test_functions_within_their_bounds() -> None:
    assert not ask("saturated", make_bounded("Tanh", np.array([-0.8, 0.9, 0.3, -0.5] * 4)))
    assert not ask("saturated", make_bounded("Sigmoid", np.array([0.2, 0.5, 0.7, 0.9] * 4)))
    with pytest.raises(CannotTell, match="no Tanh or Sigmoid"):  # the last one may be certain
        check("saturated", make_bounded("ReLU", spread(4.0), last="Sigmoid"))


def test_a_softmax_that_picks_one() -> None:
    one_hot = np.tile([1.0, 0.0, 0.0, 0.0], 8)
    [found] = ask("attention-collapse", make_bounded("Softmax", one_hot))
    assert found.site == "1"
    assert len(ask("attention-collapse", make_bounded("Softmax", one_hot, FALLING))) == 1  # it was so at all looks
    assert not ask("attention-collapse", make_bounded("Softmax", np.tile([0.9, 0.1, 0.0, 0.0], 8), FALLING))
    assert not ask("attention-collapse", make_bounded("Softmax", np.tile([0.7, 0.1, 0.1, 0.1], 8)))


def test_an_embedding_of_which_one_row_is_used() -> None:
    def make(used: int) -> Record:
        facts = [Units(name="0:weight", value=50, samples=64, used=used, moment=Moment(s)) for s in LOOKS]
        return make_record(range(20), lambda step: {"0:output": spread(1.0)}, FLAT, facts=facts)

    [found] = ask("embedding-unused", make(1))
    assert "Of the 50 rows of 0 one alone" in found.message
    assert not ask("embedding-unused", make(9))


def make_called(sure: float, entries: int = 12, losses: list[float] = FLAT) -> Record:
    looks = [
        Softmax(name="block.att", line="net.py:9", value=sure, entries=entries, moment=Moment(step)) for step in LOOKS
    ]
    return make_record(range(20), lambda step: {"0:output": spread(1.0)}, losses, facts=looks)


def test_a_softmax_that_is_called_as_a_function() -> None:
    [found] = ask("attention-collapse", make_called(0.9))
    assert (found.site, found.line, found.step) == ("block.att", "net.py:9", 0)
    assert not ask("attention-collapse", make_called(0.2))
    assert not ask("attention-collapse", make_called(0.9, entries=2))
    assert not ask("attention-collapse", make_called(0.8, losses=FALLING))
