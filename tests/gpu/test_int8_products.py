"""Products of INT8 rows by one kernel on a GPU: bit by bit beside steps that are exact, and beside torch's operations; in
layers, in graphs, and without waiting."""

import pytest
import torch
from torch import nn

from tests.ops.int8_products import cases
from twell_lab.cuda import macros
from twell_lab.layers.choice import Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.ops import int8_products
from twell_lab.ops.int8_products import Weight, takes
from twell_lab.ops.reference import GatedFeedForward
from twell_lab.sparsities import quantised
from twell_lab.sparsities.quantised import Rows, int8_linear, quantise

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < int8_products.OLDEST,
        reason="needs compute capability 8.0",
    ),
]


@pytest.fixture
def by_torch(monkeypatch):
    """From when it is called, products are torch's."""
    yield lambda: monkeypatch.setattr(int8_products, "takes", lambda *args: False)


@pytest.mark.parametrize("tile", [None, *macros.INT8_TILES])
@pytest.mark.parametrize(
    "tokens, inner, out", [(1, 16, 16), (16, 2048, 528), (17, 1072, 144), (300, 720, 272), (513, 48, 1040)]
)
@pytest.mark.parametrize("dtype", int8_products.DTYPES)
def test_bit_for_bit(dtype, tokens, inner, out, tile):
    for bias in (False, True):
        cases.check(tokens, inner, out, dtype, tile, bias)


@pytest.mark.parametrize("tokens", [1, 100, 4096])
def test_at_the_size_of_a_layer(tokens):
    cases.check(tokens, 2048, 5632, torch.bfloat16)
    cases.check(tokens, 5632, 2048, torch.bfloat16)


@pytest.mark.parametrize("dtype", int8_products.DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_a_linear_layer_has_the_bits_of_torchs_operations(tokens, with_bias, dtype, by_torch):
    torch.manual_seed(0)
    x, rows = torch.randn(tokens, 256, device="cuda").to(dtype), quantise(torch.randn(768, 256, device="cuda"))
    if tokens > 1:
        x[1, 3], x[-1, 0] = torch.inf, torch.nan
    bias = torch.randn(768, device="cuda").to(dtype) if with_bias else None
    y = int8_linear(x, rows, bias)
    by_torch()
    assert cases.same(y, int8_linear(x, rows, bias))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_a_layer_has_the_bits_of_torchs_operations(tokens, bias, by_torch):
    torch.manual_seed(0)
    made = GatedFeedForward(256, 768).requires_grad_(False)
    for part in (made.gate_proj, made.up_proj, made.down_proj):
        part.bias = nn.Parameter(torch.randn(part.out_features), requires_grad=False) if bias else None
    made = made.to("cuda", torch.bfloat16).eval()
    x = torch.randn(tokens, 256, device="cuda").bfloat16()
    sparse = SparseFFN(made, plan=Choice("int8"))
    y = sparse(x)
    by_torch()
    assert cases.same(y, sparse(x)) and y.any()


def test_what_the_kernel_does_not_take_is_torchs():
    x, scale = (t.cuda() for t in cases.rows(20, 48))
    right = Weight(*(t.cuda() for t in cases.weight(32, 48, torch.bfloat16)))
    assert takes(x, right, torch.bfloat16)
    shifted = torch.cat([x.new_zeros(8), x.reshape(-1)])[8:].view(x.shape)
    odd = Weight(*(t.cuda() for t in cases.weight(24, 48, torch.bfloat16)))
    for given in (
        (x, right, torch.float32),
        (x, right._replace(bias=right.bias.float()), torch.bfloat16),
        (shifted, right, torch.bfloat16),
        (x, odd, torch.bfloat16),
        (x.t(), right, torch.bfloat16),
    ):
        assert not takes(*given)
    rows, wide = Rows(odd.values, odd.scale), torch.randn(20, 48, device="cuda").bfloat16()
    y = int8_linear(wide, rows, odd.bias.float())
    short = quantised._rows(wide, torch.int8)
    exact = short.dense(torch.float64) @ rows.dense(torch.float64).t() + odd.bias.double()
    torch.testing.assert_close(y.double(), exact, rtol=0.01, atol=0.01)


def test_nothing_waits_and_graphs_hold_it():
    x, scale = (t.cuda() for t in cases.rows(200, 512))
    w, up = (Weight(*(t.cuda() for t in cases.weight(272, 512, torch.bfloat16, seed))) for seed in (1, 2))
    call = lambda: int8_products.gate_up(x, scale, w, up, torch.bfloat16)  # noqa: E731
    wanted = call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cases.same(made, wanted)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    x.neg_()
    graph.replay()
    assert cases.same(made, call()) and not cases.same(made, wanted)
