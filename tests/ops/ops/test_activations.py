"""What an Activation may be, who fires with it, and what `infer` refuses."""

import pytest
import torch
from torch.nn import functional as F

from twell_lab.core import InputError
from twell_lab.ops import inference
from twell_lab.ops.activation import RELU, Activation

inf, nan = torch.inf, torch.nan
CURVES = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", CURVES)
def test_a_curve_keeps_what_is_large_of_either_sign(kind, dtype):
    acts, x = Activation(kind, 0.1), torch.linspace(-6, 6, 97).to(dtype)
    value = CURVES[kind](x)
    assert torch.equal(acts.keeps(x), value.abs() >= 0.1) and (value[acts.keeps(x)] < 0).any()
    assert torch.equal(acts.applied(x), value.masked_fill(value.abs() < 0.1, 0)) and torch.equal(
        acts.dense(x), acts.applied(x)
    )


def test_what_is_not_finite():
    x = torch.tensor([-inf, inf, nan])
    for acts in (RELU, Activation("above", 0.5), *(Activation(kind, 0.5) for kind in CURVES)):
        assert acts.keeps(x).tolist() == [False, True, True]
        silent, large, none = acts.applied(x)
        assert silent == 0 and not large.isfinite() and none.isnan()  # a CPU's gelu of infinity is NaN
        assert acts.dense(x)[0].isnan() == acts.falls_back


def test_a_threshold_counts_as_it_is_rounded():
    acts, bound = Activation("above", 0.1), torch.tensor(0.1).bfloat16()
    assert acts.bound(torch.bfloat16) == bound.item() != acts.bound(torch.float16) != 0.1
    above = torch.nextafter(bound, 2 * bound)
    assert acts.keeps(torch.stack([-above, bound, above])).tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threshold", [0.0, 1e-8, 0.001, 0.3, 0.5003])
def test_every_value_of_16_bits_above_a_threshold_is_itself_and_all_others_are_plus_zero(threshold, dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    acts = Activation("above", threshold)
    expected = torch.where(acts.keeps(every), torch.relu(every), torch.zeros_like(every))
    found, number = acts.applied(every), ~every.isnan()
    assert torch.equal(found[number].view(torch.int16), expected[number].view(torch.int16))
    assert found.dtype == dtype and torch.equal(found.isnan(), ~number)


@pytest.mark.parametrize(
    "acts, gated, told",
    [
        ("silu", True, "acts is a str; an Activation is accepted"),
        (
            Activation("mish", 0.1),
            True,
            "activation is 'mish'; 'relu', 'above', 'silu', 'gelu', 'gelu_tanh' are accepted",
        ),
        (Activation("above", -0.5), True, "threshold is -0.5; a finite number from 0 up is accepted"),
        (Activation("above", nan), True, "threshold is nan; a finite number"),
        (Activation("above", 1), True, "threshold is 1; a finite number"),
        (Activation("relu", 0.5), True, "threshold is 0.5 for a relu; 0 is accepted"),
        (Activation("gelu"), True, "threshold is 0 for gelu; a number above 0 is accepted"),
        (Activation("silu", 0.5, True), True, "both is True for silu; it is accepted for the relu of a gated layer"),
        (Activation(both=True), False, "both is True for relu; it is accepted for the relu of a gated layer"),
    ],
    ids=str,
)
def test_what_is_refused(acts, gated, told):
    x, weight = torch.zeros(2, 8), torch.zeros(5, 8)
    with pytest.raises(InputError, match=told):
        inference.infer(x, weight if gated else None, weight, weight.t(), acts=acts)
