"""What a command leaves alone."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
from retrograd.launch.lean import keep_pandas_out
keep_pandas_out()
import sys, pyarrow
assert pyarrow.array([1, 2]).to_numpy().tolist() == [1, 2]
assert "pandas" not in sys.modules
try:
    import pandas
except ModuleNotFoundError as error:
    assert "left alone" not in str(error)
"""


def test_pandas_is_not_loaded_but_can_be() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=120)


def test_a_script_that_trains_nothing_loads_no_arrow() -> None:
    program = "import sys, torch, retrograd.launch.session; assert not {'pyarrow', 'pandas'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
