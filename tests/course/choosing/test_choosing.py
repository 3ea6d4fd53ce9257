"""The notebook on choosing a path: what each method computes, its times, its sentences, and the map."""

import re
import sys
import time

import pytest
import torch

from twell_lab.bench import methods
from twell_lab.course.choosing import checks, data, figures
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import clock as clocks
from twell_lab.records import Record
from twell_lab.sparsities import few_neurons, predictors

WHERE = "yours, now, on CPU"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for room in (data, methods):
        monkeypatch.setattr(room, "sizes_for", lambda device: methods.Sizes(64, 768, (1, 8), 64))


@pytest.fixture
def made_up(monkeypatch):
    """No clock: every call runs once and takes as many milliseconds as there were calls before it, plus one."""

    def clock(calls, device, *given, **named):
        for call in calls.values():
            call()
        return {name: 1.0 + i for i, name in enumerate(calls)}

    monkeypatch.setattr(data, "_clock", clock)


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(d_model=32, layers=2, heads=2, d_ff=96, context=16)).eval()
    fires = [torch.rand(64, 96) < share for share in (0.02, 0.1)]
    return data.Study(model, torch.randint(0, 256, (4, 16)), torch.randint(0, 256, (64, 16)), fires)


def row(method, tokens, share, x_dense, **more):
    exact = method not in (methods.EXPERTS, methods.PREDICTED)
    return {
        "method": method,
        "tokens": tokens,
        "share": share,
        "x_dense": x_dense,
        "exact": exact,
        "where": WHERE,
    } | more


MAP = [
    row(methods.DENSE, 1, 0.01, 1.0),
    row(methods.PACKED, 1, 0.01, 2.0),
    row(methods.PREDICTED, 1, 0.01, 5.0),
    row(methods.DENSE, 64, 0.01, 1.0),
    row(methods.TILES, 64, 0.01, 1.04),
    row(methods.EXPERTS, 64, 0.01, 3.0),
    row(methods.DENSE, 64, 0.5, 1.0),
    row(methods.PACKED, 64, 0.5, 0.5),
]


# ---- what each method computes ----


def test_what_each_method_computes_of_who_fires():
    fires = torch.rand(64, 400) < 0.05
    kinds = data.works(fires)
    assert {each.shape for each in kinds.values()} == {(64, 64)}
    wanted = kinds["packed, each entry alone"] == data.NEEDED
    for name, each in kinds.items():
        missed = (each == data.MISSED).any()
        assert ("lossy" in name) or not missed
        assert torch.equal((each == data.NEEDED) | (each == data.MISSED), wanted)
    assert (kinds["dense"] >= data.FOR_NOTHING).all() and not (kinds["packed, each entry alone"] == 1).any()
    tiles = kinds["micro-tiles of 32 tokens"].view(2, 32, 64) != data.SKIPPED
    assert torch.equal(tiles.any(1), tiles.all(1)) and torch.equal(tiles.any(1), wanted.view(2, 32, 64).any(1))
    groups = kinds["experts of 16 neurons"].view(64, 4, 16) != data.SKIPPED
    assert torch.equal(groups.any(2), groups.all(2)) and torch.equal(groups.any(2), wanted.view(64, 4, 16).any(2))
    drawn = figures.works(kinds)
    assert drawn.layout.annotations[0].text == "dense: 100%"
    assert sum(trace.type == "heatmap" for trace in drawn.data) == len(kinds)


def test_the_study_of_a_shipped_model():
    found = data.study(windows=2)
    assert len(found.fires) == len(found.model.layers) and found.fires[0].shape[1] == found.model.config.d_ff
    assert 0 < float(found.fires[1].double().mean()) < 0.2
    assert not any(layer.mlp.gate_proj._forward_hooks for layer in found.model.layers)
    assert len(found.seen) == 64 and len(found.windows) == 2


def test_columns_of_random_firing_are_occupied_as_expected(subject):
    rows = data.occupied_rows(subject, (1, 8, 32))
    for each in rows:
        assert each["measured"] == pytest.approx(each["expected"], abs=0.12)
        density, height = each["density"], each["height"]
        assert each["expected"] == pytest.approx(1 - (1 - density) ** height)
    assert [each["measured"] for each in rows if each["height"] == 1] == pytest.approx(
        [float(fires.double().mean()) for fires in subject.fires]
    )
    made_up = [
        {"layer": layer, "height": 32, "measured": measured, "expected": 0.5}
        for layer, measured in ((0, 0.6), (1, 0.27))
    ]
    assert data.occupied_sentence(made_up) == "27%, fewer in 1 of 2 layers"
    assert len(figures.occupied(rows).data) == 4


# ---- products and padding ----


def test_micro_tiles_are_timed_as_products(monkeypatch):
    monkeypatch.setattr(data, "Shape", lambda *given: data.comparison.Shape(64, 64, 16, torch.float32, "cpu", 0.01))
    rows = data.products_here("cpu", (0.5, 0.9))
    assert {each["path"] for each in rows} >= {"dense eager", methods.TILES, f"part: {methods.TILES}, conversion"}
    assert re.match("scattered zeros (begin to )?win ", data.products_sentence(rows))
    drawn = figures.products(rows)
    assert len(drawn.data) == 4 and drawn.data[1].y[0] < drawn.data[0].y[0]  # finding takes time
    both = figures.products(
        rows + [each | {"where": "recorded on a GPU"} for each in rows if "part" not in each["path"]]
    )
    assert len(both.data) == 6 and both.data[-1].name.endswith("recorded on a GPU")
    assert "nothing is recorded" in figures.products([]).layout.annotations[0].text
    padding = {"kind": "padding", "path": "padding removed", "ms": 1.0, "where": "here"}  # as a record has them, too
    assert len(figures.products([*rows, padding]).data) == len(drawn.data)


def test_padding_is_timed_where_it_gives_the_same(made_up):
    rows = data.padding_rows("cpu", (1.0, 0.5))
    assert {(each["path"], each["real"]) for each in rows} == {
        (path, real) for path in ("padded", "padding removed", "real tokens alone") for real in (1.0, 0.5)
    }
    drawn = figures.padding(rows)
    assert len(drawn.data) == 4 and drawn.layout.title.text.endswith(f"<sup>{WHERE}</sup>")


@pytest.mark.parametrize(
    "times, said",
    [
        ((0.5, 0.9, 2.0), "begin to win between 90% and 99%"),
        ((0.5, 0.6, 0.7), "win nowhere"),
        ((2.0, 3.0, 4.0), "win everywhere"),
    ],
)
def test_micro_tiles_begin_to_win_between_two_shares_of_zeros(times, said):
    rows = [
        {"path": methods.TILES, "pattern": data.SCATTERED, "density": density, "x_dense": x}
        for density, x in zip((0.5, 0.1, 0.01), times)
    ]
    rows += [{"path": methods.TILES, "pattern": data.TALL, "density": 0.5, "x_dense": 9.0}]
    assert data.products_sentence(rows) == f"scattered zeros {said}"


def test_how_much_the_padding_costs():
    rows = [
        {"real": real, "path": path, "ms": ms, "where": WHERE}
        for real, path, ms in ((1.0, "padded", 4.0), (1.0, "padding removed", 4.0), (0.25, "padded", 4.0))
    ]
    rows.append({"real": 0.25, "path": "padding removed", "ms": 1.25, "where": WHERE})
    assert data.padding_sentence(rows) == "Without padding, 25% real: 3.2 times."


def test_how_far_recorded_layers_without_padding_are_from_proportion_and_as_many_tokens_alone():
    def row(layers, real, path, ms):
        shared = {"kind": "padding", "tokens": 4, "where": "recorded on NVIDIA H100, 2026-01-01"}
        return shared | {"layers": layers, "real": real, "path": path, "ms": ms}

    times = {"dense eager": (8.0, 8.0), "padding removed": (2.4, 8.0), "real tokens alone": (2.1, 8.0)}
    rows = [row(1, real, path, ms) for path, both in times.items() for real, ms in zip((1, 4), both)]
    rows += [row(8, 2, "dense eager", 64.0), row(8, 2, "padding removed", 31.0)]  # as older records have them
    said = data.proportion_sentence([*rows, {"kind": "experts"}])
    assert said == (
        "recorded on NVIDIA H100, 2026-01-01,<br>beside proportion: 1 layer +20% (as many tokens alone +5%), 8 layers -3%"
    )
    drawn = figures.padding(
        [each | {"real": each["real"] / 4} for each in rows[:6] if each["layers"] == 1][:2]
        + [{"real": 1, "path": "padded", "ms": 8.0, "where": WHERE}],
        rows,
    )
    assert drawn.layout.title.text.endswith(f"<br>{said}</sup>") and WHERE in drawn.layout.title.text
    assert data.proportion_sentence([{"kind": "experts"}]) == ""


# ---- hot and cold, groups, experts ----


def test_what_a_packed_neuron_costs_is_read_from_two_recorded_shares():
    rows = [
        row(methods.PACKED, 16384, 0.001, 2.0, ms=0.6),
        row(methods.PACKED, 16384, 0.011, 2.0, ms=1.4),
        row(methods.PACKED, 16384, 0.05, 2.0, ms=1.5),  # too many fire: computed densely
        row(methods.PACKED, 1, 0.002, 2.0, ms=9.0),
        row(methods.DENSE, 16384, 0.001, 1.0, ms=1.8),
    ]
    assert data.dearer(rows) == pytest.approx(80 / 1.2)
    assert data.dearer(rows[1:]) is None and data.dearer(rows[:-1]) is None and data.dearer([]) is None
    assert data.dearer(data.recorded_map()) > 10
    assert "nothing is recorded" in figures.firing(torch.ones(4), None).layout.annotations[0].text


def test_who_is_hot():
    shares = torch.tensor([0.0, 0.5, 0.1, 0.5, 0.25])
    assert data.hot_neurons(shares, 4).tolist() == [1, 3] and data.hot_neurons(shares, 1).tolist() == []
    assert data.hot_neurons(shares, 100).tolist() == [1, 3, 4, 2]
    drawn = figures.firing(shares, 4)
    assert [len(bar.y) for bar in drawn.data] == [2, 3] and drawn.data[0].y == (50.0, 50.0)
    assert "2 of 5" in drawn.layout.title.text


def test_hot_sizes_are_timed_here_and_stand_beside_recorded_ones(monkeypatch):
    def samples(calls, device, seconds):
        return {name: [1.0 + 2 * i + turn for turn in range(11)] for i, name in enumerate(calls)}

    monkeypatch.setattr(data, "_samples", samples)
    recorded = [
        row(methods.SPLIT, 16384, share, x, where="recorded", d_ff=768, hot=256)
        for share, x in ((0.01, 1.5), (0.02, 1.4), (0.1, 9.0))
    ]
    rows = data.hot_rows("cpu", [*recorded, recorded[0] | {"tokens": 1}])
    here = [each for each in rows if each["where"] == WHERE]
    assert [each["hot"] for each in here] == [0, 256, 512] and here[0]["x_dense"] == pytest.approx(6 / 8)
    assert (here[0]["low"], here[0]["high"]) == pytest.approx((2 / 4, 10 / 12))
    assert [(each["where"], each["x_dense"]) for each in rows[3:]] == [
        ("recorded: 8 of 768 fire", 1.5),
        ("recorded: 15 of 768 fire", 1.4),
    ]
    drawn = figures.hot_sizes(rows)
    assert len(drawn.data) == 3 and drawn.data[0].error_y.arrayminus[0] == pytest.approx(6 / 8 - 2 / 4)


@pytest.mark.parametrize(
    "low, said",
    [
        (0.97, "none surely beats dense; the likeliest, 256 hot: 1.05 (0.97 to 1.20)"),
        (1.02, "256 hot neurons beat dense:"),
    ],
)
def test_a_gain_within_the_spread_is_none(low, said):
    rows = [{"hot": 256, "x_dense": 1.05, "low": low, "high": 1.2}, {"hot": 0, "x_dense": 1.3, "low": 0.5, "high": 2.0}]
    assert data.hot_sentence([*rows, {"hot": 9, "x_dense": 9.0}]).startswith(said)


def test_groups_of_one_neuron_do_least_and_all_are_exact():
    rows = data.grains()
    work = [each["work"] for each in rows]
    assert work == sorted(work) and work[-1] == 1 and all(each["error"] < 1e-5 for each in rows)


def test_experts_are_computed_in_each_way(made_up):
    rows = data.expert_rows("cpu", (4,))
    assert len(rows) == 2 * 3 and {each["way"] for each in rows} == {"grouped", "loop", "padded"}
    assert data.expert_sentence(rows) == "fastest of 4 experts: spread, grouped; all to the same two, grouped"
    near = [each | {"ms": 1.01} if each["way"] == "loop" else each for each in rows]
    assert "spread, grouped or loop;" in data.expert_sentence(near)
    assert len(figures.experts(rows).data) == 6


# ---- guesses ----


def test_what_guessing_costs(subject):
    found = predictors.predict(subject.model, subject.seen.split(16), recall=0.9, rank=4, steps=2)
    rows = data.lossy_rows(subject, found, (1.0,), (1.0, 0.2))
    assert rows[0]["more"] == 0 and 0 < rows[0]["computed"] < 1
    whole = [each for each in rows[1:] if each["computed"] == 1]
    assert whole and all(each["more"] == pytest.approx(0, abs=1e-4) for each in whole)
    assert not any(isinstance(each, few_neurons.FewNeurons) for each in subject.model.modules())
    assert data.predictor_sentence(found).startswith("Guessing, at 90% recall: ")
    assert len(figures.losses(rows).data) == 3


def test_the_model_is_taken_back_when_something_fails(subject, monkeypatch):
    found = predictors.predict(subject.model, subject.seen.split(16), recall=0.9, rank=4, steps=2)
    fails = iter([torch.zeros(1) + 1])
    monkeypatch.setattr(data.chosen_neurons, "second_halves", lambda *_: next(fails))
    with pytest.raises(StopIteration):
        data.lossy_rows(subject, found)
    assert not any(isinstance(each, few_neurons.FewNeurons) for each in subject.model.modules())


def test_bytes_of_one_token():
    dense, packed, predicted = data.token_bytes(10, 100, 5, 2, 7, 4)
    assert (dense, packed, predicted) == (12000, 4400, 4 * (2 * 110 + 3 * 7 * 10))
    rows = data.token_rows([row(methods.PACKED, 1, 0.01, 2.0), row(methods.PACKED, 8, 0.01, 9.0)], "cpu")
    assert len(rows) == 1 and rows[0]["bytes_x"] == pytest.approx(3 * 768 / (768 + 16))
    assert len(figures.one_token(rows).data) == 2


# ---- the map ----


def test_the_map_holds_each_method_against_dense_first(made_up):
    rows = data.map_rows("cpu", (1 / 256, 1 / 8))
    timed = lambda tokens, share: {
        each["method"] for each in rows if (each["tokens"], each["share"]) == (tokens, share)
    }
    exact = {methods.DENSE, methods.PACKED, methods.SPLIT, methods.TILES}
    always = exact | {methods.GROUPED}
    assert timed(1, 1 / 256) == always | {methods.PREDICTED} and timed(8, 1 / 256) == always
    assert timed(8, 1 / 8) == always | {methods.EXPERTS} and [*figures.COLOUR] == [*methods.METHODS]
    assert all(each["exact"] == (each["method"] in exact) for each in rows)


def test_times_of_calls_here():
    took = data._clock({"short": lambda: None, "long": lambda: time.sleep(0.002)}, "cpu", 0.01)
    assert 0 < took["short"] < 1 < 2 <= took["long"]
    took = data._clock({"longer": lambda: time.sleep(0.03)}, "cpu", 0.01)
    assert took["longer"] >= 30


def test_a_wrong_method_is_not_timed(monkeypatch):
    monkeypatch.setattr(methods, "by_stripes", lambda layer, down_t, x: layer(x) * 1.01)
    with pytest.raises(clocks.WrongResult, match="micro-tiles 32 x 1 is off by 0.01"):
        data.map_rows("cpu", (1 / 8,))


def test_the_winners():
    exact, everything = data.winners(MAP), data.winners(MAP, exact=False)
    assert {at: each["method"] for at, each in exact.items()} == {
        (0.01, 1): methods.PACKED,
        (0.01, 64): methods.DENSE,  # 1.04 times may be noise
        (0.5, 64): methods.DENSE,
    }
    assert everything[0.01, 1]["method"] == methods.PREDICTED and everything[0.01, 64]["method"] == methods.EXPERTS
    near = [row(methods.DENSE, 1, 0.010, 1.0), row(methods.PACKED, 1, 0.0105, 2.0), row(methods.PACKED, 1, 0.02, 3.0)]
    assert {at: each["x_dense"] for at, each in data.winners(near).items()} == {(0.010, 1): 2.0, (0.02, 1): 3.0}
    drawn = figures.winners(MAP)
    left, right = (trace for trace in drawn.data if trace.type == "heatmap")
    assert [*left.text[0]] == ["2", "1"]
    names = [trace for trace in drawn.data if trace.type == "scatter" and trace.mode == "text"]
    said = {text for trace in names if trace.xaxis == left.xaxis for text in trace.text}
    assert said == {"packed<br><b>2</b>", "dense<br><b>1</b>"}  # not by colour alone
    assert set(figures._SHORT) == set(methods.METHODS)
    assert left.x == ("1", "64") and left.y == ("1%", "50%") and left.z[1][0] is None
    assert {trace.name for trace in drawn.data if trace.type == "scatter"} == {
        methods.DENSE,
        methods.PACKED,
        methods.EXPERTS,
        methods.PREDICTED,
    }
    assert len([t for t in figures.winners(MAP[:2]).data if t.type == "heatmap"]) == 1
    assert "nothing is recorded" in figures.winners([]).layout.annotations[0].text


def inference(path, x_dense, nnz=29.0, tokens=16384, **more):
    shared = {"kind": "inference", "device": "NVIDIA H100", "dtype": "bfloat16", "tokens": tokens, "gated": True}
    shared |= {"d_model": 2048, "d_ff": 5632, "nnz": nnz, "workload": data.LOGNORMAL, "path": path, "ms": 1 / x_dense}
    return shared | {"dense_ms": 1.0, "spread": 0.0, "x_dense": x_dense, "samples": [1 / x_dense]} | more


def test_the_recorded_map(keep):
    rows = [inference("dense eager", 1.0), inference("forced twell", 2.0), inference("forced hot_cold 512", 2.5)]
    rows += [inference("forced twell (graph)", 9.0), inference("dense eager", 1.0, tokens=1), inference("planned", 8.0)]
    keep(Record.new("inference", "made up", rows, {}))
    found = data.recorded_map()
    assert [(each["method"], each["x_dense"]) for each in found] == [
        (methods.DENSE, 1.0),
        (methods.PACKED, 2.0),
        (methods.SPLIT, 2.5),
    ]
    assert all(each["where"].startswith("recorded on NVIDIA H100") for each in found)
    assert data.recorded("predictors") == [] and data.recorded("inference")[0]["where"] == found[0]["where"]


def test_the_map_is_recorded_with_every_method_and_drawn_instead_of_the_few_of_inference(keep, monkeypatch):
    made = methods.map_rows(1 / 8, "cpu")
    assert {each["path"] for each in made} == {"dense eager", *methods.METHODS} - {methods.DENSE}
    assert all(each["kind"] == "map" and each["share"] == 1 / 8 and each["wall_ms"] > 0 for each in made)
    assert all((0 < each["error"] < 1) == (each["path"] == methods.GROUPED) for each in made if "error" in each)
    assert {each["path"] for each in made if "error" in each} == {methods.GROUPED}
    assert all(each["nnz"] == pytest.approx(768 / 8, rel=0.3) and each["tokens"] in (1, 8) for each in made)
    assert {each["path"] for each in made if each["tokens"] == 8} == {each["path"] for each in made} - {
        methods.PREDICTED
    }
    few = Record.new("inference", "made up", [inference("dense eager", 1.0), inference("forced twell", 2.0)], {})
    keep(few)
    alone = data.recorded_map()
    keep(few, Record.new("comparison", "made up", [each | {"device": "NVIDIA H100"} for each in made], {}))
    found = data.recorded_map()
    assert [each for each in found if not each.get("whole")] == alone
    assert {(each["method"], each["tokens"]) for each in found if each.get("whole")} == {
        (methods.DENSE if each["path"] == "dense eager" else each["path"], each["tokens"]) for each in made
    }
    assert data.dearer(found) == data.dearer(alone)
    drawn = figures.winners(found)
    assert "or another layer, or lossy" in [each.text for each in drawn.layout.annotations]
    assert [*drawn.data[0].x] == ["1", "8"] and len(drawn.data[0].y) == 1


def test_every_recorded_gpu_has_a_line_of_the_map_from_one_record_and_the_one_that_is_told_of_comes_first(keep):
    def record(gpu, day, packed, tokens=1):
        shared = {"kind": "map", "device": gpu, "dtype": "bfloat16", "tokens": tokens, "d_model": 2048, "d_ff": 5632}
        shared |= {
            "nnz": 22.0 + day,
            "share": 1 / 256,
            "workload": "drawn",
        }  # what fires is drawn, so it is never the same
        rows = [shared | {"path": "dense eager", "ms": 1.0, "x_dense": 1.0, "samples": [1.0], "spread": 0.0}]
        path = {"path": methods.PACKED, "ms": 1 / packed, "x_dense": packed, "samples": [1 / packed], "spread": 0.0}
        return Record.new("comparison", "made up", [*rows, shared | path], {}), day

    def saved(*made):
        for each, day in made:
            each.date = f"2026-01-0{day}T00:00:00Z"
        keep(*(each for each, _ in made))

    old, new = record("NVIDIA H100 80GB HBM3", 1, 4.0), record("NVIDIA H100 80GB HBM3", 2, 2.0)
    other = record("NVIDIA H200", 3, 3.0)
    saved(old, new)
    alone = data.recorded_maps()
    assert [(each["x_dense"], each["gpu"]) for each in alone] == [
        (1.0, new[0].rows[0]["device"]),
        (2.0, old[0].rows[0]["device"]),
    ]
    one = figures.winners(alone)
    assert [each.text for each in one.layout.annotations] == ["the same result as dense"]
    saved(other, old, new)
    assert data.recorded_map() == [{k: v for k, v in each.items() if k != "gpu"} for each in alone]
    assert data.recorded_map("H200")[1]["x_dense"] == 3.0
    assert {each["where"][:20] for each in data.recorded("comparison")} == {"recorded on NVIDIA H"}
    assert {each["device"] for each in data.recorded("comparison")} == {"NVIDIA H100 80GB HBM3"}
    drawn = figures.winners(data.recorded_maps())
    assert [each.text for each in drawn.layout.annotations] == [
        f"{gpu}: the same result as dense" for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    ]
    first, second = (trace for trace in drawn.data if trace.type == "heatmap")
    assert (first.text[0][0], second.text[0][0]) == ("2", "3")
    assert "HBM3, 2026-01-02" in drawn.layout.title.text and "H200, 2026-01-03" in drawn.layout.title.text
    saved(other)  # nothing of the GPU that is told of
    assert {each["device"] for each in data.recorded("comparison")} == {"NVIDIA H200"}


def test_recorded_guesses_are_drawn_and_those_of_a_cpu_are_not(keep):
    lossy = "lossy: predicted, recall 90%"
    made = inference(lossy, 1.5, kind="chosen_neurons", tokens=1, loss_change=[0.0, 0.1, 0.2])
    keep(Record.new("predictors", "made up", [made | {"device": "CPU"}], {}))
    assert "nothing is recorded" in figures.chosen_neurons(data.recorded("predictors")).layout.annotations[0].text
    keep(Record.new("predictors", "made up", [made, inference(lossy + " (graph)", 3.0, kind="chosen_neurons")], {}))
    (points,) = figures.chosen_neurons(data.recorded("predictors")).data
    assert points.name == "predicted" and points.x == (0.1,) and points.y == (1.5,)


def test_predictions_stand_beside_what_was_recorded():
    recorded = [
        row(methods.PACKED, 1, 0.005, 2.54),
        row(methods.SPLIT, 16384, 0.0052, 2.1),
        row(methods.PACKED, 16384, 0.01, 9.0),
    ]
    said = data.predicted_sentence(recorded, ("T4", "H100 SXM"))
    assert said.startswith("Predicted, 1/16,384 tokens: T4 2.9/1.4, H100 2.")
    assert said.endswith("; recorded 2.5/2.1")
    assert "recorded" not in data.predicted_sentence(recorded[1:]) + data.predicted_sentence([])


def test_three_lines_say_what_the_numbers_say(subject):
    found = predictors.predict(subject.model, subject.seen.split(16), recall=0.9, rank=4, steps=2)
    padding = [{"real": 1.0, "path": path, "ms": 1.0, "where": WHERE} for path in ("padded", "padding removed")]
    lines = data.three_lines(MAP, found, padding)
    assert lines[0] == "The map here, best of 3 cells: dense 2, packed 1; at most 2.0 times, 1 token."
    assert lines[1:] == [data.padding_sentence(padding), data.predictor_sentence(found)]


# ---- checks ----


def test_loops_are_counted_in_whatever_form():
    def loop(count):
        total = 0
        for each in range(count):
            total += each
        return total

    forms = [
        loop,
        lambda count: [each for each in range(count)],
        lambda count: sum(each for each in range(count)),
        lambda count: [*map(lambda each: each + 1, range(count))],
    ]
    before = sys.gettrace()
    for form in forms:
        with checks._counting() as few:
            form(4)
        with checks._counting() as many:
            form(64)
        assert len(many) > len(few)
    assert sys.gettrace() is before
