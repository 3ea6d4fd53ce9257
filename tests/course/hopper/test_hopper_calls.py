"""What notebook 09 says about plain calls: on small rows made for these tests, which are no measurements."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.course.recorded_rows import WHERE, record, row
from twell_lab.bench import host
from twell_lab.course.hopper import calls, figures
from twell_lab.course.hopper import data as hopper

TOKENS = (1, 256, 16384)


def call(tokens, path, ms, wall, workload="forward", **more):
    return row(path, ms, tokens=tokens, kind="host", workload=workload, wall_ms=wall, **more)


def both(**more):
    """Dense and TwELL, forward and in training; as older records have it, without the dense layer's wall time."""
    return [
        call(tokens, path, factor * ms, factor * wall, workload, **more)
        for workload, factor in (("forward and backward", 5.0), ("forward", 1.0))
        for tokens, dense, twell in zip(
            TOKENS, ((0.1, 0.11), (0.1, 0.12), (0.2, 1.6)), ((0.12, 0.13), (0.11, 0.15), (0.2, 0.8))
        )
        for path, (ms, wall) in (("dense eager", dense), ("twell", twell))
    ]


ROWS = calls.compared(both())


def test_the_newest_record_is_read_and_compared_by_wall_time(keep):
    bare = [{key: value for key, value in each.items() if key != "where"} for each in both()]
    keep(
        record("host-time", "2026-01-01T00:00:00Z", [each | {"ms": 9.0} for each in bare]),
        record("host-time", "2026-01-02T00:00:00Z", [{**each, "host_us": 1e3 * each["ms"]} for each in bare]),
        record("inference", "2026-01-03T00:00:00Z", [row()]),
    )
    found = calls.recorded()
    assert len(found) == len(bare) and {each["where"][:39] for each in found} == {
        "recorded on NVIDIA H100, 2026-01-02; st"
    }
    twell = next(each for each in found if each["path"] == "twell" and each["workload"] == "forward")
    assert (twell["tokens"], twell["dense_wall_ms"]) == (1, 0.11)
    assert twell["x"] == pytest.approx(0.11 / 0.13) and twell["most"] == pytest.approx(0.13 / 0.12)


def test_rows_of_different_runs_are_not_compared():
    other = [each | {"where": "yours, now"} for each in both() if each["path"] == "twell"]
    assert calls.compared(other) == [] and len(calls.compared(both() + other)) == len(both())


@pytest.mark.parametrize(
    "most, found", [((1.0, 4.0), 16.0), ((2.0, 4.0), 0.0), ((1.0, 1.5), None), ((1.0, 2.0), 256.0), ((1.9, 1.0), None)]
)
def test_the_crossing_lies_between_the_counts_around_it(most, found):
    rows = [{"tokens": tokens, "most": each} for tokens, each in zip((256, 1), reversed(most))]
    assert calls.crossing(rows) == (found if found is None else pytest.approx(found))


def test_tables_by_tokens():
    cells = [
        {
            "path": "forced twell",
            "tokens": 1,
            "nnz": nnz,
            "ms": ms,
            "x": 2.5,
            "where": "recorded on Some GPU, yesterday",
        }
        for nnz, ms in ((8, 0.9), (29.5, 0.02))
    ]
    gpu, plain, _, one, few, many = calls.gpu_table(ROWS, cells).splitlines()
    assert (gpu, plain) == ("GPU: recorded on Some GPU, yesterday", f"plain calls: {WHERE}")
    assert one.split() == ["1", "50", "20", "2.5", "110", "130", "0.8462"]
    assert few.split()[:4] == ["256", "-", "-", "-"] and many.split()[-1] == "2"
    where, head, *lines = calls.bounds_table(ROWS).splitlines()
    assert where == WHERE and head.split() == ["tokens:", "1", "256", "16,384", "wait", "is", "longer", "from"]
    assert [line.split()[:-3] for line in lines[:2]] == [
        ["forward", "dense", "eager", "1.10x", "1.20x", "8.00x"],
        ["forward", "twell", "1.08x", "1.36x", "4.00x"],
    ]
    assert lines[0].endswith("about 780 tokens") and lines[2].startswith("forward and backward  dense eager")


@pytest.mark.parametrize(
    "tokens, said", [(None, "nowhere here"), (0.0, "the fewest tokens on"), (2049.7, "about 2,000 tokens")]
)
def test_a_crossing_has_two_digits(tokens, said):
    assert calls.tokens_text(tokens) == said


def test_every_record_stands_in_the_table_of_replays(keep):
    old, new = ([each | {"ms": ms * (1 + (each["path"] == "twell"))} for each in both()] for ms in (2.0, 1.0))
    keep(record("host-time", "2026-11-22T16:00:00Z", old), record("another", "2026-11-22T16:00:00Z", new))
    lines = calls.replayed_table().splitlines()
    assert lines[1].split()[:3] == ["2026-11-22T16:00:00Z", "prepared", "anew"] and lines[2].startswith(
        "No record here"
    )
    keep(record("host-time", "2026-11-23T00:00:00Z", new[1:]), record("host-time", "2026-11-22T16:00:00Z", old))
    first, second = calls.replayed_table().splitlines()[1:]
    assert first.split()[3:] == ["2000", "4000", "2"] * 2 + ["NVIDIA", "H100"]
    assert "replayed, + backward as graphs" in second and second.count("-  ") >= 2  # training without the dense layer
    keep(record("host-time", "2026-11-24T00:00:00Z", new))
    assert "the same, + fewer questions" in calls.replayed_table().splitlines()[1]


def test_graphs_stand_beside_plain_calls_where_wall_times_were_recorded():
    times = {"wall_ms": 0.15, "host_us": 120.0}
    plain = [row(path, tokens=1, **times) for path in ("dense eager", "forced twell")]
    graphs = [row(f"{path} (graph)", tokens=1, wall_ms=0.02, host_us=9.0) for path in ("dense eager", "forced twell")]
    others = [row(path, tokens=1, nnz=120.0, **times) for path in ("forced twell", "forced twell (graph)")]
    where, _, *lines = calls.graphs_table([*graphs, *plain, *others]).splitlines()
    assert lines[1].split() == ["1", "forced", "twell", "120", "150", "9", "20"] and len(lines) == 2 and where == WHERE
    bare = [row(each["path"], tokens=1) for each in (*plain, *graphs)]
    for rows in ([], plain, graphs, [*plain, *bare[2:]], [*graphs, *bare[:2]]):
        assert calls.graphs_table(rows).startswith("No wall times of graphs are recorded")


def test_the_summary_says_where_the_host_alone_is_too_slow():
    told = calls.summary(ROWS).splitlines()
    assert told[0].startswith(f"Plain calls of TwELL, forward, {WHERE}: from 0.80 times as fast as dense (256 tokens)")
    assert told[1].startswith("  At 1 token the host alone")
    quick = calls.compared([each | {"ms": 0.01} for each in both() if each["workload"] == "forward"])
    assert calls.summary(quick).splitlines()[1].startswith("  Nowhere")
    assert calls.summary([]) == ""


def test_without_a_record_the_command_is_named():
    assert calls.gpu_table([], []) == calls.bounds_table([]) == calls.MISSING and calls.COMMAND in calls.MISSING


def test_what_is_missing_everywhere_is_said_in_the_table_of_replays(keep):
    keep(record("inference", "2026-01-01T00:00:00Z", [row()]))
    assert calls.replayed_table() == calls.MISSING


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_no_rows_are_measured():
    assert calls.yours() == []


def test_what_a_gpu_measures_is_compared_like_the_record(my_gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(host, "rows", lambda tokens: asked.append(tokens) or both(device="My GPU"))
    found = calls.yours((1, 2))
    assert asked == [(1, 2)] and {each["where"] for each in found} == {"yours, now, on My GPU"}
    assert len(found) == len(ROWS) and found[0]["most"] > 1


@given(st.integers(0, 50), st.lists(st.integers(0, 90), min_size=1, max_size=12))
def test_a_call_is_done_no_sooner_than_its_launches_and_its_kernels_allow(launch, kernels):
    returned, done = calls.timeline(launch, kernels)
    assert returned == launch * len(kernels)
    assert done >= max(returned + kernels[-1], launch + sum(kernels)) and done <= returned + sum(kernels)
    assert calls.timeline(launch, [0] * len(kernels)) == (returned, returned)


def test_small_calls_are_timed_and_what_a_layer_is_made_of_is_added_up(monkeypatch):
    monkeypatch.setattr(host, "D_MODEL", 64), monkeypatch.setattr(host, "D_FF", 96)
    found = calls.small("cpu", rounds=5)
    assert [each["call"] for each in found] == [
        "torch.relu",
        "torch.nn.Linear",
        "dense layer",
        "SparseFFN",
        "dense layer, 64 x 96",
    ]
    assert all(each["host_us"] == each["wall_us"] > 0 for each in found)
    made_up = [each | {"host_us": us, "wall_us": us} for each, us in zip(found, (1.0, 4.0, 16.0, 60.0, 1600.0))]
    told = calls.small_text(made_up, ROWS)
    assert "a product: 14 us; the dense layer 8 wide: 16 us." in told and "That is 1.0% of" in told
    assert told.endswith(f"On a GPU 91% of it passes before the call returns: {WHERE}.")
    assert calls.small_text(made_up, []) + f"\n{told.splitlines()[-1]}" == told


def test_the_figure_has_a_panel_for_each_path_and_both_times_in_it():
    own = [each | {"where": "yours, now, on My GPU", "ms": 0.5} for each in ROWS if each["tokens"] == 1]
    figure = figures.host_and_wall(ROWS, own)
    shown = [(trace.name, list(trace.y)) for trace in figure.data if trace.yaxis == "y2"]  # TwELL, forward
    assert shown == [
        ("the result of torch's dense layer is there, recorded", [0.11, 0.12, 1.6]),
        ("the result is there, recorded", [0.13, 0.15, 0.8]),
        ("the call returns, recorded", [0.12, 0.11, 0.2]),
        ("the result is there, yours, now", [0.13]),
        ("the call returns, yours, now", [0.5]),
    ]
    assert [trace.name for trace in figure.data if trace.yaxis == "y"] == [name for name, _ in shown[1:]]
    wait = next(trace for trace in figure.data if trace.yaxis == "y2" and trace.error_y.arrayminus).error_y.arrayminus
    assert list(wait) == pytest.approx([0.01, 0.04, 0.6])
    lines = [shape.x0 for shape in figure.layout.shapes]
    assert len(lines) == 4 and lines[0] == pytest.approx(calls.crossing(calls.lines(ROWS)["forward", "dense eager"]))
    assert [trace.name for trace in figure.data if trace.showlegend] == list(dict.fromkeys(t.name for t in figure.data))
    assert WHERE in figure.layout.title.text and "yours, now, on My GPU" in figure.layout.title.text
    assert {each.text for each in figure.layout.annotations} == {"torch's dense layer", "TwELL"}


def test_the_figure_draws_what_there_is():
    assert "nothing is recorded" in figures.host_and_wall([], []).layout.annotations[0].text
    own = [each | {"where": "yours, now, on My GPU"} for each in ROWS]
    assert {trace.marker.symbol for trace in figures.host_and_wall([], own).data} == {"circle"}


def test_the_numbers_of_the_gpu_are_those_of_the_map():
    """`gpu_table` takes the cells that the notebook has, whose few tokens are graph replays."""
    rows = [row("forced twell (graph)", 0.02, 0.05, tokens=1), row("forced twell", 0.4, 0.8, tokens=16384)]
    table = calls.gpu_table(ROWS, hopper.cells(rows)).splitlines()[2:]
    assert table[1].split()[1:4] == ["50", "20", "2.5"] and table[3].split()[1:4] == ["800", "400", "2"]
