"""What people write first does what they meant, or its error says what to write."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.guesses import CALLS
from retrograd.core.history.chosen_sites import ChosenSites
from retrograd.core.runs.findings import Finding, Findings

STEPS = 10


def train(model: nn.Module, steps: int = STEPS) -> list[float]:
    """Train; returns the norm of the first weight's gradient in each step."""
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        norms.append(float(next(model.parameters()).grad.double().norm()))  # type: ignore[union-attr]
        optimizer.step()
    return norms


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


class Case:
    """A recorded training, its folder, and what torch says of it."""

    def __init__(self, folder: Path) -> None:
        self.model = make()
        self.folder = folder / "lm"
        with rg.record(self.model) as self.rec:
            self.norms = train(self.model)
        self.h: Any = self.rec.history
        model = make()
        with rg.record(model, self.folder):
            train(model, 3)
        self.s: Any = self.h["0:weight.grad"]
        self.x = torch.randn(3, requires_grad=True)

    @property
    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(4, 8)).mean()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")


def decorate(case: Case) -> bool:
    model = make()

    @rg.record(model)
    def go(steps: int) -> int:
        """Go."""
        train(model, steps)
        return steps

    assert go(3) == 3
    assert go.__doc__ == "Go."
    first: Any = vars(go)["recording"]
    assert len(first.history.loss.steps) == 3
    assert not first.is_open
    go(2)
    return len(vars(go)["recording"].history.loss.steps) == 2 and len(first.history.loss.steps) == 3


def start(case: Case) -> bool:
    model = make()
    recording = rg.record(model).start()
    train(model, 3)
    recording.stop()
    return len(recording.history.loss.steps) == 3 and not recording.is_open


def close(case: Case) -> bool:
    model = make()
    recording = rg.record(model)
    train(model, 3)
    recording.close()
    return len(recording.history.loss.steps) == 3


def thin_out(case: Case) -> bool:
    model = make()
    with rg.record(model, every=2) as recording:
        train(model, 4)
    return list(recording.history["0:output"].steps) == [0, 2]


def watched(case: Case) -> bool:
    model, logits = make(), torch.ones(2, requires_grad=True)
    with rg.record(model) as recording:
        rg.watch(logits)
        rg.watch(logits, "second")
        recording.watch(logits * 2)
        recording.watch(logits, "third")
        recording.log(a=1)
        recording.log({"b": 2})
        (model(torch.randn(4, 8)).sum() + logits.sum()).backward()
    scalars: Any = recording.history.scalars
    assert (scalars.a.last, scalars.b.last) == (1, 2)
    return {"watch/logits.grad", "watch/second.grad", "watch/logits * 2", "watch/third.grad"} <= {*recording.history}


def chosen_by_module(case: Case) -> bool:
    """A module is its name: one alone, several, and one that is not called by itself."""
    model = nn.Sequential(make(), nn.Linear(1, 1))
    for modules, names in ((model[1], "1"), ([model[0], model[1]], ["0", "1"]), (model[0], "0")):
        with rg.record(model, sites=modules) as recording, rg.record(model, sites=names) as by_name:
            train(model, 2)
        if recording.history.sites != by_name.history.sites:
            return False
    return True


def log_unnamed(case: Case) -> None:
    with rg.record(make()) as recording:
        recording.log(1)  # type: ignore[arg-type]


def tabulated(case: Case) -> bool:
    """Findings as a table: of none too it has the columns."""
    found = Findings([Finding(detector="a", severity="note", message="One."), *rg.explain(case.h)]).to_pandas()
    return list(found["detector"]) == ["a"] and list(rg.explain(case.h).to_pandas().columns) == list(found.columns)


def saved(case: Case) -> bool:
    path = case.h.save("saved")
    again = rg.open_run(path).history
    return rg.compare(case.h, again).verdict == "identical" and list(again.loss.values) == list(case.h.loss.values)


def checkpoint(case: Case) -> bool:
    torch.save(case.rec.state_dict(), "x.pt")
    return torch.load("x.pt") == {"step": STEPS}


def plot(*numbers: Any) -> list[Any]:
    from matplotlib import pyplot

    return pyplot.plot(*numbers)


WORKS: dict[str, Callable[[Case], Any]] = {
    "@rg.record(model)": decorate,
    "rec.start()": start,
    "rec.close()": close,
    "to_pandas": lambda c: c.h.to_pandas().shape[0] == c.h.rows.count,
    "h.plot()": lambda c: len(c.h.plot().get_yticklabels()) == len(c.h.sites),
    "h.plot('loss')": lambda c: list(c.h.plot("loss").lines[0].get_ydata()) == list(c.h.loss.values),
    "series.plot()": lambda c: list(c.s.plot().lines[0].get_ydata()) == list(c.s.rms),
    "h['0*']": lambda c: np.array_equal(c.h["0*"].rms.values, c.h.matrix("rms", c.h.select("0*")).values),
    "h['0.weight.grad']": lambda c: list(c.h["0.weight.grad"].l2) == list(c.s.l2),
    "h['0']": lambda c: set(c.h["0"]) == {name for name in c.h if name.startswith("0:")},
    "h.loss": lambda c: len(c.h.loss.values) == STEPS,
    "h.loss.values[-1]": lambda c: c.h.loss.values[-1] > 0,
    "h.loss[-1]": lambda c: c.h.loss[-1] == c.h.loss.last == c.h.loss.values[-1],
    "h.loss.to_pandas()": lambda c: c.h.loss.to_pandas()[3] == c.h.loss.values[3],
    "h.loss > 0": lambda c: (c.h.loss > c.h.loss.values.min()).sum() == STEPS - 1,
    "plt.plot(h.loss)": lambda c: list(plot(c.h.loss)[0].get_ydata()) == list(c.h.loss.values),
    "plt.plot(*h.loss)": lambda c: list(plot(*c.h.loss)[0].get_xdata()) == list(c.h.loss.steps),
    "list(h)": lambda c: list(c.h) == c.h.sites,
    "len(h)": lambda c: len(c.h) == len(c.h.sites),
    "keys": lambda c: list(c.h.keys()) == c.h.sites,
    "values": lambda c: [each.site for each in c.h.values()] == c.h.sites,
    "in": lambda c: "0:weight.grad" in c.h and "0:weigth.grad" not in c.h,
    "items": lambda c: {name: list(each.l2) for name, each in c.h.items()}["0:weight.grad"] == list(c.s.l2),
    "norm": lambda c: np.allclose(c.s.norm, c.norms, rtol=1e-6),
    "l2": lambda c: np.allclose(c.s.l2, c.norms, rtol=1e-6),
    "to_numpy": lambda c: np.allclose(c.s.to_numpy("l2"), c.norms, rtol=1e-6),
    "series.to_pandas": lambda c: np.allclose(c.s.to_pandas().l2[3], c.norms[3], rtol=1e-6),
    "series[-1]": lambda c: np.isclose(c.s[-1].l2, c.norms[-1], rtol=1e-6) and c.s[-1].step == STEPS - 1,
    "series[2:5]": lambda c: np.allclose(c.s[2:5].l2, c.norms[2:5], rtol=1e-6),
    "last": lambda c: np.isclose(c.s.last.l2, c.norms[-1], rtol=1e-6),
    "rg.load": lambda c: len(rg.load(c.folder).history.loss.steps) == 3,
    "rg.open_run": lambda c: len(rg.open_run(c.folder).history.loss.steps) == 3,
    "rg.open": lambda c: len(rg.open(c.folder).history.loss.steps) == 3,
    "rg.Run": lambda c: len(rg.Run(str(c.folder)).history.loss.steps) == 3,
    "rg.diff": lambda c: rg.diff(c.h, c.h).verdict == "identical",
    "rg.compare": lambda c: rg.compare(c.h, c.h).verdict == "identical",
    "compare paths": lambda c: rg.compare(str(c.folder), str(c.folder)).verdict == "identical",
    "rg.watch(x)": watched,
    "rec[site]": lambda c: list(c.rec["0:weight.grad"].l2) == list(c.s.l2),
    "run[site]": lambda c: len(rg.open_run(c.folder)["0:weight.grad"]) == 3,
    "scalars.loss": lambda c: list(c.h.scalars.loss.values) == list(c.h.loss.values),
    "a.loss - b.loss": lambda c: not (c.h.loss - c.h.loss).any(),
    "sites=module": chosen_by_module,
    "findings.to_pandas()": tabulated,
    "rg.watch(x, 'x')": lambda c: rg.watch(c.x, "x") is c.x,
    "rg.explain(rec)": lambda c: len(rg.explain(c.rec)) == 0,
    "== []": lambda c: rg.explain(c.rec) == [] and rg.explain(c.rec) == rg.explain(c.h) and rg.explain(c.rec) != [1],
    "rg.testing": lambda c: rg.testing.__name__ == "retrograd.testing",
    "matrix max": lambda c: c.h.matrix("l2").values.max() >= max(c.norms) * 0.999,
    "matrix norm": lambda c: np.array_equal(c.h.matrix("norm").values, c.h.matrix("l2").values),
    "matrix of a pattern": lambda c: c.h.matrix("rms", "*:weight.grad").sites == c.h.select("*:weight.grad"),
    "h.matrix()": lambda c: c.h.matrix().sites == c.h.sites,
    "select": lambda c: c.h.select("*:weight.grad") == ["0:weight.grad", "2:weight.grad"],
    "h.save": saved,
    "torch.save": checkpoint,
    "torch.load": checkpoint,
    "pickle": lambda c: rg.compare(pickle.loads(pickle.dumps(c.h)), c.h).verdict == "identical",
    "pickle series": lambda c: list(pickle.loads(pickle.dumps(c.s[3:])).l2) == list(c.s.l2[3:]),
    "deepcopy": lambda c: list(copy.deepcopy(c.s.select(phase=None)).l2) == list(c.s.l2),
    "every=2": thin_out,
    "rg.report": lambda c: "<html" in rg.report(str(c.folder)).read_text(),
    "write_report": lambda c: "<html" in rg.write_report(c.h).read_text(),
    "write_report path": lambda c: rg.write_report(c.h, "r.html").name == "r.html",
    "draw_graph": lambda c: "<svg" in rg.draw_graph(c.loss, "g.svg").read_text(),
    "draw_graph alone": lambda c: rg.draw_graph(c.loss).name == "graph.html",
    "integrations": lambda c: rg.integrations.__name__ == "retrograd.integrations",
    "__version__": lambda c: rg.__version__.count(".") == 2,
    "dir(rg)": lambda c: dir(rg) == rg.__all__,
}

WORDS: dict[str, tuple[Callable[[Case], Any], str]] = {
    "to_df": (lambda c: c.h.to_df(), "history.to_pandas()"),
    "h['0.weight']": (lambda c: c.h["0.weight"], "'0:weight.grad'"),
    "h['0:grad']": (lambda c: c.h["0:grad"], "'0:output.grad'"),
    "losses": (lambda c: c.h.losses, "history.loss"),
    "learning_rate": (lambda c: c.h.learning_rate, "history.lr"),
    "lrr": (lambda c: c.h.scalars["losss"], "history.scalars['loss']"),
    "h.loss[10]": (lambda c: c.h.loss[10], "steps 0 to 9"),
    "h.loss.at(10)": (lambda c: c.h.loss.at(10), "steps 0 to 9"),
    "h.loss.min()": (lambda c: c.h.loss.min(), ".values.min()"),
    "h['*weight.grad']": (lambda c: c.h["*weight.grad"], "'*:weight.grad'"),
    "h['*.grad']": (lambda c: c.h["*.grad"], "*:*.grad"),
    "h['loss']": (lambda c: c.h["loss"], "history.scalars['loss']"),
    "s['l2']": (lambda c: c.s["l2"], ".l2"),
    "s.select(step=3)": (lambda c: c.s.select(step=3), "series.at(3)"),
    "s.select(phase='test')": (lambda c: c.s.select(phase="test"), "eval"),
    "h.select(phase=…)": (lambda c: c.h.select(phase="train"), "history[name].select(phase="),
    "per_sample_gradients(model, x)": (
        lambda c: rg.per_sample_gradients(c.model, c.x),  # type: ignore[call-arg, arg-type]
        "rg.per_sample_gradients(recording)",
    ),
    "per_sample_gradients(h)": (lambda c: rg.per_sample_gradients(c.h), "(recording)"),
    "log('loss', 0.3)": (lambda c: rg.log("loss", 0.3), "rg.log(loss=0.3)"),  # type: ignore[arg-type]
    "compare(a, b, c)": (lambda c: rg.compare(c.h, c.h, c.h), "rg.compare(a, b)"),  # type: ignore[call-arg]
    "explain(severity)": (lambda c: rg.explain(c.h, severity="note"), ".severity"),  # type: ignore[call-arg]
    "extract(model, x)": (lambda c: rg.extract(c.model, c.x), "rg.extract(model, batch"),  # type: ignore[call-arg]
    "trace(model, x)": (lambda c: rg.trace(c.model, c.x), "with rg.trace(model)"),  # type: ignore[call-arg]
    "add_scalar": (lambda c: rg.add_scalar, "rg.log(loss=0.3)"),  # type: ignore[attr-defined]
    "epoch": (lambda c: c.h.epoch, "loss"),
    "h - h": (lambda c: c.h - c.h, "rg.compare(a, b)"),
    "watch(model)": (lambda c: rg.watch(c.model), "rg.record(model)"),
    "watch(x, 3)": (lambda c: rg.watch(c.x, 3), 'rg.watch("logits", logits)'),  # type: ignore[call-overload]
    "explain(model)": (lambda c: rg.explain(c.model), "rg.explain_gradients(model, loss)"),  # type: ignore[arg-type]
    "assert_finite": (lambda c: rg.assert_finite, "rg.find_nan"),  # type: ignore[attr-defined]
    "nonfinite": (lambda c: c.h.nonfinite, 'history.matrix("nonfinite")'),
    "max": (lambda c: c.h.max("l2"), 'history.matrix("l2").values'),
    "rec.save": (lambda c: c.rec.save("x.pt"), "recording.history.save(path)"),  # type: ignore[attr-defined]
    "sites='grads'": (lambda c: rg.record(make(), sites="grads"), "'*:*.grad'"),
    "log_dir": (lambda c: rg.record(make(), log_dir="x"), "path="),  # type: ignore[call-arg]
    "keep": (lambda c: rg.record(make(), keep="x"), "tensors="),  # type: ignore[call-arg]
    "both": (lambda c: rg.record(make(), every=2, schedule=2), "give one of them"),
    "record(opt)": (lambda c: rg.record(torch.optim.SGD([c.x])), "pass the model"),  # type: ignore[arg-type]
    "record(model, opt)": (lambda c: rg.record(c.model, c.x), "leave it out"),  # type: ignore[arg-type]
    "decorated model": (lambda c: c.rec(c.model), "with rg.record(model) as recording"),
    "trace(loss)": (lambda c: rg.trace(c.loss), "with rg.trace(model) as trace"),  # type: ignore[arg-type]
    "summary": (lambda c: rg.summary(c.model), "rg.plan_recording(model)"),  # type: ignore[attr-defined]
    "callback": (lambda c: rg.RetrogradCallback, "retrograd.integrations.lightning"),  # type: ignore[attr-defined]
    "chosen": (lambda c: c.h["0*"]["2:output"], "history["),
    "h[module]": (lambda c: c.h[c.model[0]], "history.sites"),
    "rewrite(module)": (lambda c: rg.rewrite(c.model, {c.model[0]: rg.rules.Zero()}), "name a slot"),
    "select(module)": (lambda c: c.h.select(c.model[0]), "0:weight.grad"),
    "sites=another": (lambda c: rg.record(c.model, sites=make()[0]), "0:output"),
    "in run": (lambda c: "0:output" in rg.open_run(c.folder), "history.sites"),
    "series - series": (lambda c: c.s - c.h["0:output"], "a.rms - b.rms"),
    "series / series": (lambda c: c.s / c.h["0:output"], "a.rms - b.rms"),
    "run - run": (lambda c: rg.open_run(c.folder) - 1, "rg.compare(a, b)"),  # type: ignore[operator]
    "select('eval')": (lambda c: c.s.select("eval"), 'phase="eval"'),
    "scalars.los": (lambda c: c.h.scalars.los, "history.scalars['loss']"),
    "findings[slug]": (lambda c: rg.explain(c.h)["dead-units"], "findings.of('dead-units')"),  # type: ignore[call-overload]
    "findings.keys()": (lambda c: rg.explain(c.h).keys(), ".detector"),  # type: ignore[attr-defined]
    "rules.Clip": (lambda c: rg.rules.Clip(1.0), "rg.rules.ClipNorm(1.0)"),  # type: ignore[attr-defined]
    "rules.clipnorm": (lambda c: rg.rules.Clipnorm, "ClipNorm"),  # type: ignore[attr-defined]
    "rg.lightning": (lambda c: rg.lightning, "retrograd.integrations.lightning"),  # type: ignore[attr-defined]
    "open=True": (lambda c: rg.write_report(c.h, open=True), "--open"),  # type: ignore[call-arg]
    "export(run)": (lambda c: rg.export(c.folder), '"csv"'),  # type: ignore[call-arg]
    "open_run()": (lambda c: rg.open_run(), "retrograd ls"),  # type: ignore[call-arg]
    "mirror(to)": (lambda c: rg.mirror("wandb"), "rg.mirror(recording,"),  # type: ignore[call-arg]
    "check_batch(model)": (lambda c: rg.check_batch(c.model), "(model, batch)"),  # type: ignore[call-arg]
    "find_kinks(model)": (lambda c: rg.find_kinks(c.model), "(model, batch)"),
    "draw_graph(model)": (lambda c: rg.draw_graph(c.model), "give the loss"),
    "watch('x')": (lambda c: rg.watch("x"), "rg.watch(logits)"),
    "rec.watch('x')": (lambda c: c.rec.watch("x"), "rg.watch(logits)"),
    "rec.log(1)": (log_unnamed, "rg.log(loss=0.3)"),
    "rg.ls": (lambda c: rg.ls("runs"), "retrograd ls"),  # type: ignore[attr-defined]
    "a folder of runs": (lambda c: rg.open_run(c.folder.parent), "retrograd ls"),
    "run.args": (lambda c: rg.open_run(c.folder).args, 'run.manifest["command"]'),  # type: ignore[attr-defined]
    "final_loss": (lambda c: c.h.final_loss, "history.loss.values[-15:]"),
    "slip": (lambda c: c.s.exponentz, "exponents"),
}


@pytest.mark.parametrize("name", WORKS)
def test_a_guess_does_what_was_meant(name: str, case: Case) -> None:
    assert WORKS[name](case)


@pytest.mark.parametrize("name", WORDS)
def test_another_one_names_the_right_call(name: str, case: Case) -> None:
    guess, words = WORDS[name]
    with pytest.raises((rg.RetrogradError, AttributeError)) as error:
        guess(case)
    assert isinstance(error.value, rg.RetrogradError)
    assert words in error.value.repair


def test_an_error_shows_no_numbers_of_a_tensor() -> None:
    with pytest.raises(rg.RetrogradError, match="Tensor is not a torch") as error:
        rg.record(torch.randn(50, 50))  # type: ignore[arg-type]
    assert "tensor(" not in str(error.value)


def test_scalars_are_attributes_of_a_history(case: Case) -> None:
    for name in ("lr", "grad_norm", "step_time"):
        if name in case.h.scalars:
            assert np.array_equal(getattr(case.h, name).values, case.h.scalars[name].values, equal_nan=True)
            assert name in dir(case.h)
        else:
            with pytest.raises(AttributeError, match="scalars of each step are"):
                getattr(case.h, name)


def test_no_guess_is_a_name_that_there_is(case: Case) -> None:
    things = {"retrograd": rg, "Series": case.s, "Curve": case.h.loss, "rules": rg.rules}
    for kind, guesses in CALLS.items():
        assert not guesses.keys() & {*dir(things.get(kind) or getattr(rg, kind))}


def test_a_choice_of_sites_is_a_mapping(case: Case) -> None:
    chosen = case.h["*:output"]
    assert isinstance(chosen, ChosenSites)
    assert {*chosen} == {"0:output", "1:output", "2:output", "self:output"}
    assert {*chosen.to_pandas()["site"]} == {*chosen}
    assert "update_ratio" in dir(chosen)
    assert chosen.norm.values.shape == (4, STEPS)
    assert len(chosen.plot("l2").get_yticklabels()) == 4


def test_what_begins_later_is_no_body_of_a_recording() -> None:
    recording = rg.record(make())
    with recording, pytest.raises(rg.RetrogradError, match="generator"):

        @recording
        def later() -> Any:
            yield 1


def test_a_property_that_raises_says_why(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rg.History, "loss", property(lambda self: self.rows.not_there))
    with pytest.raises(AttributeError, match="not_there"):
        case.h.loss  # noqa: B018
