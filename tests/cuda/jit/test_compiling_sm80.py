"""The mma.sync kernels through the real compiler, for every architecture and version that is launched. Needs no GPU."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from twell_lab.core.errors import InputError, StackError
from twell_lab.cuda import cubins as jit
from twell_lab.ops import ampere

FILE = "sm80_gate_pack.cu"
# KiB of shared memory of one block, from the CUDA programming guide's table of compute capabilities.
SHARED = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
VERSIONS = {"sm_75": 3, "sm_80": 3, "sm_86": 3, "sm_89": 3, "sm_90": 4, "sm_100": 4, "sm_120": 3}


def capability(arch: str) -> tuple[int, int]:
    return divmod(int(arch.removeprefix("sm_")), 10)


def _jobs():
    jobs = []
    for arch in jit.ARCHITECTURES:
        for dtype in (torch.float16,) if arch == "sm_75" else (torch.bfloat16, torch.float16):
            for version in range(1, VERSIONS[arch] + 1):
                jobs.append((arch, dtype, ampere.setup_for(capability(arch), version)))
    jobs += [("sm_90", torch.float16, ampere.setup_for((7, 5), v)) for v in (1, 2, 3)]  # sm_75's way, for tests
    return jobs


JOBS = _jobs()


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    try:
        jit.compiler()
    except StackError as error:
        pytest.skip(f"kernels cannot be compiled here: {error}")
    folder = tmp_path_factory.mktemp("cubins")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.delenv("TWELL_LAB_CUBINS", raising=False)
        compiled = pool.map(lambda job: jit.compile(FILE, job[0], dict(job[2].defines(job[1])), cache_in=folder), JOBS)
        return dict(zip(JOBS, compiled))


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[0]} {job[1]} {job[2]}")
def test_no_spills(job, cubins):
    arch, _, setup = job
    assert f"for '{arch}'" in cubins[job].log and cubins[job].image.startswith(b"\x7fELF")
    ((name, used),) = jit.resources(cubins[job].log).items()
    assert name == f"gate_pack_v{setup.version}"
    assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0 and used["shared_bytes"] == 0
    assert 0 < used["registers"] <= 65_536 // ampere.THREADS


@pytest.mark.parametrize("arch", jit.ARCHITECTURES)
def test_every_version_fits_the_shared_memory_of_its_gpu(arch):
    setups = [ampere.setup_for(capability(arch), v) for v in range(1, VERSIONS[arch] + 1)]
    assert [s.version for s in setups] == list(range(1, VERSIONS[arch] + 1))
    assert all(s.shared <= SHARED[arch] * 1024 for s in setups)
    assert ampere.setup_for(capability(arch)) == setups[-1]
    assert all(s.turing for s in setups) == (arch == "sm_75") and (arch != "sm_75" or setups[-1].stages == 2)


@pytest.mark.parametrize("arch, version", [("sm_75", 4), ("sm_80", 4), ("sm_86", 4), ("sm_90", 5), ("sm_89", 0)])
def test_a_version_that_does_not_fit_is_refused(arch, version):
    with pytest.raises(InputError, match=rf"version is {version}; 1 to {VERSIONS[arch]} are accepted"):
        ampere.setup_for(capability(arch), version)


def test_a_gpu_that_is_not_known_gets_what_fits_every_one_since_ampere():
    assert ampere.setup_for((12, 1)).shared <= 99 * 1024


def test_tensors_that_the_kernel_does_not_take():
    x, gate = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16)
    assert not ampere.takes(x, gate)
    with pytest.raises(InputError, match=r"not torch.bfloat16 \[4, 64\] on cpu with a gate \[16, 64\]"):
        ampere.gate_pack(x, gate)
