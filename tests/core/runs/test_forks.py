import os
import sys
import warnings
from pathlib import Path

import pytest

from retrograd.core.runs.lock import is_locked
from retrograd.core.runs.reader import open_run
from tests import warm
from tests.core.history.made import make_steps
from tests.core.runs.written import open_writer
from tests.processes import wait_for_child

if not hasattr(os, "fork"):
    pytest.skip("this system does not fork", allow_module_level=True)


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: threads and forks
        return os.fork()


def test_the_child_is_silent_and_the_parent_goes_on(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    first, second, third = make_steps([0, 1, 2])
    writer.add_rows(first)
    child = fork()
    if child == 0:
        writer.add_rows(second)
        writer.flush()
        writer.close("failed")
        os._exit(0)
    assert wait_for_child(child) == 0
    assert is_locked(tmp_path / "rank00000" / ".lock")
    writer.add_rows(third)
    writer.close()
    run = open_run(tmp_path)
    assert run.status == "finished"
    assert run.history["a:output"].steps.tolist() == [0, 2]
    assert len(run.ranks) == 1


def test_a_child_may_open_a_writer_of_its_own(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "parent")
    child = fork()
    if child == 0:
        own = open_writer(tmp_path / "child")
        own.add_rows(make_steps([0])[0])
        own.close()
        os._exit(0)
    assert wait_for_child(child) == 0
    writer.close()
    assert open_run(tmp_path / "child").history["a:output"].steps.tolist() == [0]


def test_forks_in_the_middle_of_writing(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, flush_seconds=0.001)
    for batch in make_steps(range(30)):
        writer.add_rows(batch)
        child = fork()
        if child == 0:
            os._exit(0)
        assert wait_for_child(child) == 0
    writer.close()
    assert len(open_run(tmp_path).history["a:output"]) == 30


EXITING_CHILD = """
import warnings
warnings.simplefilter("ignore")
import os, sys
from pathlib import Path
from tests.core.history.made import make_steps
from tests.core.runs.written import open_writer
writer = open_writer(Path(sys.argv[1]))
writer.add_rows(make_steps([0])[0])
if os.fork() == 0:
    sys.exit(0)  # runs what is registered for the exit
os.wait()
writer.add_rows(make_steps([1])[0])
"""


def test_a_child_that_exits_like_a_script(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXITING_CHILD, str(tmp_path)]
    warm.run(command, check=True, timeout=60)
    run = open_run(tmp_path)
    assert run.status == "finished"
    assert run.history["a:output"].steps.tolist() == [0, 1]
