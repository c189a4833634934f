"""The one ``torch.autograd.Function`` under a class of Functions. The instance comes to it with each call."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from retrograd.core.errors import FunctionError
from retrograd.core.hooks.engine import uncompiled
from retrograd.core.hooks.functions import needs_without_last, refine_node
from retrograd.tools.functions.call import NO_GRADIENT, FunctionCall
from retrograd.tools.functions.intermediates import IntermediateCheck
from retrograd.tools.functions.written_out import Method, PlainCode

Decorator = Callable[[Method], Method]

_KNOWN: tuple[Callable[..., Any], ...] = (once_differentiable, custom_fwd, custom_bwd)


def undecorate(owner: str, method: Method) -> tuple[Method, list[Decorator]]:
    """A method without the decorators of torch that are outermost on it, and those, the outermost first.

    Raises:
        FunctionError: another decorator lies around one of torch's.
    """
    decorators: list[Decorator] = []
    while (decorator := _decorator_of(method)) is not None:
        decorators.append(decorator)
        method = method.__wrapped__  # type: ignore[attr-defined]
    inner: Any = method
    while inner := getattr(inner, "__wrapped__", None):
        if _decorator_of(inner) is not None:
            raise FunctionError(
                f"{owner}.{method.__name__} has another decorator around one of torch.amp or torch.autograd.",
                repair="put torch's decorators on the lines above it.",
                reason="they take the first argument for ctx, and are moved to where it is.",
            )
    return method, decorators


def redecorate(method: Method, decorators: list[Decorator]) -> Method:
    """Put the decorators around another method, in their order."""
    for decorator in reversed(decorators):
        method = decorator(method)
    return method


def _decorator_of(method: Method) -> Decorator | None:
    """Find out which of torch's decorators made this function, with its options."""
    code = getattr(method, "__code__", None)
    for decorator in _KNOWN:
        if code in decorator.__code__.co_consts:  # the function that it defines and returns
            options = {
                name: value
                for name, value in inspect.getclosurevars(method).nonlocals.items()
                if name in inspect.signature(decorator).parameters and value is not method.__wrapped__  # type: ignore[attr-defined]
            }
            return functools.partial(decorator, **options)
    return None


def make_torch_function(
    owner: str, methods: Mapping[str, Method], settings: Mapping[str, Any], code: PlainCode | None = None
) -> type[torch.autograd.Function]:
    """A class whose static methods call those of the user, with the instance in front.

    Its ``apply`` takes the values of all arguments and then the call, so that positions are the user's own.
    The methods find the call in ``ctx``, which is the node of the graph: no instance refers to a node.

    Args:
        owner: its name, to which torch appends ``Backward`` for the nodes.
        methods: those of ``MAKERS`` that the user wrote, by name. ``forward`` has no ``ctx`` beside a
            ``setup_context``.
        settings: class attributes that torch reads.
        code: makes the methods, if the Function is plain; a call of it is a :data:`PlainCall`, and else a
            :class:`FunctionCall`.
    """
    makers: dict[str, Callable[[Method], Method]] = dict(MAKERS)
    if code is not None:
        makers.update(forward=code.make_forward, backward=code.make_backward)
    elif "setup_context" in methods:
        makers["forward"] = _make_forward_without_ctx
    body: dict[str, Any] = dict(settings)
    check = None if "setup_context" in methods else IntermediateCheck(owner)
    for name, method in methods.items():
        inner, decorators = undecorate(owner, method)
        static = _make_checked(name, inner, makers[name], check, is_code=code is not None)
        body[name] = staticmethod(redecorate(static, decorators))
    made: Any = types.new_class(owner, (torch.autograd.Function,), exec_body=lambda namespace: namespace.update(body))
    if code is None:
        refine_node(made, {"needs_grad": property(_needs_by_name)})  # made when it is asked for
    else:
        refine_node(made, {"needs_grad": property(code.needs_by_name), "needs_input_grad": needs_without_last})
    return made  # type: ignore[no-any-return]


def _make_checked(
    name: str, method: Method, make: Callable[[Method], Method], check: IntermediateCheck | None, *, is_code: bool
) -> Method:
    """A static method, which looks at what is saved; in code that is written out, until that is known."""
    if check is None or name not in ("forward", "backward"):
        return make(method)
    if name == "forward":
        made = make(check.first(method))
        check.forward_code = made if is_code else None
        return made
    if not is_code:
        return make(check.guard(method))
    made = check.backward_code = make(method)
    return made


def _make_forward(method: Method) -> Method:
    @uncompiled
    def forward(ctx: Any, *values: Any) -> Any:
        call: FunctionCall = values[-1]
        _begin(ctx, call)
        try:
            if call.positions == len(values) - 1:
                output = method(call.function, ctx, *values[:-1])
            else:
                args, kwargs = call.split(values[:-1])
                output = method(call.function, ctx, *args, **kwargs)
        except Exception as error:
            call.note(error, "forward")
            raise
        if isinstance(output, Tensor):
            return output
        plain = call.uncover(output)
        if call.hidden:
            call.mark_auxiliary(ctx, plain)
        return plain

    return forward


def _make_forward_without_ctx(method: Method) -> Method:
    @uncompiled
    def forward(*values: Any) -> Any:
        call: FunctionCall = values[-1]
        args, kwargs = call.split(values[:-1])
        try:
            output = method(call.function, *args, **kwargs)
        except Exception as error:
            call.note(error, "forward")
            raise
        return call.uncover(output)

    return forward


def _make_setup_context(method: Method) -> Method:
    @uncompiled
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call: FunctionCall = inputs[-1]
        _begin(ctx, call)
        try:
            method(call.function, ctx, inputs[:-1], output)
        except Exception as error:
            call.note(error, "setup_context")
            raise
        if call.hidden:
            call.mark_auxiliary(ctx, output)

    return setup_context


def _make_backward(method: Method) -> Method:
    @uncompiled
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        call: FunctionCall = ctx.retrograd_call
        try:
            returned = method(call.function, ctx, *(call.of_outputs(grad_outputs) if call.hidden else grad_outputs))
        except Exception as error:
            call.note(error, "backward")
            raise
        return call.arrange_gradients(returned) + NO_GRADIENT

    return backward


def _make_jvp(method: Method) -> Method:
    @uncompiled
    def jvp(ctx: Any, *tangents: Any) -> Any:
        call: FunctionCall = ctx.retrograd_call
        try:
            returned = method(call.function, ctx, *call.of_inputs(tangents[:-1]))
        except Exception as error:
            call.note(error, "jvp")
            raise
        return call.for_outputs(returned)

    return jvp


def _make_vmap(method: Method) -> Method:
    @uncompiled
    def vmap(info: Any, in_dims: tuple[Any, ...], *values: Any) -> tuple[Any, Any]:
        call: FunctionCall = values[-1]
        output, out_dims = method(call.function, info, in_dims[:-1], *values[:-1])
        return call.uncover(output), out_dims

    return vmap


MAKERS: dict[str, Callable[[Method], Method]] = {
    "forward": _make_forward,
    "setup_context": _make_setup_context,
    "backward": _make_backward,
    "jvp": _make_jvp,
    "vmap": _make_vmap,
}
"""Methods of a Function that torch calls → what makes a static method of one."""


def _begin(ctx: Any, call: FunctionCall) -> None:
    """Let ``ctx`` know its call, and tell by position and by name which arguments need a gradient."""
    ctx.retrograd_call = call
    ctx.needs_input_grad = ctx.needs_input_grad[:-1]
    if not hasattr(type(ctx), "needs_grad"):  # torch.func has a class of its own
        ctx.needs_grad = _needs_by_name(ctx)


def _needs_by_name(ctx: Any) -> dict[str, bool]:
    return dict(zip(ctx.retrograd_call.names, ctx.needs_input_grad))  # noqa: B905  # both are of every call
