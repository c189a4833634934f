"""What a command leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys

_PROGRAM = """
from retrograd.core.launch.lean import load_lean_arrow
load_lean_arrow()
import sys, pyarrow
assert pyarrow.array([1, 2]).to_numpy().tolist() == [1, 2]
assert "pandas" not in sys.modules
if "jemalloc" in pyarrow.supported_memory_backends():
    assert pyarrow.default_memory_pool().backend_name == "jemalloc"
try:
    import pandas
except ModuleNotFoundError as error:
    assert "left alone" not in str(error)
"""


def test_pandas_is_not_loaded_but_can_be_and_free_memory_is_given_back() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ARROW_DEFAULT_MEMORY_POOL"}
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=120, env=environment)


def test_a_script_that_trains_nothing_loads_no_arrow() -> None:
    program = "import sys, torch, retrograd.core.launch.session; assert not {'pyarrow', 'pandas'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
