"""What notebook 05 reads from records and computes: on small rows made for these tests, which are no measurements."""

import inspect

import numpy as np
import pytest
import torch

from twell_lab import bench, bench_inference, launch, launch_sm80, launch_sm90, pool
from twell_lab.course import hopper
from twell_lab.course import hopper_work as work
from twell_lab.formats import TwELL
from twell_lab.planner import plan
from twell_lab.profile import profile
from twell_lab.records import Record

RATES = work.Rates(tensor=800e12, memory=3e12, l2=8e12, source="a test")
WHERE = "recorded on Some GPU, 2026-01-02"


def row(path="planned", ms=1.0, dense=2.0, nnz=29.0, tokens=16384, **more):
    shared = {"kind": "inference", "device": "NVIDIA H100", "dtype": "bfloat16", "tokens": tokens, "d_model": 2048, "d_ff": 5632, "gated": True,
              "nnz": nnz, "workload": work.LOGNORMAL, "path": path, "ms": ms, "dense_ms": dense, "x_dense": dense / ms, "where": WHERE}
    return shared | more


def compared(nnz, tokens=16384, twell=1.0, workload=work.LOGNORMAL, **more):
    """What one comparison leaves in the record: every path of one layer."""
    paths = {"dense eager": 2.0, "dense compiled": 1.9, "planned": min(twell, 1.8), "planned compiled": min(twell, 1.8), "forced dense": 1.9,
             "forced twell": twell, "forced hot_cold 768": 1.5}
    rows = []
    for path, ms in paths.items():
        rows.append(row(path, ms, nnz=nnz, tokens=tokens, workload=workload, x_compiled=1.9 / ms, **more))
        if path.startswith("planned"):
            rows[-1]["choice"] = "twell"
        if tokens <= hopper.FEW and "compiled" not in path:
            rows.append(row(f"{path} (graph)", ms / 100, 0.02, nnz=nnz, tokens=tokens, workload=workload, **more))
    rows.append(row("plan: twell", twell, nnz=nnz, tokens=tokens, workload=workload, kind="plan", predicted_ms=0.9 * twell, chosen=True))
    rows.append(row("plan: hot_cold 768", 1.5, nnz=nnz, tokens=tokens, workload=workload, kind="plan", predicted_ms=1.8, chosen=False))
    return rows


def gates(v3=0.5):
    times = {"gate GEMM (torch)": 0.52, "gate GEMM (torch), then pack": 0.62, "sm90 gate_pack v1": 0.58, "sm90 gate_pack v2": 0.56,
             "sm90 gate_pack v3": v3, "sm80 gate_pack": 0.9}
    return [row(path, ms, kind="gate", tflops=1.0) for path, ms in times.items()]


def everything():
    """Rows of every sort that the figures and tables take."""
    rows = [*compared(8), *compared(29.1, twell=1.2), *compared(120, twell=3.0), *gates()]
    for tokens in (1, 4, 16, 64):
        rows += compared(27 + tokens % 4, tokens=tokens)
        rows += [row(f"{path} (graph of 8 layers)", ms, 0.03, nnz=28, tokens=tokens) for path, ms in (("dense eager", 0.03), ("forced twell", 0.012))]
    for layer in (0, 1):
        rows += compared(40, workload=f"trained, L1 0.001, layer {layer}", l1=0.001, layer=layer, validation_bits_per_byte=1.5,
                         nnz_curve=[[1, 900.0], [50, 55.0], [99, 41.0]])
    for label, slow in (("no overflow", 1.0), ("every row beyond the pool", 2.4)):
        rows += compared(60, twell=slow, workload=f"overflow: {label}")
    rows += [each | {"d_model": 1024, "d_ff": 4096, "gated": False} for tokens in (1, 2048) for each in compared(21, tokens=tokens)]
    return rows


# ---- recorded ----


def record(name, date, rows):
    return Record(name=name, purpose="a test", rows=rows, date=date, commit=None, dirty=None, kernels={"gone": "0" * 64}, machine={})


def test_the_newest_of_each_measurement_is_read(monkeypatch):
    old = record("inference", "2026-01-01T00:00:00Z", [row(nnz=29.0, ms=3.0), row(nnz=8.0, ms=1.5), {"test": "no measurement"}])
    new = record("inference-tables", "2026-01-02T00:00:00Z", [row(nnz=29.2, ms=1.0), row(nnz=8.0, device="NVIDIA T4")])
    monkeypatch.setattr(hopper.records, "load_all", lambda: [old, record("portable", "2026-01-03T00:00:00Z", [row()]), new])
    found = hopper.recorded()
    assert [(each["nnz"], each["ms"]) for each in found] == [(29.2, 1.0), (8.0, 1.5)]
    assert found[0]["where"] == "recorded on NVIDIA H100, 2026-01-02; stale: code has changed since"
    assert hopper.about(found).startswith("2 times, recorded on NVIDIA H100, 2026-01-02; stale")
    monkeypatch.setattr(hopper.records, "stale", lambda record: False)
    assert hopper.recorded()[0]["where"] == "recorded on NVIDIA H100, 2026-01-02"


def test_the_record_of_the_portable_kernels_fills_in(monkeypatch):
    rows = [row(path, ms, kind="ffn_forward") for path, ms in (("dense eager", 2.0), ("twell", 0.9), ("portable", 1.1), ("part: pack", 0.1))]
    portable = record("portable", "2026-01-01T00:00:00Z", [{key: value for key, value in each.items() if key != "where"} for each in rows])
    monkeypatch.setattr(hopper.records, "load_all", lambda: [portable])
    found = hopper.recorded()
    assert [each["path"] for each in found] == ["dense eager", "forced twell", "forced portable"]
    assert found[1]["where"].startswith("recorded on NVIDIA H100, 2026-01-01") and "1.1" in hopper.ways(found)
    newer = record("inference", "2026-01-02T00:00:00Z", [row("dense eager", 1.9, nnz=29.03), row("forced twell", 0.8, nnz=29.03)])
    monkeypatch.setattr(hopper.records, "load_all", lambda: [portable, newer])
    one = hopper.ways(hopper.recorded()).splitlines()  # of two runs, with the dense time of the newer one
    assert len(one) == 2 and one[1].split()[:2] == ["29.03", "1.9"] and {"1.1", "0.8"} <= set(one[1].split())
    newer = record("inference", "2026-01-02T00:00:00Z", [row("forced twell", 0.8)])
    monkeypatch.setattr(hopper.records, "load_all", lambda: [portable, newer])
    assert [(each["path"], each["ms"]) for each in hopper.recorded()] == [("forced twell", 0.8), ("forced portable", 1.1)]


def test_without_a_record_the_command_is_named_and_nothing_fails():
    assert hopper.COMMAND in hopper.about([])
    for told in (hopper.headline_table(hopper.headline([])), work.gained([]), work.packing_left([]), work.of_the_roof([], work.datasheet()),
                 hopper.plan_sentences([]), hopper.losses([]), hopper.trained_sentences([]), hopper.decode_table(hopper.decode([], RATES)),
                 hopper.ways([]), hopper.shapes_table(hopper.shapes([])), hopper.overflow_table(hopper.overflow_rows([]))):
        assert told.startswith("No ") and "recorded" in told
    assert work.rates([]).tensor > 1e14  # from the record of the portable kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured():
    assert hopper.yours() == []


def test_what_a_gpu_measures_has_the_form_of_the_record(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "My GPU")
    drawn = bench.workload(4, 32, 512, 8, "lognormal", torch.float32, "cpu")
    monkeypatch.setattr(bench_inference, "drawn", lambda tokens, d_model, d_ff, nnz: (*drawn, drawn[1][:2]))
    monkeypatch.setattr(bench_inference, "plan_for", lambda layer, seen: plan(profile(layer, seen[:1]), layer, tokens=4, batches=seen[1:]))
    monkeypatch.setattr(bench, "time_cuda", lambda calls: {name: [4.0, 4.0] if "dense" in name else [2.0, 2.0] for name in calls})
    rows = hopper._compare(4, 8)  # on the CPU: a clock that was replaced, and real layers
    assert [each["path"] for each in rows] == ["dense eager", "planned", "forced twell"]
    assert [each["x_dense"] for each in rows] == [1, 2, 2] and rows[1]["choice"] in ("dense", "twell") or "hot_cold" in rows[1]["choice"]
    assert {cell["path"] for cell in hopper.cells(rows)} == set()  # few tokens count as graph replays
    assert rows[0]["where"] == "yours, now, on My GPU"


def test_what_a_gpu_refuses_is_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "My GPU")

    def refuse(tokens, nnz):
        raise hopper.TwellError("too old")

    monkeypatch.setattr(hopper, "_compare", refuse)
    assert hopper.yours() == [] and capsys.readouterr().out == "Nothing was timed on My GPU: too old\n"


def test_the_headline_sets_eager_beside_eager_and_compiled_beside_compiled():
    first, second, third = hopper.headline([*compared(29.0), *compared(8.0), *compared(120.0, twell=3.0), *compared(29.0, tokens=64)])
    assert [each["nnz"] for each in (first, second, third)] == [8, 29, 120]
    assert first["x_dense"] == 2.0 and first["x_compiled"] == 1.9 and first["compiled_dense_ms"] == 1.9 and third["ms"] == 1.8
    assert "twell" in hopper.headline_table([first])


def test_estimates_stand_beside_the_recorded_times():
    lines = hopper.estimates(compared(29, twell=1.25), RATES, nnzs=(29, 60)).splitlines()
    assert "1.25" in lines[1].split() and lines[2].split()[4] == "-"


def test_the_summary_names_the_worst_and_the_best_cell():
    told = hopper.summary([*compared(8), *compared(300, twell=2.5)])
    assert "from 1.11 times as fast as dense (16,384 tokens, nnz 300) to 2.00" in told and "below 0.97 in 0 of 2" in told
    assert hopper.summary([]) == ""


def test_cells_compare_like_with_like():
    found = hopper.cells([*compared(29, tokens=1), *compared(29), *gates(), *compared(29, workload="overflow: x")])
    few = {cell["path"]: (cell["x"], cell["how"]) for cell in found if cell["tokens"] == 1}
    many = {cell["path"]: (cell["x"], cell["how"]) for cell in found if cell["tokens"] == 16384}
    assert few["planned"] == (pytest.approx(2.0), "graph") and few["planned compiled"][1] == "compiled"
    assert many["forced hot_cold"] == (pytest.approx(2 / 1.5), "eager") and set(few) == set(many)


def test_losses_count_what_is_slower_than_dense():
    lines = hopper.losses(hopper.cells([*compared(8), *compared(300, twell=8.0)])).splitlines()
    line = next(line for line in lines if line.startswith("forced twell"))
    assert line.split()[2:5] == ["2", "1", "0.25x"] and "nnz 300" in line


@pytest.mark.parametrize("path, name", [("forced hot_cold 768 (graph)", "forced hot_cold"), ("planned", "planned"), ("forced twell (graph)", "forced twell")])
def test_the_family_of_a_path(path, name):
    assert hopper.family(path) == name


def test_the_planner_is_judged_by_its_own_trials():
    found = hopper.plan_points(compared(8) + compared(29, twell=1.6))
    told = hopper.plan_sentences(found)
    assert told.startswith("4 candidates were timed.\nmore tokens: 4 of 4 within a factor of 1.25") and "In 1 of 2 layers" in told
    assert "up to 256 tokens: 2 of 2 within" in hopper.plan_sentences([*found, *hopper.plan_points(compared(8, tokens=64))])


def test_trained_layers_overflow_decode_and_shapes():
    rows = everything()
    told = hopper.trained_sentences(hopper.trained(rows))
    assert told.count("the choice") == 2 and told.startswith("L1 0.001: 1.500 bits per byte of validation text; nnz 55 at step 50, 41 at step 99\n")
    none, all_of_them = hopper.overflow_rows(rows)
    assert none["times_base"] == 1 and all_of_them["times_base"] == pytest.approx(2.4) and all_of_them["times_dense"] == pytest.approx(1.2)
    few = hopper.decode(rows, RATES)
    assert [each["tokens"] for each in few] == [1, 4, 16, 64] and few[0]["planned"] == pytest.approx(10) and few[0]["dense"] == pytest.approx(20)
    assert few[0]["stack_dense"] == pytest.approx(30) and few[0]["stack_twell"] == pytest.approx(12)
    assert few[0]["floor"] < few[0]["dense_floor"] == pytest.approx(3 * 2 * 2048 * 5632 / 3e12 * 1e6, rel=0.01)
    (plain,) = hopper.shapes(rows)
    assert plain["shape"] == "1024 x 4096, plain" and plain[2048] == 2.0 and plain[1] == pytest.approx(2.0)
    assert "2,048 tokens" in hopper.shapes_table([plain])


# ---- the work ----


def test_floors_name_what_limits_each_step():
    dense, gate, sparse = work.floors(work.work(16384, 2048, 5632, 29), RATES)
    assert (dense["limit"], gate["limit"], sparse["limit"]) == ("tensor cores", "tensor cores", "L2 cache")
    assert dense["floor_ms"] == pytest.approx(3 * gate["floor_ms"]) and gate["operations"] == 2 * 16384 * 2048 * 5632
    assert "operations a byte" in work.floors_table([dense, gate, sparse])
    one, *_ = work.floors(work.work(1), RATES)
    assert one["limit"] == "memory" and one["intensity"] < 2


def test_trials_on_other_tokens_are_set_beside_the_times():
    layer = {"l1": 0.001, "layer": 3}
    timed = [row("forced twell", 1.0, **layer), row("forced dense", 2.0, **layer), row("planned", 1.0, **layer)]
    tried = [row("plan: twell", 1.4, kind="plan", **layer), row("plan: dense", 2.1, kind="plan", **layer), row("plan: hot_cold 256", 9, kind="plan", **layer)]
    told = work.other_tokens([*timed, *tried])
    assert told.startswith("In 1 of 2 trials") and told.endswith("; the others:\n  twell in layer 3, L1 0.001: 1.40 times that")
    assert work.other_tokens([*timed, tried[1]]).endswith("timed here.") and work.other_tokens([]) == "No trained layer is recorded."


def test_versions_are_explained_from_their_times():
    found = work.versions(gates())
    assert found[0]["path"] == "sm80 gate_pack" and all(each["idea"] for each in found)
    lines = work.gained(found).splitlines()
    assert lines[0] == "one kernel instead of two: 620 -> 580 us, 6.5% less time" and len(lines) == 4
    assert "2,727 ns longer" in work.packing_left(found) and "12.0% of it" in work.packing_left(found)
    assert "not faster" in work.packing_left(work.versions(gates(v3=0.6)))


def test_points_of_the_roofline():
    fused = {"gated_v3": {"ms": 0.5, "where": WHERE}, "pack_v1": {"ms": 1.0, "where": WHERE}}
    found = work.points(everything(), fused)
    names = [p["name"] for p in found]
    assert "gated_v3" in names and "pack_v1" not in names and "twell, 1 token" in names and "dense eager, 1 token" in names
    intensity = {p["name"]: p["operations"] / p["bytes"] for p in found}
    assert intensity["gate GEMM (torch), then pack"] < intensity["gate GEMM (torch)"] < intensity["sm90 gate_pack v3"]
    twice = [*everything(), *compared(27.3, tokens=1)]  # an older run of one token drew another nnz
    assert sorted(p["name"] for p in work.points(twice, fused)) == sorted(names)
    told = work.of_the_roof(found, work.datasheet())
    assert "tensor cores" in told and "memory" in told


def test_waves():
    assert work.waves(256 * 66, 256) == (1, 1.0) and work.waves(256 * 66 + 1, 256) == (2, 67 / 132)
    assert work.waves(16384, 5632)[0] == 22


def test_the_story_is_the_comment_at_the_top():
    told = work.story("smxx_gated.cu")
    assert told.startswith("gated: y = ") and "#include" not in told and "gated_v3" in told


@pytest.mark.parametrize("d_ff", [256, 600])
def test_words_and_pool_are_read_back(d_ff):
    generator = np.random.default_rng(0)
    gate = torch.from_numpy(generator.standard_normal((20, d_ff))).float() - 1.3
    gate[3, :60], gate[17, :200] = 1.5, 2.5
    gate = gate.to(torch.bfloat16)
    packed, beyond, lost = pool.packed_and_pool(gate)
    dense, found = work.read_back(packed, beyond, d_ff)
    assert found == lost.nonzero().flatten().tolist() == [17]
    kept = [i for i in range(20) if i not in found]
    assert torch.equal(dense[kept], gate[kept].float().relu())


def test_the_pool_table_follows_the_rule():
    rows = work.pool_table([40, 31, 100, 33, 0])
    assert [each["start"] for each in rows] == [0, None, 9, 78, None]
    assert [each["lost"] for each in rows] == [False, False, True, True, False]
    assert [line.split()[-1] for line in work.pool_text(rows).splitlines()[1:]] == ["pool", "lost", "lost"]


def test_hot_and_cold():
    assert work.break_even(RATES) == 0.01
    frequency = torch.tensor([0.5] * 256 + [0.0001] * 4864, dtype=torch.float64)
    rows = work.split(frequency, [0, 256, 512, 5120], RATES)
    assert min(rows, key=lambda each: each["ms"])["hot"] == 256
    assert rows[0]["dense"] == rows[0]["start"] == rows[-1]["sparse"] == rows[-1]["start"] == 0
    assert rows[1]["cold_nnz"] == pytest.approx(0.4864) and "256 neurons hot" in work.split_sentence(rows)
    even = work.split(torch.full((5120,), 0.005, dtype=torch.float64), [0, 256, 5120], RATES)
    assert work.split_sentence(even).startswith("TwELL, nothing hot")


def test_the_versions_that_the_benchmark_times_are_those_explained(monkeypatch):
    """A dry run of its gate section on the CPU: torch in the place of the kernels, and a clock that was replaced."""

    def packs(x, gate, gate_bias=None, lost=None, version=None):
        return pool.packed_and_pool(torch.nn.functional.linear(x, gate))[:2]

    drawn = bench.workload(4, 64, 512, 8, "lognormal", torch.bfloat16, "cpu")
    monkeypatch.setattr(bench_inference, "drawn", lambda *sizes: (*drawn, drawn[1]))
    monkeypatch.setattr(launch_sm90, "gate_pack", packs)
    monkeypatch.setattr(launch_sm80, "gate_pack", packs)
    monkeypatch.setattr(launch, "pack", lambda gate, tile, words: TwELL.from_gate(gate, tile, words).packed)
    monkeypatch.setattr(bench, "time_cuda", lambda calls: {name: [1.0, 1.0] for name in calls})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    rows = bench_inference.gate_rows(4, (8,))
    assert {each["path"] for each in rows} == set(work.IDEAS) and {each["kind"] for each in rows} == {"gate"}
    assert len(work.versions([each | {"where": WHERE} for each in rows], rows[0]["nnz"], tokens=4)) == len(work.IDEAS)


def test_the_paths_that_the_benchmark_names_are_those_read():
    source = inspect.getsource(bench_inference)
    for word in ("dense compiled", "planned compiled", "forced twell", "forced hot_cold", "independent, {kind}", "overflow: ", "(graph)"):
        assert word in source, word
