"""Tensors that are kept whole or in part: true ones, within the budget, when they are asked for."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import retrograd as rg
from retrograd.core.errors import RetrogradWarning, TensorPolicyError
from retrograd.core.history.kept import count_bytes, is_overwritten
from retrograd.core.history.sink import Moment
from retrograd.core.recording.keep import Holder, Keep, KeptBatch, TensorKeeper, read_limit
from retrograd.core.sites.site import Site
from tests.core.recording.collector import Collector, collect
from tests.core.recording.oracle import listen


def make_net() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor | None = None) -> None:
    optimizer.zero_grad()
    net(torch.randn(5, 3) if x is None else x).square().sum().backward()
    optimizer.step()


def tensors(seen: Collector, site: str, **where: Any) -> list[torch.Tensor]:
    """Kept tensors as a reader sees them: none that was overwritten, and without the scale."""
    return [item.tensor / item.scale for item in seen.kept(site, **where) if not is_overwritten(item)]


@pytest.mark.parametrize("copy", [False, True])
def test_whole_tensors_of_every_step(copy: bool) -> None:
    net, optimizer = make_net()
    with listen(net) as oracle, collect(net, tensors=Keep("*:output*", copy=copy)) as seen:
        for _ in range(3):
            train(net, optimizer)
    for path in ("0", "1", "2", "self"):
        assert [item.moment.step for item in seen.kept(f"{path}:output")] == [0, 1, 2]
        assert all(map(torch.equal, tensors(seen, f"{path}:output"), oracle.values[path]))
        grads = [gradients[0] for gradients in oracle.gradients[path]]
        assert all(map(torch.equal, tensors(seen, f"{path}:output.grad"), grads))
    assert {item.moment.backward for item in seen.tensors if item.site.endswith("grad")} == {0}
    assert {item.moment.backward for item in seen.tensors if not item.site.endswith("grad")} == {-1}
    assert not any(item.tensor.requires_grad for item in seen.tensors)


def test_tensors_without_statistics() -> None:
    net, optimizer = make_net()
    with listen(net) as oracle, collect(net, tensors="1:output*", statistics=False) as seen:
        train(net, optimizer)
    assert not seen.rows
    assert torch.equal(tensors(seen, "1:output")[0], oracle.values["1"][0])
    assert torch.equal(tensors(seen, "1:output.grad")[0], oracle.gradients["1"][0][0])


def test_a_reference_that_training_overwrites_is_flagged_and_a_copy_is_true() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    x = torch.randn(5, 3)
    given = nn.functional.linear(x, net[0].weight, net[0].bias).detach()
    with collect(net, tensors=["0:output", Keep("1:*", copy=True)], sites="*:output") as seen:
        net(x).sum().backward()
    [item] = seen.kept("0:output")
    assert is_overwritten(item)
    assert torch.equal(tensors(seen, "1:output")[0], given.relu())
    with collect(net, tensors=Keep("0:output", copy=True)) as seen:
        net(x).sum().backward()
    assert torch.equal(tensors(seen, "0:output")[0], given)


def test_gradients_of_leaves_are_copies() -> None:
    """``.grad`` takes over the very memory of a leaf's gradient, and later changes it."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight

    net = nn.Sequential(Weight(), nn.Identity())
    x = torch.ones(3, requires_grad=True)
    with collect(net, tensors=["*:weight.grad", "*:output.grad", "*:input*"]) as seen:
        (net(x) * rg.watch("x", x)).sum().backward()
        with collect(net[1], tensors="*:input*grad") as inner:
            net[1](x).sum().backward()
    for leaf in (x, net[0].weight):
        assert leaf.grad is not None
        leaf.grad.data.fill_(77)  # by a way that no version counter tells of
    assert torch.equal(tensors(seen, "0:weight.grad")[0], torch.ones(3))
    assert torch.equal(tensors(seen, "0:output.grad")[0], torch.ones(3))
    assert torch.equal(tensors(seen, "1:output.grad")[0], torch.ones(3))
    assert torch.equal(tensors(inner, "self:input.input.grad")[0], torch.ones(3))


def test_weights_and_updates_can_be_kept() -> None:
    net, optimizer = make_net()
    before = net[0].weight.detach().clone()
    with collect(net, tensors=["0:weight", "0:weight.update"]) as seen:
        train(net, optimizer)
        train(net, optimizer)
    assert torch.equal(tensors(seen, "0:weight", step=0)[0], before)
    moved = tensors(seen, "0:weight", step=0)[0] + tensors(seen, "0:weight.update", step=0)[0]
    torch.testing.assert_close(moved, tensors(seen, "0:weight", step=1)[0])


@pytest.mark.parametrize(
    ("part", "taken"),
    [
        ((slice(0, 2), ..., 0), lambda x: x[:2, 0]),
        (0, lambda x: x[0]),
        (lambda x: x.abs().sum(dim=1), lambda x: x.abs().sum(dim=1)),
    ],
)
def test_a_part_of_each_tensor(part: Any, taken: Any) -> None:
    net, optimizer = make_net()
    with listen(net) as oracle, collect(net, tensors=Keep("0:output*", part=part)) as seen:
        train(net, optimizer)
    [value], [gradient] = tensors(seen, "0:output"), tensors(seen, "0:output.grad")
    assert torch.equal(value, taken(oracle.values["0"][0]))
    assert torch.equal(gradient, taken(oracle.gradients["0"][0][0]))
    assert value.untyped_storage().nbytes() == value.nbytes, "a part must not hold the whole"


def test_the_first_policy_that_wants_a_site_is_taken() -> None:
    net, optimizer = make_net()
    with collect(net, tensors=[Keep("0:output", part=0), "*:output"]) as seen:
        train(net, optimizer)
    assert tensors(seen, "0:output")[0].shape == (4,)
    assert tensors(seen, "1:output")[0].shape == (5, 4)


def test_only_scheduled_steps_are_kept() -> None:
    net, optimizer = make_net()
    with collect(net, tensors="0:output", schedule=2) as seen:
        for _ in range(4):
            train(net, optimizer)
    assert [item.moment.step for item in seen.tensors] == [0, 2]


def test_the_last_steps_are_handed_over_at_the_end() -> None:
    net, optimizer = make_net()
    with collect(net, tensors=Keep("0:output", last=2)) as seen:
        for _ in range(6):
            train(net, optimizer)
        assert not seen.tensors
    assert [item.moment.step for item in seen.tensors] == [3, 4, 5]


# ---- triggers -------------------------------------------------------------------------------------------------


def test_a_nan_hands_over_its_step_and_those_before_it() -> None:
    net, optimizer = make_net()
    with collect(net, tensors=Keep("*:output*", last=2, when=rg.on_nonfinite("*:output"))) as seen:
        for step in range(8):
            bad = step == 5
            with torch.no_grad():
                saved = net[0].bias.clone()
                net[0].bias.fill_(float("nan") if bad else 0.0)
            train(net, optimizer)
            if bad:
                for parameter in net.parameters():
                    parameter.data.nan_to_num_(0.1)
            del saved
    assert sorted({item.moment.step for item in seen.tensors}) == [3, 4, 5]
    assert tensors(seen, "0:output", step=5)[0].isnan().all()
    assert tensors(seen, "0:output.grad", step=5)[0].isnan().any()
    [event] = [event for event in seen.events_of("trigger") if event.moment.step == 5]
    assert event.text == "0:output is not finite"


def test_a_jump_hands_over_its_step() -> None:
    net, optimizer = make_net()
    when = rg.on_jump(factor=20, sites="0:output", statistic="rms")
    with collect(net, tensors=Keep("0:output", when=when), sites="0:output") as seen:
        for step in range(6):
            train(net, optimizer, torch.full((5, 3), 1e4 if step == 4 else 1.0))
            optimizer.param_groups[0]["lr"] = 0.0
    assert [item.moment.step for item in seen.tensors] == [4]
    assert "jumped" in seen.events_of("trigger")[0].text


def test_triggers_see_unscaled_gradients() -> None:
    net, optimizer = make_net()
    seen_rms = []

    def spy(names: Any, rows: Any) -> str:
        index = list(names).index("2:output.grad")
        seen_rms.append(float(rows["max"][index]))
        return ""

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with collect(net, tensors=Keep("0:output", when=spy)):
        scaler.scale(net(torch.randn(5, 3)).sum()).backward()
    assert seen_rms == [1.0]
    del optimizer


def test_a_trigger_that_raises_is_a_fault_and_rows_go_on() -> None:
    net, optimizer = make_net()

    def broken(names: Any, rows: Any) -> str:
        raise ValueError("broken trigger")

    with collect(net, tensors=Keep("0:output", when=broken)) as seen, pytest.warns(RetrogradWarning, match="broken"):
        for _ in range(2):
            train(net, optimizer)
    assert [row.step for row in seen.all("2:output.grad")] == [0, 1]


# ---- the budget -----------------------------------------------------------------------------------------------


class Source:
    """What a kept tensor is of."""

    def __init__(self, keep: Keep) -> None:
        self.site = Site("fc", ("output",))
        self.name = "fc:output"
        self.keep = keep


@example([[0], []], 0, 0)  # a step that keeps nothing pushes nothing out
@given(
    st.lists(st.lists(st.integers(0, 40), max_size=4), max_size=12),
    st.integers(0, 100),
    st.one_of(st.none(), st.integers(0, 4)),
)
def test_the_budget_is_never_passed_and_nothing_is_lost_unsaid(
    steps: list[list[int]], budget: int, last: int | None
) -> None:
    sink = Collector()
    keep = Keep("*:output", last=last)
    keeper = TensorKeeper([keep], budget, sink)
    given = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrograd.core.recording.keep.warn", lambda text: None)
        for step, sizes in enumerate(steps):
            taken = []
            for size in sizes:
                given += 1
                tensor = torch.zeros(size, dtype=torch.uint8)
                admitted = keeper.admit(keep, tensor)
                if admitted is not None:
                    taken.append((Source(keep), tensor, 0, admitted))
                assert 0 <= keeper.held <= budget
            keeper.take(Moment(step), taken, 1.0)
            assert 0 <= keeper.held <= budget
        keeper.finish(Moment(len(steps)))
    assert keeper.held == 0
    dropped = sum(int(event.value) for event in sink.events_of("dropped"))
    if last is None:
        assert len(sink.tensors) + dropped == given
    else:
        handed = [item.moment.step for item in sink.tensors]
        newest = max((step for step, sizes in enumerate(steps) if sizes), default=0)
        recent = sum(len(sizes) for sizes in steps[max(0, newest - last) : newest + 1])
        assert max(handed, default=0) - min(handed, default=0) <= last
        assert len(handed) + dropped <= given
        assert len(handed) >= recent - dropped


def test_each_stream_that_has_computed_a_kept_tensor_is_marked_when_the_step_is_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnDevice:
        nbytes, layout, is_cuda, device = 8, torch.strided, True, "cuda:0"

    marked = list[str]()

    class Stream(str):
        __slots__ = ()

        def record_event(self) -> str:
            marked.append(self)
            return f"event of {self}"

    running = ["main", "main", "side", "main"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(running.pop(0)))
    sink, keeps = Collector(), [Keep("*:output"), Keep("*:output", last=1)]
    keeper = TensorKeeper(keeps, 1000, sink)
    for step in range(2):
        taken = [(Source(keep), cast(torch.Tensor, OnDevice()), 0, 8) for keep in keeps]
        for source, tensor, _, _ in taken:
            assert keeper.admit(source.keep, tensor) == 8
        keeper.take(Moment(step), taken, 1.0)
    assert sorted(marked) == ["main", "main", "side"]
    keeper.finish(Moment(2))
    ready = {(item.moment.step, *sorted(item.ready)) for item in sink.tensors}
    assert ready == {(0, "event of main"), (1, "event of main", "event of side")}
    assert len(sink.tensors) == 4


def test_what_does_not_fit_is_dropped_and_said_once() -> None:
    net, optimizer = make_net()
    with (
        collect(net, tensors="*:output", tensor_budget=190) as seen,
        pytest.warns(RetrogradWarning, match="budget of 190 bytes") as said,
    ):
        for _ in range(3):
            train(net, optimizer)
    assert len(said) == 1
    for step in range(3):
        size = sum(item.tensor.nbytes for item in seen.tensors if item.moment.step == step)
        assert 0 < size <= 190
    [event] = seen.events_of("dropped")
    assert event.value + len(seen.tensors) == 12
    assert "'*:output'" in event.text


def test_the_oldest_make_room_for_the_newest() -> None:
    net, optimizer = make_net()
    with collect(net, tensors=Keep("0:output", last=10), tensor_budget=3 * 80) as seen, pytest.warns(RetrogradWarning):
        for _ in range(8):
            train(net, optimizer)
    assert [item.moment.step for item in seen.tensors] == [5, 6, 7]


def test_holding_and_counting() -> None:
    holder = Holder(depth=1)

    def make_batch(step: int, *sizes: int) -> KeptBatch:
        return KeptBatch(Moment(step), 1.0, [(Source(Keep("*")), torch.zeros(size), 0, 4 * size) for size in sizes])

    assert holder.oldest is None
    assert holder.add(make_batch(0, 1, 2)) == 0
    assert holder.add(make_batch(1, 3)) == 0
    assert (holder.oldest, holder.add(make_batch(2, 1))) == (0, 12)
    assert holder.drop_oldest().size == 12
    assert [kept.moment.step for released in holder.release() for kept in released.unpack()] == [2]
    assert holder.release() == []
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, -3.0], (400,), check_invariants=True)
    assert count_bytes(sparse) == 2 * 4 + 2 * 8


# ---- what a user writes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (5_000, 5_000),
        ("500", 500),
        ("2kB", 2_000),
        ("1.5 MB", 1_500_000),
        ("2GiB", 2 * 1024**3),
        ("1 tb", 10**12),
    ],
)
def test_bytes_are_read(text: Any, size: int) -> None:
    assert read_limit(text) == size


@pytest.mark.parametrize("text", [-1, True, 1.5, "", "lots", "5 apples", None])
def test_what_is_no_number_of_bytes_is_refused(text: Any) -> None:
    with pytest.raises(TensorPolicyError):
        read_limit(text)


@pytest.mark.parametrize("last", [-1, 1.5, True, "3"])
def test_a_policy_that_holds_no_number_of_steps_is_refused(last: Any) -> None:
    with pytest.raises(TensorPolicyError):
        Keep("*:output", last=last)


@pytest.mark.parametrize(
    "options", [{"factor": 1}, {"factor": 0.5}, {"memory": 0}, {"memory": 1}, {"statistic": "median"}]
)
def test_a_trigger_that_can_never_be_right_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TensorPolicyError):
        rg.on_jump(**options)
