"""A warning of torch's that stands at a line of this module is an error; the filters are the program's alone."""

import sys
import warnings

import torch
from torch import nn

warnings.filterwarnings("error", category=UserWarning, module="__main__")
model = nn.Linear(2, 2)
model.register_full_backward_hook(lambda module, to_inputs, to_outputs: None)
for _ in range(3):
    try:
        model(torch.ones(1, 2)).sum().backward()
    except UserWarning as error:
        print(str(error).split(".")[0], sys.exc_info()[2].tb_lineno)  # type: ignore[union-attr]
print([each for each in warnings.filters if each[2].__name__ == "RetrogradWarning"])
