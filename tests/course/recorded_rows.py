"""Rows as the "inference" record has them, made up for the tests of notebook 09."""

from twell_lab.analysis.costs import Rates
from twell_lab.course.hopper import data as hopper
from twell_lab.records import Record

RATES = Rates(device="a GPU", dtype="bfloat16", matmul=800e12, bandwidth=3e12, l2=8e12, launch=0.0)
WHERE = "recorded on Some GPU, 2026-01-02"


def row(path="planned", ms=1.0, dense=2.0, nnz=29.0, tokens=16384, **more):
    shared = {"kind": "inference", "device": "NVIDIA H100", "dtype": "bfloat16", "tokens": tokens, "gated": True}
    shared |= {"d_model": 2048, "d_ff": 5632, "nnz": nnz, "workload": hopper.LOGNORMAL, "path": path, "ms": ms}
    shared |= {"dense_ms": dense, "x_dense": dense / ms, "where": WHERE}
    return shared | more


def compared(nnz, tokens=16384, twell=1.0, workload=hopper.LOGNORMAL, **more):
    """What one comparison leaves in the record: every path of one layer."""
    paths = {"dense eager": 2.0, "dense compiled": 1.9, "forced dense": 1.9, "forced twell": twell}
    paths |= {"planned": min(twell, 1.8), "planned compiled": min(twell, 1.8), "forced hot_cold 768": 1.5}
    rows = []
    for path, ms in paths.items():
        rows.append(row(path, ms, nnz=nnz, tokens=tokens, workload=workload, x_compiled=1.9 / ms, **more))
        if path.startswith("planned"):
            rows[-1]["choice"] = "twell"
        if tokens <= hopper.FEW and "compiled" not in path:
            rows.append(row(f"{path} (graph)", ms / 100, 0.02, nnz=nnz, tokens=tokens, workload=workload, **more))
    return rows


def gates(v3=0.5):
    times = {"gate GEMM (torch)": 0.52, "gate GEMM (torch), then pack": 0.62, "sm80 gate_pack": 0.9}
    times |= {"sm90 gate_pack v1": 0.58, "sm90 gate_pack v2": 0.56, "sm90 gate_pack v3": v3}
    return [row(path, ms, kind="gate", tflops=1.0) for path, ms in times.items()]


def everything():
    """Rows of every sort that the figures and tables take."""
    rows = [*compared(8), *compared(29.1, twell=1.2), *compared(120, twell=3.0), *gates()]
    for tokens in (1, 4, 16, 64):
        rows += compared(27 + tokens % 4, tokens=tokens)
    return [*rows, *compared(60, twell=2.4, workload="overflow: every row beyond the pool")]


def record(name, date, rows, kernels=("gone",)):
    """A record whose kernels have other hashes than today's, so that it is stale; without kernels it never is."""
    hashes = dict.fromkeys(kernels, "0" * 64)
    return Record(name, "a test", rows, date, commit=None, dirty=None, machine={}, kernels=hashes)
