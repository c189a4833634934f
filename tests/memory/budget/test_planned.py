"""Training under a budget: bit by bit the same, and what is held is what was said."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import BudgetError, SavedPolicyError
from retrograd.memory.budget.plan import Plan
from retrograd.memory.budget.planned import Planned
from retrograd.memory.budget.planned_pass import Item, KnownPlans, PlannedPass
from retrograd.memory.policies.disk import Disk
from retrograd.memory.policies.policy import Saved
from retrograd.memory.saved.keeping import SavedHandle, keep_saved
from tests.memory.budget.residency import count_residency
from tests.memory.inventory.known_nets import ResNet
from tests.scenarios import ZOO, build, train

Loss = Callable[[], Tensor]


def planned(folder: Path, budget: float | str = 2**40) -> Planned:
    return Planned(budget, folder=folder, min_bytes=0)


# ---- exactness ------------------------------------------------------------------------------------------------


def run(name: str, make_policy: Callable[[], Planned] | None) -> tuple[list[tuple[str, bytes]], list[Planned]]:
    """A trial, with a policy for each of its models."""
    if name == "gpt2":
        pytest.importorskip("transformers")
    trial = build(name)
    policies: list[Planned] = []
    with ExitStack() as stack:
        for model in trial.modules.values() if make_policy is not None else ():
            policies.append(make_policy())
            stack.enter_context(keep_saved(model, policies[-1]))
        return train(trial), policies


@pytest.mark.parametrize("name", ZOO)
def test_every_bit_is_the_same_under_every_budget(name: str, tmp_path: Path) -> None:
    expected, _ = run(name, None)
    seen, policies = run(name, lambda: planned(tmp_path))
    assert seen == expected
    plans = [plan for policy in policies for plan in policy.plans]
    if not plans:
        pytest.skip("no pass of it ends in the run")
    peak, smallest = (max(getattr(plan, field) for plan in plans) for field in ("kept_peak", "smallest"))
    has_moved = False
    for budget in sorted({max(smallest, int(share * peak)) for share in (0.75, 0.5, 0.25, 0.0)}):
        seen, policies = run(name, lambda budget=budget: planned(tmp_path, budget))
        assert seen == expected
        for policy in policies:
            assert all(plan.predicted_peak <= budget for plan in policy.plans)
            has_moved |= any(set(plan.choices) != {"keep"} for plan in policy.plans)
    assert has_moved or smallest == peak


# ---- what is held ---------------------------------------------------------------------------------------------


def make_mlp() -> tuple[nn.Module, Loss]:
    layers = [part for _ in range(8) for part in (nn.Linear(128, 128), nn.ReLU())]
    model, x = nn.Sequential(*layers, nn.Linear(128, 1)), torch.randn(128, 128)
    return model, lambda: model(x).sum()


def make_convolutions() -> tuple[nn.Module, Loss]:
    model = ResNet((1, 2, 1)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 48, 48).to(memory_format=torch.channels_last)
    return model, lambda: model(x).square().mean()


def make_gpt2() -> tuple[nn.Module, Loss]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=100, n_positions=64, n_embd=64, n_layer=3, n_head=4)
    model, ids = transformers.GPT2LMHeadModel(config), torch.randint(0, 100, (4, 64))
    return model, lambda: model(ids, labels=ids).loss


NETS = {"mlp": make_mlp, "convolutions": make_convolutions, "gpt2": make_gpt2}


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5, 0.35])
@pytest.mark.parametrize("name", NETS)
def test_the_predicted_peak_is_the_measured_one(
    name: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    model, loss = NETS[name]()
    permanent = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    with keep_saved(model, planned(tmp_path, share)) as handle:
        loss().backward()
        plan = handle.plan
        assert plan is not None
        loss().backward()
        loss().backward()
        with count_residency(monkeypatch, lambda tensor: tensor.untyped_storage()._cdata not in permanent) as counter:
            loss().backward()
        assert handle.plan is plan
    assert plan.predicted_peak <= plan.budget
    assert counter.peak == pytest.approx(plan.predicted_peak, rel=0.03)
    assert counter.peak <= plan.budget
    if share < 1:
        assert counter.peak < plan.kept_peak


def test_the_measured_pass_keeps_near_the_budget_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss = make_mlp()
    permanent = {tensor.untyped_storage()._cdata for tensor in model.parameters()}
    kept = 9 * 128 * 128 * 4
    policy = planned(tmp_path, int(0.6 * kept))
    with (
        count_residency(monkeypatch, lambda tensor: tensor.untyped_storage()._cdata not in permanent) as counter,
        keep_saved(model, policy),
    ):
        loss().backward()
    assert counter.peak <= 0.6 * kept + 128 * 128 * 4


class Forgetful(Planned):
    """Every pass is the first."""

    def _finish(self) -> None:
        self._pass = None


# ---- passes of several kinds ----------------------------------------------------------------------------------


def gradients(model: nn.Module, steps: Callable[[], None], policy: Planned | None) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    with ExitStack() as stack:
        if policy is not None:
            stack.enter_context(keep_saved(model, policy))
        steps()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def make_layers(count: int = 6) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(part for _ in range(count) for part in (nn.Linear(32, 32), nn.Tanh())))


def test_times_are_taken_again_in_the_first_pass_that_follows_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, whose kernels are slow at first, and which waits for a program that tries things."""
    add, is_timed = KnownPlans.add, iter([False])
    monkeypatch.setattr(
        KnownPlans, "add", lambda plans, keys, plan, **_: add(plans, keys, plan, is_timed=next(is_timed, True))
    )
    model, seen = make_layers(), list[Plan | None]()
    batch = torch.randn(64, 32)
    policy = planned(tmp_path, 0.5)

    def steps() -> None:
        for _ in range(4):
            model(batch).square().sum().backward()
            seen.append(policy.plan)

    found, expected = gradients(model, steps, policy), gradients(model, steps, None)
    assert same(found, expected)
    first, second, third, fourth = seen[:4]
    assert first is not None
    assert second is not None
    assert second.recording.ranges == first.recording.ranges
    assert second.recording.events == first.recording.events
    assert second.recording.seconds != first.recording.seconds
    assert third is second
    assert fourth is second


@pytest.mark.parametrize("budget", ["1MB", "2MB"])
def test_a_forward_of_which_no_backward_has_run_yet(budget: str, tmp_path: Path) -> None:
    """What is never asked for never comes back."""
    parts = (part for _ in range(4) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()))
    model, batch = nn.Sequential(*parts), torch.randn(256, 64)

    def steps() -> None:
        model(batch).square().mean().backward()
        late = model(batch).square().mean()
        for _ in range(2):
            model(batch).square().mean().backward()
        late.backward()

    found = gradients(model, steps, planned(tmp_path, budget))
    assert same(found, gradients(model, steps, None))


class Interrupted(Planned):
    """Stops at the n-th range, as a Ctrl-C might."""

    at = -1

    def _place(self, current: PlannedPass, number: int, saved: Saved) -> Item:
        if number == self.at:
            raise KeyboardInterrupt
        return super()._place(current, number, saved)


def test_an_interrupt_while_packing_leaves_no_half_pass(tmp_path: Path) -> None:
    model, batch = make_layers(), torch.randn(64, 32)
    policy = Interrupted(0.5, folder=tmp_path, min_bytes=0)

    def steps() -> None:
        for place in (3, -1, 2, -1, -1):
            policy.at = place
            with suppress(KeyboardInterrupt):
                model(batch).square().sum().backward()

    def plainly() -> None:
        for _ in range(3):
            model(batch).square().sum().backward()

    assert same(gradients(model, steps, policy), gradients(model, plainly, None))
    assert policy.plan is not None


def test_another_batch_size_gets_a_plan_and_the_first_is_used_again(tmp_path: Path) -> None:
    model, policy = make_layers(), planned(tmp_path, 0.5)
    seen: list[object] = []

    def steps() -> None:
        for size in (64, 64, 40, 40, 40, 64, 40):
            model(torch.randn(size, 32)).square().sum().backward()
            seen.append(policy.plan)

    found = gradients(model, steps, policy)
    assert seen[0] is seen[1] is seen[5] is not seen[3]
    assert seen[3] is seen[4] is seen[6]
    assert len(policy.plans) == 2
    plan = policy.plans[0]
    assert plan is not None
    assert set(plan.choices) != {"keep"}
    assert same(found, gradients(model, steps, planned(tmp_path)))


def several_forwards(model: nn.Module) -> None:
    for _ in range(3):
        losses = [model(torch.randn(32, 32)).square().sum() for _ in range(3)]
        sum(losses[1:], losses[0]).backward()


def accumulation(model: nn.Module) -> None:
    for _ in range(6):
        (model(torch.randn(32, 32)).square().sum() / 3).backward()


def evaluation_between(model: nn.Module) -> None:
    for _ in range(4):
        outputs = model(torch.randn(32, 32))
        with torch.no_grad():
            model(torch.randn(8, 32))
        model(torch.randn(32, 32))  # its graph is dropped
        outputs.square().sum().backward()


def retained(model: nn.Module) -> None:
    for _ in range(3):
        loss = model(torch.randn(32, 32)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()


def exceptions(model: nn.Module) -> None:
    for number in range(6):
        loss = model(torch.randn(32, 32)).square().sum()
        if number in (0, 3):
            handle = next(model.parameters()).register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            handle.remove()
            model.zero_grad()
            del loss
            with pytest.raises(RuntimeError):
                model(torch.randn(32, 31))
        else:
            loss.backward()


def fail(_: Tensor) -> None:
    raise ZeroDivisionError


def checkpoints(model: nn.Module, *, reentrant: bool) -> None:
    for _ in range(4):
        x = torch.randn(32, 32, requires_grad=True)
        for part in (model[:4], model[4:8], model[8:]):  # type: ignore[index]
            x = checkpoint(part, x, use_reentrant=reentrant)
        x.square().sum().backward()


def second_order(model: nn.Module) -> None:
    for _ in range(3):
        x = torch.randn(32, 32, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()


def left_over(model: nn.Module) -> None:
    """The graph of the last step is there until the next loss is computed."""
    loss: Tensor | None = None
    for _ in range(4):
        outputs = model(torch.randn(32, 32))
        loss = outputs[:16].square().sum() + model[:2](torch.randn(32, 32)).detach().sum()  # type: ignore[index]
        loss.backward()
    assert loss is not None


def interrupted(model: nn.Module) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in range(4):
        handle = model[-1].register_forward_hook(interrupt) if number % 2 == 0 else None  # type: ignore[index]
        with suppress(KeyboardInterrupt):
            model(torch.randn(32, 32)).square().sum().backward()
        if handle is not None:
            handle.remove()


def unused_branch(model: nn.Module) -> None:
    for _ in range(3):
        hidden = model[:4](torch.randn(32, 32))  # type: ignore[index]
        model[4:](hidden).sum()  # type: ignore[index]
        hidden.square().sum().backward()


SHARES = {"retained": 1.0, "checkpoints": 1.0, "reentrant_checkpoints": 1.0, "second_order": 1.0}
"""A graph that is kept is held in full; and of what is checkpointed there is too little to choose."""

KINDS: dict[str, Callable[[nn.Module], None]] = {
    "several_forwards": several_forwards,
    "accumulation": accumulation,
    "evaluation_between": evaluation_between,
    "retained": retained,
    "exceptions": exceptions,
    "checkpoints": lambda model: checkpoints(model, reentrant=False),
    "reentrant_checkpoints": lambda model: checkpoints(model, reentrant=True),
    "second_order": second_order,
    "left_over": left_over,
    "interrupted": interrupted,
    "unused_branch": unused_branch,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["planned", "measured"])
def test_passes_of_all_kinds(way: str, kind: str, tmp_path: Path) -> None:
    """By a plan; measured each time under a tiny budget, so that everything leaves."""
    model = make_layers()
    expected = gradients(model, lambda: KINDS[kind](model), None)
    share = SHARES.get(kind, 0.6)
    policy = {
        "planned": lambda: planned(tmp_path, share),
        "measured": lambda: Forgetful(9000, folder=tmp_path, min_bytes=0),
    }[way]()
    assert same(gradients(model, lambda: KINDS[kind](model), policy), expected)
    assert policy._counter.total() == 0
    if way == "planned":
        plans = policy.plans
        assert plans or kind == "checkpoints"  # torch's own hooks take all
        assert share == 1.0 or any(set(plan.choices) != {"keep"} for plan in plans)
        assert all(plan.predicted_peak <= plan.budget for plan in plans)


def test_several_threads_share_a_budget(tmp_path: Path) -> None:
    """Their ranges come in any order, so that hardly a pass is like another."""
    model, inputs = make_layers(), [torch.randn(32, 32) for _ in range(4)]

    def slopes(x: Tensor) -> list[Tensor]:
        return [
            slope.clone()
            for _ in range(4)
            for slope in torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        ]

    expected = [slopes(x) for x in inputs]
    policy = Forgetful(30_000, folder=tmp_path, min_bytes=0)  # no plan could promise so little
    with keep_saved(model, policy), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(slopes, inputs))
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))
    del found
    gc.collect()
    assert policy._counter.total() == 0


# ---- budgets --------------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_says_so_and_training_goes_on_with_the_smallest(tmp_path: Path) -> None:
    model, x = make_layers(), torch.randn(64, 32)
    with keep_saved(model, planned(tmp_path, 9000)):
        model(x).sum().backward()
        with pytest.raises(BudgetError, match="budget of at least") as caught:
            model(x).sum().backward()
    smallest = int(str(caught.value).split("(")[1].split(" bytes")[0])
    assert smallest > 9000
    with keep_saved(model, planned(tmp_path, smallest)) as handle:
        model(x).sum().backward()
        model(x).sum().backward()
        assert handle.plan is not None
        assert handle.plan.predicted_peak <= smallest


def test_keep_saved_takes_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    handle: SavedHandle
    with keep_saved(model, budget="200kB") as handle:
        assert handle.plan is None
        model(torch.randn(128, 128, requires_grad=True)).sum().backward()
        assert handle.plan is not None
        assert handle.plan.budget == 200_000
        assert "predicted peak" in str(handle.plan)


def test_policy_and_budget_exclude_each_other() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(SavedPolicyError, match="Both"):
        keep_saved(model, Disk(), budget="1GB")
    with pytest.raises(SavedPolicyError, match="Neither"):
        keep_saved(model)
    with pytest.raises(SavedPolicyError, match="not a valid budget"):
        keep_saved(model, budget="much")


def test_a_plan_can_be_asked_for_after_the_end(tmp_path: Path) -> None:
    model = make_layers()
    with keep_saved(model, planned(tmp_path, 0.5)) as handle:
        model(torch.randn(32, 32)).sum().backward()
    assert handle.plan is not None
    assert handle.plan.destination == "disk"


def test_what_is_packed_comes_back_after_the_end(tmp_path: Path) -> None:
    model, x = make_layers(), torch.randn(64, 32)
    model(x).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with keep_saved(model, planned(tmp_path, 0.6)):
        model(x).square().sum().backward()
        model.zero_grad()
        loss = model(x).square().sum()
    loss.backward()
    assert same([parameter.grad for parameter in model.parameters()], expected)  # type: ignore[misc]


def test_a_pass_that_fails_is_not_planned_for(tmp_path: Path) -> None:
    """What it did not ask for would stay for ever, and no budget would do: so it is in a search for a batch size."""
    model, x = make_layers(), torch.randn(64, 32)

    def fail(gradient: Tensor) -> None:
        raise MemoryError

    with keep_saved(model, planned(tmp_path, 0.5)) as handle:
        middle = model[: len(model) // 2](x)
        middle.register_hook(fail)
        with pytest.raises(MemoryError):
            model[len(model) // 2 :](middle).square().sum().backward()
        del middle
        assert handle.plan is None
        for _ in range(2):
            model(x).square().sum().backward()
        assert handle.plan is not None
        assert all(saved_range.asked is not None for saved_range in handle.plan.recording.ranges)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it makes fake tensors
def test_a_pass_that_is_compiled_as_one_graph_counts_as_whole(tmp_path: Path) -> None:
    """All that is saved is asked for when the graph is made, so no budget would do. Torch says nothing at its end."""
    model, x = make_layers(), torch.randn(64, 32)
    with keep_saved(model, planned(tmp_path, 0.5)), pytest.raises(BudgetError):
        for _ in range(2):
            loss = model(x).square().sum()
            with compiled_autograd._enable(lambda graph: graph):
                loss.backward()
