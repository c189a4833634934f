"""Where policies hold: modules, threads, nested hooks, errors; and that nothing is left of them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import NoSuchSiteError, PatternError, SavedPolicyError
from retrograd.memory.policies.disk import Disk
from retrograd.memory.policies.policy import AsIs, Packed, Policy, Saved
from retrograd.memory.policies.recompute import Recompute
from retrograd.memory.saved.keeping import keep_saved
from tests.memory.saved.test_exactness import Elsewhere
from tests.memory.saved.test_ranges import Noting


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def paths(policy: Noting) -> list[str]:
    return [path for *_, path, _ in policy.seen]


def top() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


# ---- patterns -------------------------------------------------------------------------------------------------


def gradients(
    call: Callable[[Blocks], Tensor], policy: Policy | None, *, everywhere: bool = False, compiled: bool = False
) -> list[Tensor]:
    """Of a model made anew, whose output this call makes."""
    torch.manual_seed(0)
    model: Any = torch.compile(Blocks(), backend="aot_eager") if compiled else Blocks()
    with nullcontext() if policy is None else keep_saved(None if everywhere else model, policy):
        call(model).sum().backward()
    return [p.grad for p in model.parameters()]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_patterns_give_modules_their_policies() -> None:
    model, first, second = Blocks(), Noting(), Noting()
    with keep_saved(model, {"blocks.1": first, "blocks.*": second}):
        model(torch.randn(3, 6)).sum().backward()
    assert set(paths(first)) == {"blocks.1.0", "blocks.1.1"}
    assert set(paths(second)) == {"blocks.0.0", "blocks.0.1", "blocks.2.0", "blocks.2.1"}


def test_a_type_and_a_predicate_are_patterns_too() -> None:
    model, first, second = Blocks(), Noting(), Noting()
    with keep_saved(model, {nn.Tanh: first, lambda candidate: candidate.site.path == "head": second}):
        model(torch.randn(3, 6)).sum().backward()
    assert set(paths(first)) == {"blocks.0.1", "blocks.1.1", "blocks.2.1"}
    assert set(paths(second)) == {"head"}


def test_what_a_module_called_by_hand_saves_is_kept_too() -> None:
    """Some trainers never call the model itself."""
    model, policy = Blocks(), Noting()
    with keep_saved(model, policy):
        model.head(model.blocks[0](torch.randn(3, 6))).sum().backward()
    assert set(paths(policy)) == {"blocks.0.0", "blocks.0.1"}  # the head shares what the tanh gives


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        ("disk", SavedPolicyError),
        (Disk, SavedPolicyError),
        ({}, SavedPolicyError),
        ({"block.*": AsIs()}, NoSuchSiteError),
        ({"": AsIs()}, PatternError),
        ({"*": AsIs(), "head": AsIs()}, SavedPolicyError),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(policy: Any, error: type[Exception]) -> None:
    model = Blocks()
    with pytest.raises(error):
        keep_saved(model, policy)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("policy", [Recompute(), {"blocks.*": AsIs()}])
def test_the_whole_process_has_no_paths(policy: Any) -> None:
    with pytest.raises(SavedPolicyError):
        keep_saved(None, policy)


class Wrong(Policy):
    min_bytes = 0

    def pack(self, saved: Saved) -> Packed | None:
        class Half(Packed):
            def restore(self) -> Tensor:
                return torch.zeros(2)

        return Half()


def test_a_policy_that_gives_something_else_back_is_told_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with keep_saved(model, Wrong()):
        loss = model(torch.randn(3, 4)).sum()
    with pytest.raises(SavedPolicyError, match=r"Half\.restore\(\) gave \[2\]"):
        loss.backward()


# ---- other hooks and checkpoints ------------------------------------------------------------------------------


def test_the_innermost_hooks_hold() -> None:
    model, policy, seen = Blocks(), Noting(), []
    with keep_saved(None, policy):
        with saved_tensors_hooks(lambda tensor: seen.append(tensor.shape) or tensor.detach(), lambda packed: packed):
            before = len(policy.seen)
            loss = torch.randn(4, requires_grad=True).exp()
            assert len(policy.seen) == before
            seen.clear()
            before = len(policy.seen)
            model(torch.randn(3, 6))
            assert seen
            assert len(policy.seen) == before
        model(torch.randn(3, 6)).sum().backward()
        assert len(policy.seen) > before
    loss.sum().backward()


def test_ended_out_of_order_it_leaves_the_others_alone() -> None:
    handle = keep_saved(None, AsIs())
    with save_on_cpu():
        inner = top()
        handle.remove()
        assert top() == inner
    assert top() is None


def test_where_the_program_forbids_hooks_there_are_none() -> None:
    model, policy = Blocks(), Noting()
    with keep_saved(model, policy), disable_saved_tensors_hooks("not here"):
        model(torch.randn(3, 6)).sum().backward()
    assert not policy.seen


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_checkpoints_within_keep_what_they_save(use_reentrant: bool, everywhere: bool) -> None:
    policy, seen_in_forward = Noting(), list[tuple[int, ...]]()

    def call(model: Blocks) -> Tensor:
        x = torch.randn(3, 6, requires_grad=True)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        seen_in_forward[:] = [shape for _, _, shape, _, _ in policy.seen]
        return model.head(x)

    found = gradients(call, policy, everywhere=everywhere)
    if not use_reentrant:
        assert set(seen_in_forward) <= {(3, 6)}
        assert len(seen_in_forward) <= 3  # inputs of the parts, which the checkpoint itself saves
    assert same(found, gradients(call, None))


def test_a_checkpoint_around_the_model() -> None:
    def call(model: Blocks) -> Tensor:
        return checkpoint(model, torch.randn(3, 6), use_reentrant=False)

    policy = Noting()
    assert same(gradients(call, policy), gradients(call, None))
    assert not policy.seen  # the checkpoint drops it all


# ---- graphs ---------------------------------------------------------------------------------------------------


def test_double_backward_packs_what_the_first_backward_saves() -> None:
    policy, slopes = Noting(), []
    for each in (policy, None):
        torch.manual_seed(0)
        x = torch.randn(50, requires_grad=True)
        with nullcontext() if each is None else keep_saved(None, each):
            (slope,) = torch.autograd.grad((x.sin() * x.exp()).sum(), x, create_graph=True)
            slopes.append(torch.autograd.grad(slope.square().sum(), x)[0])
    assert torch.equal(*slopes)
    assert len(policy.seen) > 4


def test_a_retained_graph_runs_again_and_after_the_end() -> None:
    x = torch.randn(50, requires_grad=True)
    with keep_saved(None, Elsewhere()):
        loss = x.exp().square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    (expected,) = torch.autograd.grad(x.exp().square().sum(), x)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * expected, rtol=0, atol=0)


def test_saved_tensors_can_be_read_by_hand() -> None:
    x = torch.randn(50, requires_grad=True)
    with keep_saved(None, Elsewhere()):
        y = x.exp()
    assert torch.equal(y.grad_fn._saved_result, y)  # type: ignore[union-attr]
    assert y.grad_fn._saved_result.grad_fn is y.grad_fn  # type: ignore[union-attr]


# ---- threads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("everywhere", [False, True])
def test_modules_in_other_threads_are_kept(everywhere: bool) -> None:
    model, policy = Blocks(), Noting()
    inputs = [torch.randn(3, 6) for _ in range(4)]
    expected = [torch.autograd.grad(model(x).sum(), list(model.parameters())) for x in inputs]
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        for _ in range(10):
            found[number] = torch.autograd.grad(model(inputs[number]).sum(), list(model.parameters()))
        assert top() is None

    with keep_saved(None if everywhere else model, policy):
        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(policy.seen) == 4 * 10 * 4  # the input, and what each block's tanh gives
    for number, gradients in enumerate(expected):
        assert all(torch.equal(a, b) for a, b in zip(found[number], gradients, strict=True))


def test_replicas_of_data_parallel_are_kept() -> None:
    """``nn.DataParallel`` makes replicas whose hooks are the model's and whose weights are not, and runs them in
    threads of their own."""
    model, policy = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), Noting()
    with keep_saved(model, policy):
        replica = model._replicate_for_data_parallel()
        linear = model[0]._replicate_for_data_parallel()
        linear._former_parameters = {name: p.detach().clone() * 1 for name, p in model[0].named_parameters()}
        for name, value in linear._former_parameters.items():
            setattr(linear, name, value.requires_grad_())
        replica._modules = {"0": linear, "1": model[1]._replicate_for_data_parallel()}
        thread = threading.Thread(target=lambda: replica(torch.randn(3, 6)).sum().backward())
        thread.start()
        thread.join()
    assert [shape for _, _, shape, _, _ in policy.seen] == [(3, 6), (3, 6)]


# ---- nothing is left ------------------------------------------------------------------------------------------


def test_a_call_left_by_an_interrupt_is_forgotten() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model, policy = nn.Sequential(nn.Linear(4, 4), Interrupted()), Noting()
    with keep_saved(model, policy) as handle:
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(3, 4))
        del model[1]
        model(torch.randn(3, 4)).sum().backward()
        assert top() is None
        model.append(Interrupted())
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(3, 4))
        handle.remove()
        assert top() is None


def test_it_may_be_ended_in_the_middle_of_a_forward() -> None:
    class Ends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            handle.remove()
            assert top() is None
            return x.exp()

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Ends(), nn.Tanh())
    handle = keep_saved(model, Elsewhere())
    model(torch.randn(3, 4)).sum().backward()
    assert top() is None


def test_hooks_are_gone_and_not_copied() -> None:
    model = Blocks()
    handle = keep_saved(model, AsIs())
    twin = copy.deepcopy(model)
    handle.remove()
    handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    twin(torch.randn(3, 6)).sum().backward()


def test_a_compiled_model_gives_the_same_gradients() -> None:
    policy = Noting()
    found, expected = (
        gradients(lambda model: model(torch.randn(3, 6)), each, compiled=True) for each in (policy, None)
    )
    assert same(found, expected)
    assert policy.seen


def test_a_handle_is_entered_for_one_block() -> None:
    model, policy = nn.Linear(4, 1), Noting()
    handle = keep_saved(model, policy)
    assert "in charge" in repr(handle)
    with handle:
        model(torch.randn(2, 4)).sum().backward()
    assert "ended" in repr(handle)
    with pytest.raises(SavedPolicyError, match="was closed"), handle:
        pass


def test_what_is_no_model_is_said() -> None:
    with pytest.raises(SavedPolicyError, match="not a model"):
        keep_saved(AsIs(), nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("everywhere", [False, True])
def test_what_torch_fills_after_it_was_saved_stays(everywhere: bool) -> None:
    """The noise of an RReLU is saved first and drawn then, and that write is not counted."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.RReLU(), nn.Linear(8, 1)), torch.randn(3, 4)

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        return list(torch.autograd.grad(model(x).sum(), list(model.parameters())))

    expected = gradients()
    with keep_saved(None if everywhere else model, Elsewhere()):
        found = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
