"""Sparse adapters: peft's own SHiRA under dense and sparse layers, switched in place and back to the very bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from twell_lab.core import InputError
from twell_lab.layers.choice import Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.sparsities.adapters import FUSE, SWITCH, Adapter, Change, drawn, of_peft, switch, switching

SIZES = ModelConfig(vocabulary=50, d_model=16, layers=2, heads=2, d_ff=300, context=12)
PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]
PLANS = ["twell", "dense", Choice("hot_cold", 256), "auto"]
TOKENS = torch.arange(18).view(2, 9)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse ", "ignore:You are using torch.load", "ignore::UserWarning")


def made(dtype=torch.float32):
    torch.manual_seed(0)
    return LanguageModel(SIZES).to(dtype).eval().requires_grad_(False)


def shira(model, modules=PROJECTIONS, seed=3):
    """The model with peft's SHiRA of drawn values on it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.ShiraConfig(r=1, target_modules=list(modules), init_weights=False, random_seed=seed)
    return peft.tuners.shira.ShiraModel(model, config, "default")


@pytest.fixture(scope="module")
def trained():
    """The adapter, and what peft's own layers give with it."""
    tuned = shira(made())
    return of_peft(tuned), tuned(TOKENS).detach()


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# ---- under a sparse layer ----


@pytest.mark.parametrize("plan", PLANS, ids=str)
@torch.no_grad()
def test_a_swapped_layer_is_exact_under_an_adapter_and_without_it(plan, trained):
    adapter, with_it = trained
    model = sparsify(made(), plan)
    first, without = state(model), model(TOKENS)
    assert not torch.allclose(without, with_it, atol=0.1)
    before = switch(model, adapter)
    close(model(TOKENS), with_it)
    close(model(TOKENS), with_it)
    after = switch(model, before)
    assert same(state(model), first) and torch.equal(model(TOKENS), without)
    switch(model, after)
    close(model(TOKENS), with_it)
    close(densify(model)(TOKENS), with_it)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@torch.no_grad()
def test_pefts_layers_are_refused_while_there_and_merged_weights_are_followed(plan, trained):
    attached = shira(made())
    with pytest.raises(InputError, match="gate_proj is an adapter of PEFT's.*merge_and_unload"):
        sparsify(attached.model, plan)
    attached.merge_adapter()
    with pytest.raises(InputError, match="adapter of PEFT's"):  # its layers are there still
        sparsify(attached.model, plan)
    close(sparsify(attached.merge_and_unload(), plan)(TOKENS), trained[1])
    model = sparsify(made(), plan)
    without = model(TOKENS)  # copies are made
    tuned = shira(model)
    for _ in range(2):
        with pytest.raises(InputError, match="gate_proj of a SparseFFN is an adapter of PEFT's.*densify"):
            tuned(TOKENS)
        tuned.merge_adapter()
    merged = tuned.merge_and_unload()
    assert isinstance(merged.layers[0].mlp, SparseFFN)
    close(merged(TOKENS), trained[1])
    assert not torch.allclose(without, trained[1], atol=0.1)


@torch.no_grad()
def test_merged_without_a_forward_between_is_followed_too(trained):
    model = sparsify(made(), Choice("hot_cold", 256))
    without = model(TOKENS)
    close(shira(model).merge_and_unload()(TOKENS), trained[1])
    model = sparsify(made(), Choice("hot_cold", 256))
    model(TOKENS)
    assert torch.equal(shira(model).unload()(TOKENS), without)


@torch.no_grad()
def test_inside_a_block_a_merge_is_followed_after_refresh():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=64,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=300,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        activation_function="relu",
        dropout=0.0,
    )
    model = sparsify(transformers.OPTForCausalLM(config).eval(), Choice("hot_cold", 256))
    tuned = peft.get_peft_model(model, peft.ShiraConfig(r=1, target_modules=["fc1", "fc2"], init_weights=False))
    adapter = of_peft(tuned)
    with pytest.raises(InputError, match="fc1 of a SparseFFN is an adapter"):
        tuned(TOKENS)
    model = tuned.merge_and_unload()
    for layer in model.modules():
        if isinstance(layer, SparseFFN):
            layer.refresh()
    assert all(name in dict(model.named_parameters()) for name in adapter.changes)
    found = model(TOKENS).logits
    close(found, densify(model)(TOKENS).logits)


@torch.no_grad()
def test_adapters_beside_a_sparse_layer_are_none_of_its_business():
    dense = shira(made(), ["out_proj"])
    tuned = shira(sparsify(made(), "twell"), ["out_proj"])
    close(tuned(TOKENS), dense(TOKENS))
    adapter = of_peft(tuned)
    model = tuned.unload()
    switch(model, adapter)
    close(model(TOKENS), dense(TOKENS))


@torch.no_grad()
def test_turned_weights_are_written_where_they_lie(trained):
    model = made()
    for layer in model.layers:
        down = layer.mlp.down_proj.weight
        down.data = down.data.t().contiguous().t()
    first = state(model)
    before = switch(model, trained[0])
    assert not model.layers[0].mlp.down_proj.weight.is_contiguous()
    close(model(TOKENS), trained[1])
    switch(model, before)
    assert same(state(model), first)


def test_reordered_neurons_are_refused_and_nothing_is_written(trained, monkeypatch):
    model = sparsify(made(), "twell")
    first = state(model)
    monkeypatch.setattr(SparseFFN, "reordered", property(lambda self: self is model.layers[1].mlp))
    with pytest.raises(InputError, match=r"layers\.1\.mlp.* reordered.*densify"):
        switch(model, trained[0])
    assert same(state(model), first)


# ---- what is written ----


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.floats(0.01, 0.99), st.sampled_from([torch.float32, torch.bfloat16]))
def test_switching_twice_gives_the_bits_of_before(rows, columns, share, dtype):
    model = nn.Linear(columns, rows).to(dtype)
    with torch.no_grad():
        model.weight.view(-1)[:1] = float("nan")
        model.weight.view(-1)[-1:] = float("inf")
    first = model.weight.detach().clone()
    adapter = drawn(model, share)
    change = adapter.changes["weight"]
    before = switch(model, adapter)
    written = torch.zeros(rows * columns, dtype=torch.bool)
    written[change.places.long()] = True
    assert torch.equal(model.weight.detach().view(-1)[written], change.values)
    assert torch.equal(
        model.weight.detach().view(-1)[~written].view(torch.uint8), first.view(-1)[~written].view(torch.uint8)
    )
    assert len(change.places) == round(share * rows * columns)
    switch(model, before)
    assert torch.equal(model.weight.detach().view(torch.uint8), first.view(torch.uint8))


def test_two_adapters_are_taken_off_in_the_order_of_a_stack():
    model = made()
    first = state(model)
    one, two = drawn(model, 0.3, seed=1), drawn(model, 0.3, seed=2)
    before = switch(model, one)
    between = switch(model, two)
    assert not same(state(model), first)
    switch(model, between)
    switch(model, before)
    assert same(state(model), first)
    assert 0.29 < one.share(model) < 0.31 and one.nbytes == sum(8 * len(c.places) for c in one.changes.values())


def test_one_weight_under_two_names_is_given_back():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    first = state(model)
    places = torch.tensor([3, 5], dtype=torch.int32)
    changes = {f"{n}.weight": Change(places[n:], torch.full((2 - n,), n + 1.0), (4, 4)) for n in range(2)}
    before = switch(model, Adapter(changes))
    assert model[0].weight.flatten()[places].tolist() == [1.0, 2.0]
    after = switch(model, before)
    assert same(state(model), first)
    switch(model, after)
    assert model[0].weight.flatten()[places].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_are_pefts(dtype):
    tuned = shira(made(dtype), ["up_proj"])
    layer = tuned.model.layers[0].mlp.up_proj
    layer.set_scale("default", 0.5)
    expected = layer.base_layer.weight.double() + layer.get_delta_weight("default").to_dense().double()
    adapter = of_peft(tuned)
    model = tuned.unload()
    switch(model, adapter)
    found = model.layers[0].mlp.up_proj.weight
    assert found.dtype == dtype and torch.equal(found, expected.to(dtype)) and len(adapter.changes) == 2


def test_bad_input_is_named(trained):
    adapter, _ = trained
    model = made()
    first = state(model)
    for wrong, named in [
        (made(torch.bfloat16), r"gate_proj.weight is \(300, 16\) torch.bfloat16 on cpu; accepted: .*float32"),
        (nn.Linear(2, 2), r"no parameter 'layers.0.mlp.gate_proj.weight'"),
        ("model", "expected a torch.nn.Module"),
    ]:
        with pytest.raises(InputError, match=named):
            switch(wrong, adapter)
    with pytest.raises(InputError, match="adapter is a str"):
        switch(model, "default")
    with pytest.raises(InputError, match="no SHiRA adapter 'default' in the model.*none"):
        of_peft(model)
    apart = made()
    weight = apart.layers[1].mlp.down_proj.weight
    weight.data = torch.zeros(16, 600)[:, ::2]
    with pytest.raises(InputError, match=r"down_proj.weight has strides \(600, 2\)"):
        switch(apart, adapter)
    assert torch.equal(apart.layers[0].mlp.up_proj.weight, first["layers.0.mlp.up_proj.weight"])
    tuned = shira(made())
    with pytest.raises(InputError, match="no SHiRA adapter 'other'.*'default'"):
        of_peft(tuned, "other")
    tuned.merge_adapter()
    with pytest.raises(InputError, match="merged into it.*unmerge"):
        of_peft(tuned)
    with pytest.raises(InputError, match="sparsity is 1"):
        drawn(model, 1)
    with pytest.raises(InputError, match="no matrix"):
        drawn(nn.LayerNorm(3))
    assert same(state(model), first)


@pytest.mark.parametrize(
    "places, values, named",
    [
        ([0, 1, 1], 3, "there twice"),
        ([2, 0], 2, "do not ascend"),
        ([0, 6], 2, "places are 0 to 6; accepted: 0 to 5"),
        ([-1, 3], 2, "places are -1 to 3"),
        ([0, 1], 3, r"values \[3\]"),
    ],
)
def test_places_that_are_none_are_named(places, values, named):
    with pytest.raises(InputError, match=named):
        Change(torch.tensor(places, dtype=torch.int32), torch.zeros(values), (2, 3))


def test_an_empty_change_changes_nothing():
    model = nn.Linear(3, 2)
    first = state(model)
    switch(model, Adapter({"weight": Change(torch.zeros(0, dtype=torch.int32), torch.zeros(0), (2, 3))}))
    assert same(state(model), first)


def test_the_measurement_leaves_the_model_and_counts_what_is_written():
    model = made()
    first = state(model)
    rows = {row["path"]: row for row in switching(model, 0.02, seconds=0.01)}
    assert same(state(model), first) and set(rows) == {SWITCH, FUSE}
    assert all(row["ms"] > 0 and row["samples"] for row in rows.values())
    assert rows[SWITCH]["worst_error"] == 0.0 < rows[FUSE]["worst_error"]  # a LoRA's rounding stays
    assert rows[SWITCH]["written_bytes"] < 0.03 * rows[FUSE]["written_bytes"]
