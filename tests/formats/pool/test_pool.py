"""The reference of the pool (formats.pool), read back one entry at a time by the rule that its docstring states."""

import re

import pytest
import torch

from twell_lab import core, formats
from twell_lab.core import InputError
from twell_lab.formats import TILE, WORDS, pool, split_words


def gate_of(tokens, d_ff, dtype=torch.bfloat16, rate=0.02, seed=1):
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(tokens, d_ff, generator=generator) < rate
    return torch.where(keep, 1.0, -1.0).mul(torch.rand(tokens, d_ff, generator=generator) + 0.1).to(dtype)


def read_back(packed, pool_words, dtype, tokens, d_ff):
    """relu(gate) [tokens, d_ff] from words and pool, and the rows that cannot be read."""
    out, lost = torch.zeros(tokens, d_ff, dtype=dtype), torch.zeros(tokens, dtype=torch.bool)
    for row in range(tokens):
        for tile in range(packed.shape[1]):
            group = row // formats.POOL_ROWS
            earlier = range(group * formats.POOL_ROWS, row)
            start = sum(max(0, int(packed[r, tile, 0]) - (WORDS - 1)) for r in earlier)
            count = int(packed[row, tile, 0])
            late = max(0, count - (WORDS - 1))
            if start + late > formats.POOL_WORDS and late:
                lost[row] = True
                continue
            words = torch.cat([packed[row, tile, 1 : 1 + count - late], pool_words[group, tile, start : start + late]])
            value, column = split_words(words, dtype)
            assert (column.diff() > 0).all()
            out[row, tile * TILE + column] = value
    return out, lost


@pytest.mark.parametrize("dtype", pool.POOL_DTYPES)
@pytest.mark.parametrize("tokens, d_ff", [(1, 8), (16, 256), (37, 600), (50, 1000)])
def test_words_and_pool_hold_the_gate(tokens, d_ff, dtype):
    gate = gate_of(tokens, d_ff, dtype)
    gate[:, :40][::5] = 0.5  # every fifth row: 9 values over, up to 36 a group
    gate[tokens // 2, 1] = torch.nan
    packed, words, lost = pool.packed_and_pool(gate)
    back, unread = read_back(packed, words, dtype, tokens, d_ff)
    assert not lost.any() and not unread.any()
    assert torch.equal(back.view(torch.int16), torch.where(gate <= 0, 0, gate).view(torch.int16))


def test_rows_that_reach_past_the_pool_are_lost_and_no_others():
    gate = gate_of(48, 520, rate=0.01)
    gate[3, :256] = 1.0  # 225 over: lost, and what follows in its group too if it needs the pool
    gate[7, 256:296] = 1.0  # another tile: in the pool
    gate[9, :100] = 1.0  # same tile, later: lost
    gate[20, :256], gate[36, :256] = -1.0, -1.0
    gate[20, :95] = 1.0  # 64 over: just in
    gate[36, :96] = 1.0  # 65 over: lost
    packed, words, lost = pool.packed_and_pool(gate)
    assert set(lost.nonzero()[:, 0].tolist()) == {3, 9, 36}
    back, unread = read_back(packed, words, gate.dtype, 48, 520)
    assert torch.equal(unread, lost)
    assert torch.equal(back[~lost], torch.relu(gate)[~lost])


def test_used_words_are_counted():
    gate = gate_of(40, 300, rate=0.3)
    packed, words, _ = pool.packed_and_pool(gate)
    used = pool.pool_used(packed)
    assert used.shape == words.shape[:2] and torch.equal(used, (words != 0).sum(2)) and used.max() == formats.POOL_WORDS


@pytest.mark.parametrize(
    "gate, told",
    [
        (torch.zeros(2, 8), "float32; bfloat16, float16 are accepted"),
        (torch.zeros(8).bfloat16(), r"\[8\]; \[rows, columns\]"),
        (torch.zeros(2, 0).half(), r"\[2, 0\]; .* at least one column"),
    ],
)
def test_other_gates_are_refused(gate, told):
    with pytest.raises(InputError, match=told):
        pool.packed_and_pool(gate)


def test_the_sizes_are_those_of_the_kernels():
    text = (core.kernels_dir() / "twell.cuh").read_text(encoding="utf-8")
    sizes = dict(re.findall(r"#define (POOL\w+) (\d+)", text))
    assert sizes == {
        "POOLED_TILE": str(TILE),
        "POOLED_WORDS": str(WORDS),
        "POOL_ROWS": str(formats.POOL_ROWS),
        "POOL_WORDS": str(formats.POOL_WORDS),
    }
