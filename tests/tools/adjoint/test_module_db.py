"""Torch's own list of modules with sample inputs: every backward agrees, but for two that are known to differ."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from retrograd.core.errors import AdjointError
from retrograd.tools.adjoint.adjoint_check import FAILURES, AdjointRow, Verdict
from retrograd.tools.adjoint.check import check_adjoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import ModuleInfo, module_db

DIFFER = {"nn.CTCLoss"}
"""Its backward takes it for granted that ``log_probs`` come from a log-softmax: it is the adjoint on those alone."""

NAN_GRADIENTS = {"nn.PoissonNLLLoss": "self:input.target"}
"""With ``full=True`` the gradient of a target of zero is NaN, by way of a logarithm that is masked out."""

LONG = {"nn.Transformer", "nn.TransformerDecoderLayer", "nn.TransformerEncoder", "nn.TransformerEncoderLayer"}


def samples(info: ModuleInfo) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    torch.manual_seed(0)
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=True)
    few = inputs[:1] if info.name in LONG else inputs[:: max(1, len(inputs) // 2)]
    for sample in few:
        given = sample.forward_input
        if given is not None:
            model = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).double()
            if is_finite(model(*given.args, **given.kwargs)):  # some samples lie where a loss is not defined
                yield model, given.args, given.kwargs


def is_finite(output: Any) -> bool:
    tensors = [output] if isinstance(output, torch.Tensor) else [each for each in output if torch.is_tensor(each)]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_a_module_of_torch(info: ModuleInfo) -> None:
    for model, args, kwargs in samples(info):
        batch = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments) if kwargs else args
        try:
            check = check_adjoint(model, batch)
        except AdjointError:
            assert not any(parameter.requires_grad for parameter in model.parameters())
            assert not any(torch.is_floating_point(each) and each.numel() for each in args if torch.is_tensor(each))
            continue
        rows = [row for row in check if not is_known(info.name, row)]
        assert any(row.verdict in FAILURES for row in rows) is (info.name in DIFFER), check
        assert {row.verdict for row in rows} <= {Verdict.OK, Verdict.KINK} or info.name in DIFFER, check


def is_known(name: str, row: AdjointRow) -> bool:
    return NAN_GRADIENTS.get(name) == str(row.site) and "numbers are NaN" in row.reason
