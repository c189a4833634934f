import numpy as np

from retrograd.findings.detectors.optimizers import BeforeChange, MadeAnew
from tests.findings.by_hand import ask, make_record, spread
from tests.findings.programs import make_calls, make_optimizer, make_program


def test_an_optimizer_for_each_update() -> None:
    made = [make_optimizer(f"Adam#{k}") for k in range(1, 6)]
    calls = [
        each for k in range(1, 6) for each in make_calls([()] * k + [("backward", "step")], step={"about": f"Adam#{k}"})
    ]
    [found] = ask(MadeAnew, make_program([*made, *calls]))
    assert (found.severity, found.line) == ("warning", "train.py:5")
    assert "Adam is made anew 5 times for the same parameters, at every update" in found.message


def test_an_optimizer_that_remembers_nothing() -> None:
    plain = [make_optimizer(f"SGD#{k}", momentum=0.0) for k in range(1, 6)]
    assert [each.severity for each in ask(MadeAnew, make_program(plain))] == ["note"]
    heavy = [make_optimizer(f"SGD#{k}", momentum=0.9) for k in range(1, 6)]
    assert [each.severity for each in ask(MadeAnew, make_program(heavy))] == ["warning"]


def test_optimizers_of_other_parameters() -> None:
    models = [make_optimizer(f"Adam#{k}", names=[f"model{k}.0:weight"]) for k in range(1, 6)]
    assert not ask(MadeAnew, make_program(models))
    stages = [make_optimizer("Adam#1"), make_optimizer("Adam#2")]
    assert not ask(MadeAnew, make_program(stages))


def test_an_optimizer_of_parameters_that_were_replaced() -> None:
    sites = {"0:weight.grad": spread(1.0), "2:weight.grad": spread(1.0), "0:weight.update": spread(0.1)}
    record = make_record(range(4), lambda step: sites, facts=[make_optimizer(names=["0:weight"], unknown=1)])
    [found] = ask(BeforeChange, record)
    assert (found.severity, found.site, found.line) == ("critical", "2:weight", "train.py:5")
    assert "updates 1 tensors that belong to no recorded model, while 2:weight has gradients" in found.message


def test_parameters_of_which_nothing_is_wrong() -> None:
    sites = {"0:weight.grad": np.ones(4), "2:weight.grad": np.ones(4)}
    every = make_optimizer(names=["0:weight", "2:weight"], unknown=3)
    frozen = make_optimizer(names=["0:weight"])
    for optimizer in (every, frozen):
        assert not ask(BeforeChange, make_record(range(4), lambda step: sites, facts=[optimizer]))
