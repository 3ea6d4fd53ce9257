"""What is counted, against counts made by hand and against a model of the kernels."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator import modelled
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.simulator.counts import Counts, Footprint, Gpu, Traffic, predicted_time
from twell_lab.simulator.report import ArrayInfo


def gate(rows: int = 2, columns: int = 1024, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((rows, columns)) - 2
    return modelled.rounded(values)


def counted(block: modelled.Block) -> Counts:
    raw = block.raw()
    return Counts.of(raw["sites"], raw["footprint"], block.lines, block.arrays, block.threads)


def test_one_thread_a_tile_touches_a_sector_with_every_lane():
    counts = counted(modelled.pack_v1(gate(rows=8), 256, 32))  # 32 tiles: one warp
    reads = counts.global_reads
    assert reads == Traffic(requests=256, accesses=8192, bytes=16384, sectors=8192, lines=8192)
    assert reads.coalescing == 2 / 32 and counts.threads == 32
    assert counts.unique_bytes("gate") == counts.unique_bytes("gate", "read") == 16384
    assert counts.unique_bytes("gate", "written") == 0


def test_one_warp_a_tile_reads_whole_sectors():
    counts = counted(modelled.pack_v2(gate(rows=8), 256, 32))
    assert counts.global_reads == Traffic(requests=256, accesses=8192, bytes=16384, sectors=512, lines=256)
    assert counts.global_reads.coalescing == 1 and counts.collectives == 256
    kept = int((gate(rows=8) > 0).sum())
    assert counts.global_writes.accesses == kept + 32 and counts.global_writes.bytes == 4 * (kept + 32)


def test_shared_memory_barriers_and_atomics():
    counts = counted(modelled.block_sum(np.arange(64.0)))
    assert counts.shared_writes == Traffic(requests=2, accesses=64, bytes=256, wavefronts=2, ideal_wavefronts=2)
    assert counts.shared_reads.requests == 4 and counts.shared_reads.bank_conflicts == 0
    assert counts.barriers == 4 and counts.atomics.accesses == 64 and counts.atomics.sectors == 64
    assert math.isnan(counts.shared_reads.coalescing)


def test_bank_conflicts_are_the_passes_beyond_the_ideal():
    site = np.zeros(1, modelled.SITES)
    site[0]["kind"], site[0]["space"], site[0]["requests"] = modelled.READ, 2, 3
    site[0]["wavefronts"], site[0]["ideal_wavefronts"] = 96, 3
    assert Counts.of(site, np.zeros(0, modelled.FOOTPRINT), {}, [], 32).shared_reads.bank_conflicts == 93


def test_lines_of_the_kernel_and_of_its_helpers():
    counts = counted(modelled.block_sum(np.arange(64.0)))
    inner = {(line.file, line.number): line for line in counts.by_line()}
    assert list(inner) == sorted(inner) and inner["helpers.cuh", 9].shared_reads.requests == 4
    assert inner["helpers.cuh", 9].function == "load" and ("sum.cu", 5) not in inner
    outer = {(line.file, line.number): line for line in counts.by_line("kernel")}
    assert outer["sum.cu", 5].shared_reads.requests == 4 and ("helpers.cuh", 9) not in outer
    assert outer["sum.cu", 5].text.startswith("for (int i") and outer["sum.cu", 4].barriers == 2


@settings(max_examples=20)
@given(
    st.integers(0, 99), st.sampled_from(["innermost", "kernel"]), st.sampled_from(["pack_v1", "pack_v2", "block_sum"])
)
def test_the_lines_add_up_to_the_totals(seed, where, kernel):
    block = (
        modelled.block_sum(np.arange(64.0) + seed)
        if kernel == "block_sum"
        else getattr(modelled, kernel)(gate(seed=seed), 256, 8)
    )
    counts = counted(block)
    lines = counts.by_line(where)
    for name, total in counts.traffic.items():
        assert sum((getattr(line, name) for line in lines), Traffic()) == total
    for name in ("collectives", "barriers", "divergent_branches"):
        assert sum(getattr(line, name) for line in lines) == getattr(counts, name)


def test_divergent_branches():
    values = np.full((1, 512), -1.0, np.float32)
    values[0, 3] = 1.0  # one of the two threads keeps its fourth value: one branch where they part
    assert counted(modelled.pack_v1(values, 256, 32)).divergent_branches == 1
    assert counted(modelled.pack_v1(np.abs(values), 256, 32)).divergent_branches == 0


def test_a_larger_launch_is_predicted_from_a_small_one():
    """All work of packing is linear in the rows, so the scaled counts are those of the larger launch."""
    rows = np.repeat(gate(rows=2), 4, axis=0)
    small, large = (counted(modelled.pack_v2(each, 256, 32)) for each in (rows[:2], rows[[0, 1, 0, 1, 0, 1]]))
    grown = small.scaled(3)
    assert (grown.traffic, grown.collectives, grown.threads) == (large.traffic, large.collectives, large.threads)
    assert grown.footprints == large.footprints


def test_weights_do_not_grow_with_the_rows():
    counts = counted(modelled.block_sum(np.arange(64.0)))
    assert counts.scaled(100).unique_bytes("x") == 100 * 256
    assert counts.scaled(100, same_size=["x"]).unique_bytes("x") == 256
    assert counts.scaled(100, same_size=["x"]).global_reads.bytes == 100 * 256


def test_the_prediction_is_the_slowest_part():
    sites = np.zeros(3, modelled.SITES)
    for site, space in zip(sites[:2], (1, 2), strict=True):
        site["kind"], site["space"], site["requests"] = modelled.READ, space, 1
    sites[0]["sectors"], sites[0]["lines"], sites[1]["wavefronts"] = 100, 25, 15
    sites[2]["kind"], sites[2]["space"], sites[2]["sectors"], sites[2]["lines"] = modelled.WRITE, 1, 20, 5
    footprint = np.array([(0, 30, 20, 60)], modelled.FOOTPRINT)  # two blocks read the same 30 sectors
    array = ArrayInfo("x", "global", np.dtype("f4"), (512,), None)
    counts = Counts.of(sites, footprint, {}, [array], 32)
    gpu = Gpu("toy", multiprocessors=2, clock_hz=10.0, memory_bytes_per_s=100.0, l2_bytes_per_s=400.0, source="made up")
    predicted = predicted_time(counts, gpu)
    assert predicted.bounds == {"device memory": 16.0, "L2 cache": 6.4, "L1 cache": 2.25}
    assert (predicted.seconds, predicted.limit) == (16.0, "device memory")
    assert "16000" in str(predicted) and str(predicted).index("device") < str(predicted).index("<-")


def test_rows_that_the_cache_does_not_keep_come_from_memory_again():
    counts = Counts(footprints={"w": Footprint(read_sectors=40, block_read_sectors=140, bytes=1280)})  # 4 rows of 320

    def memory(kept_bytes: float, rows) -> float:
        gpu = Gpu("toy", 1, 1.0, memory_bytes_per_s=32.0, l2_bytes_per_s=32.0, source="made up", kept_bytes=kept_bytes)
        return predicted_time(counts, gpu, rows).bounds["device memory"]  # sectors

    often = [1, 6, 2, 1]
    assert memory(0, {}) == memory(1280, {"w": often}) == 40  # nothing is known of rows; all fit
    assert memory(640, {"w": often}) == pytest.approx(40 + 0.2 * 100)  # the two that are read most are kept
    assert memory(639, {"w": often}) == pytest.approx(40 + 0.4 * 100)
    assert memory(0, {"w": often}) == pytest.approx(140)
    with pytest.raises(InputError, match="'x'.*touched w"):
        memory(0, {"x": often})


def test_as_plain_data():
    counts = counted(modelled.pack_v2(gate(), 256, 32))
    plain = json.loads(json.dumps(counts.to_dict()))
    assert plain["global_reads"]["sectors"] == counts.global_reads.sectors
    assert plain["footprints"]["gate"]["read_sectors"] * 32 == counts.unique_bytes("gate")
    assert sum(line["global_writes"]["bytes"] for line in plain["by_line"]) == counts.global_writes.bytes


def test_what_is_refused():
    counts = counted(modelled.block_sum(np.arange(64.0)))
    for call, named in (
        (lambda: counts.by_line("outer"), "'outer'"),
        (lambda: counts.unique_bytes("gate"), "'gate'.*x, y"),
        (lambda: counts.unique_bytes("x", "all"), "'all'"),
        (lambda: counts.scaled(0), "0"),
        (lambda: counts.scaled(2, ["up"]), "up"),
    ):
        with pytest.raises(InputError, match=named):
            call()


needs_a_compiler = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler (g++ or clang++)")


@needs_a_compiler
@pytest.mark.parametrize("kernel", ["pack_v1", "pack_v2"])
def test_the_simulator_counts_what_the_model_counts(kernel):
    values = gate(rows=8)
    model = counted(getattr(modelled, kernel)(values, 256, 32))
    tiles, block = values.size // 256, 32 if kernel == "pack_v1" else 256
    packed = np.zeros((8, 4, 32), np.int32)
    per_block = block if kernel == "pack_v1" else block // 32
    run = simulator.compile("smxx_pack.cu", {"VALUE_BF16": True}).launch(
        kernel,
        tiles // per_block,
        block,
        (torch.from_numpy(values).bfloat16(), packed, *values.shape, 256, 32),
        watch="counts",
    )
    assert run.counts.traffic == model.traffic
    assert run.counts.collectives == model.collectives and run.counts.threads == model.threads
    assert run.counts.footprints == model.footprints  # no two blocks read the same sector
    if kernel == "pack_v1":
        assert run.counts.divergent_branches == model.divergent_branches
    assert [line.text for line in run.counts.by_line() if line.global_writes.bytes] == [
        line.text for line in model.by_line() if line.global_writes.bytes
    ]


@needs_a_compiler
@pytest.mark.parametrize("cores", [1, 2])
def test_a_sector_is_counted_once_for_every_block_that_reads_it(tmp_path, cores):
    (tmp_path / "twice.cu").write_text(
        'extern "C" __global__ void twice(const float* x, float* y) {\n'
        "    for (int i = 0; i < 2; ++i) y[blockIdx.x * blockDim.x + threadIdx.x] += x[threadIdx.x];\n}\n"
    )
    x, y = np.ones(64, np.float32), np.zeros(5 * 64, np.float32)
    run = simulator.compile(tmp_path / "twice.cu").launch("twice", 5, 64, (x, y), watch="counts", cores=cores)
    at = run.counts.footprints["x"]
    assert (at.read_sectors, at.written_sectors, at.block_read_sectors) in ((8, 0, 40), (9, 0, 45))  # by its alignment
    assert (y == 2).all() and run.counts.global_reads.sectors > 2 * at.block_read_sectors
