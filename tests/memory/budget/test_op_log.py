"""What is noted of a forward pass, and what could be recomputed of it."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from retrograd.core.hooks import op_info
from retrograd.core.hooks.dispatch import OperationTap
from retrograd.memory.budget.op_log import OpLog
from retrograd.memory.budget.recipe import Recipe, find_recipe


@contextmanager
def taped(op_log: OpLog) -> Iterator[None]:
    tap = OperationTap(op_log.carry_out)
    tap.put_on()
    try:
        yield
    finally:
        tap.take_off()


class Memory:
    """Lends the bytes of a tensor, themselves: whoever wrote into them would be found out."""

    def __init__(self, op_log: OpLog, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storage = storage
        self.then = whole(storage).clone()
        self.contents = op_log.find(storage, tensor._version)
        self.contents.packed = weakref.ref(self)

    @property
    def is_as_it_was(self) -> bool:
        return True

    def lend(self, *, is_kept: bool) -> Tensor:
        return whole(self.storage)


def whole(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def way_to(op_log: OpLog, tensor: Tensor) -> Recipe | None:
    return find_recipe(op_log.find(tensor.untyped_storage(), tensor._version), is_held=True)


def words(op_log: OpLog, tensor: Tensor) -> str | None:
    """The operations that would recompute it; None where none would."""
    found = way_to(op_log, tensor)
    return None if found is None else str(found)


@pytest.fixture
def op_log() -> OpLog:
    op_log = OpLog(0)
    op_log.mark(0)
    return op_log


@pytest.fixture
def x(op_log: OpLog) -> Iterator[Tensor]:
    """What everything is made of, packed."""
    value = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    memory = Memory(op_log, value)
    yield value
    assert torch.equal(memory.then, whole(memory.storage))


# ---- what is recomputed ----------------------------------------------------------------------------------------


def without_graph(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.exp()


def inference(x: Tensor) -> Tensor:
    """Torch counts no writes into what is made here."""
    with torch.inference_mode():
        y = x.exp()
    return y + 1


def add_at(x: Tensor) -> Tensor:
    y = x.exp()
    return y.index_add_(0, torch.tensor([0, 0]), torch.ones(2, 4))


def add_at_after_data(x: Tensor) -> Tensor:
    y = x.exp()
    y.data.mul_(2)
    y.index_add_(0, torch.tensor([0, 0]), torch.ones(2, 4))  # to the counter, the one write might be the other
    return y


def fill_by_numpy(x: Tensor) -> Tensor:
    y = torch.empty(3, 4)
    y.numpy()[...] = 1
    return y


def fill_zeros_by_numpy(x: Tensor) -> Tensor:
    y = torch.zeros(3, 4)
    y.numpy()[...] = 0  # another time something else
    return y


def fill_a_source_by_numpy(x: Tensor) -> Tensor:
    return fill_by_numpy(x) * x


def two_results(x: Tensor) -> Tensor:
    values, where = torch.empty(3, 4), torch.empty(3, 4, dtype=torch.long)
    torch.sort(x.detach(), out=(values, where))
    return values


class Wrapper(Tensor):
    """Memory of its own, into which its operations write without a word."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        wrapper = Tensor._make_wrapper_subclass(cls, inner.shape)  # type: ignore[attr-defined]
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func(*tree_map(lambda each: each.inner if isinstance(each, Wrapper) else each, args), **(kwargs or {}))
        return args[0]


def write_by_a_subclass(x: Tensor) -> Tensor:
    y = x.detach().exp()
    Wrapper(y).add_(1)
    assert y._version == 0
    return y


UNSEEN = {
    "no graph is made": without_graph,
    "inference mode": inference,
    "an order that is not always the same": add_at,
    "a write that is not counted before one": add_at_after_data,
    "filled by numpy": fill_by_numpy,
    "zeros": fill_zeros_by_numpy,
    "made of zeros": lambda x: fill_zeros_by_numpy(x) * x,
    "made of what was filled by numpy": fill_a_source_by_numpy,
    "two results that were there": two_results,
    "a kind of tensor with rules of its own": write_by_a_subclass,
    "a sparse tensor": lambda x: torch.sparse.mm(torch.eye(3).to_sparse(), x),
    "a gradient": lambda x: torch.autograd.grad(x.exp().sum(), x, create_graph=True)[0],
    "a transform": lambda x: torch.func.vmap(lambda row: row.index_add(0, torch.tensor([0]), row[:1]))(x),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_it_is_left_alone(name: str, op_log: OpLog, x: Tensor) -> None:
    with taped(op_log):
        result = UNSEEN[name](x)
    assert words(op_log, result) is None


def test_a_write_that_was_not_seen(op_log: OpLog, x: Tensor) -> None:
    with taped(op_log):
        y = x.exp()
    with torch.no_grad():
        y.add_(1)
    assert words(op_log, y) is None


def test_a_generator_that_nobody_else_draws_from(op_log: OpLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads may draw from the default one meanwhile."""
    with taped(op_log):
        mask = torch.empty(64).bernoulli_(0.5)
    monkeypatch.setattr(op_info, "write_random_state", pytest.fail)
    recipe = way_to(op_log, mask)
    assert recipe is not None
    assert torch.equal(whole(recipe.run()[0]), whole(mask.untyped_storage()))


# ---- what is held ---------------------------------------------------------------------------------------------


def test_nothing_is_held(op_log: OpLog, x: Tensor) -> None:
    small = OpLog(1 << 20)
    gc.disable()
    try:
        for each in (op_log, small):
            with taped(each):
                y = x + 1
                held = weakref.ref(y.untyped_storage())
                z = y * 2
            del y
            assert held() is None
            assert len(each._contents) <= 2
            del z
    finally:
        gc.enable()
    assert len(op_log._contents) == 1  # of x
    assert not small._contents


def test_a_long_chain_of_writes_can_be_dropped(op_log: OpLog, x: Tensor) -> None:
    """Each one knows the one before it."""
    y = x.exp()
    operation = torch.ops.aten.add_.Tensor
    for _ in range(20 * sys.getrecursionlimit()):
        op_log.carry_out(operation, (y, 1), {})
    assert words(op_log, y) is None
    op_log.clear()
    assert not op_log._contents


# ---- what is wanted -------------------------------------------------------------------------------------------


class Lent:
    """Lends what was there when it was packed."""

    def __init__(self, op_log: OpLog, tensor: Tensor) -> None:
        self.then = whole(tensor.untyped_storage()).clone()
        self.contents = op_log.find(tensor.untyped_storage(), tensor._version)
        self.contents.packed = weakref.ref(self)

    @property
    def is_as_it_was(self) -> bool:
        return True

    def lend(self, *, is_kept: bool) -> Tensor:
        return self.then


def write_by_a_function(x: Tensor, y: Tensor) -> None:
    """Inside of a custom Function, where no graph is made."""
    with torch.no_grad():
        x.mul_(y)


def draw_into(x: Tensor, y: Tensor) -> None:
    x.data.bernoulli_(0.5)


MAKING: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x * y,
    lambda x, y: x @ y.t(),
    lambda x, y: x.t().sin(),
    lambda x, y: x.sort(1)[0],
    lambda x, y: torch.nn.functional.dropout(x, 0.5),
    lambda x, y: torch.rand_like(x),
    lambda x, y: torch.zeros(4, 4),
    lambda x, y: torch.cat([x[:2], y[2:]]),
    lambda x, y: torch._foreach_add([x, y], 1.0)[1],
    lambda x, y: x.detach(),
    lambda x, y: x.t(),
]
WRITING: list[Callable[[Tensor, Tensor], object]] = [
    lambda x, y: x.add_(y),
    lambda x, y: x[1:3].copy_(y[:2]),
    lambda x, y: x.data.mul_(y),
    lambda x, y: x.data.fill_(2),
    lambda x, y: x.t().sigmoid_(),
    lambda x, y: x.uniform_(),
    lambda x, y: torch.mul(y, 2, out=x),
    lambda x, y: torch._foreach_mul_([x], 0.5),
    lambda x, y: x.index_add_(0, torch.tensor([0, 0]), y[:2]),
    write_by_a_function,
    draw_into,
]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_is_wanted_nothing_is_recomputed_wrongly(data: st.DataObject) -> None:
    """A random program; memory is dropped and its addresses are used again, and some of it is packed."""
    torch.manual_seed(data.draw(st.integers(0, 9)))
    op_log = OpLog(0)
    if data.draw(st.booleans()):
        op_log.mark(0)
    alive = [torch.rand(4, 4), torch.rand(4, 4)]
    packed = [Lent(op_log, each) for each in alive]
    wanted = data.draw(st.none() | st.frozensets(st.integers(0, 40)))
    op_log.wanted = wanted
    places = st.integers(0, 100)
    with taped(op_log):
        for _ in range(data.draw(st.integers(1, 14))):
            x, y = (alive[data.draw(places) % len(alive)] for _ in range(2))
            kind = data.draw(st.sampled_from(["make", "make", "write", "write", "drop", "pack", "change"]))
            if kind == "make":
                alive.append(data.draw(st.sampled_from(MAKING))(x, y))
            elif kind == "write":
                with suppress(RuntimeError):  # from and into the same memory
                    data.draw(st.sampled_from(WRITING))(x, y)
            elif kind == "drop" and len(alive) > 2:
                alive.pop(data.draw(places) % len(alive))
            elif kind == "pack":
                packed.append(Lent(op_log, x))
            elif kind == "change":
                op_log.wanted = data.draw(st.none() | st.just(wanted))
            del x, y
    state = torch.get_rng_state()
    for tensor in alive:
        recipe = way_to(op_log, tensor)
        if recipe is not None:
            held = whole(tensor.untyped_storage()).clone()
            assert torch.equal(whole(recipe.run()[0]), held), str(recipe)
            assert torch.equal(whole(tensor.untyped_storage()), held)
    assert torch.equal(state, torch.get_rng_state())


def test_a_missing_link_stops_the_chain(x: Tensor, op_log: OpLog) -> None:
    """``data`` is an operation too."""
    op_log.wanted = frozenset({0, 3, 4})
    with taped(op_log):
        y = x * 2
        y.data.add_(1)
        y.mul_(3)
        z = y.exp()
    assert words(op_log, y) is None
    assert words(op_log, z) is None
    memory = Memory(op_log, y)
    assert words(op_log, z) == "exp"
    del memory


# ---- all operations of torch ----------------------------------------------------------------------------------


def in_memory(value: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(value) if type(leaf) is Tensor]
    return [leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_nested]


def fresh(value: Any) -> Any:
    def copy(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return tree_map(copy, value)


def run(operation: Any, given: Any) -> Any:
    first, args, kwargs = given
    torch.default_generator.manual_seed(7)
    return operation(first, *args, **kwargs)


_BLANK = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
_PARTLY_BLANK = {"nn.functional.mse_loss", "nn.functional.smooth_l1_loss", "linalg.lstsq"}
"""A result of one element in memory for more, of which the rest is not written; solutions in blank memory."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
def test_every_operation_that_torch_lists(thorough: bool) -> None:
    """With the op_log the same comes out; and all that can be recomputed is the same."""
    infos = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db
    count, infos = 0, infos if thorough else infos[::10]
    for info in infos:
        if torch.float32 not in info.supported_dtypes("cpu") or info.name in _BLANK | _PARTLY_BLANK:
            continue
        for sample in islice(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd), 1):
            given = (sample.input, sample.args, sample.kwargs)
            try:
                expected = run(info.op, fresh(given))
            except (AssertionError, RuntimeError, TypeError):
                continue  # it needs another device, or what `fresh` takes from it
            state = torch.get_rng_state()
            op_log = OpLog(0)
            now_given = fresh(given)
            packed = [Memory(op_log, tensor) for tensor in in_memory(now_given)]
            with taped(op_log):
                found = run(info.op, now_given)
            assert torch.equal(state, torch.get_rng_state()), info.name
            for one, other in zip(in_memory(found), in_memory(expected), strict=True):
                assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True), info.name
            for tensor in in_memory(found):
                recipe = way_to(op_log, tensor)
                if recipe is None:
                    continue
                count += 1
                before = [whole(memory.storage).clone() for memory in packed]
                storage, _ = recipe.run()
                assert torch.equal(whole(storage), whole(tensor.untyped_storage())), info.name
                after = [whole(memory.storage) for memory in packed]
                assert all(map(torch.equal, before, after)), info.name
                others = [tensor, *in_memory(now_given)]
                assert not storage.nbytes() or all(
                    storage.data_ptr() != other.untyped_storage().data_ptr() for other in others
                ), info.name
            assert torch.equal(state, torch.get_rng_state()), info.name
    assert count > len(infos) // 2
