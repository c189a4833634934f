"""A process that seeds everything first of all, then uses every public name, and prints what each has left behind.

That is: which of them have moved a random generator, and which have loaded what only compiled code needs. It is a
script of its own since rich, for one, draws from ``random`` when it is loaded, once in a process.
"""

# ruff: noqa: E402, NPY002
import random

random.seed(1)
import numpy as np

np.random.seed(2)
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

torch.manual_seed(3)

import retrograd as rg

FOLDER = Path(sys.argv[1])


class Noisy(torch.autograd.Function):
    """Draws from every generator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (1 + 0 * (random.random() + np.random.rand() + torch.rand(()).item()))


class Net(nn.Sequential):
    """Draws in its forward, from every generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + random.random() + np.random.rand() + torch.rand(()).item())


def read_states() -> dict[str, Any]:
    return {
        "random": random.getstate(),
        "numpy": str(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state().tolist(),
    }


def read_compiled() -> list[str]:
    """What there is of ``retrograd.compiled``, and which operations torch's dispatcher has of us."""
    modules = [name for name in sys.modules if name.startswith("retrograd.compiled")]
    operations = [schema.name for schema in torch._C._jit_get_all_schemas()]
    return modules + [name for name in operations if name.startswith("retrograd::")]


net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
noisy = Net(nn.Linear(3, 3), nn.ReLU())
x = torch.ones(4, 3)
causal = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
several, tokens = torch.arange(12.0).view(4, 3), torch.arange(8).view(2, 4) % 5


def loss() -> torch.Tensor:
    return net(x).square().mean()


def made(name: str) -> Any:
    """What others have made of a net, once for all."""
    if name not in _made:
        with rg.trace() as trace:
            graph = rg.walk(value := loss())
            value.backward()
        with rg.take_inventory(net) as inventory:
            loss().backward()
        with rg.record(net, tensors="*:output.grad", path=FOLDER / "run") as recording:
            loss().backward()
        _made.update(trace=trace, graph=graph, inventory=inventory, history=recording.history)
    return _made[name]


_made: dict[str, Any] = {}


def use_function() -> None:
    class Double(rg.Function):
        def forward(self, ctx: Any, x: torch.Tensor) -> Any:
            return x * 2, rg.Auxiliary(x)

        def backward(self, ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    Double()(x.clone().requires_grad_())[0].sum().backward()


def use_bundle() -> None:
    node = Noisy.apply(x.clone().requires_grad_()).grad_fn
    assert rg.replay(rg.open_bundle(rg.write_bundle(node, [x], FOLDER / "bundle")))


def use_record() -> None:
    def chance(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten()[0] * 0

    with rg.record(net, statistics=[chance], path=FOLDER / f"recorded-{len(list(FOLDER.iterdir()))}") as recording:
        rg.watch("mine", x)
        rg.log(mine=1.0)
        loss().backward()
        recording.flush()


def use_compaction() -> None:
    folder = FOLDER / f"compacted-{len(list(FOLDER.iterdir()))}"
    with rg.record(net, folder):
        loss().backward()
    rg.compact(folder)


def use_policies() -> None:
    for name in ("CPU", "Disk", "Recompute", "Lossless", "AsIs", "Cast"):
        if policy := getattr(rg.saved, name, None):
            with rg.keep_saved(net, policy()):
                loss().backward()
    for _ in range(3):
        with rg.keep_saved(net, budget="1MB"):
            loss().backward()


def use_rules() -> None:
    for name in ("ClipNorm", "AGC", "Noise", "ZClip", "Scale"):
        if rule := getattr(rg.rules, name, None):
            with rg.rewrite(net, {"*:weight.grad": rule(0.1)}):
                loss().backward()


def step() -> None:
    stepper = rg.step_through(loss())
    for _ in stepper:
        pass


def hangs() -> None:
    with rg.watch_hangs(FOLDER / "hangs", limit=100.0) as watch:
        loss().backward()
        watch.report()


def split_samples() -> None:
    with rg.record(net, tensors=["*:inputs", "*:outputs.grad"]) as recording:
        net(x).sum().backward()
    [*rg.per_sample_gradients(recording).values()]


def dataset() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 3))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    sys.stderr = Terminal()
    rg.extract_dataset(net, loader, "0", FOLDER / "features")
    sys.stderr = sys.__stderr__


def draw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_tensor(random.random()) + torch.rand(())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def out() -> io.StringIO:
    return io.StringIO()


def rewrite() -> None:
    with rg.rewrite(net, {"0:output.grad": rg.rules.Scale(0.5)}):
        loss().backward()


def live() -> None:
    with rg.trace(live=rg.LiveLines(file=out()), norms=True, folder=FOLDER / "bundles", bundle="Relu*"):
        loss().backward()


def run_nodes() -> None:
    value = loss()
    rg.rerun(value, torch.ones(()))
    rg.run_from(value)


def explain() -> None:
    found = rg.explain(made("history"))
    repr(found)
    found._repr_html_()


def give_reasons() -> None:
    made_loss = loss()
    str(rg.explain_gradients(net, made_loss))


USES: dict[str, Callable[[], Any]] = {
    "AdjointCheck": lambda: repr(rg.check_adjoint(net, x)),
    "Auxiliary": use_function,
    "Card": lambda: str(rg.describe(made("history"))),
    "Comparison": lambda: repr(rg.compare(made("history"), made("history"))),
    "Finding": explain,
    "Findings": explain,
    "Function": use_function,
    "GradientReasons": give_reasons,
    "Graph": lambda: rg.Graph.load(made("graph").save(FOLDER / "graph.parquet")),
    "History": lambda: repr(rg.History()),
    "Inventory": lambda: rg.Inventory.load(made("inventory").save(FOLDER / "inventory.parquet")),
    "Keep": lambda: rg.record(net, tensors=rg.Keep("0:output")).close(),
    "Kinks": lambda: str(rg.find_kinks(net, x)),
    "LiveLines": live,
    "Mirror": lambda: isinstance(None, rg.Mirror),
    "Recording": lambda: isinstance(None, rg.Recording),
    "RetrogradError": lambda: rg.RetrogradError("words"),
    "RetrogradWarning": lambda: rg.RetrogradWarning("words"),
    "Rewriting": lambda: isinstance(None, rg.Rewriting),
    "Run": lambda: isinstance(None, rg.Run),
    "Trace": lambda: rg.Trace.load(made("trace").save(FOLDER / "trace.json.gz")),
    "check_adjoint": lambda: rg.check_adjoint(noisy, x, progress=True),
    "describe": lambda: rg.describe(made("history")).as_json(),
    "draw_graph": lambda: [rg.draw_graph(made("graph"), FOLDER / name) for name in ("graph.svg", "graph.html")],
    "compact": use_compaction,
    "check_batch": lambda: str(rg.check_batch(net, several)),
    "check_causal": lambda: str(rg.check_causal(causal, tokens)),
    "find_nan": lambda: str(rg.find_nan(net, x)),
    "Mixing": lambda: str(rg.check_batch(net, several)),
    "NotFinite": lambda: str(rg.find_nan(net, x * float("inf"))),
    "compare": lambda: str(rg.compare(made("history"), made("history"))),
    "every": lambda: rg.every(2),
    "explain": explain,
    "explain_gradients": give_reasons,
    "export": lambda: [made("history"), rg.export(FOLDER / "run", "csv", FOLDER / "exported")],
    "extract": lambda: rg.extract(net, x, "0"),
    "extract_dataset": dataset,
    "find_kinks": lambda: str(rg.find_kinks(net, x)),
    "findings": explain,
    "format_graph": lambda: rg.format_graph(made("graph")),
    "format_heatmap": lambda: rg.format_heatmap(made("history")),
    "format_inventory": lambda: rg.format_inventory(made("inventory")),
    "format_table": lambda: rg.format_table(made("history")),
    "format_trace": lambda: rg.format_trace(made("trace")),
    "keep_saved": use_policies,
    "log_schedule": lambda: rg.log_schedule(),
    "mirror": lambda: [made("history"), rg.mirror(FOLDER / "run", "tensorboard", FOLDER / "mirrored").close()],
    "on_jump": lambda: rg.record(net, tensors=rg.Keep("0:output", when=rg.on_jump())).close(),
    "on_nonfinite": lambda: rg.record(net, tensors=rg.Keep("0:output", when=rg.on_nonfinite())).close(),
    "open_bundle": use_bundle,
    "overhead": lambda: rg.record(net, schedule=rg.overhead(0.05)).close(),
    "open_features": lambda: rg.open_features(FOLDER / "features"),
    "open_run": lambda: [made("history"), repr(rg.open_run(FOLDER / "run"))],
    "per_sample_gradients": split_samples,
    "plan_recording": lambda: str(rg.plan_recording(net)),
    "print_graph": lambda: rg.print_graph(made("graph"), file=out()),
    "print_heatmap": lambda: rg.print_heatmap(made("history"), file=out()),
    "print_inventory": lambda: rg.print_inventory(made("inventory"), file=out()),
    "print_table": lambda: rg.print_table(made("history"), file=out()),
    "print_trace": lambda: rg.print_trace(made("trace"), file=out()),
    "record": use_record,
    "record_origins": lambda: rg.record_origins(net).__enter__().__exit__(None, None, None),
    "simulate_rule": lambda: str(rg.simulate_rule(rg.rules.Noise(0.1), made("history"), "*:output.grad")),
    "replay": use_bundle,
    "rerun": run_nodes,
    "rewrite": rewrite,
    "rules": use_rules,
    "run_from": run_nodes,
    "saved": use_policies,
    "statistic": lambda: rg.record(net, statistics=[rg.statistic(draw, name="drawn")]).close(),
    "step_through": step,
    "take_inventory": lambda: rg.take_inventory(noisy, x),
    "trace": live,
    "walk": lambda: rg.walk(loss()),
    "log": use_record,
    "watch": lambda: rg.watch("mine", x),
    "watch_hangs": hangs,
    "write_bundle": use_bundle,
    "write_chrome_trace": lambda: rg.write_chrome_trace(made("trace"), FOLDER / "chrome.json"),
    "write_inventory": lambda: rg.write_inventory(made("inventory"), FOLDER / "inventory.html"),
    "write_comparison": lambda: rg.write_comparison([made("history"), made("history")], FOLDER / "compared.html"),
    "write_report": lambda: rg.write_report(made("history"), FOLDER / "report.html"),
}
"""Public name → a use of it. What a forward of the user's own draws when it is asked for is none of ours."""

if __name__ == "__main__":
    moved: dict[str, list[str]] = {}
    compiled: dict[str, list[str]] = {}
    before = read_states()
    for name in [*rg.__all__, *rg.__all__]:  # as it comes first, and again when all is loaded
        USES[name]()
        after = read_states()
        if names := [each for each in before if before[each] != after[each]]:
            moved.setdefault(name, []).extend(names)
        before = after
        if found := read_compiled():
            compiled.setdefault(name, found)
    with rg.record(net):
        torch.compile(net, backend="aot_eager")(x).sum().backward()
    print(json.dumps({"moved": moved, "compiled": compiled, "control": read_compiled()}))
