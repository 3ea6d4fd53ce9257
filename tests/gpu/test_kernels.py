"""Every version of every kernel against the reference in float64, on adversarial patterns.

Outputs are poisoned: torch fills what it allocates with NaN (or the largest integer) in deterministic mode, so an
element that a kernel forgets to write is seen.
"""

import pytest
import torch
from torch.nn.functional import linear

from twell_lab import formats
from twell_lab.formats import TwELL
from twell_lab.ops import accuracy, portable, reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NO_TAIL = (None, None, None)


def gate_of(pattern: str, rows: int, columns: int, dtype, tile: int = 256, words: int = 32) -> torch.Tensor:
    """A gate [rows, columns], before the ReLU, with the named pattern of positives."""
    generator = torch.Generator("cuda").manual_seed(rows * 7919 + columns)
    noise = torch.rand(rows, columns, generator=generator, device="cuda")
    value = torch.randn(rows, columns, generator=generator, device="cuda").abs() + 1e-3
    column = torch.arange(columns, device="cuda") % tile
    if pattern == "sparse":
        keep = noise < 0.02
    elif pattern == "dense":
        keep = noise < 0.6
    elif pattern == "silent":
        keep = noise < 0
    elif pattern == "all":
        keep = noise >= 0
    elif pattern == "full tiles":  # exactly as many as there are slots
        keep = (column < words - 1).expand(rows, -1)
    elif pattern == "one over":
        keep = (column >= tile - words).expand(rows, -1)
    elif pattern == "some rows over":
        keep = noise < torch.where(torch.arange(rows, device="cuda") % 5 == 0, 0.5, 0.01)[:, None]
    elif pattern == "odd values":  # NaN, infinities, denormals and negative zero
        keep = noise < 0.1
        odd = torch.tensor([torch.nan, torch.inf, 1e-41, 6e-8, -0.0, -torch.inf, -torch.nan], device="cuda")
        value = torch.where(noise < 0.05, odd[(noise * 1e6).long() % 7], value)
    else:
        raise AssertionError(pattern)
    return torch.where(keep, value, -value).to(dtype)


PATTERNS = ["sparse", "dense", "silent", "all", "full tiles", "one over", "some rows over", "odd values"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", [1, 2, 3, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pack_matches_the_format(pattern, version, dtype):
    for rows, columns, tile, words in [
        (5, 5632, 256, 32),
        (300, 1000, 256, 32),
        (1, 8, 256, 32),
        (3, 264, 128, 17),
        (7, 2048, 512, 64),
        (2, 96, 32, 33),
    ]:
        gate = gate_of(pattern, rows, columns, dtype, tile, words)
        packed = portable.pack(gate, tile, words, version=version)
        expected = TwELL.from_gate(gate, tile, words)
        assert torch.equal(packed[..., 0], expected.counts)
        used = torch.arange(words - 1, device="cuda") < expected.counts[..., None]
        assert torch.equal(packed[..., 1:][used], expected.packed[..., 1:][used])


@pytest.mark.parametrize("version", [1, 2])
def test_pack_takes_any_width(version):
    for rows, columns, tile, words in [(4, 1, 256, 32), (9, 257, 256, 32), (2, 70001, 256, 32), (3, 1023, 100, 5)]:
        gate = gate_of("sparse", rows, columns, torch.bfloat16, tile, words)
        packed = portable.pack(gate, tile, words, version=version)
        expected = TwELL.from_gate(gate, tile, words)
        used = torch.arange(words - 1, device="cuda") < expected.counts[..., None]
        assert torch.equal(packed[..., 0], expected.counts)
        assert torch.equal(packed[..., 1:][used], expected.packed[..., 1:][used])


def layer_of(rows, d_model, d_ff, dtype, biases=False):
    generator = torch.Generator("cuda").manual_seed(d_model + d_ff)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")  # noqa: E731
    x, up = normal(rows, d_model).to(dtype), (normal(d_ff, d_model) / d_model**0.5).to(dtype)
    down = (normal(d_model, d_ff) / d_ff**0.5).to(dtype)
    up_bias, down_bias = (normal(d_ff).to(dtype), normal(d_model).to(dtype)) if biases else (None, None)
    return x, up, down, up_bias, down_bias


def wide(*tensors):
    return [t if t is None else t.double() for t in tensors]


def versions(name: str, dtype, d_model: int) -> list[int]:
    """The versions that take this width."""
    newest = {"gated": 4, "down": 3}[name]
    return list(range(1, newest + 1)) if portable.specialisation(dtype, d_model) else [1]


SHAPES = [
    (37, 2048, 1000),
    (5, 768, 600),
    (9, 64, 257),
    (4, 4096, 512),
    (3, 5120, 300),
    (6, 100, 300),
    (2, 12290, 256),
    (1, 8, 1),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p != "odd values"])
def test_gated_keeps_the_error_promise(pattern, dtype):
    for i, (rows, d_model, d_ff) in enumerate(SHAPES):
        x, up, down, up_bias, down_bias = layer_of(rows, d_model, d_ff, dtype, biases=i % 2 == 1)
        gate = gate_of(pattern, rows, d_ff, dtype)
        down_t = down.t().contiguous()
        exact = reference.gated(*wide(x, gate, up, down, up_bias, down_bias))
        dense = linear(torch.relu(gate) * linear(x, up, up_bias), down, down_bias)
        packed = TwELL.from_gate(gate)
        tail = (packed.tail_pointer, packed.tail_column, packed.tail_value)
        for version in versions("gated", dtype, d_model):
            for from_gate, from_tail in ((gate, NO_TAIL), (None, tail)):
                y = portable.gated(x, packed.packed, from_gate, from_tail, up, down_t, up_bias, down_bias, 256, version)
                ratio, row = accuracy.worst_row(y, dense, exact)
                assert ratio <= 1.0, (rows, d_model, d_ff, version, from_gate is None, row, ratio)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p != "odd values"])
def test_down_keeps_the_error_promise(pattern, dtype):
    for i, (rows, d_model, d_ff) in enumerate(SHAPES):
        _, _, down, _, bias = layer_of(rows, d_model, d_ff, dtype, biases=i % 2 == 0)
        gate = gate_of(pattern, rows, d_ff, dtype)
        down_t = down.t().contiguous()
        exact = linear(*wide(reference.relu(gate), down, bias))
        dense = linear(torch.relu(gate), down, bias)
        packed = TwELL.from_gate(gate)
        tail = (packed.tail_pointer, packed.tail_column, packed.tail_value)
        for version in versions("down", dtype, d_model):
            for from_gate, from_tail in ((gate, NO_TAIL), (None, tail)):
                y = portable.down(packed.packed, from_gate, from_tail, down_t, bias, d_ff, 256, version)
                ratio, row = accuracy.worst_row(y, dense, exact)
                assert ratio <= 1.0, (rows, d_model, d_ff, version, from_gate is None, row, ratio)


@pytest.mark.parametrize("tile,words", [(256, 64), (256, 128), (128, 9), (64, 65), (1000, 2)])
def test_other_geometries(tile, words):
    rows, d_model, d_ff = 33, 768, 1500
    x, up, down, up_bias, down_bias = layer_of(rows, d_model, d_ff, torch.bfloat16, biases=True)
    for pattern in ("sparse", "dense", "some rows over"):
        gate = gate_of(pattern, rows, d_ff, torch.bfloat16, tile, words)
        packed = portable.pack(gate, tile, words)
        exact = reference.gated(*wide(x, gate, up, down, up_bias, down_bias))
        dense = linear(torch.relu(gate) * linear(x, up, up_bias), down, down_bias)
        for version in (1, 2, 3, 4):
            y = portable.gated(x, packed, gate, NO_TAIL, up, down.t().contiguous(), up_bias, down_bias, tile, version)
            assert accuracy.worst_row(y, dense, exact)[0] <= 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_model", [2048, 100])
def test_rows_that_are_not_finite_follow_the_dense_layer(d_model, dtype):
    x, up, down, *_ = layer_of(12, d_model, 700, dtype)
    x[1, 3], x[4, 0], x[7, -1] = torch.nan, torch.inf, -torch.inf
    gate_weight = torch.randn(700, d_model, device="cuda").to(dtype)
    gate = linear(x, gate_weight)
    dense = linear(torch.relu(gate) * linear(x, up), down)
    packed = TwELL.from_gate(gate)
    for version in versions("gated", dtype, d_model):
        y = portable.gated(x, packed.packed, gate, NO_TAIL, up, down.t().contiguous(), None, None, 256, version)
        assert torch.equal(y.isnan(), dense.isnan())
        assert y[[1, 4, 7]].isnan().all() and y[[0, 2, 3, 5, 6, 8]].isfinite().all()


def test_an_fp16_overflow_in_a_silent_neuron_does_no_harm():
    x, up, down, *_ = layer_of(4, 256, 300, torch.float16)
    up[17] = 6e4  # x . up[17] exceeds fp16; the neuron is silent
    x.abs_()
    gate = gate_of("sparse", 4, 300, torch.float16)
    gate[:, 17] = -1
    exact = reference.gated(*wide(x, gate, up, down))
    packed = portable.pack(gate, 256, 32)
    y = portable.gated(x, packed, gate, NO_TAIL, up, down.t().contiguous(), None, None, 256)
    assert y.isfinite().all()
    assert ((y.double() - exact).norm() / exact.norm()) < 1e-3


def test_the_same_input_gives_the_same_bits():
    x, up, down, *_ = layer_of(1000, 2048, 5632, torch.bfloat16)
    gate = gate_of("some rows over", 1000, 5632, torch.bfloat16)
    down_t = down.t().contiguous()

    def run():
        return portable.gated(x, portable.pack(gate, 256, 32), gate, NO_TAIL, up, down_t, None, None, 256)

    first = run()
    assert all(same_bits(run(), first) for _ in range(5))


def test_unaligned_tensors_take_the_slower_kernels():
    x, up, down, *_ = layer_of(6, 64, 520, torch.bfloat16)
    gate = gate_of("sparse", 6, 520, torch.bfloat16)
    shifted = lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)  # noqa: E731
    dense = linear(torch.relu(gate) * linear(x, up), down)
    exact = reference.gated(*wide(x, gate, up, down))
    packed = portable.pack(shifted(gate), 256, 32)
    y = portable.gated(shifted(x), packed, shifted(gate), NO_TAIL, shifted(up), shifted(down.t()), None, None, 256)
    assert accuracy.worst_row(y, dense, exact)[0] <= 1.0


def test_more_rows_than_a_grid_dimension_of_65535():
    gate = gate_of("sparse", 70_001, 264, torch.bfloat16)
    x, up, down, *_ = layer_of(70_001, 64, 264, torch.bfloat16)
    packed = portable.pack(gate, 256, 32)
    y = portable.gated(x, packed, gate, NO_TAIL, up, down.t().contiguous(), None, None, 256)
    pick = torch.tensor([0, 65_534, 65_535, 65_536, 70_000], device="cuda")
    exact = reference.gated(*wide(x[pick], gate[pick], up, down))
    dense = linear(torch.relu(gate[pick]) * linear(x[pick], up), down)
    assert accuracy.worst_row(y[pick], dense, exact)[0] <= 1.0


def test_a_matrix_of_more_than_two_to_the_31_values():
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    rows, columns = 2**31 // 5632 + 1000, 5632
    gate = torch.full((rows, columns), -1.0, dtype=torch.bfloat16, device="cuda")
    gate[-1, -3:] = torch.tensor([1.0, 2.0, 3.0])
    packed = portable.pack(gate, 256, 32)
    assert packed[-1, -1, 0] == 3 and packed[:-1, :, 0].max() == 0
    value, column = formats.split_words(packed[-1, -1, 1:4], torch.bfloat16)
    assert value.tolist() == [1.0, 2.0, 3.0] and column.tolist() == [253, 254, 255]
