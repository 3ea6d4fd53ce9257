"""What notebook 09 reads from records: on small rows made for these tests, which are no measurements."""

import pytest
import torch

from tests.course.recorded_rows import RATES, compared, everything, gates, record, row
from twell_lab.analysis import costs
from twell_lab.analysis.planner import plan
from twell_lab.analysis.profile import profile
from twell_lab.bench import inference
from twell_lab.course.hopper import data as hopper
from twell_lab.course.roofline import data as roofline
from twell_lab.ops import measure


def test_the_newest_of_each_measurement_is_read(keep):
    old = record(
        "inference", "2026-01-01T00:00:00Z", [row(nnz=29.0, ms=3.0), row(nnz=8.0, ms=1.5), {"test": "no measurement"}]
    )
    new = record("inference-tables", "2026-01-02T00:00:00Z", [row(nnz=29.2, ms=1.0), row(nnz=8.0, device="NVIDIA T4")])
    keep(old, record("portable", "2026-01-03T00:00:00Z", [row()]), new)
    found = hopper.recorded()
    assert [(each["nnz"], each["ms"]) for each in found] == [(29.2, 1.0), (8.0, 1.5)]
    assert found[0]["where"] == "recorded on NVIDIA H100, 2026-01-02; stale: code has changed since"
    assert hopper.about(found).startswith("2 times, recorded on NVIDIA H100, 2026-01-02; stale")
    keep(record("inference", "2026-01-02T00:00:00Z", [row(ms=1.0)], kernels=()))
    assert hopper.recorded()[0]["where"] == "recorded on NVIDIA H100, 2026-01-02"


def test_the_record_of_the_portable_kernels_fills_in(keep):
    rows = [
        row(path, ms, kind="ffn_forward")
        for path, ms in (("dense eager", 2.0), ("twell", 0.9), ("portable", 1.1), ("part: pack", 0.1))
    ]
    portable = record(
        "portable",
        "2026-01-01T00:00:00Z",
        [{key: value for key, value in each.items() if key != "where"} for each in rows],
    )
    keep(portable)
    found = hopper.recorded()
    assert [each["path"] for each in found] == ["dense eager", "forced twell", "forced portable"]
    assert found[1]["where"].startswith("recorded on NVIDIA H100, 2026-01-01") and "1.1" in hopper.ways(found)
    newer = record(
        "inference", "2026-01-02T00:00:00Z", [row("dense eager", 1.9, nnz=29.03), row("forced twell", 0.8, nnz=29.03)]
    )
    keep(portable, newer)
    one = hopper.ways(hopper.recorded()).splitlines()  # of two runs, with the dense time of the newer one
    assert len(one) == 2 and one[1].split()[:2] == ["29.03", "1.9"] and {"1.1", "0.8"} <= set(one[1].split())
    newer = record("inference", "2026-01-02T00:00:00Z", [row("forced twell", 0.8)])
    keep(portable, newer)
    assert [(each["path"], each["ms"]) for each in hopper.recorded()] == [
        ("forced twell", 0.8),
        ("forced portable", 1.1),
    ]


def test_without_a_record_the_command_is_named_and_nothing_fails():
    assert hopper.COMMAND in hopper.about([])
    for told in (
        hopper.headline_table(hopper.headline([])),
        roofline.gained([]),
        roofline.packing_left([]),
        roofline.of_the_roof([], roofline.datasheet()),
        hopper.plan_sentences([]),
        hopper.losses([]),
        hopper.trained_sentences([]),
        hopper.decode_table(hopper.decode([], RATES)),
        hopper.ways([]),
        hopper.shapes_table(hopper.shapes([])),
        hopper.overflow_table(hopper.overflow_rows([])),
    ):
        assert told.startswith("No ") and "recorded" in told
    assert roofline.rates([]).tensor > 1e14  # from the record of the portable kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured():
    assert hopper.yours() == []


def test_what_a_gpu_measures_has_the_form_of_the_record(my_gpu):
    """Real layers on the CPU, and a clock that makes up its times."""
    layer, inputs = measure.workload(4, 32, 512, 8, "lognormal", torch.float32, "cpu")
    planned = plan(profile(layer, inputs[:1]), layer, tokens=4, batches=inputs[1:2])
    clock = lambda calls: {name: [4.0, 4.0] if "dense" in name else [2.0, 2.0] for name in calls}  # noqa: E731
    rows = hopper.layer_rows(layer, inputs, planned, 8, clock)
    assert [each["path"] for each in rows] == ["dense eager", "planned", "forced twell"]
    assert (
        [each["x_dense"] for each in rows] == [1, 2, 2]
        and rows[1]["choice"] in ("dense", "twell")
        or "hot_cold" in rows[1]["choice"]
    )
    assert {cell["path"] for cell in hopper.cells(rows)} == set()  # few tokens count as graph replays
    assert rows[0]["where"] == "yours, now, on My GPU" and (rows[0]["tokens"], rows[0]["d_ff"]) == (4, 512)


def test_the_headline_sets_eager_beside_eager_and_compiled_beside_compiled():
    first, second, third = hopper.headline(
        [*compared(29.0), *compared(8.0), *compared(120.0, twell=3.0), *compared(29.0, tokens=64)]
    )
    assert [each["nnz"] for each in (first, second, third)] == [8, 29, 120]
    assert (
        first["x_dense"] == 2.0
        and first["x_compiled"] == 1.9
        and first["compiled_dense_ms"] == 1.9
        and third["ms"] == 1.8
    )
    assert "twell" in hopper.headline_table([first])


def test_estimates_stand_beside_the_recorded_times():
    lines = hopper.estimates(compared(29, twell=1.25), RATES, nnzs=(29, 60)).splitlines()
    assert "1.25" in lines[1].split() and lines[2].split()[4] == "-"


def test_the_summary_names_the_worst_and_the_best_cell():
    told = hopper.summary([*compared(8), *compared(300, twell=2.5)])
    assert (
        "from 1.11 times as fast as dense (16,384 tokens, nnz 300) to 2.00" in told and "below 0.97 in 0 of 2" in told
    )
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


@pytest.mark.parametrize(
    "path, name",
    [
        ("forced hot_cold 768 (graph)", "forced hot_cold"),
        ("planned", "planned"),
        ("forced twell (graph)", "forced twell"),
    ],
)
def test_the_family_of_a_path(path, name):
    assert hopper.family(path) == name


def test_the_planner_is_judged_by_its_own_trials():
    found = hopper.plan_points(compared(8) + compared(29, twell=1.6))
    told = hopper.plan_sentences(found)
    assert (
        told.startswith("4 candidates were timed.\nmore tokens: 4 of 4 within a factor of 1.25")
        and "In 1 of 2 layers" in told
    )
    assert "up to 256 tokens: 2 of 2 within" in hopper.plan_sentences(
        [*found, *hopper.plan_points(compared(8, tokens=64))]
    )


def test_trained_layers_overflow_decode_and_shapes():
    rows = everything()
    told = hopper.trained_sentences(hopper.trained(rows))
    assert told.count("the choice") == 2 and told.startswith(
        "L1 0.001: 1.500 bits per byte of validation text; nnz 55 at step 50, 41 at step 99\n"
    )
    none, all_of_them = hopper.overflow_rows(rows)
    assert (
        none["times_base"] == 1
        and all_of_them["times_base"] == pytest.approx(2.4)
        and all_of_them["times_dense"] == pytest.approx(1.2)
    )
    few = hopper.decode(rows, RATES)
    assert (
        [each["tokens"] for each in few] == [1, 4, 16, 64]
        and few[0]["planned"] == pytest.approx(10)
        and few[0]["dense"] == pytest.approx(20)
    )
    assert few[0]["stack_dense"] == pytest.approx(30) and few[0]["stack_twell"] == pytest.approx(12)
    assert few[0]["floor"] < few[0]["dense_floor"] == pytest.approx(3 * 2 * 2048 * 5632 / 3e12 * 1e6, rel=0.01)
    (plain,) = hopper.shapes(rows)
    assert plain["shape"] == "1024 x 4096, plain" and plain[2048] == 2.0 and plain[1] == pytest.approx(2.0)
    assert "2,048 tokens" in hopper.shapes_table([plain])


def test_the_paths_that_the_benchmark_names_are_those_read(monkeypatch):
    monkeypatch.setattr(measure, "time_cuda", lambda calls: {name: [2.0] for name in calls})
    monkeypatch.setattr(measure, "graphed", lambda call: call)
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    monkeypatch.setattr(inference, "rates_here", lambda: costs.Rates("CPU", "bfloat16", 3e12, 7.4e12, 7e14, 2e-6))

    def drawn(tokens, d_model, d_ff, nnz, kind="lognormal"):
        layer, inputs = measure.workload(9, 16, 600, 8, kind, torch.bfloat16, "cpu")
        return layer, inputs, inputs[:2]

    monkeypatch.setattr(inference, "drawn", drawn)
    rows = inference.table(9, (8,), "lognormal")
    assert {row["workload"] for row in rows} == {hopper.LOGNORMAL}
    named = {row["path"] for row in rows}
    assert {"dense eager", "dense compiled", "planned", "planned compiled", "planned (graph)", "plan: dense"} <= named
    forced = {path.rpartition(" ")[0] if path[-1].isdigit() else path for path in named if path.startswith("forced")}
    assert {path for path in forced if "(graph)" not in path} == {"forced dense", "forced twell", "forced hot_cold"}
    assert all(row["workload"].startswith("overflow: ") for row in inference.overflow_rows())
