"""What the notebook on kernels computes: workloads, sources, altered copies, recorded times and predictions."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from twell_lab import simulator
from twell_lab.core.errors import InputError
from twell_lab.course.first_kernels import data as kernels
from twell_lab.formats import TwELL
from twell_lab.records.record import Record
from twell_lab.simulator.counts import Counts, Footprint, Traffic

needs_compiler = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


def test_the_reference_packs_where_no_kernel_can(monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_LAB_CXX", str(tmp_path / "none"))
    gate = kernels.gate(3, 600, 9)
    words, by = kernels.pack(gate, 1)
    assert by == "the reference" and kernels.same_words(words, gate)


@needs_compiler
def test_the_simulator_packs_the_same_words():
    gate = kernels.gate(3, 600, 40)
    words, by = kernels.pack(gate, 2)
    assert by == "pack_v2, in the simulator" and kernels.same_words(words, gate)


def test_words_that_differ_are_seen_and_words_never_written_are_not_looked_at():
    gate = kernels.gate(2, 512, 20)
    words = TwELL.from_gate(gate).packed.clone()
    count = int(words[0, 0, 0])
    words[0, 0, count + 1] = 77
    assert kernels.same_words(words, gate)
    words[0, 0, count] += 1
    assert not kernels.same_words(words, gate) and not kernels.same_words(words[:1], gate)


# ---- workloads ----


def test_a_gate_fires_exactly_where_it_is_asked_to():
    gate = kernels.gate(5)
    assert gate.shape == (5, 5632) and gate.dtype == torch.bfloat16
    assert ((gate > 0).sum(1) == 29).all() and (gate != 0).all()
    assert torch.equal(gate, kernels.gate(5)) and not torch.equal(gate[0] > 0, gate[1] > 0)
    # The frequent columns come up again and again: 40 x 29 values lie in far fewer columns than drawn evenly.
    assert (kernels.gate(40) > 0).any(0).sum() < 800


@needs_compiler
def test_a_layer_runs_both_kernels():
    layer = kernels.Layer(2, d_model=64, d_ff=512, nnz=6)
    assert layer.off_by(layer.gated(1)) < 0.01 < layer.off_by(2 * layer.gated(1))
    exact = layer.gate.double().relu() @ layer.down_t.double()
    assert (layer.down(1).double() - exact).norm() < 0.01 * exact.norm()


# ---- sources ----


def test_the_source_of_a_kernel_is_that_of_the_file():
    lines = kernels.source("smxx_pack.cu", "pack_v1").splitlines()
    assert lines[0].endswith('extern "C" __global__ void __launch_bounds__(128)') and lines[-1].endswith("}")
    file = (kernels.folders.kernels_dir() / "smxx_pack.cu").read_text().splitlines()
    for line in lines:
        number, _, text = line.strip().partition("  ")
        assert file[int(number) - 1].endswith(text)
    assert "tile_of" in kernels.source("smxx_pack.cu", "tile_of").splitlines()[0]


def test_a_part_of_a_function():
    lines = kernels.source("smxx_pack.cu", "pack_v2", at="for (int base").splitlines()
    assert "for (int base" in lines[0] and lines[-1].split() == [lines[-1].split()[0], "}"] and len(lines) < 12
    with pytest.raises(InputError, match="while"):
        kernels.source("smxx_pack.cu", "pack_v2", at="while")
    with pytest.raises(InputError, match="pack_v9"):
        kernels.source("smxx_pack.cu", "pack_v9")


def test_an_altered_copy_keeps_its_line_numbers(tmp_path):
    original = (kernels.folders.kernels_dir() / "smxx_gated.cu").read_text()
    barrier = " " * 12 + "__syncthreads();"
    first, second = (kernels.altered("smxx_gated.cu", barrier, "", tmp_path / f"{i}.cu", i).read_text() for i in (1, 2))
    assert first != second and all(text.count("\n") == original.count("\n") for text in (first, second))
    assert all(text.count(barrier) == original.count(barrier) - 1 for text in (first, second))
    both = kernels.altered("smxx_pack.cu", "++count;\n        if", "if", tmp_path / "two.cu").read_text()
    assert both.count("\n") == (kernels.folders.kernels_dir() / "smxx_pack.cu").read_text().count("\n")
    for which in (0, 9):
        with pytest.raises(InputError, match="occurs"):
            kernels.altered("smxx_gated.cu", barrier, "", tmp_path / "x.cu", which)


@needs_compiler
def test_a_fault_is_given_back_and_other_errors_are_not_swallowed(tmp_path):
    file = tmp_path / "k.cu"
    file.write_text('extern "C" __global__ void k(float* a, int n) { a[n] = 1.0f; }')
    program = simulator.compile(file)
    assert kernels.fault_of(lambda: program.launch("k", 1, 1, (torch.zeros(3), 2))) is None
    fault = kernels.fault_of(lambda: program.launch("k", 1, 1, (torch.zeros(3), 3)))
    assert type(fault).__name__ == "OutOfBounds" and fault.array == "a"
    with pytest.raises(InputError):
        kernels.fault_of(lambda: program.launch("k", 1, 1, (torch.zeros(3),)))


# ---- recorded, measured, predicted ----


def record(device: str, ms: float, date: str) -> Record:
    row = {"kind": "kernel", "device": device, "tokens": 64, "path": "pack_v1", "ms": ms}
    return Record(
        name="portable",
        purpose="a test",
        rows=[row, {**row, "tokens": 1}, {"test": "no measurement"}],
        date=date,
        commit=None,
        dirty=None,
        kernels={"gone": "0" * 64},
        machine={},
    )


def test_recorded_times_are_the_newest_of_the_wanted_gpu(keep):
    keep(
        record("NVIDIA H100", 2.0, "2026-01-01T00:00:00Z"),
        record("NVIDIA H100", 1.0, "2026-01-02T00:00:00Z"),
        record("NVIDIA T4", 9.0, "2026-01-03T00:00:00Z"),
    )
    times = kernels.recorded(64)
    assert list(times) == ["pack_v1"] and times["pack_v1"]["ms"] == 1.0
    assert times["pack_v1"]["where"] == "recorded on NVIDIA H100, 2026-01-02; stale: code has changed since"
    assert kernels.recorded(64, device="T4")["pack_v1"]["ms"] == 9.0 and kernels.recorded(65) == {}
    keep(replace(record("NVIDIA H100", 1.0, "2026-01-02T00:00:00Z"), kernels={}))
    assert kernels.recorded(64)["pack_v1"]["where"] == "recorded on NVIDIA H100, 2026-01-02"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_timed():
    assert kernels.yours() == {} and "no GPU" in kernels.on_the_gpu(kernels.gate(1, 256, 3))


def counted(lines: int, requests: int = 1000, unique: int = 300) -> Counts:
    return Counts(
        global_reads=Traffic(requests=requests, bytes=64 * requests, sectors=2 * requests, lines=lines),
        footprints={"gate": Footprint(unique, 0)},
    )


def test_predictions_stand_beside_the_times():
    counts = {"pack_v1": counted(lines=10**6), "pack_v2": counted(lines=10), "pack_v3": counted(lines=10)}
    slow = 1e3 * simulator.predicted_time(counts["pack_v1"]).seconds
    fast = 1e3 * simulator.predicted_time(counts["pack_v2"]).seconds
    times = {"pack_v1": {"ms": 1.1 * slow, "where": "recorded"}, "pack_v2": {"ms": 3 * fast, "where": "recorded"}}
    rows = kernels.against_time(counts, times, {"pack_v1": {"ms": 7.0, "where": "yours, now"}})
    assert [row["measured_ms"] for row in rows] == [1.1 * slow, 3 * fast, None]
    assert [row["yours_ms"] for row in rows] == [7.0, None, None] and rows[0]["yours"] == "yours, now"
    one, own, two, three, last = kernels.verdicts(rows).splitlines()
    assert own == "  yours, now: 7.000 ms; nothing is predicted for it"
    assert "1.1 times that: the traffic explains it" in one and "3.0 times that: something else" in two
    assert (
        three.endswith("no time is recorded") and last == "Within a factor of 1.25 of the prediction: pack_v1 (1 of 2)."
    )
    rows[0]["measured_ms"] = 0.5 * slow
    assert "0.50 times that: faster than the limit" in kernels.verdicts(rows) and "none (0 of 2)" in kernels.verdicts(
        rows
    )
    assert (
        len(kernels.verdicts(kernels.against_time(counts, {})).splitlines()) == 3
    )  # nothing recorded, nothing summed up


def test_the_readers_gpu_has_a_prediction_of_its_own(monkeypatch):
    counts = {"pack_v1": counted(lines=10, unique=10**6)}  # what memory delivers is the limit
    own = {"pack_v1": {"ms": 7.0, "where": "yours, now, on Tesla T4"}}
    here = SimpleNamespace(name="Tesla T4", multi_processor_count=40, clock_rate=1_590_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: here)
    gpu = kernels.gpu_here()
    assert (gpu.multiprocessors, gpu.clock_hz) == (40, 1.59e9) and 250e9 < gpu.memory_bytes_per_s < 320e9
    (row,) = kernels.against_time(counts, {}, own, gpu)
    assert row["yours_predicted_ms"] > 5 * max(row["predicted_ms"].values())
    assert f"Tesla T4: 7.000 ms; predicted for it {row['yours_predicted_ms']:.3f}" in kernels.verdicts([row])
    (row,) = kernels.against_time(counts, {}, own)
    assert "7.000 ms; nothing is predicted for it" in kernels.verdicts([row])
    here.name = "a GPU of next year"
    assert kernels.gpu_here() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.gpu_here() is None


def versus(version: str, limit: str, times: float | None, l1_hits: float | None = None) -> dict:
    return {
        "version": version,
        "predicted_ms": {limit: 2.0, "another part": 1.0},
        "l1_hits": l1_hits,
        "measured_ms": None if times is None else 2 * times,
    }


def test_a_limit_that_was_beaten_is_said_with_how_that_can_be():
    rows = [
        versus("down_v2", "L2 cache", 0.81, 0.12),
        versus("gated_v2", "L2 cache", 0.94, 0.058),
        versus("slow", "L2 cache", 1.3),
    ]
    lines = kernels.verdicts(rows).splitlines()
    assert lines[0].endswith("0.81 times that: faster than the limit") and "0.94 times that: faster" in lines[1]
    assert lines[3] == "Within a factor of 1.25 of the prediction: down_v2, gated_v2 (2 of 3)."
    assert lines[4].startswith(
        "Faster than the limit of the L2 cache: down_v2 by 19%, gated_v2 by 6%. How that can be: "
    )
    assert "once for every block" in lines[4] and "slow" not in lines[4]
    assert "12% for down_v2, 6% for gated_v2" in lines[5] and "too little for down_v2: there the L2" in lines[5]
    assert kernels.summary(rows[1:]).endswith("That is enough.")
    assert "counters" not in kernels.summary([versus("a", "L2 cache", 0.9)])  # without a record of them
    assert "register" in kernels.summary([versus("a", "L1 cache", 0.9)])
    assert "before" in kernels.summary([versus("a", "device memory", 0.9, 0.5)])
    assert "Faster" not in kernels.summary(
        [versus("a", "L2 cache", 0.999), versus("b", "L2 cache", None)]
    )  # the same, rounded
    assert kernels.summary([versus("b", "L2 cache", None)]) == ""


def test_the_counters_of_the_gpu_stand_with_its_times(keep):
    rows = [
        {"case": f"{tokens} tokens, bf16", "kernel": "pack_v1", "l1_hits_percent": 10.0 * tokens} for tokens in (6, 64)
    ]
    counters = Record(
        name="gpu-counters",
        purpose="a test",
        rows=rows,
        date="2026-01-02T00:00:00Z",
        commit=None,
        dirty=None,
        kernels={"gone": "0" * 64},
        machine={"gpus": [{"name": "NVIDIA H100"}]},
    )
    rows[1]["l1_hits_percent"] = 25.0
    keep(record("NVIDIA H100", 1.0, "2026-01-02T00:00:00Z"), counters)
    assert kernels.recorded(64)["pack_v1"]["l1_hits"] == 0.25 and kernels.recorded(1)["pack_v1"]["l1_hits"] is None


def test_tables_of_counts():
    both = {"a": counted(lines=7), "b": counted(lines=8, requests=5)}
    assert kernels.traffic(both).splitlines()[1].split() == ["a", "1,000", "64,000", "2,000", "64,000", "7", "0"]
    assert kernels.fused_traffic(both).splitlines()[2].split() == ["b", "5", "10", "320", "0", "0", "0"]


@needs_compiler
def test_counts_stand_beside_those_of_the_hardware(keep):
    rows = [
        {"case": case.name, "kernel": f"pack_v{version}", "global_read_sectors": 1000, "global_write_sectors": 10**6}
        for case in kernels.evidence.counted()
        if case.kernel == "pack"
        for version in case.versions
    ]
    found = Record(
        name="gpu-counters",
        purpose="a test",
        rows=rows,
        date="2026-01-02T00:00:00Z",
        commit=None,
        dirty=None,
        kernels={"gone": "0" * 64},
        machine={"gpus": [{"name": "NVIDIA H100"}]},
    )
    keep(found)
    *table, last = kernels.beside_hardware("pack").splitlines()
    assert len(table) == 9 and table[1].split()[:6] == ["pack_v1", "64", "tokens", "65,536", "1,000", "3,479"]
    assert last == (
        "Hardware: NVIDIA H100, 2026-01-02; stale: code has changed since. "
        f"The largest difference is {(65536 - 1000) / 1000:.1%}."
    )
    keep()
    assert kernels.beside_hardware("pack").startswith("No hardware counters")


@needs_compiler
def test_the_busiest_line():
    gate = kernels.gate(1, 512, 4)
    with simulator.watching("counts") as runs:
        kernels.pack(gate, 2)
    assert (
        "in[c]" in kernels.busiest(runs[-1].counts).text
        and "out[" in kernels.busiest(runs[-1].counts, "global_writes").text
    )
