"""Our own engine gives what torch's gives, to the last bit, and leaves everything else alone."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import FreedGraphError, NoGraphError, ReplayError
from retrograd.core.hooks.nodes import number_of, root_edges, run_node
from retrograd.core.hooks.reach import find_nodes
from retrograd.following.engine.one_node import rerun
from retrograd.following.engine.replayer import run_from
from tests.by_hand import make_function, passing
from tests.following.graph.bits import all_same, same
from tests.following.graph.zoo import ZOO, leaf

every_graph = pytest.mark.parametrize("name", ZOO)


@pytest.fixture
def fixed() -> Any:
    yield
    Fails.broken = True


def by_engine(name: str, **options: Any) -> list[Tensor | None]:
    roots, leaves = ZOO[name]()
    torch.autograd.backward(roots, [torch.full_like(root, 0.7) for root in roots], **options)
    return [each.grad for each in leaves]


def start(roots: list[Tensor]) -> dict[Tensor, Tensor]:
    return {root: torch.full_like(root, 0.7) for root in roots}


@every_graph
def test_gradients_are_those_of_the_engine(name: str) -> None:
    roots, leaves = ZOO[name]()
    found = run_from(start(roots))
    assert all(each.grad is None for each in leaves)
    assert {id(key) for key in found} == {id(each) for each in leaves}
    assert all_same(by_engine(name), [found[each] for each in leaves])


@every_graph
def test_what_is_added_to_grad_is_what_the_engine_adds(name: str) -> None:
    roots, leaves = ZOO[name]()
    for each in leaves:
        each.grad = torch.full_like(each, 1 / 3)
    torch.manual_seed(3)
    torch.autograd.backward(roots, list(start(roots).values()), retain_graph=True)
    expected = [each.grad for each in leaves]
    for each in leaves:
        each.grad = torch.full_like(each, 1 / 3)
    torch.manual_seed(3)
    found = run_from(start(roots), accumulate=True)
    assert all_same(expected, [each.grad for each in leaves])
    assert all(found[each] is each.grad for each in leaves)


@every_graph
def test_the_engine_finds_the_same_after_us(name: str) -> None:
    roots, leaves = ZOO[name]()
    run_from(start(roots))
    run_from(start(roots))
    torch.autograd.backward(roots, list(start(roots).values()))
    assert all_same(by_engine(name), [each.grad for each in leaves])


@every_graph
def test_any_node_to_start_at_gives_what_torch_gives_from_there(name: str) -> None:
    if name == "checkpoint_that_is_reentrant":
        pytest.skip("torch.autograd.grad refuses it")
    roots, leaves = ZOO[name]()
    nodes = find_nodes(root_edges(roots)).nodes
    for node in sorted(nodes, key=number_of)[:12]:
        came = came_in(node)
        if came is None:
            continue
        edges = [torch.autograd.graph.GradientEdge(node, slot) for slot in range(len(came))]
        expected = torch.autograd.grad(edges, leaves, came, retain_graph=True, allow_unused=True)
        found = run_from(node, came)
        assert all_same(expected, [found.get(each) for each in leaves])


def came_in(node: Any) -> tuple[Tensor, ...] | None:
    """Some gradients for a node, or None where one of its results has no derivative."""
    described = node._input_metadata
    if any(each.is_nested_tensor or (not list(each.shape) and len(described) > 1) for each in described):
        return None
    return tuple(torch.full(tuple(each.shape), 0.3, dtype=each.dtype) for each in described)


@every_graph
def test_where_it_is_to_stop_it_gives_what_torch_gives_there(name: str) -> None:
    if name == "checkpoint_that_is_reentrant":
        pytest.skip("torch.autograd.grad refuses it")
    roots, leaves = ZOO[name]()
    nodes = find_nodes(root_edges(roots)).nodes
    middle = [node for node in nodes if len(node._input_metadata) == 1][1::5]
    edges = [torch.autograd.graph.GradientEdge(node, 0) for node in middle]
    expected = torch.autograd.grad(
        roots, [*edges, *leaves], list(start(roots).values()), retain_graph=True, allow_unused=True
    )
    found = run_from(start(roots), to=[*middle, *leaves])
    assert len(found) == len(middle) + len(leaves)
    assert all_same(expected[: len(middle)], [found[key][0] if found[key] else None for key in middle])
    assert all_same(expected[len(middle) :], [found[each] for each in leaves])


def test_what_is_not_needed_does_not_run() -> None:
    x, y = leaf(3), leaf(3)
    a = x * 1
    found = run_from((a.exp() + Fails.apply(y)).sum(), to=a)
    assert same(found[a], a.exp().detach())


def test_a_tensor_that_was_not_reached_has_no_gradient() -> None:
    x, y = leaf(3), leaf(3)
    z = y.exp()
    found = run_from(x.sum(), to=[x, y, z, z.grad_fn])
    assert torch.equal(found[x], torch.ones(3))
    assert [found[y], found[z], found[z.grad_fn]] == [None] * 3
    assert "nothing" in repr(found)


def test_a_tensor_among_several_results_of_a_node_is_told_from_the_others() -> None:
    x = leaf(2, 3)
    first, second = x.exp().unbind()
    found = run_from((first * 2 + second * 3).sum(), to=[second, first, torch.autograd.graph.get_gradient_edge(second)])
    assert [each.tolist() for each in found.values()] == [[3] * 3, [2] * 3, [3] * 3]


def test_a_start_may_be_where_it_stops() -> None:
    x = leaf(3).exp()
    found = run_from(x, torch.ones(3), to=x)
    assert torch.equal(found[x], torch.ones(3))


@pytest.mark.parametrize("made", ["leaf", "tensor", "node", "list", "dict"])
def test_all_ways_to_say_where_to_start(made: str) -> None:
    x = leaf(3)
    y = (x * x).sum()
    ways: dict[str, Any] = {"leaf": x, "tensor": y, "node": y.grad_fn, "list": [y], "dict": {y.grad_fn: torch.ones(())}}
    found = run_from(ways[made], torch.ones(3) if made == "leaf" else None)
    assert torch.equal(found[x], torch.ones(3) if made == "leaf" else 2 * x.detach())


def test_one_tensor_twice_counts_twice() -> None:
    x = leaf()
    y = x * 3
    assert run_from([y, y])[x] == 6


def test_gradients_of_gradients_are_those_of_torch() -> None:
    for name in ("mlp", "transformer", "complex_numbers", "broadcast", "shared_parameters", "python_functions"):
        roots, leaves = ZOO[name]()
        first = torch.autograd.grad(roots, leaves, list(start(roots).values()), create_graph=True)
        second = torch.autograd.grad(
            [each.abs().sum() for each in first if each.requires_grad], leaves, allow_unused=True
        )
        roots, leaves = ZOO[name]()
        ours = run_from(start(roots), create_graph=True)
        assert all_same(first, [ours[each] for each in leaves])
        sums = [ours[each].abs().sum() for each in leaves if ours[each].requires_grad]
        again = run_from(sums, to=leaves)
        assert all_same(second, [again[each] for each in leaves])


def test_nothing_is_recorded_unless_asked() -> None:
    x = leaf(3)
    with torch.enable_grad():
        assert not run_from(x.exp().sum())[x].requires_grad
    with torch.no_grad():
        pass
    y = x.exp().sum()
    with torch.no_grad():
        assert run_from(y, create_graph=True)[x].requires_grad


operations = st.sampled_from(["add", "mul", "matmul", "sub_", "view", "cat", "sum", "half", "unbind", "row", "expand"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(operations, st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=25))
def test_random_graphs(steps: list[tuple[str, int, int]]) -> None:
    torch.manual_seed(5)
    leaves = [leaf(3, 3), leaf(1, 3), leaf(3, 1), leaf(3, 3, dtype=torch.float64)]
    pool: list[Tensor] = list(leaves)
    for operation, i, j in steps:
        pool.append(apply(operation, pool[i % len(pool)], pool[j % len(pool)]))
    roots = [each for each in pool[-3:] if each.grad_fn is not None]
    gradients = [torch.rand(each.shape).to(each.dtype) for each in roots]
    torch.autograd.backward(roots, gradients, retain_graph=True)
    found = run_from(roots, gradients)
    assert all(same(each.grad, found.get(each)) for each in leaves)
    middle = pool[len(pool) // 2]
    expected = torch.autograd.grad(roots, middle, gradients, retain_graph=True, allow_unused=True)[0]
    assert same(expected, run_from(roots, gradients, to=middle)[middle])


def apply(operation: str, x: Tensor, y: Tensor) -> Tensor:
    """All tensors are 3 × 3, or broadcast to it."""
    match operation:
        case "add":
            return x + y
        case "mul":
            return x * y.sigmoid()
        case "matmul":
            return x.expand(3, 3).tanh() @ y.expand(3, 3).to(x.dtype).tanh()
        case "sub_":
            base = x.expand(3, 3).clone()
            base[1] -= y.expand(3, 3)[2].to(x.dtype) * 0.5
            return base
        case "view":
            return (x * 1).expand(3, 3).reshape(9).view(3, 3).t()
        case "cat":
            return torch.cat([x.expand(3, 3)[:2], y.expand(3, 3)[:1].to(x.dtype)])
        case "sum":
            return x.sum(0, keepdim=True)
        case "half":
            return (x.to(torch.bfloat16) * 2).to(y.dtype)
        case "unbind":
            a, _, b = x.expand(3, 3).unbind()
            return torch.stack([a, b, a * b])
        case "row":
            return x[:1].exp().clamp(max=3) if x.shape[0] else x
        case _:
            return x.expand(3, 3)


@pytest.mark.slow
def test_a_compiled_region_is_one_node() -> None:
    @torch.compile(backend="aot_eager")
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * y).sin().sum(0), (x + y).exp()

    x, y = leaf(3, 4), leaf(4)
    try:
        first, second = forward(x, y)
        for roots in ([first], [second], [first, second]):  # gradients of the others are undefined
            gradients = [torch.full_like(root, 0.7) for root in roots]
            expected = torch.autograd.grad(roots, [x, y], gradients, retain_graph=True)
            found = run_from(roots, gradients)
            assert all_same(expected, [found[x], found[y]])
    finally:
        torch.compiler.reset()


# ---- failure, and what comes after ----


class Fails(Function):
    """Raises while ``broken`` is set."""

    broken = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        (x,) = ctx.saved_tensors
        if Fails.broken or incoming[0].isnan().any():
            raise ArithmeticError("no")
        return incoming[0] * x.cos()


def test_an_error_is_the_nodes_own_and_says_which_node_it_was() -> None:
    x = leaf(3)
    with pytest.raises(ArithmeticError, match="no") as caught:
        run_from(Fails.apply(x * 2).sum())
    (said,) = caught.value.__notes__
    assert "FailsBackward" in said
    assert "float32[3]" in said


@pytest.mark.usefixtures("fixed")
def test_a_pass_that_died_is_finished_from_where_it_died() -> None:
    """As somebody would who has seen what was waiting when the engine stopped."""
    x, weight = leaf(4), leaf(4)
    used_early = x.exp()
    failing = Fails.apply(used_early * weight)
    loss = (failing * used_early).sum()
    for each in (x, weight):
        each.grad = None
    waiting: dict[Any, tuple[Tensor | None, ...]] = {}
    product, exp = loss.grad_fn.next_functions[0][0], used_early.grad_fn
    product.register_hook(
        lambda outgoing, _: waiting.update({failing.grad_fn: (outgoing[0],), exp: (outgoing[1],)}),
    )
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    assert weight.grad is None
    Fails.broken = False
    run_from(waiting, accumulate=True)
    expected = torch.autograd.grad(loss, [x, weight])
    assert same(x.grad, expected[0])
    assert same(weight.grad, expected[1])


@pytest.mark.usefixtures("fixed")
def test_a_gradient_may_be_mended_before_going_on() -> None:
    Fails.broken = False
    x = leaf(3)
    failing = Fails.apply(x.exp())
    bad = (failing * torch.tensor([1.0, float("nan"), 1.0])).sum()
    with pytest.raises(ArithmeticError):
        bad.backward(retain_graph=True)
    came = run_from(bad, to=failing)[failing]
    assert came.isnan().tolist() == [False, True, False]
    found = run_from(failing, came.nan_to_num(0.0))[x]
    assert same(found, torch.autograd.grad(failing, x, torch.tensor([1.0, 0.0, 1.0]))[0])


def test_gradients_that_wait_at_two_nodes_of_which_one_leads_to_the_other() -> None:
    x = leaf(3)
    a = x.exp()
    b = a.sin()
    found = run_from({a: torch.ones(3), b.grad_fn: (torch.ones(3),)})
    assert same(found[x], torch.autograd.grad([a, b], x, [torch.ones(3)] * 2)[0])


def test_nothing_may_wait_at_a_node() -> None:
    x = leaf(3)
    assert run_from({x.exp().grad_fn: (None,)})[x] is None


@pytest.mark.parametrize("again", [run_from, rerun], ids=["a pass", "one node"])
@pytest.mark.usefixtures("fixed")
def test_a_graph_that_is_freed(again: Any) -> None:
    Fails.broken = False
    for make, name in ((torch.exp, "ExpBackward0"), (Fails.apply, "FailsBackward")):
        y = make(leaf(3))
        for _ in range(2):
            again(y, torch.ones(3))
        y.backward(torch.ones(3))
        with pytest.raises(FreedGraphError, match=name) as caught:
            again(y, torch.ones(3))
        assert "retain_graph" in caught.value.repair


# ---- what it leaves alone ----


@pytest.mark.parametrize(
    "again",
    [
        run_from,
        lambda loss: run_from(loss, accumulate=True),
        lambda loss: rerun(loss.grad_fn.next_functions[0][0], torch.ones(3)),
    ],
    ids=["a pass", "a pass that adds", "one node"],
)
def test_no_hook_runs(again: Any) -> None:
    x = leaf(3)
    y = x.exp()
    ran: list[str] = []
    x.register_hook(lambda gradient: ran.append("leaf"))
    x.register_post_accumulate_grad_hook(lambda leaf: ran.append("after"))
    y.register_hook(lambda gradient: ran.append("tensor"))
    y.retain_grad()
    y.grad_fn.register_prehook(lambda incoming: ran.append("before node"))
    y.grad_fn.register_hook(lambda outgoing, incoming: ran.append("after node"))
    again(y.sum())
    assert ran == []
    assert y.grad is None
    assert x.grad is None or same(x.grad, y.detach())


def test_a_grad_that_was_added_to_is_the_same_tensor() -> None:
    x = leaf(3)
    x.grad = before = torch.ones(3)
    found = run_from(x.sum(), accumulate=True)
    assert x.grad is before
    assert found[x] is before
    assert before.tolist() == [2, 2, 2]


def test_what_is_added_to_grad_is_a_copy() -> None:
    x, given = leaf(3), torch.ones(3)
    run_from(x, given, accumulate=True)
    assert x.grad is not given
    assert x.grad.data_ptr() != given.data_ptr()


def test_a_checkpoints_own_pass_changes_no_grad_and_its_gradients_are_found() -> None:
    inner, x = nn.Linear(3, 3), leaf(2, 3)
    for parameter in inner.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: parameter.grad for name, parameter in inner.named_parameters()}
    y = checkpoint(inner, x, use_reentrant=True)
    found = run_from(y.sum())
    assert all(parameter.grad is before[name] for name, parameter in inner.named_parameters())
    assert all(torch.equal(each, torch.ones_like(each)) for each in before.values())
    named = found.by_name(inner)
    expected = torch.autograd.grad(inner(x).sum(), [*inner.parameters(), x])
    assert same(named["weight"], expected[0])
    assert same(named["bias"], expected[1])
    assert same(found[x], expected[2])
    assert run_from(y.sum(), to=x)[x] is not None
    assert len(run_from(y.sum(), to=inner.bias)) == 1


def test_leaves_of_another_dtype_than_their_grad() -> None:
    x = leaf(3)
    if not hasattr(x, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    x.grad_dtype = torch.float64
    y = x.exp().sum()
    y.backward(retain_graph=True)
    found = run_from(y)[x]
    assert found.dtype == torch.float64
    assert same(x.grad, found)


# ---- size ----


def chain(length: int) -> tuple[Tensor, Tensor]:
    x = y = torch.ones(1, requires_grad=True)
    for _ in range(length):
        y = y * 1.0
    return x, y


@pytest.mark.slow
def test_a_chain_of_100_000_nodes() -> None:
    x, y = chain(100_000)
    assert run_from(y)[x].item() == 1
    del y  # must not crash
    gc.collect()


def test_a_deep_chain_on_a_small_stack() -> None:
    def work() -> None:
        x, y = chain(10_000)
        found.append(run_from(y, to=x)[x].item())
        del y

    found: list[float] = []
    size = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
    assert found == [1.0]


def test_sixteen_doublings_run_each_node_once() -> None:
    x = y = leaf()
    for _ in range(60):
        y = y + y
    assert run_from(y)[x].item() == 2.0**60


# ---- what is refused ----


def test_bad_input() -> None:
    x = leaf(3)
    y = x.exp()
    with pytest.raises(NoGraphError):
        run_from(torch.ones(3))
    with pytest.raises(ReplayError, match="needs a gradient") as caught:
        run_from(y)
    assert "float32[3]" in caught.value.repair
    with pytest.raises(ReplayError, match="takes 1 gradients, not 2"):
        run_from(y, (torch.ones(3), torch.ones(3)))
    with pytest.raises(ReplayError, match="2 gradients for 1 starts"):
        run_from([y], (torch.ones(3), torch.ones(3)))
    with pytest.raises(ReplayError, match=r"float32\[3\], and is float32\[4\]"):
        run_from(y, torch.ones(4))
    with pytest.raises(ReplayError, match="given twice"):
        run_from({y: torch.ones(3)}, torch.ones(3))
    with pytest.raises(ReplayError, match="names nothing"):
        run_from(y, torch.ones(3), to=[])
    with pytest.raises(ReplayError, match="leaves"):
        run_from(y, torch.ones(3), to=y, accumulate=True)


def test_gradients_are_a_mapping_by_identity() -> None:
    x, y = leaf(3), leaf(3)
    found = run_from((x * y).sum())
    assert x in found
    assert torch.ones(3) not in found
    assert len(found) == 2
    assert {id(key) for key in found} == {id(x), id(y)}
    assert found != run_from((x * y).sum())
    with pytest.raises(KeyError, match=r"float32\[2\]"):
        found[leaf(2)]
    assert repr(found).splitlines()[1].strip() == "leaf float32[3]: float32[3]"


def test_a_node_that_returns_too_few_gradients_is_named() -> None:
    forgets = make_function(lambda ctx, x, y: x + y, lambda ctx, gradient: gradient, "Forgets").apply
    y = forgets(leaf(3), leaf(3))
    with pytest.raises(RuntimeError, match="incorrect number of gradients") as ours:
        run_from(y, torch.ones(3))
    with pytest.raises(RuntimeError) as theirs:
        y.backward(torch.ones(3))
    assert str(ours.value) == str(theirs.value)
    with pytest.raises(RuntimeError):
        run_node(y.grad_fn, (torch.ones(3),))


def test_a_gradient_that_cannot_be_reduced_is_refused() -> None:
    y = passing(lambda gradient: torch.ones(7), "Misshapes")(leaf(3) * 2)
    with pytest.raises(ReplayError, match=r"shape \[7\] cannot be summed to \[3\]") as caught:
        run_from(y, torch.ones(3))
    assert "MisshapesBackward" in caught.value.__notes__[0]
