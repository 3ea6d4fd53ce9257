"""Other sparsities on a GPU: torch's kernels give what the dense product with the same zeros gives."""

import copy

import pytest
import torch
from torch import nn

from tests.gpu import needed
from twell_lab.bench import comparison
from twell_lab.core import InputError
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.choice import Choice
from twell_lab.models.swap import sparsify
from twell_lab.ops.block_linear import block_linear
from twell_lab.ops.reference import GatedFeedForward
from twell_lab.sparsities.adapters import drawn as drawn_adapter
from twell_lab.sparsities.adapters import switch, switching
from twell_lab.sparsities.blocks import block_mask, group_columns, nested_mask, to_bsr_linear
from twell_lab.sparsities.dropout import product_times
from twell_lab.sparsities.predictors import CoreFFN, predict
from twell_lab.sparsities.two_four import product, prune_two_four, to_semi_structured, two_four_mask
from twell_lab.sparsities.two_four_training import TwoFourLinear, step_times, two_four
from twell_lab.sparsities.weights import SparseLinear, magnitude_mask, prune, to_linears

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemi", "ignore:Sparse ")]


def drawn(out, inner, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(inner, out, dtype=dtype).cuda()


def assert_as_good(fast, dense, x):
    """Row by row at most twice as far from float64 as the dense layer, and an ulp."""
    exact = nn.functional.linear(x.double(), dense.weight.double(), dense.bias.double())
    far, near = ((each(x).double() - exact).norm(dim=1) / exact.norm(dim=1) for each in (fast, dense))
    assert far.max() <= 2 * near.max() + torch.finfo(x.dtype).eps


def test_masks_are_those_of_the_cpu():
    weight = (torch.randn(64, 128) * 4).round().cuda()  # with many ties
    for mask in (
        lambda weight: magnitude_mask(weight, 0.7),
        two_four_mask,
        lambda weight: two_four_mask(weight, transposable=True),
        lambda weight: block_mask(weight.sign(), 0.5, 16, norm=1),
    ):
        assert torch.equal(mask(weight).cpu(), mask(weight.cpu()))
    assert torch.equal(group_columns(weight > 8, 16).cpu(), group_columns(weight.cpu() > 8, 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("product", ["dense", "csr"])
def test_a_sparse_layer_is_the_dense_one_with_its_mask(product, dtype):
    dense = drawn(96, 128, dtype)
    layer = SparseLinear.from_linear(dense, magnitude_mask(dense.weight, 0.9), product=product)
    assert_as_good(layer, layer.to_linear(), torch.randn(40, 128, device="cuda", dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16, 130])
def test_a_layer_of_blocks_is_the_dense_one(dtype, tokens):
    dense = to_linears(prune(drawn(96, 128, dtype), mask=lambda weight: block_mask(weight, 0.75, 32)))
    x = torch.randn(tokens, 128, device="cuda", dtype=dtype)
    assert_as_good(to_bsr_linear(dense, 32), dense, x)
    with pytest.raises(InputError, match="power of two"):
        to_bsr_linear(drawn(96, 96, dtype), 24)


@pytest.mark.parametrize("backend", ["cutlass", "cusparselt"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 128])
def test_a_two_four_layer_is_the_dense_one(backend, dtype, tokens):
    needed.two_four(backend)
    dense = prune_two_four(drawn(192, 256, dtype))
    fast = to_semi_structured(dense, backend=backend)
    assert_as_good(fast, dense, torch.randn(tokens, 256, device="cuda", dtype=dtype))
    assert fast.weight.packed.nbytes < dense.weight.nbytes and fast.bias is dense.bias


def of_cusparselt(dtype):
    needed.two_four("cusparselt")
    fast = to_semi_structured(prune_two_four(drawn(192, 256, dtype)).requires_grad_(False), backend="cusparselt")
    fast.weight.fuse_transpose_cusparselt = True  # so that torch's way writes y as `product` does
    return fast


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (7,), (16,), (3, 50), (0,), ()])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_product_has_the_bits_of_torchs_dispatched_one(with_bias, shape, dtype):
    fast = of_cusparselt(dtype)
    bias, x = fast.bias if with_bias else None, torch.randn(*shape, 256, device="cuda", dtype=dtype)
    y = product(x, fast.weight, bias)
    assert y.is_contiguous() and y.shape == (*shape, 192)
    if x.numel():
        assert torch.equal(y, nn.functional.linear(x.view(-1, 256), fast.weight, bias).view(y.shape))
    wide = torch.randn(24, 600, device="cuda", dtype=dtype)
    for rows in (wide[:, :256], wide[:, 1:257]):  # as they lie, and at an odd address
        assert torch.equal(product(rows, fast.weight, bias), product(rows.contiguous(), fast.weight, bias))


def test_what_the_comparison_times_for_the_gain_of_fusing_is_right():
    needed.two_four("cusparselt")
    methods = [each for each in comparison.METHODS if each.name in (comparison.FUSED, comparison.APART)]
    rows = comparison.product_rows(comparison.TWO_FOUR, 0.5, comparison.Shape(256, 256, 256), methods)
    assert rows[0]["left_out"] == {}
    assert {row["path"] for row in rows} >= {comparison.FUSED, comparison.APART}


def test_the_product_runs_in_a_graph_and_compiled_and_does_not_wait():
    fast, x = of_cusparselt(torch.bfloat16), torch.randn(40, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        fast(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            expected = fast(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fast(x)
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(fast, fullgraph=True)(x), expected, rtol=0.02, atol=0.02)
    with pytest.raises(InputError, match="x needs a gradient"):
        fast(x.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 128])
def test_two_four_inside_blocks_is_the_dense_layer_by_both_products_of_blocks(dtype, tokens):
    dense = drawn(192, 256, dtype)
    with torch.no_grad():
        dense.weight.mul_(nested_mask(dense.weight, 0.5, 32))
    fast, x = to_bsr_linear(dense, 32), torch.randn(tokens, 256, device="cuda", dtype=dtype)
    assert_as_good(fast, dense, x)
    assert_as_good(lambda x: block_linear(x, fast.weight, dense.bias.detach()), dense, x)


def untied(rows, columns, dtype):
    """Of each 4 x 4 values all magnitudes differ, so that it is clear which stay."""
    torch.manual_seed(0)
    tiles = torch.rand(rows // 4, columns // 4, 16).argsort(-1).add(1).view(rows // 4, columns // 4, 4, 4)
    signs = torch.randint(0, 2, (rows, columns)) * 2 - 1
    return (tiles.transpose(1, 2).reshape(rows, columns) * signs / 64).to("cuda", dtype)


@pytest.mark.parametrize("backend", ["cutlass", "cusparselt"])
@pytest.mark.parametrize("operand", ["weight", "input"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_four_in_training_is_the_cpus(operand, dtype, backend):
    needed.two_four(backend)
    dense = nn.Linear(256, 128).to("cuda", dtype)
    values = untied(128, 256, dtype)
    x = (untied(192, 256, dtype) if operand == "input" else torch.randn(192, 256, device="cuda", dtype=dtype))[:140]
    with torch.no_grad():
        dense.weight.copy_(values)
    here, layer = copy.deepcopy(dense).cpu().float(), TwoFourLinear(dense, operand, backend=backend)
    there, dy = TwoFourLinear(here, operand), torch.randn(140, 128, device="cuda", dtype=dtype)
    kept = two_four(values, backend=backend)
    given = x.clone().requires_grad_()
    layer(given).backward(dy)
    assert torch.equal(kept.to_dense().cpu(), two_four(values.cpu()))
    given_here = x.cpu().float().requires_grad_()
    y = there(given_here)
    y.backward(dy.cpu().float())
    for ours, theirs in (
        (layer(x), y),
        (given.grad, given_here.grad),
        (dense.weight.grad, here.weight.grad),
        (dense.bias.grad, here.bias.grad),
    ):
        assert (ours.cpu().float() - theirs).norm() <= 4 * torch.finfo(dtype).eps * theirs.norm()


def test_a_step_of_two_four_training_is_timed_after_a_check():
    needed.two_four()
    rows = {row["path"]: row for row in step_times(256, 512, 256)}
    assert len(rows) == 5 and all(row["ms"] > 0 for row in rows.values())
    assert rows["dense step"]["dropped"] == 0 < rows["2:4 input step"]["dropped"] < rows["2:4 weight step"]["dropped"]


@pytest.mark.parametrize("backend", ["cutlass", "cusparselt"])
def test_the_product_of_dropped_activations_is_timed_after_a_check(backend):
    needed.two_four(backend)
    rows = {row["path"]: row for row in product_times(512, 1024, 256, backend=backend)}
    assert set(rows) == {"dense product", "compress", "2:4 product", "compress and 2:4 product"}
    assert all(row["ms"] > 0 for row in rows.values()) and rows["2:4 product"]["error_over_dense"] <= 2


@pytest.mark.parametrize("plan", ["twell", "dense", Choice("hot_cold", 256)], ids=str)
@torch.no_grad()
def test_an_adapter_under_a_swapped_layer_is_that_of_the_dense_one(plan):
    torch.manual_seed(0)
    dense = nn.ModuleList([GatedFeedForward(256, 1024)]).cuda().bfloat16().eval().requires_grad_(False)
    model, x = copy.deepcopy(dense), torch.randn(64, 256, device="cuda").bfloat16()
    model = sparsify(model, plan, memory=float("inf"))
    model[0](x)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    adapter = drawn_adapter(dense, 0.1)
    expected = [dense[0](x)]
    switch(dense, adapter)
    expected.append(dense[0](x))
    before = switch(model, adapter)
    for wanted in reversed(expected):
        assert (model[0](x) - wanted).float().norm() <= 0.02 * wanted.float().norm()
        switch(model, before)
    assert (expected[0] - expected[1]).float().norm() > 0.1 * expected[0].float().norm()
    assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())
    rows = {row["path"]: row for row in switching(dense, 0.02)}
    assert rows["switch in place"]["worst_error"] == 0 and rows["fuse LoRA"]["wall_ms"] > 0


@torch.no_grad()
def test_chosen_neurons_are_the_cpus_and_run_in_a_graph():
    torch.manual_seed(0)
    layer = GatedFeedForward(64, 256).eval().requires_grad_(False)
    x = torch.randn(400, 64)
    found = predict(layer, [x], steps=20, rank=8)
    here, there = copy.deepcopy(layer), copy.deepcopy(layer).cuda()
    expected = found.apply(here)
    made = found.apply(there)
    assert made(x[:1].cuda()).cpu().sub(expected(x[:1])).norm() <= 1e-3 * expected(x[:1]).norm()
    held = x[:1].cuda()
    for call in (made, CoreFFN(feed_forwards(copy.deepcopy(layer).cuda())[0], torch.arange(0, 256, 2))):
        want = call(held)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call(held)
        graph.replay()
        assert torch.equal(y, want)
