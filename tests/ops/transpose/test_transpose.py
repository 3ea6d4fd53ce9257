"""The transpose kernel, in the simulator; and compiled for every architecture that may run it."""

import pytest
import torch

from twell_lab.core.errors import InputError, StackError
from twell_lab.cuda import cubins
from twell_lab.ops import transpose


@pytest.mark.parametrize("rows, columns", [(8, 8), (64, 64), (72, 64), (8, 136), (200, 8), (0, 8), (128, 192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_arrives(rows, columns, dtype):
    m = torch.randn(rows, columns).to(dtype)
    assert torch.equal(transpose.transposed(m), m.t())


def test_slices_and_odd_addresses():
    m = torch.randn(64 * 80 + 1).to(torch.bfloat16)
    for each in (m[1:].view(64, 80), m[:-1].view(80, 64).t(), m[:-1].view(64, 80)[:, 8:72]):
        assert torch.equal(transpose.transposed(each), each.t())


@pytest.mark.parametrize(
    "m", [torch.zeros(8, 9, dtype=torch.float16), torch.zeros(8, 8), torch.zeros(8, dtype=torch.float16)]
)
def test_what_is_not_taken_is_named(m):
    with pytest.raises(InputError, match="the matrix is"):
        transpose.transposed(m)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_compiles_without_spilling(arch):
    try:
        cubins.compiler()
    except StackError as error:
        pytest.skip(f"kernels cannot be compiled here: {error}")
    for file, defines in transpose.builds(torch.float16):
        for name, used in cubins.resources(cubins.compile(file, arch, dict(defines)).log).items():
            assert not used.get("spill_stores", 0), name
