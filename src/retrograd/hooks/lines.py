"""Lines of the program: who called, whatever libraries lie in between."""

from __future__ import annotations

import sysconfig
from types import FrameType

from retrograd.hooks.thread_logs import is_inner, user_frame


class _Installed(dict[str, bool]):
    """Source file → whether it belongs to an installed package, or to Python."""

    _python = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
    _packages = ("/site-packages/", "/dist-packages/")

    def __missing__(self, file: str) -> bool:
        is_package = file.startswith(self._python) or any(each in file for each in self._packages)
        answer = self[file] = is_inner[file] or is_package
        return answer


_is_installed = _Installed()


def program_frame(frame: FrameType) -> FrameType:
    """The innermost frame of the program itself, from this one outwards; where all is installed, of who called us."""
    outer: FrameType | None = frame
    while outer is not None and _is_installed[outer.f_code.co_filename]:
        outer = outer.f_back
    return user_frame(frame) if outer is None else outer


def describe_frame(frame: FrameType) -> str:
    """``file:line`` of where a frame is."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
