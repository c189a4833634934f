"""A script that dies prints the traceback that plain Python prints, but for torch's own way past hooks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from retrograd.core.errors import AttachError
from retrograd.core.launch.process import clean_traceback
from tests.commands import run

_SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid())
output = model(torch.ones(3, 4))
loss = output.square().mean()
output.add_(1)
{last}
"""


def list_calls(errors: str) -> list[str]:
    """File and function of each frame; torch calls ``inner`` where there are hooks."""
    return [call for call in re.findall(r'File "(.*), in (.*)', errors) if call[1] != "inner"]


@pytest.mark.parametrize("last", ["loss.backward()", "model(torch.ones(3, 5))", "torch.ones(2) @ torch.ones(3)"])
def test_the_traceback_is_that_of_plain_python(last: str, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(_SCRIPT.format(last=last))
    _, _, plain = run([sys.executable, str(script)], tmp_path)
    code, _, ours = run([sys.executable, "-m", "retrograd", "explain", str(script)], tmp_path)
    assert code == 1
    strip = [(re.sub(r'", line \d+', "", file), name) for file, name in list_calls(ours)]
    assert strip == [(re.sub(r'", line \d+', "", file), name) for file, name in list_calls(plain)]


def test_an_error_of_ours_keeps_its_frames() -> None:
    with pytest.raises(AttachError) as raised:
        raise AttachError("wrong")
    before = raised.value.__traceback__
    clean_traceback(raised.value)
    assert raised.value.__traceback__ is before
