"""What the notebook on packing computes: against the formats themselves, and against counting by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twell_lab.course.packing import data as packing
from twell_lab.formats import TwELL


def gate(rows: int = 5, columns: int = 300) -> torch.Tensor:
    torch.manual_seed(1)
    return (torch.randn(rows, columns) - 0.5).to(torch.bfloat16)


def test_same_bits_tells_zeros_apart_and_takes_nan_for_itself():
    a = torch.tensor([torch.nan, 0.0, 1.0])
    assert packing.same_bits(a, a.clone())
    assert not packing.same_bits(a, torch.tensor([torch.nan, -0.0, 1.0]))
    assert not packing.same_bits(a, a.double()) and not packing.same_bits(a, a[:2])


def test_the_toy_loses_exactly_what_the_tail_holds():
    x = gate()
    packed = TwELL.from_gate(x, 64, 8)
    lost = (packing.toy_unpack(x, 64, 8) != x.relu()).sum(1)
    assert lost.tolist() == packed.tail_pointer.diff().tolist() and lost.sum() > 0
    sparse = packing.one_tile(31)
    assert packing.same_bits(packing.toy_unpack(sparse), sparse.relu())


def test_geometries_are_what_packing_gives():
    x = gate()
    table = packing.geometries(x, [64, 256], [8, 65, 66])
    assert [(row["tile"], row["words"]) for row in table] == [(64, 8), (64, 65), (256, 8), (256, 65), (256, 66)]
    packed = TwELL.from_gate(x, 64, 8)
    row = table[0]
    assert row["bytes"] == packed.nbytes / 5 and row["tail"] == packed.tail_value.numel() / 5
    assert row["overflow"] == len(packed.overflow_rows) / 5
    assert row["slots_used"] == pytest.approx((packed.nnz - packed.tail_value.numel()) / (5 * 5 * 7))
    assert table[1]["overflow"] == 0  # a slot for every column


def test_the_smallest_geometry_keeps_to_the_overflow_allowed():
    table = [{"bytes": 10, "overflow": 0.5}, {"bytes": 20, "overflow": 0.01}, {"bytes": 30, "overflow": 0.0}]
    assert packing.smallest(table, 0.01)["bytes"] == 20
    assert packing.smallest(table, 1.0)["bytes"] == 10
    assert packing.smallest(table[:1], 0.1) is None


@given(st.integers(0, 2**32 - 1))
def test_a_ballot_gives_each_lane_its_place_in_line(bits):
    fires = torch.tensor([bool(bits >> lane & 1) for lane in range(32)])
    ballot, slots = packing.warp_slots(fires)
    assert ballot == bits
    assert [slots[lane] for lane in range(32) if fires[lane]] == list(range(1, bits.bit_count() + 1))


def test_a_view_holds_the_row_as_packed():
    x = gate()
    view = packing.view(x, row=2, part=4, tile=64, words=5)
    packed = TwELL.from_gate(x[2:3], 64, 5)
    assert view["counts"] == packed.counts[0].tolist() and view["nnz"] == packed.nnz
    assert view["width"] == 300 - 4 * 64 == len(view["columns"])
    assert view["tail_row"] == packed.tail_value.numel() and view["bytes"] == packed.nbytes
    assert [value for value, _ in view["columns"]] == x[2, 256:].relu().tolist()
    in_words, in_tail = (
        [(value, column) for column, (value, sort) in enumerate(view["columns"]) if sort == wanted]
        for wanted in (packing.IN_WORDS, packing.IN_TAIL)
    )
    assert view["entries"] == in_words and view["tail"] == [(value, 256 + column) for value, column in in_tail]
    assert len(view["tail"]) == view["counts"][4] - 4 > 0 and view["lost"] == 0


def test_a_threshold_takes_values_and_says_what_that_costs():
    x = torch.tensor([[3.0, -1.0, 4.0, torch.nan]], dtype=torch.float32)
    view = packing.view(x[:, :3], tile=3, words=4, threshold=3.5)
    assert [sort for _, sort in view["columns"]] == [packing.BELOW, packing.SILENT, packing.IN_WORDS]
    assert view["lost"] == pytest.approx(3 / 5) and view["nnz"] == 1
    assert packing.view(x, tile=4, words=4, threshold=9.0)["nnz"] == 1  # NaN is kept, and its norm is no number
