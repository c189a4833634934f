"""Calls of torch functions: the program's line that makes one, the frame to make it from, and the call in words."""

from __future__ import annotations

import dis
import itertools
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import torch
import torch.overrides
from torch import Tensor
from torch.nn.parameter import is_lazy

from retrograd.core.hooks.engine import next_sequence_number, uncompiled, uncompiled_itself

_OVERRIDES = torch.overrides.__file__
TORCHS_WAY: CodeType = torch.overrides.handle_torch_function.__code__
"""Code by which functions that torch writes in Python go to a mode."""

_CALL: CodeType = (lambda function, args, kwargs: function(*args, **kwargs)).__code__  # on one line

Key = TypeVar("Key")
Answer = TypeVar("Answer")

_MANY = 4096


class AnswerCache(dict[Key, Answer]):
    """What a function returns for a key, computed when that is first asked for.

    Args:
        find: the function.
    """

    def __init__(self, find: Callable[[Key], Answer]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: Key) -> Answer:
        if len(self) >= _MANY:
            self.clear()
        answer = self[key] = self._find(key)
        return answer


_OURS = f"{Path(str(sys.modules['retrograd'].__file__)).parent}/"
_OUTSIDE = (f"{Path(torch.__file__).parent}/", _OURS, "<eval_with_key>", "<frozen ")
_PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_PACKAGES = ("/site-packages/", "/dist-packages/")

is_inner = AnswerCache[str, bool](lambda file: file.startswith(_OUTSIDE))
"""Source file → whether its lines are none of the user's: torch's, ours, or generated."""

is_ours = AnswerCache[str, bool](lambda file: file.startswith(_OURS))
"""Source file → whether it is ours."""

_MACHINERY = (_OURS, *(f"{Path(torch.__file__).parent}/{name}" for name in ("distributed/", "utils/checkpoint.py")))

is_machinery = AnswerCache[str, bool](lambda file: file.startswith(_MACHINERY))
"""Source file → whether functions that it calls are part of no model: ours, or what torch does around modules."""

is_installed = AnswerCache[str, bool](
    lambda file: is_inner[file] or file.startswith(_PYTHON) or any(each in file for each in _PACKAGES)
)
"""Source file → whether it belongs to an installed package, or to Python."""


def user_frame(frame: FrameType) -> FrameType:
    """The innermost frame of the user's code, from this one outwards."""
    while is_inner[frame.f_code.co_filename]:
        outer = frame.f_back
        if outer is None:
            break
        frame = outer
    return frame


def user_line(frame: FrameType | None = None) -> str:
    """``file:line`` of the user's code around a frame; around the caller where it is left out."""
    return describe_frame(user_frame(frame or sys._getframe(1)))


def program_frame(frame: FrameType) -> FrameType:
    """The innermost frame of the program itself, from this one outwards; where all is installed, of who called us."""
    outer: FrameType | None = frame
    while outer is not None and is_installed[outer.f_code.co_filename]:
        outer = outer.f_back
    return user_frame(frame) if outer is None else outer


def describe_frame(frame: FrameType) -> str:
    """``file:line`` of where a frame is."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def describe_function(function: Any) -> tuple[str, str]:
    """Name of a function, and the line at which it begins; both may be empty."""
    function = getattr(function, "func", function)  # of a partial
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return str(name), f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def line_at(code: CodeType, offset: int) -> int:
    """The line of an instruction, at this offset in its code; that of the function where it is not known."""
    line = next(itertools.islice(code.co_positions(), offset // 2, None), (None,))[0]
    return line or code.co_firstlineno


def is_stand_in(frame: FrameType) -> bool:
    """Return whether this frame only looks like one of the program: it holds none of its variables."""
    return frame.f_code.co_code == _CALL.co_code and frame.f_code.co_varnames == _CALL.co_varnames


_POP, _CACHE = dis.opmap["POP_TOP"], dis.opmap["CACHE"]


def is_statement(frame: FrameType) -> bool:
    """Return whether the call that this frame is in is a statement of its own: what it returns is thrown away."""
    code, place = frame.f_code.co_code, frame.f_lasti + 2
    while code[place] == _CACHE:
        place += 2
    return code[place] == _POP


_FRAMES_AROUND = 2
"""``softmax`` in ``nn.Softmax`` warns for the caller of ``forward``'s caller; torch counts no further."""


class SameFrames:
    """Stands between a function mode and what it calls.

    Python asks the caller's frame for file, line and for what it has warned of before. One that passes a call on from
    another file would be named in its place, and the warning would be given a second time where we are not.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[int, int], Callable[..., Any]] = {}
        """Identity of code, which is hashed as a whole each time, and offset in it → the stand-in."""
        self._codes: list[CodeType] = []
        """Held, so that no other gets their identities."""

    @uncompiled
    def make(self, frame: FrameType) -> Callable[..., Any]:
        """Make what calls ``(function, args, kwargs)`` as if from this frame."""
        key = id(frame.f_code), frame.f_lasti
        if key not in self.made:
            code = _CALL.replace(
                co_filename=frame.f_code.co_filename,
                co_name=frame.f_code.co_name,
                co_qualname=frame.f_code.co_qualname,
                co_firstlineno=frame.f_lineno,
            )
            self._codes.append(frame.f_code)
            self.made[key] = FunctionType(code, frame.f_globals)
        return self.made[key]

    @uncompiled_itself
    def call_python(
        self, frame: FrameType, call: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function that torch writes in Python as if from this frame, and from the two around it.

        Its warnings may be meant for any of these; behind the stand-ins are frames by which it has come to the mode.
        """
        outer = frame.f_back
        for _ in range(_FRAMES_AROUND):
            if outer is None:
                break
            around = self.made.get((id(outer.f_code), outer.f_lasti)) or self.make(outer)
            function, args, kwargs, call = call, (function, args, kwargs), {}, around
            outer = outer.f_back
        return call(function, args, kwargs)

    def clear(self) -> None:
        """Hold no frame's globals."""
        self.made.clear()
        self._codes.clear()


@uncompiled
def find_caller(frame: FrameType, function: Any) -> FrameType:
    """The frame that calls a torch function, from this one outwards: not torch's own way to a mode."""
    while frame.f_back is not None and (
        frame.f_code.co_filename == _OVERRIDES or frame.f_code is getattr(function, "__code__", None)
    ):
        frame = frame.f_back
    return frame


VALUES = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__"}
)
"""Functions that bring numbers out of torch, where no graph can follow."""

_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that are tensors made of it."""

_UNINTERESTING = frozenset(
    {"backward", "grad", "register_hook", "retain_grad", "requires_grad_", "is_nonzero", "__repr__", "__format__",
     "__delete__"}
)  # fmt: skip

_OPERATORS = frozenset(
    {"getitem", "setitem", "rsub", "rdiv", "rtruediv", "rpow", "rmod", "rmatmul", "rfloordiv", "radd", "rmul", "pow",
     "ipow", "neg", "contains", "iter", "reversed", "invert", "and", "or", "xor", "iand", "ior", "ixor"}
)  # fmt: skip

_ALONG = frozenset(
    {"softmax", "log_softmax", "logsumexp", "sum", "mean", "std", "var", "prod", "argmax", "argmin", "max", "min",
     "amax", "amin", "cumsum", "cumprod", "norm", "squeeze", "unsqueeze", "median", "mode", "unbind", "all", "any",
     "nansum", "nanmean", "std_mean", "var_mean"}
)  # fmt: skip
"""Functions whose first argument that is not a tensor is a dimension, if it is a number or several."""

_ACCESS = ("__get__", "__set__")
_SHORTEST, _LONGEST = 40, 160


def name_function(function: Any) -> str:
    """The name of a torch function, ``getitem`` for ``__getitem__``; empty for one that makes nothing of interest."""
    try:
        return _names[function]
    except TypeError:  # somebody's own, that cannot be hashed
        return _name(function)


def _name(function: Any) -> str:
    if not hasattr(function, "__name__"):
        return ""
    name = called_name(function)
    if function.__name__ in _ACCESS:
        return name if name in _PROPERTIES else ""
    return "" if name in _UNINTERESTING else plain_name(name)


_names = AnswerCache[Any, str](_name)


def plain_name(name: str) -> str:
    """``getitem`` for ``__getitem__``, of the name of a torch function; others as they are."""
    plain = name.strip("_") if name.startswith("__") else name
    return plain if plain in _OPERATORS else name


def called_name(function: Any) -> str:
    """The name of a torch function as it is, or of an attribute that it reads; ``__set__ grad`` where it writes one."""
    name = str(getattr(function, "__name__", type(function).__name__))
    if name in _ACCESS:
        attribute = str(getattr(getattr(function, "__self__", None), "__name__", ""))
        return attribute if name == "__get__" else f"{name} {attribute}"
    return name


def is_bare(name: str) -> bool:
    """Return whether a function takes of its operand no more than its shape: ``zeros_like``, ``new_ones``."""
    return name.endswith("_like") or name.startswith("new_")


def tensors_of(args: Any, kwargs: Mapping[str, Any] | None) -> list[Tensor]:
    """The tensors among arguments, in their order, with those in tuples and lists."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(tensors_of(value, None))
    return found


class TorchCall:
    """A call of a torch function, as listeners of a function mode are shown it. It holds tensors: not to be kept.

    Attributes:
        function, args, kwargs: what is called, and with what.
        frame: of who calls it, perhaps torch's.
        first: the number of the first node that it can make.
        result: what it returned; None until then.
    """

    __slots__ = ("args", "first", "frame", "function", "kwargs", "result")

    @uncompiled
    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.frame = frame
        self.first = next_sequence_number()
        self.result: Any = None

    @property
    def name(self) -> str:
        """Its name, as :func:`name_function` gives it."""
        return name_function(self.function)

    @property
    def operands(self) -> list[Tensor]:
        """The tensors that it is given."""
        return tensors_of(self.args, self.kwargs)

    @property
    def made(self) -> list[Tensor]:
        """The tensors that it has made, or written to by ``x[…] = …``."""
        return tensors_of(self.args[:1] if self.name == "setitem" else (self.result,), None)

    @property
    def line(self) -> str:
        """``file:line`` of the user's code that calls it."""
        return user_line(self.frame)


def describe_tensor(tensor: Tensor) -> str:
    """Its type and shape: ``float32[4, 3]``."""
    if tensor.is_nested:
        return f"nested_{_short(tensor.dtype)}"
    if is_lazy(tensor):
        return _short(tensor.dtype)  # it has no shape yet
    return _described[tensor.dtype, tensor.shape]


_described = AnswerCache[tuple[torch.dtype, torch.Size], str](lambda key: f"{_short(key[0])}{list(map(int, key[1]))}")


def describe_arguments(name: str, args: Any, kwargs: Mapping[str, Any] | None) -> str:
    """Describe the arguments: ``dim=-1, keepdim=True``; of tensors the names of those that are passed by name."""
    plain = [each for each in args if not isinstance(each, Tensor) and each is not None]
    given = [_short(each) for each in plain]
    if plain and name in _ALONG and isinstance(plain[0], int | list | tuple) and not isinstance(plain[0], bool):
        given[0] = f"dim={given[0]}"
    if kwargs:
        given += [f"{key}={_short(each)}" for key, each in kwargs.items() if each is not None]
    text = ", ".join(given)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _short(value: Any) -> str:
    match value:
        case bool() | int() | float() | complex() | None:
            return repr(value)
        case str():
            return value[:_SHORTEST]
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case list() | tuple():
            inner = ", ".join(map(_short, value[:8]))
            return f"({inner}{', …' if len(value) > 8 else ''})"
        case slice():
            parts = (value.start, value.stop, value.step)
            return ":".join("" if each is None else _short(each) for each in parts[: 2 + (parts[2] is not None)])
        case _ if value is Ellipsis:
            return "..."
        case Tensor():
            return "tensor"
        case torch.device() | torch.layout() | torch.memory_format():
            return str(value)
        case _:
            return type(value).__name__
