"""The page of a run, served beside the program that is recorded."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from retrograd.core.launch import beside, live_page
from retrograd.core.limits import LIMITS
from tests import warm
from tests.commands import ENVIRONMENT
from tests.core.runs.written import write_run
from tests.core.serving.served import serving

WAITS = """
import sys
sys.stdin.readline()
import torch
net = torch.nn.Linear(2, 1)
for _ in range(3):
    net(torch.ones(1, 2)).sum().backward()
sys.stdin.readline()
"""


def read(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def test_a_run_is_served_from_before_it_begins_and_is_no_child_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    line = [sys.executable, "-m", "retrograd", "run", "--live", "-q", "-o", "run", "waits.py"]
    with warm.Popen(
        line,
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        told = re.search(r"http://\S+", program.stderr.readline())
        assert told
        assert b"Nothing was recorded yet" in read(told[0])
        program.stdin.write("\n")
        program.stdin.flush()
        for _ in range(300):
            if b'id="viewport"' in (page := read(told[0])):
                break
            threading.Event().wait(0.1)
        assert b'id="viewport"' in page
        assert not Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        program.communicate("\n", timeout=60)
        assert program.returncode == 0


@pytest.mark.slow
def test_the_browser_of_a_run_is_given_a_file_that_goes_with_the_run(tmp_path: Path) -> None:
    """Whoever lists processes sees its command line, and not the token."""
    (tmp_path / "train.py").write_text("import sys\nsys.stdin.readline()\n")
    browser = tmp_path / "browser"
    browser.write_text('#!/bin/sh\necho "$@" >opened\ncp "${1#file://}" page.html\n')
    browser.chmod(0o755)
    files = tmp_path / "temporary"
    files.mkdir()
    with warm.Popen(
        [sys.executable, "-m", "retrograd", "run", "--open", "-q", "-o", "run", "train.py"],
        cwd=tmp_path,
        env={**ENVIRONMENT, "BROWSER": str(browser), "TMPDIR": str(files)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        told = re.search(r"http://[\w.:]+/([\w-]+)/", program.stderr.readline())
        assert told
        for _ in range(300):
            if (tmp_path / "page.html").is_file():
                break
            threading.Event().wait(0.1)
        assert told[1] not in (tmp_path / "opened").read_text()
        assert f'url={told[0]}"' in (tmp_path / "page.html").read_text()
        program.communicate("\n", timeout=60)
    for _ in range(600):
        if not list(files.glob("retrograd-*.html")):
            break
        threading.Event().wait(0.1)
    assert not list(files.glob("retrograd-*.html"))


def test_a_server_ends_with_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "page_seconds", 0.0)
    monkeypatch.setattr(LIMITS, "page_pause", 0.01)
    with subprocess.Popen(["sleep", "60"]) as program, serving(write_run(tmp_path / "run")) as server:
        ending = threading.Thread(target=live_page.end_with, args=(server, program.pid))
        ending.start()
        assert beside.is_alive(program.pid)
        assert ending.is_alive()
        program.kill()
        program.wait()
        ending.join(60)
        assert not ending.is_alive()
