"""Layers of a model in training that change between the dense and the sparse path by what they report."""

import pytest
import torch

from twell_lab.analysis import costs, switching
from twell_lab.core import InputError
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.terms import LayerTerm, layer_terms
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import survivors, train_lost

CONFIG = ModelConfig(vocabulary=32, d_model=16, layers=2, heads=2, d_ff=256, context=12)


def model(can_fire=6):
    torch.manual_seed(0)
    net = LanguageModel(CONFIG)
    with torch.no_grad():
        for found in feed_forwards(net):
            found.gate.weight[can_fire:] = 0
    return net


def loss_of(net):
    with layer_terms(net) as terms:
        scores = net(torch.randint(0, 32, (3, 12), generator=torch.Generator().manual_seed(1)))
    return scores.square().mean() + 0.1 * sum(term.l1 for term in terms) / len(terms), terms


def same(one, other):
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


RATES = costs.Rates("a GPU", "bfloat16", bandwidth=3e12, l2=7.4e12, matmul=7e14, launch=2e-6)


def terms_of(nnz, lost=(None, None)):
    lost = [None if share is None else torch.tensor(share) for share in lost]
    return [LayerTerm(f"layers.{i}.mlp", torch.zeros(()), torch.tensor(float(n)), lost[i]) for i, n in enumerate(nnz)]


def paths(net):
    return [found.module.learning for found in feed_forwards(net)]


def test_break_even_is_where_both_sides_cost_the_same():
    n = switching.break_even(RATES, 2048, 5632)
    gemm, row = 2 * 2048 * 5632 / 7e14, 2048 * 2 / 7.4e12
    dense = 9 * gemm + 11 * 5632 * 2 / 3e12
    sparse = gemm + 5632 / 3e12 + 6 * 2048 * 2 / 3e12 + 7 * n * row
    assert abs(dense - sparse) < 1e-12 and 40 < n < 120
    slow = costs.Rates("a GPU", "bfloat16", bandwidth=1e9, l2=1e9, matmul=7e14, launch=0)
    assert switching.break_even(slow, 2048, 5632, gated=False) >= 0


def test_layers_change_over_one_by_one_and_not_at_the_first_sign():
    net = sparsify(model(), "twell")
    assert switching.switch(net, terms_of([100, 10]), below=50) == {"layers.0.mlp": "dense"}
    assert paths(net) == ["dense", "twell"]
    assert switching.switch(net, terms_of([47, 53]), below=50) == {} and paths(net) == ["dense", "twell"]
    assert switching.switch(net, terms_of([44, 56]), below=50) == {"layers.0.mlp": "twell", "layers.1.mlp": "dense"}
    assert switching.switch(net, terms_of([torch.nan, 1]), below={"layers.0.mlp": 5, "layers.1.mlp": 5.0}) == {
        "layers.0.mlp": "dense",
        "layers.1.mlp": "twell",
    }


def test_a_model_that_becomes_sparse_changes_over_and_computes_the_same():
    dense, sparse = model(can_fire=256), sparsify(model(can_fire=256), "twell")
    change = switching.Switch(sparse, below=20.0)
    for silent in (0, 248):
        with torch.no_grad():
            for net in (dense, sparse):
                for found in feed_forwards(net):
                    found.gate.weight[:silent] = 0
        for net in (dense, sparse):
            net.zero_grad()
            loss, terms = loss_of(net)
            loss.backward()
        change.see(terms)
        same(sparse, dense)
        assert paths(sparse) == (["twell"] * 2 if silent else ["dense"] * 2)


def test_tokens_without_room_count_as_what_they_cost():
    net = sparsify(model(), "twell")
    on_tensor_cores = 1 / train_lost.TOKENS_A_ROW
    assert switching.switch(net, terms_of([10, 10], [on_tensor_cores, 0.0]), below=50) == {}
    rest = 60 - switching.LOST_TO_TENSOR_CORES * CONFIG.d_ff * on_tensor_cores
    share = on_tensor_cores + rest / (switching.LOST * CONFIG.d_ff)  # costs as much as 60 neurons firing
    assert switching.switch(net, terms_of([10, 10], [share, 0.0]), below=50) == {"layers.0.mlp": "dense"}
    assert paths(net) == ["dense", "twell"]


def heavy_terms(nnz, light, heavy, lost=None):
    """Of the model's first layer."""
    rest = (None if each is None else torch.tensor(each) for each in (nnz, lost, light, heavy))
    return [LayerTerm("layers.0.mlp", torch.zeros(()), *rest)]


def test_few_tokens_with_many_neurons_cost_what_lost_ones_do(monkeypatch):
    """512 of 16,384 tokens with 1,500 of 5,632 neurons: 76 fire on average, above the break-even of 75, yet the step
    takes 2.5 ms on the sparse path and 4.8 on the dense one (training-20261126T021907Z.json)."""
    monkeypatch.setattr(switching.train_lost, "tensor_core_rows", lambda *_: 512)
    up, share = torch.empty(5632, 2048, device="meta"), 512 / 16384
    (seen,) = heavy_terms(75.7, 28.1, share)
    assert switching.cost(seen, up) == pytest.approx(28.1 + 0.07 * 5632 * share)
    # The sparse path loses these very rows, and no others: they cost as much, once.
    (there,) = heavy_terms(75.7, 28.1, share, lost=share)
    assert switching.cost(there, up) == pytest.approx(switching.cost(seen, up))
    (more,) = heavy_terms(75.7, 28.1, share, lost=0.2)
    assert switching.cost(more, up) == pytest.approx(28.1 + 5632 * (0.07 / 8 + 0.3 * (0.2 - 1 / 8)))
    # More of them than tensor cores take are walked, as all are where there are none.
    (many,) = heavy_terms(300.0, 28.1, 0.2)
    assert switching.cost(many, up) == 300
    monkeypatch.setattr(switching.train_lost, "tensor_core_rows", lambda *_: 0)
    assert switching.cost(seen, up) == pytest.approx(75.7)


def test_a_layer_sent_back_by_lost_tokens_does_not_return_for_its_heavy_ones(monkeypatch):
    monkeypatch.setattr(switching.train_lost, "tensor_core_rows", lambda *_: 512)
    net = sparsify(model(), "twell")
    change = switching.Switch(net, below=50.0)
    seen = 10.0 + switching.LOST_TO_TENSOR_CORES * CONFIG.d_ff * 0.1
    assert change.see(heavy_terms(60.0, 10.0, 0.1, lost=1.0)) == {"layers.0.mlp": "dense"}
    assert change.below["layers.0.mlp"] == pytest.approx(seen)
    assert change.see(heavy_terms(60.0, 10.0, 0.1)) == {}
    assert change.see(heavy_terms(60.0, 0.8 * 10.0, 0.1)) == {"layers.0.mlp": "twell"}


@pytest.mark.parametrize("below", [50.0, {"layers.0.mlp": 50.0, "layers.1.mlp": 50.0}])
def test_a_layer_that_lost_tokens_send_back_waits_until_fewer_neurons_fire(below):
    net, given = sparsify(model(), "twell"), below.copy() if isinstance(below, dict) else below
    change = switching.Switch(net, below=below)
    assert change.see(terms_of([10, 10], [1.0, None])[:1]) == {"layers.0.mlp": "dense"}
    assert change.below == {"layers.0.mlp": 10, "layers.1.mlp": 50} and below == given
    assert change.see(terms_of([10, 10])[1:]) == {}
    assert (
        change.see(terms_of([10, 10])) == {} == change.see(terms_of([9.1, 10]))
    )  # what sent it back cannot be seen from there
    assert change.see(terms_of([8, 10])) == {"layers.0.mlp": "twell"}
    assert change.see(terms_of([70, 70])) == {
        "layers.0.mlp": "dense",
        "layers.1.mlp": "dense",
    }  # too many fire, none is lost
    assert change.below["layers.1.mlp"] == 50


def test_dense_layers_of_the_model_are_left_alone_and_bad_thresholds_named():
    assert switching.switch(model(), terms_of([1, 1]), below=50) == {}
    for below in (-1, "x", True, {}, torch.nan):
        with pytest.raises(InputError, match="below is"):
            switching.switch(sparsify(model(), "twell"), terms_of([1, 1]), below=below)


def test_a_switch_measures_the_break_even_of_its_own_device():
    net = sparsify(model(), "twell")
    change = switching.Switch(net)
    change.see(terms_of([1, 1]))
    # On a CPU there are no kernels, and the sparse path is the slower one: layers stay where they are.
    assert change.below == {"layers.0.mlp": 0.0, "layers.1.mlp": 0.0}


def test_only_layers_that_the_kernels_take_have_a_break_even(monkeypatch):
    net, asked = sparsify(model(), "twell"), []
    monkeypatch.setattr(switching.costs, "measure_rates", lambda *_: RATES)
    monkeypatch.setattr(switching.train, "takes", lambda *sizes: asked.append(sizes) or len(asked) > 1)
    monkeypatch.setattr(switching, "break_even", lambda *_: 7.0)
    assert switching.Switch(net).measure(300) == {"layers.0.mlp": 0.0, "layers.1.mlp": 7.0}
    assert asked == [(torch.device("cpu"), torch.float32, 300, 16, 256)] * 2


@pytest.mark.parametrize("tokens", [0, -1, 2.5, True])
def test_a_break_even_needs_tokens(tokens):
    with pytest.raises(InputError, match=f"tokens is {tokens}; a whole number from 1 up"):
        switching.Switch(sparsify(model(), "twell")).measure(tokens)


def test_a_break_even_stays_within_the_room_for_entries(monkeypatch):
    net, tokens = sparsify(model(), "twell"), 100
    monkeypatch.setattr(switching.costs, "measure_rates", lambda *_: RATES)
    monkeypatch.setattr(switching.train, "takes", lambda *_: True)
    monkeypatch.setattr(switching, "break_even", lambda *_: 1e6)
    limit = switching.Switch(net).measure(tokens)["layers.0.mlp"]
    room = survivors.capacity_for(tokens, CONFIG.d_ff)
    assert 0.8 * room < limit * tokens < limit * (1 + switching.MARGIN) * tokens < room
