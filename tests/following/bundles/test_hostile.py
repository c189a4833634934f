"""Bundles that somebody wrote in order to do harm: none does more than to raise an error of ours."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.core.cli import main
from retrograd.core.errors import UnsafeBundleError
from retrograd.following.bundles.bundle import read_bundle
from retrograd.following.bundles.files import digest
from retrograd.following.bundles.guard import read_allowed
from retrograd.following.bundles.replay import describe_replay, replay
from retrograd.following.bundles.writer import write_bundle
from tests.apart import Came, call_apart
from tests.following.bundles.bundled import KINDS
from tests.following.bundles.test_bundle import follow_engine
from tests.following.graph.zoo import leaf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory, and forks")

HARMLESS = {"ok", "unsafe-bundle", "damaged-bundle", "cannot-rerun", "other-torch"}

Facts = dict[str, Any]
Call = tuple[Any, ...]
"""Name of an operation, its arguments, and those by name if there are any."""

WILD = 1 << 40
T = {"tensor": 0}
"""The tensor that is stored: float32 with the elements 0 … 15, of shape [4, 4]."""

I = {"tensor": 1}  # noqa: E741  # integers
"""Another: int64 of shape [4], the first of which is wild."""

F_ = {"tensor": 2}
"""Result of the operation before."""


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle to change: its program is one operation, on two tensors."""
    result = F.embedding(torch.tensor([1, 2, 2, 0]), leaf(4, 4))
    return write_bundle(result.grad_fn, [torch.arange(16.0).reshape(4, 4)], tmp_path_factory.mktemp("harmless") / "it")


def rewrite(bundle: Path, folder: Path, change: Callable[[Facts, dict[str, Tensor]], None]) -> Path:
    """A bundle that somebody has changed, who knows how it is made."""
    facts = json.loads((bundle / "bundle.json").read_text())
    tensors = safetensors.torch.load((bundle / "tensors.safetensors").read_bytes())
    change(facts, tensors)
    return seal(folder, facts, safetensors.torch.save(tensors))


def seal(folder: Path, facts: Facts, data: bytes) -> Path:
    folder.mkdir(parents=True)
    facts = {key: value for key, value in facts.items() if key != "digest"}
    (folder / "tensors.safetensors").write_bytes(data)
    (folder / "bundle.json").write_text(json.dumps({**facts, "digest": digest(facts, data)}))
    return folder


def _write_call(name: str, args: list[Any], kwargs: Facts | None = None, *, result: int) -> Facts:
    name = name if "::" in name else f"aten::{name}"
    return {"name": name, "args": args, "kwargs": kwargs or {}, "result": {"tensor": result}}


def run(*calls: Call) -> Callable[[Facts, dict[str, Tensor]], None]:
    """Put another program into a bundle; the result of one call is the next tensor."""

    def change(facts: Facts, tensors: dict[str, Tensor]) -> None:
        [indices] = [name for name, tensor in tensors.items() if tensor.dtype is torch.int64 and tensor.numel() == 4]
        tensors[indices][0] = WILD
        operations = [_write_call(*call, result=2 + at) for at, call in enumerate(calls)]
        facts["program"] = {"operations": operations, "outputs": [1 + len(calls)]}

    return change


SHAPE = {"tuple": [4, 4]}
PROGRAMS: dict[str, tuple[Call, ...]] = {
    "fills a file": (("from_file", ["VICTIM", True, 4]), ("fill_.Scalar", [F_, 7])),
    "reads a file": (("from_file", ["/etc/passwd", False, 4]),),
    "resizes": (("resize_", [T, [10**6]]),),
    "takes another memory": (("set_.source_Storage_storage_offset", [T, T, 100, [4], [1]]),),
    "pins memory": (("pin_memory", [T]),),
    "makes a sparse tensor": (("_sparse_coo_tensor_unsafe", [I, T, [4, 4]]), ("_to_dense", [F_])),
    "gives an embedding's gradient": (("embedding_dense_backward", [T, I, 4, -1, True]),),
    "counts an embedding's gradient": (("embedding_dense_backward", [T, I, WILD, -1, True]),),
    "loses": (("nll_loss_backward", [T, T, I, None, 0, -100, T]),),
    "picks": (("gather", [T, 0, I]),),
    "norms with another size": (("native_layer_norm_backward", [T, T, [4], I, T, None, None, [True] * 3]),),
    "norms with nothing": (
        ("native_batch_norm_backward", [T, T, None, None, None, None, None, True, 1e-5, [True] * 3]),
    ),
    "pools with wild indices": (
        ("as_strided", [T, [1, 2, 2], [4, 2, 1], 0]),
        ("view", [I, [1, 2, 2]]),
        ("unsqueeze", [T, 0]),
        ("adaptive_max_pool2d_backward", [F_, {"tensor": 4}, {"tensor": 3}]),
    ),
    "writes into the indices of a sparse tensor": (
        ("_to_sparse", [T]),
        ("_indices", [F_]),
        ("fill_.Scalar", [{"tensor": 3}, WILD]),
        ("_to_dense", [F_]),
    ),
    "makes too much": (("zeros", [[10**6, 10**6]]),),
    "makes too much of little": (("expand", [T, [10**5, 10**5, 4, 4]]), ("clone", [F_])),
    "makes too much of strides": (("new_empty_strided", [T, [2], [10**12]]),),
    "multiplies too much": (("expand", [T, [10**4, 10**4, 4, 4]]), ("bmm", [F_, F_])),
    "counts too far": (("arange.start", [0, 10**12]),),
    "repeats too often": (("repeat", [T, [10**6, 10**6]]),),
    "draws too much": (("randn", [[10**11]]),),
    "pads too much": (("constant_pad_nd", [T, [10**6, 10**6, 10**6, 10**6]]),),
    "squares too much": (("diag_embed", [T, 10**6]),),
    "repeats a list": (("mul.left_t", [[1], 10**11]),),
    "joins texts": (("add.str", ["x", "y"]),),
    "divides the least by -1": (
        ("full", [[1], -(1 << 63)]),
        ("div.Scalar_mode", [F_, -1], {"rounding_mode": "trunc"}),
    ),
    "calls something else": (("retrograd_tests::anything", [T]),),
    "asks for Python": (("prim::PythonOp", [T]),),
}


def replay_all(home: Path) -> dict[str, Came]:
    """What comes of each bundle in a folder."""
    return call_apart({folder.name: partial(_describe, folder) for folder in sorted(home.iterdir())})


def _describe(folder: Path) -> str:
    return str(replay(folder))


def _name_victim(calls: tuple[Call, ...], victim: Path) -> Any:
    return json.loads(json.dumps(calls).replace("VICTIM", str(victim)))


@pytest.fixture(scope="module")
def came(harmless: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Came]:
    folder = tmp_path_factory.mktemp("hostile")
    victim = tmp_path_factory.mktemp("home") / "victim"
    victim.write_bytes(bytes(16))
    for name, calls in PROGRAMS.items():
        rewrite(harmless, folder / name, run(*_name_victim(calls, victim)))
    found = replay_all(folder)
    assert victim.read_bytes() == bytes(16)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_may_do_harm_is_refused(name: str, came: dict[str, Came]) -> None:
    """What is refused says which operation, and nothing else comes of it: no crash, no other error."""
    slug, text = came[name]
    names = [call[0] if "::" in call[0] else f"aten::{call[0]}" for call in PROGRAMS[name]]
    if name == "picks":  # torch looks at these indices itself
        assert slug == "ok"
    elif name == "calls something else":  # there is no such thing here
        assert slug == "cannot-rerun"
    else:
        assert slug == "unsafe-bundle", (slug, text)
        assert any(each in text for each in names)


def deepen(facts: Facts, tensors: dict[str, Tensor]) -> None:
    value: Any = []
    for _ in range(900):
        value = [value]
    facts["program"]["operations"][0]["args"] = value


def set_fact(*path: Any, value: Any) -> Callable[[Facts, dict[str, Tensor]], None]:
    def change(facts: Facts, tensors: dict[str, Tensor]) -> None:
        place: Any = facts
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def spoil_random(facts: Facts, tensors: dict[str, Tensor]) -> None:
    tensors["random.0.cpu"] = torch.full((5056,), 255, dtype=torch.uint8)


FIRST = ("inputs", "tensors", 0, "tensor")
CHANGES: dict[str, Callable[[Facts, dict[str, Tensor]], None]] = {
    "is deep": deepen,
    "asks for a million threads": set_fact("switches", "threads", value=10**6),
    "has another random state": spoil_random,
    "begins far behind": set_fact("inputs", "blocks", 0, "skew", value=10**13),
    "begins far before": set_fact("inputs", "blocks", 0, "start", value=10**13),
    "is huge and has no memory": set_fact(*FIRST, value={"shape": [10**6, 10**6], "dtype": "float32"}),
    "shows the same again": set_fact(
        *FIRST, value={"shape": [10**6, 10**6], "dtype": "float32", "block": 0, "strides": [0, 0]}
    ),
    "has a size that is not a number of torch": set_fact(*FIRST, "shape", value=[1 << 70, 4]),
    "has a negative size": set_fact(*FIRST, "shape", value=[-4, -4]),
    "is on a device that is not here": set_fact("inputs", "blocks", 0, "device", value="xla:0"),
    "is quantized": set_fact(*FIRST, "dtype", value="quint8"),
    "is of a dtype that is a function": set_fact(*FIRST, "dtype", value="load"),
    "comes out huge": set_fact(
        "outgoing",
        "tensors",
        0,
        "tensor",
        value={"shape": [10**6, 10**6], "dtype": "float32", "block": 0, "strides": [0, 0]},
    ),
    "has texts for numbers": set_fact("node", "incoming", 0, "nonfinite", value="many"),
    "has lists for names": set_fact("node", "module", value=[["x"]]),
    "has a number for a line": set_fact("node", "line", value=7),
    "has another text for a line": set_fact("node", "line", value={"file": "x", "line": "y", "function": 3}),
}


def test_facts_that_may_do_harm_are_refused(harmless: Path, tmp_path: Path) -> None:
    for name, change in CHANGES.items():
        rewrite(harmless, tmp_path / "bundles" / name, change)
    raw = (harmless / "bundle.json").read_bytes()
    for name, text in {
        "is deeper than the stack": b"[" * 200_000,
        "tells a thing twice": raw.replace(b'{\n "format"', b'{"node": 1,\n "format"'),
        "has a number of many digits": b'{"format": 1' + b"0" * 10_000 + b"}",
        "is not a text": b"\xff\xfe" * 100,
        "is a list": b"[1, 2]",
        "is a link": b"",
    }.items():
        folder = tmp_path / "bundles" / name
        folder.mkdir()
        (folder / "bundle.json").write_bytes(text)
        (folder / "tensors.safetensors").write_bytes((harmless / "tensors.safetensors").read_bytes())
    came = replay_all(tmp_path / "bundles")
    assert len(came) == len(CHANGES) + 6
    assert {name: each for name, each in came.items() if each[0] not in HARMLESS} == {}
    read = {name for name, (slug, _) in came.items() if slug == "ok"} - {"has another random state", "is quantized"}
    assert read <= {
        "has texts for numbers",
        "has lists for names",
        "has a number for a line",
        "has another text for a line",
    }


WILD_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2, 3, 5, 64, 10**6, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 64, 0.5, 1e300, "", "x", "float32",
    "aten::mul.Tensor", "aten::as_strided", "meta", "cuda:0", [], {}, [9, 9], [[[]]], {"tensor": 0}, {"tensor": 99},
    {"dtype": "int64"}, {"device": "meta"}, {"float": "nan"}, {"tuple": [1]}, [10**5] * 3,
]  # fmt: skip
KEPT = (
    "addmm",
    "layer norm",
    "log softmax and loss",
    "max pool",
    "embedding",
    "attention",
    "LSTM",
    "batch norm",
    "svd",
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, part in parts for inner in paths_in(part, (*path, key)))]


def mutate(facts: Facts, tensors: dict[str, Tensor], chance: random.Random) -> None:
    """Change one to three things: a value, a call, or what is stored."""
    for _ in range(chance.choice([1, 1, 2, 3])):
        name = chance.choice(sorted(tensors))
        if chance.random() < 0.35:
            tensors[name] = spoil(tensors[name], chance)
            continue
        begin = chance.choice(["program", "program", "inputs", "outgoing", "switches", "node", "random"])
        *outer, last = chance.choice(paths_in(facts[begin], (begin,))[1:] or [(begin,)])
        place: Any = facts
        for key in outer:
            place = place[key]
        place[last] = chance.choice(WILD_VALUES)


def spoil(tensor: Tensor, chance: random.Random) -> Tensor:
    """Other values, fewer of them, or none."""
    if tensor.numel() and chance.random() < 0.7:
        data = bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for _ in range(chance.choice([1, 4, 16])):
            data[chance.randrange(len(data))] = chance.choice([0, 1, 127, 128, 255])
        return torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape).clone()
    return tensor.reshape(-1)[: chance.choice([0, 1, max(tensor.numel() // 2, 0)])].clone()


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.thorough)]
)
def test_a_bundle_that_is_changed_at_random_is_run_or_refused(seed: int, tmp_path: Path) -> None:
    """No crash, no error but ours, no more memory than is allowed; and nothing is written anywhere."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    bundles = []
    for name in KEPT:
        node, incoming, _ = follow_engine(KINDS[name]())[0]
        bundles.append(write_bundle(node, incoming, tmp_path / "sound" / name))
    for number in range(150):
        rewrite(chance.choice(bundles), tmp_path / "changed" / f"{number:04}", lambda *both: mutate(*both, chance))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    came = replay_all(tmp_path / "changed")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert {name: each for name, each in came.items() if each[0] not in HARMLESS} == {}
    assert len({slug for slug, _ in came.values()}) > 2


# what is not refused


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        return torch.histc(incoming[0]).sum() * incoming[0]


def test_who_writes_a_bundle_is_told_that_it_needs_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Doubles.apply(leaf(3))  # which holds the node where torch is older than 2.13
    path = write_bundle(output.grad_fn, [torch.ones(3)], tmp_path / "it")
    assert "aten::histc" in read_bundle(path).refusal
    with pytest.raises(UnsafeBundleError, match="aten::histc"):
        replay(path)
    assert main(["replay", str(path)]) == 2
    assert "--trust" in capsys.readouterr().err
    assert replay(path, trusted=True)
    assert main(["replay", "--trust", str(path)]) == 0


def test_what_is_listed_is_there() -> None:
    """A name that torch does not have would be a slip; another version may lack one that ours has."""
    if torch.__version__.startswith("2.13"):
        assert [name for name in read_allowed() if not hasattr(torch.ops.aten, name.partition(".")[0])] == []


def test_nothing_listed_knows_files_or_memory() -> None:
    """By the words of their schemas: storages, streams, generators that one hands over, or names of files."""
    words = ("Storage", "Stream", "filename", "QScheme")
    schemas = [
        str(getattr(packet, overload)._schema)
        for name in read_allowed()
        if "." not in name and (packet := getattr(torch.ops.aten, name, None)) is not None
        for overload in packet.overloads()
    ]
    assert [schema for schema in schemas if any(word in schema for word in words)] == []
    names = {name.partition(".")[0] for name in read_allowed()}
    assert not names & {"from_file", "set_", "resize_", "resize_as_", "record_stream", "pin_memory", "data", "save"}


def test_no_control_characters_reach_the_terminal(
    harmless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rewrite(harmless, tmp_path / "it", set_fact("node", "module", value="\x1b]0;evil\x07\x1b[2J\u202egnp"))
    assert main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "\\x1b]0;evil" in out
    assert "evil" in describe_replay(replay(path))
