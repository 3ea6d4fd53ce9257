"""Routed experts: found one by one, swapped in part or all, asked one by one where that is of use, and left dense."""

import copy

import pytest
import torch
from torch import nn

import twell_lab as tl
from tests.layers import models_of
from tests.layers.models_of import given, logits
from twell_lab.core import InputError
from twell_lab.layers.experts import Routed, experts_of, mixed, stored
from twell_lab.layers.find import feed_forwards, survey
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify

pytest.importorskip("transformers")


@pytest.fixture
def model():
    return models_of.build("Mixtral")


def home(model, layer=0):
    return model.model.layers[layer].mlp.experts


def test_each_expert_is_a_layer_by_its_number(model):
    names = [f"model.layers.{layer}.mlp.experts.{number}" for layer in range(2) for number in range(4)]
    assert [each.name for each in feed_forwards(model)] == names
    assert [each.name for each in feed_forwards(sparsify(model, "twell"))] == names
    assert all(each.up.weight.shape == (40, 16) for each in feed_forwards(model))
    shared = models_of.build("Qwen2-MoE")
    assert [each.name.rpartition("mlp.")[2] for each in feed_forwards(shared)][:5] == [
        *(f"experts.{number}" for number in range(4)),
        "shared_expert",
    ]


@torch.no_grad()
def test_some_experts_alone(model):
    expected = logits(model)
    sparsify(model, "twell", only=lambda name, module: name.endswith("0.mlp.experts.2"))
    assert [type(each.module) is SparseFFN for each in feed_forwards(model)] == [False, False, True] + 5 * [False]
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert "forward" not in vars(home(model, 1))
    assert sum(layer.tokens for layer in tl.profile(model, given(model)).layers) == 2 * 2 * 18
    sparsify(model, "twell")
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(densify(model)), expected) and "forward" not in vars(home(model))


def test_terms_and_gradients(model):
    dense, sparse = model.train(), sparsify(copy.deepcopy(model), "twell").train()
    terms = []
    for net in (dense, sparse):
        with tl.layer_terms(net) as found:
            loss = logits(net).square().mean()
        terms.append([(each.name, each.l1.item(), each.nnz.item()) for each in found])
        (loss + 1e-2 * sum(each.l1 for each in found)).backward()
    for one, other in zip(*terms, strict=True):
        assert one[0] == other[0] and one[1:] == pytest.approx(other[1:], rel=1e-4)
    for (name, p), q in zip(dense.named_parameters(), sparse.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5 * p.grad.abs().max().item(), msg=name)


@torch.no_grad()
def test_compiled_and_copied(model):
    expected = logits(model)
    twin = copy.deepcopy(sparsify(model, "twell"))
    home(twin).down_proj.zero_()
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert home(twin).forward.module is home(twin) and not torch.allclose(logits(twin), expected)
    layer, x = home(model), torch.randn(6, 16)
    chosen, weights = torch.rand(6, 4).argsort(1)[:, :2], torch.rand(6, 2)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(x, chosen, weights), layer(x, chosen, weights), rtol=1e-4, atol=1e-4)
    named = layer(x, top_k_weights=weights, top_k_index=chosen)
    assert torch.equal(named, layer(x, chosen, weights))


def test_tokens_are_spread_over_their_experts():
    chosen = torch.tensor([[0, 2], [2, 4], [1, 2]])  # 4 is nobody's number
    x, weights = torch.ones(3, 1), torch.tensor([[1.0, 10.0], [100.0, 7.0], [1000.0, 10000.0]])
    asked = []

    def one(expert, rows):
        asked.append((expert, len(rows)))
        return (expert + 1) * rows

    assert mixed(x, chosen, weights, 4, one).flatten().tolist() == [31, 300, 32000]
    assert asked == [(0, 1), (1, 1), (2, 3)]


@torch.no_grad()
def test_transposed_weights_are_read_as_such():
    from transformers import AriaTextConfig
    from transformers.models.aria.modeling_aria import AriaExperts

    config = AriaTextConfig(
        hidden_size=16, intermediate_size=24, moe_num_experts=4, moe_topk=2, num_attention_heads=2, hidden_act="relu"
    )
    config._experts_implementation = "eager"
    layer = AriaExperts(config).eval()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.2)
    layer.act_fn = nn.ReLU()
    assert stored(layer) == (4, True)
    x, chosen, weights = torch.randn(5, 16), torch.rand(5, 4).argsort(1)[:, :2], torch.rand(5, 2)
    expected = layer(x, chosen, weights)
    torch.testing.assert_close(sparsify(layer, "twell")(x, chosen, weights), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rule",
    [
        lambda dense, x, chosen, weights: 2 * dense(x, chosen, weights),
        lambda dense, x, chosen, weights: dense(x, chosen, weights.square()),
        lambda dense, x, chosen, weights: dense(x.mul_(2), chosen, weights),
        lambda dense, x, chosen, weights: (dense(x, chosen, weights), None),
    ],
)
def test_experts_that_compute_something_else_stay_dense(model, rule):
    kind = type(home(model))

    class Other(kind):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return rule(lambda *given: kind.forward(self, *given), hidden_states, top_k_index, top_k_weights)

    home(model, 1).__class__ = Other
    assert [*survey(model)[1]] == ["model.layers.1.mlp.experts"]
    sparsify(model, "twell")
    assert isinstance(vars(home(model)).get("forward"), Routed) and "forward" not in vars(home(model, 1))


@torch.no_grad()
def test_hooks_on_the_module_go_on_to_be_called(model):
    seen = []
    home(model).register_forward_hook(lambda *_: seen.append(1))
    expected = logits(model)
    torch.testing.assert_close(logits(sparsify(model, "twell")), expected, rtol=1e-4, atol=1e-4)
    assert len(seen) == 2


def test_another_activation_is_named():
    model = models_of.build("Mixtral", act="silu")
    with pytest.raises(InputError, match="uses SiLUActivation; .*twell_lab.relufy"):
        feed_forwards(model)
    assert len(feed_forwards(tl.relufy(model))) == 8 and model.config.hidden_act == "relu"


def test_what_is_no_module_of_experts():
    layer = nn.Module()
    layer.act_fn = nn.ReLU()
    for up, down in (((4, 6), (4, 6)), ((2, 7, 4), (2, 4, 3)), ((2, 6, 4), (3, 4, 3)), ((2, 6, 4), (2, 4, 6))):
        layer.gate_up_proj, layer.down_proj = nn.Parameter(torch.ones(up)), nn.Parameter(torch.ones(down))
        assert stored(layer) is None and experts_of(layer) == []
