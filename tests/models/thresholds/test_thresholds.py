"""Thresholds: what they are made of, what they zero, that they come off again, and who is refused."""

import copy
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import twell_lab as tl
from tests.layers import models_of
from tests.models.relufication.test_relufication import Scaled
from tests.models.thresholds.models_of import MODELS, answer, gpt2, llama, ours, tokens
from twell_lab.core import InputError, RecordError
from twell_lab.layers.lossy import lossy_parts
from twell_lab.layers.skipping import SkippingLinear
from twell_lab.models.thresholds import CONFIG, ROWS, Histogram, calibrate
from twell_lab.models.tiny import LanguageModel

BOTH = pytest.mark.parametrize("method", ["cats", "teal", "wina"])
INPUTS = pytest.mark.parametrize("method", ["teal", "wina"])
EACH = pytest.mark.parametrize("name", MODELS)


def seen(model, batches) -> list[dict]:
    """For each layer, in order, what enters its projections and what leaves its activation: from hooks of the test's."""
    found = []
    for _, module in model.named_modules():
        parts = {
            kind: next((getattr(module, name) for name in names if hasattr(module, name)), None)
            for kind, names in {
                "up": ("gate_proj", "gate_up_proj", "up_proj", "c_fc", "fc1"),
                "down": ("down_proj", "c_proj", "fc2"),
                "act": ("act_fn", "act", "activation_fn"),
            }.items()
        }
        if None in parts.values():
            continue
        each = {"input": [], "hidden": [], "activation": []}
        for part, key in (("up", "input"), ("down", "hidden")):
            parts[part].register_forward_hook(lambda m, args, out, to=each[key]: to.append(args[0].flatten(0, -2)))
        if isinstance(parts["act"], nn.Module):
            parts["act"].register_forward_hook(
                lambda m, args, out, to=each["activation"]: to.append(out.flatten(0, -2))
            )
        else:
            module.act_fn = lambda x, act=parts["act"], to=each["activation"]: (
                to.append(act(x).flatten(0, -2)) or act(x)
            )
        found.append(each)
    with torch.no_grad():
        for batch in batches:
            model(batch)
    return [{key: torch.cat(values) for key, values in each.items()} for each in found]


def norms(layer, site) -> torch.Tensor:
    """Of the columns of the weights that a value of this place of a layer meets."""
    names = {"input": ("gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1"), "hidden": ("down_proj", "c_proj", "fc2")}
    parts = [getattr(layer, name) for name in names[site] if hasattr(layer, name)]
    return torch.cat([part.weight if isinstance(part, nn.Linear) else part.weight.t() for part in parts]).norm(dim=0)


@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=60), st.integers(0, 60), st.floats(0, 0.99))
def test_the_threshold_of_a_histogram_keeps_the_share(values, cut, sparsity):
    values = torch.tensor(values)
    whole, parts = Histogram(), Histogram()
    whole.add(values)
    parts.add(values[:cut])
    parts.add(values[cut:])
    assert torch.equal(whole.counts, parts.counts) and int(whole.counts.sum()) == len(values)
    threshold = whole.threshold(sparsity)
    # All values of a step count as spread over it, so the share may be off by those beside the threshold.
    near = ((values.abs() > threshold / 1.03) & (values.abs() < threshold * 1.03)).double().mean().item()
    tiny = ((values != 0) & (values.abs() < 2.0**-24)).double().mean().item()
    large = (values.abs() >= 2.0**16).double().mean().item()
    below = (values.abs() < threshold).double().mean().item()
    zero = (values == 0).double().mean().item()
    off = near + tiny + large + 1e-9
    assert max(below, zero) == pytest.approx(max(sparsity, zero), abs=off)
    assert whole.density(threshold) == pytest.approx(1 - max(below, zero), abs=off)
    assert math.isnan(Histogram().density(1.0))
    with pytest.raises(InputError, match="not finite"):
        whole.add(torch.tensor([1.0, math.inf]))


@EACH
@BOTH
def test_densities_are_those_that_the_model_shows(name, method):
    """The thresholded values of each layer, counted by hooks while the dense model runs on the same batches."""
    batches = [tokens(8), tokens(5, seed=2)]
    model = MODELS[name]()
    found = tl.thresholds(model, batches, 0.6, method=method)
    assert [lossy_parts(model), found.tokens, found.sparsity] == [[], 13 * 16, 0.6]
    for layer, values in zip(found.layers, seen(model, batches), strict=True):
        for site, threshold in layer.thresholds.items():
            scale = norms(model.get_submodule(layer.name), site) if method == "wina" else 1
            kept = (values[site].abs() * scale >= threshold) & (values[site] != 0)
            assert layer.density[site] == pytest.approx(kept.double().mean().item(), abs=0.02)
            assert layer.density[site] < 0.41 and (threshold > 0 or "ReLU" in name)
        assert 0 <= layer.error < 1 and (layer.error > 0 or "ReLU" in name)


@EACH
@BOTH
def test_applied_it_zeroes_exactly_what_is_below_and_comes_off_bit_for_bit(name, method):
    model = MODELS[name]()
    before, states = answer(model), list(model.state_dict())
    found = tl.thresholds(model, tokens(), 0.8, method=method)
    assert torch.equal(answer(model), before)
    assert found.apply(model) is model
    after = answer(model)
    assert not torch.equal(after, before) and list(model.state_dict()) == states
    assert "lossy: |value| < " in repr(model)
    for layer, values in zip(found.layers, seen(copy.deepcopy(model), [tokens()]), strict=True):
        for site, threshold in layer.thresholds.items():
            if site == "activation":
                silent = values[site] == 0
                assert silent.double().mean() > 0.5 and (values[site][~silent].abs() >= threshold).all()
                assert (values["hidden"][silent] == 0).all()
            else:
                scale, zero = norms(model.get_submodule(layer.name), site) if method == "wina" else 1, values[site] == 0
                assert zero.double().mean() > 0.5 and (zero | (values[site].abs() * scale >= 0.9999 * threshold)).all()
    found.apply(model)  # once more: it takes the first off
    assert torch.equal(answer(model), after)
    assert found.remove(model) is model and torch.equal(answer(model), before) and not lossy_parts(model)
    assert "lossy" not in repr(model)


@BOTH
@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_error_is_that_of_the_layer_run_with_thresholds(make, method):
    """Measured on the module itself; with fewer rows than are kept, these are all that entered it."""
    model = make()
    calibration = calibrate(model, tokens(6), method=method)
    found, modules = calibration.at(0.5), [model.get_submodule(layer.name) for layer in calibration.layers]
    with torch.no_grad():
        exact = [module(layer.rows) for module, layer in zip(modules, calibration.layers)]
        found.apply(model)
        cut = [module(layer.rows) for module, layer in zip(modules, calibration.layers)]
    for layer, y, wanted in zip(found.layers, cut, exact, strict=True):
        assert (
            layer.error == pytest.approx(((y - wanted).norm() / wanted.norm()).item(), rel=1e-3) and layer.error > 0.01
        )


def test_the_rows_that_errors_are_measured_on_come_from_all_batches():
    model, first, last = llama(), tokens(40), tokens(40, seed=2)
    (layer, _) = calibrate(model, iter([first, last])).layers
    early, late = ({tuple(row.tolist()) for row in calibrate(model, some).layers[0].rows} for some in (first, last))
    kept = {tuple(row.tolist()) for row in layer.rows}
    assert layer.tokens == 1280 and len(layer.rows) == ROWS
    assert len(kept & early) > 20 < len(kept & late)


@pytest.mark.parametrize("method", ["cats", "teal", "wina"])
def test_what_is_put_on_and_what_comes_back_is_in_the_mode_of_the_layer(method):
    """A model in evaluation mode is taken by verbs that refuse one in training mode, such as bench.model."""
    model = llama()
    model.model.layers[0].train()
    modes = [module.training for module in model.modules()]
    found = tl.thresholds(model, [tokens()], method=method)
    found.loss(model, tokens(seed=3))
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for training in (False, True):
        assert {each.training for each in found.apply(model.train(training)).modules()} == {training}
        assert {each.training for each in found.remove(model.train(not training)).modules()} == {not training}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    model = llama().to(dtype)
    found, exact = tl.thresholds(model, tokens(), 0.5), tl.thresholds(llama(), tokens(), 0.5)
    for one, other in zip(found.layers, exact.layers):
        assert one.thresholds["activation"] == pytest.approx(other.thresholds["activation"], rel=0.05)
        assert one.error == pytest.approx(other.error, rel=0.1)
    assert answer(found.apply(model)).dtype == dtype


def test_what_is_spared_is_counted_by_multiplications():
    """Of a gated layer two of three projections can be skipped with "cats", of a plain one one of two."""
    for model, share in ((llama(), 2 / 3), (gpt2(), 1 / 2)):
        found = tl.thresholds(model, tokens(), 0.6)
        assert found.spared == pytest.approx(0.6 * share, abs=1e-3)
        assert f"{found.spared:.0%} of the layers' multiplications meet a zero" in str(found)
        both = tl.thresholds(model, tokens(), 0.6, method="teal")
        assert both.spared == pytest.approx(0.6, abs=1e-3)


@BOTH
def test_the_loss_is_that_of_both_models_on_the_same_windows(method):
    model, windows = llama(), tokens(9, 12, seed=4)
    found = tl.thresholds(model, tokens(), 0.7, method=method)

    def losses(model):
        with torch.no_grad():
            scores = model(windows).logits
        nats = F.cross_entropy(scores[:, :-1].flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
        return nats.view(9, 11).mean(1)

    dense, before = losses(model), answer(model)
    cost = found.loss(model, windows)
    assert torch.equal(answer(model), before) and not lossy_parts(model)
    with_them = losses(found.apply(model))
    assert (cost.dense, cost.thresholded) == pytest.approx((dense.mean().item(), with_them.mean().item()), rel=1e-5)
    difference = with_them - dense
    reach = 1.96 * difference.std().item() / 3
    assert cost.change == pytest.approx(difference.mean().item(), abs=1e-6)
    assert (cost.low, cost.high) == pytest.approx((cost.change - reach, cost.change + reach), abs=1e-6)
    assert cost.windows == 9 and "lossy" in str(cost)
    with pytest.raises(InputError, match="the model has thresholds on it"):
        found.loss(model, windows)


@pytest.mark.parametrize("windows", [tokens(1), tokens(4, 1), tokens().float(), "text"])
def test_a_text_shorter_than_that_is_refused(windows):
    model = llama()
    with pytest.raises(InputError, match="accepted: int64 .n, length., two or more windows"):
        tl.thresholds(model, tokens(), 0.5).loss(model, windows)


def test_the_layers_are_known_to_profile_sparsify_and_report_and_say_that_they_are_lossy():
    model = llama()
    found = tl.thresholds(model, tokens(), 0.3)
    found.apply(model)
    profile = tl.profile(model, tokens())
    with torch.no_grad():
        kept = [each["activation"] != 0 for each in seen(copy.deepcopy(model), [tokens()])]
    assert [layer.mean_nnz for layer in profile.layers] == [each.sum(1).double().mean().item() for each in kept]
    assert all((each["activation"] < 0).any() for each in seen(copy.deepcopy(model), [tokens()]))  # negative ones too
    after = answer(model)
    tl.sparsify(model, "twell")
    assert torch.allclose(answer(model), after, rtol=1e-4, atol=1e-5)
    assert "lossy: " in repr(model) and all("lossy" in row["why"] for row in tl.report(model).rows)
    with pytest.raises(InputError, match="mlp: swapped by sparsify; accepted: dense layers"):
        found.remove(model)
    found.remove(tl.densify(model))
    assert torch.equal(answer(model), answer(llama()))


@INPUTS
@pytest.mark.parametrize("name", ["Llama", "Phi-3", "ours, plain GELU", "ours, squared ReLU"])
def test_profile_counts_the_hidden_values_that_thresholds_keep(name, method):
    model = MODELS[name]()
    tl.thresholds(model, tokens(), 0.6, method=method).apply(model)
    kept = [each["hidden"] != 0 for each in seen(copy.deepcopy(model), [tokens()])]
    for _ in range(2):
        for layer, wanted in zip(tl.profile(model, tokens()).layers, kept, strict=True):
            assert layer.neuron_counts.tolist() == wanted.sum(0).tolist()
        tl.sparsify(model, "dense")


def test_a_thresholded_activation_is_not_replaced_by_a_relu():
    with pytest.raises(InputError, match=r"uses ThresholdedActivation \(thresholds come off by tl.Thresholds.remove"):
        tl.relufy(thresholded())


@INPUTS
def test_inputs_with_thresholds_are_not_swapped_without_a_word(method):
    for model in (llama(hidden_act="relu"), llama()):
        found = tl.thresholds(model, tokens(), 0.5, method=method)
        after = answer(found.apply(model))
        assert all("lossy: |input| <" in row["why"] for row in tl.report(model).rows)
        tl.sparsify(model, "dense")
        assert torch.equal(answer(model), after) and repr(model).count("lossy: ") == 4
        assert all("lossy: |input| <" in row["why"] for row in tl.report(model).rows)
        with pytest.raises(InputError, match="mlp: swapped by sparsify; accepted: dense layers"):
            found.remove(model)
        assert not lossy_parts(found.remove(tl.densify(model)))


@BOTH
def test_a_thresholded_model_compiles_as_one_graph_dense_and_swapped(method):
    model = llama(num_hidden_layers=1).requires_grad_(False)
    after = answer(tl.thresholds(model, tokens(), 0.6, method=method).apply(model))
    for path in (None, "twell" if method == "cats" else "kept_inputs"):
        if path:
            tl.sparsify(model, path)
        torch._dynamo.reset()
        torch.testing.assert_close(answer(torch.compile(model, backend="eager", fullgraph=True)), after)


def test_a_copy_of_a_thresholded_model_is_its_own(tmp_path):
    model = llama()
    for method in ("cats", "teal", "wina"):
        found = tl.thresholds(model, tokens(), 0.6, method=method)
        found.apply(model)
        torch.save(model, tmp_path / "model.pt")
        for twin in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
            assert torch.equal(answer(twin), answer(model))
            found.remove(twin)
            assert not lossy_parts(twin) and not torch.equal(answer(twin), answer(model))
        found.remove(model)


@BOTH
def test_they_are_saved_with_a_model_of_transformers_and_come_back(method, tmp_path):
    model = llama()
    found = tl.thresholds(model, tokens(), 0.6, method=method)
    after = answer(found.apply(model))
    model.save_pretrained(tmp_path)
    loaded = tl.load(tmp_path)
    assert torch.equal(answer(loaded), after) and len(lossy_parts(loaded)) == len(lossy_parts(model)) > 0
    tl.sparsify(loaded, "dense").save_pretrained(tmp_path)
    assert torch.equal(answer(tl.load(tmp_path)), after)
    found.remove(model).save_pretrained(tmp_path)
    assert not lossy_parts(tl.load(tmp_path)) and torch.equal(answer(tl.load(tmp_path)), answer(llama()))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda held: held.pop("layers"), "twell_lab_thresholds of config.json in .* lacks 'layers'"),
        (lambda held: held["layers"].pop().clear(), None),
        (lambda held: held["layers"][0].update(d_ff=48), "thresholds of another model"),
    ],
)
def test_a_damaged_configuration_is_named(change, said, tmp_path):
    model = llama()
    tl.thresholds(model, tokens(), 0.6).apply(model).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    change(content[CONFIG])
    (tmp_path / "config.json").write_text(json.dumps(content))
    if said is None:  # thresholds for fewer layers than the model has
        assert len(lossy_parts(tl.load(tmp_path))) == 1
    else:
        with pytest.raises(InputError, match=said):
            tl.load(tmp_path)


@pytest.mark.parametrize("save", [LanguageModel.save, LanguageModel.save_pretrained])
def test_a_file_that_holds_no_thresholds_is_not_written(save, tmp_path):
    model = ours(vocabulary=256)
    tl.thresholds(model, tokens(), 0.6).apply(model)
    with pytest.raises(InputError, match="thresholds on it, which its file does not hold"):
        save(model, tmp_path)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"method": "dice"}, "'method' is none of cats, teal, wina"),
        ({"layers": []}, "'layers' is empty"),
        ({"layers": [{}]}, "'layers' 0 lacks 'activation'"),
        ({"method": "teal"}, "'thresholds' and 'density' of"),
    ],
)
def test_a_damaged_file_is_named(change, said, tmp_path):
    path = tl.thresholds(llama(), tokens(), 0.5).save(tmp_path / "thresholds.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RecordError, match=said):
        tl.Thresholds.load(path)


@pytest.mark.parametrize(
    "other, said",
    [
        (lambda: llama(num_hidden_layers=1), "'model.layers.1.mlp' is not there"),
        (lambda: llama(intermediate_size=48), "has .* d_ff 48.*and they are for d_model 16, d_ff 40"),
        (lambda: llama(hidden_act="gelu"), "has .* GELUActivation, and they are for .* SiLUActivation"),
        (gpt2, "'model.layers.0.mlp' is not there"),
    ],
)
def test_thresholds_of_another_model_are_refused(other, said):
    found = tl.thresholds(llama(), tokens(), 0.5)
    model = other()
    before = answer(model)
    for verb in (found.apply, lambda model: found.loss(model, tokens())):
        with pytest.raises(InputError, match=f"thresholds of another model: .*{said}"):
            verb(model)
    assert torch.equal(answer(model), before) and not lossy_parts(model)


class Int8Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x.round())


def quantised():
    model = llama()
    model.model.layers[1].mlp.down_proj = Int8Linear(40, 16, bias=False)
    return model


def thresholded():
    model = llama()
    return tl.thresholds(model, tokens(), 0.5).apply(model)


def half_swapped():
    return tl.sparsify(llama(hidden_act="relu"), "twell", only=lambda name, _: "0" in name)


def not_finite():
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[0, 0] = math.nan
    return model


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: "SakanaAI/SparseLM0.5B", r"got str; accepted: a model, such as tl.load\('SakanaAI/SparseLM0.5B'\)"),
        (lambda: None, "expected a torch.nn.Module, got NoneType"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "no feed-forward layer in Sequential; routed experts"),
        (quantised, r"model.layers.1.mlp \(LlamaMLP\).*quantised"),
        (lambda: llama().to("meta"), "on meta"),
        (thresholded, "has thresholds on it; accepted: one without"),
        (half_swapped, "model.layers.0.mlp: swapped by sparsify; accepted: dense layers"),
        (not_finite, "not finite"),
        (lambda: nn.Sequential(Scaled(16, 24)), "does not compute down"),
    ],
)
def test_models_that_cannot_be_calibrated(make, said):
    with pytest.raises(InputError, match=said):
        tl.thresholds(make(), tokens(), 0.5)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"sparsity": 1}, "sparsity is 1; .* from 0 up to, but not, 1"),
        ({"sparsity": math.nan}, "sparsity is nan"),
        ({"method": "dice"}, "method is 'dice'; accepted: 'cats', 'teal', 'wina'"),
        ({"batches": []}, "batches is empty"),
        ({"batches": [tokens(0)]}, "'layers.0.mlp' saw no token"),
        ({"only": 1}, "only is 1"),
        ({"only": lambda *_: False}, "no feed-forward layer in LanguageModel that `only` takes"),
    ],
)
def test_wrong_arguments(change, said):
    arguments = {"batches": tokens(), "sparsity": 0.5, **change}
    with pytest.raises(InputError, match=said):
        tl.thresholds(ours(nn.SiLU()), arguments.pop("batches"), arguments.pop("sparsity"), **arguments)


def test_experts_beside_other_layers_are_passed_over():
    """Routed experts share an activation, and stay as they are; a model that has no other layer is refused."""
    experts = models_of.build("Mixtral").model.layers[0].mlp.experts
    model = ours(nn.SiLU())
    model.experts = experts
    assert [layer.name for layer in tl.thresholds(model, tokens(), 0.5).layers] == ["layers.0.mlp", "layers.1.mlp"]
    with pytest.raises(InputError, match="routed experts, which share an activation, do not count"):
        tl.thresholds(nn.Sequential(experts), tokens(), 0.5)


@INPUTS
def test_attention_is_cut_saved_swapped_and_taken_back(method, tmp_path):
    """The inputs of q, k, v and o, as published: the model is what hooks on its projections make of it."""
    model, batch = llama(), tokens()
    before = answer(model)
    found = tl.thresholds(model, [batch], 0.5, method=method, attention=True)
    names = [one.name for one in found.projections]
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all(abs(one.density["input"] - 0.5) < 0.05 for one in found.projections) and 0.45 < found.spared < 0.55
    assert f"{len(names)} projections of attention" in str(found) and len(lossy_parts(found.apply(model))) > len(names)
    cut = answer(model)
    assert not torch.equal(cut, before)
    model.save_pretrained(tmp_path)
    assert torch.equal(answer(tl.load(tmp_path)), cut)
    assert tl.Thresholds.load(found.save(tmp_path / "thresholds.json")) == found
    tl.sparsify(model, "kept_inputs")
    assert sum(isinstance(module, SkippingLinear) for module in model.modules()) in (0, len(names))
    torch.testing.assert_close(answer(model), cut)
    tl.densify(model)
    assert torch.equal(answer(model), cut)
    assert torch.equal(answer(found.remove(model)), before)
    with pytest.raises(InputError, match="attention"):
        tl.thresholds(llama(), [batch], 0.5, attention=True)
