"""The accuracy promise: on rows whose errors are known by hand; and neurons whose sign rounding decides: what the search
for another way of counting them accepts, and how long it takes."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import linear

from twell_lab.ops import accuracy

inf, nan = math.inf, math.nan
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 2.0**-23}  # one ulp of 1.0
U, BELOW, LARGEST = EPS[FP32], 1.0 - 2.0**-24, torch.finfo(FP16).max


def judge(y, dense, exact, dtype=FP32):
    y, dense = (torch.tensor(rows, dtype=torch.float64).to(dtype) for rows in (y, dense))
    return accuracy.worst_row(y, dense, torch.tensor(exact, dtype=torch.float64))


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
    assert accuracy.worst_row(*[torch.empty(0, 4)] * 2, torch.empty(0, 4).double()) == (0.0, -1)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[2, 4\]"):
        accuracy.worst_row(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"dense one \[1, 4\]"):  # it would broadcast
        accuracy.worst_row(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(2, 4))


# ---- neurons in doubt


def layer(tokens, d_model, d_ff, *, off=1e-3, dtype=torch.bfloat16, seed=0):
    """x, gate, up, down with a gate that nearly cancels: every neuron is in doubt."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, gate, up = normal(tokens, d_model), normal(d_ff, d_model), normal(d_ff, d_model)
    half = d_model // 2
    x[:, half:], gate[:, half:] = x[:, :half], -gate[:, :half] * (1 + off * normal(d_ff, 1))
    return [t.to(dtype) for t in (x, gate / d_model**0.5, up / d_model**0.5, normal(d_model, d_ff) / 4)]


def counted(x, gate, up, down, keep):
    """The float64 result if the neurons of `keep` fire, in the working dtype."""
    x, gate, up, down = (t.double() for t in (x, gate, up, down))
    return linear(torch.where(keep, linear(x, gate) * linear(x, up), 0.0), down)


@pytest.mark.parametrize("seed", range(3))
def test_a_row_is_accepted_only_if_one_of_all_ways_explains_it(seed):
    tensors = layer(40, 8, 6, off=0.01, seed=seed)
    exact = accuracy.Exact(*tensors)
    doubtful, dense = exact.doubtful(slice(None), 2.0**-7), exact.y.bfloat16()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(40, 1, generator=generator) * torch.randn(40, 8, generator=generator)
    drawn = counted(*tensors, exact.keep ^ (doubtful & (torch.rand(40, 6, generator=generator) < 0.5)))
    y = (drawn + 0.01 * noise * drawn.norm(dim=1, keepdim=True)).bfloat16()
    best = torch.full((40,), torch.inf, dtype=torch.float64)
    for flipped in itertools.product((False, True), repeat=6):
        way = counted(*tensors, exact.keep ^ (doubtful & torch.tensor(flipped)))
        best = torch.minimum(best, accuracy._ratios(y, way, dense, exact.y))
    ratios = torch.tensor(
        [accuracy.Exact(tensors[0][[i]], *tensors[1:]).judge(y[[i]], dense[[i]]).ratio for i in range(40)]
    )
    assert (best > 1).sum() >= 5 and (best <= 1).sum() >= 5
    assert (best[ratios <= 1] <= 1).all() and (ratios[best > 1] >= best[best > 1] * 0.999).all()
    assert (ratios <= 1).sum() >= 0.8 * (best <= 1).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_neurons_that_are_counted_the_other_way_are_found(dtype):
    tensors = layer(150, 64, 300, off={torch.bfloat16: 1e-3, torch.float32: 1e-6}[dtype], dtype=dtype)
    exact = accuracy.Exact(*tensors)
    doubtful = exact.doubtful(slice(None), torch.finfo(dtype).eps)
    dense = exact.y.to(dtype)
    few = doubtful & (torch.rand(doubtful.shape, generator=torch.Generator().manual_seed(1)) < 0.01)
    y = counted(*tensors, exact.keep ^ few).to(dtype)
    failed = int((few.any(1) & ~(y == dense).all(1)).sum())
    verdict = exact.judge(y, dense)
    assert failed > 50 and verdict.ratio <= 1.0 and 0 < verdict.excused <= failed


def test_a_wrong_result_of_which_every_neuron_is_in_doubt_is_refused():
    tensors = layer(200, 256, 1500)
    exact = accuracy.Exact(*tensors)
    assert exact.doubtful(slice(None), 2.0**-7).all()
    dense = exact.y.bfloat16()
    verdict = exact.judge(dense * 1.05, dense)
    assert verdict.ratio > 1.0 and verdict.excused == 0


def test_the_row_of_a_broken_promise_is_one_that_no_way_explains():
    """Another way of counting explains row 3, whose error was larger before; none explains row 5."""
    tensors = layer(8, 64, 300)
    exact = accuracy.Exact(*tensors)
    dense, other = exact.y.bfloat16(), exact.keep.clone()
    other[3, exact._value[3].abs().argmax()] ^= True
    y = counted(*tensors, other).bfloat16()
    assert exact.judge(y, dense).excused == 1
    y[5] *= 1.05
    ratios = [accuracy.worst_row(y[[i]], dense[[i]], exact.y[[i]])[0] for i in (3, 5)]
    assert ratios[0] > ratios[1] > 1
    verdict = exact.judge(y, dense)
    assert verdict.ratio > 1.0 and verdict.row == 5 and verdict.excused == 1
