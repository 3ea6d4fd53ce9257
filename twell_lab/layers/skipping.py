"""A linear layer that reads the weights of nonzero inputs alone, for few tokens on a GPU: a zero spares its column of
the weight, which stays the model's own parameter, stored by columns. Zeros come from what stands before, such as the
thresholds of TEAL (Liu et al., arXiv 2408.14690) on the inputs of an attention's projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import linear

from ..ops import checks, kept_inputs
from . import storage


class SkippingLinear(nn.Linear):
    """A torch.nn.Linear whose zero inputs cost nothing where the kernel `kept_inputs` runs; made by `skip`."""

    def forward(self, input: Tensor) -> Tensor:
        compiling, few = is_dynamo_compiling(), input.is_cuda and 0 < input.shape[:-1].numel() <= kept_inputs.FEW
        plain = few and (compiling or type(input) is Tensor and checks.plain_eager())
        if not plain or input.dtype != self.weight.dtype or checks.needs_gradient(input, self.weight, self.bias):
            return linear(input, self.weight, self.bias)
        if compiling:
            return torch.ops.twell_lab.kept_inputs(input, self.weight, None, self.bias, None, 0.0, None)
        return kept_inputs.operator(input, self.weight, None, self.bias)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        storage.save_contiguous(self, destination, prefix, {})


def skip(module: nn.Linear) -> None:
    """Have a linear layer skip its zero inputs, in place: it stays the same module with the same parameters. One that
    the kernel does not take, or whose weight has to lie as it does, is left as it is."""
    kernel_takes = type(module) is nn.Linear and not (module.in_features % 8 or module.out_features % 8)
    if kernel_takes and not storage.rewrite([module], {"gate": storage.COLUMNS}):
        module.__class__ = SkippingLinear


def stop_skipping(module: nn.Module) -> None:
    """Take `skip` back; another module is left as it is."""
    if type(module) is SkippingLinear:
        module.__class__ = nn.Linear
        storage.restore([module], None)
