"""What sparsify is told, and what report says of it: safe without a word, by name or by a plan's file if asked for."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import twell_lab as tl
from twell_lab.analysis import auto, costs, planner, trials
from twell_lab.analysis.costs import Rates
from twell_lab.analysis.trials import Times
from twell_lab.core import InputError, RecordError
from twell_lab.layers.choice import Candidate, Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.tiny import LanguageModel, ModelConfig

RATES = Rates("CPU", "float32", bandwidth=3e12, l2=7.4e12, matmul=7e14, launch=2.5e-6)
TOKENS = torch.arange(32).view(2, 16)


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = dict(d_model=32, layers=3, heads=2, d_ff=300, context=16)
    return LanguageModel(ModelConfig(**sizes)).requires_grad_(False).eval()


@pytest.fixture
def plan(model, clock):
    clock(dense=100.0, twell=50.0, hot_cold=80.0)
    return tl.plan(tl.profile(model, TOKENS), model, rates=RATES, tokens=(4, 32), batches=TOKENS)


@pytest.fixture
def clock(monkeypatch):
    """clock(dense=..., twell=..., hot_cold=...): what the clock will read, in microseconds."""

    def read(**us):
        def clock(calls, device, beside):
            return {each: Times(us["dense"] if each is None else us[each.path]) for each in calls}

        monkeypatch.setitem(trials.CLOCKS, "wall", clock)
        monkeypatch.setattr(planner, "_REACH", 100.0)  # layers as small as these are predicted to be all launches

    return read


def sparse(model):
    return [each for each in model.modules() if isinstance(each, SparseFFN)]


def paths(model):
    return {each["path"] for layer in sparse(model) for each in layer.status()["classes"]}


# ---- safe by default ----


def test_without_a_plan_layers_are_dense_until_they_know(model, clock, monkeypatch):
    clock(dense=100.0, twell=50.0, hot_cold=80.0)
    monkeypatch.setattr(costs, "measure_rates", lambda device, dtype: RATES)
    expected = model(TOKENS)
    assert tl.sparsify(model) is model and len(sparse(model)) == 3
    for _ in range(auto.FORWARDS):
        assert paths(model) == {"dense"} and {each.status()["plan"] for each in sparse(model)} == {"watching"}
        assert torch.equal(model(TOKENS), expected) and all(each.extra_bytes == 0 for each in sparse(model))
        assert {row["state"] for row in tl.report(model).rows} == {"watching"}
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-4)
    assert {each.status()["plan"] for each in sparse(model)} == {"planned"} and "twell" in paths(model)


def test_a_layer_for_which_nothing_is_faster_stays_dense(model, clock, monkeypatch):
    clock(dense=100.0, twell=98.0, hot_cold=150.0)
    monkeypatch.setattr(costs, "measure_rates", lambda device, dtype: RATES)
    monkeypatch.setattr(planner, "TOKENS", (32,))
    expected = model(TOKENS)
    tl.sparsify(model)
    for _ in range(auto.FORWARDS + 2):
        assert torch.equal(model(TOKENS), expected)
    assert paths(model) == {"dense"} and {row["choice"] for row in tl.report(model).rows} == {"dense"}
    assert all("less than 3% faster" in row["why"] or "5%" in row["why"] for row in tl.report(model).rows)


def test_while_training_a_layer_stays_dense(model):
    dense = [p.clone() for p in model.requires_grad_(True).parameters()]
    model(TOKENS).square().mean().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    tl.sparsify(model.train())
    model.zero_grad()
    model(TOKENS).square().mean().backward()
    assert all(torch.equal(p.grad, want) for p, want in zip(model.parameters(), wanted))
    assert all(map(torch.equal, model.parameters(), dense)) and paths(model) == {"dense"}


def test_layers_that_are_sparse_already_stay_as_they_are(model, plan):
    tl.sparsify(model, plan, only=None)
    before = [each.plan for each in sparse(model)]
    assert tl.sparsify(model) is model and [each.plan for each in sparse(model)] == before
    tl.sparsify(model, "auto")
    assert {each.status()["plan"] for each in sparse(model)} == {"watching"} and paths(model) == {"dense"}


# ---- asked for by name ----


@pytest.mark.parametrize("word", ["twell", "dense"])
def test_a_path_by_name(model, word):
    expected = model(TOKENS)
    tl.sparsify(model, word)
    assert paths(model) == {word} and {each.plan for each in sparse(model)} == {Choice(word)}
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-4)
    assert {(row["state"], row["choice"], row["us"]) for row in tl.report(model).rows} == {("told", word, None)}


def test_a_choice_for_every_layer(model):
    expected = model(TOKENS)
    tl.sparsify(model, Choice("hot_cold", 256))
    assert paths(model) == {"hot_cold"}
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="hot is 512 of 300 neurons"):
        tl.sparsify(model, Choice("hot_cold", 512))
    assert paths(model) == {"hot_cold"}  # nothing was changed


def test_a_choice_that_one_layer_does_not_take_changes_nothing(model):
    model.layers[2].mlp = type(model.layers[2].mlp)(32, 200)
    with pytest.raises(InputError, match="hot is 256 of 200 neurons; a layer of more than 256 neurons is accepted"):
        tl.sparsify(model, Choice("hot_cold", 256))
    assert not sparse(model)


@pytest.mark.parametrize("plan", [None, "dense", "twell"])
def test_a_model_of_a_dtype_that_no_path_has_is_left_as_it_was(model, plan):
    model.layers[1].mlp.double()
    with pytest.raises(
        InputError, match="layers.1.mlp: the weights are torch.float64; bfloat16, float16 and float32 are"
    ):
        tl.sparsify(model, plan)
    assert not sparse(model)
    tl.sparsify(model.float(), plan)
    assert len(sparse(model)) == 3


def test_a_path_that_splits_is_not_asked_for_by_its_name_alone(model):
    with pytest.raises(
        InputError, match=r"'hot_cold', which needs a number of hot neurons: tl.Choice\('hot_cold', 256\);"
    ):
        tl.sparsify(model, "hot_cold")
    assert not sparse(model)


@pytest.mark.parametrize(
    "word", ["fast", "twel", "hot_cold", "AUTO", "", "\0", "\ud800", "no/such/plan.json", "x" * 5000, 3, b"twell", []]
)
def test_a_word_that_means_nothing_is_named(model, word):
    with pytest.raises(InputError, match=r"^plan is .*: .*'auto', 'dense', 'twell', 'two_four', .*, a Choice, or None"):
        tl.sparsify(model, word)
    assert not sparse(model)


# ---- a plan, and its file ----


@pytest.mark.parametrize("kind", [str, Path])
def test_a_plan_by_the_name_of_its_file(model, plan, tmp_path, kind):
    expected = model(TOKENS)
    tl.sparsify(model, kind(plan.save(tmp_path / "plan.json")))
    assert [each.plan for each in sparse(model)] == plan.layers and "twell" in paths(model)
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_a_file_called_like_a_path_is_not_meant_by_its_word(model, plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan.save("dense")
    tl.sparsify(model, "dense")
    assert paths(model) == {"dense"}
    tl.sparsify(model, os.path.join(".", "dense"))
    assert "twell" in paths(model)


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, -2])
def test_a_file_that_was_cut_off(model, plan, tmp_path, keep):
    path = plan.save(tmp_path / "plan.json")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(RecordError, match="plan.json"):
        tl.sparsify(model, str(path))
    assert not sparse(model)


def test_a_folder_and_a_file_that_is_gone(model, tmp_path):
    for path in (str(tmp_path), tmp_path, tmp_path / "gone.json"):
        with pytest.raises(RecordError, match="cannot be read"):
            tl.sparsify(model, path)


def test_a_plan_for_elsewhere_is_refused_with_nothing_changed(model, plan):
    for changes, named in (
        ({"device": "NVIDIA H100"}, "the plan is for NVIDIA H100, float32; the model is on CPU, float32"),
        ({"dtype": "bfloat16"}, "the plan is for CPU, bfloat16; the model is on CPU, float32"),
        ({"release": "0.0.9"}, f"the plan was made by twell-lab 0.0.9, this is {tl.__version__}"),
        (
            {"layers": plan.layers[:2]},
            "the plan has layers that the model lacks: none; the model has layers that the plan lacks: 'layers.2.mlp';",
        ),
        (
            {"layers": [replace(each, name=f"other.{n}") for n in range(200) for each in plan.layers[:1]]},
            "the model lacks: 'other.0', 'other.1', 'other.2' and 197 more; .*: 'layers.0.mlp', .*2.mlp'; the same",
        ),
    ):
        with pytest.raises(InputError, match=named):
            tl.sparsify(model, replace(plan, **changes))
        assert not sparse(model)
    with pytest.raises(InputError, match="the model is on CPU, float16"):
        tl.sparsify(model.half(), plan)


@pytest.mark.parametrize("told", [None, "dense", "twell", "auto"])
def test_a_layer_whose_weights_are_not_finite_is_named_with_nothing_changed(model, told):
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight[2, 3] = float("nan")
    with pytest.raises(
        InputError, match=r"layers.1.mlp: up has 1 values that are not finite, the first at \[2, 3\]: nan"
    ):
        tl.sparsify(model, told)
    assert not sparse(model)


def test_a_plans_file_says_who_made_it_how(plan, tmp_path):
    path = plan.save(tmp_path / "plan.json")
    content = json.loads(path.read_text())
    assert (content["release"], content["clock"], content["version"]) == (tl.__version__, "wall", 3)
    assert tl.Plan.load(path) == plan
    for key, value in (("release", 1), ("clock", None), ("clock", 7)):
        path.write_text(json.dumps({**content, key: value}))
        if value is None:
            assert tl.Plan.load(path).clock is None
        else:
            with pytest.raises(RecordError, match=f"'{key}' is {value}"):
                tl.Plan.load(path)
    content["layers"][0]["candidates"][0]["host_us"] = -1.0
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match="layer 0, candidate 0: 'host_us' is -1.0"):
        tl.Plan.load(path)


# ---- the report ----


def test_a_report_of_planned_layers(model, plan):
    tl.sparsify(model, plan)
    found = tl.report(model)
    assert [(row["layer"], row["tokens"]) for row in found.rows] == [
        (f"layers.{i}.mlp", tokens) for i in range(3) for tokens in (4, 32)
    ]
    first = found.rows[0]
    assert (first["state"], first["choice"], first["us"], first["dense_us"]) == ("planned", "twell", 50.0, 100.0)
    assert first["x_dense"] == 2.0 and first["how"] == "measured" and first["why"] == "fastest, measured: 2.00x dense"
    assert first["extra_bytes"] == model.layers[0].mlp.extra_bytes > 0 and first["nnz"] > 0
    json.dumps(found.rows, allow_nan=False)
    for row in found.rows[2:]:
        shared = plan.layer(row["layer"]).candidates[0].timed_on != row["layer"]
        assert row["how"] == ("measured on layers.0.mlp" if shared else "measured")
    assert [all_of["tokens"] for all_of in found.together] == [4, 32]
    assert found.together[0]["dense_us"] == 300.0
    assert "x dense" in str(found) and "all layers, 32 tokens: " in str(found)


def test_a_report_of_a_model_swapped_in_part(model):
    tl.sparsify(model, "twell", only=lambda name, module: name == "layers.1.mlp")
    rows = tl.report(model).rows
    assert [row["state"] for row in rows] == ["not swapped", "told", "not swapped"]
    assert [row["extra_bytes"] > 0 for row in rows] == [False, True, False] and tl.report(model).together == []
    (one,) = tl.report(model, only=lambda name, module: name == "layers.1.mlp").rows
    assert one == rows[1] and "be it faster or not" in str(tl.report(model))
    with pytest.raises(InputError, match="no ReLU feed-forward"):
        tl.report(nn.Linear(2, 2))


def test_a_report_of_a_plan_that_timed_nothing(model):
    plan = tl.plan(tl.profile(model, TOKENS), rates=RATES, tokens=(32,), device="cpu")
    rows = tl.report(tl.sparsify(model, plan)).rows
    assert {row["how"] for row in rows} == {"predicted"} and all(row["us"] > 0 for row in rows)


def test_a_report_of_a_layer_that_no_token_reached_is_json_too(model, plan):
    unseen = [replace(each, profiled=0, neuron_counts=(0,) * each.d_ff) for each in plan.layers]
    found = tl.report(tl.sparsify(model, replace(plan, layers=unseen)))
    assert {row["nnz"] for row in found.rows} == {None} and str(found) and str(replace(plan, layers=unseen))
    json.dumps(found.rows, allow_nan=False)


def test_a_report_of_a_layer_that_is_the_model(model, plan):
    alone = replace(plan.layers[0], name="")
    mlp = tl.sparsify(model.layers[0].mlp, replace(plan, layers=[alone]))
    found = tl.report(mlp)
    assert {row["layer"] for row in found.rows} == {""} and str(found).splitlines()[1].startswith("layer ")


def test_classes_that_only_some_layers_have_are_not_added_up(model, plan):
    cut = replace(
        plan.layers[1], candidates=(*plan.layers[1].candidates, Candidate(9, "dense", 0, 1.0, None, True, "a test's"))
    )
    tl.sparsify(model, replace(plan, layers=[plan.layers[0], cut, plan.layers[2]]))
    assert [all_of["tokens"] for all_of in tl.report(model).together] == [4, 32]
