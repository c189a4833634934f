"""Names that people try first, and the call that does what they meant: one table, for everything that has attributes.

What a name can only mean, it does: ``rg.load`` is :func:`retrograd.open_run` (see ``__init__.pyi``). Everything else
is an error that says what to write.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from retrograd.core.errors import CallError, NoSuchNameError, RetrogradError

P = ParamSpec("P")
R = TypeVar("R")

_HOME = str(Path(__file__).parents[1])

_CALLBACK = "from retrograd.integrations.lightning import RetrogradCallback (or .transformers, for its Trainer)"
_TABLE = "history.to_pandas(), .to_polars(), or .table() for Arrow"
_DIFFERENCE = 'rg.compare(a, b), or of numbers: a.matrix("rms").values - b.matrix("rms").values'
_MATRIX = 'history.matrix("l2").values, an array of sites × steps'

CALLS: dict[str, dict[str, str]] = {
    "retrograd": {
        **dict.fromkeys(("RetrogradCallback", "lightning", "transformers"), _CALLBACK),
        "Recorder": "rg.record(model)",
        "Session": "rg.record(model)",
        "start": "recording = rg.record(model), and recording.close() at the end",
        "init": "rg.record(model), or rg.record(model, 'runs/a-{date}') for a run folder",
        "assert_finite": "rg.find_nan(model, batch), or rg.explain(recording) for a whole run",
        "detect_anomaly": "rg.find_nan(model, batch)",
        "check_nan": "rg.find_nan(model, batch)",
        **dict.fromkeys(("add_scalar", "log_metrics", "log_dict", "log_scalar"), "rg.log(loss=0.3)"),
        **dict.fromkeys(("finish", "close"), "recording.close(), of recording = rg.record(model)"),
        **dict.fromkeys(
            ("runs", "list_runs", "open_runs", "ls", "best", "Api"),
            "`retrograd ls DIR --sort final`, with --json for other tools, or rg.open_run(path) of each",
        ),
        **dict.fromkeys(
            ("get_activations", "activations", "extract_features", "log_forward_pass"),
            'rg.extract(model, batch, ["layer2"])',
        ),
        **dict.fromkeys(
            ("IntegratedGradients", "integrated_gradients", "Saliency", "grad_cam", "GradCAM", "LayerGradCam"),
            'rg.extract(model, batch, ["layer4"], differentiable=True) and torch.autograd.grad; see examples/',
        ),
        "SummaryWriter": 'rg.mirror(recording, "tensorboard"), or rg.export(run, "tensorboard")',
        "config": "rg.open_run(path).manifest",
        "summary": "print(rg.plan_recording(model)) for the sites of a model, rg.describe(run) for what a run did",
        "hook": 'rg.record(model, tensors="*:output.grad") to see, rg.rewrite(model) to change',
        "visualize": 'rg.draw_graph(loss, "graph.html"), or rg.write_report(run)',
        "make_dot": 'rg.draw_graph(loss, "graph.svg")',
        "plot": "rg.open_run(path).history.plot(), or rg.write_report(run)",
        "show": "rg.write_report(run)",
        "save": "history.save(path), or rg.record(model, path) from the start",
        "serve": "`retrograd serve PATH` on the command line",
        "run": "`retrograd run train.py` on the command line",
    },
    "rules": {
        "Clip": "rg.rules.ClipNorm(1.0), ClipValue(1.0) for each element, or Clamp for activations",
        "Freeze": "rg.rules.Zero()",
        "GradientReversal": "rg.rules.Reverse()",
        "SignSGD": "rg.rules.KeepSign()",
    },
    "Findings": {
        **dict.fromkeys(("to_df", "df", "dataframe"), "findings.to_pandas()"),
        "to_json": "findings.as_json_lines()",
        **dict.fromkeys(("keys", "slugs", "names"), "[each.detector for each in findings]"),
        **dict.fromkeys(("filter", "get", "select"), "findings.of(slug), or by their .severity, .site and .step"),
    },
    "History": {
        "-": _DIFFERENCE,
        "to_df": _TABLE,
        "df": _TABLE,
        "dataframe": _TABLE,
        "to_dict": _TABLE,
        "config": "history.manifest",
        "metrics": "history.scalars",
        "summary": "rg.describe(history), or history.scalars.last",
        "final_loss": "np.mean(history.loss.values[-15:]), say; `retrograd ls` takes the last twentieth of the steps",
        "losses": "history.loss, which has .steps and .values",
        "learning_rate": "history.lr",
        "learning_rates": "history.lr",
        "nonfinite": 'history.matrix("nonfinite"), history["*"].nonfinite, or rg.explain(history) for the cause',
        "nan": 'history.matrix("nan"), or rg.explain(history) for the cause',
        "max": f"{_MATRIX}, has .max()",
        "min": f"{_MATRIX}, has .min()",
        "mean": f"{_MATRIX}, has .mean()",
        "l2": 'history.matrix("l2"), or history["*"].l2',
        "norm": 'history.matrix("l2"), or history["*"].l2',
        "rms": 'history.matrix("rms"), or history["*"].rms',
        "gradients": 'history["*:*.grad"], or history["*:parameters.grad"] for those of parameters',
        "grads": 'history["*:*.grad"], or history["*:parameters.grad"] for those of parameters',
        "activations": 'history["*:output"]',
        "layers": "history.sites",
        "names": "history.sites",
        "steps": "history.made_steps, or the .steps of one site",
        "columns": "history.table().column_names",
        "report": "rg.write_report(history)",
        "explain": "rg.explain(history)",
        "to_csv": 'rg.export(run, "csv", path), or history.to_pandas().to_csv(path)',
    },
    "Curve": {
        **{
            name: f".values.{name}(), with NaN left out np.nan{name}(.values)"
            for name in ("min", "max", "mean", "std", "sum", "argmin", "argmax")
        },
        "tolist": ".values.tolist()",
        "items": "zip(*curve), or .to_pandas().items()",
        "data": ".values",
        "value": ".values, or .last",
        "step": ".steps",
        "first": "[0]",
        "to_df": ".to_pandas()",
        "to_csv": ".to_pandas().to_csv(path)",
        "shape": ".values.shape",
        "smooth": ".to_pandas().ewm(alpha=0.1).mean()",
        "rolling": ".to_pandas().rolling(20).mean()",
        "diff": ".to_pandas().diff()",
    },
    "Series": {
        "-": "one statistic of both, of the same steps: a.rms - b.rms; a.to_pandas() - b.to_pandas() aligns the steps",
        "values": ".rms, .l2, .mean or another statistic: one number a step",
        "norms": ".norm, which is .l2",
        "max_abs": ".abs_max",
        "var": ".std ** 2",
        "first": "[0]",
        "data": ".to_pandas()",
        "to_df": ".to_pandas()",
        "numpy": '.to_numpy("rms")',
        "histogram": ".exponents",
        "hist": ".exponents",
        "tensor": ".tensors[-1].tensor, where the recording keeps them: rg.record(model, tensors=…)",
        "grad": "the site of the gradient: history['fc:weight.grad']",
    },
    "Recording": {
        "save": "recording.history.save(path), or rg.record(model, path) from the start",
        "finish": "recording.close()",
        "end": "recording.close()",
        "pause": "rg.record(model, schedule=…), a function from step to bool",
        "step_end": "recording.begin_step(number), for loops that count by themselves",
        "plot": "recording.history.plot()",
        "loss": "recording.history.loss",
        "scalars": "recording.history.scalars",
        "to_pandas": "recording.history.to_pandas()",
        "matrix": 'recording.history.matrix("rms")',
        "sites": "recording.history.sites",
        "report": "rg.write_report(recording)",
        "explain": "rg.explain(recording)",
        "load_state_dict": "rg.record(model, path, resume=state)",
    },
    "Run": {
        "-": _DIFFERENCE,
        "loss": "run.history.loss",
        "scalars": "run.history.scalars",
        "metrics": "run.history.scalars",
        "summary": "rg.describe(run), or run.history.scalars.last",
        "findings": "rg.explain(run)",
        "describe": "rg.describe(run)",
        "name": "run.path.name",
        **dict.fromkeys(
            ("settings", "args", "argv", "params", "hyperparameters", "optimizer"),
            'run.manifest["command"] and run.manifest["optimizers"]; in words rg.describe(run)',
        ),
        "sites": "run.history.sites",
        "to_pandas": "run.history.to_pandas()",
        "matrix": 'run.history.matrix("rms")',
        "plot": "run.history.plot()",
        "config": "run.manifest",
        "explain": "rg.explain(run)",
        "report": "rg.write_report(run)",
    },
}
"""Kind of thing → name that is tried → what to write."""

ARGUMENTS: dict[str, dict[str, str]] = {
    "record": {
        **dict.fromkeys(
            ("log_dir", "logdir", "dir", "folder", "run_dir", "out", "output", "output_dir", "save_dir", "save_to"),
            "path=",
        ),
        **dict.fromkeys(("name", "run_name", "project"), 'path="runs/NAME"'),
        **dict.fromkeys(("keep", "keep_tensors", "save_tensors"), "tensors=, as in tensors='*:output.grad'"),
        **dict.fromkeys(("layers", "modules", "names", "patterns", "include", "filter"), "sites="),
        **dict.fromkeys(("interval", "every_n_steps", "log_every", "log_freq", "freq"), "every="),
        **dict.fromkeys(("stats", "metrics"), "statistics="),
        **dict.fromkeys(("histograms", "hist", "bins"), "histogram="),
        **dict.fromkeys(("budget", "max_bytes"), "tensor_budget="),
        **dict.fromkeys(("optimizer", "opt", "loss", "criterion"), "nothing: what trains the model is found by itself"),
    },
    "write_report": {"open": "nothing: it returns the path; `retrograd report RUN --open` shows it in the browser"},
}
"""Function → argument that is tried → the one to give."""


USES: dict[str, str] = {
    "per_sample_gradients": 'record one step with rg.record(model, tensors=["*:inputs", "*:outputs.grad"]) as '
    "recording, then rg.per_sample_gradients(recording)",
    "log": 'rg.log(loss=0.3), or rg.log({"val/loss": 0.3}, step=7)',
    "compare": "rg.compare(a, b), of two runs; more at once are compared by `retrograd compare`",
    "explain": "rg.explain(run); findings are chosen by .of(slug), or by their .severity, .site and .step",
    "trace": "with rg.trace(model) as trace: loss.backward()",
    "extract": 'rg.extract(model, batch, ["layer2", "fc"])',
    "find_nan": "rg.find_nan(model, batch), or with a function from output to loss as third argument",
    "rewrite": 'rg.rewrite(model, {"*:output.grad": rg.rules.KeepSign()})',
    "plan_recording": 'rg.plan_recording(model, sites="blocks.*")',
    "open_run": 'rg.open_run("runs/NAME"); `retrograd ls runs` lists them, the newest first',
    "describe": "rg.describe(run)",
    "export": 'rg.export(run, "csv"), or "parquet", "tensorboard", "wandb" or "mlflow"',
    "mirror": 'rg.mirror(recording, "tensorboard"), or "wandb" or "mlflow"',
    "write_report": 'rg.write_report(run, "report.html")',
    "check_batch": "rg.check_batch(model, batch)",
    "check_causal": "rg.check_causal(model, tokens)",
    "find_kinks": "rg.find_kinks(model, batch), or rg.find_kinks(loss) before its backward",
    "Series.select": 'series.select(phase="eval"), or by backward=, micro=, rank=, call=',
    "History.select": 'history.select("*:output.grad") for names; of phases: history[name].select(phase="eval")',
}
"""Function → how it is called."""


def guide(kind: str, name: str, known: Iterable[str], *, what: str = "") -> NoSuchNameError:
    """Make the error for an attribute that is not there; it names the right call, or what is nearest.

    Args:
        kind: of which thing, a key of :data:`CALLS`.
        name: what was asked for.
        known: names that there are.
        what: the thing in words.
    """
    repair = CALLS.get(kind, {}).get(name, "")
    if not repair and not name.startswith("_"):
        near = difflib.get_close_matches(name, [each for each in known if not each.startswith("_")], n=3)
        repair = f"the nearest are {', '.join(near)}." if near else ""
    return NoSuchNameError(f"{what or repr(kind)} has no attribute {name!r}.", repair=repair)


class Guided:
    """Something whose missing attributes name the right call."""

    if not TYPE_CHECKING:  # a checker shall know a slip from a name

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # the property itself has raised: say what
                return object.__getattribute__(self, name)
            raise guide(type(self).__name__, name, dir(self), what=f"{type(self).__name__!r} object")

    def __sub__(self, other: object) -> Any:
        """Not at all.

        Raises:
            CallError: it names what can be.
        """
        if not (repair := CALLS.get(type(self).__name__, {}).get("-")):
            return NotImplemented
        raise CallError(f"{type(self).__name__} cannot be calculated with as a whole.", repair=f"{repair}.")

    __add__ = __mul__ = __truediv__ = __sub__


def names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Have a call with wrong arguments name the right ones.

    Raises:
        CallError: by the function that is made.
    """
    known = inspect.signature(function).parameters
    guesses = ARGUMENTS.get(function.__name__, {})

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        for name in options.keys() - known.keys():
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            meant = guesses.get(name) or (f"{near[0]}=" if near else "")
            if guesses:
                raise CallError(
                    f"rg.{function.__name__}() takes no argument {name!r}.",
                    repair=f"give {meant}." if meant else f"give one of {', '.join(known)}.",
                )
        try:
            return function(*args, **options)
        except RetrogradError as error:
            if _is_ours(error):
                error.__traceback__ = None
            raise
        except TypeError as error:
            inner = error.__traceback__ and error.__traceback__.tb_next
            if inner or function.__qualname__ not in USES:  # raised in the function, not by its call
                raise
            raise CallError(f"{error}.", repair=f"{USES[function.__qualname__]}.") from None

    return call


def _is_ours(error: BaseException) -> bool:
    """Return whether no file but ours is on the way to an error: then the line of the call says where."""
    trace = error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_HOME):
            return False
        trace = trace.tb_next
    return True
