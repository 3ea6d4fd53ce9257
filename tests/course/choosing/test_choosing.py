"""The notebook on choosing a path: what each method computes, its times, its sentences, and the map."""

import math
import sys
import time

import pytest
import torch

from twell_lab.course.choosing import checks, data, figures
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import measure
from twell_lab.records.record import Record
from twell_lab.sparsities import predictors

WHERE = "yours, now, on CPU"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(data, "sizes_for", lambda device: data.Sizes(64, 768, (1, 8), 64))


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
    exact = method not in (data.EXPERTS, data.PREDICTED)
    return {
        "method": method,
        "tokens": tokens,
        "share": share,
        "x_dense": x_dense,
        "exact": exact,
        "where": WHERE,
    } | more


MAP = [
    row(data.DENSE, 1, 0.01, 1.0),
    row(data.PACKED, 1, 0.01, 2.0),
    row(data.PREDICTED, 1, 0.01, 5.0),
    row(data.DENSE, 64, 0.01, 1.0),
    row(data.TILES, 64, 0.01, 1.04),
    row(data.EXPERTS, 64, 0.01, 3.0),
    row(data.DENSE, 64, 0.5, 1.0),
    row(data.PACKED, 64, 0.5, 0.5),
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
    assert "layer 1" in data.occupied_sentence(rows)
    assert len(figures.occupied(rows).data) == 4


# ---- products and padding ----


def test_micro_tiles_are_timed_as_products(monkeypatch):
    monkeypatch.setattr(data, "Shape", lambda *given: data.comparison.Shape(64, 64, 16, torch.float32, "cpu", 0.01))
    rows = data.products_here("cpu", (0.5, 0.9))
    assert {each["path"] for each in rows} >= {"dense eager", data.TILES, f"part: {data.TILES}, conversion"}
    assert "scattered: faster than dense" in data.products_sentence(rows)
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
        (path, real) for path in ("padded", "padding removed") for real in (1.0, 0.5)
    }
    assert len(figures.padding(rows).data) == 3


@pytest.mark.parametrize("took, said", [({1.0: 4.0, 0.25: 1.0}, "within 0%"), ({1.0: 4.0, 0.25: 1.2}, "within 20%")])
def test_how_far_time_follows_the_real_rows(took, said):
    rows = [{"real": real, "path": "padding removed", "ms": ms, "where": WHERE} for real, ms in took.items()]
    rows += [{"real": real, "path": "padded", "ms": 4.0, "where": WHERE} for real in took]
    sentence = data.padding_sentence(rows)
    assert said in sentence and f"{4 / took[0.25]:.1f} times as fast as with" in sentence


# ---- hot and cold, groups, experts ----


def test_firing_packed_costs_more_where_many_tokens_share_a_dense_product():
    many, one = data.dearer("H100 SXM", 16384), data.dearer("H100 SXM", 1)
    assert many > 10 > one > 0


def test_who_is_hot():
    shares = torch.tensor([0.0, 0.5, 0.1, 0.5, 0.25])
    assert data.hot_neurons(shares, 4).tolist() == [1, 3] and data.hot_neurons(shares, 1).tolist() == []
    assert data.hot_neurons(shares, 100).tolist() == [1, 3, 4, 2]
    drawn = figures.firing(shares, 4)
    assert [len(bar.y) for bar in drawn.data] == [2, 3] and drawn.data[0].y == (50.0, 50.0)
    assert "2 of 5" in drawn.layout.title.text


def test_hot_sizes_are_timed_here_and_predicted(made_up):
    rows = data.hot_rows("cpu")
    here = [each for each in rows if each["where"] == WHERE]
    assert [each["hot"] for each in here] == [0, 256, 512] and here[0]["x_dense"] == 0.5
    assert {each["where"] for each in rows} == {WHERE, "predicted for an H100 SXM, 16,384 tokens"}
    lines = data.hot_sentence(rows).splitlines()
    assert "best with no hot neurons of 768, 0.50 times" in lines[0] and len(lines) == 2
    assert len(figures.hot_sizes(rows).data) == 2


def test_groups_of_one_neuron_do_least_and_all_are_exact():
    rows = data.grains()
    work = [each["work"] for each in rows]
    assert work == sorted(work) and work[-1] == 1 and all(each["error"] < 1e-5 for each in rows)


def test_experts_are_computed_in_each_way(made_up):
    rows = data.expert_rows("cpu", (4,))
    assert len(rows) == 2 * 3 and {each["way"] for each in rows} == {"grouped", "loop", "padded"}
    lines = data.expert_sentence(rows).splitlines()
    assert lines[0] == "tokens spread, 4 experts: grouped is fastest, 3.0 times as fast as padded"
    assert len(figures.experts(rows).data) == 6


# ---- guesses ----


def test_what_guessing_costs(subject):
    found = predictors.predict(subject.model, subject.seen.split(16), recall=0.9, rank=4, steps=2)
    rows = data.lossy_rows(subject, found, (1.0,), (1.0, 0.2))
    assert rows[0]["more"] == 0 and 0 < rows[0]["computed"] < 1
    whole = [each for each in rows[1:] if each["computed"] == 1]
    assert whole and all(each["more"] == pytest.approx(0, abs=1e-4) for each in whole)
    assert not any(isinstance(each, predictors.FewNeurons) for each in subject.model.modules())
    assert "to find 90% of what fires" in data.predictor_sentence(found)
    assert len(figures.losses(rows).data) == 3


def test_the_model_is_taken_back_when_something_fails(subject, monkeypatch):
    found = predictors.predict(subject.model, subject.seen.split(16), recall=0.9, rank=4, steps=2)
    fails = iter([torch.zeros(1) + 1])
    monkeypatch.setattr(data.chosen_neurons, "second_halves", lambda *_: next(fails))
    with pytest.raises(StopIteration):
        data.lossy_rows(subject, found)
    assert not any(isinstance(each, predictors.FewNeurons) for each in subject.model.modules())


def test_bytes_of_one_token():
    dense, packed, predicted = data.token_bytes(10, 100, 5, 2, 7, 4)
    assert (dense, packed, predicted) == (12000, 4400, 4 * (2 * 110 + 3 * 7 * 10))
    rows = data.token_rows([row(data.PACKED, 1, 0.01, 2.0), row(data.PACKED, 8, 0.01, 9.0)], "cpu")
    assert len(rows) == 1 and rows[0]["bytes_x"] == pytest.approx(3 * 768 / (768 + 16))
    assert len(figures.one_token(rows).data) == 2


# ---- the map ----


def test_the_map_holds_each_method_against_dense_first(made_up):
    rows = data.map_rows("cpu", (1 / 256, 1 / 8))
    methods = lambda tokens, share: {
        each["method"] for each in rows if (each["tokens"], each["share"]) == (tokens, share)
    }
    exact = {data.DENSE, data.PACKED, data.SPLIT, data.TILES}
    assert methods(1, 1 / 256) == exact | {data.PREDICTED} and methods(8, 1 / 256) == exact
    assert methods(8, 1 / 8) == exact | {data.EXPERTS}
    assert all(each["exact"] == (each["method"] in exact) for each in rows)


def test_times_of_calls_here():
    took = data._clock({"short": lambda: None, "long": lambda: time.sleep(0.002)}, "cpu", 0.01)
    assert 0 < took["short"] < 1 < 2 <= took["long"]
    took = data._clock({"longer": lambda: time.sleep(0.03)}, "cpu", 0.01)
    assert took["longer"] >= 30


def test_a_wrong_method_is_not_timed(monkeypatch):
    monkeypatch.setattr(data, "by_stripes", lambda layer, down_t, x: layer(x) * 1.01)
    with pytest.raises(measure.WrongResult, match="micro-tiles 32 x 1 is off by 0.01"):
        data.map_rows("cpu", (1 / 8,))
    data._hold("nothing", torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(measure.WrongResult):
        data._hold("no number", torch.full((2, 3), math.nan), torch.ones(2, 3))


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_stripes_give_the_dense_result(tokens, share):
    layer, (x, *_) = measure.workload(tokens, 24, 40, share * 40, "uniform", torch.float32, "cpu")
    with torch.no_grad():
        y = data.by_stripes(layer, layer.down_proj.weight.t().contiguous(), x)
        torch.testing.assert_close(y, layer(x), rtol=1e-4, atol=1e-5)


def test_the_winners():
    exact, everything = data.winners(MAP), data.winners(MAP, exact=False)
    assert {at: each["method"] for at, each in exact.items()} == {
        (0.01, 1): data.PACKED,
        (0.01, 64): data.DENSE,  # 1.04 times may be noise
        (0.5, 64): data.DENSE,
    }
    assert everything[0.01, 1]["method"] == data.PREDICTED and everything[0.01, 64]["method"] == data.EXPERTS
    near = [row(data.DENSE, 1, 0.010, 1.0), row(data.PACKED, 1, 0.0105, 2.0), row(data.PACKED, 1, 0.02, 3.0)]
    assert {at: each["x_dense"] for at, each in data.winners(near).items()} == {(0.010, 1): 2.0, (0.02, 1): 3.0}
    drawn = figures.winners(MAP)
    left, right = (trace for trace in drawn.data if trace.type == "heatmap")
    assert [*left.text[0]] == ["2", "1"]
    assert left.x == ("1", "64") and left.y == ("1%", "50%") and left.z[1][0] is None
    assert {trace.name for trace in drawn.data if trace.type == "scatter"} == {
        data.DENSE,
        data.PACKED,
        data.EXPERTS,
        data.PREDICTED,
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
        (data.DENSE, 1.0),
        (data.PACKED, 2.0),
        (data.SPLIT, 2.5),
    ]
    assert all(each["where"].startswith("recorded on NVIDIA H100") for each in found)
    assert data.recorded("predictors") == [] and data.recorded("inference")[0]["where"] == found[0]["where"]


def test_recorded_guesses_are_drawn_and_those_of_a_cpu_are_not(keep):
    lossy = "lossy: predicted, recall 90%"
    made = inference(lossy, 1.5, kind="chosen_neurons", tokens=1, loss_change=[0.0, 0.1, 0.2])
    keep(Record.new("predictors", "made up", [made | {"device": "CPU"}], {}))
    assert "nothing is recorded" in figures.chosen_neurons(data.recorded("predictors")).layout.annotations[0].text
    keep(Record.new("predictors", "made up", [made, inference(lossy + " (graph)", 3.0, kind="chosen_neurons")], {}))
    (points,) = figures.chosen_neurons(data.recorded("predictors")).data
    assert points.name == "predicted" and points.x == (0.1,) and points.y == (1.5,)


def test_predictions_for_other_gpus():
    lines = data.predicted_lines(("T4", "H100 SXM"), tokens=(1, 16384))
    assert len(lines) == 2 and lines[0].startswith("T4, 1.6% firing, predicted: 1 token: packed (TwELL) 2.")
    assert "16,384 tokens: hot and cold, " in lines[1]


def test_three_lines_say_what_the_numbers_say(subject):
    found = predictors.predict(subject.model, subject.seen.split(16), recall=0.9, rank=4, steps=2)
    padding = [{"real": 1.0, "path": path, "ms": 1.0, "where": WHERE} for path in ("padded", "padding removed")]
    lines = data.three_lines(MAP, found, padding)
    assert (
        len(lines) == 3 and f"Of 3 places on this machine's map, {data.DENSE} wins 2, {data.PACKED} wins 1" in lines[0]
    )
    assert "2.00 times, by packed (TwELL) at 1.0% firing and 1 token;" in lines[1]
    assert "somewhere from 1.0% firing on" in lines[1] and "Padding: time in proportion" in lines[2]
    assert "dense is fastest nowhere" in data.three_lines(MAP[:2], found, padding)[1]


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
