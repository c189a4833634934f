"""Has a file of its own where the run folder was to be."""

import runpy
from pathlib import Path

Path("run").write_text("mine")
runpy.run_path(str(Path(__file__).with_name("plain_loop.py")), run_name="__main__")
print(Path("run").read_text())
