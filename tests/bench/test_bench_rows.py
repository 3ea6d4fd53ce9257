"""What all benchmarks share: what is replayed as a graph, and with which row each row is compared."""

import math
from types import SimpleNamespace

import pytest
import torch

from twell_lab.bench import rows, training
from twell_lab.bench.forward import Case
from twell_lab.ops import clock as clocks

GPU = torch.device("cuda")


@pytest.fixture
def clock(monkeypatch):
    """Clocks of a GPU that only note what they were given, and graphs that call what they were made of."""
    noted, bursts = [], []
    monkeypatch.setattr(clocks, "time_cuda", lambda calls, **_: noted.append([*calls]) or dict.fromkeys(calls, [1.0]))
    monkeypatch.setattr(clocks, "graphed", lambda call: call)

    def time_bursts(calls, wait, *, rounds, count):
        wait()
        bursts.append(([*calls], rounds, count))
        return {name: ([0.5] * rounds, [2.0] * rounds) for name in calls}

    monkeypatch.setattr(clocks, "time_bursts", time_bursts)
    return SimpleNamespace(noted=noted, bursts=bursts)


def test_calls_for_few_tokens_are_replayed_as_graphs_too_but_for_compiled_ones(clock):
    calls = dict.fromkeys(("dense eager", "dense compiled", "dense max-autotune", "twell"), lambda turn: None)
    samples, bursts = rows.clocked(calls, GPU, tokens=clocks.GRAPH_TOKENS)
    replayed = ["dense eager (graph)", "dense max-autotune (graph)", "twell (graph)"]
    assert clock.noted == [[*calls], replayed]
    assert [*samples] == sum(clock.noted, [])
    assert [*bursts] == [*calls, *replayed]
    assert [*rows.clocked(calls, GPU, tokens=clocks.GRAPH_TOKENS + 1)[0]] == [*calls]
    assert [*rows.clocked(calls, GPU, tokens=clocks.GRAPH_TOKENS + 1, graphs=True)[0]] == [*calls, *replayed]
    everything = [f"{name} (graph)" for name in calls]
    assert [*rows.clocked(calls, GPU, tokens=clocks.GRAPH_TOKENS, compiled=True)[1]] == [*calls, *everything]


def test_a_row_is_compared_with_the_dense_layer_that_was_run_in_the_same_way():
    times = {"dense eager": 4.0, "dense compiled": 3.0, "twell": 2.0}
    times |= {"dense eager (graph)": 3.5, "twell (graph)": 1.75}
    bursts = {
        "dense eager": ([0.1, 0.2, 0.3], [4.0, 5.0, 6.0]),
        "twell": ([0.3, 0.4, 0.5], [2.0, 2.5, 3.0]),
        "dense eager (graph)": ([0.01], [3.0]),
        "twell (graph)": ([0.01], [1.5]),
    }
    samples, facts = {path: [ms] for path, ms in times.items()}, {"twell": {"choice": "twell"}}
    made = {row["path"]: row for row in rows.table({"kind": "made"}, samples, facts, bursts)}
    twell, graph = made["twell"], made["twell (graph)"]
    assert twell["x_dense"] == 2.0 and twell["x_compiled"] == 1.5 and twell["choice"] == graph["choice"] == "twell"
    assert graph["x_dense"] == 2.0 and "x_compiled" not in graph
    (alone,) = rows.table({}, {"twell": [2.0]}, base=None)
    assert alone["x_dense"] is None and alone["dense_ms"] is None and not any("wall" in key for key in alone)
    assert made["dense eager"]["wall_ms"] == made["dense eager"]["dense_wall_ms"] == 5.0
    assert (twell["wall_ms"], twell["wall_spread"], twell["dense_wall_ms"]) == (2.5, 0.5, 5.0)
    assert twell["host_us"] == pytest.approx(400) and twell["wall_samples"] == [2.0, 2.5, 3.0]
    assert (graph["wall_ms"], graph["dense_wall_ms"]) == (1.5, 3.0)


def test_what_raises_is_left_out_and_says_why():
    call = lambda turn: None

    def way(error):
        return call, {"error": rows.hold("y", error, 0.5)}

    ways = {path: (lambda error=error: way(error)) for path, error in (("a", 0.1), ("b", 0.6), ("c", math.nan))}
    ways["d"] = lambda: [].pop()
    left_out = {}
    assert rows.admit(ways, left_out, "step, ") == ({"a": call}, {"a": {"error": 0.1}})
    assert left_out.keys() == {"step, b", "step, c", "step, d"} and left_out["step, d"].startswith("IndexError: pop")
    assert left_out["step, b"] == "WrongResult: y: off by 0.6, where 0.5 is allowed: nothing was timed"
    with pytest.raises(clocks.WrongResult, match="y: off by nan"):
        rows.admit(ways, {}, must=("c",))

    def full():
        raise torch.OutOfMemoryError("too little")

    with pytest.raises(torch.OutOfMemoryError):
        rows.admit({"a": full}, {})


def test_host_times_are_the_rows_times_and_wall_times_stand_beside_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(training, "ROUNDS", 2)
    made = training.host_rows(Case(3, d_model=32, d_ff=600))
    paths = [(work, path) for work in ("forward", "forward and backward") for path in ("dense eager", "twell")]
    assert [(row["workload"], row["path"]) for row in made] == paths
    for row in made:
        assert row["kind"] == "host" and row["gated"] and row["tokens"] == 3 and len(row["samples"]) == 2
        assert row["wall_ms"] >= row["ms"] > 0 and row["x_dense"] == pytest.approx(row["dense_ms"] / row["ms"])
        assert row["dense_wall_ms"] > 0 and row["host_us"] == pytest.approx(1e3 * row["ms"])


def test_rows_of_a_gpu_hold_times_of_plain_calls_and_peak_memory(clock, monkeypatch):
    monkeypatch.setattr(clocks, "peak_bytes", lambda call: 7)
    calls = dict.fromkeys(("dense eager", "twell"), lambda turn: None)
    made = rows.measured({"device": "A GPU"}, calls, {"twell": {"choice": "twell"}}, tokens=4)
    assert [row["path"] for row in made] == [*calls, "dense eager (graph)", "twell (graph)"]
    assert [row.get("peak_bytes") for row in made] == [7, 7, None, None]
    assert all(row["wall_ms"] == 2.0 and row["dense_wall_ms"] == 2.0 for row in made)
