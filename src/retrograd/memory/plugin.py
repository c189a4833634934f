"""What memory gives to the core: see :mod:`retrograd.core.plugins`."""

PROVIDES = {
    "inventory_block": "retrograd.memory.views.inventory_page:make_block",
    "run_inventory": "retrograd.memory.launch.inventory:RunInventory",
    "requests": "retrograd.memory.launch.requests:REQUESTS",
    "commands": "retrograd.memory.launch.commands:COMMANDS",
}
