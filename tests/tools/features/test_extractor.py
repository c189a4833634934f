from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import FeatureError, NoSuchSiteError
from retrograd.core.recording.record import record
from retrograd.tools.features.extractor import extract
from tests.tools.features.nets import Answer, Net, hook_by_hand, make_images, make_net


def count_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


PLAIN = ["stem", "norm", "relu", "mix", "cell#1", "blocks.0", "blocks.1", "blocks.2", "head.fc"]


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_values_are_those_of_a_hook_by_hand(mode: str) -> None:
    model, images = make_net(), make_images()
    model.train(mode == "train")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = {}
    for path in PLAIN:
        model.load_state_dict(state)
        torch.manual_seed(5)
        expected[path] = hook_by_hand(model, path.partition("#")[0], images)
    model.load_state_dict(state)
    torch.manual_seed(5)
    features = extract(model, images, list(reversed(PLAIN)))
    assert list(features) == list(reversed(PLAIN))
    for path in PLAIN:
        assert torch.equal(features[path], expected[path]), path
        assert not features[path].requires_grad
    assert count_hooks(model) == 0


def test_each_site_alone_ends_where_it_is() -> None:
    """Alone, a feature comes from a forward that ends there; together, from one that goes on."""
    model, images = make_net().eval(), make_images()
    together = extract(model, images, PLAIN)
    for path in PLAIN:
        assert torch.equal(extract(model, images, path)[path], together[path])


def test_names_of_every_kind() -> None:
    model, images = make_net().eval(), make_images()
    sites = ["cell#2", "cell#3:output", "self", "head:output.parts.rest", "lstm:output.1.0", "head.fc:input.input"]
    features = extract(model, images, sites)
    assert list(features) == sites
    assert torch.equal(features["cell#2"], hook_by_hand(model, "cell", images, call=2))
    assert torch.equal(features["cell#3:output"], hook_by_hand(model, "cell", images, call=3))
    answer = hook_by_hand(model, "", images)
    assert isinstance(features["self"], Answer)
    assert torch.equal(features["self"].logits, answer.logits)
    assert torch.equal(features["self"].parts["first"], answer.parts["first"])
    assert torch.equal(features["head:output.parts.rest"], answer.parts["rest"])
    assert torch.equal(features["lstm:output.1.0"], hook_by_hand(model, "lstm", images)[1][0])
    assert torch.equal(features["head.fc:input.input"], hook_by_hand(model, "blocks.2", images))


@pytest.mark.parametrize("name", ["cell", "cel*", "cell:output", "cell:outputs", "cell:output*", "c*:outputs"])
def test_a_name_without_a_number_is_every_call(name: str) -> None:
    model, images = make_net().eval(), make_images()
    features = extract(model, images, ["stem", name])
    slot = ":output" if ":" in name else ""
    assert list(features) == ["stem", *(f"cell#{call}{slot}" for call in (1, 2, 3))]
    for call in (1, 2, 3):
        expected = hook_by_hand(model, "cell", images, call=call)
        assert torch.equal(features[f"cell#{call}{slot}"], expected)
        assert torch.equal(extract(model, images, f"cell#{call}")[f"cell#{call}"], expected)


def test_kinds_are_all_tensors_of_an_output_or_input() -> None:
    model, images = make_net().eval(), make_images()
    names = ["lstm:output.0", "lstm:output.1.0", "lstm:output.1.1", "head:input.states", "cell#2:output"]
    features = extract(model, images, ["lstm:outputs", "head:inputs", "cell#2:outputs"])
    assert list(features) == names
    assert torch.equal(features["head:input.states"], hook_by_hand(model, "blocks.2", images))


def test_a_model_that_fails_behind_all_that_was_asked_for_is_told_how_to_end_before() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(1):
                x = self.fc(x)
            raise ValueError("no head")

    model = Failing()
    with pytest.raises(ValueError, match="no head") as caught:
        extract(model, torch.ones(1, 2), "fc")
    assert "'fc#1:output'" in caught.value.__notes__[0]
    assert list(extract(model, torch.ones(1, 2), "fc#1")) == ["fc#1"]


def test_the_arguments_of_a_call_are_a_dict() -> None:
    model, images = make_net().eval(), make_images()
    arguments = extract(model, images, "head:input")["head:input"]
    assert list(arguments) == ["states", "scale"]
    assert arguments["scale"] == 2.0
    assert torch.equal(arguments["states"], hook_by_hand(model, "blocks.2", images))


def test_globs_expand_in_the_order_of_the_model() -> None:
    model, images = make_net().eval(), make_images()
    assert list(extract(model, images, ["head.*", "blocks.*"])) == ["head.fc", "blocks.0", "blocks.1", "blocks.2"]
    assert list(extract(model, images, "blocks.*:output")) == ["blocks.0:output", "blocks.1:output", "blocks.2:output"]
    names = ["lstm:output.0", "lstm:output.1.0", "lstm:output.1.1"]
    assert list(extract(model, images, "lstm:output.*")) == names
    every = extract(model, images, "cell#*")
    assert list(every) == ["cell#1:output", "cell#2:output", "cell#3:output"]
    for number, value in enumerate(every.values(), 1):
        assert torch.equal(value, hook_by_hand(model, "cell", images, call=number))
    assert list(extract(model, images, "cell*#2")) == ["cell#2"]
    assert list(extract(model, images, "cell*#3:output")) == ["cell#3:output"]
    assert list(extract(model, images, "lstm#*:output")) == names
    assert list(extract(model, images, "*lstm:input")) == ["lstm:input"]
    assert list(extract(model, images, "mix:*")) == ["mix:output", "mix:input.input"]
    assert "unused" not in extract(model, images, "*")  # a glob leaves out what the forward leaves out


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("layer4", "nearest are"),
        ("stemm", "the nearest are stem"),
        ("stem:outptu", "stem:output"),
        ("blocs.*", "blocks.0"),
    ],
)
def test_a_name_that_the_model_does_not_have(site: str, said: str) -> None:
    with pytest.raises(NoSuchSiteError, match=said):
        extract(make_net(), make_images(), site)


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("stem:output.grad", r"rg\.record"),
        ("blocks.*:output.grad", r"rg\.record"),
        ("stem:weight", "parameter"),
        ("*:parameters", "parameter"),
        ("stem:weight.update", "update"),
        ("blocks", r"'blocks\.\*'"),
        ("unused", "never called"),
        ("unused:input.input", "never called"),
        ("cell#4", "called 3 times"),
        ("stem#2:output", "called 1 time"),
        ("lstm:output.2", r"lstm:output\.0, lstm:output\.1\.0"),
        ("stem:input.x", r"there are: stem:input\.input"),
        ("*:output.7.*", "matches no tensor"),
        ("unused*", "never called"),
        ("watch/x", "by hand"),
        ("re:stem", "not a valid name of a feature"),
        ("", "not a valid name of a feature"),
        (7, "not a valid name of a feature"),
    ],
)
def test_what_no_forward_has(site: Any, said: str) -> None:
    model = make_net()
    with pytest.raises(FeatureError, match=said):
        extract(model, make_images(), [site])
    assert count_hooks(model) == 0


def test_things_that_are_no_model() -> None:
    with pytest.raises(FeatureError, match="is not a torch"):
        extract(lambda x: x, make_images(), "a")  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match=r"model\.module"):
        extract(nn.DataParallel(nn.Linear(2, 2)), torch.ones(1, 2), "self")
    with pytest.raises(FeatureError, match="No site"):
        extract(nn.Linear(2, 2), torch.ones(1, 2), [])


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.see(torch.ones(1)), args, kwargs


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    ("batch", "args", "kwargs"),
    [
        (5, (5,), {}),
        ((1, 2), (1, 2), {}),
        ({"x": 1}, (), {"x": 1}),
        (((1,), {"x": 2}), (1,), {"x": 2}),
        (((1,), 2), ((1,), 2), {}),
        ([1, 2], ([1, 2],), {}),
        (Pair(1, 2), (Pair(1, 2),), {}),
        (({"x": 1},), ({"x": 1},), {}),
    ],
)
def test_what_a_batch_stands_for(batch: Any, args: Any, kwargs: Any) -> None:
    _, seen_args, seen_kwargs = extract(Takes(), batch, "self")["self"]
    assert (seen_args, seen_kwargs) == (args, kwargs)


class InPlace(nn.Module):
    """Everything is written over after it was returned; ``last`` outlives the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.pair = nn.LSTM(3, 3)
        self.same = nn.Identity()
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("last", torch.zeros(4, 3))
        self.remember = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.relu(y)
        states, (h, _) = self.pair(y)
        h.zero_()
        states[0] += 1
        z = self.same(states)
        states.mul_(3)
        self.last.copy_(z)
        return self.relu(self.remember(self.last))


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("site", ["fc", "pair", "same", "relu#1", "relu#1:input.input", "remember"])
def test_what_is_written_later_does_not_reach_a_feature(site: str, differentiable: bool) -> None:
    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(4, 3)
    path = "fc" if site == "relu#1:input.input" else site.partition("#")[0]
    expected = hook_by_hand(model, path, x, grad=differentiable)
    model.last.zero_()
    feature = extract(model, x, [site, "self"], differentiable=differentiable)[site]
    model(x * 2)  # writes into the buffer too
    if site == "pair":
        assert torch.equal(feature[0], expected[0])
        assert torch.equal(feature[1][0], expected[1][0])
    else:
        assert torch.equal(feature, expected)


def test_the_last_feature_is_not_the_batch_itself() -> None:
    x = torch.ones(2)
    feature = extract(nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), x, "0")["0"]
    x.zero_()
    assert torch.equal(feature, torch.ones(2))


def test_with_a_graph_gradients_are_those_of_autograd() -> None:
    model, images = make_net().eval(), make_images().requires_grad_()
    sites = ["stem", "norm", "mix", "lstm:output.0", "cell#2", "head.fc"]
    weights = torch.Generator().manual_seed(2)
    inputs = [images, *model.stem.parameters(), *model.lstm.parameters(), *model.cell.parameters()]

    features = extract(model, images, sites, differentiable=True)
    factors = [torch.randn(value.shape, generator=weights) for value in features.values()]
    loss = sum((value * factor).sum() for value, factor in zip(features.values(), factors, strict=True))
    found = torch.autograd.grad(loss, inputs)

    stem = model.stem(images)  # the same net, written out without anything in place
    norm = model.norm(stem)
    x = norm.relu()
    mix = model.mix(x)
    states, _ = model.lstm((x + mix).flatten(2).transpose(1, 2))
    first = model.cell(states[:, -1])
    second = model.cell(first.tanh())
    y = model.blocks[2](model.blocks[1](model.blocks[0](model.cell(second.tanh()).tanh())))
    values = [stem, norm, mix, states, second, model.head.fc(y)]
    expected = torch.autograd.grad(sum((v * f).sum() for v, f in zip(values, factors, strict=True)), inputs)
    for each, right in zip(found, expected, strict=True):
        torch.testing.assert_close(each, right)
    assert count_hooks(model) == 0


def test_a_feature_with_a_graph_lies_on_the_way_to_the_next() -> None:
    model, images = make_net().eval(), make_images()
    features = extract(model, images, ["mix", "lstm:output.0", "head:output.logits"], differentiable=True)
    (gradient,) = torch.autograd.grad(features["head:output.logits"].sum(), features["lstm:output.0"])
    assert gradient.abs().sum() > 0


def test_the_caller_may_be_without_grad() -> None:
    model, images = make_net().eval(), make_images()
    with torch.no_grad():
        assert extract(model, images, "stem", differentiable=True)["stem"].requires_grad
    assert not extract(model, images, "stem")["stem"].requires_grad
    with torch.inference_mode():
        extract(model, images, "stem")
        with pytest.raises(FeatureError, match="inference"):
            extract(model, images, "stem", differentiable=True)


def test_an_exception_of_the_model_comes_through_and_no_hook_stays() -> None:
    model = make_net()
    with pytest.raises(RuntimeError, match="channels"):
        extract(model, torch.ones(1, 2, 4, 4), ["stem", "head"])
    assert count_hooks(model) == 0


def test_calls_in_other_threads_are_not_read() -> None:
    class Threaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: self.fc(torch.zeros(1, 2)))
            thread.start()
            thread.join()
            return self.fc(x)

    model, x = Threaded(), torch.ones(1, 2)
    assert torch.equal(extract(model, x, "fc")["fc"], model.fc(x))


class Noting(nn.Linear):
    """Keeps a weak reference to all that it has returned."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.returned: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.returned.append(weakref.ref(output))
        return output


@pytest.mark.parametrize("early_end", [False, True])
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("sites", [["0", "1"], ["1:output.9"], ["1#2"]])
def test_nothing_holds_on_to_a_forward(sites: list[str], differentiable: bool, early_end: bool) -> None:
    model, x = nn.Sequential(Noting(), Noting(), nn.Tanh(), Noting()), torch.ones(2, 3)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(FeatureError):
            extract(model, x, sites, differentiable=differentiable, early_end=early_end)
        returned = [ref for module in model if isinstance(module, Noting) for ref in module.returned]
        assert len(returned) == (2 if early_end and sites != ["1#2"] else 3)
        assert all(ref() is None for ref in returned)
    finally:
        gc.enable()


def test_inside_of_a_recording_it_reads_the_same() -> None:
    model, images = make_net().eval(), make_images()
    expected = extract(model, images, "mix")["mix"]
    with record(model, sites="*") as recording:
        assert torch.equal(extract(model, images, "mix")["mix"], expected)
        model(images).logits.sum().backward()
    assert recording.history["mix:output"].steps.tolist() == [0]
    assert count_hooks(model) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpointed_part(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def part(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x).tanh()).tanh()).tanh()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.part, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(2, 3, requires_grad=True)
    expected = model.second(model.first(x).tanh())
    assert torch.equal(extract(model, x, "second")["second"], expected)
    found = extract(model, x, "second", differentiable=True)["second"]
    assert torch.equal(found, expected)
    if reentrant:  # its parts run without grad, so a hook sees no graph either
        assert not found.requires_grad
        return
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), [x, *model.first.parameters()]),
        torch.autograd.grad(expected.sum(), [x, *model.first.parameters()]),
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by torch 2.15's Dynamo
def test_a_compiled_model_is_read_at_its_boundary() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2)).eval()
    x = torch.randn(2, 3)
    expected = hook_by_hand(model, "1", x)
    model[1] = torch.compile(model[1], backend="eager")
    assert torch.equal(extract(model, x, "1")["1"], expected)
    assert list(extract(model, x, "*")) == ["self", "0", "1", "2"]  # what is inside is left out
    with pytest.raises(FeatureError, match="inside a compiled module"):
        extract(model, x, "1.0")
    in_place = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).eval()
    in_place[1].compile(backend="eager")
    with pytest.raises(FeatureError, match="inside a compiled module"):
        extract(in_place, x, "1")
    assert torch.equal(extract(in_place, x, "self")["self"], in_place(x))


def test_a_compiled_model_is_not_compiled_again() -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(1)
        return graph.forward

    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).eval()
    model = torch.compile(inner, backend=backend)
    x = torch.randn(2, 3)
    with torch.no_grad():
        expected = model(x)
        compiled = len(calls)
        assert torch.equal(extract(model, x, "self")["self"], expected)
        model(x)
    assert len(calls) == compiled


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone, which outlives the models of a test: a model that let go of it last could hang."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel_is_read_without_communication() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    model = nn.parallel.DistributedDataParallel(inner)
    x = torch.randn(2, 3)
    feature = extract(model, x, "0", differentiable=True)["0"]
    assert torch.equal(feature, inner[0](x))
    extract(nn.Sequential(model), x, "0.0", differentiable=True)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in inner.parameters())


def test_a_transformer_layer_takes_the_way_that_a_hook_makes_it_take() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    assert torch.equal(extract(model, x, "norm1")["norm1"], hook_by_hand(model, "norm1", x))


def test_a_model_that_extracts_inside_its_own_forward() -> None:
    class Perceptual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = make_net().eval()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            inner = extract(self.backbone, x, ["stem", "head.fc"])
            return self.fc(inner["head.fc"]) + inner["stem"].mean()

    model, images = Perceptual(), make_images()
    net: Net = model.backbone
    features = extract(model, images, ["backbone.mix", "self"])
    assert torch.equal(features["backbone.mix"], hook_by_hand(net, "mix", images))
    assert torch.equal(features["self"], model(images))
    assert torch.equal(extract(model, images, "backbone.mix")["backbone.mix"], features["backbone.mix"])
    assert count_hooks(model) == 0


@pytest.mark.slow
def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20, n_positions=8)
    model, batch = transformers.GPT2Model(config).eval(), {"input_ids": torch.arange(8)[None]}
    with torch.no_grad():
        expected = model(**batch, output_hidden_states=True)
    features = extract(model, batch, ["h.0:output", "self", "self:output.last_hidden_state", "h.1:input.hidden_states"])
    assert torch.equal(features["h.1:input.hidden_states"], expected.hidden_states[1])
    assert torch.equal(features["self"].last_hidden_state, expected.last_hidden_state)
    assert torch.equal(features["self"]["last_hidden_state"], features["self:output.last_hidden_state"])
    assert type(features["self"]) is type(expected)
