"""Every format, made and read back bit for bit, against plain Python integers and lists."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twell_lab import ops
from twell_lab.core import InputError
from twell_lab.formats import COO, CSR, ELL, Hybrid, TwELL, join_words, pool, split_words, word_dtype

BITS = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 32, torch.float64: 64}
INTEGER = {16: torch.int16, 32: torch.int32, 64: torch.int64}
PACKABLE = (torch.bfloat16, torch.float16, torch.float32)
CLASSICS = {
    "COO": COO.from_dense,
    "CSR": CSR.from_dense,
    "ELL": ELL.from_dense,
    "Hybrid": Hybrid.from_dense,
    "Hybrid of limit 1": lambda x: Hybrid.from_dense(x, limit=1),
}
# Exponent and fraction widths: enough to name every special value of a dtype by its bits.
FIELDS = {torch.bfloat16: (8, 7), torch.float16: (5, 10), torch.float32: (8, 23), torch.float64: (11, 52)}


def from_bits(rows, dtype, width):
    """A matrix from lists of unsigned bit patterns."""
    bits = BITS[dtype]
    flat = [b - (1 << bits) if b >> (bits - 1) else b for row in rows for b in row]
    return torch.tensor(flat, dtype=INTEGER[bits]).view(dtype).reshape(len(rows), width)


def to_bits(x):
    """Lists of unsigned bit patterns."""
    bits = BITS[x.dtype]
    return [[b % (1 << bits) for b in row] for row in x.contiguous().view(INTEGER[bits]).tolist()]


def special_bits(dtype):
    """Bit patterns of zeros, infinities, NaNs with payloads and signs, denormals and the extremes."""
    exponent, fraction = FIELDS[dtype]
    sign, infinite = 1 << (exponent + fraction), ((1 << exponent) - 1) << fraction
    positive = [
        0,
        1,
        (1 << fraction) - 1,
        1 << fraction,
        infinite - 1,
        infinite,
        infinite + 1,
        infinite | 1 << (fraction - 1),
        infinite | ((1 << fraction) - 1),
    ]
    return positive + [sign | p for p in positive]


def is_zero(bits, dtype):
    return bits % (1 << (BITS[dtype] - 1)) == 0


def is_nan(bits, dtype):
    exponent, fraction = FIELDS[dtype]
    return bits % (1 << (exponent + fraction)) > ((1 << exponent) - 1) << fraction


def fires(bits, dtype):
    """`not (value <= 0)`, from the bits alone."""
    return is_nan(bits, dtype) or not (is_zero(bits, dtype) or bits >> (BITS[dtype] - 1))


@st.composite
def matrices(draw, dtypes=PACKABLE, most_columns=40):
    """(matrix, its bits): any shape, mostly zeros, and values of every kind."""
    dtype = draw(st.sampled_from(dtypes))
    rows, width = draw(st.integers(0, 4)), draw(st.integers(1, most_columns))
    special = st.sampled_from(special_bits(dtype))
    anything = st.integers(0, (1 << BITS[dtype]) - 1)
    value = draw(st.sampled_from([st.one_of(st.just(0), special, anything), anything, special]))
    bits = draw(st.lists(st.lists(value, min_size=width, max_size=width), min_size=rows, max_size=rows))
    return from_bits(bits, dtype, width), bits


def ordinary(rows, width, dtype=torch.bfloat16, density=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    return torch.where(torch.rand(rows, width, generator=generator) < density, x, 0).to(dtype)


def packed_by_hand(bits, dtype, keep, tile, words):
    """({(row, tile, word): integer}, [tail of each row as (column, value bits)]), of Python integers only."""
    shift = 16 if BITS[dtype] == 16 else 32
    stored, tails = {}, []
    for r, row in enumerate(bits):
        tails.append([])
        for first in range(0, len(row), tile):
            kept = [c for c in range(first, min(first + tile, len(row))) if keep(row[c], dtype)]
            stored[r, first // tile, 0] = len(kept)
            for i, c in enumerate(kept):
                if i < words - 1:
                    stored[r, first // tile, i + 1] = row[c] << shift | (c - first)
                else:
                    tails[-1].append((c, row[c]))
    return stored, tails


def assert_packed(twell, bits, keep, tile, words):
    stored, tails = packed_by_hand(bits, twell.dtype, keep, tile, words)
    word_bits = 8 * twell.packed.element_size()
    assert word_bits == (32 if BITS[twell.dtype] == 16 else 64)
    found = twell.packed.tolist()
    assert {place: found[place[0]][place[1]][place[2]] % (1 << word_bits) for place in stored} == stored
    assert twell.packed.shape == (len(bits), -(-twell.shape[1] // tile), words)
    assert twell.tail_pointer.tolist() == [sum(map(len, tails[:r])) for r in range(len(bits) + 1)]
    assert twell.tail_column.tolist() == [c for tail in tails for c, _ in tail]
    values = to_bits(twell.tail_value[None])[0] if twell.tail_value.numel() else []
    assert values == [b for tail in tails for _, b in tail]
    assert twell.overflow_rows.tolist() == [r for r, tail in enumerate(tails) if tail]
    assert twell.counts.tolist() == [[found[r][t][0] for t in range(twell.packed.shape[1])] for r in range(len(bits))]
    assert twell.nnz == sum(keep(b, twell.dtype) for row in bits for b in row)
    assert (twell.words, twell.slots, twell.tile) == (words, words - 1, tile)


# ---- the classics ----


@pytest.mark.parametrize("name", CLASSICS)
@given(drawn=matrices(dtypes=tuple(BITS)))
def test_classics_give_back_every_bit(name, drawn):
    x, bits = drawn
    stored = CLASSICS[name](x)
    expected = [[0 if is_zero(b, x.dtype) else b for b in row] for row in bits]
    dense = stored.to_dense()
    assert dense.shape == x.shape and dense.dtype == x.dtype
    assert to_bits(dense) == expected
    assert stored.nnz == sum(b != 0 for row in expected for b in row)
    assert tuple(stored.shape) == tuple(x.shape)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("rows, width, density", [(0, 5, 0.5), (1, 1, 1.0), (7, 33, 0.2), (5, 64, 1.0), (9, 3, 0.0)])
def test_coo_and_csr_are_what_torch_makes(rows, width, density):
    x = ordinary(rows, width, torch.float32, density)
    coo, csr = COO.from_dense(x), CSR.from_dense(x)
    theirs = x.to_sparse().coalesce()
    assert torch.equal(torch.stack([coo.row, coo.column]).long(), theirs.indices())
    assert torch.equal(coo.value, theirs.values())
    theirs = x.to_sparse_csr()
    assert torch.equal(csr.pointer, theirs.crow_indices())
    assert torch.equal(csr.column.long(), theirs.col_indices())
    assert torch.equal(csr.value, theirs.values())
    assert (coo.row.dtype, coo.column.dtype, csr.pointer.dtype, csr.column.dtype) == (torch.int32,) * 2 + (
        torch.int64,
        torch.int32,
    )


def test_entries_in_any_order_and_those_that_have_no_place():
    x = ordinary(4, 9, torch.float32, 0.5)
    coo, order = COO.from_dense(x), torch.randperm(int((x != 0).sum()), generator=torch.Generator().manual_seed(0))
    assert torch.equal(COO(coo.row[order], coo.column[order], coo.value[order], (4, 9)).to_dense(), x)
    index = lambda *each: torch.tensor(each, dtype=torch.int32)  # noqa: E731
    for stored, told in (
        (COO(index(0, 4), index(1, 1), torch.ones(2), (4, 9)), "row 4; 0 to 3"),
        (COO(index(0, -1), index(1, 1), torch.ones(2), (4, 9)), "row -1; 0 to 3"),
        (CSR(torch.tensor([0, 1, 2, 2, 2]), index(9, 1), torch.ones(2), (4, 9)), "column 9; 0 to 8"),
        (ELL(index(1, 0), index(-2, 0).view(2, 1), torch.ones(2, 1), (2, 9)), "column -2; 0 to 8"),
        (COO(index(2, 0, 2), index(5, 1, 5), torch.ones(3), (4, 9)), "row 2, column 5 is stored twice"),
        (ELL(index(2, 0), index(3, 3, 0, 0).view(2, 2), torch.ones(2, 2), (2, 9)), "row 0, column 3 is stored twice"),
    ):
        with pytest.raises(InputError, match=told):
            stored.to_dense()


def test_bytes_of_the_classics():
    x = torch.zeros(5, 100, dtype=torch.bfloat16)
    x[0, :3], x[4, :7] = 1, 2
    assert COO.from_dense(x).nbytes == 10 * (4 + 4 + 2)
    assert CSR.from_dense(x).nbytes == 6 * 8 + 10 * (4 + 2)
    assert ELL.from_dense(x).nbytes == 5 * 4 + 5 * 7 * (4 + 2)
    hybrid = Hybrid.from_dense(x, limit=3)
    assert hybrid.nbytes == 5 * 8 + (4 * 4 + 4 * 3 * (4 + 2)) + 100 * 2
    assert Hybrid.from_dense(x.float(), limit=3).nbytes == 5 * 8 + (4 * 4 + 4 * 3 * (4 + 4)) + 100 * 4


def test_ell_widens_to_its_fullest_row_and_never_reads_past_a_count():
    x = ordinary(6, 50, density=0.1)
    x[3] = 1
    ell = ELL.from_dense(x)
    assert ell.slots == 50 and ell.count.tolist() == (x != 0).sum(1).tolist()
    unused = torch.arange(ell.slots) >= ell.count[:, None]
    ell.column[unused], ell.value[unused] = 10**9, torch.nan
    assert torch.equal(ell.to_dense(), x)


@given(drawn=matrices(), limit=st.integers(0, 45))
def test_hybrid_splits_by_the_limit(drawn, limit):
    x, bits = drawn
    hybrid = Hybrid.from_dense(x, limit)
    counts = [sum(not is_zero(b, x.dtype) for b in row) for row in bits]
    assert hybrid.light.tolist() == [r for r, n in enumerate(counts) if n <= limit]
    assert hybrid.heavy.tolist() == [r for r, n in enumerate(counts) if n > limit]
    assert hybrid.ell.slots <= limit and hybrid.limit == limit
    assert hybrid.nnz == sum(counts)
    assert to_bits(hybrid.to_dense()) == [[0 if is_zero(b, x.dtype) else b for b in row] for row in bits]


# ---- TwELL ----


@given(drawn=matrices(), tile=st.integers(1, 45), data=st.data())
def test_twell_of_any_matrix_word_by_word(drawn, tile, data):
    x, bits = drawn
    words = data.draw(st.integers(2, tile + 1))
    twell = TwELL.from_dense(x, tile, words)
    assert_packed(twell, bits, lambda b, dtype: not is_zero(b, dtype), tile, words)
    assert to_bits(twell.to_dense()) == [[0 if is_zero(b, x.dtype) else b for b in row] for row in bits]


@given(drawn=matrices(), tile=st.integers(1, 45), data=st.data())
def test_twell_of_any_gate_word_by_word(drawn, tile, data):
    x, bits = drawn
    words = data.draw(st.integers(2, tile + 1))
    twell = TwELL.from_gate(x, tile, words)
    assert_packed(twell, bits, fires, tile, words)
    assert to_bits(twell.to_dense()) == [[b if fires(b, x.dtype) else 0 for b in row] for row in bits]


def test_a_gate_decoded_by_hand():
    # Six columns in tiles of four: the last tile is two wide. bf16 1.5 is 0x3FC0, 2 is 0x4000, 0.25 is 0x3E80.
    gate = torch.tensor([[1.5, -1.0, 2.0, 0.0, 0.25, 2.0]], dtype=torch.bfloat16)
    packed = TwELL.from_gate(gate, tile=4, words=3).packed
    assert packed.dtype == torch.int32
    assert packed.tolist() == [[[2, 0x3FC0_0000, 0x4000_0002], [2, 0x3E80_0000, 0x4000_0001]]]
    # fp16 1.5 is 0x3E00; in words of 64 bits, fp32 1.5 is 0x3FC00000 above a column of 32 bits.
    assert TwELL.from_gate(gate.half(), tile=4, words=3).packed[0, 0].tolist() == [2, 0x3E00_0000, 0x4000_0002]
    packed = TwELL.from_gate(gate.float(), tile=4, words=3).packed
    assert packed.dtype == torch.int64
    assert packed[0, 0].tolist() == [2, 0x3FC0_0000 << 32, 0x4000_0000 << 32 | 2]


def test_negative_values_by_hand():
    # bf16 -1.5 is 0xBFC0: the word's top bit is set, and as int32 it is negative.
    x = torch.tensor([[0.0, -1.5]], dtype=torch.bfloat16)
    ((count, word),) = TwELL.from_dense(x, tile=2, words=2).packed[0].tolist()
    assert (count, word) == (1, 0xBFC0_0001 - 2**32)
    ((count, word),) = TwELL.from_dense(x.float(), tile=2, words=2).packed[0].tolist()
    assert (count, word) == (1, (struct.unpack(">I", struct.pack(">f", -1.5))[0] << 32 | 1) - 2**64)


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("kept", [30, 31, 32, 256])
def test_a_tile_at_over_and_far_over_its_slots(dtype, kept):
    gate = torch.full((3, 600), -1.0, dtype=dtype)
    gate[1, 256 : 256 + kept] = torch.arange(1, kept + 1, dtype=dtype)
    twell = TwELL.from_gate(gate)
    assert twell.counts.tolist() == [[0, 0, 0], [0, kept, 0], [0, 0, 0]]
    late = max(0, kept - 31)
    assert twell.tail_pointer.tolist() == [0, 0, late, late]
    assert twell.tail_column.tolist() == list(range(256 + kept - late, 256 + kept))
    assert twell.overflow_rows.tolist() == ([1] if late else [])
    assert torch.equal(twell.to_dense(), gate.clamp(min=0)) and twell.nnz == kept


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("width", [1, 255, 256, 257, 700])
def test_all_positive_and_all_negative(dtype, sign, width):
    gate = sign * (torch.rand(2, width) + 0.5).to(dtype)
    twell = TwELL.from_gate(gate)
    assert torch.equal(twell.to_dense(), gate if sign > 0 else torch.zeros_like(gate))
    assert twell.nnz == (gate.numel() if sign > 0 else 0)
    assert torch.equal(TwELL.from_dense(gate).to_dense(), gate)


def test_no_rows():
    for dtype in PACKABLE:
        twell = TwELL.from_gate(torch.empty(0, 300, dtype=dtype))
        assert twell.packed.shape == (0, 2, 32) and twell.tail_pointer.tolist() == [0]
        assert twell.to_dense().shape == (0, 300) and twell.nnz == 0 and twell.overflow_rows.tolist() == []


@pytest.mark.parametrize("dtype", PACKABLE)
def test_more_columns_than_sixteen_bits_number(dtype):
    gate = ordinary(2, 65_536 + 300, dtype, density=0.01, seed=3)
    gate[1, -300:] = 1
    gate[0, 65_535], gate[0, 65_536], gate[0, -1] = 2, 3, 4
    twell = TwELL.from_gate(gate)
    assert twell.counts.shape == (2, 258) and twell.overflow_rows.tolist()[-1] == 1
    assert torch.equal(twell.to_dense(), gate.clamp(min=0))


@pytest.mark.parametrize("words", [2, 3, 65_537])
def test_the_widest_tile_uses_all_sixteen_bits_of_a_column(words):
    gate = torch.full((1, 70_000), -1.0, dtype=torch.bfloat16)
    gate[0, [0, 65_535, 65_536, 69_999]] = torch.tensor([1.5, 2.0, 0.25, 1.0], dtype=torch.bfloat16)
    twell = TwELL.from_gate(gate, tile=65_536, words=words)
    assert twell.counts.tolist() == [[2, 2]]
    if words > 2:
        assert twell.packed[0, 0, 2].item() == 0x4000_FFFF
    assert twell.tail_column.tolist() == ([65_535, 69_999] if words == 2 else [])
    assert torch.equal(twell.to_dense(), gate.clamp(min=0))


@pytest.mark.parametrize("dtype", PACKABLE)
def test_words_past_the_count_are_never_read(dtype):
    gate = ordinary(4, 90, dtype, density=0.6, seed=1)
    twell = TwELL.from_gate(gate, tile=16, words=7)
    assert len(twell.overflow_rows)
    position = torch.arange(twell.words)
    twell.packed[(position > twell.counts[..., None]) & (position > 0)] = -1
    assert torch.equal(twell.to_dense(), gate.clamp(min=0))


def test_bytes_of_twell():
    gate = torch.full((3, 600), -1.0, dtype=torch.bfloat16)
    gate[0, :40] = 1  # nine more than the slots
    assert TwELL.from_gate(gate).nbytes == 3 * 3 * 32 * 4 + 4 * 8 + 9 * (4 + 2)
    assert TwELL.from_gate(gate.float()).nbytes == 3 * 3 * 32 * 8 + 4 * 8 + 9 * (4 + 4)


@given(drawn=matrices())
def test_joined_words_split_again(drawn):
    x, _ = drawn
    columns = torch.arange(x.numel()).reshape(x.shape) * 65_535 // max(1, x.numel() - 1)
    words = join_words(x, columns)
    assert words.dtype == word_dtype(x.dtype)
    value, column = split_words(words, x.dtype)
    assert to_bits(value) == to_bits(x) and torch.equal(column, columns)


# ---- layouts, gradients ----

ALL = {**CLASSICS, "TwELL": TwELL.from_dense, "TwELL in tiles of 5": lambda x: TwELL.from_dense(x, 5, 3)}


@pytest.mark.parametrize("name", ALL)
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
    ids=["transposed", "every third column", "inner slice", "flipped", "one row six times", "one column nine times"],
)
def test_strided_matrices(name, view):
    x = view(ordinary(12, 40, density=0.4))
    assert torch.equal(ALL[name](x).to_dense(), x)


def test_strided_gates():
    gate = ordinary(12, 40, density=0.8)
    for strided in (gate.t(), gate[:, 1::2], gate[:1].expand(5, -1)):
        assert torch.equal(TwELL.from_gate(strided, 8, 4).to_dense(), strided.clamp(min=0))


def test_the_matrix_is_left_alone():
    for name, make in ALL.items():
        x = ordinary(5, 30)
        before = x.clone()
        stored = make(x)
        stored.to_dense().fill_(7)
        assert torch.equal(x, before) and torch.equal(stored.to_dense(), before), name


def test_packing_carries_no_gradient():
    gate = torch.rand(2, 300, requires_grad=True)  # every tile overflows: neither words nor tail may carry one
    twell = TwELL.from_gate(gate)
    assert not twell.tail_value.requires_grad and not twell.to_dense().requires_grad


# ---- bad input ----


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "x, told",
    [
        (torch.zeros(3), r"\[3\]"),
        (torch.zeros(2, 3, 4), r"\[2, 3, 4\]"),
        (torch.zeros(3, 0), r"\[3, 0\]"),
        (torch.zeros(3, 4, dtype=torch.int64), "int64"),
        (torch.zeros(3, 4, dtype=torch.bool), "bool"),
        (torch.zeros(3, 4, dtype=torch.complex64), "complex64"),
        (torch.ones(3, 4).to_sparse(), "sparse_coo"),
        ([[1.0, 2.0]], "list"),
        (None, "NoneType"),
    ],
    ids=["vector", "3 dimensions", "no columns", "int64", "bool", "complex", "sparse", "list", "None"],
)
def test_what_no_format_takes(name, x, told):
    with pytest.raises(InputError, match=told):
        ALL[name](x)


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
    make(x, words=257)


@pytest.mark.parametrize("limit", [-1, 1.5, None])
def test_hybrid_names_a_wrong_limit(limit):
    with pytest.raises(InputError, match=f"limit is {limit!r}"):
        Hybrid.from_dense(torch.ones(2, 3), limit)


# ---- equality ----


@pytest.mark.parametrize("name", [*CLASSICS, "TwELL"])
@given(drawn=matrices(dtypes=PACKABLE))
def test_what_holds_the_same_matrix_is_equal(name, drawn):
    make = CLASSICS.get(name, TwELL.from_dense)
    x, _ = drawn
    assert (make(x) == make(x.clone())) is True and (make(x) != make(x)) is False
    if x.numel():
        other = x.clone()
        other[-1, -1] = 3.0 if x[-1, -1] != 3.0 else 0.0
        assert (make(x) == make(other)) is False
    assert (
        make(x) != make(x.double())
        if name != "TwELL"
        else make(x) != TwELL.from_dense(x.float() if x.dtype != torch.float32 else x.half())
    )


def test_formats_of_another_kind_or_geometry_are_not_equal():
    x = ordinary(5, 300)
    made = [
        COO.from_dense(x),
        CSR.from_dense(x),
        ELL.from_dense(x),
        Hybrid.from_dense(x),
        Hybrid.from_dense(x, limit=3),
        TwELL.from_dense(x),
        TwELL.from_dense(x, tile=64),
        TwELL.from_dense(x, words=9),
        COO.from_dense(x[:, :-1]),
        COO.from_dense(x[:-1]),
        x,
        None,
        3,
    ]
    for i, one in enumerate(made[:-3]):
        assert [
            bool(one == other) for j, other in enumerate(made) if j != i and not isinstance(other, torch.Tensor)
        ].count(True) == 0
        with pytest.raises(TypeError, match="unhashable"):
            hash(one)


def test_words_that_nobody_reads_are_no_difference():
    x = ordinary(5, 300, density=0.05)
    one, other = TwELL.from_dense(x), TwELL.from_dense(x)
    used = torch.arange(one.words) <= other.counts[..., None]
    other.packed[~used] = -1
    assert one == other
    other.packed[0, 0, 1] ^= 1 << 20
    assert one != other


# ---- tensors without values ----


def without_values():
    rows = [torch.randn(3), torch.randn(4)]
    return {
        "meta": torch.empty(3, 4, device="meta"),
        "nested": torch.nested.nested_tensor(rows),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "sparse": torch.eye(4).to_sparse(),
        "mkldnn": torch.eye(4).to_mkldnn(),
        "quantized": torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
        "float8": torch.eye(4).to(torch.float8_e4m3fn),
        "complex": torch.eye(4).to(torch.complex64),
        "none": None,
        "list": [[1.0]],
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", ["meta", "nested", "jagged", "sparse", "mkldnn", "quantized", "float8", "complex", "none", "list"]
)
def test_a_tensor_that_cannot_be_packed_is_refused(kind):
    x = without_values()[kind]
    for make in (*CLASSICS.values(), TwELL.from_dense, TwELL.from_gate, ops.pack, pool.packed_and_pool, pool.pool_used):
        with pytest.raises(InputError, match="accepted"):
            make(x)


def test_a_printed_twell_says_what_it_holds():
    x = torch.tensor([[1.0, 2.0, 3.0, -1.0], [0.0, -1.0, -2.0, 4.0]], dtype=torch.bfloat16)
    packed = TwELL.from_gate(x, tile=3, words=3)  # two slots a tile: the third of the first row's first tile is late
    told = "TwELL(2 x 4, torch.bfloat16, cpu: 4 values kept, 1 of them in the tail; tile=3, words=3)"
    assert repr(packed) == str(packed) == told
