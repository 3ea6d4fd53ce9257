"""kernels/few_rows.cuh in the simulator: few rows shared among many blocks, beside float64."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.rows.drawn import gate_of
from tests.ops.rows.pooled import POISON, Pooled, right
from twell_lab import simulator
from twell_lab.cuda.launch import value
from twell_lab.formats import packed_and_pool
from twell_lab.ops import accuracy
from twell_lab.ops.gate_pack import POOLED

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
FILE = Path(__file__).parent / "few_rows.cu"
FEW, RUN_ENTRIES = 24, 512  # of few_rows.cuh: rows that are shared out; entries of a run that a block holds at a time


def share(
    layer: Pooled, rows: list[int], blocks: int = 7, gated: bool = True, step: int = 0, beyond=(), watch="faults"
):
    """y, poisoned but for the rows that were computed. rows: in the order of the list. step: values between two rows of
    a weight. beyond: those that are listed as lost to the pool."""
    (tokens, d_model), columns = layer.x.shape, layer.gate.shape[1]
    packed, pool, _ = packed_and_pool(layer.gate)
    counts = packed[..., 0]
    packed[..., 1:][torch.arange(31) >= counts[..., None]] = POISON
    lost = torch.full((1 + tokens,), POISON, dtype=torch.int32)
    lost[0] = len(rows)
    lost[1 : 1 + len(rows)] = torch.tensor([~row if row in beyond else row for row in rows], dtype=torch.int32)
    lost_x = torch.full_like(layer.x, POISON)
    lost_x[: len(rows)] = layer.x[rows]
    wide = [torch.full((columns, d_model + step), torch.nan, dtype=w.dtype) for w in (layer.up, layer.down_t)]
    for padded, w in zip(wide, (layer.up, layer.down_t)):
        padded[:, :d_model] = w
    parts, y = torch.full((max(blocks, len(rows)), d_model), torch.nan), torch.full_like(layer.x, POISON)
    program = simulator.compile(
        FILE, dict((*value(layer.x.dtype), *POOLED, ("FEW_ROWS", FEW), ("MOST_D_MODEL", d_model)))
    )
    first, first_bias = (wide[0], layer.up_bias) if gated else (None, None)
    weights = first, d_model + step, first_bias, wide[1], d_model + step
    program.launch("sum_runs", blocks, 96, (lost_x, packed, pool, lost, *weights, parts, columns, d_model), watch=watch)
    added = parts, lost, layer.down_bias, layer.start, y, columns, d_model
    program.launch("add_all_runs", blocks, 96, added, watch=watch)
    return y


def check(layer: Pooled, rows: list[int], gated: bool = True, **how) -> torch.Tensor:
    y = share(layer, rows, gated=gated, **how)
    others = torch.ones(len(y), dtype=torch.bool)
    others[rows] = False
    assert (y[others] == torch.full_like(y[0], POISON)).all()
    wide = [None if t is None else t.double() for t in layer]
    exact, dense = (right("gated" if gated else "down", *given)[rows] for given in (wide, layer))
    assert accuracy.worst_row(y[rows], dense, exact)[0] <= 1.0
    return y


def heavy(tokens: int, columns: int, rows: list[int], rate: float, dtype=torch.bfloat16) -> torch.Tensor:
    gate, dense = (gate_of(share, tokens, columns, dtype, seed=9) for share in (0.05, rate))
    gate[rows] = dense[rows]
    return gate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [[0], [39], [5, 33, 16], [16, 0, 32]])
def test_few_rows_of_many_entries(rows, gated, dtype):
    """Tiles that overflow into the pool; a narrow last tile; rows of weights that lie apart."""
    gate = heavy(40, 600, rows, 0.2, dtype)
    layer = Pooled.draw(gate, 264, biases=len(rows) == 1, start=len(rows) > 1)
    packed, _, lost = packed_and_pool(gate)
    assert (packed[rows][..., 0] > 31).any() and not lost[rows].any()
    check(layer, rows, gated, step=8 * len(rows))


def test_rows_that_are_not_finite():
    rows = [3, 17, 30]
    gate = heavy(40, 300, rows, 0.15)
    layer = Pooled.draw(gate, 264)
    layer.x[3, 5], layer.x[17, 200], layer.x[20, 1] = torch.nan, -torch.inf, torch.nan
    y = check(layer, rows)
    assert y[3].isnan().all() and y[17].isnan().all() and y[30].isfinite().all()


def test_a_whole_row_of_an_infinite_x_has_no_silent_neuron():
    layer = Pooled.draw(torch.full((3, 48), 1.0).bfloat16(), 264)
    layer.up.abs_(), layer.down_t.abs_(), layer.x.abs_()
    layer.x[1, 0] = torch.inf
    y = share(layer, [1])
    assert y[1].isposinf().all()


def test_more_entries_than_a_block_holds_and_fewer_than_there_are_blocks():
    gate = heavy(18, 256 * 9 + 8, [4], 0.25)
    layer = Pooled.draw(gate, 72, biases=True, start=True)
    assert (layer.gate[4] > 0).sum() > RUN_ENTRIES
    check(layer, [4], blocks=1)
    gate[4] = -gate[4].abs()
    gate[4, 7] = 1.0
    check(layer, [4], blocks=23)
    gate[4] = -1.0
    check(layer, [4])  # nothing fires


def test_the_order_of_the_list_changes_no_bit():
    rows = [0, 5, 31, 17]
    layer = Pooled.draw(heavy(40, 600, rows, 0.15), 264, biases=True)
    first, *others = (share(layer, each, blocks=13).view(torch.int16) for each in (rows, rows[::-1], [17, 0, 5, 31]))
    assert all(torch.equal(other, first) for other in others)


def test_what_is_left_to_the_dense_product():
    rows = list(range(FEW + 1))
    layer = Pooled.draw(gate_of(0.05, FEW + 3, 40, torch.bfloat16), 8)
    for listed, how in (([], {}), (rows, {"blocks": 40}), (rows[:9], {"blocks": 8}), ([2, 5], {"beyond": [5]})):
        assert (share(layer, listed, **how) == torch.full_like(layer.x, POISON)).all()
    check(layer, rows[:FEW], blocks=FEW)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_rows(data):
    tokens, columns = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 80)) * 8
    d_model, blocks = data.draw(st.sampled_from([8, 72, 264])), data.draw(st.integers(1, 40))  # a build for each width
    many = min(tokens, blocks, FEW)
    rows = data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=many, unique=True))
    gate = heavy(tokens, columns, rows, data.draw(st.floats(0, 0.25)))
    layer = Pooled.draw(gate, d_model, data.draw(st.booleans()), data.draw(st.booleans()))
    lost = packed_and_pool(gate)[2]
    rows = [row for row in rows if not lost[row]]
    if rows:
        check(layer, rows, data.draw(st.booleans()), blocks=blocks, watch=None)
