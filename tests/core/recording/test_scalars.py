"""Scalars of a recording are what torch itself finds: norms that clipping returns, sums by hand, rates of groups."""

from __future__ import annotations

import datetime as dt
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import duckdb
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import retrograd as rg
from retrograd.core.errors import RetrogradWarning, ScalarError
from retrograd.core.limits import LIMITS
from retrograd.core.runs import manifest
from tests import warm

Parameters = Iterable[Tensor]


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def total(parameters: Parameters) -> float:
    """By numpy, in float64."""
    gradients = [each.grad.float().numpy().astype(np.float64) for each in parameters if each.grad is not None]
    return math.sqrt(sum(float((each**2).sum()) for each in gradients))


def loss_of(net: nn.Module) -> Tensor:
    loss: Tensor = net(torch.randn(8, 6)).float().square().mean()
    return loss


def values(history: rg.History, name: str) -> list[float]:
    return history.scalars[name].values.tolist()


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("in_folder", [True, False])
def test_norms_are_those_of_what_the_optimizer_gets(
    net: nn.Sequential, micros: int, in_folder: bool, tmp_path: Path
) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    before, after, ratios = [], [], []
    with rg.record(net, tmp_path / "run" if in_folder else None) as recording:
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(micros):
                (loss_of(net) / micros).backward()
            before.append(clip_grad_norm_(net.parameters(), 0.1).item())
            after.append(total(net.parameters()))
            old = [each.detach().clone() for each in net.parameters()]
            optimizer.step()
            moved = sum(
                ((new.detach() - was).double() ** 2).sum() for new, was in zip(net.parameters(), old, strict=True)
            )
            ratios.append(math.sqrt(float(moved / sum((was.double() ** 2).sum() for was in old))))
    history = recording.history
    assert values(history, "grad_norm") == pytest.approx(before, rel=1e-6)
    assert values(history, "grad_norm_clipped") == pytest.approx(after, rel=1e-5)
    assert values(history, "update_ratio") == pytest.approx(ratios, rel=1e-4)
    assert history.scalars["grad_norm"].steps.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("most", [None, 0.01])
def test_each_parameter_has_the_norm_of_what_several_passes_left(net: nn.Sequential, most: float | None) -> None:
    """It is taken when the optimizer begins to step: clipped, where something clips it."""
    optimizer, norms = torch.optim.SGD(net.parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *args: norms.append(net[0].weight.grad.norm().item()))
    with rg.record(net) as recording:
        for step in range(4):
            optimizer.zero_grad()
            for _ in range(1 if step == 0 else 3):
                loss_of(net).backward()
            if most is not None:
                clip_grad_norm_(net.parameters(), most)
            optimizer.step()
    series = recording.history["0:weight.accumulated"]
    assert series.steps.tolist() == [1, 2, 3]
    assert series.l2.tolist() == pytest.approx(norms[1:], rel=1e-6)


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loss_scaling_is_divided_out(net: nn.Sequential, unscales: bool, clips: bool, dtype: torch.dtype) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before, after = [], []
    with rg.record(net) as recording:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = loss_of(net)
            scaler.scale(loss).backward()
            before.append(total(net.parameters()) / 1024)
            if unscales:
                scaler.unscale_(optimizer)
            if clips:
                clip_grad_norm_(net.parameters(), 0.1 if unscales else 50.0)
            after.append(total(net.parameters()) / (1 if unscales else 1024))
            scaler.step(optimizer)
            scaler.update()
    assert values(recording.history, "grad_norm") == pytest.approx(before, rel=1e-5)
    assert ("grad_norm_clipped" in recording.history.scalars) is clips
    if clips:
        assert values(recording.history, "grad_norm_clipped") == pytest.approx(after, rel=1e-5)
    assert values(recording.history, "scale") == [1024.0] * 3


def clip_all(net: nn.Sequential) -> None:
    clip_grad_norm_(net.parameters(), 0.01)


def clip_each(net: nn.Sequential) -> None:
    clip_grad_norm_(net[0].parameters(), 0.01)
    clip_grad_norm_(net[2].parameters(), 0.02)


def clip_one(net: nn.Sequential) -> None:
    clip_grad_norm_(net[0].weight, 0.01)


def clip_twice(net: nn.Sequential) -> None:
    clip_grad_norm_(net.parameters(), 0.02)
    clip_grad_norm_(net.parameters(), 0.01)


def clip_values(net: nn.Sequential) -> None:
    clip_grad_value_(net.parameters(), 0.01)


@pytest.mark.parametrize("clip", [clip_all, clip_each, clip_one, clip_twice, clip_values])
def test_norms_of_several_optimizers_and_clips_add_up(
    net: nn.Sequential, clip: Callable[[nn.Sequential], None]
) -> None:
    optimizers = [torch.optim.SGD(net[place].parameters(), lr=0.1) for place in (0, 2)]
    before, after = [], []
    with rg.record(net) as recording:
        for _ in range(3):
            net.zero_grad()
            loss_of(net).backward()
            before.append(total(net.parameters()))
            clip(net)
            after.append(total(net.parameters()))
            for optimizer in optimizers:
                optimizer.step()
    history = recording.history
    assert values(history, "grad_norm") == pytest.approx(before, rel=1e-5)
    assert values(history, "grad_norm_clipped") == pytest.approx(after, rel=1e-4)
    assert {"lr", "lr[SGD_2]"} <= set(history.scalars)


def test_a_norm_before_clipping_that_is_not_known_is_not_told(net: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net) as recording:
        loss_of(net).backward()
        clip_grad_norm_(net.parameters(), 0.01, norm_type=math.inf)
        optimizer.step()
    assert "grad_norm" not in recording.history.scalars
    assert values(recording.history, "grad_norm_clipped") == pytest.approx([total(net.parameters())], rel=1e-5)


def test_gradients_of_a_closure_are_those_of_its_last_call(net: nn.Sequential) -> None:
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    seen: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        seen.append(total(net.parameters()))
        return loss

    last = []
    with rg.record(net) as recording:
        for _ in range(3):
            optimizer.step(closure)
            last.append(seen[-1])
    assert values(recording.history, "grad_norm") == pytest.approx(last, rel=1e-5)


def test_a_gan_has_the_norm_of_both_by_step(net: nn.Sequential) -> None:
    critic = nn.Linear(1, 1)
    of_critic, of_generator = (torch.optim.Adam(each.parameters()) for each in (critic, net))
    squares: dict[int, dict[int, float]] = {}
    with rg.record({"generator": net, "critic": critic}) as recording:
        for _ in range(5):
            for optimizer, sign in ((of_critic, 1.0), (of_generator, -1.0)):
                optimizer.zero_grad()
                fake = net(torch.randn(8, 6))
                (sign * critic(fake.detach() if sign > 0 else fake)).mean().backward()
                model = critic if sign > 0 else net
                squares.setdefault(recording.step, {})[id(model)] = total(model.parameters()) ** 2  # the last of each
                optimizer.step()
    curve = recording.history.scalars["grad_norm"]
    assert dict(zip(curve.steps.tolist(), (curve.values**2).tolist(), strict=True)) == pytest.approx(
        {step: sum(each.values()) for step, each in squares.items()}, rel=1e-5
    )


def test_sparse_and_half_gradients_count_too() -> None:
    net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2).bfloat16())
    optimizer, norms = torch.optim.SGD(net.parameters(), lr=0.1), []
    with rg.record(net) as recording:
        net[1](net[0](torch.randint(10, (3, 5))).bfloat16()).square().mean().backward()
        dense = [net[0].weight.grad.to_dense(), *(each.grad.float() for each in net[1].parameters())]
        norms.append(torch.cat([each.flatten() for each in dense]).norm().item())
        optimizer.step()
    assert values(recording.history, "grad_norm") == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("every", [1, 3])
def test_rates_are_those_of_each_group_when_it_updates(net: nn.Sequential, every: int) -> None:
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": torch.tensor(0.02)}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    rates: list[list[float]] = []
    with rg.record(net, schedule=every) as recording:
        for _ in range(80):
            optimizer.zero_grad()
            loss_of(net).backward()
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
    scalars = recording.history.scalars
    for group in range(2):
        assert scalars[f"lr[{group}]"].steps.tolist() == list(range(0, 80, every))
        assert scalars[f"lr[{group}]"].values.tolist() == pytest.approx([each[group] for each in rates[::every]])
    assert ("every 3 steps" in scalars.about("lr[0]").about) is (every == 3)


@pytest.mark.parametrize("clips", [True, False])
def test_within_a_budget_it_is_said_which_numbers_are_there_at_each_step(net: nn.Sequential, clips: bool) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net, schedule=rg.overhead(0.0001)) as recording:
        for _ in range(300):
            optimizer.zero_grad()
            loss_of(net).backward()
            if clips:
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
    scalars = recording.history.scalars
    for name in ("loss", "lr", "grad_norm", "update_ratio", *(["grad_norm_clipped"] if clips else [])):
        found = len(scalars[name].steps)
        said = f"; at {found} of 300 steps (within a budget of 0.01 %)" if found < 300 else ""
        assert scalars.about(name).about.endswith(said)
        assert ("budget" in scalars.about(name).about) is (found < 300)
    assert len(scalars["lr"].steps) == 300 > len(scalars["update_ratio"].steps)
    assert (len(scalars["grad_norm"].steps) == 300) is clips


def test_of_each_third_step_alone_losses_are_at_recorded_steps_too(net: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net, schedule=3) as recording:
        for _ in range(30):
            optimizer.zero_grad()
            loss_of(net).backward()
            optimizer.step()
    scalars = recording.history.scalars
    for name in ("loss", "lr", "grad_norm", "update_ratio"):
        assert scalars.about(name).about.endswith("; at recorded steps (every 3 steps)")


class WithLoss(nn.Module):
    """Returns its loss, as a model of a library does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.kind = kind

    def forward(self, x: Tensor) -> object:
        out = self.linear(x)
        loss = F.mse_loss(out, torch.zeros_like(out))
        return {"tuple": (out, loss), "mapping": {"loss": loss, "out": out}, "loss": loss}[self.kind]


def take(output: object) -> Tensor:
    loss: object = output["loss"] if isinstance(output, dict) else output[1] if isinstance(output, tuple) else output
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.parametrize("kind", ["tuple", "mapping", "loss"])
@pytest.mark.parametrize("grad", [True, False])
def test_losses_of_evaluations_are_averaged(kind: str, grad: bool) -> None:
    model = WithLoss(kind)
    optimizer, means = torch.optim.SGD(model.parameters(), lr=0.1), []
    with rg.record(model) as recording:
        for _ in range(3):
            model.train()
            optimizer.zero_grad()
            take(model(torch.randn(8, 6))).backward()
            optimizer.step()
            model.eval()
            with torch.set_grad_enabled(grad):
                means.append(np.mean([take(model(torch.randn(8, 6))).item() for _ in range(4)]))
    assert values(recording.history, "eval_loss") == pytest.approx(means, rel=1e-6)
    assert len(recording.history.loss.steps) == 3


def test_throughput_is_the_batch_over_the_time_of_a_step(net: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net) as recording:
        for _ in range(4):
            for _ in range(2):
                loss_of(net).backward()
            optimizer.step()
    scalars, history = recording.history.scalars, recording.history
    times = [event.time for event in history.events if event.kind == "update"]
    assert scalars["step_time"].values.tolist() == pytest.approx(np.diff(times).tolist())
    assert scalars["throughput"].values.tolist() == pytest.approx((16 / np.diff(times)).tolist())
    assert scalars.about("throughput").unit == "samples/s"
    assert scalars["memory"].values[0] > 1 << 20


def test_memory_that_is_not_known_is_not_noted(
    net: nn.Sequential, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrograd.core.recording.scalar_watch._OF_PROCESS", tmp_path / "statm")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net) as recording:
        loss_of(net).backward()
        optimizer.step()
    assert "memory" not in recording.history.scalars
    assert "lr" in recording.history.scalars


# ---- rg.log ----


def test_what_the_program_logs_is_of_the_step_that_it_is(net: nn.Sequential, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net, tmp_path / "run") as recording:
        rg.log(early=True)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(net)
            loss.backward()
            optimizer.step()
            rg.log(accuracy=np.float32(step / 2), loss=loss, nothing=math.nan)
            rg.log({"val": {"accuracy": torch.tensor([step])}}, step=10 * step)
            rg.log(accuracy=step)
    scalars = rg.open_run(tmp_path / "run").history.scalars
    assert scalars["early"].values.tolist() == [1.0]
    assert scalars["accuracy"].steps.tolist() == [0, 1, 2]
    assert scalars["accuracy"].values.tolist() == [0.0, 1.0, 2.0]
    assert scalars["logged/loss"].values.tolist() == pytest.approx(scalars["loss"].values.tolist())
    assert scalars["val/accuracy"].steps.tolist() == [0, 10, 20]
    assert np.isnan(scalars["nothing"].values).all()
    assert recording.history.scalars.to_arrow().column_names[0] == "step"
    frame = recording.history.scalars.to_pandas()
    assert frame["accuracy"][2] == 2.0
    assert math.isnan(frame["accuracy"][10])
    assert recording.history.scalars.to_polars()["step"].to_list() == [0, 1, 2, 10, 20]


@pytest.mark.parametrize("value", ["0.9", None, 1j, [1.0], torch.ones(2), np.ones(3), object()])
def test_what_is_no_number_is_named(net: nn.Sequential, value: object) -> None:
    with rg.record(net), pytest.raises(ScalarError, match="'val/acc'"):
        rg.log({"val": {"acc": value}})


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_what_is_no_step_is_refused(step: object) -> None:
    with pytest.raises(ScalarError, match="not a step"):
        rg.log(a=1, step=step)  # type: ignore[arg-type]


def test_without_a_recording_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrograd.core.recording.logged._said", [])
    with pytest.warns(RetrogradWarning, match="nothing is recorded"):
        rg.log(a=1)
    rg.log(a=1)


SCRIPT = """
import torch, retrograd as rg
from torch import nn
rg.log(before=1)
net = nn.Linear(2, 1); opt = torch.optim.SGD(net.parameters(), lr=.1)
for step in range(3):
    net(torch.ones(4, 2)).sum().backward(); opt.step(); opt.zero_grad()
    rg.log(mine=step)
"""


def test_a_script_that_is_run_may_log(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = tmp_path / "run"
    command = [sys.executable, "-m", "retrograd", "run", "--quiet", "-o", str(run), "train.py", "--lr", "0.1"]
    warm.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    history = rg.open_run(run).history
    assert history.scalars["mine"].values.tolist() == [0.0, 1.0, 2.0]
    assert history.scalars["before"].values.tolist() == [1.0]


# ---- records ----


@pytest.fixture
def few_held() -> Iterator[None]:
    held, LIMITS.held_events = LIMITS.held_events, 20
    yield
    LIMITS.held_events = held


@pytest.mark.parametrize("is_long", [True, False])
def test_a_resumed_run_has_no_step_as_long_as_the_pause(
    net: nn.Sequential, tmp_path: Path, is_long: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_long:
        request.getfixturevalue("few_held")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    later, clock = 0.0, time.time
    monkeypatch.setattr(time, "time", lambda: clock() + later)
    norms = []
    for session in range(2):
        with rg.record(net, tmp_path / "run", resume=session > 0):
            for _ in range(20):
                optimizer.zero_grad()
                loss_of(net).backward()
                norms.append(total(net.parameters()))
                optimizer.step()
        later = 3600.0
        started = dt.datetime.fromtimestamp(clock() + later - 10, dt.UTC).isoformat(timespec="seconds")
        facts = manifest.gather_facts() | {"started": started}
        monkeypatch.setattr(manifest, "gather_facts", lambda facts=facts: dict(facts))
    scalars = rg.open_run(tmp_path / "run").history.scalars
    assert scalars["grad_norm"].values.tolist() == pytest.approx(norms, rel=1e-5)
    assert scalars["lr"].steps.tolist() == list(range(40))
    assert 20 not in scalars["step_time"].steps.tolist()
    assert scalars["step_time"].values.max() < 3000


def test_the_sql_of_the_page_reads_scalars_from_the_folder(net: nn.Sequential, tmp_path: Path) -> None:
    """As the history has them; what is logged, by hand too: of two of a step the last."""
    page = Path(__file__).parents[3] / "docs" / "run_folder.md"
    queries = re.findall(r"^```sql\n-- DuckDB\n(.*?);\n```", page.read_text(), re.DOTALL | re.MULTILINE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    criterion = nn.MSELoss()
    with rg.record({"head": net}, tmp_path) as recording:
        for step in range(5):
            optimizer.zero_grad()
            for _ in range(2):
                criterion(net(torch.randn(4, 6)), torch.zeros(4, 1)).backward()
            clip_grad_norm_(net.parameters(), 0.1)
            rg.log(accuracy=9.0)
            rg.log(accuracy=step / 10)
            optimizer.step()
            with torch.no_grad():
                criterion(net(torch.randn(4, 6)), torch.zeros(4, 1))
    scalars = recording.history.scalars
    rows, loss, each = (duckdb.sql(query.replace("RUN", str(tmp_path))).fetchall() for query in queries)
    assert [step for step, _ in rows] == sorted([*range(5)] * 2)  # a row for each micro-batch
    assert loss == list(zip(range(5), scalars["loss"].values.tolist(), strict=True))
    assert [(step, value) for step, name, value in each if name == "accuracy"] == [(n, n / 10) for n in range(5)]
    names = {name for _, name, _ in each} - {"batch"}
    assert names == {"accuracy", "eval_loss", "grad_norm", "grad_norm_clipped", "memory", "update_ratio"}
    for name in names:
        mine = [(step, value) for step, of, value in each if of == name]
        assert [step for step, _ in mine] == scalars[name].steps.tolist()
        assert [value for _, value in mine] == pytest.approx(scalars[name].values.tolist(), rel=1e-12)
