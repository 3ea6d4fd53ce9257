"""The Hopper gate GEMM with the packing epilogue: the GEMM against float64, words and pool against torch, entry by
entry."""

import pytest
import torch
from torch.nn.functional import linear

from tests.formats.pools import pool_used
from twell_lab import formats
from twell_lab.formats import TILE, packed_and_pool
from twell_lab.ops import accuracy, hopper_pack

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
VERSIONS = [1, 2, 3]
BF16, FP16 = torch.bfloat16, torch.float16


def layer(tokens, d_model, d_ff, nnz=None, dtype=BF16, bias=False, seed=1):
    """x, gate weights, bias: neurons that fire independently, at lognormal rates, `nnz` a row; None: half of them
    fire."""
    generator = torch.Generator("cuda").manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")  # noqa: E731
    x, weight = normal(tokens, d_model), normal(d_ff, d_model) / d_model**0.5
    if nnz:
        rate = torch.exp(1.5 * normal(d_ff)) * (torch.rand(d_ff, generator=generator, device="cuda") > 0.3)
        for _ in range(20):
            rate = rate * nnz / rate.clamp(max=0.9).sum()
        threshold = torch.special.ndtri((1 - rate.clamp(max=0.9)).clamp(max=1 - 1e-7).double()).float()
        x[:, 0], weight[:, 0] = 8.0, -threshold / 8
    return x.to(dtype), weight.to(dtype), (0.3 * normal(d_ff)).to(dtype) if bias else None


def check_words(x, weight, bias=None, versions=VERSIONS):
    """The dense gate of the same main loop near float64's, and each version's words and pool those of that gate."""
    gate = hopper_pack.dense_gate(x, weight, bias)
    some = torch.linspace(0, len(x) - 1, min(len(x), 700), device="cuda").long()
    wide = [t if t is None else t.double() for t in (x[some], weight, bias)]
    ratio, row = accuracy.worst_row(gate[some], linear(x, weight, bias)[some], linear(*wide))
    assert ratio <= 1.0, f"row {int(some[row])}: {ratio}"
    packed, pool, lost = packed_and_pool(gate)
    used = torch.arange(packed.shape[2], device="cuda") <= packed[..., :1]
    pool_words = torch.arange(pool.shape[2], device="cuda") < pool_used(packed)[..., None]
    for version in versions:
        flags = torch.full((3,), 7, dtype=torch.int32, device="cuda")
        found, spilled = hopper_pack.gate_pack(x, weight, bias, flags, version)
        assert torch.equal(found[..., 0], packed[..., 0]), version
        assert torch.equal(found[used], packed[used]), version
        assert torch.equal(spilled[pool_words], pool[pool_words]), version
        assert flags.tolist() == [0, 7, 7]
    return packed, lost


@pytest.mark.parametrize(
    "tokens, d_model, d_ff, nnz",
    [
        (1, 64, 256, None),
        (17, 72, 8, None),
        (300, 2048, 5632, 29),
        (513, 1024, 336, None),
        (2048, 2048, 5632, 300),
        (20_000, 64, 1000, None),
        (9000, 1536, 1536, None),
        (300, 768, 3072, 60),
        (300, 2048, 8192, 29),
        (255, 200, 232, None),
        (70_001, 64, 264, 5),
        (129, 4096, 520, 8),
        (16_384, 2048, 5632, 29),
    ],
)
def test_words_and_pool(tokens, d_model, d_ff, nnz):
    check_words(*layer(tokens, d_model, d_ff, nnz)[:2])


@pytest.mark.parametrize(
    "tokens, d_model, d_ff, nnz", [(300, 2048, 5632, 29), (1000, 72, 1000, None), (33, 136, 24, None)]
)
def test_fp16(tokens, d_model, d_ff, nnz):
    check_words(*layer(tokens, d_model, d_ff, nnz, FP16)[:2])


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "tokens, d_model, d_ff, nnz", [(600, 512, 1000, None), (40_000, 128, 5632, None), (300, 2048, 5632, 29)]
)
def test_a_bias_is_added_before_rounding(tokens, d_model, d_ff, nnz, dtype):
    check_words(*layer(tokens, d_model, d_ff, nnz, dtype, bias=True))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rows_that_are_not_finite(dtype):
    x, weight, _ = layer(20_000, 200, 1000, dtype=dtype)
    x[3, 5], x[200, 7], x[201, 7] = torch.nan, torch.inf, -torch.inf
    packed, _ = check_words(x, weight)
    gate = linear(x, weight)
    rows = torch.tensor([3, 200, 201], device="cuda")
    assert torch.equal(hopper_pack.dense_gate(x, weight)[rows].isnan(), gate[rows].isnan())
    assert torch.equal(packed[rows, :, 0].sum(1), formats.fires(gate[rows]).sum(1))


def overflowing(tokens, d_model, d_ff, share):
    """A sparse gate in which a `share` of the rows have a tile (the second) of 40 positives."""
    x, weight, _ = layer(tokens, d_model, d_ff, 30)
    generator = torch.Generator("cuda").manual_seed(5)
    x[:, 1] = (torch.rand(tokens, generator=generator, device="cuda") < share) * 30.0
    weight[:, 1] = 0
    weight[TILE : TILE + 40, 1] = 1
    return x, weight


@pytest.mark.parametrize("share, fewest_lost, most_lost", [(0.2, 0.0, 0.03), (1.0, 0.5, 0.7)])
def test_tiles_of_forty_positives_go_to_the_pool(share, fewest_lost, most_lost):
    """A group has room for six or seven such rows: with three on average few are lost, with sixteen more than half."""
    x, weight = overflowing(2000, 1024, 2816, share)
    packed, lost = check_words(x, weight)
    assert (packed[:, 1, 0] >= 40).float().mean() > share * 0.9
    assert fewest_lost <= lost.float().mean() <= most_lost


def test_a_slice_of_rows_of_the_weights_and_rows_apart():
    x, weight, bias = layer(300, 256, 1536, bias=True)
    check_words(x, weight[512:], bias[512:])
    wide = torch.cat([x, x], 1)
    assert torch.equal(hopper_pack.dense_gate(wide[:, :256], weight), hopper_pack.dense_gate(x, weight))


def test_the_same_input_gives_the_same_bits():
    x, weight = overflowing(3000, 512, 2816, 0.3)
    first, pool = hopper_pack.gate_pack(x, weight)
    used = torch.arange(32, device="cuda") <= first[..., :1]  # what lies beyond is left over from other tiles
    for _ in range(4):
        again, pool_again = hopper_pack.gate_pack(x, weight)
        assert torch.equal(first[..., 0], again[..., 0]) and torch.equal(first[used], again[used])
        assert torch.equal(pool, pool_again)  # with the same poison in what is not written


def test_no_tokens_and_no_launch():
    x, weight, _ = layer(0, 64, 264)
    lost = torch.full((1,), 7, dtype=torch.int32, device="cuda")
    packed, pool = hopper_pack.gate_pack(x, weight, lost=lost)
    assert packed.shape == (0, 2, 32) and pool.shape == (0, 2, 64) and lost.item() == 0


def test_on_a_side_stream_and_in_a_graph():
    x, weight, _ = layer(1000, 512, 1536, 20)
    expected, _ = hopper_pack.gate_pack(x, weight)  # loads the kernel: not to be done while a graph is captured
    used = torch.arange(32, device="cuda") <= expected[..., :1]
    held = torch.zeros_like(x)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        held.copy_(x)
        found, _ = hopper_pack.gate_pack(held, weight)
    stream.synchronize()
    assert torch.equal(found[used], expected[used])
    with torch.cuda.graph(graph):
        found, _ = hopper_pack.gate_pack(held, weight)
    held.zero_()
    graph.replay()
    assert not found[..., 0].any()
    held.copy_(x)
    graph.replay()
    assert torch.equal(found[used], expected[used])
