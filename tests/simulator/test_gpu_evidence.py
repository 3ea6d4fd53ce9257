"""The simulator against an H100: the bits of the outputs, and the sectors that the hardware counted."""

import pytest
import torch

from twell_lab import records, simulator
from twell_lab.bench import evidence

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
CASES = {case.name: case for case in evidence.cases()}
COUNTED = [(case, version) for case in evidence.counted() for version in case.versions]
SECTORS = ("global_read_requests", "global_read_sectors", "global_write_requests", "global_write_sectors")


def latest(name: str) -> records.Record:
    found = [record for record in records.load_all() if record.name == name]
    assert found, f"no record {name!r} in data/records"
    record = max(found, key=lambda record: record.date)
    if records.stale(record):
        pytest.skip(records.verify())  # raises unless data/records/UNVERIFIED.json excuses these kernels
    return record


def bits(t: torch.Tensor) -> torch.Tensor:
    """The tensor's bits; of a NaN only that it is one, which is all that IEEE 754 fixes."""
    if not t.is_floating_point():
        return t
    kind = {2: torch.int16, 4: torch.int32}[t.element_size()]
    return torch.where(t.isnan(), torch.full_like(t, torch.nan), t).view(kind)


@pytest.mark.parametrize("name", CASES)
def test_outputs_have_the_bits_that_the_gpu_made(name):
    (row,) = [row for row in latest("gpu-outputs").rows if row["case"] == name]
    assert set(row["outputs"]) == {str(v) for v in CASES[name].versions}
    for version, recorded in row["outputs"].items():
        recorded, made = evidence.decode(recorded), CASES[name].run(int(version))
        assert made.dtype == recorded.dtype and torch.equal(bits(made), bits(recorded)), version


@pytest.mark.parametrize("case,version", COUNTED, ids=[f"{c.kernel}_v{v}, {c.name.split(',')[0]}" for c, v in COUNTED])
def test_sectors_are_what_the_hardware_counts(case, version):
    kernel = f"{case.kernel}_v{version}"
    (row,) = [row for row in latest("gpu-counters").rows if (row["case"], row["kernel"]) == (case.name, kernel)]
    with simulator.watching("counts") as runs:
        case.run(version)
    (counts,) = [run.counts for run in runs if run.kernel == kernel]
    made = evidence.counts_of(counts)
    for name in SECTORS:
        assert made[name] == pytest.approx(row[name], rel=0.01, abs=0), name
    # The compiler may join neighbouring loads of shared memory into one wider load; here each is counted as written.
    # A store is never joined with one on the other side of a barrier.
    assert made["shared_write_requests"] == pytest.approx(row["shared_write_requests"], rel=0.01)


def test_a_tensor_survives_json():
    for t in (torch.tensor([1.0, torch.nan, -0.0]).bfloat16(), torch.arange(6).view(2, 3)):
        back = evidence.decode(evidence.encode(t))
        assert back.dtype == t.dtype and back.shape == t.shape and torch.equal(bits(back), bits(t))
