"""Other sparsities on a GPU: torch's kernels give what the dense product with the same zeros gives."""

import pytest
import torch
from torch import nn

from twell_lab.core.errors import DeviceError, InputError
from twell_lab.sparsities.blocks import block_mask, group_columns, to_bsr_linear
from twell_lab.sparsities.two_four import prune_two_four, to_semi_structured, two_four_mask
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
    dense = prune_two_four(drawn(192, 256, dtype))
    try:
        fast = to_semi_structured(dense, backend=backend)
    except DeviceError as error:
        pytest.skip(str(error))
    assert_as_good(fast, dense, torch.randn(tokens, 256, device="cuda", dtype=dtype))
    assert fast.weight.packed.nbytes < dense.weight.nbytes and fast.bias is dense.bias
