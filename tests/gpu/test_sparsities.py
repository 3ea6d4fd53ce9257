"""Other sparsities on a GPU: masks and products beside the CPU's and the dense ones, paths in a layer, graphs, and
nothing that waits. The kernels themselves are in the table of tests/gpu/test_kernels.py."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import twell_lab as tl
from tests.gpu import needed
from tests.gpu.drawn import captured, on_another_stream, unwaiting
from tests.ops.rows import blocks as block_rows
from tests.ops.rows import microtiles as tile_rows
from tests.ops.rows import spmm as spmm_rows
from twell_lab.formats import COO, CSR, ELL
from twell_lab.layers.choice import Choice
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.skipping import skip
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import sparsify
from twell_lab.ops import accuracy, clock, int8, kept_inputs
from twell_lab.ops.blocks import BlockOperand
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward
from twell_lab.ops.spmm import SparseOperand
from twell_lab.sparsities import int8 as int8_file
from twell_lab.sparsities.adapters import drawn as drawn_adapter
from twell_lab.sparsities.adapters import switch
from twell_lab.sparsities.blocks import block_mask, group_columns, to_bsr
from twell_lab.sparsities.experts import WAYS, ExpertsLayer, takes_grouped
from twell_lab.sparsities.few_neurons import CoreFFN
from twell_lab.sparsities.int8 import int8_linear
from twell_lab.sparsities.magnitude import magnitude_mask
from twell_lab.sparsities.microtiles import find_microtiles
from twell_lab.sparsities.microtiles import product as tile_product
from twell_lab.sparsities.padding import add_padding, remove_padding
from twell_lab.sparsities.predictors import predict
from twell_lab.sparsities.quantised import fp8_linear, output_error, quantise
from twell_lab.sparsities.two_four import packed, product, prune_two_four, two_four_mask
from twell_lab.sparsities.two_four_training import TwoFourLinear, two_four
from twell_lab.sparsities.weights import SparseLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemi", "ignore:Sparse "),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ampere = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="needs compute capability 8.0"
)


def drawn(out, inner, dtype=FP32):
    torch.manual_seed(0)
    return nn.Linear(inner, out, dtype=dtype).cuda()


def normal(*sizes, dtype=BF16):
    return torch.randn(*sizes, device="cuda").to(dtype)


def assert_as_good(fast, dense, x):
    """Row by row at most twice as far from float64 as the dense layer, and an ulp."""
    exact = nn.functional.linear(x.double(), dense.weight.double(), dense.bias.double())
    far, near = ((module(x).double() - exact).norm(dim=1) / exact.norm(dim=1) for module in (fast, dense))
    assert far.max() <= 2 * near.max() + torch.finfo(x.dtype).eps


def assert_unwaiting_and_captured(call):
    """The same bits where waiting for the GPU is an error, and from a CUDA graph."""
    wanted = call()
    assert torch.equal(unwaiting(call), wanted) and torch.equal(captured(call), wanted)


# ---- masks and products


def test_masks_are_those_of_the_cpu():
    weight = (torch.randn(64, 128) * 4).round().cuda()  # with many ties
    for mask in (
        lambda weight: magnitude_mask(weight, 0.7),
        two_four_mask,
        partial(two_four_mask, transposable=True),
        lambda weight: block_mask(weight.sign(), 0.5, 16),
    ):
        assert torch.equal(mask(weight).cpu(), mask(weight.cpu()))
    assert torch.equal(group_columns(weight > 8, 16).cpu(), group_columns(weight.cpu() > 8, 16))


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("product", ["dense", "csr"])
def test_a_sparse_layer_is_the_dense_one_with_its_mask(product, dtype):
    dense = drawn(96, 128, dtype)
    layer = SparseLinear.from_linear(dense, magnitude_mask(dense.weight, 0.9), product=product)
    assert_as_good(layer, layer.to_linear(), normal(40, 128, dtype=dtype))


@pytest.mark.parametrize("form", [COO, CSR, ELL])
def test_sparse_products_wait_for_nothing_and_can_be_captured(form):
    a, b = spmm_rows.draw(300, 520, 0.1, BF16).cuda(), normal(520, 64)
    left = SparseOperand(form.from_dense(a))
    for version in (None, *left.versions(b)):
        assert accuracy.worst_row(left(b, version), a @ b, a.double() @ b.double())[0] <= 1.0
        assert_unwaiting_and_captured(partial(left, b, version))


@ampere
@pytest.mark.parametrize("shape", [(), (1,), (2, 150), (0,)])
def test_blocks_take_any_tokens_and_addresses(shape):
    w = block_rows.draw(32, 32, 4, 5, BF16, 0.5).cuda()
    weight, x = BlockOperand(to_bsr(w, 32)), normal(*shape, 160)
    torch.testing.assert_close(weight(x), x @ w.t(), rtol=0.02, atol=0.2)
    if x.dim() == 3:
        odd = torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
        assert torch.equal(weight(odd), weight(x))
        assert_unwaiting_and_captured(lambda: weight(x))


@pytest.mark.parametrize("backend", ["cutlass", "cusparselt"])
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("tokens", [1, 7, 128])
def test_a_two_four_layer_is_the_dense_one(backend, dtype, tokens):
    needed.two_four(backend)
    dense = prune_two_four(drawn(192, 256, dtype))
    sparse, bias, x = packed(dense.weight, backend), dense.bias.detach(), normal(tokens, 256, dtype=dtype)
    fast = lambda x: product(x, sparse, bias)  # noqa: E731
    assert_as_good(fast, dense, x)
    assert sparse.packed.nbytes < dense.weight.nbytes
    with torch.no_grad():
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(fast, fullgraph=True)(x), fast(x), rtol=0.02, atol=0.02)
        if backend == "cusparselt":
            sparse.fuse_transpose_cusparselt = True  # so that torch's way writes y as `product` does
            assert torch.equal(fast(x), nn.functional.linear(x, sparse, bias))
            assert_unwaiting_and_captured(lambda: fast(x))


def untied(rows, columns, dtype):
    """Of each 4 x 4 values all magnitudes differ, so that it is clear which stay."""
    torch.manual_seed(0)
    tiles = torch.rand(rows // 4, columns // 4, 16).argsort(-1).add(1).view(rows // 4, columns // 4, 4, 4)
    signs = torch.randint(0, 2, (rows, columns)) * 2 - 1
    return (tiles.transpose(1, 2).reshape(rows, columns) * signs / 64).to("cuda", dtype)


@pytest.mark.parametrize("backend", ["cutlass", "cusparselt"])
@pytest.mark.parametrize("operand", ["weight", "input"])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_two_four_in_training_is_the_cpus(operand, dtype, backend):
    needed.two_four(backend)
    dense = nn.Linear(256, 128).to("cuda", dtype)
    values = untied(128, 256, dtype)
    x = (untied(192, 256, dtype) if operand == "input" else normal(192, 256, dtype=dtype))[:140]
    with torch.no_grad():
        dense.weight.copy_(values)
    here, layer = copy.deepcopy(dense).cpu().float(), TwoFourLinear(dense, operand, backend=backend)
    there, dy = TwoFourLinear(here, operand), normal(140, 128, dtype=dtype)
    assert torch.equal(two_four(values, backend=backend).to_dense().cpu(), two_four(values.cpu()))
    given, given_here = x.clone().requires_grad_(), x.cpu().float().requires_grad_()
    layer(given).backward(dy)
    y = there(given_here)
    y.backward(dy.cpu().float())
    for ours, theirs in (
        (layer(x), y),
        (given.grad, given_here.grad),
        (dense.weight.grad, here.weight.grad),
        (dense.bias.grad, here.bias.grad),
    ):
        assert (ours.cpu().float() - theirs).norm() <= 4 * torch.finfo(dtype).eps * theirs.norm()


# ---- few bits


@pytest.mark.parametrize("linear, kind", [(int8_linear, torch.int8), (fp8_linear, torch.float8_e4m3fn)])
@pytest.mark.parametrize("tokens", [1, 16, 17, 300])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_the_cpus_and_by_the_kernel_has_the_bits_of_torchs(linear, kind, tokens, dtype, with_bias):
    if kind == torch.float8_e4m3fn:
        needed.fp8()
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 256).to(dtype), torch.randn(768, 256).to(dtype)
    if tokens > 1:
        x[1, 3], x[-1, 0] = torch.inf, torch.nan
    bias = torch.randn(768).to(dtype) if with_bias else None
    rows, there = quantise(weight, kind), quantise(weight.cuda(), kind)
    assert torch.equal(there.values.cpu().float(), rows.values.float()) and torch.equal(there.scale.cpu(), rows.scale)
    bias_there = None if bias is None else bias.cuda()
    y = linear(x.cuda(), there, bias_there)
    torch.testing.assert_close(y.cpu(), linear(x, rows, bias), rtol=0.01, atol=0.1, equal_nan=True)
    if linear is int8_linear:
        apart = int8_linear(x.cuda(), there, bias_there, apart=True)
        assert torch.equal(y.nan_to_num(7), apart.nan_to_num(7)) and torch.equal(y.isnan(), apart.isnan())


@ampere
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_a_layer_of_int8_is_one_sequence_with_the_bits_of_its_products(tokens, bias, monkeypatch):
    dense = layer_of("int8", bias=bias)
    sparse, x = SparseFFN(dense, plan=Choice("int8")), normal(tokens, D_MODEL)
    y = sparse(x)
    assert sparse.forms["int8"][1] is not None
    assert_unwaiting_and_captured(lambda: sparse(x))
    monkeypatch.setattr(int8, "MOST_TOKENS", 0)
    monkeypatch.setattr(int8_file, "has_kernel", lambda *given: False)
    assert torch.equal(y, sparse(x)) and y.any()


def off_on_rounded(layer, x, y, linear, kind):
    """Return how far off the three products of a layer without biases are from float64, on values rounded as theirs
    are: of g, u and y the norm of the error over that of the exact result, for the worst token and, of many tokens, the
    worst column. g and u are what `linear` gives of x; y, which the layer gave, is compared with what these make of it:
    an H100 adds products of E4M3 with 13 or 14 bits, so that a tenth of the h = relu(g) u are rounded to a neighbour,
    6 to 12% away, which moves y by about 1% of its norm, though no product is off by more than 0.2%."""

    def off(result, a, b):
        left, right = (part.values.double() * part.scale.double()[:, None] for part in (quantise(a, kind), b))
        exact, ways = left @ right.t(), (1, 0) if len(y) >= 64 else (1,)
        wrong, norms = (torch.cat([t.norm(dim=along) for along in ways]) for t in (result.double() - exact, exact))
        return float(torch.where(wrong == 0, 0, wrong / norms).max())

    gate, up, down = (quantise(part.weight, kind) for part in (layer.gate_proj, layer.up_proj, layer.down_proj))
    g, u = linear(x, gate), linear(x, up)
    return {"g": off(g, x, gate), "u": off(u, x, up), "y": off(y, torch.relu(g) * u, down)}


@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize("name, how", [("int8", (int8_linear, torch.int8)), ("fp8", (fp8_linear, torch.float8_e4m3fn))])
@torch.no_grad()
def test_the_layer_is_right_by_its_products(name, how, tokens):
    """At the size of a 2B model's layer, since how tensor cores add up is part of it."""
    needed.path(name)
    layer, (x, *_) = clock.workload(tokens, 2048, 5632, 29, "lognormal", BF16, "cuda")
    y = sparsify(nn.Sequential(copy.deepcopy(layer).requires_grad_(False).eval()), Choice(name))(x)
    off = off_on_rounded(layer, x, y, *how)
    assert max(off.values()) <= 0.01, off


# ---- paths

D_MODEL, D_FF = 256, 768
MASKS = {"two_four": two_four_mask, "blocks": lambda weight: block_mask(weight, 0.75, 32)}
LOSSY = {"int8": 0.08, "fp8": 0.1, "twell_int8": 0.02}  # how far off, at most


def layer_of(name, kind="gated", bias=True, dtype=BF16):
    torch.manual_seed(0)
    layer = GatedFeedForward(D_MODEL, D_FF) if kind == "gated" else PlainFeedForward(D_MODEL, D_FF, kind)
    for part in [part for part in layer.requires_grad_(False).children() if isinstance(part, nn.Linear)]:
        if name in MASKS:
            part.weight.mul_(MASKS[name](part.weight))
        part.bias = nn.Parameter(torch.randn(part.out_features) / 4, requires_grad=False) if bias else None
    return layer.to("cuda", dtype).eval()


@pytest.mark.parametrize("name", [*MASKS, *LOSSY])
@pytest.mark.parametrize("kind", ["gated", "relu", "relu2"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_what_a_layer_computes(name, kind, dtype, tokens):
    needed.path(name)
    dense = layer_of(name, kind, dtype=dtype)
    sparse, x = SparseFFN(dense, plan=Choice(name)), normal(tokens, D_MODEL, dtype=dtype)
    exact, y = copy.deepcopy(dense).double()(x.double()), sparse(x)
    assert y.dtype == dtype and torch.equal(y, sparse(x)) and sparse(x[:0]).shape == (0, D_MODEL)
    if name in LOSSY:
        assert 0 < output_error(y, exact) < LOSSY[name]
    else:
        far, near = ((each.double() - exact).norm(dim=-1) / exact.norm(dim=-1) for each in (y, dense(x)))
        assert far.max() <= 2 * near.max() + torch.finfo(dtype).eps
    if tokens > 1:
        bad = x.clone()
        bad[1, 5] = torch.inf
        spoilt = sparse(bad)
        assert spoilt[1].isnan().all()
        torch.testing.assert_close(spoilt[2:], y[2:], rtol=0.01, atol=0.01 * float(y.abs().max()))


@pytest.mark.parametrize("name", [*MASKS, *LOSSY])
def test_in_a_graph_on_another_stream_and_compiled(name):
    needed.path(name)
    dense = layer_of(name)
    sparse, x = SparseFFN(dense, plan=Choice(name)), normal(64, D_MODEL)
    with torch.no_grad():
        expected = sparse(x)
        assert torch.equal(on_another_stream(lambda: sparse(x)), expected)
        assert_unwaiting_and_captured(lambda: sparse(x))
        torch._dynamo.reset()
        compiled = torch.compile(sparse, fullgraph=True)  # dense
        torch.testing.assert_close(compiled(x), dense(x), rtol=0.02, atol=0.02 * float(expected.abs().max()))


# ---- micro-tiles, padding, experts, predictors, adapters


@ampere
@pytest.mark.parametrize("dtype, height", [(BF16, 32), (FP16, 64), (FP16, 128), (FP32, 32), (BF16, 16), (FP16, 100)])
@pytest.mark.parametrize("rows, width, n", [(1, 8, 8), (37, 1048, 264), (64, 77, 9)])
def test_a_product_of_micro_tiles_is_the_dense_one(dtype, height, rows, width, n):
    a, b = tile_rows.draw(rows, width, dtype, odd=False).cuda(), normal(width, n, dtype=dtype)
    tiles = find_microtiles(a, height)
    here = find_microtiles(a.cpu(), height)
    assert torch.equal(tiles.counts.cpu(), here.counts) and tiles.shape == here.shape
    by_torch = dtype == FP32 or height in (16, 100)  # both are torch's products then, of other shapes
    c = tile_product(tiles, b)
    assert accuracy.worst_row(c, a @ b, a.double() @ b.double())[0] <= (2.0 if by_torch else 1.0)
    shifted = torch.cat([a.new_zeros(1), a.reshape(-1)])[1:].view(a.shape)
    assert torch.equal(tile_product(find_microtiles(shifted, height), b.t().contiguous().t()), c)
    if not by_torch:
        assert_unwaiting_and_captured(lambda: tile_product(find_microtiles(a, height), b))


def test_padding_goes_and_comes_back_without_waiting():
    x = normal(4, 100, 64)
    real = torch.arange(100, device="cuda") < torch.tensor([[100], [3], [0], [57]], device="cuda")
    rows, padding = remove_padding(x, real)
    assert len(rows) == 160 and torch.equal(add_padding(rows, padding), x * real[..., None])
    assert_unwaiting_and_captured(lambda: add_padding(padding.gather(x), padding))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("experts, top_k, tokens", [(8, 2, 300), (64, 2, 100), (8, 1, 1), (4, 4, 33)])
def test_all_ways_of_experts_give_the_same(dtype, experts, top_k, tokens):
    torch.manual_seed(0)
    layer = ExpertsLayer(128, 256, experts, top_k, dtype=dtype, device="cuda")
    x = normal(tokens, 128, dtype=dtype)
    chosen, weights = layer.route(x)
    wide = ExpertsLayer(128, 256, experts, top_k, dtype=torch.float64, device="cuda", way="loop")
    wide.load_state_dict(layer.state_dict())
    exact = wide.experts(x.double(), chosen, weights)
    for layer.experts.way in WAYS:
        y = layer.experts(x, chosen, weights)
        assert (y.double() - exact).norm() <= 4 * max(torch.finfo(dtype).eps, 2**-11) * exact.norm(), layer.experts.way
    layer.experts.way = "grouped"
    if takes_grouped(x, layer.experts.gate_up_proj) and torch.cuda.get_device_capability()[0] in (9, 10):
        assert_unwaiting_and_captured(lambda: layer(x))


@torch.no_grad()
def test_chosen_neurons_are_the_cpus_and_run_in_a_graph():
    torch.manual_seed(0)
    layer = GatedFeedForward(64, 256).eval().requires_grad_(False)
    x = torch.randn(400, 64)
    found = predict(layer, [x], steps=20, rank=8)
    here, there = found.apply(copy.deepcopy(layer)), found.apply(copy.deepcopy(layer).cuda())
    assert there(x[:1].cuda()).cpu().sub(here(x[:1])).norm() <= 1e-3 * here(x[:1]).norm()
    core = CoreFFN(feed_forwards(copy.deepcopy(layer).cuda())[0], torch.arange(0, 256, 2))
    for module in (there, core):
        assert_unwaiting_and_captured(partial(module, x[:1].cuda()))


@pytest.mark.parametrize("plan", ["twell", "dense", Choice("hot_cold", 256)], ids=str)
@torch.no_grad()
def test_an_adapter_under_a_swapped_layer_is_that_of_the_dense_one(plan):
    torch.manual_seed(0)
    dense = nn.ModuleList([GatedFeedForward(256, 1024)]).cuda().bfloat16().eval().requires_grad_(False)
    model, x = sparsify(copy.deepcopy(dense), plan), normal(64, 256)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    adapter, without = drawn_adapter(dense, 0.1), dense[0](x)
    switch(dense, adapter)
    with_it = dense[0](x)
    before = switch(model, adapter)
    assert (model[0](x) - with_it).float().norm() <= 0.02 * with_it.float().norm()
    switch(model, before)
    assert (model[0](x) - without).float().norm() <= 0.02 * without.float().norm()
    assert (without - with_it).float().norm() > 0.1 * without.float().norm()
    assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("d_model, d_ff", ((2048, 5632), (264, 400)))
@pytest.mark.parametrize("tokens", (1, 2, 3))
@pytest.mark.parametrize("method", ("teal", "wina"))
def test_thresholds_stay_kernels_in_compiled_code(gpu, d_model, d_ff, tokens, method):
    """A layer with thresholds on its inputs, and a projection of an attention behind one, eager and compiled."""
    torch._dynamo.reset()  # or the cases together are more compilations than one function may have
    torch.manual_seed(tokens)
    layer = GatedFeedForward(d_model, d_ff)
    layer.act_fn = torch.nn.SiLU()
    x = torch.randn(tokens, d_model, device=gpu, dtype=torch.bfloat16)
    model = torch.nn.Sequential(layer, torch.nn.Linear(d_model, 128, bias=False)).to(gpu, torch.bfloat16).eval()
    model = tl.thresholds(model.requires_grad_(False), [x], 0.5, method=method).apply(model)
    wanted = model(x).float()
    sparse = tl.sparsify(copy.deepcopy(model), "kept_inputs")
    skip(sparse[1])
    with torch.no_grad():
        for call in (sparse, torch.compile(sparse, fullgraph=True)):
            y = call(x)
            assert (y.float() - wanted).norm() <= 0.03 * wanted.norm()  # rounding moves some over a threshold
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled, torch.no_grad():
        call(x)
    names = [event.name for event in profiled.events() if event.name.startswith("kept_inputs_v")]
    assert len(names) == (3 if tokens <= kept_inputs.FEW else 0)
