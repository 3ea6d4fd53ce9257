"""The reference itself, against torch's dense layer where that is exact."""

import math

import pytest
import torch
from torch.nn.functional import linear

from twell_lab import formats
from twell_lab.ops import reference

inf, nan = math.inf, math.nan


def drawn(tokens=3, d_model=4, d_ff=6, seed=0, biases=True):
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x, gate, up, down = normal(tokens, d_model), normal(d_ff, d_model), normal(d_ff, d_model), normal(d_model, d_ff)
    return x, gate, up, down, *((normal(d_ff), normal(d_ff), normal(d_model)) if biases else (None, None, None))


def dense_gated(x, gate, up, down, gate_bias, up_bias, down_bias):
    return linear(torch.relu(linear(x, gate, gate_bias)) * linear(x, up, up_bias), down, down_bias)


def test_what_fires_and_what_is_given_back():
    gate = torch.tensor([1.0, 1e-45, 0.0, -0.0, -1e-45, -1.0, inf, -inf, nan])
    assert formats.fires(gate).tolist() == [True, True, False, False, False, False, True, False, True]
    given = reference.relu(gate)
    assert given[:8].tolist() == [1.0, gate[1].item(), 0, 0, 0, 0, inf, 0] and math.isnan(given[8])
    assert not torch.signbit(given[2:6]).any()


@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test_rows_that_are_not_finite_follow_the_dense_layer(bad):
    tensors = drawn(tokens=4, d_ff=40)
    x = tensors[0]
    x[1, 2] = bad
    x[3] = bad
    assert torch.allclose(reference.gated_ffn(*tensors), dense_gated(*tensors), rtol=1e-12, equal_nan=True)
    _, _, up, down, _, up_bias, down_bias = tensors
    dense = linear(torch.relu(linear(x, up, up_bias)), down, down_bias)
    assert torch.allclose(reference.plain_ffn(x, up, down, up_bias, down_bias), dense, rtol=1e-12, equal_nan=True)


def test_a_row_with_an_infinity_in_which_every_neuron_fires():
    x, gate, up, down, *_ = drawn(tokens=2, biases=False)
    gate, x[1, 0] = gate.abs(), inf
    x[1, 1:] = 1.0
    assert not reference.spoilt(x, formats.fires(linear(x, gate))).any()
    tensors = (x, gate, up, down, None, None, None)
    y, dense = reference.gated_ffn(*tensors), dense_gated(*tensors)
    assert torch.equal(y[1].isnan(), dense[1].isnan()) and torch.equal(y[1].isinf(), dense[1].isinf())


def test_an_overflow_in_a_silent_neuron_does_no_harm():
    x = torch.tensor([[60_000.0, 1.0]], dtype=torch.float16)
    gate = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float16)  # the first fires, the second does not
    up = torch.tensor([[0.0, 2.0], [30.0, 0.0]], dtype=torch.float16)  # 30 * 60,000 overflows fp16
    down = torch.ones(2, 2, dtype=torch.float16)
    assert dense_gated(x, gate, up, down, None, None, None).isnan().all()
    assert reference.gated_ffn(x, gate, up, down).tolist() == [[2.0, 2.0]]
