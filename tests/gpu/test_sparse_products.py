"""Sparse weights times dense matrices on a GPU: every version of COO, CSR, ELL and of blocks, beside float64."""

import pytest
import torch

from tests.ops.block_linear import cases as blocks
from tests.ops.spmm import cases
from twell_lab.ops.block_linear import DTYPES, VERSIONS, BlockOperand, block_linear
from twell_lab.ops.block_linear import every_version as block_versions
from twell_lab.ops.spmm import SparseOperand, spmm
from twell_lab.ops.spmm import every_version as spmm_versions
from twell_lab.sparsities.blocks import to_bsr, to_bsr_linear

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned"), pytest.mark.filterwarnings("ignore:Sparse ")]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = [(16, 16), (16, 32), (32, 32), (64, 64), (128, 128), (48, 96), (32, 16), (128, 32), (64, 16)]


@pytest.fixture
def ampere():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")


def unwaiting_and_captured(call):
    """What a call returns from a CUDA graph, after it ran once where waiting for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    graph.replay()
    return result


# ---- COO, CSR, ELL ----


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("density", [0, 0.001, 0.01, 0.1, 0.5, 1])
@pytest.mark.parametrize("rows, columns, n", [(700, 1024, 1032), (333, 517, 77), (1, 4096, 8), (2049, 3, 520)])
def test_every_version(rows, columns, n, density, dtype):
    cases.check(cases.draw(rows, columns, density, dtype).cuda(), n)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("n", [8, 264, 1000])
def test_skewed_rows(n, dtype):
    cases.check(cases.skewed(dtype).cuda(), n)
    heavy = cases.draw(3000, 2048, 0.002, dtype)
    heavy[:3], heavy[-1] = 1, 1  # among rows of about four entries
    cases.check(heavy.cuda(), n)


@pytest.mark.parametrize("rows, n", [(0, 8), (3, 0)])
def test_nothing_to_compute(rows, n):
    cases.check(cases.draw(rows, 5, 0.5, BF16).cuda(), n)


@pytest.mark.parametrize("each", cases.FORMATS)
def test_the_product_of_the_comparison(each):
    """4,096 in each direction, 99% zeros."""
    cases.check(cases.draw(4096, 4096, 0.01, BF16).cuda(), 4096, (each,))


@pytest.mark.parametrize("each", cases.FORMATS)
def test_products_wait_for_nothing_and_can_be_captured(each):
    a, b = cases.draw(300, 520, 0.1, BF16).cuda(), torch.randn(520, 64, device="cuda").bfloat16()
    left = SparseOperand(each.from_dense(a))
    expected = {version: left(b, version) for version in left.versions(b)}
    for version, c in expected.items():
        assert torch.equal(unwaiting_and_captured(lambda version=version: spmm(left, b, version)), c)


@pytest.mark.parametrize("each", cases.FORMATS)
def test_what_is_not_finite(each):
    a = torch.tensor([[0.0, 2, 0], [1, 0, 0], [0, 0, float("nan")]], device="cuda").half()
    b = torch.tensor([[1.0] * 8, [3] * 8, [float("inf")] * 8], device="cuda").half()
    left = SparseOperand(each.from_dense(a))
    for version in left.versions(b):
        assert left(b, version)[:, 0].nan_to_num(nan=-1).tolist() == [6, 1, -1]


# ---- blocks ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [1, 21, 256, 777])
@pytest.mark.parametrize("density", [0, 0.1, 0.5, 1])
def test_blocks(ampere, density, tokens, size, dtype):
    """A full row of blocks and an empty one among the others; the last tile of tokens is not full."""
    w = blocks.draw(*size, 7, 6, dtype, density)
    x, bias = (t.cuda() for t in blocks.inputs(tokens, w))
    w, weight = w.cuda(), blocks.operand(w.cuda(), size)
    for version in (None, *VERSIONS):
        y = weight(x, bias, version)
        blocks.assert_right(y, x, w, bias, size)
        assert torch.equal(y[:3], weight(x, bias, version)[:3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_the_comparison(ampere, dtype):
    """4,096 in each direction, 90% of the blocks of 32 x 32 empty."""
    w = blocks.draw(32, 32, 128, 128, dtype, 0.1).cuda()
    x, bias = (t.cuda() for t in blocks.inputs(4096, w.cpu()))
    weight = blocks.operand(w, 32)
    for version in VERSIONS:
        blocks.assert_right(weight(x, bias, version), x, w, bias, (32, 32))


def test_versions_by_their_names(ampere):
    """As a benchmark calls them."""
    a, b = cases.draw(64, 96, 0.2, BF16).cuda(), torch.randn(96, 128, device="cuda").bfloat16()
    w = blocks.draw(32, 32, 2, 3, BF16).cuda()
    for calls, exact in (
        (spmm_versions(a, b), a.double() @ b.double()),
        (block_versions(b.t().contiguous(), to_bsr(w, 32)), b.t().double() @ w.double().t()),
    ):
        for name, call in calls.items():
            assert torch.allclose(call().double(), exact, rtol=0.02, atol=0.05), name


@torch.no_grad()
def test_the_weight_of_a_layer_of_blocks(ampere):
    dense = torch.nn.Linear(96, 64, dtype=BF16, device="cuda")
    dense.weight.copy_(blocks.draw(32, 32, 2, 3, BF16))
    layer, x = to_bsr_linear(dense, 32), torch.randn(2, 5, 96, device="cuda").bfloat16()
    assert torch.allclose(block_linear(x, layer.weight, layer.bias).float(), dense(x).float(), rtol=0.02, atol=0.02)


def test_blocks_at_odd_addresses(ampere):
    w = blocks.draw(16, 32, 3, 2, FP16).cuda()
    weight, memory = blocks.operand(w, (16, 32)), torch.randn(2 * 3 * 64 + 1, device="cuda").half()
    for x in (memory[1:].view(2, 3, 64), memory[:-1].view(64, 6).t(), memory[:64], memory[:0].view(2, 0, 64)):
        exact = x.double() @ w.double().t()
        assert all(torch.allclose(weight(x, None, v).double(), exact, rtol=0.01, atol=0.01) for v in VERSIONS)


def test_blocks_wait_for_nothing_and_can_be_captured(ampere):
    w = blocks.draw(32, 32, 4, 5, BF16).cuda()
    weight, x = BlockOperand(to_bsr(w, 32)), torch.randn(300, 160, device="cuda").bfloat16()
    y = block_linear(x, weight)
    assert torch.equal(unwaiting_and_captured(lambda: weight(x)), y)
