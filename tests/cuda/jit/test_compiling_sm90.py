"""The Hopper kernels through the real compiler: what ptxas says of registers and of wgmma. Needs no GPU."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from twell_lab.core.errors import StackError
from twell_lab.cuda import cubins as jit
from twell_lab.ops import hopper_pack

try:
    jit.compiler()
except StackError as error:
    pytest.skip(f"kernels cannot be compiled here: {error}", allow_module_level=True)

MOST_SPILLED = 128  # bytes, stores and loads together: numbers that do not change within a tile, read between k-steps
JOBS = hopper_pack.builds()


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cubins")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.delenv("TWELL_LAB_CUBINS", raising=False)
        return dict(zip(JOBS, pool.map(lambda job: jit.compile(job[0], "sm_90a", dict(job[1]), cache_in=folder), JOBS)))


@pytest.mark.parametrize("job", JOBS, ids=lambda job: " ".join([job[0], *(f"{k}={v}" for k, v in job[1])]))
def test_the_pipeline_stays_in_registers(job, cubins):
    log = cubins[job].log
    ((name, used),) = jit.resources(log).items()
    assert name.endswith(f"_v{dict(job[1])['VERSION']}")
    # 168 for each of 384 threads are all that a multiprocessor has; the warpgroups then deal them out anew.
    assert used["registers"] == 168 and used["spill_bytes"] <= MOST_SPILLED and used["shared_bytes"] == 0
    assert "serialized" not in log and "setmaxnreg" not in log  # ptxas's words for wgmma or setmaxnreg given up
    assert hopper_pack.RING_BYTES < hopper_pack._PACK_SHARED <= 227 * 1024
