"""Squared ReLU: what it computes, how it is saved, and that a sparse layer computes it where it can and takes it for
no ReLU."""

import pytest
import torch

from twell_lab.core import InputError
from twell_lab.layers.find import feed_forwards, firing_layers
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

SMALL = dict(vocabulary=50, d_model=24, layers=2, heads=3, d_ff=40, context=12)


def model(**changes):
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(**{**SMALL, **changes})).eval()


def test_squared_layers_compute_their_formulas():
    x = torch.randn(5, 8)
    gated, plain = GatedFeedForward(8, 20, "relu2"), PlainFeedForward(8, 20, "relu2")
    gate, up, down = (part.weight for part in (gated.gate_proj, gated.up_proj, gated.down_proj))
    torch.testing.assert_close(gated(x), ((x @ gate.T).clamp(min=0) ** 2 * (x @ up.T)) @ down.T)
    torch.testing.assert_close(plain(x), (x @ plain.up_proj.weight.T).clamp(min=0) ** 2 @ plain.down_proj.weight.T)


def test_sparse_layers_refuse_a_gated_squared_model_and_say_why():
    squared = model(gated=True, activation="relu2")
    for refused in (
        lambda: sparsify(squared, "twell"),
        lambda: SparseFFN(squared.layers[0].mlp),
        lambda: feed_forwards(squared),
    ):
        with pytest.raises(InputError, match="SquaredReLU.*ReLU"):
            refused()
    assert not any(isinstance(module, SparseFFN) for module in squared.modules())


def test_a_plain_squared_model_is_swapped():
    squared, tokens = model(gated=False, activation="relu2"), torch.randint(50, (2, 9))
    with torch.no_grad():
        expected = squared(tokens)
        for word in ("twell", "dense"):
            torch.testing.assert_close(sparsify(squared, word)(tokens), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(squared(tokens), expected)  # on the dense path the very bits


@pytest.mark.parametrize("gated", [True, False])
def test_layers_that_fire_are_found_with_either_activation(gated):
    squared, plain = firing_layers(model(gated=gated, activation="relu2")), model(gated=gated)
    assert [layer.name for layer in squared] == ["layers.0.mlp", "layers.1.mlp"]
    assert all(layer.pattern is (layer.gate if gated else layer.up) for layer in squared)
    assert firing_layers(plain) == feed_forwards(plain)
    assert [layer.name for layer in firing_layers(sparsify(plain, "twell"))] == ["layers.0.mlp", "layers.1.mlp"]
