"""Rules on all gradients of an optimizer together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import CannotRewriteError, RewriteError
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.clipping import ClipNorm
from retrograd.rewriting.rules.norm_rule import NormRule
from retrograd.rewriting.rules.pass_rule import PassRule
from retrograd.rewriting.rules.rule import SiteState
from tests.core.recording.collector import collect
from tests.rewriting.models import assert_same, halve, make_net, weights


class SkipLarge(NormRule):
    """Skips what lies above a bound."""

    skips = True

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def scale(self, norm: Tensor, state: SiteState) -> Tensor:
        state.put("norm", norm)
        return (norm <= self.bound).to(norm.dtype)


class Weighted(PassRule):
    """One times the first pass and ten times the second."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: list[int] = []

    def combine(self, passes: Sequence[Sequence[Tensor | None]], state: SiteState) -> list[Tensor | None]:
        self._counts.append(len(passes))
        return [
            None
            if all(each is None for each in column)
            else sum(each * 10**index for index, each in enumerate(column) if each is not None)
            for column in zip(*passes, strict=True)
        ]  # type: ignore[misc]


def steps(
    net: nn.Module, optimizer: Optimizer, count: int = 4, *, factor: Any = lambda step: 1.0, then: Any = None
) -> None:
    torch.manual_seed(3)
    for step in range(count):
        optimizer.zero_grad()
        (net(torch.randn(5, 3)).square().mean() * factor(step)).backward()
        if then is not None:
            then()
        optimizer.step()


def clip_by_hand(parameters: Sequence[Tensor], bound: float) -> None:
    gradients = [each.grad for each in parameters if each.grad is not None]
    norm = torch.stack([each.norm() for each in gradients]).norm()
    for each in gradients:
        each.mul_((bound / norm).clamp(max=1))


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_as_clipped_by_hand(kind: Any) -> None:
    net, plain = make_net(), make_net()
    optimizer, other = kind(net.parameters(), lr=0.1), kind(plain.parameters(), lr=0.1)
    with rewrite(optimizer, ClipNorm(0.05)):
        steps(net, optimizer)
    steps(plain, other, then=lambda: clip_by_hand(list(plain.parameters()), 0.05))
    for name, each in weights(net).items():
        torch.testing.assert_close(each, weights(plain)[name], rtol=1e-4, atol=1e-6)


def test_as_torch_clips() -> None:
    """Which adds 1e-6 to the norm."""
    net, plain = make_net(), make_net()
    optimizer, other = SGD(net.parameters(), lr=0.1), SGD(plain.parameters(), lr=0.1)
    with rewrite(optimizer, ClipNorm(0.05)):
        steps(net, optimizer)
    steps(plain, other, then=lambda: clip_grad_norm_(plain.parameters(), 0.05))
    for name, each in weights(net).items():
        torch.testing.assert_close(each, weights(plain)[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_all_kinds_of_gradients(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = SGD(parameters, lr=1.0)
    with rewrite(optimizer, ClipNorm(1.0)):
        for parameter in parameters[:2]:
            parameter.grad = torch.full_like(parameter, 2.0)
        optimizer.step()
    norm = (4.0 * 5) ** 0.5
    assert parameters[0].grad is not None
    assert parameters[0].grad.dtype is dtype
    torch.testing.assert_close(parameters[0].grad, torch.full((3,), 2 / norm, dtype=dtype), rtol=0.01, atol=0)
    torch.testing.assert_close(parameters[1].grad, torch.full((2,), 2 / norm))
    assert parameters[2].grad is None


def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = SparseAdam(table.parameters(), lr=0.1)
    with rewrite(optimizer, ClipNorm(1.0)):
        (table(torch.tensor([1, 1, 3])) * 3).sum().backward()
        optimizer.step()
    assert table.weight.grad is not None
    dense = table.weight.grad.to_dense()
    expected = torch.tensor([0.0, 6.0, 0.0, 3.0, 0.0]).unsqueeze(1).expand(5, 2)
    torch.testing.assert_close(dense, expected / expected.norm())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1, momentum=0.9),
        lambda p: Adam(p, lr=0.1),
        lambda p: AdamW(p, lr=0.1, fused=True),
        lambda p: Adam(p, lr=0.1, foreach=True),
    ],
)
def test_a_skipped_step_leaves_no_trace(make: Any) -> None:
    net, plain = make_net(), make_net()
    optimizer, other = make(net.parameters()), make(plain.parameters())
    with rewrite(optimizer, SkipLarge(1e3)):
        steps(net, optimizer, 4, factor=lambda step: 1e6 if step in (1, 3) else 1.0)
    torch.manual_seed(3)
    for step in range(4):
        x = torch.randn(5, 3)
        other.zero_grad()
        plain(x).square().mean().backward()
        if step not in (1, 3):
            other.step()
    assert_same(weights(net), weights(plain))
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert all(parameter.grad is not None for parameter in net.parameters())  # the script may look at them
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("fused", [False, True])
def test_skipping_beside_loss_scaling(fused: bool) -> None:
    net, plain = make_net(), make_net()

    def train(net: nn.Module, bad: dict[int, float], skips: Sequence[int], *, scaled: bool) -> None:
        optimizer = Adam(net.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        rules = rewrite(optimizer, [SkipLarge(1e3), ClipNorm(0.1)]) if scaled else None
        torch.manual_seed(3)
        for step in range(5):
            optimizer.zero_grad()
            loss = net(torch.randn(5, 3)).square().mean() * bad.get(step, 1.0)
            scaler.scale(loss).backward()
            if scaled:
                scaler.step(optimizer)
                scaler.update()
            elif step not in skips:
                norm = torch.stack([each.grad.norm() for each in net.parameters()]).norm()  # type: ignore[union-attr]
                for each in net.parameters():
                    each.grad.mul_((0.1 / norm).clamp(max=1))  # type: ignore[union-attr]
                optimizer.step()
        if rules is not None:
            rules.remove()

    train(net, {1: float("inf"), 3: 1e6}, (), scaled=True)
    train(plain, {}, (1, 3), scaled=False)
    for name, each in weights(net).items():
        torch.testing.assert_close(each, weights(plain)[name], rtol=1e-5, atol=1e-6)


def test_passes_are_kept_apart() -> None:
    net, plain, rule = make_net(), make_net(), Weighted()
    optimizer, other = SGD(net.parameters(), lr=0.1), SGD(plain.parameters(), lr=0.1)
    x = torch.randn(5, 3)
    with rewrite(optimizer, rule):
        for _ in range(2):
            optimizer.zero_grad()
            out = net(x)
            out.square().mean().backward(retain_graph=True)
            out.abs().mean().backward()
            optimizer.step()
    for _ in range(2):
        other.zero_grad()
        out = plain(x)
        (out.square().mean() + 10 * out.abs().mean()).backward()
        other.step()
    assert rule._counts == [2, 2]
    for name, each in weights(net).items():
        torch.testing.assert_close(each, weights(plain)[name])


def passes_after(prepare: Any, net: nn.Module | None = None) -> tuple[list[int], nn.Module]:
    net, rule = net or make_net(), Weighted()
    optimizer = SGD(net.parameters(), lr=0.1)
    with rewrite(optimizer, rule):
        prepare(net, optimizer)
        optimizer.step()
    return rule._counts, net


def test_gradients_that_were_thrown_away_do_not_count() -> None:
    def prepare(net: nn.Module, optimizer: Optimizer) -> None:
        net(torch.randn(5, 3)).sum().backward()
        optimizer.zero_grad()
        net(torch.randn(5, 3)).sum().backward()

    assert passes_after(prepare)[0] == [1]


def test_gradients_that_were_only_asked_for_do_not_count() -> None:
    def prepare(net: nn.Module, optimizer: Optimizer) -> None:
        torch.autograd.grad(net(torch.randn(5, 3)).sum(), list(net.parameters()))
        net(torch.randn(5, 3)).sum().backward()

    assert passes_after(prepare)[0] == [1]


def test_a_step_that_loss_scaling_skipped_leaves_no_passes() -> None:
    rule, net = Weighted(), make_net()
    optimizer = SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with rewrite(optimizer, rule):
        for factor in (float("inf"), 1.0):
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(net(torch.randn(5, 3)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    assert rule._counts == [1]
    assert all(each.isfinite().all() for each in weights(net).values())


@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")
def test_the_passes_inside_a_reentrant_part_are_no_passes_of_their_own() -> None:
    def prepare(net: nn.Module, optimizer: Optimizer) -> None:
        x = torch.randn(5, 3, requires_grad=True)
        h = checkpoint(net[:2], x, use_reentrant=True)  # type: ignore[index]
        checkpoint(net[2:], h, use_reentrant=True).sum().backward()  # type: ignore[index]

    assert passes_after(prepare)[0] == [1]


def test_parameters_that_thaw_and_that_are_added() -> None:
    net = make_net()
    net[0].requires_grad_(requires_grad=False)
    late = nn.Parameter(torch.ones(1))
    rule = Weighted()
    optimizer = SGD(net.parameters(), lr=1.0)
    with rewrite(optimizer, rule):
        net[0].requires_grad_(requires_grad=True)
        optimizer.add_param_group({"params": [late]})
        before = net[0].bias.detach().clone()
        x = torch.randn(5, 3)
        out = net(x).sum() * late
        out.backward(retain_graph=True)
        first = net[0].bias.grad.clone()  # type: ignore[union-attr]
        out.backward()
        optimizer.step()
    torch.testing.assert_close(net[0].bias, before - 11 * first)


def test_events() -> None:
    net = make_net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with collect(net) as seen, rewrite(optimizer, ClipNorm(1e-3)):
        steps(net, optimizer, 3)
    events = seen.events_of("rewrite")
    name, rule = "optimizer:gradients", "ClipNorm(max_norm=0.001)"
    assert [(event.moment.step, event.name, event.text) for event in events] == [
        (step, name, rule) for step in range(3)
    ]
    assert all(event.value is not None and 0.5 < event.value < 1 for event in events)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS])
def test_lbfgs_is_refused(kind: Any) -> None:
    with pytest.raises(CannotRewriteError, match=r"LBFGS(.|\n)*\*:parameters\.grad"):
        rewrite(kind(make_net().parameters()), ClipNorm(1.0))


def by_closure(optimizer: Optimizer, net: nn.Module, by_name: bool) -> None:
    torch.manual_seed(3)
    for step in range(6):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = net(torch.randn(5, 3)).square().mean() * 10 ** (step % 3)
            loss.backward()
            return loss

        loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)  # type: ignore[call-arg,func-returns-value]
        assert isinstance(loss, Tensor)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", [SGD, Adam, lambda p, lr: AdamW(p, lr=lr, fused=True)])
def test_a_closure_computes_the_gradients(kind: Any, by_name: bool) -> None:
    """As Lightning has it: the rules act behind the closure as they do before an update without one."""
    net, plain = make_net(), make_net()
    optimizer, other = kind(net.parameters(), lr=0.1), kind(plain.parameters(), lr=0.1)
    skip, expected = SkipLarge(4.0), SkipLarge(4.0)
    with rewrite(optimizer, [ClipNorm(5.0), skip]):
        by_closure(optimizer, net, by_name)
    with rewrite(other, [ClipNorm(5.0), expected]):
        steps(plain, other, 6, factor=lambda step: 10 ** (step % 3))
    assert_same(weights(net), weights(plain))
    assert torch.equal(
        skip.state_at("optimizer:gradients").get("norm"), expected.state_at("optimizer:gradients").get("norm")
    )
    assert not weights(net)["0.weight"].equal(make_net()[0].weight)


def test_an_optimizer_that_asks_twice_is_refused() -> None:
    class Twice(SGD):
        def step(self, closure: Any = None) -> None:
            closure()
            closure()
            super().step()

    net = make_net()
    optimizer = Twice(net.parameters(), lr=0.1)
    with (
        rewrite(optimizer, ClipNorm(1.0)),
        pytest.raises(CannotRewriteError, match=r"several times(.|\n)*\*:parameters\.grad"),
    ):
        optimizer.step(lambda: net(torch.ones(1, 3)).sum().backward())


def test_a_first_argument_that_is_no_closure() -> None:
    class Damped(SGD):
        def step(self, damping: Any, closure: Any = None) -> Any:  # type: ignore[override]
            assert damping == 0.5
            return super().step(closure)

    net, plain = make_net(), make_net()
    optimizer, other = Damped(net.parameters(), lr=0.1), SGD(plain.parameters(), lr=0.1)
    with rewrite(optimizer, ClipNorm(0.05)), rewrite(other, ClipNorm(0.05)):
        for model in (net, plain):
            model(torch.ones(1, 3)).sum().backward()
        optimizer.step(0.5)
        other.step()
    assert_same(weights(net), weights(plain))


def test_a_closure_that_raises_leaves_nothing() -> None:
    net = make_net()
    optimizer = SGD(net.parameters(), lr=0.1)

    def closure() -> float:
        raise OSError("no data")

    with rewrite(optimizer, SkipLarge(0.0)):
        with pytest.raises(OSError, match="no data"):
            optimizer.step(closure)
        before = weights(net)
        by_closure(optimizer, net, by_name=False)
        assert_same(weights(net), before)
        assert all(each.grad is not None for each in net.parameters())


@pytest.mark.parametrize("rules", [halve, [ClipNorm(1.0), halve], {"0:weight.grad": ClipNorm(1.0)}, [], 3])
def test_what_is_refused(rules: Any) -> None:
    net = make_net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with pytest.raises(RewriteError):
        rewrite(optimizer, rules)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_pass_rule_on_a_model_is_refused() -> None:
    with pytest.raises(CannotRewriteError, match="optimizer"):
        rewrite(make_net(), {"0:weight.grad": Weighted()})


def test_an_optimizer_in_a_wrapper() -> None:
    class Wrapper(Optimizer):
        """As trainers have them: an optimizer by class alone."""

        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

        def step(self, closure: Any = None) -> None:
            self.optimizer.step()

    net, plain = make_net(), make_net()
    wrapper = Wrapper(SGD(net.parameters(), lr=0.1))
    with rewrite(wrapper, ClipNorm(0.05)):
        net(torch.ones(1, 3)).sum().backward()
        wrapper.step()
    other = SGD(plain.parameters(), lr=0.1)
    plain(torch.ones(1, 3)).sum().backward()
    clip_grad_norm_(plain.parameters(), 0.05)
    other.step()
    for name, each in weights(net).items():
        torch.testing.assert_close(each, weights(plain)[name])


def test_a_step_that_raises_gives_the_gradients_back() -> None:
    class Fails(SGD):
        def step(self, closure: Any = None) -> None:
            if any(each.grad is None for group in self.param_groups for each in group["params"]):
                raise OSError("no gradients")
            super().step()

    net = make_net()
    optimizer = Fails(net.parameters(), lr=0.1)
    rewriting = rewrite(optimizer, SkipLarge(0.0))
    net(torch.ones(1, 3)).sum().backward()
    with pytest.raises(OSError, match="no gradients"):
        optimizer.step()
    rewriting.remove()
    assert all(each.grad is not None for each in net.parameters())
    optimizer.step()


def test_nothing_is_left() -> None:
    net = make_net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with rewrite(optimizer, Weighted()):
        net(torch.ones(1, 3)).sum().backward()
        assert any(each._backward_hooks for each in net.parameters())
    assert not any(each._backward_hooks for each in net.parameters())
    assert not any(each._post_accumulate_grad_hooks for each in net.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
