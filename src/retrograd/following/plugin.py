"""What following gives to the core: see :mod:`retrograd.core.plugins`."""

PROVIDES = {
    "requests": "retrograd.following.launch.requests:REQUESTS",
    "commands": "retrograd.following.launch.commands:COMMANDS",
}
