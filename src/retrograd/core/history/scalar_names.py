"""Names of scalars, and what their events say: a recorder needs no more of them."""

from __future__ import annotations

SCALAR = "scalar"
"""Kind of the events that hold a number of their step; ``name`` says of what, ``text`` how it was taken."""

OWN = "recorded"
"""Text of what the recorder took; what the program has logged has none."""

SHARDS = "shards"
"""Text of a norm of this process's part of all parameters: squares add up over processes."""

REFERENCE = "shards before"
"""Text of the same of the parameters themselves, beside that of what an update has added to them."""

LOSS, EVAL_LOSS, LR, BATCH = "loss", "eval_loss", "lr", "batch"
GRAD_NORM, GRAD_NORM_CLIPPED, UPDATE_RATIO = "grad_norm", "grad_norm_clipped", "update_ratio"
STEP_TIME, THROUGHPUT, MEMORY, SCALE = "step_time", "throughput", "memory", "scale"
SAMPLES, TOKENS = "samples", "tokens"
"""What a batch is counted in: text of its events."""
