"""What a tile goes through: the layout held against the kernel's own code, the words against the library's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twell_lab import formats, simulator
from twell_lab.core import InputError
from twell_lab.course.hopper import tile


def test_the_sizes_are_those_that_the_kernel_needs():
    size = tile.sizes()
    assert (size.rows, size.columns, size.threads) == (
        64 * size.consumers,
        formats.twell.TILE,
        128 * (size.consumers + 1),
    )
    assert size.stage == 2 * size.depth * (size.rows + size.columns) and [tile.sizes(v).cluster for v in (1, 2, 3)] == [
        1,
        2,
        2,
    ]
    kept = size.shared - size.stages * size.stage
    assert tile.stages_that_fit(size.rows, size.columns, size.depth, 227 * 1024, kept) == size.stages
    assert tile.stages_that_fit(8, 8, 8, 100, 200) == 0
    with pytest.raises(InputError, match="version is 4"):
        tile.sizes(4)


def test_every_sum_has_one_place_and_every_register_one_sum():
    for columns in (8, 64, 256):
        warp, lane, register = tile.sums(columns)
        places = {*zip(*(each.flatten().tolist() for each in (warp, lane, register)))}
        assert places == {(w, i, d) for w in range(4) for i in range(32) for d in range(columns // 2)}
    for wrong in (0, 12, 264):
        with pytest.raises(InputError, match=f"columns is {wrong};"):
            tile.sums(wrong)


@given(st.integers(0, 2**31), st.sampled_from([-3.0, -1.5, 0.0, 3.0]), st.sampled_from([torch.bfloat16, torch.float16]))
def test_a_row_is_packed_as_the_library_packs_it(seed, shift, dtype):
    gate = (torch.randn(256, generator=torch.Generator().manual_seed(seed)) + shift).to(dtype)
    gate[seed % 256], gate[seed % 251] = -0.0, torch.nan
    packed = tile.pack_row(gate)
    assert packed.words == formats.TwELL.from_gate(gate[None]).packed[0, 0, : len(packed.words)].tolist()
    assert packed.words[0] == sum(map(len, packed.held)) and len(packed.words) == 1 + min(31, packed.words[0])
    assert packed.before == [sum(map(len, packed.held[:q])) for q in range(4)]


@pytest.mark.parametrize("beside", [False, True])
def test_nobody_works_on_a_stage_that_is_not_theirs(beside):
    found = tile.schedule(beside, tiles=3, steps=8)
    fills, uses, packs = (
        [part for part in found if part["who"] == who] for who in (tile.PRODUCER, tile.TENSOR, tile.PACKING)
    )
    assert len(fills) == len(uses) == 24
    for i, (fill, use) in enumerate(zip(fills, uses)):
        assert fill["stage"] == use["stage"] and use["start"] >= fill["end"]
        assert i < 4 or fill["start"] >= uses[i - 4]["end"]
    for line in (fills, uses):
        assert all(after["start"] >= before["end"] for before, after in zip(line, line[1:]))
    assert sum(part["end"] - part["start"] for part in packs) == pytest.approx(3)
    for part in packs:
        busy = any(use["start"] < part["end"] and part["start"] < use["end"] for use in uses)
        assert busy == (beside and part["tile"] < 2)


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lost_rows_are_listed_and_the_others_right(dtype):
    counts = [12, 40, 9, 31, 0, 33, 18, 75, 22, 30, 52, 8, 31, 14, 36, 20]
    lost, error = tile.overflow(counts, dtype)
    assert lost == [10, 14] and error < 0.01
    assert tile.overflow([0] * 15 + [256], dtype)[0] == [15]
