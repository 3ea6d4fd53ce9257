"""What all benchmarks share: what is replayed as a graph, and with which row each row is compared."""

import pytest
import torch

from twell_lab.bench import host, rows
from twell_lab.ops import measure


@pytest.fixture
def clock(monkeypatch):
    """A clock of a GPU that only notes what it was given, and graphs that call what they were made of."""
    noted = []
    monkeypatch.setattr(measure, "time_cuda", lambda calls: noted.append([*calls]) or dict.fromkeys(calls, [1.0]))
    monkeypatch.setattr(measure, "graphed", lambda call: call)
    return noted


def test_calls_for_few_tokens_are_replayed_as_graphs_too_but_for_compiled_ones_and_parts(clock):
    calls = dict.fromkeys(("dense eager", "dense compiled", "twell"), lambda turn: None)
    parts = {"part: pack": lambda turn: None}
    samples = rows.clock_gpu(calls, measure.GRAPH_TOKENS, parts)
    assert clock == [[*calls, "part: pack"], ["dense eager (graph)", "twell (graph)"]]
    assert [*samples] == clock[0] + clock[1]
    assert [*rows.clock_gpu(calls, measure.GRAPH_TOKENS + 1)] == [*calls]


def test_a_row_is_compared_with_the_dense_layer_that_was_run_in_the_same_way():
    samples = {
        "dense eager": [4.0],
        "dense compiled": [3.0],
        "twell": [2.0],
        "part: pack": [1.0],
        "dense eager (graph)": [3.5],
        "twell (graph)": [1.75],
    }
    made = {row["path"]: row for row in rows.table({"kind": "made"}, samples, {"twell": {"choice": "twell"}})}
    assert made["twell"]["x_dense"] == 2.0 and made["twell"]["x_compiled"] == 1.5
    assert made["twell (graph)"]["x_dense"] == 2.0 and "x_compiled" not in made["twell (graph)"]
    assert made["twell"]["choice"] == made["twell (graph)"]["choice"] == "twell"
    assert made["part: pack"]["x_dense"] is None and made["part: pack"]["dense_ms"] is None


def test_host_times_are_the_rows_times_and_wall_times_stand_beside_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host, "D_FF", 600), monkeypatch.setattr(host, "ROUNDS", 2)
    monkeypatch.setattr(
        host.inference,
        "drawn",
        lambda tokens, d_model, d_ff, nnz: (
            *measure.workload(tokens, 32, d_ff, nnz, "lognormal", torch.bfloat16, "cpu"),
            [],
        ),
    )
    made = host.rows((3,))
    assert [row["workload"] for row in made] == ["forward"] * 4 + ["forward and backward"] * 3
    assert [row["path"] for row in made] == [
        "dense eager",
        "dense",
        "twell",
        "hot_cold 512",
        "dense eager",
        "dense",
        "twell",
    ]
    for row in made:
        assert row["kind"] == "host" and row["gated"] and row["tokens"] == 3 and len(row["samples"]) == 2
        assert row["wall_ms"] >= row["ms"] > 0 and row["x_dense"] == pytest.approx(row["dense_ms"] / row["ms"])
