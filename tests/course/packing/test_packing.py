"""What the notebook on packing computes: against the formats themselves, and against counting by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from twell_lab.course.packing import data as packing
from twell_lab.course.packing.figures import IN_WORDS, SILENT, tile_view
from twell_lab.formats import TwELL


def gate(rows: int = 5, columns: int = 300) -> torch.Tensor:
    torch.manual_seed(1)
    return (torch.randn(rows, columns) - 0.5).to(torch.bfloat16)


def test_the_toy_loses_exactly_what_the_tail_holds():
    x = gate()
    packed = TwELL.from_gate(x, 64, 8)
    lost = (packing.toy_unpack(x, 64, 8) != x.relu()).sum(1)
    assert lost.tolist() == packed.tail_pointer.diff().tolist() and lost.sum() > 0
    sparse = packing.one_tile(31)
    assert packing.same_bits(packing.toy_unpack(sparse), sparse.relu())


@given(st.integers(0, 2**32 - 1))
def test_a_ballot_gives_each_lane_its_place_in_line(bits):
    fires = torch.tensor([bool(bits >> lane & 1) for lane in range(32)])
    ballot, slots = packing.warp_slots(fires)
    assert ballot == bits
    assert [slots[lane] for lane in range(32) if fires[lane]] == list(range(1, bits.bit_count() + 1))


def test_the_tile_is_drawn_as_packed():
    x = gate()
    packed = TwELL.from_gate(x[2:3], 64, 5)
    figure = tile_view(packed, row=2, part=4)
    in_words, in_tail, columns, words, tail = figure.data
    assert (sum(in_words.y), sum(in_tail.y)) == (packed.nnz - packed.tail_value.numel(), packed.tail_value.numel())
    sorts = [sort for line in columns.z for sort in line if sort is not None]
    kept = (x[2, 256:] > 0).tolist()
    assert [sort != SILENT for sort in sorts] == kept and sorts.count(IN_WORDS) == 4 < sum(kept)
    texts = [text for line in words.text for text in line if text]
    assert texts[0] == f"<b>{sum(kept)}</b>"
    texts = texts[1:] + [text for line in tail.text for text in line if text]
    places = [int(text.partition("<br>")[0]) for text in texts]
    first = [place for place, fires in enumerate(kept) if fires]
    assert places == first[:4] + [256 + place for place in first[4:]]
