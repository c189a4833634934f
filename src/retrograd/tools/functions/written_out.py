"""The code of a plain Function, written out for its arguments: a call loops over nothing, packs nothing, asks once.

A Function is plain when its ``forward`` takes ``ctx`` and arguments that may all be given by position, none of them
auxiliary, and it has no other method than ``backward``: nearly every one. What has a line for each argument, or names
them, is put together as source when the class is defined. Other Functions go through loops.

A call takes 5 µs more than torch's own where one that goes through loops takes 27: without this a step of 50 layers of
32 takes a fifth more, and one of 50 layers of 256 a twentieth.

The call of an instance gives torch's ``apply`` the arguments and then the :data:`PlainCall`, which ``ctx`` keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from retrograd.core.hooks.checkpoints import part_computed_again
from retrograd.core.hooks.engine import grad_enabled, is_in_backward, uncompiled
from retrograd.core.hooks.functions import FunctionClass, inner_apply, transforms_active, unwrap_if_dead
from retrograd.core.hooks.saved import read_top_pair
from retrograd.tools.functions.arguments import Arguments
from retrograd.tools.functions.call import NO_GRADIENT, FunctionCall
from retrograd.tools.functions.remembering import note_memory, recalling

Method = Callable[..., Any]

PlainCall = tuple[Any, ...]
"""The instance that is called, then the shape of each argument: None for what is not a tensor."""

_CALL = """
def call(self, *args, **kwargs):
    part = part_computed_again() if is_in_backward() else None  # torch.compile breaks its graph here
    if kwargs or len(args) != {count}:
        args = bind(args, kwargs, self, self._held)[0]
    {values}= args{each_argument}
    if part is not None:
        with recalling(self, self._memory, part):
            return apply({values}(self, {shapes}))
    if read_top_pair(True) is not None or not grad_enabled():  # else it is in no part that is computed again later
        note_memory(self, self._memory)
"""

_INNER = """
    if not transforms_active():
        return inner_apply({values}(self, {shapes}))
"""

_APPLY = """
    return apply({values}(self, {shapes}))
"""

_ARGUMENT = """
    if isinstance(value{i}, Tensor):{unwrap}
        shape{i} = value{i}.shape
    else:
        shape{i} = None
        if value{i} is not None:
            check_other({name}, value{i})"""

_UNWRAP = """
        value{i} = unwrap_if_dead(value{i})"""

_FORWARD = """
def forward(ctx, {values}call):
    ctx.retrograd_call = call
    try:
        output = method(call[0], ctx, {values})
    except Exception as error:
        whole(call).note(error, "forward")
        raise
    return output if isinstance(output, Tensor) else uncover(ctx, call, output)
"""

_BACKWARD = """
def backward(ctx, grad_output, *others):
    function, {shapes}= call = ctx.retrograd_call
    try:
        if others:
            returned = method(function, ctx, *without_hidden(ctx, call, (grad_output, *others)))
        else:
            returned = method(function, ctx, grad_output)
    except Exception as error:
        whole(call).note(error, "backward")
        raise
    if type(returned) is dict:
        if len(returned) != {count}:
            return arrange(call, returned)
        try:
            {gradients}= {by_name}
        except KeyError:
            return arrange(call, returned)
    elif type(returned) is tuple and len(returned) == {count}:
        {gradients}= returned
    else:
        return arrange(call, returned)
    if {fits}:
        return {gradients}None
    return arrange(call, returned)
"""


class PlainCode:
    """Makes the functions of one plain Function.

    Args:
        owner: its name.
        arguments: of its ``forward``.
    """

    def __init__(self, owner: str, arguments: Arguments) -> None:
        self._arguments = arguments
        self._file = f"{Path(__file__).parent}/<{owner}>"  # which tools tell for ours, and nobody finds
        self._texts = {
            "count": str(len(arguments.names)),
            "values": self._each("value{i}, "),
            "shapes": self._each("shape{i}, "),
            "gradients": self._each("gradient{i}, "),
            "by_name": self._each("returned[{name}], "),
            "fits": self._each(
                "(isinstance(gradient{i}, Tensor) and gradient{i}.shape == shape{i} or gradient{i} is None)", " and "
            ),
        }

    def make_call(self, function: FunctionClass) -> Method:
        """What calls an instance: the ``forward`` of a module.

        Args:
            function: torch's Function, with what is made here.
        """
        inner = inner_apply(function)
        source = _CALL + _APPLY if inner is None else _CALL + _INNER + _APPLY
        each = _ARGUMENT.replace("{unwrap}", "" if inner is None else _UNWRAP)
        return self._make(
            source.replace("{each_argument}", self._each(each)),
            apply=function.apply,
            bind=self._arguments.bind,
            grad_enabled=grad_enabled,
            inner_apply=inner,
            is_in_backward=is_in_backward,
            note_memory=note_memory,
            part_computed_again=part_computed_again,
            read_top_pair=read_top_pair,
            recalling=recalling,
            check_other=self._arguments.check_other,
            transforms_active=transforms_active,
            unwrap_if_dead=unwrap_if_dead,
        )

    def make_forward(self, method: Method) -> Method:
        """The static ``forward`` for the method that the user wrote."""
        return self._make(_FORWARD, method=method, uncover=self._uncover, whole=self._whole)

    def make_backward(self, method: Method) -> Method:
        """The static ``backward`` for the method that the user wrote."""
        made: Any = self._make(
            _BACKWARD, arrange=self._arrange, method=method, whole=self._whole, without_hidden=self._without_hidden
        )
        made.__wrapped__ = method  # so that it is found where the source of a backward is asked for
        return made  # type: ignore[no-any-return]

    def needs_by_name(self, ctx: Any) -> dict[str, bool]:
        """Return by name which arguments need a gradient."""
        return dict(zip(self._arguments.names, ctx.needs_input_grad, strict=True))

    def _whole(self, call: PlainCall) -> FunctionCall:
        """The same call as an object that can be asked anything."""
        function, *shapes = call
        return FunctionCall(function, self._arguments.names, shapes, len(shapes))

    def _uncover(self, ctx: Any, call: PlainCall, output: Any) -> Any:
        whole = self._whole(call)
        plain = whole.uncover(output)
        ctx.retrograd_hidden = whole.hidden
        if whole.hidden:
            whole.mark_auxiliary(ctx, plain)
        return plain

    def _without_hidden(self, ctx: Any, call: PlainCall, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        whole = self._whole(call)
        whole.hidden = ctx.retrograd_hidden
        return whole.of_outputs(gradients)

    def _arrange(self, call: PlainCall, returned: Any) -> tuple[Tensor | None, ...]:
        return self._whole(call).arrange_gradients(returned) + NO_GRADIENT

    def _each(self, text: str, between: str = "") -> str:
        """The text once for each argument."""
        return between.join(text.format(i=i, name=repr(name)) for i, name in enumerate(self._arguments.names))

    def _make(self, source: str, **used: Any) -> Method:
        """The function that a source defines, with what it uses beside the builtins."""
        names: dict[str, Any] = {"Tensor": Tensor, "__name__": __name__, **used}
        exec(compile(source.format(**self._texts), self._file, "exec"), names)
        made: Method = names[source[len("\ndef ") : source.index("(")]]
        return uncompiled(made)
