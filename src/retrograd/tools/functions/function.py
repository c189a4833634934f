"""``rg.Function``: an operation with a backward of its own, as an object."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from retrograd.core.errors import FunctionError
from retrograd.core.hooks.checkpoints import part_computed_again
from retrograd.core.hooks.engine import grad_enabled, is_in_backward, uncompiled
from retrograd.core.hooks.functions import NODES_ARE_KNOWN, FunctionClass
from retrograd.core.hooks.saved import read_top_pair
from retrograd.tools.functions.arguments import Arguments
from retrograd.tools.functions.call import FunctionCall
from retrograd.tools.functions.remembering import Remembering, note_memory, recalling
from retrograd.tools.functions.torch_function import MAKERS, make_torch_function, undecorate
from retrograd.tools.functions.written_out import Method, PlainCode

_TORCH_SETTINGS = ("generate_vmap_rule", "clear_saved_tensors_on_access")


class Function(Remembering):
    """An operation whose backward is written by hand, as an object that is called and that remembers.

        class Exp(rg.Function):
            def forward(self, ctx, input):
                output = input.exp()
                ctx.save_for_backward(output)
                return output

            def backward(self, ctx, grad_output):
                (output,) = ctx.saved_tensors
                self.remember("grad_output", grad_output, last=8)
                return {"input": grad_output * output}

        exp = Exp()
        exp(x).sum().backward()
        exp.remembered["grad_output"]

    There is one ``torch.autograd.Function`` under each class, and ``ctx`` is torch's: a new one for each call. The
    instance is the same for all calls, and is a module: held by another it is saved, moved and copied with it, has
    forward hooks, and may have parameters. A parameter or buffer of its own stands in for the argument of its name
    that a caller leaves out.

    A subclass writes ``forward(self, ctx, ...)`` and ``backward(self, ctx, *grad_outputs)``; and, if it likes,
    ``jvp(self, ctx, *tangents)`` for forward mode. With ``setup_context(self, ctx, inputs, output)`` the forward takes
    no ``ctx``, and works under ``torch.func``. Torch's ``once_differentiable``, ``custom_fwd`` and ``custom_bwd``
    decorate these methods as they do static ones.

    ``backward`` returns gradients by name, ``{"input": ...}``, where what is left out has none; or by position, one
    for each argument of ``forward``. ``ctx.needs_grad["input"]`` tells by name what ``ctx.needs_input_grad[0]`` tells
    by position.

    Attributes:
        auxiliary: names of arguments that carry data and no gradient. They are detached. For outputs there is
            :class:`~retrograd.tools.functions.call.Auxiliary`.
        generate_vmap_rule: let torch make a rule for ``torch.func.vmap`` from the methods; or write
            ``vmap(self, info, in_dims, *args)``.
        clear_saved_tensors_on_access: let go of ``ctx.saved_tensors`` when they are first read.

    Raises:
        FunctionError: at the definition of a class that autograd could not follow; by a call whose gradients would be
            lost; in a backward pass, when the gradients do not fit the arguments.
    """

    auxiliary: ClassVar[Sequence[str]] = ()
    generate_vmap_rule: ClassVar[bool] = False
    clear_saved_tensors_on_access: ClassVar[bool] = False

    backward: Callable[..., Any]

    _written: ClassVar[type[Function]]
    """The class as the user wrote it; set on the one that instances are made of."""

    _called: ClassVar[type[Function] | None] = None
    """The class that instances of this one are made of: it has a ``forward`` that can be called."""

    _arguments: ClassVar[Arguments]
    _held: frozenset[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "_written"):
            cls._called = None if cls.forward is nn.Module.forward else _make_called(cls)

    def __new__(cls, *_args: Any, **_options: Any) -> Self:
        called = cls if hasattr(cls, "_written") else cls._called
        if called is None:
            raise FunctionError(
                f"{cls.__name__} has no forward.", repair="write `def forward(self, ctx, ...)` in a subclass of it."
            )
        made: Any = super().__new__(called)
        made._held = frozenset()
        return made  # type: ignore[no-any-return]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As that of a module. The parameter stands in for the argument of its name.

        Raises:
            FunctionError: there is no such argument.
        """
        if name not in self._arguments.names:
            raise FunctionError(
                f"{type(self).__name__} cannot hold the parameter {name!r}: forward takes no argument of that name.",
                repair=f"add {name!r} to the arguments of forward; the instance's own stands in when none is given.",
                reason="autograd sees arguments only, and the parameter would never get a gradient.",
            )
        super().register_parameter(name, param)
        self._held |= {name}

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """As that of a module. If forward takes an argument of its name, it stands in for that."""
        super().register_buffer(name, tensor, persistent)
        self._held |= {name} & set(self._arguments.names)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """The call, as that of torch's ``Function.apply``; given one function alone, what a module does with it.

        ``model.apply(initialise)`` calls a function on each module, and so on this one and those in it.
        """
        if not isinstance(self, Function):
            raise FunctionError(
                "A Function is called as an object, not by apply.",
                repair="make an instance, and call it: `my_linear = MyLinear(); my_linear(input, weight)`.",
            )
        given = (*args, *kwargs.values())
        if len(given) == 1 and callable(given[0]) and kwargs.keys() <= {"fn"}:
            return super().apply(given[0])
        return self(*args, **kwargs)

    def __prepare_scriptable__(self) -> None:
        """Asked for by ``torch.jit.script``."""
        raise FunctionError(
            f"{type(self).__name__} cannot be compiled by torch.jit.script.",
            repair="compile a model without it.",
            reason="TorchScript knows no backward in Python.",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (self._written,), self.__getstate__()  # type: ignore[no-untyped-call]


def _remake(cls: type[Function]) -> Function:
    return cls.__new__(cls)


def _make_called(cls: type[Function]) -> type[Function]:
    """The subclass that instances are made of.

    Its ``forward`` takes what the caller of a module gives, without ``ctx``: so calls, hooks and names of arguments
    are those of any module. The class that the user wrote keeps its methods as they are, for ``super().forward(ctx,
    ...)`` of other classes.
    """
    name = cls.__name__
    methods = _written_methods(cls)
    has_ctx = "setup_context" not in methods
    arguments = Arguments(name, cls.forward, has_ctx=has_ctx, auxiliary=cls.auxiliary)
    settings = {setting: getattr(cls, setting) for setting in _TORCH_SETTINGS}
    code = PlainCode(name, arguments) if _is_plain(arguments, methods) else None
    function = make_torch_function(name, methods, {"__module__": cls.__module__, **settings}, code)
    forward: Any = _make_call(arguments, function) if code is None else code.make_call(function)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = arguments.signature.replace(parameters=[itself, *arguments.signature.parameters.values()])
    body = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "_arguments": arguments,
        "_written": cls,
        "forward": forward,
    }
    return types.new_class(name, (cls,), exec_body=lambda namespace: namespace.update(body))


def _is_plain(arguments: Arguments, methods: Mapping[str, Method]) -> bool:
    """Return whether the code is written out: not under torch's decorators, which inspect what ``forward`` is given."""
    decorators = undecorate("", methods["forward"])[1]
    has_others = bool(decorators) or not methods.keys() <= {"forward", "backward"}
    return NODES_ARE_KNOWN and arguments.are_plain and bool(arguments.names) and not has_others


def _make_call(arguments: Arguments, function: FunctionClass) -> Method:
    """What calls an instance: the ``forward`` of a module."""
    apply = function.apply

    @uncompiled
    def forward(self: Function, *args: Any, **kwargs: Any) -> Any:
        inside = is_in_backward()  # torch.compile breaks its graph at this question
        part = part_computed_again() if inside else None
        values, names, positions = arguments.bind(args, kwargs, self, self._held)
        call = FunctionCall(self, names, arguments.shapes_of(names, values), positions)
        if part is not None:
            with recalling(self, self._memory, part):
                return apply(*values, call)
        if read_top_pair(True) is not None or not grad_enabled():  # else it is in no part that is computed again later
            note_memory(self, self._memory)
        return apply(*values, call)

    return forward


def _written_methods(cls: type[Function]) -> dict[str, Callable[..., Any]]:
    """The methods that torch calls, by name."""
    if hasattr(cls, "vjp"):
        raise FunctionError(f"{cls.__name__} has a method vjp.", repair="call it backward.")
    methods = {}
    for name in MAKERS:
        method = inspect.getattr_static(cls, name, None)
        if isinstance(method, staticmethod | classmethod):
            raise FunctionError(
                f"{name} of {cls.__name__} is a {type(method).__name__}.",
                repair=f"write an ordinary method: `def {name}(self, ...)` without the decorator.",
            )
        if method is not None:
            methods[name] = getattr(cls, name)
    return methods
