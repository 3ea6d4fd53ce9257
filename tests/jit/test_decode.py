"""The decode kernels through the real compiler, for every architecture they run on. Needs no GPU."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from twell_lab import jit, launch_decode
from twell_lab.errors import StackError

try:
    jit.compiler()
except StackError as error:
    pytest.skip(f"kernels cannot be compiled here: {error}", allow_module_level=True)

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
MOST_SHARED = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}  # KiB a block may have
TOKENS = [1, 8, 16, 32, 64]
JOBS = [(c, torch.bfloat16, 2048, rows) for c, rows in itertools.product(CAPABILITIES, TOKENS)]
JOBS += [(c, torch.float16, 2048, rows) for c, rows in itertools.product(CAPABILITIES, (1, 64))]
JOBS += [((9, 0), torch.bfloat16, d_model, rows) for d_model, rows in itertools.product((8, 768, 2056, 5120), TOKENS)]


def called(job):
    (major, minor), dtype, d_model, rows = job
    return f"sm_{major}{minor} {str(dtype).removeprefix('torch.')} {d_model} {rows} tokens"


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    """Every job's cubin, compiled two at a time into a cache of its own."""
    folder = tmp_path_factory.mktemp("cubins")

    def made(job):
        capability, dtype, d_model, rows = job
        defines, _ = launch_decode.specialisation(dtype, d_model, rows, capability)
        return jit.compile(launch_decode.FILE, f"sm_{capability[0]}{capability[1]}", dict(defines), cache_in=folder)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.delenv("TWELL_LAB_CUBINS", raising=False)
        return dict(zip(JOBS, pool.map(made, JOBS)))


@pytest.mark.parametrize("job", JOBS, ids=called)
def test_no_spills_and_as_many_blocks_as_were_meant(job, cubins):
    capability, dtype, d_model, rows = job
    kernels = jit.resources(cubins[job].log)
    assert set(kernels) == {f"decode_gate_v{v}" for v in launch_decode.VERSIONS} | {"decode_down"}
    assert all(used["spill_bytes"] == 0 and used["stack_bytes"] == 0 for used in kernels.values()), kernels
    assert all(used["shared_bytes"] <= 48 * 1024 for used in kernels.values())
    defines, shared = launch_decode.specialisation(dtype, d_model, rows, capability)
    found, gate = dict(defines), kernels["decode_gate_v2"]
    assert gate["registers"] <= 255 and gate["registers"] * 32 * found["WARPS"] * found["RESIDENT"] <= 65_536
    assert gate["shared_bytes"] + shared <= MOST_SHARED[capability] * 1024
    if capability == (9, 0):  # a multiprocessor has 228 KiB, of which each block takes one for the system
        assert (gate["shared_bytes"] + shared + 1024) * found["RESIDENT"] <= 228 * 1024
    assert kernels["decode_down"]["registers"] * launch_decode._DOWN_THREADS <= 65_536


def test_how_tokens_are_rounded_up():
    assert [launch_decode.rounded_up(t) for t in (1, 2, 8, 9, 16, 17, 32, 33, 64)] == [1, 8, 8, 16, 16, 32, 32, 64, 64]
    assert {launch_decode.rounded_up(t) for t in range(1, launch_decode.MOST_TOKENS + 1)} == set(TOKENS)
