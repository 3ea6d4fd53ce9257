"""Products with block-sparse weights: torch's on a CPU, the kernels in the simulator with C++ in the place of their PTX,
and bad input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.without_ptx import without_ptx
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.cuda import cubins, launcher, macros, registry
from twell_lab.ops.block_linear import DTYPES, FILE, BlockOperand, block_linear
from twell_lab.sparsities.blocks import to_bsr

from .cases import assert_right, draw, inputs, operand

# (high, wide): every tile of the kernel, and blocks that several tiles share.
SIZES = [(16, 16), (16, 32), (32, 32), (64, 64), (128, 128), (48, 96), (32, 16), (128, 32)]
pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [1, 6])
def test_on_a_cpu(tokens, size, dtype):
    w = draw(*size, 4, 3, dtype)
    x, bias = inputs(tokens, w)
    assert_right(operand(w, size)(x, bias), x, w, bias, size)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.sampled_from([0, 0.3, 1]), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_any_pattern(rows, columns, tokens, density, seed):
    w = draw(16, 16, rows, columns, torch.bfloat16, density, seed)
    x = torch.randn(tokens, columns * 16).bfloat16()
    y = block_linear(x, to_bsr(w, 16))
    assert torch.allclose(y.double(), x.double() @ w.double().t(), rtol=0.01, atol=0.01)


@pytest.fixture(scope="module")
def source():
    return without_ptx(FILE)


def simulated(source, weight, x, bias, version):
    y = torch.full((len(x), weight.shape[0]), torch.nan, dtype=x.dtype)
    made = weight.launch(x, bias, y, version)
    kernel = registry.find(FILE)
    assert (kernel, made.defines) in registry.builds((8, 0), DTYPES, [])
    entry = kernel.entries(made.defines)[made.entry]
    launcher.check_arguments(entry, made.arguments)
    program = simulator.compile(source, dict(made.defines))
    # Unwatched: shared memory is read through addresses of 32 bits, which the simulator does not know.
    program.launch(made.entry, made.grid, entry.threads, made.arguments, watch=None, shared_bytes=made.shared)
    return y


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("at, size", list(enumerate(SIZES)))
def test_every_version(source, at, size):
    """More steps than stages, in the full row of blocks; the last tile of tokens is not full."""
    w = draw(*size, 3, 5 if size[1] <= 32 else 2, DTYPES[at % 2])
    x, bias = inputs(260 if size == (32, 32) else 21, w)
    for version in (1, 2):
        assert_right(simulated(source, operand(w, size), x, bias, version), x, w, bias, size)


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("density", [0, 1])
def test_no_block_and_every_block(source, density):
    w = draw(16, 16, 2, 2, torch.bfloat16, density)
    x = torch.randn(3, 32).bfloat16()
    for version in (1, 2):
        y = simulated(source, operand(w, 16), x, None, version)
        assert torch.allclose(y.double(), x.double() @ w.double().t(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("arch", [arch for arch in cubins.ARCHITECTURES if arch != "sm_75"])
@pytest.mark.parametrize("size", SIZES)
def test_shared_memory_fits_every_gpu_since_ampere(size, arch):
    defines, shared = macros.blocks(torch.float16, *size)
    assert 0 < shared <= 99 * 1024 and not (size[0] % dict(defines)["BN"] or size[1] % dict(defines)["BK"])


def test_leading_dimensions_and_odd_addresses():
    w = draw(16, 32, 3, 2, torch.float16)
    weight, memory = operand(w, (16, 32)), torch.randn(2 * 3 * 64 + 1).half()
    for x in (memory[1:].view(2, 3, 64), memory[:-1].view(64, 6).t(), memory[:64], memory[:0].view(2, 0, 64)):
        y = weight(x)
        assert y.shape == (*x.shape[:-1], 48)
        assert torch.allclose(y.double(), x.double() @ w.double().t(), rtol=0.01, atol=0.01)


W = draw(16, 32, 3, 2, torch.bfloat16)
X, BIAS = torch.ones(4, 64).bfloat16(), torch.ones(48).bfloat16()


def bsr(pointer, column, dtype=torch.bfloat16, size=16):
    values = torch.ones(len(column), size, size, dtype=dtype)
    shape = ((len(pointer) - 1) * size, 2 * size)
    return torch.sparse_bsr_tensor(torch.tensor(pointer), torch.tensor(column), values, shape, check_invariants=False)


@pytest.mark.parametrize(
    "weight, told",
    [
        (lambda: W, "the weight is torch.strided; a torch.sparse_bsr matrix"),
        (lambda: None, "the weight is NoneType"),
        (lambda: W.to_sparse(), "the weight is torch.sparse_coo"),
        (lambda: W.float().to_sparse_bsr((16, 16)), r"blocks \[16, 16\] of torch.float32; multiples of 16 up to 128"),
        (lambda: W.to_sparse_bsr((8, 8)), r"blocks \[8, 8\] of torch.bfloat16"),
        (lambda: torch.ones(144, 144).half().to_sparse_bsr((144, 144)), r"blocks \[144, 144\]"),
        (lambda: bsr([0, 1, 2], [0, 2]), "a block in column 2; 0 to 1 are accepted"),
        (lambda: bsr([0, 2, 2], [1, 1]), "stores block 0, 1 twice"),
        (lambda: bsr([0, 2, 1], [0, 1]), "not an ascent from 0 to 2"),
    ],
)
def test_a_weight_that_is_not_taken_is_named(weight, told):
    with pytest.raises(InputError, match=told):
        BlockOperand(weight())


@pytest.mark.parametrize(
    "x, bias, version, told",
    [
        (X[:, 1:], None, None, r"x is torch.strided \[4, 63\]; a dense tensor \[..., 64\]"),
        (X.half(), None, None, "x is torch.float16 on cpu; torch.bfloat16 on cpu"),
        (X, BIAS.float(), None, "bias is torch.float32"),
        (X, BIAS[1:], None, r"bias is \[47\]; \[48\] is accepted"),
        (X, None, 2, "version is 2 on cpu; None is accepted"),
        (X.clone().requires_grad_(), None, None, "needs a gradient"),
    ],
)
def test_an_input_that_is_not_taken_is_named(x, bias, version, told):
    with pytest.raises(InputError, match=told):
        operand(W, (16, 32))(x, bias, version)
