"""Runs scripts without us, each in a fork of this process, which has loaded torch already.

line on stdin    ["/path/to/script.py", "argument", …] and the folder to run it in, as a JSON list of the two
line on stdout   its exit code; what it printed is in the files ``stdout`` and ``stderr`` of that folder
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # every optimizer imports it


def run(words: list[str], folder: str) -> None:
    """Be this script."""
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    os.close(0)
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    code: object = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != words[0]:
            frames = frames.tb_next  # those of this file and of runpy
        traceback.print_exception(type(error), error, frames)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.alarm(150)  # nothing hangs for ever
            run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
