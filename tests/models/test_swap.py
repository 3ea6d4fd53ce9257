"""sparsify, densify and report on whole models: what is swapped and what stays dense, why, and that all comes back."""

import copy
import json
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import twell_lab as tl
from tests.layers import models_of
from tests.layers.models_of import sparse_layers as sparse
from tests.models.thresholds import models_of as smooth
from tests.models.tiny import test_model
from tests.threads import one_thread  # noqa: F401
from twell_lab.analysis import planner
from twell_lab.analysis.costs import Rates
from twell_lab.core import InputError, RecordError
from twell_lab.layers.choice import Candidate

TOKENS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
RATES = Rates("CPU", "float32", bandwidth=3e12, l2=7.4e12, matmul=7e14, launch=2.5e-6)
HOT = tl.Choice("hot_cold", 256)


def ours(d_ff: int = 300, layers: int = 3) -> nn.Module:
    sizes = dict(vocabulary=64, d_model=32, layers=layers, heads=2, d_ff=d_ff, context=16)
    return test_model.model(**sizes).requires_grad_(False)


MODELS = {"ours": ours} | {
    name: lambda name=name: models_of.build(name).requires_grad_(False) for name in ("Llama", "OPT", "GPT-2", "Mixtral")
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


@torch.no_grad()
def answer(model) -> torch.Tensor:
    y = model(TOKENS)
    return getattr(y, "logits", y)


def plan_for(model, *choices: tl.Choice, gain: float = 2.0) -> tl.Plan:
    """A plan with one choice a layer, for any number of tokens, `gain` times as fast as dense; every third neuron fires
    most."""
    layers = []
    for place, choice in zip(tl.feed_forwards(model), choices, strict=True):
        d_ff, d_model = place.up.weight.shape
        counts = tuple(100 if n % 3 == 0 else 1 for n in range(d_ff))
        row = Candidate(64, choice.path, choice.hot, 1.0, 100.0 / gain, True, "a test's", 100.0, place.name)
        layers.append(tl.LayerPlan(place.name, d_model, d_ff, place.gate is not None, 1000, counts, (row,)))
    return tl.Plan(layers, "CPU", "float32")


def place(memory: nn.Module) -> dict:
    """Everything about a model that a swap could leave behind: names, bits, strides, hooks, classes, attributes."""
    of = {n: (t.clone(), t.stride(), id(t)) for n, t in [*memory.named_parameters(), *memory.named_buffers()]}
    modules = {
        n: (type(m), sorted(vars(m)), len(m._forward_hooks), len(m._state_dict_hooks))
        for n, m in memory.named_modules()
    }
    return {"tensors": of, "modules": modules, "state": [*memory.state_dict()]}


def check_same(model: nn.Module, before: dict) -> None:
    now = place(model)
    assert now["modules"] == before["modules"] and now["state"] == before["state"]
    for name, (value, strides, own) in before["tensors"].items():
        assert torch.equal(now["tensors"][name][0], value) and now["tensors"][name][1:] == (strides, own), name


def memory(model: nn.Module) -> int:
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict(keep_vars=True).values()
    }
    return sum(storages.values())


@pytest.fixture
def twell_takes(monkeypatch):
    """twell_takes(microseconds, path="twell"): what the clock reads on that path; 100 on every other."""

    def read(us: float, path: str = "twell") -> None:
        def times(calls, *_, **__):
            return {key: [us / 1e3 if key and key[0].path == path else 0.1] * 8 for key in calls}

        monkeypatch.setattr(planner.clock, "time_calls", times)
        monkeypatch.setattr(planner, "measure_rates", lambda *_: RATES)
        monkeypatch.setattr(planner, "_REACH", 100.0)  # such small layers are predicted to be all launches

    return read


@pytest.mark.parametrize("us, swaps", [(50.0, True), (99.0, False)])
def test_batches_are_profiled_planned_and_said(us, swaps, model, twell_takes, capsys):
    twell_takes(us)
    expected, many = answer(model), len(tl.feed_forwards(model))
    routed = hasattr(model.config, "num_local_experts")
    swapped = tl.sparsify(model, [TOKENS, TOKENS.flip(0)], tokens=(4,))
    said, swaps = capsys.readouterr().out.splitlines(), swaps and not routed
    assert swapped is model and said[0].startswith("fires: ") and said[0].endswith("counted on 64 tokens") != routed
    taken = "dense" if routed else f"{'twell; 2.00' if swaps else 'dense; 1.00'}x dense together"
    assert said[1] == f"up to 4 tokens: {many} {taken}" and (swaps or said[2].startswith("dense throughout: "))
    assert said[-1] == "for CPU, float32; " + ("predicted" if routed else "timed, eager calls")
    assert len(sparse(model)) == swaps * many
    torch.testing.assert_close(answer(model), expected, rtol=1e-4, atol=1e-4)
    assert {row["state"] for row in tl.report(model).rows} == {"planned"}


def test_neurons_that_were_put_in_order_are_said(twell_takes, capsys, monkeypatch):
    twell_takes(20.0, "hot_cold")
    monkeypatch.setattr(planner, "measure_rates", lambda *_: replace(RATES, fuses=True))
    model = ours(d_ff=700)
    expected = answer(model)
    tl.sparsify(model, TOKENS, tokens=(4096,))
    assert "neurons in another order: 3 layers; optimizers" in capsys.readouterr().out
    torch.testing.assert_close(answer(model), expected, rtol=1e-4, atol=1e-4)


def test_a_single_batch_and_what_is_left_out_are_said(twell_takes, capsys):
    twell_takes(50.0)
    model = ours()
    model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)
    expected = answer(model)
    tl.sparsify(model, TOKENS, tokens=(16,))
    fires, paths, how, left = capsys.readouterr().out.splitlines()
    assert paths == "up to 16 tokens: 2 twell; 2.00x dense together"
    assert left.startswith("stay dense: 1 layers, down_proj has hooks")
    assert [row["state"] for row in tl.report(model).rows] == ["planned", "not swapped", "planned"]
    torch.testing.assert_close(answer(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["twell", "dense", tl.Choice("twell")], ids=str)
def test_a_path_by_name_for_every_layer(how, model):
    expected, before, bits = answer(model), place(model), memory(model)
    assert tl.sparsify(model, how) is model and len(sparse(model)) == len(tl.feed_forwards(model))
    assert memory(model) == bits
    torch.testing.assert_close(answer(model), expected, rtol=1e-4, atol=1e-4)
    name = getattr(how, "path", how)
    assert {(row["state"], row["runs"], row["us"]) for row in tl.report(model).rows} == {("told", name, None)}
    assert tl.densify(model) is model
    check_same(model, before)
    assert torch.equal(answer(model), expected)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_plan_swaps_what_it_makes_faster_and_nothing_else(as_file, tmp_path):
    model = ours(d_ff=700)
    expected, before, bits = answer(model), place(model), memory(model)
    plan = plan_for(model, HOT, tl.Choice("dense"), tl.Choice("twell"))
    plan.layers[1] = replace(plan.layers[1], candidates=(replace(plan.layers[1].candidates[0], measured_us=100.0),))
    tl.sparsify(model, plan.save(tmp_path / "plan.json") if as_file else plan)
    assert type(model.layers[1].mlp) is not tl.SparseFFN and len(sparse(model)) == 2 and memory(model) == bits
    torch.testing.assert_close(answer(model), expected, rtol=1e-4, atol=1e-4)
    rows = tl.report(model).rows
    assert [(row["state"], row["runs"], row["us"]) for row in rows] == [
        ("planned", "hot_cold 256", 50.0),
        ("planned", "dense", 100.0),
        ("planned", "twell", 50.0),
    ]
    assert ["another order" in row["why"] for row in rows] == [True, False, False]
    json.dumps(rows, allow_nan=False)
    dense = replace(plan, layers=[replace(layer, candidates=plan.layers[1].candidates) for layer in plan.layers])
    check_same(tl.densify(tl.sparsify(model, dense)), before)
    tl.sparsify(tl.sparsify(model, plan), dense)
    assert sparse(model) == [] and torch.equal(answer(model), expected)


def test_only_some_layers():
    model = ours()
    expected = answer(model)
    tl.sparsify(model, "twell", only=lambda name, module: name == "layers.1.mlp")
    assert [row["state"] for row in tl.report(model).rows] == ["not swapped", "told", "not swapped"]
    (row,) = tl.report(model, only=lambda name, module: name == "layers.1.mlp").rows
    assert row["runs"] == "twell" and "be it faster or not" in str(tl.report(model))
    torch.testing.assert_close(answer(model), expected, rtol=1e-4, atol=1e-4)


BAD = {
    "nothing": (lambda m: (), r"not told how; accepted: tl.sparsify\(model, batches\)"),
    "a word": (lambda m: ("fast",), "how is 'fast', neither a path .*twell.* nor a file; accepted: tl.sparsify"),
    "a path that splits": (lambda m: ("hot_cold",), "needs a number of hot neurons: tl.Choice"),
    "too many hot ones": (lambda m: (tl.Choice("hot_cold", 512),), "layer 'layers.0.mlp': hot is 512 of 300"),
    "a path for thresholds": (lambda m: ("kept_inputs",), "thresholds on their inputs"),
    "no batch": (lambda m: ([],), "batches"),
    "another model's plan": (lambda m: (plan_for(ours(64), *[tl.Choice()] * 3),), "d_ff 64"),
    "a plan of too few layers": (
        lambda m: (plan_for(ours(layers=2), *[tl.Choice()] * 2),),
        "layer 'layers.2.mlp' is missing in the plan",
    ),
    "another device's plan": (
        lambda m: (replace(plan_for(m, *[tl.Choice()] * 3), device="H100"),),
        "the plan is for H100, float32; the model is on CPU",
    ),
}


@pytest.mark.parametrize("how, says", BAD.values(), ids=BAD)
def test_what_sparsify_is_not_told_is_an_input_error_and_changes_nothing(how, says):
    model = ours()
    before = place(model)
    with pytest.raises(InputError, match=says):
        tl.sparsify(model, *how(model))
    check_same(model, before)


def test_a_choice_that_one_layer_does_not_take_changes_none():
    model = ours(layers=2)
    model.layers[1].mlp = ours(200, 1).layers[0].mlp
    before = place(model)
    with pytest.raises(InputError, match="layer 'layers.1.mlp': hot is 256 of 200 neurons"):
        tl.sparsify(model, HOT)
    check_same(model, before)
    tl.sparsify(model, "twell")
    with pytest.raises(InputError, match="'layers.1.mlp'"):
        tl.sparsify(model, HOT)
    assert [str(layer.plan) for layer in sparse(model)] == ["twell", "twell"]


def test_files_that_hold_no_plan(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    for path in (tmp_path, tmp_path / "plan.json", str(tmp_path / "plan.json"), tmp_path / "gone.json"):
        with pytest.raises(RecordError):
            tl.sparsify(ours(), path)
    with pytest.raises(InputError, match="no ReLU feed-forward layer"):
        tl.sparsify(nn.Linear(2, 2), "twell")


def lora(model, mlp):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["layers.1.mlp.down_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)


def scaled(model, mlp):
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


def not_finite(model, mlp):
    mlp.up_proj.weight[2, 3] = torch.nan


# tests/layers/test_find.py has more reasons.
DENSE = {
    "LoRA": (lora, "merge adapters"),
    "scaled": (scaled, "does not compute"),
    "another activation": (lambda model, mlp: setattr(mlp, "act_fn", nn.SiLU()), "SiLU"),
    "not finite": (not_finite, "up holds a value that is not finite"),
}


@pytest.mark.parametrize("change, says", DENSE.values(), ids=DENSE)
def test_a_layer_that_cannot_be_sparse_stays_dense_with_a_reason(change, says):
    model = ours()
    mlp = model.layers[1].mlp
    change(model, mlp)
    tl.sparsify(model, "twell")
    assert model.layers[1].mlp is mlp and len(sparse(model)) == 2
    rows = {row["layer"]: row for row in tl.report(model).rows}
    if "layers.1.mlp" in rows:
        assert rows["layers.1.mlp"]["state"] == "not swapped" and says in rows["layers.1.mlp"]["why"]
    plan = plan_for(model, *[tl.Choice()] * len(rows))
    assert len(sparse(tl.sparsify(model, plan))) == 2


@pytest.mark.parametrize("name, sparse_ones", [("GPT-2", 0), ("ours, squared ReLU", 0), ("OPT", 2), ("Llama", 2)])
def test_thresholds_with_and_without_a_kernel(name, sparse_ones):
    """GPT-2's GELU is none of torch's, and a gated squared ReLU has no kernel: such layers stay as they are."""
    model = smooth.MODELS[name]()
    tl.thresholds(model, [smooth.tokens()], 0.5, method="cats").apply(model)
    expected = smooth.answer(model)
    tl.sparsify(model, "twell")
    assert len(sparse(model)) == sparse_ones
    torch.testing.assert_close(smooth.answer(model), expected, rtol=1e-4, atol=1e-5)
    whys = {row["why"] for row in tl.report(model).rows}
    assert sparse_ones or all("has no other path" in why for why in whys)


def test_a_model_in_training_mode_is_not_rewritten_and_learns():
    model = ours().train().requires_grad_(True)
    before = {n: p.stride() for n, p in model.named_parameters()}
    dense = copy.deepcopy(model)
    tl.sparsify(model, "twell")
    assert {n: p.stride() for n, p in model.named_parameters()} == before
    assert all("training mode" in row["runs"] for row in tl.report(model).rows)
    for m in (model, dense):
        m(TOKENS).square().mean().backward()
    for p, wanted in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad, wanted.grad, rtol=1e-4, atol=1e-5)


def moved_on(model, how):
    return {
        "deepcopy": copy.deepcopy,
        "pickle": lambda m: pickle.loads(pickle.dumps(m)),
        "a state": lambda m: (m.load_state_dict(m.state_dict()), m)[1],
        "assigned": lambda m: (m.load_state_dict(m.state_dict(), assign=True), m)[1],
        "training and back": lambda m: m.train().eval(),
        "double and back": lambda m: m.double().float(),
    }[how](model)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "a state", "assigned", "training and back", "double and back"])
def test_a_swapped_model_survives(how, model):
    expected = answer(model)
    moved = moved_on(tl.sparsify(model, "twell"), how)
    assert how == "assigned" or {row["runs"] for row in tl.report(moved).rows} == {"twell"}
    torch.testing.assert_close(answer(moved), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(answer(tl.densify(moved)), expected, rtol=1e-4, atol=1e-4)
    assert sparse(moved) == [] and all(p.is_contiguous() for p in moved.parameters())
    assert not any(m._state_dict_hooks for m in moved.modules())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_shares_nothing_with_its_model(how):
    model = ours(d_ff=700)
    tl.sparsify(model, plan_for(model, HOT, HOT, tl.Choice()))
    expected, twin = answer(model), moved_on(model, how)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(answer(model), expected) and not answer(twin).any()
    tl.densify(twin)
    assert len(sparse(model)) == 3 and torch.equal(answer(model), expected)


def test_tied_weights_keep_their_order():
    model = ours(d_ff=700, layers=2)
    model.layers[1].mlp.up_proj.weight = model.layers[0].mlp.up_proj.weight
    expected, before = answer(model), place(model)
    tl.sparsify(model, plan_for(model, HOT, HOT))
    assert [layer.order for layer in sparse(model)] == [None, None] and "tied" in sparse(model)[0].why
    torch.testing.assert_close(answer(model), expected, rtol=1e-4, atol=1e-4)
    check_same(tl.densify(model), before)


def test_a_layer_at_two_places_and_a_layer_that_is_the_model():
    model = ours(layers=2)
    model.layers[1].mlp = model.layers[0].mlp
    expected = answer(model)
    tl.sparsify(model, "twell")
    assert model.layers[1].mlp is model.layers[0].mlp and len(sparse(model)) == 1
    torch.testing.assert_close(answer(model), expected, rtol=1e-4, atol=1e-4)
    alone = ours().layers[0].mlp
    plan = plan_for(alone, tl.Choice())
    swapped = tl.sparsify(alone, plan)
    assert isinstance(swapped, tl.SparseFFN) and str(tl.report(swapped)).splitlines()[1].startswith("layer ")
    assert tl.densify(swapped) is alone
