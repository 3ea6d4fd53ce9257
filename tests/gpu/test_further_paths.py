"""Paths that are handed down, on a GPU: exact ones give what the dense layer gives, lossy ones are close, all follow
their weights, in graphs, in compiled code and on several streams; the kernel of INT8 rows beside torch's operations."""

import copy

import pytest
import torch
from torch import nn

import twell_lab as tl
from tests.gpu import needed
from tests.simulator.cases import GEOMETRIES, gate_of
from tests.simulator.int8_cases import Int8Layer
from twell_lab.bench import few_bits, methods
from twell_lab.layers.choice import Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.ops import clock, portable
from twell_lab.ops.int8_rows import gated_int8
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward
from twell_lab.sparsities.blocks import block_mask
from twell_lab.sparsities.quantised import (
    fp8_linear,
    int8_linear,
    output_error,
    packed_two_four,
    quantise,
    rows_product,
    two_four_int8,
)
from twell_lab.sparsities.two_four import two_four_mask

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemi", "ignore:Sparse ")]
D_MODEL, D_FF = 256, 768
MASKS = {"two_four": two_four_mask, "blocks": lambda weight: block_mask(weight, 0.75, 32)}
LOSSY = {
    "int8": 0.08,
    "fp8": 0.1,
    "twell_int8": 0.02,
    "predicted": 1.0,
    "experts": 1.0,
}  # how far off, in weights that are normal


def layer(name, gated=True, bias=True, dtype=torch.bfloat16):
    torch.manual_seed(0)
    made = (GatedFeedForward if gated else PlainFeedForward)(D_MODEL, D_FF).requires_grad_(False)
    for part in [part for part in made.children() if isinstance(part, nn.Linear)]:
        if name in MASKS:
            part.weight.mul_(MASKS[name](part.weight))
        part.bias = nn.Parameter(torch.randn(part.out_features) / 4, requires_grad=False) if bias else None
    return made.to("cuda", dtype).eval()


def sparse_of(made, name):
    needed.path(name)
    return SparseFFN(made, plan=Choice(name))


def assert_right(name, sparse, made, x):
    wide = copy.deepcopy(made).double()
    exact, y, dense = wide(x.double()), sparse(x), made(x)
    assert y.dtype == x.dtype and y.shape == x.shape
    if name in LOSSY:
        assert 0 < output_error(y, exact) < LOSSY[name]
    else:
        far, near = ((each.double() - exact).norm(dim=-1) / exact.norm(dim=-1) for each in (y, dense))
        assert far.max() <= 2 * near.max() + torch.finfo(x.dtype).eps


@pytest.mark.parametrize("name", [*MASKS, *LOSSY])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_what_a_layer_computes(name, gated, dtype, tokens):
    made = layer(name, gated, dtype=dtype)
    sparse = sparse_of(made, name)
    x = torch.randn(tokens, D_MODEL, device="cuda", dtype=dtype)
    assert_right(name, sparse, made, x)
    assert torch.equal(sparse(x), sparse(x))  # as remembered, and the same bits
    (form,) = sparse.forms.values()
    assert form.value is not None and sparse.extra_bytes > 0
    if tokens > 1:
        bad = x.clone()
        bad[1, 5] = torch.inf
        y = sparse(bad)
        assert y[1].isnan().all() and torch.equal(y[2:], sparse(x)[2:])
    assert sparse(x[:0]).shape == (0, D_MODEL)


@pytest.mark.parametrize("name", [*MASKS, *LOSSY])
def test_changed_weights_are_followed(name):
    made = layer(name)
    sparse = sparse_of(made, name)
    x = torch.randn(40, D_MODEL, device="cuda", dtype=torch.bfloat16)
    before = sparse(x), sparse(x)
    made.up_proj.weight.neg_()
    assert_right(name, sparse, made, x)
    assert not torch.equal(sparse(x), before[1])
    made.down_proj.weight = nn.Parameter(made.down_proj.weight * 2, requires_grad=False)
    assert_right(name, sparse, made, x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made.gate_proj.weight.mul_(0.5)
        beside = sparse(x)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(beside, sparse(x))
    if name in MASKS:
        for part in (made.gate_proj, made.up_proj, made.down_proj):
            part.weight.normal_()
        assert torch.equal(sparse(x), made(x))  # dense, as nothing is empty
    assert output_error(sparse.cpu()(x.cpu()), made(x.cpu())) < LOSSY.get(name, 0.01)


@pytest.mark.parametrize("name", [*MASKS, *LOSSY])
def test_in_a_graph_and_compiled(name):
    made = layer(name)
    sparse = sparse_of(made, name)
    x = torch.randn(64, D_MODEL, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = sparse(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sparse(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = sparse(x)
        x.mul_(2)
        graph.replay()
        torch.testing.assert_close(y, sparse(x), rtol=0.02, atol=0.02 * float(expected.abs().max()))
        torch._dynamo.reset()
        compiled = torch.compile(sparse, fullgraph=True)
        torch.testing.assert_close(compiled(x), sparse(x), rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("name", [*MASKS, *LOSSY])
def test_a_plan_times_it(name):
    made = layer(name)
    needed.path(name)
    model = nn.Sequential(made)
    x = torch.randn(256, D_MODEL, device="cuda", dtype=torch.bfloat16)
    plan = tl.plan(tl.profile(model, [x]), model, batches=[x.flip(0)], tokens=(64,), paths=[name], progress=False)
    (row,) = [row for row in plan.layers[0].table() if row["path"] == name]
    if name in LOSSY:
        assert "lossy" in row["why"]
    if row["measured_us"] is not None:
        assert row["host_us"] > 0 and row["device_us"] > 0 and (name in MASKS or "% off" in row["why"])
    tl.sparsify(model, name)
    assert name in repr(model) and tl.report(model).extra_bytes > 0


# ---- products of few bits ----


@pytest.mark.parametrize("product, kind", [(int8_linear, torch.int8), (fp8_linear, torch.float8_e4m3fn)])
@pytest.mark.parametrize("tokens", [1, 16, 17, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_is_the_cpus(product, kind, tokens, dtype):
    if kind == torch.float8_e4m3fn:
        needed.fp8()
    torch.manual_seed(0)
    x, weight, bias = torch.randn(tokens, 64).to(dtype), torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype)
    rows = quantise(weight, kind)
    there = type(rows)(*(t.cuda() for t in quantise(weight.cuda(), kind)))
    assert torch.equal(there.values.cpu().float(), rows.values.float()) and torch.equal(there.scale.cpu(), rows.scale)
    y = product(x.cuda(), there, bias.cuda())
    torch.testing.assert_close(y.cpu(), product(x, rows, bias), rtol=0.01, atol=0.05)


def test_two_four_with_int8():
    needed.two_four("cusparselt")
    torch.manual_seed(0)
    weight, x = torch.randn(96, 128), torch.randn(40, 128).bfloat16()
    rows = quantise(weight * two_four_mask(weight))
    there = type(rows)(*(t.cuda() for t in rows))
    y = two_four_int8(x.cuda(), there)
    torch.testing.assert_close(y.cpu(), int8_linear(x, rows), rtol=0.01, atol=0.05)
    assert torch.equal(two_four_int8(x.cuda(), there, packed_two_four(there)), y)


@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize("name", ["int8", "fp8"])
@torch.no_grad()
def test_the_layer_is_held_by_its_products_as_the_record_holds_it(name, tokens):
    """At the record's own size, since how tensor cores add up is part of it."""
    needed.path(name)
    layer, (x, *_) = clock.workload(tokens, 2048, 5632, few_bits.NNZ, "lognormal", torch.bfloat16, "cuda")
    y = methods.swapped(layer, Choice(name))(x)
    off = few_bits.off_on_rounded(layer, x, y, *few_bits.ROUNDED[name])
    assert max(off.values()) <= few_bits.MOST_OFF[name], off


def test_every_part_of_the_record_of_few_bits():
    left_out = {}
    x, weight = (torch.randn(rows, 256, device="cuda").bfloat16() for rows in (40, 512))
    parts = few_bits._parts(weight, x, left_out)  # held against each other
    assert parts.keys() | left_out.keys() == {
        *(few_bits.PLAIN, few_bits.WITHIN, few_bits.APART, few_bits.EXPANDED, few_bits.TWO_FOUR)
    }
    if torch.cuda.get_device_capability() >= (8, 0) and torch.backends.cusparselt.is_available():
        assert not left_out


# ---- the kernel ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("d_model", [77, 264, 2048, 5120])
@pytest.mark.parametrize("pattern", ["sparse", "all", "silent", "one over", "some rows over"])
def test_every_version_of_the_kernel(pattern, d_model, dtype):
    for tile, words in (GEOMETRIES[0], GEOMETRIES[3]):
        case = Int8Layer.draw(gate_of(pattern, 9, 700, dtype, tile, words), d_model).cuda()
        for version in (None, 1, 2, 3, 4):
            case.check(tile, words, version)
            case.check(tile, words, version, plain=True)
        case.check(tile, words, signed=True)


def test_the_kernel_at_the_size_of_a_layer():
    torch.manual_seed(0)
    gate = torch.where(torch.rand(4096, 5632, device="cuda") < 0.005, 1.0, -1.0)
    gate = (gate * torch.rand_like(gate)).bfloat16()
    x = torch.randn(4096, 2048, device="cuda").bfloat16()
    up, down = (quantise(torch.randn(5632, 2048, device="cuda") / 45) for _ in range(2))
    y = gated_int8(x, portable.pack(gate, 256, 32), gate, up, down, None, None, 256)
    exact = rows_product(x.double().float(), gate.relu().float(), up, down)
    assert output_error(y, exact) < 0.004  # the rounding to bfloat16
    weights = up.dense(torch.bfloat16), down.dense(torch.bfloat16)
    short = portable.gated(x, portable.pack(gate, 256, 32), gate, (None, None, None), *weights, None, None, 256)
    assert output_error(y, exact) <= output_error(short, exact) * 1.1
