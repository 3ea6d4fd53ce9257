"""Sparse adapters: peft's own SHiRA under dense and sparse layers, switched in place and back to the very bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.models.test_swap import HOT, plan_for
from twell_lab.core import InputError
from twell_lab.layers.choice import Choice
from twell_lab.models.swap import densify, sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.sparsities.adapters import Change, drawn, of_peft, switch

SIZES = ModelConfig(vocabulary=50, d_model=16, layers=2, heads=2, d_ff=300, context=12)
TOKENS = torch.arange(18).view(2, 9)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse ", "ignore:You are using torch.load", "ignore::UserWarning")


def tiny(dtype=torch.float32):
    torch.manual_seed(0)
    return LanguageModel(SIZES).to(dtype).eval().requires_grad_(False)


def shira(model, modules=("gate_proj", "up_proj", "down_proj")):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.ShiraConfig(r=1, target_modules=list(modules), init_weights=False, random_seed=3)
    return peft.tuners.shira.ShiraModel(model, config, "default")


@pytest.fixture(scope="module")
def trained():
    """The adapter, and what peft's own layers give with it."""
    tuned = shira(tiny())
    return of_peft(tuned), tuned(TOKENS).detach()


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("plan", [None, "twell", "dense", Choice("hot_cold", 256)], ids=str)
@torch.no_grad()
def test_a_layer_is_exact_under_an_adapter_and_without_it(plan, trained):
    adapter, with_it = trained
    model = tiny()
    dense, without = state(model), model(TOKENS)
    if plan is not None:
        model = sparsify(model, plan)
    first = state(model)
    assert not torch.allclose(without, with_it, atol=0.1)
    before = switch(model, adapter)
    torch.testing.assert_close(model(TOKENS), with_it, rtol=1e-4, atol=1e-4)
    after = switch(model, before)
    assert same(state(model), first)
    torch.testing.assert_close(model(TOKENS), without, rtol=1e-4, atol=1e-4)
    switch(model, after)
    torch.testing.assert_close(model(TOKENS), with_it, rtol=1e-4, atol=1e-4)
    switch(model, before)
    assert same(state(model if plan is None else densify(model)), dense)


def test_layers_with_neurons_in_another_order_are_refused(trained):
    model = tiny()
    model = sparsify(model, plan_for(model, HOT, HOT))
    with pytest.raises(InputError, match="densify"):
        switch(model, trained[0])


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.floats(0.01, 0.99),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_switching_twice_gives_the_bits_of_before(rows, columns, share, dtype, turned):
    model = nn.Linear(columns, rows).to(dtype).requires_grad_(False)
    model.weight[0, 0], model.weight[-1, -1] = float("nan"), float("inf")
    if turned:
        model.weight.data = model.weight.t().contiguous().t()
    first = model.weight.clone()
    adapter = drawn(model, share)
    change = adapter["weight"]
    before = switch(model, adapter)
    written = torch.zeros(rows * columns, dtype=torch.bool)
    written[change.places] = True
    bits = lambda t: t.contiguous().view(torch.uint8)  # noqa: E731
    now = model.weight.reshape(-1)
    assert torch.equal(now[written], change.values) and len(change.places) == round(share * (rows * columns))
    assert torch.equal(bits(now[~written]), bits(first.reshape(-1)[~written]))
    switch(model, before)
    assert torch.equal(bits(model.weight), bits(first))


def test_adapters_are_taken_off_in_the_order_of_a_stack_also_under_two_names():
    model = tiny()
    first = state(model)
    before = switch(model, drawn(model, 0.3, seed=1))
    between = switch(model, drawn(model, 0.3, seed=2))
    switch(model, between)
    switch(model, before)
    assert same(state(model), first)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).requires_grad_(False)
    model[1].weight = model[0].weight
    first, places = state(model), torch.tensor([3, 5])
    changes = {f"{n}.weight": Change(places[n:], torch.full((2 - n,), n + 1.0), (4, 4)) for n in range(2)}
    before = switch(model, changes)
    assert model[0].weight.flatten()[places].tolist() == [1.0, 2.0]
    switch(model, before)
    assert same(state(model), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_are_pefts(dtype):
    tuned = shira(tiny(dtype), ["up_proj"])
    layer = tuned.model.layers[0].mlp.up_proj
    layer.set_scale("default", 0.5)
    expected = layer.base_layer.weight.double() + layer.get_delta_weight("default").to_dense().double()
    adapter = of_peft(tuned)
    model = tuned.unload()
    switch(model, adapter)
    assert torch.equal(model.layers[0].mlp.up_proj.weight, expected.to(dtype)) and len(adapter) == 2
