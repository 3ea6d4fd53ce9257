"""What layers report to a training loop: on every path the L1 norms, counts and gradients of the dense model."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from twell_lab.core import InputError
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.layers.terms import layer_terms
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward
from twell_lab.training.objective import Objective

NAMES = ["layers.0.mlp", "layers.1.mlp"]


def model(gated=True, seed=0):
    torch.manual_seed(seed)
    return LanguageModel(ModelConfig(vocabulary=32, d_model=16, layers=2, heads=2, d_ff=64, context=12, gated=gated))


def swapped(path="twell", **how):
    net = model(**how)
    for layer in net.layers:
        layer.mlp = SparseFFN.from_module(layer.mlp)
        layer.mlp.learn(path)
    return net


def tokens(seed=1):
    return torch.randint(0, 32, (3, 12), generator=torch.Generator().manual_seed(seed))


def loss_of(net, call=None):
    with layer_terms(net) as terms:
        scores = (net if call is None else call)(tokens())
    return scores.square().mean() + 0.1 * sum(term.l1 for term in terms) / len(terms), terms


def same(one, other):
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def same_terms(found, wanted):
    assert [term.name for term in found] == [term.name for term in wanted] == NAMES
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.l1, other.l1)
        assert one.nnz == other.nnz and not one.nnz.requires_grad
        assert one.l1.requires_grad == other.l1.requires_grad


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("path", ["dense", "twell", None])
def test_penalty_and_gradients_are_those_of_the_dense_model(gated, path):
    dense, sparse = model(gated), swapped(path, gated=gated)
    results = []
    for net in (dense, sparse):
        for _ in range(2):  # gradients add up
            loss, terms = loss_of(net)
            loss.backward()
        results.append(terms)
    same(sparse, dense)
    same_terms(*reversed(results))


@pytest.mark.parametrize("frozen", [["mlp"], ["embed", "attention", "mlp"], [""]], ids=["layers", "most", "all"])
def test_frozen_layers_have_terms_as_well(frozen):
    results = []
    for net in (model(), swapped()):
        for name, weight in net.named_parameters():
            weight.requires_grad_(not any(part in name for part in frozen))
        with layer_terms(net) as terms:
            net(tokens())
        results.append(list(terms))
    same_terms(*reversed(results))


def test_without_gradients_terms_have_none():
    with torch.no_grad():
        (_, wanted), (_, found) = loss_of(model()), loss_of(swapped())
    same_terms(found, wanted)
    assert not found[0].l1.requires_grad


@pytest.mark.parametrize("make, reentrant", [(model, True), (swapped, True), (swapped, False)])
def test_gradient_checkpointing(make, reentrant):
    dense, net = model(), make()
    loss_of(dense)[0].backward()
    for layer in net.layers:
        layer.forward = lambda *given, run=layer.forward: checkpoint(run, *given, use_reentrant=reentrant)
    if reentrant:
        with pytest.raises(InputError, match="use_reentrant=False"), layer_terms(net):
            net(tokens())
        assert loss_of(model())[1]  # nothing is left behind
        return
    loss_of(net)[0].backward()
    same(net, dense)


@pytest.mark.parametrize("path", ["dense", "twell"])
def test_inside_torch_compile(path):
    dense, sparse = model(), swapped(path)
    loss, terms = loss_of(sparse, torch.compile(sparse, backend="aot_eager"))
    loss.backward()
    wanted, beside = loss_of(dense)
    wanted.backward()
    same(sparse, dense)
    same_terms(terms, beside)


@pytest.mark.parametrize("sparse", [False, True])
def test_layers_compiled_one_by_one_share_a_graph(sparse):
    """As with FSDP2 and other large models: the terms that a layer reports must not make it another graph."""
    torch._dynamo.reset()
    net = swapped(None) if sparse else model()
    graphs = CompileCounterWithBackend("aot_eager")
    objective = Objective(net)
    for layer in net.layers:
        layer.compile(backend=graphs)
    for turn in range(2):
        loss, *_ = objective(tokens(turn), torch.tensor(0.1))
        loss.backward()
    assert graphs.frame_count == 1
    torch._dynamo.reset()


def test_terms_of_several_passes_come_in_their_order():
    net = swapped()
    net.layers[1].mlp = model().layers[1].mlp  # a dense layer beside a sparse one
    with layer_terms(net) as terms:
        net(tokens(1))
        net(tokens(2))
    net(tokens(3))  # outside: nobody asked
    assert [term.name for term in terms] == NAMES * 2 and len(terms) == 4
    assert terms[2].l1 != terms[0].l1 and terms[-1].name == NAMES[1]
    terms.clear()
    assert not terms


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
    with layer_terms(sparse) as terms:
        sparse(x)
    fired = (linear(x, layer.gate_proj.weight) > 0).sum(1).float()
    heavy = fired > 7
    (term,) = terms
    assert term.heavy == heavy.float().mean() == 0.1 and fired.max() > 90
    torch.testing.assert_close(term.light, fired[~heavy].sum() / 50)
    torch.testing.assert_close(term.nnz, fired.mean())


@pytest.mark.parametrize("kind", [GatedFeedForward, PlainFeedForward])
def test_frozen_weights_get_no_gradient(kind):
    layer = kind(8, 24)
    layer.down_proj.requires_grad_(False)
    SparseFFN.from_module(layer)(torch.randn(3, 8)).sum().backward()
    assert layer.down_proj.weight.grad is None and layer.up_proj.weight.grad.any()


def test_learn_refuses_what_it_does_not_know():
    with pytest.raises(InputError, match="path is 'hot_cold'; 'dense', 'twell' and None are accepted"):
        SparseFFN.from_module(GatedFeedForward(8, 24)).learn("hot_cold")
