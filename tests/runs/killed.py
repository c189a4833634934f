"""A process that writes steps until it is killed, and prints each step once it has handed it over."""

import sys
import time
from pathlib import Path

from retrograd.runs import compaction
from tests.history.made import make_steps
from tests.runs.written import add_step, open_writer

compaction.FAN_IN = 3
writer = open_writer(Path(sys.argv[1]), resume=True, flush_seconds=0.01)
for batch in make_steps(range(writer.next_step, 10**6)):
    add_step(writer, batch)
    print(batch.moment.step, flush=True)
    time.sleep(0.0005)
