"""What a tile goes through: the layout held against the kernel's own code, the words against the library's."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twell_lab import core, formats, simulator
from twell_lab.core import InputError
from twell_lab.course.hopper import tile
from twell_lab.formats import packed_and_pool

KERNEL = (core.kernels_dir() / "sm90_gate_pack.cu").read_text(encoding="utf-8")
PTX = (core.kernels_dir() / "ptx_sm90.cuh").read_text(encoding="utf-8")


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


def test_pairs_of_blocks_fetch_all_of_x_and_half_of_the_weights():
    alone, pairs = (tile.l2_bytes(16384, 2048, 5632, cluster) for cluster in (1, 2))
    assert alone == 2816 * 2 * 2048 * 384 and pairs * 3 == alone * 2


def test_every_sum_has_one_place_and_every_register_one_sum():
    for columns in (8, 64, 256):
        warp, lane, register = tile.sums(columns)
        places = {*zip(*(each.flatten().tolist() for each in (warp, lane, register)))}
        assert places == {(w, i, d) for w in range(4) for i in range(32) for d in range(columns // 2)}
    for wrong in (0, 12, 264):
        with pytest.raises(InputError, match=f"columns is {wrong};"):
            tile.sums(wrong)


def test_the_layout_is_what_the_header_of_the_instructions_says():
    text = PTX[PTX.index("// d [64][256] =") : PTX.index("wgmma_64x256x16(")].replace("//", "")
    text = " ".join(text.split())
    row, column = re.search(r"is row (.+?), column (.+?)\.", text).groups()
    held = tile.sums()
    for warp, lane, j, r, e in ((0, 0, 0, 0, 0), (3, 31, 31, 1, 1), (1, 13, 7, 1, 0), (2, 6, 20, 0, 1)):
        known = {"warp": warp, "lane": lane, "j": j, "r": r, "e": e}
        at = tuple(value_of(each.replace("8 r", "8 * r").replace("8 j", "8 * j"), known) for each in (row, column))
        assert tuple(int(each[at]) for each in held) == (warp, lane, 4 * j + 2 * r + e)


def value_of(expression: str, known: dict) -> int:
    """An expression of C over whole numbers."""
    return eval(re.sub(r"(?<!/)/(?!/)", "//", expression), {}, known)


def test_the_layout_and_the_order_are_what_the_kernel_assumes():
    """`round_tile` makes pairs of registers, and `store_dense` says which row and neuron each of them is."""
    first, second = re.search(r": round_pair\(d\[(.+?)\], d\[(.+?)\]\);", KERNEL).groups()
    line = re.search(r"row = p\.row0 \+ (.+?), in = (.+?), c = (.+?);", KERNEL).groups()
    pair = re.search(r"value_of_bits\(p\.v\[(.+?)\]\[(.+?)\] >> (.+?) \* 16", KERNEL).groups()
    warp, lane, register = tile.sums()
    place = {(int(lane[r, c]), int(register[r, c])): (r, c) for r in range(16) for c in range(256)}  # of warp 0
    for of_lane in (0, 1, 5, 30, 31):
        for i in range(128):
            known = {"lane": of_lane, "i": i, "span": 64}
            known["in"] = value_of(line[1], known)
            row, neuron = (
                value_of(line[0], known),
                value_of(line[2].replace("in", "inside"), {**known, "inside": known["in"]}),
            )
            r, j, e = (value_of(each.replace("in", "inside"), {**known, "inside": known["in"]}) for each in pair)
            at = value_of((first, second)[e], {"j": j, "r": r})
            assert place[of_lane, at][0] == row and tile.neuron_at(place[of_lane, at][1]) == neuron


def test_a_tensor_map_reads_the_weights_in_this_order():
    order = torch.tensor([tile.neuron_at(place) for place in range(256)])
    assert torch.equal(torch.arange(256).view(4, 32, 2).transpose(0, 1).flatten(), order)
    lanes = order[tile.sums()[1][0].argsort(stable=True)].view(4, 64)
    assert torch.equal(lanes, torch.arange(256).view(4, 64))


@given(st.integers(0, 2**31), st.sampled_from([-3.0, -1.5, 0.0, 3.0]), st.sampled_from([torch.bfloat16, torch.float16]))
def test_a_row_is_packed_as_the_library_packs_it(seed, shift, dtype):
    gate = (torch.randn(256, generator=torch.Generator().manual_seed(seed)) + shift).to(dtype)
    gate[seed % 256], gate[seed % 251] = -0.0, torch.nan
    packed = tile.pack_row(gate)
    assert packed.words == formats.TwELL.from_gate(gate[None]).packed[0, 0, : len(packed.words)].tolist()
    assert packed.words[0] == sum(map(len, packed.held)) and len(packed.words) == 1 + min(31, packed.words[0])
    assert packed.before == [sum(map(len, packed.held[:q])) for q in range(4)]


@pytest.mark.parametrize("wrong", [torch.zeros(255, dtype=torch.bfloat16), torch.zeros(256)])
def test_another_row_is_refused(wrong):
    with pytest.raises(InputError, match=r"16-bit values \[256\]"):
        tile.pack_row(wrong)


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


def test_packing_beside_saves_the_packing_of_all_tiles_but_the_last():
    ends = [max(part["end"] for part in tile.schedule(beside, tiles=5, pack=2)) for beside in (False, True)]
    assert ends[0] - ends[1] == pytest.approx(4 * 2)


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lost_rows_are_listed_and_the_others_right(dtype):
    counts = [12, 40, 9, 31, 0, 33, 18, 75, 22, 30, 52, 8, 31, 14, 36, 20]
    lost, error = tile.overflow(counts, dtype)
    assert lost == [10, 14] and error < 0.01
    assert tile.overflow([0] * 15 + [256], dtype)[0] == [15]


@pytest.mark.parametrize("counts", [[1] * 15, [257] + [0] * 15])
def test_counts_that_are_no_group_are_refused(counts):
    with pytest.raises(InputError, match="counts is"):
        tile.overflow(counts, torch.bfloat16)


def test_the_lost_rows_are_those_of_the_reference():
    gate = torch.full((16, 256), -1.0, dtype=torch.bfloat16)
    gate[3, :40], gate[5, :90] = 1, 1
    assert packed_and_pool(gate)[2].nonzero().flatten().tolist() == [5]
