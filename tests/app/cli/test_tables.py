"""The tables of the README and of docs/: which record and rows they are made of, and what they say without one."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from twell_lab import records
from twell_lab.app import tables

NAMES = re.findall(r"tables\.(\w+)\(", (Path(__file__).parents[3] / "docs" / "measured.md").read_text())


def record(name: str, day: int, rows: list[dict]) -> records.Record:
    shared = {"device": "NVIDIA H100", "kind": "x", "ms": 1.0}
    rows = [shared | row for row in rows]
    return records.Record(name, "a test's own", rows, f"2026-01-0{day}T00:00:00Z", None, None, {}, kernels={})


def cells(table: str) -> list[list[str]]:
    """The head and the lines of a table."""
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return [head, *lines]


@pytest.mark.parametrize("name", [*NAMES, "whole_beside_layer"])
def test_without_records_a_table_says_so(name):
    others = [record(kind, 1, []) for kind in ("inference", "training", "arena", "bench-model", "pruning")]
    for recorded in ([], others):
        assert cells(getattr(tables, name)(recorded)) == [["figures"], ["nothing is recorded yet"]]


SHAPE = {"kind": "inference", "gated": True, "d_model": 2048, "d_ff": 5632}


def test_the_table_of_calls_takes_the_drawn_workload_with_29_neurons():
    walls = {"dense eager": 0.2, "planned": 0.1, "dense compiled": 0.15, "planned compiled": 0.3}

    def rows(factor: float) -> list[dict]:
        shape = SHAPE | {"workload": "independent, lognormal", "nnz": 29.0}
        found = [
            {**shape, "tokens": tokens, "path": path, "wall_ms": factor * ms * tokens, "choice": choice}
            | {"dense_wall_ms": factor * 0.2 * tokens}
            for tokens, choice in ((2048, "hot_cold 512"), (1, "twell"))
            for path, ms in walls.items()
        ]
        others = ({"workload": "heavy rows: 8"}, {"nnz": 8.0}, {"d_ff": 4096})
        return [found[0] | other | {"wall_ms": 99.0} for other in others] + found

    assert cells(tables.calls([record("inference", 1, rows(7.0)), record("inference", 2, rows(1.0))])) == [
        ["milliseconds a call, NVIDIA H100, 2026-01-02", "1 token", "2,048 tokens"],
        ["torch's dense layer", "0.2", "410"],
        ["planned", "0.1", "205"],
        ["it takes", "twell", "hot_cold 512"],
        ["times as fast", "2.00", "2.00"],
        ["times as fast, both under torch.compile", "0.50", "0.50"],
    ]
    old = replace(record("inference", 2, rows(1.0)), kernels={"smxx_pack": 64 * "0"})
    assert "2026-01-02; stale: code has changed since |" in tables.calls([old])


def test_the_table_of_the_model_compares_like_with_like():
    times = {"dense eager": 30.0, "planned": 20.0, "planned for graphs": 999.0, "dense eager (graph)": 1200.0}
    times |= {"planned for graphs (graph)": 600.0, "dense compiled": 10.0, "planned for graphs compiled": 8.0}
    shared = {"kind": "model_decode", "workload": "drawn 2B Llama, decode step, batch 1", "head": True}
    rows = [shared | {"path": path, "wall_ms": ms, "wall_samples": [ms] * 5} for path, ms in times.items()]
    energy = {"mj_per_token": 2.5, "peak_bytes": 2**25, "loss": 1.0, "kind": "model_forward"}
    rows[:2] = [row | energy for row in rows[:2]]
    others = [row | {"workload": "drawn 1B Llama, decode step, batch 1"} for row in rows[:2]]
    assert cells(tables.model([record("bench-model", 1, rows + others)])) == [
        ["milliseconds, NVIDIA H100, 2026-01-01", "dense", "planned", "times as fast", "middle half"]
        + ["mJ a token", "peak MiB", "loss, nats"],
        ["forward, decode step, batch 1", "30", "20", "1.50", "1.50 to 1.50", "2.5 to 2.5", "32 to 32"]
        + ["1.0000 to 1.0000"],
        ["decode step, batch 1, CUDA graph, planned for graphs", "1,200", "600", "2.00", "2.00 to 2.00", "", "", ""],
        ["decode step, batch 1, compiled, planned for graphs", "10", "8", "1.25", "1.25 to 1.25", "", "", ""],
    ]


def test_tables_are_of_the_gpu_that_pages_tell_of_where_it_was_recorded():
    def made(gpu: str, day: int, us: float) -> records.Record:
        found = record("arena", day, [{"kind": "arena", "workload": "8 layers, one", "path": "teal", "ms": us / 1e3}])
        found.rows = [each | {"device": gpu} for each in found.rows]
        return found

    told, other = made("NVIDIA H100 80GB HBM3", 1, 2.0), made("NVIDIA H200", 2, 3.0)
    assert tables.arena([told, other]) == tables.arena([told]) and "| teal | 2.0" in tables.arena([told])
    assert "NVIDIA H200" in tables.arena([other]) and "| teal | 3.0" in tables.arena([other])
    assert records.newest([told, other], "arena", "H200") is other
