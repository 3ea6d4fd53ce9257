"""Which macros are chosen for which GPU, width and number of tokens."""

import pytest
import torch

from twell_lab.core import InputError
from twell_lab.cuda import cubins, macros, registry

# KiB of shared memory of one block, from the CUDA programming guide's table of compute capabilities.
SHARED = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
VERSIONS = {"sm_75": 3, "sm_80": 3, "sm_86": 3, "sm_89": 3, "sm_90": 4, "sm_100": 4, "sm_120": 3}
TOKENS = [1, 8, 16, 32, 64]


def capability(arch: str) -> tuple[int, int]:
    return divmod(int(arch.removeprefix("sm_")), 10)


@pytest.mark.parametrize("arch", cubins.ARCHITECTURES)
def test_every_version_of_gate_pack_fits_the_shared_memory_of_its_gpu(arch):
    setups = [macros.setup_for(capability(arch), v) for v in range(1, VERSIONS[arch] + 1)]
    assert [s.version for s in setups] == list(range(1, VERSIONS[arch] + 1))
    assert all(s.shared <= SHARED[arch] * 1024 for s in setups)
    assert macros.setup_for(capability(arch)) == setups[-1]
    assert all(s.turing for s in setups) == (arch == "sm_75") and (arch != "sm_75" or setups[-1].stages == 2)


@pytest.mark.parametrize("arch, version", [("sm_75", 4), ("sm_80", 4), ("sm_86", 4), ("sm_90", 5), ("sm_89", 0)])
def test_a_version_that_does_not_fit_is_refused(arch, version):
    with pytest.raises(InputError, match=rf"version is {version}; 1 to {VERSIONS[arch]} are accepted"):
        macros.setup_for(capability(arch), version)


def test_a_gpu_that_is_not_known_gets_what_fits_every_one_since_ampere():
    assert macros.setup_for((12, 1)).shared <= 99 * 1024


def test_how_tokens_are_rounded_up():
    assert [macros.decode_tokens(t) for t in (1, 2, 8, 9, 16, 17, 32, 33, 64)] == [1, 8, 8, 16, 16, 32, 32, 64, 64]
    assert {macros.decode_tokens(t) for t in range(1, 65)} == set(TOKENS)


def test_bands_a_block():
    bands = lambda rows, d_ff, capability=(9, 0): macros.decode_shape(rows, d_ff, capability, 132)[0]  # noqa: E731
    assert [bands(rows, 5632) for rows in TOKENS] == [1, 1, 1, 3, 3]
    assert bands(64, 8192) == 2 and bands(64, 3072) == 2 and bands(64, 18944) == 3
    assert all(bands(rows, d_ff, (8, 6)) == 1 for rows in TOKENS for d_ff in (333, 5632))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("d_model", [8, 64, 768, 1536, 2048, 4096, 5120, 8192, 16384])
@pytest.mark.parametrize("teams", [1, 2, 8])
def test_specialisations_cover_the_row_and_fit_a_block(dtype, d_model, teams):
    defines = macros.specialisation(dtype, d_model, teams)
    a_warp = 32 * 16 // dtype.itemsize * macros._CHUNKS_A_LANE  # values of a row that one warp can hold
    if defines is None:
        assert d_model > macros._MOST_WARPS * a_warp
        return
    sizes = dict(defines)
    assert sizes["D_MODEL"] == d_model and sizes[macros.VALUE[dtype]] is True
    assert (sizes["WARPS"] - 1) * a_warp < d_model <= sizes["WARPS"] * a_warp
    assert sizes["WARPS"] * sizes.get("TEAMS", 1) <= macros._MOST_WARPS and sizes.get("TEAMS", 1) <= teams


@pytest.mark.parametrize(
    "dtype, d_model", [(torch.bfloat16, 2047), (torch.bfloat16, 4), (torch.float32, 6), (torch.bfloat16, 1 << 20)]
)
def test_widths_that_only_the_plain_kernels_take(dtype, d_model):
    assert macros.specialisation(dtype, d_model) is None


def test_widths_that_no_kernel_holds_in_registers():
    widths = {dict(defines).get("D_MODEL") for _, defines in registry.builds((9, 0), [torch.bfloat16], [2047, 16392])}
    assert widths == {None, 256, 16392}  # that of the kernels for any width; the decode kernels read rows in pieces
