"""A call is bound as Python binds it: ``inspect.signature`` is the oracle."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from retrograd.tools.functions.arguments import Arguments
from retrograd.tools.functions.function import Function


def plain(self: Any, ctx: Any, a: Any, b: Any, c: Any = 3, d: Any = 4) -> None: ...


def mixed(self: Any, ctx: Any, a: Any, /, b: Any = 2, *rest: Any, c: Any = 3, **others: Any) -> None: ...


def keyword_only(self: Any, ctx: Any, a: Any, *, b: Any, c: Any = 3) -> None: ...


@pytest.mark.parametrize("forward", [plain, mixed, keyword_only])
@given(args=st.lists(st.integers(), max_size=6), kwargs=st.dictionaries(st.sampled_from("abcdex"), st.integers()))
def test_values_are_those_that_python_would_bind(forward: Any, args: list[int], kwargs: dict[str, int]) -> None:
    arguments = Arguments("F", forward, has_ctx=True, auxiliary=())
    try:
        bound = inspect.signature(forward).bind(None, None, *args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError, match=r"^F: "):
            arguments.bind(tuple(args), kwargs, None, ())
        return
    if forward is mixed and "a" in kwargs:  # which Python lets pass, and which gradients by name could not tell apart
        with pytest.raises(TypeError, match="multiple values for argument 'a'"):
            arguments.bind(tuple(args), kwargs, None, ())
        return
    bound.apply_defaults()
    values, names, positions = arguments.bind(tuple(args), kwargs, None, ())
    assert values == (*bound.args[2:], *bound.kwargs.values())
    assert positions == len(bound.args) - 2
    assert names[positions:] == tuple(bound.kwargs)
    assert len(names) == len(values) == len(set(names))
    flat = dict(zip(names, values, strict=True))
    for name, value in bound.arguments.items():
        if name == "rest":
            assert [flat[f"rest[{index}]"] for index in range(len(value))] == list(value)
        elif name == "others":
            assert {key: flat[key] for key in value} == value
        elif name not in ("self", "ctx"):
            assert flat[name] == value


class Holder:
    def __init__(self, **tensors: Tensor | None) -> None:
        vars(self).update(tensors)


@pytest.mark.parametrize("forward", [plain, mixed, keyword_only])
def test_what_is_left_out_is_what_the_holder_has(forward: Any) -> None:
    arguments = Arguments("F", forward, has_ctx=True, auxiliary=())
    own = torch.ones(2)
    held = Holder(b=own, c=None)
    values, names, _ = arguments.bind((1,), {}, held, ("b", "c"))
    flat = dict(zip(names, values, strict=True))
    assert flat["b"] is own
    assert flat["c"] == 3
    values, names, _ = arguments.bind((1,), {"b": 7}, held, ("b", "c"))
    assert dict(zip(names, values, strict=True))["b"] == 7


def test_a_held_tensor_does_not_fill_an_argument_given_by_position() -> None:
    for forward in (plain, mixed):
        arguments = Arguments("F", forward, has_ctx=True, auxiliary=())
        assert arguments.bind((1, 2), {}, Holder(b=torch.ones(2)), ("b",))[0][:2] == (1, 2)


def test_a_wrong_call_names_the_function() -> None:
    class Two(Function):
        def forward(self, ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x * weight

    for call, text in (
        (lambda f: f(1), "Two: missing a required argument: 'weight'"),
        (lambda f: f(1, 2, 3), "Two: too many positional arguments"),
        (lambda f: f(1, 2, wieght=3), "Two: got an unexpected keyword argument 'wieght'"),
        (lambda f: f(1, 2, weight=3), "Two: multiple values for argument 'weight'"),
    ):
        with pytest.raises(TypeError, match=text):
            call(Two())
