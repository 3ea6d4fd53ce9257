"""Every format, made and read back bit for bit, against plain Python integers and lists."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import twell_lab as tl
from tests.formats.pools import pool_used
from twell_lab.core import InputError
from twell_lab.formats import (
    COO,
    CSR,
    ELL,
    POOL_ROWS,
    POOL_WORDS,
    TILE,
    WORDS,
    Hybrid,
    TwELL,
    as_tensor,
    packed_and_pool,
    split_words,
    word_dtype,
)

BITS = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 32, torch.float64: 64}
INTEGER = {16: torch.int16, 32: torch.int32, 64: torch.int64}
# Exponent and fraction widths: enough to name every special value of a dtype by its bits.
FIELDS = {torch.bfloat16: (8, 7), torch.float16: (5, 10), torch.float32: (8, 23), torch.float64: (11, 52)}
PACKABLE = (torch.bfloat16, torch.float16, torch.float32)
CLASSICS = {
    "COO": COO.from_dense,
    "CSR": CSR.from_dense,
    "ELL": ELL.from_dense,
    "Hybrid": Hybrid.from_dense,
    "Hybrid of limit 1": lambda x: Hybrid.from_dense(x, limit=1),
}
MATRICES = {**CLASSICS, "TwELL": TwELL.from_dense, "TwELL in tiles of 5": lambda x: TwELL.from_dense(x, 5, 3)}
MAKERS = {**MATRICES, "TwELL of a gate": TwELL.from_gate, "pack": tl.pack}


def from_bits(rows, dtype, width):
    bits = BITS[dtype]
    flat = [b - (1 << bits) if b >> (bits - 1) else b for row in rows for b in row]
    return torch.tensor(flat, dtype=INTEGER[bits]).view(dtype).reshape(len(rows), width)


def to_bits(x):
    bits = BITS[x.dtype]
    return [[b % (1 << bits) for b in row] for row in x.contiguous().view(INTEGER[bits]).tolist()]


def special_bits(dtype):
    """Bit patterns of zeros, infinities, NaNs with payloads and signs, denormals and the extremes."""
    exponent, fraction = FIELDS[dtype]
    sign, infinite = 1 << (exponent + fraction), ((1 << exponent) - 1) << fraction
    ends = [0, 1, (1 << fraction) - 1, 1 << fraction, infinite - 1, infinite, infinite + 1]
    positive = [*ends, infinite | 1 << (fraction - 1), infinite | ((1 << fraction) - 1)]
    return positive + [sign | p for p in positive]


def stored(bits, dtype):
    """Whether a value is not zero, from the bits alone."""
    return bits % (1 << (BITS[dtype] - 1)) != 0


def fires(bits, dtype):
    """`not (value <= 0)`, from the bits alone."""
    exponent, fraction = FIELDS[dtype]
    is_nan = bits % (1 << (exponent + fraction)) > ((1 << exponent) - 1) << fraction
    return is_nan or stored(bits, dtype) and not bits >> (BITS[dtype] - 1)


@st.composite
def matrices(draw, dtypes=PACKABLE):
    """(matrix, its bits): any shape, mostly zeros, and values of every kind."""
    dtype = draw(st.sampled_from(dtypes))
    rows, width = draw(st.integers(0, 4)), draw(st.integers(1, 40))
    special = st.sampled_from(special_bits(dtype))
    anything = st.integers(0, (1 << BITS[dtype]) - 1)
    value = draw(st.sampled_from([st.one_of(st.just(0), special, anything), anything, special]))
    bits = draw(st.lists(st.lists(value, min_size=width, max_size=width), min_size=rows, max_size=rows))
    return from_bits(bits, dtype, width), bits


def ordinary(rows, width, dtype=torch.bfloat16, density=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    return torch.where(torch.rand(rows, width, generator=generator) < density, x, 0).to(dtype)


@pytest.mark.parametrize("name", CLASSICS)
@given(drawn=matrices(dtypes=tuple(BITS)))
def test_classics_give_back_every_bit(name, drawn):
    x, bits = drawn
    packed, expected = CLASSICS[name](x), [[b if stored(b, x.dtype) else 0 for b in row] for row in bits]
    dense = packed.to_dense()
    assert (dense.shape, dense.dtype, to_bits(dense)) == (x.shape, x.dtype, expected)
    assert packed.nnz == sum(b != 0 for row in expected for b in row) and packed.shape == tuple(x.shape)


@given(drawn=matrices(), tile=st.integers(1, 45), of_gate=st.booleans(), data=st.data())
def test_twell_word_by_word(drawn, tile, of_gate, data):
    x, bits = drawn
    words, keep = data.draw(st.integers(2, tile + 1)), fires if of_gate else stored
    packed = (TwELL.from_gate if of_gate else TwELL.from_dense)(x, tile, words)
    shift = 16 if BITS[x.dtype] == 16 else 32
    found, tails = packed.packed.tolist(), []
    for r, row in enumerate(bits):
        tails.append([])
        for first in range(0, len(row), tile):
            kept = [c for c in range(first, min(first + tile, len(row))) if keep(row[c], x.dtype)]
            expected = [len(kept), *(row[c] << shift | (c - first) for c in kept[: words - 1])]
            assert [w % (1 << 2 * shift) for w in found[r][first // tile][: len(expected)]] == expected
            tails[-1] += kept[words - 1 :]
    assert packed.packed.shape == (len(bits), -(-x.shape[1] // tile), words)
    assert packed.packed.dtype == word_dtype(x.dtype) == INTEGER[2 * shift]
    assert packed.tail_pointer.tolist() == [sum(map(len, tails[:r])) for r in range(len(bits) + 1)]
    assert packed.tail_column.tolist() == [c for tail in tails for c in tail]
    assert packed.overflow_rows.tolist() == [r for r, tail in enumerate(tails) if tail]
    assert packed.nnz == sum(keep(b, x.dtype) for row in bits for b in row)
    assert to_bits(packed.to_dense()) == [[b if keep(b, x.dtype) else 0 for b in row] for row in bits]


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize(
    "width, tile, words", [(300, 256, 32), (65_836, 256, 32), (70_000, 65_536, 2), (257, 256, 257)]
)
def test_wide_gates_and_tiles(dtype, width, tile, words):
    gate = ordinary(3, width, dtype, density=0.01, seed=3)
    gate[1, -300:], gate[0, :40], gate[0, -1] = 1, 2, 4
    packed = TwELL.from_gate(gate, tile, words)
    assert packed.counts.shape == (3, -(-width // tile)) and (packed.tile, packed.slots) == (tile, words - 1)
    assert torch.equal(packed.to_dense(), gate.clamp(min=0))


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::3],
        lambda x: x[::2, 1:-1],
        lambda x: x.flip(1),
        lambda x: x[:1].expand(6, -1),
        lambda x: x[:, :1].expand(-1, 9),
    ],
)
def test_strided_matrices_are_read_and_left_alone(name, view):
    x = view(ordinary(12, 40, density=0.4))
    before, packed = x.clone(), MATRICES[name](x)
    packed.to_dense().fill_(7)
    assert torch.equal(packed.to_dense(), before) and torch.equal(x, before)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("rows, width, density", [(0, 5, 0.5), (1, 1, 1.0), (7, 33, 0.2), (5, 64, 1.0), (9, 3, 0.0)])
def test_coo_and_csr_are_what_torch_makes(rows, width, density):
    x = ordinary(rows, width, torch.float32, density)
    coo, csr, theirs = COO.from_dense(x), CSR.from_dense(x), x.to_sparse_csr()
    assert torch.equal(torch.stack([coo.row, coo.column]).long(), x.to_sparse().coalesce().indices())
    assert torch.equal(csr.pointer, theirs.crow_indices()) and torch.equal(csr.column.long(), theirs.col_indices())
    assert torch.equal(csr.value, theirs.values()) and torch.equal(coo.value, theirs.values())
    assert [t.dtype for t in (coo.row, coo.column, csr.column, csr.pointer)] == [torch.int32] * 3 + [torch.int64]


@given(drawn=matrices(), limit=st.integers(0, 45))
def test_hybrid_splits_by_the_limit(drawn, limit):
    x, bits = drawn
    hybrid, counts = Hybrid.from_dense(x, limit), [sum(stored(b, x.dtype) for b in row) for row in bits]
    assert hybrid.light.tolist() == [r for r, n in enumerate(counts) if n <= limit]
    assert hybrid.heavy.tolist() == [r for r, n in enumerate(counts) if n > limit]
    assert hybrid.ell.slots <= limit and hybrid.nnz == sum(counts)


def test_slots_past_a_count_are_never_read():
    x = ordinary(6, 50, density=0.1)
    x[3] = 1
    ell, packed = ELL.from_dense(x), TwELL.from_dense(x, tile=16, words=7)
    unused = torch.arange(ell.slots) >= ell.count[:, None]
    ell.column[unused], ell.value[unused] = 10**9, torch.nan
    packed.packed[torch.arange(7) > packed.counts[..., None].clamp(min=0)] = -1
    assert ell.slots == 50 and torch.equal(ell.to_dense(), x) and torch.equal(packed.to_dense(), x)


def test_bytes():
    x = torch.zeros(5, 100, dtype=torch.bfloat16)
    x[0, :3], x[4, :7] = 1, 2
    gate = torch.full((3, 600), -1.0)
    gate[0, :40] = 1  # nine more than the slots
    for packed, nbytes in (
        (COO.from_dense(x), 10 * (4 + 4 + 2)),
        (CSR.from_dense(x), 6 * 8 + 10 * (4 + 2)),
        (ELL.from_dense(x), 5 * 4 + 5 * 7 * (4 + 2)),
        (Hybrid.from_dense(x, limit=3), 5 * 8 + (4 * 4 + 4 * 3 * (4 + 2)) + 100 * 2),
        (TwELL.from_gate(gate.half()), 3 * 3 * 32 * 4 + 4 * 8 + 9 * (4 + 2)),
        (TwELL.from_gate(gate), 3 * 3 * 32 * 8 + 4 * 8 + 9 * (4 + 4)),
    ):
        assert packed.nbytes == nbytes


@pytest.mark.parametrize("name", MATRICES)
@settings(max_examples=25)
@given(drawn=matrices())
def test_what_holds_the_same_matrix_is_equal(name, drawn):
    make, (x, _) = MATRICES[name], drawn
    assert (make(x) == make(x.clone())) is True and (make(x) != make(x)) is False
    assert make(x) != make(x.float() if x.dtype != torch.float32 else x.half())
    if x.numel():
        other = x.clone()
        other[-1, -1] = 3.0 if x[-1, -1] != 3.0 else 0.0
        assert (make(x) == make(other)) is False


def test_formats_of_another_kind_or_geometry_are_not_equal():
    x = ordinary(5, 300)
    packed = [make(x) for make in MATRICES.values()]
    packed += [TwELL.from_dense(x, tile=64), TwELL.from_dense(x, words=9), COO.from_dense(x[:, :-1])]
    for i, one in enumerate(packed):
        assert not any(one == other for j, other in enumerate([*packed, None, 3]) if j != i)
        with pytest.raises(TypeError, match="unhashable"):
            hash(one)


class Foreign:
    """An array of a library that torch does not know: it offers DLPack and nothing else."""

    def __init__(self, inside, error=None):
        self.inside, self.error, self.asked = inside, error, 0

    def __dlpack_device__(self):
        return self.inside.__dlpack_device__()

    def __dlpack__(self, *, stream=None):
        self.asked += 1
        if self.error:
            raise self.error
        return self.inside.__dlpack__()


def array(dtype=np.float32):
    drawn = np.random.default_rng(3).normal(size=(5, 300))
    return np.where(drawn > 1, drawn, 0).astype(dtype)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_an_array_gives_what_its_tensor_gives(name, dtype):
    x = array(dtype)
    for given_array in (x, Foreign(x), x.T.copy().T):
        assert MAKERS[name](given_array) == MAKERS[name](torch.from_numpy(x.copy()))


def test_memory_is_shared_and_asked_for_once():
    x, foreign = array(), Foreign(array())
    for given_array in (x, x[::2, 5:]):
        shared = as_tensor("x", given_array)
        assert shared.data_ptr() == given_array.ctypes.data and tuple(shared.shape) == given_array.shape
    t = torch.ones(2, 3, requires_grad=True)
    assert as_tensor("x", t) is t and tl.pack(foreign) is not None and foreign.asked == 1


def refused():
    """(matrix, words of the error) for everything that no format takes."""
    rows = [torch.randn(3), torch.randn(4)]
    eye = torch.eye(4)
    return [
        (torch.zeros(3), r"\[3\]"),
        (torch.zeros(2, 3, 4), r"\[2, 3, 4\]"),
        (torch.zeros(3, 0), r"\[3, 0\]"),
        (torch.zeros(3, 4, dtype=torch.int64), "int64"),
        (eye.bool(), "bool"),
        (eye.to(torch.complex64), "complex64"),
        (eye.to(torch.float8_e4m3fn), "float8"),
        (eye.to_sparse(), "sparse_coo"),
        (eye.to_mkldnn(), "mkldnn"),
        (torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8), "quantized|quint8|qint8"),
        (torch.empty(3, 4, device="meta"), "meta"),
        (torch.nested.nested_tensor(rows), "nested"),
        (torch.nested.nested_tensor(rows, layout=torch.jagged), "nested"),
        ([[1.0, 2.0]], "a list; a torch.Tensor, or an array with __dlpack__"),
        (None, "NoneType"),
        (np.ndarray, "is a type;"),
        (np.float32(1.0), "float32"),
        (array()[::-1], r"ndarray with strides \(-1200, 4\); none below zero is accepted: copy it"),
        (array().astype(">f4"), "ndarray that torch cannot share: .*byte order"),
        (array().astype(object), "ndarray that torch cannot share"),
        (Foreign(array(), BufferError("it moved")), "Foreign that torch cannot share: it moved"),
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*MAKERS, "pool"])
def test_what_is_no_matrix_is_refused_by_name(name):
    for x, told in refused():
        with pytest.raises(InputError, match=told):
            {**MAKERS, "pool": packed_and_pool}[name](x)


@pytest.mark.parametrize("make", [TwELL.from_gate, TwELL.from_dense])
def test_what_twell_does_not_take(make):
    x = torch.ones(3, 300)
    with pytest.raises(InputError, match="float64"):
        make(x.double())
    for tile in (0, -1, 65_537, 256.0, "256", None, True):
        with pytest.raises(InputError, match=f"tile is {tile!r}"):
            make(x, tile=tile)
    for words in (1, 0, -5, 258, 32.0, None):
        with pytest.raises(InputError, match=f"words is {words!r}"):
            make(x, words=words)
    for limit in (-1, 1.5, None):
        with pytest.raises(InputError, match=f"limit is {limit!r}"):
            Hybrid.from_dense(x, limit)


def altered():
    """(format, words of the error) for objects whose fields do not belong together."""
    index = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    x = ordinary(4, 9, torch.float32, 0.5)
    coo, csr, ell, twell = COO.from_dense(x), CSR.from_dense(x), ELL.from_dense(x), TwELL.from_dense(x, 4, 2)
    hybrid = Hybrid.from_dense(x, 3)
    return [
        (COO(index(0, 4), index(1, 1), torch.ones(2), (4, 9)), "row 4; 0 to 3"),
        (COO(index(0, -1), index(1, 1), torch.ones(2), (4, 9)), "row -1; 0 to 3"),
        (COO(index(2, 0, 2), index(5, 1, 5), torch.ones(3), (4, 9)), "row 2, column 5 is stored twice"),
        (replace(coo, row=coo.row[1:]), "rows of torch.int32; as many"),
        (replace(coo, column=coo.column.float()), "columns of torch.float32"),
        (replace(coo, value=coo.value.to("meta")), "value is a meta tensor"),
        (replace(coo, value=[1.0]), "value is a list"),
        (CSR(torch.tensor([0, 1, 2, 2, 2]), index(9, 1), torch.ones(2), (4, 9)), "column 9; 0 to 8"),
        (replace(csr, pointer=csr.pointer.flip(0)), "do not fit together"),
        (replace(csr, pointer=csr.pointer.to_sparse()), "pointer is a sparse_coo tensor"),
        (ELL(index(1, 0), index(-2, 0).view(2, 1), torch.ones(2, 1), (2, 9)), "column -2; 0 to 8"),
        (replace(ell, column=ell.column[:, 1:]), "do not fit together"),
        (replace(hybrid, light=hybrid.light[:-1]), "do not fit together"),
        (replace(twell, tail_pointer=twell.tail_pointer.flip(0)), "do not fit together"),
        (replace(twell, tail_column=twell.tail_column + 99), "column .*; 0 to 8"),
        (replace(twell, packed=twell.packed | 255), "column|stored twice"),
        (replace(twell, packed=torch.nested.nested_tensor([torch.zeros(1, 2)])), "packed is a nested tensor"),
    ]


@pytest.mark.filterwarnings("ignore")
def test_an_altered_format_is_refused():
    for packed, told in altered():
        with pytest.raises(InputError, match=told):
            packed.to_dense()


def test_entries_may_come_in_any_order():
    x = ordinary(4, 9, torch.float32, 0.5)
    coo = COO.from_dense(x)
    order = torch.randperm(coo.nnz, generator=torch.Generator().manual_seed(0))
    assert torch.equal(COO(coo.row[order], coo.column[order], coo.value[order], (4, 9)).to_dense(), x)


# ---- the pool, read back one entry at a time by the rule that formats.twell states ----


def read_back(packed, pool, dtype, tokens, d_ff):
    """relu(gate) [tokens, d_ff] from words and pool, and the rows that cannot be read."""
    out, lost = torch.zeros(tokens, d_ff, dtype=dtype), torch.zeros(tokens, dtype=torch.bool)
    for row in range(tokens):
        for tile in range(packed.shape[1]):
            group = row // POOL_ROWS
            start = sum(max(0, int(packed[r, tile, 0]) - (WORDS - 1)) for r in range(group * POOL_ROWS, row))
            count = int(packed[row, tile, 0])
            late = max(0, count - (WORDS - 1))
            if start + late > POOL_WORDS and late:
                lost[row] = True
                continue
            words = torch.cat([packed[row, tile, 1 : 1 + count - late], pool[group, tile, start : start + late]])
            value, column = split_words(words, dtype)
            assert (column.diff() > 0).all()
            out[row, tile * TILE + column] = value
    return out, lost


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens, d_ff", [(1, 8), (16, 256), (37, 600), (50, 1000)])
def test_words_and_pool_hold_the_gate(tokens, d_ff, dtype):
    gate = ordinary(tokens, d_ff, dtype, density=0.04, seed=1)
    gate[:, :40][::5] = 0.5  # every fifth row: 9 values over, up to 36 a group
    gate[tokens // 2, 1] = torch.nan
    packed, pool, lost = packed_and_pool(gate)
    back, unread = read_back(packed, pool, dtype, tokens, d_ff)
    assert not lost.any() and not unread.any() and torch.equal(pool_used(packed), (pool != 0).sum(2))
    assert torch.equal(back.view(torch.int16), torch.where(gate <= 0, 0, gate).view(torch.int16))


def test_rows_that_reach_past_the_pool_are_lost_and_no_others():
    gate = ordinary(48, 520, density=0.02, seed=1)
    gate[3, :256] = 1.0  # 225 over: lost, and what follows in its group too if it needs the pool
    gate[7, 256:296] = 1.0  # another tile: in the pool
    gate[9, :100] = 1.0  # same tile, later: lost
    gate[20, :256], gate[36, :256] = -1.0, -1.0
    gate[20, :95] = 1.0  # 64 over: just in
    gate[36, :96] = 1.0  # 65 over: lost
    packed, pool, lost = packed_and_pool(gate)
    assert set(lost.nonzero()[:, 0].tolist()) == {3, 9, 36}
    back, unread = read_back(packed, pool, gate.dtype, 48, 520)
    assert torch.equal(unread, lost) and torch.equal(back[~lost], torch.relu(gate)[~lost])
    with pytest.raises(InputError, match="float32; bfloat16, float16 are accepted"):
        packed_and_pool(gate.float())
