"""The tables of the README and of docs/: which record and rows they are made of, and what they say without one."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from twell_lab import records
from twell_lab.app import tables, walk
from twell_lab.bench.methods import WHOLE

NAMES = re.findall(r"tables\.(\w+)\(", (Path(__file__).parents[3] / "docs" / "measured.md").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_without_records_a_table_says_so(name):
    head, line, said = getattr(tables, name)([]).splitlines()
    assert said == "| nothing is recorded yet |" and head.count("|") == line.count("|") == said.count("|")
    others = [record(kind, 1, []) for kind in ("inference", "training", "comparison", "bench-model", "trained")]
    assert getattr(tables, name)(others) == "\n".join((head, line, said))


def test_the_table_of_products_says_where_each_is_faster():
    def row(pattern, path, zeros, ms, wall=None):
        samples = [ms, ms, 1.1 * ms]
        return {
            "kind": "comparison",
            "device": "NVIDIA H100",
            "path": path,
            "pattern": pattern,
            "workload": f"{pattern}, {zeros:.1%} zeros",
            "density": 1 - zeros,
            "ms": ms,
            "wall_ms": wall or ms,
            "samples": samples,
            "x_dense": 1.0 / ms,
        }

    rows = [row("scattered", "dense eager", zeros, 1.0, 2.0) for zeros in (0.5, 0.9, 0.99)]
    rows += [row("scattered", "csr_v3", zeros, ms) for zeros, ms in ((0.5, 8.0), (0.9, 2.0), (0.99, 0.5))]
    rows += [row("scattered", "csr_v1", 0.99, 4.0), row("scattered", "part: csr_v3, conversion", 0.99, 4.0)]
    rows += [row("2:4", "dense eager", 0.5, 1.0), row("2:4", "2:4 (torch: cuSPARSELt)", 0.5, 0.8, 4.0)]
    made = records.Record("comparison", "a test's own", rows, "2026-01-02T00:00:00Z", None, None, {}, kernels={})
    assert tables.comparison([made]).splitlines()[0].endswith("2026-01-02 | 50.0% | 90.0% | 99.0% | faster from |")
    csr, semi = tables.comparison([made]).splitlines()[2:]
    assert csr.startswith("| scattered: csr_v3 | 0.12 (0.25) | 0.50 (1.00) | 2.00 (4.00) | 96.84% (")
    assert semi == "| 2:4: 2:4 (torch: cuSPARSELt) | 1.25 (0.25) |  |  | 50.0%, the fewest measured |"


def record(name: str, day: int, rows: list[dict]) -> records.Record:
    shared = {"device": "NVIDIA H100", "kind": "x", "ms": 1.0}
    rows = [shared | row for row in rows]
    return records.Record(name, "a test's own", rows, f"2026-01-0{day}T00:00:00Z", None, None, {}, kernels={})


SHAPE = {"kind": "inference", "gated": True, "d_model": 2048, "d_ff": 5632}


def test_the_table_of_calls_takes_the_drawn_workload_with_29_neurons():
    def rows(factor: float) -> list[dict]:
        shape = SHAPE | {"workload": "independent, lognormal", "nnz": 29.0}
        found = [
            {**shape, "tokens": tokens, "path": path, "wall_ms": factor * ms * tokens, "choice": choice}
            for tokens, choice in ((1, "twell"), (2048, "hot_cold 512"))
            for path, ms in (
                ("dense eager", 0.2),
                ("planned", 0.1),
                ("dense compiled", 0.15),
                ("planned compiled", 0.3),
            )
        ]
        others = ({"workload": "heavy rows: 8"}, {"nnz": 8.0}, {"d_ff": 4096})
        return [found[0] | other | {"wall_ms": 99.0} for other in others] + found

    lines = tables.calls([record("inference", 1, rows(7.0)), record("inference", 2, rows(1.0))]).splitlines()
    assert lines[0] == "| milliseconds a call, NVIDIA H100, 2026-01-02 | 1 token | 2,048 tokens |"
    assert lines[2:] == [
        "| torch's dense layer | 0.2 | 410 |",
        "| planned | 0.1 | 205 |",
        "| it takes | TwELL | hot/cold |",
        "| times as fast | 2.00 | 2.00 |",
        "| times as fast, both under torch.compile | 0.50 | 0.50 |",
    ]
    shape = SHAPE | {"workload": "independent, lognormal", "nnz": 29.0, "choice": "twell"}
    tuned = shape | {"path": "dense max-autotune", "tokens": 1, "wall_ms": 0.12}
    for more, named, first in (([], "eager, compiled", "1.50"), ([tuned], "eager, compiled, max-autotune", "1.20")):
        head, _, line = tables.headline([record("inference", 2, rows(1.0) + more)]).splitlines()
        assert head.startswith(f"| times as fast as torch's dense layer, the fastest of {named}; NVIDIA H100, 2026")
        assert line == f"| a plain call | {first} | 1.50 |"  # 0.15, and 0.12, beside 0.1
    old = replace(record("inference", 2, rows(1.0)), kernels={"smxx_pack": 64 * "0"})
    assert all("2026-01-02; stale: code has changed since |" in t([old]) for t in (tables.calls, tables.headline))


def beside(kind: str, path: str, nnz: float, ms: float, workload: str = "independent, lognormal", **more) -> dict:
    """A row of 16,384 tokens beside a dense layer of 8 ms, 10 on the wall; the path's wall time is twice its own."""
    times = {"ms": ms, "wall_ms": 2 * ms, "dense_ms": 8.0, "dense_wall_ms": 10.0}
    return SHAPE | {"kind": kind, "tokens": 16384, "path": path, "nnz": nnz, "workload": workload} | times | more


def test_the_table_of_a_layer_names_the_paths_by_who_fires():
    rows = [beside("inference", f"forced {path}", 29.0, ms) for path, ms in (("twell", 4.0), ("dense", 8.0))]
    rows += [beside("inference", "forced hot_cold 512", 29.0, 2.0), beside("inference", "dense compiled", 29.0, 5.0)]
    others = [beside("inference", "forced twell (graph)", 29.0, 1.0), beside("inference", "forced twell", 9.0, 1.0)]
    others[1]["tokens"] = 256
    first = "| neurons firing for a token, mean; NVIDIA H100, 2026-01-02 | 29 |"
    lines = tables.layer([record("inference", 2, rows + others), record("inference", 3, [])]).splitlines()
    assert lines[0] == first
    assert [line.rpartition(" | ")[2] for line in lines[2:]] == [
        f"{x} |" for x in ("2.00 (1.25)", "4.00 (2.50)", "1.00 (0.62)", "1.60 (1.00)", "512")
    ]


def test_the_table_of_training_compares_compiled_with_compiled():
    rows = [
        beside("training", path, 8.0, ms, peak_bytes=mib << 20, choice="twell")
        for path, ms, mib in (("dense eager", 8.0, 900), ("dense compiled", 4.0, 800))
    ]
    rows += [
        beside("training", p, 8.0, 2.0, peak_bytes=300 << 20, choice="twell") for p in ("planned", "planned compiled")
    ]
    lines = tables.training([record("training", 1, rows)]).splitlines()
    assert [line.rpartition(" | ")[2] for line in lines[2:]] == [
        f"{x} |" for x in ("TwELL", "4.00 (2.50)", "2.00 (2.00)", "300", "900", "800")
    ]


def test_the_table_of_heavy_tokens_takes_a_record_that_has_them_all():
    def made(name: str, day: int, counts: tuple[int, ...]) -> records.Record:
        works = [f"heavy rows: {count}{more}" for count in counts for more in ("", ", all neurons")]
        rows = [beside(name, "forced twell", 29.0, 4.0 + len(work) / 100, work) for work in works]
        return record(name, day, rows)

    whole, part = made("inference", 1, (0, 1, 512)), made("inference", 2, (0, 1))
    lines = tables.heavy([whole, part]).splitlines()
    assert lines[0] == "| longer by | 1 token | 512 tokens |"
    assert lines[2:] == [
        "| forward, 1,500 neurons; NVIDIA H100, 2026-01-01 | +0% | +0% |",
        "| forward, all 5,632; NVIDIA H100, 2026-01-01 | +3% | +4% |",
    ]
    assert "nothing is recorded yet" in tables.heavy([part])


def test_the_table_of_steps_takes_the_newest_record_of_each_model():
    def step(path: str, ms: float, model: str) -> dict:
        return beside("training", path, 30.6, ms, f"whole step, {model}")

    def made(day: int, factor: float, *models: str) -> records.Record:
        times = {"dense compiled": 80.0, "planned compiled": 40.0, "planned, compiled by layer": 50.0, "planned": 9.0}
        return record("training", day, [step(path, factor * ms, m) for m in models for path, ms in times.items()])

    lines = tables.steps([made(1, 2.0, "8 layers", "the sweep's model"), made(2, 1.0, "8 layers")]).splitlines()
    assert lines[2:] == [
        "| 8 layers, 2048 wide; NVIDIA H100, 2026-01-02 | 31 | 80 | 40 | 2.00 | 50 |",
        "| the sweep's model, 2048 wide; NVIDIA H100, 2026-01-01 | 31 | 160 | 80 | 2.00 | 100 |",
    ]


def test_the_table_of_experts_says_from_where_they_beat_all_neurons():
    def row(n: int, path: str, ms: float) -> dict:
        said = {"kind": "experts", "workload": f"{n} experts", "density": 2 / n, "experts": n}
        return said | {"path": path, "ms": ms, "wall_ms": ms, "samples": [ms]}

    times = (("dense eager", 4.0), ("grouped", 2.0), (WHOLE, 1.0))
    rows = [row(n, path, n * ms if path == WHOLE else ms) for n in (2, 8) for path, ms in times]
    head, _, *lines = tables.experts([record("comparison", 1, rows)]).splitlines()
    assert head.endswith("| 2 experts | 8 experts | faster than all neurons where a token does without |")
    assert lines[0] == "| the loop | 1 | 1 | 50.00% (50.00% to 50.00%) |"
    assert lines[1].endswith("| 0.0%, the fewest measured |") and lines[2].endswith("| 0.50 (0.50) |  |")


def test_the_table_of_few_bits():
    def row(path: str, tokens: int, ms: float, **more: object) -> dict:
        said = {"kind": "few bits", "path": path, "tokens": tokens, "ms": ms, "wall_ms": 2 * ms}
        return said | {"samples": [0.9 * ms, ms, 1.1 * ms]} | more

    rows = [row("dense eager", 1, 4.0), row("dense eager (graph)", 1, 3.0), row("dense eager", 2048, 9.0)]
    rows += [row("forced int8 (lossy)", tokens, 5.0, error=0.03) for tokens in (1, 2048)]
    rows += [row("forced int8 (lossy) (graph)", 1, 2.9, error=0.03), row("part: x Wg^T", 2048, 0.5)]
    head, _, *lines = tables.few_bits([record("comparison", 1, rows)]).splitlines()
    assert head.endswith("| 1 token | 2,048 tokens | error | surely faster at |")
    assert lines == [
        "| int8 (lossy) | 1.03 (0.80) | 1.80 (1.80) | 3.0% | 2,048 |",
        "| x Wg^T |  | 0.5 ms |  |  |",
    ]


def test_from_how_many_zeros_chosen_neurons_are_faster():
    def row(path: str, ms: float, zeros: float, work: str = "decode step, batch 1, ReLU trained on a text") -> dict:
        return {"workload": work, "path": path, "tokens": 1, "ms": ms, "sparsity": zeros, "samples": [ms]}

    rows = [row("dense eager", 4.0, 0.0), row("dense eager (graph)", 2.0, 0.0), row("trained with L1, dense", 2.0, 0.9)]
    for ms, zeros in ((3.0, 0.5), (1.5, 0.75)):
        rows += [row(f"lossy: predicted, recall {zeros:.0%}{how}", ms, zeros) for how in ("", " (graph)")]
    silu = lambda zeros: f"CATS {zeros:.0%}, decode step, batch 1, SiLU trained on a text"  # noqa: E731
    more = [row("dense eager", 2.0, 0.0, silu(zeros)) for zeros in (0.5, 0.75)]
    more += [row("thresholds, dense", 3.0, zeros, silu(zeros)) for zeros in (0.5, 0.75)]
    lines = tables.chosen_from([record("predictors", 1, rows), record("thresholds", 1, more)]).splitlines()
    assert (
        lines[2].startswith("| ReLU: predicted | 66.")
        and lines[3] == "| SiLU: CATS, computed densely | nowhere measured |"
    )
    assert len(lines) == 4


def test_the_table_of_padding_says_how_far_from_proportional_it_is():
    def row(layers: int, real: int, path: str, ms: float) -> dict:
        more = {"layers": layers} if layers > 1 else {}  # older records had one layer, and did not say so
        return {"kind": "padding", "tokens": 8, "real": real, "path": path, "ms": ms, "wall_ms": 2 * ms, **more}

    rows = [row(layers, real, "dense eager", 4.0 * layers) for layers in (1, 8) for real in (2, 8)]
    rows += [row(1, 2, "padding removed", 2.0), row(1, 8, "padding removed", 5.0)]
    rows += [row(8, 2, "padding removed", 8.0), row(8, 8, "padding removed", 32.0)]
    rows += [row(1, 2, "real tokens alone", 1.5), row(1, 8, "real tokens alone", 4.0)]
    lines = tables.padding([record("comparison", 1, rows)]).splitlines()
    first = "| times as fast as dense; NVIDIA H100, 2026-01-01 | 25% of the tokens real | 100% of the tokens real |"
    assert lines[0] == f"{first} off a proportional time | off dense's share | of that, tokens alone |"
    assert lines[2:] == [
        "| padding removed once for 1 layer | 2.00 (2.00) | 0.80 (0.80) | 23.1% | +100.0% | +50.0% |",
        "| padding removed once for 8 layers | 4.00 (4.00) | 1.00 (1.00) | 0.0% | +0.0% | not recorded |",
    ]


def test_tables_are_of_the_gpu_that_pages_tell_of_where_it_was_recorded():
    def made(gpu: str, day: int, ms: float) -> records.Record:
        row = {"kind": "experts", "workload": "8 experts", "path": "dense eager", "ms": ms, "wall_ms": ms}
        rows = [row, row | {"path": "grouped", "ms": 1.0, "wall_ms": 1.0}]
        found = record("comparison", day, rows)
        found.rows = [each | {"device": gpu} for each in found.rows]
        return found

    told, other = made("NVIDIA H100 80GB HBM3", 1, 2.0), made("NVIDIA H200", 2, 3.0)
    assert tables.experts([told, other]) == tables.experts([told]) and "| grouped | 2.00" in tables.experts([told])
    assert "NVIDIA H200" in tables.experts([other]) and "| grouped | 3.00" in tables.experts([other])
    assert records.newest([told, other], "comparison", "H200") is other
    assert records.newest([told, other], "inference") is None


def test_the_table_of_the_course_says_which_notebooks_have_changed(monkeypatch, tmp_path):
    for name in ("00-a", "01-b"):
        notebook = {"cells": [{"cell_type": "code", "source": ["x = 1"]}], "nbformat": 4}
        (tmp_path / f"{name}.ipynb").write_text(json.dumps(notebook, indent=1))
    monkeypatch.setattr(walk.core, "notebooks_dir", lambda: tmp_path)
    same = walk.code_hash(tmp_path / "00-a.ipynb")
    rows = [{"path": "00-a.ipynb", "ms": 12000.0, "code": same}, {"path": "01-b.ipynb", "ms": 3000.0, "code": "old"}]
    old = record("course", 1, [{**rows[0], "ms": 1.0}])
    assert tables.course([old, record("course", 2, rows)]).splitlines() == [
        "| seconds, all cells of a notebook | NVIDIA H100, 2026-01-02 |",
        "| --- | --- |",
        "| 00-a | 12 |",
        "| 01-b | 3, changed since |",
        "| together | 15 |",
    ]


def test_the_table_of_paths_has_each_beside_its_own_dense_model():
    def rows(about, work, path, wall, error, loss=None, kind="model_forward"):
        more = {} if loss is None else {"loss": loss}
        return {"kind": kind, "workload": f"{about}, {work}", "path": path, "wall_ms": wall, "error": error, **more}

    made = [
        rows("drawn", "decode step, batch 1", "dense eager", 4.0, 0.2, kind="model_decode"),
        rows("drawn", "decode step, batch 1", "forced int8 (lossy)", 2.0, 0.9, kind="model_decode"),
        rows("drawn", "decode step, batch 1", "dense eager (graph)", 3.0, 0.2, kind="model_decode"),
        rows("drawn", "decode step, batch 1", "forced int8 (lossy) (graph)", 1.0, 0.9, kind="model_decode"),
        rows("drawn", "1 x 8 tokens", "dense eager", 9.0, 0.25),
        rows("drawn", "1 x 8 tokens", "forced int8 (lossy)", 18.0, 0.5),
        rows("trained", "1 x 4 tokens", "dense eager", 1.0, 0.0, 1.5),
        rows("trained", "1 x 4 tokens", "forced int8 (lossy)", 0.5, 0.125, 1.75) | {"layer_error": 0.75},
    ]
    assert tables.model_paths([record("model-paths", 1, made)]).splitlines() == [
        "| times as fast as dense, NVIDIA H100, 2026-01-01 | decode step, batch 1 | 1 x 8 tokens | 1 x 4 tokens | error | of a layer | loss |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| drawn: int8 (lossy) | 2.00 (3.00) | 0.50 |  | 50% (dense 25%) |  |  |",
        "| trained: int8 (lossy) |  |  | 2.00 | 12% (dense 0%) | 75% | 1.7500 (dense 1.5000) |",
    ]


def test_the_table_of_the_model_compares_like_with_like():
    rows = [
        {"workload": "drawn 2B Llama, 1 x 8 tokens", "path": path, "wall_ms": ms, "wall_spread": 0.5}
        for path, ms in (
            ("dense eager", 30.0),
            ("planned", 20.0),
            ("planned for graphs", 999.0),
            ("dense eager (graph)", 1200.0),
            ("planned (graph)", 999.0),
            ("planned for graphs (graph)", 600.0),
            ("dense compiled", 10.0),
            ("planned for graphs compiled", 8.0),
        )
    ]
    rows += [{"workload": "drawn 2B Llama, plan of 5 token classes", "path": "plan", "ms": 9000.0}]
    rows += [{**rows[0], "workload": "drawn 1B Llama, 1 x 8 tokens"}, {**rows[0], "head": False}]
    assert tables.model([record("bench-model", 1, rows)]).splitlines() == [
        "| milliseconds, NVIDIA H100, 2026-01-01 | dense | planned | times as fast |",
        "| --- | --- | --- | --- |",
        "| 1 x 8 tokens | 30 (0.5) | 20 (0.5) | 1.50 |",
        "| 1 x 8 tokens, as a CUDA graph | 1,200 (0.5) | 600 (0.5) | 2.00 |",
        "| 1 x 8 tokens, compiled | 10 (0.5) | 8 (0.5) | 1.25 |",
        "| plan of 5 token classes |  | 9,000 |  |",
    ]


def test_the_table_of_sizes_joins_what_records_hold_in_part():
    def made(day: int, size: str, work: str, walls: dict[str, float], kind="model_decode", **more) -> records.Record:
        rate = "tokens_per_s" if kind == "model_decode" else "tokens_per_ms"
        shared = {"kind": kind, "device": "NVIDIA H100", "workload": f"drawn {size} Llama, {work}", "head": True}
        rows = [
            {**shared, "path": path, "ms": ms, "wall_ms": ms, "wall_samples": [ms] * 5, rate: 1e3 / ms, **more}
            for path, ms in walls.items()
        ]
        date = f"2026-01-{day:02}T00:00:00Z"
        return records.Record("bench-model", "a test's own", rows, date, None, None, {}, kernels={})

    graphs = {"dense eager": 9.0, "planned": 9.0, "planned for graphs": 9.0}
    graphs |= {"dense eager (graph)": 4.0, "planned (graph)": 3.0, "planned for graphs (graph)": 2.0}
    step = "decode step, batch 1"
    halves = [
        made(2, "2B", step, graphs, peak_bytes=2**22),  # too little to be told
        made(3, "2B", "64 x 2,048 tokens", {"dense eager": 13.0, "planned": 10.0}, "model_forward", peak_bytes=2**25),
        made(4, "0.5B", step, {"dense eager": 8.0, "planned": 5.0, "forced twell": 1.0}, mj_per_token=2.0, mj_spread=1),
        made(5, "1M", step, {"dense eager": 8.0, "planned": 4.0}),  # none of the paper's
    ]
    head, _, *lines = tables.sizes(halves).splitlines()
    assert head.endswith("| 0.5B; NVIDIA H100, 2026-01-04 | 2B; NVIDIA H100, 2026-01-03 |")
    assert lines == [
        "| forward, 64 x 2,048 tokens, eager, tokens/ms |  | 1.30 (76.9 to 100) |",
        "| decode step, batch 1, eager, tokens/s | 1.60 (125 to 200) | 1.00 (111 to 111) |",
        "| decode step, batch 1, CUDA graph, tokens/s |  | 2.00 (250 to 500) |",
        "| decode step, batch 1, eager, mJ a token | +0% (2 to 2) |  |",
        "| forward, 64 x 2,048 tokens, eager, peak MiB |  | +0% (32 to 32) |",
    ]
    again = made(6, "2B", step, {"dense eager": 8.0, "planned": 4.0})
    assert "1.60 (125 to 200) | 2.00 (125 to 250) |" in tables.sizes([*halves, again])  # the newest of that workload
    assert "2.00 (250 to 500) |" in tables.sizes([*halves, again])  # and the rest stays
    assert "nothing is recorded yet" in tables.sizes(halves[3:])


def test_the_table_of_chosen_neurons_has_both_records_graphs_and_plain_calls():
    def row(work, path, ms, wall, **more):
        return {"device": "NVIDIA H100", "tokens": 1, "workload": work, "path": path, "ms": ms, "wall_ms": wall} | more

    cost = {"loss": 1.1, "dense_loss": 1.0, "loss_change": [0.08, 0.1, 0.12], "sparsity": 0.5}
    step = "decode step, batch 1, a model"
    predicted = [
        row(step, "dense eager", 2.0, 4.0, loss=1.0),
        row(step, "lossy: predicted, recall 80%", 2.0, 5.0, **cost),
        row(step, "dense eager (graph)", 1.0, 1.0, loss=1.0),
        row(step, "lossy: predicted, recall 80% (graph)", 0.5, 0.6, **cost),
        row(step, "lossy: predicted, recall 80%", 9.0, 9.0, **cost) | {"tokens": 4, "workload": "another"},
    ]
    cut = f"CATS 50%, {step}"
    thresholds = [
        row(cut, "dense eager", 2.0, 4.0),
        row(cut, "thresholds, dense", 2.0, 8.0, **cost),
        row(cut, "thresholds, forced twell", 2.0, 2.0, **cost),
    ]
    made = [
        records.Record(name, "a test's own", rows, "2026-01-02T00:00:00Z", None, None, {}, kernels={})
        for name, rows in (("thresholds", thresholds), ("predictors", predicted))
    ]
    assert tables.chosen(made).splitlines()[2:] == [
        "| **a model, NVIDIA H100, 2026-01-02** |  | 1.0000 |  |  |",
        "| predicted, recall 80% | 50% | 1.1000 | +0.1000 (+0.0800 to +0.1200) | 2.00 (0.80) |",
        "| **a model, NVIDIA H100, 2026-01-02** |  | 1.0000 |  |  |",
        "| CATS 50%, computed densely | 50% | 1.1000 | +0.1000 (+0.0800 to +0.1200) | 0.50 |",
        "| CATS 50%, forced twell | 50% | 1.1000 | +0.1000 (+0.0800 to +0.1200) | 2.00 |",
    ]
