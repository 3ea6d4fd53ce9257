"""The mma.sync gate GEMM with the packing epilogue, entry by entry against words and pool made in torch.

The inputs are small whole numbers, drawn anew in each run: every sum is then exact in float32 in any order, so that the
gate is known to the last bit. Outputs are poisoned, as in test_kernels.py."""

import random

import pytest
import torch

from tests.formats.pools import pool_used
from twell_lab import core
from twell_lab.formats import join_words, packed_and_pool, split_words
from twell_lab.ops import ampere
from twell_lab.ops.ampere import Setup, setup_for

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
SEED = random.SystemRandom().randrange(2**31)
DTYPES = [torch.bfloat16, torch.float16]


def setups(dtype):
    """Every version for this GPU, each way of pipelining it that some GPU uses, and for fp16 the way of sm_75."""
    capability = torch.cuda.get_device_capability()
    if dtype == torch.bfloat16 and capability < (8, 0):
        return []
    newest = setup_for(capability).version
    others = {Setup(4, 32, 5), setup_for((8, 6), 2), setup_for((8, 6), 3)} if newest == 4 else set()
    others |= {setup_for((7, 5), v) for v in (1, 2, 3)} if dtype == torch.float16 else set()
    return sorted({setup_for(capability, v) for v in range(1, newest + 1)} | others)


def whole(generator, rows, columns, most, dtype):
    return torch.randint(-most, most + 1, (rows, columns), generator=generator, device="cuda").to(dtype)


def problem(tokens, d_model, d_ff, dtype, threshold=2.2, salt=0):
    """x and gate of whole numbers; the first component of x is 1, its weights set how rarely the neurons fire."""
    generator = torch.Generator("cuda").manual_seed(SEED + salt)
    x, gate = whole(generator, tokens, d_model, 4, dtype), whole(generator, d_ff, d_model, 8, dtype)
    x[:, 0] = 1
    gate[:, 0] = -threshold * (160 * d_model) ** 0.5
    gate[:, 0].round_()
    return x, gate


def exact_gate(x, gate, bias=None):
    product = x.double() @ gate.double().t()
    return (product if bias is None else product + bias.double()).float().to(x.dtype)


def one_nan(words, dtype):
    """Words with one bit pattern for every NaN."""
    value, column = split_words(words, dtype)
    return torch.where(value.isnan(), join_words(torch.full_like(value, torch.nan), column), words)


def assert_packed(found, gate):
    """found: (packed, pool) of a kernel; gate: what it packed. Words that are not in use are not looked at."""
    (packed, pool), (words, spilled, _) = found, packed_and_pool(gate)
    assert torch.equal(packed[..., 0], words[..., 0]), f"counts, seed {SEED}"
    place = torch.arange(31, device="cuda")
    used = place < words[..., :1]
    assert torch.equal(one_nan(packed[..., 1:][used], gate.dtype), one_nan(words[..., 1:][used], gate.dtype)), (
        f"seed {SEED}"
    )
    used = torch.arange(64, device="cuda") < pool_used(words)[..., None]
    assert torch.equal(one_nan(pool[used], gate.dtype), one_nan(spilled[used], gate.dtype)), f"pool, seed {SEED}"


def assert_all(x, weights, bias=None, some=None):
    gate = exact_gate(x, weights, bias)
    for setup in some or setups(x.dtype):
        lost = torch.full((3,), 7, dtype=torch.int32, device="cuda")
        first = ampere._run(x, weights, bias, lost, setup)
        second = ampere._run(x, weights, bias, None, setup)
        assert_packed(first, gate)
        assert all(map(torch.equal, first, second)), setup
        assert lost.tolist() == [0, 7, 7]
    return gate


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_model, d_ff", [(2048, 5632), (768, 3072), (4096, 14336), (136, 1000), (8, 8), (72, 264)])
@pytest.mark.parametrize("tokens", [1, 17, 300, 4097])
def test_sparse(tokens, d_model, d_ff, dtype):
    gate = assert_all(*problem(tokens, d_model, d_ff, dtype))
    assert d_ff < 1000 or 0.001 < float((gate > 0).float().mean()) < 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_dense_and_lost_rows(dtype):
    x, weights = problem(300, 264, 1000, dtype, threshold=0, salt=1)
    gate = assert_all(x, weights)
    assert packed_and_pool(gate)[2].all()  # no group of rows fits the pool: only the first words of it are in use


@pytest.mark.parametrize("dtype", DTYPES)
def test_forty_positives_in_a_tile(dtype):
    """Every fifth row has 40 in one tile: nine go to the pool, of three or four rows of a group."""
    x, weights = problem(300, 264, 2816, dtype, threshold=4, salt=2)
    x[:, 1], weights[:, 1] = 0, 0
    x[::5, 1] = 200
    weights[300:340, 1] = 200
    gate = assert_all(x, weights)
    _, _, lost = packed_and_pool(gate)
    assert (gate[::5, 300:340] > 0).all() and not lost.any()
    weights[512:640, 1] = 200
    assert packed_and_pool(assert_all(x, weights))[2].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite(dtype):
    """NaN fires, also where the last tile is narrow: there the kernel multiplies it with rows that do not exist."""
    x, weights = problem(150, 136, 1000, dtype, salt=3)
    x[3, 5], x[148, 9], x[20, 0] = torch.nan, torch.inf, -torch.inf
    gate = assert_all(x, weights)
    assert gate[3].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias(dtype):
    x, weights = problem(200, 200, 1000, dtype, salt=4)
    bias = whole(torch.Generator("cuda").manual_seed(SEED), 1, 1000, 200, dtype)[0]
    assert_all(x, weights, bias)
    assert_all(x, weights[256:], bias[256:])  # slices of rows, as the cold part of a layer is


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_gate_at_all(dtype):
    """With the identity for x the weights are the gate: denormals, zeros of either sign, infinities of the dtype's
    range."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    bits = torch.randint(-(2**15), 2**15, (1000, 256), generator=generator, device="cuda").to(torch.int16)
    weights = bits.view(dtype)
    weights = torch.where(weights.isfinite(), weights, torch.zeros_like(weights))
    weights[:, ::3] = -weights[:, ::3].abs()
    x = torch.eye(256, dtype=dtype, device="cuda")
    for setup in setups(dtype):
        assert_packed(ampere._run(x, weights, None, None, setup), weights.t().contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_numbers(dtype):
    """Where the sums are not exact, the words hold the gate to within its rounding and that of the float32 sums."""
    x, weights = (torch.randn(n, 2048, device="cuda").to(dtype) for n in (300, 1000))
    exact = x.double() @ weights.double().t()
    for setup in setups(dtype):
        packed, _ = ampere._run(x, weights, None, None, setup)
        counts = packed[..., 0]
        positive = torch.nn.functional.pad(exact > 0, (0, 24)).view(300, 4, 256).sum(2)
        assert ((counts - positive).abs() <= 1).all()  # a sum within rounding of zero may fall on either side
        value, column = split_words(packed[..., 1:], dtype)
        used = torch.arange(31, device="cuda") < counts[..., None]
        row, tile, _ = used.nonzero(as_tuple=True)
        wanted = exact[row, tile * 256 + column[used]]
        error = (value[used].double() - wanted).abs()
        assert (error <= 2.0 ** (-8 if dtype == torch.bfloat16 else -11) * wanted.abs() + 1e-3).all()


def test_the_public_call():
    x, weights = problem(70, 64, 512, torch.float16, salt=5)
    gate = exact_gate(x, weights)
    assert ampere.takes(x, weights)
    assert_packed(ampere.gate_pack(x, weights), gate)
    assert_packed(ampere.gate_pack(x, weights, version=1), gate)
    lost = torch.ones(1, dtype=torch.int32, device="cuda")
    packed, pool = ampere.gate_pack(x[:0], weights, lost=lost)
    assert packed.shape == (0, 2, 32) and pool.shape == (0, 2, 64) and lost.item() == 0


def test_what_is_not_taken():
    x, weights = problem(70, 64, 512, torch.float16)
    assert not ampere.takes(x.float(), weights.float())
    assert not ampere.takes(x, weights.bfloat16())
    assert not ampere.takes(x[:, :60], weights[:, :60])
    assert not ampere.takes(x, weights[:509])
    assert not ampere.takes(x[:, 8:], weights[:, 8:].contiguous())
    wide = torch.empty(8, 2**22 + 8, dtype=torch.float16, device="cuda")
    assert ampere.takes(wide.view(-1)[: 2**23].view(2, -1), wide.view(-1)[: 2**25].view(8, -1))
    assert not ampere.takes(wide, wide)
    shifted = torch.empty(512 * 64 + 1, dtype=torch.float16, device="cuda")[1:].view(512, 64)
    assert not ampere.takes(x, shifted)
    with pytest.raises(core.InputError, match="aligned to 16 bytes"):
        ampere.gate_pack(x, shifted)
