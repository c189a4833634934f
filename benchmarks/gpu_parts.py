"""The parts of ``gpu.py`` that are programs of ours. Each prints its verdicts."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import retrograd as rg
from contenders import OUTPUTS, Contender, bare, bare_training, recorded
from device import DEVICE, ON_DEVICE, describe_machine, synchronize, use_tf32
from nets import Net, make_gpt2, make_mlp
from retrograd.core.recording import deliveries
from retrograd.core.statistics import slab, torch_slab
from timing import interleave, say

OURS = str(Path(rg.__file__).parent)


def judge(holds: bool, text: str) -> None:
    """Print a verdict."""
    print(f"{'holds' if holds else 'FAILS'}: {text}")


def make_small_gpt(batch: int = 4) -> Net:
    """2 layers of width 64, with dropout, so that random numbers are drawn."""
    torch.manual_seed(0)
    net = make_gpt2(layers=2, width=64, heads=2, length=32, batch=batch, vocabulary=256)
    for module in net.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    net.to(DEVICE, torch.preserve_format)
    return net


def watch_nothing(net: Net, folder: str) -> AbstractContextManager[Any]:
    return nullcontext()


def watch_with_record(net: Net, folder: str) -> AbstractContextManager[Any]:
    return rg.record(net.model, f"{folder}/run")


# ---- build ----------------------------------------------------------------------------------------------------

COMPILED = ("statistics._kernel", "hooks._native")
"""Below ``retrograd.core``."""


def build(*, small: bool) -> None:
    """Compile where nothing that can be loaded is there; without a compiler all else runs with the twins in Python."""
    if not can_be_loaded():
        root = Path(__file__).resolve().parents[1]
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=root, check=True)
    judge(can_be_loaded(), f"{len(COMPILED)} compiled modules can be loaded")


def can_be_loaded() -> bool:
    program = "; ".join(f"import retrograd.core.{name}" for name in COMPILED)
    return subprocess.run([sys.executable, "-c", program], check=False, stderr=subprocess.DEVNULL).returncode == 0


# ---- waits ----------------------------------------------------------------------------------------------------

WAITING = ("item", "cpu", "tolist", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")
"""Methods of a tensor that wait for a device; what stands in for its own check where there is none."""


@contextmanager
def waits_counted() -> Iterator[Counter[str]]:
    """Count the places that wait: by torch's check of synchronising operations, or by the methods that would be such.

    The check is set to warn. To raise, as it can, would be of no use: what fails within a hook of ours is caught there.
    """
    found: Counter[str] = Counter()

    def count(*_: Any, **__: Any) -> None:
        place = find_place()
        if "deliveries.py" not in place or ON_DEVICE:  # it reads what has come
            found[place] += 1

    if ON_DEVICE:
        before, warnings.showwarning = warnings.showwarning, count
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message="called a synchronizing")
            torch.cuda.set_sync_debug_mode("warn")
            found.clear()  # it warns that it is a prototype
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
                warnings.showwarning = before
        return
    methods = {name: getattr(Tensor, name) for name in WAITING}
    for name, method in methods.items():
        setattr(Tensor, name, lambda *args, _method=method, **options: (count(), _method(*args, **options))[1])
    try:
        yield found
    finally:
        for name, method in methods.items():
            setattr(Tensor, name, method)


def find_place() -> str:
    """Our innermost two lines of the stack, or its innermost line where none is ours."""
    frames = traceback.extract_stack()[:-2]
    ours = [frame for frame in frames if frame.filename.startswith(OURS)]
    shown = ours[-2:] or [frame for frame in frames if frame.filename != __file__][-1:]
    return " > ".join(f"{frame.filename.removeprefix(OURS).lstrip('/')}:{frame.lineno} {frame.name}" for frame in shown)


def find_waits(*, small: bool) -> None:
    """Places where training waits for the device, bare and recorded: five steps, and one in which facts are sampled."""
    if not ON_DEVICE:  # as a device without a kernel of ours would be read
        slab.NativeSlab = None  # type: ignore[assignment]
        torch_slab.read_fast = lambda x, reference: None  # type: ignore[assignment]
        deliveries._is_device = lambda device: True
    net = make_small_gpt()
    net.training_step()
    usual: set[str] = set()
    for name, first, steps, attached in (("bare", 0, 5, False), ("recorded", 9, 5, True), ("sampled", 16, 1, True)):
        watch = watch_with_record if attached else watch_nothing
        with tempfile.TemporaryDirectory() as folder, watch(net, folder):
            for _ in range(first):
                net.training_step()
            synchronize()
            with waits_counted() as found:
                for _ in range(steps):
                    net.training_step()
        print(f"{name}, {steps} steps: {sum(found.values())} waits")
        for place, count in found.most_common():
            print(f"    {count:4} {place}")
        if name == "bare":
            usual = set(found)
        elif name == "recorded":
            ours = set(found) - usual
            judge(not ours, f"nothing of ours waits, in a recorded step or between two; {len(ours)} places do")


# ---- twins ----------------------------------------------------------------------------------------------------


def train(watch: Callable[[Net, str], AbstractContextManager[Any]], dtype: torch.dtype, steps: int) -> list[Tensor]:
    """Train by AdamW under autocast, with a GradScaler for float16.

    Returns:
        On the host: the losses, all weights, all moments, the state of the generator, the scale.
    """
    net = make_small_gpt()
    parameters = list(net.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype is torch.float16)
    losses = []
    with tempfile.TemporaryDirectory() as folder, watch(net, folder):
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, dtype):
                loss = net.loss(net.model(net.inputs))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
    state = torch.cuda.get_rng_state() if ON_DEVICE else torch.get_rng_state()
    moments = [each for kept in optimizer.state.values() for each in kept.values() if isinstance(each, Tensor)]
    found = [*losses, *parameters, *moments, state, torch.tensor(scaler.get_scale())]
    return [each.detach().cpu().clone() for each in found]


WATCHES: dict[str, Callable[[Net, str], AbstractContextManager[Any]]] = {
    "nothing (whether it repeats at all)": watch_nothing,
    "record": watch_with_record,
    "record, tensors kept": lambda net, folder: rg.record(net.model, f"{folder}/run", tensors="*.attn:output"),
    "rewrite by 1": lambda net, folder: rg.rewrite(net.model, {"*:output.grad": rg.rules.Scale(1.0)}),
    "keep_saved on the host": lambda net, folder: rg.keep_saved(net.model, rg.saved.Cpu(min_bytes=1 << 12)),
    "keep_saved on disk": lambda net, folder: rg.keep_saved(net.model, rg.saved.Disk(min_bytes=1 << 12)),
    "keep_saved, budget of a half": lambda net, folder: rg.keep_saved(net.model, rg.saved.Planned(0.5)),
    "trace": lambda net, folder: rg.trace(),
}


def compare_twins(*, small: bool) -> None:
    torch.use_deterministic_algorithms(True)
    for dtype in (torch.bfloat16, torch.float16):
        expected = train(watch_nothing, dtype, 3 if small else 20)
        for name, watch in WATCHES.items():
            try:
                found = train(watch, dtype, 3 if small else 20)
            except Exception as error:  # the others are still to be seen
                judge(False, f"{dtype}, {name}: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            pairs = zip(found, expected, strict=True)
            differ = sum(not torch.equal(*(each.reshape(-1).view(torch.uint8) for each in pair)) for pair in pairs)
            judge(differ == 0, f"{dtype}, {name}: {differ} of {len(expected)} tensors differ in their bits")


# ---- cost -----------------------------------------------------------------------------------------------------

AFTER = 33
"""Steps before any is measured: facts are sampled at step 32, and at 64 again."""


def time_steps(contender: Contender, net: Net, steps: int, after: int) -> float:
    """Seconds a step, until the device has done all of it."""
    with contender(net) as (step, finish):
        for _ in range(after):
            step()
        synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        finish()
        synchronize()
        return (time.perf_counter() - began) / steps


def list_nets(*, small: bool) -> dict[str, Callable[[], Net]]:
    """Two that the host cannot launch fast enough, and one that keeps the device busy."""
    if small:
        return {"mlp, batch 1": partial(make_mlp, 256, 1), "gpt2, small": make_small_gpt}
    return {
        "mlp, batch 1": partial(make_mlp, 256, 1),
        "mlp, batch 64": partial(make_mlp, 256, 64),
        "gpt2, 6 layers, batch 64": partial(make_gpt2, batch=64),
        "gpt2, 12 x 768, batch 16 x 512": partial(
            make_gpt2, layers=12, width=768, heads=12, length=512, batch=16, vocabulary=8192
        ),
    }


def measure_cost(*, small: bool) -> None:
    use_tf32()
    print(describe_machine())
    after, steps, rounds = (2, 2, 1) if small else (AFTER, 30, 3)
    for name, make in list_nets(small=small).items():
        torch.manual_seed(0)
        net = make()
        net.to(DEVICE, torch.preserve_format)
        groups: tuple[tuple[Contender, dict[str, Contender]], ...] = (
            (bare, {
                "bare (the noise)": bare,
                "not scheduled": recorded(after=0, sites=OUTPUTS, schedule=lambda step: False),
                "statistics": recorded(after=0, sites=OUTPUTS, histogram=False),
                "statistics, histogram": recorded(after=0, sites=OUTPUTS),
            }),
            (bare_training, {
                "all by default": recorded(after=0, training=True),
                "all by default, every 10th step": recorded(after=0, training=True, every=10),
            }),
        )  # fmt: skip
        for base, contenders in groups:
            measure_against(base, contenders, net, name, (steps, after, rounds))


def measure_against(
    base: Contender, contenders: dict[str, Contender], net: Net, title: str, sizes: tuple[int, int, int]
) -> None:
    steps, after, rounds = sizes
    ratios: dict[str, list[float]] = {name: [] for name in contenders}
    seconds: list[float] = []
    for turn in interleave(
        contenders, rounds,
        lambda name: time_steps(contenders[name], net, steps, after),
        lambda: time_steps(base, net, steps, 2),
        seconds=8.0,
    ):  # fmt: skip
        ratios[turn.name].append(2 * turn.found / (turn.before + turn.after))
        seconds += [turn.before, turn.after]
    for name, found in ratios.items():
        middle, low, high = statistics.median(found), min(found), max(found)
        say(f"{title}, {name}: {middle:.2f} [{low:.2f} {high:.2f}] of {1e3 * statistics.median(seconds):.2f} ms")


# ---- capture --------------------------------------------------------------------------------------------------


def train_captured(watch: Callable[[nn.Module], AbstractContextManager[Any]], *, inside: bool) -> list[Tensor]:
    """Capture a whole step after three, replay it five times; what watches begins before that, or around all of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(32, 64, device=DEVICE)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()
        optimizer.step()

    with watch(model) if inside else nullcontext():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            step()
        for _ in range(5):
            graph.replay()
    with nullcontext() if inside else watch(model):
        for _ in range(2):
            graph.replay()
    torch.cuda.synchronize()
    return [each.detach().cpu().clone() for each in model.parameters()]


def train_compiled(*, recorded: bool, small: bool) -> tuple[list[float], int]:
    """The losses of six steps of a compiled net, and how many sites were recorded."""
    torch._dynamo.reset()
    net = make_small_gpt()
    for module in net.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    how = {"backend": "aot_eager"} if small else {"mode": "reduce-overhead"}
    compiled: Any = torch.compile(net.model, **how)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(net.model.parameters(), lr=0.1)
    losses = []
    with rg.record(net.model) if recorded else nullcontext() as recording:
        for _ in range(6):
            optimizer.zero_grad()
            loss = net.loss(compiled(net.inputs))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    history = recording.history if recording is not None else None
    sites = [site for site in history.sites if history[site].count.size] if history is not None else []
    return losses, len(sites)


def attempt(name: str, check: Callable[[], tuple[bool, str]]) -> None:
    """Judge, also where it raises."""
    try:
        judge(*check())
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        judge(False, f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def check_captures(*, small: bool) -> None:
    def compare_captures(*, inside: bool) -> tuple[bool, str]:
        expected = train_captured(lambda model: nullcontext(), inside=inside)
        found = train_captured(rg.record, inside=inside)
        same = all(map(torch.equal, found, expected))
        return same, f"a step captured {'inside' if inside else 'before'} a recording gives the same weights"

    def compare_compiled() -> tuple[bool, str]:
        (plain, _), (watched, sites) = (train_compiled(recorded=each, small=small) for each in (False, True))
        worst = max(abs(a - b) for a, b in zip(plain, watched, strict=True))
        return worst < 1e-5 and sites > 0, f"compiled: losses within {worst:.1e}, {sites} sites recorded"

    if ON_DEVICE:
        for inside in (True, False):
            attempt("capture by hand", lambda inside=inside: compare_captures(inside=inside))
    else:
        print("skipped: a capture by hand needs a device")
    attempt("compiled", compare_compiled)


# ---- streams --------------------------------------------------------------------------------------------------


def check_streams(*, small: bool) -> None:
    """A forward on a side stream, each step; kept tensors and norms are those that were there."""
    torch.manual_seed(0)
    width, steps = (64, 3) if small else (2048, 10)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(DEVICE)
    batch = torch.randn(width, width, device=DEVICE)
    side = torch.cuda.Stream() if ON_DEVICE else None
    norms, outputs = [], []
    handle = model[1].register_forward_hook(lambda module, args, output: outputs.append(output.detach().clone()))
    with tempfile.TemporaryDirectory() as folder:
        keep = rg.Keep("1:output", last=steps)
        with rg.record(model, f"{folder}/run", tensors=keep, tensor_budget="2GB") as recording:
            for number in range(steps):
                if side is None or number % 2:
                    loss = model(batch * (number + 1)).square().mean()
                else:
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        loss = model(batch * (number + 1)).square().mean()
                    torch.cuda.current_stream().wait_stream(side)
                loss.backward()
                model.zero_grad()
        handle.remove()
        synchronize()
        norms = [output.double().norm().item() for output in outputs]
        series = recording.history["1:output"]
        kept = [each.tensor for each in series.tensors]
        same = [torch.equal(a, b.cpu()) for a, b in zip(kept, outputs, strict=True)]
    off = max(abs(a - b) / b for a, b in zip(series.l2.tolist(), norms, strict=True))
    judge(off < 1e-5, f"norms of {steps} outputs, half of them of a side stream: off by {off:.1e} at most")
    judge(all(same), f"{sum(same)} of {steps} kept tensors are what was computed, bit for bit")


PARTS: dict[str, Callable[..., None]] = {
    "build": build,
    "waits": find_waits,
    "twins": compare_twins,
    "cost": measure_cost,
    "capture": check_captures,
    "streams": check_streams,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    PARTS[arguments.part](small=arguments.small)


if __name__ == "__main__":
    main()
