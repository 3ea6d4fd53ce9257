"""The decode kernels through the real compiler, for every architecture they run on. Needs no GPU."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from twell_lab.core.errors import StackError
from twell_lab.cuda import cubins as jit
from twell_lab.ops import decode

try:
    jit.compiler()
except StackError as error:
    pytest.skip(f"kernels cannot be compiled here: {error}", allow_module_level=True)

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
MOST_SHARED = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}  # KiB a block may have
TOKENS = [1, 8, 16, 32, 64]
D_FF = {
    3: 5632,
    2: 8192,
}  # widths for which, on 132 multiprocessors and with many tokens, so many tiles a block are best
# Each job: capability, dtype, d_model, d_ff, rows.
JOBS = [(c, torch.bfloat16, 2048, D_FF[3], rows) for c, rows in itertools.product(CAPABILITIES, TOKENS)]
JOBS += [(c, torch.float16, 2048, D_FF[3], rows) for c, rows in itertools.product(CAPABILITIES, (1, 64))]
JOBS += [
    ((9, 0), torch.bfloat16, d_model, D_FF[3], rows)
    for d_model, rows in itertools.product((8, 768, 2056, 5120), TOKENS)
]
JOBS += [
    ((9, 0), dtype, 2048, D_FF[2], rows) for dtype, rows in itertools.product((torch.bfloat16, torch.float16), (32, 64))
]


def called(job):
    (major, minor), dtype, d_model, d_ff, rows = job
    return f"sm_{major}{minor} {str(dtype).removeprefix('torch.')} {d_model} {d_ff} {rows} tokens"


def specialised(job):
    capability, dtype, d_model, d_ff, rows = job
    return decode.specialisation(dtype, d_model, rows, decode.shape_for(rows, d_ff, capability, 132))


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    """Every job's cubin, compiled two at a time into a cache of its own."""
    folder = tmp_path_factory.mktemp("cubins")

    def made(job):
        (capability, *_), (defines, _) = job, specialised(job)
        return jit.compile(decode.FILE, f"sm_{capability[0]}{capability[1]}", dict(defines), cache_in=folder)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.delenv("TWELL_LAB_CUBINS", raising=False)
        return dict(zip(JOBS, pool.map(made, JOBS)))


@pytest.mark.parametrize("job", JOBS, ids=called)
def test_no_spills_and_as_many_blocks_as_were_meant(job, cubins):
    capability = job[0]
    kernels = jit.resources(cubins[job].log)
    assert set(kernels) == {f"decode_gate_v{v}" for v in decode.VERSIONS} | {"decode_down"}
    assert all(used["spill_bytes"] == 0 and used["stack_bytes"] == 0 for used in kernels.values()), kernels
    assert all(used["shared_bytes"] <= 48 * 1024 for used in kernels.values())
    defines, shared = specialised(job)
    found, gate = dict(defines), kernels["decode_gate_v2"]
    assert gate["registers"] <= 255 and gate["registers"] * 32 * found["BLOCK_WARPS"] * found["RESIDENT"] <= 65_536
    assert gate["shared_bytes"] + shared <= MOST_SHARED[capability] * 1024
    if capability == (9, 0):  # a multiprocessor has 228 KiB, of which each block takes one for the system
        assert (gate["shared_bytes"] + shared + 1024) * found["RESIDENT"] <= 228 * 1024
    assert kernels["decode_down"]["registers"] * decode._DOWN_THREADS <= 65_536


def test_how_tokens_are_rounded_up():
    assert [decode.rounded_up(t) for t in (1, 2, 8, 9, 16, 17, 32, 33, 64)] == [1, 8, 8, 16, 16, 32, 32, 64, 64]
    assert {decode.rounded_up(t) for t in range(1, decode.MOST_TOKENS + 1)} == set(TOKENS)


def test_tiles_a_block():
    tiles = lambda rows, d_ff, capability=(9, 0): decode.shape_for(rows, d_ff, capability, 132)[0]  # noqa: E731
    assert [tiles(rows, 5632) for rows in TOKENS] == [1, 1, 1, 3, 3]
    assert tiles(64, D_FF[2]) == 2 and tiles(64, 3072) == 2 and tiles(64, 18944) == 3
    assert all(tiles(rows, d_ff, (8, 6)) == 1 for rows in TOKENS for d_ff in (333, 5632))


def test_every_macro_that_a_call_may_need_is_among_the_builds():
    made = set(decode.builds(torch.bfloat16, (2048, 100)))
    assert {(decode.FILE, specialised(job)[0]) for job in JOBS if job[1:3] == (torch.bfloat16, 2048)} <= made
    assert all(dict(defines)["D_MODEL"] == 2048 for _, defines in made)
