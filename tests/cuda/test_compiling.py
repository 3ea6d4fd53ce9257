"""The real compiler on everything that is declared: every kernel, its builds, every architecture. Needs no GPU."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from twell_lab.core import StackError
from twell_lab.cuda import cubins as jit
from twell_lab.cuda import macros, registry, sources

from .test_macros import SHARED, capability

try:
    jit.compiler()
except StackError as error:
    pytest.skip(f"kernels cannot be compiled here: {error}", allow_module_level=True)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REGISTERS = 65_536  # of a multiprocessor; 255 is the most that one thread can use
THREADS = {"sm_75": 1024, "sm_86": 1536, "sm_89": 1536, "sm_120": 1536}  # that a multiprocessor holds; others: 2048
LEAST_THREADS = 448  # that should be under way on a multiprocessor at the least, where no tensor cores are fed
# Bytes, stores and loads together, in kernels that may spill: outside of their loops, or what does not change in one.
MOST_SPILLED = {"smxx_train_lost": 700, "smxx_lost_weights": 3610, "smxx_weight_gradients": 128, "sm90_gate_pack": 128}
MOST_SPILLED |= {"sm80_train_lost": 72, "smxx_listed": 76}
OTHERS = {*filter(None, macros.ACTIVATIONS.values()), "BOTH", "SIGNED"}  # of other activations than the ReLU
DECODED = list(product((1, 8, 16, 32, 64), (5632, 8192)))  # tokens, d_ff: the second wants fewer bands a block


def _jobs() -> list[tuple[str, str, tuple]]:
    """(architecture of the GPU, kernel, macros) of what is compiled."""
    jobs = []

    def add(arch, dtypes, widths=(2048,), others=False):
        built = registry.builds(capability(arch), dtypes, widths)
        jobs.extend((arch, kernel.name, each) for kernel, each in built if others or not OTHERS & dict(each).keys())

    for arch in jit.ARCHITECTURES:
        dtype = FP16 if arch == "sm_75" else BF16  # the type that has tensor cores there
        add(arch, [dtype], others=arch in ("sm_75", "sm_80", "sm_90", "sm_120"))
        newest = macros.setup_for(capability(arch)).version
        setups = [macros.setup_for(capability(arch), version) for version in range(1, newest)]
        jobs.extend((arch, "sm80_gate_pack", setup.defines(dtype)) for setup in setups)
    add("sm_75", [FP32])
    add("sm_90", [FP16, FP32])
    add("sm_90", [BF16], [8, 64, 768, 2056, 5120])
    for kernel in ("sm90_gate_up", "sm90_down_sums", "sm90_down_rows"):  # blocks on their own
        jobs.append(("sm_90", kernel, (*macros.value(BF16), ("CLUSTER", 1))))
    turing = [macros.setup_for((7, 5), version).defines(FP16) for version in (1, 2, 3)]
    jobs.extend(("sm_90", "sm80_gate_pack", each) for each in turing)  # sm_75's way, which tests take there
    return list(dict.fromkeys(jobs))


JOBS = _jobs()


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    """Every job's cubin, compiled two at a time into a cache of its own."""
    folder = tmp_path_factory.mktemp("cubins")

    def made(job):
        arch, name, defines = job
        kernel = registry.KERNELS[name]
        return jit.compile(kernel.file, kernel.target(arch), dict(defines), cache_in=folder)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.delenv("TWELL_LAB_CUBINS", raising=False)
        return dict(zip(JOBS, pool.map(made, JOBS)))


def called(job):
    arch, name, defines = job
    return " ".join([arch, name, *(key if value is True else f"{key}={value}" for key, value in defines)])


@pytest.mark.parametrize("job", JOBS, ids=called)
def test_registers_spills_and_shared_memory(job, cubins):
    (arch, name, defines), log = job, cubins[job].log
    kernel = registry.KERNELS[name]
    assert cubins[job].image.startswith(b"\x7fELF") and f"for '{kernel.target(arch)}'" in log
    found = jit.resources(log)
    entries = kernel.entries((*defines, ("__CUDA_ARCH__", 10 * int(arch.removeprefix("sm_")))))
    assert found and set(found) == set(entries)
    for entry, used in found.items():
        threads = entries[entry].threads
        assert 0 < used["registers"] <= 255 and used["shared_bytes"] <= 48 * 1024
        assert used["spill_bytes"] <= MOST_SPILLED.get(name, 0), entry
        assert used["stack_bytes"] == 0 or name in MOST_SPILLED, entry
        # Registers are handed out eight at a time.
        resident = REGISTERS // (-(-used["registers"] // 8) * 8 * threads) * threads
        meant = min(entries[entry].resident * threads, THREADS.get(arch, 2048))
        least = LEAST_THREADS // threads * threads if kernel.simulated else 0
        assert resident >= max(meant, least, threads), f"{entry}: {used}, {threads} threads"


@pytest.mark.parametrize("job", [job for job in JOBS if registry.KERNELS[job[1]].alone], ids=called)
def test_wgmma_runs_beside_what_surrounds_it(job, cubins):
    _, name, defines = job
    assert "serialized" not in cubins[job].log and "setmaxnreg" not in cubins[job].log  # ptxas's words for giving up
    # 168 for each of 384 threads are all that a multiprocessor has; the warpgroups then deal them out anew.
    assert {used["registers"] for used in jit.resources(cubins[job].log).values()} == {168}
    whole = {"sm90_gate_pack": "SHARED_BYTES", "sm90_down_sums": "EPILOGUE"}.get(name, "OUT_END")
    assert sources.number(f"{name}.cu", whole, defines) <= SHARED["sm_90"] * 1024


@pytest.mark.parametrize("arch", [arch for arch in jit.ARCHITECTURES if capability(arch) >= (8, 0)])
@pytest.mark.parametrize("rows, d_ff", DECODED)
def test_decode_finds_its_cubin_and_enough_shared_memory(rows, d_ff, arch, cubins):
    defines, dynamic = macros.decode(BF16, 2048, rows, macros.decode_shape(rows, d_ff, capability(arch), 132))
    found = jit.resources(cubins[arch, "sm80_decode", defines].log)["decode_gate_v2"]["shared_bytes"] + dynamic
    assert found <= SHARED[arch] * 1024
    if arch == "sm_90":  # a multiprocessor has 228 KiB, of which each block takes one for the system
        assert (found + 1024) * dict(defines)["RESIDENT"] <= 228 * 1024
