from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import MISSING
from pathlib import Path

import pytest

from retrograd.core.cli import main
from retrograd.core.cli.commands import COMMANDS
from retrograd.core.launch.options import Command
from retrograd.core.launch.parser import parse
from tests.commands import ENVIRONMENT, SCRIPTS

SCRIPT = str(SCRIPTS / "no_torch.py")


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "retrograd", *words]
    return subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["help"],
        ["help", "view"],
        ["run", "--help"],
        ["report", "--help"],
        ["view", "--help"],
        ["export", "--help"],
    ],
)
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: retrograd")
    assert "RUN" in text or "examples:" in text


def test_help_of_one_command_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for words in (["help", "compare"], ["compare", "--help"]):
        with pytest.raises(SystemExit):
            main(words)
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("retrograd 0.")


@pytest.mark.parametrize("words", [["--help"], ["run", "--every", "0", SCRIPT]])
def test_torch_is_not_loaded(words: list[str]) -> None:
    code = (
        f"import sys; from retrograd.core.cli import main\ntry: main({words})\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("False\n"), done.stderr


def test_what_runs_a_program_waits_for_no_other_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')")
    line = [sys.executable, "-X", "importtime", "-m", "retrograd", "run", str(script)]
    done = subprocess.run(line, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    loaded = {each.rpartition("|")[2].strip() for each in done.stderr.splitlines() if each.startswith("import time:")}
    assert done.stdout == "trained\n"
    assert "retrograd.core.launch.requests" in loaded
    assert not loaded & {
        "retrograd.core.cli.commands",
        "subprocess",
        "shutil",
        "random",
        "secrets",
        "socket",
        "difflib",
    }


@pytest.mark.parametrize(
    ("words", "slug"),
    [
        (["run"], "cannot-launch"),
        (["run", "no_such.py"], "cannot-launch"),
        (["run", "--every", "0", SCRIPT], "bad-schedule"),
        (["run", "--every", "-1", SCRIPT], "bad-schedule"),
        (["run", "--sites", "", "--", SCRIPT], "bad-pattern"),
        (["run", "--sites", "re:(", "--", SCRIPT], "bad-pattern"),
        (["run", "--tensors", "", "--", SCRIPT], "bad-pattern"),
        (["view", "no/such/run"], "not-a-run"),
        (["report", "no/such/run"], "not-a-run"),
        (["export", "no/such/run", "--to", "csv"], "not-a-run"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(
    words: list[str], slug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("retrograd: ")
    assert f"[{slug}]" in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--nonsense", SCRIPT],
        ["run", "--every", "often", SCRIPT],
        ["run", "--schedule", "exp", SCRIPT],
        ["run", "--every", "2", "--schedule", "log", SCRIPT],
        ["nonsense"],
        ["--nonsense"],
        ["--sites", "x", "run", SCRIPT],
    ],
)
def test_options_that_do_not_exist(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2
    assert "retrograd run train.py" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["manifest.json", "notes.txt"])
@pytest.mark.parametrize("command", [[SCRIPT], ["-m", "timeit"], ["sh", "-c", "true"]])
def test_a_folder_with_other_things_is_refused(
    content: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / content).write_text("{}")
    assert main(["run", "-o", str(tmp_path), *command]) == 2
    assert "[run-exists]" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")
def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    code = """
import sys
from retrograd.core import cli
from retrograd.core.cli import commands
commands.View.check = lambda self: None
commands.View.carry_out = lambda self: print("x" * 1_000_000)
sys.exit(cli.main(["view", "."]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 128 + signal.SIGPIPE
    assert not errors


@pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")
def test_ctrl_c_ends_us_without_a_traceback() -> None:
    code = """
from retrograd.core import cli
from retrograd.core.cli import commands
def view(self): raise KeyboardInterrupt
commands.View.check = lambda self: None
commands.View.carry_out = view
cli.main(["view", "."])
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert not done.stderr


def test_the_recorded_script_may_be_anything(tmp_path: Path) -> None:
    done = run("run", "sh", "-c", 'echo "$0 $1"; exit 7', "a", "b c", cwd=tmp_path)
    assert done.returncode == 7
    assert done.stdout == "a b c\n"
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu"], "usage: retrograd run"),
        (["view", "--site", "x"], "the nearest is '--sites'"),
        (["report", "--site", "x"], "run, view and export have '--sites'"),
        (["--every=3", "run", "train.py"], "no option '--every' before a command; run has '--every'"),
    ],
)
def test_the_nearest_is_told_with_its_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    told = capsys.readouterr().err
    assert said in told
    assert told.startswith("usage: ")


def test_a_wrong_path_is_told_without_torch_and_tables(tmp_path: Path) -> None:
    code = """
import sys
from retrograd.core.cli import main
for words in (["report", "nosuch"], ["view", "nosuch"], ["explain", "nosuch"], ["compare", "a", "b"], ["ls", "nosuch"]):
    assert main(words) == 2
print([name for name in ("torch", "pyarrow", "numpy") if name in sys.modules])
"""
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command.name in script for command in COMMANDS)
    if shell == "bash":
        typed = 'COMP_WORDS=(retrograd view --s); COMP_CWORD=2; _retrograd; echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", script + typed], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["--sites", "--statistic", "--sort"]


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.name)
def test_what_is_not_given_has_the_default_of_its_field(kind: type[Command]) -> None:
    needed = [each for each in kind.options() if each.default is MISSING]
    words = []
    for each in needed:
        words += [*([] if each.is_argument else each.names[-1:]), *(each.choices[:1] or ["here"])]
    asked = parse([kind.name, *words], lambda: COMMANDS, "", "")
    for each in kind.options():
        if each not in needed:
            assert getattr(asked, each.field) == each.default, each.field
