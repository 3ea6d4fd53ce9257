"""The accuracy promise on rows whose errors are known by hand."""

import math

import pytest
import torch

from twell_lab.ops.accuracy import worst_row

inf, nan = math.inf, math.nan
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 2.0**-23}  # one ulp of 1.0
U, BELOW, LARGEST = EPS[FP32], 1.0 - 2.0**-24, torch.finfo(FP16).max


def judge(y, dense, exact, dtype=FP32):
    y, dense = (torch.tensor(rows, dtype=torch.float64).to(dtype) for rows in (y, dense))
    return worst_row(y, dense, torch.tensor(exact, dtype=torch.float64))


ROWS = [  # y, dense, exact, dtype, error over what is allowed
    *(([1.0, 0.25, ulps * EPS[d]], [1.0, 0.25, 0], [1.0, 0.25, 0], d, ulps) for d in EPS for ulps in (0.0, 0.5, 2.0)),
    # twice the dense error and an ulp; norms over the row
    *(([1.0, ulps * U], [1.0, 3 * U], [1.0, 0.0], FP32, ratio) for ulps, ratio in ((7, 1.0), (14, 2.0), (3.5, 0.5))),
    ([1.0, 3 * U, 4 * U], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], FP32, 5.0),
    # 1.0 sits below a step twice as wide as the one beneath it; 0.999 does not
    ([BELOW], [1.0], [1.0], FP32, 0.5),
    ([1.0], [BELOW], [BELOW], FP32, 1.0),
    ([0.0, -0.0], [0.0, 0.0], [0.0, 0.0], FP32, 0.0),
    # what is not finite where the exact value is; the dense layer's overflow is no excuse for one's own
    *(([1.0, wrong], [1.0, beside], [1.0, 2.0], FP32, inf) for wrong in (nan, inf, -inf) for beside in (2.0, wrong)),
    # where the exact value is not finite it must be met exactly, and hides no error beside it
    *(
        ([1.0, y], [1.0, 0.0], [1.0, exact], FP32, 0.0 if y == exact or y != y and exact != exact else inf)
        for y in (nan, inf, -inf, 3.0)
        for exact in (nan, inf, -inf)
    ),
    ([1.0 + 8 * U, nan], [1.0, nan], [1.0, nan], FP32, 8.0),
    ([1.0, 2 * EPS[FP16]], [1.0, inf], [1.0, 0.0], FP16, 2.0),
    # fp16 ends at 65,504
    ([inf, 1.0], [inf, 1.0], [70_000.0, 1.0], FP16, 0.0),
    ([LARGEST, 1.0], [inf, 1.0], [70_000.0, 1.0], FP16, inf),
    ([-inf, 1.0], [inf, 1.0], [70_000.0, 1.0], FP16, inf),
    ([inf, 1.0], [inf, 1.0], [70_000.0, 1.0], BF16, inf),
    ([LARGEST], [LARGEST], [LARGEST], FP16, 0.0),
]


@pytest.mark.parametrize("y, dense, exact, dtype, ratio", ROWS)
def test_a_row(y, dense, exact, dtype, ratio):
    assert judge([y], [dense], [exact], dtype) == (pytest.approx(ratio), 0)


def test_the_worst_row_is_named_and_rows_do_not_excuse_each_other():
    dense = exact = [[1.0, 0.0], [1024.0, 0.0], [1.0, 0.0]]
    assert judge([[1.0, U], [1024.0, 100 * U], [1.0, 3 * U]], dense, exact) == (pytest.approx(3.0), 2)
    assert judge([[0.0, 1e-30]], [[0.0, 0.0]], [[0.0, 0.0]])[0] > 1e6  # a row of zeros must be zeros
    assert worst_row(*[torch.empty(0, 4)] * 2, torch.empty(0, 4).double()) == (0.0, -1)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[2, 4\]"):
        worst_row(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"dense one \[1, 4\]"):  # it would broadcast
        worst_row(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(2, 4))
