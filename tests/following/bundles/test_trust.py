"""Whose bundle is run: one that this user has written, and any other only if somebody says so."""

from __future__ import annotations

import hmac
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import retrograd as rg
from retrograd.core.cli import main
from retrograd.core.errors import DamagedBundleError, RetrogradWarning, UntrustedBundleError
from retrograd.following.bundles.signing import FOLDER, find_key, sum_files
from tests import warm
from tests.following.bundles.test_bundle import bundle_of
from tests.following.graph.zoo import leaf

REPLAY = "import sys, retrograd as rg; print(bool(rg.replay(sys.argv[1])))"
MARK = "RETROGRAD_TESTS_MARK"


@torch.library.custom_op("retrograd_tests::leave_a_mark", mutates_args=())
def leave_a_mark(x: torch.Tensor) -> torch.Tensor:
    """What an operation of somebody else may do."""
    Path(os.environ[MARK]).write_text("here")
    return x.clone()


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(MARK, str(tmp_path / "mark"))
    return tmp_path / "mark"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the key of a user who has none yet."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "data"))
    return tmp_path / "data" / "retrograd"


@pytest.fixture
def own(home: Path, tmp_path: Path) -> Path:
    return bundle_of(leaf(3).exp(), tmp_path / "own")


def rewrite(bundle: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change what a bundle says as somebody does who knows how it is made, but not the key."""
    facts, seal = json.loads((bundle / "bundle.json").read_text()), json.loads((bundle / "seal.json").read_text())
    change(facts)
    (bundle / "bundle.json").write_text(json.dumps(facts))
    return sum_again(bundle, seal)


def sum_again(bundle: Path, seal: dict[str, Any]) -> Path:
    files = {name: (bundle / name).read_bytes() for name in ("bundle.json", "tensors.safetensors")}
    (bundle / "seal.json").write_text(json.dumps({**seal, "sum": sum_files(files)}))
    return bundle


def replace_operation(facts: dict[str, Any]) -> None:
    facts["operations"] = [
        {"name": "retrograd_tests::leave_a_mark", "args": [{"tensor": "incoming.0"}], "result": {"tensor": 9}}
    ]
    facts["outputs"] = [9]


def test_what_this_user_has_written_is_run_in_any_process(own: Path) -> None:
    assert rg.open_bundle(own).doubt == ""
    assert rg.replay(own)
    done = warm.run([sys.executable, "-c", REPLAY, str(own)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_copy_is_as_good(own: Path, tmp_path: Path) -> None:
    assert rg.replay(shutil.copytree(own, tmp_path / "copy"))


def test_what_another_user_has_written_is_opened_and_not_run(
    own: Path, mark: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its operation leaves a mark when it is run: by no way to open it, and only if it is trusted."""
    rewrite(own, replace_operation)
    assert "retrograd_tests::leave_a_mark" in str(rg.open_bundle(own))
    assert main(["replay", "--show", str(own)]) == 0
    assert "retrograd_tests::leave_a_mark" in capsys.readouterr().out
    with pytest.raises(UntrustedBundleError, match="or was changed since") as caught:
        rg.replay(own)
    with pytest.raises(UntrustedBundleError):
        rg.replay(rg.open_bundle(own))
    for part in ("trust=True", "--trust", "registered with torch", "read and write files", "--show"):
        assert part in str(caught.value)
    assert main(["replay", str(own)]) == 2
    assert "--trust" in capsys.readouterr().err
    assert not mark.exists()
    assert rg.replay(own, trust=True).equal is False
    assert mark.exists()
    mark.unlink()
    assert main(["replay", "--trust", str(own)]) == 1
    assert mark.exists()


def test_on_another_machine_it_needs_trust(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "elsewhere"))
    with pytest.raises(UntrustedBundleError, match="there is no key at"):
        rg.replay(own)
    assert not (tmp_path / "elsewhere").exists()  # only who writes a bundle makes a key
    assert rg.replay(own, trust=True)
    bundle_of(leaf(3).exp(), tmp_path / "its own")
    with pytest.raises(UntrustedBundleError, match="by another user or on another machine"):
        rg.replay(own)


def test_the_signature_is_an_hmac_over_every_byte(own: Path) -> None:
    """By the words of the standard library alone, as another program would write it."""
    message = b"retrograd bundle"
    for name in ("bundle.json", "tensors.safetensors"):
        for part in (name.encode(), (own / name).read_bytes()):
            message += len(part).to_bytes(8, "little") + part
    total, key = sha256(message).hexdigest(), find_key().read_bytes()
    seal = json.loads((own / "seal.json").read_text())
    assert seal == {"sum": total, "signature": hmac.digest(key, total.encode(), "sha256").hex()}


@pytest.mark.parametrize("name", ["bundle.json", "tensors.safetensors"])
def test_no_byte_can_be_changed(name: str, own: Path) -> None:
    whole, seal = (own / name).read_bytes(), json.loads((own / "seal.json").read_text())
    step = max(1, len(whole) // 100)
    for place in range(0, len(whole), step):
        changed = bytearray(whole)
        changed[place] ^= 1
        (own / name).write_bytes(changed)
        (own / "seal.json").write_text(json.dumps(seal))
        with pytest.raises(DamagedBundleError):  # whose sum is of other bytes
            rg.open_bundle(own)
        sum_again(own, seal)
        try:
            assert rg.open_bundle(own).doubt, place
        except DamagedBundleError:  # it is not a bundle any more
            continue
    (own / name).write_bytes(whole)
    assert rg.replay(sum_again(own, seal))


def test_files_cannot_be_added_or_swapped(own: Path, tmp_path: Path) -> None:
    (own / "more.json").write_text("{}")
    with pytest.raises(UntrustedBundleError, match=r"'more\.json' was put into it"):
        rg.replay(own)
    (own / "more.json").unlink()
    other = bundle_of(leaf(3).exp(), tmp_path / "other")
    shutil.copy(other / "tensors.safetensors", own)
    with pytest.raises(DamagedBundleError, match="not the files that were written"):
        rg.replay(own)
    for seal in (own, other):
        sum_again(own, json.loads((seal / "seal.json").read_text()))
        with pytest.raises(UntrustedBundleError):
            rg.replay(own)


@pytest.mark.parametrize("signature", [None, "", "ü", 3, [], {}])
def test_no_signature_is_none(signature: Any, own: Path) -> None:
    sum_again(own, {"signature": signature})
    with pytest.raises(UntrustedBundleError):
        rg.replay(own)


# the key


def test_the_key_is_made_once_and_only_its_user_can_read_it(own: Path, home: Path, tmp_path: Path) -> None:
    key = home / "bundles.key"
    assert [each.name for each in home.iterdir()] == [key.name]
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = key.read_bytes()
    bundle_of(leaf(3).exp(), tmp_path / "again")
    assert key.read_bytes() == before
    assert len(set(before)) > 8


def test_processes_that_write_their_first_bundles_at_once_have_one_key(home: Path, tmp_path: Path) -> None:
    script = """
import sys, torch, retrograd as rg
x = torch.ones(3, requires_grad=True)
rg.write_bundle(x.exp().grad_fn, [torch.ones(3)], sys.argv[1])
"""
    started = [warm.Popen([sys.executable, "-c", script, str(tmp_path / str(rank))]) for rank in range(4)]
    assert [each.wait(timeout=120) for each in started] == [0] * 4
    assert all(rg.replay(tmp_path / str(rank)) for rank in range(4))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602])
def test_a_key_that_others_can_read_is_not_used(mode: int, own: Path, home: Path, tmp_path: Path) -> None:
    (home / "bundles.key").chmod(mode)
    with pytest.raises(
        UntrustedBundleError, match=rf"others can read or change the key .* \(mode {mode:o}\); remove it"
    ):
        rg.replay(own)
    with pytest.warns(RetrogradWarning, match=r"is not signed: others can read or change the key"):
        unsigned = bundle_of(leaf(3).exp(), tmp_path / "unsigned")
    (home / "bundles.key").chmod(0o600)
    assert rg.replay(own)
    with pytest.raises(UntrustedBundleError, match="it is not signed"):
        rg.replay(unsigned)
    assert rg.replay(unsigned, trust=True)


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_key_that_is_none_signs_nothing(content: bytes, own: Path, home: Path) -> None:
    (home / "bundles.key").write_bytes(content)
    with pytest.raises(UntrustedBundleError, match="is not a key of 32 bytes; remove it"):
        rg.replay(own)


def test_where_no_key_can_be_made_a_bundle_is_not_signed(home: Path, tmp_path: Path) -> None:
    home.parent.write_text("a file where the folder should be")
    with pytest.warns(RetrogradWarning, match=r"is not signed: .*--trust"):
        path = bundle_of(leaf(3).exp(), tmp_path / "it")
    with pytest.raises(UntrustedBundleError, match="it is not signed"):
        rg.replay(path)
    assert rg.replay(path, trust=True)


def test_where_the_key_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FOLDER)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert find_key() == tmp_path / ".local/share/retrograd/bundles.key"
    monkeypatch.setattr("sys.platform", "darwin")
    assert find_key() == tmp_path / "Library/Application Support/retrograd/bundles.key"
    monkeypatch.setenv(FOLDER, str(tmp_path / "data"))
    assert find_key() == tmp_path / "data/retrograd/bundles.key"


# what is checked of all bundles


@pytest.fixture
def forged(own: Path) -> Callable[..., Path]:
    """Makes a bundle that says something else, signed by this user so that only what is checked besides stops it."""

    def forge(*path: Any, value: Any) -> Path:
        facts = json.loads((own / "bundle.json").read_text())
        place = facts
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return rewrite(own, lambda old: old.update(facts))

    return forge


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("inputs", 0, "shape"), [10**6, 10**6]),
        (("inputs", 0, "strides"), [1 << 70]),
        (("inputs", 0, "shape"), [-3]),
        (("inputs", 0, "dtype"), "load"),
        (("inputs", 0, "dtype"), "_inductor"),
        (("inputs", 0, "block"), "elsewhere"),
        (("outgoing", 0, "offset"), 1 << 40),
        (("blocks", "incoming.0"), {"start": 10**13}),
        (("blocks", "incoming.0"), {"skew": 10**13}),
        (("switches", "threads"), "many"),
        (("random",), [["x"]]),
        (("node", "module"), [["x"]]),
        (("node", "line"), 7),
        (("operations", 0, "args"), {}),
        (("format",), 10**9),
    ],
)
def test_what_does_not_fit_is_damage(path: tuple[Any, ...], value: Any, forged: Callable[..., Path]) -> None:
    with pytest.raises(DamagedBundleError):
        rg.open_bundle(forged(*path, value=value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("operations", 0, "args"), [{"tensor": "nowhere"}]),
        (("operations", 0, "args"), [{"what": 1}]),
        (("outputs",), [77]),
        (("random",), []),
        (("switches", "threads"), -1),
        (("switches", "default_dtype"), "int64"),
    ],
)
def test_what_cannot_be_run_is_damage(path: tuple[Any, ...], value: Any, forged: Callable[..., Path]) -> None:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with pytest.raises(DamagedBundleError, match="cannot be run"):
        rg.replay(forged(*path, value=value), trust=True)
    assert (torch.get_default_dtype(), torch.get_num_threads()) == (dtype, threads)


@pytest.mark.parametrize(
    "text", [b"[" * 200_000, b'{"format": 3, "format": 3}', b'{"format": 1' + b"0" * 10_000 + b"}", b"\xff\xfe", b"[1]"]
)
@pytest.mark.parametrize("name", ["bundle.json", "seal.json"])
def test_json_that_is_wrong_is_damage(name: str, text: bytes, own: Path) -> None:
    (own / name).write_bytes(text)
    with pytest.raises(DamagedBundleError):
        rg.open_bundle(own)


def test_a_state_of_a_generator_that_is_none_is_damage(own: Path) -> None:
    tensors = safetensors.torch.load((own / "tensors.safetensors").read_bytes())
    tensors["random.0.cpu"] = torch.zeros(3, dtype=torch.uint8)
    (own / "tensors.safetensors").write_bytes(safetensors.torch.save(tensors))
    with pytest.raises(DamagedBundleError, match="cannot be run"):
        rg.replay(sum_again(own, {}), trust=True)


def test_no_control_characters_reach_the_terminal(
    forged: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = forged("node", "module", value="\x1b]0;evil\x07\x1b[2J\u202egnp")
    for command in (["replay", "--show", str(path)], ["replay", "--trust", str(path)]):
        assert main(command) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\u202e" not in out
        assert "\\x1b]0;evil" in out
    assert "evil" in str(rg.replay(path, trust=True))
