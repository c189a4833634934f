"""The commands of memory."""

from __future__ import annotations

from retrograd.core.launch.options import Command
from retrograd.memory.launch.requests import InventoryRequest

COMMANDS: tuple[type[Command], ...] = (InventoryRequest,)
