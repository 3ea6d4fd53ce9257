"""Recorded training steps as notebook 11 reads them: the newest of each, by path, and what is said if there
are none."""

import pytest
import torch

from tests.course.recorded_rows import record
from twell_lab import records
from twell_lab.bench import training
from twell_lab.course.backward import data as backward
from twell_lab.course.backward import measured
from twell_lab.course.roofline.data import LOGNORMAL, Rates
from twell_lab.ops import measure

RATES = Rates(tensor=800e12, memory=3e12, l2=8e12, source="a test")
WHERE = "recorded on NVIDIA H100 80GB HBM3, 2026-11-21"


def row(path: str, ms: float, nnz: float = 29.02, workload: str = LOGNORMAL, **more) -> dict:
    return {
        "kind": "training",
        "device": "NVIDIA H100 80GB HBM3",
        "dtype": "bfloat16",
        "tokens": 16384,
        "d_model": 2048,
        "d_ff": 5632,
        "gated": True,
        "nnz": nnz,
        "workload": workload,
        "path": path,
        "ms": ms,
        "spread": 0.01,
        "dense_ms": 6.0,
        "x_dense": 6.0 / ms,
        "x_compiled": 5.4 / ms,
        **more,
    }


def compared(nnz: float = 29.02, workload: str = LOGNORMAL, ms: float = 3.0, choice: str = "twell") -> list[dict]:
    return [
        row("dense eager", 6.0, nnz, workload, peak_bytes=1012 * 2**20),
        row("dense compiled", 5.4, nnz, workload),
        row("forced twell", ms, nnz, workload, peak_bytes=390 * 2**20),
        row("planned", ms, nnz, workload, choice=choice),
        row("planned compiled", 2.7, nnz, workload, choice=choice),
    ]


@pytest.fixture
def stored(keep):
    """A function that makes these lists of rows the records, oldest first."""

    def store(*each: tuple[str, list[dict]], kernels: tuple[str, ...] = ()) -> None:
        keep(
            *(record(name, f"2026-11-{20 + day}T00:00:00Z", rows, kernels) for day, (name, rows) in enumerate(each, 1))
        )

    return store


def placed(rows: list[dict]) -> list[dict]:
    return [each | {"where": WHERE} for each in rows]


def test_the_newest_record_of_each_measurement_counts(stored):
    stored(
        ("training", compared(ms=4.0) + compared(8.01, ms=2.0)),
        ("training", compared(ms=3.0)),
        ("inference", compared(60.0)),
    )
    rows = measured.recorded()
    sparse = {each["nnz"]: each for each in rows if each["path"] == "forced twell"}
    assert {nnz: each["ms"] for nnz, each in sparse.items()} == {29.02: 3.0, 8.01: 2.0}
    assert sparse[29.02]["where"] == "recorded on NVIDIA H100 80GB HBM3, 2026-11-22" and not measured.recorded("RTX")
    assert measured.about(rows).startswith("10 times of training steps, recorded on")


def test_steps_of_other_numbers_of_tokens_and_graph_replays_are_not_read(stored):
    few, whole = (
        [each | more for each in compared()]
        for more in ({"tokens": 16}, {"tokens": 32768, "workload": "whole step, 8 layers"})
    )
    replayed = [each | {"path": f"{each['path']} (graph)"} for each in compared()]
    stored(("training", compared() + few + whole + replayed))
    rows = measured.recorded()
    assert len(rows) == len(compared()) + len(whole)
    assert {each["tokens"] for each in rows} == {measured.TOKENS, 32768}
    assert not any("graph" in each["path"] for each in rows)


def test_old_kernels_are_called_stale(stored):
    stored(("training", compared()), kernels=("gone",))
    assert measured.recorded()[0]["where"].endswith("; stale: code has changed since")


def test_the_tables_hold_each_path_in_its_column():
    rows = placed(compared() + compared(8.01) + compared(29.02, "overflow: 20% of rows"))
    head, first, second = measured.table(rows).splitlines()
    assert first.split()[:4] == ["8.01", "6", "3", "2"] and "1012" in second and "390" in second
    assert [each["column"] for each in measured.steps(rows)][::5] == ["8", "29"]


def test_the_summary_names_the_extremes_and_the_losses():
    rows = placed(compared(8.01, ms=2.0) + compared(120.0, ms=6.6, choice="dense"))
    says = measured.summary(rows)
    assert (
        "from 0.91 times as fast as dense (planned, " in says
        and "nnz 120) to 3.00" in says
        and "below 0.97 in 1 of 4 rows" in says
    )


def test_recorded_steps_beside_the_floor():
    floors = {"29": backward.floors(backward.parts(nnz=29), RATES)}
    floor = sum(part["ms"] for part in floors["29"])
    assert (
        measured.beside_floor(placed(compared()), floors)
        == f"nnz 29: counted {floor:.2f} ms, recorded 3.00, {3 / floor:.2f} times that"
    )
    assert measured.beside_floor(placed(compared(ms=0.9 * floor)), floors).endswith(
        "the caches delivered rows faster than the rate used here"
    )
    assert measured.dense_ms(placed(compared() + compared(8.0))) == 6.0
    assert "1012 MiB (dense), 390 MiB (sparse)" in measured.memory_sentence(placed(compared(8.0) + compared()))


def trained(nnz: float = 150.0) -> list[dict]:
    return compared(nnz, "trained, L1 0.0001, layer 2", ms=24.0, choice="dense")


def test_the_kinds_of_workload_are_told_apart():
    plain = [each | {"d_ff": 8192, "gated": False} for each in compared(40.0, f"{LOGNORMAL}, plain layer")]
    rows = placed(
        compared()
        + compared(29.2, "independent, uniform")
        + compared(31.0, "overflow: 1% of rows with a tile of 200")
        + plain
        + trained()
    )
    found = measured.series(rows)
    assert [len(each) for each in found.values()] == [5, 5, 5, 5] and list(found) == list(measured.KINDS.values())
    assert {each["workload"] for each in found["a few neurons fire often"]} == {LOGNORMAL}


def test_where_the_sparse_step_meets_the_dense_ones():
    rows = placed(compared(40.0, ms=4.0) + compared(80.0, ms=6.8) + trained())
    assert measured.meets(rows[:10], "dense compiled") == pytest.approx(60.0)
    assert (
        measured.meetings(rows)
        == "Recorded, a few neurons fire often: the sparse step takes as long as torch's compiled at nnz 60, eager at "
        "nnz 69."
    )
    assert measured.meets(rows[:5], "dense compiled") is None and "Nothing" in measured.meetings(rows[:5])


def test_a_layer_with_no_room_is_named_with_what_it_costs():
    room = 128 * 16384 + 16 * 5632
    line = measured.no_room(placed(compared() + trained()))
    assert line.startswith(
        f"trained, L1 0.0001, layer 2: {150 * 16384:,} entries, room for {room:,}. At least 11.0% of them are in lost "
        f"rows."
    )
    assert line.endswith("Sparse 24.0 ms, dense 6.0, planned (dense) 24.0.")
    assert measured.no_room(placed(compared())).startswith("In no recorded layer")


def test_what_a_lost_row_costs():
    drawn = compared(20.0, ms=2.0) + compared(40.0, ms=3.0)
    rows = placed(drawn + compared(30.0, "overflow: 1% of rows with a tile of 200", ms=3.3192))
    assert (
        measured.lost_cost(rows)
        == "1% of 16,384 rows lost: 3.32 ms instead of 2.50 (between the rows of the table), so a lost row costs "
        "about 5 us, a stored one 0.15."
    )
    assert measured.lost_cost(placed(drawn)).startswith("No workload")


def test_a_whole_step_beside_its_layers():
    model = [
        each | {"layers": 8, "parameters": 5e8, "peak_bytes": 2**30, "x_dense": 1.4, "x_compiled": 1.3}
        for each in (
            row("dense eager", 120.0, 30.0),
            row("planned", 84.0, 30.0),
            row("dense compiled", 90.0, 30.0),
            row("planned compiled", 66.0, 30.0),
        )
    ]
    rows = placed(compared() + [each | {"workload": "whole step, 8 layers"} for each in model])
    head, _, eager, compiled, saved = measured.whole_step(rows).splitlines()
    assert head == "8 layers of 2048 x 5632, 500 million parameters, nnz 30.0"
    assert eager.split() == ["planned", "120", "84", "1.4", "1024", "1024"]
    assert (
        compiled.split()[4] == "1.3"
        and saved == "Compiled, the step saves 24.0 ms; 8 single layers at nnz 29 save 8 x 2.70 = 21.6."
    )
    small = [
        each | {"workload": "whole step, small", "d_model": 768, "choice": "3 of 8 layers sparse"}
        for each in (*model, row("forced twell compiled", 100.0, 30.0) | {"x_compiled": 0.9, "peak_bytes": 2**29})
    ]
    *_, head, _, eager, compiled, forced = measured.whole_step(placed(compared() + small)).splitlines()
    assert head.endswith("8 layers of 768 x 5632, 500 million parameters, nnz 30.0, planned: 3 of 8 layers sparse")
    assert forced.split() == ["sparse,", "compiled", "90", "100", "0.9", "1024", "512"]


def test_without_a_record_everything_says_so(stored):
    stored()
    rows = measured.recorded()
    assert rows == [] and measured.COMMAND in measured.about(rows) and measured.table(rows) == measured.MISSING
    assert measured.summary(rows) == "" and measured.dense_ms(rows) is None
    assert "No peak" in measured.memory_sentence(rows)
    assert "No recorded step" in measured.beside_floor(rows, {}) and measured.series(rows) == {}
    assert measured.whole_step(rows).startswith("No whole step") and measured.meetings(rows).startswith(
        "Nothing recorded"
    )
    assert measured.lost_cost(rows).startswith("No workload") and measured.no_room(rows).startswith(
        "In no recorded layer"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to time")
def test_where_there_is_no_gpu_nothing_is_timed():
    assert measured.yours() == []


def test_your_own_steps_are_checked_and_come_as_rows(my_gpu):
    """Real layers on the CPU, and a clock that makes up its times."""
    layer, inputs = measure.workload(32, 64, 256, 8, "lognormal", torch.bfloat16, "cpu")
    times = {"dense eager": [6.0, 6.0], "forced twell": [3.0, 3.0]}
    rows = measured.step_rows(layer, inputs, 8, lambda calls: times, lambda call: len(call(0)) * 2**20)
    assert [(each["path"], each["nnz"], each["x_dense"]) for each in rows] == [
        ("dense eager", 8, 1.0),
        ("forced twell", 8, 2.0),
    ]
    assert rows[0]["where"] == "yours, now, on My GPU" and rows[0]["peak_bytes"] == 5 * 2**20
    assert (rows[0]["tokens"], rows[0]["d_model"], rows[0]["d_ff"]) == (32, 64, 256)


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    dense = training.dense_layer
    monkeypatch.setattr(training, "our_layer", lambda path: lambda x, gate, up, down: dense(x, gate, up, 2 * down))
    layer, inputs = measure.workload(32, 64, 256, 8, "lognormal", torch.bfloat16, "cpu")
    with pytest.raises(measure.WrongResult, match="a gradient is off by"):
        measured.step_rows(layer, inputs, 8, clock=lambda calls: pytest.fail("it was timed"))


def test_the_newest_record_holds_what_training_promises():
    """Times as fast as torch's eager dense layer, memory and errors: a record that falls behind is noticed where it is
    added. A section that it left out for want of time, and says so, is looked for in the record before."""
    stored = sorted((each for each in records.load_all() if each.name == "training"), key=lambda each: each.date)
    newest = stored[-1]
    rows = [
        each for each in newest.rows if each["tokens"] == measured.TOKENS or each["workload"].startswith(measured.WHOLE)
    ]
    mib = {
        name: [each["peak_bytes"] / 2**20 for each in rows if each["path"] == name]
        for name in ("forced twell", "dense eager")
    }
    for nnz, least in ((8, 2.65), (29, 1.95), (60, 1.45), (120, 1.0)):
        found = [
            each["x_dense"]
            for each in rows
            if each["path"] == "planned" and each["workload"] == LOGNORMAL and abs(each["nnz"] / nnz - 1) < 0.1
        ]
        assert len(found) == 1 and found[0] >= least, (nnz, found)
    assert all(each["x_dense"] >= 0.97 for each in rows if each["path"] == "planned")
    assert all(each["x_compiled"] >= 0.97 for each in rows if each["path"] == "planned compiled")
    assert 0 < min(mib["forced twell"]) and max(mib["forced twell"]) <= 400 < min(mib["dense eager"])

    def of(section, workload):
        having = [record for record in stored if any(each["workload"] == workload for each in record.rows)][-1]
        assert having is newest or section in newest.notes["left_out"]
        return [each for each in having.rows if each["workload"] == workload]

    for heavy in (64, 512):
        if (workload := f"heavy rows: {heavy}") not in {each["workload"] for each in rows}:
            rows += of("heavy rows", workload)
    assert sum("error_over_allowed" in each for each in rows) > 50
    assert max(each.get("error_over_allowed", 0) for each in rows) <= 1

    steps = {each["path"]: each["ms"] for each in of("whole step", "whole step, 8 layers")}
    assert steps["dense compiled"] / steps["planned compiled"] >= 1.15
    swept = of("whole step, the sweep's model", "whole step, the sweep's model")
    assert {each["path"] for each in swept} >= {"dense compiled", "planned compiled", "forced twell compiled"} and len(
        {each["nnz"] for each in swept}
    ) == 2
