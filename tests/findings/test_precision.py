import numpy as np
import pytest

from retrograd.findings.record import CannotTell, Record
from retrograd.history.facts import Parameter
from retrograd.history.sink import Event, Moment
from tests.findings.by_hand import Elements, ask, check, make_record, spread

FLAT = [0.7] * 30


def zeroed(elements: np.ndarray, share: float) -> np.ndarray:
    """The same with the first so many zero."""
    out = elements.copy()
    out[: int(share * len(out))] = 0
    return out


def make_typed(kind: str, sites: Elements, losses: list[float] = FLAT) -> Record:
    looks = [Parameter(name="0:weight", value=1.0, shape=(8, 8), dtype=kind, grad="some")]
    return make_record(range(30), lambda step: sites, losses, weights=lambda step: {"0:weight": 8.0}, facts=looks)


def test_gradients_below_the_normal_numbers() -> None:
    small = np.full(64, 2.0**-20)
    [found] = ask("underflow", make_typed("float16", {"0:weight.grad": zeroed(small, 0.5)}))
    assert "50% of the gradients of 0:weight are zero, and 100% of the rest" in found.message
    assert not ask("underflow", make_typed("float32", {"0:weight.grad": zeroed(small, 0.5)}))
    assert not ask("underflow", make_typed("float16", {"0:weight.grad": zeroed(np.full(64, 0.1), 0.5)}))  # a ReLU
    assert not ask("underflow", make_typed("float16", {"0:weight.grad": small}))


def test_gradients_of_updates_that_loss_scaling_has_skipped_are_no_underflow() -> None:
    record = make_typed("float16", {"0:weight.grad": zeroed(np.full(64, 2.0**-20), 0.5)})
    for step in range(27):
        record.history.add_event(Event(Moment(step), "skipped", "SGD"))
    assert not ask("underflow", Record(record.history))


def make_updated(kind: str, update: float, gradient: float = 0.0, losses: list[float] = FLAT) -> Record:
    """Shares of elements that are zero in the update and in the gradient."""
    sites = {"0:weight.grad": zeroed(spread(1.0, 64), gradient), "0:weight.update": zeroed(spread(1.0, 64), update)}
    return make_typed(kind, sites, losses)


def test_updates_that_round_away() -> None:
    [found] = ask("bf16-update-lost", make_updated("bfloat16", 0.9))
    assert (found.severity, found.site) == ("warning", "0:weight")
    assert "89% of the elements of 0:weight (bfloat16)" in found.message
    [found] = ask("bf16-update-lost", make_updated("bfloat16", 0.7, losses=[0.7 * 0.9**step for step in range(30)]))
    assert found.severity == "note"


def make_scaled(skipped: list[bool], scale: float) -> Record:
    record = make_record(range(len(skipped)), lambda step: {"0:weight.grad": spread(1.0)}, [0.7] * len(skipped))
    for step, is_skipped in enumerate(skipped):
        moment = Moment(step)
        record.history.add_event(Event(moment, "skipped" if is_skipped else "update", "SGD"))
        record.history.add_event(Event(moment, "scale", value=scale))
    return Record(record.history)


def test_a_scale_that_finds_no_rest() -> None:
    [found] = ask("scaler-churn", make_scaled([step % 2 == 0 for step in range(100)], 4.0))
    assert (found.step, found.severity) == (0, "warning")
    assert "skipped 50 of 100" in found.message
    assert len(ask("scaler-churn", make_scaled([True] * 19, 0.25))) == 1


def test_a_scale_below_one_is_told_by_that_and_not_by_the_share_of_updates() -> None:
    [found] = ask("scaler-churn", make_scaled([step >= 101 for step in range(113)], 0.5))
    assert [str(each) for each in found.evidence] == ["scale in the end: 0.5 (< 1)"]
    [found] = ask("scaler-churn", make_scaled([step % 2 == 0 for step in range(100)], 4.0))
    assert [str(each) for each in found.evidence] == ["share of updates skipped after the first 20: 0.5 (> 0.2)"]


def test_a_scale_that_is_searched_for() -> None:
    assert not ask("scaler-churn", make_scaled([step < 12 for step in range(100)], 16.0))
    assert not ask("scaler-churn", make_scaled([step % 50 == 49 for step in range(200)], 16.0))
    with pytest.raises(CannotTell, match="no update was skipped"):
        check("scaler-churn", make_scaled([False] * 50, 16.0))
