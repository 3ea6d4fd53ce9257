"""The product of micro-tiles in the simulator, with C++ in the place of its PTX, beside float64."""

import pytest
import torch

from tests.simulator.without_ptx import without_ptx
from twell_lab import simulator
from twell_lab.cuda import macros, sources
from twell_lab.ops import accuracy, microtiles

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def source():
    return without_ptx(microtiles.PRODUCT)


def product(source, version, a, b, height):
    """What ops.microtiles.product launches."""
    counts, columns, values = microtiles.find(a, height)
    at = torch.arange(a.shape[1])
    columns[at >= counts[:, None]], values[at >= counts[:, None]] = 2**30, torch.nan  # what lies past is never read
    defines = macros.microtile(a.dtype, height)
    shared, threads = (sources.number(microtiles.PRODUCT, name, defines) for name in ("SHARED_BYTES", "THREADS"))
    c = torch.full((len(a), b.shape[1]), torch.nan, dtype=a.dtype)
    grid = len(counts), -(-b.shape[1] // microtiles.COLUMNS)
    program = simulator.compile(source, dict(defines))
    given = (counts, columns, values, b, c, len(a), a.shape[1], b.shape[1])
    program.launch(f"microtiles_v{version}", grid, threads, given, watch=None, shared_bytes=shared)
    return c


@pytest.mark.parametrize("height, rows, width, n", [(32, 45, 200, 264), (64, 64, 40, 8), (128, 100, 136, 72)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_is_the_dense_one(source, dtype, height, rows, width, n):
    draw = torch.Generator().manual_seed(height)
    a, b = (torch.randn(shape, generator=draw) for shape in ((rows, width), (width, n)))
    a[: rows // 2, torch.rand(width, generator=draw) < 0.5] = 0
    a[:, 1::3] = 0  # most stripes hold a number of columns that no stage is full of
    a, b = a.to(dtype), b.to(dtype)
    exact = a.double() @ b.double()
    made = [product(source, version, a, b, height) for version in (1, 2)]
    assert torch.equal(*made)
    assert accuracy.worst_row(made[0], a @ b, exact)[0] <= 1


def test_a_stripe_of_zeros_and_values_that_are_not_finite(source):
    a = torch.zeros(96, 24, dtype=torch.bfloat16)
    a[70, 3], a[71, 5], a[72, 5] = torch.nan, torch.inf, -torch.inf
    b = torch.randn(24, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    for version in (1, 2):
        c = product(source, version, a, b, 32)
        assert not c[:70].any() and c[70].isnan().all() and not c[73:].any()
        assert torch.equal(c[71], b[5].sign() * torch.inf) and torch.equal(c[72], -c[71])
