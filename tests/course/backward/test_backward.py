"""What notebook 11 computes of the backward pass: the same gradients, and what is kept."""

import torch

from twell_lab.course.backward import data as backward
from twell_lab.ops.reference import GatedFeedForward

CASE = backward.drawn()
FIRED = CASE.x @ CASE.gate.T > 0


def test_what_torch_saves_of_a_dense_layer_is_listed():
    layer = GatedFeedForward(16, 48)
    with backward.saved_tensors(layer) as saved:
        y = layer(torch.randn(10, 16))
    assert [tensor["shape"] for tensor in saved] == [[10, 16], [10, 48], [10, 48], [10, 48]]
    assert [tensor["bytes"] for tensor in saved] == [4 * 10 * 16, *[4 * 10 * 48] * 3]
    y.sum().backward()  # the hooks hand back what they were given
    assert layer.up_proj.weight.grad.abs().sum() > 0
