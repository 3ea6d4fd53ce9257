"""Sparse layers that are trained: their penalty, the change between paths, and everything that changes weights under
them."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from twell_lab.analysis import costs, switching
from twell_lab.core import InputError
from twell_lab.layers import terms as penalty
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.terms import LayerTerm
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import cpu, survivors, train_lost
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward
from twell_lab.training.objective import Objective

CONFIG = ModelConfig(vocabulary=32, d_model=16, layers=2, heads=2, d_ff=256, context=12)


def model(gated=True, seed=0, can_fire=6):
    """A model of which few neurons can fire, so that its sparse layers do skip the others on a CPU."""
    torch.manual_seed(seed)
    net = LanguageModel(ModelConfig(**{**vars(CONFIG), "gated": gated}))
    with torch.no_grad():
        for found in feed_forwards(net):
            (found.gate if gated else found.up).weight[can_fire:] = 0
    return net


@pytest.fixture
def skipped(monkeypatch):
    """A list that gets an entry for each forward pass on a CPU that computes only what fires."""
    calls, real = [], cpu._gated_wide
    monkeypatch.setattr(cpu, "_gated_wide", lambda *arguments: calls.append(1) or real(*arguments))
    return calls


def tokens(seed=1):
    return torch.randint(0, 32, (3, 12), generator=torch.Generator().manual_seed(seed))


def loss_of(net, weight=0.1, call=None):
    with penalty.layer_terms(net) as terms:
        scores = (net if call is None else call)(tokens())
    return scores.square().mean() + weight * sum(term.l1 for term in terms) / len(terms), terms


def same(one, other):
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("path", ["dense", "twell", None])
def test_penalty_and_gradients_are_those_of_the_dense_model(gated, path):
    dense, sparse = model(gated), sparsify(model(gated), "twell")
    for found in feed_forwards(sparse):
        found.module.learn(path)
    expected, terms = loss_of(dense)
    expected.backward()
    loss, ours = loss_of(sparse)
    loss.backward()
    same(sparse, dense)
    assert [t.name for t in ours] == [t.name for t in terms] == ["layers.0.mlp", "layers.1.mlp"]
    for a, b in zip(ours, terms):
        torch.testing.assert_close(a.l1, b.l1)
        assert a.nnz == b.nnz and not a.nnz.requires_grad


def test_penalty_inside_torch_compile():
    dense, sparse = model(), sparsify(model(), "twell")
    compiled = torch.compile(sparse)
    for path in ("dense", "twell"):
        feed_forwards(sparse)[0].module.learn(path)
        loss, terms = loss_of(sparse, call=compiled)
        assert len(terms) == 2
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        loss_of(dense)[0].backward()
        same(sparse, dense)


def test_nothing_is_reported_outside_the_context():
    net = sparsify(model(), "twell")
    _, terms = loss_of(net)
    net(tokens())
    assert len(terms) == 2


@pytest.mark.parametrize("net", [model(), sparsify(model(), "twell")], ids=["dense", "sparse"])
def test_a_forward_pass_without_gradients_reports_nothing(net):
    with penalty.layer_terms(net) as terms, torch.no_grad():
        net(tokens())
    assert len(terms) == 0 and list(terms) == []


def test_terms_of_several_passes_come_in_their_order():
    net = sparsify(model(), "twell")
    net.layers[1].mlp = model().layers[1].mlp  # a dense layer beside a sparse one
    with penalty.layer_terms(net) as terms:
        net(tokens(1))
        net(tokens(2))
    assert [term.name for term in terms] == ["layers.0.mlp", "layers.1.mlp"] * 2 and len(terms) == 4
    assert terms[2] is not terms[0] and terms[2].l1 != terms[0].l1 and terms[-1].name == "layers.1.mlp"
    assert "layers.1.mlp" in repr(terms)
    terms.clear()
    assert not terms


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("ask", ["terms", "objective"])
def test_layers_compiled_one_by_one_share_a_graph(sparse, ask):
    """As with FSDP2 and other large models: the terms that a layer reports must not make it another graph."""
    torch._dynamo.reset()
    net = sparsify(model(), "twell") if sparse else model()
    graphs = CompileCounterWithBackend("aot_eager")
    objective = Objective(net) if ask == "objective" else None
    for layer in net.layers:
        layer.compile(backend=graphs)
    for turn in range(2):
        if objective is None:
            loss, terms = loss_of(net)
            assert [term.name for term in terms] == ["layers.0.mlp", "layers.1.mlp"]
        else:
            loss, *_ = objective(tokens(turn), torch.tensor(0.1), True)
        loss.backward()
    assert graphs.frame_count == 1
    torch._dynamo.reset()


def test_gradient_checkpointing():
    dense, sparse = model(), sparsify(model(), "twell")
    for found in feed_forwards(sparse):
        layer = found.module
        layer.forward = lambda x, run=layer.forward: checkpoint(run, x, use_reentrant=False)
    loss_of(dense)[0].backward()
    loss_of(sparse)[0].backward()
    same(sparse, dense)


@pytest.mark.parametrize("path", ["dense", "twell"])
def test_the_sparse_path_keeps_nothing_as_wide_as_the_layer(path):
    layer = SparseFFN.from_module(model().layers[0].mlp)
    layer.learn(path)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        layer(torch.randn(5, 16)).sum().backward()
    assert ((5, 256) in kept) == (path == "dense") and (5, 16) in kept


def test_gradient_accumulation():
    dense, sparse = model(), sparsify(model(), "twell")
    for net in (dense, sparse):
        for _ in range(3):
            (loss_of(net)[0] / 3).backward()
    same(sparse, dense)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_step_is_followed_forwards_and_backwards(fused, skipped):
    dense, sparse = model(), sparsify(model(), "twell")
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused) for net in (dense, sparse)]
    for _ in range(3):
        for net, optimizer in zip((dense, sparse), optimizers):
            optimizer.zero_grad()
            loss_of(net)[0].backward()
            optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(sparse(tokens()), dense(tokens()), rtol=1e-3, atol=1e-4)
    assert len(skipped) == 3 * 2


def test_load_state_dict_to_and_deepcopy_are_followed(skipped):
    dense, sparse = model(seed=0), sparsify(model(seed=0), "twell")
    loss_of(sparse)[0].backward()
    other = model(seed=5)
    with torch.no_grad():
        sparse(tokens())
        sparse.load_state_dict(other.state_dict())
        for net in (sparse, copy.deepcopy(sparse)):
            torch.testing.assert_close(net(tokens()), other(tokens()))
    assert len(skipped) == 3 * 2
    for net in (sparse, copy.deepcopy(sparse)):
        net.zero_grad(), other.zero_grad()
        loss_of(net)[0].backward(), loss_of(other)[0].backward()
        same(net, other)
    sparse.to(torch.bfloat16).to(torch.float32)
    dense.load_state_dict(other.state_dict())
    dense.to(torch.bfloat16).to(torch.float32)
    sparse.zero_grad()
    loss_of(sparse)[0].backward(), loss_of(dense)[0].backward()
    same(sparse, dense)


@pytest.mark.parametrize("kind", [GatedFeedForward, PlainFeedForward])
def test_frozen_weights_get_no_gradient(kind):
    layer = kind(8, 24)
    layer.down_proj.requires_grad_(False)
    sparse = SparseFFN.from_module(layer)
    sparse.learn("dense")
    sparse(torch.randn(3, 8)).sum().backward()
    assert layer.down_proj.weight.grad is None and layer.up_proj.weight.grad.any()


def test_learn_refuses_what_it_does_not_know():
    with pytest.raises(InputError, match="path is 'hot_cold'; 'dense', 'twell' and None are accepted"):
        SparseFFN.from_module(GatedFeedForward(8, 24)).learn("hot_cold")


# ---- switching ----

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


@pytest.mark.parametrize("path", ["dense", "twell"])
def test_a_layer_tells_how_many_of_its_tokens_are_heavy(path):
    torch.manual_seed(0)
    layer = GatedFeedForward(16, 100)
    x = torch.randn(50, 16)
    with torch.no_grad():
        layer.gate_proj.weight[:, 0], x[:, 0] = 4.0, -8.0
        x[::10, 0] = 8.0
        layer.gate_proj.weight[:3, 0] = 0.0
    sparse = SparseFFN.from_module(layer)
    sparse.learn(path)
    sparse.tell(told := [])
    sparse(x)
    fired = (torch.nn.functional.linear(x, layer.gate_proj.weight) > 0).sum(1).float()
    heavy = fired > 7
    assert told[0].heavy == heavy.float().mean() == 0.1 and fired.max() > 90
    torch.testing.assert_close(told[0].light, fired[~heavy].sum() / 50)
    torch.testing.assert_close(told[0].nnz, fired.mean())


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
    monkeypatch.setattr(
        switching.train, "takes", lambda x, gate, up: asked.append((x.shape, x.dtype)) or len(asked) > 1
    )
    monkeypatch.setattr(switching, "break_even", lambda *_: 7.0)
    assert switching.Switch(net).measure(300) == {"layers.0.mlp": 0.0, "layers.1.mlp": 7.0}
    assert asked == [((300, 16), torch.float32)] * 2


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
