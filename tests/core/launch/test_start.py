from __future__ import annotations

import sys
from pathlib import Path

import pytest

from retrograd.core.errors import LaunchError
from retrograd.core.launch.parser import split_command
from retrograd.core.launch.requests import RunRequest
from retrograd.core.launch.start import name_folder, resolve_command
from retrograd.core.runs.dated import make_dated


@pytest.mark.parametrize(
    "line",
    [
        "| train.py --lr 0.1",
        "-o out | train.py -o theirs",
        "-o out -- | prog --every 3",
        "--every 2 | -m package.train --every 3",
        "--every=2 | train.py",
        "--sites a | train.py b",
        "--sites a b:output 'c d' | train.py",
        "--sites a b | torchrun --nproc-per-node 2 train.py",
        "--sites a b | /usr/bin/python3.12 train.py",
        "--sites a --tensors b | accelerate launch train.py",
        "--sites a b -- | ./train --sites c",
        "--sites train.py | train.py",
        "--no-histogram --resume | bash train.sh -- x",
        "--sites a |",
        "--unknown | train.py",
        "|",
    ],
)
def test_the_command_begins_where_our_options_end(line: str) -> None:
    ours, command = (part.split() for part in line.split("|"))
    assert split_command([*ours, *command], RunRequest) == ([word for word in ours if word != "--"], command)


def test_a_script_is_run_by_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("without_ending").touch()
    Path("folder").mkdir()
    Path("folder/__main__.py").touch()
    assert resolve_command(["train.py", "-x"]) == [sys.executable, "train.py", "-x"]
    assert resolve_command(["without_ending"]) == [sys.executable, "without_ending"]
    assert resolve_command(["folder"]) == [sys.executable, "folder"]


def test_a_module_is_run_by_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    assert resolve_command(["-m", "package.train", "1"]) == [sys.executable, "-m", "package.train", "1"]
    assert resolve_command(["-m", "timeit"]) == [sys.executable, "-m", "timeit"]


def test_a_program_is_run_as_it_is() -> None:
    program, *arguments = resolve_command(["sh", "-c", "true"])
    assert Path(program).is_absolute()
    assert Path(program).name == "sh"
    assert arguments == ["-c", "true"]


@pytest.mark.parametrize("command", [[], ["-m"], ["-m", "no_such_module"], ["no_such.py"], ["no-such-program"]])
def test_what_cannot_be_run(command: list[str]) -> None:
    with pytest.raises(LaunchError) as raised:
        resolve_command(command)
    assert raised.value.repair


def test_a_misspelt_script_is_told_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(LaunchError) as raised:
        resolve_command([str(tmp_path / "trian.py")])
    assert raised.value.repair == f"the nearest is {str(tmp_path / 'train.py')!r}."


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["some/train.py", "x"], "train"),
        (["-m", "package.train"], "package.train"),
        (["torchrun", "--nproc-per-node", "2", "train.py"], "train"),
        (["/usr/bin/prog"], "prog"),
    ],
)
def test_a_folder_is_named_for_the_script(
    command: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda pattern: "20250131-120000")
    first = make_dated(name_folder(command))
    assert first == f"runs/{name}-20250131-120000"
    assert Path(first).is_dir()  # else another one who begins in this second has it too
    assert make_dated(name_folder(command)) == f"{first}-2"
    assert make_dated("runs/own") == "runs/own"
    assert not Path("runs/own").exists()


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("train()", "train.py --overhead 5%", "--overhead"),
        ("train()", "torchrun train.py --every=2", "--every"),
        ("parser.add_argument('--every')", "train.py --every 2", ""),
        ("def main(every): ...", "train.py --every 2", ""),
        ("train()", "train.py --lr 0.1 every --every2 3 -o out", ""),
        ("train()", "-m train --every 2", ""),
        ("train()", "missing.py --every 2", ""),
    ],
)
def test_an_option_of_ours_behind_a_script_that_knows_none_is_named(
    text: str, words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(text)
    command = tuple(words.split())
    said = RunRequest(command=command).find_misplaced()
    assert said.startswith(f"{told}, behind train.py, is passed to it") if told else not said
    assert not RunRequest(command=command, quiet=True).find_misplaced()
