from __future__ import annotations

import contextlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import (
    BundleVersionError,
    CannotBundleError,
    DamagedBundleError,
    FreedGraphError,
    ReplayError,
)
from retrograd.core.hooks.engine import TORCH
from retrograd.core.hooks.nodes import edges_of, is_leaf, is_python
from retrograd.following.bundles.bundle import open_bundle
from retrograd.following.bundles.files import SEAL
from retrograd.following.bundles.replay import replay
from retrograd.following.bundles.signing import sign, sum_files
from retrograd.following.bundles.writer import write_bundle
from retrograd.following.graph.node import Line
from tests import warm
from tests.by_hand import make_function, passing
from tests.following.bundles.bundled import KINDS, WritesToItsBuffer
from tests.following.graph.bits import same
from tests.following.graph.zoo import ZOO, leaf

Gradients = tuple[Tensor | None, ...]
Written = dict[str, list[tuple[Path, Gradients]]]
"""Name of a kind or net → the bundle of each of its nodes, and what torch's engine got from it."""

Elsewhere = dict[str, list[Any]]
"""Name of a bundle → whether it came out the same in another process, and what is said of it."""

REPLAY_ALL = """
import json, sys, warnings
from pathlib import Path
from retrograd.following.bundles.replay import replay
from retrograd.core.errors import GraphError
warnings.simplefilter("ignore")

def attempt(path):
    try:
        replayed = replay(path)
    except GraphError as error:
        return [False, str(error)]
    return [bool(replayed), str(replayed)]

print(json.dumps({path.name: attempt(path) for path in sorted(Path(sys.argv[1]).iterdir())}))
"""


def nodes_below(roots: Any) -> list[Any]:
    """All nodes but those of leaves."""
    tensors = [each for each in (roots if isinstance(roots, list | tuple) else [roots]) if each.requires_grad]
    todo, seen = [each.grad_fn for each in tensors], dict[Any, None]()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen[node] = None
            todo += [following for following, _ in edges_of(node) if following is not None]
    return [node for node in seen if not is_leaf(node)]


def follow_engine(roots: Any) -> list[tuple[Any, Gradients, Gradients]]:
    """What torch's own engine put into each node, and what it got."""
    came, gave, handles = dict[Any, Gradients](), dict[Any, Gradients](), []
    for node in nodes_below(roots):
        handles.append(node.register_prehook(lambda incoming, node=node: note(came, node, incoming)))
        handles.append(node.register_hook(lambda outgoing, _, node=node: note(gave, node, outgoing)))
    tensors = [each for each in (roots if isinstance(roots, list | tuple) else [roots]) if each.requires_grad]
    seeds = [torch.randn_like(each) if each.layout is torch.strided else each.detach() for each in tensors]
    torch.autograd.backward(tensors, seeds, retain_graph=True)
    for handle in handles:
        handle.remove()
    return [(node, came[node], gave[node]) for node in came]


def note(table: dict[Any, Gradients], node: Any, gradients: Gradients) -> None:
    table[node] = tuple(None if each is None else each.detach() for each in gradients)


def run_elsewhere(folder: Path) -> Elsewhere:
    done = warm.run([sys.executable, "-c", REPLAY_ALL, str(folder)], check=True, capture_output=True, text=True)
    came: Elsewhere = json.loads(done.stdout)
    return came


multiplies_wrongly = passing(lambda gradient: (gradient * 2).mm(torch.ones(7, 2)))


@torch.library.custom_op("retrograd_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


uses_custom = passing(lambda gradient: twice(gradient))


def bundle_of(result: Tensor, path: Path, incoming: Sequence[Tensor | None] | None = None, **about: Any) -> Path:
    incoming = [torch.randn_like(result)] if incoming is None else incoming
    return write_bundle(result.grad_fn, incoming, path, about=about)


NETS = [name for name in ZOO if name not in {"checkpoint_that_is_reentrant", "nested_tensors"}]  # refused, see below


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("bundles")
    bundles: Written = {}
    for name in [*KINDS, *NETS]:
        torch.manual_seed(0)
        roots = KINDS[name]() if name in KINDS else ZOO[name]()[0]
        kinds = Counter[type]()
        bundles[name] = []
        for node, incoming, gave in follow_engine(roots):
            kinds[type(node)] += 1
            if kinds[type(node)] < 3:  # the same kind forty times tells nothing new
                bundles[name].append((write_bundle(node, incoming, folder / name), gave))
    for name, result, incoming in (
        ("raises in Python", multiplies_wrongly(leaf(2, 3)), [torch.ones(2, 3)]),
        ("raises in torch", leaf(3, 4).softmax(1), [torch.ones(2, 4)]),
        ("not registered", uses_custom(leaf(3)), [torch.ones(3)]),
    ):
        bundles[name] = [(bundle_of(result, folder / name, incoming), ())]
    return bundles


@pytest.fixture(scope="module")
def elsewhere(written: Written) -> Elsewhere:
    return run_elsewhere(next(iter(written.values()))[0][0].parent)


@pytest.mark.parametrize("name", [*KINDS, *NETS])
def test_a_node_gives_the_same_bits_again(name: str, written: Written, elsewhere: Elsewhere) -> None:
    assert written[name]
    for path, gave in written[name]:
        replayed = replay(path)
        if name == "cumprod with a zero" and not replayed and TORCH < (2, 13):
            assert replayed.bundle.node.deviation  # which a newer torch does not have
            continue
        assert replayed, str(replayed)
        assert elsewhere[path.name][0], elsewhere[path.name][1]
        if replayed.bundle.node.name in {"BranchesBackward", "WritesToItsBufferBackward"}:
            continue  # another draw; another state of the buffer
        for one, other in zip(replayed.outputs, gave, strict=False):  # the engine sums and casts afterwards
            if one is not None and other is not None and (one.shape, one.dtype) == (other.shape, other.dtype):
                assert same(one, other)


def test_a_bundle_tells_everything(tmp_path: Path) -> None:
    x, weight = leaf(3, 4), leaf(4)
    result = F.layer_norm(x, (4,), weight)
    line = Line(__file__, 1, "forward", "layer_norm")
    gradient = torch.full((3, 4), math.nan)
    path = bundle_of(result, tmp_path / "it", [gradient], module="blocks.3", call=2, line=line, step=7, loss=math.inf)
    node = open_bundle(path).node
    assert (node.place, node.number) == ("blocks.3#2:NativeLayerNormBackward0", result.grad_fn._sequence_nr())
    assert node.line == line
    assert (1, "from __future__ import annotations") in node.source
    assert [str(each.tensor) for each in node.incoming if each] == ["float32[3, 4]"]
    assert [each.nonfinite for each in node.incoming if each] == [12]
    assert {each.name: str(each.tensor) for each in node.saved if each.tensor}["input"] == "float32[3, 4]"
    assert {each.name: each.value for each in node.saved}["normalized_shape"] == "(4,)"
    assert node.about == {"step": 7, "loss": "inf"}
    text = str(replay(path))
    for part in ("blocks.3#2", "import annotations", "12 not finite", "aten::native_layer_norm_backward", "The same."):
        assert part in text
    assert {each.name for each in path.iterdir()} == {"bundle.json", "tensors.safetensors", "seal.json"}


def test_a_line_may_be_told_by_its_number(tmp_path: Path) -> None:
    path = bundle_of(leaf(3).exp(), tmp_path / "it", line=1, file=__file__, function="forward")
    assert str(open_bundle(path).node.line) == f"{__file__}:1 in forward"


def test_tensors_are_named_by_what_they_are_to_the_node(tmp_path: Path) -> None:
    from_closure = torch.ones(3)

    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x + 1)
        ctx.mask = torch.ones(3)
        return x.clone()

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        one, other = ctx.saved_tensors
        return gradient * one * other * ctx.mask * from_closure

    bundle = open_bundle(bundle_of(make_function(forward, backward).apply(leaf(3)), tmp_path / "it"))
    names = ["incoming.0", "saved.tensors[0]", "saved.tensors[1]", "context.mask", "other.0"]
    assert [each.name for each in bundle.inputs] == names


def test_no_bundle_is_written_over_another(tmp_path: Path) -> None:
    result = leaf(3).exp()
    names = [bundle_of(result, tmp_path / "deep" / "it").name for _ in range(3)]
    assert names == ["it", "it-2", "it-3"]
    assert sorted(each.name for each in (tmp_path / "deep").iterdir()) == names


def test_where_nothing_can_be_written_the_error_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotBundleError, match="No bundle can be written to"):
        bundle_of(leaf(3).exp(), tmp_path / "file" / "it")


def test_other_gradients(tmp_path: Path) -> None:
    x = leaf(3)
    path = bundle_of(x.exp(), tmp_path / "it")
    replayed = replay(path, incoming=[torch.full((3,), 2.0)])
    assert replayed.equal is None
    assert not replayed
    assert replayed.outputs[0] is not None
    assert same(replayed.outputs[0], 2 * x.detach().exp())
    for wrong in ([], [None], [torch.ones(4)], [torch.ones(3, dtype=torch.float64)]):
        with pytest.raises(ReplayError):
            replay(path, incoming=wrong)


def test_other_gradients_are_not_written_to(tmp_path: Path) -> None:
    gradient = torch.ones(3)
    path = bundle_of(passing(lambda incoming: incoming.mul_(2))(leaf(3)), tmp_path / "it", [gradient])
    assert (gradient.tolist(), gradient._version) == ([1, 1, 1], 0)
    replay(path, incoming=[gradient])
    assert gradient.tolist() == [1, 1, 1]


def test_a_leafs_node_adds_nothing(tmp_path: Path) -> None:
    x = leaf(3)
    node = x.exp().grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    gradient = torch.randn(3)
    replayed = replay(write_bundle(node, [gradient], tmp_path / "it", about={"parameter": "x"}))
    assert replayed
    assert same(replayed.outputs[0], gradient)
    assert x.grad is None
    assert replayed.bundle.node.place == "x"


# what must not change


def test_writing_changes_nothing(tmp_path: Path) -> None:
    """Gradients, draws and version counters of training are those of training without bundles."""

    def train(visit: Callable[[Any, Gradients], None]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 2))
        buffer, seen = torch.ones(5, 2), list[Tensor]()
        for _ in range(2):
            result = WritesToItsBuffer.apply(net(torch.randn(5, 4)), buffer)
            nodes = nodes_below(result)
            versions = [each._version for each in (*net.parameters(), *net.buffers(), buffer)]
            handles = [node.register_prehook(lambda incoming, node=node: visit(node, incoming)) for node in nodes]
            (result * result).sum().backward()
            for handle in handles:
                handle.remove()
            seen += [torch.tensor(versions), torch.rand(3)]
        gradients = [each.grad for each in net.parameters() if each.grad is not None]
        return [*seen, buffer, *net.state_dict().values(), *gradients]

    written = list[Path]()

    def bundle(node: Any, incoming: Gradients) -> None:
        written.append(write_bundle(node, incoming, tmp_path / "it"))

    plain, bundled = train(lambda node, incoming: None), train(bundle)
    assert len(written) > 10
    assert all(map(same, plain, bundled))


def test_a_bundle_written_during_the_pass_leaves_checkpoints_alone(tmp_path: Path) -> None:
    def train(visit: Callable[[Any], None]) -> Tensor:
        torch.manual_seed(0)
        x = leaf(3)
        result = checkpoint(lambda x: F.dropout(x.exp().sin(), 0.4), x, use_reentrant=False)
        handles = [node.register_prehook(lambda _, node=node: visit(node)) for node in nodes_below(result)]
        (add,) = [edge for node in nodes_below(result) for edge, _ in edges_of(node) if edge and is_leaf(edge)]
        handles.append(add.register_prehook(lambda _: [visit(node) for node in nodes_below(result)] and None))
        result.sum().backward(retain_graph=True)
        for handle in handles:
            handle.remove()
        assert x.grad is not None
        return torch.cat([x.grad, torch.rand(1)])

    def bundle(node: Any) -> None:
        written.append(write_bundle(node, [torch.ones(3)], tmp_path / "it"))

    written = list[Path]()
    assert same(train(lambda node: None), train(bundle))
    assert len(written) == 6
    assert all(map(replay, written))


def test_versions_are_as_before_when_a_node_writes(tmp_path: Path) -> None:
    buffer = torch.ones(3, dtype=torch.float64)
    result = WritesToItsBuffer.apply(leaf(3, dtype=torch.float64), buffer)
    view = buffer[1:]
    bundle_of(result, tmp_path / "it")
    assert buffer.tolist() == [1, 1, 1]
    assert view._version == 0


def test_replaying_changes_nothing(tmp_path: Path) -> None:
    path = bundle_of(F.dropout(leaf(5)), tmp_path / "it")
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu"):
            assert replay(path)
            assert torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


# nodes that raise


def raise_value_error(gradient: Tensor) -> Tensor:
    raise ValueError(f"no {gradient.sum().item()}")


def tidy_up(gradient: Tensor) -> Tensor:
    try:
        return gradient.mm(torch.ones(7, 2))
    except RuntimeError:
        gradient.neg()
        raise


@pytest.mark.parametrize("name", ["raises in Python", "raises in torch"])
def test_an_operation_that_raises_raises_again(name: str, written: Written, elsewhere: Elsewhere) -> None:
    [(path, _)] = written[name]
    replayed = replay(path)
    assert replayed
    assert elsewhere[path.name][0]
    assert type(replayed.error) is RuntimeError
    assert replayed.bundle.node.failure is not None
    assert str(replayed.error) == replayed.bundle.node.failure.error.text


def test_with_other_gradients_it_goes_as_far_as_it_was_recorded(tmp_path: Path) -> None:
    path = bundle_of(leaf(3, 4).softmax(1), tmp_path / "it", [torch.ones(2, 4)])
    replayed = replay(path, incoming=[torch.ones(3, 4)])
    assert replayed.error is None
    assert "what would have come after" in replayed.differences[0]


def test_what_python_code_raised_is_told_and_not_raised(tmp_path: Path) -> None:
    replayed = replay(bundle_of(passing(raise_value_error)(leaf(3)), tmp_path / "it", [torch.ones(3)]))
    assert (replayed.equal, replayed.error) == (None, None)
    assert not replayed
    [told] = replayed.differences
    assert told.startswith("raised by Python code, not by an operation: ValueError: no 3.0\nTraceback")
    assert "in raise_value_error" in told


def test_an_error_that_comes_late_is_pythons(tmp_path: Path) -> None:
    replayed = replay(bundle_of(passing(tidy_up)(leaf(2, 3)), tmp_path / "it"))
    assert replayed.equal is None
    assert replayed.differences[0].startswith("raised by Python code, not by an operation: RuntimeError: ")
    assert "mat1 and mat2" in replayed.differences[0]


def test_what_autograd_raised_is_told_and_not_raised(tmp_path: Path) -> None:
    x = leaf(3)
    y = x.exp()
    y.add_(1)
    y_exp = edges_of(y.grad_fn)[0][0]
    replayed = replay(write_bundle(y_exp, [torch.ones(3)], tmp_path / "it"))
    assert "raised by autograd itself" in replayed.differences[0]
    assert "modified by an inplace operation" in replayed.differences[0]


# what cannot be bundled


WEIGHT = torch.ones(3, requires_grad=True)


def add_to_leaves(gradient: Tensor) -> Tensor:
    with torch.enable_grad():
        (WEIGHT * 2).backward(gradient)
    return gradient


def call_numpy(gradient: Tensor) -> Tensor:
    result = torch.zeros(3)
    result.numpy()[:] = gradient.numpy() * 2
    return result


def keep_other(ctx: Any, x: Tensor) -> Tensor:
    ctx.other = Strange(torch.ones(3))
    return x.clone()


class Strange(Tensor):
    """A tensor that says of itself what is done with it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


REFUSED = {
    "checkpoint": (lambda x: checkpoint(torch.exp, x, use_reentrant=True), "use_reentrant=False"),
    "adds to leaves": (passing(add_to_leaves), "adds to the .grad of leaves"),
    "generator": (passing(lambda gradient: gradient * torch.rand(3, generator=torch.Generator())), "Generator"),
    "numpy": (passing(call_numpy), "do not give what it gives"),
    "subclass": (
        make_function(keep_other, lambda ctx, gradient: gradient * ctx.other).apply,
        "Strange, a kind of tensor with rules of its own",
    ),
    "makes a subclass": (
        passing(lambda gradient: gradient * Strange(torch.ones(3))),
        "only while its operations are recorded",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_bundled_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    result = make(leaf(3))
    with pytest.raises(CannotBundleError) as caught:
        bundle_of(result, tmp_path / "it", [torch.ones(3)])
    assert reason in str(caught.value)
    assert caught.value.repair
    assert not list(tmp_path.iterdir())
    assert WEIGHT.grad is None


def test_nested_tensors_are_refused(tmp_path: Path) -> None:
    result = torch.nested.as_nested_tensor([leaf(2, 3), leaf(4, 3)], layout=torch.jagged).sin()
    with pytest.raises(CannotBundleError, match="NestedTensor, a kind of tensor with rules of its own"):
        bundle_of(result, tmp_path / "it", [result.detach()])


def test_a_node_that_talks_to_other_processes_is_refused_before_it_does(tmp_path: Path) -> None:
    def reduce(gradient: Tensor) -> Tensor:
        torch.distributed.all_reduce(gradient)
        return gradient

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(CannotBundleError, match="talks to other processes"):
            bundle_of(passing(reduce)(leaf(3)), tmp_path / "it")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_compiled_region_is_refused(tmp_path: Path) -> None:
    compiled = torch.compile(lambda x: x.sin().exp(), backend="aot_eager")
    with pytest.raises(CannotBundleError, match="a whole compiled region"):
        bundle_of(compiled(leaf(3)), tmp_path / "it")
    torch.compiler.reset()


def test_a_freed_node_is_refused(tmp_path: Path) -> None:
    for make in (lambda: leaf(3).exp(), lambda: KINDS["Function"]()):
        result = make()
        result.sum().backward()
        with pytest.raises(FreedGraphError):
            bundle_of(result, tmp_path / "it")


def test_too_few_gradients_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="takes 1 gradients, but 0 were given"):
        bundle_of(leaf(3).exp(), tmp_path / "it", [])


def test_a_checkpoint_that_is_not_reentrant_brings_its_forward_along(tmp_path: Path) -> None:
    result: Tensor = checkpoint(lambda x: x.exp().sin(), leaf(3), use_reentrant=False)
    replayed = replay(bundle_of(result, tmp_path / "it"))
    assert replayed
    names = [operation.name for operation in replayed.bundle.operations]
    assert names.index("aten::exp") < names.index("aten::cos")


# bundles that cannot be read


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("sound") / "it"
    write_bundle(F.dropout(leaf(3, 4)).grad_fn, [torch.randn(3, 4)], path)
    return {each.name: each.read_bytes() for each in path.iterdir()}


def seal(files: dict[str, bytes], facts: dict[str, Any]) -> dict[str, bytes]:
    """The files with other facts, and the sum and signature that belong to these."""
    files = {"tensors.safetensors": files["tensors.safetensors"], "bundle.json": json.dumps(facts).encode()}
    total = sum_files(files)
    return files | {SEAL: json.dumps({"sum": total, "signature": sign(total)}).encode()}


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_cut_off_file_is_damage(
    data: st.DataObject, sound: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = data.draw(st.sampled_from(sorted(sound)))
    length = data.draw(st.integers(0, len(sound[name]) - 1))
    folder = put(tmp_path_factory.mktemp("cut"), {**sound, name: sound[name][:length]})
    with pytest.raises(DamagedBundleError):
        open_bundle(folder)


def test_a_sparse_tensor_without_its_parts_is_damage(tmp_path: Path) -> None:
    path = bundle_of(F.embedding(torch.tensor([1, 2]), leaf(4, 3), sparse=True), tmp_path / "it")
    facts = json.loads((path / "bundle.json").read_text())
    [tensor] = [each for each in facts["outgoing"] if each]
    del tensor["parts"][0]
    put(path, seal({"tensors.safetensors": (path / "tensors.safetensors").read_bytes()}, facts))
    with pytest.raises(DamagedBundleError, match="not made of 1 others"):
        open_bundle(path)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths_in(part, (*path, key))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_other_fact_is_damage_or_is_read(
    data: st.DataObject, sound: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever stands in one place of the JSON, no other error than those of bundles comes out."""
    facts = json.loads(sound["bundle.json"])
    *outer, last = data.draw(st.sampled_from(list(paths_in(facts))[1:]))
    place = facts
    for key in outer:
        place = place[key]
    place[last] = data.draw(st.sampled_from([None, -1, 0, 1, 3, 10**9, 0.5, "x", [], {}, [9, 9], True]))
    folder = put(tmp_path_factory.mktemp("other"), seal(sound, facts))
    with contextlib.suppress(DamagedBundleError):
        str(open_bundle(folder))


def test_a_missing_file_is_damage(sound: dict[str, bytes], tmp_path: Path) -> None:
    for name, data in sound.items():
        with pytest.raises(DamagedBundleError, match="cannot be read"):
            open_bundle(put(tmp_path / name, {name: data}))
    with pytest.raises(DamagedBundleError, match="There is no bundle at"):
        replay(tmp_path / "nowhere")


def test_another_version_of_torch_is_refused_unless_asked_for(sound: dict[str, bytes], tmp_path: Path) -> None:
    facts = json.loads(sound["bundle.json"])
    facts["versions"]["torch"] = "1.4"
    folder = put(tmp_path, seal(sound, facts))
    with pytest.raises(BundleVersionError, match=r"was written with torch 1\.4"):
        replay(folder)
    assert replay(folder, strict=False)


def test_another_result_is_told(sound: dict[str, bytes], tmp_path: Path) -> None:
    facts = json.loads(sound["bundle.json"])
    [multiply] = [each for each in facts["operations"] if each["name"].startswith("aten::mul")]
    multiply["name"] = "aten::add.Tensor"
    replayed = replay(put(tmp_path, seal(sound, facts)))
    assert replayed.equal is False
    assert not replayed
    assert "12 of 12 elements differ, by at most" in str(replayed)
    assert "Not the same." in str(replayed)


def test_a_node_that_takes_another_formula_when_it_is_recorded_is_told_of(tmp_path: Path) -> None:
    """The product is one of three among torch's operators."""
    replayed = replay(bundle_of(leaf(5, 5, 5, dtype=torch.float64).prod(), tmp_path / "it"))
    assert replayed.equal is False
    assert replayed.bundle.node.deviation == replayed.differences[0]
    assert "another formula" in replayed.differences[1]


def test_an_operation_that_is_not_registered_is_named(written: Written, elsewhere: Elsewhere) -> None:
    [(path, _)] = written["not registered"]
    assert replay(path)
    came, said = elsewhere[path.name]
    assert not came
    assert "does not know the operation retrograd_tests::twice" in said
    assert "import the module that registers the operations of 'retrograd_tests'" in said


def test_the_kinds_are_many() -> None:
    names = {type(node).__name__ for name in KINDS for node in nodes_below(KINDS[name]())}
    assert len(names) > 60
    assert any(is_python(node) for node in nodes_below(KINDS["Function"]()))
