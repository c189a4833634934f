"""What the running autograd engine says of itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

current_graph_task = torch._C._current_graph_task_id
"""Number of the backward pass that runs in this thread; −1 outside of one. Inside a forward hook anything else
than −1 means that this forward recomputes a checkpointed part: it is no new call."""

current_node = torch._C._current_autograd_node
"""The node that the running backward pass is at; None outside of one."""

is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is seen inside a ``torch.func`` transform, where it has no values of its own."""

is_compiling = torch.compiler.is_dynamo_compiling
"""True while torch.compile traces the code. The first question of every hook, so that nothing of ours is traced."""

grad_enabled = torch.is_grad_enabled
inference_enabled = torch.is_inference_mode_enabled
next_sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number that the next node made in this thread will have."""


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback()`` when the backward pass that runs now has ended. Only to be used inside of one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
