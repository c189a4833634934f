"""A process that writes steps until it is killed, and prints each step once it has handed it over."""

import itertools
import sys
import time
from pathlib import Path

from retrograd.core.limits import LIMITS
from tests.core.history.made import make_steps
from tests.core.runs.written import add_step, open_writer

LIMITS.fan_in = 3
writer = open_writer(Path(sys.argv[1]), resume=True, flush_seconds=0.01)
for step in itertools.count(writer.next_step):
    add_step(writer, make_steps([step])[0])
    print(step, flush=True)
    time.sleep(0.0005)
