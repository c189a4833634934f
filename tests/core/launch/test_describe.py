"""The page about commands is made from their options, which are also what the parser knows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from retrograd.core.cli import main
from retrograd.core.cli.commands import COMMANDS
from retrograd.core.launch.options import Command

PAGE = Path(__file__).parents[3] / "docs" / "commands.md"


def test_the_page_is_up_to_date() -> None:
    describe_commands = runpy.run_path(str(PAGE.with_name("make_commands.py")))["describe_commands"]
    assert PAGE.read_text() == describe_commands(COMMANDS), "run `python docs/make_commands.py`"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_help_names_every_option(command: type[Command], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command.name, "--help"])
    text = capsys.readouterr().out
    for option in command.options():
        assert all(name in text for name in option.names)
        assert option.help.split()[0] in text
