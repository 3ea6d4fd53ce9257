"""What is counted, against counts made by hand."""

import math

import numpy as np
import pytest
import torch

from tests.simulator import recorded
from tests.simulator.recorded import block_sum, pack
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.simulator.counts import Counts, Footprint, Gpu, Traffic, predicted_time

if not simulator.available():
    pytest.skip("needs a C++ compiler", allow_module_level=True)


def gate(rows: int = 2, columns: int = 1024) -> torch.Tensor:
    return recorded.gate(rows, columns, shift=2)


def test_one_thread_a_tile_touches_a_sector_with_every_lane():
    counts = pack(1, gate(rows=8)).counts  # 32 tiles: one warp
    reads = counts.global_reads
    assert reads == Traffic(requests=256, accesses=8192, bytes=16384, sectors=8192, lines=8192)
    assert reads.coalescing == 2 / 32 and counts.threads == 32
    assert counts.unique_bytes("gate", "read") == 16384
    assert counts.unique_bytes("gate", "written") == 0


def test_one_warp_a_tile_reads_whole_sectors():
    counts = pack(2, gate(rows=8)).counts
    assert counts.global_reads == Traffic(requests=256, accesses=8192, bytes=16384, sectors=512, lines=256)
    assert counts.global_reads.coalescing == 1 and counts.collectives == 256
    kept = int((gate(rows=8) > 0).sum())
    assert counts.global_writes.accesses == kept + 32 and counts.global_writes.bytes == 4 * (kept + 32)


def test_shared_memory_barriers_and_atomics():
    counts = block_sum().counts
    assert counts.shared_writes == Traffic(requests=2, accesses=64, bytes=256, wavefronts=2, ideal_wavefronts=2)
    assert counts.shared_reads.requests == 4 and counts.shared_reads.bank_conflicts == 0
    assert counts.barriers == 4 and counts.atomics.accesses == 64 and counts.atomics.sectors == 8
    assert math.isnan(counts.shared_reads.coalescing)
    assert Traffic(requests=3, wavefronts=96, ideal_wavefronts=3).bank_conflicts == 93


def test_divergent_branches():
    values = -torch.ones(1, 512)
    values[0, 3] = 1.0  # one of the two threads keeps its fourth value: one branch where they part
    assert pack(1, values).counts.divergent_branches == 1
    assert pack(1, values.abs()).counts.divergent_branches == 0


def test_a_larger_launch_is_predicted_from_a_small_one():
    """All work of packing is linear in the rows, so the scaled counts are those of the larger launch."""
    small, large = (pack(2, gate(rows=2).repeat(times, 1)).counts for times in (1, 3))
    grown = small.scaled(3)
    assert (grown.traffic, grown.collectives, grown.threads) == (large.traffic, large.collectives, large.threads)
    assert grown.footprints == large.footprints


def test_the_prediction_is_the_slowest_part():
    counts = Counts(
        global_reads=Traffic(requests=1, sectors=100, lines=25),
        shared_reads=Traffic(requests=1, wavefronts=15),
        global_writes=Traffic(requests=1, sectors=20, lines=5),
        footprints={"x": Footprint(30, 20, block_read_sectors=60, bytes=2048)},  # two blocks read the same 30 sectors
    )
    gpu = Gpu("toy", multiprocessors=2, clock_hz=10.0, memory_bytes_per_s=100.0, l2_bytes_per_s=400.0, source="made up")
    predicted = predicted_time(counts, gpu)
    assert predicted.bounds == {"device memory": 16.0, "L2 cache": 6.4, "L1 cache": 2.25}
    assert (predicted.seconds, predicted.limit) == (16.0, "device memory")


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


def test_what_is_refused():
    counts = block_sum().counts
    for call, named in (
        (lambda: counts.unique_bytes("gate", "read"), "'gate'.*x, y"),
        (lambda: counts.unique_bytes("x", "all"), "'all'"),
        (lambda: counts.scaled(0), "0"),
        (lambda: counts.scaled(2, ["up"]), "up"),
    ):
        with pytest.raises(InputError, match=named):
            call()


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
