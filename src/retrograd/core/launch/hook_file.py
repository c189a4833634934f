"""A hook file in site-packages, by which isolated interpreters find us: ``python -I`` ignores ``PYTHONPATH``."""

from __future__ import annotations

from pathlib import Path

from retrograd.core.errors import LaunchError
from retrograd.core.files import write_text
from retrograd.core.launch.interpreter import BOOTSTRAP, OURS

HOOK = "retrograd_hook.pth"
"""Its name."""


def install_hook(site_packages: Path) -> Path:
    """Write the file; it does nothing in processes that are not below a command of ours.

    Args:
        site_packages: folder of the environment that isolated children use.

    Returns:
        The file.

    Raises:
        LaunchError: if it cannot be written.
    """
    bootstrap = str(BOOTSTRAP / "sitecustomize.py")
    run = f"exec(open({bootstrap!r}).read(), {{'__name__': 'retrograd_hook', '__file__': {bootstrap!r}}})"
    hook = site_packages / HOOK
    try:
        write_text(hook, f"import os; any(name.startswith({OURS!r}) for name in os.environ) and {run}\n")
    except OSError as error:
        raise LaunchError(f"{str(hook)!r} cannot be written: {error.strerror}.") from error
    return hook


def remove_hook(site_packages: Path) -> Path:
    """Remove the file, if it is there.

    Raises:
        LaunchError: if it cannot be removed.
    """
    hook = site_packages / HOOK
    try:
        hook.unlink(missing_ok=True)
    except OSError as error:
        raise LaunchError(f"{str(hook)!r} cannot be removed: {error.strerror}.") from error
    return hook
